"""The launchers: what they would run, what they say of failures, and what bad values get; which Python and torch they
use."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from script_calls import ROOT, call, programs, shell

from scripts import watch
from scripts.study import converge, runs

pytestmark = pytest.mark.integration


def test_train_runs_bf16_and_then_the_config_as_it_is() -> None:
    """With TensorBoard, which a TOML may have off: its logs are compared."""
    settings = {"DRYRUN": "1", "NGPU": "2", "OUT": "x", "WANDB_RUN_NAME": "n", "LAUNCH": "now", "LOG_RANK": "0,1"}
    result = shell("scripts/train.sh", "--training.steps=3", **settings)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"+ WANDB_RUN_NAME=n torchrun --standalone --nproc-per-node=2 --log-dir=x/{run}/logs/now --tee=3 "
        "--role=rank --local-ranks-filter=0,1 -m torchtitan.train --job.config_file=train_configs/debug_llama4.toml "
        f"--job.dump_folder=x/{run}{converters} --metrics.enable_tensorboard --training.steps=3"
        for run, converters in (("bf16", " --model.converters="), ("mxfp8", ""))
    ]


@pytest.mark.parametrize("script", ["train.sh", "train_multinode.sh"])
def test_paths_are_those_of_the_callers_folder(script: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").touch()
    command, of_repository = f"cd {tmp_path} && {ROOT}/scripts/{script}", "train_configs/debug_llama4.toml"
    for config, out, config_file, folder in (
        ("own.toml", "", f"{tmp_path}/own.toml", "outputs/own-"),
        (f"{tmp_path}/own.toml", "x", f"{tmp_path}/own.toml", "x/mxfp8"),
        (of_repository, f"{tmp_path}/y", of_repository, "y/mxfp8"),
    ):
        done = shell("sh", "-c", command, DRYRUN="1", RUNS="mxfp8", CONFIG=config, OUT=out)
        assert done.returncode == 0, done.stderr
        assert f"--job.config_file={config_file} --job.dump_folder={tmp_path}/{folder}" in done.stdout


def test_relative_paths_of_a_toml_of_ones_own_lead_from_the_current_folder(
    tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the repository's TOMLs from the repository, wherever the launcher is called."""
    (tmp_path / "stub" / "torchtitan" / "train.py").write_text("import os\nprint('trained in', os.getcwd())")
    (tmp_path / "own.toml").touch()
    settings = stub | {"PYTHON": sys.executable, "RUNS": "mxfp8", "CONFIG": "own.toml"}
    done = shell("sh", "-c", f"cd {tmp_path} && {ROOT}/scripts/train.sh", **settings)
    assert done.returncode == 0 and f"trained in {tmp_path}\n" in done.stdout, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    for config, folder in (("train_configs/debug_llama4.toml", ROOT), (tmp_path / "own.toml", tmp_path)):
        said = shell("bash", "-c", f"here={tmp_path}; . scripts/launch.sh; folder_of {config}").stdout
        assert said == f"{folder}\n" and converge.folder_of(ROOT / config) == folder


def test_train_ends_with_the_cause_whatever_the_rank(tmp_path: Path, stub: dict[str, str]) -> None:
    """Rank 0 loses its connection to rank 1, which is the one that failed, and is the last to write a traceback."""
    (tmp_path / "stub" / "torchtitan" / "train.py").write_text(
        f"""
import os, pathlib, sys, time, traceback
said = [pathlib.Path({str(tmp_path)!r}, f"rank{{rank}}") for rank in (0, 1)]
rank = int(os.environ["RANK"])
while rank == 0 and not said[1].exists():
    time.sleep(0.01)
try:
    if rank == 1:
        raise ValueError("expert_parallel_degree 3 does not divide 8")
    raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer")
except Exception:
    traceback.print_exc()
said[rank].touch()
while not said[0].exists():
    time.sleep(0.01)
sys.exit(1)
"""
    )
    settings = stub | {"NGPU": "2", "RUNS": "mxfp8", "OUT": str(tmp_path / "out")}
    done = shell("scripts/train.sh", **settings)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    error = "ValueError: expert_parallel_degree 3 does not divide 8"
    assert last.startswith(f"train.sh: mxfp8 failed: {error} (local rank 1: ")
    assert "ValueError" in Path(last.rpartition(": ")[2].rstrip(")")).read_text()
    assert "ChildFailedError" not in done.stdout and "Traceback" not in done.stdout
    (log,) = (tmp_path / "out" / "mxfp8" / "logs").glob("*/*.log")
    assert "ChildFailedError" in log.read_text() and "[rank0]:Traceback" in log.read_text()


TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n"
TORCHRUN = "E1122 15:33:36.727000 4716 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) "
TORCHRUN += "local_rank: 1 (pid: 4767) of binary: python\n"
NOTE = "I1122 15:35:34.545000 5533 .venv/lib/site-packages/torch/distributed/elastic/agent/server/api.py:942] [rank] "
OF_RANK = "[rank{0}]:[rank{0}]:"
TRACE = f"{OF_RANK} Traceback (most recent call last):\n{OF_RANK}   File 'x'\n{OF_RANK} "
REPORT = """Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 5041)  (SIGKILL)
======
"""
ABORTED = """-6 (pid: 5041)  (SIGABRT)
  traceback : Traceback (most recent call last):
    File "trainer.py", line 828, in _forward_backward_body
      loss.backward()
  torch.AcceleratorError: CUDA error: device assert
  Search for `cudaErrorAssert'
"""


def test_watch_shows_what_is_news() -> None:
    lost, own = f"{TRACE.format(0)}E: Connection closed by peer\n", f"{TRACE.format(2)}E: mine\n"
    mixed = [line for pair in zip(lost.splitlines(True), own.splitlines(True), strict=True) for line in pair]
    logged = "[rank0]:[titan] 2026-11-22 17:38:32,418 - root - INFO - Destroying the purge thread.\n"
    mixed.insert(3, logged)  # by another thread of rank 0
    lines = ["[rank0]:step:  8\n", *mixed, TORCHRUN.format(-9), f"{NOTE}Stopping worker group\n"]
    lines += [f"{NOTE}Worker group FAILED. 2/3 attempts left; will restart worker group\n"]
    lines += [f"{NOTE}Detected 1 new nodes from group_rank=0; will restart worker group\n"]
    lines += [*REPORT.splitlines(True), "[rank0]:the end\n", "[rank1]:Traceback (most recent call last):\n"]
    assert list(watch.shortened(lines)) == [
        "[rank0]:step:  8\n",
        logged,
        "[rank0]:[rank0]: E: Connection closed by peer\n",
        *own.splitlines(True),
        TORCHRUN.format(-9),
        "local rank 1 was killed by SIGKILL: restarting, attempt 2 of 3\n",
        "another machine waits to train with this one: restarting\n",
        "[rank0]:the end\n",
        "[rank1]:Traceback (most recent call last):\n",
    ]


FRAME = "╭─ Unrecognized options ─╮\n│ Unrecognized options: --training.stepz=3 │\n╰──╯\n"
CHAINED = f"{TRACEBACK}KeyError: 1\n\nThe above\n\n{TRACEBACK}ValueError: x\n"


@pytest.mark.parametrize(
    "torchrun, ranks, expected",
    [
        (REPORT, {0: TRACE.format(0) + "E: Connection closed by peer\n"}, "local rank 1 was killed by SIGKILL ("),
        ("", {0: TRACE.format(0) + "E: Connection closed by peer\n"}, "E: Connection closed by peer (local rank 0: "),
        ("", {0: FRAME, 1: FRAME}, "Unrecognized options: --training.stepz=3 (local rank 0: "),
        (REPORT, {3: CHAINED}, "ValueError: x (local rank 3: "),
        ("", {0: f"{TRACEBACK}[titan] 2026 - root - INFO - x\nValueError: x\n"}, "ValueError: x (local rank 0: "),
        (TORCHRUN.format(1) + f"{TRACEBACK}RendezvousClosedError\n", {0: ""}, "RendezvousClosedError ("),
        (TORCHRUN.format(-6), {0: ""}, "local rank 1 was killed by SIGABRT ("),
        (TORCHRUN.format(1), {0: ""}, "local rank 1 ended with status 1 ("),
        ("torchrun: error: x", {}, "see "),
    ],
)
def test_watch_finds_the_cause(torchrun: str, ranks: dict[int, str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "node-1.log").write_text(torchrun)
    for rank, output in ranks.items():
        for attempt, text in ((9, f"{TRACEBACK}E: of an earlier attempt\n"), (10, output)):
            folder = tmp_path / "new" / "id_x" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
            (folder / "stdout.log").touch()
    (tmp_path / "old").mkdir()
    os.utime(tmp_path / "old", (0, 0))
    printed = call("watch", "cause", tmp_path / "old", tmp_path / "new", tmp_path / "none")
    assert printed.startswith(expected) and f"{tmp_path / 'new'}" in printed and printed.count("\n") == 1
    assert call("watch", "cause", tmp_path / "none") == "it has not started\n"


@pytest.mark.parametrize(
    "log, cause",
    [
        (f"{TRACEBACK}ValueError: mine\n{REPORT}", "ValueError: mine"),
        # as where a kernel of a GPU asserts: the process prints no traceback of its own
        (REPORT.replace("-9 (pid: 5041)  (SIGKILL)\n", ABORTED), "torch.AcceleratorError: CUDA error: device assert"),
    ],
)
def test_the_end_of_a_failed_run_begins_with_its_cause(log: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log + "[1]:\n" * 2000)
    assert runs.ending(tmp_path / "log").startswith(f"{cause}; {tmp_path / 'log'} ends:\n[1]:")


def test_watch_takes_the_first_recorded_error(tmp_path: Path) -> None:
    """torch records what TorchTitan's trainer raises; a rank that fails because another did comes later."""
    for rank, time in ((0, 200), (1, 100)):
        folder = tmp_path / "id_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "error.json").write_text(json.dumps({"message": {"message": f"ValueError: rank {rank}\nmore"}}))
        os.utime(folder / "error.json", (time, time))
    assert call("watch", "cause", tmp_path).startswith("ValueError: rank 1 more (local rank 1: ")


@pytest.mark.parametrize("recorded", ["", '{"message": {"mess', '{"message": "one line"}', "[]"])
def test_watch_reads_what_was_printed_where_no_whole_error_is_recorded(recorded: str, tmp_path: Path) -> None:
    """As where the disk is full, which is what ended the training."""
    folder = tmp_path / "id_x" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(recorded)
    (folder / "stderr.log").write_text(f"{TRACEBACK}OSError: No space left on device\n")
    (folder / "stdout.log").touch()
    assert call("watch", "cause", tmp_path).startswith("OSError: No space left on device (local rank 0: ")


@pytest.mark.parametrize("full", ["log", "stdout", "log stdout", "log stdout stderr"])
def test_watch_goes_on_where_the_disk_is_full(full: str, tmp_path: Path) -> None:
    """What it watches prints more than a pipe holds, and would die of one that nobody reads."""
    out, err, log = tmp_path / "out", tmp_path / "err", tmp_path / "logs" / f"{socket.gethostname()}-$BASHPID.log"
    (tmp_path / "logs").mkdir()
    redirected = f">{'/dev/full' if 'stdout' in full else out} 2>{'/dev/full' if 'stderr' in full else err}"
    command = f"""set -o pipefail
        (seq 20000 && touch {tmp_path}/ended) | (
            {f"ln -s /dev/full {log}" if "log" in full else ""}
            exec {sys.executable} scripts/watch.py show {tmp_path / "logs"} {redirected}
        )"""
    done = shell("bash", "-c", command, PYTHONUNBUFFERED="")
    assert done.returncode == 0 and (tmp_path / "ended").exists(), done.stderr
    everything = "".join(f"{number}\n" for number in range(1, 20001))
    if "stdout" not in full:
        assert out.read_text() == everything
    if "log" not in full:
        (written,) = (tmp_path / "logs").iterdir()
        assert written.read_text() == everything
    if "stderr" not in full:
        said = err.read_text().splitlines()
        assert len(said) == len(full.split()), said
        assert all("No space left on device; the training goes on" in line for line in said)


def test_train_multinode_gives_torchrun_the_rendezvous() -> None:
    settings = {"NNODES": "8", "RDZV_ENDPOINT": "node01:29500", "RDZV_ID": "7", "WANDB_RUN_NAME": "n", "DRYRUN": "1"}
    settings["LAUNCH"] = "now"
    result = shell("scripts/train_multinode.sh", "--training.steps=3", RUNS="bf16 mxfp8", **settings)
    assert result.returncode == 0, result.stderr
    launch = "torchrun --nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=node01:29500 --rdzv-id=7-{} --max-restarts=3"
    train = "--tee=3 --role=rank --local-ranks-filter=0 -m torchtitan.train"
    train += " --job.config_file=train_configs/debug_llama4.toml"
    assert result.stdout.splitlines() == [
        f"+ WANDB_RUN_NAME=n {launch.format(run)} --nproc-per-node=8 --log-dir=outputs/debug_llama4-7/{run}/logs/now "
        f"{train} --job.dump_folder=outputs/debug_llama4-7/{run}{converters} --training.steps=3"
        for run, converters in (("bf16", " --model.converters="), ("mxfp8", ""))
    ]
    addresses = {"RDZV_ENDPOINT": "10.0.0.1:29500", "NGPU": "4", "MAX_RESTARTS": "0"}
    for local, is_host in (("10.0.0.1", 1), ("10.0.0.2", 0)):
        out = shell("scripts/train_multinode.sh", **(settings | addresses), LOCAL_ADDR=local).stdout
        assert f"--max-restarts=0 --local-addr={local} --rdzv-conf=is_host={is_host} --nproc-per-node=4 " in out


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job on two nodes of four; srun runs its command once for each, as SLURM would."""
    commands = {
        "scontrol": 'test "$*" = "show hostnames gpu[07-08]" && printf "gpu07\\ngpu08\\n"',
        "srun": """echo "srun $*"
            while [ "${1#--}" != "$1" ]; do shift; done
            for node in gpu07 gpu08; do "$@" | sed "s/^/$node: /"; done""",
    }
    programs(tmp_path, commands)
    shutil.copy(ROOT / "scripts" / "train.slurm", tmp_path / "slurm_script")  # SLURM runs a copy of it
    job = {"SLURM_JOB_ID": "31234", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "WANDB_RUN_NAME": "n", "DRYRUN": "1"}
    return job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_slurm_checks_the_config_and_runs_one_agent_on_each_node(slurm: dict[str, str], tmp_path: Path) -> None:
    programs(tmp_path, {"python": 'echo "$@"'})
    result = shell(str(tmp_path / "slurm_script"), "--training.steps=3", **slurm, PYTHON=str(tmp_path / "python"))
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    layout = "--cluster.nodes=2 --cluster.gpus_per_node=4 --training.steps=3"
    assert lines[:2] == [
        "train.slurm: job 31234, restart 0, nodes gpu07 gpu08",
        f"{ROOT}/scripts/check_configs.py train_configs/debug_llama4.toml {layout}",
    ]
    agent = (
        "+ WANDB_RUN_NAME=n torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=gpu07:21234 --rdzv-id=31234-mxfp8 "
        "--max-restarts=3 --nproc-per-node=4 --log-dir=outputs/debug_llama4-31234/mxfp8/logs/31234-0 --tee=3 "
        "--role=rank --local-ranks-filter=0 -m torchtitan.train "
        "--job.config_file=train_configs/debug_llama4.toml --job.dump_folder=outputs/debug_llama4-31234/mxfp8 "
        "--training.steps=3"
    )
    assert lines[-3:] == [
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --export=ALL "
        f"--chdir={ROOT} --label {ROOT}/scripts/train_multinode.sh --training.steps=3",
        f"gpu07: {agent}",
        f"gpu08: {agent}",
    ]


def test_slurm_trains_with_torchtitan_03_whose_configs_have_no_check(slurm: dict[str, str], tmp_path: Path) -> None:
    slurm |= {"TITAN": "0.3", "PYTHON": sys.executable}
    result = shell(str(tmp_path / "slurm_script"), **slurm)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "gpu08: + WANDB_RUN_NAME=n torchrun --nnodes=2" in result.stdout
    assert "--config=debug_deepseek_v3 --dump_folder=outputs/debug_deepseek_v3-31234/mxfp8" in result.stdout
    checked = shell("scripts/check_configs.sh", **slurm)
    assert checked.returncode == 2 and checked.stderr.startswith("check_configs.sh: configs of TorchTitan 0.3 cannot")


@pytest.mark.nightly
def test_slurm_ends_a_job_that_does_not_fit_before_its_nodes_work(slurm: dict[str, str], tmp_path: Path) -> None:
    slurm["CONFIG"] = "train_configs/llama4_17bx16e_8x8.toml"
    result = shell(str(tmp_path / "slurm_script"), **slurm)
    assert result.returncode == 1 and "srun" not in result.stdout
    assert "does not fit 8 processes" in result.stdout
    unchecked = shell(str(tmp_path / "slurm_script"), **slurm, CHECK="0")
    assert unchecked.returncode == 0 and "srun --nodes=2" in unchecked.stdout


def test_slurm_sets_up_before_its_nodes_would_do_it_all_at_once(slurm: dict[str, str], tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    agent = "scripts/train_multinode.sh"
    programs(repository, {"scripts/setup.sh": "echo set up", agent: 'echo train "$CONFIG" "$OUT" "$LAUNCH"'})
    for name in ("launch.sh", "watch.py"):
        shutil.copy(ROOT / "scripts" / name, repository / "scripts")
    (tmp_path / "own.toml").touch()
    settings = slurm | {"CHECK": "0", "DRYRUN": "0", "SLURM_SUBMIT_DIR": str(tmp_path), "CONFIG": "own.toml"}
    result = shell("sh", "-c", f"cd {repository} && {tmp_path / 'slurm_script'}", **settings)
    assert result.returncode == 0, result.stderr
    _, set_up, srun, *agents = result.stdout.splitlines()
    assert set_up == "set up" and srun.startswith("srun")
    out = f"{tmp_path}/outputs/own-31234"
    assert agents == [f"{node}: train {tmp_path}/own.toml {out} 31234-0" for node in ("gpu07", "gpu08")]

    # of two nodes, the one that failed; the other had the log of its own output written first
    for node, error in (("gpu07", "E: Connection closed by peer"), ("gpu08", "ValueError: mine")):
        process = Path(out) / "mxfp8" / "logs" / "31234-0" / f"id_{node}" / "attempt_0" / "0"
        process.mkdir(parents=True)
        (process / "stderr.log").write_text(TRACE.format(0) + error)
    programs(tmp_path, {"srun": "exit 7"})
    result = shell("sh", "-c", f"cd {repository} && {tmp_path / 'slurm_script'}", **settings)
    assert result.returncode == 7
    assert result.stderr.splitlines()[-1].startswith("train.slurm: ValueError: mine (local rank 0: ")


TRAIN = ["NGPU=0", "NGPU=2.5", "NGPU=08", "NGPU=1 2", "TITAN=0.4", "DRYRUN=yes", "RUNS= ", "RUNS=bf16,mxfp8"]
TRAIN += ["RUNS=mxfp8 fp4", "LOG_RANK=all", "LOG_RANK=0 1", "MAX_RESTARTS=many"]
REFUSED = {
    "train.sh": TRAIN,  # by launch.sh, for all that train
    "train_multinode.sh": ["NGPU=0", "NNODES=0", "NNODES=1:2", "RDZV_ENDPOINT=node01", "RDZV_ENDPOINT=node01:http"],
    "train.slurm": ["NGPU=0", "RDZV_PORT=0", "RDZV_PORT=http", "CHECK=no"],
    "bench/bench_all.sh": ["DEVICE=gpu", "MINUTES=ten", "MINUTES=1/2", "QUICK=yes", "PARTS= ", "PARTS=scaling,kernels"],
    "verify_hardware.sh": ["MINUTES=-1", "STEPS=doctor,tests"],
    "test_gpu.sh": ["JOBS=0", "JOBS=auto"],
    "converge.sh": ["NGPU=2.5"],
}


@pytest.mark.parametrize(("script", "setting"), [(script, each) for script, all in REFUSED.items() for each in all])
def test_scripts_refuse_values_that_they_would_misread(script: str, setting: str, slurm: dict[str, str]) -> None:
    """Before they do anything: NGPU=0 ended with status 0 and nothing trained, in others the shell's words."""
    name, _, value = setting.partition("=")
    done = shell(f"scripts/{script}", **slurm | {"PYTHON": sys.executable, "TITAN": "0.2", name: value})
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert f"{name} " in said and repr(value) in said, said


def test_slurm_says_where_it_must_be_submitted(slurm: dict[str, str], tmp_path: Path) -> None:
    result = shell("sh", "-c", f"cd {tmp_path} && ./slurm_script", **slurm)
    assert result.returncode == 2 and f"{tmp_path} is not the repository's root" in result.stderr
    result = shell("scripts/train.slurm", SLURM_JOB_ID="")
    assert result.returncode != 0 and "this is a batch script: sbatch scripts/train.slurm" in result.stderr


UNSET = {"PYTHON": "", "TORCH": ""}  # what the tests themselves may have been called with
INSTALLED = 'touch .venv/.installed-$(cksum < pyproject.toml | cut -d" " -f1)-default-{cpu,gpu}'


def set_up(folder: Path, steps: str = "true", **settings: str) -> subprocess.CompletedProcess:
    """Sources setup.sh, behind other steps, in a tree of which ``folder`` has the rest."""
    (folder / "pyproject.toml").write_text("")
    shutil.copy(ROOT / "scripts" / "setup.sh", folder)
    command = f"set -euo pipefail; cd {folder}; {steps}; . ./setup.sh"
    return shell("bash", "-c", command, **UNSET | {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"} | settings)


@pytest.mark.parametrize("inherited", [True, False])
@pytest.mark.parametrize("titan, end", [("0.2", ""), ("0.3", "03")])
def test_setup_installs_torch_where_the_new_environment_lacks_that_of_python3(
    titan: str, end: str, inherited: bool, tmp_path: Path
) -> None:
    """A python3 with torch may itself be that of an environment: a new one is made from the Python behind it."""
    venv = f".venv{end}"
    made = f"""[ "$1" = -c ] && exit
mkdir -p {venv}/bin
touch {venv}/bin/activate
echo 'echo "$@" >> calls; [ "$1" = -c ] && exit {int(not inherited)}; exit 0' > {venv}/bin/python
chmod +x {venv}/bin/python
echo "$@" >> calls"""
    programs(tmp_path, {"bin/python3": made})
    result = set_up(tmp_path, TORCH="torch==2.13.0", TITAN=titan, EXTRA="hf")
    assert result.returncode == 0, result.stderr
    made, newer, _, *installs = (tmp_path / "calls").read_text().splitlines()
    assert made == f"-m venv --system-site-packages {venv}" and newer.endswith("--upgrade pip")
    torch_first = [] if inherited else ["torch==2.13.0"]
    assert [install.split()[-1] for install in installs] == [*torch_first, f".[train{end},test,hf]"]


def environment(fits: str) -> dict[str, str]:
    """Stubs of a .venv that notes what it installs, on a machine whose own Python has no torch; ``fits``: by which case
    of the shell's its torch will do."""
    return {
        ".venv/bin/activate": "",
        ".venv/bin/python": f'case "$*" in {fits} -c*) ;; *) echo "$@" >> calls ;; esac',
        "bin/python3": '[ "$1" != -c ] || exit 1',
    }


@pytest.mark.skipif(shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None, reason="has a GPU at once")
def test_setup_replaces_a_cpu_build_where_there_is_a_gpu(tmp_path: Path) -> None:
    """A .venv that a login node without a GPU made trained a GPU node's job on its CPU."""
    stubs, calls = environment("*torch.version.cuda*) [ -e cuda ] ;;"), tmp_path / "calls"
    gpu = {"bin/nvidia-smi": ""}
    for added, expected in (({}, ["pip", ".[train,test]"]), (gpu, ["pip", "torch>=2.11,<2.14", ".[train,test]"])):
        programs(tmp_path, stubs | added)
        for _ in range(2):
            done = set_up(tmp_path)
            assert done.returncode == 0, done.stderr
        installs = calls.read_text().splitlines()
        assert [install.split()[-1] for install in installs] == expected
        assert all(("--force-reinstall" in install) == ("torch" in install) for install in installs)
        calls.unlink()


@pytest.mark.skipif(shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None, reason="has a GPU of another maker")
def test_setup_takes_no_build_for_cuda_where_the_gpus_are_amds(tmp_path: Path) -> None:
    """Such as pip finds, unless it is told of an index of builds for ROCm."""
    programs(tmp_path, environment('*"t torch.version.hip"*) test -e hip ;;') | {"bin/rocminfo": ""})
    done = set_up(tmp_path)
    assert done.returncode == 1 and "Linux, Pip, ROCm), put it in PIP_EXTRA_INDEX_URL" in done.stderr
    (tmp_path / "hip").touch()
    assert set_up(tmp_path).returncode == 0
    installs = (tmp_path / "calls").read_text().splitlines()
    assert [install.split()[-1] for install in installs] == ["pip", "torch>=2.11,<2.14", "pip", ".[train,test]"]


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
    both = "--module=titan_mxfp8.titan03 --config=debug_qwen3 --dump_folder=o/{} --metrics.enable_tensorboard"
    both += " --training.steps=3"
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
    built = "is a CPU build" if torch.version.cuda is None else f"was built for {torch.version.cuda}"
    assert "this machine has a GPU, and torch" in done.stderr and built in done.stderr
    meant = "set -eu; . scripts/launch.sh; . scripts/setup.sh; check_gpu; echo trains"
    assert shell("bash", "-c", meant, **settings | {"CUDA_VISIBLE_DEVICES": ""}).stdout == "trains\n"


@pytest.mark.parametrize(
    "given, seen",
    [
        ({}, "expandable_segments:True titan_mxfp8"),
        ({"PYTORCH_ALLOC_CONF": "x", "WANDB_PROJECT": "mine"}, "x mine"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, " titan_mxfp8"),
    ],
)
def test_launchers_have_torch_reuse_memory_and_name_a_project_unless_told_otherwise(given: dict, seen: str) -> None:
    commands = ". scripts/launch.sh; torchrun_flags() { torchrun=(); }; train_runs train_configs/debug_llama4.toml out"
    commands += """; sh -c 'echo "$PYTORCH_ALLOC_CONF $WANDB_PROJECT"'"""
    settings = {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "", "WANDB_PROJECT": ""}
    settings |= {"DRYRUN": "1", "NGPU": "1", "RUNS": "mxfp8"}
    result = shell("bash", "-c", commands, **(settings | given))
    assert result.stdout.splitlines()[-1] == seen


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
