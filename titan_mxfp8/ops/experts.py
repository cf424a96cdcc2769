"""The experts of a MoE layer: their weights, what is chosen for them, and operands as lists of tensors.

M rows, D model and H hidden features, E experts. ``expert_operators`` makes layers of this.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import index
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from titan_mxfp8.backends import Backend, Plan
from titan_mxfp8.format.codec import Encoded, decode
from titan_mxfp8.format.spec import UNQUANTIZED, Operand, OperandSpec
from titan_mxfp8.ops.autograd import Owned, take
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.library import aligned, quantize_both


class Weights(NamedTuple):
    """Parameters of E experts.

    Attributes:
        w1, w3: (E, H, D), bf16 or fp32: the gate's and the other half's. Within operators also operands in exact 32x32
            blocks, of weights that were gathered so, or those of both GEMMs.
        w2: (E, D, H).
        b1, b3: (E, H), or None.
        b2: (E, D), or None.
    """

    w1: "Tensor | Operand | Quantized"
    w3: "Tensor | Operand | Quantized"
    w2: "Tensor | Operand | Quantized"
    b1: Tensor | None = None
    b3: Tensor | None = None
    b2: Tensor | None = None


class Quantized(NamedTuple):
    """A weight that was quantised before the call, as both GEMMs take it."""

    forward: Operand
    dgrad: Operand


class Tokens(NamedTuple):
    """x or g as it is there for the GEMMs."""

    rowwise: Operand | None  # quantised along D: as the GEMM along D takes it, or FP8 rows from which that is made
    columnwise: Operand | None = None  # along M, from the high-precision tensor; None: made of ``sent`` or ``rowwise``
    values: Tensor | None = None  # (M, D) in high precision; None: those of ``rowwise``
    sent: Operand | None = None  # the rows once for each token, as they were sent or as they arrived
    sources: Tensor | None = None  # int32 (M,): which row of ``sent`` each row is

    def along_features(self, spec: OperandSpec, offs: Tensor, kernels: Backend) -> Operand:
        """As forward or dgrad takes it: as it is, its values in bf16, or with its scales by groups."""
        rows = self.rowwise
        return rows if rows.spec == spec else kernels.requantize(rows, 1, spec, offs if spec.grouped_scales else None)

    def along_tokens(self, spec: OperandSpec, offs: Tensor, kernels: Backend) -> Operand:
        """As wgrad takes it."""
        if self.columnwise is not None:
            return self.columnwise
        if self.sent is not None:
            return kernels.requantize(self.sent, 0, spec, offs, self.sources)
        if self.rowwise.spec.stored == "bf16":
            return Operand(self.rowwise.data, None, spec, 0)
        return kernels.requantize(self.rowwise, 0, spec, offs)


class DispatchedRows(NamedTuple):
    """x, or the output's gradient g, at the experts."""

    tokens: Owned  # the ``Tokens`` of it
    handle: list[Tensor]  # of x's dispatch, see ``ExpertsLayer``
    sources: list[Tensor]  # int32 (M,): which kept row each row is, where one is kept for all of a token's experts here
    kept: list[Tensor]  # what ``ExpertsLayer.wgrad_tokens`` takes, unless that is x or g itself; or nothing


@dataclass(frozen=True, kw_only=True)
class ExpertsLayer(Encoded):
    """Everything about a layer of experts that is no tensor: what is chosen for them, how rows come to them, and where
    outputs go. A handle is what backward has to know of that: tensors, of which the first is ``offs``, int32 (E,), the
    end offsets of the experts' rows.
    """

    gemms: MXConfig
    limit: float | None = None  # that of gpt_oss's clamped SwiGLU, or None for SiLU
    zero_tail: ClassVar[bool]  # whether outputs are zeros at and past ``offs[-1]``
    handle_tensors: ClassVar[int] = 1  # how many a handle has

    @cached_property
    def plan(self) -> Plan:
        return self.gemms.plan

    @cached_property
    def x_rows(self) -> OperandSpec:
        """What x is quantised to before it travels, as ``g_rows`` is of g."""
        return row_spec(self.gemms.plan.forward.a)

    @cached_property
    def g_rows(self) -> OperandSpec:
        return row_spec(self.gemms.plan.dgrad.a)

    @cached_property
    def counts(self) -> "tuple[TensorCounts, TensorCounts]":
        """How many tensors its operators return and save: where H is no multiple of 128, and where it is one."""
        return self._count(False), self._count(True)

    def _count(self, whole_blocks: bool) -> "TensorCounts":
        along_h, along_m = (1 if gemm.a.stored == "bf16" else 2 for gemm in (self.plan.dgrad, self.plan.wgrad))
        in_u = self.plan.in_u(whole_blocks)
        rowwise = 2 * along_h - (in_u == "dgate_dup")
        columnwise = 2 * along_m if self.plan.dgrad.a.is_quantized else 0
        u_place = {"dgate_dup": 0, "dgate": rowwise if columnwise else 0, "nothing": None}[in_u]
        quantizes_g, handle = self.plan.wgrad.a.is_quantized, self.handle_tensors
        return TensorCounts(rowwise, columnwise, along_m, u_place, quantizes_g, handle, self.copied_slots())

    def connect(self, device: torch.device) -> object:
        """What carries rows, which the functions below take as ``transport``; None where nothing does."""
        return None

    def dispatch(
        self,
        transport: object,
        x: Tensor,
        scores: Tensor | None,
        routing: Tensor,
        capacity: int | None,
        local: int,
        save: bool,
        kernels: Backend,
        overlap: Callable[[], None],
    ) -> DispatchedRows:
        """Rows to their experts.

        Args:
            x, scores, routing, capacity: as of ``expert_operators.experts_forward``.
            local: E.
            save: whether backward follows.
            overlap: launches what does not need x; called once, when x has been quantised.
        """
        raise NotImplementedError

    def scores(self, handle: list[Tensor]) -> Tensor | None:
        """Those of the rows, fp32 (M,); None where rows have none."""
        raise NotImplementedError

    def combine(self, transport: object, y: Tensor, weighted: bool, handle: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Outputs (M, D) to where x came from, (T, D); ``weighted``: multiplied by their scores."""
        raise NotImplementedError

    def dispatch_gradient(
        self, transport: object, g: Tensor, handle: list[Tensor], needs_w2: bool, kernels: Backend
    ) -> DispatchedRows:
        """The output's gradient (T, D) to the experts; ``needs_w2``: w2's is wanted, which keeps it."""
        raise NotImplementedError

    def combine_gradient(
        self, transport: object, rows: list[Tensor], dscores_M: Tensor | None, handle: list[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """The gradient of x (T, D), of one or two tensors (M, D) whose sum is meant, and that of the scores (T, K)."""
        raise NotImplementedError

    def empty_dispatched(
        self, x: Tensor, routing: Tensor, capacity: int | None, local: int
    ) -> tuple[list[Tensor], int, list[Tensor]]:
        """For fakes: the handle unless it is ``routing``; M; and what ``dispatch`` saves of x."""
        raise NotImplementedError

    def empty_gradient(self, g: Tensor, handle: list[Tensor], rows: int, needs_w2: bool) -> list[Tensor]:
        """For fakes: ``sources`` and ``kept`` of ``dispatch_gradient``; ``rows``: M."""
        raise NotImplementedError

    def wgrad_tokens(self, tensors: Owned, sources: Tensor | None, of_g: bool) -> Tokens:
        """x, or g, for wgrad, of what was saved of it, taken; ``sources``: of rows that are kept once for a token."""
        raise NotImplementedError

    def copied_slots(self) -> int:
        """The least number of experts of a token with which its row is kept once, and not once for each of them."""
        return sys.maxsize


@torch.compiler.assume_constant_result
def key_of(kind: type[ExpertsLayer], gemms: str, **fields: object) -> str:
    """The key of the layer of this kind with these fields, and with the GEMMs of which ``gemms`` is the key."""
    return _layer(kind, gemms, **fields).key


@cache
def _layer(kind: type[ExpertsLayer], gemms: str, **fields: object) -> ExpertsLayer:
    return kind(gemms=decode(gemms), **fields)


def constant_of(x: float) -> float:
    """A Python number of what may be a symbol in compiled code, which is then compiled anew for each value. ``float()``
    keeps a symbol, ``index(int())`` does not: hence two whole numbers. Exact from 2^-7 on, within 2^-60 below. What no
    fp32 number reaches is infinite."""
    if x > 1e39:
        return math.inf
    upper = index(int(x * 2**30))
    lower = index(int((x * 2**30 - upper) * 2**30))
    return (upper + lower / 2**30) / 2**30


def row_spec(spec: OperandSpec) -> OperandSpec:
    """What x or g are quantised to before they travel: ``spec``, which the GEMM takes, or the FP8 that its bf16 values
    are made from, and whose scales it wants by groups."""
    return spec.exact if spec.is_quantized and (spec.stored == "bf16" or spec.grouped_scales) else spec


def weights_of(matrices: list[Tensor], biases: list[Tensor | None], plan: Plan) -> Weights:
    """``Weights`` as kernels take them. ``matrices``: w1, w3, w2; or of each, where they were gathered quantised, the
    FP8 elements and the scales; or what ``quantize_ahead`` gave; or none."""
    if matrices and matrices[0].is_cuda:
        matrices, biases = ([aligned(x) for x in tensors] for tensors in (matrices, biases))
    tensors = list(matrices)
    if len(tensors) == 6:
        matrices = [Operand.take(tensors, plan.forward.b.exact, 2) for _ in range(3)]
    elif len(tensors) == 12:
        take, forward, dgrad = Operand.take, plan.forward.b, plan.dgrad.b
        matrices = [Quantized(take(tensors, forward, 2), take(tensors, dgrad, 1)) for _ in range(3)]
    biases = list(biases)
    for i, bias in enumerate(biases):
        if bias is not None:
            biases[i] = bias.contiguous()
    return Weights(*(matrices or (None, None, None)), *biases)


def can_quantize_ahead(config: MXConfig) -> bool:
    """Whether ``quantize_ahead`` gives what the GEMMs multiply. Quantised values in bf16 would take four bytes for each
    weight."""
    return not config.recipe.quantized or "bf16" not in (config.plan.forward.b.stored, config.plan.dgrad.b.stored)


@torch.no_grad()
def quantize_ahead(matrices: Sequence[Tensor], config: MXConfig) -> list[Tensor]:
    """w1, w3 and w2 as any number of calls take them until a weight changes: of each elements and scales, for forward
    and for dgrad; where nothing is quantised, in bf16."""
    if not config.recipe.quantized:
        return [w.bfloat16() for w in matrices]
    specs = config.plan.forward.b.key, config.plan.dgrad.b.key
    return [tensor for w in matrices for tensor in quantize_both(w, *specs, None, config.backend)]


def bytes_ahead(matrices: Sequence[Tensor], config: MXConfig) -> int:
    """Bytes of what ``quantize_ahead`` gives, which this does not make."""
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


def for_dgrad(w: Tensor | Operand | Quantized, plan: Plan, kernels: Backend) -> Operand:
    """A weight of ``weights_of`` as dgrad takes it."""
    if isinstance(w, Quantized):
        return w.dgrad
    make = kernels.requantize if isinstance(w, Operand) else kernels.quantize
    return make(w, 1, plan.dgrad.b, None)


def tensors_of(operands: Sequence[Operand]) -> list[Tensor]:
    """Elements and, where there are any, scales, one operand after the other."""
    return [tensor for operand in operands for tensor in operand[:2] if tensor is not None]


def kept_operands(tensors: Owned, gemms: MXConfig) -> Owned:
    """Weights of ``plan.dgrad.b``, of all tensors that were kept of them, taken."""
    return [Operand.take(tensors, gemms.plan.dgrad.b, 1) for _ in range(len(tensors) // 2)]


class TensorCounts(NamedTuple):
    """How many tensors there are of both gradients along H, of both along M, and of the score times h.
    What is not quantised is the same along both, and counts once. Also which of these tensors is u, overwritten, and
    not returned; whether g is quantised along M; how many tensors a handle has; and ``ExpertsLayer.copied_slots``."""

    rowwise: int
    columnwise: int
    h: int
    u_place: int | None
    quantizes_g: bool
    handle: int
    copied_slots: int


@torch.compiler.assume_constant_result
def count_tensors(config: str, whole_blocks: bool) -> TensorCounts:
    """Of ``ExpertsLayer.counts`` of the layer with this key the one for H in ``whole_blocks`` of 128, or not."""
    return decode(config).counts[whole_blocks]


def hidden_tensors(
    layer: ExpertsLayer,
    whole_blocks: bool,
    rowwise: list[Operand],
    columnwise: list[Operand],
    dscores: Tensor | None,
    biases: list[Tensor],
) -> list[Tensor]:
    """What an operator returns of what backward makes of u and the pre-activations: no tensor twice, and not the one
    that is in the memory of u.

    Args:
        whole_blocks: whether H is a multiple of 128.
        rowwise: the gradients of gate and up along H, for the rows' gradient.
        columnwise: what wgrad takes along M: the gradients of gate and up, and the score times h if w2's is wanted.
        dscores: fp32 (M,), or None.
        biases: the gradients of b1 and b3, fp32, of each that is wanted.
    """
    first = 0 if layer.plan.dgrad.a.is_quantized else 2
    along_h = tensors_of(rowwise)
    if rowwise[0].data is rowwise[1].data:  # interleaved
        del along_h[2]
    tensors, place = [*along_h, *tensors_of(columnwise[first:])], layer.counts[whole_blocks].u_place
    if place is not None:
        del tensors[place]
    return [*tensors, *([] if dscores is None else [dscores]), *biases]


def hidden_gradients(tensors: Owned, layer: ExpertsLayer) -> Owned:
    """Both gradients along H, of all tensors of them, taken."""
    spec = layer.plan.dgrad.a
    if len(tensors) == 3:  # interleaved
        data = take(tensors).view(spec.elem_dtype)
        return [Operand(data, take(tensors), spec, 1) for _ in range(2)]
    return [Operand.take(tensors, spec, 1) for _ in range(2)]


def bf16_values(rows: Operand, offs: Tensor, kernels: Backend) -> Tensor:
    """The values of (M, C) rows in bf16."""
    if rows.spec.stored == "bf16":
        return rows.data
    return kernels.requantize(rows, 1, UNQUANTIZED, offs if rows.spec.grouped_scales else None).data
