"""The operators of ``mxfp8_moe``, with their fakes: forward, and what backward begins and ends with.

Backward is several operators. Each frees what it has used, where nothing else holds it; but compiled code holds all
that it gives an operator until that returns, and frees between them.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.moe import DispatchHandle, Transport, TransportName, choose
from titan_mxfp8.moe.bounds import bound
from titan_mxfp8.moe.checks import check_expert_ids
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.autograd import Owned, take_many
from titan_mxfp8.ops.experts import ExpertsConfig, Tokens
from titan_mxfp8.ops.grouped_experts import empty_hidden, to_rows_gradient
from titan_mxfp8.ops.library import Operator, aligned


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertsConfig):
    """Everything about a layer that is no tensor.

    Attributes:
        transport: as of ``mxfp8_moe``.
        factor: of ``rows``, see ``bounds.factor_of``.
        most_rows: that a rank ever sends in a call; 0: as many as in the first.
        ranks, group: how many share the experts, and the name of their process group; empty: this process alone.
    """

    transport: TransportName
    factor: float | None
    most_rows: int
    ranks: int
    group: str

    def keeps_copies(self, slots: int) -> bool:
        """Whether a token's row is kept once where it arrived, not once for each of its experts there, and
        ``Backend.requantize`` gathers the rows that wgrad takes."""
        spec = self.plan.wgrad.b
        gathers = spec.scales == "mn_major" or (spec.stored == "bf16" and spec.is_quantized)
        return gathers and self.ranks < slots

    def wgrad_tokens(self, tensors: Owned, sources: Tensor | None, of_g: bool) -> Tokens:
        """See ``ExpertsConfig``. With one rank g's are kept once for a token too."""
        rows = Operand.of_rows(self.g_rows if of_g else self.x_rows, *take_many(tensors))
        gathers = sources is not None and (self.ranks == 1 or not of_g)
        return Tokens(None, sent=rows, sources=sources) if gathers else Tokens(rows)

    def capacity(self, tokens: int, slots: int, local: int) -> int | None:
        """The rows there is memory for, see ``bounds.bound``; None: those that come."""
        return None if self.factor is None else bound(self.factor, tokens, slots, self.ranks, local)

    def connect(self, device: torch.device) -> Transport:
        group = dist.distributed_c10d._resolve_process_group(self.group) if self.group else None
        transport, _ = choose(self.transport, group, device)
        if self.most_rows > transport.shared.reserved:
            transport.reserve(self.most_rows)
        return transport


@Operator
def moe_forward(
    x: Tensor,
    scores: Tensor | None,
    expert_ids: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    config: str,
    save: bool,
) -> list[Tensor]:
    """The output (T, D), and with ``save`` what backward takes: the ``DispatchHandle``, gate and up (M, H),
    the kept weights, and x as it arrived: its rows, or copies (``MoEConfig.keeps_copies``).

    Args:
        weights: w1, w3, w2, as ``experts.weights_of`` takes them.
        biases: b1, b3, b2.
        config: the key of a ``MoEConfig``.
    """
    layer: MoEConfig = decode(config)
    gemms, kernels = layer.gemms, backends.load(layer.gemms.backend, x.device)
    transport, count = layer.connect(x.device), weights[0].shape[0] * layer.ranks
    check_expert_ids(expert_ids, count)
    parameters = experts.weights_of(weights, biases, gemms.plan)
    parts = _to_parts(kernels.quantize(aligned(x), 1, layer.x_rows, None))
    sent_scores = torch.ones_like(expert_ids, dtype=torch.float32) if scores is None else scores
    quantized, kept = [], []

    def quantize_weights() -> None:
        made = experts.quantize_weights(parameters, gemms.plan, kernels, gemms.keeps_weight and save)
        quantized.extend(made[0]), kept.extend(made[1])

    recipe, (tokens, slots) = gemms.recipe.name, expert_ids.shape
    room = transport.agree(tokens, experts=count, slots=slots, recipe=recipe, rows=layer.factor)
    capacity = layer.capacity(room, slots, weights[0].shape[0])
    copies = [] if save and layer.keeps_copies(slots) else None
    received, handle = transport.dispatch(parts, expert_ids, sent_scores, count, capacity, quantize_weights, copies)
    x_tokens = [Tokens(Operand.of_rows(layer.x_rows, *received))]
    kept_x = copies or (received if save else [])
    del parts, received
    y, gate, up = experts.forward(x_tokens, quantized, parameters, handle.offs, layer, kernels)
    out, _ = transport.combine([y], scores is not None, None, handle, x.dtype)
    if not save:
        return [out]
    return [out, *handle, gate, up, *experts.tensors_of(kept), *kept_x]


@torch.library.register_fake(moe_forward.overload)
def _(x, scores, expert_ids, weights, biases, config, save):
    out = x.new_empty(x.shape)
    if not save:
        return [out]
    layer, (local, hidden, _) = decode(config), weights[0].shape
    handle = _empty_handle(expert_ids, local, layer)
    rows = handle.scores.shape[0]
    kept_rows = handle.destinations.shape[0] if layer.keeps_copies(expert_ids.shape[1]) else rows
    preactivations = [x.new_empty((rows, hidden), dtype=torch.bfloat16) for _ in range(2)]
    gemms = layer.gemms
    kept = [gemms.plan.dgrad.b.empty(w, 1, None) for w in weights] if gemms.keeps_weight else []
    return [out, *handle, *preactivations, *experts.tensors_of(kept), *_empty_parts(x, kept_rows, layer.x_rows)]


def _empty_handle(expert_ids: Tensor, local: int, config: MoEConfig) -> DispatchHandle:
    """The shapes of a ``DispatchHandle``. Where the host counts rows, compilers take their number as it comes;
    elsewhere, as in estimates of memory, it is that of balanced experts."""
    tokens, slots = expert_ids.shape
    ranks, counted = config.ranks, config.ranks > 1 and config.factor is None
    room = config.most_rows if config.most_rows and ranks > 1 else tokens
    capacity = config.capacity(room, slots, local)

    def count(balanced: int) -> int:
        if not counted:  # on meta tensors there is no context
            return balanced
        context = torch.library.get_ctx()
        return balanced if context._shape_env is None else context.new_dynamic_size()

    rows = count(tokens * slots) if capacity is None else capacity
    return DispatchHandle(
        offs=expert_ids.new_empty(local, dtype=torch.int32),
        destinations=expert_ids.new_empty((count(room * ranks), slots), dtype=torch.int32),
        scores=expert_ids.new_empty(rows, dtype=torch.float32),
        expert_ids=expert_ids.new_empty((tokens, slots), dtype=torch.int32),
        # of these three the transport decides how many there are
        copies_of_token=expert_ids.new_empty((count(0), ranks), dtype=torch.int32),
        token_of_copy=expert_ids.new_empty(count(0), dtype=torch.int32),
        splits=expert_ids.new_empty((2, count(0)), dtype=torch.int64, device="cpu"),
    )


@Operator
def moe_hidden_gradients(
    g: Tensor,
    handle: list[Tensor],
    preactivations: list[Tensor],
    quantized: list[Tensor],
    weights: list[Tensor],
    b2: Tensor | None,
    scored: bool,
    needs: list[bool],
    config: str,
) -> list[Tensor]:
    """``experts.hidden_tensors``; then, where a token's row was kept once (``MoEConfig.keeps_copies``), which of these
    each row is; then what w2's gradient takes of g, if it is wanted.

    Args:
        handle: the ``DispatchHandle``.
        preactivations, quantized, weights, needs: as of ``experts_hidden_gradients``.
        scored: whether the scores have a gradient.
    """
    layer: MoEConfig = decode(config)
    kernels, transport = backends.load(layer.gemms.backend, g.device), layer.connect(g.device)
    parameters = experts.weights_of(weights, [None, None, b2], layer.plan)
    routing = DispatchHandle(*handle)
    sent = _to_parts(kernels.quantize(aligned(g), 1, layer.g_rows, None))
    received = transport.dispatch_with_handle(sent, routing)
    gathers = layer.keeps_copies(routing.expert_ids.shape[1])
    sources = [transport.find_sources(routing)] if gathers else []
    left = (sent if gathers and layer.ranks == 1 else received) if needs[2] else []
    tokens = [Tokens(Operand.of_rows(layer.g_rows, *received))]
    del sent, received
    scores, w2 = routing.scores if scored else None, experts.kept_operands(quantized, layer.gemms)
    rest = parameters, w2, needs, routing.offs, layer, kernels
    made = experts.hidden_gradients(tokens, take_many(preactivations), scores, *rest)
    return [*experts.hidden_tensors(made, layer), *sources, *left]


@torch.library.register_fake(moe_hidden_gradients.overload)
def _(g, handle, preactivations, quantized, weights, b2, scored, needs, config):
    layer, routing, gate = decode(config), DispatchHandle(*handle), preactivations[0]
    made = empty_hidden(gate, routing.offs.shape[0], needs, scored, layer, g.shape[1])
    rows, gathers = gate.shape[0], layer.keeps_copies(routing.expert_ids.shape[1])
    sources = [gate.new_empty(rows, dtype=torch.int32)] if gathers else []
    sent_rows = g.shape[0] if gathers and layer.ranks == 1 else rows
    return [*made, *sources, *(_empty_parts(g, sent_rows, layer.g_rows) if needs[2] else [])]


@Operator
def moe_rows_gradient(
    offs: Tensor,
    handle: list[Tensor],
    rowwise: list[Tensor],
    quantized: list[Tensor],
    weights: list[Tensor],
    dscores_M: Tensor | None,
    sizes: list[int],
    dtype: torch.dtype,
    config: str,
) -> list[Tensor]:
    """The gradient of x (T, D) in ``dtype`` and, of ``dscores_M``, that of the scores (T, K).

    Args:
        offs, handle: those of the ``DispatchHandle``, and all of it.
        rowwise, quantized, weights, sizes: as of ``experts_rows_gradient``.
    """
    layer: MoEConfig = decode(config)
    kernels, transport = backends.load(layer.gemms.backend, offs.device), layer.connect(offs.device)
    taken = to_rows_gradient(rowwise, quantized, weights, layer)
    rows = experts.rows_gradient(*taken, offs, layer, kernels)
    dx, dscores = transport.combine(rows, False, dscores_M, DispatchHandle(*handle), dtype)
    return [dx] if dscores is None else [dx, dscores]


@torch.library.register_fake(moe_rows_gradient.overload)
def _(offs, handle, rowwise, quantized, weights, dscores_M, sizes, dtype, config):
    expert_ids = DispatchHandle(*handle).expert_ids
    dx = offs.new_empty((expert_ids.shape[0], sizes[2]), dtype=dtype)
    return [dx] if dscores_M is None else [dx, expert_ids.new_empty(expert_ids.shape, dtype=torch.float32)]


# As ``ops/library.py`` has it for single GEMMs: of T * K rows, as many as come to a rank if experts are balanced.
@register_flop_formula(torch.ops.titan_mxfp8.moe_forward)
def _(x_shape, scores_shape, expert_ids_shape, weight_shapes, *args, **kwargs) -> int:
    return 3 * 2 * math.prod(expert_ids_shape) * math.prod(weight_shapes[0][1:])


@register_flop_formula(torch.ops.titan_mxfp8.moe_hidden_gradients)
def _(g_shape, handle_shapes, preactivation_shapes, *args, **kwargs) -> int:
    rows = math.prod(DispatchHandle(*handle_shapes).expert_ids)
    return 2 * rows * g_shape[1] * preactivation_shapes[0][1]


@register_flop_formula(torch.ops.titan_mxfp8.moe_rows_gradient)
def _(offs_shape, handle_shapes, rowwise_shapes, quantized_shapes, weight_shapes, scores_shape, sizes, *args, **kwargs):
    return 2 * 2 * math.prod(sizes)


def _to_parts(rows: Operand) -> list[Tensor]:
    """What travels of (T, D) rows: their elements and, (T, D / block_k), their scales; or bf16 alone."""
    if rows.spec.scales == "mn_major":  # of no rows contiguous() would leave the strides
        return [rows.data, rows.row_scales().clone(memory_format=torch.contiguous_format)]
    return [rows.data] if rows.scale is None else [rows.data, rows.scale.contiguous()]


def _empty_parts(x: Tensor, rows: int, spec: OperandSpec) -> list[Tensor]:
    """For fakes: ``_to_parts`` of so many rows like those of (T, D)."""
    features = x.shape[1]
    data = x.new_empty((rows, features), dtype=spec.elem_dtype)
    scales = [x.new_empty((rows, ceil_div(features, spec.block_k)), dtype=torch.uint8)] * spec.is_quantized
    return [data, *scales]
