"""The public quantiser."""

import torch

from titan_mxfp8.format.mx import BLOCK_SIZE, BLOCKS, ELEM_DTYPES, ROUNDINGS, Block, MXTensor, Rounding, ceil_div
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.ops import library
from titan_mxfp8.ops.autograd import exported
from titan_mxfp8.ops.checks import check_devices, check_dtypes, check_offs_type, plain


def quantize(
    x: torch.Tensor,
    axis: int = -1,
    *,
    rounding: Rounding = "rceil",
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    block: Block = "1x32",
    offs: torch.Tensor | None = None,
    backend: str = "auto",
) -> MXTensor:
    """Quantises ``x`` to MXFP8 along ``axis``, blocks of 32 elements (OCP Microscaling Formats v1.0, section 6.3).

    Args:
        x: bf16 or fp32.
        axis: the axis that the GEMM to come contracts. With 32x32 blocks one of the last two: the values are blocks
            along both, and ``axis`` is the one that the storage is contiguous along.
        rounding: of the scale. ``rceil`` rounds ``amax / max`` up to a power of two, so nothing saturates; ``floor`` is
            the OCP rule, by which a block's largest elements may saturate (``format.reference._round``).
        elem_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: ``1x32``, or ``32x32`` squares over the last two axes.
        offs: int32 (E,) end offsets of token groups along ``axis``, any sizes. Each group starts a new block, at the
            next multiple of 32 of the padded axis; what lies past ``offs[-1]`` is dropped. 2-D ``x``, 1x32 blocks.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.

    Returns:
        The quantised operand. Without ``offs`` its gradient is that of ``x`` (``MXTensor.source``), for which nothing
        keeps the memory of ``x``. A block that holds NaN or Inf is NaN as a whole, no other block is touched.

    Raises:
        ValueError: another dtype or shape, an axis out of range, an unknown rounding, element type, block or backend,
            ``offs`` with squares or with other than two axes; on a CPU, ``offs`` that is negative, decreasing or past
            the end of the axis.
    """
    (x,) = plain("quantize", x=x)
    check_dtypes(x=x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}")
    axis %= x.ndim
    for name, value, known in (
        ("rounding", rounding, ROUNDINGS),
        ("elem_dtype", elem_dtype, ELEM_DTYPES),
        ("block", block, BLOCKS),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(map(str, known))}")
    if block == "32x32" and (x.ndim < 2 or axis < x.ndim - 2):
        raise ValueError(f"32x32 blocks span the last two axes of {tuple(x.shape)}, axis {axis} is neither of them")
    if offs is not None:
        if block != "1x32" or x.ndim != 2:
            raise ValueError(f"offs takes 1x32 blocks of a 2-D tensor, got {block} and shape {tuple(x.shape)}")
        check_offs_type(offs)
        check_devices(x=x, offs=offs)
    spec = _spec(elem_dtype, rounding, block)
    data, scale = library.quantize(x.detach(), axis, spec.key, offs, backend)
    length = x.shape[axis] if offs is None else data.shape[-1]  # what lies behind is padding
    data, scale = data.narrow(-1, 0, length), scale.narrow(-1, 0, ceil_div(length, BLOCK_SIZE))
    source = _source_of(x) if offs is None and x.requires_grad and torch.is_grad_enabled() else None
    return MXTensor(data.movedim(-1, axis), scale.movedim(-1, axis), axis, block, x.dtype, source)


@torch.compiler.assume_constant_result
def _spec(elem_dtype: torch.dtype, rounding: Rounding, block: Block) -> OperandSpec:
    return OperandSpec(elem_dtype=elem_dtype, rounding=rounding, block=block, block_mn=32 if block == "32x32" else 1)


class _Source(torch.autograd.Function):
    """A tensor of the shape and dtype of ``x`` without memory, whose gradient is that of ``x``."""

    @staticmethod
    def forward(ctx, x):
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx, dx):
        return dx


def _source(x):
    return _Source.apply(x)


_source_of = exported(_source, lambda x: x.new_empty(()).expand(x.shape), "Tensor x")
