"""Trains each parallel layout of TorchTitan and a twin in one process, and compares their losses step by step.

    python scripts/study/compare_layouts.py --out outputs/layouts    # on CPUs; on GPUs --ngpu 4

Both start from one seed checkpoint and see the same sequences in the same steps; the twin's batch holds the sequences
whose tokens meet in one expert GEMM of the layout, so that weight gradients are quantised in the same blocks. In fp32
what is left is the order of summation. The same pair without converters shows how much is not MXFP8's. A row of
data.csv is a pair; one that failed says why, and the exit status is 1.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from operator import attrgetter
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.bench.problems import relative_rms
from scripts.progress import ends_in_words, progress
from scripts.result_files import environment, format_table, write_results
from scripts.study.runs import LOSS, cores_each, launch, read_tensorboard
from scripts.watch import message
from titan_mxfp8.backends import select
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.recipe import GROUPED_MM, get_recipe

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "train_configs" / "assets"
MODELS = ("llama4", "deepseek_v3")
SEQ_LEN = 128
BATCH = 2  # sequences of one rank in one microbatch
GRAD_NORM = "grad_norm"


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread a training over processes.

    Attributes:
        data_ranks: data-parallel degree: ranks that read data of their own.
        expert_batch: sequences whose tokens meet in one expert GEMM: ``batch`` times the data ranks that expert
            parallelism joins, or the microbatch of a pipeline times them.
        flags: TorchTitan's, besides those that every run has.
        accumulate: microbatches of each data rank in a step.
        batch: sequences in a microbatch.
        favoured_experts: so many experts, the first ones, get every token: under EP some ranks get none.
    """

    name: str
    processes: int
    data_ranks: int
    expert_batch: int
    flags: tuple[str, ...] = ()
    accumulate: int = 1
    batch: int = BATCH
    favoured_experts: int = 0

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.data_ranks * self.accumulate * self.batch

    def twin(self) -> "Layout":
        """One process that reads the layout's sequences in microbatches of ``expert_batch``."""
        own, count = self.expert_batch, self.sequences // self.expert_batch
        name = f"1 process {count} x {own}" + " favoured" * (self.favoured_experts > 0)
        return replace(self, name=name, processes=1, flags=(), data_ranks=1, accumulate=count, batch=own)


def parallel(**degrees: int | str) -> tuple[str, ...]:
    """``parallel(tensor=2)`` gives ``--parallelism.tensor_parallel_degree=2``; likewise for each of TorchTitan's."""
    names = {"reshard": "fsdp_reshard_after_forward", "schedule": "pipeline_parallel_schedule"}
    names |= {"shard": "data_parallel_shard_degree", "replicate": "data_parallel_replicate_degree"}
    return tuple(f"--parallelism.{names.get(key, f'{key}_parallel_degree')}={value}" for key, value in degrees.items())


INTERLEAVED, ONE = "Interleaved1F1B", "1F1B"
LAYOUTS = (  # TorchTitan takes the experts' ranks (EP) from those of FSDP and TP
    Layout("FSDP 2", 2, 2, 2),
    Layout("FSDP 2 accumulate 2", 2, 2, 2, accumulate=2),
    Layout("DDP 2", 2, 2, 2, parallel(replicate=2, shard=1)),
    Layout("EP 2", 2, 2, 4, parallel(expert=2)),
    Layout("EP 2 always reshard", 2, 2, 4, parallel(expert=2, reshard="always")),
    Layout("EP 2 never reshard", 2, 2, 4, parallel(expert=2, reshard="never")),
    Layout("EP 2 one rank gets every token", 2, 2, 4, parallel(expert=2), favoured_experts=4),
    Layout("TP 2", 2, 1, 2, parallel(tensor=2)),
    Layout("PP 2", 2, 1, 1, parallel(pipeline=2, schedule=ONE)),
    Layout("PP 2 interleaved", 2, 1, 1, parallel(pipeline=2, schedule=INTERLEAVED)),
    Layout("CP 2", 2, 1, 2, parallel(context=2)),
    Layout("FSDP 4 + EP 2", 4, 4, 4, parallel(expert=2)),
    Layout("FSDP 4 + EP 4", 4, 4, 8, parallel(expert=4)),
    Layout("HSDP 2x2", 4, 4, 2, parallel(replicate=2, shard=2)),
    Layout("HSDP 2x2 + EP 2", 4, 4, 4, parallel(replicate=2, shard=2, expert=2)),
    Layout("HSDP 2x2 + EP 2 accumulate 2", 4, 4, 4, parallel(replicate=2, shard=2, expert=2), accumulate=2),
    Layout("TP 4", 4, 1, 2, parallel(tensor=4)),
    Layout("FSDP 2 + TP 2", 4, 2, 2, parallel(tensor=2)),
    Layout("FSDP 2 + TP 2 + EP 2", 4, 2, 2, parallel(tensor=2, expert=2)),
    Layout("FSDP 2 + TP 2 + EP 4", 4, 2, 4, parallel(tensor=2, expert=4)),
    Layout("FSDP 2 + TP 2 + EP 2 + ETP 2", 4, 2, 4, parallel(tensor=2, expert=2, expert_tensor=2)),
    Layout("PP 2 + FSDP 2 + EP 2", 4, 2, 2, parallel(pipeline=2, schedule=ONE, expert=2)),
    Layout("PP 2 interleaved + FSDP 2 + EP 2", 4, 2, 2, parallel(pipeline=2, schedule=INTERLEAVED, expert=2)),
    Layout("PP 2 + TP 2", 4, 1, 1, parallel(pipeline=2, schedule=ONE, tensor=2)),
    Layout("CP 2 + FSDP 2 + EP 2", 4, 2, 2, parallel(context=2, expert=2)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        kind: "plain", without converters, or "mxfp8", with both.
        dispatch: ``quantize.grouped_mm.mx.dispatch``.
    """

    layout: Layout
    model: str
    kind: str
    dispatch: str = "off"
    compile: bool = False

    @property
    def name(self) -> str:
        words = f"{self.layout.name} {self.model} {self.kind}" + " compiled" * self.compile
        words += f" dispatch {self.dispatch}" * (self.dispatch != "off")
        return re.sub(r"\W+", "_", words)

    def plain(self) -> "Run":
        return replace(self, kind="plain", dispatch="off")

    def twin(self) -> "Run":
        return replace(self, layout=self.layout.twin(), compile=False)


class Comparison:
    """The runs of one call, in a folder of its own."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.failed: dict[Run, str] = {}
        self.rows = make_rows(args.steps * max(layout.sequences for layout in LAYOUTS))

    def status(self, run: Run) -> str:
        return "ok" if (self.work / run.name / "done").exists() else self.failed.get(run, "not run yet")

    def flags(self, run: Run) -> list[str]:
        layout = run.layout
        flags = [
            *self.common_flags(run.model, self.work / run.name),
            f"--training.steps={self.args.steps}",
            f"--training.dataset_path={self.data(layout)}",
            f"--training.local_batch_size={layout.batch}",
            f"--training.global_batch_size={layout.sequences}",
            f"--checkpoint.initial_load_path={self.work}/seed_{run.model}/checkpoint/step-0",
            "--checkpoint.load_only",
            f"--{GROUPED_MM}.dispatch={run.dispatch}",
            *layout.flags,
        ]
        return flags + ["--compile.enable"] * run.compile + ["--model.converters="] * (run.kind == "plain")

    def common_flags(self, model: str, out: Path) -> list[str]:
        return [
            f"--job.config_file={ROOT}/train_configs/debug_{model}.toml",
            f"--job.dump_folder={out}",
            f"--model.hf_assets_path={ASSETS}/tokenizer",
            f"--training.dataset_path={ASSETS}/kjv",
            f"--training.seq_len={SEQ_LEN}",
            "--training.mixed_precision_param=float32",
            "--training.max_norm=0.1",
            "--checkpoint.enable",
            "--metrics.no_enable_wandb",
        ]

    def data(self, layout: Layout) -> Path:
        """A folder with the rows in the order in which the layout's data ranks read them, each its contiguous share of
        the file."""
        folder = self.work / f"data_{layout.data_ranks}_{layout.accumulate}_{layout.batch}"
        if folder.exists():
            return folder
        of_rank = layout.accumulate * layout.batch  # sequences in a step
        lines = []
        for rank, step in product(range(layout.data_ranks), range(len(self.rows) // layout.sequences)):
            begin = step * layout.sequences + rank * of_rank
            lines += [json.dumps({"text": row}) + "\n" for row in self.rows[begin : begin + of_rank]]
        folder.mkdir()
        (folder / "data.jsonl").write_text("".join(lines))
        return folder

    def make_seeds(self, models: Iterable[str]) -> None:
        """Saves the weights that all runs of a model start from, as TorchTitan draws others for each pipeline stage.
        Raises ValueError if that failed."""
        seeds, created = {model: self.work / f"seed_{model}" for model in models}, "--checkpoint.create_seed_checkpoint"
        runs = [{"out": str(out), "flags": [*self.common_flags(model, out), created]} for model, out in seeds.items()]
        if reason := self.launch(1, runs, "seed checkpoints"):
            raise ValueError(f"no seed checkpoint: {reason}")

    def train(self, runs: list[Run]) -> None:
        """Trains runs of one number of processes in one launch; after a failure the rest are launched again."""
        processes = runs[0].layout.processes
        while runs:
            configs = [
                {"out": f"{self.work}/{r.name}", "flags": self.flags(r), "favoured_experts": r.layout.favoured_experts}
                for r in runs
            ]
            reason = self.launch(processes, configs, f"layouts of {processes} processes")
            runs = [run for run in runs if self.status(run) != "ok"]
            if runs:
                self.failed[runs.pop(0)] = reason

    def launch(self, processes: int, runs: Sequence[dict], what: str) -> str:
        """Runs ``train_many.py``, with a log in OUT; if it failed, the reason."""
        number = time.monotonic_ns()
        config, log = self.work / f"runs_{number}.json", self.args.out / "logs" / f"{number}.log"
        config.write_text(json.dumps(runs))
        log.parent.mkdir(parents=True, exist_ok=True)
        own = {"TORCHINDUCTOR_COMPILE_THREADS": str(cores_each(processes)), "WANDB_MODE": "disabled"}
        own |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.work / "datasets")}
        own |= {} if self.args.ngpu else {"CUDA_VISIBLE_DEVICES": ""}
        program = [str(Path(__file__).with_name("train_many.py")), str(config)]
        process = launch(processes, program, log, own, cwd=ROOT)
        with progress(len(runs), what) as bar:
            while process.poll() is None:
                time.sleep(0.2)
                bar.update(sum((Path(run["out"]) / "done").exists() for run in runs) - bar.n)
        return f"{message(log.read_text(errors='replace')) or 'no exception'} ({log})" if process.returncode else ""

    def row(self, run: Run) -> dict[str, object]:
        """The comparison of one layout, from its four runs; ``run`` is the MXFP8 one."""
        device = torch.device("cuda:0" if self.args.ngpu else "cpu")
        row: dict[str, object] = {
            "layout": run.layout.name,
            "twin": run.layout.twin().name,
            "model": run.model,
            "converters": "grouped_mm, linear",
            "dispatch": run.dispatch,
            "compile": run.compile,
            "backend": select("auto", hardware_of(device), get_recipe("mxfp8")).name,
            "steps": self.args.steps,
        }
        problems = []
        for kind, one in (("mxfp8", run), ("plain", run.plain())):
            pair = one, one.twin()
            problems += [f"{r.name}: {self.status(r)}" for r in pair if self.status(r) != "ok"]
            if problems:
                continue
            folders = [self.work / each.name for each in pair]
            ours, twins = map(read_tensorboard, folders)
            gradients, twin_gradients = map(first_gradients, folders)
            losses = ours[LOSS]
            if apart := (losses.keys() ^ twins[LOSS].keys()) | (gradients.keys() ^ twin_gradients.keys()):
                problems.append(f"{one.name} and its twin do not both have {', '.join(sorted(map(str, apart)))}")
                continue
            row[f"{kind}_max_difference"] = max(abs(losses[step] - twins[LOSS][step]) for step in losses)
            row[f"{kind}_gradient_difference"], row[f"{kind}_worst_gradient"] = max(
                (relative_rms(gradients[name], twin), name) for name, twin in twin_gradients.items()
            )
            row[f"{kind}_grad_norm_ratio"] = ours[GRAD_NORM][1] / twins[GRAD_NORM][1]
            if kind == "mxfp8":
                row |= {"first_loss": losses[1], "last_loss": losses[self.args.steps]}
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


def first_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """A run's gradients of the first step, which have been clipped, by parameter."""
    return {name: grad for path in folder.glob("gradients_*.pt") for name, grad in torch.load(path).items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for data.csv, env.json and logs")
    add("--ngpu", type=int, default=0, help="GPUs that layouts may take; 0: CPUs [0]")
    help_text = "layouts, each alone or behind a model's name, and =WAY behind it, of "
    help_text += "quantize.grouped_mm.mx.dispatch: 'llama4 TP 2', 'EP 2=collective' [all that the devices allow]"
    add("--only", nargs="+", metavar="LAYOUT", help=help_text)
    add("--steps", type=int, default=10)
    add("--compile", action="store_true", help="with --compile.enable; twins never")
    args = parser.parse_args()
    if args.ngpu > torch.cuda.device_count():
        parser.error(f"--ngpu {args.ngpu}, but this machine has {torch.cuda.device_count()} GPUs")
    names = [layout.name for layout in LAYOUTS]
    args.only = dict(word.partition("=")[::2] for word in args.only or names)
    if unknown := args.only.keys() - {*names, *(f"{model} {name}" for model in MODELS for name in names)}:
        parser.error(f"unknown layouts {sorted(unknown)}; there are {names}")
    return args


def main() -> int:
    args = parse_arguments()
    pairs = []
    for model, layout in product(MODELS, LAYOUTS):
        names = [name for name in (f"{model} {layout.name}", layout.name) if name in args.only]
        # TorchTitan's CP has no sharding rule for the attention of CPUs.
        if names and (layout.processes <= args.ngpu if args.ngpu else not layout.name.startswith("CP")):
            way = args.only[names[0]] or "off"
            pairs.append(Run(layout=layout, model=model, kind="mxfp8", compile=args.compile, dispatch=way))
    runs = [run for pair in pairs for run in (pair, pair.plain())]
    env = environment("cuda" if args.ngpu else "cpu") | {"command": " ".join(sys.argv)}
    with tempfile.TemporaryDirectory() as work:
        comparison = Comparison(args, Path(work))
        comparison.make_seeds({run.model for run in runs})
        # Runs of as many processes share a launch; twins, which have one, come first.
        processes = attrgetter("layout.processes")
        trained = sorted(dict.fromkeys([run.twin() for run in runs] + runs), key=processes)
        for _, group in groupby(trained, processes):
            comparison.train(list(group))
            rows = [comparison.row(run) for run in pairs]
            write_results(args.out, rows, env)
    print(format_table(rows))
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    with ends_in_words(
        "compare_layouts", "OUT has the pairs that ended; --only and another --out make those that are left"
    ):
        sys.exit(main())
