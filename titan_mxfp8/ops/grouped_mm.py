"""``mxfp8_grouped_mm``: a layer of experts as three grouped GEMMs (``matmul``)."""

import torch
from torch import Tensor

from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.ops.checks import (
    check_activations,
    check_devices,
    check_dtypes,
    check_features,
    check_flags,
    check_offs_type,
    plain,
)
from titan_mxfp8.ops.config import MXConfig, config_of
from titan_mxfp8.ops.matmul import mx_matmul
from titan_mxfp8.recipe import Recipe, get_recipe


def mxfp8_grouped_mm(
    a: Tensor | MXTensor,
    b_t: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    rebase: bool = False,
    keep_quantized_weight: bool = True,
    requantize_input: bool = False,
) -> Tensor:
    """``torch._grouped_mm`` of 2-D ``a`` and 3-D ``b_t`` with MXFP8 GEMMs; differentiable.

    Args:
        a: (M, K) activations, bf16 or fp32. Or an ``MXTensor`` quantised along K (1x32, E4M3), say one that several
            layers multiply or that comes from an all-to-all: its gradient flows to ``MXTensor.source``, and the weight
            gradient multiplies its values, quantised again along M as the recipe says.
        b_t: (E, K, N) weights, bf16 or fp32, usually ``w_ENK.transpose(-2, -1)``. K and N are multiples of 32.
        offs: int32 (E,) end offsets of the groups among the M rows: non-decreasing, any sizes, on the device of ``a``.
        bias: (N,), or (E, N) for one per expert; added in fp32 before the output is rounded.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        out_dtype: ``torch.bfloat16`` or ``torch.float32``.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: takes the recipe's rebased form (``Recipe.rebased``): the GEMMs scale once per 128 elements, much
            faster on Hopper, at the price of an inexact step (``format.reference.rebase``). Backends ``hopper`` and
            ``reference``, with the same bits.
        keep_quantized_weight: a weight of 32x32 blocks that the GEMMs take in FP8 is quantised once, and the bytes for
            dgrad are kept until backward. False: ``b_t`` is quantised again in backward. For weights that are freed
            after forward, as FSDP's: one byte per element of every layer would be alive at once.
        requantize_input: ``a`` is kept for backward as the FP8 rows that forward multiplies, 1.03 bytes per element,
            and requantised along M there (``format.reference.requantize``). False: quantised along M from ``a`` itself,
            or ``a`` itself (``wgrad_bf16``); two bytes per element on most hardware. Where forward multiplies values in
            bf16 (``backends.Plan``) it is always so.

    Returns:
        (M, N) in ``out_dtype``. Rows at and past ``offs[-1]`` are zero, here and in the gradient of ``a``; what ``a``
        holds there is never used. The weight gradient of an expert without rows is exactly zero.

    Raises:
        ValueError: an unknown recipe or backend, or one that cannot run here; another dtype, shape or device of a
            tensor; K or N that is no multiple of 32; an ``MXTensor`` of other blocks or along another axis; on a CPU,
            ``offs`` that is negative, decreasing or past M.
    """
    (b_t,) = plain("mxfp8_grouped_mm", b_t=b_t)
    check_flags(keep_quantized_weight=keep_quantized_weight, requantize_input=requantize_input)
    key = get_recipe(recipe, rebase).key
    config = config_of(key, f"{backend}", b_t.device, keep_quantized_weight, requantize_input)
    return grouped_mm(a, b_t, offs, bias, out_dtype, config)


def grouped_mm(
    a: Tensor | MXTensor, b_t: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype, config: MXConfig
) -> Tensor:
    """``mxfp8_grouped_mm`` with a ``config``."""
    a, b_t, bias = plain("mxfp8_grouped_mm", a=a, b_t=b_t, bias=bias)
    if b_t.ndim != 3 or len(a.shape) != 2 or not isinstance(offs, Tensor):
        given = tuple(offs.shape) if isinstance(offs, Tensor) else repr(offs)
        raise ValueError(
            "mxfp8_grouped_mm takes a of shape (M, K), b_t of shape (E, K, N) and offs, an int32 tensor of shape (E,), "
            f"got {tuple(a.shape)}, {tuple(b_t.shape)} and {given}"
        )
    experts, k, n = b_t.shape
    if a.shape[1] != k:
        raise ValueError(
            f"mxfp8_grouped_mm: a of shape {tuple(a.shape)} and b_t of shape {tuple(b_t.shape)} disagree about K"
            + ": pass b_t.mT" * (a.shape[1] == n)
        )
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype must be torch.bfloat16 or torch.float32, got {out_dtype}")
    check_offs_type(offs, experts)
    check_activations("a", a)
    check_dtypes(b_t=b_t, bias=bias)
    check_features({"K, the number of in features,": k, "N, the number of out features,": n})
    check_devices(a=a, b_t=b_t, offs=offs, bias=bias)
    if bias is not None:
        if tuple(bias.shape) not in ((n,), (experts, n)):
            raise ValueError(f"bias must be of shape ({n},) or ({experts}, {n}), got {tuple(bias.shape)}")
        bias = bias.expand(experts, n)
    return mx_matmul(a, b_t.mT, bias, offs, out_dtype, config)
