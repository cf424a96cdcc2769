"""A convergence study from one TOML: every recipe with every seed, then compare_runs.py over the finished runs.

    JOBS=2 ./scripts/converge.sh train_configs/moe_100m.toml --recipes bf16 mxfp8_2d+dispatch --seeds 0 1 2 -- FLAGS

Runs go seed by seed. bf16 is the TOML without its converters. Behind a recipe may stand +rebase, +dispatch,
+requantize, +experts or +linears (these alone are converted) and +repeat (the same once more); what does not stand
there is off, whatever the TOML says. bf16+dispatch is the control: experts that dispatch, with nothing quantised. A
study that is started again skips finished runs and continues others from their checkpoint, with the same data and
tokenizer alone. Flags behind -- go to TorchTitan.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from scripts.progress import ends_in_words, progress, say, step_of
from scripts.study import compare_runs
from scripts.study.conversions import conversion_of
from scripts.study.runs import TRAIN, ending, launch, split_flags
from titan_mxfp8.modules import as_list
from titan_mxfp8.recipe import BF16

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = "checkpoint/step-*/.metadata"
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
DATA = ("training.dataset_path", "validation.dataset_path", "model.hf_assets_path")
TOKENIZER = ("tokenizer*", "vocab*", "merges*")  # files of a model's assets that decide what it sees
EVERY_FLAG = (BF16.name, "mxfp8+rebase+dispatch")  # recipes of which flags_of sets all that it alone may set


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One training run of a study; ``folder`` is its dump folder."""

    recipe: str
    seed: int
    folder: Path

    @property
    def finished(self) -> bool:
        return is_finished(self.folder)

    @property
    def has_checkpoint(self) -> bool:
        return any(self.folder.glob(CHECKPOINTS))


@dataclass(slots=True, kw_only=True)
class Going:
    """A run that was started in one of the slots."""

    run: StudyRun
    slot: int
    process: subprocess.Popen
    started: float


def is_finished(folder: Path) -> bool:
    """Whether its run noted that it ended, and that was not cut short."""
    try:
        return "seconds" in json.loads((folder / "finished.json").read_text())
    except (FileNotFoundError, ValueError):
        return False


def write_json(path: Path, content: dict[str, object]) -> None:
    """All of it or nothing, if the disk is full or this process is killed."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(new, path)


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


def field_of(flag: str) -> str:
    """The field of TorchTitan's config that a flag sets; tyro takes ``-`` for ``_``, and ``no-`` before a name."""
    section, _, name = flag.partition("=")[0].removeprefix("--").replace("-", "_").rpartition(".")
    return f"{section}.{name.removeprefix('no_')}"


def check_flags(flags: Sequence[str], checkpoint_every: int, seeds: str = "--seeds") -> None:
    """Raises ValueError if the user's trailing flags have one that ``flags_of`` sets: of two the last one counts.

    Args:
        seeds: the script's own flag for them.
    """
    instead = {"job.config_file": "the TOML", "job.dump_folder": "--out", "debug.seed": seeds}
    runs = [StudyRun(recipe=recipe, seed=0, folder=Path()) for recipe in EVERY_FLAG]
    own = {field_of(flag) for run in runs for flag in flags_of(run, Path(), checkpoint_every)}
    for flag in flags:
        name = field_of(flag)
        if flag.startswith("--") and name in own:
            use = "--checkpoint-every" if name.startswith("checkpoint.") else instead.get(name, "--recipes")
            raise ValueError(f"{flag} behind -- would override what is set for each run: use {use}")


def start(run: StudyRun, args: argparse.Namespace, slot: int, gpus: int) -> Going:
    """Starts a run on the GPUs of ``slot``: slots go round the GPUs, so more jobs than GPUs share them."""
    if run.folder.exists() and not run.has_checkpoint:
        shutil.rmtree(run.folder)  # logs of steps that will be run again
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = {"WANDB_RUN_NAME": run.folder.name, "WANDB_RUN_GROUP": args.out.name}
    if gpus:
        mine = [(slot * args.ngpu + i) % gpus for i in range(args.ngpu)]
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")  # to the study, whose first GPU need not be the machine's
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(allowed.split(",")[gpu] if allowed else str(gpu) for gpu in mine)
    say(f"{run.folder.name}: started{' from its checkpoint' if run.has_checkpoint else ''}")
    process = launch(
        args.ngpu,
        [*TRAIN, *flags_of(run, args.config, args.checkpoint_every), *args.flags],
        run.folder / "log",
        environment,
        jobs=args.jobs,
        cwd=folder_of(args.config),
        start_new_session=True,  # Ctrl-C reaches the study alone, which then stops its runs
    )
    return Going(run=run, slot=slot, process=process, started=time.monotonic())


def stop(going: list[Going]) -> None:
    """Ends the runs and their workers."""
    for one in going:
        one.process.terminate()  # torchrun hands it on, and kills workers that have not ended after 30 s
    for one in going:
        try:
            one.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        say(f"{one.run.folder.name}: stopped after {time.monotonic() - one.started:.0f} s")


def close(going: Going) -> str:
    """Notes how an ended run ended."""
    name, seconds = going.run.folder.name, time.monotonic() - going.started
    if going.process.returncode:
        say(f"{name}: failed after {seconds:.0f} s, {ending(going.run.folder / 'log')}")
        return FAILED
    try:
        write_json(going.run.folder / "finished.json", {"seconds": round(seconds, 1)})
    except OSError as error:  # if it has checkpoints, the same command ends it again from the last one
        say(f"{name}: finished in {seconds:.0f} s, which cannot be noted: {error}")
        return FAILED
    shutil.rmtree(going.run.folder / "checkpoint", ignore_errors=True)
    say(f"{name}: finished in {seconds:.0f} s")
    return FINISHED


def study(args: argparse.Namespace, asked: Sequence[int]) -> dict[StudyRun, str]:
    """Runs what is not finished yet, until the time limit or until ``asked``, the signals so far, is not empty.

    Returns how each run of the study stands.
    """
    runs = [
        StudyRun(recipe=recipe, seed=seed, folder=args.out / f"{recipe}-seed{seed}")
        for seed in args.seeds
        for recipe in args.recipes
    ]
    gpus = torch.cuda.device_count()
    standing = {run: FINISHED if run.finished else STOPPED for run in runs}
    waiting = [run for run in runs if not run.finished]
    finished = len(runs) - len(waiting)
    say(f"{len(runs)} runs, {finished} finished already, {args.jobs} at a time on {gpus or 'no'} GPUs")
    deadline = time.monotonic() + args.limit if args.limit else float("inf")
    steps = int(value_of("training.steps", args.config, args.flags) or 10000)  # TorchTitan's default
    going: list[Going] = []
    bar = progress(len(waiting) * steps, "study", "step")
    try:
        while (waiting or going) and not asked and time.monotonic() < deadline:
            if waiting and len(going) < args.jobs:
                free = next(slot for slot in range(args.jobs) if slot not in {other.slot for other in going})
                going.append(start(waiting.pop(0), args, free, gpus))
                continue
            time.sleep(1)
            show(bar, going, list(standing), steps)
            for ended in [other for other in going if other.process.poll() is not None]:
                going.remove(ended)
                standing[ended.run] = close(ended)
    finally:
        stop(going)
        bar.close()
    return standing


def show(bar: tqdm, going: Sequence[Going], runs: Sequence[StudyRun], steps: int) -> None:
    """On the bar: how far all runs are together, and which are going, at which step, with which log."""
    now = {one.run: step_of(one.run.folder / "log") for one in going}
    ended = bar.total // steps - sum(not run.finished and run not in now for run in runs) - len(now)
    bar.update(max(0, ended * steps + sum(now.values()) - bar.n))
    words = [f"run {runs.index(run) + 1} of {len(runs)}, step {step} of {steps}" for run, step in now.items()]
    logs = [str(one.run.folder / "log") for one in going[:1]]
    bar.set_postfix_str("; ".join(words + logs))


def folder_of(config: Path) -> Path:
    """Where it is trained, so that its relative paths lead from there: as in launch.sh, the repository for its own
    configs, the current folder for others."""
    return ROOT if config.resolve().is_relative_to(ROOT) else Path.cwd()


def value_of(name: str, config: Path, flags: Sequence[str]) -> object:
    """What a run has in a field such as ``training.steps``, by the flags and then the TOML; None where neither says."""
    section, _, key = name.partition(".")
    value = tomllib.loads(config.read_text()).get(section, {}).get(key)
    for flag, behind in zip(flags, [*flags, ""][1:], strict=True):
        if flag.startswith("--") and field_of(flag) == name:
            value = flag.partition("=")[2] or behind
    return value


def data_of(config: Path, flags: Sequence[str]) -> dict[str, str]:
    """The sha256 of each file of data and tokenizer that runs see, by the field of TorchTitan's config and its name
    below that. Of what is not on this machine there is none."""
    found = {}
    for name in DATA:
        value = value_of(name, config, flags)
        if not value or not (top := folder_of(config) / str(value)).exists():
            continue
        patterns = TOKENIZER if name.endswith("hf_assets_path") else ("**/*",)
        paths = sorted(path for pattern in patterns for path in top.glob(pattern)) if top.is_dir() else [top]
        for path in filter(Path.is_file, paths):
            with path.open("rb") as file:
                found[f"{name}/{path.relative_to(top)}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what would fail later, and OSError if the study's folder cannot be written."""
    if not args.config.is_file():
        raise ValueError(f"{args.config} is no file; ls train_configs")
    for flag, values in (("--recipes", args.recipes), ("--seeds", args.seeds)):
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{flag} has {twice[0]} twice")  # two runs would write one folder
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
    (args.out / ".writable").touch()
    (args.out / ".writable").unlink()
    data = data_of(args.config, args.flags)
    described = {"config": args.config.read_text(), "flags": args.flags, "ngpu": args.ngpu, "data": data}
    kept = args.out / "study.json"
    trained = any(any(args.out.glob(f"*-seed*/{kind}")) for kind in ("finished.json", CHECKPOINTS))
    if trained and kept.is_file() and json.loads(kept.read_text()) != described:
        raise ValueError(
            f"{args.out} holds a study of another config, other flags or other data ({kept}): name another --out, or "
            "remove this folder with its runs"
        )
    write_json(kept, described)


def compare(args: argparse.Namespace) -> None:
    """Compares all finished runs in the study's folder, if there are any."""

    def place(folder: Path) -> tuple[int, str, int]:
        recipe, _, seed = folder.name.rpartition("-seed")
        return args.recipes.index(recipe) if recipe in args.recipes else len(args.recipes), recipe, int(seed)

    finished = sorted(filter(is_finished, args.out.glob("*-seed*")), key=place)
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
    add("--limit", type=float, metavar="SECONDS", help="stop then; the same command continues the study")
    help_text = "0: no checkpoints, runs that stop start anew [500]"
    add("--checkpoint-every", type=int, default=500, metavar="STEPS", help=help_text)
    add("--window", type=float, default=0.1, help="of compare_runs.py [0.1]")
    add("--margin", type=float, default=0.005, help="of compare_runs.py [0.005]")
    own, flags = split_flags(argv)
    args = parser.parse_args(own, argparse.Namespace(flags=flags))
    for flag, least in (("jobs", 1), ("ngpu", 1), ("checkpoint_every", 0)):
        if getattr(args, flag) < least:
            parser.error(f"--{flag.replace('_', '-')} is at least {least}, got {getattr(args, flag)}")
    if args.limit is not None and not args.limit > 0:
        parser.error(f"--limit is above 0 seconds, got {args.limit:g}; without it there is no limit")
    args.out = (args.out or Path("outputs") / f"study_{args.config.stem}").absolute()
    args.config = args.config.absolute() if args.config.is_file() else ROOT / args.config
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    with ends_in_words("converge"):
        check(args)
    asked: list[int] = []  # to stop: exceptions might leave a run that was just started
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    standing = study(args, asked)
    counts = {state: list(standing.values()).count(state) for state in (FINISHED, FAILED, STOPPED)}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    compare(args)
    if counts[STOPPED]:
        print("the same command continues the study")
    sys.exit(1 if counts[FAILED] else 3 if counts[STOPPED] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
