"""recovery.py and what it does to trainings: its parts, without a training."""

import argparse
import json
import math
import os
import pkgutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from script_calls import rows_of

from scripts.study import faults, recovery
from scripts.study.faults import Plan, Watch


def test_faults_are_in_their_steps_alone(tmp_path: Path) -> None:
    plan = Plan(("dead", "nan"), 2, 3)
    what, first, last = json.loads(plan.flags()[1].partition("=")[2])
    assert Plan(tuple(what), first, last) == plan
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


def test_a_process_kills_itself_at_its_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(faults.os, "kill", lambda *call: killed.append(call))
    watch = Watch(Plan(("rerun",), 2, 8), tmp_path, rank=0)
    for step, point in ((1, "rerun"), (2, "step"), (3, "rerun")):
        watch.step = step
        watch.reach(point)
    assert not killed
    watch.step = 2
    watch.reach("rerun")
    assert killed == [(os.getpid(), signal.SIGKILL)]


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
    assert run["loss"].tolist()[:2] == [2.0, 1.25], "the later one of a step that ran twice"
    words = "loss 2.000 to nan, not finite in steps 3; gradient norms to 1.00; largest share of an expert 0.75; "
    assert recovery.described(run) == f"{words}expert 0 without tokens in steps 1 to 3"
    assert recovery.gap(run[1:], run) == 0 and recovery.gap(run, run[1:]) == math.inf
    other = run.assign(loss=1.0)
    assert (
        recovery.gap(other[1:2], run) == 0.25 and recovery.gap(other[2:], run) == recovery.gap(run, other) == math.inf
    )
    log = "[titan] 2026-11-27 03:48:29,566 - titan_mxfp8.titan.rerun - INFO - MXFP8: step 5 runs again, as\n"
    assert recovery.line_of(log, "runs again") == "MXFP8: step 5 runs again, as"
    assert recovery.line_of(log, "loss: +nan") == "nothing"


def test_a_run_ends_as_its_plan_says(tmp_path: Path) -> None:
    programs = []

    class Starter:
        def start(self, flags: list[str], log: Path) -> subprocess.Popen:
            log.write_text("Traceback (most recent call last):\nRuntimeError: mine\n")
            with log.open("a") as file:
                return subprocess.Popen(["sh", "-c", programs.pop(0)], cwd=log.parent, stdout=file)

    args = argparse.Namespace(out=tmp_path, ngpu=2, dead=1, flags=[])
    study = recovery.Study("MXFP8", args, Starter(), {})
    killed = "echo 'Signal 9 (SIGKILL) received by PID 1'; exit 1"
    row = "5,2.5,0.5,3,0.25"
    programs[:] = [killed, f"echo {row} >> steps.csv", "exit 3", "true", killed]
    assert study.train("step", Plan(("step",), 1, 1), killed=True)[0].empty
    assert study.train("step", Plan())[0].to_dict("index") == {
        5: dict(zip(faults.COLUMNS[1:], (2.5, 0.5, 3, 0.25), strict=True))
    }
    for is_killed, said in ((False, "failed, RuntimeError: mine"), (True, "was not killed"), (False, "failed")):
        with pytest.raises(ValueError, match=f"run MXFP8-step {said}"):
            study.train("step", Plan(), killed=is_killed)


def test_a_study_kills_goes_on_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trainings that are made up: MXFP8's that go on from a checkpoint have other losses."""
    trained = []

    def train(study: recovery.Study, name: str, plan: Plan, *flags: str, steps: int = 8, killed: bool = False) -> tuple:
        trained.append((study.kind, name, plan.what, killed))
        loss = 1.5 if study.kind == "MXFP8" and name == "step" else 1.0
        values = dict(zip(faults.COLUMNS[1:], (loss, 0.5, 3, 0.25), strict=True))
        return pd.DataFrame([values] * 2, index=[5, 6]), "Training starts at step 5"

    monkeypatch.setattr(recovery.Study, "train", train)
    with pytest.raises(SystemExit, match=r"^recovery: step of MXFP8: losses differ$"):
        recovery.main(["--out", str(tmp_path), "--dead", "4"])
    rows = {(row["case"], row["run"]): row for row in rows_of(tmp_path / "data.csv")}
    cases = ("step", "checkpoint", "collapse", "rerun", "nan", "nan, again", "dead")
    assert list(rows) == [(case, kind) for kind in recovery.KINDS for case in cases]
    assert trained[:2] == [("bf16", "whole", (), False), ("bf16", "step", ("step",), True)]
    assert ("MXFP8", "rerun", ("collapse", "rerun"), True) in trained
    assert rows["step", "MXFP8"]["largest gap"] == "0.5" and rows["dead", "MXFP8"]["losses"] == "equal"
    assert (rows["rerun", "bf16"]["losses"], rows["rerun", "MXFP8"]["losses"]) == ("", "equal")
    assert rows["nan, again", "bf16"]["what it did"] == "Training starts at step 5"
