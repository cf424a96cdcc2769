"""The benchmarks of kernels: how times are taken, what is compared before, what a run leaves behind."""

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.bench import bench, bench_grouped_mm, bench_kernels
from scripts.result_files import write_results
from scripts.study import tables
from titan_mxfp8.backends import plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS

ROOT = Path(__file__).parent.parent
SMALL = ["--device", "cpu", "--quick", "--turns", "1", "--seconds", "0"]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "data.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bench.Bench, list[str], list[list[float]]]:
    """A bench of two turns whose calls are letters; the letters of the blocks it ran; the blocks' times, to be set."""
    ran: list[str] = []
    times: list[list[float]] = []

    def block(self: bench.Bench, call: str, count: int, meter: bench.Meter | None = None) -> bench.Block:
        if count <= 3:  # to see how many calls fill a block
            return bench.Block(us=[0.0])
        ran.append(call)
        return bench.Block(us=times.pop(0))

    monkeypatch.setattr(bench.Bench, "_block", block)
    args = Namespace(out=tmp_path, device="cpu", backend="auto", quick=False, turns=2, seconds=0, limit=1e9)
    return bench.Bench("x", args), ran, times


def test_baseline_and_ours_take_turns_and_half_a_block_does_not_count(scripted, tmp_path: Path) -> None:
    measured, ran, times = scripted
    thrown_away = [[1.0, 1.0]] * 3
    times += thrown_away
    times += [[500, 500, 90, 90], [70, 50, 30, 30], [9.0, 9.0], [500, 500, 40, 40], [500, 500, 20, 20], [5.0, 5.0]]
    work = bench.Work(flops=5e7, moved=5e4)
    entries = [bench.Entry(key=measured.key(what=what), call=what, work=work) for what in ("ours", "other")]
    measured.compare(entries, "bf16")
    assert ran == ["bf16", "ours", "other"] * 3, "a run's first turn is thrown away"
    row, other = rows_of(tmp_path)
    # ratios are those of a turn: 90 / 30 and 40 / 20
    assert [float(row[name]) for name in ("x", "x_min", "x_max", "baseline_us")] == [2.5, 2, 3, 65]
    assert [float(row[name]) for name in ("p20_us", "p50_us", "p80_us", "repeats")] == [20, 25, 30, 4]
    assert [float(row[name]) for name in ("tflops", "gb_per_s")] == [2, 2]
    assert [float(row[name]) for name in ("block_ms", "dropped_ms")] == [0.6, 0.6]
    assert [float(other[name]) for name in ("x", "x_min", "x_max", "baseline_us")] == [9, 8, 10, 65]
    times += [[50.0, 50.0]] * 5
    measured.compare([bench.Entry(key=measured.key(what="second"), call="ours")], "bf16")
    assert len(ran) == 13, "later ones once"
    measured.compare([bench.Entry(key=measured.key(what="third"), call="ours")])
    assert len(ran) == 14, "without a baseline there is one block"


def test_a_block_is_long_enough_and_has_enough_calls(monkeypatch, tmp_path: Path) -> None:
    now = [0.0]

    def lasts(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(bench, "time", clock)
    args = Namespace(out=tmp_path, device="cpu", backend="auto", quick=False, turns=3, seconds=0.05, limit=1e9)
    measured = bench.Bench("x", args)
    measured.compare([bench.Entry(key=measured.key(what="slow"), call=lambda: lasts(0.01))])
    measured.compare([bench.Entry(key=measured.key(what="fast"), call=lambda: lasts(0.0005))])
    slow, fast = rows_of(tmp_path)
    assert (slow["p50_us"], slow["repeats"], slow["block_ms"], slow["dropped_ms"]) == (
        "10000.0",
        "20",
        "400.0",
        "200.0",
    )
    assert float(fast["block_ms"]) == pytest.approx(50, abs=1) and int(fast["repeats"]) == pytest.approx(50, abs=1)


class SlowGPU:
    """In place of a GPU, its clock and NVML: a call takes it 10 ms, and the host ``launch`` seconds to launch.

    It draws 300 W up to the eleventh call of a block of 20, which is the first that counts, 600 W from there to the end
    of the last one launched, and then 100 W.
    """

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, launch: float) -> None:
        self.launch, self.fails, self.now, self.done, self.calls, self.hot_since = launch, "", 0.0, 0.0, 0, 0.0
        self.perf_counter = self.monotonic = lambda: self.now
        self.nvmlInit = lambda: self.ask("init")
        self.nvmlDeviceGetHandleByUUID = lambda uuid: self.ask(f"handle of {uuid}")

    def ask(self, answer: object) -> object:
        self.now += 0.001  # which NVML takes
        if self.fails and self.fails in str(answer):
            raise self.NVMLError
        return answer

    def call(self) -> None:
        if self.calls % 20 == 10:
            self.hot_since = max(self.done, self.now)
        self.done, self.calls = max(self.done, self.now) + 0.01, self.calls + 1
        self.now += self.launch

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle of GPU-12ab"
        begun, done = min(self.now, self.hot_since), min(self.now, self.done)
        return self.ask(round(300e3 * begun + 600e3 * (done - begun) + 100e3 * (self.now - done)))

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle of GPU-12ab", self.NVML_CLOCK_SM)
        return self.ask(1980 if self.now < self.done else 1410)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", max(self.done, self.now))
        event.query = lambda: self.now >= event.at
        event.synchronize = lambda: setattr(self, "now", max(self.now, event.at))
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[SlowGPU], bench.Bench]:
    """A bench of blocks of 20 calls on a ``SlowGPU``."""

    def make(gpu: SlowGPU) -> bench.Bench:
        args = Namespace(out=tmp_path, device="cpu", backend="auto", quick=False, turns=2, seconds=0, limit=1e9)
        measured = bench.Bench("x", args)
        assert measured.meter is None, "of a CPU"
        monkeypatch.setattr(bench, "time", gpu)
        monkeypatch.setattr(torch.cuda, "Event", gpu.event)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
        measured.device, measured.cold, measured.sink = torch.device("cuda", 0), torch.ones(1), torch.empty(())
        measured.meter = bench.meter_of(measured.device)
        monkeypatch.setattr(measured, "_count", lambda call, turns: 20)
        return measured

    return make


@pytest.mark.parametrize("launch", [0.0, 0.005, 0.01])
def test_power_is_that_of_the_calls_that_count(launch: float, on_gpu, tmp_path: Path, monkeypatch, capsys) -> None:
    """Whether the GPU has all calls before it begins, or waits for each. Rows without power stand beside."""
    gpu = SlowGPU(launch)
    monkeypatch.setitem(sys.modules, "pynvml", gpu)
    measured = on_gpu(gpu)
    measured.rows = [{"what": "earlier", "p50_us": "5"}]
    entry = bench.Entry(key=measured.key(what="ours"), call=gpu.call, work=bench.Work(flops=1))
    measured.compare([entry])
    earlier, row = rows_of(tmp_path)
    assert [float(row[name]) for name in ("watts", "sm_mhz", "p50_us")] == [600, 1410, 10_000]
    assert "watts=600 sm_mhz=1410" in capsys.readouterr().out and earlier["watts"] == earlier["sm_mhz"] == ""


@pytest.mark.parametrize("fails", ["absent", "init", "GPU", "0", "1410"])
def test_without_nvml_there_is_no_power(fails: str, on_gpu, tmp_path: Path, monkeypatch) -> None:
    """Without its package, where it finds no driver or not this GPU, or where that tells no energy or clock."""
    gpu = SlowGPU(0.0)
    gpu.fails = fails
    monkeypatch.setitem(sys.modules, "pynvml", None if fails == "absent" else gpu)
    measured = on_gpu(gpu)
    measured.compare([bench.Entry(key=measured.key(what="ours"), call=gpu.call)])
    (row,) = rows_of(tmp_path)
    assert (row["watts"], row["sm_mhz"], float(row["p50_us"])) == ("", "", 10_000)


def test_power_is_the_median_of_turns(scripted, tmp_path: Path, monkeypatch) -> None:
    measured, _, _ = scripted
    measured.meter = lambda: None
    blocks = [bench.Block(us=[1.0, 1.0], watts=watts, sm_mhz=int(3 * watts)) for watts in (1, 1, 9, 400, 9, 600.3)]
    monkeypatch.setattr(measured, "_turns", lambda calls, turns, beside: [blocks[::2][-2:], blocks[1::2][-2:]])
    measured.compare([bench.Entry(key=measured.key(what="ours"), call="ours")], "bf16")
    (row,) = rows_of(tmp_path)
    assert (row["watts"], row["sm_mhz"]) == ("500.1", "1500.0")


def test_bench_grouped_mm_compares_times_and_goes_on(tmp_path: Path, monkeypatch, capsys) -> None:
    arguments = [*SMALL, "--shapes", "96,64,96,3", "--out", str(tmp_path), "--recipes", "mxfp8_2d_rebased", "mxfp8"]
    bench_grouped_mm.main([*arguments, "--limit", "0"])
    assert "5 rows left out" in capsys.readouterr().out and rows_of(tmp_path) == []
    bench_grouped_mm.main(arguments)
    rows = rows_of(tmp_path)
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


def test_bench_grouped_mm_lists_what_matters_first_and_leaves_out_what_cannot_run() -> None:
    args = SimpleNamespace(shapes=None, recipes=list(bench_grouped_mm.RECIPES), quick=False, scaling=False)
    jobs = list(bench_grouped_mm.jobs(args, rebases=True))
    assert [(job.shape.name, job.spread) for job in jobs[:3]] == [
        ("llama4_g8", "balanced"), ("dsv3_g8", "balanced"), ("llama4_g1", "balanced"),
    ]  # fmt: skip
    assert {job.shape.groups for job in jobs} == {1, 2, 4, 8, 64} and jobs[-1].held == 16
    assert all("bf16" in job.ways for job in jobs), "every table has its control"
    ways = {way for job in bench_grouped_mm.jobs(args, rebases=False) for way in job.ways}
    assert "mxfp8_2d" in ways and not any(way.endswith("_rebased") for way in ways)
    args.scaling = True
    jobs = [job for job in bench_grouped_mm.jobs(args, rebases=True) if job.shape.n == 1408]
    assert [job.shape.m for job in jobs[:9]] == [2**18 >> halvings for halvings in range(9)]
    assert [job.shape.groups for job in jobs[9:14]] == [1, 4, 16, 64, 256]
    assert [job.spread for job in jobs[14:]] == ["zipf", "empties", "one"]


def test_bench_kernels_times_each_pass_of_a_recipe(tmp_path: Path, monkeypatch) -> None:
    recipes = ["bf16", "mxfp8", "mxfp8_2d_wgrad_bf16", "mxfp8_2d_rebased"]
    arguments = [*SMALL, "--shapes", "96,64,128,3", "--out", str(tmp_path), "--recipes", *recipes]
    bench_kernels.main(arguments)
    rows = {(row["recipe"], row["what"]): row for row in rows_of(tmp_path)}
    gemms = ["forward", "dgrad", "wgrad"]
    passes = [*gemms, "quantise x", "quantise dy", "quantise w", "quantise w again", "requantise x"]
    assert [what for recipe, what in rows if recipe == "torch"] == list(bench.CEILINGS)
    assert [what for recipe, what in rows if recipe == "bf16"] == gemms
    assert [what for recipe, what in rows if recipe == "mxfp8_2d_rebased"] == passes
    # of 96 x 128 tokens in bf16: read, and written as FP8 rows with a scale for 32; what wgrad takes is x itself
    row = rows["mxfp8_2d_wgrad_bf16", "quantise x"]
    moved = float(row["gb_per_s"]) * float(row["p50_us"]) * 1e3
    assert moved == pytest.approx(96 * 128 * (2 + 1 + 1 / 32), rel=0.02)
    copy = rows["torch", "copy"]
    assert float(row["share"]) == pytest.approx(float(row["gb_per_s"]) / float(copy["gb_per_s"]), abs=1e-3)
    assert rows["bf16", "wgrad"]["mma_dtype"] == "bf16" and rows["bf16", "wgrad"]["control"] == "True"
    assert rows["mxfp8", "forward"]["mma_dtype"] == "fp32" and float(rows["mxfp8", "forward"]["x"]) > 0
    monkeypatch.setitem(bench_grouped_mm.MAX_ERROR, True, 1e-6)
    with pytest.raises(SystemExit, match="96,64,128,3 forward mxfp8: y is off by"):
        bench_kernels.main([*arguments, "--out", str(tmp_path / "new")])


def test_bench_kernels_takes_operands_as_hopper_wants_them(tmp_path: Path, monkeypatch) -> None:
    """Which reference.py's kernels can make and multiply too."""
    hopper = CLUSTER_GPUS["H200"]

    monkeypatch.setattr(bench_kernels, "plan", lambda recipe, backend, device: plan_on(recipe, "auto", hopper))
    recipes = ["mxfp8", "mxfp8_2d", "mxfp8_2d_rebased"]
    bench_kernels.main([*SMALL, "--shapes", "300,128,256,3", "--out", str(tmp_path), "--recipes", *recipes])
    rows = {(row["recipe"], row["what"]): row for row in rows_of(tmp_path) if row["recipe"] in recipes}
    assert len(rows) == 3 * 8
    multiplied = [[rows[recipe, gemm]["mma_dtype"] for gemm in ("forward", "dgrad", "wgrad")] for recipe in recipes]
    assert multiplied == [["bf16"] * 3, ["FP8", "FP8", "bf16"], ["FP8"] * 3]
    even = rows["mxfp8_2d", "forward"]
    assert all(1 <= float(even[name]) <= 4 for name in ("sums_a", "sums_b"))
    assert not rows["mxfp8_2d", "wgrad"]["sums_a"] and not rows["mxfp8_2d_rebased", "forward"]["sums_a"]
    fp8 = next(row for row in rows_of(tmp_path) if row["what"] == "FP8 matmul")
    assert float(even["share"]) == pytest.approx(float(even["tflops"]) / float(fp8["tflops"]), rel=0.1)


def test_what_does_not_fit_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(job: bench_grouped_mm.Job, device: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench_grouped_mm, "make_problem", full)
    bench_grouped_mm.main([*SMALL, "--shapes", "96,64,96,3", "--out", str(tmp_path)])
    assert "96,64,96,3 forward + backward: left out, it does not fit" in capsys.readouterr().out


def test_the_tables_of_a_folder_show_what_it_holds(tmp_path: Path) -> None:
    """Of a run that the limit cut off after the ceilings, and of one with a shape."""
    common = [*SMALL, "--recipes", "mxfp8_2d"]
    bench_kernels.main([*common, "--shapes", "96,64,96,3", "--out", str(tmp_path / "kernels"), "--limit", "-1"])
    assert tables.of_folder(tmp_path) == ""
    bench_kernels.main(["--ceilings", *SMALL, "--out", str(tmp_path / "kernels")])
    text = tables.of_folder(tmp_path)
    assert text.startswith("## kernels\n\n| M, N, K, experts | recipe | pass | us | rate |\n") and "GB/s" in text
    bench_kernels.main([*common, "--shapes", "96,64,96,3", "--out", str(tmp_path / "kernels")])
    bench_grouped_mm.main([*common, "--shapes", "96,64,96,3", "--out", str(tmp_path / "grouped_mm")])
    text = tables.of_folder(tmp_path)
    assert text.startswith(
        "## grouped_mm\n\n| GPU | M, N, K, experts | torch bf16, compiled | bf16, ours | `mxfp8_2d` |\n"
    )
    assert "| 96, 64, 96, 3 | mxfp8_2d | quantise w again |" in text and "| CPU | 96, 64, 96, 3 |" in text


def test_the_table_of_passes_shows_power_where_it_was_measured(tmp_path: Path) -> None:
    rates = {"M": 1, "N": 2, "K": 3, "recipe": "mxfp8", "p50_us": 100, "share": 0.5, "x": ""}
    gemm, copy = rates | {"what": "wgrad", "tflops": 1000, "gb_per_s": ""}, rates | {"what": "copy", "gb_per_s": 4000}
    heads = ["M, N, K, experts", "recipe", "pass", "us", "rate", "of the ceiling", "times bf16"]
    for power in ({}, {"watts": "", "sm_mhz": ""}):
        write_results(tmp_path, [gemm | power, copy | power], {})
        assert [list(row) for row in tables.kernels(tmp_path / "data.csv")] == [heads] * 2
    hot, cool = {"watts": 650.4, "sm_mhz": 1410}, {"watts": 400.2, "sm_mhz": 1980}
    write_results(tmp_path, [gemm | hot, copy | cool, gemm], {})
    shown = tables.kernels(tmp_path / "data.csv")
    assert [[row.get(name, "") for name in ("W", "MHz", "pJ per FLOP")] for row in shown] == [
        ["650", "1410", "0.650"], ["400", "1980", ""], ["", "", ""],
    ]  # fmt: skip
    # 650.4 W for 100 us, over 1000 TFLOP/s for 100 us
    assert float(shown[0]["pJ per FLOP"]) == pytest.approx(1e12 * (650.4 * 100e-6) / (1000e12 * 100e-6), abs=1e-3)


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
