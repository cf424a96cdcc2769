"""The one place that looks at hardware: what a device, or a named GPU of a cluster, can do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

# How tensor cores multiply. scaled: FP8 elements and E8M0 scales (SM100, gfx950). bf16_tma: bf16 values, loaded by the
# tensor memory accelerator (SM90). bf16: bf16 values, loaded through pointers.
Mma = Literal["scaled", "bf16_tma", "bf16"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of processor."""

    arch: str  # ``cpu``, ``sm_90``, ``gfx950``, or another type of device that torch knows
    name: str  # as it calls itself

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability; None for anything but an NVIDIA GPU."""
        digits = self.arch.removeprefix("sm_")
        return (int(digits[:-1]), int(digits[-1])) if self.arch.startswith("sm_") else None

    @property
    def mma(self) -> Mma:
        """How the portable GEMMs multiply here. A CPU, that is Triton's interpreter, can do all three."""
        if self.arch.startswith("gfx950"):
            return "scaled"
        major, _ = self.capability or (0, 0)
        return {9: "bf16_tma", 10: "scaled"}.get(major, "bf16")  # SM120 has TMA, not the shared memory for our tiles

    @property
    def was_tried(self) -> bool:
        """Whether this project has ever run there: CPUs, the H100 and the H200."""
        return self.arch == "cpu" or (self.arch == "sm_90" and self.name.startswith(("NVIDIA H100", "NVIDIA H200")))


# GPUs that ``[cluster] gpu`` of a config may name.
CLUSTER_GPUS = {
    name: Hardware(arch, f"NVIDIA {name}")
    for name, arch in (("H20", "sm_90"), ("H100", "sm_90"), ("H200", "sm_90"), ("B200", "sm_100"), ("GB200", "sm_100"))
}


_overrides: list[Hardware] = []


@contextmanager
def override_hardware(hardware: Hardware) -> Iterator[None]:
    """Within, every device is taken for ``hardware``, so that a model on the meta device is planned as it would be
    there. Nothing can be computed so."""
    _overrides.append(hardware)
    try:
        yield
    finally:
        _overrides.pop()


def hardware_of(device: torch.device) -> Hardware:
    """What ``device`` is."""
    return _overrides[-1] if _overrides else _look_at(device)


@cache
def _look_at(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return Hardware(device.type, str(device))
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        return Hardware(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0], name)
    major, minor = torch.cuda.get_device_capability(device)
    return Hardware(f"sm_{major}{minor}", name)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; else 3: the interpreter's programs, which run one by one, then take further tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
