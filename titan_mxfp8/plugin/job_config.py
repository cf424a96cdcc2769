"""The config fields that the plugin adds to TorchTitan's, with their documentation.

TorchTitan merges ``JobConfig`` into its own while it parses the config. The merge needs real types: this module must
not have ``from __future__ import annotations``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import tyro

from titan_mxfp8.backends import recommend
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.modules import training_device
from titan_mxfp8.recipe import AUTO, GROUPED_MM, LINEAR, Recipe
from titan_mxfp8.titan.fields import Dispatch, Once


def option(default: object) -> Callable[[str], Any]:
    """A field with this default, a tuple for a list, and its text for ``--help``: ``option(0)("How many.")``."""
    given = {"default_factory": lambda: list(default)} if isinstance(default, tuple) else {"default": default}
    return lambda text: field(**given, metadata={"help": " ".join(text.split())})


def section(cls: type) -> type:
    """A dataclass with the texts of its own options in the types of its fields, which TorchTitan's merge takes over."""
    cls = dataclass(cls)
    for item in fields(cls):
        if "help" in item.metadata and item.name in cls.__annotations__:
            item.type = Annotated[item.type, tyro.conf.arg(help=item.metadata["help"])]
    return cls


@section
class _MX:
    recipe_name: str = option(AUTO)("""
    What is quantised how: auto, the recipe that is recommended for the hardware, which the log names; mxfp8,
    mxfp8_floor, mxfp8_wgrad_bf16, mxfp8_2d, mxfp8_2d_wgrad_bf16, mxfp8_e5m2_grad; one of these with _rebased behind it,
    see hopper_rebase; or one of the aliases mxfp8_rceil and mxfp8_cublas_rceil (= mxfp8), mxfp8_cublas (= mxfp8_floor),
    mxfp8_rceil_wgrad_with_hp (= mxfp8_wgrad_bf16). Of routed experts bf16 too, where dispatch is not off: the same
    layer with nothing quantised, the control for what the number format does.
    """)

    backend: str = option("auto")("""
    auto, or the name of a backend: one that cannot run on this hardware is an error. The log names the choice.
    """)

    hopper_rebase: bool = option(False)("""
    Whether to take the recipe's rebased form (mxfp8_2d: mxfp8_2d_rebased), whose GEMMs scale once per 128 elements,
    much faster on an H100 or H200, but not exact MXFP8: elements that become too small for the shared scale are
    rounded. Backends hopper and reference, with the same bits.
    """)

    hopper_rebase_report: int = option(0)("""
    Steps between two log lines with the share of elements that rebasing changed in that step, in this process; 0:
    never. Measured as quantize.health_every is.
    """)

    requantize_input: bool = option(False)("""
    Whether inputs are kept for backward as the FP8 rows that forward multiplies, and quantised once more there, along
    the tokens: half their memory where the weight gradient multiplies bf16 values (mxfp8_2d on an H100 or H200). It
    changes nothing elsewhere, nor in experts whose dispatch is not off, which keep FP8 rows anyway.
    """)


@section
class MXLinear(_MX):
    filter_fqns: list[str] = option(("output", "router.gate"))("""
    Comma-separated parts of the names of nn.Linear modules to leave in high precision; with $ behind it, a part at the
    end of a name. Routers are always left, and a linear whose in or out features are not a multiple of 32, with a log
    line that names it.
    Example: --quantize.linear.mx.filter_fqns="output,router.gate,attention.wk,attention.wv"
    """)


@section
class MXGroupedMM(_MX):
    fqns: list[str] | str = option(("experts",))("""
    Comma-separated parts of the names of expert modules to convert; with $ behind it, a part at the end of a name. Only
    modules that hold one matrix per expert count: the linears of moe.shared_experts match "experts" too, and belong to
    quantize.linear.mx.
    """)

    dispatch: Dispatch = option("auto")("""
    How tokens travel to their experts. off: TorchTitan's own way, in bf16, once for each of a token's experts. Else
    each token is quantised once and crosses each link once: symmetric, by kernels that read the memory of other GPUs of
    one host; collective, in an all-to-all; auto, symmetric where it can be, else collective. The log says which and
    why, and where experts keep TorchTitan's way. Parameters and checkpoints are the same in all.
    """)

    dispatch_rows: str | float = option("auto")("""
    For how many rows a MoE layer has memory where they are received, if dispatch is not off. A factor of those of
    balanced experts, such as 1.25; bounded, which is 1.5: the host waits in no layer, and a step in which a layer gets
    more runs again with a larger factor. worst_case: for all that ever could come. counted: for as many as come, which
    the host waits for in each layer. auto: bounded on GPUs, with the exceptions that the log names, else counted.
    """)

    fsdp_fp8_all_gather: bool = option(True)("""
    Whether FSDP gathers the experts' weights in FP8, with recipes of 32x32 blocks: half of bf16's bytes, quantised from
    the fp32 shards. The log says which way is taken and why. Parameters and checkpoints are the same.
    """)

    quantize_weights_once: Once = option("auto")("""
    Whether a step of several microbatches, of gradient accumulation or a pipeline, quantises the experts' weights once,
    and keeps that until its last backward: 2 bytes for each weight, where FSDP gathers them in FP8 1 byte for each of
    this rank's shard. on; off; auto: on where GPUs have the memory. Losses are the same.
    """)


@dataclass
class QuantizedLinear:
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass
class QuantizedGroupedMM:
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)


@section
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)

    health_every: int = option(0)("""
    Every so many steps, log to TensorBoard and wandb, for each converted module and its activations, weights and
    gradients (mx_health/...), the shares of elements that saturate or are flushed to zero, the range of the scales'
    exponents, and what rebasing and requantising changed; and of all routed experts how many got no tokens, and how
    full the fullest one is. 0: never. Of large operands 16.8 million elements are measured.
    """)


@section
class Training:
    cuda_graph: Literal["off", "on", "auto"] = option("auto")("""
    Whether forward, loss and backward of a microbatch are one CUDA graph, which the host launches at once: off; on,
    which is an error where that cannot be; auto, where it can be, was tried, and leaves memory free, else the log says
    why not. It needs NVIDIA GPUs, and with expert parallelism a dispatch with dispatch_rows other than counted.
    """)


@section
class Model:
    study_flavors: bool = option(False)("""
    Whether the model tables get the flavors of titan_mxfp8.plugin.flavors: <flavor>_2layers, _4layers and _7layers of
    several models, moe_100m of llama4 and moe_320m of deepseek_v3.
    """)


@section
class Job:
    git_commit: str = option("")("""
    Logged with the config. By default found where titan_mxfp8 lies, if that is a git repository; "-dirty" behind it
    says that files were changed since.
    """)

    save_config_file: str | None = option("job_config.json")("""
    The whole config as JSON, in job.dump_folder: scripts/study/compare_runs.py reads it.
    """)


@section
class Cluster:
    """
    The machines that a config was laid out for. Read by scripts/check_configs.sh only: training takes the number of
    processes from torchrun.
    """

    nodes: int = option(1)("Machines.")

    gpus_per_node: int = option(1)("GPUs of each machine.")

    gpu: str = option("")("H20, H100, H200, B200 or GB200. Empty: the memory estimate is compared with nothing.")


@dataclass
class JobConfig:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    quantize: Quantize = field(default_factory=Quantize)
    cluster: Cluster = field(default_factory=Cluster)


def has_our_fields(job_config: object) -> bool:
    """Whether a config was merged with ``JobConfig``. A program that imports the plugin may parse others too."""
    return hasattr(job_config, "cluster") and hasattr(job_config.quantize, "health_every")


def converter_configs(job_config: JobConfig) -> dict[str, MXGroupedMM | MXLinear]:
    """The section of each of our converters, by the converter's name."""
    return {GROUPED_MM: job_config.quantize.grouped_mm.mx, LINEAR: job_config.quantize.linear.mx}


def asked_configs(job_config: JobConfig) -> dict[str, MXGroupedMM | MXLinear]:
    """The same of those that the config asks for."""
    return {name: mx for name, mx in converter_configs(job_config).items() if name in job_config.model.converters}


def recipe_of(config: MXGroupedMM | MXLinear) -> Recipe:
    """The recipe that a section asks for: the one named, or recommended for the hardware of this training; rebased
    where ``hopper_rebase`` is on. Raises ValueError: as ``backends.recommend``."""
    return recommend(config.recipe_name, config.backend, hardware_of(training_device()), config.hopper_rebase)
