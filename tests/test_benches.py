"""The benchmarks of kernels: how times are taken, what is compared before, what a run leaves behind."""

import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from script_calls import rows_of

from scripts.bench import bench, bench_grouped_mm, bench_host
from scripts.bench.problems import SMALL_EXPERT_SHAPES
from titan_mxfp8.backends import plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS

SMALL = ["--device", "cpu", "--quick", "--turns", "1", "--seconds", "0"]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bench.Bench, list[str], list[list[float]]]:
    """A bench of two turns whose calls are letters; the letters of the blocks it ran; the blocks' times, to be set."""
    ran: list[str] = []
    times: list[list[float]] = []

    def block(self: bench.Bench, call: str, count: int) -> list[float]:
        if count <= 3:  # to see how many calls fill a block
            return [0.0]
        ran.append(call)
        return times.pop(0)

    monkeypatch.setattr(bench.Bench, "_block", block)
    args = Namespace(out=tmp_path, device="cpu", backend="auto", repeats=20, turns=2, seconds=0)
    return bench.Bench("x", args), ran, times


def test_baseline_and_ours_take_turns_and_half_a_block_does_not_count(scripted, tmp_path: Path) -> None:
    measured, ran, times = scripted
    thrown_away = [[1.0, 1.0]] * 3
    times += thrown_away
    times += [[500, 500, 90, 90], [70, 50, 30, 30], [9.0, 9.0], [500, 500, 40, 40], [500, 500, 20, 20], [5.0, 5.0]]
    work = {"flops": 5e7, "moved": 5e4}
    entries = [bench.Entry(key=measured.key(what=what), call=what, **work) for what in ("ours", "other")]
    measured.compare(entries, "bf16")
    assert ran == ["bf16", "ours", "other"] * 3, "a run's first turn is thrown away"
    row, other = rows_of(tmp_path / "data.csv")
    # ratios are those of a turn: 90 / 30 and 40 / 20
    assert [float(row[name]) for name in ("x", "x_min", "x_max", "baseline_us")] == [2.5, 2, 3, 65]
    assert [float(row[name]) for name in ("p20_us", "p50_us", "p80_us", "repeats")] == [20, 25, 30, 4]
    assert [float(row[name]) for name in ("tflops", "gb_per_s")] == [2, 2]
    assert [float(other[name]) for name in ("x", "x_min", "x_max", "baseline_us")] == [9, 8, 10, 65]
    times += [[50.0, 50.0]] * 5
    measured.compare([bench.Entry(key=measured.key(what="second"), call="ours")], "bf16")
    assert len(ran) == 13, "later ones once"
    measured.compare([bench.Entry(key=measured.key(what="third"), call="ours")])
    assert len(ran) == 14, "without a baseline there is one block"


def test_the_largest_error_is_that_of_the_worst_rows() -> None:
    ref = torch.ones(20000, 4)
    out = ref.clone()
    out[9000:9100] += 0.5
    assert bench.largest_error(out, ref) == pytest.approx((0.25 * 100 / 8192) ** 0.5)
    out[19000, 2] = torch.nan
    assert math.isnan(bench.largest_error(out, ref))


def test_a_block_is_long_enough_and_has_enough_calls(monkeypatch, tmp_path: Path) -> None:
    now = [0.0]

    def lasts(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(bench, "time", clock)
    args = Namespace(out=tmp_path, device="cpu", backend="auto", repeats=20, turns=3, seconds=0.05)
    measured = bench.Bench("x", args)
    measured.compare([bench.Entry(key=measured.key(what="slow"), call=lambda: lasts(0.01))])
    measured.compare([bench.Entry(key=measured.key(what="fast"), call=lambda: lasts(0.0005))])
    slow, fast = rows_of(tmp_path / "data.csv")
    assert (slow["p50_us"], slow["repeats"]) == ("10000.0", "20") and int(fast["repeats"]) == pytest.approx(50, abs=1)


def test_bench_grouped_mm_compares_times_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    arguments = [*SMALL, "--shapes", "96,64,96,3", "--out", str(tmp_path), "--recipes", "mxfp8_2d_rebased", "mxfp8"]
    bench_grouped_mm.main(arguments)
    rows = rows_of(tmp_path / "data.csv")
    controls = ["torch bf16", "torch bf16, compiled", "bf16"]
    assert [row["recipe"] for row in rows] == [*controls, "mxfp8_2d_rebased", "mxfp8"]
    assert [row["control"] for row in rows] == ["True"] * 3 + ["False"] * 2
    for row in rows:
        assert float(row["x_min"]) <= float(row["x"]) <= float(row["x_max"]) and int(row["repeats"]) >= 4
        assert float(row["tflops"]) == pytest.approx(6 * 96 * 64 * 96 / float(row["p50_us"]) / 1e6, abs=1e-4)
    before = (tmp_path / "data.csv").read_text()
    bench_grouped_mm.main(arguments)
    assert (tmp_path / "data.csv").read_text() == before, "nothing was measured twice"

    monkeypatch.setitem(bench_grouped_mm.MAX_ERROR, True, 1e-6)
    with pytest.raises(SystemExit, match=r"mxfp8: y is off by 0.0\d+ from bf16's, more than 1e-06"):
        bench_grouped_mm.main([*SMALL, "--shapes", "96,64,96,3", "--recipes", "mxfp8", "--out", str(tmp_path / "new")])
    env = json.loads((tmp_path / "env.json").read_text())
    (tmp_path / "env.json").write_text(json.dumps(env | {"commit": "another"}))
    with pytest.raises(SystemExit, match="holds a run with commit another, and this one has"):
        bench_grouped_mm.main(arguments)


def test_bench_grouped_mm_lists_what_matters_first() -> None:
    jobs = list(bench_grouped_mm.jobs(None, bench_grouped_mm.RECIPES))
    assert [(job.shape.name, job.spread) for job in jobs[:3]] == [
        ("llama4_g8", "balanced"), ("dsv3_g8", "balanced"), ("dsv3_16b", "zipf"),
    ]  # fmt: skip
    assert {job.shape.groups for job in jobs} == {1, 2, 4, 8, 64}
    assert all("bf16" in job.ways for job in jobs), "every table has its control"
    jobs = list(bench_grouped_mm.scaling(SMALL_EXPERT_SHAPES, ("bf16",)))
    assert [job.shape.m for job in jobs[:9]] == [2**18 >> halvings for halvings in range(9)]
    assert [job.shape.groups for job in jobs[9:14]] == [1, 4, 16, 64, 256]
    assert [job.spread for job in jobs[14:]] == ["zipf", "empties", "one"]


def test_passes_of_a_recipe_are_timed_alone(tmp_path: Path, monkeypatch) -> None:
    """On operands as Hopper wants them, which reference.py's kernels can make and multiply too."""
    hopper = CLUSTER_GPUS["H200"]
    monkeypatch.setattr(bench_grouped_mm, "plan", lambda recipe, backend, device: plan_on(recipe, "auto", hopper))
    recipes = ["mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_2d_rebased"]
    arguments = [*SMALL, "--passes", "--shapes", "300,128,256,3", "--out", str(tmp_path), "--recipes", *recipes]
    bench_grouped_mm.main(arguments)
    rows = {(row["recipe"], row["what"]): row for row in rows_of(tmp_path / "data.csv")}
    gemms = ["forward", "dgrad", "wgrad"]
    passes = [*gemms, "quantise x", "quantise dy", "quantise w", "quantise w again"]
    ceilings = [what for recipe, what in rows if recipe == "torch"]
    assert ceilings == ["copy", "bf16 matmul", "FP8 matmul"], "which the roofline takes"
    assert [what for recipe, what in rows if recipe == "bf16"] == gemms
    assert [what for recipe, what in rows if recipe == "mxfp8_2d_rebased"] == passes
    # of 300 x 256 tokens in bf16: read, and written as FP8 rows with a scale for 32; what wgrad takes is x itself
    row = rows["mxfp8_2d_wgrad_bf16", "quantise x"]
    moved = float(row["gb_per_s"]) * float(row["p50_us"]) * 1e3
    assert moved == pytest.approx(300 * 256 * (2 + 1 + 1 / 32), rel=0.05)
    assert rows["bf16", "wgrad"]["control"] == "True" and float(rows["mxfp8_2d", "forward"]["x"]) > 0
    monkeypatch.setitem(bench_grouped_mm.MAX_ERROR, True, 1e-6)
    with pytest.raises(SystemExit, match="300,128,256,3 forward mxfp8_2d: y is off by"):
        bench_grouped_mm.main([*arguments, "--out", str(tmp_path / "new")])


@pytest.mark.nightly
def test_bench_host_times_each_layer_eager_and_compiled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench_host.Bench, "parts", 1)
    bench_host.main([*SMALL, "--recipes", "mxfp8_2d", "--layers", "1", "--out", str(tmp_path)])
    rows = [(row["what"], row["mode"], row["recipe"], row["control"]) for row in rows_of(tmp_path / "data.csv")]
    recipes = ("bf16", "True"), ("mxfp8_2d", "False")
    assert rows == [(w, m, *recipe) for w in ("linear", "grouped") for m in ("eager", "compiled") for recipe in recipes]


def test_what_does_not_fit_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(job: bench_grouped_mm.Job, device: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench_grouped_mm, "make_problem", full)
    bench_grouped_mm.main([*SMALL, "--shapes", "96,64,96,3", "--out", str(tmp_path)])
    assert "96,64,96,3: left out, it does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "llama5"], "is no shape: M,N,K,G such as"),
        (["--shapes", "1,2,3"], "is no shape"),
        (["--turns", "0"], "--turns is at least 1"),
        (["--recipes", "fp4"], "unknown recipe 'fp4'"),
    ],
)
def test_flags_are_checked(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        bench_grouped_mm.main(["--device", "cpu", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
