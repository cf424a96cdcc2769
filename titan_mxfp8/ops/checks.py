"""Checks of what every op takes: that operands are ordinary tensors, dtypes, sizes, devices; that nothing transforms
it."""

import torch
from torch.distributed.tensor import DTensor

from titan_mxfp8.format.mx import BLOCK_SIZE, MXTensor

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_TAKE_QUANTIZED = frozenset((("mxfp8_linear", "x"), ("mxfp8_grouped_mm", "a")))
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
        if (function, name) in _TAKE_QUANTIZED:
            return x
        raise ValueError(f"{function}: {name} is an MXTensor: pass the tensor that it was made of")
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


def check_flags(**flags: object) -> None:
    """Raises ValueError unless all are True or False: ``"false"`` is not false."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise ValueError(f"{name} = {value!r}: it must be True or False")


def check_dtypes(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless each tensor that is not None is bf16 or fp32."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name} must be bfloat16 or float32, got {x.dtype}: cast it first")


def check_features(sizes: dict[str, int]) -> None:
    """Raises ValueError unless each feature dimension, by its name, is a positive multiple of 32."""
    for name, size in sizes.items():
        if size == 0 or size % BLOCK_SIZE:
            raise ValueError(
                f"{name} is {size}, but MXFP8 scales blocks of {BLOCK_SIZE} features: make it a positive multiple of "
                f"{BLOCK_SIZE}, or leave this layer in bf16"
            )


def check_devices(**operands: torch.Tensor | MXTensor | None) -> None:
    """Raises ValueError unless all operands that are not None are on one device."""
    devices = {}
    for name, x in operands.items():
        if x is not None:
            devices[name] = x.qdata.device if isinstance(x, MXTensor) else x.device
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"operands must be on one device, got {places}: move them, or initialise what is on meta")


def check_offs_type(offs: torch.Tensor, groups: int | None = None) -> None:
    """Raises ValueError unless ``offs`` is a non-empty int32 vector, of length ``groups`` if given."""
    if not isinstance(offs, torch.Tensor):
        raise ValueError(f"offs must be an int32 tensor of end offsets, one per group, got {offs!r}")
    if offs.dtype != torch.int32 or offs.ndim != 1 or offs.shape[0] == 0:
        raise ValueError(
            f"offs must be an int32 vector of end offsets, one per group, got {offs.dtype} of shape "
            f"{tuple(offs.shape)}: torch.cumsum(group_sizes, 0, dtype=torch.int32) makes one"
        )
    if groups is not None and offs.shape[0] != groups:
        raise ValueError(f"offs has {offs.shape[0]} groups but there are {groups} experts")


def check_offs_values(offs: torch.Tensor | None, rows: int) -> None:
    """Raises ValueError if ``offs`` on CPU, where looking costs no sync, is negative, decreasing or past ``rows``."""
    if offs is None or not offs.is_cpu:
        return
    values = offs.tolist()
    if values[0] < 0 or values != sorted(values):
        raise ValueError(f"offs must be non-decreasing end offsets of the groups, got {values}")
    if values[-1] > rows:
        raise ValueError(f"offs ends at {values[-1]} but there are only {rows} rows: {values}")


def check_activations(name: str, x: torch.Tensor | MXTensor) -> None:
    """Raises ValueError unless ``x`` is bf16 or fp32, or an ``MXTensor`` as forward multiplies it."""
    if not isinstance(x, MXTensor):
        check_dtypes(**{name: x})
        return
    last = len(x.shape) - 1
    if x.axis != last:
        raise ValueError(
            f"operand {name} of shape {tuple(x.shape)} is quantised along axis {x.axis}, but this GEMM contracts "
            f"axis {last}: quantise the high-precision tensor along that axis"
        )
    if x.block != "1x32" or x.qdata.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} must be float8_e4m3fn in 1x32 blocks, got {x.qdata.dtype} in {x.block} blocks")
