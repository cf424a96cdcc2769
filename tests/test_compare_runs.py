"""compare_runs.py: what it says of runs that are known; Student's t against tables, verdicts against simulation."""

import math
import os
import random
import re
from pathlib import Path
from statistics import fmean

import pytest
from script_calls import call, write_run
from torch.utils.tensorboard import SummaryWriter

from scripts.result_files import read_rows
from scripts.study import runs
from scripts.study.compare_runs import critical_t, verdict_on

NAN, INF = math.nan, math.inf


def compare(*arguments: object) -> str:
    return call("compare_runs", *arguments)


def table(out: Path, *arguments: object) -> list[dict[str, str]]:
    """The rows of the table that it writes to a folder."""
    compare(*arguments, "--out", out)
    return read_rows(out / "table.csv")


def test_compare_runs_prints_and_plots_the_difference(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "bf16", [8.0, 7.0, 6.0]), write_run(tmp_path / "mxfp8", [8.5, 7.0, 5.75])
    printed = compare(a, b, "--out", tmp_path / "out")
    assert "| step | bf16 | mxfp8 | mxfp8 - bf16 |" in printed
    assert "| 1 | 8.0000 | 8.5000 | +0.5000 |" in printed and "| 3 | 6.0000 | 5.7500 | -0.2500 |" in printed
    bf16, mxfp8 = read_rows(tmp_path / "out" / "table.csv")
    assert (bf16["tokens/s"], bf16["memory GiB"], mxfp8["x"]) == ("250.0", "4.0", "1.0")
    assert (mxfp8["difference"], mxfp8["95% low"], mxfp8["margin"]) == ("-0.2500", "", "0.0300")
    assert (mxfp8["pairs"], mxfp8["verdict"]) == ("1", "none: bf16 and mxfp8 have one seed in common")
    assert (tmp_path / "out" / "losses.csv").read_text().splitlines()[2] == "2,7.0,200.0,7.0,200.0"
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_compare_runs_judges_paired_differences(tmp_path: Path) -> None:
    """bf16's seeds end at 3.00, 3.02 and 2.98, so the margin is 0.015; each other group moves every seed."""
    seeds = (0.0, 0.02, -0.02)
    groups = {
        "bf16": (0, 0, 0),
        "same": (0.001, -0.001, 0.0015),
        "higher": (0.005, 0.0055, 0.006),
        "lower": (-0.005, -0.0055, -0.006),
        "worse": (0.04, 0.05, 0.045),
        "better": (-0.04, -0.05, -0.045),
        "near": (0.01, 0.014, 0.018),  # all within the margin, and yet the mean may be beyond it
        "wild": (-0.01, 0.03, 0.01),
    }
    folders = []
    for group, moved in groups.items():
        for seed, (offset, move) in enumerate(zip(seeds, moved, strict=True)):
            # 100 steps, of which the last ten count: their noise is the same for all and has mean zero
            losses = [5.0 + 3 * move] * 90 + [3.0 + offset + move + (-1) ** step for step in range(10)]
            folders.append(write_run(tmp_path / f"{group}-seed{seed}", losses))
    assert "| 3 | equivalent within 0.5% |" in compare(*folders, "--out", tmp_path)
    bf16, *others = read_rows(tmp_path / "table.csv")
    assert (bf16["run"], bf16["seeds"], bf16["final loss"], bf16["verdict"]) == ("bf16", "3", "3.0000", "")
    assert {row["run"]: row["verdict"] for row in others} == {
        "same": "equivalent within 0.5%",
        "higher": "equivalent within 0.5%, higher",
        "lower": "equivalent within 0.5%, lower",
        "worse": "worse",
        "better": "better",
        "near": "worse",
        "wild": "cannot tell",
    }
    near = others[5]  # mean 0.014, standard error 0.004 / sqrt(3), t 4.303
    assert (near["difference"], near["standard error"], near["margin"]) == ("+0.0140", "0.0023", "0.0150")
    assert (near["95% low"], near["95% high"], near["pairs"]) == ("+0.0041", "+0.0239", "3")
    near = table(tmp_path, *folders, "--margin", "0.02")[6]
    assert (near["margin"], near["verdict"]) == ("0.0600", "equivalent within 2%, higher")
    # the seeds in common count, whatever the order: 1 and 2 of near
    near = table(tmp_path, *folders[:3], folders[20], folders[19])[1]
    assert [near[key] for key in ("difference", "pairs")] == ["+0.0160", "2"]
    near = table(tmp_path, *folders[:2], folders[20])[1]
    assert near["verdict"] == "none: bf16 and near have no seed in common"


def test_compare_runs_names_pairs_that_saw_other_data(tmp_path: Path) -> None:
    """What batches share shows from step to step, whatever the level of a run; a seed's partner is its own."""
    hard = [[random.Random(f"{data} {step}").gauss(0, 0.1) for step in range(40)] for data in range(2)]

    def run(name: str, data: int, level: float, steps: int = 40) -> Path:
        return write_run(tmp_path / name, [level - step / 100 + hard[data][step] for step in range(steps)])

    bf16 = [run("bf16-seed0", 0, 8.0), run("bf16-seed1", 1, 8.0)]
    others = [run("same-seed0", 0, 7.0), run("same-seed1", 1, 9.0), run("other-seed0", 0, 8.0)]
    odd = run("other-seed1", 0, 8.0)
    assert "same batches" not in compare(*bf16, *others, "--out", tmp_path / "out")
    pairs = re.findall(r"(\S+ and \S+) have not seen the same batches", compare(*bf16, *others, odd, "--out", tmp_path))
    assert pairs == ["other-seed1 and bf16-seed1"]
    # of 20 changes one can tell, of fewer not
    assert "same batches" in compare(bf16[1], odd, "--steps", 21, "--out", tmp_path)
    assert "same batches" not in compare(bf16[1], odd, "--steps", 20, "--out", tmp_path)


def test_compare_runs_gives_one_pair_the_interval_of_its_steps_and_shows_held_out_losses(tmp_path: Path) -> None:
    """The last 20 of 200 steps count: ten parts of two, whose differences are 0.1 +- 0.03 by turns, in pairs."""
    base = write_run(tmp_path / "bf16-seed0", [3.0] * 200)
    moved = [3.5] * 180 + [3.0 + 0.1 + sign * 0.03 for sign in (1, -1) * 5 for _ in range(2)]
    other = write_run(tmp_path / "mxfp8-seed0", moved)
    writer = SummaryWriter(str(other / "tb"))
    for step, loss in ((100, 3.75), (201, 3.25)):  # the latter logs no loss of its own
        writer.add_scalar(runs.HELD_OUT, loss, step)
    writer.close()
    printed = compare(base, other, "--out", tmp_path / "out")
    assert "none: bf16 and mxfp8 have one seed in common" in printed
    row = read_rows(tmp_path / "out" / "table.csv")[1]
    error = 0.03 * math.sqrt(10 / 9) / math.sqrt(10)
    assert (row["difference"], row["standard error"]) == ("+0.1000", f"{error:.4f}")
    assert float(row["95% high"]) == pytest.approx(0.1 + 2.262 * error, abs=1e-4), "t of nine degrees of freedom"
    assert (row["pairs"], row["held-out loss"]) == ("1", "3.2500")
    losses = read_rows(tmp_path / "out" / "losses.csv")
    assert [line["mxfp8-seed0 held-out"] for line in losses if line["mxfp8-seed0 held-out"]] == ["3.75", "3.25"]
    again = compare(tmp_path / "out" / "losses.csv", "--out", tmp_path / "again")
    assert read_rows(tmp_path / "again" / "table.csv")[1]["held-out loss"] == "3.2500"
    assert "+0.1000" in again and "| 3.2500 |" in again
    row = table(tmp_path / "out", base, other, "--steps", "100")[1]
    assert row["held-out loss"] == "3.7500", "of the steps that are compared"


def test_compare_runs_makes_the_same_tables_of_its_losses(tmp_path: Path) -> None:
    folders = []
    for group, moves in {"bf16": (0, 0.01, 0.04), "mxfp8": (0.01, 0.03, 0.04)}.items():
        for seed, move in enumerate(moves):
            folders.append(write_run(tmp_path / f"{group}-seed{seed}", [4.0, NAN, 3.0 + move]))
    files = [tmp_path / name / "losses.csv" for name in ("first", "again")]
    first, again = table(tmp_path / "first", *folders), table(tmp_path / "again", files[0])
    memory = [row.pop("memory GiB") for row in first], [row.pop("memory GiB") for row in again]
    assert first == again and memory == (["4.0", "4.0"], ["", ""])
    assert files[0].read_text() == files[1].read_text()
    # two files whose runs have the same names; the baseline's own repeat is a group
    verdicts = [row["verdict"] for row in table(tmp_path / "both", *files)]
    assert verdicts == ["", "cannot tell", "equivalent within 0.5%", "cannot tell"]
    assert f"{files[0]} would be overwritten" in compare(files[0], "--out", tmp_path / "first")
    assert "table.csv is no losses.csv of compare_runs.py" in compare(tmp_path / "first" / "table.csv")


def test_a_newer_log_replaces_an_older_one_from_its_first_step_on(tmp_path: Path) -> None:
    """Whether it goes on from a checkpoint, or a shorter run has taken the folder; and after both were copied."""
    folder = write_run(tmp_path / "run", [8.0, 7.0, 6.0, 5.0])
    (first,) = folder.rglob("events*")
    first.rename(first.with_name(first.name.replace("tfevents.1", "tfevents.0")))
    with SummaryWriter(str(folder / "tb" / "again")) as writer:
        writer.add_scalar(runs.LOSS, 6.5, 3)
        writer.add_scalar("lr", 0.1, 1)  # no step that the older log has
    os.utime(next((folder / "tb" / "again").iterdir()), (0, 0))
    read = runs.read_run(folder)
    assert (read.loss, list(read.tps)) == ({1: 8.0, 2: 7.0, 3: 6.5}, [1, 2])
    write_run(folder, [4.0, 3.0])
    assert runs.read_run(folder).loss == {1: 4.0, 2: 3.0}


def test_compare_runs_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    assert "nothing: no such folder" in compare(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    assert "holds no TensorBoard log" in compare(tmp_path / "nothing")
    with SummaryWriter(str(tmp_path / "empty")) as writer:
        writer.add_scalar("lr", 0.1, 1)
    assert "ended before its first log" in compare(tmp_path / "empty")
    for seed in (0, 1):
        write_run(tmp_path / "study" / f"bf16-seed{seed}", [8.0, 7.0])
        (tmp_path / "wandb" / str(seed)).mkdir(parents=True)
        (tmp_path / "wandb" / str(seed) / "job_config.json").touch()
    for name in ("study", "wandb"):
        refused = compare(tmp_path / name, "--out", tmp_path / "out")
        assert f"{tmp_path / name} holds several runs" in refused and f"{tmp_path / name}/*-seed*" in refused
    config = {"model": {"name": "llama4", "flavor": "a"}, "training": {"seq_len": 32}, "optimizer": {"lr": 1e-3}}
    long = write_run(tmp_path / "long", [8.0, 7.0, 6.0], config)
    short = write_run(tmp_path / "short", [8.0, 7.0], config)
    other = write_run(tmp_path / "other", [8.0, 7.0, 6.0], config | {"model": {"name": "llama4", "flavor": "b"}})
    assert "long ended at step 3 and short at step 2: finish the shorter run" in compare(long, short)
    assert "| short | 1 | 2 |" in compare(long, short, "--steps", 2, "--out", tmp_path)
    assert "short has losses of steps 1 to 2, and --steps is 3" in compare(long, short, "--steps", 3)
    assert "long has model.flavor = 'a' and other 'b'" in compare(long, other)
    (tmp_path / "file").touch()
    assert "File exists" in compare(long, "--out", tmp_path / "file")
    assert "--window is a share of the steps" in compare(long, "--window", 10)
    assert "--margin is a share of the loss, above 0 and below 1, got 0.0" in compare(long, "--margin", 0)
    path = tmp_path / "losses.csv"
    for text, message in (
        (b"step,a loss\n1,8.0\n2,x\n", "could not convert"),
        (b"\x89PNG\r\n", "'utf-8' codec"),
        (b"a log\nof lines, with a comma\n", "it needs columns"),
    ):
        path.write_bytes(text)
        assert f"{path} is no losses.csv of compare_runs.py: {message}" in compare(path, "--out", tmp_path / "out")


def test_compare_runs_reports_diverged_runs_and_judges_the_others(tmp_path: Path) -> None:
    """bf16's seeds end at 3.00 and 3.02; a run with NaN or Inf at its end has diverged, one that recovered has not."""
    ends = {
        "bf16": ([3.0], [3.02], [NAN]),
        "near": ([3.01], [3.02], [3.0]),
        "once": ([3.01], [INF], [3.0]),
        "all": ([NAN], [INF], [-INF, INF]),
        "spike": ([3.5], [3.52], [3.5]),
    }
    folders = []
    for group, seeds in ends.items():
        for seed, end in enumerate(seeds):
            losses = [5.0, INF if group == "spike" else 4.5, *[4.0] * 25, *(end * 3)[:3]]
            folders.append(write_run(tmp_path / f"{group}-seed{seed}", losses))
    rows = {row["run"]: row for row in table(tmp_path / "out", *folders)}
    assert rows["bf16"]["verdict"] == "diverged: 1 of 3 runs" and rows["bf16"]["final loss"] == "3.0100"
    near = [rows["near"][key] for key in ("difference", "pairs", "margin", "verdict")]
    assert near == ["+0.0050", "2", "0.0150", "cannot tell"]
    assert (rows["once"]["difference"], rows["once"]["verdict"]) == ("+0.0100", "diverged: 1 of 3 runs")
    assert (rows["all"]["final loss"], rows["all"]["difference"]) == ("nan", "")
    assert rows["all"]["verdict"] == "diverged: 3 of 3 runs"
    assert (rows["spike"]["difference"], rows["spike"]["verdict"]) == ("+0.5000", "worse")
    assert (tmp_path / "out" / "losses.png").stat().st_size > 10_000
    # of two pairs one or both are gone with bf16's run
    row = table(tmp_path / "out", folders[0], folders[2], folders[3], folders[5])[1]
    assert row["verdict"] == "none: bf16 diverged with all but one of the same seeds"
    write_run(tmp_path / "bf16-seed1", [5.0, 4.5, *[4.0] * 25, NAN, NAN, NAN])
    (row,) = table(tmp_path / "out", *folders[1:3], *folders[4:6])[1:]
    assert (row["verdict"], row["margin"]) == ("none: bf16 diverged with all of the same seeds", "nan")
    assert (tmp_path / "out" / "losses.png").stat().st_size > 10_000


def test_compare_runs_draws_intervals_and_the_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: panels.append(self.axes[-1]))
    folders = [write_run(tmp_path / "bf16", [3.0] * 20)]
    for name, value in (("nan", NAN), ("inf", INF)):
        folders.append(write_run(tmp_path / name, [3.1] * 10 + [value] * 5 + [3.2] * 5))
    compare(*folders, "--out", tmp_path / "out")
    assert panels[0].get_ylim() == pytest.approx((-0.3, 0.3))
    pair = [write_run(tmp_path / name, [3.0, up] * 50) for name, up in (("bf16-seed0", 3.0), ("up-seed0", 3.2))]
    row = table(tmp_path / "out", *pair)[1]
    assert row["largest difference"] == "0.1333"  # two of three are 0.2 higher
    (band,) = panels.pop().collections  # at both ends of two differences, 0 and 0.2: 0.1 -+ 12.706 * 0.1
    ends = band.get_paths()[0].get_extents()
    assert (ends.ymin, ends.ymax) == pytest.approx((-1.1706, 1.3706), abs=1e-4)
    compare(folders[0], "--out", tmp_path / "out")
    assert panels[1].get_ylim() == pytest.approx((-0.0225, 0.0225))  # 1.5 times the margin
    assert [line.get_ydata()[0] for line in panels[1].lines] == pytest.approx([0, -0.015, 0.015])

    folders = [write_run(tmp_path / f"bf16-seed{seed}", [3.0 + seed] * 20) for seed in range(3)]
    folders += [write_run(tmp_path / f"up-seed{seed}", [3.0 + 1.1 * seed] * 20) for seed in range(3)]
    folders.append(write_run(tmp_path / "up-seed3", [9.0] * 20))  # without a pair
    compare(*folders, "--out", tmp_path / "out")
    assert panels[2].lines[0].get_ydata() == pytest.approx([0.1] * 20)
    (band,) = panels[2].collections  # differences of 0, 0.1 and 0.2: 0.1 -+ 4.303 * 0.1 / sqrt(3)
    ends = band.get_paths()[0].get_extents()
    assert (ends.ymin, ends.ymax) == pytest.approx((-0.1484, 0.3484), abs=1e-4)
    write_run(tmp_path / "gap-seed0", [3.0] * 20)
    write_run(tmp_path / "gap-seed1", [4.2] * 8 + [NAN] * 4 + [4.2] * 8)
    compare(*folders[:2], tmp_path / "gap-seed0", tmp_path / "gap-seed1", "--out", tmp_path / "out")
    mean = panels[3].lines[0].get_ydata()
    assert mean == pytest.approx([0.1] * 8 + [NAN] * 4 + [0.1] * 8, nan_ok=True), "of both pairs or none"


def test_compare_runs_tells_runs_of_one_name_apart(tmp_path: Path) -> None:
    ends = {"s1/bf16-seed0": 3.0, "s1/bf16-seed1": 3.1, "s2/bf16-seed0": 4.0, "s2/mxfp8-seed1": 4.5}
    folders = [write_run(tmp_path / name, [5.0, end]) for name, end in ends.items()]
    printed = compare(*folders[:3], "--out", tmp_path)
    assert "| step | s1/bf16-seed0 | s1/bf16-seed1 | s2/bf16-seed0 |" in printed
    rows = [(row["run"], row["seeds"], row["final loss"]) for row in read_rows(tmp_path / "table.csv")]
    assert rows == [("s1/bf16", "2", "3.0500"), ("s2/bf16", "1", "4.0000")]
    alone = [write_run(tmp_path / name / "run", [5.0, end]) for name, end in (("a", 3.0), ("b", 4.0))]
    assert [(row["run"], row["seeds"]) for row in table(tmp_path, *alone)] == [("a/run", "1"), ("b/run", "1")]
    short = table(tmp_path, folders[0], folders[3], folders[1])  # of names that differ
    assert [row["run"] for row in short] == ["bf16", "mxfp8"]
    assert "bf16-seed0 is given twice" in compare(folders[0], folders[1], tmp_path / "s2" / ".." / "s1" / "bf16-seed0")
    again = write_run(tmp_path / "s1" / "bf16-seed00", [5.0, 3.0])
    assert "bf16-seed0 and bf16-seed00 are both seed 0 of bf16" in compare(folders[0], again)


def test_compare_runs_says_how_other_scalars_are_spread(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"bf16-seed{seed}", [5.0] * (2 + seed)) for seed in (0, 1)]
    folders.append(write_run(tmp_path / "mxfp8-seed0", [5.0]))
    compare(*folders, "--steps", 1, "--out", tmp_path, "--tags", "memory/*", "loss_metrics/*")
    memory, other, *_ = read_rows(tmp_path / "tags.csv")  # 2 and 3 GiB of one seed, 2, 3 and 4 of the other
    assert memory == {"tag": "memory/*", "run": "bf16", "values": "5", "mean": "2.8", "median": "3", "largest": "4"}
    assert (other["run"], other["values"], other["mean"]) == ("mxfp8", "1", "2")
    assert "--tags mx_*: no run has such a scalar; there are" in compare(*folders, "--steps", 1, "--tags", "mx_*")


@pytest.mark.parametrize(
    "confidence, values",  # as printed in tables of Student's t, by degrees of freedom
    [
        (0.90, {1: 6.314, 2: 2.920, 5: 2.015, 11: 1.796, 30: 1.697, 120: 1.658}),
        (0.95, {1: 12.706, 2: 4.303, 5: 2.571, 11: 2.201, 30: 2.042, 120: 1.980}),
        (0.99, {1: 63.657, 2: 9.925, 5: 4.032, 11: 3.106, 30: 2.750, 120: 2.617}),
        (0.999, {1: 636.619, 2: 31.599, 5: 6.869, 11: 4.437, 30: 3.646, 120: 3.373}),
    ],
)
def test_critical_t_is_that_of_the_tables(confidence: float, values: dict[int, float]) -> None:
    for freedom, value in values.items():
        assert critical_t(confidence, freedom) == pytest.approx(value, abs=6e-4), freedom


def samples(mean: float, pairs: int, count: int) -> list[list[float]]:
    """``count`` times ``pairs`` normal numbers with a standard deviation of 1."""
    numbers = random.Random(0)
    return [[numbers.gauss(mean, 1) for _ in range(pairs)] for _ in range(count)]


@pytest.mark.parametrize("difference", [-1.5, 1.5])
def test_a_difference_of_the_margin_is_called_equivalent_once_in_twenty(difference: float) -> None:
    called = [verdict_on(values, 1.5, 0.005) for values in samples(difference, 12, 4000)]
    assert fmean(verdict.startswith("equivalent") for verdict in called) == pytest.approx(0.05, abs=0.01)


def test_no_difference_is_called_worse_or_higher_once_in_forty() -> None:
    """Whatever the margin, which decides how it is called."""
    for nats in (0.1, 1.0):
        verdicts = [verdict_on(values, nats, 0.005) for values in samples(0.0, 12, 4000)]
        up = fmean(verdict == "worse" or verdict.endswith("higher") for verdict in verdicts)
        down = fmean(verdict == "better" or verdict.endswith("lower") for verdict in verdicts)
        assert (up, down) == pytest.approx((0.025, 0.025), abs=0.0075)
