"""What the GEMMs multiply: MXFP8, or its values in bf16 where the tensor cores know no scales."""

from functools import cache
from typing import Literal

import torch

from titan_mxfp8.backends.triton.dequantize import quantize_dequantize, quantize_dequantize_both
from titan_mxfp8.backends.triton.quantize import quantize, quantize_both
from titan_mxfp8.format.mx import Block, Form, MXTensor, Rounding

# scaled:    FP8 elements and E8M0 scales, by the tensor cores of SM100 and gfx950.
# bf16_tma:  dequantised values, loaded by the tensor memory accelerator: SM90.
# bf16:      dequantised values, loaded through pointers: everything else.
Mma = Literal["scaled", "bf16_tma", "bf16"]


@cache
def mma_for(device: torch.device) -> Mma:
    """How this device multiplies; the CPU, that is Triton's interpreter, can do all three."""
    if device.type != "cuda":
        return "bf16"
    if torch.version.hip:
        return "scaled" if "gfx950" in torch.cuda.get_device_properties(device).gcnArchName else "bf16"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "bf16_tma", 10: "scaled"}.get(major, "bf16")  # SM120 has TMA but not the shared memory for our tiles


def operand_forms(
    gemm: Literal["m_grouped", "k_grouped"], weight_block: Block, rebased: bool, device: torch.device
) -> tuple[Form, Form]:
    """``format.reference.operand_forms``: bf16 where the tensor cores know no scales."""
    assert not rebased
    form = "mx" if mma_for(device) == "scaled" else "bf16"
    return form, form


def quantize_operand(
    x: torch.Tensor,
    axis: int,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    form: Form,
) -> MXTensor:
    """``format.reference.quantize_operand`` in the forms ``mx`` and ``bf16``."""
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "block": block, "offs": offs}
    if form == "mx":
        return quantize(x, axis, **kwargs)
    return _dequantized(quantize_dequantize(x, axis, **kwargs), x, axis, block)


def quantize_operand_both(
    x: torch.Tensor,
    *,
    rounding: Rounding,
    elem_dtype: torch.dtype,
    block: Block,
    offs: torch.Tensor | None,
    forms: tuple[Form, Form],
) -> tuple[MXTensor, MXTensor]:
    """``format.reference.quantize_operand_both``, both ``mx`` or both ``bf16``.

    In bf16, 32x32 blocks have the same values along both axes, and then lie in memory once.
    """
    kwargs = {"rounding": rounding, "elem_dtype": elem_dtype, "offs": offs}
    if forms == ("mx", "mx"):
        return quantize_both(x, block=block, **kwargs)
    assert forms == ("bf16", "bf16"), forms
    if block == "32x32":
        last = first = quantize_dequantize(x, x.ndim - 1, block=block, **kwargs)
    else:
        last, first = quantize_dequantize_both(x, **kwargs)
    return _dequantized(last, x, x.ndim - 1, block), _dequantized(first, x, x.ndim - 2, block)


def _dequantized(values: torch.Tensor, x: torch.Tensor, axis: int, block: Block) -> MXTensor:
    return MXTensor(values, x.new_empty(0, dtype=torch.uint8), axis, block, x.dtype)
