"""bench_training.py: its tables, turns and limits, of runs that are stubs."""

import json
import math
import platform
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from script_calls import ROOT, call, write_run

from scripts.bench import bench_training, peers, roofline
from scripts.result_files import read_rows
from scripts.study import converge, runs, tables
from scripts.study.starter import Starter
from titan_mxfp8.recipe import GROUPED_MM
from titan_mxfp8.tools.dry_run import parse_config

Launched = list[list[str]]
Losses = dict[str, tuple[float, float, float]]


@pytest.fixture
def losses() -> Losses:
    """Of runs that ``launched`` logs, by their folders' names; other runs stay at 2."""
    return {}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, losses: Losses) -> Launched:
    """What bench_training.py launches, in order. Instead of training, a run of 3 steps is logged: bf16 at 100 tokens/s,
    its last step at 50, in its second repeat at 125, bf16+dispatch at 115, all others at 200."""
    speeds = {"bf16": (100, 100, 50), "bf16-repeat2": (125, 125, 125), "bf16+dispatch": (115, 115, 115)}
    programs: Launched = []

    def start(starter: Starter, program: list[str], log: Path) -> SimpleNamespace:
        programs.append(program)
        name = log.parent.name
        write_run(log.parent, losses.get(name, (2.0,) * 3), speeds=speeds.get(name, (200,) * 3))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(Starter, "start", start)
    return programs


def bench(out: Path, *arguments: object, warmup: int = 0) -> str:
    """What the script says of runs of 3 steps on one GPU."""
    return call("bench_training", "--ngpu", 1, "--steps", 3, "--warmup", warmup, "--out", out, *arguments)


def test_minimal_async_ep_has_a_config_of_its_own(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_training, "TITAN03", True)
    bench(tmp_path, "--config", "full_ac", "--runs", "bf16", "bf16+async", "grouped+dispatch:mxfp8")
    chosen = [flag for flags in launched for flag in flags if flag.startswith("--config=")]
    assert chosen == ["--config=full_ac", "--config=full_ac_minimal_async_ep", "--config=full_ac"]


def test_bench_training_tables_its_runs_and_does_none_twice(tmp_path: Path, launched: Launched) -> None:
    again = partial(bench, tmp_path, "--runs", "bf16", "grouped:mxfp8_2d", warmup=1)
    for _ in range(2):
        assert "| grouped:mxfp8_2d |" in again()
    assert len(launched) == 2
    assert "--model.converters=quantize.grouped_mm.mx --quantize.grouped_mm.mx.recipe" in " ".join(launched[1])
    rows = read_rows(tmp_path / "table.csv")
    assert [row["run"] for row in rows] == ["bf16", "grouped:mxfp8_2d"]
    assert [rows[1][key] for key in ("tokens/s (median, per GPU)", "memory GiB", "x")] == ["200", "4.0", "2.667"]
    for unknown in ("bf16+rebase", "bf16+dispatch:mxfp8", "both+dispatch:bf16", "linears+dispatch", "both+fast"):
        assert f"unknown run '{unknown}'" in again(unknown)
    assert "async cannot be trained with 0.2.2" in again("bf16+async")
    flags = bench_training.flags_of("both+rebase+dispatch:mxfp8_2d")
    assert "--quantize.grouped_mm.mx.dispatch=auto" in flags and "--quantize.linear.mx.hopper_rebase" in flags
    assert "unknown recipe 'fp8'" in again("both:fp8")
    assert "--runs has bf16 twice: --repeats makes every run several times" in again("bf16"), "one run, of two repeats"

    again("both+rebase:mxfp8", "--flavors", "a_2layers", "b")
    flavors = [flag.partition("=")[2] for flags in launched[2:] for flag in flags if "--model.flavor=" in flag]
    assert flavors == ["a_2layers"] * 3 + ["b"] * 3
    assert "--quantize.linear.mx.hopper_rebase" in launched[-1]
    assert not (tmp_path / "layers.csv").exists()
    rows = read_rows(tmp_path / "table.csv")
    assert [(row["flavor"], row["run"]) for row in rows[2:4]] == [("a_2layers", "both+rebase:mxfp8"), ("b", "bf16")]


def test_bench_training_takes_no_run_of_another_commit_or_of_other_flags(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEASURED_COMMIT", "a")
    bench(tmp_path, "--runs", "bf16")
    other_flags = bench(tmp_path, "--runs", "bf16", "--", "--training.seq_len=8")
    assert "with flags none, and this one has --training.seq_len=8: give another --out" in other_flags
    monkeypatch.setenv("MEASURED_COMMIT", "b")
    assert f"{tmp_path} holds a run with commit a, and this one has b" in bench(tmp_path, "--runs", "bf16")
    assert len(launched) == 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_bench_training_ends_with_the_cause_where_its_first_run_fails(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``max() arg is an empty sequence`` hid it: the table had a row for the run."""

    class Failed:
        returncode = None

        def poll(self) -> int | None:
            return self.returncode

        def wait(self, timeout: float | None = None) -> None:
            if timeout and interrupted:
                raise KeyboardInterrupt
            self.returncode = 1

        terminate = wait

    def start(starter: Starter, program: list[str], log: Path) -> Failed:
        log.write_text("Traceback (most recent call last):\nRuntimeError: mine\n")
        return Failed()

    monkeypatch.setattr(Starter, "start", start)
    cause = "interrupted; the same" if interrupted else "run bf16 failed, RuntimeError: mine"
    assert call("bench_training", "--out", tmp_path, "--runs", "bf16").startswith(f"bench_training: {cause}")


def test_torchtitans_fp8_is_a_run_beside_ours_where_torchao_is(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "grouped+rebase+dispatch:mxfp8_2d"
    again = partial(bench, tmp_path, "--runs", "bf16", "grouped:float8", "both:float8", ours)
    monkeypatch.setattr(peers, "installed_version", lambda module: "0.17.0")
    said = again()
    assert said.startswith("bench_training: float8 takes torchao 0.16.0, here is 0.17.0: pip install --no-deps")
    assert launched == [], "it says so before it starts anything"
    for module in (peers, bench_training):
        monkeypatch.setattr(module, "installed_version", lambda module: peers.TORCHAO)
    monkeypatch.setitem(sys.modules, peers.FLOAT8_MODULE, None)
    assert "float8: torchao 0.16.0 cannot be imported here: " in again() and launched == []
    monkeypatch.setitem(sys.modules, peers.FLOAT8_MODULE, ModuleType(peers.FLOAT8_MODULE))
    assert "| both:float8 |" in again()
    assert json.loads((tmp_path / "env.json").read_text())["torchao"] == "0.16.0"
    own = parse_config(str(ROOT / "train_configs" / "deepseek_v3_16b_1x8.toml"), launched[2])
    assert own.model.converters == ["quantize.grouped_mm.float8", "quantize.linear.float8"]
    assert own.quantize.grouped_mm.float8.fqns == ["moe.experts"], "not the shared experts"
    assert own.quantize.linear.float8.recipe_name == "rowwise"
    assert own.quantize.linear.float8.filter_fqns == own.quantize.linear.mx.filter_fqns, "the linears of ours"
    assert "--model.converters=quantize.grouped_mm.float8" in launched[1]
    for unknown in ("bf16:float8", "grouped+dispatch:float8", "grouped+graph:float8"):
        assert f"unknown run '{unknown}'" in again(unknown)
    monkeypatch.setattr(bench_training, "TITAN03", True)
    assert "unknown run 'grouped:float8'" in again()

    monkeypatch.setattr(tables, "env_of", lambda path: {})
    (plain,) = tables.end_to_end(tmp_path / "table.csv")
    assert plain["`mxfp8_2d_rebased`"] == "2.00" and "TorchTitan's FP8" not in plain
    (beside,) = tables.end_to_end(tmp_path / "table.csv", recipes="float8,mxfp8_2d_rebased")
    assert beside["model"] == ", experts alone, `dispatch`" and beside["TorchTitan's FP8"] == "2.00"
    assert [row["run"] for _, _, row, _ in roofline.trainings(tmp_path)] == [ours], "of ours alone"


def test_a_run_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains, fails = Starter.start, {"linears", "grouped-repeat2"}

    def start(starter: Starter, program: list[str], log: Path) -> object:
        done = trains(starter, program, log)
        if log.parent.name in fails:
            next(log.parent.rglob("events.*")).unlink()
            log.write_text("Traceback (most recent call last):\nRuntimeError: mine\n")
            return SimpleNamespace(poll=lambda: 1, returncode=1)
        return done

    monkeypatch.setattr(Starter, "start", start)
    arguments = "--repeats", 2, "--runs", "bf16", "linears", "grouped", "both"
    said = bench(tmp_path, *arguments)
    assert "linears: no x, as run linears failed, RuntimeError: mine\n" in said
    assert f"run grouped-repeat2 failed, RuntimeError: mine\n{tmp_path} has" in said
    assert len(launched) == 7, "what failed is not tried again in this call"
    rows = {row["run"]: row for row in read_rows(tmp_path / "table.csv")}
    assert [row["x"] for row in rows.values()] == ["1.0", "", "2.0", "1.8"]
    assert rows["linears"]["no x, as"] == "run linears failed, RuntimeError: mine"
    assert rows["grouped"]["failed"] == "run grouped-repeat2 failed, RuntimeError: mine"
    fails.clear()
    assert "no x, as" not in bench(tmp_path, *arguments)
    assert len(launched) == 10, "the same command tries it again"


def test_the_control_of_dispatch_is_that_of_converge_and_is_told_from_the_baseline(tmp_path: Path, launched) -> None:
    assert bench_training.flags_of("bf16+graph") == ["--model.converters=", "--training.cuda_graph=on"]
    of_titan03 = bench_training.flags_of_titan03("both+rebase+dispatch+graph:mxfp8_2d")
    experts = 'titan_mxfp8.titan03.experts={"recipe": "mxfp8_2d_rebased", "dispatch": "auto"}'
    linears = 'titan_mxfp8.titan03.linears={"recipe": "mxfp8_2d_rebased"}'
    assert of_titan03 == ["--override.imports", experts, linears, "--training.no_disable_cuda_graphs"]
    assert bench_training.flags_of_titan03("bf16") == ["--training.disable_cuda_graphs"]
    flags = bench_training.flags_of("bf16+dispatch")
    assert flags == converge.flags_of(converge.StudyRun(recipe="bf16+dispatch", seed=0, folder=tmp_path), Path(), 0)[3:]
    config = parse_config(str(ROOT / "train_configs" / "debug_deepseek_v3.toml"), flags)  # refuses bad combinations
    assert config.model.converters == [GROUPED_MM] and config.quantize.grouped_mm.mx.dispatch == "auto"
    assert config.quantize.grouped_mm.mx.recipe_name == "bf16"

    names = "bf16", "both:mxfp8_2d", "bf16+dispatch", "both+dispatch:mxfp8_2d"
    bench(tmp_path, "--runs", *names)
    plain, sent = tables.end_to_end(tmp_path / "table.csv")
    assert plain["bf16, ours"] == "" and plain["`mxfp8_2d`"] == "2.00"
    assert sent["model"].endswith("`dispatch`") and (sent["bf16, ours"], sent["`mxfp8_2d`"]) == ("1.15", "2.00")
    assert sent["memory"] == "1.00", "of the control and of mxfp8_2d"
    assert tables.recipe_of("grouped+dispatch:bf16") == tables.OURS, "as it could be written before"
    assert [row["run"] for _, _, row, _ in roofline.trainings(tmp_path)] == list(names[1:]), "the control among them"
    bench(tmp_path, "--runs", *names, "linears:mxfp8_2d", "grouped+dispatch:mxfp8_2d")
    found = tables.end_to_end(tmp_path / "table.csv")
    models = [(row["model"].removeprefix("Llama4 17Bx16E, 2 layers"), row["bf16, ours"]) for row in found]
    both = [("", ""), (", linears alone", ""), (", `dispatch`", "1.15"), (", experts alone, `dispatch`", "1.15")]
    assert models == both, "a control beside what it controls"
    bench(tmp_path, "--runs", *names[::2])
    (alone,) = tables.end_to_end(tmp_path / "table.csv")
    assert (alone["bf16, ours"], alone["`mxfp8_2d`"], alone["memory"]) == ("1.15", "", "1.00")


def test_bench_training_tells_the_time_of_a_layer_from_that_of_the_rest() -> None:
    def run(name: str, us_per_token: float) -> list[runs.Run]:
        tps = {1: 1.0} | dict.fromkeys(range(2, 9), 1e6 / us_per_token)
        return [runs.Run(name=name, loss={8: 1.0}, tps=tps, memory={8: 1.0}, config={})]

    speeds = {"m_2layers": {"bf16": 20, "both": 18}, "m_4layers": {"bf16": 30, "both": 26, "linears": 28}}
    bench = {(flavor, name): run(name, us) for flavor, of_it in speeds.items() for name, us in of_it.items()}

    def of(repeats: dict[tuple[str, str], list[runs.Run]], *flags: str) -> bench_training.Bench:
        bench = bench_training.Bench(bench_training.parse_arguments(["--warmup", "1", "--ngpu", "1", *flags]))
        bench.runs = repeats
        return bench

    assert [row["x"] for row in of(bench).table()] == [1.0, 1.111, 1.0, 1.154, 1.071]
    figures = {"bf16": (5.0, 1.0), "both": (4.0, 1.25)}
    expected = [{"model": "m", "run": name, "us per token and layer": us, "x": x} for name, (us, x) in figures.items()]
    assert of(bench).layer_table() == expected
    others = {("other_8layers", "bf16"): run("bf16", 90), ("m", "bf16"): run("bf16", 9)}
    assert of(bench | others).layer_table() == expected, "no differences between models"
    assert of({key: run for key, run in bench.items() if key[0] == "m_4layers"}).layer_table() == []
    first_loss = bench["m_2layers", "both"][0].loss
    first_loss[8] = 1.02
    assert of(bench).layer_table() == [expected[0], expected[1] | {"x": None}]
    assert of(bench, "--loss-limit", "0.03").layer_table() == expected
    first_loss[8] = 1.0
    del bench["m_4layers", "bf16"]
    assert of(bench).layer_table() == [expected[1] | {"x": None}]


def test_bench_training_takes_turns_and_shows_what_strays(tmp_path: Path, launched: Launched) -> None:
    bench(tmp_path, "--repeats", 2, "--runs", "bf16", "both:mxfp8_2d_rebased")
    folders = [next(flag for flag in flags if "dump_folder" in flag).rpartition("/")[2] for flags in launched]
    names = "bf16", "both-mxfp8_2d_rebased"
    assert folders == [f"{name}{turn}" for turn in ("", "-repeat2") for name in names]
    assert "--quantize.linear.mx.recipe_name=mxfp8_2d_rebased" in launched[1]
    bf16, ours = read_rows(tmp_path / "table.csv")
    # the means are those of all tokens over all time: 75 and 125 in bf16's repeats
    assert (bf16["tokens/s (median, per GPU)"], bf16["tokens/s (mean)"], bf16["repeats"]) == ("112", "100", "2")
    # of 50, 100 and 100 p20 is 70 and p80 100; of the other repeat both are 125
    assert [row[f"tokens/s ({name})"] for row in (bf16, ours) for name in ("p20", "p80")] == ["98", "112", "200", "200"]
    assert (bf16["slowest step / median"], ours["slowest step / median"]) == ("2.0", "1.0")
    assert (bf16["tokens/s, range"], ours["x"], ours["x, range"]) == ("100 to 125", "1.8", "1.600 to 2.000")
    assert [row["repeat"] for row in read_rows(tmp_path / "data.csv")][:6] == ["1"] * 3 + ["2"] * 3
    assert "--repeats is at least 1, got 0" in call("bench_training", "--repeats", 0)
    for steps in (["--training.steps=2"], ["--training.steps", "2"]):
        assert "--training.steps behind -- would override --steps" in bench(tmp_path, "--", *steps)


def test_bench_training_gives_no_x_to_a_run_that_computes_something_else(
    tmp_path: Path, launched: Launched, losses: Losses
) -> None:
    losses |= {"bf16": (2.0, 1.5, 1.0), "grouped": (2.009, 1.0, 1.0), "linears-repeat2": (1.985, 1.5, 1.0)}
    losses |= {"both": (2.0, 1.5, math.inf), "both-mxfp8_2d": (math.nan, math.nan, math.nan)}
    names = "bf16", "grouped", "linears", "both", "both:mxfp8_2d"
    twice = "--repeats", 2, "--runs"
    said = bench(tmp_path, *twice, *names, warmup=1)
    assert len(launched) == 10 and all("--debug.seed=0" in flags for flags in launched), "one seed, and all have run"
    reasons = {
        "linears": "its first loss is 1.9850 and that of bf16 2.0000, further apart than 0.01: it computes something "
        "else, or started from other weights",
        "both": "its loss at step 3 is inf",
        "both:mxfp8_2d": "its loss at step 1 is nan",
    }
    lines = [f"{name}: no x, as {reason}" for name, reason in reasons.items()]
    assert said == "\n".join([f"bench_training: {lines[0]}", *lines[1:], f"{tmp_path} has all that was measured"])
    rows = {row["run"]: row for row in read_rows(tmp_path / "table.csv")}
    gains = [("1.0", "1.000 to 1.000"), ("2.133", "1.600 to 2.667"), *[("", "")] * 3]
    assert [(row["x"], row["x, range"]) for row in rows.values()] == gains
    assert {name: row["no x, as"] for name, row in rows.items() if row["no x, as"]} == reasons
    assert rows["both"]["tokens/s (median, per GPU)"] == "200" and len(read_rows(tmp_path / "data.csv")) == 30
    (shown,) = tables.end_to_end(tmp_path / "table.csv", recipes="mxfp8,mxfp8_2d")
    assert shown["model"] == "Llama4 17Bx16E, 2 layers, experts alone"
    assert (shown["`mxfp8`"], shown["`mxfp8_2d`"]) == ("2.13 (1.60-2.67)", "")
    assert [row["run"] for _, _, row, _ in roofline.trainings(tmp_path)] == ["grouped"]
    wider = bench(tmp_path, "--loss-limit", 0.02, *twice, *names[:3], warmup=1)
    assert "no x, as" not in wider, "nor a column of it"

    losses |= {"bf16": (2.0, math.nan, 1.0)}
    said = bench(tmp_path / "baseline", *twice, *names[:2], warmup=1)
    assert "bf16: no x, as its loss at step 2 is nan" in said
    assert "grouped: no x, as of its baseline, bf16, its loss at step 2 is nan" in said
    assert [row["x"] for row in read_rows(tmp_path / "baseline" / "table.csv")] == ["", ""]
    assert tables.end_to_end(tmp_path / "baseline" / "table.csv") == []


@pytest.mark.integration
def test_the_next_run_waits_for_its_arguments_until_the_script_ends(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Starter(1, tmp_path / "runs", program="platform") as starter:
        assert starter.start(["terse", "nonaliased"], tmp_path / "log").wait(100) == 0
        signal.raise_signal(signal.SIGTERM)
    assert (tmp_path / "log").read_text().strip().endswith(platform.platform(aliased=False, terse=True))
    assert not list((tmp_path / "runs").iterdir())
