"""Workarounds of TorchTitan 0.3, and those of every version."""

from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d
from torch.nn.attention.varlen import AuxRequest
from torchtitan.components.metrics import WandBLogger
from torchtitan.models.common import attention
from torchtitan.tools import utils

from titan_mxfp8 import workarounds
from titan_mxfp8.titan03 import moe
from titan_mxfp8.workarounds.cpu import train_on_cpu
from titan_mxfp8.workarounds.patch import is_patched, patch_of
from titan_mxfp8.workarounds.wandb_offline import log_offline_if_the_start_fails


def apply() -> None:
    """Applies the workarounds that every run needs, and those of machines without an accelerator where there is
    none."""
    workarounds.apply()
    let_parts_be_overridden_too()
    set_timeouts_of_process_groups()
    log_offline_where_wandb_is_out_of_reach()
    train_on_cpu(utils, attend_without_cuda)


def let_parts_be_overridden_too() -> None:
    """Works around: `claims 'model_spec.model', an ancestor of ...` where a run has MXFP8 and an override of another
    part.

    For: TorchTitan 0.3.0.

    Ours claim the whole model's config, which they leave where it is: they act when the model has been built, on what
    the others have made of its parts. So their claims leave the tree in which TorchTitan looks for conflicts. The whole
    config is kept: overrides are not told of it.
    """
    titan_override = import_module("torchtitan.config.override")  # torchtitan.config has a function of this name
    collect = titan_override._collect_claims
    if is_patched(collect):
        return

    @patch_of(collect)
    def collect_and_move_ours(resolved: list, config_root: object) -> list:
        claims = collect(resolved, config_root)
        for claim in claims:
            if claim.ov.origin_module == "titan_mxfp8.titan03":
                moe.remember(config_root)
                claim.fqn, claim.parent = f"the model at {claim.fqn}", SimpleNamespace()
        return claims

    titan_override._collect_claims = collect_and_move_ours


def set_timeouts_of_process_groups() -> None:
    """Works around: `module 'torch.distributed' has no attribute 'set_timeout'` after the first step.

    For: TorchTitan 0.3.0 with torch 2.13, whose function of this kind is private.
    """
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = distributed_c10d._set_pg_timeout


def log_offline_where_wandb_is_out_of_reach() -> None:
    """Works around: a run that goes on unlogged where wandb cannot be reached.

    For: TorchTitan 0.3.0; wandb up to 0.31.
    """
    start = WandBLogger.__init__
    if is_patched(start):
        return

    @patch_of(start)
    def start_or_log_offline(self: WandBLogger, *args: object, **kwargs: object) -> None:
        log_offline_if_the_start_fails(self, lambda: start(self, *args, **kwargs))

    WandBLogger.__init__ = start_or_log_offline


def attend_without_cuda() -> None:
    """Works around: `Could not run 'aten::_flash_attention_forward'`: variable-length attention is CUDA's only.

    For: TorchTitan 0.3.0, torch up to 2.13.

    TorchTitan's other choice, flex attention, has no backward on CPUs. So configs for CPUs take
    ``attn_backend="varlen"``, whose one call of torch is replaced.
    """
    attention.varlen_attn = varlen_attn_on_cpu


def varlen_attn_on_cpu(
    q_TNH: torch.Tensor,
    k_TMH: torch.Tensor,
    v_TMV: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``torch.nn.attention.varlen.varlen_attn`` in plain torch, over all pairs of the T packed tokens.

    N query heads share M key and value heads; the log-sum-exp of the scores is (N, T), in fp32.
    """

    def places(x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The document of each token, and its position in it."""
        tokens = torch.arange(x.shape[0], device=x.device)
        documents = torch.bucketize(tokens, starts[1:], right=True)
        return documents, tokens - starts[documents]

    (q_documents, q_positions), (k_documents, k_positions) = places(q_TNH, cu_seq_q), places(k_TMH, cu_seq_k)
    distance = q_positions[:, None] - k_positions
    seen = q_documents[:, None] == k_documents
    left, right = window_size
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    shared = q_TNH.shape[1] // k_TMH.shape[1]
    k_NTH, v_NTV = (x.transpose(0, 1).repeat_interleave(shared, dim=0) for x in (k_TMH, v_TMV))
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    scores = ((q_TNH.transpose(0, 1) @ k_NTH.mT).float() * scale).masked_fill(~seen, -torch.inf)
    y_TNV = (F.softmax(scores, dim=-1).to(v_NTV.dtype) @ v_NTV).transpose(0, 1)
    return y_TNV if return_aux is None else (y_TNV, scores.logsumexp(dim=-1))
