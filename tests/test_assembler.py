"""Which ptxas compiles the kernels, and that it is given back."""

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
    monkeypatch.setenv("TRITON_PTXAS_PATH", named)

    class Nvidia:
        ptxas = NvidiaTool("own", own)

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


@pytest.mark.integration
def test_kernels_are_compiled_with_it_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, own, newer = torch.empty(32), knobs.nvidia.ptxas, tmp_path / "ptxas"
    newer.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {own.path} "$@"\n')
    newer.chmod(0o755)
    monkeypatch.setattr(assembler, "ptxas", lambda capability: NvidiaTool(str(newer), own.version))
    with compile_only("sm_90") as kernels:
        Kernel(_fill).launch(1, (out,), (), (), (32,), device=out.device)
        _fill[(1,)](out, 64)
    assert len(kernels) == 2
    assert (tmp_path / "calls").read_text().count("--gpu-name=sm_90") == 1
    assert own == knobs.nvidia.ptxas
