"""Pad and unpad of token groups: each group moves to the next multiple of an alignment, and back."""

import torch
import triton
import triton.language as tl

from titan_mxfp8.backends.triton.groups import UnitMap, map_units, units_with_tail
from titan_mxfp8.format.mx import ceil_div

UNIT = 16  # rows that a program moves; alignments are multiples of it
COLUMN_BYTES = 1024  # of a row that a program moves


def pad_token_groups(
    x: torch.Tensor, offs: torch.Tensor, *, alignment: int, padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups of ``x`` (M, D) in a buffer of ``padded_rows``, zeros elsewhere, and the padded groups' offsets."""
    x = x.contiguous()
    padded = torch.empty((padded_rows, x.shape[1]), dtype=x.dtype, device=x.device)
    with torch.accelerator.device_index(x.device.index):
        unit_map = map_units(offs, x.shape[0], units=padded_rows // UNIT, unit=UNIT, alignment=alignment)
        _launch(padded, x, unit_map, offs, pad=True)
    return padded, unit_map.padded_offs


def unpad_token_groups(padded: torch.Tensor, offs: torch.Tensor, *, alignment: int, rows: int) -> torch.Tensor:
    """The (rows, D) that ``pad_token_groups`` was given; rows past the last group are zeros."""
    padded = padded.contiguous()
    packed = torch.empty((rows, padded.shape[1]), dtype=padded.dtype, device=padded.device)
    with torch.accelerator.device_index(padded.device.index):
        kwargs = {"unit": UNIT, "alignment": alignment, "tail_alignment": UNIT}
        unit_map = map_units(offs, rows, units=units_with_tail(rows, offs.shape[0], **kwargs), **kwargs)
        _launch(packed, padded, unit_map, offs, pad=False)
    return packed


def _launch(out: torch.Tensor, source: torch.Tensor, unit_map: UnitMap, offs: torch.Tensor, *, pad: bool) -> None:
    cols = out.shape[1]
    tile_cols = COLUMN_BYTES // out.element_size()
    programs = unit_map.units * ceil_div(cols, tile_cols)
    if programs and out.numel():
        _move_units[(programs,)](
            out, source, unit_map.start, unit_map.stop, offs[-1:], cols, UNIT=UNIT, COLS=tile_cols, PAD=pad
        )


@triton.jit
def _move_units(
    out, source, map_start, map_stop, offs_end, cols, UNIT: tl.constexpr, COLS: tl.constexpr, PAD: tl.constexpr
):
    """One program: ``UNIT`` rows of a unit of the map, ``COLS`` of their columns, into the padded buffer or out of it.

    ``offs = [2, 40]`` aligned to 32: unit 3, padded rows 48..63, holds packed rows 18..33.
    """
    col_tiles = tl.cdiv(cols, COLS)
    unit = tl.program_id(0) // col_tiles
    i = tl.arange(0, UNIT)
    col = (tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS))[None, :]
    packed_row = tl.load(map_start + unit) + i
    inside = (packed_row < tl.load(map_stop + unit))[:, None]
    packed = packed_row.to(tl.int64)[:, None] * cols + col
    padded = (unit.to(tl.int64) * UNIT + i)[:, None] * cols + col
    if PAD:
        tl.store(out + padded, tl.load(source + packed, mask=inside & (col < cols), other=0), mask=col < cols)
    else:
        in_group = (packed_row < tl.load(offs_end))[:, None]  # else the tail
        values = tl.load(source + padded, mask=inside & in_group & (col < cols), other=0)
        tl.store(out + packed, values, mask=inside & (col < cols))
