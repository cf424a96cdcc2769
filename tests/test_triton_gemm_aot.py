"""The GEMM kernels compiled for GPUs that are not here: no spills, pipelined, the matrix instruction that is meant.

``pytest -rP tests/test_triton_gemm_aot.py`` prints what was found.
"""

import pytest
import torch
from aot import SHARED_BYTES, Kernel, compile_only

from titan_mxfp8.backends.triton import gemm
from titan_mxfp8.backends.triton.operands import Mma
from titan_mxfp8.format.mx import MXTensor

M, N, K, E = 4096, 512, 1056, 8  # K is a multiple of 32 but of no tile
BF16 = torch.bfloat16

# target, how it multiplies, instruction
TARGETS: tuple[tuple[str, Mma, str], ...] = (
    ("sm_80", "bf16", "HMMA"),
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


def stored(*shape: int, mma: Mma, axis: int) -> MXTensor:
    """An operand of this shape, quantised along ``axis``, as the quantiser leaves it."""
    if mma != "scaled":
        return MXTensor(torch.empty(shape, dtype=BF16), torch.empty(0, dtype=torch.uint8), axis, "1x32", BF16)
    *rest, length = torch.empty(shape, device="meta").movedim(axis, -1).shape
    qdata = torch.empty(*rest, length, dtype=torch.float8_e4m3fn).movedim(-1, axis)
    scale = torch.empty(*rest, length // 32, dtype=torch.uint8).movedim(-1, axis)
    return MXTensor(qdata, scale, axis, "1x32", BF16)


def compile_all(target: str, mma: Mma, tiles: gemm.Tiles) -> dict[str, Kernel]:
    kernels = {}
    padded = M + 32 * E if mma == "scaled" else M
    offs = torch.zeros(E, dtype=torch.int32)
    with compile_only(target) as compiled:
        x, w = stored(M, K, mma=mma, axis=1), stored(E, N, K, mma=mma, axis=2).mT
        gemm.multiply_m_grouped(x, w, offs, torch.empty(E, N, dtype=BF16), BF16, mma, tiles)
        kernels["forward"] = compiled[-1]
        dy, w = stored(M, N, mma=mma, axis=1), stored(E, N, K, mma=mma, axis=1)
        gemm.multiply_m_grouped(dy, w, offs, None, BF16, mma, tiles)
        kernels["dgrad"] = compiled[-1]
        dy, x = stored(padded, N, mma=mma, axis=0).mT, stored(padded, K, mma=mma, axis=0)
        gemm.multiply_k_grouped(dy, x, offs, BF16, mma, tiles)
        kernels["wgrad"] = compiled[-1]
    assert len(compiled) == 3
    return kernels


@pytest.mark.parametrize(
    "target, mma, instruction, tiles",
    ROWS,
    ids=[f"{target}-{mma}-{tiles.bm}x{tiles.bn}x{tiles.bc}-{tiles.stages}" for target, mma, _, tiles in ROWS],
)
def test_compiles(target: str, mma: Mma, instruction: str, tiles: gemm.Tiles):
    for name, kernel in compile_all(target, mma, tiles).items():
        found = kernel.count(instruction)
        print(f"{name}: {kernel}, {found} {instruction}")
        assert kernel.spills == 0 and not kernel.warnings
        assert tiles.programs * kernel.shared <= SHARED_BYTES[target]
        assert found
        if target == "sm_100":
            assert "kind::mxf8f6f4.block_scale" in kernel.ptx
        # Pipelined: the operands of the stages ahead wait in shared memory.
        ahead = tiles.stages - 1
        assert kernel.shared >= ahead * (tiles.bm + tiles.bn) * tiles.bc * (1 if mma == "scaled" else 2)
