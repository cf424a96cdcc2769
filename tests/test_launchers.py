"""The launchers: what they would run, what they say of failures, and what bad values get."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from script_calls import ROOT, call, programs, shell

from scripts import watch
from scripts.study import converge, runs

pytestmark = pytest.mark.integration


def test_train_runs_bf16_and_then_the_config_as_it_is() -> None:
    settings = {
        "DRYRUN": "1",
        "NGPU": "2",
        "OUT": "outputs/x",
        "WANDB_RUN_NAME": "n",
        "LAUNCH": "now",
        "LOG_RANK": "0,1",
    }
    result = shell("scripts/train.sh", "--training.steps=3", **settings)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"+ WANDB_RUN_NAME=n torchrun --standalone --nproc-per-node=2 --log-dir=outputs/x/{run}/logs/now --tee=3 "
        "--role=rank --local-ranks-filter=0,1 -m torchtitan.train --job.config_file=train_configs/debug_llama4.toml "
        f"--job.dump_folder=outputs/x/{run}{converters} --training.steps=3"
        for run, converters in (("bf16", " --model.converters="), ("mxfp8", ""))
    ]


@pytest.mark.parametrize("script", ["train.sh", "train_multinode.sh"])
def test_paths_are_those_of_the_callers_folder(script: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").touch()

    def command(**environment: str) -> str:
        done = shell("sh", "-c", f"cd {tmp_path} && {ROOT}/scripts/{script}", DRYRUN="1", RUNS="mxfp8", **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"--job.config_file={tmp_path}/own.toml --job.dump_folder={tmp_path}/outputs/own-" in command(
        CONFIG="own.toml"
    )
    own = command(CONFIG=f"{tmp_path}/own.toml", OUT="x")
    assert f"--job.config_file={tmp_path}/own.toml --job.dump_folder={tmp_path}/x/mxfp8" in own
    repository = command(CONFIG="train_configs/debug_llama4.toml", OUT=f"{tmp_path}/y")
    assert f"--job.config_file=train_configs/debug_llama4.toml --job.dump_folder={tmp_path}/y/mxfp8" in repository


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
    assert last.startswith(
        "train.sh: mxfp8 failed: ValueError: expert_parallel_degree 3 does not divide 8 (local rank 1: "
    )
    assert "ValueError" in Path(last.rpartition(": ")[2].rstrip(")")).read_text()
    assert "ChildFailedError" not in done.stdout and "Traceback" not in done.stdout
    (log,) = (tmp_path / "out" / "mxfp8" / "logs").glob("*/*.log")
    assert "ChildFailedError" in log.read_text() and "[rank0]:Traceback" in log.read_text()


TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n"
TORCHRUN = "E1122 15:33:36.727000 4716 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) "
TORCHRUN += "local_rank: 1 (pid: 4767) of binary: python\n"
NOTE = "I1122 15:35:34.545000 5533 .venv/lib/site-packages/torch/distributed/elastic/agent/server/api.py:942] [rank] "
TRACE = (
    "[rank{0}]:[rank{0}]: Traceback (most recent call last):\n[rank{0}]:[rank{0}]:   File 'x'\n[rank{0}]:[rank{0}]: "
)
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
ABORTED = """  traceback : Traceback (most recent call last):
    File "trainer.py", line 828, in _forward_backward_body
      loss.backward()
  torch.AcceleratorError: CUDA error: device-side assert
  Search for `cudaErrorAssert'
"""


def test_watch_shows_what_is_news() -> None:
    lost, own = (
        TRACE.format(rank) + f"{error}\n" for rank, error in ((0, "E: Connection closed by peer"), (2, "E: mine"))
    )
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


@pytest.mark.parametrize(
    "torchrun, ranks, expected",
    [
        (REPORT, {0: TRACE.format(0) + "E: Connection closed by peer\n"}, "local rank 1 was killed by SIGKILL ("),
        ("", {0: TRACE.format(0) + "E: Connection closed by peer\n"}, "E: Connection closed by peer (local rank 0: "),
        ("", {0: FRAME, 1: FRAME}, "Unrecognized options: --training.stepz=3 (local rank 0: "),
        (
            REPORT,
            {3: f"{TRACEBACK}KeyError: 1\n\nThe above\n\n{TRACEBACK}ValueError: x\n"},
            "ValueError: x (local rank 3: ",
        ),
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


def test_the_end_of_a_failed_run_begins_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{TRACEBACK}ValueError: mine\n" + REPORT + "[1]:\n" * 2000)
    assert runs.ending(tmp_path / "log").startswith(f"ValueError: mine; {tmp_path / 'log'} ends:\n[1]:")


def test_the_cause_of_an_abort_is_in_torchruns_report(tmp_path: Path) -> None:
    """As where a kernel of a GPU asserts: the process prints no traceback of its own."""
    report = REPORT.replace("-9 (pid: 5041)  (SIGKILL)\n", "-6 (pid: 5041)  (SIGABRT)\n" + ABORTED)
    (tmp_path / "log").write_text(report + "[1]:\n" * 9)
    assert runs.ending(tmp_path / "log").startswith("torch.AcceleratorError: CUDA error: device-side assert; ")


def test_watch_takes_the_first_recorded_error(tmp_path: Path) -> None:
    """torch records what TorchTitan's trainer raises; a rank that fails because another did comes later."""
    for rank, time in ((0, 200), (1, 100)):
        folder = tmp_path / "id_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "error.json").write_text(json.dumps({"message": {"message": f"ValueError: rank {rank}\nmore"}}))
        os.utime(folder / "error.json", (time, time))
    assert call("watch", "cause", tmp_path).startswith("ValueError: rank 1 more (local rank 1: ")


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


def test_slurm_runs_one_agent_on_each_node(slurm: dict[str, str], tmp_path: Path) -> None:
    result = shell(str(tmp_path / "slurm_script"), "--training.steps=3", **slurm)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "  processes  8" in lines  # of the dry run, at the job's size
    agent = (
        "+ WANDB_RUN_NAME=n torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=gpu07:21234 --rdzv-id=31234-mxfp8 "
        "--max-restarts=3 --nproc-per-node=4 --log-dir=outputs/debug_llama4-31234/mxfp8/logs/31234-0 --tee=3 "
        "--role=rank --local-ranks-filter=0 -m torchtitan.train "
        "--job.config_file=train_configs/debug_llama4.toml --job.dump_folder=outputs/debug_llama4-31234/mxfp8 "
        "--training.steps=3"
    )
    assert "train.slurm: job 31234, restart 0, nodes gpu07 gpu08" in lines
    assert lines[-3:] == [
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --export=ALL "
        f"--chdir={ROOT} --label {ROOT}/scripts/train_multinode.sh --training.steps=3",
        f"gpu07: {agent}",
        f"gpu08: {agent}",
    ]


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


ALL_TRAIN = ["NGPU=0", "NGPU=two", "NGPU=2.5", "NGPU=-1", "NGPU=08", "NGPU=1 2", "TITAN=0.4", "DRYRUN=yes", "RUNS= "]
ALL_TRAIN += ["RUNS=bf16,mxfp8", "RUNS=mxfp8 fp4", "LOG_RANK=all", "LOG_RANK=0 1", "MAX_RESTARTS=many"]
REFUSED = {
    "train.sh": ALL_TRAIN,
    "train_multinode.sh": [*ALL_TRAIN, "NNODES=0", "NNODES=1:2", "RDZV_ENDPOINT=node01", "RDZV_ENDPOINT=node01:http"],
    "train.slurm": [*ALL_TRAIN, "RDZV_PORT=0", "RDZV_PORT=http", "CHECK=no"],
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
