"""``pad_token_groups`` and ``unpad_token_groups``: for callers whose buffers must hold each group at an aligned row.

The package's own GEMMs take groups of any size and never need this.
"""

import importlib
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from titan_mxfp8.backends import runs_triton
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.format.mx import ceil_div, ragged_rows
from titan_mxfp8.ops.checks import check_dtypes, check_offs_type, check_offs_values


def pad_token_groups(x: torch.Tensor, offs: torch.Tensor, alignment: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves each group of rows to the next multiple of ``alignment``; differentiable.

    ``offs = [2, 2, 40]``, alignment 32: rows 0..1 stay, rows 2..39 go to 32..69, the padded offsets are [32, 32, 96].

    Args:
        x: (M, D), bf16 or fp32.
        offs: int32 (E,) end offsets of the groups among the M rows: non-decreasing, any sizes, any number.
        alignment: a multiple of 16.

    Returns:
        The padded rows, ``format.mx.ragged_rows(M, E, alignment)`` of them, zeros between the groups and behind the
        last one (rows of ``x`` at and past ``offs[-1]`` are dropped); and int32 (E,), the padded groups' end offsets.

    Raises:
        ValueError: another dtype or shape of ``x`` or ``offs``, an alignment that is no multiple of 16; on a CPU,
            offsets that are negative, decreasing or past M.
    """
    _check(x, offs, alignment)
    return _pad(x, offs, alignment)


def unpad_token_groups(padded: torch.Tensor, offs: torch.Tensor, alignment: int, rows: int) -> torch.Tensor:
    """The inverse of ``pad_token_groups``; differentiable.

    Args:
        padded: (``ragged_rows(rows, E, alignment)``, D), bf16 or fp32.
        offs: the offsets of the groups before padding, as ``pad_token_groups`` took them.
        alignment: that of the padded groups.
        rows: M, the number of rows before padding.

    Returns:
        (rows, D), zeros at and past ``offs[-1]``.

    Raises:
        ValueError: as ``pad_token_groups``, or another number of padded rows.
    """
    _check(padded, offs, alignment)
    expected = ragged_rows(rows, offs.shape[0], alignment)
    if padded.shape[0] != expected:
        raise ValueError(
            f"{rows} rows in {offs.shape[0]} groups aligned to {alignment} are padded to {expected} rows, "
            f"got {padded.shape[0]}: pass the rows, groups and alignment that they were padded with"
        )
    return _unpad(padded, offs, alignment, rows)


@torch.library.custom_op("titan_mxfp8::pad_token_groups", mutates_args=())
def _pad(x: torch.Tensor, offs: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    check_offs_values(offs, x.shape[0])
    length = ragged_rows(x.shape[0], offs.shape[0], alignment)
    if kernels := _kernels(x.device):
        return kernels.pad_token_groups(x, offs, alignment=alignment, padded_rows=length)
    starts, ends, padded_starts, padded_ends = _bounds(offs, alignment)
    position = torch.arange(length, device=x.device)
    group = torch.searchsorted(padded_ends, position, right=True).clamp(max=offs.shape[0] - 1)
    source = position - padded_starts[group] + starts[group]
    source = torch.where(source < ends[group], source, x.shape[0])  # behind the last row: a row of zeros
    return F.pad(x, (0, 0, 0, 1))[source], padded_ends.to(torch.int32)


@_pad.register_fake
def _(x, offs, alignment):
    return x.new_empty((ragged_rows(x.shape[0], offs.shape[0], alignment), x.shape[1])), torch.empty_like(offs)


@torch.library.custom_op("titan_mxfp8::unpad_token_groups", mutates_args=())
def _unpad(padded: torch.Tensor, offs: torch.Tensor, alignment: int, rows: int) -> torch.Tensor:
    check_offs_values(offs, rows)
    if kernels := _kernels(padded.device):
        return kernels.unpad_token_groups(padded, offs, alignment=alignment, rows=rows)
    starts, ends, padded_starts, _ = _bounds(offs, alignment)
    row = torch.arange(rows, device=padded.device)
    group = torch.searchsorted(ends, row, right=True).clamp(max=offs.shape[0] - 1)
    source = torch.where(row < ends[group], row - starts[group] + padded_starts[group], padded.shape[0])
    return F.pad(padded, (0, 0, 0, 1))[source]


@_unpad.register_fake
def _(padded, offs, alignment, rows):
    return padded.new_empty((rows, padded.shape[1]))


def _save_pad(ctx, inputs, output):
    x, offs, ctx.alignment = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(offs)


def _pad_backward(ctx, grad_padded, _):
    return _unpad(grad_padded, *ctx.saved_tensors, ctx.alignment, ctx.rows), None, None


def _save_unpad(ctx, inputs, output):
    _, offs, ctx.alignment, _ = inputs
    ctx.save_for_backward(offs)


def _unpad_backward(ctx, grad_packed):
    return _pad(grad_packed, *ctx.saved_tensors, ctx.alignment)[0], None, None, None


_pad.register_autograd(_pad_backward, setup_context=_save_pad)
_unpad.register_autograd(_unpad_backward, setup_context=_save_unpad)


def _bounds(offs: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 (E,): starts and ends of the groups, starts and ends of the padded groups."""
    ends = offs.long()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded_sizes = ceil_div(sizes, alignment) * alignment
    padded_ends = padded_sizes.cumsum(0)
    return ends - sizes, ends, padded_ends - padded_sizes, padded_ends


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels where Triton runs, whichever backend multiplies there."""
    return importlib.import_module("titan_mxfp8.backends.common.pad") if runs_triton(hardware_of(device)) else None


def _check(x: torch.Tensor, offs: torch.Tensor, alignment: int) -> None:
    check_dtypes(tokens=x)
    if x.ndim != 2:
        raise ValueError(f"takes tokens of shape (rows, features), got {tuple(x.shape)}")
    check_offs_type(offs)
    if alignment < 16 or alignment % 16:
        raise ValueError(f"alignment must be a multiple of 16, got {alignment}")
