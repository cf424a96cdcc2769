"""Checks of a parsed TorchTitan config, before any process group, model or GPU exists."""

import logging
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import torch
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.config import JobConfig, manager
from torchtitan.config.job_config import MXLinear as TorchTitanMXLinear
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs, model_converter
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8 import backends
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.modules import as_list, training_device
from titan_mxfp8.moe import ROWS
from titan_mxfp8.plugin.check_files import check_files
from titan_mxfp8.plugin.job_config import (
    DISPATCH,
    Cluster,
    Model,
    MXGroupedMM,
    MXLinear,
    Quantize,
    converter_configs,
    recipe_of,
)
from titan_mxfp8.plugin.refusal import in_one_line
from titan_mxfp8.plugin.repairs.moe import hide_grouped_mm_warning
from titan_mxfp8.plugin.wandb_run import fill_git_commit
from titan_mxfp8.recipe import BF16, GROUPED_MM, LINEAR
from titan_mxfp8.repairs.patch import is_patched, patch_of

logger = logging.getLogger(__name__)

# These of TorchTitan's models wrap in FSDP wherever there is EP, and fail without ranks for it. Qwen3 does not.
FSDP_WITH_EP = ("llama4", "deepseek_v3", "gpt_oss")


def check_job_config(job_config: JobConfig) -> None:
    """Normalises lists that TOML or the command line gave as strings, and checks what the plugin is about to use.
    Warns of a field without effect. Fills ``job.git_commit`` on rank 0, which saves the config, and registers the study
    flavors where the config asks for them.

    ``--model.converters=`` (nothing behind the sign) means no converters.

    Raises:
        ValueError: a value of the wrong type, a converter that nobody registered, MXFP8 beside another quantisation, an
            unknown recipe or backend, a backend without rebase, a report on it or on health that cannot be, a dispatch
            that cannot be, activation checkpointing or compilation that TorchTitan is known to fail at.
    """
    check_types(job_config)
    job_config.model.converters = converters = as_list(",".join(as_list(job_config.model.converters)))
    if os.environ.get("RANK", "0") == "0":
        fill_git_commit(job_config)
    if job_config.model.study_flavors:
        from titan_mxfp8.tools.flavors import register_flavors

        register_flavors()
    _check_converters(job_config)
    check_one_quantisation(job_config)
    check_dispatch(job_config)
    for name, config in converter_configs(job_config).items():
        if name not in converters:
            continue
        try:
            backends.select(config.backend, hardware_of(training_device()), recipe_of(config))
            _check_rebase_report(config)
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from error
    kernel_choice = job_config.quantize.linear.mx.mxfp8_dim1_cast_kernel_choice
    if LINEAR in converters and kernel_choice != TorchTitanMXLinear.mxfp8_dim1_cast_kernel_choice:
        logger.warning(
            f"[{LINEAR}] mxfp8_dim1_cast_kernel_choice = {kernel_choice!r} has no effect with titan_mxfp8: its kernels "
            "are chosen by backend"
        )
    _check_health(job_config)
    _check_activation_checkpointing(job_config)
    _check_compile(job_config)
    hide_grouped_mm_warning(GROUPED_MM in converters)
    job_config.quantize.grouped_mm.mx.fqns = as_list(job_config.quantize.grouped_mm.mx.fqns)
    job_config.quantize.linear.mx.filter_fqns = as_list(job_config.quantize.linear.mx.filter_fqns)


def check_dispatch(job_config: JobConfig) -> None:
    """Raises ValueError if ``dispatch`` and ``dispatch_rows`` have unknown values or contradict each other, or where
    recipe ``bf16``, the control of the dispatch, is asked of anything else."""
    config, linears = job_config.quantize.grouped_mm.mx, job_config.quantize.linear.mx
    converters = job_config.model.converters
    for name, known in (("dispatch", DISPATCH), ("dispatch_rows", ROWS)):
        if getattr(config, name) not in known:
            raise ValueError(f"[{GROUPED_MM}] unknown {name} {getattr(config, name)!r}: use one of {', '.join(known)}")
    if config.dispatch_rows == "worst_case" and config.dispatch in ("off", "collective"):
        raise ValueError(
            f"[{GROUPED_MM}] dispatch_rows = 'worst_case' and dispatch = {config.dispatch!r}: only 'symmetric' (or "
            "'auto', where it takes that) works without a number of rows that the host has read"
        )
    if LINEAR in converters and linears.recipe_name == BF16.name:
        raise ValueError(
            f"[{LINEAR}] recipe {BF16.name!r} is no conversion of linears: leave {LINEAR} out of the converters"
        )
    if GROUPED_MM in converters and config.recipe_name == BF16.name:
        if config.dispatch == "off":
            raise ValueError(
                f"[{GROUPED_MM}] recipe {BF16.name!r} with dispatch = 'off' is TorchTitan's own: set dispatch, or "
                f"leave {GROUPED_MM} out of the converters"
            )
        if config.hopper_rebase or config.hopper_rebase_report:
            raise ValueError(
                f"[{GROUPED_MM}] recipe {BF16.name!r} quantises nothing: hopper_rebase has nothing to rebase"
            )


def check_transport(job_config: JobConfig) -> None:
    """Raises ValueError if this machine cannot have the transport that ``dispatch`` names, as far as known before there
    is a process group."""
    config = job_config.quantize.grouped_mm.mx
    if GROUPED_MM not in job_config.model.converters or not needs_symmetric(config):
        return
    device = training_device()
    if device.type != "cuda":
        raise ValueError(
            f"[{GROUPED_MM}] dispatch = {config.dispatch!r} with dispatch_rows = {config.dispatch_rows!r} needs GPUs "
            f"that read each other's memory, and this run trains on {device.type}: set dispatch = 'collective' and "
            "dispatch_rows = 'counted'"
        )
    processes, per_host = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    check_hosts(job_config, processes, per_host)


def check_types(job_config: JobConfig) -> None:
    """Raises ValueError if a field of the plugin, or ``model.converters``, has a value of another type: TOML takes any.

    A string stands for a list of strings too.
    """
    sections = {
        "model": (Model, job_config.model),
        "quantize": (Quantize, job_config.quantize),
        GROUPED_MM: (MXGroupedMM, job_config.quantize.grouped_mm.mx),
        LINEAR: (MXLinear, job_config.quantize.linear.mx),
        "cluster": (Cluster, job_config.cluster),
    }
    words = {int: "a whole number", bool: "true or false", str: "a string"}
    values = [("model.converters", list[str], job_config.model.converters)]
    for section, (cls, config) in sections.items():
        hints = get_type_hints(cls)
        values += [(f"{section}.{name}", hints[name], getattr(config, name)) for name in hints]
    for name, hint, value in values:
        if hint in words:
            fits = type(value) is hint
        else:
            fits = is_dataclass(hint) or (
                isinstance(value, str | list) and all(isinstance(part, str) for part in value)
            )
        if not fits:
            raise ValueError(f"{name} = {value!r}: it must be {words.get(hint, 'a list of strings')}")


def check_layout(job_config: JobConfig, world_size: int) -> ParallelDims:
    """The mesh dimensions of the config on ``world_size`` processes, once the arithmetic of the layout holds.

    Raises:
        ValueError: degrees that do not multiply to ``world_size``, or do not divide the experts, the sequence or the
            global batch; EP without ranks for FSDP; an empty batch or sequence; an unknown model or flavor.
    """
    parallelism, training = job_config.parallelism, job_config.training
    check_batch(job_config)
    try:
        dims = ParallelDims(
            dp_replicate=parallelism.data_parallel_replicate_degree,
            dp_shard=parallelism.data_parallel_shard_degree,
            cp=parallelism.context_parallel_degree,
            tp=parallelism.tensor_parallel_degree,
            pp=parallelism.pipeline_parallel_degree,
            ep=parallelism.expert_parallel_degree,
            etp=parallelism.expert_tensor_parallel_degree,
            world_size=world_size,
        )
    except AssertionError as error:
        raise ValueError(
            f"[parallelism] does not fit {world_size} processes: {error}. Start as many processes as the degrees "
            "multiply to, or change a degree (data_parallel_shard_degree = -1 takes what is left)"
        ) from error
    ranks = dims.dp_shard * dims.cp * dims.tp
    if dims.ep > 1 and ranks % (dims.ep * dims.etp):
        raise ValueError(
            f"expert_parallel_degree {dims.ep} x expert_tensor_parallel_degree {dims.etp} does not divide the {ranks} "
            "ranks of data_parallel_shard x context_parallel x tensor_parallel, among which it divides the experts: "
            "choose a divisor"
        )
    if dims.ep > 1 and dims.dp_shard * dims.cp == 1 and job_config.model.name in FSDP_WITH_EP:
        raise ValueError(
            f"expert_parallel_degree {dims.ep} takes its ranks from tensor_parallel_degree {dims.tp} alone, but where "
            f"TorchTitan's {job_config.model.name} has EP it also needs ranks for FSDP: set "
            "data_parallel_shard_degree or context_parallel_degree to 2 or more, or expert_parallel_degree = 1"
        )
    args = model_args(job_config)
    counts = {
        "experts": (getattr(getattr(args, "moe_args", None), "num_experts", 0), "expert", dims.ep),
        "attention heads": (getattr(args, "n_heads", 0), "tensor", dims.tp),
        "key and value heads": (getattr(args, "n_kv_heads", 0) or 0, "tensor", dims.tp),
    }
    for what, (count, kind, degree) in counts.items():
        if count % degree:
            raise ValueError(
                f"{kind}_parallel_degree {degree} does not divide the {count} {what} of {job_config.model.name} "
                f"{job_config.model.flavor}: choose a divisor"
            )
    if training.seq_len % dims.seq_len_divisor:
        raise ValueError(
            f"training.seq_len {training.seq_len} is no multiple of {dims.seq_len_divisor} = 2 x "
            f"context_parallel_degree {dims.cp} x tensor_parallel_degree {dims.tp}, which divide the sequence"
        )
    batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if training.global_batch_size == 0 or (training.global_batch_size > 0 and training.global_batch_size % batch):
        raise ValueError(
            f"training.global_batch_size {training.global_batch_size} is no multiple of {batch} = local_batch_size "
            f"{training.local_batch_size} x {dims.dp_replicate * dims.dp_shard} data-parallel ranks"
        )
    return dims


def check_batch(job_config: JobConfig) -> None:
    """Raises ValueError of an empty batch or sequence."""
    for name in ("local_batch_size", "seq_len"):
        if getattr(job_config.training, name) < 1:
            raise ValueError(f"training.{name} = {getattr(job_config.training, name)}: it must be at least 1")


def check_hosts(job_config: JobConfig, processes: int, per_host: int) -> None:
    """Raises ValueError if ``symmetric`` is asked for and expert parallelism, whose ranks are consecutive ones, takes
    ranks of several hosts, of ``per_host`` processes each."""
    config, degree = job_config.quantize.grouped_mm.mx, job_config.parallelism.expert_parallel_degree
    if needs_symmetric(config) and processes > per_host and per_host % degree:
        raise ValueError(
            f"[{GROUPED_MM}] dispatch = {config.dispatch!r} with dispatch_rows = {config.dispatch_rows!r} needs all "
            f"ranks of expert parallelism on one host, and expert_parallel_degree {degree} does not divide the "
            f"{per_host} processes of a host: choose one that does, or dispatch = 'collective' and dispatch_rows = "
            "'counted'"
        )


def needs_symmetric(config: MXGroupedMM) -> bool:
    """Whether no other transport will do."""
    return config.dispatch == "symmetric" or (config.dispatch != "off" and config.dispatch_rows == "worst_case")


def check_checkpoint(job_config: JobConfig, dims: ParallelDims) -> None:
    """Checks that the run can go on with the data from the checkpoint that it will find in its own folder.

    Raises:
        ValueError: the checkpoint was written with another number of data-parallel ranks, between which TorchTitan
            cannot carry the position in the data.
    """
    config = job_config.checkpoint
    if not config.enable or "dataloader" in config.exclude_from_loading:
        return
    folder = Path(job_config.job.dump_folder) / config.folder
    names = (path.parent.name.removeprefix("step-") for path in folder.glob("step-*/.metadata"))
    steps = [int(name) for name in names if name.isdecimal()]
    step = max(steps, default=-1) if config.load_step == -1 else config.load_step
    if step not in steps or step == 0:  # of a seed checkpoint TorchTitan loads the model alone
        return
    path = folder / f"step-{step}"
    states = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = sum(name.startswith("dataloader.dp_rank_") for name in states)
    ranks = dims.dp_replicate * dims.dp_shard
    if saved not in (0, ranks):
        raise ValueError(
            f"{path} holds the position in the data of {saved} data-parallel ranks, and this run has {ranks}. "
            "TorchTitan cannot carry it over: go on with --checkpoint.exclude_from_loading=dataloader, and the data "
            "begin with their first row again, or with the former number of ranks"
        )


def model_args(job_config: JobConfig) -> BaseModelArgs:
    """TorchTitan's arguments of the config's model and flavor: the shared object, not a copy.

    Raises:
        ValueError: unknown model or flavor.
    """
    flavors = get_train_spec(job_config.model.name).model_args
    if job_config.model.flavor not in flavors:
        more = "" if job_config.model.study_flavors else ", or set model.study_flavors for those of titan_mxfp8"
        raise ValueError(
            f"{job_config.model.name} has no flavor {job_config.model.flavor!r}: use one of {', '.join(flavors)}{more}"
        )
    return flavors[job_config.model.flavor]


def check_one_quantisation(job_config: JobConfig) -> None:
    """Raises ValueError if ``model.converters`` mixes MXFP8 with another quantisation, such as float8."""
    quantisations = [name for name in job_config.model.converters if name.startswith("quantize.")]
    if len({name.rsplit(".", 1)[-1] for name in quantisations}) > 1:
        raise ValueError(
            f"model.converters = {quantisations} mixes quantisation formats, which TorchTitan does not support: keep "
            "either the .mx converters or the .float8 ones"
        )


def compiles_model(job_config: JobConfig) -> bool:
    """Whether TorchTitan compiles the model's blocks, and not only the loss."""
    return job_config.compile.enable and "model" in job_config.compile.components


def install() -> None:
    """Makes TorchTitan's config manager run the checks above once it has parsed and checked a config itself.

    The layout is checked where the number of processes is known: in a process that torchrun started. Not where
    ``experimental.custom_import`` is yet to bring the model.
    """
    validate: Callable = manager.ConfigManager._validate_config
    if is_patched(validate):
        return

    @patch_of(validate)
    @in_one_line()
    def validate_and_check(self: manager.ConfigManager) -> None:
        validate(self)
        check_job_config(self.config)
        check_files(self.config)
        check_transport(self.config)
        if "WORLD_SIZE" in os.environ and not self.config.experimental.custom_import:
            dims = check_layout(self.config, int(os.environ["WORLD_SIZE"]))
            if os.environ.get("RANK", "0") == "0":
                check_checkpoint(self.config, dims)

    manager.ConfigManager._validate_config = validate_and_check


def _check_converters(job_config: JobConfig) -> None:
    known = model_converter._registry_model_converter_cls
    unknown = [name for name in job_config.model.converters if name not in known]
    if unknown and not job_config.experimental.custom_import:  # which may bring them
        raise ValueError(
            f"model.converters has {', '.join(map(repr, unknown))}, which nobody registered: use {GROUPED_MM!r} and "
            f"{LINEAR!r} (TorchTitan knows {', '.join(sorted(known))})"
        )


def _check_health(job_config: JobConfig) -> None:
    every, metrics = job_config.quantize.health_every, job_config.metrics
    if every < 0:
        raise ValueError(f"quantize.health_every = {every}: a number of steps, or 0 for never")
    measured = every and converter_configs(job_config).keys() & set(job_config.model.converters)
    if measured and not (metrics.enable_tensorboard or metrics.enable_wandb):
        raise ValueError(
            f"quantize.health_every = {every} has nowhere to log to: set metrics.enable_tensorboard or "
            "metrics.enable_wandb, or health_every = 0"
        )


def _check_activation_checkpointing(job_config: JobConfig) -> None:
    config = job_config.activation_checkpoint
    config.selective_ac_option = option = str(config.selective_ac_option)  # TOML may have a number
    if config.mode == "selective" and option != "op" and not (option.isdecimal() and int(option)):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {option!r}: use 'op', or N for every N-th layer, 1 or more"
        )


def _check_compile(job_config: JobConfig) -> None:
    tensor_parallel = job_config.parallelism.tensor_parallel_degree
    if tensor_parallel > 1 and compiles_model(job_config) and torch.__version__ >= (2, 14):
        raise ValueError(
            f"tensor_parallel_degree = {tensor_parallel} and a compiled model: TorchTitan 0.2.2 fails at them with "
            f"torch {torch.__version__} (\"'Tensor' object has no attribute '_local_tensor'\" in backward), with or "
            "without converters. Use torch 2.11 to 2.13, compile.enable = false, or compile.components = ['loss']"
        )


def _check_rebase_report(config: MXLinear | MXGroupedMM) -> None:
    if config.hopper_rebase_report < 0:
        raise ValueError(f"hopper_rebase_report is a number of steps, got {config.hopper_rebase_report}: 0 is never")
    if config.hopper_rebase_report and recipe_of(config).scale_span == 32:
        raise ValueError("hopper_rebase_report says what rebasing changes: set hopper_rebase = true as well")
