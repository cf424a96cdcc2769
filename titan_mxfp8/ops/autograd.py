"""What the autograd functions of the package share."""

from collections.abc import Callable
from functools import wraps

import torch

Owned = list  # of tensors and operands, which has one owner: see ``take``


def take(owned: Owned) -> object:
    """Takes the first one out of a list: who takes it is the last to hold it, and frees it after its use.

    A function whose arguments are to be taken can free each as soon as it is used up, which plain arguments would not
    be before it returns, as its caller holds them too.
    """
    return owned.pop(0)


def take_many(owned: Owned, count: int | None = None) -> Owned:
    """The first ``count``, or all, in order; see ``take``."""
    taken = owned[:count]
    del owned[:count]
    return taken


def take_saved(ctx: torch.autograd.function.FunctionCtx) -> Owned:
    """``ctx.saved_tensors``, which backward alone holds afterwards, unless the graph is kept for another backward. What
    autograd itself does when backward has returned, and torch.compile here. Activation checkpointing hands them out
    once."""
    saved = list(ctx.saved_tensors)
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return saved


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Has the ``backward`` of an autograd function return gradients that cannot be differentiated again.

    ``once_differentiable`` of torch looks at the output gradient alone: of ``y.sum()`` that needs none, and what the
    second derivative lacks would be left out without a word.
    """

    @wraps(backward)
    def run(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # which refuses create_graph itself
            return backward(ctx, *grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        return tuple(g if g is None else _NotAgain.apply(g.requires_grad_()) for g in gradients)

    return run


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "MXFP8 GEMMs cannot be differentiated twice: compute what needs a second derivative, such as a gradient "
            "penalty, with layers that are not converted"
        )
