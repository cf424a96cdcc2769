"""``mxfp8_moe``: a MoE layer between its router and its output, as one operator forward and one backward.

T tokens here, K experts each of E in all, which R ranks share; M rows for those here. D model and H hidden features.

```
forward                                                      backward
x_TD --quantise along D--> FP8 rows                          g_TD --quantise along D--> FP8 rows
     --dispatch: once per link, to all places--> x_MD             --the same way, to the same places--> g_MD
       (overlap weights are quantised)
     --experts (ops/experts.py)--> y_MD bf16                      --experts--> dgate w1, dup w3 (M, D), scores' (M,)
     --combine: scores, sums, once per link--> out_TD             --combine--> dx_TD, dscores_TK
saved: of x_MD one FP8 row for each token that came, gate and up (M, H) bf16, the handle
```
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.moe import DispatchHandle, Rows, Transport, TransportName, choose
from titan_mxfp8.moe.bounds import bound, factor_of
from titan_mxfp8.moe.checks import check_call, check_expert_ids
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.accumulate import held_gradients
from titan_mxfp8.ops.autograd import (
    Owned,
    ScoredCopies,
    exported,
    is_exporting,
    once_differentiable,
    save_for_backward,
    split,
    take_many,
)
from titan_mxfp8.ops.checks import check_flags
from titan_mxfp8.ops.config import MXConfig, config_of
from titan_mxfp8.ops.experts import ExpertsConfig, Tokens, Weights
from titan_mxfp8.ops.grouped_experts import (
    KEPT,
    common_dtype,
    empty_hidden,
    gradients_of,
    to_rows_gradient,
    weight_gradients,
)
from titan_mxfp8.ops.library import Operator, aligned
from titan_mxfp8.ops.operands import plain
from titan_mxfp8.recipe import Recipe, get_recipe

_HANDLE = len(DispatchHandle._fields)
_MOST_CHECKED = 4096
_checked: set[tuple] = set()  # shapes, dtypes, devices and options of calls that were right


def mxfp8_moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    transport: TransportName = "auto",
    rows: Rows = "counted",
    max_tokens: int | None = None,
    scores_first: bool = False,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    swiglu_limit: float | None = None,
    keep_quantized_weight: bool = True,
) -> Tensor:
    """The routed experts of a MoE layer: ``sum over j of scores[t, j] * expert(expert_ids[t, j])(x[t])``.

    With a ``group``, its R ranks share the experts (expert parallelism): rank r holds experts ``r E / R`` to
    ``(r + 1) E / R - 1`` and tokens of its own, and all ranks call this together. A token's row is quantised once, on
    its source rank, crosses each link once, and arrives where it is multiplied; outputs are summed before they travel.

    ``expert(x) = (silu(x w1^T) * (x w3^T)) w2^T``; with ``swiglu_limit`` gpt_oss's clamped form of it. Differentiable
    in everything but ``expert_ids``.

    Args:
        x: (T, D), bf16 or fp32; T may differ between ranks.
        scores: (T, K), fp32 or bf16.
        expert_ids: (T, K) integers. Those outside 0 .. E - 1 are an error on a CPU; on a GPU, where looking at them
            would stop the host, such a slot adds nothing. One token's are different, which nothing checks: an expert
            that it names twice may count once.
        w1, w3: (E / R, H, D), this rank's. bf16 or fp32. D and H are multiples of 32.
        w2: (E / R, D, H).
        group: the ranks, or None for all experts here.
        recipe: a key of ``RECIPES``, a ``Recipe``, or ``bf16``: unquantised rows and GEMMs, as a control.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        transport: ``symmetric``: ranks of one host share memory; ``collective``: all-to-all; ``auto``: the
            first where it can be had (``titan_mxfp8.moe.choose``).
        rows: ``counted``: M is read on the host, once for each call, and memory is exact. A number: M is that times the
            ``max_tokens * K`` rows of balanced experts, rounded up to 128, and the host never waits; ``bounded``: 1.5
            times; ``worst_case``: ``R * max_tokens * min(K, E / R)`` rows, all tokens of all ranks, which is the most.
            Rows that do not fit are left out, and the call's backward or the next call raises.
        max_tokens: the most tokens that any rank ever has in a call, the same on all ranks and in all layers of the
            group; None: as many as any rank has in the first call. Unless rows are counted, and with ``symmetric``,
            whose buffer has room for so many, more tokens are an error: on the rank that has them, for which the others
            wait until the process group's timeout; on all with ``symmetric`` and counted rows.
        scores_first: scores multiply x, as in llama4, instead of the outputs.
        b1, b3: (E / R, H), added to the pre-activations, or None.
        b2: (E / R, D), added to the experts' outputs, or None.
        swiglu_limit: positive; see above. ``min(gate, limit) * sigmoid(1.702 ..) * (clamp(up, +-limit) + 1)``.
        keep_quantized_weight: as for ``mxfp8_grouped_mm``.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: an unknown recipe, backend, transport or kind of rows, or one that cannot be here; another dtype,
            shape or device of a tensor; D or H that is no multiple of 32; K above E, E that the ranks do not divide; a
            limit or ``max_tokens`` that is not positive; more tokens than there is room for; on a CPU, ids of no
            expert; on every rank, ranks that disagree about experts, K, recipe or rows.
        RuntimeError: an earlier call had more rows than memory for them, as far as the host knows without waiting.
    """
    (x,) = plain("mxfp8_moe", x=x)
    check_flags(scores_first=scores_first, keep_quantized_weight=keep_quantized_weight)
    config = config_of(get_recipe(recipe).key, f"{backend}", x.device, bool(keep_quantized_weight))
    options = Dispatched(transport=transport, rows=rows, max_tokens=max_tokens, limit=swiglu_limit)
    return moe(x, scores, expert_ids, Weights(w1, w3, w2, b1, b3, b2), group, options, config, scores_first)


class Dispatched(NamedTuple):
    """Arguments of ``mxfp8_moe`` that are no tensors."""

    transport: TransportName = "auto"
    rows: Rows = "counted"
    max_tokens: int | None = None
    limit: float | None = None


def moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    weights: Weights,
    group: dist.ProcessGroup | None,
    options: Dispatched,
    config: MXConfig,
    scores_first: bool = False,
    gathered: Sequence[Tensor] = (),
) -> Tensor:
    """``mxfp8_moe`` with a ``config``; ``gathered``: as of ``grouped_experts``."""
    x, scores, *rest = plain("mxfp8_moe", x=x, scores=scores, **weights._asdict())
    weights = Weights(*rest)
    compiling = torch.compiler.is_compiling()  # torch 2.11 cannot ask a group for its attributes then
    if group is not None and not compiling and not hasattr(group, "group_name"):
        raise ValueError(
            f"mxfp8_moe: group must be a torch.distributed.ProcessGroup or None, got {group!r}: a DeviceMesh has one "
            "for each of its dimensions, mesh.get_group(name)"
        )
    ranks = 1 if group is None else group.size()
    if compiling or type(x) is not Tensor:  # sizes may be symbols, which have no hash
        check_call(x, scores, expert_ids, weights, ranks, options)
    else:
        given = [ranks, f"{options}"]
        for tensor in (x, scores, expert_ids, *weights):
            given.append(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device))
        if (key := tuple(given)) not in _checked:
            check_call(x, scores, expert_ids, weights, ranks, options)
            if len(_checked) == _MOST_CHECKED:
                _checked.clear()
            _checked.add(key)
    slots = expert_ids.shape[1]
    transport, rows, max_tokens, limit = options
    most_rows = (max_tokens or 0) * (slots if scores_first else 1)
    name = "" if group is None else group.group_name
    layer = _moe_key(config.key, limit, transport, f"{rows}", most_rows, ranks, name)
    if compiling and is_exporting():
        return _exported_moe(x, scores, expert_ids, *weights, scores_first, layer, config.kept_weight)
    kept_weight = "itself" if gathered else config.kept_weight
    rest = layer, kept_weight, torch.is_grad_enabled(), *weights, *gathered
    return _apply(x, scores, expert_ids, rest, scores_first)


def _apply(x: Tensor, scores: Tensor, expert_ids: Tensor, rest: tuple, scores_first: bool) -> Tensor:
    """``_MoE`` of tokens, or with ``scores_first`` of each of their copies."""
    if not scores_first:
        return _MoE.apply(x, scores.float(), expert_ids, *rest)[0]
    out = _MoE.apply(ScoredCopies.apply(x, scores.float()), None, expert_ids.reshape(-1, 1), *rest)[0]
    slots = expert_ids.shape[1]
    return out if slots == 1 else out.view(-1, slots, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


def _moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b3: Tensor | None,
    b2: Tensor | None,
    scores_first: bool,
    config: str,
    kept_weight: str,
) -> Tensor:
    rest = config, kept_weight, torch.is_grad_enabled(), w1, w3, w2, b1, b3, b2
    return _apply(x, scores, expert_ids, rest, scores_first)


_exported_moe = exported(_moe, lambda x, *rest: x.new_empty(x.shape))


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


@torch.compiler.assume_constant_result
def _moe_key(gemms: str, limit: float | None, transport: str, rows: str, most_rows: int, ranks: int, group: str) -> str:
    """The key of a ``MoEConfig``, of whose GEMMs ``gemms`` is the key."""
    return _moe_config(gemms, limit, transport, rows, most_rows, ranks, group).key


@cache
def _moe_config(
    gemms: str, limit: float | None, transport: str, rows: str, most_rows: int, ranks: int, group: str
) -> MoEConfig:
    return MoEConfig(
        gemms=decode(gemms),
        limit=limit,
        transport=transport,
        factor=factor_of(rows),
        most_rows=most_rows,
        ranks=ranks,
        group=group,
    )


@torch.compiler.assume_constant_result
def keeps_copies(config: str, slots: int) -> bool:
    """That of the ``MoEConfig`` with this key."""
    return decode(config).keeps_copies(slots)


class _MoE(torch.autograd.Function):
    """Saves the rows that arrived in FP8, the two pre-activations, where rows arrived, and the weights; of those of
    32x32 blocks what was quantised for dgrad instead, unless FSDP frees them (``MXConfig.kept_weight``)."""

    @staticmethod
    def forward(ctx, x, scores, expert_ids, config, kept_weight, grad_enabled, *given):
        (w1, w3, w2, b1, b3, b2), gathered = given[:6], given[6:]
        save = grad_enabled and any(ctx.needs_input_grad)
        ctx.config, ctx.scored, ctx.x_dtype = config, scores is not None, x.dtype
        ctx.dtypes = [None if w is None else w.dtype for w in given[:6]]
        if kept_weight == "bf16":
            w1, w3, w2 = w1.bfloat16(), w3.bfloat16(), w2.bfloat16()
        matrices = gathered or (w1, w3, w2)
        out, *saved = moe_forward(x, scores, expert_ids, [*matrices], [b1, b3, b2], config, save)
        if not save:
            return out, None
        weights = () if kept_weight == "quantized" else matrices
        ctx.matrices, ctx.kept = len(weights), KEPT if kept_weight == "quantized" else (0, 0)
        ctx.gathers = keeps_copies(config, expert_ids.shape[1])
        return save_for_backward(ctx, out, b2, *weights, *saved)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, g_TD):
        b2, *saved = saved
        weights, handle, preactivations, kept, kept_w2, x = split(saved, ctx.matrices, _HANDLE, 2, *ctx.kept)
        del saved
        needs, routing = list(ctx.needs_input_grad[6:12]), DispatchHandle(*handle)
        held = held_gradients(ctx, first=2 + ctx.scored, count=3)
        sizes = [routing.expert_ids.numel(), preactivations[0].shape[1], g_TD.shape[1]]
        rowwise, columnwise, h, dscores, biases, sources, of_g = split(
            moe_hidden_gradients(g_TD, handle, preactivations, kept_w2, weights, b2, ctx.scored, needs, ctx.config),
            *experts.count_tensors(ctx.config).of_hidden(needs),
            ctx.scored,
            sum(needs[3:]),
            ctx.gathers,
        )
        dscores_M, sources = dscores[0] if ctx.scored else None, sources[0] if ctx.gathers else None
        wanted = sizes, needs, common_dtype(ctx.dtypes), held, ctx.config
        dweights = weight_gradients(routing.offs, (columnwise or [*rowwise], h), (x, of_g), sources, *wanted)
        rest = kept, weights, dscores_M, sizes, g_TD.dtype, ctx.config
        dx, *dscores = moe_rows_gradient(routing.offs, handle, rowwise, *rest)
        none = [None] * (len(ctx.needs_input_grad) - 12)
        dparams = gradients_of(dweights + biases, needs, ctx.dtypes)
        return dx.to(ctx.x_dtype), dscores[0] if ctx.scored else None, *[None] * 4, *dparams, *none


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
