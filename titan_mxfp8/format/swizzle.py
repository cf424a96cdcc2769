"""Scales in tiles of 128 lines x 4, as the tensor cores of SM100 read them: where each byte lies, in plain torch.

A tile is 512 bytes; the scale of its line r and column c is byte ``r % 32 * 16 + r // 32 * 4 + c``. Tiles lie one row
of tiles after the other, and are filled up with zeros. Four cases, of stored elements (..., R, C):

| elements                    | lines                            | columns                | tiles of group g      |
|-----------------------------|----------------------------------|------------------------|-----------------------|
| (R, C), dense               | R                                | C / 32                 |                       |
| (E, R, C), weights          | R                                | C / 32                 | matrix by matrix      |
| (M, C) in groups of rows    | each group starts a row of tiles | C / 32                 | behind those of g - 1 |
| (R, P) in groups of columns | R                                | size of the group / 32 | behind those of g - 1 |

The last is an operand of wgrad, quantised along the tokens: its elements have groups at multiples of 32 tokens, its
scales a matrix of tiles for each group. What lies behind the last group is undefined.
"""

from dataclasses import replace

import torch
from torch import Tensor

from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec

TILE_LINES, TILE_COLUMNS = 128, 4
TILE_BYTES = TILE_LINES * TILE_COLUMNS


def swizzle(rows: Operand, spec: OperandSpec, offs: Tensor | None) -> Operand:
    """An exact operand with its scales in tiles; those of 32x32 blocks are repeated for each line.

    Args:
        rows: scales in rows; of (M, C) along either axis, or of (E, R, C) along one of the last two.
        spec: of the result.
        offs: int32 (E,) end offsets of the groups of M, or None.
    """
    assert spec.scales == "swizzled" and rows.spec.scales == "k_major" and rows.spec.stored == "fp8", (spec, rows.spec)
    scale = rows.scale
    if rows.spec.block_mn > 1:
        scale = scale.repeat_interleave(rows.spec.block_mn, dim=-2).narrow(-2, 0, rows.data.shape[-2])
    groups = None if offs is None else offs.shape[0]
    swizzled = scale.new_zeros(spec.scale_shape(rows.data.shape, groups, rows.axis == rows.data.ndim - 1))
    index, known = positions(rows, offs)
    swizzled.view(-1)[index[known]] = scale[known]
    return Operand(rows.data, swizzled, spec, rows.axis)


def unswizzle(operand: Operand, offs: Tensor | None) -> Operand:
    """The inverse of ``swizzle``: the operand with its scales in rows, one for each line; 0 in lines of no group."""
    assert operand.spec.scales == "swizzled", operand.spec
    index, known = positions(operand, offs)
    scale = operand.scale.reshape(-1)[torch.where(known, index, 0)].masked_fill_(~known, 0)
    return Operand(operand.data, scale, replace(operand.spec, block="1x32", scales="k_major"), operand.axis)


def positions(operand: Operand, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each scale of (..., R, C / 32): the byte where it lies, and whether there is one."""
    *rest, rows, length = operand.data.shape
    device, count = operand.data.device, ceil_div(length, BLOCK_SIZE)
    line, column = torch.arange(rows, device=device)[:, None], torch.arange(count, device=device)[None, :]
    known = torch.ones((*rest, rows, count), dtype=torch.bool, device=device)
    line_tiles, column_tiles = ceil_div(rows, TILE_LINES), ceil_div(count, TILE_COLUMNS)
    if offs is None:
        index = _byte(line // TILE_LINES * column_tiles + column // TILE_COLUMNS, line, column)
        if rest:
            matrix = torch.arange(rest[0], device=device)[:, None, None]
            index = index + matrix * (line_tiles * column_tiles * TILE_BYTES)
        return index, known
    sizes = offs.diff(prepend=offs.new_zeros(1)).long()
    tiles = ceil_div(sizes, TILE_LINES)  # of the group's tokens, which are lines or, 32 each, columns
    tiles_before = tiles.cumsum(0) - tiles
    if operand.axis == operand.data.ndim - 1:
        group = torch.searchsorted(offs, line.int().contiguous(), right=True)
        known &= group < offs.shape[0]
        group = group.clamp(max=offs.shape[0] - 1)
        line = line - (offs.long() - sizes)[group] + TILE_LINES * tiles_before[group]
        return _byte(line // TILE_LINES * column_tiles + column // TILE_COLUMNS, line, column), known
    blocks = ceil_div(sizes, BLOCK_SIZE)
    ends = blocks.cumsum(0)
    group = torch.searchsorted(ends, column.long().contiguous(), right=True)
    known &= group < offs.shape[0]
    group = group.clamp(max=offs.shape[0] - 1)
    column = column - (ends - blocks)[group]
    tile = line_tiles * tiles_before[group] + line // TILE_LINES * tiles[group] + column // TILE_COLUMNS
    return _byte(tile, line, column), known


def _byte(tile: Tensor, line: Tensor, column: Tensor) -> Tensor:
    return tile * TILE_BYTES + line % 32 * 16 + line // 32 % 4 * 4 + column % TILE_COLUMNS
