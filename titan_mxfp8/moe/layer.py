"""``mxfp8_moe``: a MoE layer between its router and its output, as one operator forward and one backward.

T tokens here, K experts each of E in all, which R ranks share; M rows land here. D model and H hidden features.

```
forward                                                      backward
x_TD --quantise along D--> FP8 rows                          g_TD --quantise along D--> FP8 rows
     --dispatch: once per link, to all places--> x_MD             --the same way, to the same places--> g_MD
       (overlap weights are quantised)
     --experts (ops/experts.py)--> y_MD bf16                      --experts--> dgate w1, dup w3 (M, D), scores' (M,)
     --combine: scores, sums, once per link--> out_TD             --combine--> dx_TD, dscores_TK
saved: x_MD as FP8 rows, gate and up (M, H) bf16, the handle
```
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.backends import Plan
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.moe import TRANSPORTS, DispatchHandle, Rows, Transport, TransportName, choose
from titan_mxfp8.moe.bounds import bound, factor_of
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.checks import check_devices, check_dtype, check_features
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.library import Operator, aligned
from titan_mxfp8.ops.matmul import Once, release_saved_tensors
from titan_mxfp8.recipe import Recipe, get_recipe


def mxfp8_moe(
    x: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    transport: TransportName = "auto",
    rows: Rows = "counted",
    max_tokens: int | None = None,
    scores_first: bool = False,
    b1: torch.Tensor | None = None,
    b3: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    keep_quantized_weight: bool = True,
) -> torch.Tensor:
    """The routed experts of a MoE layer: ``sum over j of scores[t, j] * expert(expert_ids[t, j])(x[t])``.

    With a ``group``, its R ranks share the experts (expert parallelism): rank r holds experts ``r E / R`` to
    ``(r + 1) E / R - 1`` and tokens of its own, and all ranks call this together. A token's row is quantised once, at
    home, crosses each link once, and lands where it is multiplied; outputs are summed before they travel.

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
        ValueError: anything not as described above; on every rank, if they disagree about experts, K, recipe or rows.
        RuntimeError: an earlier call had more rows than memory for them, as far as the host knows without waiting.
    """
    recipe = get_recipe(recipe)
    weights = Weights(w1, w3, w2, b1, b3, b2)
    _check(x, scores, expert_ids, weights, group, transport, rows, max_tokens, swiglu_limit)
    tokens, slots = expert_ids.shape
    layer = _Layer(
        recipe=recipe.key,
        backend=backend,
        group="" if group is None else group.group_name,
        transport=transport,
        factor=factor_of(rows),
        most_rows=(max_tokens or 0) * (slots if scores_first else 1),
        limit=swiglu_limit,
        keep=keep_quantized_weight and recipe.weight_block == "32x32" and recipe.quantized,
        ranks=1 if group is None else group.size(),
    ).key
    if not scores_first:
        return _MoE.apply(x, scores.float(), expert_ids, *weights, layer, torch.is_grad_enabled())
    ids = expert_ids.reshape(tokens * slots, 1)
    out = _MoE.apply(_Scaled.apply(x, scores.float()), None, ids, *weights, layer, torch.is_grad_enabled())
    return out if slots == 1 else out.view(tokens, slots, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


class _Layer(NamedTuple):
    """Everything about a layer that is no tensor. Operators and graphs carry it as one string, ``key``.

    ``factor``: see ``bounds.factor_of``. ``most_rows``: that a rank ever sends in a call; 0: as many as in the first.
    """

    recipe: str
    backend: str
    transport: str
    factor: float | None
    most_rows: int
    limit: float | None
    keep: bool
    ranks: int
    group: str

    def capacity(self, tokens: int, slots: int, local: int) -> int | None:
        """The rows there is memory for, see ``bounds.bound``; None: those that come."""
        return None if self.factor is None else bound(self.factor, tokens, slots, self.ranks, local)

    @property
    def key(self) -> str:
        return "|".join(str(value) for value in self)

    @staticmethod
    @cache
    def of_key(key: str) -> "_Layer":
        recipe, backend, transport, factor, most_rows, limit, keep, ranks, group = key.split("|", maxsplit=8)
        factor, limit = (None if value == "None" else float(value) for value in (factor, limit))
        return _Layer(recipe, backend, transport, factor, int(most_rows), limit, keep == "True", int(ranks), group)

    def plan(self, device: torch.device) -> Plan:
        return _plan(self.recipe, self.backend, backends.hardware_of(device))

    def connect(self, device: torch.device) -> Transport:
        group = dist.distributed_c10d._resolve_process_group(self.group) if self.group else None
        transport, _ = choose(self.transport, group, device)
        transport.reserve(self.most_rows)
        return transport


@cache
def _plan(recipe: str, backend: str, hardware: Hardware) -> Plan:
    return backends.plan_on(Recipe.of_key(recipe), backend, hardware)


class _Scaled(torch.autograd.Function):
    """x (T, D) times each of a token's scores, in fp32 and rounded once: (T K, D). Saves x as it is, not in fp32."""

    @staticmethod
    def forward(ctx, x, scores):
        ctx.save_for_backward(x, scores)
        tokens, slots = scores.shape
        return (x.float().unsqueeze(1) * scores.unsqueeze(2)).to(x.dtype).view(tokens * slots, x.shape[1])

    @staticmethod
    def backward(ctx, g):
        x, scores = ctx.saved_tensors
        g_TKD = g.view(*scores.shape, x.shape[1])  # in products with fp32 it is taken for fp32
        dscores = (g_TKD * x.float().unsqueeze(1)).sum(2) if ctx.needs_input_grad[1] else None
        return (g_TKD * scores.unsqueeze(2)).sum(1).to(x.dtype) if ctx.needs_input_grad[0] else None, dscores


class _MoE(torch.autograd.Function):
    """Saves the rows that arrived in FP8, the two pre-activations, where rows arrived, and the weights; of those of
    32x32 blocks what was quantised for dgrad instead, unless FSDP frees them (``keep``)."""

    @staticmethod
    def forward(ctx, x, scores, expert_ids, w1, w3, w2, b1, b3, b2, layer, grad_enabled):
        weights = (w1, w3, w2, b1, b3, b2)
        save = grad_enabled and any(ctx.needs_input_grad)
        out, *saved = moe_forward(x, scores, expert_ids, *weights, layer, save)
        if save:
            if _Layer.of_key(layer).keep:  # backward reads what was kept, and of these the shape and dtype alone
                weights = (*(w.new_empty(()).expand(w.shape) for w in weights[:3]), *weights[3:])
            ctx.save_for_backward(*weights, *saved)
        ctx.layer, ctx.scored, ctx.x_dtype = layer, scores is not None, x.dtype
        return out

    @staticmethod
    def backward(ctx, g_TD):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _MoE.gradients(ctx, g_TD)
        with torch.no_grad():
            gradients = _MoE.gradients(ctx, g_TD)
        return tuple(g if g is None else Once.apply(g.requires_grad_()) for g in gradients)

    @staticmethod
    def gradients(ctx, g_TD):
        tensors = ctx.saved_tensors  # activation checkpointing hands them out once
        release_saved_tensors(ctx)
        weights, saved = tensors[:6], list(tensors[6:])
        del tensors  # so that moe_backward alone has what was saved
        needs = list(ctx.needs_input_grad[3:9])
        made = iter(moe_backward(g_TD, saved, *weights, ctx.scored, needs, ctx.layer))
        dx_TD, dscores_TK = next(made), next(made) if ctx.scored else None
        dweights = [next(made) if needed else None for needed in needs]
        return dx_TD.to(ctx.x_dtype), dscores_TK, None, *dweights, None, None


@Operator
def moe_forward(
    x: torch.Tensor,
    scores: torch.Tensor | None,
    expert_ids: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    layer: str,
    save: bool,
) -> list[torch.Tensor]:
    """The output (T, D), and with ``save`` what ``moe_backward`` takes: the ``DispatchHandle``, gate and up (M, H),
    the rows of x as they arrived, and the kept weights."""
    device = x.device
    config = _Layer.of_key(layer)
    _check_expert_ids(expert_ids, w1.shape[0] * config.ranks)
    matrices, biases = map(aligned, (w1, w3, w2)), (b if b is None else aligned(b.contiguous()) for b in (b1, b3, b2))
    weights = Weights(*matrices, *biases)
    plan, kernels, transport = config.plan(device), backends.load(config.backend, device), config.connect(device)
    parts = _to_parts(kernels.quantize(aligned(x), 1, experts.row_spec(plan.forward.a), None))
    sent_scores = torch.ones_like(expert_ids, dtype=torch.float32) if scores is None else scores
    quantized: list[list[Operand] | None] = []

    def quantize_weights() -> None:
        quantized.extend(experts.quantize_weights(weights, plan, kernels, config.keep and save))

    (tokens, slots), experts_of_all = expert_ids.shape, w1.shape[0] * config.ranks
    room = transport.agree(tokens, experts=experts_of_all, slots=slots, recipe=config.recipe, rows=config.factor)
    capacity = config.capacity(room, slots, w1.shape[0])
    received, handle = transport.dispatch(parts, expert_ids, sent_scores, experts_of_all, capacity, quantize_weights)
    del parts
    rows = _of_parts(received, experts.row_spec(plan.forward.a))
    w_forward, kept = quantized
    quantized.clear()  # so that the first of the two can be freed below
    y, gate, up = experts.forward(rows, w_forward, weights, handle.offs, config.limit, plan, kernels)
    del w_forward
    out, _ = transport.combine([y], scores is not None, None, handle, x.dtype)
    if not save:
        return [out]
    kept = [tensor for operand in kept or () for tensor in operand[:2] if tensor is not None]
    return [out, *handle, gate, up, *received, *kept]


@torch.library.register_fake(moe_forward.overload)
def _(x, scores, expert_ids, w1, w3, w2, b1, b3, b2, layer, save):
    out = x.new_empty(x.shape)
    if not save:
        return [out]
    config = _Layer.of_key(layer)
    plan, (local, hidden, features) = config.plan(x.device), w1.shape
    handle = _empty_handle(expert_ids, local, config)
    x_spec, rows = experts.row_spec(plan.forward.a), handle.scores.shape[0]
    received = [x.new_empty((rows, features), dtype=x_spec.elem_dtype)]
    if x_spec.is_quantized:
        received.append(x.new_empty((rows, ceil_div(features, x_spec.block_k)), dtype=torch.uint8))
    preactivations = [x.new_empty((rows, hidden), dtype=torch.bfloat16) for _ in range(2)]
    operands = [plan.dgrad.b.empty(w, 1, None) for w in (w1, w3, w2)] if config.keep else []
    kept = [tensor for operand in operands for tensor in operand[:2] if tensor is not None]
    return [out, *handle, *preactivations, *received, *kept]


def _empty_handle(expert_ids: torch.Tensor, local: int, config: "_Layer") -> DispatchHandle:
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
def moe_backward(
    g: torch.Tensor,
    saved: list[torch.Tensor],
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    scored: bool,
    needs: list[bool],
    layer: str,
) -> list[torch.Tensor]:
    """The gradients: of x (T, D) in bf16 or the dtype of ``g``, with ``scored`` of the scores (T, K), and those of the
    weights and biases that ``needs`` names. The list ``saved`` is emptied, and each of its tensors freed after its use,
    if nothing else holds it."""
    device, weights = g.device, Weights(*map(aligned, (w1, w3, w2)), b1, b3, b2)
    config = _Layer.of_key(layer)
    plan, kernels, transport = config.plan(device), backends.load(config.backend, device), config.connect(device)
    fields = len(DispatchHandle._fields)
    handle, preactivations, rest = DispatchHandle(*saved[:fields]), saved[fields : fields + 2], saved[fields + 2 :]
    saved.clear()
    x_spec, g_spec = experts.row_spec(plan.forward.a), experts.row_spec(plan.dgrad.a)
    x = [_of_parts(rest[: _part_count(x_spec)], x_spec)]
    kept = rest[_part_count(x_spec) :]
    dgrad, tensors = plan.dgrad.b, len(kept) // 3
    quantized = [Operand(*[*kept[i : i + tensors], None][:2], dgrad, 1) for i in range(0, len(kept), tensors or 1)]
    del rest, kept
    offs, scores = handle.offs, handle.scores if scored else None
    g_rows = _of_parts(
        transport.dispatch_with_handle(_to_parts(kernels.quantize(aligned(g), 1, g_spec, None)), handle), g_spec
    )
    made, dscores_M, dw2, db2 = experts.backward_w2(
        g_rows, preactivations, scores, weights, quantized, needs, offs, config.limit, plan, kernels
    )
    del g_rows  # before the rows' gradient, the largest of all, is made; so `made` is emptied too
    rows, (dw1, dw3), (db1, db3) = experts.backward_w1_w3(made, x, weights, quantized, needs, offs, plan, kernels)
    dx, dscores = transport.combine(rows, False, dscores_M, handle, g.dtype)
    wanted = [grad for grad, needed in zip((dw1, dw3, dw2, db1, db3, db2), needs, strict=True) if needed]
    return [dx, *([dscores] if scored else []), *wanted]


@torch.library.register_fake(moe_backward.overload)
def _(g, saved, w1, w3, w2, b1, b3, b2, scored, needs, layer):
    handle = DispatchHandle(*saved[: len(DispatchHandle._fields)])
    dscores = [handle.expert_ids.new_empty(handle.expert_ids.shape, dtype=torch.float32)] if scored else []
    weights = [w.new_empty(w.shape) for w, needed in zip((w1, w3, w2, b1, b3, b2), needs, strict=True) if needed]
    return [g.new_empty(g.shape), *dscores, *weights]


# As ``ops/library.py`` has it for single GEMMs: of T * K rows, as many as land on a rank if experts are balanced.
@register_flop_formula(torch.ops.titan_mxfp8.moe_forward)
def _(x_shape, scores_shape, expert_ids_shape, w1_shape, *args, **kwargs) -> int:
    return 3 * _flops_of_gemm(expert_ids_shape, w1_shape)


@register_flop_formula(torch.ops.titan_mxfp8.moe_backward)
def _(
    g_shape, saved_shapes, w1_shape, w3_shape, w2_shape, b1_shape, b3_shape, b2_shape, scored, needs, *args, **kwargs
) -> int:
    expert_ids_shape = DispatchHandle(*saved_shapes[: len(DispatchHandle._fields)]).expert_ids
    return (3 + sum(needs[:3])) * _flops_of_gemm(expert_ids_shape, w1_shape)


def _flops_of_gemm(expert_ids_shape: torch.Size, w1_shape: torch.Size) -> int:
    return 2 * math.prod(expert_ids_shape) * math.prod(w1_shape[1:])


def _to_parts(rows: Operand) -> list[torch.Tensor]:
    """What travels of (T, D) rows: their elements and, (T, D / block_k), their scales; or bf16 alone."""
    if rows.scale is None:
        return [rows.data]
    scales = rows.row_scales()
    if rows.spec.scales == "mn_major":  # of no rows contiguous() would leave the strides
        scales = scales.clone(memory_format=torch.contiguous_format)
    return [rows.data, scales.contiguous()]


def _of_parts(parts: list[torch.Tensor], spec: OperandSpec) -> Operand:
    """The rows that arrived, as a GEMM takes them."""
    data, scale = (*parts, None)[:2]
    if spec.scales == "mn_major":
        across = scale.new_zeros(spec.scale_shape(tuple(data.shape)))
        across[:, : data.shape[0]] = scale.mT
        scale = across
    return Operand(data, scale, spec, 1)


def _part_count(spec: OperandSpec) -> int:
    return 2 if spec.is_quantized else 1


def _check_expert_ids(expert_ids: torch.Tensor, experts: int) -> None:
    """Raises ValueError if ids on a CPU, where looking costs no sync, are of no expert."""
    if not expert_ids.is_cpu or not expert_ids.numel():
        return
    first, last = expert_ids.aminmax()
    if first < 0 or last >= experts:
        raise ValueError(f"expert_ids must be of 0 to {experts - 1}, got {first.item()} to {last.item()}")


def _check(
    x: torch.Tensor,
    scores: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: Weights,
    group: dist.ProcessGroup | None,
    transport: str,
    rows: Rows,
    max_tokens: int | None,
    swiglu_limit: float | None,
) -> None:
    w1, w3, w2, *biases = weights
    if x.ndim != 2 or w1.ndim != 3 or w1.shape[2] != x.shape[1]:
        raise ValueError(
            "takes x of shape (T, D), w1 and w3 of shape (E / R, H, D) and w2 of shape (E / R, D, H), got "
            f"{tuple(x.shape)}, {tuple(w1.shape)}, {tuple(w3.shape)} and {tuple(w2.shape)}"
        )
    local, hidden, features = w1.shape
    if w3.shape != w1.shape or tuple(w2.shape) != (local, features, hidden):
        raise ValueError(
            f"w3 must be of shape {tuple(w1.shape)} and w2 of shape {(local, features, hidden)}, as w1 is of shape "
            f"{tuple(w1.shape)}; got {tuple(w3.shape)} and {tuple(w2.shape)}"
        )
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0] or scores.shape != expert_ids.shape:
        raise ValueError(
            f"scores and expert_ids must be of shape ({x.shape[0]}, K), one of each for every token and slot, got "
            f"{tuple(scores.shape)} and {tuple(expert_ids.shape)}"
        )
    if expert_ids.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"expert_ids must be integers, got {expert_ids.dtype}")
    for name, bias, size in zip(("b1", "b3", "b2"), biases, (hidden, hidden, features), strict=True):
        if bias is not None:
            check_dtype(name, bias)
            if tuple(bias.shape) != (local, size):
                raise ValueError(f"{name} must be of shape ({local}, {size}), got {tuple(bias.shape)}")
    factor_of(rows)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
        raise ValueError(f"max_tokens is a positive number of tokens or None, got {max_tokens!r}")
    if swiglu_limit is not None and not (isinstance(swiglu_limit, float | int) and swiglu_limit > 0):
        raise ValueError(f"swiglu_limit is a positive number or None, got {swiglu_limit!r}")
    slots, ranks = expert_ids.shape[1], 1 if group is None else group.size()
    if slots > local * ranks:
        raise ValueError(f"each token is sent to {slots} experts, but there are only {local * ranks}")
    named = {"x": x, "scores": scores, "w1": w1, "w3": w3, "w2": w2}
    for name, tensor in named.items():
        check_dtype(name, tensor)
    check_features("D, the number of model features,", features)
    check_features("H, the number of hidden features,", hidden)
    check_devices(**named, expert_ids=expert_ids, b1=weights.b1, b3=weights.b3, b2=weights.b2)
