"""The experts of a MoE layer on rows that are sorted by expert already: one operator forward, four backward.

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
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.accumulate import held_gradients, take_gradients
from titan_mxfp8.ops.autograd import (
    Owned,
    exported,
    is_exporting,
    once_differentiable,
    save_for_backward,
    split,
    take_many,
)
from titan_mxfp8.ops.checks import check_offs_values
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.experts import ExpertsConfig, HiddenGradients, Tokens, Weights
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


KEPT = 4, 2  # tensors of w1 and w3, and of w2, that were quantised for dgrad


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
        ctx.matrices, ctx.kept = len(weights), KEPT if kept_weight == "quantized" else (0, 0)
        return save_for_backward(ctx, y, offs, b2, *weights, *saved, *((x,) if keeps_input else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, g):
        offs, b2, *saved = saved
        weights, preactivations, kept, kept_w2, x = split(saved, ctx.matrices, 2, *ctx.kept)
        del saved
        needs, sizes = list(ctx.needs_input_grad[2:8]), [*preactivations[0].shape, g.shape[1]]
        held, counts = held_gradients(ctx, first=2, count=3), experts.count_tensors(ctx.config)
        rowwise, columnwise, h, biases, of_g = split(
            experts_hidden_gradients(g, offs, preactivations, kept_w2, weights, b2, needs, ctx.config),
            *counts.of_hidden(needs),
            sum(needs[3:]),
        )
        of_x_and_g = x, of_g if counts.quantizes_g else [g]
        wanted = sizes, needs, common_dtype(ctx.dtypes), held, ctx.config
        dweights = weight_gradients(offs, (columnwise or [*rowwise], h), of_x_and_g, None, *wanted)
        dx = experts_rows_gradient(offs, rowwise, kept, weights, sizes, ctx.config)
        none = [None] * (len(ctx.needs_input_grad) - 8)
        return dx, None, *gradients_of(dweights + biases, needs, ctx.dtypes), *none


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
    """y (M, D), and with ``save`` what backward takes: gate and up (M, H), the kept weights, and x as wgrad
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
def experts_hidden_gradients(
    g: torch.Tensor,
    offs: torch.Tensor,
    preactivations: list[torch.Tensor],
    quantized: list[torch.Tensor],
    weights: list[torch.Tensor],
    b2: torch.Tensor | None,
    needs: list[bool],
    config: str,
) -> list[torch.Tensor]:
    """``experts.hidden_tensors``; then g along M, if w2's gradient is wanted and made of what is quantised.

    Args:
        preactivations: gate and up. Emptied, as all lists of operators in backward that hold what forward or another
            of them has made: each tensor is freed after its use, if nothing else holds it. Compiled code does, until
            an operator returns, so backward is several of them.
        quantized: w2 as ``experts_forward`` has kept it, emptied; or none.
        weights: w1, w3, w2, as ``experts.weights_of`` takes them; none where they are kept quantised.
        needs: which gradients of w1, w3, w2, b1, b3 and b2 are wanted.
    """
    layer: ExpertsConfig = decode(config)
    kernels, plan = backends.load(layer.gemms.backend, g.device), layer.plan
    g, offs = aligned(g), aligned(offs)
    parameters = experts.weights_of(weights, [None, None, b2], plan)
    rows, columns = plan.dgrad.a, plan.wgrad.a
    of_columns = []
    if needs[2] and columns.is_quantized:
        of_rows, operand = kernels.quantize_both(g, rows, columns, offs)
        of_columns = operand.tensors()
    else:
        of_rows = kernels.quantize(g, 1, rows, offs if rows.grouped_scales else None)
    tokens = [Tokens(of_rows, None, g)]
    del of_rows
    w2, given = experts.kept_operands(quantized, layer.gemms), take_many(preactivations)
    made = experts.hidden_gradients(tokens, given, None, parameters, w2, needs, offs, layer, kernels)
    return [*experts.hidden_tensors(made, layer), *of_columns]


@torch.library.register_fake(experts_hidden_gradients.overload)
def _(g, offs, preactivations, quantized, weights, b2, needs, config):
    layer, local = decode(config), offs.shape[0]
    made, columns = empty_hidden(preactivations[0], local, needs, False, layer, g.shape[1]), layer.plan.wgrad.a
    return made + (columns.empty(g, 0, local).tensors() if needs[2] and columns.is_quantized else [])


def empty_hidden(
    gate: torch.Tensor, local: int, needs: list[bool], scored: bool, layer: ExpertsConfig, dim: int
) -> list[torch.Tensor]:
    """For fakes: ``experts.hidden_tensors`` of ``local`` experts, with ``gate`` (M, H)."""
    (rows, hidden), dgrad, wgrad = gate.shape, layer.plan.dgrad, layer.plan.wgrad
    rowwise = [dgrad.a.empty(gate, 1, local if dgrad.a.grouped_scales else None) for _ in range(2)]
    columnwise = [spec.empty(gate, 0, local) for spec in (wgrad.a, wgrad.a, *[wgrad.b] * needs[2])]
    dscores = gate.new_empty(rows, dtype=torch.float32) if scored else None
    shapes = zip((hidden, hidden, dim), needs[3:], strict=True)
    biases = [gate.new_empty((local, n), dtype=torch.float32) if needed else None for n, needed in shapes]
    return experts.hidden_tensors(HiddenGradients(rowwise, columnwise, dscores, biases), layer)


def weight_gradients(
    offs: torch.Tensor,
    columnwise: tuple[Owned, Owned],
    tokens: tuple[Owned, Owned],
    sources: torch.Tensor | None,
    sizes: list[int],
    needs: list[bool],
    dtype: torch.dtype,
    held: tuple[list[torch.Tensor], list[torch.Tensor]],
    config: str,
) -> list[torch.Tensor]:
    """The gradients of w1, w3 and w2 that ``needs`` names: that of w2 is made first, and frees most.

    Args:
        columnwise: tensors of the gradients of gate and up, and of the score times h.
        tokens: of x, and of g.
        sources, sizes, dtype: as of ``expert_weight_gradients``.
        held: ``accumulate.held_gradients``.
    """
    (_, h), (_, g), (params, totals), (of_w1, of_w3, of_w2) = columnwise, tokens, held, needs[:3]
    rest, made = (dtype, totals, config), []
    if of_w2:
        made = expert_weight_gradients(offs, h, g, sources, sizes, [False, False, True], *rest)
    if of_w1 or of_w3:
        given = columnwise[0], tokens[0], sources, sizes, [of_w1, of_w3, False]
        made = expert_weight_gradients(offs, *given, *rest) + made
    return take_gradients(params, totals) + made


@Operator
def expert_weight_gradients(
    offs: torch.Tensor,
    columnwise: list[torch.Tensor],
    tokens: list[torch.Tensor],
    sources: torch.Tensor | None,
    sizes: list[int],
    needs: list[bool],
    dtype: torch.dtype,
    totals: list[torch.Tensor],
    config: str,
) -> list[torch.Tensor]:
    """The gradient of w2, or those of w1 and w3 that ``needs`` names, in ``dtype``.

    Args:
        columnwise: tensors of the score times h, or of the gradients of gate and up, along M. Emptied.
        tokens, sources: of g, or of x, as ``ExpertsConfig.wgrad_tokens`` takes them; emptied.
        sizes: rows, H and D.
        totals: fp32, to which the gradients of w1, w3 and w2, all needed, are added: they are not returned then. Not
            in the schema, as compiled graphs have none.
    """
    layer: ExpertsConfig = decode(config)
    kernels, offs, wgrad = backends.load(layer.gemms.backend, offs.device), aligned(offs), layer.plan.wgrad
    given = [layer.wgrad_tokens(tokens, sources, needs[2])]
    operands = [experts.operand_of(columnwise, spec, 0) for spec in ((wgrad.b,) if needs[2] else (wgrad.a, wgrad.a))]
    made = experts.weight_gradients(operands, given, needs, dtype, totals, offs, layer, kernels)
    return [] if totals else made


@torch.library.register_fake(expert_weight_gradients.overload)
def _(offs, columnwise, tokens, sources, sizes, needs, dtype, totals, config):
    (_, h, d), local = sizes, offs.shape[0]
    shapes = zip(((h, d), (h, d), (d, h)), needs, strict=True)
    return [] if totals else [offs.new_empty((local, *shape), dtype=dtype) for shape, needed in shapes if needed]


@Operator
def experts_rows_gradient(
    offs: torch.Tensor,
    rowwise: list[torch.Tensor],
    quantized: list[torch.Tensor],
    weights: list[torch.Tensor],
    sizes: list[int],
    config: str,
) -> torch.Tensor:
    """The gradient of x (M, D) in bf16.

    Args:
        rowwise: of ``HiddenGradients``. Emptied.
        quantized: w1 and w3 as ``experts_forward`` has kept them, emptied; or none.
        weights: as of ``experts_hidden_gradients``.
        sizes: as of ``expert_weight_gradients``.
    """
    layer: ExpertsConfig = decode(config)
    kernels, offs = backends.load(layer.gemms.backend, offs.device), aligned(offs)
    dx = experts.rows_gradient(*to_rows_gradient(rowwise, quantized, weights, layer), offs, layer, kernels)
    dx = dx[0] if len(dx) == 1 else dx[0].add_(dx[1])
    row_M = torch.arange(dx.shape[0], device=offs.device)
    return dx.masked_fill_((row_M >= offs[-1])[:, None], 0)


@torch.library.register_fake(experts_rows_gradient.overload)
def _(offs, rowwise, quantized, weights, sizes, config):
    return offs.new_empty((sizes[0], sizes[2]), dtype=torch.bfloat16)


def to_rows_gradient(
    rowwise: Owned, quantized: Owned, weights: list[torch.Tensor], layer: ExpertsConfig
) -> tuple[Owned, Weights, Owned]:
    """What ``experts.rows_gradient`` takes, of an operator's arguments, taken."""
    operands = [experts.operand_of(rowwise, layer.plan.dgrad.a, 1) for _ in range(2)]
    parameters = experts.weights_of(weights, [None] * 3, layer.plan)
    return operands, parameters, experts.kept_operands(quantized, layer.gemms)


# As ``ops/library.py`` has it for single GEMMs.
@register_flop_formula(torch.ops.titan_mxfp8.experts_forward)
def _(x_shape, weight_shapes, *args, **kwargs) -> int:
    return 3 * 2 * x_shape[0] * math.prod(weight_shapes[0][1:])


@register_flop_formula(torch.ops.titan_mxfp8.experts_hidden_gradients)
def _(g_shape, offs_shape, preactivation_shapes, *args, **kwargs) -> int:
    return 2 * math.prod(g_shape) * preactivation_shapes[0][1]


@register_flop_formula(torch.ops.titan_mxfp8.expert_weight_gradients)
def _(offs_shape, columnwise_shapes, token_shapes, sources_shape, sizes, needs, *args, **kwargs) -> int:
    return sum(needs) * 2 * math.prod(sizes)


@register_flop_formula(torch.ops.titan_mxfp8.experts_rows_gradient)
def _(offs_shape, rowwise_shapes, quantized_shapes, weight_shapes, sizes, *args, **kwargs) -> int:
    return 2 * 2 * math.prod(sizes)
