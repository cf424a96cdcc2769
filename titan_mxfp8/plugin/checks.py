"""Checks of a parsed TorchTitan config, before any process group, model or GPU exists."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import MXLinear as TorchTitanMXLinear
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs, model_converter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from titan_mxfp8 import backends, workarounds
from titan_mxfp8.arguments import check_types
from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.modules import as_list, training_device
from titan_mxfp8.plugin.check_files import check_checkpoint, check_files, check_positive
from titan_mxfp8.plugin.flavors import is_study_flavor, register_flavors
from titan_mxfp8.plugin.job_config import asked_configs, has_our_fields, recipe_of
from titan_mxfp8.plugin.wandb_run import fill_git_commit
from titan_mxfp8.recipe import GROUPED_MM, LINEAR
from titan_mxfp8.titan.cuda_graph import waits_in_bf16
from titan_mxfp8.titan.dispatch import dispatches, refusal
from titan_mxfp8.titan.fields import check_fields, compiles_model
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)

# These of TorchTitan's models wrap in FSDP wherever there is EP, and fail without ranks for it. Qwen3 does not.
FSDP_WITH_EP = ("llama4", "deepseek_v3", "gpt_oss")
MODELS = ("deepseek_v3", "gpt_oss", "llama3", "llama4", "qwen3")  # of TorchTitan, which were tried
OPTIMIZERS = ("Adam", "AdamW")  # that build_optimizers of TorchTitan knows, in a local variable
NUMBER_AS_STRING = ("activation_checkpoint.selective_ac_option",)  # in a TOML


def check_job_config(job_config: JobConfig, knows_gpu: bool = True) -> None:
    """Normalises lists that TOML or the command line gave as strings, and checks what the plugin is about to use; the
    types of all fields are checked before. Warns of a field without effect. Fills ``job.git_commit`` on rank 0, which
    saves the config, and registers the study flavors where the config asks for them. Without ``knows_gpu`` it is not
    known what it will be trained on, and CUDA graphs are not refused for that.

    ``--model.converters=`` (nothing behind the sign) means no converters. Raises ValueError: a converter that nobody
    registered, MXFP8 beside another quantisation, an unknown recipe or backend, a backend without rebase, a report on
    it or on health that cannot be, fields of dispatch that contradict each other, activation checkpointing or
    compilation that TorchTitan is known to fail at, an optimizer that it does not know."""
    experts, linears = job_config.quantize.grouped_mm.mx, job_config.quantize.linear.mx
    job_config.model.converters = converters = as_list(",".join(as_list(job_config.model.converters)))
    experts.fqns, linears.filter_fqns = as_list(experts.fqns), as_list(linears.filter_fqns)
    checkpointing, tensor_parallel = job_config.activation_checkpoint, job_config.parallelism.tensor_parallel_degree
    checkpointing.selective_ac_option = option = str(checkpointing.selective_ac_option)
    if os.environ.get("RANK", "0") == "0":
        fill_git_commit(job_config)
    if job_config.model.study_flavors:
        register_flavors()
    check_converters(job_config)
    known = model_converter._registry_model_converter_cls
    unknown = [name for name in converters if name not in known]
    if unknown and not job_config.experimental.custom_import:  # which may bring them
        raise ValueError(
            f"model.converters has {', '.join(map(repr, unknown))}, which nobody registered: use {GROUPED_MM!r} and "
            f"{LINEAR!r} (TorchTitan knows {', '.join(sorted(known))})"
        )
    every, asked = job_config.quantize.health_every, asked_configs(job_config)
    with errors_in(GROUPED_MM):
        dispatch = dispatches(experts.dispatch, experts.dispatch_rows)
    for name, config in asked.items():
        with errors_in(name):
            recipe, kind = recipe_of(config), "experts" if name == GROUPED_MM else "linears"
            backends.select(config.backend, hardware_of(training_device()), recipe)
            check_fields(recipe, kind, dispatch and config is experts, every, config.hopper_rebase_report)
    kernel = linears.mxfp8_dim1_cast_kernel_choice
    if LINEAR in asked and kernel != TorchTitanMXLinear.mxfp8_dim1_cast_kernel_choice:
        logger.warning(
            f"[{LINEAR}] mxfp8_dim1_cast_kernel_choice = {kernel!r} has no effect with titan_mxfp8: its kernels are "
            "chosen by backend"
        )
    if every and asked and not (job_config.metrics.enable_tensorboard or job_config.metrics.enable_wandb):
        raise ValueError(
            f"quantize.health_every = {every} has nowhere to log to: set metrics.enable_tensorboard or "
            "metrics.enable_wandb, or health_every = 0"
        )
    if checkpointing.mode == "selective" and option != "op" and not (option.isdecimal() and int(option)):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {option!r}: use 'op', or N for every N-th layer, 1 or more"
        )
    if checkpointing.mode == "memory_budget" and not compiles_model(job_config):
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' works in a compiled model only: set compile.enable = true, "
            "with 'model' in compile.components, or another mode"
        )
    if tensor_parallel > 1 and compiles_model(job_config) and torch.__version__ >= (2, 14):
        raise ValueError(
            f"tensor_parallel_degree = {tensor_parallel} and a compiled model: TorchTitan 0.2.2 fails at them with "
            f"torch {torch.__version__} (\"'Tensor' object has no attribute '_local_tensor'\" in backward), with or "
            "without converters. Use torch 2.11 to 2.13, compile.enable = false, or compile.components = ['loss']"
        )
    check_optimizer(job_config)
    check_cuda_graph(job_config, hardware_of(training_device()) if knows_gpu else None)
    workarounds.apply("hide_grouped_mm_warning", GROUPED_MM in converters)


@contextmanager
def errors_in(section: str) -> Iterator[None]:
    """Within, errors begin with the section that they are in."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"[{section}] {error}") from error


def check_converters(job_config: JobConfig) -> None:
    """Raises ValueError if ``model.converters`` mixes MXFP8 with another quantisation, such as float8, or has ours in a
    config without our fields."""
    quantisations = [name for name in job_config.model.converters if name.startswith("quantize.")]
    if len({name.rsplit(".", 1)[-1] for name in quantisations}) > 1:
        raise ValueError(
            f"model.converters = {quantisations} mixes quantisation formats, which TorchTitan does not support: keep "
            "either the .mx converters or the .float8 ones"
        )
    ours = [name for name in quantisations if name in (GROUPED_MM, LINEAR)]
    if ours and not has_our_fields(job_config):
        raise ValueError(
            f"model.converters has {', '.join(map(repr, ours))} of titan_mxfp8, whose fields this config lacks: set "
            "job.custom_config_module to 'titan_mxfp8.plugin', or to a module whose JobConfig derives from that one's"
        )


def check_optimizer(job_config: JobConfig) -> None:
    """Raises ValueError of an optimizer that TorchTitan does not know, unless the model builds its own, as one that
    ``custom_import`` is yet to bring may do."""
    builder, name = getattr(_known_spec(job_config), "build_optimizers_fn", None), job_config.optimizer.name
    is_titans = builder in (build_optimizers, build_optimizers_with_moe_load_balancing)
    if is_titans and not job_config.experimental.custom_import and name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name = {name!r}: TorchTitan knows {', '.join(OPTIMIZERS)}")


def check_cuda_graph(job_config: JobConfig, hardware: Hardware | None) -> None:
    """Switches ``auto`` off where steps cannot be captured, with a log line that says why, and tells NCCL to register
    no memory for graphs, which torch's expandable segments are not made for. ``hardware``: None if it is not known.
    Raises ValueError: ``on`` where a step cannot be captured."""
    training = job_config.training
    if training.cuda_graph == "off":
        return
    reason = graph_obstacle(job_config, hardware)
    if training.cuda_graph == "auto" and (reason := reason or _untried(job_config)):
        if training_device().type == "cuda":
            logger.info(f"MXFP8: no CUDA graphs (training.cuda_graph = 'auto') with {reason}")
        training.cuda_graph = "off"
    elif reason:
        raise ValueError(f"training.cuda_graph = 'on' does not work with {reason}, or set cuda_graph = 'off'")
    else:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _untried(job_config: JobConfig) -> str:
    """What in a config might wait for the GPU, which no graph can hold, in words; nothing where all was tried."""
    name, module = job_config.model.name, job_config.experimental.custom_import
    found = [f"model converter {other!r}" for other in job_config.model.converters if other not in (GROUPED_MM, LINEAR)]
    found += [f"model {name!r}"] * (name not in MODELS) + [f"custom_import {module!r}"] * bool(module)
    return f"{found[0]}, with which it was never tried: set cuda_graph = 'on' to try" if found else ""


def graph_obstacle(job_config: JobConfig, hardware: Hardware | None) -> str:
    """What in a config keeps a step from being captured, and what to do, in words; nothing where it can be, but for
    experts that ``fqns`` leave in bf16, which plugin/trainer.py finds in the model."""
    parallelism = job_config.parallelism
    if hardware is not None and hardware.capability is None:
        return f"training on {hardware.name}: it needs NVIDIA GPUs"
    for name in ("pipeline", "tensor", "context"):
        if (degree := getattr(parallelism, f"{name}_parallel_degree")) > 1:
            return f"{name} parallelism: set {name}_parallel_degree = 1 instead of {degree}"
    experts, degree = job_config.quantize.grouped_mm.mx, parallelism.expert_parallel_degree
    comm, ours = parallelism.expert_parallel_comm_backend, GROUPED_MM in job_config.model.converters
    ours = ours and dispatches(experts.dispatch, experts.dispatch_rows)
    ours = ours and not refusal(experts.dispatch, recipe_of(experts))
    if parallelism.data_parallel_replicate_degree > 1:
        return "DDP and HSDP, with which it was never tried: set data_parallel_replicate_degree = 1"
    if job_config.training.enable_cpu_offload:
        return "training.enable_cpu_offload: set it to false"
    if job_config.optimizer.early_step_in_backward:
        return "optimizer.early_step_in_backward: set it to false"
    if job_config.fault_tolerance.enable:
        return "TorchFT: set fault_tolerance.enable = false"
    if attention(job_config) == "varlen":
        return "attention of kind varlen, which reads lengths on the host: take another flavor"
    if degree > 1 and not ours:
        return (
            f"expert_parallel_degree = {degree} where TorchTitan dispatches the tokens and the host waits for their "
            f"numbers: convert experts, with a dispatch ([{GROUPED_MM}] dispatch = 'symmetric')"
        )
    if job_config.model.name == "gpt_oss" and not ours:
        return f"gpt_oss's own experts, for whose rows the host waits: set [{GROUPED_MM}] dispatch = 'auto'"
    in_bf16 = GROUPED_MM not in job_config.model.converters and _has_experts(job_config)
    if in_bf16 and hardware is not None and waits_in_bf16(hardware):
        return (
            f"experts in bf16 on {hardware.name}, where the host waits for their rows: torch._grouped_mm does without "
            f"on SM90 and SM100. Convert experts ({GROUPED_MM})"
        )
    if degree > 1 and comm != "standard":
        return f"expert_parallel_comm_backend = {comm!r}: set it to 'standard'"
    if degree > 1 and experts.dispatch_rows == "counted":
        ways = "set dispatch_rows = 'bounded' or 'worst_case'"
        return f"[{GROUPED_MM}] dispatch_rows = 'counted', which the host waits for: {ways}"
    return ""


def attention(job_config: JobConfig) -> str:
    """The kind of attention of the model, if it is known by now."""
    return getattr(_known_args(job_config), "attn_type", "")


def _has_experts(job_config: JobConfig) -> bool:
    """Whether the model has routed experts, if it is known by now."""
    args = _known_args(job_config)
    return getattr(args, "moe_enabled", hasattr(args, "moe_args"))


def _known_args(job_config: JobConfig) -> BaseModelArgs | None:
    spec = _known_spec(job_config)
    return spec and spec.model_args.get(job_config.model.flavor)


def _known_spec(job_config: JobConfig) -> TrainSpec | None:
    try:
        return get_train_spec(job_config.model.name)
    except ValueError:
        return None


def check_layout(job_config: JobConfig, world_size: int) -> ParallelDims:
    """The mesh dimensions of the config on ``world_size`` processes, once the arithmetic of the layout holds. Raises
    ValueError: degrees that do not multiply to ``world_size``, or do not divide the experts, the sequence or the global
    batch; EP without ranks for FSDP; an empty batch or sequence; an unknown model or flavor."""
    check_positive("training", job_config.training, "local_batch_size", "seq_len")
    parallelism = job_config.parallelism
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
    args, model, training = model_args(job_config), job_config.model, job_config.training
    experts = getattr(getattr(args, "moe_args", None), "num_experts", 0)
    heads, kv_heads = getattr(args, "n_heads", 0), getattr(args, "n_kv_heads", 0) or 0
    ep, tp = f"expert_parallel_degree {dims.ep}", f"tensor_parallel_degree {dims.tp}"
    of_model = f"of {model.name} {model.flavor}: choose a divisor"
    ranks, batches = dims.dp_shard * dims.cp * dims.tp, dims.dp_replicate * dims.dp_shard
    batch, together = training.global_batch_size, training.local_batch_size * batches
    wrong = (
        (
            dims.ep > 1 and ranks % (dims.ep * dims.etp),
            f"{ep} x expert_tensor_parallel_degree {dims.etp} does not divide the {ranks} ranks of data_parallel_shard "
            "x context_parallel x tensor_parallel, among which it divides the experts: choose a divisor",
        ),
        (
            dims.ep > 1 and dims.dp_shard * dims.cp == 1 and model.name in FSDP_WITH_EP,
            f"{ep} takes its ranks from {tp} alone, but where TorchTitan's {model.name} has EP it also needs ranks for "
            "FSDP: set data_parallel_shard_degree or context_parallel_degree to 2 or more, or "
            "expert_parallel_degree = 1",
        ),
        (experts % dims.ep, f"{ep} does not divide the {experts} experts {of_model}"),
        (heads % dims.tp, f"{tp} does not divide the {heads} attention heads {of_model}"),
        (kv_heads % dims.tp, f"{tp} does not divide the {kv_heads} key and value heads {of_model}"),
        (
            training.seq_len % dims.seq_len_divisor,
            f"training.seq_len {training.seq_len} is no multiple of {dims.seq_len_divisor} = 2 x "
            f"context_parallel_degree {dims.cp} x {tp}, which divide the sequence",
        ),
        (
            batch == 0 or (batch > 0 and batch % together),  # negative: what all ranks have together
            f"training.global_batch_size {batch} is no multiple of {together} = local_batch_size "
            f"{training.local_batch_size} x {batches} data-parallel ranks",
        ),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise ValueError(message)
    return dims


def check_symmetric(job_config: JobConfig, dims: ParallelDims, per_host: int, hardware: Hardware | None) -> None:
    """Raises ValueError: dispatch ``symmetric`` on other hardware than it is for, None being unknown, or where expert
    parallelism, whose ranks are consecutive ones, takes ranks of several hosts with ``per_host`` processes each."""
    asked = asked_configs(job_config).get(GROUPED_MM)
    if asked is None or asked.dispatch != "symmetric" or dims.ep == 1 or dims.tp_enabled:  # TP: TorchTitan dispatches
        return
    start, instead = f"[{GROUPED_MM}] dispatch = 'symmetric' needs", "or dispatch = 'auto' or 'collective'"
    if hardware is not None and (hardware.capability or (0, 0)) < (8, 0):
        raise ValueError(f"{start} NVIDIA GPUs of SM80 or newer, and trains on {hardware.name}: choose such, {instead}")
    if dims.world_size > per_host and per_host % dims.ep:
        raise ValueError(
            f"{start} all ranks of expert parallelism on one host, and expert_parallel_degree {dims.ep} does not "
            f"divide the {per_host} processes of a host: choose one that does, {instead}"
        )


def model_args(job_config: JobConfig) -> BaseModelArgs:
    """TorchTitan's arguments of the config's model and flavor: the shared object, not a copy. Raises ValueError:
    unknown model or flavor."""
    model = job_config.model
    flavors = {  # another config of this process may have registered ours
        name: args
        for name, args in get_train_spec(model.name).model_args.items()
        if model.study_flavors or not is_study_flavor(args)
    }
    if model.flavor not in flavors:
        more = "" if model.study_flavors else ", or set model.study_flavors = true for those of titan_mxfp8"
        raise ValueError(f"{model.name} has no flavor {model.flavor!r}: use one of {', '.join(flavors)}{more}")
    return flavors[model.flavor]


@contextmanager
def in_one_line() -> Iterator[None]:
    """Within, a ValueError that ends this process is printed without its traceback, and is what torchrun's report ends
    with. The report shows what a file says: torch writes what TorchTitan's trainer raises to it, but nothing yet while
    the config is parsed."""
    try:
        yield
    except ValueError as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            refused, said, usual = error, f"ValueError: {error}", sys.excepthook
            message = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": message}))

            def hook(kind: type[BaseException], value: BaseException, traceback: object) -> None:
                print(said, file=sys.stderr) if value is refused else usual(kind, value, traceback)

            sys.excepthook = hook
        raise


@around("torchtitan.config.manager.ConfigManager._validate_config")
@in_one_line()
def validate_and_check(validate: Any, config_manager: ConfigManager) -> None:
    """Has TorchTitan's config manager run the checks above once it has checked a config itself; the layout where the
    number of processes is known, in a process that torchrun started, unless ``custom_import`` is yet to bring the
    model."""
    config = config_manager.config
    if not has_our_fields(config):
        validate(config_manager)
        check_converters(config)
        return
    check_types(config, skip=NUMBER_AS_STRING)  # before TorchTitan takes values for what they are not
    validate(config_manager)
    check_job_config(config)
    check_files(config)
    if "WORLD_SIZE" in os.environ and not config.experimental.custom_import:
        processes = int(os.environ["WORLD_SIZE"])
        dims, per_host = check_layout(config, processes), int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        check_symmetric(config, dims, per_host, hardware_of(training_device()))
        if os.environ.get("RANK", "0") == "0":
            check_checkpoint(config, dims)
