"""MXFP8 data: elements in FP8 and one power-of-two E8M0 scale per block of 32 (OCP Microscaling Formats v1.0)."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

BLOCK_SIZE = 32
REBASED_SIZE = 128

Block = Literal["1x32", "32x32", "1x128", "32x128"]
Rounding = Literal["rceil", "floor"]
# What a GEMM is given: FP8 elements with a scale per 32 of them, the same with equal scales for neighbours where that
# changes no value (``reference.even_out``), the values in bf16 (``is_dequantized``), or FP8 elements with a scale per
# 128 or per 32 x 128 (``reference.rebase``).
Form = Literal["mx", "even", "bf16", "1x128", "32x128"]

BLOCKS: tuple[Block, ...] = ("1x32", "32x32")  # what a quantiser makes
REBASED: tuple[Block, ...] = ("1x128", "32x128")  # and what ``reference.rebase`` makes of it
SQUARES: tuple[Block, ...] = ("32x32", "32x128")  # a scale for 32 across the axis
ROUNDINGS: tuple[Rounding, ...] = ("rceil", "floor")
ELEM_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

# Scale byte s stands for 2^(s - 127); 255 makes the whole block NaN.
SCALE_BIAS = 127
SCALE_NAN = 255


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def ragged_rows(rows: int, groups: int, alignment: int = BLOCK_SIZE) -> int:
    """Rows that ``rows`` rows in ``groups`` groups fill at most once each is padded to a multiple of ``alignment``.

    The true number is known on the device only; this bound needs no sync: ``ragged_rows(100, 3) == 192``, while groups
    of 1, 1 and 98 rows fill ``32 + 32 + 128 = 192`` and groups of 32, 32 and 36 fill ``32 + 32 + 64 = 128``.
    """
    return (rows + (alignment - 1) * groups) // alignment * alignment


@dataclass(frozen=True, slots=True)
class MXTensor:
    """A quantised operand, which knows the axis that it was quantised along.

    A plain dataclass and not a ``torch.Tensor`` subclass: it never reaches the dispatcher, autograd or a checkpoint.

    Attributes:
        qdata: FP8 elements in the shape of the input. With ragged groups the quantised axis is the padded one (see
            ``quantize``). Storage is contiguous along ``axis``: transposed where ``axis`` is not the last one, as the
            tensor cores of Hopper want it. Or the values themselves, see ``is_dequantized``.
        scale: ``uint8`` E8M0 bytes. ``1x32``: the shape of ``qdata`` with ``axis`` divided by 32, rounded up.
            ``32x32``: the last two axes divided so. Stored like ``qdata``, contiguous along ``axis``. ``1x128`` and
            ``32x128``: ``axis`` divided by 128 instead, and stored across, see ``stored_across``.
        axis: the quantised axis, non-negative.
        block: ``1x32`` (32 elements along ``axis``) or ``32x32`` (squares over the last two axes, so that the values
            are blocks of 32 along either of the two). Or rebased (``reference.rebase``): ``1x128``, or ``32x128`` of
            either, 128 elements along ``axis`` and, of the last two axes, 32 along the other one.
        orig_dtype: dtype of the input, and what ``dequantize`` returns by default.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    axis: int
    block: Block
    orig_dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.qdata.shape

    @property
    def block_length(self) -> int:
        """Elements along ``axis`` that share a scale."""
        return REBASED_SIZE if self.block in REBASED else BLOCK_SIZE

    @property
    def other_axis(self) -> int:
        """Of the last two axes the one that is not ``axis``."""
        return 2 * self.qdata.ndim - 3 - self.axis

    @property
    def is_dequantized(self) -> bool:
        """Whether ``qdata`` holds the values ``element * 2^(scale - 127)`` in bf16, and ``scale`` is empty.

        So a backend whose tensor cores have no MX may take its operands (``operand_forms``). They lie like the input:
        not transposed and, with ragged groups, not padded; rows that belong to no group are undefined. Exact but for
        values below 2^-133, bf16's smallest, which round to a multiple of it: they only occur in blocks whose largest
        value is below 2^-116 (E4M3) or 2^-102 (E5M2).
        """
        return self.qdata.dtype == torch.bfloat16

    @property
    def mT(self) -> "MXTensor":
        """The last two axes swapped: a view, no data moves."""
        last = self.qdata.ndim - 1
        axis = {last: last - 1, last - 1: last}.get(self.axis, self.axis)
        scale = self.scale if self.is_dequantized else self.scale.mT
        return replace(self, qdata=self.qdata.mT, scale=scale, axis=axis)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``element * 2^(scale - 127)``, in ``dtype`` or else ``orig_dtype``.

        Exact in fp32, and in bf16 down to 2^-133. A ragged operand comes back in its padded shape.
        """
        if self.is_dequantized:
            return self.qdata.to(dtype or self.orig_dtype)
        return self.scale_elements(self.qdata.float()).to(dtype or self.orig_dtype)

    def scale_elements(self, elements: torch.Tensor) -> torch.Tensor:
        """Multiplies the elements, given in fp32, by their scales; overwrites them."""
        axis, scale = self.axis, decode_scale(self.scale)
        if self.block in SQUARES:
            other = self.other_axis
            scale = scale.repeat_interleave(BLOCK_SIZE, dim=other).narrow(other, 0, self.shape[other])
        values = to_blocks(elements, axis, self.block_length).mul_(scale.unsqueeze(axis + 1))
        return values.flatten(axis, axis + 1).narrow(axis, 0, self.shape[axis])

    @classmethod
    def from_qdata_and_scales(cls, qdata: torch.Tensor, scales: torch.Tensor, orig_dtype: torch.dtype) -> "MXTensor":
        """Wraps activations that arrive quantised, for example from an expert-parallel all-to-all.

        Args:
            qdata: ``float8_e4m3fn`` of shape (M, K), K a multiple of 32.
            scales: E8M0 of shape (M, K / 32), not swizzled, as ``float8_e8m0fnu`` or as ``uint8`` bytes.
            orig_dtype: the high-precision dtype the data came from, ``bfloat16`` or ``float32``.

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
        return cls(qdata.contiguous(), scales.contiguous().view(torch.uint8), 1, "1x32", orig_dtype)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes to fp32: ``2^(s - 127)``. Byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = (scale.to(torch.int32) << 23).clamp_(min=0x00400000)
    return bits.masked_fill_(scale == SCALE_NAN, 0x7FC00000).view(torch.float32)


def to_blocks(x: torch.Tensor, axis: int, size: int = BLOCK_SIZE) -> torch.Tensor:
    """Splits ``axis`` of length L into (ceil(L / size), size), zeros filling the last block; a view if it is whole."""
    missing = -x.shape[axis] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, missing))
    return x.unflatten(axis, (-1, size))


def stored_across(*shape: int) -> tuple[int, ...]:
    """Shape of the storage of rebased scales whose shape, with the quantised axis last, is (..., R, C).

    (..., C, R rounded up to a multiple of 16): the scales of neighbouring rows are neighbours, as a GEMM that scales
    once per 128 loads them, and each run of them starts on 16 bytes.
    """
    *rest, rows, blocks = shape
    return *rest, blocks, ceil_div(rows, 16) * 16
