"""Trainings that are killed, and trainings with faults in them: what bf16 and MXFP8 do, beside each other.

    python scripts/study/recovery.py --ngpu 2 --out OUT -- FLAGS

DeepSeek-V3's debug model, FSDP and EP over all processes, on GPUs or CPUs; with FLAGS for TorchTitan, which is 0.2.2:

    step, checkpoint    SIGKILL for all processes amid a step, and while a checkpoint is written
    rerun               the same amid a step that runs again, as the router collapsed and rows did not fit
    nan                 a token's embedding is NaN in one step; then once more from the checkpoint before it
    dead, collapse      an expert gets no token for many steps, then may again; all tokens go to experts of one rank

Writes data.csv, a row for each case and run, and env.json; runs are in OUT/runs, and each call makes its own. Exit
status 1 where a run that went on has other losses than one that nobody killed.
"""

import argparse
import csv
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import torch

from scripts.progress import ends_in_words, say
from scripts.result_files import environment, format_table, write_results
from scripts.study.faults import COLUMNS, Plan
from scripts.study.runs import ending, split_flags
from scripts.study.starter import Starter

KINDS = {
    "bf16": ["--model.converters="],
    "MXFP8": ["--quantize.grouped_mm.mx.dispatch_rows=bounded", "--quantize.health_every=4"],
}
CASES = ("step", "checkpoint", "rerun", "collapse", "nan", "dead")
STEPS, EVERY = 8, 2  # of a run, and between its checkpoints
FAULT = 5  # the step with a fault, or that is killed: the last checkpoint is of the one before
REVIVED = 4  # steps after those in which an expert got nothing
TIMEOUT = 300  # seconds for a run to get where it is to be killed, or to its end

Steps = dict[int, dict[str, float]]  # the columns of faults.COLUMNS by step
Row = dict[str, object]


def descendants(pid: int) -> list[int]:
    """The processes below one, of /proc."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has ended since
            children += map(int, path.read_text().split())
    return children + [pid for child in children for pid in descendants(child)]


def kill(process: subprocess.Popen) -> None:
    """Sends SIGKILL to a launcher and to all of its processes, in their groups and sessions."""
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):  # some end by themselves once their parent has ended
            os.kill(pid, signal.SIGKILL)
    process.wait()


def read_steps(path: Path) -> Steps:
    """The steps that a run logged; of a step that it ran twice, the later one."""
    with path.open(newline="") as file:
        rows = [dict(zip(COLUMNS, map(float, row), strict=True)) for row in csv.reader(file)]
    return {int(row["step"]): row for row in rows}


def gap(run: Steps, other: Steps) -> float:
    """The largest distance of losses of the steps of ``run``: 0 where both are NaN, infinite where one of the two is,
    or where ``other`` has no such step."""
    pairs = [(row["loss"], other[step]["loss"] if step in other else math.inf) for step, row in run.items()]
    distances = [abs(ours - theirs) if math.isfinite(ours) or math.isfinite(theirs) else 0.0 for ours, theirs in pairs]
    return max((math.inf if math.isnan(distance) else distance for distance in distances), default=math.inf)


def line_of(log: str, pattern: str) -> str:
    """The first line of a log that matches, without the time and the module before it."""
    found = re.search(rf"^.*{pattern}.*$", log, re.M)
    return re.sub(r"^\[titan\] [\d :,-]+ - [\w.]+ - [A-Z]+ - ", "", found[0]).strip() if found else "nothing"


class Study:
    """The runs of one kind, and the rows of its cases."""

    def __init__(self, kind: str, args: argparse.Namespace, starter: Starter) -> None:
        self.kind, self.args, self.starter = kind, args, starter
        self.rows: list[Row] = []

    def train(self, name: str, plan: Plan, *flags: str, steps: int = STEPS, killed: bool = False) -> tuple[Steps, str]:
        """Runs it in the folder of that name, to its end or until it is killed, which the plan has a point for.

        Returns:
            The steps that it logged, and its log.

        Raises:
            ValueError: it failed, or got nowhere.
        """
        folder = self.args.out / "runs" / f"{self.kind}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        logged, reached = folder / "steps.csv", folder / "reached"
        log = folder / f"log{len(list(folder.glob('log*'))) + 1}"
        for path in (logged, reached):
            path.unlink(missing_ok=True)
        own = ["--job.config_file=train_configs/debug_deepseek_v3.toml", f"--job.dump_folder={folder}", *plan.flags()]
        own += [f"--training.steps={steps}", "--training.seq_len=256", "--training.local_batch_size=1"]
        own += [f"--parallelism.expert_parallel_degree={self.args.ngpu}", "--metrics.no-enable_wandb"]
        own += ["--metrics.disable_color_printing", "--checkpoint.enable", f"--checkpoint.interval={EVERY}"]
        process = self.starter.start([*own, *KINDS[self.kind], *flags, *self.args.flags], log)
        deadline = time.monotonic() + TIMEOUT + self.args.dead
        try:
            while process.poll() is None and not (killed and reached.exists()) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:  # Ctrl-C too
            ended = process.poll() is not None
            if not ended:
                kill(process)
        if ended == killed or (ended and process.returncode):
            raise ValueError(f"run {folder.name} {'failed' if ended else 'got nowhere'}, {ending(log)}")
        say(f"{folder.name}, {log.name}: {'killed' if killed else 'ended'}")
        return read_steps(logged) if logged.exists() else {}, log.read_text(errors="replace")

    def row(self, case: str, done: str, seen: str, log: str, run: Steps, against: str, other: Steps | None) -> None:
        """Adds one, of a run that is compared with another one, unless that is None."""
        row: Row = {"case": case, "run": self.kind, "what was done": done, "what it did": seen}
        row |= {"the log says": log.replace(str(self.args.out), "OUT"), "steps": f"{min(run)} to {max(run)}"}
        if other is not None:
            row |= {"losses": "differ" if gap(run, other) else "equal", "largest gap": gap(run, other)}
        self.rows.append(row | {"against": "" if other is None else against})

    def killed(self, point: str, whole: Steps, faults: Sequence[str] = ()) -> None:
        """Kills a run at a point, and lets it go on to the end."""
        step = FAULT - 1 if point == "checkpoint" else FAULT
        self.train(point, Plan((*faults, point), step, STEPS), killed=True)
        run, log = self.train(point, Plan(tuple(faults), step, STEPS))
        seen = line_of(log, "Training starts at step")
        says = line_of(log, "MXFP8: step .* runs again" if point == "rerun" else "Loading the checkpoint from")
        against = "the same run that nobody killed"
        done = {
            "step": "amid step",
            "checkpoint": "amid the checkpoint of step",
            "rerun": "amid the second run of step",
        }
        self.row(point, f"killed {done[point]} {step}", seen, says, run, against, whole)

    def make(self, of_bf16: dict[str, Steps]) -> None:
        """Those asked for. ``of_bf16``, by case, is what bf16 did, which fills it; others are compared with it."""
        cases = self.args.cases
        whole, _ = self.train("whole", Plan())
        if torch.cuda.is_available():
            again, _ = self.train("again", Plan())
            self.row("none", "the same run twice", described(again), "", again, "the first of the two", whole)
        for point in filter(cases.__contains__, ("step", "checkpoint")):
            self.killed(point, whole)
        if "rerun" in cases or "collapse" in cases:
            collapsed, log = self.train("collapse", Plan(("collapse",), FAULT, STEPS))
            self.fault("collapse", f"all tokens to the first experts from step {FAULT} on", collapsed, log, of_bf16)
        if "rerun" in cases and self.kind == "bf16":
            words = "TorchTitan's dispatch counts rows, and no step runs again"
            self.rows.append({"case": "rerun", "run": self.kind, "what it did": words})
        elif "rerun" in cases:
            self.killed("rerun", collapsed, ("collapse",))
        if "nan" in cases:
            self.take_back(whole, of_bf16)
        if "dead" in cases:
            last = STEPS + self.args.dead - 1
            dead, log = self.train("dead", Plan(("dead",), STEPS, last), "--checkpoint.no-enable", steps=last + REVIVED)
            self.fault("dead", f"expert 0 without tokens in steps {STEPS} to {last}", dead, log, of_bf16)

    def take_back(self, whole: Steps, of_bf16: dict[str, Steps]) -> None:
        """A run with a NaN, and once more from the checkpoint before it."""
        ill, log = self.train("nan", Plan(("nan",), FAULT, FAULT))
        self.fault("nan", f"a token's embedding NaN in step {FAULT}", ill, log, of_bf16)
        well, log = self.train("nan", Plan(), f"--checkpoint.load_step={FAULT - 1}")
        says = line_of(log, "Loading the checkpoint from")
        done, seen = f"from the checkpoint of step {FAULT - 1} on, without the NaN", line_of(log, "Training starts")
        self.row("nan, again", done, seen, says, well, "the run without a fault", whole)

    def fault(self, case: str, done: str, run: Steps, log: str, of_bf16: dict[str, Steps]) -> None:
        """The row of a run with a fault, which says what the run did and is compared with bf16's."""
        pattern = {"nan": "loss: +nan", "collapse": "runs again", "dead": "got no tokens"}[case]
        self.row(case, done, described(run), line_of(log, pattern), run, "bf16 with the same fault", of_bf16.get(case))
        if self.kind == "bf16":
            of_bf16[case] = run


def described(run: Steps) -> str:
    """What a run did, in words."""
    bad = [step for step, row in run.items() if not math.isfinite(row["loss"])]
    losses = [row["loss"] for row in run.values()]
    words = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, " + (
        f"not finite in steps {span(bad)}" if bad else "all finite"
    )
    without = [step for step, row in run.items() if not row["tokens of expert 0"]]
    norms = max((row["grad_norm"] for row in run.values() if math.isfinite(row["grad_norm"])), default=math.nan)
    share = max(row["largest share"] for row in run.values())
    words += f"; gradient norms to {norms:.2f}; largest share of an expert {share:.2f}"
    return words + (f"; expert 0 without tokens in steps {span(without)}" if without else "")


def span(steps: Iterable[int]) -> str:
    """``5 to 8, 10`` of 5, 6, 7, 8, 10."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), lambda item: item[1] - item[0])]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ngpu", type=int, default=2, help="processes, one per GPU [2]")
    add("--dead", type=int, default=200, metavar="STEPS", help="in which an expert gets no token [200]")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="[bf16 MXFP8]")
    add("--cases", nargs="+", default=CASES, choices=CASES, help="[all]")
    add("--out", type=Path, default=Path("outputs/recovery"), help="[%(default)s]")
    own, flags = split_flags(argv)
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    device, rows, of_bf16 = "cuda" if torch.cuda.is_available() else "cpu", [], {}
    shutil.rmtree(args.out / "runs", ignore_errors=True)
    with ends_in_words("recovery", "the same command begins again"), Starter(args.ngpu, args.out / "runs") as starter:
        for kind in args.kinds:
            study = Study(kind, args, starter)
            try:
                study.make(of_bf16)
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
