"""What every public function refuses before it looks at shapes: things that are no ordinary tensors, and transforms."""

import torch
from torch.distributed.tensor import DTensor

from titan_mxfp8.format.mx import MXTensor

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_OPTIONAL = frozenset(("bias", "b1", "b3", "b2"))
_ADVICE = {
    "ndarray": ": torch.from_numpy makes one",
    "Proxy": ": torch.fx cannot trace MXFP8 layers, use torch.export, or a Tracer whose is_leaf_module names them",
}
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", bool)  # without it, torch's own errors do


def plain(function: str, **operands: torch.Tensor | MXTensor | None) -> list[torch.Tensor | MXTensor | None]:
    """The operands of a public function, of which lazily negated ones are negated: kernels read memory.

    Raises:
        ValueError: something that is no tensor, or a tensor of another kind than an ordinary one.
        RuntimeError: a transform, as of ``refuse_transforms``.
    """
    if torch.compiler.is_compiling():  # which sees operators, and says itself what it cannot trace
        return [*operands.values()]
    if _transforms_active() or torch.jit.is_tracing():
        refuse_transforms()
    for name, x in operands.items():
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested or x.is_neg():
            if x is not None or name not in _OPTIONAL:
                operands[name] = _made_plain(function, name, x)
    return [*operands.values()]


def _made_plain(function: str, name: str, x: object) -> torch.Tensor | MXTensor:
    if isinstance(x, MXTensor):
        return x
    kind = type(x).__name__
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{function}: {name} must be a torch.Tensor, got {kind}{_ADVICE.get(kind, '')}")
    if isinstance(x, DTensor):
        raise ValueError(f"{function}: {name} is a DTensor: pass what this rank holds of it, {name}.to_local()")
    if x.is_nested:
        raise ValueError(
            f"{function}: {name} is nested: pass the rows of all its tensors, {name}.values() where layout=torch.jagged"
        )
    if x.layout is not torch.strided:
        raise ValueError(f"{function}: {name} is of layout {x.layout}: pass {name}.to_dense()")
    return x.resolve_neg()


def refuse_transforms(dy: torch.Tensor | None = None) -> None:
    """Raises RuntimeError within a transform of torch that would look inside the GEMMs; ``dy``: in backward."""
    active = _transforms_active()
    try:
        if dy is not None:
            dy.untyped_storage()
    except NotImplementedError:  # a tensor of is_grads_batched, for which torch has no public name, has no storage
        active = True
    if active:
        raise RuntimeError(
            "MXFP8 layers take no transforms of torch.func (grad, vjp, jvp, vmap, ...) and no batched gradients "
            "(is_grads_batched, vectorize=True): use backward() or torch.autograd.grad, sample by sample, or layers "
            "that are not converted"
        )
    if torch.jit.is_tracing():
        raise RuntimeError("torch.jit.trace cannot trace MXFP8 layers: use torch.export")
