"""``MoEConfig``: how the tokens of ``mxfp8_moe`` come to their experts and back, within its operators."""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.moe import DispatchHandle, Transport, TransportName, choose
from titan_mxfp8.moe.bounds import bound, factor_of
from titan_mxfp8.ops.autograd import take_many
from titan_mxfp8.ops.experts import DispatchedRows, ExpertsLayer, Tokens
from titan_mxfp8.ops.library import aligned


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ExpertsLayer):
    """Everything about a layer that is no tensor. Its handle is a ``DispatchHandle``."""

    transport: TransportName  # as of ``mxfp8_moe``
    rows: str  # likewise, a factor as text
    most_rows: int  # that a rank ever sends in a call; 0: as many as in the first
    ranks: int  # how many share the experts
    group: str  # the name of their process group; empty: this process alone
    zero_tail: ClassVar[bool] = False
    handle_tensors: ClassVar[int] = len(DispatchHandle._fields)

    @cached_property
    def factor(self) -> float | None:
        """See ``bounds.factor_of``."""
        return factor_of(self.rows)

    def dispatch(self, transport, x, scores, routing, capacity, local, save, kernels, overlap):
        experts, (tokens, slots) = local * self.ranks, routing.shape
        check_expert_ids(routing, experts)
        parts = _to_parts(kernels.quantize(aligned(x), 1, self.x_rows, None))
        if scores is None:
            scores = torch.ones_like(routing, dtype=torch.float32)
        recipe = self.gemms.recipe.name
        rows = self.factor if capacity is None else capacity
        room = transport.agree(tokens, experts=experts, slots=slots, recipe=recipe, rows=rows)
        capacity = self.capacity(capacity, room, slots, local)
        copies = [] if save and slots >= self.copied_slots() else None
        received, handle = transport.dispatch(parts, routing, scores, experts, capacity, overlap, copies)
        tokens = [Tokens(Operand.of_rows(self.x_rows, *received))]
        return DispatchedRows(tokens, [*handle], [], copies or (received if save else []))

    def scores(self, handle):
        return DispatchHandle(*handle).scores

    def combine(self, transport, y, weighted, handle, dtype):
        return transport.combine([y], weighted, None, DispatchHandle(*handle), dtype)[0]

    def dispatch_gradient(self, transport, g, handle, needs_w2, kernels):
        dispatched = DispatchHandle(*handle)
        sent = _to_parts(kernels.quantize(g, 1, self.g_rows, None))
        received = transport.dispatch_with_handle(sent, dispatched)
        gathers = dispatched.expert_ids.shape[1] >= self.copied_slots()
        sources = [transport.find_sources(dispatched)] if gathers else []
        kept = (sent if gathers and self.ranks == 1 else received) if needs_w2 else []
        tokens = [Tokens(Operand.of_rows(self.g_rows, *received))]
        return DispatchedRows(tokens, handle, sources, kept)

    def combine_gradient(self, transport, rows, dscores_M, handle, dtype):
        dx, dscores = transport.combine(rows, False, dscores_M, DispatchHandle(*handle), dtype)
        return [dx] if dscores is None else [dx, dscores]

    def empty_dispatched(self, x, routing, capacity, local):
        handle = _empty_handle(routing, capacity, local, self)
        rows = handle.scores.shape[0]
        kept_rows = handle.destinations.shape[0] if routing.shape[1] >= self.copied_slots() else rows
        return [*handle], rows, _empty_parts(x, kept_rows, self.x_rows)

    def empty_gradient(self, g, handle, rows, needs_w2):
        gathers = DispatchHandle(*handle).expert_ids.shape[1] >= self.copied_slots()
        sources = [g.new_empty(rows, dtype=torch.int32)] if gathers else []
        sent_rows = g.shape[0] if gathers and self.ranks == 1 else rows
        return [*sources, *(_empty_parts(g, sent_rows, self.g_rows) if needs_w2 else [])]

    def wgrad_tokens(self, tensors, sources, of_g):
        """With one rank g's rows are kept once for a token too."""
        rows = Operand.of_rows(self.g_rows if of_g else self.x_rows, *take_many(tensors))
        gathers = sources is not None and (self.ranks == 1 or not of_g)
        return Tokens(None, sent=rows, sources=sources) if gathers else Tokens(rows)

    def copied_slots(self) -> int:
        """More than there are ranks, if ``Backend.requantize`` gathers the rows that wgrad takes; else never."""
        spec = self.plan.wgrad.b
        gathers = spec.scales == "mn_major" or (spec.stored == "bf16" and spec.is_quantized)
        return self.ranks + 1 if gathers else sys.maxsize

    def capacity(self, given: int | None, tokens: int, slots: int, local: int) -> int | None:
        """The rows there is memory for: those given, or of ``bounds.bound``; None: those that come."""
        if given is not None or self.factor is None:
            return given
        return bound(self.factor, tokens, slots, self.ranks, local)

    def connect(self, device: torch.device) -> Transport:
        """The transport, which all layers of a group share."""
        group = dist.distributed_c10d._resolve_process_group(self.group) if self.group else None
        transport, _ = choose(self.transport, group, device)
        if self.most_rows > transport.shared.reserved:
            transport.reserve(self.most_rows)
        return transport


def check_expert_ids(expert_ids: Tensor, experts: int) -> None:
    """Raises ValueError if ids on a CPU, where looking costs no sync, are of no expert."""
    if not expert_ids.is_cpu or not expert_ids.numel():
        return
    first, last = expert_ids.aminmax()
    if first < 0 or last >= experts:
        raise ValueError(f"expert_ids must be of 0 to {experts - 1}, got {first.item()} to {last.item()}")


def _empty_handle(expert_ids: Tensor, capacity: int | None, local: int, config: MoEConfig) -> DispatchHandle:
    """The shapes of a ``DispatchHandle``. Counted rows are taken for those of balanced experts, as estimates of memory
    want."""
    (tokens, slots), ranks = expert_ids.shape, config.ranks
    room = config.most_rows if config.most_rows and ranks > 1 else tokens
    capacity = config.capacity(capacity, room, slots, local)
    rows = tokens * slots if capacity is None else capacity
    return DispatchHandle(
        offs=expert_ids.new_empty(local, dtype=torch.int32),
        destinations=expert_ids.new_empty((room * ranks, slots), dtype=torch.int32),
        scores=expert_ids.new_empty(rows, dtype=torch.float32),
        expert_ids=expert_ids.new_empty((tokens, slots), dtype=torch.int32),
        # of these three the transport decides how many there are
        copies_of_token=expert_ids.new_empty((0, ranks), dtype=torch.int32),
        token_of_copy=expert_ids.new_empty(0, dtype=torch.int32),
        splits=expert_ids.new_empty((2, 0), dtype=torch.int64, device="cpu"),
    )


def _to_parts(rows: Operand) -> list[Tensor]:
    """What travels of (T, D) rows: their elements and, (T, D / block_k), their scales; or bf16 alone."""
    if rows.spec.scales == "mn_major":  # of no rows contiguous() would leave the strides
        return [rows.data, rows.row_scales().clone(memory_format=torch.contiguous_format)]
    return [rows.data] if rows.scale is None else [rows.data, rows.scale.contiguous()]


def _empty_parts(x: Tensor, rows: int, spec: OperandSpec) -> list[Tensor]:
    """For fakes: ``_to_parts`` of so many rows like those of (T, D)."""
    features = x.shape[1]
    data = x.new_empty((rows, features), dtype=spec.elem_dtype)
    scales = [x.new_empty((rows, ceil_div(features, spec.block_k)), dtype=torch.uint8)] * spec.is_quantized
    return [data, *scales]
