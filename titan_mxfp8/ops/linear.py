"""``mxfp8_linear``: a grouped GEMM with one group."""

import torch

from titan_mxfp8.ops.checks import check_devices, check_dtype, check_features
from titan_mxfp8.ops.matmul import mx_matmul
from titan_mxfp8.recipe import Recipe, get_recipe


def mxfp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    rebase: bool = False,
    keep_quantized_weight: bool = True,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with MXFP8 GEMMs in forward and backward.

    In an autocast region the inputs are cast to its dtype first, as ``F.linear`` does.

    Args:
        x: (..., K), bf16 or fp32.
        weight: (N, K), bf16 or fp32. K and N are multiples of 32.
        bias: (N,) or None.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: as for ``mxfp8_grouped_mm``, and so is ``keep_quantized_weight``.

    Returns:
        (..., N) in the dtype of ``x``.

    Raises:
        ValueError: anything not as described above.
    """
    recipe = get_recipe(recipe, rebase)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"takes x of shape (..., K) and weight of shape (N, K), got {tuple(x.shape)}, {tuple(weight.shape)}"
        )
    n, k = weight.shape
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"bias must be of shape ({n},), got {tuple(bias.shape)}")
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    check_dtype("x", x)
    check_dtype("weight", weight)
    check_features("K, the number of in features,", k)
    check_features("N, the number of out features,", n)
    check_devices(x=x, weight=weight, bias=bias)
    x_MK = x.reshape(-1, k)
    bias_EN = None if bias is None else bias.unsqueeze(0)
    y_MN = mx_matmul(x_MK, weight.unsqueeze(0), bias_EN, None, recipe, x.dtype, backend, keep_quantized_weight)
    return y_MN.view(*x.shape[:-1], n)
