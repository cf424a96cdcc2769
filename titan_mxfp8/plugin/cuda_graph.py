"""``training.cuda_graph``: what cannot be captured is refused at parse."""

import logging
import os

import torch
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8.modules import training_device
from titan_mxfp8.plugin.job_config import recipe_of
from titan_mxfp8.recipe import GROUPED_MM
from titan_mxfp8.titan.dispatch import dispatches, refusal

logger = logging.getLogger(__name__)


def check_cuda_graph(job_config: JobConfig) -> None:
    """Decides ``auto``, with a log line that says why if steps are not to be captured, and tells NCCL to register no
    memory for graphs, which torch's expandable segments are not made for. Raises ValueError: an unknown value, or
    ``on`` where a step cannot be captured."""
    training = job_config.training
    if training.cuda_graph not in ("off", "on", "auto"):
        raise ValueError(f"cuda_graph = {training.cuda_graph!r}: use one of off, on, auto")
    if training.cuda_graph == "off":
        return
    if reason := obstacle(job_config):
        if training.cuda_graph == "on":
            raise ValueError(f"training.cuda_graph = 'on' does not work with {reason}, or set cuda_graph = 'off'")
        logger.info(f"MXFP8: training.cuda_graph = 'auto' is off here: it does not work with {reason}")
        training.cuda_graph = "off"
        return
    training.cuda_graph = "on"
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def obstacle(job_config: JobConfig) -> str:
    """What in a config keeps a step from being captured, and what to do, in words; nothing where it can be."""
    parallelism, kind = job_config.parallelism, training_device().type
    if kind != "cuda" or torch.version.hip:
        return f"training on {'AMD GPUs' if kind == 'cuda' else kind}: it needs NVIDIA GPUs"
    for name in ("pipeline", "tensor", "context"):
        if (degree := getattr(parallelism, f"{name}_parallel_degree")) > 1:
            return f"{name} parallelism: set {name}_parallel_degree = 1 instead of {degree}"
    experts, degree = job_config.quantize.grouped_mm.mx, parallelism.expert_parallel_degree
    comm, ours = parallelism.expert_parallel_comm_backend, GROUPED_MM in job_config.model.converters
    ours = ours and dispatches(experts.dispatch, experts.dispatch_rows)
    ours = ours and not refusal(experts.dispatch, recipe_of(experts))
    obstacles = (
        (
            parallelism.data_parallel_replicate_degree > 1,
            "DDP and HSDP, with which it was never tried: set data_parallel_replicate_degree = 1",
        ),
        (job_config.training.enable_cpu_offload, "training.enable_cpu_offload: set it to false"),
        (job_config.optimizer.early_step_in_backward, "optimizer.early_step_in_backward: set it to false"),
        (job_config.fault_tolerance.enable, "TorchFT: set fault_tolerance.enable = false"),
        (
            _attention(job_config) == "varlen",
            "attention of kind varlen, which reads lengths on the host: take another flavor",
        ),
        (
            degree > 1 and not ours,
            f"expert_parallel_degree = {degree} where TorchTitan dispatches the tokens and the host waits for "
            f"their numbers: convert experts, with a dispatch ([{GROUPED_MM}] dispatch = 'symmetric')",
        ),
        (
            job_config.model.name == "gpt_oss" and not ours,
            f"gpt_oss's own experts, for whose rows the host waits: set [{GROUPED_MM}] dispatch = 'auto'",
        ),
        (degree > 1 and comm != "standard", f"expert_parallel_comm_backend = {comm!r}: set it to 'standard'"),
        (
            degree > 1 and experts.dispatch_rows == "counted",
            f"[{GROUPED_MM}] dispatch_rows = 'counted', which the host waits for: set dispatch_rows = 'bounded' or "
            "'worst_case'",
        ),
    )
    return next((words for holds, words in obstacles if holds), "")


def _attention(job_config: JobConfig) -> str:
    """The kind of attention of the model, if it is known by now."""
    try:
        args = get_train_spec(job_config.model.name).model_args.get(job_config.model.flavor)
    except ValueError:
        return ""
    return getattr(args, "attn_type", "")
