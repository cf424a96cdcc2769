"""The experts of a MoE layer on rows that are sorted by expert already: one operator forward and one backward.

M rows, D model and H hidden features, E experts. x and the output's gradient are there in high precision, so all of
their operands are quantised from the originals; what the recipe leaves unquantised is multiplied as it is. Saved for
backward: x as wgrad wants it (or as FP8 rows, with ``requantize_input``), gate and up (M, H) in bf16, and the weights
or, of 32x32 blocks, what was quantised for dgrad, unless FSDP frees them.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch.utils.flop_counter import register_flop_formula

from titan_mxfp8 import backends
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.spec import Operand
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.accumulate import held_gradients, take_gradients
from titan_mxfp8.ops.autograd import (
    Owned,
    exported,
    is_exporting,
    once_differentiable,
    save_for_backward,
    take,
    take_many,
)
from titan_mxfp8.ops.checks import check_offs_values
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.experts import ExpertsConfig, Tokens, WeightGradients, Weights
from titan_mxfp8.ops.library import Operator, aligned


def grouped_experts(
    x_MD: torch.Tensor,
    weights: Weights,
    offs: torch.Tensor,
    config: MXConfig,
    limit: float | None = None,
    gathered: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """``expert(x)`` of each expert on its own rows, (M, D) in bf16; zeros at and past ``offs[-1]``, here and in the
    gradient of x.

    Args:
        x_MD: bf16, sorted by expert.
        weights: this rank's.
        offs: int32 (E,), end offsets of the experts' rows.
        limit: that of gpt_oss's clamped SwiGLU, or None for SiLU.
        gathered: elements and scales of w1, w3 and w2 in exact 32x32 blocks, where they were gathered quantised; or
            what ``experts.quantize_ahead`` gave, with a ``config`` that keeps no quantised weight. Those of ``weights``
            only get the gradients then, in their dtype.
    """
    key = experts_key(config.key, limit)
    if torch.compiler.is_compiling() and is_exporting():
        return _exported_experts(x_MD, offs, *weights, key, config.keeps_input, config.kept_weight)
    kept = config.keeps_input, "itself" if gathered else config.kept_weight
    return _GroupedExperts.apply(x_MD, offs, *weights, key, kept, torch.is_grad_enabled(), *gathered)[0]


def _experts(
    x: torch.Tensor,
    offs: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    config: str,
    keeps_input: bool,
    kept_weight: str,
) -> torch.Tensor:
    kept = keeps_input, kept_weight
    return _GroupedExperts.apply(x, offs, w1, w3, w2, b1, b3, b2, config, kept, torch.is_grad_enabled())[0]


_exported_experts = exported(_experts, lambda x, *rest: x.new_empty(x.shape, dtype=torch.bfloat16))


@torch.compiler.assume_constant_result
def experts_key(gemms: str, limit: float | None) -> str:
    """The key of the ``ExpertsConfig`` for the ``MXConfig`` of this key."""
    return _experts_config(gemms, limit).key


@cache
def _experts_config(gemms: str, limit: float | None) -> ExpertsConfig:
    return ExpertsConfig(gemms=decode(gemms), limit=limit)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offs, w1, w3, w2, b1, b3, b2, config, kept, grad_enabled, *gathered):
        save = grad_enabled and any(ctx.needs_input_grad)
        keeps_input, kept_weight = kept
        ctx.config, ctx.dtypes = config, [None if w is None else w.dtype for w in (w1, w3, w2, b1, b3, b2)]
        if kept_weight == "bf16":
            w1, w3, w2 = w1.bfloat16(), w3.bfloat16(), w2.bfloat16()
        matrices = gathered or (w1, w3, w2)
        y, *saved = experts_forward(x, [*matrices], [b1, b3, b2], offs, config, save)
        if not save:
            return y, None
        weights = () if kept_weight == "quantized" else matrices
        ctx.matrices = len(weights)
        return save_for_backward(ctx, y, offs, b2, *weights, *saved, *((x,) if keeps_input else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, g):
        offs, b2, *saved = saved
        weights, saved = [*saved[: ctx.matrices]], [*saved[ctx.matrices :]]
        needs = list(ctx.needs_input_grad[2:8])
        params, totals = held_gradients(ctx, first=2, count=3)
        made = experts_backward(g, saved, weights, b2, offs, needs, common_dtype(ctx.dtypes), totals, ctx.config)
        dweights = gradients_of(take_gradients(params, totals) + made[1:], needs, ctx.dtypes)
        none = [None] * (len(ctx.needs_input_grad) - 8)
        return made[0], None, *dweights, *none


def common_dtype(dtypes: list[torch.dtype | None]) -> torch.dtype:
    """That of the gradients of w1, w3 and w2, whose own these are, before each is rounded to its own."""
    return dtypes[0] if dtypes[0] == dtypes[1] == dtypes[2] else torch.float32


def gradients_of(
    made: list[torch.Tensor], needs: list[bool], dtypes: list[torch.dtype | None]
) -> list[torch.Tensor | None]:
    """The gradients of all parameters, of which only those that are needed were made."""
    rest = iter(made)
    return [next(rest).to(dtype) if needed else None for needed, dtype in zip(needs, dtypes, strict=True)]


@Operator
def experts_forward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    offs: torch.Tensor,
    config: str,
    save: bool,
) -> list[torch.Tensor]:
    """y (M, D), and with ``save`` what ``experts_backward`` takes: gate and up (M, H), the kept weights, and x as wgrad
    or requantisation wants it, unless that is x itself.

    Args:
        weights: w1, w3, w2, as ``experts.weights_of`` takes them.
        biases: b1, b3, b2.
        config: the key of an ``ExpertsConfig``.
    """
    check_offs_values(offs, x.shape[0])
    layer: ExpertsConfig = decode(config)
    gemms, kernels = layer.gemms, backends.load(layer.gemms.backend, x.device)
    spec, x, offs = gemms.plan.forward.a, aligned(x), aligned(offs)
    parameters = experts.weights_of(weights, biases, gemms.plan)
    if save and not gemms.keeps_rows and not gemms.keeps_input:
        rows, x_saved = kernels.quantize_both(x, spec, gemms.plan.wgrad.b, offs)
    else:
        rows = x_saved = kernels.quantize(x, 1, spec, offs if spec.grouped_scales else None)
    quantized, kept = experts.quantize_weights(parameters, gemms.plan, kernels, save and gemms.keeps_weight)
    tokens = [Tokens(rows)]
    del rows
    y, gate, up = experts.forward(tokens, quantized, parameters, offs, layer, kernels, zero_tail=True)
    if not save:
        return [y]
    return [y, gate, up, *experts.tensors_of(kept), *([] if gemms.keeps_input else x_saved.tensors())]


@torch.library.register_fake(experts_forward.overload)
def _(x, weights, biases, offs, config, save):
    y = x.new_empty(x.shape, dtype=torch.bfloat16)
    if not save:
        return [y]
    gemms, (_, hidden, _), groups = decode(config).gemms, weights[0].shape, offs.shape[0]
    preactivations = [x.new_empty((x.shape[0], hidden), dtype=torch.bfloat16) for _ in range(2)]
    kept = [gemms.plan.dgrad.b.empty(w, 1, None) for w in weights] if gemms.keeps_weight else []
    if gemms.keeps_input:
        return [y, *preactivations, *experts.tensors_of(kept)]
    spec = gemms.plan.forward.a
    if gemms.keeps_rows:
        x_saved = spec.empty(x, 1, groups if spec.grouped_scales else None)
    else:
        x_saved = gemms.plan.wgrad.b.empty(x, 0, groups)
    return [y, *preactivations, *experts.tensors_of(kept), *x_saved.tensors()]


@Operator
def experts_backward(
    g: torch.Tensor,
    saved: list[torch.Tensor],
    weights: list[torch.Tensor],
    b2: torch.Tensor | None,
    offs: torch.Tensor,
    needs: list[bool],
    dtype: torch.dtype,
    totals: list[torch.Tensor],
    config: str,
) -> list[torch.Tensor]:
    """The gradient of x (M, D) in bf16, and those that ``needs`` names: of w1, w3, w2 in ``dtype``, of b1, b3, b2 in
    fp32.

    Args:
        saved: what ``experts_forward`` returned behind y, and x where that is kept as it is. Emptied: each tensor is
            freed after its use, if nothing else holds it.
        weights: w1, w3, w2, as ``experts.weights_of`` takes them; none where they are kept quantised.
        totals: fp32, to which the gradients of w1, w3 and w2, all needed, are added: they are not returned then. Not
            in the schema, as compiled graphs have none.
    """
    layer: ExpertsConfig = decode(config)
    gemms, kernels = layer.gemms, backends.load(layer.gemms.backend, g.device)
    plan, g, offs = gemms.plan, aligned(g), aligned(offs)
    parameters = experts.weights_of(weights, [None, None, b2], plan)
    taken = take_many(saved)
    preactivations = take_many(taken, 2)
    quantized = kept_operands(taken, gemms)
    x = [_saved_tokens(taken, gemms)]
    rows, columns = plan.dgrad.a, plan.wgrad.a
    if not needs[2]:
        g_tokens = [Tokens(kernels.quantize(g, 1, rows, offs if rows.grouped_scales else None), None, g)]
    elif columns.is_quantized:
        g_tokens = [Tokens(*kernels.quantize_both(g, rows, columns, offs), g)]
    else:
        of_rows = kernels.quantize(g, 1, rows, offs if rows.grouped_scales else None)
        g_tokens = [Tokens(of_rows, Operand(g.bfloat16().contiguous(), None, columns, 0), g)]
        del of_rows
    rest = needs, WeightGradients(dtype, totals), offs, layer, kernels
    made, _, dw2, db2 = experts.backward_w2(g_tokens, preactivations, None, parameters, quantized, *rest)
    dx, (dw1, dw3, db1, db3) = experts.backward_w1_w3(made, x, parameters, quantized, *rest)
    dx = dx[0] if len(dx) == 1 else dx[0].add_(dx[1])
    row_M = torch.arange(dx.shape[0], device=offs.device)
    dx.masked_fill_((row_M >= offs[-1])[:, None], 0)
    return [dx, *returned((dw1, dw3, dw2, db1, db3, db2), needs, totals)]


@torch.library.register_fake(experts_backward.overload)
def _(g, saved, weights, b2, offs, needs, dtype, totals, config):
    dx = g.new_empty(g.shape, dtype=torch.bfloat16)
    return [dx, *empty_gradients(g, saved[0].shape[1], offs.shape[0], needs, dtype, totals)]


def returned(
    gradients: Sequence[torch.Tensor | None], needs: list[bool], totals: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What an operator returns of the gradients of w1, w3, w2, b1, b3 and b2: those that ``needs`` names, but for the
    first three where they were added to ``totals``."""
    first = 3 if totals else 0
    return [grad for grad, needed in zip(gradients[first:], needs[first:], strict=True) if needed]


def empty_gradients(
    g: torch.Tensor, hidden: int, local: int, needs: list[bool], dtype: torch.dtype, totals: list[torch.Tensor]
) -> list[torch.Tensor]:
    """For fakes: what is ``returned`` of the gradients of ``local`` experts' parameters, with ``g`` (M, D)."""
    d, h = g.shape[1], hidden
    shapes = (local, h, d), (local, h, d), (local, d, h), (local, h), (local, h), (local, d)
    dtypes = [dtype] * 3 + [torch.float32] * 3
    return returned([g.new_empty(shape, dtype=dt) for shape, dt in zip(shapes, dtypes, strict=True)], needs, totals)


def kept_operands(saved: Owned, gemms: MXConfig) -> Owned:
    """w1, w3 and w2 of ``plan.dgrad.b``, taken out of what was saved; none where they are not kept."""
    if not gemms.keeps_weight:
        return []
    return [Operand(*take_many(saved, 2), gemms.plan.dgrad.b, 1) for _ in range(3)]


def _saved_tokens(saved: Owned, gemms: MXConfig) -> Tokens:
    if gemms.keeps_input:
        return Tokens(None, Operand(take(saved).bfloat16().contiguous(), None, gemms.plan.wgrad.b, 0))
    data, scale = (*take_many(saved), None)[:2]
    if gemms.keeps_rows:
        return Tokens(Operand(data, scale, gemms.plan.forward.a, 1))
    return Tokens(None, Operand(data, scale, gemms.plan.wgrad.b, 0))


# As ``ops/library.py`` has it for single GEMMs.
@register_flop_formula(torch.ops.titan_mxfp8.experts_forward)
def _(x_shape, weight_shapes, *args, **kwargs) -> int:
    return 3 * 2 * x_shape[0] * math.prod(weight_shapes[0][1:])


@register_flop_formula(torch.ops.titan_mxfp8.experts_backward)
def _(g_shape, saved_shapes, weight_shapes, b2_shape, offs_shape, needs, *args, **kwargs) -> int:
    return (3 + sum(needs[:3])) * 2 * math.prod(g_shape) * saved_shapes[0][1]
