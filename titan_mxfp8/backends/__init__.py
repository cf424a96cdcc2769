"""The backends, and the one place that looks at hardware.

A backend is a module with the functions of ``format/reference.py``, same signatures, same quantised bits: ``quantize``,
``quantize_both``, ``operand_forms``, ``quantize_operand``, ``quantize_operand_both``, ``gemm_m_grouped``,
``gemm_k_grouped`` and ``wgrad_bf16``. It is imported when it is chosen.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A row of the table.

    Attributes:
        name: what users write.
        module: import path of the module with the functions.
        needs: the hardware it needs, in words.
        runs_on: whether it runs on this device.
        rebases: whether it takes ``rebase``.
    """

    name: str
    module: str
    needs: str
    runs_on: Callable[[torch.device], bool]
    rebases: bool


# In order of preference: ``auto`` takes the first that runs on the device.
BACKENDS = (
    Backend(
        name="hopper",
        module="titan_mxfp8.backends.hopper",
        needs="an NVIDIA GPU of SM90 (H100, H200)",
        runs_on=lambda device: device.type == "cuda" and _is_sm90(device),
        rebases=True,
    ),
    Backend(
        name="triton",
        module="titan_mxfp8.backends.triton",
        needs="an NVIDIA GPU of SM80 or newer, or an AMD gfx942 or gfx950",
        runs_on=lambda device: device.type == "cuda" and _runs_triton(device),
        rebases=False,
    ),
    Backend(
        name="reference",
        module="titan_mxfp8.format.reference",
        needs="anything torch runs on",
        runs_on=lambda device: True,
        rebases=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen backend and why, in words for the log."""

    name: str
    reason: str


@cache
def select(backend: str, device: torch.device, rebase: bool = False) -> Selection:
    """Chooses the backend for ``device``: the one named, or with ``auto`` the first of the table that runs there.

    Raises:
        ValueError: unknown name, a named backend that cannot run on ``device``, or ``rebase`` with one that cannot.
    """
    if backend == "auto":
        row = next(row for row in BACKENDS if row.runs_on(device))
        passed_over = [f"{other.name} needs {other.needs}" for other in BACKENDS[: BACKENDS.index(row)]]
        reason = "; ".join([f"for {_describe(device)}", *passed_over])
    else:
        row, reason = _named(backend, device), "named by the user"
    if rebase and not row.rebases:
        able = " or ".join(repr(other.name) for other in BACKENDS if other.rebases)
        raise ValueError(
            f"rebase is asked for, but backend {row.name!r} ({reason}) cannot: use backend {able}, or no rebase"
        )
    return Selection(name=row.name, reason=reason)


@cache
def load(backend: str, device: torch.device) -> ModuleType:
    """The module of ``select(backend, device)``."""
    name = select(backend, device).name
    return importlib.import_module(next(row.module for row in BACKENDS if row.name == name))


def _named(backend: str, device: torch.device) -> Backend:
    row = next((row for row in BACKENDS if row.name == backend), None)
    if row is None:
        known = ", ".join(["auto", *(row.name for row in BACKENDS)])
        raise ValueError(f"unknown backend {backend!r}: use one of {known}")
    if not row.runs_on(device):
        raise ValueError(
            f"backend {backend!r} needs {row.needs} and cannot run on {_describe(device)}: use 'auto' or 'reference'"
        )
    return row


def _is_sm90(device: torch.device) -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


def _runs_triton(device: torch.device) -> bool:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx942", "gfx950"))
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
