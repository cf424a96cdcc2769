"""The SwiGLU experts of a MoE layer on rows that lie where they are multiplied: plain functions of operands.

Per expert e, rows of group e only: ``y = h w2^T + b2``, ``h = act(x w1^T + b1, x w3^T + b3)``. M rows, D model and H
hidden features, E experts. A row's score s multiplies y afterwards; with g the gradient of that product, unscaled:

| gradient of     | computed as                                                                    |
|-----------------|--------------------------------------------------------------------------------|
| h               | ``s u``, ``u = g w2``                                                          |
| s               | the sum over H of ``u * h``, and ``g b2``: y itself is not needed              |
| w2              | ``g^T (s h)``                                                                  |
| w1, w3          | ``dgate^T x`` and ``dup^T x``                                                  |
| x               | ``dgate w1`` and ``dup w3``, which whoever sums the rows of a token adds up    |

x and g come as FP8 rows, quantised along D, once for all GEMMs that contract D. Those that contract the tokens take the
same rows quantised again (``Backend.requantize``); the activation writes both its forms at once (``Backend.swiglu``).
"""

from typing import NamedTuple

import torch

from titan_mxfp8.backends import Backend, Plan
from titan_mxfp8.format.spec import UNQUANTIZED, Operand, OperandSpec


class Weights(NamedTuple):
    """Parameters of E experts.

    Attributes:
        w1, w3: (E, H, D), bf16 or fp32: the gate's and the other half's.
        w2: (E, D, H).
        b1, b3: (E, H), or None.
        b2: (E, D), or None.
    """

    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b3: torch.Tensor | None
    b2: torch.Tensor | None

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.w1, self.w3, self.w2


class Gradients(NamedTuple):
    """What ``backward`` returns: ``rows`` are the two addends of (M, D); ``scores`` (M,) in fp32."""

    rows: list[torch.Tensor]
    scores: torch.Tensor | None
    weights: list[torch.Tensor | None]


def row_spec(spec: OperandSpec) -> OperandSpec:
    """What x or g are quantised to at home: ``spec``, which the GEMM takes, or the FP8 that its bf16 values are made
    from."""
    return spec.exact if spec.is_quantized and spec.stored == "bf16" else spec


def quantize_weights(
    weights: Weights, plan: Plan, kernels: Backend, keep: bool
) -> tuple[list[Operand], list[Operand] | None]:
    """The three matrices for forward and, with ``keep``, for dgrad."""
    forward, dgrad = plan.forward.b, plan.dgrad.b
    if not keep:
        return [kernels.quantize(w, 2, forward, None) for w in weights.matrices], None
    both = [kernels.quantize_both(w, forward, dgrad, None) for w in weights.matrices]
    return [pair[0] for pair in both], [pair[1] for pair in both]


def forward(
    x: Operand,
    weights: list[Operand],
    biases: Weights,
    offs: torch.Tensor,
    limit: float | None,
    plan: Plan,
    kernels: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (M, D), and the pre-activations x w1^T and x w3^T, (M, H); all bf16, undefined at and past ``offs[-1]``.

    Args:
        x: (M, D) of ``row_spec(plan.forward.a)``.
        weights: w1, w3 and w2 of ``plan.forward.b``.
        biases: those of its fields that are biases.
        offs: int32 (E,), end offsets of the experts' rows.
        limit: that of gpt_oss's clamped SwiGLU, or None for SiLU.
    """
    w1, w3, w2 = weights
    values = _as_multiplied(x, plan.forward.a, kernels)
    gate = _gemm(values, w1, biases.b1, offs, kernels)
    up = _gemm(values, w3, biases.b3, offs, kernels)
    del values
    h = kernels.swiglu(gate, up, limit, plan.forward.a, offs)
    return _gemm(h, w2, biases.b2, offs, kernels), gate, up


def backward(
    g: Operand,
    x: Operand,
    gate: torch.Tensor,
    up: torch.Tensor,
    scores: torch.Tensor | None,
    weights: Weights,
    quantized: list[Operand] | None,
    needs: list[bool],
    offs: torch.Tensor,
    limit: float | None,
    plan: Plan,
    kernels: Backend,
) -> Gradients:
    """The gradients of everything, in the table of this module.

    Args:
        g: (M, D) of ``row_spec(plan.dgrad.a)``, not yet multiplied by the scores.
        x, gate, up: as ``forward`` took and returned them.
        scores: float32 (M,), or None where outputs are not multiplied by any.
        weights: as they are, in high precision.
        quantized: w1, w3 and w2 of ``plan.dgrad.b``, or None: they are quantised again.
        needs: which of the six weights' and biases' gradients are wanted.
    """
    w1, w3, w2 = quantized or [kernels.quantize(w, 1, plan.dgrad.b, None) for w in weights.matrices]
    need_w1, need_w3, need_w2, *_ = needs
    u = _gemm(_as_multiplied(g, plan.dgrad.a, kernels), w2, None, offs, kernels)
    first, h_first = plan.wgrad.a, plan.wgrad.b
    dgate, dup, dgate_first, dup_first, h, dscores = kernels.swiglu_backward(
        gate, up, u, scores, limit, plan.dgrad.a, first, h_first, offs
    )
    del u
    grads: list[torch.Tensor | None] = [None] * 6
    if any(bias is not None for bias in weights[3:]):
        dscores = _bias_gradients(g, dgate, dup, scores, dscores, weights, needs, offs, kernels, grads)
    if need_w2:
        g_first = _along_tokens(g, first, offs, kernels)
        grads[2] = kernels.gemm_k_grouped(g_first, h, offs, weights.w2.dtype)
        del g_first
    del h
    if need_w1 or need_w3:
        x_first = _along_tokens(x, h_first, offs, kernels)
        grads[0] = kernels.gemm_k_grouped(dgate_first, x_first, offs, weights.w1.dtype) if need_w1 else None
        del dgate_first
        grads[1] = kernels.gemm_k_grouped(dup_first, x_first, offs, weights.w3.dtype) if need_w3 else None
        del dup_first, x_first
    rows = [_gemm(dgate, w1, None, offs, kernels), _gemm(dup, w3, None, offs, kernels)]
    return Gradients(rows, dscores, grads)


def _bias_gradients(
    g: Operand,
    dgate: Operand,
    dup: Operand,
    scores: torch.Tensor | None,
    dscores: torch.Tensor | None,
    weights: Weights,
    needs: list[bool],
    offs: torch.Tensor,
    kernels: Backend,
    grads: list[torch.Tensor | None],
) -> torch.Tensor | None:
    """Fills in those of the biases, sums of the quantised rows. Returns the scores' gradient with b2's part."""
    expert_M = torch.searchsorted(offs, torch.arange(g.data.shape[0], device=offs.device), right=True)
    for i, operand in ((3, dgate), (4, dup), (5, g)):
        bias = weights[i]
        if bias is None:
            continue
        values = _values(operand, kernels).float()
        if i == 5 and dscores is not None:
            dscores = dscores + (values * bias.float()[expert_M.clamp(max=offs.numel() - 1)]).sum(1)
            values = values * scores[:, None]
        if needs[i]:
            sums = values.new_zeros((offs.numel() + 1, values.shape[1]))  # the last: of rows of no expert
            grads[i] = sums.index_add_(0, expert_M, values)[:-1].to(bias.dtype)
    return dscores


def _gemm(a: Operand, w: Operand, bias: torch.Tensor | None, offs: torch.Tensor, kernels: Backend) -> torch.Tensor:
    return kernels.gemm_m_grouped(a, w, offs, bias, torch.bfloat16, zero_tail=False)


def _as_multiplied(rows: Operand, spec: OperandSpec, kernels: Backend) -> Operand:
    """FP8 rows as the GEMM takes them: as they are, or their values in bf16."""
    return rows if rows.spec == spec else kernels.requantize(rows, 1, spec, None)


def _along_tokens(rows: Operand, spec: OperandSpec, offs: torch.Tensor, kernels: Backend) -> Operand:
    """The rows for wgrad."""
    if rows.spec.stored == "bf16":
        return Operand(rows.data, None, spec, 0)
    return kernels.requantize(rows, 0, spec, offs)


def _values(rows: Operand, kernels: Backend) -> torch.Tensor:
    """The values of (M, C) rows in bf16."""
    return rows.data if rows.spec.stored == "bf16" else kernels.requantize(rows, 1, UNQUANTIZED, None).data
