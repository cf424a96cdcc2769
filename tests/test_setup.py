"""setup.sh and launch.sh: which Python and torch the launchers use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_calls import ROOT, programs, shell

pytestmark = pytest.mark.integration


UNSET = {"PYTHON": "", "TORCH": ""}  # what the tests themselves may have been called with
INSTALLED = 'touch .venv/.installed-$(cksum < pyproject.toml | cut -d" " -f1)-default-{cpu,gpu}'


def set_up(folder: Path, steps: str = "true", **settings: str) -> subprocess.CompletedProcess:
    """Sources setup.sh, behind other steps, in a tree of which ``folder`` has the rest."""
    (folder / "pyproject.toml").write_text("")
    shutil.copy(ROOT / "scripts" / "setup.sh", folder)
    command = f"set -euo pipefail; cd {folder}; {steps}; . ./setup.sh"
    return shell("bash", "-c", command, **UNSET | {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"} | settings)


@pytest.mark.parametrize("inherited", [True, False])
@pytest.mark.parametrize(
    ("titan", "venv", "extras"), [("0.2", ".venv", "train,test,hf"), ("0.3", ".venv03", "train03,test,hf")]
)
def test_setup_installs_torch_where_the_new_environment_lacks_that_of_python3(
    titan: str, venv: str, extras: str, inherited: bool, tmp_path: Path
) -> None:
    """A python3 with torch may itself be that of an environment: a new one is made from the Python behind it."""
    made = f"""[ "$1" = -c ] && exit
mkdir -p {venv}/bin
touch {venv}/bin/activate
echo 'echo "$@" >> calls; [ "$1" = -c ] && exit {int(not inherited)}; exit 0' > {venv}/bin/python
chmod +x {venv}/bin/python
echo "$@" >> calls"""
    programs(tmp_path, {"bin/python3": made})
    result = set_up(tmp_path, TORCH="torch==2.13.0", TITAN=titan, EXTRA="hf")
    assert result.returncode == 0, result.stderr
    made, _, *installs = (tmp_path / "calls").read_text().splitlines()
    assert made == f"-m venv --system-site-packages {venv}"
    assert [install.split()[-1] for install in installs] == [*(["torch==2.13.0"] * (not inherited)), f".[{extras}]"]


@pytest.mark.skipif(shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None, reason="has a GPU at once")
def test_setup_replaces_a_cpu_build_where_there_is_a_gpu(tmp_path: Path) -> None:
    """A .venv that a login node without a GPU made trained a GPU node's job on its CPU."""
    stubs = {
        ".venv/bin/activate": "",
        ".venv/bin/python": 'case "$*" in *torch.version.cuda*) [ -e cuda ] ;; -c*) ;; *) echo "$@" >> calls ;; esac',
        "bin/python3": '[ "$1" != -c ] || exit 1',
    }
    calls = tmp_path / "calls"
    for added, expected in (({}, [".[train,test]"]), ({"bin/nvidia-smi": ""}, ["torch>=2.11,<2.14", ".[train,test]"])):
        programs(tmp_path, stubs | added)
        for _ in range(2):
            done = set_up(tmp_path)
            assert done.returncode == 0, done.stderr
        installs = calls.read_text().splitlines()
        assert [install.split()[-1] for install in installs] == expected
        assert all(("--force-reinstall" in install) == ("torch" in install) for install in installs)
        calls.unlink()


def test_setup_installs_one_more_extra_once_and_for_others_nothing_again(tmp_path: Path) -> None:
    """Else each script that a test calls would install anew, two at a time in one environment."""
    programs(tmp_path, {".venv/bin/activate": "", ".venv/bin/python": '[ "$1" = -c ] || echo "$@" >> calls'})
    for extra in ("hf", "hf", ""):
        result = set_up(tmp_path, INSTALLED, EXTRA=extra)
        assert result.returncode == 0, result.stderr
    (install,) = (tmp_path / "calls").read_text().splitlines()
    assert install.endswith("install -q --no-compile --disable-pip-version-check -e .[hf]")


def test_the_launcher_calls_either_torchtitan() -> None:
    settings = {"TITAN": "0.3", "CONFIG": "debug_qwen3", "OUT": "o", "DRYRUN": "1"}
    bf16, mxfp8 = shell("scripts/train.sh", "--training.steps=3", **settings).stdout.splitlines()
    both = "--module=titan_mxfp8.titan03 --config=debug_qwen3 --dump_folder=o/{} --training.steps=3"
    assert bf16.endswith(f"-m torchtitan.train {both.format('bf16')}")
    overrides = "titan_mxfp8.titan03.experts titan_mxfp8.titan03.linears"
    assert mxfp8.endswith(f"-m torchtitan.train --override.imports {overrides} {both.format('mxfp8')}")
    own = 'titan_mxfp8.titan03.experts={"recipe":"mxfp8_2d"}'
    (mxfp8,) = shell("scripts/train.sh", **settings, RUNS="mxfp8", OVERRIDES=own, MODULE="m").stdout.splitlines()
    assert f"--override.imports {own} --module=m" in mxfp8
    result = shell("scripts/test.sh", TITAN="0.4")
    assert result.returncode == 2 and "TITAN takes 0.2 or 0.3, not '0.4'" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch could use the GPU")
def test_launchers_do_not_train_on_the_cpu_of_a_machine_with_a_gpu(tmp_path: Path, stub: dict[str, str]) -> None:
    programs(tmp_path, {"bin/nvidia-smi": "echo GPU 0: NVIDIA H100"})
    settings = stub | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "RUNS": "mxfp8"}
    settings |= {"OUT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": "0"}
    done = shell("scripts/train.sh", **settings)
    assert done.returncode == 1 and not (tmp_path / "calls").exists()
    assert "this machine has a GPU, and torch" in done.stderr and "CPU build" in done.stderr
    meant = "set -eu; . scripts/launch.sh; . scripts/setup.sh; check_gpu; echo trains"
    assert shell("bash", "-c", meant, **settings | {"CUDA_VISIBLE_DEVICES": ""}).stdout == "trains\n"


def test_launchers_say_that_they_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = shell("scripts/train.sh", OUT=f"{tmp_path}/file/out", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and f"OUT={tmp_path}/file/out cannot be written to" in done.stderr


def test_setup_takes_a_python_as_it_is(tmp_path: Path) -> None:
    """Nothing is installed, the package is found, and torchrun is that Python's."""
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    command = f"set -euo pipefail; cd {tmp_path}; . ./setup.sh; python -c 'import sys; print(sys.executable, sys.path)'"
    done = shell("bash", "-c", f"{command}; torchrun --help", PYTHON=sys.executable, PYTHONPATH="/wheels")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{sys.executable} ['', '{tmp_path}', '/wheels'") and "--nproc" in done.stdout
    assert not (tmp_path / ".venv").exists(), "a read-only repository has no place for it"
    caller = tmp_path / "caller"
    (caller / "bin").mkdir(parents=True)
    (caller / "bin" / "python").symlink_to(sys.executable)
    done = shell("bash", "-c", f"here={caller}; {command}", PYTHON="bin/python", VIRTUAL_ENV="")
    assert done.returncode == 0 and done.stdout.startswith(f"{caller}/bin/python ["), done.stderr
    wrong = shell("bash", "-c", command, PYTHON="no-such-python")
    assert wrong.returncode == 1 and wrong.stderr == "setup: PYTHON=no-such-python is no program\n"
