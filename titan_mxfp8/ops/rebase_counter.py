"""How many elements a rebased operand lost: counted on the device, read when someone asks."""

from typing import Literal

import torch

Kind = Literal["activations", "weights", "gradients"]
KINDS: tuple[Kind, ...] = ("activations", "weights", "gradients")


class RebaseCounter:
    """Counts, for one module, the elements whose value ``format.reference.rebase`` changed.

    Passed as ``rebase`` of an op, which it turns on. Each quantisation counts: that of activations and gradients along
    two axes twice, and that of a forward that activation checkpointing repeats again. All elements of an operand are
    counted as seen, rows past the last group too.
    """

    def __init__(self) -> None:
        self._changed: dict[Kind, torch.Tensor] = {}  # int64 scalars on the device
        self._seen: dict[Kind, int] = dict.fromkeys(KINDS, 0)

    @torch.compiler.disable(reason="rebase is counted in eager mode only: pass rebase=True to compile")
    def add_seen(self, kind: Kind, x: torch.Tensor, axes: int) -> torch.Tensor:
        """Counts ``x``, about to be quantised along ``axes`` axes, as seen.

        Returns:
            The int64 scalar on the device of ``x`` to which the quantiser adds the number of elements it changes.
        """
        self._seen[kind] += axes * x.numel()
        if kind not in self._changed:
            self._changed[kind] = torch.zeros((), dtype=torch.int64, device=x.device)
        return self._changed[kind]

    def read(self) -> dict[Kind, tuple[int, int]]:
        """Elements changed and seen since the last ``read``, by kind; waits for the device."""
        counts = {kind: (int(self._changed[kind]) if kind in self._changed else 0, self._seen[kind]) for kind in KINDS}
        self.__init__()
        return counts
