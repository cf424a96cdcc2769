"""Weight gradients that a GEMM adds to what ``.grad`` holds, where autograd would launch another kernel for it.

    autograd:  dw = gemm(..)                        -> param.grad += dw     reads both, writes one
    here:      total, param.grad = param.grad, None
               gemm(.., add_to=total)               -> param.grad = total   a reference

The gradient that the operator returns is then the sum, and autograd's part finds no other one. So hooks that run after
it (``register_post_accumulate_grad_hook``, DDP's) find what they would find otherwise.
"""

import torch
from torch.distributed.tensor import DTensor

_will_execute = getattr(torch._C, "_will_engine_execute_node", None)  # without it, autograd adds


def held_gradients(
    ctx: torch.autograd.function.FunctionCtx, first: int, count: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters among the inputs of an autograd function, and their gradients (fp32, this rank's), which its backward
    may add to; all ``count`` of them, or none.

    None unless autograd is sure to give them back. Each input is a parameter, or what ``DTensor.to_local`` made of one;
    this backward adds to ``.grad``, which ``torch.autograd.grad`` does not; what it makes is not differentiated again;
    no hook of the parameter wants to see what is added; the gradient is no part of a larger buffer, as DDP's or a
    user's, which autograd would leave for other memory where the parameter is used elsewhere in the graph too.
    Compiled graphs do not see parameters: there autograd adds.
    Prehooks of the node that accumulates (``Node.register_prehook``) cannot be seen from Python: they get the sum.

    Args:
        ctx: whose backward is ``once_differentiable``.
        first: number of the first of them among the inputs that are tensors.
    """
    params, totals, seen = [], [], set()
    if torch.compiler.is_compiling() or ctx.creates_graph or _will_execute is None:
        return [], []
    for node, _ in ctx.next_functions[first : first + count]:
        if node is not None and type(node).__name__ == "_ToTorchTensorBackward":
            node = node.next_functions[0][0]
        param = getattr(node, "variable", None)  # of the node that accumulates
        total = None if param is None or param._backward_hooks else param.grad
        if total is None or not _may_add(param, total):
            return [], []
        try:
            if not _will_execute(node):
                return [], []
        except RuntimeError:  # the gradient is handed out
            return [], []
        params.append(param)
        totals.append(total if type(total) is torch.Tensor else total._local_tensor)
        seen.add(totals[-1].data_ptr())
    return (params, totals) if len(seen) == count else ([], [])


def take_gradients(params: list[torch.Tensor], totals: list[torch.Tensor]) -> list[torch.Tensor]:
    """``totals``, to which something was added, away from their parameters, to which autograd gives them. As other
    tensors of the same memory: what anybody else holds autograd would copy."""
    taken = []
    for param, total in zip(params, totals, strict=True):
        torch.autograd.graph.increment_version(total)
        param.grad = None
        taken.append(total.detach())
    return taken


def _may_add(param: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether autograd, which copies what lies otherwise than the parameter, would take the gradient as it is, and a
    kernel can add to it."""
    if isinstance(grad, DTensor):
        if not isinstance(param, DTensor) or grad.placements != param.placements or grad.requires_grad:
            return False
        if not all(placement.is_shard() for placement in grad.placements):
            return False
        param, grad = param._local_tensor, grad._local_tensor
    if type(grad) is not torch.Tensor or grad.dtype != torch.float32 or param.dtype != torch.float32:
        return False
    if grad.requires_grad or grad.layout is not torch.strided or grad.is_neg() or grad.data_ptr() % 16:
        return False
    if grad.untyped_storage().nbytes() != grad.nbytes:
        return False
    return grad.is_contiguous() and grad.stride() == param.stride()
