"""MoE layers that dispatch their own tokens, by ``mxfp8_moe``: which do, over which transport, with how much memory."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.modules import Dispatch
from titan_mxfp8.moe import TRANSPORTS
from titan_mxfp8.recipe import BF16, Recipe

logger = logging.getLogger(__name__)

GIB = 2**30


def dispatch_of(transport: str, rows: str) -> Dispatch | None:
    """The fields ``dispatch`` and ``dispatch_rows`` of a config; None where TorchTitan dispatches.

    Raises:
        ValueError: an unknown name, or fields that contradict each other.
    """
    if transport not in ("off", *TRANSPORTS):
        raise ValueError(f"dispatch = {transport!r}: use one of off, {', '.join(TRANSPORTS)}")
    dispatch = Dispatch(transport="auto" if transport == "off" else transport, rows=rows)
    if rows == "worst_case" and transport in ("off", "collective"):
        raise ValueError(
            f"dispatch_rows = 'worst_case' and dispatch = {transport!r}: only 'symmetric' (or 'auto', where it takes "
            "that) works without a number of rows that the host has read"
        )
    return None if transport == "off" else dispatch


def choose_layers(dispatch: Dispatch, recipe: Recipe, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Which experts are to get their tokens by ``dispatch``. Those that keep TorchTitan's way are logged.

    Args:
        recipe: of the experts.
        reasons: names of converted expert modules, and why the layer around each cannot dispatch its own tokens, in
            words; an empty string where it can.

    Raises:
        ValueError: recipe ``bf16`` for experts that would be TorchTitan's own.
    """
    refusal = dispatch.refusal(recipe)
    chosen: list[str] = []
    left: dict[str, list[str]] = {}
    for name, reason in reasons:
        if refusal or reason:
            left.setdefault(refusal or reason, []).append(name)
        else:
            chosen.append(name)
    for reason, names in left.items():
        words = (
            f"MXFP8: dispatch = {dispatch.transport!r} does not work with {reason}: TorchTitan dispatches the tokens "
            f"of {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"
        )
        if not recipe.quantized:
            raise ValueError(f"{words}, with recipe {BF16.name!r} as if unconverted. Leave the experts unconverted")
        logger.info(words)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchingLayers:
    """The MoE layers of a model that dispatch their own tokens.

    Attributes:
        dispatch: how.
        count: layers of the model.
        kept: layers of a rank that keep their rows for backward, at least.
        rows: the most that a rank sends in one forward; None: not known.
        top_k: copies of a row that are received, at most.
        experts, dim, hidden: of a layer; all of its experts.
    """

    dispatch: Dispatch
    count: int
    kept: int
    rows: int | None
    top_k: int
    experts: int
    dim: int
    hidden: int

    def connect(self, group: dist.ProcessGroup | None, device: torch.device, where: str = "MXFP8: ") -> str:
        """Chooses the transport, called by every rank at once before anything is trained. Returns the log line.

        Args:
            group: the ranks of expert parallelism; None: one.
            where: what an error begins with.

        Raises:
            ValueError: a transport that cannot be, or too little memory for ``worst_case``.
        """
        rows, transport = self.dispatch.rows, self.dispatch.transport
        try:
            choice = self.dispatch.connect(group, device, self.rows)
        except ValueError as error:
            raise ValueError(f"{where}dispatch = {transport!r}: {error}") from error
        if rows == "worst_case" and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            self.check_memory(1 if group is None else group.size(), total, where)
        who = "1 MoE layer dispatches tokens itself"
        if self.count > 1:
            who = f"{self.count} MoE layers dispatch tokens themselves"
        return f"MXFP8: {who}, {choice}; rows {rows}"

    def check_memory(self, ranks: int, available: float, where: str = "MXFP8: ") -> None:
        """Raises ValueError if a GPU has fewer bytes than ``worst_case`` needs at least."""
        if self.rows is None:
            return
        needed = worst_case_bytes(
            tokens=self.rows,
            ranks=ranks,
            top_k=self.top_k,
            experts=self.experts,
            dim=self.dim,
            hidden=self.hidden,
            saved_layers=self.kept,
        )
        if needed > available:
            raise ValueError(
                f"{where}dispatch_rows = 'worst_case' needs at least {needed / GIB:.1f} GiB of each GPU, which has "
                f"{available / GIB:.1f} GiB: take 'counted', fewer tokens (local_batch_size, seq_len), a lower "
                f"expert_parallel_degree{', or full activation checkpointing' * (self.kept > 1)}"
            )


def most_tokens(training: Any, parallelism: Any, validation: Any = None) -> int:
    """The most tokens that a rank has in one forward.

    Args:
        training, parallelism: these sections of TorchTitan's config.
        validation: likewise, if a run validates on batches of another size.
    """
    pipelined = parallelism.pipeline_parallel_degree > 1
    batches = [training] if validation is None else [training, validation]
    tokens = [
        (parallelism.pipeline_parallel_microbatch_size if pipelined else batch.local_batch_size) * batch.seq_len
        for batch in batches
    ]
    return max(tokens) // parallelism.context_parallel_degree


def kept_layers(layers: int, parallelism: Any, checkpointing: bool) -> int:
    """How many of a model's layers a rank keeps until backward, at least."""
    return 1 if checkpointing else ceil_div(layers, parallelism.pipeline_parallel_degree)


def worst_case_bytes(
    *, tokens: int, ranks: int, top_k: int, experts: int, dim: int, hidden: int, saved_layers: int
) -> int:
    """Bytes on one GPU that layers with ``dispatch_rows = "worst_case"`` need at least.

    All tokens of all ranks may be received here, each for as many experts as are here: ``tokens * ranks * min(top_k,
    experts / ranks)`` rows. (Where scores are applied first, each of a token's slots is a token of one.) Each layer
    keeps for backward the rows in FP8 with their scales and two pre-activations in bf16; one layer at a time has its
    output and its hidden activation in bf16 besides.
    """
    rows = tokens * ranks * min(top_k, experts // ranks)
    saved = dim + dim // BLOCK_SIZE + 2 * 2 * hidden
    return rows * (saved_layers * saved + 2 * dim + 2 * hidden)
