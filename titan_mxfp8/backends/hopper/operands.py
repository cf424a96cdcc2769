"""What the GEMMs multiply on SM90, whose tensor cores know FP8 but no scales.

| recipe               | forward, dgrad                                                              | wgrad          |
|----------------------|-----------------------------------------------------------------------------|----------------|
| exact, 1x32 weights  | ``bf16``: the dequantised values                                            | ``bf16``       |
| exact, 32x32 weights | ``even``: FP8, sums scaled per 64 or 128 where scales can be equal, else 32 | ``bf16``       |
| rebased              | FP8, sums scaled per 128: ``1x128``, ``32x128``                             | FP8: ``1x128`` |

``bf16`` goes to the GEMMs of ``backends.triton``. With 1x32 blocks on both sides, sums of 32 would need two FP32
instructions each, and scales could be equal in far fewer places.
"""

from typing import Literal

import torch

from titan_mxfp8.backends import triton
from titan_mxfp8.backends.hopper.quantize import quantize_rebased
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import REBASED, Block, Form, MXTensor, Rounding

_OWN_FORMS: tuple[Form, ...] = (*REBASED, "even")  # quantize_rebased makes these, the Triton backend the others


def operand_forms(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebased: bool, device: torch.device
) -> tuple[Form, Form]:
    """``format.reference.operand_forms``: the table above."""
    if rebased:
        return reference.operand_forms(gemm, weight_block, rebased, device)
    if gemm == "m_grouped" and weight_block == "32x32":
        return "even", "even"
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
    if form not in _OWN_FORMS:
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
    if forms[0] in _OWN_FORMS and forms[1] in _OWN_FORMS:
        return quantize_rebased(x, forms=forms, offs=offs, changed=changed, **kwargs)
    if forms == ("even", "bf16"):  # nothing makes both in one read
        last, _ = quantize_rebased(x, forms=("even", None), offs=None, changed=None, **kwargs)
        return last, triton.quantize_operand(x, x.ndim - 2, offs=offs, form="bf16", **kwargs)
    return triton.quantize_operand_both(x, offs=offs, forms=forms, **kwargs)
