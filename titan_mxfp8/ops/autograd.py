"""What the autograd functions of the package share."""

from collections.abc import Callable
from functools import wraps

import torch

from titan_mxfp8.ops.checks import refuse_transforms

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


def split(tensors: Owned, *counts: int) -> list[Owned]:
    """The first tensors in lists of these lengths, and the rest. ``tensors`` stay: it is to be held by nobody."""
    parts, start = [], 0
    for count in counts:
        parts.append(tensors[start : start + count])
        start += count
    return [*parts, tensors[start:]]


def save_for_backward(
    ctx: torch.autograd.function.FunctionCtx, y: torch.Tensor, *tensors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Saves ``tensors`` for a backward that is ``once_differentiable``. Gives what forward has to return: ``y``, and an
    empty tensor, saved too, which leads backward to all inputs of the function and keeps the memory of none. Compiled
    graphs, which refuse second derivatives themselves, need none."""
    token = None
    if not torch.compiler.is_compiling():
        token = torch.empty(0)  # on the CPU, where it costs the least
        ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, token)
    return y, token


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorates ``backward(ctx, saved, dy)``: ``saved`` is a list of what was saved, which nothing else holds, and
    ``dy`` the gradient of y. Its gradients cannot be differentiated again, whatever is asked for.

    torch's ``once_differentiable`` looks at the output gradient alone: of ``y.sum()`` that needs none. And a second
    derivative that is asked for by inputs, as of ``torch.autograd.grad``, runs only what leads to these inputs. What it
    lacks would be left out without a word.
    """

    @wraps(backward)
    def run(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor | None, _: torch.Tensor | None = None) -> tuple:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        *saved, token = ctx.saved_tensors  # activation checkpointing hands them out once
        if torch.compiler.is_compiling():
            return backward(ctx, saved, dy)
        owned = [saved]
        del saved
        refuse_transforms(dy)
        dy = dy.resolve_neg() if dy.is_neg() else dy
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept; autograd would do so when backward has returned
        ctx.creates_graph = torch.is_grad_enabled()
        if not ctx.creates_graph:
            return backward(ctx, owned.pop(), dy)
        with torch.no_grad():
            gradients = backward(ctx, owned.pop(), dy)
        return tuple(g if g is None else _NotAgain.apply(g, dy, token) for g in gradients)

    return run


class _NotAgain(torch.autograd.Function):
    """A gradient, and what it depends on: dy and, or what leads to, all inputs of the layer."""

    @staticmethod
    def forward(ctx, gradient, *depends_on):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "MXFP8 GEMMs cannot be differentiated twice: compute what needs a second derivative, such as a gradient "
            "penalty, with layers that are not converted"
        )


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether ``torch.export`` traces. Dynamo of torch 2.11 takes torch's own function for True everywhere."""
    return torch.compiler.is_exporting()


def exported(
    function: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor], schema: str
) -> Callable[..., torch.Tensor]:
    """A differentiable function of one output that is one operator with gradients where ``torch.export`` traces, and
    itself elsewhere. Exported graphs hold operators alone, and lose autograd functions around them with their
    gradients. And one operator takes any number of rows, whatever it chooses by them.

    The operator's backward computes forward again. ``fake`` takes the function's arguments and returns an empty output;
    ``schema`` is what the operator takes, as torch writes it.
    """
    name = f"titan_mxfp8::{function.__name__.strip('_')}"
    operator = torch.library.custom_op(name, torch.no_grad()(function), mutates_args=(), schema=f"({schema}) -> Tensor")
    operator.register_fake(fake)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*[x if isinstance(x, torch.Tensor) else None for x in inputs])
        ctx.options = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    def backward(ctx, dy):
        pairs = zip(ctx.saved_tensors, ctx.options, ctx.needs_input_grad, strict=True)
        args = [option if x is None else x.detach().requires_grad_(needed) for x, option, needed in pairs]
        with torch.enable_grad():
            y = function(*args)
        wanted = [x for x, needed in zip(args, ctx.needs_input_grad, strict=True) if needed]
        made = iter(torch.autograd.grad(y, wanted, dy.detach()))
        gradients = [next(made) if needed else None for needed in ctx.needs_input_grad]
        if not torch.is_grad_enabled():
            return tuple(gradients)
        return tuple(g if g is None else _NotAgain.apply(g, dy, *ctx.saved_tensors) for g in gradients)

    operator.register_autograd(backward, setup_context=save)

    def run(*args):
        return operator(*args) if torch.compiler.is_compiling() and is_exporting() else function(*args)

    return run
