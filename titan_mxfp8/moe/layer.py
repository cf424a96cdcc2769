"""``mxfp8_moe``: a MoE layer between its router and its output, as one operator forward and four backward.

T tokens here, K experts each of E in all, which R ranks share; M rows for those here. D model and H hidden features.

```
forward                                                      backward
x_TD --quantise along D--> FP8 rows                          g_TD --quantise along D--> FP8 rows
     --dispatch: once per link, to all places--> x_MD             --the same way, to the same places--> g_MD
       (overlap weights are quantised)
     --experts (ops/experts.py)--> y_MD bf16                      --experts--> dgate w1, dup w3 (M, D), scores' (M,)
     --combine: scores, sums, once per link--> out_TD             --combine--> dx_TD, dscores_TK
saved: of x_MD one FP8 row for each token that came, gate and up (M, H) bf16, the handle
```
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.format.codec import decode
from titan_mxfp8.moe import DispatchHandle, Rows, TransportName
from titan_mxfp8.moe.bounds import factor_of
from titan_mxfp8.moe.checks import check_call
from titan_mxfp8.moe.operators import MoEConfig, moe_forward, moe_hidden_gradients, moe_rows_gradient
from titan_mxfp8.ops import experts
from titan_mxfp8.ops.accumulate import held_gradients
from titan_mxfp8.ops.autograd import (
    ScoredCopies,
    exported,
    is_exporting,
    once_differentiable,
    save_for_backward,
    split,
)
from titan_mxfp8.ops.checks import check_flags
from titan_mxfp8.ops.config import MXConfig, config_of
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.grouped_experts import KEPT, common_dtype, gradients_of, weight_gradients
from titan_mxfp8.ops.operands import plain
from titan_mxfp8.recipe import Recipe, get_recipe

_HANDLE = len(DispatchHandle._fields)
_MOST_CHECKED = 4096
_checked: set[tuple] = set()  # shapes, dtypes, devices and options of calls that were right


def mxfp8_moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    recipe: str | Recipe = "mxfp8",
    backend: str = "auto",
    transport: TransportName = "auto",
    rows: Rows = "counted",
    max_tokens: int | None = None,
    scores_first: bool = False,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    swiglu_limit: float | None = None,
    keep_quantized_weight: bool = True,
) -> Tensor:
    """The routed experts of a MoE layer: ``sum over j of scores[t, j] * expert(expert_ids[t, j])(x[t])``.

    With a ``group``, its R ranks share the experts (expert parallelism): rank r holds experts ``r E / R`` to
    ``(r + 1) E / R - 1`` and tokens of its own, and all ranks call this together. A token's row is quantised once, on
    its source rank, crosses each link once, and arrives where it is multiplied; outputs are summed before they travel.

    ``expert(x) = (silu(x w1^T) * (x w3^T)) w2^T``; with ``swiglu_limit`` gpt_oss's clamped form of it. Differentiable
    in everything but ``expert_ids``.

    Args:
        x: (T, D), bf16 or fp32; T may differ between ranks.
        scores: (T, K), fp32 or bf16.
        expert_ids: (T, K) integers. Those outside 0 .. E - 1 are an error on a CPU; on a GPU, where looking at them
            would stop the host, such a slot adds nothing. One token's are different, which nothing checks: an expert
            that it names twice may count once.
        w1, w3: (E / R, H, D), this rank's. bf16 or fp32. D and H are multiples of 32.
        w2: (E / R, D, H).
        group: the ranks, or None for all experts here.
        recipe: a key of ``RECIPES``, a ``Recipe``, or ``bf16``: unquantised rows and GEMMs, as a control.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        transport: ``symmetric``: ranks of one host share memory; ``collective``: all-to-all; ``auto``: the
            first where it can be had (``titan_mxfp8.moe.choose``).
        rows: ``counted``: M is read on the host, once for each call, and memory is exact. A number: M is that times the
            ``max_tokens * K`` rows of balanced experts, rounded up to 128, and the host never waits; ``bounded``: 1.5
            times; ``worst_case``: ``R * max_tokens * min(K, E / R)`` rows, all tokens of all ranks, which is the most.
            Rows that do not fit are left out, and the call's backward or the next call raises.
        max_tokens: the most tokens that any rank ever has in a call, the same on all ranks and in all layers of the
            group; None: as many as any rank has in the first call. Unless rows are counted, and with ``symmetric``,
            whose buffer has room for so many, more tokens are an error: on the rank that has them, for which the others
            wait until the process group's timeout; on all with ``symmetric`` and counted rows.
        scores_first: scores multiply x, as in llama4, instead of the outputs.
        b1, b3: (E / R, H), added to the pre-activations, or None.
        b2: (E / R, D), added to the experts' outputs, or None.
        swiglu_limit: positive; see above. ``min(gate, limit) * sigmoid(1.702 ..) * (clamp(up, +-limit) + 1)``.
        keep_quantized_weight: as for ``mxfp8_grouped_mm``.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: an unknown recipe, backend, transport or kind of rows, or one that cannot be here; another dtype,
            shape or device of a tensor; D or H that is no multiple of 32; K above E, E that the ranks do not divide; a
            limit or ``max_tokens`` that is not positive; more tokens than there is room for; on a CPU, ids of no
            expert; on every rank, ranks that disagree about experts, K, recipe or rows.
        RuntimeError: an earlier call had more rows than memory for them, as far as the host knows without waiting.
    """
    (x,) = plain("mxfp8_moe", x=x)
    check_flags(scores_first=scores_first, keep_quantized_weight=keep_quantized_weight)
    config = config_of(get_recipe(recipe).key, f"{backend}", x.device, bool(keep_quantized_weight))
    options = Dispatched(transport=transport, rows=rows, max_tokens=max_tokens, limit=swiglu_limit)
    return moe(x, scores, expert_ids, Weights(w1, w3, w2, b1, b3, b2), group, options, config, scores_first)


class Dispatched(NamedTuple):
    """Arguments of ``mxfp8_moe`` that are no tensors."""

    transport: TransportName = "auto"
    rows: Rows = "counted"
    max_tokens: int | None = None
    limit: float | None = None


def moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    weights: Weights,
    group: dist.ProcessGroup | None,
    options: Dispatched,
    config: MXConfig,
    scores_first: bool = False,
    gathered: Sequence[Tensor] = (),
) -> Tensor:
    """``mxfp8_moe`` with a ``config``; ``gathered``: as of ``grouped_experts``."""
    x, scores, *rest = plain("mxfp8_moe", x=x, scores=scores, **weights._asdict())
    weights = Weights(*rest)
    compiling = torch.compiler.is_compiling()  # torch 2.11 cannot ask a group for its attributes then
    if group is not None and not compiling and not hasattr(group, "group_name"):
        raise ValueError(
            f"mxfp8_moe: group must be a torch.distributed.ProcessGroup or None, got {group!r}: a DeviceMesh has one "
            "for each of its dimensions, mesh.get_group(name)"
        )
    ranks = 1 if group is None else group.size()
    if compiling or type(x) is not Tensor:  # sizes may be symbols, which have no hash
        check_call(x, scores, expert_ids, weights, ranks, options)
    else:
        given = [ranks, f"{options}"]
        for tensor in (x, scores, expert_ids, *weights):
            given.append(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device))
        if (key := tuple(given)) not in _checked:
            check_call(x, scores, expert_ids, weights, ranks, options)
            if len(_checked) == _MOST_CHECKED:
                _checked.clear()
            _checked.add(key)
    slots = expert_ids.shape[1]
    transport, rows, max_tokens, limit = options
    most_rows = (max_tokens or 0) * (slots if scores_first else 1)
    name = "" if group is None else group.group_name
    layer = _moe_key(config.key, limit, transport, f"{rows}", most_rows, ranks, name)
    if compiling and is_exporting():
        return _exported_moe(x, scores, expert_ids, *weights, scores_first, layer, config.kept_weight)
    kept_weight = "itself" if gathered else config.kept_weight
    rest = layer, kept_weight, torch.is_grad_enabled(), *weights, *gathered
    return _apply(x, scores, expert_ids, rest, scores_first)


def _apply(x: Tensor, scores: Tensor, expert_ids: Tensor, rest: tuple, scores_first: bool) -> Tensor:
    """``_MoE`` of tokens, or with ``scores_first`` of each of their copies."""
    if not scores_first:
        return _MoE.apply(x, scores.float(), expert_ids, *rest)[0]
    out = _MoE.apply(ScoredCopies.apply(x, scores.float()), None, expert_ids.reshape(-1, 1), *rest)[0]
    slots = expert_ids.shape[1]
    return out if slots == 1 else out.view(-1, slots, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


def _moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b3: Tensor | None,
    b2: Tensor | None,
    scores_first: bool,
    config: str,
    kept_weight: str,
) -> Tensor:
    rest = config, kept_weight, torch.is_grad_enabled(), w1, w3, w2, b1, b3, b2
    return _apply(x, scores, expert_ids, rest, scores_first)


_exported_moe = exported(_moe, lambda x, *rest: x.new_empty(x.shape))


@torch.compiler.assume_constant_result
def _moe_key(gemms: str, limit: float | None, transport: str, rows: str, most_rows: int, ranks: int, group: str) -> str:
    """The key of a ``MoEConfig``, of whose GEMMs ``gemms`` is the key."""
    return _moe_config(gemms, limit, transport, rows, most_rows, ranks, group).key


@cache
def _moe_config(
    gemms: str, limit: float | None, transport: str, rows: str, most_rows: int, ranks: int, group: str
) -> MoEConfig:
    return MoEConfig(
        gemms=decode(gemms),
        limit=limit,
        transport=transport,
        factor=factor_of(rows),
        most_rows=most_rows,
        ranks=ranks,
        group=group,
    )


@torch.compiler.assume_constant_result
def keeps_copies(config: str, slots: int) -> bool:
    """That of the ``MoEConfig`` with this key."""
    return decode(config).keeps_copies(slots)


class _MoE(torch.autograd.Function):
    """Saves the rows that arrived in FP8, the two pre-activations, where rows arrived, and the weights; of those of
    32x32 blocks what was quantised for dgrad instead, unless FSDP frees them (``MXConfig.kept_weight``)."""

    @staticmethod
    def forward(ctx, x, scores, expert_ids, config, kept_weight, grad_enabled, *given):
        (w1, w3, w2, b1, b3, b2), gathered = given[:6], given[6:]
        save = grad_enabled and any(ctx.needs_input_grad)
        ctx.config, ctx.scored, ctx.x_dtype = config, scores is not None, x.dtype
        ctx.dtypes = [None if w is None else w.dtype for w in given[:6]]
        if kept_weight == "bf16":
            w1, w3, w2 = w1.bfloat16(), w3.bfloat16(), w2.bfloat16()
        matrices = gathered or (w1, w3, w2)
        out, *saved = moe_forward(x, scores, expert_ids, [*matrices], [b1, b3, b2], config, save)
        if not save:
            return out, None
        weights = () if kept_weight == "quantized" else matrices
        ctx.matrices, ctx.kept = len(weights), KEPT if kept_weight == "quantized" else (0, 0)
        ctx.gathers = keeps_copies(config, expert_ids.shape[1])
        return save_for_backward(ctx, out, b2, *weights, *saved)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, g_TD):
        b2, *saved = saved
        weights, handle, preactivations, kept, kept_w2, x = split(saved, ctx.matrices, _HANDLE, 2, *ctx.kept)
        del saved
        needs, routing = list(ctx.needs_input_grad[6:12]), DispatchHandle(*handle)
        held = held_gradients(ctx, first=2 + ctx.scored, count=3)
        sizes = [routing.expert_ids.numel(), preactivations[0].shape[1], g_TD.shape[1]]
        rowwise, columnwise, h, dscores, biases, sources, of_g = split(
            moe_hidden_gradients(g_TD, handle, preactivations, kept_w2, weights, b2, ctx.scored, needs, ctx.config),
            *experts.count_tensors(ctx.config).of_hidden(needs),
            ctx.scored,
            sum(needs[3:]),
            ctx.gathers,
        )
        dscores_M, sources = dscores[0] if ctx.scored else None, sources[0] if ctx.gathers else None
        wanted = sizes, needs, common_dtype(ctx.dtypes), held, ctx.config
        dweights = weight_gradients(routing.offs, (columnwise or [*rowwise], h), (x, of_g), sources, *wanted)
        rest = kept, weights, dscores_M, sizes, g_TD.dtype, ctx.config
        dx, *dscores = moe_rows_gradient(routing.offs, handle, rowwise, *rest)
        none = [None] * (len(ctx.needs_input_grad) - 12)
        dparams = gradients_of(dweights + biases, needs, ctx.dtypes)
        return dx.to(ctx.x_dtype), dscores[0] if ctx.scored else None, *[None] * 4, *dparams, *none
