"""Compiles the package's kernels for GPUs that this machine does not have, and reads what came out.

    with compile_only(TARGETS["sm_90"]) as kernels:
        quantize(torch.empty(256, 256, dtype=torch.bfloat16), ...)  # the project's own Python, on CPU tensors
    kernels[0].spills, kernels[0].count("F2FP")

A stand-in driver takes the place of the GPU's: every launch compiles, with the argument types, divisibility and options
of the real call, and nothing runs. Triton's wheel brings ptxas, nvdisasm and an assembler for AMD. Triton 3.6 and 3.9.
"""

import contextlib
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from titan_mxfp8.backends.common import assembler

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 89, 90, 100, 120)}
TARGETS |= {arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")}
# What a block of threads may take: 163, 99, 227, 227 and 99 KiB on NVIDIA, the LDS of a compute unit on AMD.
SHARED_BYTES = {
    "sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376,
    "gfx942": 65536, "gfx950": 163840,
}  # fmt: skip
# Those of an A100, L40S, H200, B200, RTX 5090, MI300X and MI355X.
MULTIPROCESSORS = {
    "sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304, "gfx950": 256
}  # fmt: skip

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_devices = itertools.count(1000)  # a number for each use: Triton keeps compiled kernels by device
# Of this process: a kernel from Triton's cache comes without the log of ptxas, which was read when it was compiled.
_cache, _inspected = tempfile.TemporaryDirectory(), {}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel. ``spills`` are bytes on NVIDIA and on AMD vector registers: scalar ones are
    spilled to those, not to memory. ``warnings`` are of ptxas."""

    name: str
    target: str
    warps: int
    registers: int
    spills: int
    shared: int
    warnings: tuple[str, ...]
    ptx: str
    binary: bytes

    @cached_property
    def assembly(self) -> str:
        """Not made for kernels of which nobody asks: starting nvdisasm takes as long as five runs of ptxas."""
        if TARGETS[self.target].backend == "hip":
            return self.binary.decode()
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(self.binary)
            cubin.flush()
            command = [_NVDISASM, "-ndf", "-c", cubin.name]  # without following branches, a fourth of the time
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def count(self, opcode: str) -> int:
        """Instructions whose opcode starts so: ``QGMMA`` (sm_90), ``v_mfma_scale`` (gfx950)."""
        return len(re.findall(rf"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?{re.escape(opcode)}", self.assembly, re.M))

    def __str__(self) -> str:
        return (
            f"{self.target} {self.name}: {self.warps} warps, {self.registers} registers, {self.spills} spilled, "
            f"{self.shared} bytes shared{''.join('; ' + line for line in self.warnings)}"
        )


class _Driver:
    """As much of a Triton driver as ``JITFunction.run(warmup=True)`` asks for."""

    def __init__(self, name: str):
        self.name, self.device, self.utils = name, next(_devices), self

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": MULTIPROCESSORS[self.name], "max_shared_mem": SHARED_BYTES[self.name]}

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty


@contextlib.contextmanager
def compile_only(target: str) -> Iterator[list[Kernel]]:
    """Within, launches compile for ``target`` and the kernels join the list."""
    kernels: list[Kernel] = []
    run = JITFunction.run

    def compile_launch(self, *args, grid, warmup=False, **kwargs):
        known = set(map(id, self.device_caches[driver.active.get_current_device()][0].values()))
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in _inspected:
            _inspected[compiled.hash] = _inspect(target, compiled, log.getvalue())
        if id(compiled) not in known:
            kernels.append(_inspected[compiled.hash])
        return compiled

    with (
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        mock.patch.object(JITFunction, "run", compile_launch),
        mock.patch.object(driver, "_active", _Driver(target)),
        mock.patch.object(assembler, "FOLDER", _cache.name),
    ):
        triton.knobs.cache.dir = _cache.name
        triton.knobs.nvidia.dump_ptxas_log = True
        yield kernels


@contextlib.contextmanager
def specializations(target: str) -> Iterator[set[str]]:
    """Within, launches add what they would compile for ``target`` to the set: the kernel and what it is compiled for.

    Nothing is compiled, so this takes no time, and nothing runs.
    """
    found: set[str] = set()

    def note(*, key, repr, fn, **_) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # spares the compilation

    with triton.knobs.runtime.scope(), mock.patch.object(driver, "_active", _Driver(target)):
        triton.knobs.runtime.jit_cache_hook = note
        yield found


def _inspect(target: str, compiled, log: str) -> Kernel:
    def number(pattern: str, text: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    common = {"target": target, "name": compiled.metadata.name}
    common |= {"warps": compiled.metadata.num_warps, "shared": compiled.metadata.shared}
    if TARGETS[target].backend == "hip":
        text = compiled.asm["amdgcn"]
        return Kernel(
            registers=number(r"\.vgpr_count:\s+(\d+)", text),
            spills=number(r"\.vgpr_spill_count:\s+(\d+)", text),
            warnings=(),
            ptx="",
            binary=text.encode(),
            **common,
        )
    return Kernel(
        registers=number(r"Used (\d+) registers", log),
        spills=number(r"(\d+) bytes spill", log),
        warnings=tuple(line for line in log.splitlines() if "warning" in line.lower() or "C75" in line),
        ptx=compiled.asm["ptx"],
        binary=compiled.asm["cubin"],
        **common,
    )
