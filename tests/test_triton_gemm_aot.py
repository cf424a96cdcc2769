"""The GEMM kernels compiled for GPUs that are not here: no spills, pipelined, the matrix instruction that is meant.

``pytest -rP tests/test_triton_gemm_aot.py`` prints what was found.
"""

import pytest
import torch
from aot import SHARED_BYTES, Kernel, compile_only
from tiers import daily
from triton import __version__ as triton_version

from titan_mxfp8.backends.common import gemm
from titan_mxfp8.backends.hardware import Mma
from titan_mxfp8.format.spec import OperandSpec

pytestmark = pytest.mark.integration

M, N, K, E = 4096, 512, 1056, 8  # K is a multiple of 32 but of no tile
BF16 = torch.bfloat16

# target, how it multiplies, instruction
TARGETS: tuple[tuple[str, Mma, str], ...] = (
    ("sm_80", "bf16", "HMMA"),
    ("sm_89", "bf16", "HMMA"),
    ("sm_120", "bf16", "HMMA"),
    ("sm_90", "bf16_tma", "HGMMA"),
    ("sm_90", "bf16", "HGMMA"),
    ("sm_100", "scaled", "UTCQMMA"),
    ("gfx942", "bf16", "v_mfma_f32_"),
    ("gfx950", "scaled", "v_mfma_scale_f32_"),
)
ROWS = [
    (target, mma, instruction, tiles)
    for target, mma, instruction in TARGETS
    for tiles in (gemm.AMD_TILES if target.startswith("gfx") else gemm.TILES)[mma]
]


def compile_all(target: str, mma: Mma, tiles: gemm.Tiles) -> dict[str, Kernel]:
    spec, offs = OperandSpec(stored="fp8" if mma == "scaled" else "bf16"), torch.zeros(E, dtype=torch.int32)
    x, w, dy = (torch.empty(shape, dtype=BF16) for shape in ((M, K), (E, N, K), (M, N)))
    names, bias = ["forward", "dgrad", "wgrad"], torch.empty(E, N, dtype=BF16)
    a, b = spec.empty(dy, 1, None), spec.empty(w, 1, None)
    with compile_only(target) as compiled:
        gemm.multiply_m_grouped(spec.empty(x, 1, None), spec.empty(w, 2, None), offs, bias, BF16, mma, tiles)
        gemm.multiply_m_grouped(a, b, offs, None, BF16, mma, tiles)
        gemm.multiply_k_grouped(spec.empty(dy, 0, E), spec.empty(x, 0, E), offs, BF16, mma, tiles)
        if mma == "bf16_tma":
            gemm.multiply_m_grouped(a, b, offs, None, BF16, mma, tiles, second=(a, b))
            names.append("sum of two")
    return dict(zip(names, compiled, strict=True))


def name(row: tuple) -> str:
    target, mma, _, tiles = row
    return f"{target}-{mma}-{tiles.bm}x{tiles.bn}x{tiles.bc}-{tiles.stages}"


DAILY = {row[0]: row for row in ROWS if row[0] in ("sm_90", "sm_100", "gfx950") and row[1] != "bf16"}.values()


@pytest.mark.parametrize("target, mma, instruction, tiles", daily(ROWS, *DAILY, ids=name))
def test_compiles(target: str, mma: Mma, instruction: str, tiles: gemm.Tiles):
    for name, kernel in compile_all(target, mma, tiles).items():
        found = kernel.count(instruction)
        print(f"{name}: {kernel}, {found} {instruction}")
        spills = 48 if target == "sm_120" and name == "wgrad" and tiles.warps == 8 else 0
        if target == "sm_100" and name == "forward" and triton_version.startswith("3.8."):
            spills = 800  # neither with 3.7 nor with 3.9
        assert kernel.spills <= spills and not kernel.warnings
        assert tiles.programs * kernel.shared <= SHARED_BYTES[target]
        assert found
        if target == "sm_100":
            assert "kind::mxf8f6f4.block_scale" in kernel.ptx
        # Pipelined: the operands of the stages ahead wait in shared memory.
        ahead = tiles.stages - 1
        assert kernel.shared >= ahead * (tiles.bm + tiles.bn) * tiles.bc * (1 if mma == "scaled" else 2)
