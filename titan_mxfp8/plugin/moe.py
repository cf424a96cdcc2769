"""``quantize.grouped_mm.mx.dispatch``: TorchTitan's MoE layers, with ``mxfp8_moe`` in place of all around the experts.

    TorchTitan:  router -> reorderer -> x[order // k] -> all-to-all -> permute -> experts -> the same backwards
    here:        router -> experts(x, Routing), which is mxfp8_moe

The classes of ``moe`` and ``moe.experts`` are swapped; their parameters, buffers and submodules stay. The layer goes
through ``moe.experts``, as FSDP gathers the weights in a hook of that module. Expert parallelism shards the weights as
ever, but TorchTitan's hooks that dispatch and combine are left out.
"""

import logging

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_module
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.dual_pipe_v import get_dual_pipe_v_flag
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.gpt_oss.model.moe import GptOssMoE
from torchtitan.models.moe.moe import MoE

from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.modules import Dispatch, check_memory, training_device, worst_case_bytes
from titan_mxfp8.plugin.experts import RoutedExperts, Routing
from titan_mxfp8.plugin.job_config import recipe_of
from titan_mxfp8.recipe import BF16, GROUPED_MM
from titan_mxfp8.workarounds.patch import is_patched, patch_of

logger = logging.getLogger(__name__)


class MXFP8MoE(MoE):
    """Takes the place of the class of a ``MoE`` whose experts have a ``dispatch``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, D) to the same shape; counts the tokens of each expert as TorchTitan's does."""
        x_TD = x.view(-1, x.shape[-1])
        scores_TK, expert_ids_TK, tokens_per_expert = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(tokens_per_expert)
        out_TD = self.experts(x_TD, Routing(scores_TK, expert_ids_TK, self.score_before_experts))
        if self.shared_experts is not None:
            out_TD = self.shared_experts(x_TD) + out_TD
        return out_TD.reshape(x.shape)


class MXFP8GptOssMoE(MXFP8MoE, GptOssMoE):
    """Takes the place of the class of a ``GptOssMoE``."""


MOE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {MoE: MXFP8MoE, GptOssMoE: MXFP8GptOssMoE}


def dispatch_tokens(
    model: nn.Module, converted: list[str], job_config: JobConfig, dims: ParallelDims | None
) -> list[str]:
    """Has the MoE layers around converted experts dispatch as ``quantize.grouped_mm.mx.dispatch`` says.

    Args:
        model: on meta, before TorchTitan has parallelised it.
        converted: names of converted expert modules.
        dims: of the whole run; None for one process.

    Returns:
        The names of those layers. Those that keep TorchTitan's way are logged, with the reason.

    Raises:
        ValueError: a transport that cannot be, too little memory for ``worst_case``, or recipe ``bf16`` for experts
            that would be TorchTitan's own.
    """
    config = job_config.quantize.grouped_mm.mx
    dispatch = Dispatch(transport=config.dispatch, rows=config.dispatch_rows)
    layers: dict[str, nn.Module] = {}
    left: dict[str, list[str]] = {}
    of_the_run = _not_for_run(job_config, dims) or dispatch.refusal(recipe_of(config))
    for fqn in converted:
        name, _, child = fqn.rpartition(".")
        layer = model.get_submodule(name)
        if reason := of_the_run or _not_for_layer(layer, child):
            left.setdefault(reason, []).append(fqn)
        else:
            layers[name] = layer
    for reason, names in left.items():
        words = (
            f"MXFP8: dispatch = {config.dispatch!r} does not work with {reason}: TorchTitan dispatches the tokens of "
            f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"
        )
        if config.recipe_name == BF16.name:
            raise ValueError(f"{words}, with recipe {BF16.name!r} as if unconverted. Leave {GROUPED_MM} out instead")
        logger.info(words)
    if not layers:
        return []
    chosen = list(layers.values())
    choice = _choose_transport(dispatch, dims, _most_rows(chosen[0], job_config, dims))
    if config.dispatch_rows == "worst_case" and (device := _device()).type == "cuda":
        check_worst_case(chosen, job_config, dims, torch.cuda.get_device_properties(device).total_memory)
    for layer in layers.values():
        layer.__class__ = MOE_CLASSES[type(layer)]
        layer.experts.dispatch = dispatch
    who = (
        f"{len(layers)} MoE layers dispatch tokens themselves"
        if len(layers) > 1
        else "1 MoE layer dispatches tokens itself"
    )
    logger.info(f"MXFP8: {who}, {choice}; rows {config.dispatch_rows}")
    return list(layers)


def check_worst_case(layers: list[MoE], job_config: JobConfig, dims: ParallelDims | None, available: float) -> None:
    """Raises ValueError if a GPU has fewer bytes than ``worst_case`` needs at least for the layers of a model."""
    moe = layers[0]
    _, dim, hidden = moe.experts.get_parameter("mlp2_weight" if isinstance(moe, GptOssMoE) else "w2").shape
    keeps_layers = job_config.activation_checkpoint.mode == "none"
    needed = worst_case_bytes(
        tokens=_most_rows(moe, job_config, dims),
        ranks=dims.ep if dims else 1,
        top_k=1 if moe.score_before_experts else moe.router.top_k,
        experts=moe.experts.num_experts,
        dim=dim,
        hidden=hidden,
        saved_layers=ceil_div(len(layers), dims.pp if dims else 1) if keeps_layers else 1,
    )
    check_memory(needed, available, f"[{GROUPED_MM}] ", ", or activation_checkpoint.mode = full" * keeps_layers)


def _not_for_run(job_config: JobConfig, dims: ParallelDims | None) -> str:
    """Why no layer of a run can dispatch its own tokens, in words; nothing where they can."""
    if dims is None:
        return ""
    if dims.tp > 1:
        return "tensor parallelism"
    if dims.ep > 1 and job_config.parallelism.expert_parallel_comm_backend != "standard":
        return f"expert_parallel_comm_backend = {job_config.parallelism.expert_parallel_comm_backend!r}"
    return "DualPipeV's overlap" if get_dual_pipe_v_flag(job_config, dims) else ""


def _not_for_layer(layer: nn.Module, child: str) -> str:
    """The same for one layer, whose experts are its child of this name."""
    if type(layer) not in MOE_CLASSES or child != "experts":
        return f"experts in a {type(layer).__name__}"
    return "" if isinstance(layer.experts, RoutedExperts) else f"experts of class {type(layer.experts).__name__}"


def _choose_transport(dispatch: Dispatch, dims: ParallelDims | None, rows: int) -> str:
    """Which transport ``mxfp8_moe`` will take for so many rows of a rank, and why, in words. Chosen here so that an
    error, and the log line, come before anything is trained."""
    group = None if dims is None or dims.ep == 1 else dims.get_mesh("ep").get_group()
    try:
        return dispatch.connect(group, _device(), rows)
    except ValueError as error:
        raise ValueError(f"[{GROUPED_MM}] dispatch = {dispatch.transport!r}: {error}") from error


def _device() -> torch.device:
    """This process's: TorchTitan has set it when a model is converted."""
    device = training_device()
    return device if device.type == "cpu" else torch.device(device.type, torch.accelerator.current_device_index())


def _most_rows(moe: MoE, job_config: JobConfig, dims: ParallelDims | None) -> int:
    """The most rows that a rank sends in one forward, validation included: its tokens, or where scores come first, a
    row for each of a token's slots."""
    training, validation, parallelism = job_config.training, job_config.validation, job_config.parallelism
    pipelined = dims is not None and dims.pp > 1
    sequences = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    tokens = sequences * training.seq_len
    if validation.enable:
        sequences = sequences if pipelined else validation.local_batch_size
        tokens = max(tokens, sequences * validation.seq_len)
    return tokens // (dims.cp if dims else 1) * (moe.router.top_k if moe.score_before_experts else 1)


def install() -> None:
    """Has expert parallelism shard the weights of layers that dispatch their own tokens, and no more. Safe to call
    again."""
    apply = ExpertParallel._apply
    if is_patched(apply):
        return

    @patch_of(apply)
    def shard_or_apply(self: ExpertParallel, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if getattr(module, "dispatch", None) is None:
            return apply(self, module, device_mesh)
        return distribute_module(module, device_mesh, self._partition_fn)

    ExpertParallel._apply = shard_or_apply
