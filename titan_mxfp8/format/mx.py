"""MXFP8 data: elements in FP8 and one power-of-two E8M0 scale per block of 32 (OCP Microscaling Formats v1.0)."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 32

Block = Literal["1x32", "32x32"]  # elements that are rounded with one scale: along the axis, or a square
Rounding = Literal["rceil", "floor"]
BlockK = Literal[32, 128]  # elements along the axis that share a scale in the end: 128 where operands are rebased

BLOCKS: tuple[Block, ...] = get_args(Block)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
BLOCK_KS: tuple[BlockK, ...] = get_args(BlockK)
ELEM_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

# Scale byte s stands for 2^(s - 127); 255 makes the whole block NaN.
SCALE_BIAS = 127
SCALE_NAN = 255


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ceil_to(a: int, b: int) -> int:
    """``a`` rounded up to a multiple of ``b``."""
    return -(-a // b) * b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, a positive number. Triton's, which kernels can call too, takes
    the host far longer."""
    return 1 << (n - 1).bit_length()


def ragged_rows(rows: int, groups: int, alignment: int = BLOCK_SIZE) -> int:
    """Rows that ``rows`` rows in ``groups`` groups fill at most once each is padded to a multiple of ``alignment``.

    The true number is known on the device only; this bound needs no sync: ``ragged_rows(100, 3) == 192``, while groups
    of 1, 1 and 98 rows fill ``32 + 32 + 128 = 192`` and groups of 32, 32 and 36 fill ``32 + 32 + 64 = 128``.
    """
    return (rows + (alignment - 1) * groups) // alignment * alignment


@dataclass(frozen=True, slots=True)
class MXTensor:
    """A quantised operand, which knows the axis that it was quantised along.

    A plain dataclass and not a ``torch.Tensor`` subclass: it never reaches the dispatcher or a checkpoint, nor autograd
    but through ``source``.

    Attributes:
        qdata: FP8 elements in the shape of the input. With ragged groups the quantised axis is the padded one (see
            ``quantize``). Storage is contiguous along ``axis``, or a part of such a storage: transposed where ``axis``
            is not the last one, as the tensor cores of Hopper want it.
        scale: ``uint8`` E8M0 bytes. ``1x32``: the shape of ``qdata`` with ``axis`` divided by 32, rounded up.
            ``32x32``: the last two axes divided so. Stored like ``qdata``, contiguous along ``axis``.
        axis: the quantised axis, non-negative.
        block: ``1x32`` (32 elements along ``axis``) or ``32x32`` (squares over the last two axes, so that the values
            are blocks of 32 along either of the two).
        orig_dtype: dtype of the input, and what ``dequantize`` returns by default.
        source: what gets the gradient with respect to the values, as if those had not been rounded: a tensor of the
            shape and dtype of the input, whose own values nobody reads (an expanded scalar will do). None: no gradient.
            ``quantize`` makes one of an input that requires a gradient.
    """

    qdata: Tensor
    scale: Tensor
    axis: int
    block: Block
    orig_dtype: torch.dtype
    source: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.qdata.shape

    @property
    def mT(self) -> "MXTensor":
        """The last two axes swapped: a view, no data moves."""
        last = self.qdata.ndim - 1
        axis = {last: last - 1, last - 1: last}.get(self.axis, self.axis)
        source = None if self.source is None else self.source.mT
        return replace(self, qdata=self.qdata.mT, scale=self.scale.mT, axis=axis, source=source)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """``element * 2^(scale - 127)``, in ``dtype`` or else ``orig_dtype``.

        Exact in fp32, and in bf16 down to 2^-133. An element rounded up beside the largest fp32 numbers is the one
        exception: 2^128, which 3.4e38 is rounded to, is Inf in either. A ragged operand comes back in its padded shape.
        """
        along, scale = self.qdata.movedim(self.axis, -1), self.scale.movedim(self.axis, -1)
        block_mn = BLOCK_SIZE if self.block == "32x32" else 1
        values = scale_elements(along.float(), scale, block_k=BLOCK_SIZE, block_mn=block_mn)
        return values.movedim(-1, self.axis).to(dtype or self.orig_dtype)

    @classmethod
    def from_qdata_and_scales(
        cls, qdata: Tensor, scales: Tensor, orig_dtype: torch.dtype, source: Tensor | None = None
    ) -> "MXTensor":
        """Wraps activations that arrive quantised, for example from an expert-parallel all-to-all.

        Args:
            qdata: ``float8_e4m3fn`` of shape (M, K), K a multiple of 32.
            scales: E8M0 of shape (M, K / 32), not swizzled, as ``float8_e8m0fnu`` or as ``uint8`` bytes.
            orig_dtype: the high-precision dtype the data came from, ``bfloat16`` or ``float32``.
            source: (M, K) in ``orig_dtype``, what gets the gradient (see above), for example what an autograd function
                that sends the data returns beside it. None: no gradient.

        Raises:
            ValueError: another dtype or shape.
        """
        if qdata.dtype != torch.float8_e4m3fn or qdata.ndim != 2 or qdata.shape[1] % BLOCK_SIZE:
            raise ValueError(
                f"qdata must be float8_e4m3fn of shape (M, K) with K a multiple of {BLOCK_SIZE}, "
                f"got {qdata.dtype} of shape {tuple(qdata.shape)}"
            )
        expected = (qdata.shape[0], qdata.shape[1] // BLOCK_SIZE)
        if scales.dtype not in (torch.float8_e8m0fnu, torch.uint8) or tuple(scales.shape) != expected:
            raise ValueError(
                f"scales must be float8_e8m0fnu or uint8 of shape {expected}, one per {BLOCK_SIZE} elements of a row, "
                f"not swizzled; got {scales.dtype} of shape {tuple(scales.shape)}"
            )
        if orig_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"orig_dtype must be torch.bfloat16 or torch.float32, got {orig_dtype}")
        if source is not None and (source.shape != qdata.shape or source.dtype != orig_dtype):
            raise ValueError(
                f"source must be of the shape of qdata, {tuple(qdata.shape)}, and {orig_dtype}, got "
                f"{tuple(source.shape)} and {source.dtype}"
            )
        return cls(qdata.contiguous(), scales.contiguous().view(torch.uint8), 1, "1x32", orig_dtype, source)


def decode_scale(scale: Tensor) -> Tensor:
    """E8M0 bytes to fp32: ``2^(s - 127)``. Byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = (scale.to(torch.int32) << 23).clamp_(min=0x00400000)
    return bits.masked_fill_(scale == SCALE_NAN, 0x7FC00000).view(torch.float32)


def to_blocks(x: Tensor, axis: int, size: int = BLOCK_SIZE) -> Tensor:
    """Splits ``axis`` of length L into (ceil(L / size), size), zeros filling the last block; a view if it is whole."""
    missing = -x.shape[axis] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, missing))
    return x.unflatten(axis, (-1, size))


def scale_elements(elements: Tensor, scale: Tensor, *, block_k: int, block_mn: int) -> Tensor:
    """Elements, given in fp32 with the quantised axis last, times their scales; may overwrite ``elements``.

    Args:
        elements: (..., R, C).
        scale: E8M0 bytes, (..., R / block_mn, C / block_k), both rounded up.
        block_k: elements along the axis that share a scale.
        block_mn: neighbours across the axis that do, 1 or 32.
    """
    length = elements.shape[-1]
    factor = decode_scale(scale)
    if block_mn > 1:
        factor = factor.repeat_interleave(block_mn, dim=-2).narrow(-2, 0, elements.shape[-2])
    if missing := -length % block_k:
        elements = F.pad(elements, (0, missing))
    scaled = elements.unflatten(-1, (-1, block_k)).mul_(factor.unsqueeze(-1)).flatten(-2)
    return scaled.narrow(-1, 0, length) if missing else scaled
