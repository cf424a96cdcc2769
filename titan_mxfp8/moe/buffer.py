"""What lies where in the memory that the ranks of one host share."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from titan_mxfp8.format.mx import ceil_to

# The sections of a rank's buffer, which are rows of the table of pointers.
COUNTS, METADATA, PAYLOAD, PARTIALS, VALUES = range(5)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A buffer for layers that are no larger than this. Every rank's is the same.

    | section  | holds                                                           | written by | read by      |
    |----------|-----------------------------------------------------------------|------------|--------------|
    | counts   | int32 (E + 1): slots here that chose each expert, then T        | its rank   | all, to plan |
    | metadata | int32 (T, 3K), see ``rows.make_metadata``                       | its rank   | all          |
    | payload  | data (T, B_0); then, from ``scales_offset`` on, scales (T, B_1) | its rank   | all          |
    | partials | bf16 (R, tokens, D): what each rank added up of its tokens      | each rank  | its rank     |
    | values   | fp32 (R, tokens, K): slot values, likewise                      | each rank  | its rank     |
    """

    ranks: int  # R
    tokens: int = 1  # the most that a rank may have of its own
    experts: int = 1  # E
    slots: int = 1  # K
    row_bytes: int = 1  # of a token's data and scales together
    dim: int = 1  # D

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each section begins, and at last the bytes of all."""
        copies = self.ranks * self.tokens
        sizes = (
            4 * (self.experts + 1),
            12 * self.slots * self.tokens,
            self.row_bytes * self.tokens + 16,  # scales begin at a multiple of 16
            2 * self.dim * copies,
            4 * self.slots * copies,
        )
        ends = [0]
        for size in sizes:
            ends.append(ceil_to(ends[-1] + size, 256))
        return tuple(ends)

    def holds(self, **sizes: int) -> bool:
        """Whether there is room for this."""
        return all(getattr(self, name) >= size for name, size in sizes.items())

    def grown(self, **sizes: int) -> "Layout":
        """The least that holds this too."""
        return replace(self, **{name: max(getattr(self, name), size) for name, size in sizes.items()})

    def table(self, pointers: list[int], device: torch.device) -> Tensor:
        """Where each section of each rank's buffer begins, int64 (sections, R), from where the buffers begin."""
        sections = [[pointer + offset for pointer in pointers] for offset in self.offsets[:-1]]
        return torch.tensor(sections, dtype=torch.int64, device=device)

    def view(self, buffer: Tensor, section: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """The beginning of a section of this rank's buffer, uint8, as a tensor."""
        start = self.offsets[section]
        return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def rooms(self, buffer: Tensor, tokens: int, *widths: int) -> list[Tensor]:
        """Room for data and scales, each uint8 (tokens, bytes of its rows)."""
        start, out = self.offsets[PAYLOAD], []
        for width in widths:
            out.append(buffer[start : start + tokens * width].view(tokens, width))
            start += scales_offset(self.tokens, width)
        return out


def scales_offset(tokens: int, row_bytes: int) -> int:
    """How many bytes after the data the scales begin, on every rank, however many tokens it has."""
    return ceil_to(tokens * row_bytes, 16)
