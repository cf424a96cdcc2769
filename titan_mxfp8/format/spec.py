"""``OperandSpec``: the one description of a GEMM's operand; ``Operand``: an operand as it lies in memory."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from titan_mxfp8.format.codec import Encoded
from titan_mxfp8.format.mx import (
    BLOCK_KS,
    BLOCK_SIZE,
    BLOCKS,
    ELEM_DTYPES,
    ROUNDINGS,
    Block,
    BlockK,
    Rounding,
    ceil_div,
    ceil_to,
    ragged_rows,
    scale_elements,
)

Stored = Literal["fp8", "coalesced", "bf16"]
ScaleLayout = Literal["k_major", "mn_major", "swizzled"]


@dataclass(frozen=True, kw_only=True)
class OperandSpec(Encoded):
    """How an operand is quantised and how it lies in memory. Nothing about it is inferred from shapes or dtypes.

    Attributes:
        elem_dtype: FP8 type of the elements; ``bfloat16`` where the operand is not quantised.
        rounding: of the scales.
        block: elements that are rounded with one scale.
        block_k: elements along the axis that share a scale in the end: 128 where blocks are rebased
            (``format.reference.rebase``).
        block_mn: neighbours across the axis that share it, 1 or 32: 32 with 32x32 blocks, and where the weight's 1x32
            blocks are rebased to 32 x 128.
        stored: ``fp8``; ``coalesced``: FP8, neighbouring blocks at one scale where that changes no value
            (``format.reference.coalesce_scales``); or ``bf16``: the values ``element * 2^(scale - 127)``, for tensor
            cores that know no scales. Exact but for values below 2^-133, bf16's smallest, which round to a multiple of
            it: they only occur in blocks whose largest value is below 2^-116 (E4M3) or 2^-102 (E5M2).
        scales: how scales lie. ``k_major``: those of a row side by side. ``mn_major``: those of neighbouring rows side
            by side, rows rounded up to a multiple of 16, as a GEMM that scales once per 128 copies them. ``swizzled``:
            in tiles of 128 rows x 4 scales, as SM100's tensor cores read them, a scale for each row and, in ragged
            operands, whole tiles for each group (``format.swizzle``).
        key: the spec as the string that operators take and graphs show.
        is_quantized: whether the operand is.
        exact: the spec of the FP8 elements and scales that it is made from: one scale per block, as rounded.
        scale_block: elements that share a scale, across and along the axis: ``32x128``.
        grouped_scales: whether scales along the last axis of (M, C) lie by groups of rows: ``offs`` are then of those.
    """

    elem_dtype: torch.dtype = torch.float8_e4m3fn
    rounding: Rounding = "rceil"
    block: Block = "1x32"
    block_k: BlockK = 32
    block_mn: Literal[1, 32] = 1
    stored: Stored = "fp8"
    scales: ScaleLayout = "k_major"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.elem_dtype in (*ELEM_DTYPES, torch.bfloat16) and self.rounding in ROUNDINGS, self
        assert self.block in BLOCKS and self.block_k in BLOCK_KS and self.stored in get_args(Stored), self
        if self.scales == "swizzled":
            assert self.block_mn == 1 and self.block_k == 32 and self.stored == "fp8", self
        else:
            assert self.block_mn == 32 if self.block == "32x32" else self.block_mn == 1 or self.block_k == 128, self
            assert self.scales == ("k_major" if self.block_k == 32 else "mn_major"), self
        assert self.block_k == 32 or self.stored == "fp8", self
        assert self.is_quantized or self.stored == "bf16", self

    @cached_property
    def is_quantized(self) -> bool:
        return self.elem_dtype != torch.bfloat16

    @cached_property
    def exact(self) -> "OperandSpec":
        block_mn = 32 if self.block == "32x32" else 1
        return replace(self, block_k=32, block_mn=block_mn, stored="fp8", scales="k_major")

    @cached_property
    def scale_block(self) -> str:
        return f"{self.block_mn}x{self.block_k}"

    @cached_property
    def grouped_scales(self) -> bool:
        return self.scales == "swizzled"

    def scale_shape(self, shape: tuple[int, ...], groups: int | None = None, by_rows: bool = False) -> tuple[int, ...]:
        """Shape of the stored scales of stored elements of this shape, (..., R, C).

        Args:
            shape: of the elements.
            groups: with ragged groups, how many; only swizzled scales take more room for them.
            by_rows: whether those cut R, and not C.
        """
        if len(shape) == 1:
            return (ceil_div(shape[0], self.block_k),)
        *rest, rows, length = shape
        if self.scales == "swizzled":
            if groups is not None and by_rows:
                rows = ragged_rows(rows, groups, 128)
            elif groups is not None:
                length = (length + (128 - BLOCK_SIZE) * groups) // 128 * 128  # it is padded to whole blocks already
            rows, scales = ceil_to(rows, 128), ceil_to(ceil_div(length, self.block_k), 4)
            return (*rest, rows * scales) if rest else (rows, scales)
        rows, blocks = ceil_div(rows, self.block_mn), ceil_div(length, self.block_k)
        return (*rest, rows, blocks) if self.scales == "k_major" else (*rest, blocks, ceil_to(rows, 16))

    def empty(self, x: Tensor, axis: int, groups: int | None) -> "Operand":
        """Uninitialised memory for ``x`` quantised along ``axis``, with ragged groups or (None) without.

        The groups cut ``axis``, and each starts at a multiple of ``block_k``; of a spec that ``grouped_scales`` they
        cut the first one of (M, C). Along another axis than the last FP8 is stored transposed, and its rows are padded
        with zeros to whole blocks of 32, so that each starts at a multiple of 16 bytes.
        """
        if self.stored == "bf16":
            values = x.new_empty(x.shape, dtype=torch.bfloat16)
            return Operand(values, None, self, axis)
        # Of a fake tensor sizes may be symbols, which have no hash.
        shapes = _stored_shapes if type(x) is Tensor else _stored_shapes.__wrapped__
        data, scale = shapes(self, x.shape, axis, groups)
        data, scale = x.new_empty(data, dtype=self.elem_dtype), x.new_empty(scale, dtype=torch.uint8)
        return Operand(data, scale, self, axis)


@lru_cache(maxsize=1024)
def _stored_shapes(
    spec: OperandSpec, shape: tuple[int, ...], axis: int, groups: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the elements and of the scales of ``OperandSpec.empty``, of an input of this shape."""
    is_last, length = axis == len(shape) - 1, shape[axis]
    by_rows = is_last and spec.grouped_scales
    if groups is not None and not by_rows:
        length = ragged_rows(length, groups, spec.block_k)
    elif not is_last:
        length = ceil_to(length, BLOCK_SIZE)
    stored = (*shape[:axis], *shape[axis + 1 :], length)
    return stored, spec.scale_shape(stored, groups, by_rows)


UNQUANTIZED = OperandSpec(elem_dtype=torch.bfloat16, stored="bf16")


class Operand(NamedTuple):
    """An operand as it lies in memory: what a backend's quantiser makes and its GEMMs multiply.

    Attributes:
        data: FP8 elements, contiguous, the quantised axis moved to the end; with ragged groups, or where that axis was
            not the last one, padded: see ``OperandSpec.empty``. Of two operands that are ``interleave``d the elements
            of both. Or, with ``stored = "bf16"``, values in the shape of the input; rows that belong to no group are
            then undefined.
        scale: E8M0 bytes, see ``OperandSpec.scale_shape``; None with ``stored = "bf16"``.
        spec: what ``data`` and ``scale`` are.
        axis: the axis of the input that was quantised, non-negative. A GEMM whose contraction is another one raises.
    """

    data: Tensor
    scale: Tensor | None
    spec: OperandSpec
    axis: int

    def tensors(self) -> list[Tensor]:
        """``data``, and ``scale`` where there is one."""
        return [self.data] if self.scale is None else [self.data, self.scale]

    @classmethod
    def take(cls, tensors: list[Tensor], spec: OperandSpec, axis: int) -> "Operand":
        """The inverse: the first operand of a list, out of which it is taken. What is not quantised may be there in any
        dtype."""
        data, scale = tensors.pop(0), None
        if spec.stored != "bf16":
            scale = tensors.pop(0)
        elif not spec.is_quantized:
            data = data.bfloat16().contiguous()
        return cls(data, scale, spec, axis)

    @classmethod
    def of_rows(cls, spec: OperandSpec, data: Tensor, scales: Tensor | None = None) -> "Operand":
        """(M, C) quantised along C, given the scales of each row, (M, C / block_k), as ``row_scales`` has them."""
        if spec.scales == "mn_major":
            stored = scales.new_zeros(spec.scale_shape(data.shape))
            stored[:, : data.shape[0]] = scales.mT
            scales = stored
        return cls(data, scales, spec, 1)

    def row_scales(self) -> Tensor:
        """The scales as (..., R / block_mn, C / block_k), a view. Of swizzled ones see ``format.swizzle``."""
        assert self.spec.scales != "swizzled", self.spec
        if self.spec.scales == "k_major":
            return self.scale
        return self.scale.narrow(-1, 0, ceil_div(self.data.shape[-2], self.spec.block_mn)).mT

    def rows_at(self, places: Tensor) -> "Operand":
        """Of (M, C), quantised along C, the rows at ``places``, integers."""
        places = places.long()
        data = self.data.view(torch.uint8)[places].view(self.data.dtype)
        return Operand.of_rows(self.spec, data, self.row_scales()[places])

    def dequantize(self) -> Tensor:
        """The values in fp32, as ``data`` lies."""
        if self.spec.stored == "bf16":
            return self.data.float()
        return scale_elements(
            self.data.float(), self.row_scales(), block_k=self.spec.block_k, block_mn=self.spec.block_mn
        )


def interleave(one: Operand, other: Operand) -> tuple[Operand, Operand]:
    """Two rebased operands of whole blocks, of the same shape (M, C) and spec, interleaved: both with the same ``data``
    of (M, 2 C), in which a block of 128 of the one is followed by that of the other."""
    blocks = [x.data.view(torch.uint8).unflatten(1, (-1, 128)) for x in (one, other)]
    data = torch.stack(blocks, 2).flatten(1).view(one.data.dtype)
    return one._replace(data=data), other._replace(data=data)


def separate(one: Operand, other: Operand) -> tuple[Operand, Operand]:
    """The inverse; operands that are not interleaved as they are."""
    if one.data is not other.data:
        return one, other
    blocks = one.data.view(torch.uint8).unflatten(1, (-1, 2, 128)).unbind(2)
    # contiguous(): what flatten gives of a single block is a view
    one_data, other_data = (x.flatten(1).contiguous().view(one.data.dtype) for x in blocks)
    return one._replace(data=one_data), other._replace(data=other_data)


M_GROUPED_AXES = (1,), (1, 2)  # that ``a`` and ``b`` of forward and dgrad may be quantised along: those contracted
K_GROUPED_AXES = (0,), (0,)  # those of wgrad


def check_axes(a: Operand, b: Operand, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    """Raises ValueError unless the operands of a GEMM were quantised along one of ``of_a`` and one of ``of_b``."""
    for name, operand, contracted in (("a", a, of_a), ("b", b, of_b)):
        assert (operand.scale is None) == (operand.spec.stored == "bf16"), "values in bf16 have no scales, FP8 has"
        if operand.axis not in contracted:
            raise ValueError(
                f"operand {name} is quantised along axis {operand.axis}, but this GEMM contracts axis "
                f"{' or '.join(map(str, contracted))}: quantise the high-precision tensor along that axis"
            )
