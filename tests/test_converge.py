"""Studies. converge.py: what it runs, in which order, and how it goes on. The parts of recovery.py, and what it does to
trainings, without one."""

import argparse
import contextlib
import io
import json
import math
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from script_calls import ROOT, call, interrupted

from scripts.result_files import read_rows
from scripts.study import converge, faults, recovery, runs
from scripts.study.faults import Plan, Watch
from titan_mxfp8.recipe import GROUPED_MM, LINEAR
from titan_mxfp8.tools.dry_run import parse_config

TOML = "train_configs/debug_llama4.toml"
Study = Callable[..., tuple[int, str]]


@pytest.fixture
def study(tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    """Calls converge.py in this process, with a clock of its own and without torchrun, which takes seconds to start:
    exit status and output."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    clock = SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: sleep(seconds / 20))
    for name, value in stub.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(converge, "time", clock)
    monkeypatch.setattr(runs, "torchrun", lambda _, *program: [sys.executable, *program[program.index("-m") :]])

    def call_converge(*arguments: str, now: Callable[[], float] = monotonic, **environment: str) -> tuple[int, str]:
        clock.monotonic = now
        printed = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as exit:
            for name, value in environment.items():
                patch.setenv(name, value)
            converge.main(list(arguments))
        return exit.value.code, printed.getvalue()

    yield call_converge
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.integration
def test_an_error_fails_its_run_alone_and_one_of_the_study_stops_them_all(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [TOML, "--recipes", "bf16", "--out", str(tmp_path / "study")]
    launch = converge.launch

    def launch_or_fail(processes: int, program: list[str], *arguments: object, **options: object) -> subprocess.Popen:
        if "--debug.seed=0" in program:
            raise OSError("no space left")
        return launch(processes, program, *arguments, **options)

    monkeypatch.setattr(converge, "launch", launch_or_fail)
    status, said = study(*command, "--seeds", "0", "1")
    assert status == 1 and "bf16-seed0: failed: no space left" in said and "1 finished, 1 failed" in said

    def broken(log: Path) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(converge, "step_of", broken)
    with pytest.raises(BrokenPipeError):
        study(*command, "--seeds", "2", "3", "4", STUB_SECONDS="2")
    assert not (tmp_path / "study" / "bf16-seed4").exists(), "what is left is not begun"


@pytest.mark.integration
def test_converge_runs_a_study_in_order_stops_at_the_limit_and_continues(tmp_path: Path, study: Study) -> None:
    out, calls = tmp_path / "study", tmp_path / "calls"
    command = [TOML, "--out", str(out)]
    command += ["--recipes", "bf16", "mxfp8_2d+rebase", "--seeds", "0", "1"]
    late = lambda: monotonic() + 1000 * calls.is_file()  # noqa: E731 - once the first run has begun
    status, first = study(*command, "--limit", "900", "--", "--training.steps=3", now=late, STUB_SECONDS="90")
    assert status == 3, first
    assert "bf16-seed0: stopped" in first and "the same command continues the study" in first
    assert len(calls.read_text().splitlines()) == 1, "one at a time"

    checkpoint = out / "bf16-seed0" / "checkpoint" / "step-2" / ".metadata"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    status, second = study(*command, "--jobs", "2", "--", "--training.steps=3", STUB_FAIL="mxfp8_2d+rebase-seed1")
    assert status == 1 and "mxfp8_2d+rebase-seed1: failed" in second and "no luck" in second
    assert "bf16-seed0: started from its checkpoint" in second
    assert not checkpoint.exists(), "a finished run needs none"
    assert [row["run"] for row in read_rows(out / "table.csv")] == ["bf16", "mxfp8_2d+rebase"]
    seeds = re.findall(r"-seed(.): started", second)
    assert seeds == ["0", "0", "1", "1"], "seed by seed"

    status, third = study(*command, "--", "--training.steps=3")
    assert status == 0, third
    assert "4 runs, 3 finished already, 1 at a time" in third and "4 finished, 0 failed, 0 stopped" in third
    assert [row["seeds"] for row in read_rows(out / "table.csv")] == ["2", "2"]

    lines = calls.read_text().splitlines()
    assert len(lines) == 6 and "--training.steps=3" in lines[-1] and "--debug.seed=1" in lines[-1]
    assert "--model.converters=" in lines[0] and "--model.converters=" not in lines[-1]
    assert "--quantize.grouped_mm.mx.recipe_name=mxfp8_2d --quantize.linear.mx.recipe_name=mxfp8_2d" in lines[-1]
    assert "--quantize.grouped_mm.mx.hopper_rebase --quantize.linear.mx.hopper_rebase" in lines[-1]
    assert all("--metrics.enable_tensorboard --training.steps=3" in line for line in lines), "which is compared"
    assert not any("hopper_rebase" in line for line in lines if "--model.converters=" in line)
    refused = call("converge", *command, "--", "--training.steps=4")
    assert "holds a study of another config or other flags" in refused


@pytest.mark.parametrize("allowed, expected", [(None, ["0", "1"]), ("3,5", ["3", "5"])])
def test_converge_takes_the_gpus_that_it_may_use(
    allowed: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    args = converge.parse_arguments([TOML, "--out", str(tmp_path), "--jobs", "2"])
    run = converge.StudyRun(recipe="bf16", seed=0, folder=tmp_path / "bf16-seed0")
    given = [converge.environment_of(run, args, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert given == [*expected, expected[0]]


def test_converge_compares_all_finished_runs_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those of earlier commands too, with the first recipe of this one as the baseline."""
    names = ["bf16-seed2", "mxfp8-seed2", "mxfp8-seed10", "bf16+repeat-seed2"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "finished.json").touch()
    (tmp_path / "bf16-seed3").mkdir()
    shutil.copytree(tmp_path / names[0], tmp_path / "bf16-seed2.bak")
    ran = []
    monkeypatch.setattr(converge.compare_runs, "main", ran.append)

    def compared(*recipes: str) -> None:
        options = ["--out", str(tmp_path), "--margin", "0.01", "--window", "0.2"]
        converge.compare(converge.parse_arguments(["x.toml", "--recipes", *recipes, *options]))

    compared("bf16", "mxfp8")
    folders = [str(tmp_path / name) for name in names]
    assert ran[0] == [*folders, "--out", str(tmp_path), "--window", "0.2", "--margin", "0.01"]
    compared("mxfp8_2d", "mxfp8")
    assert len(ran) == 1
    assert capsys.readouterr().out == "nothing to compare with: no run of mxfp8_2d is finished\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["none.toml"], "none.toml is no file"),
        ([TOML, "--recipes", "fp4"], "unknown recipe 'fp4'"),
        ([TOML, "--recipes", "mxfp8+again"], "once, are async, dispatch, experts, graph, linears, rebase, repeat"),
        ([TOML, "--recipes", "mxfp8+linears+dispatch"], "linears dispatch nothing"),
        ([TOML, "--recipes", "bf16+experts"], "unknown run 'bf16+experts'"),
        ([TOML, "--recipes", "bf16", "float8"], "unknown recipe 'float8'"),
        ([TOML, "--recipes", "bf16+async"], "async cannot be trained with 0.2.2"),
        (["linears.toml", "--recipes", "mxfp8+experts"], "mxfp8+experts needs quantize.grouped_mm.mx"),
        ([TOML, "--recipes", "bf16+repeat+repeat"], "unknown run 'bf16+repeat+repeat'"),
        (["plain.toml", "--recipes", "bf16", "mxfp8"], "mxfp8 needs quantize.grouped_mm.mx or quantize.linear.mx"),
        ([TOML, "--out", "pyproject.toml/study"], "pyproject.toml"),
        ([TOML, "--window", "7"], "--window is a share of the steps, above 0 and at most 1, got 7.0"),
        ([TOML, "--margin", "0"], "--margin is a share of the loss, above 0 and below 1, got 0.0"),
        ([TOML, "--seeds", "0", "1", "0"], "--seeds has 0 twice"),
        ([TOML, "--seeds", "0", "-1"], "--seeds has -1, a number below 0"),
        ([TOML, "--recipes", "bf16", "mxfp8", "bf16"], "--recipes has bf16 twice"),
    ],
)
def test_converge_refuses_a_bad_study(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name, converters in (("linears.toml", '["quantize.linear.mx"]'), ("plain.toml", "[]")):
        if name in arguments:
            (tmp_path / name).write_text(f"[model]\nconverters = {converters}\n")
            arguments = [str(tmp_path / name), *arguments[1:]]
    assert message in call("converge", *arguments)


@pytest.mark.parametrize(
    "flags, use",
    [
        (["--job.dump-folder", "x"], "--out"),
        (["--training.steps=3", "--debug.seed=7"], "--seeds"),
        (["--quantize.grouped-mm.mx.recipe_name=mxfp8"], "--recipes"),
        (["--quantize.grouped_mm.mx.dispatch=auto"], "--recipes"),
        (["--checkpoint.no-enable"], "--checkpoint-every"),
        (["--checkpoint-every", "0", "--", "--checkpoint.folder=ck"], "--checkpoint-every"),
        (["--job.config_file=x.toml"], "the TOML"),
    ],
)
def test_converge_refuses_flags_that_it_sets_for_each_run(
    flags: list[str], use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converge, "study", lambda *_: pytest.fail("training began"))
    ran = tmp_path / "bf16-seed0" / "ck" / "step-2"
    ran.mkdir(parents=True)
    own = [] if "--" in flags else ["--"]
    refused = call("converge", TOML, "--out", tmp_path, *own, *flags)
    assert refused.startswith("converge: --") and refused.endswith(f"is set for each run: use {use}"), refused
    assert ran.is_dir() and not (tmp_path / "study.json").exists()
    harmless = "--quantize.linear.mx.hopper_rebase_report=9 --checkpoint.keep_latest_k 2 --debug.deterministic"
    converge.check_flags(harmless.split(), 500)


@pytest.mark.parametrize(
    "recipe, converters, name, rebase, requantize, dispatch",
    [
        ("bf16", [], "auto", True, True, "symmetric"),  # of converters that do not run the TOML's
        ("bf16+repeat", [], "auto", True, True, "symmetric"),
        ("bf16+dispatch", [GROUPED_MM], "bf16", False, False, "auto"),
        ("mxfp8+experts+dispatch", [GROUPED_MM], "mxfp8", False, False, "auto"),
        ("mxfp8_2d+experts+rebase", [GROUPED_MM], "mxfp8_2d", True, False, "off"),
        ("mxfp8_2d+repeat", [GROUPED_MM, LINEAR], "mxfp8_2d", False, False, "off"),
        ("mxfp8_2d_rebased+dispatch+repeat", [GROUPED_MM, LINEAR], "mxfp8_2d_rebased", False, False, "auto"),
        ("mxfp8+linears+requantize", [LINEAR], "mxfp8", False, True, "symmetric"),
    ],
)
def test_converge_converts_as_a_recipe_and_its_options_say_whatever_the_toml_says(
    recipe: str, converters: list[str], name: str, rebase: bool, requantize: bool, dispatch: str, tmp_path: Path
) -> None:
    toml = (ROOT / "train_configs" / "debug_deepseek_v3.toml").read_text()
    switched_on = "hopper_rebase = true\nhopper_rebase_report = 50\nrequantize_input = true\n"
    for section in ("[quantize.grouped_mm.mx]\n", "[quantize.linear.mx]\n"):
        toml = toml.replace(section, section + switched_on)
    toml = toml.replace('fqns = ["experts"]', 'dispatch = "symmetric"\ndispatch_rows = "worst_case"')
    (tmp_path / "on.toml").write_text(toml)
    run = converge.StudyRun(recipe=recipe, seed=7, folder=tmp_path / f"{recipe}-seed7")
    config = parse_config(str(tmp_path / "on.toml"), converge.flags_of(run, tmp_path / "on.toml", 0)[1:])
    assert (config.model.converters, config.debug.seed, config.job.dump_folder) == (converters, 7, str(run.folder))
    for converter, mx in ((GROUPED_MM, config.quantize.grouped_mm.mx), (LINEAR, config.quantize.linear.mx)):
        if not converters or converter in converters:
            assert (mx.recipe_name, mx.hopper_rebase, mx.requantize_input) == (name, rebase, requantize)
    assert config.quantize.grouped_mm.mx.dispatch == dispatch
    read = runs.Run(name=run.folder.name, loss={}, tps={}, memory={}, config={})
    assert (read.group, read.seed) == (recipe, 7)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_converge_that_is_ended_says_how_to_go_on(number: int, tmp_path: Path, stub: dict[str, str]) -> None:
    command = sys.executable, "scripts/study/converge.py", TOML, "--out", str(tmp_path / "out")
    status, rest, errors = interrupted(*command, number=number, once="started", **stub, STUB_SECONDS="600")
    assert status == 3 and "bf16-seed0: stopped" in rest, errors
    assert rest.splitlines()[-1] == "the same command continues the study"


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
            watch.step = step
            watch.end_step(loss, 1.0)
    run = recovery.read_steps(tmp_path / "steps.csv")
    assert run["loss"].tolist()[:2] == [2.0, 1.25], "the later one of a step that ran twice"
    words = "loss 2.000 to nan, not finite in steps 3; gradient norms to 1.00; largest share of an expert 0.75; "
    assert recovery.described(run) == f"{words}expert 0 without tokens in steps 1 to 3"
    assert recovery.gap(run[1:], run) == 0 and recovery.gap(run, run[1:]) == math.inf
    other = run.assign(loss=1.0)
    assert recovery.gap(other[1:2], run) == 0.25
    assert recovery.gap(other[2:], run) == recovery.gap(run, other) == math.inf
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
    (step,) = study.train("step", Plan())[0].reset_index().to_numpy().tolist()
    assert step == [5, 2.5, 0.5, 3, 0.25]
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
    rows = {(row["case"], row["run"]): row for row in read_rows(tmp_path / "data.csv")}
    cases = ("step", "checkpoint", "collapse", "rerun", "nan", "nan, again", "dead")
    assert list(rows) == [(case, kind) for kind in recovery.KINDS for case in cases]
    assert trained[:2] == [("bf16", "whole", (), False), ("bf16", "step", ("step",), True)]
    assert ("MXFP8", "rerun", ("collapse", "rerun"), True) in trained
    assert rows["step", "MXFP8"]["largest gap"] == "0.5" and rows["dead", "MXFP8"]["losses"] == "equal"
    assert (rows["rerun", "bf16"]["losses"], rows["rerun", "MXFP8"]["losses"]) == ("", "equal")
    assert rows["nan, again", "bf16"]["what it did"] == "Training starts at step 5"

    old = tmp_path / "runs" / "MXFP8-whole"
    old.mkdir()
    with pytest.raises(SystemExit, match="losses differ"):  # goes on to train
        recovery.main(["--out", str(tmp_path)])
    assert not old.exists()


@pytest.mark.parametrize("theirs", ["runs/bf16/log", "data.csv"])
def test_a_study_of_kills_leaves_what_others_made(theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery.Study, "make", lambda study: None)
    kept = tmp_path / theirs
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()
    with pytest.raises(SystemExit, match=r"is not of an earlier call, .*: remove it, or name another --out"):
        recovery.main(["--out", str(tmp_path)])
    assert kept.is_file()
