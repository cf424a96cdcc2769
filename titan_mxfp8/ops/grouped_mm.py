"""``mxfp8_grouped_mm``: the three GEMMs of a layer of experts.

Per expert e, rows of group e only. M tokens, N out features, K in features, E experts.

| GEMM    | computes                      | contracts  | operands, quantised along it                    |
|---------|-------------------------------|------------|-------------------------------------------------|
| forward | y_MN = x_MK @ w_ENK^T         | K          | x along K (1x32), w along K (recipe)            |
| dgrad   | dx_MK = dy_MN @ w_ENK         | N          | dy along N (1x32), w along N (recipe)           |
| wgrad   | dw_ENK = dy_MN^T @ x_MK       | M, ragged  | dy and x along M, blocks restart at each group  |

Every operand is quantised from the high-precision tensor. The backend says in which form each GEMM takes its operands
(``format.mx.Form``); x and dy are quantised along both axes in one read where both come in the same one.
"""

import torch

from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.ops import library
from titan_mxfp8.ops.checks import check_axis, check_dtype, check_features, check_offs_type
from titan_mxfp8.ops.rebase_counter import Kind, RebaseCounter
from titan_mxfp8.recipe import Recipe, get_recipe


def mxfp8_grouped_mm(
    a: torch.Tensor | MXTensor,
    b_t: torch.Tensor,
    offs: torch.Tensor,
    *,
    recipe: str | Recipe = "mxfp8",
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    rebase: bool | RebaseCounter = False,
    keep_quantized_weight: bool = True,
) -> torch.Tensor:
    """``torch._grouped_mm`` of 2-D ``a`` and 3-D ``b_t`` with MXFP8 GEMMs; differentiable.

    Args:
        a: (M, K) activations, bf16 or fp32. Or an ``MXTensor`` quantised along K (1x32, E4M3), with a recipe whose
            wgrad is bf16; no gradient flows to it.
        b_t: (E, K, N) weights, bf16 or fp32, usually ``w_ENK.transpose(-2, -1)``. K and N are multiples of 32.
        offs: int32 (E,) end offsets of the groups among the M rows: non-decreasing, any sizes, on the device of ``a``.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        bias: (N,), or (E, N) for one per expert; added in fp32 before the output is rounded.
        out_dtype: ``torch.bfloat16`` or ``torch.float32``.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: lets the GEMMs scale once per 128 elements, much faster on Hopper, at the price of an inexact step: see
            ``format.reference.rebase``. A ``RebaseCounter`` counts what it changes. Backends ``hopper`` and
            ``reference``, with the same bits; ``a`` must not be an ``MXTensor``.
        keep_quantized_weight: a weight of 32x32 blocks that the GEMMs take in FP8 is quantised once, and the bytes for
            dgrad are kept until backward. False: ``b_t`` is quantised again in backward. For weights that are freed
            after forward, as FSDP's: one byte per element of every layer would be alive at once.

    Returns:
        (M, N) in ``out_dtype``. Rows at and past ``offs[-1]`` are zero, here and in the gradient of ``a``; what ``a``
        holds there is never used. The weight gradient of an expert without rows is exactly zero.

    Raises:
        ValueError: anything not as described above.
    """
    recipe = get_recipe(recipe)
    if b_t.ndim != 3 or len(a.shape) != 2 or offs is None:
        raise ValueError(
            "takes a of shape (M, K), b_t of shape (E, K, N) and offs of shape (E,), got "
            f"{tuple(a.shape)}, {tuple(b_t.shape)} and {None if offs is None else tuple(offs.shape)}"
        )
    experts, k, n = b_t.shape
    if a.shape[1] != k:
        raise ValueError(f"a of shape {tuple(a.shape)} and b_t of shape {tuple(b_t.shape)} disagree about K")
    check_offs_type(offs, experts)
    _check_operands(a, b_t, bias, out_dtype, recipe)
    if bias is not None:
        if tuple(bias.shape) not in ((n,), (experts, n)):
            raise ValueError(f"bias must be of shape ({n},) or ({experts}, {n}), got {tuple(bias.shape)}")
        bias = bias.expand(experts, n)
    return mx_matmul(a, b_t.mT, bias, offs, recipe, out_dtype, backend, rebase, keep_quantized_weight)


def mx_matmul(
    x: torch.Tensor | MXTensor,
    w_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    offs: torch.Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    backend: str,
    rebase: bool | RebaseCounter,
    keep_quantized_weight: bool,
) -> torch.Tensor:
    """The differentiable core of ``mxfp8_grouped_mm`` and ``mxfp8_linear``; ``offs=None``: one expert, every row."""
    keep = keep_quantized_weight, torch.is_grad_enabled()
    options = (w_ENK, bias_EN, offs, recipe, out_dtype, backend, rebase, *keep)
    if isinstance(x, MXTensor):
        if recipe.wgrad != "bf16":
            raise ValueError(
                f"recipe {recipe.name!r} quantises activations along the tokens too, which an MXTensor has lost: pass "
                "a high-precision tensor, or use a recipe with a bf16 weight gradient ('mxfp8_wgrad_bf16')"
            )
        check_axis("a", x, 1)
        if x.block != "1x32" or x.qdata.dtype != torch.float8_e4m3fn:
            raise ValueError(f"a must be float8_e4m3fn in 1x32 blocks, got {x.qdata.dtype} in {x.block} blocks")
        if rebase:
            raise ValueError("rebase takes high-precision activations, got an MXTensor: pass those, or no rebase")
        return _MXMatmul.apply(x.qdata.detach(), x.scale, x.orig_dtype, *options)
    return _MXMatmul.apply(x, None, x.dtype, *options)


class _MXMatmul(torch.autograd.Function):
    """Saves for backward: x as wgrad wants it, quantised along M (one byte per element; two where the backend
    multiplies the dequantised values) or high-precision, and for dgrad the FP8 weight of 32x32 blocks, quantised once,
    or else the weight itself, which FSDP may free and gather again. ``grad_enabled``: ``needs_input_grad`` does not
    know of ``no_grad``."""

    @staticmethod
    def forward(
        ctx, x_MK, x_scale, x_dtype, w_ENK, bias_EN, offs, recipe, out_dtype, backend, rebase, keep_w, grad_enabled
    ):
        needs_dx, needs_dw = (grad_enabled and ctx.needs_input_grad[i] for i in (0, 3))
        rebased = rebase is not False  # Dynamo of torch 2.11 knows no bool() of a RebaseCounter
        like = recipe.weight_block, rebased, x_MK.device, backend
        act_form, weight_form = library.operand_forms("m_grouped", *like)
        dy_form, x_form = library.operand_forms("k_grouped", *like)
        act = {"rounding": recipe.rounding, "elem_dtype": torch.float8_e4m3fn, "block": "1x32", "backend": backend}
        weight = act | {"block": recipe.weight_block}
        ctx.recipe, ctx.backend, ctx.rebase = recipe, backend, rebase
        ctx.act_form, ctx.weight_form, ctx.dy_form = act_form, weight_form, dy_form
        ctx.x_dtype, ctx.w_dtype = x_dtype, w_ENK.dtype
        ctx.bias_dtype = None if bias_EN is None else bias_EN.dtype

        saved_x = saved_x_scale = ctx.x_block = None
        if x_scale is not None:
            x_along_k, saved_x, saved_x_scale = MXTensor(x_MK, x_scale, 1, "1x32", x_dtype), x_MK, x_scale
        elif needs_dw and recipe.wgrad == "mxfp8":
            counted = _counted(rebase, "activations", x_MK, axes=2)
            x_along_k, x_along_m = library.quantize_operand_both(
                x_MK, offs=offs, forms=(act_form, x_form), **act, **counted
            )
            saved_x, saved_x_scale, ctx.x_block = x_along_m.qdata, x_along_m.scale, x_along_m.block
        else:
            counted = _counted(rebase, "activations", x_MK)
            x_along_k, saved_x = library.quantize_operand(x_MK, 1, offs=None, form=act_form, **act, **counted), x_MK

        saved_w, saved_w_scale, ctx.w_block = w_ENK, None, None
        if needs_dx and keep_w and recipe.weight_block == "32x32":
            counted = _counted(rebase, "weights", w_ENK, axes=2)
            w_along_k, w_along_n = library.quantize_operand_both(
                w_ENK, offs=None, forms=(weight_form, weight_form), **weight, **counted
            )
            if not w_along_n.is_dequantized:  # two bytes per weight of every layer would cost more than a second pass
                saved_w, saved_w_scale, ctx.w_block = w_along_n.qdata, w_along_n.scale, w_along_n.block
        else:
            counted = _counted(rebase, "weights", w_ENK)
            w_along_k = library.quantize_operand(w_ENK, 2, offs=None, form=weight_form, **weight, **counted)

        ctx.save_for_backward(
            saved_x if needs_dw else None,
            saved_x_scale if needs_dw else None,
            saved_w if needs_dx else None,
            saved_w_scale,
            offs,
        )
        return library.gemm_m_grouped(x_along_k, w_along_k.mT, offs, bias=bias_EN, out_dtype=out_dtype, backend=backend)

    @staticmethod
    def backward(ctx, dy_MN):
        x, x_scale, w, w_scale, offs = ctx.saved_tensors
        recipe, backend, act_form, dy_form = ctx.recipe, ctx.backend, ctx.act_form, ctx.dy_form
        needs_dx, needs_dw, needs_dbias = (ctx.needs_input_grad[i] for i in (0, 3, 4))
        grad = {"rounding": recipe.rounding, "elem_dtype": recipe.grad_dtype, "block": "1x32", "backend": backend}
        mx_wgrad = needs_dw and recipe.wgrad == "mxfp8"

        dy_along_n = dy_along_m = dx_MK = dw_ENK = dbias_EN = None
        counted = _counted(ctx.rebase, "gradients", dy_MN, axes=needs_dx + mx_wgrad)
        if needs_dx and mx_wgrad:
            dy_along_n, dy_along_m = library.quantize_operand_both(
                dy_MN, offs=offs, forms=(act_form, dy_form), **grad, **counted
            )
        elif needs_dx:
            dy_along_n = library.quantize_operand(dy_MN, 1, offs=None, form=act_form, **grad, **counted)
        elif mx_wgrad:
            dy_along_m = library.quantize_operand(dy_MN, 0, offs=offs, form=dy_form, **grad, **counted)

        if needs_dx:
            if w_scale is None:
                weight = grad | {"elem_dtype": torch.float8_e4m3fn, "block": recipe.weight_block}
                counted = _counted(ctx.rebase, "weights", w)
                w_along_n = library.quantize_operand(w, 1, offs=None, form=ctx.weight_form, **weight, **counted)
            else:
                w_along_n = MXTensor(w, w_scale, 1, ctx.w_block, ctx.w_dtype)
            dx_MK = library.gemm_m_grouped(
                dy_along_n, w_along_n, offs, bias=None, out_dtype=ctx.x_dtype, backend=backend
            )
        if mx_wgrad:
            x_along_m = MXTensor(x, x_scale, 0, ctx.x_block, ctx.x_dtype)
            dw_ENK = library.gemm_k_grouped(dy_along_m.mT, x_along_m, offs, out_dtype=ctx.w_dtype, backend=backend)
        elif needs_dw:
            x_MK = x if x_scale is None else MXTensor(x, x_scale, 1, "1x32", torch.bfloat16).dequantize()
            dw_ENK = library.wgrad_bf16(dy_MN, x_MK, offs, backend=backend).to(ctx.w_dtype)
        if needs_dbias:
            dbias_EN = _bias_grad(dy_MN, offs).to(ctx.bias_dtype)
        return dx_MK, None, None, dw_ENK, dbias_EN, *[None] * 7


def _counted(rebase: bool | RebaseCounter, kind: Kind, x: torch.Tensor, axes: int = 1) -> dict[str, torch.Tensor]:
    """What a quantiser takes besides if ``rebase`` counts."""
    return {"changed": rebase.add_seen(kind, x, axes)} if isinstance(rebase, RebaseCounter) else {}


def _bias_grad(dy_MN: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Sum of the output gradient over the rows of each group, (E, N) in fp32."""
    if offs is None:
        return dy_MN.sum(0, keepdim=True, dtype=torch.float32)
    experts = offs.shape[0]
    row_M = torch.arange(dy_MN.shape[0], device=offs.device)
    expert_M = torch.searchsorted(offs, row_M, right=True)  # rows past the last group: E, summed apart and dropped
    sums = dy_MN.new_zeros((experts + 1, dy_MN.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, expert_M, dy_MN.float())[:experts]


def _check_operands(
    a: torch.Tensor | MXTensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
) -> None:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float32, got {out_dtype}")
    if not isinstance(a, MXTensor):
        check_dtype("a", a)
    check_dtype("b_t", b)
    if bias is not None:
        check_dtype("bias", bias)
    check_features("K, the number of in features,", b.shape[-2])
    check_features("N, the number of out features,", b.shape[-1])
