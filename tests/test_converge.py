"""converge.py: what it runs, in which order, and how it goes on."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
from script_calls import ROOT, call, rows_of

from scripts.study import converge, runs
from titan_mxfp8.recipe import GROUPED_MM, LINEAR
from titan_mxfp8.tools.dry_run import parse_config


@pytest.fixture
def study(tmp_path: Path, stub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple]]:
    """Calls converge.py in this process, with a clock of its own and without torchrun, which takes seconds to start:
    exit status and output."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
    tmp_path: Path, study: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train_configs/debug_llama4.toml", "--recipes", "bf16", "--out", str(tmp_path / "study")]
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
def test_converge_runs_a_study_in_order_stops_at_the_limit_and_continues(
    tmp_path: Path, study: Callable[..., tuple[int, str]]
) -> None:
    out, calls = tmp_path / "study", tmp_path / "calls"
    command = ["train_configs/debug_llama4.toml", "--out", str(out)]
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
    assert [row["run"] for row in rows_of(out / "table.csv")] == ["bf16", "mxfp8_2d+rebase"]
    seeds = re.findall(r"-seed(.): started", second)
    assert seeds == ["0", "0", "1", "1"], "seed by seed"

    status, third = study(*command, "--", "--training.steps=3")
    assert status == 0, third
    assert "4 runs, 3 finished already, 1 at a time" in third and "4 finished, 0 failed, 0 stopped" in third
    assert [row["seeds"] for row in rows_of(out / "table.csv")] == ["2", "2"]

    lines = calls.read_text().splitlines()
    assert len(lines) == 6 and "--training.steps=3" in lines[-1] and "--debug.seed=1" in lines[-1]
    assert "--model.converters=" in lines[0] and "--model.converters=" not in lines[-1]
    assert "--quantize.grouped_mm.mx.recipe_name=mxfp8_2d --quantize.linear.mx.recipe_name=mxfp8_2d" in lines[-1]
    assert "--quantize.grouped_mm.mx.hopper_rebase --quantize.linear.mx.hopper_rebase" in lines[-1]
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
    args = converge.parse_arguments(["train_configs/debug_llama4.toml", "--out", str(tmp_path), "--jobs", "2"])
    run = converge.StudyRun(recipe="bf16", seed=0, folder=tmp_path / "bf16-seed0")
    given = [converge.environment_of(run, args, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert given == [*expected, expected[0]]


def test_converge_compares_all_finished_runs_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those of earlier commands too, with the first recipe of this one as the baseline."""
    for name in ("mxfp8-seed10", "mxfp8-seed2", "bf16-seed2", "bf16+repeat-seed2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "finished.json").write_text('{"seconds": 1.0}')
    for name, cut in (("bf16-seed3", ""), ("bf16-seed4", '{"sec'), ("bf16-seed5", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "finished.json").write_text(cut)  # not finished
    (tmp_path / "bf16-seed6").mkdir()
    ran = []
    monkeypatch.setattr(converge.compare_runs, "main", ran.append)

    def compared(*recipes: str) -> None:
        options = ["--out", str(tmp_path), "--margin", "0.01", "--window", "0.2"]
        converge.compare(converge.parse_arguments(["x.toml", "--recipes", *recipes, *options]))

    compared("bf16", "mxfp8")
    names = ["bf16-seed2", "mxfp8-seed2", "mxfp8-seed10", "bf16+repeat-seed2"]
    folders = [str(tmp_path / name) for name in names]
    assert ran[0] == [*folders, "--out", str(tmp_path), "--window", "0.2", "--margin", "0.01"]
    compared("mxfp8_2d", "mxfp8")
    assert len(ran) == 1
    assert capsys.readouterr().out == "nothing to compare with: no run of mxfp8_2d is finished\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["none.toml"], "none.toml is no file"),
        (["train_configs/debug_llama4.toml", "--recipes", "fp4"], "unknown recipe 'fp4'"),
        (
            ["train_configs/debug_llama4.toml", "--recipes", "mxfp8+again"],
            "each once, are async, dispatch, experts, graph, linears, rebase, repeat",
        ),
        (["train_configs/debug_llama4.toml", "--recipes", "mxfp8+linears+dispatch"], "linears dispatch nothing"),
        (["train_configs/debug_llama4.toml", "--recipes", "bf16+experts"], "unknown run 'bf16+experts'"),
        (["train_configs/debug_llama4.toml", "--recipes", "bf16", "float8"], "unknown recipe 'float8'"),
        (["train_configs/debug_llama4.toml", "--recipes", "bf16+async"], "async cannot be trained with 0.2.2"),
        (["linears.toml", "--recipes", "mxfp8+experts"], "mxfp8+experts needs quantize.grouped_mm.mx"),
        (["train_configs/debug_llama4.toml", "--recipes", "bf16+repeat+repeat"], "unknown run 'bf16+repeat+repeat'"),
        (["plain.toml", "--recipes", "bf16", "mxfp8"], "mxfp8 needs quantize.grouped_mm.mx or quantize.linear.mx"),
        (["train_configs/debug_llama4.toml", "--out", "pyproject.toml/study"], "pyproject.toml"),
        (["train_configs/debug_llama4.toml", "--seeds", "0", "1", "0"], "--seeds has 0 twice"),
        (["train_configs/debug_llama4.toml", "--recipes", "bf16", "mxfp8", "bf16"], "--recipes has bf16 twice"),
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
    refused = call("converge", "train_configs/debug_llama4.toml", "--out", tmp_path, *own, *flags)
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
def test_converge_says_after_ctrl_c_how_to_go_on(tmp_path: Path, stub: dict[str, str]) -> None:
    command = [sys.executable, "scripts/study/converge.py", "train_configs/debug_llama4.toml", "--out"]
    command.append(str(tmp_path / "out"))
    environment = os.environ | stub | {"STUB_SECONDS": "600"}
    study = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for line in study.stdout:
        if b"started" in line:
            study.send_signal(signal.SIGINT)
            break
    rest = study.communicate(timeout=120)[0].decode()
    assert study.returncode == 3 and "bf16-seed0: stopped" in rest
    assert rest.splitlines()[-1] == "the same command continues the study"
