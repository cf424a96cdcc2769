"""Which ptxas compiles the kernels, and that it is given back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
from aot import compile_only
from triton import knobs
from triton import language as tl
from triton.backends.nvidia import compiler
from triton.knobs import NvidiaTool

from titan_mxfp8.backends.common import assembler
from titan_mxfp8.backends.common.assembler import ptxas
from titan_mxfp8.backends.common.launch import Kernel

SM90 = (9, 0)


@triton.jit
def _fill(out, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), 1.0)


@pytest.fixture(autouse=True)
def as_with_triton_36(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9, which CI has, takes for SM90 what it takes for SM100."""
    monkeypatch.setattr(
        compiler, "get_ptxas", lambda arch: knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    )


@pytest.mark.parametrize(
    "own, newer, named, capability, expected",
    [
        ("12.8", "12.9", "", SM90, "12.9"),  # Triton 3.6
        ("12.8", "13.1", "", SM90, "12.8"),  # 3.7, whose 13.1 gains nothing
        ("12.9", "13.3", "", SM90, "12.9"),  # 3.8
        ("12.10", "12.9", "", SM90, "12.10"),
        ("12.8", None, "", SM90, "12.8"),
        ("12.8", "12.9", "own", SM90, "12.8"),
        ("12.8", "12.9", "missing", SM90, "12.9"),  # a program of another machine
        ("12.8", "12.9", "", (8, 0), "12.8"),
        ("12.8", None, "", (8, 0), "12.8"),
        ("12.8", "12.9", "", (10, 0), "12.9"),
    ],
)
def test_hopper_takes_the_newer_ptxas(
    own: str, newer: str | None, named: str, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "NAMED", named or None)

    class Nvidia:
        @property
        def ptxas(self) -> NvidiaTool:
            return NvidiaTool("own", own)

        @property
        def ptxas_blackwell(self) -> NvidiaTool:
            if newer is None:
                raise RuntimeError("Cannot find ptxas-blackwell")
            return NvidiaTool("newer", newer)

    monkeypatch.setattr(knobs, "nvidia", Nvidia())
    assert ptxas(capability).version == expected


@pytest.mark.integration
def test_kernels_stay_where_triton_kept_them_before_the_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which names another folder in the environment when it compiles a kernel, so in some runs and not in others."""
    out, own, inductors = torch.empty(32), tmp_path / "own", tmp_path / "inductors"
    with compile_only("sm_90"):
        monkeypatch.setattr(assembler, "FOLDER", str(own))
        knobs.cache.dir = str(inductors)  # and so the variable
        Kernel(_fill).launch(1, (out,), (), (), (32,), device=out.device)
        assert list(own.rglob("_fill.cubin")) and not inductors.exists()
        _fill[(1,)](out, 64)
        assert list(inductors.rglob("_fill.cubin")), "the user's"
        own.rename(tmp_path / "gone")
        own.write_text("no folder")
        assembler._is_writable.cache_clear()
        Kernel(_fill).launch(1, (out,), (), (), (128,), device=out.device)
        assert len(list(inductors.rglob("_fill.cubin"))) == 2, "where the own one cannot be"


def recording_ptxas(folder: Path) -> tuple[Path, Callable[[], int]]:
    """A ptxas that does what Triton's newer one does, and how many kernels it has compiled."""
    program, calls = folder / "ptxas", folder / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {knobs.nvidia.ptxas_blackwell.path} "$@"\n')
    program.chmod(0o755)
    calls.touch()
    return program, lambda: calls.read_text().count("--gpu-name=sm_90")


@pytest.mark.integration
def test_kernels_are_compiled_with_it_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, own = torch.empty(32), knobs.nvidia.ptxas
    newer, compiled = recording_ptxas(tmp_path)
    monkeypatch.setattr(assembler, "ptxas", lambda capability: NvidiaTool(str(newer), own.version))
    with compile_only("sm_90") as kernels:
        Kernel(_fill).launch(1, (out,), (), (), (32,), device=out.device)
        _fill[(1,)](out, 64)
    assert len(kernels) == 2 and compiled() == 1
    assert own == knobs.nvidia.ptxas


@pytest.mark.integration
def test_the_ptxas_that_the_inductor_names_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names one where it compiles a kernel, so in some runs and not in others."""
    out, own = torch.empty(512), ptxas(SM90)
    inductors, compiled = recording_ptxas(tmp_path)
    with compile_only("sm_90"):
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(inductors))
        Kernel(_fill).launch(1, (out,), (), (), (256,), device=out.device)
        assert compiled() == 0 and ptxas(SM90) == own
        assert knobs.nvidia.ptxas.path == str(inductors), "the user's kernels take it"
        monkeypatch.setattr(assembler, "NAMED", str(inductors))
        Kernel(_fill).launch(1, (out,), (), (), (512,), device=out.device)
        assert compiled() == 1
