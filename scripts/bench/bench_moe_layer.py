"""A MoE layer that dispatches its own tokens against TorchTitan's in bf16, compiled as TorchTitan compiles it.

    torchrun --standalone --nproc-per-node=2 scripts/bench/bench_moe_layer.py --out OUT    # or python, for one rank

Forward and backward of router, experts and shared experts are timed in turns with TorchTitan's layer, after output and
gradients were compared with its own. Writes data.csv, a row for each layer and way: milliseconds on the slowest rank,
the ratio to bf16, peak memory. Controls are rows too: bf16 again, and our dispatch with nothing quantised.
--peers sonicmoe adds a bf16 layer of another project (peers.py), --profile the kernels of a step. OUT's rows are not
measured again: a run that was cut short goes on.
"""

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra import parallelize
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools.utils import set_default_dtype

import titan_mxfp8.plugin  # noqa: F401 - where there is no accelerator TorchTitan needs its workarounds
from scripts.bench.bench import QUICK_REPEATS, REPEATS, parse, parser_of
from scripts.bench.kernel_times import kernel_table
from scripts.bench.peers import SONICMOE, SonicMoE, is_installed, versions
from scripts.bench.problems import relative_rms
from scripts.progress import ends_in_words, progress, say
from scripts.result_files import environment, format_table, percentiles, read_rows, write_rows
from titan_mxfp8.moe.bounds import ROWS
from titan_mxfp8.recipe import BF16, GROUPED_MM, LINEAR

ASSETS = Path(__file__).parents[2] / "train_configs" / "assets"
GIB = 2**30
# Largest relative RMS against bf16's, of any 8192 rows of the output or of a gradient. A quantised layer has two GEMMs
# one after the other, and its gradients four; in the router's gradient the errors of a token's experts do not cancel
# where the values do.
MAX_ERROR = {"bf16": 0.03, "quantised": 0.15, "router": 0.3}


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer: ``tokens`` on each rank, ``experts`` on all together."""

    name: str
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    shared: int = 0
    scores_first: bool = False
    one_rank: bool = False


LAYERS = (
    Layer("dsv3", 16384, 7168, 2048, 64, 8, shared=1),
    Layer("dsv3_16b", 32768, 2048, 1408, 64, 6, shared=2),
    Layer("dsv3_16b_routed", 32768, 2048, 1408, 64, 6),
    Layer("qwen3_30b", 32768, 2048, 768, 128, 8),
    Layer("fine_grained", 32768, 4096, 1024, 128, 8),
    Layer("llama4", 32768, 5120, 8192, 16, 1, shared=1, scores_first=True),
    Layer("llama4_8", 131072, 5120, 8192, 8, 1, shared=1, scores_first=True, one_rank=True),
    Layer("dsv3_8", 131072, 7168, 2048, 8, 1, shared=1, one_rank=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a layer is computed; no recipe: TorchTitan's own, or a peer's."""

    recipe: str = ""
    transport: str = ""
    rows: str = ""
    peer: str = ""

    def __str__(self) -> str:
        return self.peer or " ".join(filter(None, (self.recipe, self.transport, self.rows))) or "torchtitan"


Row = dict[str, object]
Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A way that can be timed: its module, its step, how many fill a block, how far off it is, what it holds."""

    way: Way
    module: nn.Module
    step: Step
    calls: int
    errors: dict[str, float]
    held_gib: float


class Block(nn.Module):
    """What TorchTitan's functions that parallelise and compile a model look for in one of its layers."""

    moe_enabled = True

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)


class Bench:
    """The processes, their device, and what all of them agree on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device != "cpu" else None)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.ranks > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def say(self, text: str) -> None:
        if self.rank == 0:
            say(text)

    def write(self, rows: list[Row], name: str, env: dict[str, str]) -> None:
        """The rows, on rank 0, as a file of the results."""
        if self.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            write_rows(self.args.out / name, rows)
            (self.args.out / "env.json").write_text(json.dumps(env, indent=2) + "\n")

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest on any rank."""
        if self.ranks == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return together.tolist()

    def config(self, layer: Layer, way: Way) -> JobConfig:
        """What a run's TOML would say."""
        shared = layer.shared > 0 and way.recipe != BF16.name and not self.args.shared_in_bf16
        converters = [GROUPED_MM, *[LINEAR] * shared] if way.recipe else []
        flags = [
            "--job.custom_config_module=titan_mxfp8.plugin",
            f"--job.dump_folder={self.args.out}",
            f"--model.hf_assets_path={ASSETS}/tokenizer",
            "--training.dataset=c4_test",
            f"--training.dataset_path={ASSETS}/kjv",
            f"--training.seq_len={layer.tokens}",
            "--training.local_batch_size=1",
            f"--parallelism.expert_parallel_degree={self.ranks}",
            "--compile.enable",
            f"--compile.backend={'aot_eager' if self.args.tiny else 'inductor'}",
            f"--model.converters={','.join(converters)}",
        ]
        if way.recipe:
            flags += [f"--{GROUPED_MM}.dispatch={way.transport}"]
            flags += [f"--{GROUPED_MM}.dispatch_rows={way.rows}"] if way.rows else []
            flags += [f"--{name}.recipe_name={way.recipe}" for name in converters]
        return ConfigManager().parse_args(flags)

    def build(self, layer: Layer, way: Way) -> nn.Module:
        """The layer, converted, split and compiled as TorchTitan does it, its parameters drawn."""
        config = self.config(layer, way)
        dims = ParallelDims(
            dp_replicate=1, dp_shard=self.ranks, cp=1, tp=1, pp=1, ep=self.ranks, etp=1, world_size=self.ranks
        )
        moe_args = MoEArgs(
            num_experts=layer.experts,
            num_shared_experts=layer.shared,
            top_k=layer.top_k,
            score_before_experts=layer.scores_first,
            score_func="softmax" if self.args.peers else "sigmoid",
            route_norm=bool(self.args.peers),
            use_grouped_mm=self.device.type == "cuda",
        )
        model = nn.Module()
        with torch.device("meta"), set_default_dtype(torch.bfloat16):
            model.layers = nn.ModuleDict({"0": Block(MoE(moe_args, layer.dim, layer.hidden))})
        build_model_converters(config, dims).convert(model)
        if self.ranks > 1:
            parallelize.apply_moe_ep_tp(
                model, tp_mesh=None, ep_mesh=dims.get_mesh("ep"), etp_mesh=None, ep_etp_mesh=None
            )
        parallelize.apply_compile(model, config.compile, ep_enabled=self.ranks > 1)
        model.to_empty(device=self.device)
        with torch.no_grad():
            for number, (_, param) in enumerate(sorted(model.named_parameters())):
                split = isinstance(param, DTensor)
                generator = torch.Generator(self.device).manual_seed(1000 * number + split * self.rank)
                local = param.to_local() if split else param
                local.normal_(std=param.shape[-1] ** -0.5, generator=generator)
            for buffer in model.buffers():
                buffer.zero_()
        return model.layers["0"]

    def problem(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the gradient of the output, others on each rank."""
        generator = torch.Generator(self.device).manual_seed(self.rank)
        shape = 1, layer.tokens, layer.dim
        x, dy = (torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator) for _ in range(2))
        return x.requires_grad_(), dy

    def errors(self, way: Way, ours: nn.Module, bf16: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
        """Of the output, the tokens' gradient and each parameter's: the largest error of 8192 rows on any rank.

        Raises:
            ValueError: one is further off than its format explains.
        """
        steps = [values_and_gradients(module, x, dy) for module in (ours, bf16)]
        names = list(steps[1])
        worst = self.largest([largest_error(steps[0][name], steps[1][name]) for name in names])
        errors = dict(zip(names, worst, strict=True))
        for name, error in errors.items():
            kind = "bf16" if way.recipe in ("", "bf16") else "router" if "router" in name else "quantised"
            if not error < MAX_ERROR[kind]:
                raise ValueError(f"{way}: {name} is off by {error:.3f} from bf16's, more than {MAX_ERROR[kind]}")
        return errors

    def block(self, step: Step, calls: int) -> list[float]:
        """Milliseconds of so many steps, each on its slowest rank, that nobody waits for in between."""
        if self.device.type == "cpu":
            marks = [time.perf_counter()]
            for _ in range(calls):
                step()
                marks.append(time.perf_counter())
            return self.largest([1e3 * (end - start) for start, end in itertools.pairwise(marks)])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return self.largest([start.elapsed_time(end) for start, end in itertools.pairwise(events)])

    def calls(self, step: Step) -> int:
        """Steps of a block, the same number on every rank: of all turns enough count, and a block is long enough."""
        self.block(step, 2)  # compiles
        repeats = QUICK_REPEATS if self.args.quick else REPEATS
        return max(2 * ceil(repeats / self.args.turns), ceil(self.args.seconds * 1e3 / min(self.block(step, 3))))

    def peak(self, step: Step) -> float:
        """GiB that a step allocates on top of what is held before it; NaN on a CPU."""
        if self.device.type == "cpu":
            return float("nan")
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        return self.largest([(torch.cuda.max_memory_allocated() - held) / GIB])[0]

    def outside(self) -> float:
        """GiB of the device that are not torch's allocator's."""
        if self.device.type == "cpu":
            return 0.0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / GIB

    def prepare(self, layer: Layer, way: Way, bf16: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Prepared:
        """The way, compared with bf16 and compiled."""
        held = self.outside()
        if way.recipe:
            module = self.build(layer, way)
            copy_parameters(module, bf16)
        else:
            module = SonicMoE(bf16.moe) if way.peer else bf16
        errors = self.errors(way, module, bf16, x, dy)
        step = step_of(module, x, dy)
        held = self.outside() - held if way.recipe else 0.0
        return Prepared(
            way=way, module=module, step=step, calls=self.calls(step), errors=errors, held_gib=max(0.0, held)
        )

    def compare(
        self, layer: Layer, ways: Sequence[Prepared], bf16: nn.Module, x: torch.Tensor, dy: torch.Tensor
    ) -> list[Row]:
        """A row for each way: bf16 and the ways in turns."""
        base = step_of(bf16, x, dy)
        turns = [(bf16, base, self.calls(base)), *((way.module, way.step, way.calls) for way in ways)]
        times: list[list[list[float]]] = [[] for _ in turns]
        for turn in range(self.args.turns + 1):
            for (module, step, count), each in zip(turns, times, strict=True):
                block = self.block(step, count)
                forget_gradients(module, x)
                if turn:  # the first is thrown away
                    each.append(block[len(block) // 2 :])
        bf16_ms, bf16_peak = percentiles([time for block in times[0] for time in block])[1], self.peak(base)
        forget_gradients(bf16, x)
        rows = []
        for way, blocks in zip(ways, times[1:], strict=True):
            ratios = [median(theirs) / median(mine) for theirs, mine in zip(times[0], blocks, strict=True)]
            p20, p50, p80 = percentiles([time for block in blocks for time in block])
            row: Row = {"way": str(way.way), "control": way.way.recipe in ("", BF16.name)}
            row |= {"p20_us": 1e3 * p20, "p50_us": 1e3 * p50, "p80_us": 1e3 * p80, "baseline_us": 1e3 * bf16_ms}
            row |= {"x": median(ratios), "x_min": min(ratios), "x_max": max(ratios)}
            row |= {"bf16_peak_gib": bf16_peak, "peak_gib": self.peak(way.step), "held_gib": way.held_gib}
            row |= {"error_y": way.errors["y"], "error_dx": way.errors["x"]}
            row["error_dw"] = max(error for name, error in way.errors.items() if "router" not in name and "." in name)
            row["error_router"] = max(error for name, error in way.errors.items() if "router" in name)
            rows.append(row | {"turns": self.args.turns, "repeats": sum(map(len, blocks))})
            if self.args.profile and self.device.type == "cuda":
                self.profile({"layer": layer.name, "ranks": self.ranks, "way": str(way.way)}, way.step)
            forget_gradients(way.module, x)
        return rows

    def profile(self, key: Row, step: Step) -> None:
        """Prints the kernels of a step that take the most time, on rank 0, and adds them to kernels.csv behind ``key``;
        every rank takes part."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
        if self.rank == 0:
            name = f"{key['layer']} {key['way']}"
            path = self.args.out / "traces" / f"{name.replace(' ', '_')}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            rows = [{"ms": row["ms"], "count": row["count"], "kernel": row["kernel"]} for row in kernel_table(path, 40)]
            self.say(f"{name}\n{format_table([row | {'kernel': row['kernel'][:110]} for row in rows])}")
            kept = self.args.out / "kernels.csv"
            write_rows(kept, [*(read_rows(kept) if kept.is_file() else ()), *(key | row for row in rows)])


def step_of(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Step:
    """Forward and backward; gradients are new tensors each time."""

    def step() -> None:
        forget_gradients(module, x)
        module(x).backward(dy)

    return step


def forget_gradients(module: nn.Module, x: torch.Tensor) -> None:
    x.grad = None
    for param in module.parameters():
        param.grad = None


def values_and_gradients(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of a step, this rank's part of each."""
    forget_gradients(module, x)
    y = module(x)
    y.backward(dy)
    values = {"y": y.detach(), "x": x.grad}
    if isinstance(module, SonicMoE):
        return values | module.gradients()
    for name, param in module.named_parameters():
        grad, param.grad = param.grad, None
        values[name.replace("_orig_mod.", "")] = grad.to_local() if isinstance(grad, DTensor) else grad
    x.grad = None
    return values


def largest_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The largest relative RMS of 8192 neighbouring rows."""
    pairs = zip(*(tensor.reshape(-1, tensor.shape[-1]).split(8192) for tensor in (out, ref)), strict=True)
    return max(relative_rms(*pair) for pair in pairs)


def copy_parameters(module: nn.Module, source: nn.Module) -> None:
    """Gives a layer the memory of another's parameters and buffers: two of the large ones need not be held. Their names
    differ by what is compiled of each."""
    known = {name.replace("_orig_mod.", ""): tensor for name, tensor in source.state_dict().items()}
    own = {name: known[name.replace("_orig_mod.", "")] for name in module.state_dict()}
    module.load_state_dict(own, assign=True)


def shown(row: Mapping[str, object]) -> Row:
    """What is printed of a row, of this call or read back."""
    short = {name: row[name] for name in ("layer", "ranks", "way")}
    short |= {name: float(row[name]) for name in ("baseline_us", "p50_us", "x")}
    short["x, range"] = f"{float(row['x_min']):.3f} to {float(row['x_max']):.3f}"
    return short | {name: float(row[name]) for name in ("bf16_peak_gib", "peak_gib", "error_y", "error_dw")}


def tiny(layer: Layer) -> Layer:
    """The same layer small, for a CPU."""
    return replace(layer, tokens=64, dim=64, hidden=96, experts=8, top_k=min(layer.top_k, 4))


def ways(args: argparse.Namespace) -> list[Way]:
    """The control first. TorchTitan's dispatch knows one choice of rows, and with bf16 would be TorchTitan's layer."""
    chosen = [Way(recipe=one, transport=transport) for one in args.recipes for transport in args.transports]
    off = [way for way in chosen if way.transport == "off" and way.recipe != BF16.name]
    sent = [replace(way, rows=rows) for way in chosen for rows in args.rows if way.transport != "off"]
    return [Way(), *(Way(peer=peer) for peer in args.peers), *sent, *off]


@contextmanager
def one_layer() -> Iterator[None]:
    """Within, torch compiles one layer's shapes: it keeps at most 8 versions of a function."""
    torch.compiler.reset()
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, recipes=("bf16", "mxfp8_2d_rebased", "mxfp8_2d", "mxfp8"))
    add = parser.add_argument
    names = [layer.name for layer in LAYERS]
    add("--layers", nargs="+", choices=names, help="[all that the number of processes allows]")
    help_text = "off: TorchTitan's dispatch, our experts [auto]"
    add("--transports", nargs="+", default=["auto"], choices=("auto", "collective", "symmetric", "off"), help=help_text)
    add("--rows", nargs="+", default=["counted"], choices=ROWS, help="[counted]")
    add("--peers", nargs="+", default=[], choices=(SONICMOE,), help="layers of other projects to time too [none]")
    add("--shared-in-bf16", action="store_true", help="leave the linears of shared experts as they are")
    add("--profile", action="store_true", help="add the kernels of a step of each way, on a GPU")
    add("--tiny", action="store_true", help="small sizes and code that is not optimised, to try the script")
    args = parse(parser, argv, quick_seconds=0.5)
    if args.peers and not is_installed():
        parser.error(f"{SONICMOE} cannot be imported: scripts/bench/peers.py says what it needs")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    kept = args.out / "data.csv"
    rows: list[Mapping[str, object]] = list(read_rows(kept)) if kept.is_file() else []  # before a process adds to it
    started, bench = time.monotonic(), Bench(args)
    chosen = [
        layer for layer in LAYERS if layer.name in (args.layers or [layer.name]) and layer.one_rank * bench.ranks < 2
    ]
    # The most tokens first: the symmetric transport makes its buffer for those of the first dispatch.
    chosen.sort(key=lambda layer: -layer.tokens * (layer.top_k if layer.scores_first else 1))
    if not chosen:
        sys.exit(f"bench_moe_layer: {', '.join(args.layers)} are layers of one process, and there are {bench.ranks}")
    if args.peers and (bench.ranks > 1 or any(layer.shared for layer in chosen)):
        sys.exit("bench_moe_layer: --peers takes one process, and --layers without shared experts")
    env = environment(bench.device) | {"ranks": str(bench.ranks), "command": " ".join(sys.argv)}
    env |= versions() if args.peers else {}
    done = {(row["layer"], str(row["ranks"]), row["way"]) for row in rows}
    todo = list(map(tiny, chosen) if args.tiny else chosen)
    bar = progress(len(todo) * len(ways(args)) if bench.rank == 0 else 0, "MoE layers", "way")
    try:
        for layer in todo:
            with one_layer(), ends_in_words("bench_moe_layer"):
                due = [way for way in ways(args) if (layer.name, str(bench.ranks), str(way)) not in done]
                if not due:
                    continue
                bf16, (x, dy), prepared = bench.build(layer, Way()), bench.problem(layer), []
                for way in due:
                    if bench.largest([time.monotonic() - started])[0] > args.limit:
                        bench.say(f"{layer.name} {way}: not begun, the time limit is reached")
                        continue
                    bar.set_postfix_str(f"{layer.name} {way}")
                    prepared.append(bench.prepare(layer, way, bf16, x, dy))
                    bar.update()
                sizes = (layer.tokens, layer.dim, layer.hidden, layer.experts, layer.top_k, layer.shared)
                key: Row = {"layer": layer.name, "ranks": bench.ranks}
                key |= dict(zip(("tokens", "D", "H", "experts", "top_k", "shared"), sizes, strict=True))
                new = [key | row for row in bench.compare(layer, prepared, bf16, x, dy)] if prepared else []
                rows += new
                bench.say(format_table(list(map(shown, new))))
                bench.write(rows, "data.csv", env)
                del bf16, x, dy, prepared
    finally:
        bench.say(format_table(list(map(shown, rows))))
        if bench.ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
