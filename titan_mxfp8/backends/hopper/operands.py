"""What the GEMMs multiply on SM90, whose tensor cores know FP8 but no scales.

| recipe                          | forward, dgrad                                  | wgrad          |
|---------------------------------|-------------------------------------------------|----------------|
| exact                           | ``bf16``: the dequantised values                | ``bf16``       |
| exact, 32x32 weights, on an H20 | ``mx``: FP8, sums scaled per 32 elements        | ``bf16``       |
| rebased                         | FP8, sums scaled per 128: ``1x128``, ``32x128`` | FP8: ``1x128`` |

``bf16`` goes to the GEMMs of ``backends.triton``. On an H200 it is faster than exact FP8, which spends more power and
instructions on adding sums than it saves on multiplying (``results/2026-11-21_h200_hopper``). By their data sheets an
H20 multiplies a quarter as fast per multiprocessor and adds as fast as an H200: there adding hides behind multiplying,
and FP8 takes half of the time of bf16. That is reckoned, it has never run on an H20.
"""

import re
from functools import cache
from typing import Literal

import torch

from titan_mxfp8.backends import triton
from titan_mxfp8.backends.hopper.quantize import quantize_rebased
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import REBASED, Block, Form, MXTensor, Rounding


def operand_forms(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebased: bool, device: torch.device
) -> tuple[Form, Form]:
    """``format.reference.operand_forms``: the table above."""
    if rebased:
        return reference.operand_forms(gemm, weight_block, rebased, device)
    if gemm == "m_grouped" and weight_block == "32x32" and _is_h20(device):
        return "mx", "mx"
    return "bf16", "bf16"


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
    if form not in REBASED:
        return triton.quantize_operand(x, axis, form=form, **kwargs)
    along_last = axis == x.ndim - 1
    forms = (form, None) if along_last else (None, form)
    operands = quantize_rebased(x, forms=forms, changed=changed, **kwargs)
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
    if forms[0] in REBASED and forms[1] in REBASED:
        return quantize_rebased(x, forms=forms, offs=offs, changed=changed, **kwargs)
    if forms == ("mx", "bf16"):  # nothing makes both in one read
        last = triton.quantize_operand(x, x.ndim - 1, offs=None, form="mx", **kwargs)
        return last, triton.quantize_operand(x, x.ndim - 2, offs=offs, form="bf16", **kwargs)
    return triton.quantize_operand_both(x, offs=offs, forms=forms, **kwargs)


@cache
def _is_h20(device: torch.device) -> bool:
    return re.search(r"\bH20\b", torch.cuda.get_device_name(device)) is not None
