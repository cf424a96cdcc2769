"""What the GEMMs multiply on SM90, whose tensor cores know FP8 but no scales.

| recipe                  | forward, dgrad                          | wgrad                 |
|-------------------------|-----------------------------------------|-----------------------|
| weights in 1x32 blocks  | ``bf16``, the dequantised values        | ``bf16``              |
| weights in 32x32 blocks | ``mx``: sums are scaled per 32 elements | ``bf16``              |
| rebased                 | ``rebased``: scaled per 128             | ``rebased``           |

Of 32x32 weights ``mx`` and ``bf16`` were measured equally fast, within the spread of runs
(``results/2026-11-21_h200_hopper``); ``mx`` moves fewer bytes and quantises a weight once for both GEMMs.
"""

from typing import Literal

import torch

from titan_mxfp8.backends import triton
from titan_mxfp8.backends.hopper.quantize import quantize_rebased
from titan_mxfp8.format.mx import Block, Form, MXTensor, Rounding


def operand_form(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebased: bool, device: torch.device
) -> Form:
    """``format.reference.operand_form``: the table above."""
    if rebased:
        return "rebased"
    return "mx" if gemm == "m_grouped" and weight_block == "32x32" else "bf16"


def quantize_operand(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    form: Form,
    changed: torch.Tensor | None = None,
) -> MXTensor:
    """``format.reference.quantize_operand``; ``axis`` is one of the last two."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    if form != "rebased":
        return triton.quantize_operand(x, axis, form=form, **kwargs)
    along_last = axis == x.ndim - 1
    operands = quantize_rebased(x, last=along_last, first=not along_last, changed=changed, **kwargs)
    return operands[0 if along_last else 1]


def quantize_operand_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    forms: tuple[Form, Form],
    changed: torch.Tensor | None = None,
) -> tuple[MXTensor, MXTensor]:
    """``format.reference.quantize_operand_both``."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block}
    if forms == ("rebased", "rebased"):
        return quantize_rebased(x, last=True, first=True, offs=offs, changed=changed, **kwargs)
    if forms[0] == forms[1]:
        return triton.quantize_operand_both(x, offs=offs, forms=forms, **kwargs)
    last = triton.quantize_operand(x, x.ndim - 1, offs=None, form=forms[0], **kwargs)
    return last, triton.quantize_operand(x, x.ndim - 2, offs=offs, form=forms[1], **kwargs)
