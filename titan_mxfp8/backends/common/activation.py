"""The mathematics of SwiGLU in registers, and the loads of what its gradients are made of. Functions for kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from titan_mxfp8.backends.common.tiles import SEGMENT_BYTES, Matrices, as_matrices, load_tile, load_values, tile_rows
from titan_mxfp8.format.swiglu import GPT_OSS_ALPHA

SEGMENT = SEGMENT_BYTES // 2  # columns in bf16
_ALPHA = tl.constexpr(GPT_OSS_ALPHA)  # where there is a limit


def matrices_of(*tensors: Tensor) -> tuple[Matrices, ...]:
    for x in tensors:
        assert x.dtype == torch.bfloat16 and x.shape == tensors[0].shape and x.ndim == 2, (x.dtype, x.shape)
    return tuple(as_matrices(x, 0) for x in tensors)


def sums_of(scores_M: Tensor | None, rows: int, col_tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """The scores, contiguous, and room for the sums of u * h over the columns of each tile, fp32 (col_tiles, rows)."""
    if scores_M is None:
        return None, None
    return scores_M.contiguous(), torch.empty((col_tiles, rows), dtype=torch.float32, device=scores_M.device)


@triton.jit
def sigmoid(x):
    """``1 / (1 + tl.exp(-x))``; on NVIDIA in half the instructions, but 0 where that is below 2^-126."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def rounded(values):
    """``values.to(tl.bfloat16)``, on NVIDIA two at a time, which ptxas does not see by itself."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return values.to(tl.bfloat16)


@triton.jit
def widened(values):
    """``values.to(tl.float32)`` of bf16, on NVIDIA two at a time, as ``rounded`` leaves them in registers: one
    instruction each."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=f,=f,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return values.to(tl.float32)


@triton.jit
def activation(gate, up, LIMIT: tl.constexpr):
    """The cut gate, what it is multiplied by, and its sigmoid."""
    if LIMIT is None:
        return gate, up, sigmoid(gate)
    else:
        NAN_STAYS: tl.constexpr = tl.PropagateNan.ALL
        gate = tl.minimum(gate, LIMIT, NAN_STAYS)
        up = tl.maximum(tl.minimum(up, LIMIT, NAN_STAYS), -LIMIT, NAN_STAYS)
        return gate, up + 1, sigmoid(gate * _ALPHA)


@triton.jit
def load_parts(
    gate, up, u, scores, table, rows, cols, gate_stride, up_stride, u_stride, tile_row, tile_col, row_blocks,
    LIMIT: tl.constexpr, RAGGED: tl.constexpr, SCORED: tl.constexpr,
    BLOCKS: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """What the gradients are made of, tiles of (8, BLOCKS, SEGMENTS, 4, SEGMENT) in fp32.

    Returns:
        gate, up and u; the parts of ``activation``; the scores, which broadcast; and of the tile its places in a matrix
        of ``cols`` columns and its mask, as ``load_tile`` lays it, its rows and where they end.
    """
    g, row, col, inside = load_tile(
        gate, None, table, rows, cols, gate_stride, tile_row, tile_col, row_blocks, rows,
        0, False, RAGGED, BLOCKS, SEGMENTS, SEGMENT,
    )  # fmt: skip
    at = row.to(tl.int64)[:, None] * cols + col
    v = load_values(up, table, rows, cols, up_stride, tile_row, tile_col, row_blocks, RAGGED, BLOCKS, SEGMENTS, SEGMENT)
    du = load_values(u, table, rows, cols, u_stride, tile_row, tile_col, row_blocks, RAGGED, BLOCKS, SEGMENTS, SEGMENT)
    row, stop = tile_rows(table, rows, tile_row, row_blocks, RAGGED, BLOCKS)
    score = 1.0
    if SCORED:
        score = tl.load(scores + row, mask=row < stop, other=0)
        score = tl.permute(tl.reshape(score, (BLOCKS, 4, 8)), (2, 0, 1))[:, :, None, :, None]
    g = tl.reshape(g, (8, BLOCKS, SEGMENTS, 4, SEGMENT))
    cut_g, factor, s = activation(g, v, LIMIT)
    return g, v, du, cut_g, factor, s, score, at, inside, row, stop


@triton.jit
def gradient_of_up(up, dh, cut_g, s, LIMIT: tl.constexpr):
    dup = dh * (cut_g * s)
    if LIMIT is not None:
        dup = tl.where(tl.abs(up) > LIMIT, 0.0, dup)
    return dup


@triton.jit
def gradient_of_gate(gate, dh, cut_g, factor, s, LIMIT: tl.constexpr):
    ALPHA: tl.constexpr = 1.0 if LIMIT is None else _ALPHA
    dgate = dh * factor * (s * (1 + cut_g * ALPHA * (1 - s)))
    if LIMIT is not None:
        dgate = tl.where(gate > LIMIT, 0.0, dgate)
    return dgate


@triton.jit
def store_products(sums, h, du, row, stop):
    """The sums of u * h over the columns of a tile of 32 rows."""
    products = tl.sum(tl.sum(du * rounded(h).to(tl.float32), 4), 2)  # (8, 1, 4)
    products = tl.reshape(tl.permute(products, (1, 2, 0)), (32,))
    tl.store(sums + row, products, mask=row < stop)
