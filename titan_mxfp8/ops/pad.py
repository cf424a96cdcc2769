"""``pad_token_groups`` and ``unpad_token_groups``: for callers whose buffers must hold each group at an aligned row.

The package's own GEMMs take groups of any size and never need this.
"""

import torch

from titan_mxfp8.format.mx import ragged_rows
from titan_mxfp8.format.reference import gather_groups, padded_ends, scatter_groups
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
        ValueError: another dtype or shape of ``x`` or ``offs``, an alignment that is no int or no multiple of 16; on a
            CPU, but in compiled code, offsets that are negative, decreasing or past M.
    """
    _check(x, offs, x.shape[0], alignment)
    return gather_groups(x, 0, offs, alignment), padded_ends(offs, alignment)


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
        ValueError: as ``pad_token_groups``, another number of padded rows, or ``rows`` that are no int.
    """
    _check(padded, offs, rows, alignment)
    expected = ragged_rows(rows, offs.shape[0], alignment)
    if padded.shape[0] != expected:
        raise ValueError(
            f"{rows} rows in {offs.shape[0]} groups aligned to {alignment} are padded to {expected} rows, "
            f"got {padded.shape[0]}: pass the rows, groups and alignment that they were padded with"
        )
    return scatter_groups(padded, 0, offs, alignment, rows)


def _check(x: torch.Tensor, offs: torch.Tensor, rows: int, alignment: int) -> None:
    check_dtypes(tokens=x)
    if x.ndim != 2:
        raise ValueError(f"takes tokens of shape (rows, features), got {tuple(x.shape)}")
    check_offs_type(offs)
    for name, number in (("alignment", alignment), ("rows", rows)):
        if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
            raise ValueError(f"{name} must be an int, got {number!r}")
    if alignment < 16 or alignment % 16:
        raise ValueError(f"alignment must be a multiple of 16, got {alignment}")
    if not torch.compiler.is_compiling() and type(offs) is torch.Tensor:  # a fake one has no values
        check_offs_values(offs, rows)
