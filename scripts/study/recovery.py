"""Trainings that are killed, and trainings with faults in them: what bf16 and MXFP8 do, beside each other.

    python scripts/study/recovery.py --ngpu 2 --out OUT -- FLAGS

DeepSeek-V3's debug model, FSDP and EP over all processes, on GPUs or CPUs; with FLAGS for TorchTitan, which is 0.2.2:

    step, checkpoint    all processes get SIGKILL amid a step, and while a checkpoint is written
    rerun               the same amid a step that runs again, as the router collapsed and rows did not fit
    nan                 a token's embedding is NaN in one step; then once more from the checkpoint before it
    dead, collapse      an expert gets no token for many steps, then may again; all tokens go to experts of one rank

Writes data.csv, a row for each case and run, and env.json; runs are in OUT/runs, and each call makes its own in the
place of an earlier one's. Exit status 1 where a run that went on has other losses than one that nobody killed.
"""

import argparse
import math
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from scripts.progress import ends_in_words, follow, say
from scripts.result_files import environment, format_table, write_results
from scripts.study.faults import COLUMNS, Plan
from scripts.study.runs import ending, split_flags
from scripts.study.starter import Starter

KINDS = {
    "bf16": ["--model.converters="],
    "MXFP8": ["--quantize.grouped_mm.mx.dispatch_rows=bounded", "--quantize.health_every=4"],
}
# How a row says it, and what it quotes of the log, by what happens.
KILLED = {
    "step": ("amid step", "Loading the checkpoint from"),
    "checkpoint": ("amid the checkpoint of step", "Loading the checkpoint from"),
    "rerun": ("amid the second run of step", "MXFP8: step .* runs again"),
}
FAULTS = {"collapse": "runs again", "nan": "loss: +nan", "dead": "got no tokens"}
STEPS, EVERY = 8, 2  # of a run, and between its checkpoints
FAULT = 5  # the step with a fault, or that is killed: the last checkpoint is of the one before
REVIVED = 4  # steps after those in which an expert got nothing
OURS = "made_by_recovery"  # a file in OUT/runs of a call of this script


def begin_anew(out: Path) -> None:
    """Makes OUT/runs, in the place of an earlier call's. Raises ValueError if OUT has runs or results of anything else,
    such as of a benchmark."""
    runs = out / "runs"
    for path in (runs, out / "data.csv", out / "env.json"):
        if path.exists() and not (runs / OURS).is_file():
            raise ValueError(f"{path} is not of an earlier call, and would be lost: remove it, or name another --out")
    runs.mkdir(parents=True, exist_ok=True)
    (runs / OURS).touch()
    for path in runs.iterdir():  # all but that file, so that a call that was cut short here can begin again
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OURS:
            path.unlink()


def read_steps(path: Path) -> pd.DataFrame:
    """``COLUMNS`` by step of what a run logged; of a step that it ran twice, the later one."""
    steps = pd.read_csv(path, names=COLUMNS, index_col="step")
    return steps[~steps.index.duplicated(keep="last")]


def gap(run: pd.DataFrame, other: pd.DataFrame) -> float:
    """The largest distance of losses of the steps of ``run``: 0 where both are NaN, infinite where one of the two is,
    or where ``other`` has no such step."""
    ours, theirs = run["loss"], other["loss"].reindex(run.index, fill_value=math.inf)
    return float((ours - theirs).abs().fillna(math.inf).mask(ours.isna() & theirs.isna(), 0).max())


def line_of(log: str, pattern: str) -> str:
    """The first line of a log that matches, without the time and the module before it."""
    found = re.search(rf"^.*{pattern}.*$", log, re.M)
    return re.sub(r"^\[titan\] [\d :,-]+ - [\w.]+ - [A-Z]+ - ", "", found[0]).strip() if found else "nothing"


class Study:
    """The runs of one kind, and the rows of its cases. Of ``of_bf16``: by case, what bf16 did, which fills it."""

    def __init__(self, kind: str, args: argparse.Namespace, starter: Starter, of_bf16: dict[str, pd.DataFrame]) -> None:
        self.kind, self.args, self.starter, self.of_bf16 = kind, args, starter, of_bf16
        self.rows: list[dict[str, object]] = []

    def train(
        self, name: str, plan: Plan, *flags: str, steps: int = STEPS, killed: bool = False
    ) -> tuple[pd.DataFrame, str]:
        """Runs it in the folder of that name, to its end or until it kills itself, which the plan has a point for: the
        steps that it logged, and its log. Raises ValueError if it failed, or was not killed."""
        folder = self.args.out / "runs" / f"{self.kind}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        logged = folder / "steps.csv"
        logged.write_text("")
        log = folder / f"log{len(list(folder.glob('log*'))) + 1}"
        own = ["--job.config_file=train_configs/debug_deepseek_v3.toml", f"--job.dump_folder={folder}", *plan.flags()]
        own += [f"--training.steps={steps}", "--training.seq_len=256", "--training.local_batch_size=1"]
        own += [f"--parallelism.expert_parallel_degree={self.args.ngpu}", "--metrics.no-enable_wandb"]
        own += ["--metrics.disable_color_printing", "--checkpoint.enable", f"--checkpoint.interval={EVERY}"]
        process = self.starter.start([*own, *KINDS[self.kind], *flags, *self.args.flags], log)
        status, text = follow(process, log, steps, folder.name), log.read_text(errors="replace")
        if killed != ("(SIGKILL)" in text) or (status and not killed):
            raise ValueError(f"run {folder.name} {'was not killed' if killed else 'failed'}, {ending(log)}")
        say(f"{folder.name}, {log.name}: {'killed' if killed else 'ended'}")
        return read_steps(logged), text

    def row(
        self, case: str, done: str, seen: str, says: str, run: pd.DataFrame, other: pd.DataFrame | None, against: str
    ) -> None:
        """Adds one: what was done, what the run did, what its log says, and how far it is from another one."""
        says = says.replace(str(self.args.out), "OUT")
        row = {"case": case, "run": self.kind, "what was done": done, "what it did": seen, "the log says": says}
        row["steps"] = f"{run.index.min()} to {run.index.max()}"
        if other is not None:
            largest = gap(run, other)
            row |= {"losses": "differ" if largest else "equal", "largest gap": largest, "against": against}
        self.rows.append(row)

    def goes_on(self, case: str, plan: Plan, done: str, says: str, *flags: str) -> None:
        """Starts the run of the case again; it is to have the losses of one that went through."""
        run, log = self.train(case.partition(",")[0], plan, *flags)
        seen, other = line_of(log, "Training starts at step"), self.collapsed if case == "rerun" else self.whole
        self.row(case, done, seen, line_of(log, says), run, other, "the same run that went through")

    def kill(self, point: str, faults: tuple[str, ...] = ()) -> None:
        """Kills a run at a point, and lets it go on to the end."""
        step = FAULT - 1 if point == "checkpoint" else FAULT
        self.train(point, Plan((*faults, point), step, STEPS), killed=True)
        when, says = KILLED[point]
        self.goes_on(point, Plan(faults, step, STEPS), f"killed {when} {step}", says)

    def fault(self, case: str, done: str, plan: Plan, *flags: str, steps: int = STEPS) -> pd.DataFrame:
        """Trains with a fault, and compares what it did with what bf16 did."""
        run, log = self.train(case, plan, *flags, steps=steps)
        says, other = line_of(log, FAULTS[case]), self.of_bf16.get(case)
        self.row(case, done, described(run), says, run, other, "bf16 with the same fault")
        if self.kind == "bf16":
            self.of_bf16[case] = run
        return run

    def make(self) -> None:
        """All cases."""
        self.whole, _ = self.train("whole", Plan())
        if torch.cuda.is_available():
            again, _ = self.train("again", Plan())
            self.row("none", "the same run twice", described(again), "", again, self.whole, "the first of the two")
        self.kill("step")
        self.kill("checkpoint")
        done = f"all tokens to the first experts from step {FAULT} on"
        self.collapsed = self.fault("collapse", done, Plan(("collapse",), FAULT, STEPS))
        if self.kind == "bf16":
            words = "TorchTitan's dispatch counts rows, and no step runs again"
            self.rows.append({"case": "rerun", "run": self.kind, "what it did": words})
        else:
            self.kill("rerun", ("collapse",))
        self.fault("nan", f"a token's embedding NaN in step {FAULT}", Plan(("nan",), FAULT, FAULT))
        done = f"from the checkpoint of step {FAULT - 1} on, without the NaN"
        load = f"--checkpoint.load_step={FAULT - 1}"
        self.goes_on("nan, again", Plan(), done, "Loading the checkpoint from", load)
        last = STEPS + self.args.dead - 1
        plan, done = Plan(("dead",), STEPS, last), f"expert 0 without tokens in steps {STEPS} to {last}"
        self.fault("dead", done, plan, "--checkpoint.no-enable", steps=last + REVIVED)


def described(run: pd.DataFrame) -> str:
    """What a run did, in words."""
    bad = run.index[~np.isfinite(run["loss"])]
    without = run.index[run["tokens of expert 0"] == 0]
    words = f"loss {run['loss'].iloc[0]:.3f} to {run['loss'].iloc[-1]:.3f}, "
    words += f"not finite in steps {span(bad)}" if len(bad) else "all finite"
    words += f"; gradient norms to {run['grad_norm'][np.isfinite(run['grad_norm'])].max():.2f}"
    words += f"; largest share of an expert {run['largest share'].max():.2f}"
    return words + (f"; expert 0 without tokens in steps {span(without)}" if len(without) else "")


def span(steps: Iterable[int]) -> str:
    """``5 to 8, 10`` of 5, 6, 7, 8, 10."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), lambda item: item[1] - item[0])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ngpu", type=int, default=2, help="processes, one per GPU [2]")
    add("--dead", type=int, default=200, metavar="STEPS", help="in which an expert gets no token [200]")
    add("--out", type=Path, default=Path("outputs/recovery"), help="[%(default)s]")
    own, flags = split_flags(argv)
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    device, rows, of_bf16 = "cuda" if torch.cuda.is_available() else "cpu", [], {}
    with ends_in_words("recovery", "the same command begins again"), Starter(args.ngpu, args.out / "runs") as starter:
        begin_anew(args.out)
        for kind in KINDS:
            study = Study(kind, args, starter, of_bf16)
            try:
                study.make()
            finally:
                rows += study.rows
                described_by = {"flags": " ".join(args.flags), "processes": str(args.ngpu)}
                write_results(args.out, rows, environment(device) | described_by)
        print(format_table(rows))
        wrong = [row for row in rows if row.get("losses") == "differ" and not str(row["against"]).startswith("bf16")]
        if wrong:
            raise ValueError("\n".join(f"{row['case']} of {row['run']}: losses differ" for row in wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
