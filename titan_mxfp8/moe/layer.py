"""``mxfp8_moe``: a MoE layer between its router and its output, as one operator forward and five backward.

T tokens here, K experts each of E in all, which R ranks share; M rows for those here. D model and H hidden features.
``titan_mxfp8/dispatch.md`` draws the way of a token, and says what is saved.
"""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mxfp8.moe import TRANSPORTS, Rows, TransportName
from titan_mxfp8.moe.bounds import factor_of
from titan_mxfp8.moe.config import MoEConfig
from titan_mxfp8.ops.autograd import exported, is_exporting
from titan_mxfp8.ops.checks import check_devices, check_dtypes, check_features, check_flags, plain
from titan_mxfp8.ops.config import MXConfig, config_of
from titan_mxfp8.ops.expert_operators import WEIGHTS_SCHEMA, ExpertsFunction
from titan_mxfp8.ops.experts import Weights, constant_of, key_of
from titan_mxfp8.recipe import Recipe, get_recipe

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
            Rows that do not fit are left out, and the call's backward or the next call raises. Under ``torch.compile``
            counted rows of several ranks break the graph.
        max_tokens: the most tokens that any rank ever has in a call, the same on all ranks and in all layers of the
            group; None: as many as any rank has in the first call. Unless rows are counted, and with ``symmetric``,
            whose buffer has room for so many, more tokens are an error: on the rank that has them, for which the others
            wait until the process group's timeout; on all with ``symmetric`` and counted rows. Of one rank alone it is
            not used: ``rows`` are then those of the call's own T tokens.
        scores_first: scores multiply x, as in llama4, instead of the outputs.
        b1, b3: (E / R, H), added to the pre-activations, or None.
        b2: (E / R, D), added to the experts' outputs, or None.
        swiglu_limit: positive; see above. ``min(gate, limit) * sigmoid(1.702 ..) * (clamp(up, +-limit) + 1)``.
        keep_quantized_weight: as for ``mxfp8_grouped_mm``.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: an unknown recipe, backend, transport or kind of rows, or one that cannot be here; another dtype,
            shape or device of a tensor; D or H that is no multiple of 32; K above E; a limit or ``max_tokens`` that is
            not positive; more tokens than there is room for; on a CPU, ids of no expert; on every rank, ranks that
            disagree about experts, K, recipe or rows.
        RuntimeError: an earlier call had more rows than memory for them, as far as the host knows without waiting.
    """
    (x,) = plain("mxfp8_moe", x=x)
    check_flags(scores_first=scores_first, keep_quantized_weight=keep_quantized_weight)
    config = config_of(get_recipe(recipe).key, f"{backend}", x.device, keep_quantized_weight)
    options = DispatchOptions(transport=transport, rows=rows, max_tokens=max_tokens, limit=swiglu_limit)
    return moe(x, scores, expert_ids, Weights(w1, w3, w2, b1, b3, b2), group, options, config, scores_first)


class DispatchOptions(NamedTuple):
    """Arguments of ``mxfp8_moe`` that are no tensors."""

    transport: TransportName = "auto"
    rows: Rows = "counted"
    max_tokens: int | None = None
    limit: float | None = None
    capacity: int | None = None  # M, in place of what ``rows`` makes it: in compiled code it may be a symbol


def moe(
    x: Tensor,
    scores: Tensor,
    expert_ids: Tensor,
    weights: Weights,
    group: dist.ProcessGroup | None,
    options: DispatchOptions,
    config: MXConfig,
    scores_first: bool = False,
    gathered: Sequence[Tensor] = (),
) -> Tensor:
    """``mxfp8_moe`` with a ``config``; ``gathered``: as of ``grouped_experts``."""
    operands = {"x": x, "scores": scores, "expert_ids": expert_ids} | weights._asdict()
    x, scores, expert_ids, *rest = plain("mxfp8_moe", **operands)
    weights = Weights(*rest)
    compiling = torch.compiler.is_compiling()  # torch 2.11 cannot ask a group for its attributes then
    if group is not None and not compiling and not hasattr(group, "group_name"):
        raise ValueError(
            f"mxfp8_moe: group must be a torch.distributed.ProcessGroup or None, got {group!r}: a DeviceMesh has one "
            "for each of its dimensions, mesh.get_group(name)"
        )
    ranks = 1 if group is None else group.size()
    if compiling or type(x) is not Tensor:  # sizes may be symbols, which have no hash
        _check_call(x, scores, expert_ids, weights, ranks, options)
    else:
        given = [ranks, f"{options}"]
        for tensor in (x, scores, expert_ids, *weights):
            given.append(None if tensor is None else (tensor.shape, tensor.dtype, tensor.device))
        if (key := tuple(given)) not in _checked:
            _check_call(x, scores, expert_ids, weights, ranks, options)
            if len(_checked) == _MOST_CHECKED:
                _checked.clear()
            _checked.add(key)
    transport, rows, max_tokens, limit, capacity = options
    if compiling and ranks > 1 and rows == "counted" and not is_exporting():
        return _run_eagerly(x, scores, expert_ids, weights, group, options, config, scores_first, gathered)
    slots = expert_ids.shape[1]
    # The key takes constants; compiled code may have symbols here.
    most_rows = index((max_tokens or 0) * (slots if scores_first else 1))
    if compiling:
        rows, limit = (x if x is None or isinstance(x, str) else constant_of(x) for x in (rows, limit))
    name = "" if group is None else group.group_name
    fields = {"transport": transport, "rows": f"{rows}", "most_rows": most_rows, "ranks": ranks, "group": name}
    layer = key_of(MoEConfig, config.key, limit=limit, **fields)
    kept_weight = "itself" if gathered else config.kept_weight
    return _run_moe(x, scores, expert_ids, scores_first, capacity, layer, kept_weight, *weights, *gathered)


def _check_call(
    x: Tensor, scores: Tensor, expert_ids: Tensor, weights: Weights, ranks: int, options: DispatchOptions
) -> None:
    """Raises ValueError of arguments that ``mxfp8_moe`` refuses."""
    w1, w3, w2, b1, b3, b2 = weights
    transport, rows, max_tokens, swiglu_limit, _ = options
    if x.ndim != 2 or w1.ndim != 3 or w1.shape[2] != x.shape[1]:
        raise ValueError(
            "mxfp8_moe takes x of shape (T, D), w1 and w3 of shape (E / R, H, D) and w2 of shape (E / R, D, H), got "
            f"{tuple(x.shape)}, {tuple(w1.shape)}, {tuple(w3.shape)} and {tuple(w2.shape)}"
            + ": pass w1.mT, w3.mT and w2.mT"
            * (w1.ndim == 3 and w1.shape[1:2] == x.shape[-1:])
        )
    local, hidden, features = w1.shape
    if w3.shape != w1.shape or tuple(w2.shape) != (local, features, hidden):
        raise ValueError(
            f"w3 must be of shape {tuple(w1.shape)} and w2 of shape {(local, features, hidden)}, as w1 is of shape "
            f"{tuple(w1.shape)}; got {tuple(w3.shape)} and {tuple(w2.shape)}"
        )
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0] or scores.shape != expert_ids.shape:
        raise ValueError(
            f"scores and expert_ids must be of shape ({x.shape[0]}, K), one of each for every token and slot, got "
            f"{tuple(scores.shape)} and {tuple(expert_ids.shape)}"
        )
    if expert_ids.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"expert_ids must be integers, got {expert_ids.dtype}")
    for name, bias, size in (("b1", b1, hidden), ("b3", b3, hidden), ("b2", b2, features)):
        if bias is not None and tuple(bias.shape) != (local, size):
            raise ValueError(f"{name} must be of shape ({local}, {size}), got {tuple(bias.shape)}")
    factor_of(rows)
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is one of {', '.join(TRANSPORTS)}, got {transport!r}")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens > 0):
        raise ValueError(f"max_tokens is a positive number of tokens or None, got {max_tokens!r}")
    if swiglu_limit is not None and not (isinstance(swiglu_limit, float | int) and swiglu_limit > 0):
        raise ValueError(f"swiglu_limit is a positive number or None, got {swiglu_limit!r}")
    slots = expert_ids.shape[1]
    if slots > local * ranks:
        raise ValueError(f"each token is sent to {slots} experts, but there are only {local * ranks}")
    check_dtypes(x=x, scores=scores, w1=w1, w3=w3, w2=w2, b1=b1, b3=b3, b2=b2)
    check_features({"D, the number of model features,": features, "H, the number of hidden features,": hidden})
    check_devices(x=x, scores=scores, expert_ids=expert_ids, w1=w1, w3=w3, w2=w2, b1=b1, b3=b3, b2=b2)


@torch.compiler.disable(reason="the host waits for the rows of mxfp8_moe: rows='bounded' makes it part of the graph")
def _run_eagerly(*arguments: Any) -> Tensor:
    return moe(*arguments)


class _ScoredCopies(torch.autograd.Function):
    """x (T, D) times each of a token's scores, in fp32 and rounded once: (T K, D). Saves x as it is, not in fp32."""

    @staticmethod
    def forward(ctx, x, scores):
        ctx.save_for_backward(x, scores)
        return (x.float().unsqueeze(1) * scores.unsqueeze(2)).to(x.dtype).flatten(0, 1)

    @staticmethod
    def backward(ctx, g):
        x, scores = ctx.saved_tensors
        g_TKD = g.view(*scores.shape, x.shape[1])  # in products with fp32 it is taken for fp32
        dscores = (g_TKD * x.float().unsqueeze(1)).sum(2) if ctx.needs_input_grad[1] else None
        return (g_TKD * scores.unsqueeze(2)).sum(1).to(x.dtype) if ctx.needs_input_grad[0] else None, dscores


def _moe(x, scores, expert_ids, scores_first, capacity, config, kept_weight, *weights):
    """``ExpertsFunction`` of tokens, or with ``scores_first`` of each of their copies."""
    rest = capacity, config, kept_weight, False, torch.is_grad_enabled(), *weights
    if not scores_first:
        return ExpertsFunction.apply(x, scores.float(), expert_ids, *rest)[0]
    out = ExpertsFunction.apply(_ScoredCopies.apply(x, scores.float()), None, expert_ids.reshape(-1, 1), *rest)[0]
    slots = expert_ids.shape[1]
    return out if slots == 1 else out.view(*expert_ids.shape, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


_run_moe = exported(
    _moe,
    lambda x, *rest: x.new_empty(x.shape),
    "Tensor x, Tensor scores, Tensor expert_ids, bool scores_first, SymInt? capacity, str config, str kept_weight, "
    + WEIGHTS_SCHEMA,
)
