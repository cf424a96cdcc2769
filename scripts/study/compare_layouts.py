"""Trains each parallel layout of TorchTitan and a twin in one process, and compares their losses step by step.

    python scripts/study/compare_layouts.py --devices cpu --out outputs/layouts    # or --devices 4, on GPUs

Both start from one seed checkpoint and see the same sequences in the same steps; the twin's batch holds the sequences
whose tokens meet in one expert GEMM of the layout, so that weight gradients are quantised in the same blocks. In fp32,
unless --precision says otherwise, what is left is the order of summation. The same pair without converters shows how
much is not MXFP8's. A row of data.csv is a pair; one that failed says why, and the exit status is 1.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.bench.problems import relative_rms
from scripts.progress import ends_in_words, progress
from scripts.result_files import environment, format_table, write_results
from scripts.study.layouts import LAYOUTS, Layout, twin_of
from scripts.study.runs import LOSS, cores_each, launch, read_tensorboard
from scripts.watch import message
from titan_mxfp8.backends import select
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.recipe import GROUPED_MM, get_recipe

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "train_configs" / "assets"
MODELS = ("llama4", "deepseek_v3")
SEQ_LEN = 128
GRAD_NORM = "grad_norm"
TIME_LIMIT = "not run: time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    layout: Layout
    model: str
    kind: str  # "plain": no converters, or "mxfp8": both
    dispatch: str = "off"  # of converted experts
    compile: bool = False

    @property
    def name(self) -> str:
        words = f"{self.layout.name} {self.model} {self.kind}" + " compiled" * self.compile
        words += f" dispatch {self.dispatch}" * (self.dispatch != "off")
        return re.sub(r"\W+", "_", words)

    def plain(self) -> "Run":
        return replace(self, kind="plain", dispatch="off")

    def twin(self) -> "Run":
        return replace(self, layout=twin_of(self.layout), compile=False)


class Comparison:
    """The runs of one call, in a folder of its own."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.work = work
        self.status: dict[Run, str] = {}
        self.deadline = time.monotonic() + args.limit
        hardware = hardware_of(torch.device("cuda:0" if args.gpus else "cpu"))
        self.backend = select("auto", hardware, get_recipe("mxfp8")).name
        self.bar = progress(1, "seed checkpoints")
        self.rows = make_rows(args.steps * max(x.data_ranks * x.accumulate * x.batch for x in LAYOUTS))

    def folder(self, run: Run) -> Path:
        return self.work / run.name

    def flags(self, run: Run) -> list[str]:
        layout = run.layout
        flags = [
            *self.common_flags(run.model, self.folder(run)),
            f"--training.steps={self.args.steps}",
            f"--training.dataset_path={self.data(layout)}",
            f"--training.local_batch_size={layout.batch}",
            f"--training.global_batch_size={layout.data_ranks * layout.accumulate * layout.batch}",
            f"--checkpoint.initial_load_path={self.work}/seed_{run.model}/checkpoint/step-0",
            "--checkpoint.load_only",
            f"--{GROUPED_MM}.dispatch={run.dispatch}",
            *layout.flags,
        ]
        flags += ["--compile.enable"] * run.compile
        return flags + ["--model.converters="] * (run.kind == "plain")

    def common_flags(self, model: str, out: Path) -> list[str]:
        return [
            f"--job.config_file={ROOT}/train_configs/debug_{model}.toml",
            f"--job.dump_folder={out}",
            f"--model.hf_assets_path={ASSETS}/tokenizer",
            f"--training.dataset_path={ASSETS}/kjv",
            f"--training.seq_len={SEQ_LEN}",
            f"--training.mixed_precision_param={self.args.precision}",
            "--training.max_norm=0.1",
            "--checkpoint.enable",
            "--metrics.no_enable_wandb",
        ]

    def data(self, layout: Layout) -> Path:
        return self.work / f"data_{layout.data_ranks}_{layout.accumulate}_{layout.batch}"

    def write_data(self, layout: Layout) -> None:
        """The rows in the order in which the layout's data ranks read them, each its contiguous share of the file."""
        of_rank = layout.accumulate * layout.batch  # sequences in a step
        steps = len(self.rows) // (layout.data_ranks * of_rank)
        begins = [
            of_rank * (step * layout.data_ranks + rank)
            for rank, step in product(range(layout.data_ranks), range(steps))
        ]
        lines = [json.dumps({"text": row}) for begin in begins for row in self.rows[begin : begin + of_rank]]
        self.data(layout).mkdir(exist_ok=True)
        (self.data(layout) / "data.jsonl").write_text("\n".join(lines) + "\n")

    def make_seeds(self, models: Iterable[str]) -> None:
        """Saves the weights that all runs of a model start from, as TorchTitan draws others for each pipeline stage.

        Raises:
            ValueError: that failed.
        """
        seeds = {model: self.work / f"seed_{model}" for model in models}
        created = "--checkpoint.create_seed_checkpoint"
        runs = [{"out": str(o), "flags": [*self.common_flags(model, o), created]} for model, o in seeds.items()]
        if reason := self.torchrun(1, runs):
            raise ValueError(f"no seed checkpoint: {reason}")

    def train(self, runs: list[Run]) -> None:
        """Trains runs of one number of processes in one launch; after a failure the rest are launched again."""
        while runs:
            configs = [
                {"out": str(self.folder(r)), "flags": self.flags(r), "favoured_experts": r.layout.favoured_experts}
                for r in runs
            ]
            reason = self.torchrun(runs[0].layout.processes, configs)
            done = [run for run in runs if (self.folder(run) / "done").exists()]
            self.status |= dict.fromkeys(done, "ok")
            runs = runs[len(done) :]
            if reason == TIME_LIMIT:
                self.status |= dict.fromkeys(runs, TIME_LIMIT)
                return
            if runs:
                self.status[runs[0]] = reason
                runs = runs[1:]

    def torchrun(self, processes: int, runs: list[dict]) -> str:
        """Runs ``train_many.py``, with a log in OUT; if it failed, the reason."""
        number = time.monotonic_ns()
        config, log = self.work / f"runs_{number}.json", self.args.out / "logs" / f"{number}.log"
        config.write_text(json.dumps(runs))
        log.parent.mkdir(parents=True, exist_ok=True)
        program = [str(Path(__file__).with_name("train_many.py")), str(config)]
        process = launch(processes, program, log, self.environment(processes), cwd=ROOT)
        done = 0
        while process.poll() is None:
            time.sleep(0.2)
            now = sum((Path(run["out"]) / "done").exists() for run in runs)
            self.bar.update(now - done)
            done = now
            if time.monotonic() > self.deadline:
                process.terminate()  # torchrun ends its workers, within 30 s
                process.wait()
                return TIME_LIMIT
        return f"{message(log.read_text(errors='replace')) or 'no exception'} ({log})" if process.returncode else ""

    def environment(self, processes: int) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "TORCHINDUCTOR_COMPILE_THREADS": str(cores_each(processes)),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.work / "datasets"),
            "WANDB_MODE": "disabled",
        }
        return own | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(min(processes, self.args.gpus))))}

    def row(self, run: Run) -> dict[str, object]:
        """The comparison of one layout, from its four runs; ``run`` is the MXFP8 one."""
        row: dict[str, object] = {
            "layout": run.layout.name,
            "twin": twin_of(run.layout).name,
            "model": run.model,
            "converters": "grouped_mm, linear",
            "dispatch": run.dispatch,
            "compile": run.compile,
            "precision": self.args.precision,
            "backend": self.backend,
            "steps": self.args.steps,
        }
        problems = []
        for kind, one in (("mxfp8", run), ("plain", run.plain())):
            pair = one, one.twin()
            problems += [f"{r.name}: {s}" for r in pair if (s := self.status.get(r, "not run yet")) != "ok"]
            if problems:
                continue
            folders = [self.folder(each) for each in pair]
            try:
                (losses, norms), (twin_losses, twin_norms) = (losses_and_norms(f, self.args.steps) for f in folders)
            except ValueError as error:
                problems.append(str(error))
                continue
            row[f"{kind}_max_difference"] = max(abs(losses[step] - twin_losses[step]) for step in losses)
            row[f"{kind}_gradient_difference"], row[f"{kind}_worst_gradient"] = worst_gradient(*folders)
            row[f"{kind}_grad_norm_ratio"] = norms[1] / twin_norms[1]
            row[f"{kind}_weights_equal"] = weights(folders[0]) == weights(folders[1])
            if kind == "mxfp8":
                row["first_loss"], row["last_loss"] = losses[1], losses[self.args.steps]
                row["fall"] = losses[1] - losses[self.args.steps]
        row["status"] = "; ".join(problems) or "ok"
        return row


def make_rows(count: int) -> list[str]:
    """Texts that are one training sequence each: ``SEQ_LEN`` + 1 tokens, the ones that mark begin and end included."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    with (ASSETS / "kjv" / "data.jsonl").open() as file:
        text = " ".join(json.loads(line)["text"] for line in file)
    tokens = SEQ_LEN + 1 - 2
    rng = random.Random(0)
    rows: list[str] = []
    while len(rows) < count:
        begin = rng.randrange(len(text) - 20 * tokens)
        piece = text[begin : begin + 20 * tokens]
        row = piece[: tokenizer.encode(piece).offsets[tokens - 1][1]]
        if len(tokenizer.encode(row).ids) == tokens:  # a word that was cut may be merged another way
            rows.append(row)
    return rows


def losses_and_norms(folder: Path, steps: int) -> tuple[dict[int, float], dict[int, float]]:
    """Loss and gradient norm by step, from the run's TensorBoard log.

    Raises:
        ValueError: it has not every step.
    """
    scalars = read_tensorboard(folder)
    for tag in (LOSS, GRAD_NORM):
        if list(scalars.get(tag, {})) != list(range(1, steps + 1)):
            raise ValueError(f"{folder.name}: {tag} logged at steps {list(scalars.get(tag, {}))}")
    return scalars[LOSS], scalars[GRAD_NORM]


def weights(folder: Path) -> dict[str, str]:
    """Hashes of a run's first weights; a set of two where ranks that share a weight disagree about it."""
    merged: dict[str, set[str]] = {}
    for path in folder.glob("weights_*.json"):
        for name, digest in json.loads(path.read_text()).items():
            merged.setdefault(name, set()).add(digest)
    return {name: "+".join(sorted(digests)) for name, digests in merged.items()}


def worst_gradient(folder: Path, twin: Path) -> tuple[float, str]:
    """Largest relative RMS difference of a parameter's first gradient, which has been clipped, and its name."""
    one, other = (
        {name: grad for path in f.glob("gradients_*.pt") for name, grad in torch.load(path).items()}
        for f in (folder, twin)
    )
    if one.keys() != other.keys():
        return float("inf"), ", ".join(sorted(one.keys() ^ other.keys()))
    return max((relative_rms(one[name], other[name]), name) for name in one)


def launches(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs with the same number of processes share a launch.

    Eager runs come before compiled ones, and twins, which have one process, before the layouts.
    """

    def shared(run: Run) -> tuple[bool, int]:
        return run.compile, run.layout.processes

    return [list(group) for _, group in groupby(sorted(dict.fromkeys(runs), key=shared), shared)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for data.csv, env.json and logs")
    add("--devices", default="cpu", help="cpu, or the number of GPUs [cpu]")
    help_text = "names of layouts, each alone or behind a model's as in 'llama4 TP 2' [all that the devices allow]"
    add("--only", nargs="+", metavar="LAYOUT", help=help_text)
    add("--models", nargs="+", default=MODELS, choices=MODELS)
    help_text = "quantize.grouped_mm.mx.dispatch of a layout, named as for --only, or of a model [off]"
    add("--dispatch", nargs="+", default=[], metavar="LAYOUT=WAY", help=help_text)
    add("--steps", type=int, default=10)
    add("--compile", default="no", choices=("no", "yes", "both"), help="with --compile.enable [no]")
    add("--precision", default="float32", choices=("float32", "bfloat16"))
    add("--limit", type=float, default=500, help="seconds after which the rest is not run [500]")
    args = parser.parse_args()
    if args.devices != "cpu" and not args.devices.isdigit():
        parser.error(f"--devices takes cpu or a number of GPUs, not {args.devices!r}")
    args.gpus = 0 if args.devices == "cpu" else int(args.devices)
    if args.gpus > torch.cuda.device_count():
        parser.error(f"--devices {args.devices}, but this machine has {torch.cuda.device_count()} GPUs")
    args.dispatch = dict(pair.partition("=")[::2] for pair in args.dispatch)
    names = [layout.name for layout in LAYOUTS]
    known = {*names, *(f"{model} {name}" for model in args.models for name in names)}
    if unknown := set(args.only or ()) - known or set(args.dispatch) - known - set(MODELS):
        parser.error(f"unknown layouts {sorted(unknown)}; there are {names}")
    return args


def main() -> int:
    args = parse_arguments()
    layouts = [x for x in LAYOUTS if (x.processes <= args.gpus if args.gpus else not x.gpu_only)]
    compiled = {"no": (False,), "yes": (True,), "both": (False, True)}[args.compile]
    pairs = []
    for flag, model, layout in product(compiled, args.models, layouts):
        names = f"{model} {layout.name}", layout.name, model
        if not args.only or set(names[:2]) & set(args.only):
            ways = [args.dispatch[name] for name in names if name in args.dispatch]
            pairs.append(Run(layout=layout, model=model, kind="mxfp8", compile=flag, dispatch=[*ways, "off"][0]))
    runs = [run for pair in pairs for run in (pair, pair.plain())]
    twins = [run.twin() for run in runs]
    env = environment("cuda" if args.gpus else "cpu") | {"command": " ".join(sys.argv)}

    with tempfile.TemporaryDirectory() as work:
        comparison = Comparison(args, Path(work))
        for run in (*twins, *runs):
            comparison.write_data(run.layout)
        comparison.make_seeds(args.models)
        launched = launches(twins + runs)
        with progress(sum(map(len, launched)), "layouts") as comparison.bar:
            for group in launched:
                comparison.train(group)
                rows = [comparison.row(run) for run in pairs]
                write_results(args.out, rows, env)
    print(format_table(rows))
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    with ends_in_words("compare_layouts", "OUT has the pairs that ended; --only names those that are left"):
        sys.exit(main())
