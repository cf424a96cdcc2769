"""Checks of what every op takes."""

import torch

from titan_mxfp8.format.mx import BLOCK_SIZE, MXTensor


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
