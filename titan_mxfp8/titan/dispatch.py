"""MoE layers that dispatch their own tokens, by ``mxfp8_moe``: which do, over which transport, with how much memory."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_mxfp8.format.mx import BLOCK_SIZE, ceil_div
from titan_mxfp8.logs import by_reason, count_of
from titan_mxfp8.moe import TransportName, choose
from titan_mxfp8.moe.bounds import WantedRows, bound, factor_of
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.moe.layer import DispatchOptions
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.recipe import AUTO, BF16, Recipe

logger = logging.getLogger(__name__)

GIB = 2**30
GPUS_TRIED = 4  # in expert parallelism, by any run that results/ has
COUNTS = "tokens_per_expert"  # how the names of the buffers begin that a forward pass changes
LAYERS = "mxfp8_layers"  # the attribute of a model, and of each layer, that has its ``DispatchingLayers``
COMPILED_VERSIONS = 32  # of one function
MARGIN, MOST_MARGIN = 1.1, 2.0  # times the rows that were wanted: to what a bound grows at least, and at most


def dispatches(transport: str, rows: str | float) -> bool:
    """Whether layers with the fields ``dispatch`` and ``dispatch_rows`` of a config are to dispatch their own tokens.
    Raises ValueError: no factor, or fields that contradict each other."""
    if rows != AUTO and factor_of(rows, "dispatch_rows") is not None and transport == "off":
        raise ValueError(f"dispatch_rows = {rows!r} and dispatch = 'off': TorchTitan's own dispatch counts rows")
    return transport != "off"


def refusal(transport: str, recipe: Recipe) -> str:
    """Why ``auto`` leaves the tokens of experts with this recipe to TorchTitan's dispatch, in words; else nothing."""
    if transport == AUTO and recipe.quantized and recipe.wgrad == "bf16":
        return f"recipe {recipe.name!r}, whose weight gradient takes tokens that were not quantised"
    return ""


def choose_layers(transport: str, recipe: Recipe, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Which experts get their tokens over ``transport``. Those that keep TorchTitan's way are logged. ``reasons``
    are names of converted expert modules, and why the layer around each cannot dispatch its own tokens, or nothing.
    Raises ValueError of recipe ``bf16`` for experts that would be TorchTitan's own."""
    left = by_reason((name, refusal(transport, recipe) or reason) for name, reason in reasons)
    chosen = left.pop("", [])
    for reason, names in left.items():
        words = (
            f"MXFP8: dispatch = {transport!r} does not work with {reason}: TorchTitan dispatches the tokens "
            f"of {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}"
        )
        if not recipe.quantized:
            raise ValueError(f"{words}, with recipe {BF16.name!r} as if unconverted. Leave the experts unconverted")
        logger.info(words)
    return chosen


@dataclass(kw_only=True)
class DispatchingLayers:
    """The MoE layers of a model that dispatch their own tokens; they share this."""

    transport: TransportName  # as of ``mxfp8_moe``
    rows: str | float  # likewise, then as text; of ``auto`` ``counted`` until ``connect`` chooses. See ``set_rows``
    once: str  # why a step cannot run again, in words; empty where it can
    count: int  # layers of the model
    kept: int  # layers of a rank that keep their rows for backward, at least
    max_tokens: int | None  # the most that a rank has in one forward; None: not known
    slots: int = 1  # rows that a rank sends of each token, where scores come before the experts
    top_k: int  # copies of a row that are received, at most
    experts: int  # of a layer, on all ranks
    dim: int
    hidden: int
    chooses_rows: bool = False  # whether ``connect`` chooses
    group: str = ""  # the name of the process group that ``connect`` was called with; empty: this process alone
    ranks: int = 1  # its size
    why_fsdp: str = ""  # why FSDP takes the experts, in words; empty where it does not, or nobody has asked
    # As long as the bound, where one may have been too small.
    _room: torch.Tensor | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.chooses_rows |= self.rows == AUTO
        self.set_rows("counted" if self.rows == AUTO else f"{self.rows}")

    def __deepcopy__(self, memo: dict) -> "DispatchingLayers":
        return self

    @property
    def most_rows(self) -> int | None:
        """The most that a rank sends in one forward."""
        return None if self.max_tokens is None else self.max_tokens * self.slots

    def connect(self, group: dist.ProcessGroup | None, device: torch.device, where: str = "MXFP8: ") -> str:
        """Chooses the transport, and the rows if that is left to it. Called by every rank of the group, those of expert
        parallelism, before anything is trained. Returns the log line. Raises ValueError, which begins with ``where``,
        of a transport that cannot be, or too little memory for the rows."""
        transport, choice = None, "not chosen: the other ranks do not exist"
        if group is None or dist.get_backend(group) != "fake":
            try:
                transport, choice = choose(self.transport, group, device)
            except ValueError as error:
                raise ValueError(f"{where}dispatch = {self.transport!r}: {error}") from error
            if self.max_tokens is not None:
                transport.reserve(self.most_rows)
        if group is not None:
            self.group, self.ranks = group.group_name, group.size()
        if device.type == "cuda" and self.ranks > GPUS_TRIED and transport is not None:
            choice += f"; never run on more than {GPUS_TRIED} GPUs"
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
        reason = self._why_counted(isinstance(transport, Collective), device, total)
        rows = self.rows
        if self.chooses_rows:
            rows = "counted" if reason or device.type == "cpu" else "bounded"
        elif self.once and self.may_overflow():
            rows = "counted"
        else:
            reason = ""
        self.set_rows(rows)
        self.check_memory(total, where)
        who = count_of(self.count, "MoE layer") + (
            " dispatch tokens themselves" if self.count > 1 else " dispatches tokens itself"
        )
        return f"MXFP8: {who}, {choice}; rows {self.rows}{f', as {reason}' * bool(reason)}"

    def _why_counted(self, is_collective: bool, device: torch.device, available: float) -> str:
        """Why rows are counted if that is left to us, in words; nothing where they need not be."""
        if self.max_tokens is None or device.type == "cpu":
            return ""
        if self.once:
            return f"with {self.once} no step can run again"
        if is_collective and self.ranks > self.top_k:
            return f"with a bound all {self.ranks} ranks would be sent every token, whose experts are on {self.top_k}"
        if self.bytes_needed("bounded") > available:
            return "there is too little memory for bounded ones"
        return ""

    def may_overflow(self) -> bool:
        """Whether more rows may be wanted than there is memory for."""
        factor = factor_of(self.rows)
        return factor is not None and (self.max_tokens is None or self._bound(factor) < self._bound(math.inf))

    def wanted(self, device: torch.device) -> WantedRows:
        """What the layers wanted."""
        group = dist.distributed_c10d._resolve_process_group(self.group) if self.group else None
        return choose(self.transport, group, device)[0].shared.wanted

    def share(self, wanted: float) -> float:
        """``wanted`` rows as a multiple of those that balanced experts get."""
        return wanted / (self.most_rows * self.top_k)

    def largest_share(self, device: torch.device) -> float:
        """The ``share`` of the most rows that any rank wanted since the last call; 0 where rows have no bound. All
        ranks call it, and wait for their GPUs."""
        if self.max_tokens is None or factor_of(self.rows) is None:
            return 0
        rows = self.wanted(device)
        most = torch.tensor(max(rows.read().values(), default=0), device=device)
        rows.reset()
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return self.share(int(most))

    def grow(self, wanted: int, available: float, free: float = math.inf) -> None:
        """Makes the bound twice the rows that were wanted, as routers go on to become more uneven while a training is
        young. Fewer, where that would take more than half of the ``free`` bytes if all layers kept their rows, but 1.1
        times those that were wanted at least. Or counts rows from now on, where ``available`` bytes are too few."""
        now, most = self._bound(factor_of(self.rows)), self._bound(math.inf)
        room = now + free / 2 / sum(bytes_of_row(self.dim, self.hidden, self.count))
        rows = min(most, max(MARGIN * wanted, min(MOST_MARGIN * wanted, room)))
        grown = f"{math.ceil(1000 * self.share(rows)) / 1000}"
        self.set_rows(grown if self.bytes_needed(grown) <= available else "counted")

    def are_counted(self, training: bool) -> bool:
        """Whether rows are counted in a call now. Those of a validation are, as nobody runs its batches again."""
        return not training or self.rows == "counted"

    def options(self, training: bool, limit: float | None) -> DispatchOptions:
        """What a call now is given besides tensors; ``limit``: of the experts' SwiGLU."""
        rows, capacity = self.rows if training else "counted", None
        if training and self._room is not None:
            rows, capacity = "bounded", self._room.shape[0]
        return DispatchOptions(self.transport, rows, self.max_tokens, limit, capacity)

    def set_rows(self, rows: str) -> None:
        """From the next step on. Compiled layers that took a bound that may overflow go on with any other: to them it
        is a symbol, the length of a tensor that may change. What rows are called is a constant of theirs."""
        self.rows, had_room = rows, self._room is not None
        self._room = None
        if self.max_tokens is not None and (self.may_overflow() or (had_room and factor_of(rows) is not None)):
            self._room = torch.empty(self._bound(factor_of(rows)), dtype=torch.uint8, device="cpu")
            torch._dynamo.maybe_mark_dynamic(self._room, 0)

    def bytes_needed(self, rows: str) -> int:
        """Bytes on one GPU that layers with such ``dispatch_rows`` need at least; 0 where that is not known before."""
        factor = factor_of(rows)
        if factor is None or self.max_tokens is None:
            return 0
        of_copy, of_row = bytes_of_row(self.dim, self.hidden, self.kept)
        room = self._bound(factor)
        return room * of_row + min(room, self._copies) * of_copy

    def check_memory(self, available: float, where: str = "MXFP8: ") -> None:
        """Raises ValueError if a GPU has fewer bytes than the rows need at least."""
        needed = self.bytes_needed(self.rows)
        if needed <= available:
            return
        of_copy, of_row = bytes_of_row(self.dim, self.hidden, self.kept)
        room = max(available / (of_row + of_copy), (available - self._copies * of_copy) / of_row)
        factor = math.floor(100 * self.share(room)) / 100
        raise ValueError(
            f"{where}dispatch_rows = {self.rows!r} needs at least {needed / GIB:.1f} GiB of each GPU, which "
            f"has {available / GIB:.1f} GiB: take a factor of at most {factor}, 'counted', "
            "fewer tokens (local_batch_size, seq_len), a lower expert_parallel_degree"
            f"{', or full activation checkpointing' * (self.kept > 1)}"
        )

    def _bound(self, factor: float) -> int:
        return bound(factor, self.most_rows, self.top_k, self.ranks, self.experts // self.ranks)

    @property
    def _copies(self) -> float:
        """The token copies that a rank keeps at most instead of its rows (``MoEConfig.copied_slots``), if it may."""
        return self.ranks * self.most_rows if self.ranks < self.top_k else math.inf


def local(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return param.to_local() if isinstance(param, DTensor) else param


def gpt_oss_weights(w13: torch.Tensor, b13: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> Weights:
    """This rank's weights of gpt_oss's experts: ``w13`` and ``b13`` interleave gate and linear half along axis 1."""
    (w1, w3), (b1, b3) = (local(param).unflatten(1, (-1, 2)).unbind(2) for param in (w13, b13))
    return Weights(w1, w3, local(w2), b1, b3, local(b2))


def token_counts(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers in which a model's MoE layers count the tokens of each expert, (experts,), by their names; of those
    that are distributed this rank's part."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2].startswith(COUNTS)}
    return {name: getattr(buffer, "_local_tensor", buffer) for name, buffer in buffers.items()}


def allow_compiled_versions() -> None:
    """Has torch.compile not give up after 8 versions of a function, with an error where it is told to take a block
    whole: there are layers of several kinds, each in training and in validation, whose batches may be of another size,
    and with rows that may overflow, that may not, and that are counted."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_VERSIONS)


def microbatches_of(training: Any, parallelism: Any) -> int:
    """How many microbatches a pipeline makes of each batch, of a validation's too; 1 without a pipeline."""
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    return max(1, training.local_batch_size // parallelism.pipeline_parallel_microbatch_size)


def most_tokens(training: Any, parallelism: Any, validation: Any = None) -> int:
    """The most tokens that a rank has in one forward, by these sections of TorchTitan's config; ``validation`` if a run
    validates on batches of another size."""
    microbatches = microbatches_of(training, parallelism)
    batches = [training] if validation is None else [training, validation]
    tokens = [ceil_div(batch.local_batch_size, microbatches) * batch.seq_len for batch in batches]
    return max(tokens) // parallelism.context_parallel_degree


def kept_layers(layers: int, parallelism: Any, checkpointing: bool) -> int:
    """How many of a model's layers a rank keeps until backward, at least."""
    return 1 if checkpointing else ceil_div(layers, parallelism.pipeline_parallel_degree)


def bytes_of_row(dim: int, hidden: int, saved_layers: int) -> tuple[int, int]:
    """Bytes on one GPU for each row that there is memory for, at least: of its tokens, and all others.

    Each layer keeps for backward the rows, or fewer copies, in FP8 with their scales, and two pre-activations in bf16;
    one layer at a time has its output and its hidden activation in bf16 besides.
    """
    return saved_layers * (dim + dim // BLOCK_SIZE), saved_layers * 2 * 2 * hidden + 2 * dim + 2 * hidden
