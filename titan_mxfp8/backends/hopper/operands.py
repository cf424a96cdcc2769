"""What the GEMMs multiply on SM90, whose tensor cores know FP8 but no scales.

| recipe  | forward, dgrad, wgrad                                                   |
|---------|-------------------------------------------------------------------------|
| exact   | ``bf16``, the dequantised values, by the GEMMs of ``backends.triton``   |
| rebased | ``rebased``: FP8, whose sums are scaled per 128 elements                |

For 32x32 weights there is an exact FP8 GEMM too, whose sums are scaled per 32 elements (form ``mx``). It was measured
slower than ``bf16``: 698 and 614 TFLOP/s against 746 and 748 in the same run (``results/2026-11-21_h200_hopper``).
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
    return "rebased" if rebased else "bf16"


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
    return triton.quantize_operand_both(x, offs=offs, forms=forms, **kwargs)
