"""Rows whose number is bounded, so that no host waits for it: how many there is memory for, and how many were wanted.

Where routing is balanced a rank's experts get T K rows; ``rows`` of a layer says for how many of them there is memory.
What does not fit is left out: of the last experts, of an expert that of the last source ranks, of those the last slots.
"""

import math
from fractions import Fraction
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from titan_mxfp8.format.mx import ceil_div, ceil_to

RowsName = Literal["counted", "bounded", "worst_case"]
Rows = RowsName | float
ROWS: tuple[RowsName, ...] = get_args(RowsName)
BALANCED_ROWS = 1.5  # times, with "bounded"
_MULTIPLE = 128  # of rows, a GEMM's tile


def factor_of(rows: Rows | str, name: str = "rows") -> float | None:
    """How many times T K rows there is memory for; None: for those that come, which the host counts. Raises ValueError
    of other ``rows``.

    Args:
        rows: ``counted`` (None), ``bounded`` (1.5), ``worst_case`` (infinity), or the factor, as text too.
        name: what an error calls it.
    """
    if isinstance(rows, str) and rows in ROWS:
        return {"counted": None, "bounded": BALANCED_ROWS, "worst_case": math.inf}[rows]
    try:
        factor = -1.0 if isinstance(rows, bool) else float(rows)
    except (TypeError, ValueError):
        factor = -1.0
    if not factor >= 0:
        raise ValueError(f"{name} is one of {', '.join(ROWS)}, or a factor of balanced rows from 0 on, got {rows!r}")
    return factor


def bound(factor: float, tokens: int, slots: int, ranks: int, local: int) -> int:
    """The rows there is memory for on each rank, M.

    Args:
        factor: see ``factor_of``.
        tokens: T, the most of any rank; of one rank alone those of the call.
        slots: K.
        ranks: R.
        local: experts on each rank, E / R.

    Returns:
        ``factor`` T K, rounded up to 128; at most what could come, T R min(K, E / R). Of 100 tokens, 4 slots and 2
        ranks of 8 experts each: 640 with a factor of 1.5, 800 with 2 or more.
    """
    most = tokens * ranks * min(slots, local)
    if factor == math.inf:
        return most
    times, of = _ratio(factor)  # tokens may be symbolic
    return torch.sym_min(most, ceil_to(ceil_div(tokens * slots * times, of), _MULTIPLE))


@cache
def _ratio(factor: float) -> tuple[int, int]:
    return Fraction(factor).limit_denominator(1000).as_integer_ratio()


class WantedRows:
    """How many rows the fullest rank of a group wanted, for each bound of its layers. Every rank knows it.

    Kernels write it, a CUDA graph's too, and the host reads it without waiting. Who looks for himself, before gradients
    are used, and computes again what was incomplete, takes ``raises`` off: then nothing is read unless he asks.
    """

    def __init__(self) -> None:
        self.raises = True
        self._most: dict[int, Tensor] = {}
        self._reads: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    def buffer(self, capacity: int, device: torch.device) -> Tensor:
        """The rows wanted since ``reset`` where there was memory for ``capacity``, int32 (1,): what ``plan`` raises.
        Raises RuntimeError if that is not there yet while a CUDA graph is captured, which would zero it."""
        if capacity not in self._most:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("run a layer with bounded rows once before capturing it in a CUDA graph")
            with torch.inference_mode(False):  # a tensor made in it could not be written outside of it
                self._most[capacity] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._most[capacity]

    def watch(self, capacity: int) -> None:
        """Starts reading what was wanted, unless a read is under way: later ones will see it too."""
        most = self._most[capacity]
        if not self.raises or capacity in self._reads or (most.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not most.is_cuda:
            self._reads[capacity] = most, None
            return
        host, done = torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        host.copy_(most, non_blocking=True)
        done.record()
        self._reads[capacity] = host, done

    def check(self, wait: bool = False) -> None:
        """Raises RuntimeError if a call before wanted more than its bound; as far as is known without waiting, unless
        it may ``wait`` for the GPU."""
        for capacity, (host, done) in list(self._reads.items()):
            if wait and done is not None:
                done.synchronize()
            if done is not None and (torch.cuda.is_current_stream_capturing() or not done.query()):
                continue
            self._reads.pop(capacity, None)  # another thread may have done so
            if self.raises and (wanted := int(host)) > capacity:
                self.reset()
                raise RuntimeError(
                    f"the experts of one rank were sent {wanted} rows by a MoE layer that had memory for {capacity}, "
                    "so the output and gradients of that call are incomplete. Take a larger factor for `rows` of "
                    "mxfp8_moe, at least in that proportion, or 'worst_case' (memory for all that could come), or "
                    "'counted' (the host waits)"
                )

    def read(self) -> dict[int, int]:
        """The bounds and the most rows that were wanted since ``reset``. Waits for the GPU."""
        return {capacity: int(most) for capacity, most in self._most.items()}

    def most(self) -> tuple[list[int], Tensor]:
        """The bounds, and a copy of the numbers on the device: int32, as many."""
        return list(self._most), torch.cat([*self._most.values()] or [torch.empty(0, dtype=torch.int32)])

    def reset(self) -> None:
        """Forgets what was wanted."""
        self._reads.clear()
        for most in self._most.values():
            most.zero_()
