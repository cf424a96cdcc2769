"""Builds a config's model at its full world size on one CPU process, and says what training it would mean.

TorchTitan's own code makes the meshes, the model, the conversion and the sharding, over torch's ``fake`` process group
and on the meta device: a wrong layout fails here as it would on the cluster, and no tensor holds memory.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib import import_module
from math import prod

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import init_fake_mode
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from titan_mxfp8 import backends
from titan_mxfp8.arguments import check_types
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware, hardware_of, override_hardware
from titan_mxfp8.modules import is_expert_module, training_device
from titan_mxfp8.plugin import checks
from titan_mxfp8.plugin.check_files import check_positive, check_validation, validates
from titan_mxfp8.plugin.job_config import asked_configs
from titan_mxfp8.plugin.moe import MXFP8MoE, dispatching_layers
from titan_mxfp8.recipe import GROUPED_MM, Recipe
from titan_mxfp8.titan.cuda_graph import fsdp_modules
from titan_mxfp8.tools.memory import (
    COMPILE_BACKEND,
    FILL,
    GIB,
    Memory,
    card_memory,
    estimate_memory,
    experts_out_of_fsdp,
    model_parallel_shape,
)

CONFIG_MODULE = "Set it to 'titan_mxfp8.plugin', or to a module whose JobConfig derives from that one's"


class LocalConfigManager(ConfigManager):
    """Parses a config as training on this machine would, which has to bring the plugin's fields, and imports what may
    bring its model."""

    def parse_args(self, args: list[str]) -> JobConfig:
        config = super().parse_args(args)
        module = config.experimental.custom_import
        try:
            if module:
                import_module(module)
        except ImportError as error:
            raise ValueError(f"experimental.custom_import = {module!r} cannot be imported: {error}") from error
        return config

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict | None) -> type[JobConfig]:
        try:
            config_cls = super()._maybe_add_custom_config(args, toml_values)
        except (AttributeError, ImportError) as error:
            raise ValueError(f"job.custom_config_module cannot be used: {error}. {CONFIG_MODULE}") from error
        if "cluster" not in {field.name for field in fields(config_cls)}:
            raise ValueError(f"job.custom_config_module brings no fields of titan_mxfp8. {CONFIG_MODULE}")
        return config_cls


class ClusterConfigManager(LocalConfigManager):
    """Parses a config that will run elsewhere: this machine needs neither its tokenizer nor its data, nor its GPU."""

    def _validate_config(self) -> None:
        check_types(self.config, skip=checks.NUMBER_AS_STRING)  # before its GPU's name is looked at
        with cluster_gpu(self.config):
            checks.check_job_config(self.config, knows_gpu=self.config.cluster.gpu in CLUSTER_GPUS)


def cluster_gpu(job_config: JobConfig) -> AbstractContextManager:
    """Within, this machine is taken for one with the cluster's GPU, if the config names one that we know."""
    gpu = job_config.cluster.gpu
    return override_hardware(CLUSTER_GPUS[gpu]) if gpu in CLUSTER_GPUS else nullcontext()


def multiplied(job_config: JobConfig, hardware: Hardware) -> dict[str, tuple[Recipe, str]]:
    """By converter that the config asks for its recipe, and in words what ``hardware`` multiplies in each of its GEMMs,
    and by which backend."""
    found = {}
    for name, mx in asked_configs(job_config).items():
        recipe = backends.recommend(mx.recipe_name, mx.backend, hardware, mx.hopper_rebase)
        selection = backends.select(mx.backend, hardware, recipe)
        untried = ", never run there" if selection.warning else ""
        plan = backends.plan_on(recipe, selection.name, hardware)
        found[name] = recipe, f"{recipe.name}, backend {selection.name}{untried}: {plan}"
    return found


def multiplied_here(path: str, overrides: Sequence[str] = ()) -> dict[str, tuple[Recipe, str]]:
    """The same of a TOML and TorchTitan flags, parsed for this machine. The layout is not looked at: how many processes
    there will be is not known. Raises ValueError, OSError: what training would be refused for."""
    job_config = LocalConfigManager().parse_args([f"--job.config_file={path}", *overrides])
    hardware, attention = hardware_of(training_device()), checks.attention(job_config)
    check_positive("training", job_config.training, "local_batch_size", "seq_len")
    if hardware.arch == "cpu" and attention in ("flex", "varlen"):
        raise ValueError(
            f"model.flavor {job_config.model.flavor!r} has attention of kind {attention}, with which TorchTitan trains "
            "on GPUs only: take a GPU, or a flavor with sdpa"
        )
    converted_model(job_config, ParallelDims(*[1] * 7, world_size=1))
    return multiplied(job_config, hardware)


def converted_model(job_config: JobConfig, dims: ParallelDims) -> tuple[nn.Module, BaseModelArgs]:
    """The whole model, converted, on the meta device; and its arguments. Raises ValueError: an unknown model or flavor,
    or modules to convert that it has not."""
    args = copy.deepcopy(checks.model_args(job_config))  # update_from_config writes into it
    args.update_from_config(job_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        model = get_train_spec(job_config.model.name).model_cls(args)
    build_model_converters(job_config, dims).convert(model)
    return model, args


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``dry_run`` found."""

    model: str  # TorchTitan's name of it
    world_size: int  # processes, one per GPU
    mesh: dict[str, int]  # size of every mesh dimension larger than 1
    sequences: int  # per optimizer step, on all processes together
    converted: Counter[str]  # converted modules by name, layer numbers as ``*``
    left: Counter[str]  # the same for the linears and expert modules that stay in bf16
    dispatching: int  # MoE layers that dispatch their own tokens
    parameters: int  # of the whole model
    memory: Memory  # of the process with the largest shards, rank 0
    card: tuple[str, float] | None  # name of the GPU, and its memory in bytes; None where the config names none
    tokens: float  # that a GPU computes in a step; with tensor parallelism its share of them
    flops_per_token: int  # forward and backward, as TorchTitan counts them for its MFU
    mxfp8_share: float  # part of these FLOPs that run as MXFP8 GEMMs
    multiplied: dict[str, str]  # by converter, the words of ``multiplied``; empty without a GPU that we know
    # quantised layers of one GPU by recipe and sizes: M tokens, N features out, K in, G experts
    gemms: Counter[tuple[Recipe, int, int, int, int]]
    frees_weights: bool  # whether FSDP frees them after forward
    out_of_fsdp: int  # elements of one GPU's experts that FSDP leaves alone though it takes the rest, see titan/fsdp.py
    forwards: int  # how often forward is computed


def parse_config(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Parses a TOML and TorchTitan flags as training would, but for the files that only the cluster has."""
    return ClusterConfigManager().parse_args([f"--job.config_file={path}", *overrides])


def dry_run(job_config: JobConfig, fill: float = FILL) -> Report:
    """Builds, converts and shards the model of a ``parse_config`` for all the GPUs of its ``[cluster]``. Raises
    ValueError where the layout does not work, or the estimate is more than ``fill`` of a card's memory."""
    cluster, training = job_config.cluster, job_config.training
    card, hardware = (cluster.gpu, card_memory(cluster.gpu)) if cluster.gpu else None, CLUSTER_GPUS.get(cluster.gpu)
    if min(cluster.nodes, cluster.gpus_per_node) < 1:
        raise ValueError("[cluster] nodes and gpus_per_node are 1 at least")
    world_size = cluster.nodes * cluster.gpus_per_node
    dims = check_cluster(job_config, world_size)
    with fake_processes(world_size), cluster_gpu(job_config):
        dims.build_mesh()
        whole, args = converted_model(without_hardware(job_config), dims)
        dispatching = [module for module in whole.modules() if isinstance(module, MXFP8MoE)]
        if card is not None and dispatching:
            layers = replace(dispatching_layers(dispatching, job_config), ranks=dims.ep)
            layers.check_memory(card[1], f"[{GROUPED_MM}] ")
        parameters, flops = args.get_nparams_and_flops(whole, training.seq_len)
        sharded = shard(copy.deepcopy(whole), job_config, dims)
        memory = estimate_memory(whole, sharded, job_config, dims)
        gemms = converted_gemms(sharded, args, training.local_batch_size * training.seq_len // dims.cp)
        out_of_fsdp = sum(
            prod(model_parallel_shape(param))
            for module in experts_out_of_fsdp(sharded).values()
            for param in module.parameters(recurse=False)
        )
    if card is not None and memory.total > fill * card[1]:
        raise ValueError(
            f"does not fit: {memory.total / GIB:.1f} GiB a GPU estimated ({memory}), more than {fill:.0%} of "
            f"{card[0]}'s {card[1] / GIB:.1f} GiB. {lower_memory(job_config)}"
        )
    one_step = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    meshes = {name: dims.get_optional_mesh(name) for name in ("dp_replicate", "fsdp", "cp", "tp", "ep", "efsdp", "etp")}
    return Report(
        model=job_config.model.name,
        world_size=world_size,
        mesh={name: mesh.size() for name, mesh in meshes.items() if mesh is not None and mesh.size() > 1},
        sequences=training.global_batch_size if training.global_batch_size > 0 else one_step,
        converted=count_names(name for name, module in gemm_modules(whole) if hasattr(module, "mxfp8")),
        left=count_names(name for name, module in gemm_modules(whole) if not hasattr(module, "mxfp8")),
        dispatching=len(dispatching),
        parameters=parameters,
        memory=memory,
        card=card,
        tokens=training.local_batch_size * training.seq_len / (dims.cp * dims.tp),
        flops_per_token=flops,
        mxfp8_share=mxfp8_flops(whole, args) / flops,
        multiplied={name: words for name, (_, words) in multiplied(job_config, hardware).items()} if hardware else {},
        gemms=gemms,
        frees_weights=bool(fsdp_modules(sharded)),
        out_of_fsdp=out_of_fsdp,
        forwards=2 if job_config.activation_checkpoint.mode == "full" else 1,
    )


def check_cluster(job_config: JobConfig, world_size: int) -> ParallelDims:
    """``check_layout``, ``check_symmetric`` and ``check_validation``. Raises ValueError: as these; pipelines."""
    dims, cluster = checks.check_layout(job_config, world_size), job_config.cluster
    checks.check_symmetric(job_config, dims, cluster.gpus_per_node, CLUSTER_GPUS.get(cluster.gpu))
    if validates(job_config):
        check_validation(job_config)
    if dims.pp_enabled:
        raise ValueError(
            "pipeline_parallel_degree > 1 cannot be checked: a stage's memory depends on the schedule (CHECK=0 lets "
            "train.slurm go on without)"
        )
    return dims


def without_hardware(job_config: JobConfig) -> JobConfig:
    """A copy by which a model can be converted without the GPUs' links, and whose compiled experts save what
    ``saved_by_blocks`` can look at."""
    job_config = copy.deepcopy(job_config)
    experts = job_config.quantize.grouped_mm.mx
    if experts.dispatch != "off":
        experts.dispatch, experts.dispatch_rows = "auto", "counted"
    job_config.compile.backend = COMPILE_BACKEND
    return job_config


def shard(model: nn.Module, job_config: JobConfig, dims: ParallelDims) -> nn.Module:
    """Has TorchTitan shard a model in place; not compiled, as compilation moves no shard. Raises ValueError: TorchTitan
    cannot."""
    eager = copy.deepcopy(job_config)
    eager.compile.enable = False
    if eager.activation_checkpoint.mode == "memory_budget":
        eager.activation_checkpoint.mode = "none"  # of an eager model TorchTitan refuses it
    try:
        return get_train_spec(job_config.model.name).parallelize_fn(model, dims, eager)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"TorchTitan cannot lay out the model so: {error}") from error


def converted_gemms(sharded: nn.Module, args: BaseModelArgs, tokens: int) -> Counter[tuple[Recipe, int, int, int, int]]:
    """One GPU's part of every quantised layer, each expert with its share of the tokens; see ``Report.gemms``."""
    found = Counter()
    for module, param in quantized_weights(sharded):
        *groups, n, k = model_parallel_shape(param)
        rows = tokens * args.moe_args.top_k if groups else tokens
        found[module.mxfp8.recipe, rows, n, k, groups[0] if groups else 1] += 1
    return found


def lower_memory(job_config: JobConfig) -> str:
    """What there is left to try where a config does not fit."""
    training, ways = job_config.training, ["shard over more GPUs"]
    if job_config.activation_checkpoint.mode != "full":
        ways.append("set activation_checkpoint.mode = 'full'")
    ways.append(f"lower training.{'local_batch_size' if training.local_batch_size > 1 else 'seq_len'}")
    return f"To fit: {', '.join(ways[:-1])} or {ways[-1]}"


@contextmanager
def fake_processes(world_size: int) -> Iterator[None]:
    """Within, this process is rank 0 of ``world_size``, and collectives do nothing."""
    init_fake_mode(world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def gemm_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears and expert modules of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_expert_module(module):
            yield name, module


def count_names(names: Iterator[str]) -> Counter[str]:
    """Counts names that differ in layer numbers only: ``layers.0.attention.wq`` is ``layers.*.attention.wq``."""
    return Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)


def quantized_weights(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """The operands of quantised GEMMs, a linear's matrix or one matrix per expert, with their modules."""
    for _, module in gemm_modules(model):
        if hasattr(module, "mxfp8") and module.mxfp8.recipe.quantized:
            for param in module.parameters(recurse=False):
                if param.ndim == (2 if isinstance(module, nn.Linear) else 3):  # else a bias of either
                    yield module, param


def mxfp8_flops(model: nn.Module, args: BaseModelArgs) -> float:
    """FLOPs per token that run as MXFP8 GEMMs: 6 per weight that a token meets, 4 where wgrad stays in bf16."""
    flops = 0.0
    for module, param in quantized_weights(model):
        gemms = 3 if module.mxfp8.recipe.wgrad == "mxfp8" else 2
        met = args.moe_args.top_k / args.moe_args.num_experts if param.ndim == 3 else 1
        flops += 2 * gemms * param.numel() * met
    return flops
