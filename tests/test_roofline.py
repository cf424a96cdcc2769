"""The model of what MXFP8 can bring: bytes and FLOPs of passes, rates from committed results, steps, pictures."""

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import check_configs
from scripts.bench import bench_grouped_mm, roofline
from scripts.bench.problems import GroupedShape
from scripts.bench.roofline import BOTH, Pass, Rates, committed_rates, passes, predicted_seconds, step_speedup
from scripts.result_files import SPEED, read_rows, training_gains, write_results
from scripts.study import measured, tables
from titan_mxfp8.backends import plan_on
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.recipe import BF16, get_recipe
from titan_mxfp8.tools.dry_run import Report, dry_run, parse_config

ROOT = Path(__file__).parent.parent
H200, CPU = CLUSTER_GPUS["H200"], Hardware("cpu", "cpu")
LAYER = GroupedShape("", m=96, n=64, k=128, groups=3)
CONFIG = "train_configs/llama4_17bx16e_2layers_1x4.toml"


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_2d_rebased", "mxfp8_rebased"])
def test_the_bytes_of_quantisers_are_those_that_they_move(name: str) -> None:
    """Of the reference backend, tensor by tensor, as scripts/bench/bench_grouped_mm.py counts them."""
    recipe = get_recipe(name)
    problem = bench_grouped_mm.make_problem(bench_grouped_mm.Job(shape=LAYER, ways=()), torch.device("cpu"))
    x, w, dy, offs = (tensor.detach() for tensor in problem)
    calls = bench_grouped_mm.passes_of(name, "reference", x, w, dy, offs)
    moved = {}
    for what in bench_grouped_mm.QUANTIZERS:
        moved[what] = bench_grouped_mm.bytes_moved(calls[what], {"x": x, "dy": dy, "w": w}[what.split()[1]])
    plan = plan_on(recipe, "reference", CPU)
    kept, freed = ({one.name: one.moved for one in passes(recipe, plan, LAYER, keeps)} for keeps in (True, False))
    for what in ("quantise x", "quantise dy", "quantise w"):
        assert kept[what] == moved[what], what
    assert freed["quantise w again"] == moved["quantise w again"]
    assert ("quantise w again" in kept) == (recipe.weight_block != "32x32")
    assert freed["quantise w"] <= kept["quantise w"]


def test_gemms_move_their_operands_and_multiply_all_of_them() -> None:
    bf16 = {one.name: one for one in passes(BF16, plan_on(BF16, "auto", H200), LAYER)}
    x, w, y = 96 * 128, 3 * 64 * 128, 96 * 64
    assert list(bf16) == ["forward", "dgrad", "wgrad"] and {one.moved for one in bf16.values()} == {2 * (x + w + y)}
    assert {one.flops for one in bf16.values()} == {2 * 96 * 64 * 128} and bf16["wgrad"].what == "bf16"
    recipe = get_recipe("mxfp8_2d_rebased")
    ours = {one.name: one for one in passes(recipe, plan_on(recipe, "auto", H200), LAYER)}
    # a byte an element; a scale for 128 of x, and for 32 x 128 of w, in rows of 16 scales; the product in bf16
    assert ours["forward"].moved == x + 96 * 1 + w + 3 * 16 + 2 * y and ours["forward"].what == "FP8"


def test_a_pass_takes_the_longer_of_moving_and_multiplying() -> None:
    rates = Rates(ceilings={"copy": 10.0, "bf16": 100.0, "FP8": 200.0})
    assert rates.seconds("mxfp8", Pass(name="forward", moved=10, flops=1000, what="FP8")) == 5
    assert rates.seconds("mxfp8", Pass(name="forward", moved=70, flops=1000, what="FP8")) == 7
    assert rates.seconds("mxfp8", Pass(name="quantise x", moved=70)) == 7
    own = Rates(ceilings=rates.ceilings, own={("mxfp8", "forward"): 50.0, ("mxfp8", "quantise x"): 7.0})
    assert own.seconds("mxfp8", Pass(name="forward", moved=10, flops=1000, what="FP8")) == 20
    assert own.seconds("mxfp8", Pass(name="quantise x", moved=70)) == 10


def test_a_step_is_its_layers_and_what_no_format_changes() -> None:
    rates = Rates(ceilings={"copy": 1e30, "bf16": 1.0, "FP8": 2.0})
    recipe, flops = get_recipe("mxfp8_2d_rebased"), 2 * 96 * 64 * 128
    assert predicted_seconds(recipe, H200, LAYER, rates)[BOTH] == pytest.approx(3 * flops / 2)
    assert predicted_seconds(recipe, H200, LAYER, rates, forwards=2)[BOTH] == pytest.approx(4 * flops / 2)
    gemm, memory = (96, 64, 128, 3), SimpleNamespace(parameters=0, activations=0)
    step = SimpleNamespace(gemms={(recipe, *gemm): 2}, flops_per_token=18 * flops, tokens=1, forwards=1)
    vars(step).update(memory=memory, out_of_fsdp=0, frees_weights=False)
    assert step_speedup(step, "H200", rates) == pytest.approx((12 + 6) / (12 + 3))
    step.out_of_fsdp = 1e30 * flops / roofline.FSDP_COPIES
    assert step_speedup(step, "H200", rates) == pytest.approx((12 + 6 + 1) / (12 + 3))
    step.gemms, step.out_of_fsdp = {(BF16, *gemm): 2}, 0
    assert step_speedup(step, "H200", rates) == 1, "the control"


def test_rates_are_read_from_committed_results(tmp_path: Path) -> None:
    """Rows of a second for 2e12 FLOPs, of fewer and of more."""
    key = {"bench": "kernels", "M": 100, "N": 100, "K": 10**8, "G": 1, "groups": "balanced", "p50_us": 1e6}
    gemm = key | {"recipe": "mxfp8_2d_rebased", "what": "forward", "baseline_us": 2e6}
    rates = {"copy": {"gb_per_s": 3}, "bf16 matmul": {"tflops": 1.5}, "FP8 matmul": {"tflops": 4}}
    ceilings = [key | {"recipe": "torch", "what": what} | rate for what, rate in rates.items()]
    h100, h200 = {"gpu": "NVIDIA H100 80GB HBM3"}, {"gpu": "NVIDIA H200"}
    write_results(tmp_path / "a", [*ceilings, gemm | {"recipe": "mxfp8_2d", "p50_us": 1}], h200)
    rows = [gemm, gemm | {"M": 200, "N": 50, "p50_us": 2e6}, gemm | {"data": "products", "p50_us": 1}]
    rows += [gemm | {"recipe": "mxfp8", "p50_us": 0.5e6, "baseline_us": ""}, key | {"recipe": "bf16", "what": "wgrad"}]
    write_results(tmp_path / "b", rows, h200)
    write_results(tmp_path / "c", [gemm | {"p50_us": 1}], h100)
    # without passes, or with those of one shape alone, it leaves our rates as they were
    write_results(tmp_path / "d", ceilings[:1], h200)
    write_results(tmp_path / "e", [gemm | {"p50_us": 4e6}], h200)
    roof, own = committed_rates(tmp_path, "H200")
    # mxfp8 multiplies bf16 values of 8 bits faster than plain bf16 can be: not a ceiling of bf16
    assert roof.ceilings == {"copy": 3e9, "bf16": 1.5e12, "FP8": 2e18} and not roof.own
    # of the newest run of several shapes alone: the mean of 2e12 and 1e12; bf16's by its baselines
    assert own.own["mxfp8_2d_rebased", "forward"] == 1.5e12 and ("mxfp8_2d", "forward") not in own.own
    assert own.own["bf16", "forward"] == 1e12 and own.own["mxfp8", "forward"] == 4e12
    assert ("bf16", "wgrad") not in own.own
    assert committed_rates(tmp_path, "H100") is None and committed_rates(tmp_path, "B200") is None


@pytest.fixture(scope="module")
def report():
    return dry_run(parse_config(str(ROOT / CONFIG), ["--cluster.gpu=H200"]))


def test_a_dry_run_knows_what_a_gpu_multiplies(report) -> None:
    """4 GPUs, EP 4: 16 experts of 8192 x 5120 are 4 a GPU, with the tokens of one; attention and shared experts."""
    tokens = 4 * 8192
    found = {gemm[1:]: count for gemm, count in report.gemms.items()}
    assert found[tokens, 8192, 5120, 4] == 4 and found[tokens, 5120, 8192, 4] == 2, "w1, w3; w2; of two layers"
    assert (tokens, 5120, 5120, 1) in found and report.frees_weights
    assert report.out_of_fsdp == 2 * 3 * 4 * 8192 * 5120, "FSDP's mesh of the experts has one rank"
    converted = sum(6 * m * n * k * count for (m, n, k, _), count in found.items())
    assert report.forwards == 1
    assert converted == pytest.approx(report.flops_per_token * tokens * report.mxfp8_share)
    top_6 = dry_run(parse_config(str(ROOT / "train_configs/deepseek_v3_16b_1x8.toml")))
    experts = {gemm[1:] for gemm in top_6.gemms if gemm[-1] > 1}
    assert experts == {(4 * 4096 * 6, 1408, 2048, 8), (4 * 4096 * 6, 2048, 1408, 8)}
    again = dry_run(parse_config(str(ROOT / CONFIG), ["--activation_checkpoint.mode=full"]))
    assert again.forwards == 2 and again.memory.activations < report.memory.activations


def test_check_configs_says_what_to_expect(report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said(report: Report) -> str:
        (line,) = (line for line in check_configs.describe(report).splitlines() if line.startswith("  speed-up"))
        return line.removeprefix("  speed-up").strip()

    by_format = step_speedup(report, "H200", committed_rates(ROOT / "results", "H200")[1])
    unknown = replace(report, model="gpt_oss")
    assert report.dispatching and said(unknown).startswith(f"{by_format:.2f} times bf16's speed by the number format")
    assert "what the dispatch gains besides was not measured for gpt_oss on H200; communication" in said(unknown)
    # of DeepSeek-V3 it was, on one GPU and on two
    gains = check_configs.dispatch_gains("H200", "deepseek_v3")
    like_measured = replace(report, model="deepseek_v3")
    low, high = (f"{by_format * gain:.2f}" for gain in (min(gains), max(gains)))
    assert len(gains) > 1 and f"{low} to {high} times bf16's speed: {by_format:.2f} by" in said(like_measured)
    without = said(replace(like_measured, dispatching=0))
    assert without.startswith(f"{by_format:.2f} times bf16's speed by") and "dispatch" not in without
    bf16 = replace(report, converted=Counter(), multiplied={})
    assert said(bf16) == "none, as nothing is converted"
    assert "MMA dtype  bf16 in all GEMMs" in check_configs.describe(bf16)
    monkeypatch.setattr(check_configs, "ROOT", tmp_path)
    assert said(report) == "not known: no committed result has rates that were measured on H200"
    assert "cluster.gpu names no GPU" in said(replace(report, card=None))


def test_predictions_stand_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(roofline.trainings(ROOT / "results"))
    assert len(found) > 20 and {path.parent.name for path, *_ in found} >= {"2026-11-22_4xh200_training"}
    chosen = [one for one in found if one[0].parent.name == "2026-11-22_4xh200_training"][-2:]
    monkeypatch.setattr(roofline, "trainings", lambda results: chosen)
    rows = roofline.check(ROOT / "results")
    assert [(row["model"], row["run"], row["measured"]) for row in rows] == [
        ("17bx16e_4layers", "both+rebase:mxfp8_2d", 1.168), ("17bx16e_4layers", "both:mxfp8_2d", 1.061),
    ]  # fmt: skip
    # rebasing brings more, and a step gains less than its GEMMs do
    assert 1 < rows[1]["by our rates"] < rows[0]["by our rates"] < rows[0]["by the ceilings"] < 1.5
    assert [row["memory GiB"] for row in rows] == ["99.59", "103.04"], "TorchTitan's"
    estimated = [row["estimated GiB"] for row in rows]
    assert estimated == pytest.approx([99.59, 103.04], rel=0.025), "more than the card's 70%"


def test_a_training_has_one_gain_wherever_it_stands() -> None:
    """That of pairs: in one table the medians of ``both:mxfp8_2d`` and bf16 are 81994 and 89864, which is 0.912."""
    rows = [{"run": "both", SPEED: "9", "x": "1.0"}, {"run": "bf16", SPEED: "8", "x": "0.8"}]
    assert [gain for _, gain in training_gains(rows)] == [1.25, 1] and not list(training_gains(rows[:1]))
    trained = []
    for path, _, row, gain in roofline.trainings(ROOT / "results"):
        key = path.relative_to(ROOT).as_posix(), tables.recipe_of(row["run"]), f"{gain:.2f}"
        trained.append((row["run"], key))
    by_roofline = Counter(key for run, key in trained if run.startswith("both"))
    by_tables = Counter(
        (file, recipe, cell.split()[0])
        for file in {file for file, *_ in by_roofline}
        for cells in tables.end_to_end(ROOT / file, recipes=",".join(bench_grouped_mm.RECIPES))
        for recipe in bench_grouped_mm.RECIPES
        if (cell := cells.get(tables.code(recipe))) and " alone" not in cells["model"]
    )
    assert by_roofline == by_tables
    gains = {(file.split("/")[1], recipe, gain) for _, (file, recipe, gain) in trained}
    for row in measured.measured(ROOT / "results"):
        if row["kind"] == "training" and row["recipe"] != "bf16":
            assert (row["folder"], row["recipe"], row["x"]) in gains
    assert by_tables["results/2026-11-23_2xh200_dispatch_training/training_table.csv", "mxfp8_2d", "0.92"] == 1


def test_predictions_that_count_are_of_what_was_measured() -> None:
    """In the newest folder of predictions that counts, of the trainings that are still here; with the gains."""
    results = ROOT / "results"
    folder = max(re.findall(r"\*\*`([\w-]+_cpu_predictions\w*)`\*\*", (results / "README.md").read_text()))
    rows = [row for row in read_rows(results / folder / "data.csv") if (results / row["folder"]).is_dir()]
    predicted = Counter((row["folder"], row["table"], row["run"], row["measured"]) for row in rows)
    known = {row["folder"] for row in rows}
    measured = Counter(
        (str(path.parent.relative_to(results)), path.name, row["run"], str(round(gain, 3)))
        for path, env, row, gain in roofline.trainings(results)
        if str(path.parent.relative_to(results)) in known
    )
    assert len(rows) > 30 and measured == predicted, "roofline.py check writes them"


def test_passes_are_predicted_beside_what_was_measured(tmp_path: Path) -> None:
    for part in ("grouped_mm", "kernels"):
        shutil.copytree(ROOT / "results" / "2026-11-25_h200_bench" / part, tmp_path / part)
    roofline.main(["passes", str(tmp_path)])
    rows = [row for row in read_rows(tmp_path / "roofline.csv") if row["N"] == "8192"]
    (row,) = (r for r in rows if (r["M"], r["recipe"], r["what"]) == ("131072", "mxfp8_2d_rebased", roofline.BOTH))
    assert float(row["x"]) == pytest.approx(1.46, abs=0.005) and 1.4 < float(row["predicted_x"]) < 1.8
    for path in tmp_path.glob("*/env.json"):
        path.write_text("{}")
    with pytest.raises(SystemExit, match="lacks ceilings of one of H20, H100"):
        roofline.main(["passes", str(tmp_path)])
