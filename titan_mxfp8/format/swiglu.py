"""The definition of the experts' SwiGLU, before anything is quantised: plain torch, fp32 inside, each result rounded
once to bf16.

M tokens, H hidden features. ``gate`` and ``up`` are the two pre-activations, ``u`` the gradient of the layer's output
by h before the score (``u = g w2``), s a token's score.
"""

import torch
from torch import Tensor

GPT_OSS_ALPHA = 1.702  # with a limit, h is gate * sigmoid(1.702 gate) * (up + 1)


def forward(gate_MH: Tensor, up_MH: Tensor, limit: float | None) -> Tensor:
    """h (M, H) in bf16.

    Args:
        gate_MH, up_MH: bf16.
        limit: None: ``gate * sigmoid(gate) * up``. Else gate is cut at ``limit`` and up at ``-limit`` and ``limit``,
            and h is ``gate * sigmoid(1.702 gate) * (up + 1)``, as gpt_oss has it.
    """
    gate, up, sigmoid = _parts(gate_MH, up_MH, limit)
    return (gate * sigmoid * up).bfloat16()


def backward(
    gate_MH: Tensor, up_MH: Tensor, u_MH: Tensor, scores_M: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients by gate and up, (M, H) in bf16, of ``sum(s * u * h)``, s and u held fixed; 0 where a value was cut.
    The score times h, likewise, which wgrad of w2 multiplies. And the scores' gradient, fp32 (M,), None without scores.

    Args:
        gate_MH, up_MH, limit: as ``forward``.
        u_MH: bf16, the gradient by h, without the score.
        scores_M: fp32, or None for 1.
    """
    gate, up, sigmoid = _parts(gate_MH, up_MH, limit)
    u = u_MH.float()
    s = 1.0 if scores_M is None else scores_M.float()[:, None]
    dh, activated = u * s, gate * sigmoid
    h = activated * up
    alpha = 1.0 if limit is None else GPT_OSS_ALPHA
    dgate = dh * up * (sigmoid * (1 + alpha * gate * (1 - sigmoid)))
    dup = dh * activated
    if limit is not None:
        dgate = dgate.masked_fill(gate_MH > limit, 0)
        dup = dup.masked_fill(up_MH.abs() > limit, 0)
    dscores = None if scores_M is None else (u * h.bfloat16().float()).sum(1)
    return dgate.bfloat16(), dup.bfloat16(), (h * s).bfloat16(), dscores


def _parts(gate_MH: Tensor, up_MH: Tensor, limit: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """In fp32 the cut gate, what it is multiplied by, and its sigmoid."""
    gate, up = gate_MH.float(), up_MH.float()
    if limit is None:
        return gate, up, torch.sigmoid(gate)
    # Not clamp, which from torch 2.14 on has no gradient at the limit itself: ``backward`` has one there.
    gate, up = (x.masked_fill(x > limit, limit) for x in (gate, up))
    return gate, up.masked_fill(up < -limit, -limit) + 1, torch.sigmoid(GPT_OSS_ALPHA * gate)
