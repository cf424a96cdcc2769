"""What ``mxfp8_moe`` refuses."""

import torch
from torch import Tensor

from titan_mxfp8.moe import TRANSPORTS
from titan_mxfp8.moe.bounds import factor_of
from titan_mxfp8.ops.checks import check_devices, check_dtypes, check_features
from titan_mxfp8.ops.experts import Weights


def check_expert_ids(expert_ids: Tensor, experts: int) -> None:
    """Raises ValueError if ids on a CPU, where looking costs no sync, are of no expert."""
    if not expert_ids.is_cpu or not expert_ids.numel():
        return
    first, last = expert_ids.aminmax()
    if first < 0 or last >= experts:
        raise ValueError(f"expert_ids must be of 0 to {experts - 1}, got {first.item()} to {last.item()}")


def check_call(x: Tensor, scores: Tensor, expert_ids: Tensor, weights: Weights, ranks: int, options: tuple) -> None:
    """Raises ValueError of arguments that ``mxfp8_moe`` refuses; ``options``: a ``layer.Dispatched``."""
    w1, w3, w2, b1, b3, b2 = weights
    transport, rows, max_tokens, swiglu_limit = options
    if x.ndim != 2 or w1.ndim != 3 or w1.shape[2] != x.shape[1]:
        raise ValueError(
            "mxfp8_moe takes x of shape (T, D), w1 and w3 of shape (E / R, H, D) and w2 of shape (E / R, D, H), got "
            f"{tuple(x.shape)}, {tuple(w1.shape)}, {tuple(w3.shape)} and {tuple(w2.shape)}"
            + ": pass w1.mT, w3.mT and w2.mT"
            * (w1.ndim == 3 and w1.shape[1] == x.shape[-1])
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
