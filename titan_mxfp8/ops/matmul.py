"""The three GEMMs of a layer as functions of their operands, and the autograd function over them.

Per expert e, rows of group e only; a linear is one expert with every row. M tokens, N out features, K in features, E
experts.

| GEMM    | computes                      | contracts  | operands, quantised along it                    |
|---------|-------------------------------|------------|-------------------------------------------------|
| forward | y_MN = x_MK @ w_ENK^T         | K          | x along K (1x32), w along K (recipe)            |
| dgrad   | dx_MK = dy_MN @ w_ENK         | N          | dy along N (1x32), w along N (recipe)           |
| wgrad   | dw_ENK = dy_MN^T @ x_MK       | M, ragged  | dy and x along M, blocks restart at each group  |

Every operand is quantised from the high-precision tensor, but for x along M where it comes as an ``MXTensor`` or with
``requantize_input``: then it is quantised again from FP8 rows (``format.reference.requantize``). The backend's plan
(``backends.Plan``) says how each lies in memory; x and dy are quantised along both axes in one read where the backend
has a kernel for the pair.
"""

from functools import cache
from typing import NamedTuple

import torch

from titan_mxfp8 import backends
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.format.spec import UNQUANTIZED, OperandSpec
from titan_mxfp8.ops import library
from titan_mxfp8.recipe import Recipe

_UNQUANTIZED = UNQUANTIZED.key
_ARRIVED = OperandSpec().key  # of activations that come quantised


class Specs(NamedTuple):
    """Keys of the operands' specs, by the GEMM that takes them (``backends.Plan``)."""

    x_forward: str
    w_forward: str
    dy_dgrad: str
    w_dgrad: str
    dy_wgrad: str
    x_wgrad: str


@cache
def _planned(recipe: str, backend: str, hardware: Hardware) -> Specs:
    plan = backends.plan_on(Recipe.of_key(recipe), backend, hardware)
    return Specs(*(spec.key for gemm in plan.gemms.values() for spec in (gemm.a, gemm.b)))


def specs_of(recipe: str, backend: str, device: torch.device) -> Specs:
    """What the chosen backend's GEMMs take.

    Args:
        recipe: ``Recipe.key``.

    Raises:
        ValueError: as ``backends.select``.
    """
    return _planned(recipe, backend, backends.hardware_of(device))


def quantize(x: torch.Tensor, axis: int, spec: str, offs: torch.Tensor | None, backend: str) -> list[torch.Tensor]:
    """``library.quantize``. What stays unquantised takes no operator, which may not return what it was given."""
    if spec == _UNQUANTIZED:
        return [x.bfloat16().contiguous()]
    return library.quantize(x, axis, spec, offs, backend)


def quantize_input(
    x_MK: torch.Tensor, offs: torch.Tensor | None, last: str, first: str, backend: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x or dy for its two GEMMs: along the features (``last``) and along the tokens (``first``)."""
    if first == _UNQUANTIZED:
        return quantize(x_MK, 1, last, _offs_of_rows(last, offs), backend), [x_MK]
    tensors = library.quantize_both(x_MK, last, first, offs, backend)
    split = _tensor_count(last)
    return tensors[:split], tensors[split:]


def forward(
    x: list[torch.Tensor],
    x_spec: str,
    w: list[torch.Tensor],
    w_spec: str,
    offs: torch.Tensor | None,
    bias_EN: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """y_MN, from x quantised along K and w along K."""
    return library.gemm_m_grouped(
        x[0], _scale(x), x_spec, w[0], _scale(w), w_spec, 2, offs, bias_EN, out_dtype, backend
    )


def dgrad(
    dy: list[torch.Tensor],
    dy_spec: str,
    w: list[torch.Tensor],
    w_spec: str,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """dx_MK, from dy quantised along N and w along N."""
    return library.gemm_m_grouped(
        dy[0], _scale(dy), dy_spec, w[0], _scale(w), w_spec, 1, offs, None, out_dtype, backend
    )


def wgrad(
    dy: list[torch.Tensor],
    dy_spec: str,
    x: list[torch.Tensor],
    x_spec: str,
    rows: int,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """dw_ENK, from dy and x quantised along M; unquantised operands are rounded to bf16, and so is their product."""
    if dy_spec == _UNQUANTIZED:
        dy, x = (quantize(operand[0], 0, _UNQUANTIZED, offs, backend) for operand in (dy, x))
    product = torch.bfloat16 if dy_spec == _UNQUANTIZED else out_dtype
    dw_ENK = library.gemm_k_grouped(dy[0], _scale(dy), dy_spec, x[0], _scale(x), x_spec, rows, offs, product, backend)
    return dw_ENK.to(out_dtype)


def mx_matmul(
    x: torch.Tensor | MXTensor,
    w_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    offs: torch.Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    backend: str,
    keep_quantized_weight: bool,
    requantize_input: bool = False,
) -> torch.Tensor:
    """The differentiable core of ``mxfp8_grouped_mm`` and ``mxfp8_linear``; ``offs=None``: one expert, every row."""
    keep = keep_quantized_weight and recipe.weight_block == "32x32"
    options = (w_ENK, bias_EN, offs, recipe.key, out_dtype, backend, keep, requantize_input)
    if isinstance(x, MXTensor):
        rows, scale = x.qdata.detach().contiguous(), x.scale.contiguous()
        return _multiply(x.source, rows, scale, x.orig_dtype, *options)
    return _multiply(x, None, None, x.dtype, *options)


@torch.compiler.allow_in_graph
def _multiply(
    x: torch.Tensor | None,
    rows: torch.Tensor | None,
    scale: torch.Tensor | None,
    x_dtype: torch.dtype,
    w_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    offs: torch.Tensor | None,
    recipe: str,
    out_dtype: torch.dtype,
    backend: str,
    keep_w: bool,
    requantize: bool,
) -> torch.Tensor:
    """``_Matmul``, which ``torch.compile`` traces for its graph, but without guards for the functions and types in it:
    they do not change. Else a compiled region with linears would look at a hundred more things before each call, in
    forward, where the GPU waits for the host."""
    specs = specs_of(recipe, backend, w_ENK.device)
    options = specs, out_dtype, backend, keep_w, requantize, torch.is_grad_enabled()
    return _Matmul.apply(x, rows, scale, x_dtype, w_ENK, bias_EN, offs, *options)


class _Matmul(torch.autograd.Function):
    """``x``: the activations; or, of those that come as FP8 ``rows`` with their ``scale``, what gets their gradient.

    Saves for backward: x as wgrad wants it, quantised along M (one byte per element; two where the backend multiplies
    the values in bf16) or high-precision, or as FP8 rows, which backward requantises; and for dgrad the FP8 weight of
    32x32 blocks, quantised once, or else the weight itself, which FSDP may free and gather again. ``grad_enabled``:
    ``needs_input_grad`` does not know of ``no_grad``."""

    @staticmethod
    def forward(
        ctx, x, rows, scale, x_dtype, w_ENK, bias_EN, offs, specs, out_dtype, backend, keep_w, requantize, grad_enabled
    ):  # fmt: skip
        needs_dx, needs_dw = (grad_enabled and ctx.needs_input_grad[i] for i in (0, 4))
        x_saved, rows_spec = [], None
        if rows is not None:
            x_saved = x_forward = [rows, scale]
            rows_spec = _ARRIVED
            if not _is_exact(specs.x_forward):
                offs_of_rows = _offs_of_rows(specs.x_forward, offs)
                x_forward = library.requantize(rows, scale, rows_spec, 1, specs.x_forward, offs_of_rows, backend)
        elif needs_dw and not (requantize and _tensor_count(specs.x_forward) == 2):
            x_forward, x_saved = quantize_input(x, offs, specs.x_forward, specs.x_wgrad, backend)
        else:
            offs_of_rows = _offs_of_rows(specs.x_forward, offs)
            x_saved = x_forward = quantize(x, 1, specs.x_forward, offs_of_rows, backend)
            rows_spec = specs.x_forward
        w_saved = [w_ENK]
        # Values in bf16, two bytes per weight of every layer, would cost more than a second pass.
        keeps_w = needs_dx and keep_w and _tensor_count(specs.w_dgrad) == 2
        if keeps_w:
            both = library.quantize_both(w_ENK, specs.w_forward, specs.w_dgrad, None, backend)
            w_forward, w_saved = both[:2], both[2:]
        else:
            w_forward = quantize(w_ENK, 2, specs.w_forward, None, backend)
        saved_x = [*x_saved, None, None][:2] if needs_dw else [None, None]
        saved_w = [*w_saved, None][:2] if needs_dx else [None, None]
        ctx.save_for_backward(*saved_x, *saved_w, offs)
        ctx.specs, ctx.backend, ctx.keeps_w, ctx.rows_spec = specs, backend, keeps_w, rows_spec
        ctx.x_dtype, ctx.w_dtype = x_dtype, w_ENK.dtype
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype
        return forward(x_forward, specs.x_forward, w_forward, specs.w_forward, offs, bias_EN, out_dtype, backend)

    @staticmethod
    def backward(ctx, dy_MN):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # which refuses create_graph itself
            return _Matmul.gradients(ctx, dy_MN)
        with torch.no_grad():
            gradients = _Matmul.gradients(ctx, dy_MN)
        return tuple(g if g is None else Once.apply(g.requires_grad_()) for g in gradients)

    @staticmethod
    def gradients(ctx, dy_MN):
        x, x_scale, w, w_scale, offs = ctx.saved_tensors
        release_saved_tensors(ctx)
        specs, backend = ctx.specs, ctx.backend
        needs_dx, needs_dw, needs_dbias = (ctx.needs_input_grad[i] for i in (0, 4, 5))
        dx_MK = dw_ENK = dbias_EN = None
        if needs_dx and needs_dw:
            dy_dgrad, dy_wgrad = quantize_input(dy_MN, offs, specs.dy_dgrad, specs.dy_wgrad, backend)
        elif needs_dx:
            dy_dgrad = quantize(dy_MN, 1, specs.dy_dgrad, _offs_of_rows(specs.dy_dgrad, offs), backend)
        elif needs_dw:
            dy_wgrad = quantize(dy_MN, 0, specs.dy_wgrad, offs, backend)
        if needs_dx:
            w_dgrad = [w, w_scale] if ctx.keeps_w else quantize(w, 1, specs.w_dgrad, None, backend)
            dx_MK = dgrad(dy_dgrad, specs.dy_dgrad, w_dgrad, specs.w_dgrad, offs, ctx.x_dtype, backend)
            del dy_dgrad, w_dgrad, w, w_scale
        if needs_dw:
            x_wgrad = [x] if x_scale is None else [x, x_scale]
            if ctx.rows_spec:
                x_wgrad = library.requantize(x, x_scale, ctx.rows_spec, 0, specs.x_wgrad, offs, backend)
            rows = dy_MN.shape[0]
            dw_ENK = wgrad(dy_wgrad, specs.dy_wgrad, x_wgrad, specs.x_wgrad, rows, offs, ctx.w_dtype, backend)
        if needs_dbias:
            dbias_EN = _bias_grad(dy_MN, offs).to(ctx.bias_dtype)
        return dx_MK, None, None, None, dw_ENK, dbias_EN, *[None] * 7


def release_saved_tensors(ctx: torch.autograd.function.FunctionCtx) -> None:
    """Leaves what ``ctx.saved_tensors`` has just given to the caller alone, to free it within backward, unless the
    graph is kept for another backward. What autograd itself does when backward has returned, and torch.compile here."""
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()


class Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again. ``once_differentiable`` of torch looks at the output gradient
    alone: of ``y.sum()`` that needs none, and what the second derivative lacks would be left out without a word."""

    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "MXFP8 GEMMs cannot be differentiated twice: compute what needs a second derivative, such as a gradient "
            "penalty, with layers that are not converted"
        )


def _bias_grad(dy_MN: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Sum of the output gradient over the rows of each group, (E, N) in fp32."""
    if offs is None:
        return dy_MN.sum(0, keepdim=True, dtype=torch.float32)
    experts = offs.shape[0]
    row_M = torch.arange(dy_MN.shape[0], device=offs.device)
    expert_M = torch.searchsorted(offs, row_M, right=True)  # rows past the last group: E, summed apart and dropped
    sums = dy_MN.new_zeros((experts + 1, dy_MN.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, expert_M, dy_MN.float())[:experts]


def _tensor_count(spec: str) -> int:
    """How many tensors an operand of this spec is."""
    return 1 if " bf16 " in spec else 2


def _offs_of_rows(spec: str, offs: torch.Tensor | None) -> torch.Tensor | None:
    """What a quantiser along the features takes: the offsets where it places scales by groups of rows."""
    return offs if spec.endswith(" swizzled") else None


def _is_exact(spec: str) -> bool:
    """Whether an operand of this spec is exact FP8 in 1x32 blocks: however scales are rounded, ``_ARRIVED`` is one."""
    return spec.split()[2:] == _ARRIVED.split()[2:]


def _scale(operand: list[torch.Tensor]) -> torch.Tensor | None:
    return operand[1] if len(operand) == 2 else None
