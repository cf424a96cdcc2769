"""``mxfp8_linear``: a grouped GEMM with one group."""

from dataclasses import replace

import torch

from titan_mxfp8.format.mx import BLOCK_SIZE, MXTensor
from titan_mxfp8.ops.checks import check_activations, check_devices, check_dtypes, check_features, check_flags, plain
from titan_mxfp8.ops.config import MXConfig, config_of
from titan_mxfp8.ops.matmul import mx_matmul
from titan_mxfp8.recipe import Recipe, get_recipe


def mxfp8_linear(
    x: torch.Tensor | MXTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    rebase: bool = False,
    keep_quantized_weight: bool = True,
    requantize_input: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with MXFP8 GEMMs in forward and backward.

    In an autocast region the inputs are cast to its dtype first, as ``F.linear`` does.

    Args:
        x: (..., K), bf16 or fp32. Or an ``MXTensor``, as for ``mxfp8_grouped_mm``.
        weight: (N, K), bf16 or fp32. K and N are multiples of 32.
        bias: (N,) or None.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: as for ``mxfp8_grouped_mm``, and so are ``keep_quantized_weight`` and ``requantize_input``.

    Returns:
        (..., N) in the dtype of ``x``, of an ``MXTensor`` in its ``orig_dtype``.

    Raises:
        ValueError: an unknown recipe or backend, or one that cannot run here; another dtype, shape or device of a
            tensor; K or N that is no multiple of 32; an ``MXTensor`` of other blocks or along another axis; an
            autocast region of float16.
    """
    (weight,) = plain("mxfp8_linear", weight=weight)
    check_flags(keep_quantized_weight=keep_quantized_weight, requantize_input=requantize_input)
    key = get_recipe(recipe, rebase).key
    config = config_of(key, f"{backend}", weight.device, keep_quantized_weight, requantize_input)
    return linear(x, weight, bias, config)


def linear(
    x: torch.Tensor | MXTensor, weight: torch.Tensor, bias: torch.Tensor | None, config: MXConfig
) -> torch.Tensor:
    """``mxfp8_linear`` with a ``config``."""
    x, weight, bias = plain("mxfp8_linear", x=x, weight=weight, bias=bias)
    if weight.ndim != 2 or len(x.shape) < 1 or x.shape[-1] != weight.shape[1]:
        is_transposed = weight.ndim == 2 and weight.shape[:1] == x.shape[-1:]
        raise ValueError(
            f"mxfp8_linear takes x of shape (..., K) and weight of shape (N, K), got {tuple(x.shape)}, "
            f"{tuple(weight.shape)}" + ": pass weight.mT" * is_transposed
        )
    n, k = weight.shape
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"bias must be of shape ({n},), got {tuple(bias.shape)}")
    out_dtype = x.orig_dtype if isinstance(x, MXTensor) else x.dtype
    if weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type):
        out_dtype = torch.get_autocast_dtype(weight.device.type)
        if out_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"this autocast region is of {out_dtype}: MXFP8 takes those of torch.bfloat16")
        weight, bias = weight.to(out_dtype), None if bias is None else bias.to(out_dtype)
        x = x if isinstance(x, MXTensor) else x.to(out_dtype)
    check_activations("x", x)
    check_dtypes(weight=weight, bias=bias)
    check_features({"K, the number of in features,": k, "N, the number of out features,": n})
    check_devices(x=x, weight=weight, bias=bias)
    x_MK = _flat(x, k) if isinstance(x, MXTensor) else x.reshape(-1, k)
    bias_EN = None if bias is None else bias.unsqueeze(0)
    y_MN = mx_matmul(x_MK, weight.unsqueeze(0), bias_EN, None, out_dtype, config)
    # no view where none is needed: FSDP cannot free one that an operation behind the linear has changed in place
    return y_MN if len(x.shape) == 2 else y_MN.view(*x.shape[:-1], n)


def _flat(x: MXTensor, k: int) -> MXTensor:
    """(..., K) as (M, K)."""
    source = None if x.source is None else x.source.reshape(-1, k)
    rows, scale = x.qdata.reshape(-1, k), x.scale.reshape(-1, k // BLOCK_SIZE)
    return replace(x, qdata=rows, scale=scale, axis=1, source=source)
