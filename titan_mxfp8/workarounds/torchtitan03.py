"""Workarounds of TorchTitan 0.3."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.varlen import AuxRequest

from titan_mxfp8.workarounds.patch import TITAN03, around, workaround


@workaround(torchtitan=TITAN03)
@around("torchtitan.config.override._collect_claims")
def let_parts_be_overridden_too(collect: Any, resolved: list, config_root: Any) -> list:
    """`claims 'model_spec.model', an ancestor of ...` where another override has a part of the model.

    Our overrides claim the whole model's config, and act when the model has been built, on what the others have made of
    its parts. So their claims leave the tree in which TorchTitan looks for conflicts."""
    claims = collect(resolved, config_root)
    for claim in claims:
        if claim.ov.origin_module == "titan_mxfp8.titan03":
            claim.fqn, claim.parent = f"the model at {claim.fqn}", SimpleNamespace()
    return claims


@workaround("torch.distributed.set_timeout", torchtitan=TITAN03, before="2.14")
def set_timeouts_of_process_groups() -> None:
    """`module 'torch.distributed' has no attribute 'set_timeout'` after the first step.

    torch 2.13's function of this kind is private."""
    if not hasattr(dist, "set_timeout"):
        from torch.distributed.distributed_c10d import _set_pg_timeout

        dist.set_timeout = _set_pg_timeout


@workaround("torchtitan.models.common.attention.varlen_attn", torchtitan=TITAN03, cpu=True)
def attend_without_cuda() -> None:
    """`Could not run 'aten::_flash_attention_forward'`: variable-length attention is CUDA's only.

    TorchTitan's other choice, flex attention, has no backward on CPUs."""
    from torchtitan.models.common import attention

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
