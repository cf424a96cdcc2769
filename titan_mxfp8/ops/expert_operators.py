"""A layer of SwiGLU experts as operators, with their fakes, and the autograd function over them: one operator is all of
forward, five are backward.

Per expert e, rows of group e only: ``y = h w2^T + b2``, ``h = act(x w1^T + b1, x w3^T + b3)``. A row's score s
multiplies y afterwards; with g the gradient of that product, unscaled:

| gradient of     | computed as                                                                    |
|-----------------|--------------------------------------------------------------------------------|
| h               | ``s u``, ``u = g w2``                                                          |
| s               | the sum over H of ``u * h``, and ``g b2``: y itself is not needed              |
| w2              | ``g^T (s h)``                                                                  |
| w1, w3          | ``dgate^T x`` and ``dup^T x``                                                  |
| x               | ``dgate w1 + dup w3``                                                          |

x and g are quantised along D once for all GEMMs that contract D; the activation writes both its forms at once
(``Backend.swiglu_backward``).

How rows come to the experts, and where their outputs go, is the layer's part (``ExpertsLayer``): rows may be sorted by
expert already (``grouped_experts``), or be tokens that travel (``moe.config``).

Backward is several operators. Each frees what it has used, where nothing else holds it: every list argument whose
docstring says so is emptied. But compiled code holds all that it gives an operator until that returns, and frees
between them.

T tokens, K experts of each, M rows for the E experts here; for sorted rows T is M and K is 1. D model and H hidden
features.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.spec import Operand, separate
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.accumulate import held_gradients, take_gradients
from titan_mxfp8.ops.autograd import once_differentiable, save_for_backward, split, take, take_many
from titan_mxfp8.ops.experts import ExpertsLayer
from titan_mxfp8.ops.library import Operator, aligned
from titan_mxfp8.ops.matmul import sum_rows

# Of what ``autograd.exported`` makes of a layer.
WEIGHTS_SCHEMA = "Tensor w1, Tensor w3, Tensor w2, Tensor? b1, Tensor? b3, Tensor? b2"
_KEPT = 4, 2  # tensors of w1 and w3, and of w2, that were quantised for dgrad


class ExpertsFunction(torch.autograd.Function):
    """Saves the handle, which of sorted rows is ``routing``; x as wgrad wants it; the two pre-activations; and the
    weights, or of those of 32x32 blocks what was quantised for dgrad, unless FSDP frees them
    (``MXConfig.kept_weight``).

    Args:
        routing, capacity: as of ``experts_forward``.
        keeps_x: whether x is saved as it is.
        given: w1, w3, w2, b1, b3 and b2. Behind them, where there is any, what is multiplied instead of the three
            weights: these only get the gradients then.
    """

    @staticmethod
    def forward(ctx, x, scores, routing, capacity, config, kept_weight, keeps_x, grad_enabled, *given):
        (w1, w3, w2, b1, b3, b2), gathered = given[:6], given[6:]
        save = grad_enabled and any(ctx.needs_input_grad)
        ctx.config, ctx.scored, ctx.x_dtype = config, scores is not None, x.dtype
        ctx.dtypes = [None if w is None else w.dtype for w in given[:6]]
        if kept_weight == "bf16":
            w1, w3, w2 = w1.bfloat16(), w3.bfloat16(), w2.bfloat16()
        matrices = gathered or (w1, w3, w2)
        out, *saved = experts_forward(x, scores, routing, capacity, [*matrices], [b1, b3, b2], config, save)
        if not save:
            return out, None
        weights = () if kept_weight == "quantized" else matrices
        ctx.matrices, ctx.kept = len(weights), _KEPT if kept_weight == "quantized" else (0, 0)
        ctx.sorted = routing.ndim == 1
        ctx.slots = 1 if ctx.sorted else routing.shape[1]
        # Under torch.compile(dynamic=True) what is compared is a symbol: a branch makes a constant of it, and bool() a
        # flag.
        ctx.whole_blocks = False
        if given[0].shape[1] % 128 == 0:
            ctx.whole_blocks = True
        ctx.gathers = bool(ctx.slots >= experts.count_tensors(config, ctx.whole_blocks).copied_slots)
        own = (routing,) if ctx.sorted else ()
        return save_for_backward(ctx, out, b2, *weights, *own, *saved, *((x,) if keeps_x else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, g):
        b2, *saved = saved
        counts = experts.count_tensors(ctx.config, ctx.whole_blocks)
        weights, handle, preactivations, kept, kept_w2, x = split(saved, ctx.matrices, counts.handle, 2, *ctx.kept)
        del saved
        needs, offs, config = list(ctx.needs_input_grad[8:14]), handle[0], ctx.config
        sizes = [g.shape[0], ctx.slots, preactivations[0].shape[1], g.shape[1]]
        params, totals = held_gradients(ctx, first=2 + ctx.scored, count=3)
        u, dscores_b2, db2, sources, of_g = split(
            experts_output_gradient(
                g, handle, kept_w2, weights, b2, preactivations[0], ctx.scored, needs, sizes, config
            ),
            1,
            ctx.scored and b2 is not None,
            needs[5],
            ctx.gathers,
        )
        in_u = [] if counts.u_place is None else [*u]
        made = experts_hidden_gradients(offs, handle, preactivations, u, ctx.scored, needs, config)
        if in_u:
            made = [*made[: counts.u_place], *in_u, *made[counts.u_place :]]
        del u, in_u
        rowwise, columnwise, h, dscores, biases = split(
            made, counts.rowwise, counts.columnwise, counts.h * needs[2], ctx.scored
        )
        del made
        dscores_M, sources = dscores[0] if ctx.scored else None, sources[0] if ctx.gathers else None
        if dscores_b2:
            dscores_M = dscores_M + dscores_b2[0]
        if ctx.sorted and not counts.quantizes_g:
            of_g = [g]
        dtypes, made = ctx.dtypes, []
        dtype = dtypes[0] if dtypes[0] == dtypes[1] == dtypes[2] else torch.float32
        rest = sources, sizes, dtype, totals, config
        if needs[0] or needs[1]:
            columnwise = columnwise or [*rowwise]
        if needs[2]:  # first, and those of w1 and w3 last: so the least is held at once
            made = expert_weight_gradients(offs, h, of_g, [False, False, True], *rest)
        dx, *dscores = experts_rows_gradient(offs, handle, rowwise, kept, weights, dscores_M, sizes, g.dtype, config)
        if needs[0] or needs[1]:
            made = expert_weight_gradients(offs, columnwise, x, [*needs[:2], False], *rest) + made
        made = take_gradients(params, totals) + made + biases + db2
        dparams = gradients_of(made, needs, dtypes)
        none = [None] * (len(ctx.needs_input_grad) - 14)
        return dx.to(ctx.x_dtype), dscores[0] if ctx.scored else None, *[None] * 6, *dparams, *none


def gradients_of(made: list[Tensor], needs: list[bool], dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
    """The gradients of all parameters, of which only those that are needed were made."""
    rest = iter(made)
    return [next(rest).to(dtype) if needed else None for needed, dtype in zip(needs, dtypes, strict=True)]


@Operator
def experts_forward(
    x: Tensor,
    scores: Tensor | None,
    routing: Tensor,
    capacity: int | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    config: str,
    save: bool,
) -> list[Tensor]:
    """The output (T, D), and with ``save`` what backward takes: the handle unless it is ``routing``, gate and up
    (M, H), the kept weights, and x as ``ExpertsLayer.dispatch`` saves it.

    Args:
        routing: int32 (E,), end offsets of the experts' rows in x; or integers (T, K), each token's experts.
        capacity: M, where neither ``config`` nor the routing says it.
        weights: w1, w3, w2, as ``experts.weights_of`` takes them.
        biases: b1, b3, b2.
        config: the key of an ``ExpertsLayer``.
    """
    layer: ExpertsLayer = decode(config)
    gemms, kernels = layer.gemms, backends.load(layer.gemms.backend, x.device)
    parameters = experts.weights_of(weights, biases, gemms.plan)
    quantized, kept = [], []

    def quantize_weights() -> None:
        made = experts.quantize_weights(parameters, gemms.plan, kernels, save and gemms.kept_weight == "quantized")
        quantized.extend(made[0]), kept.extend(made[1])

    transport, local = layer.connect(x.device), weights[0].shape[0]
    rows = layer.dispatch(transport, x, scores, routing, capacity, local, save, kernels, quantize_weights)
    handle, offs, spec, gemm = rows.handle, rows.handle[0], gemms.plan.forward.a, kernels.gemm_m_grouped
    values, fused = take(rows.tokens).along_features(spec, offs, kernels), kernels.swiglu_gemm_m_grouped
    made = None if fused is None else fused(values, *quantized[:2], parameters[3:5], layer.limit, spec, offs)
    if made is not None:
        gate, up, h = made
        take_many(quantized, 2)
        del values, made
    else:
        gate = gemm(values, take(quantized), offs, parameters.b1, torch.bfloat16, False)
        up = gemm(values, take(quantized), offs, parameters.b3, torch.bfloat16, False)
        del values
        h = kernels.swiglu(gate, up, layer.limit, spec, offs)
    y = gemm(h, take(quantized), offs, parameters.b2, torch.bfloat16, layer.zero_tail)
    del h
    out = layer.combine(transport, y, scores is not None, handle, x.dtype)
    if not save:
        return [out]
    return [out, *(handle if routing.ndim > 1 else []), gate, up, *experts.tensors_of(kept), *rows.kept]


@torch.library.register_fake(experts_forward.overload)
def _(x, scores, routing, capacity, weights, biases, config, save):
    out = x.new_empty(x.shape)
    if not save:
        return [out]
    layer, (local, hidden, _) = decode(config), weights[0].shape
    handle, rows, kept_x = layer.empty_dispatched(x, routing, capacity, local)
    preactivations = [x.new_empty((rows, hidden), dtype=torch.bfloat16) for _ in range(2)]
    gemms = layer.gemms
    kept = [gemms.plan.dgrad.b.empty(w, 1, None) for w in weights] if gemms.kept_weight == "quantized" else []
    return [out, *handle, *preactivations, *experts.tensors_of(kept), *kept_x]


@Operator
def experts_output_gradient(
    g: Tensor,
    handle: list[Tensor],
    quantized: list[Tensor],
    weights: list[Tensor],
    b2: Tensor | None,
    gate: Tensor,
    scored: bool,
    needs: list[bool],
    sizes: list[int],
    config: str,
) -> list[Tensor]:
    """u; of a b2 its part of the scores' gradient, fp32 (M,), and its own gradient, fp32, where they are wanted; then
    ``sources`` and ``kept`` of ``ExpertsLayer.dispatch_gradient``.

    Args:
        quantized: w2 as ``experts_forward`` has kept it, emptied; or none.
        weights: w1, w3, w2, as ``experts.weights_of`` takes them; none where they are kept quantised.
        gate: as of ``experts_hidden_gradients``, not read. Compilers make one call of two that are alike, say those of
            two x with the same experts, offsets and g. Of these each needs a u of its own, which will be overwritten.
        scored: whether the scores have a gradient.
        needs: which gradients of w1, w3, w2, b1, b3 and b2 are wanted.
        sizes: T, K, H and D, for whoever counts FLOPs.
    """
    layer: ExpertsLayer = decode(config)
    plan, kernels = layer.plan, backends.load(layer.gemms.backend, g.device)
    parameters = experts.weights_of(weights, [None, None, b2], plan)
    transport, offs = layer.connect(g.device), aligned(handle[0])
    rows = layer.dispatch_gradient(transport, aligned(g), [offs, *handle[1:]], needs[2], kernels)
    kept, tokens = experts.kept_operands(quantized, layer.gemms), take(rows.tokens)
    w2 = take(kept) if kept else experts.for_dgrad(parameters.w2, plan, kernels)
    made, of_g = [], tokens.along_features(plan.dgrad.a, offs, kernels)
    if b2 is not None:
        values = experts.bf16_values(tokens.rowwise, offs, kernels) if tokens.values is None else tokens.values
        values = values.float()
        if scored:
            expert_M = torch.searchsorted(offs, torch.arange(values.shape[0], device=offs.device), right=True)
            made.append((values * b2.float()[expert_M.clamp(max=offs.numel() - 1)]).sum(1))
            values = values * layer.scores(handle)[:, None]
        if needs[5]:
            made.append(sum_rows(values, offs))
        del values
    del tokens
    u = kernels.gemm_m_grouped(of_g, w2, offs, None, torch.bfloat16, False)
    return [u, *made, *rows.sources, *rows.kept]


@torch.library.register_fake(experts_output_gradient.overload)
def _(g, handle, quantized, weights, b2, gate, scored, needs, sizes, config):
    layer, (*_, hidden, features) = decode(config), sizes
    scores = layer.scores(handle)
    rows = g.shape[0] if scores is None else scores.shape[0]
    made = [g.new_empty((rows, hidden), dtype=torch.bfloat16)]
    if scored and b2 is not None:
        made.append(g.new_empty(rows, dtype=torch.float32))
    if needs[5]:
        made.append(g.new_empty((handle[0].shape[0], features), dtype=torch.float32))
    return [*made, *layer.empty_gradient(g, handle, rows, needs[2])]


@Operator
def experts_hidden_gradients(
    offs: Tensor,
    handle: list[Tensor],
    preactivations: list[Tensor],
    u: list[Tensor],
    scored: bool,
    needs: list[bool],
    config: str,
) -> list[Tensor]:
    """``experts.hidden_tensors``.

    Args:
        offs: the first tensor of ``handle``.
        preactivations: gate and up, emptied.
        u: u alone, overwritten (``Plan.in_u``); emptied. The schema does not say so, as torch does not functionalise an
            operator that writes to a tensor and returns a list: nobody may read the u that was.
        scored: whether the scores have a gradient.
        needs: as of ``experts_output_gradient``.
    """
    layer: ExpertsLayer = decode(config)
    plan, kernels, offs = layer.plan, backends.load(layer.gemms.backend, offs.device), aligned(offs)
    scores = layer.scores(handle) if scored else None
    whole_blocks, inputs = u[0].shape[1] % 128 == 0, [*take_many(preactivations), u.pop()]
    *operands, dscores = kernels.swiglu_backward(inputs, scores, layer.limit, plan, offs)
    rowwise, columnwise = take_many(operands, 2), operands
    biases = []
    if needs[3] or needs[4]:
        gradients = [rows for rows, needed in zip(separate(*rowwise), needs[3:5], strict=True) if needed]
        biases = [sum_rows(experts.bf16_values(rows, offs, kernels).float(), offs) for rows in gradients]
    if not needs[2]:
        columnwise.pop()
    return experts.hidden_tensors(layer, whole_blocks, rowwise, columnwise, dscores, biases)


@torch.library.register_fake(experts_hidden_gradients.overload)
def _(offs, handle, preactivations, u, scored, needs, config):
    layer, local, (u,) = decode(config), offs.shape[0], u
    (rows, hidden), plan, spec = u.shape, layer.plan, layer.plan.dgrad.a
    rowwise = [spec.empty(u, 1, local if spec.grouped_scales else None) for _ in range(2)]
    whole_blocks = bool(hidden % 128 == 0)
    if plan.in_u(whole_blocks) == "dgate_dup":
        rowwise = [operand._replace(data=u) for operand in rowwise]
    return experts.hidden_tensors(
        layer,
        whole_blocks,
        rowwise,
        columnwise=[spec.empty(u, 0, local) for spec in (plan.wgrad.a, plan.wgrad.a, *[plan.wgrad.b] * needs[2])],
        dscores=u.new_empty(rows, dtype=torch.float32) if scored else None,
        biases=[u.new_empty((local, hidden), dtype=torch.float32) for needed in needs[3:5] if needed],
    )


@Operator
def expert_weight_gradients(
    offs: Tensor,
    columnwise: list[Tensor],
    tokens: list[Tensor],
    needs: list[bool],
    sources: Tensor | None,
    sizes: list[int],
    dtype: torch.dtype,
    totals: list[Tensor],
    config: str,
) -> list[Tensor]:
    """The gradient of w2, or those of w1 and w3 that ``needs`` names, in ``dtype``.

    Args:
        columnwise: tensors of the score times h, or of the gradients of gate and up, along M. Emptied.
        tokens, sources: of g, or of x, as ``ExpertsLayer.wgrad_tokens`` takes them; emptied.
        sizes: T, K, H and D.
        totals: fp32, to which the gradients of w1, w3 and w2, all needed, are added: they are not returned then. Not
            in the schema, as compiled graphs have none.
    """
    layer: ExpertsLayer = decode(config)
    kernels, offs, wgrad = backends.load(layer.gemms.backend, offs.device), aligned(offs), layer.plan.wgrad

    def multiply(i: int, dy: Operand, x: Operand) -> Tensor:
        if totals:
            return kernels.gemm_k_grouped(dy, x, offs, torch.float32, totals[i])
        return kernels.gemm_k_grouped(dy, x, offs, dtype)

    spec = wgrad.a if needs[2] else wgrad.b
    of_tokens = layer.wgrad_tokens(tokens, sources, needs[2]).along_tokens(spec, offs, kernels)
    if needs[2]:
        made = [multiply(2, of_tokens, Operand.take(columnwise, wgrad.b, 0))]
    else:
        made = []
        for i in (0, 1):
            dy = Operand.take(columnwise, wgrad.a, 0)
            if needs[i]:
                made.append(multiply(i, dy, of_tokens))
            del dy
    return [] if totals else made


@torch.library.register_fake(expert_weight_gradients.overload)
def _(offs, columnwise, tokens, needs, sources, sizes, dtype, totals, config):
    (*_, h, d), local = sizes, offs.shape[0]
    shapes = zip(((h, d), (h, d), (d, h)), needs, strict=True)
    return [] if totals else [offs.new_empty((local, *shape), dtype=dtype) for shape, needed in shapes if needed]


@Operator
def experts_rows_gradient(
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
        offs: the first tensor of ``handle``.
        rowwise: all tensors of both gradients along H, that in the memory of u too. Emptied.
        quantized: w1 and w3 as ``experts_forward`` has kept them, emptied; or none.
        weights: as of ``experts_output_gradient``.
        sizes: T, K, H and D.
    """
    layer: ExpertsLayer = decode(config)
    kernels = backends.load(layer.gemms.backend, offs.device)
    operands = experts.hidden_gradients(rowwise, layer)
    parameters = experts.weights_of(weights, [None] * 3, layer.plan)
    kept = experts.kept_operands(quantized, layer.gemms)

    def products() -> Iterator[tuple[Operand, Operand]]:
        for w in parameters[:2]:
            of_dgrad = take(kept) if kept else experts.for_dgrad(w, layer.plan, kernels)
            yield take(operands), of_dgrad

    rows = kernels.dual_gemm_m_grouped(products(), aligned(offs))
    return layer.combine_gradient(layer.connect(offs.device), rows, dscores_M, handle, dtype)


@torch.library.register_fake(experts_rows_gradient.overload)
def _(offs, handle, rowwise, quantized, weights, dscores_M, sizes, dtype, config):
    tokens, slots, _, d = sizes
    dx = offs.new_empty((tokens, d), dtype=dtype)
    return [dx] if dscores_M is None else [dx, offs.new_empty((tokens, slots), dtype=torch.float32)]


# As ``ops/library.py`` has it for single GEMMs: of T * K rows, as many as come to a rank if experts are balanced.
@register_flop_formula(torch.ops.titan_mxfp8.experts_forward)
def _(x_shape, scores_shape, routing_shape, capacity, weight_shapes, *args, **kwargs) -> int:
    rows = x_shape[0] if len(routing_shape) == 1 else math.prod(routing_shape)
    return 3 * 2 * rows * math.prod(weight_shapes[0][1:])


@register_flop_formula(torch.ops.titan_mxfp8.experts_output_gradient)
def _(g, handle, quantized, weights, b2, gate, scored, needs, sizes, *args, **kwargs) -> int:
    return 2 * math.prod(sizes)


@register_flop_formula(torch.ops.titan_mxfp8.expert_weight_gradients)
def _(offs, columnwise, tokens, needs, sources, sizes, *args, **kwargs) -> int:
    return sum(needs) * 2 * math.prod(sizes)


@register_flop_formula(torch.ops.titan_mxfp8.experts_rows_gradient)
def _(offs, handle, rowwise, quantized, weights, dscores_M, sizes, *args, **kwargs) -> int:
    return 2 * 2 * math.prod(sizes)
