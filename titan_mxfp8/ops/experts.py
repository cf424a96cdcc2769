"""The SwiGLU experts of a MoE layer on rows that lie where they are multiplied: plain functions of operands.

Per expert e, rows of group e only: ``y = h w2^T + b2``, ``h = act(x w1^T + b1, x w3^T + b3)``. M rows, D model and H
hidden features, E experts. A row's score s multiplies y afterwards; with g the gradient of that product, unscaled:

| gradient of     | computed as                                                                    |
|-----------------|--------------------------------------------------------------------------------|
| h               | ``s u``, ``u = g w2``                                                          |
| s               | the sum over H of ``u * h``, and ``g b2``: y itself is not needed              |
| w2              | ``g^T (s h)``                                                                  |
| w1, w3          | ``dgate^T x`` and ``dup^T x``                                                  |
| x               | ``dgate w1 + dup w3``                                                          |

x and g come as FP8 rows, quantised along D, once for all GEMMs that contract D. Those that contract the tokens take the
same rows quantised again (``Backend.requantize``); the activation writes both its forms at once (``Backend.swiglu``).
"""

from collections.abc import Iterator
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


def row_spec(spec: OperandSpec) -> OperandSpec:
    """What x or g are quantised to at home: ``spec``, which the GEMM takes, or the FP8 that its bf16 values are made
    from, and whose scales it wants by groups."""
    return spec.exact if spec.is_quantized and (spec.stored == "bf16" or spec.grouped_scales) else spec


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
    values = _as_multiplied(x, plan.forward.a, offs, kernels)
    gate = _gemm(values, w1, biases.b1, offs, kernels)
    up = _gemm(values, w3, biases.b3, offs, kernels)
    del values
    h = kernels.swiglu(gate, up, limit, plan.forward.a, offs)
    return _gemm(h, w2, biases.b2, offs, kernels), gate, up


def backward_w2(
    g: Operand,
    preactivations: list[torch.Tensor],
    scores: torch.Tensor | None,
    weights: Weights,
    quantized: list[Operand],
    needs: list[bool],
    offs: torch.Tensor,
    limit: float | None,
    plan: Plan,
    kernels: Backend,
) -> tuple[list[Operand], torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What g alone is needed for: the gradients of the pre-activations (gate and up along H, then along M), of the
    scores, of w2 and of b2.

    Args:
        g: (M, D) of ``row_spec(plan.dgrad.a)``, not yet multiplied by the scores.
        preactivations: gate and up, as ``forward`` returned them; the list is emptied, so that they are freed after
            their use.
        scores: float32 (M,), or None where outputs are not multiplied by any.
        weights: as they are, in high precision.
        quantized: w1, w3 and w2 of ``plan.dgrad.b``, of which w2 is taken out; or none: it is quantised again.
        needs: which gradients of ``weights`` are wanted.
    """
    w2 = quantized.pop() if quantized else kernels.quantize(weights.w2, 1, plan.dgrad.b, None)
    preactivations.append(_gemm(_as_multiplied(g, plan.dgrad.a, offs, kernels), w2, None, offs, kernels))  # u
    del w2
    specs = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    *made, sh_columnwise, dscores = kernels.swiglu_backward(preactivations, scores, limit, *specs, offs)
    dw2 = db2 = None
    if needs[2]:
        g_first = _along_tokens(g, plan.wgrad.a, offs, kernels)
        dw2 = kernels.gemm_k_grouped(g_first, sh_columnwise, offs, weights.w2.dtype)
    if weights.b2 is not None:
        values = _values(g, offs, kernels).float()
        expert_M = _expert_of_rows(offs, values.shape[0])
        if scores is not None:
            products = (values * weights.b2.float()[expert_M.clamp(max=offs.numel() - 1)]).sum(1)
            dscores = dscores + products
            values = values * scores[:, None]
        db2 = _sum_rows(values, expert_M, offs).to(weights.b2.dtype) if needs[5] else None
    return made, dscores, dw2, db2


def backward_w1_w3(
    made: list[Operand],
    x: list[Operand],
    weights: Weights,
    quantized: list[Operand],
    needs: list[bool],
    offs: torch.Tensor,
    plan: Plan,
    kernels: Backend,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The rows' gradient, (M, D), as the one or the two tensors that ``Backend.dual_gemm_m_grouped`` gives, and the
    gradients of w1, w3 and of b1, b3.

    Args:
        made: the operands that ``backward_w2`` returned; the list is emptied, so that each is freed after its use.
        x: as ``forward`` took it, alone in a list that is emptied too: nothing needs it once it is quantised along M.
        quantized: w1 and w3 of ``plan.dgrad.b``, emptied too; or none: they are quantised again.
    """
    *along_hidden, dgate_columnwise, dup_columnwise = made
    made.clear()
    dweights: list[torch.Tensor | None] = [None, None]
    if needs[0] or needs[1]:
        x_first = _along_tokens(x.pop(), plan.wgrad.b, offs, kernels)
        if needs[0]:
            dweights[0] = kernels.gemm_k_grouped(dgate_columnwise, x_first, offs, weights.w1.dtype)
        del dgate_columnwise
        if needs[1]:
            dweights[1] = kernels.gemm_k_grouped(dup_columnwise, x_first, offs, weights.w3.dtype)
        del dup_columnwise, x_first
    dbiases: list[torch.Tensor | None] = [None, None]
    for i, bias in enumerate((weights.b1, weights.b3)):
        if needs[3 + i]:
            values = _values(along_hidden[i], offs, kernels).float()
            dbiases[i] = _sum_rows(values, _expert_of_rows(offs, values.shape[0]), offs).to(bias.dtype)
            del values

    def products() -> Iterator[tuple[Operand, Operand]]:
        for weight in (weights.w1, weights.w3):
            yield (
                along_hidden.pop(0),
                quantized.pop(0) if quantized else kernels.quantize(weight, 1, plan.dgrad.b, None),
            )

    return kernels.dual_gemm_m_grouped(products(), offs), dweights, dbiases


def _expert_of_rows(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row; E for those behind the last group."""
    return torch.searchsorted(offs, torch.arange(rows, device=offs.device), right=True)


def _sum_rows(values: torch.Tensor, expert_M: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The sum of each expert's rows, (E, C) in fp32."""
    sums = values.new_zeros((offs.numel() + 1, values.shape[1]))
    return sums.index_add_(0, expert_M, values)[:-1]


def _gemm(a: Operand, w: Operand, bias: torch.Tensor | None, offs: torch.Tensor, kernels: Backend) -> torch.Tensor:
    return kernels.gemm_m_grouped(a, w, offs, bias, torch.bfloat16, zero_tail=False)


def _as_multiplied(rows: Operand, spec: OperandSpec, offs: torch.Tensor, kernels: Backend) -> Operand:
    """FP8 rows as the GEMM takes them: as they are, their values in bf16, or with their scales by groups."""
    return rows if rows.spec == spec else kernels.requantize(rows, 1, spec, offs if spec.grouped_scales else None)


def _along_tokens(rows: Operand, spec: OperandSpec, offs: torch.Tensor, kernels: Backend) -> Operand:
    """The rows for wgrad."""
    if rows.spec.stored == "bf16":
        return Operand(rows.data, None, spec, 0)
    return kernels.requantize(rows, 0, spec, offs)


def _values(rows: Operand, offs: torch.Tensor, kernels: Backend) -> torch.Tensor:
    """The values of (M, C) rows in bf16."""
    if rows.spec.stored == "bf16":
        return rows.data
    return kernels.requantize(rows, 1, UNQUANTIZED, offs if rows.spec.grouped_scales else None).data
