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

x and g are quantised along D once for all GEMMs that contract D; the activation writes both its forms at once
(``Backend.swiglu_backward``). ``expert_operators`` makes layers of these functions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from titan_mxfp8.backends import Backend, Plan
from titan_mxfp8.format.codec import Encoded, decode
from titan_mxfp8.format.spec import UNQUANTIZED, Operand, OperandSpec
from titan_mxfp8.ops.autograd import Owned, take, take_many
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.library import aligned, quantize_both
from titan_mxfp8.ops.matmul import sum_rows


class Weights(NamedTuple):
    """Parameters of E experts.

    Attributes:
        w1, w3: (E, H, D), bf16 or fp32: the gate's and the other half's. Within operators also operands in exact 32x32
            blocks, of weights that were gathered so, or those of both GEMMs.
        w2: (E, D, H).
        b1, b3: (E, H), or None.
        b2: (E, D), or None.
    """

    w1: "torch.Tensor | Operand | Quantized"
    w3: "torch.Tensor | Operand | Quantized"
    w2: "torch.Tensor | Operand | Quantized"
    b1: torch.Tensor | None = None
    b3: torch.Tensor | None = None
    b2: torch.Tensor | None = None


class Quantized(NamedTuple):
    """A weight that was quantised before the call, as both GEMMs take it."""

    forward: Operand
    dgrad: Operand


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Encoded):
    """Everything about experts that is no tensor.

    Attributes:
        gemms: of their GEMMs.
        limit: that of gpt_oss's clamped SwiGLU, or None for SiLU.
        x_rows, g_rows: what x and g are quantised to before they travel.
        counts: how many tensors operators return of each kind.
        handle_tensors: of those, how many a handle has.
    """

    gemms: MXConfig
    limit: float | None = None
    handle_tensors: ClassVar[int] = 1

    @cached_property
    def plan(self) -> Plan:
        return self.gemms.plan

    @cached_property
    def x_rows(self) -> OperandSpec:
        return row_spec(self.gemms.plan.forward.a)

    @cached_property
    def g_rows(self) -> OperandSpec:
        return row_spec(self.gemms.plan.dgrad.a)

    @cached_property
    def counts(self) -> "TensorCounts":
        along_h, along_m = (1 if gemm.a.stored == "bf16" else 2 for gemm in (self.plan.dgrad, self.plan.wgrad))
        columnwise = 2 * along_m if self.plan.dgrad.a.is_quantized else 0
        return TensorCounts(2 * along_h, columnwise, along_m, self.plan.wgrad.a.is_quantized, self.handle_tensors)


class Tokens(NamedTuple):
    """x or g as it is there for the GEMMs.

    Attributes:
        rowwise: quantised along D: as the GEMM along D takes it, or FP8 rows from which that is made.
        columnwise: quantised along M, from the high-precision tensor; None: it is made from ``rowwise``.
        values: (M, D) in high precision; None: those of ``rowwise``.
        sent, sources: the rows once for each token, as they were sent or as they arrived, and which of them each row
            is, int32 (M,): what is quantised along M is made from these. None: from ``rowwise``.
    """

    rowwise: Operand | None
    columnwise: Operand | None = None
    values: torch.Tensor | None = None
    sent: Operand | None = None
    sources: torch.Tensor | None = None

    def along_features(self, spec: OperandSpec, offs: torch.Tensor, kernels: Backend) -> Operand:
        """As forward or dgrad takes it: as it is, its values in bf16, or with its scales by groups."""
        rows = self.rowwise
        return rows if rows.spec == spec else kernels.requantize(rows, 1, spec, offs if spec.grouped_scales else None)

    def along_tokens(self, spec: OperandSpec, offs: torch.Tensor, kernels: Backend) -> Operand:
        """As wgrad takes it."""
        if self.columnwise is not None:
            return self.columnwise
        if self.sent is not None:
            return kernels.requantize(self.sent, 0, spec, offs, self.sources)
        if self.rowwise.spec.stored == "bf16":
            return Operand(self.rowwise.data, None, spec, 0)
        return kernels.requantize(self.rowwise, 0, spec, offs)


def row_spec(spec: OperandSpec) -> OperandSpec:
    """What x or g are quantised to before they travel: ``spec``, which the GEMM takes, or the FP8 that its bf16 values
    are made from, and whose scales it wants by groups."""
    return spec.exact if spec.is_quantized and (spec.stored == "bf16" or spec.grouped_scales) else spec


def weights_of(matrices: list[torch.Tensor], biases: list[torch.Tensor | None], plan: Plan) -> Weights:
    """``Weights`` as kernels take them.

    Args:
        matrices: w1, w3, w2; or of each, where they were gathered quantised, the FP8 elements and the scales; or what
            ``quantize_ahead`` gave; or none.
    """
    if matrices and matrices[0].is_cuda:
        matrices, biases = ([aligned(x) for x in tensors] for tensors in (matrices, biases))
    if len(matrices) == 6:
        pairs = zip(matrices[::2], matrices[1::2], strict=True)
        matrices = [Operand(data, scale, plan.forward.b.exact, 2) for data, scale in pairs]
    elif len(matrices) == 12:
        specs = plan.forward.b, plan.dgrad.b
        matrices = [
            Quantized(Operand(*matrices[i : i + 2], specs[0], 2), Operand(*matrices[i + 2 : i + 4], specs[1], 1))
            for i in (0, 4, 8)
        ]
    biases = list(biases)
    for i, bias in enumerate(biases):
        if bias is not None:
            biases[i] = bias.contiguous()
    return Weights(*(matrices or (None, None, None)), *biases)


def values_of(gathered: Sequence[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """w1, w3 and w2 in fp32, of elements and scales as ``weights_of`` takes them."""
    return [w.dequantize() for w in weights_of([*gathered], [None] * 3, plan)[:3]]


def can_quantize_ahead(config: MXConfig) -> bool:
    """Whether ``quantize_ahead`` gives what the GEMMs multiply. Quantised values in bf16 would take four bytes for each
    weight."""
    return not config.recipe.quantized or "bf16" not in (config.plan.forward.b.stored, config.plan.dgrad.b.stored)


@torch.no_grad()
def quantize_ahead(matrices: Sequence[torch.Tensor], config: MXConfig) -> list[torch.Tensor]:
    """w1, w3 and w2 as any number of calls take them until a weight changes: of each elements and scales, for forward
    and for dgrad; where nothing is quantised, in bf16."""
    if not config.recipe.quantized:
        return [w.bfloat16() for w in matrices]
    specs = config.plan.forward.b.key, config.plan.dgrad.b.key
    return [tensor for w in matrices for tensor in quantize_both(w, *specs, None, config.backend)]


def bytes_ahead(matrices: Sequence[torch.Tensor], config: MXConfig) -> int:
    """Of what ``quantize_ahead`` gives, which is not made."""
    specs = (config.plan.forward.b, 2), (config.plan.dgrad.b, 1)
    metas = [w.detach().to("meta") for w in matrices]
    operands = [spec.empty(w, axis, None) for w in metas for spec, axis in specs[: 1 + config.recipe.quantized]]
    return sum(tensor.nbytes for tensor in tensors_of(operands))


def quantize_weights(weights: Weights, plan: Plan, kernels: Backend, keep: bool) -> tuple[Owned, Owned]:
    """w1, w3 and w2 for forward and, with ``keep``, for dgrad; of what came quantised none is kept."""
    spec, dgrad, forward, kept = plan.forward.b, plan.dgrad.b, [], []
    for w in weights[:3]:
        if isinstance(w, Quantized):
            of_forward = w.forward
        elif isinstance(w, Operand):
            of_forward = kernels.requantize(w, 2, spec, None)
        elif keep:
            of_forward, of_dgrad = kernels.quantize_both(w, spec, dgrad, None)
            kept.append(of_dgrad)
        else:
            of_forward = kernels.quantize(w, 2, spec, None)
        forward.append(of_forward)
    return forward, kept


def forward(
    x: Owned,
    quantized: Owned,
    weights: Weights,
    offs: torch.Tensor,
    config: ExpertsConfig,
    kernels: Backend,
    zero_tail: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (M, D), and the pre-activations x w1^T and x w3^T, (M, H); all bf16, undefined at and past ``offs[-1]``, but y
    zero there with ``zero_tail``.

    Args:
        x: the ``Tokens`` of it, taken.
        quantized: w1, w3 and w2 of ``plan.forward.b``, taken.
        weights: of which the biases count.
        offs: int32 (E,), end offsets of the experts' rows.
    """
    spec, gemm = config.gemms.plan.forward.a, kernels.gemm_m_grouped
    values = take(x).along_features(spec, offs, kernels)
    made = None
    if kernels.swiglu_gemm_m_grouped is not None:
        biases = weights.b1, weights.b3
        made = kernels.swiglu_gemm_m_grouped(values, *quantized[:2], biases, config.limit, spec, offs)
    if made is not None:
        gate, up, h = made
        take_many(quantized, 2)
        del values, made
    else:
        gate = gemm(values, take(quantized), offs, weights.b1, torch.bfloat16, False)
        up = gemm(values, take(quantized), offs, weights.b3, torch.bfloat16, False)
        del values
        h = kernels.swiglu(gate, up, config.limit, spec, offs)
    return gemm(h, take(quantized), offs, weights.b2, torch.bfloat16, zero_tail), gate, up


class HiddenGradients(NamedTuple):
    """What backward makes of g and the pre-activations.

    Attributes:
        rowwise: the gradients of gate and up along H, for the rows' gradient.
        columnwise: what wgrad takes along M: the gradients of gate and up, and the score times h if w2's is wanted.
        dscores: fp32 (M,), or None.
        biases: the gradients of b1, b3 and b2, fp32, of each that is wanted.
    """

    rowwise: Owned
    columnwise: Owned
    dscores: torch.Tensor | None
    biases: list[torch.Tensor | None]


def hidden_gradients(
    g: Owned,
    preactivations: Owned,
    scores: torch.Tensor | None,
    weights: Weights,
    quantized: Owned,
    needs: list[bool],
    offs: torch.Tensor,
    config: ExpertsConfig,
    kernels: Backend,
) -> HiddenGradients:
    """All that the pre-activations are needed for.

    Args:
        g: the ``Tokens`` of it, not yet multiplied by the scores; taken.
        preactivations: gate and up, as ``forward`` returned them; taken.
        scores: float32 (M,), or None where outputs are not multiplied by any.
        weights: as they are, in high precision; w2 may be missing if it is in ``quantized``.
        quantized: w2 of ``plan.dgrad.b``, taken; or none: it is quantised again.
        needs: which gradients of ``weights`` are wanted.
    """
    plan = config.gemms.plan
    w2 = take(quantized) if quantized else _for_dgrad(weights.w2, plan, kernels)
    g = g.pop()
    rows = g.along_features(plan.dgrad.a, offs, kernels)
    if weights.b2 is None:
        del g
    preactivations.append(kernels.gemm_m_grouped(rows, w2, offs, None, torch.bfloat16, False))  # u
    del w2, rows
    specs = plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    *made, dscores = kernels.swiglu_backward(preactivations, scores, config.limit, *specs, offs)
    rowwise, columnwise = take_many(made, 2), take_many(made)
    biases: list[torch.Tensor | None] = [None] * 3
    for i in (0, 1):
        if needs[3 + i]:
            biases[i] = sum_rows(_values(rowwise[i], offs, kernels).float(), offs)
    if weights.b2 is not None:
        values = (_values(g.rowwise, offs, kernels) if g.values is None else g.values).float()
        if scores is not None:
            expert_M = torch.searchsorted(offs, torch.arange(values.shape[0], device=offs.device), right=True)
            products = (values * weights.b2.float()[expert_M.clamp(max=offs.numel() - 1)]).sum(1)
            dscores = dscores + products
            values = values * scores[:, None]
        biases[2] = sum_rows(values, offs) if needs[5] else None
    if not needs[2]:
        columnwise.pop()
    return HiddenGradients(rowwise, columnwise, dscores, biases)


def weight_gradients(
    columnwise: Owned,
    tokens: Owned,
    needs: list[bool],
    dtype: torch.dtype,
    totals: list[torch.Tensor],
    offs: torch.Tensor,
    config: ExpertsConfig,
    kernels: Backend,
) -> list[torch.Tensor]:
    """The gradient of w2, or those of w1 and w3.

    Args:
        columnwise: of ``HiddenGradients``: the score times h, or the gradients of gate and up; taken.
        tokens: the ``Tokens`` of g, or of x, taken: nothing needs them once they are quantised along M.
        needs: which of w1's, w3's and w2's; not w2's with others.
        dtype: of new ones.
        totals: fp32 gradients of all three that they are added to; none: they are new.
    """
    wgrad = config.gemms.plan.wgrad

    def multiply(i: int, dy: Operand, x: Operand) -> torch.Tensor:
        if totals:
            return kernels.gemm_k_grouped(dy, x, offs, torch.float32, totals[i])
        return kernels.gemm_k_grouped(dy, x, offs, dtype)

    if needs[2]:
        g = tokens.pop().along_tokens(wgrad.a, offs, kernels)
        return [multiply(2, g, columnwise.pop())]
    x, grads = tokens.pop().along_tokens(wgrad.b, offs, kernels), []
    for i in (0, 1):
        dy = columnwise.pop(0)
        if needs[i]:
            grads.append(multiply(i, dy, x))
        del dy
    return grads


def rows_gradient(
    rowwise: Owned, weights: Weights, quantized: Owned, offs: torch.Tensor, config: ExpertsConfig, kernels: Backend
) -> list[torch.Tensor]:
    """The rows' gradient, (M, D), as the one or the two tensors that ``Backend.dual_gemm_m_grouped`` gives.

    Args:
        rowwise: as of ``HiddenGradients``, taken.
        weights: as of ``hidden_gradients``.
        quantized: w1 and w3 of ``plan.dgrad.b``, taken; or none: they are quantised again.
    """

    def products() -> Iterator[tuple[Operand, Operand]]:
        for w in weights[:2]:
            of_dgrad = take(quantized) if quantized else _for_dgrad(w, config.gemms.plan, kernels)
            yield take(rowwise), of_dgrad

    return kernels.dual_gemm_m_grouped(products(), offs)


def _for_dgrad(w: torch.Tensor | Operand | Quantized, plan: Plan, kernels: Backend) -> Operand:
    if isinstance(w, Quantized):
        return w.dgrad
    make = kernels.requantize if isinstance(w, Operand) else kernels.quantize
    return make(w, 1, plan.dgrad.b, None)


def tensors_of(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """Elements and, where there are any, scales, one operand after the other."""
    return [tensor for operand in operands for tensor in operand[:2] if tensor is not None]


def operand_of(tensors: Owned, spec: OperandSpec, axis: int) -> Operand:
    """The first one of ``tensors_of``, taken; what is not quantised may be there in any dtype."""
    data, scale = tensors.pop(0), None
    if spec.stored != "bf16":
        scale = tensors.pop(0)
    elif not spec.is_quantized:
        data = data.bfloat16().contiguous()
    return Operand(data, scale, spec, axis)


def kept_operands(tensors: Owned, gemms: MXConfig) -> Owned:
    """Weights of ``plan.dgrad.b``, of all tensors that were kept of them, taken."""
    return [operand_of(tensors, gemms.plan.dgrad.b, 1) for _ in range(len(tensors) // 2)]


class TensorCounts(NamedTuple):
    """How many tensors ``hidden_tensors`` makes of both gradients along H, of both along M, and of the score times h.
    What is not quantised is the same along both, and counts once. Also whether g is quantised along M, and how many
    tensors a handle has (``expert_operators.ExpertsLayer``)."""

    rowwise: int
    columnwise: int
    h: int
    quantizes_g: bool
    handle: int


@torch.compiler.assume_constant_result
def count_tensors(config: str) -> TensorCounts:
    """Of the layer whose ``ExpertsConfig`` has this key."""
    return decode(config).counts


def hidden_tensors(made: HiddenGradients, config: ExpertsConfig) -> list[torch.Tensor]:
    """What an operator returns of ``HiddenGradients``: no tensor twice."""
    first = 0 if config.plan.dgrad.a.is_quantized else 2
    optional = made.dscores, *made.biases
    rest = [tensor for tensor in optional if tensor is not None]
    return [*tensors_of(made.rowwise), *tensors_of(made.columnwise[first:]), *rest]


def _values(rows: Operand, offs: torch.Tensor, kernels: Backend) -> torch.Tensor:
    """The values of (M, C) rows in bf16."""
    if rows.spec.stored == "bf16":
        return rows.data
    return kernels.requantize(rows, 1, UNQUANTIZED, offs if rows.spec.grouped_scales else None).data
