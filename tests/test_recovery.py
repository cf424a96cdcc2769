"""recovery.py and what it does to trainings: its parts, without a training."""

import argparse
import math
import pkgutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.study import faults, recovery
from scripts.study.faults import Plan, Watch


def test_faults_are_in_their_steps_alone(tmp_path: Path) -> None:
    plan = Plan(("dead", "nan"), 2, 3)
    assert Plan.of(plan.flags()[1].partition("=")[2]) == plan and Plan.of(Plan().flags()[1].partition("=")[2]) == Plan()
    router, scores = SimpleNamespace(num_experts=6, top_k=2), torch.rand(64, 6)
    for what, tokens in (("dead", [0]), ("collapse", [64, 64, 0, 0, 0, 0])):
        watch = Watch(Plan((what,), 2, 3), tmp_path, rank=0)
        for step, is_due in ((1, False), (2, True), (3, True), (4, False)):
            watch.step = step
            biases = [watch.bias(router, scores, None), watch.bias(router, scores, torch.zeros(6))]
            assert is_due or biases[0] is None
            for bias in biases[not is_due :]:
                counts = (scores + bias).topk(2).indices.flatten().bincount(minlength=6)
                assert (counts[: len(tokens)].tolist() == tokens) is is_due
    embedded = torch.randn(2, 5, 8)
    for rank, step, count in ((0, 2, 8), (1, 2, 0), (0, 4, 0)):
        watch = Watch(plan, tmp_path, rank)
        watch.step = step
        assert int(watch.embed(embedded).isnan().sum()) == count and not embedded.isnan().any()


def test_a_process_says_where_it_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stood = []
    monkeypatch.setattr(faults.time, "sleep", stood.append)
    watch = Watch(Plan(("rerun",), 2, 8), tmp_path, rank=0)
    for step, point in ((1, "rerun"), (2, "step"), (3, "rerun")):
        watch.step = step
        watch.reach(point)
    assert not stood and not (tmp_path / "reached").exists()
    watch.step = 2
    watch.reach("rerun")
    assert stood == [faults.STAND_STILL] and (tmp_path / "reached").exists()


def test_what_it_wraps_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = []
    monkeypatch.setattr(faults, "around", lambda target: lambda patch: lambda: wrapped.append(target))
    faults.install(Watch(Plan(), tmp_path, rank=0))
    assert len(wrapped) == 6 and all(map(callable, map(pkgutil.resolve_name, wrapped)))


def test_losses_are_compared_step_by_step(tmp_path: Path) -> None:
    for rank in (1, 0):
        watch = Watch(Plan(), tmp_path, rank)
        for step, loss in ((1, 2.0), (2, 1.5), (2, 1.25), (3, math.nan)):
            watch.counts = [torch.tensor([0, 3, 1]), torch.tensor([0, 2, 2])]
            watch.end_step(step, loss, 1.0)
    run = recovery.read_steps(tmp_path / "steps.csv")
    assert [row["loss"] for row in run.values()][:2] == [2.0, 1.25], "the later one of a step that ran twice"
    words = "loss 2.000 to nan, not finite in steps 3; gradient norms to 1.00; largest share of an expert 0.75; "
    assert recovery.described(run) == f"{words}expert 0 without tokens in steps 1 to 3"
    later = {2: run[2], 3: run[3]}
    assert recovery.gap(later, run) == 0 and recovery.gap(run, later) == math.inf
    assert recovery.gap({2: {"loss": 1.0}}, run) == 0.25 and recovery.gap({3: {"loss": 1.0}}, run) == math.inf
    log = "[titan] 2026-11-27 03:48:29,566 - titan_mxfp8.titan.rerun - INFO - MXFP8: step 5 runs again, as\n"
    assert recovery.line_of(log, "runs again") == "MXFP8: step 5 runs again, as"
    assert recovery.line_of(log, "loss: +nan") == "nothing"


def test_all_processes_are_killed_where_the_run_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, descendants = [], recovery.descendants
    no_more = 2**22 + 1  # what has ended by itself; Linux numbers no process so
    monkeypatch.setattr(recovery, "descendants", lambda pid: [no_more, *descendants(pid)])
    glob = Path.glob
    with monkeypatch.context() as patch:  # a thread that ends before it is looked at
        patch.setattr(Path, "glob", lambda tasks, pattern: [tasks / "0" / "children", *glob(tasks, pattern)])
        assert descendants(no_more) == []

    class Starter:
        def start(self, flags: list[str], log: Path) -> subprocess.Popen:
            log.write_text("Traceback (most recent call last):\nRuntimeError: mine\n")
            return subprocess.Popen(["sh", "-c", programs.pop(0)], cwd=log.parent)

    args = argparse.Namespace(out=tmp_path, ngpu=2, dead=1, cases=[], flags=[])
    study = recovery.Study("MXFP8", args, Starter())
    programs.append("setsid sh -c 'echo $$ > pid; sleep 60; true' & sleep 0.2; touch reached; wait")
    assert study.train("step", Plan(("step",), 1, 1), killed=True)[0] == {}
    pid = int((tmp_path / "runs" / "MXFP8-step" / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "a process of a session of its own goes on"
    for program, killed, said in (("exit 3", False, "failed, RuntimeError: mine"), ("true", True, "failed")):
        programs.append(program)
        with pytest.raises(ValueError, match=f"run MXFP8-step {said}"):
            study.train("step", Plan(), killed=killed)


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
