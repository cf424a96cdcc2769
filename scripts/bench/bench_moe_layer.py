"""A MoE layer that dispatches its own tokens against TorchTitan's in bf16, compiled as TorchTitan compiles it.

    torchrun --standalone --nproc-per-node=2 scripts/bench/bench_moe_layer.py --out OUT    # or python, for one rank

Forward and backward of router, experts and shared experts are timed in turns with TorchTitan's layer, after output and
gradients were compared with its own. Writes data.csv, a row for each layer and way: microseconds on the slowest rank,
the ratio to bf16, peak memory. Controls are rows too: bf16 again, and our dispatch with nothing quantised.
--peers sonicmoe adds a bf16 layer of another project (peers.py), --profile the kernels of a step. OUT's rows are not
measured again: a run that was cut short goes on.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from scripts.bench import bench
from scripts.bench.bench import Entry, Row, largest_error, parse, parser_of
from scripts.bench.kernel_times import kernel_table, shown
from scripts.bench.peers import SONICMOE, SonicMoE, is_installed, versions
from scripts.progress import ends_in_words
from scripts.result_files import read_rows, write_rows
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


@dataclass(frozen=True, slots=True)
class Step:
    """Forward and backward of a layer, of tokens and the gradient of its output (1, tokens, D); new gradients each
    time."""

    module: nn.Module
    x: torch.Tensor
    dy: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.forget()
        y = self.module(self.x)
        y.backward(self.dy)
        return y

    def forget(self) -> None:
        """Frees the gradients."""
        for tensor in (self.x, *self.module.parameters()):
            tensor.grad = None

    def values(self) -> dict[str, torch.Tensor]:
        """Output and gradients of a step, this rank's part of each."""
        values = {"y": self().detach(), "x": self.x.grad}
        if isinstance(self.module, SonicMoE):
            values |= self.module.gradients()
        else:
            for name, param in self.module.named_parameters():
                grad = param.grad
                values[name.replace("_orig_mod.", "")] = grad.to_local() if isinstance(grad, DTensor) else grad
        self.forget()
        return values


class Bench(bench.Bench):
    """On all ranks: time is that of the slowest one, of steps that nobody waits for in between."""

    identity = ("layer", "ranks", "way")
    empties_l2 = False
    shown = ("baseline_us", "p50_us", "x", "x_min", "x_max", "bf16_peak_gib", "peak_gib", "error_y", "error_dw")

    def __init__(self, args: argparse.Namespace) -> None:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        super().__init__("moe_layer", args)
        self.env |= {"ranks": str(self.ranks)} | (versions() if args.peers else {})

    def config(self, layer: Layer, way: Way) -> JobConfig:
        """What a run's TOML would say."""
        converters = [GROUPED_MM] if way.recipe else []
        converters += [LINEAR] if layer.shared and way.recipe not in ("", BF16.name) else []
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
            f"--compile.backend={'inductor' if self.device.type == 'cuda' else 'aot_eager'}",
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
        # what TorchTitan's functions that parallelise and compile a model look for
        model, block = nn.Module(), nn.Sequential()
        model.layers, block.moe_enabled = nn.ModuleDict({"0": block}), True
        with torch.device("meta"), set_default_dtype(torch.bfloat16):
            block.moe = MoE(moe_args, layer.dim, layer.hidden)
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

    def errors(self, way: Way, ours: Step, bf16: Step) -> dict[str, float]:
        """Of the output, the tokens' gradient and each parameter's: the largest error of 8192 rows on any rank. Raises
        ValueError if one is further off than its format explains."""
        values, expected = ours.values(), bf16.values()
        worst = self.largest([largest_error(values[name], expected[name]) for name in expected])
        errors = dict(zip(expected, worst, strict=True))
        for name, error in errors.items():
            kind = "bf16" if way.recipe in ("", "bf16") else "router" if "router" in name else "quantised"
            if not error < MAX_ERROR[kind]:
                raise ValueError(f"{way}: {name} is off by {error:.3f} from bf16's, more than {MAX_ERROR[kind]}")
        return errors

    def _block(self, call: Step, count: int) -> list[float]:
        times = super()._block(call, count)
        call.forget()
        return times

    def peak(self, step: Step) -> float:
        """GiB that a step allocates on top of what is held before it; NaN on a CPU."""
        if self.device.type == "cpu":
            return float("nan")
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        peak = self.largest([(torch.cuda.max_memory_allocated() - held) / GIB])[0]
        step.forget()
        return peak

    def outside(self) -> float:
        """GiB of the device that are not torch's allocator's."""
        if self.device.type == "cpu":
            return 0.0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / GIB

    def prepare(self, layer: Layer, way: Way, bf16: Step, bf16_peak: float) -> Entry:
        """The way, compared with bf16 and compiled: what it holds and allocates, and how far it is off."""
        before, module = self.outside(), bf16.module
        if way.recipe:
            module = self.build(layer, way)
            copy_parameters(module, bf16.module)
        elif way.peer:
            module = SonicMoE(bf16.module.moe)
        step = Step(module, bf16.x, bf16.dy)
        errors = self.errors(way, step, bf16)
        more: Row = {"control": way.recipe in ("", BF16.name), "bf16_peak_gib": bf16_peak, "peak_gib": self.peak(step)}
        more["held_gib"] = max(0.0, self.outside() - before) if way.recipe else 0.0
        more |= {"error_y": errors["y"], "error_dx": errors["x"]}
        more["error_dw"] = max(error for name, error in errors.items() if "router" not in name and "." in name)
        more["error_router"] = max(error for name, error in errors.items() if "router" in name)
        return Entry(key=self.key_of(layer, way), call=step, more=more)

    def key_of(self, layer: Layer, way: Way) -> Row:
        sizes = {"tokens": layer.tokens, "D": layer.dim, "H": layer.hidden, "experts": layer.experts}
        sizes |= {"top_k": layer.top_k, "shared": layer.shared}
        return {"layer": layer.name, "ranks": self.ranks, **sizes, "way": str(way)}

    def measure(self, layer: Layer) -> None:
        """The rows of a layer that are due: bf16 and the ways in turns."""
        due = [way for way in ways(self.args) if self.is_due(self.key_of(layer, way))]
        if not due:
            return
        torch.compiler.reset()  # it keeps at most 8 versions of a function
        bf16 = Step(self.build(layer, Way()), *self.problem(layer))
        peak = self.peak(bf16)
        entries = [self.prepare(layer, way, bf16, peak) for way in due]
        self.is_warm = False
        self.compare(entries, bf16)
        for entry in entries if self.args.profile and self.device.type == "cuda" else ():
            self.profile({name: entry.key[name] for name in self.identity}, entry.call)

    def profile(self, key: Row, step: Step) -> None:
        """Prints the kernels of a step that take the most time, on rank 0, and adds them to kernels.csv behind ``key``;
        every rank takes part."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
        if self.rank == 0:
            name = f"{key['layer']} {key['way']}"
            trace, kept = self.args.out / "traces" / f"{name.replace(' ', '_')}.json", self.args.out / "kernels.csv"
            trace.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(trace))
            rows = kernel_table(trace, 40)
            self.say(f"{name}\n{shown(rows)}")
            rows = [key | {column: row[column] for column in ("ms", "count", "kernel")} for row in rows]
            write_rows(kept, [*(read_rows(kept) if kept.is_file() else ()), *rows])


def copy_parameters(module: nn.Module, source: nn.Module) -> None:
    """Gives a layer the memory of another's parameters and buffers: two of the large ones need not be held. Their names
    differ by what is compiled of each."""
    known = {name.replace("_orig_mod.", ""): tensor for name, tensor in source.state_dict().items()}
    own = {name: known[name.replace("_orig_mod.", "")] for name in module.state_dict()}
    module.load_state_dict(own, assign=True)


def tiny(layer: Layer) -> Layer:
    """The same layer small, for a CPU."""
    return replace(layer, tokens=64, dim=64, hidden=96, experts=8, top_k=min(layer.top_k, 4))


def ways(args: argparse.Namespace) -> list[Way]:
    """The control first. TorchTitan's dispatch knows one choice of rows, and with bf16 would be TorchTitan's layer."""
    chosen = [Way(recipe=one, transport=transport) for one in args.recipes for transport in args.transports]
    off = [way for way in chosen if way.transport == "off" and way.recipe != BF16.name]
    sent = [replace(way, rows=rows) for way in chosen for rows in args.rows if way.transport != "off"]
    return [Way(), *(Way(peer=peer) for peer in args.peers), *sent, *off]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, ("bf16", "mxfp8_2d_rebased", "mxfp8_2d", "mxfp8"))
    add = parser.add_argument
    names = [layer.name for layer in LAYERS]
    add("--layers", nargs="+", choices=names, default=names, help="[all that the number of processes allows]")
    help_text = "off: TorchTitan's dispatch, our experts [auto]"
    add("--transports", nargs="+", default=["auto"], choices=("auto", "collective", "symmetric", "off"), help=help_text)
    add("--rows", nargs="+", default=["counted"], choices=ROWS, help="[counted]")
    add("--peers", nargs="+", default=[], choices=(SONICMOE,), help="layers of other projects to time too [none]")
    add("--profile", action="store_true", help="add the kernels of a step of each way, on a GPU")
    parser.set_defaults(quick_seconds=0.5)
    args = parse(parser, argv)
    if args.peers and not is_installed():
        parser.error(f"{SONICMOE} cannot be imported: scripts/bench/peers.py says what it needs")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    with ends_in_words("bench_moe_layer"):
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        chosen = [layer for layer in LAYERS if layer.name in args.layers and (ranks == 1 or not layer.one_rank)]
        if not chosen:
            raise ValueError(f"{', '.join(args.layers)} are layers of one process, and there are {ranks}")
        if args.peers and (ranks > 1 or any(layer.shared for layer in chosen)):
            raise ValueError("--peers takes one process, and --layers without shared experts")
        # The most tokens first: the symmetric transport makes its buffer for those of the first dispatch.
        chosen.sort(key=lambda layer: -layer.tokens * (layer.top_k if layer.scores_first else 1))
        layers = Bench(args)
        try:
            layers.run(chosen if args.device == "cuda" else [*map(tiny, chosen)], layers.measure, "layer")
        finally:
            if ranks > 1:
                dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
