"""A convergence study from one TOML: every recipe with every seed, then compare_runs.py over the finished runs.

    JOBS=2 ./scripts/converge.sh train_configs/moe_100m.toml --recipes bf16 mxfp8_2d+dispatch --seeds 0 1 2 -- FLAGS

Runs go seed by seed. bf16 is the TOML without its converters. Behind a recipe may stand +rebase, +dispatch,
+requantize, +experts or +linears (these alone are converted) and +repeat (the same once more); what does not stand
there is off, whatever the TOML says. bf16+dispatch is the control: experts that dispatch, with nothing quantised. A
study that is started again skips finished runs and continues others from their checkpoint. Flags behind -- go to
TorchTitan.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import torch

from scripts.progress import ends_in_words, progress, say, step_of
from scripts.result_files import write_json
from scripts.study import compare_runs
from scripts.study.conversions import conversion_of
from scripts.study.runs import TRAIN, ending, field_of, launch, split_flags, value_of
from titan_mxfp8.modules import as_list
from titan_mxfp8.recipe import BF16

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS, NOTE = "checkpoint/step-*/.metadata", "finished.json"  # in a run's folder
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
EVERY_FLAG = (BF16.name, "mxfp8+rebase+dispatch")  # recipes of which flags_of sets all that it alone may set


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One training run of a study; ``folder`` is its dump folder."""

    recipe: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"


def is_finished(folder: Path) -> bool:
    """Whether its run noted that it ended."""
    return (folder / NOTE).is_file()


def flags_of(run: StudyRun, config: Path, checkpoint_every: int) -> list[str]:
    """TorchTitan's command line of a run, without the user's trailing flags."""
    flags = [f"--job.config_file={config}", f"--job.dump_folder={run.folder}", f"--debug.seed={run.seed}"]
    conversion = conversion_of(run.recipe)
    if conversion.what != "both":
        flags.append(f"--model.converters={','.join(conversion.converters)}")
    flags += conversion.flags()
    if checkpoint_every:
        flags += ["--checkpoint.enable", f"--checkpoint.interval={checkpoint_every}", "--checkpoint.folder=checkpoint"]
        flags += ["--checkpoint.no-last_save_model_only"]  # a run whose end cannot be noted is ended again from it
    return flags


def check_flags(flags: Sequence[str], checkpoint_every: int) -> None:
    """Raises ValueError if the user's trailing flags have one that ``flags_of`` sets: of two the last one counts."""
    instead = {"job.config_file": "the TOML", "job.dump_folder": "--out", "debug.seed": "--seeds"}
    runs = (StudyRun(recipe, 0, Path()) for recipe in EVERY_FLAG)
    own = {field_of(flag) for run in runs for flag in flags_of(run, Path(), checkpoint_every)}
    for flag in flags:
        name = field_of(flag)
        if flag.startswith("--") and name in own:
            use = "--checkpoint-every" if name.startswith("checkpoint.") else instead.get(name, "--recipes")
            raise ValueError(f"{flag} behind -- would override what is set for each run: use {use}")


def environment_of(run: StudyRun, args: argparse.Namespace, slot: int) -> dict[str, str]:
    """What a run is told besides its flags: its name, and the GPUs of ``slot``. Slots go round the GPUs, so more jobs
    than GPUs share them."""
    environment = {"WANDB_RUN_NAME": run.folder.name, "WANDB_RUN_GROUP": args.out.name}
    if gpus := torch.cuda.device_count():
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")  # to the study, whose first GPU need not be the machine's
        names = allowed.split(",") if allowed else [*map(str, range(gpus))]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[(slot * args.ngpu + i) % gpus] for i in range(args.ngpu))
    return environment


def train(run: StudyRun, args: argparse.Namespace, slot: int, asked: Event) -> str:
    """Trains until it has ended or is ``asked`` to; how it ended."""
    name, started = run.folder.name, time.monotonic()
    goes_on = any(run.folder.glob(CHECKPOINTS))
    if run.folder.exists() and not goes_on:
        shutil.rmtree(run.folder)  # logs of steps that will be run again
    run.folder.mkdir(parents=True, exist_ok=True)
    say(f"{name}: started{' from its checkpoint' if goes_on else ''}")
    process = launch(
        args.ngpu,
        # TensorBoard's log is what is compared
        [*TRAIN, *flags_of(run, args.config, args.checkpoint_every), "--metrics.enable_tensorboard", *args.flags],
        run.log,
        environment_of(run, args, slot),
        jobs=args.jobs,
        cwd=folder_of(args.config),
        start_new_session=True,  # Ctrl-C reaches the study alone, which then stops its runs
    )
    while process.poll() is None and not asked.is_set():
        time.sleep(1)
    if process.poll() is None:
        process.terminate()  # torchrun hands it on, and kills workers that have not ended after 30 s
        try:
            process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        say(f"{name}: stopped after {time.monotonic() - started:.0f} s")
        return STOPPED
    seconds = time.monotonic() - started
    if process.returncode:
        say(f"{name}: failed after {seconds:.0f} s, {ending(run.log)}")
        return FAILED
    write_json(run.folder / NOTE, {"seconds": round(seconds, 1)})
    shutil.rmtree(run.folder / "checkpoint", ignore_errors=True)
    say(f"{name}: finished in {seconds:.0f} s")
    return FINISHED


def study(args: argparse.Namespace, asked: Event) -> list[str]:
    """Runs what is not finished yet, until the time limit or until it is ``asked`` to stop; how each run stands."""
    order = product(args.seeds, args.recipes)
    runs = [StudyRun(recipe, seed, args.out / f"{recipe}-seed{seed}") for seed, recipe in order]
    due = [run for run in runs if not is_finished(run.folder)]
    said = f"{len(runs)} runs, {len(runs) - len(due)} finished already, {args.jobs} at a time on"
    say(f"{said} {torch.cuda.device_count() or 'no'} GPUs")
    deadline = time.monotonic() + args.limit
    steps = int(value_of("training.steps", args.config, args.flags) or 10000)  # TorchTitan's default
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(args.jobs):
        slots.put(slot)

    def train_in_a_slot(run: StudyRun) -> str:
        slot = slots.get()
        try:
            return STOPPED if asked.is_set() else train(run, args, slot, asked)
        except OSError as error:  # as of a full disk; a run that had ended is ended again from its last checkpoint
            say(f"{run.folder.name}: failed: {error}")
            return FAILED
        finally:
            slots.put(slot)

    with progress(len(due) * steps, "study", "step") as bar, ThreadPoolExecutor(args.jobs) as pool:
        jobs = {run: pool.submit(train_in_a_slot, run) for run in due}
        try:
            while not all(job.done() for job in jobs.values()):
                time.sleep(1)
                if time.monotonic() > deadline:
                    asked.set()
                going = {run: step_of(run.log) for run, job in jobs.items() if job.running()}
                ended = sum(job.done() for job in jobs.values())
                bar.update(max(0, ended * steps + sum(going.values()) - bar.n))
                words = [
                    f"run {runs.index(run) + 1} of {len(runs)}, step {step} of {steps}" for run, step in going.items()
                ]
                bar.set_postfix_str("; ".join([*words, *(str(run.log) for run in [*going][:1])]))
        finally:
            asked.set()  # an error here must not let the pool train what is left
    return [jobs[run].result() if run in jobs else FINISHED for run in runs]


def folder_of(config: Path) -> Path:
    """Where it is trained, so that its relative paths lead from there: as in launch.sh, the repository for its own
    configs, the current folder for others."""
    return ROOT if config.resolve().is_relative_to(ROOT) else Path.cwd()


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what would fail later, and OSError if the study's folder cannot be written."""
    if not args.config.is_file():
        raise ValueError(f"{args.config} is no file; ls train_configs")
    compare_runs.check_shares(args.window, args.margin)
    for flag, values in (("--recipes", args.recipes), ("--seeds", args.seeds)):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{flag} has {twice[0]} twice")  # two runs would write one folder
    if (least := min(args.seeds)) < 0:
        raise ValueError(f"--seeds has {least}, a number below 0")  # folders of runs are not named so
    converters = as_list(value_of("model.converters", args.config, []) or [])
    for recipe in args.recipes:
        conversion_of(recipe).flags()  # which there may not be
        needed = conversion_of(recipe).converters
        if needed and not set(needed) & set(converters):
            raise ValueError(f"{args.config} has model.converters = {converters}: {recipe} needs {' or '.join(needed)}")
    check_flags(args.flags, args.checkpoint_every or 1)  # those of checkpoints in any case: start deletes unknown ones
    gpus = torch.cuda.device_count()
    if gpus and args.ngpu > gpus:
        raise ValueError(f"--ngpu {args.ngpu}, but this machine has {gpus} GPUs")
    args.out.mkdir(parents=True, exist_ok=True)
    described = {"config": args.config.read_text(), "flags": args.flags, "ngpu": args.ngpu}
    kept = args.out / "study.json"
    trained = any(any(args.out.glob(f"*-seed*/{kind}")) for kind in (NOTE, CHECKPOINTS))
    if trained and kept.is_file() and (earlier := json.loads(kept.read_text())) | described != earlier:
        instead = "name another --out, or remove this folder with its runs"
        raise ValueError(f"{args.out} holds a study of another config or other flags ({kept}): {instead}")
    write_json(kept, described)


def compare(args: argparse.Namespace) -> None:
    """Compares all finished runs in the study's folder, if there are any."""

    def place(folder: Path) -> tuple[int, str, int]:
        recipe, _, seed = folder.name.rpartition("-seed")
        return args.recipes.index(recipe) if recipe in args.recipes else len(args.recipes), recipe, int(seed)

    folders = (folder for folder in args.out.glob("*-seed*") if folder.name.rpartition("-seed")[2].isdecimal())
    finished = sorted(filter(is_finished, folders), key=place)
    if finished and place(finished[0])[0] > 0:
        print(f"nothing to compare with: no run of {args.recipes[0]} is finished")
    elif finished:
        options = ["--out", str(args.out), "--window", str(args.window), "--margin", str(args.margin)]
        compare_runs.main([*map(str, finished), *options])


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", type=Path, metavar="TOML", help="a config with both MXFP8 converters, here or in the repository")
    recipes = ["bf16", "mxfp8", "mxfp8_2d"]
    add("--recipes", nargs="+", default=recipes, help="[bf16 mxfp8 mxfp8_2d], the first is the baseline")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="[0 1 2]")
    add("--out", type=Path, help="folder of the study [outputs/study_<config>]")
    jobs, ngpu = (os.environ.get(name) or 1 for name in ("JOBS", "NGPU"))
    add("--jobs", type=int, default=jobs, help="runs at a time; more than GPUs share them [JOBS, or 1]")
    add("--ngpu", type=int, default=ngpu, help="processes of one run, one per GPU [NGPU, or 1]")
    help_text = "stop then; the same command continues the study"
    add("--limit", type=float, default=math.inf, metavar="SECONDS", help=help_text)
    help_text = "0: no checkpoints, runs that stop start anew [500]"
    add("--checkpoint-every", type=int, default=500, metavar="STEPS", help=help_text)
    add("--window", type=float, default=0.1, help="of compare_runs.py [0.1]")
    add("--margin", type=float, default=0.005, help="of compare_runs.py [0.005]")
    own, flags = split_flags(argv)
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    for flag, least in (("jobs", 1), ("ngpu", 1), ("checkpoint_every", 0)):
        if getattr(args, flag) < least:
            parser.error(f"--{flag.replace('_', '-')} is at least {least}, got {getattr(args, flag)}")
    args.out = (args.out or Path("outputs") / f"study_{args.config.stem}").absolute()
    args.config = args.config.absolute() if args.config.is_file() else ROOT / args.config
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    with ends_in_words("converge"):
        check(args)
    asked = Event()  # to stop: exceptions might leave a run that was just started
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup has it do
        signals.append(signal.SIGHUP)  # the terminal is gone, which the runs, in sessions of their own, are not told
    for number in signals:
        signal.signal(number, lambda *_: asked.set())
    states = study(args, asked)
    counts = {state: states.count(state) for state in (FINISHED, FAILED, STOPPED)}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    compare(args)
    if counts[STOPPED]:
        print("the same command continues the study")
    sys.exit(1 if counts[FAILED] else 3 if counts[STOPPED] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
