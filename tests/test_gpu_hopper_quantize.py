"""The quantise kernels that rebase on an SM90 GPU: bit for bit against the reference on the CPU.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest tests/test_gpu_hopper_quantize.py`` must be clean
as well.
"""

import pytest
import torch
from kernel_checks import E4M3, E5M2, FORMATS, REBASINGS, check_even, check_rebased, partly_even, uneven, wild

from titan_mxfp8.testing import SPREADS, group_sizes, make_offs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)

BF16, FP32 = torch.bfloat16, torch.float32
# Tile edges (128 rows, 128 columns), block edges, sizes that 16-byte accesses do not fit, one row, one column.
SHAPES = [(256, 512), (384, 160), (129, 70), (1, 2048), (1000, 1), (33, 4099), (3, 136, 288)]


@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", [BF16, FP32])
@pytest.mark.parametrize("blocks", REBASINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_axes(shape: tuple[int, ...], blocks: str, in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    check_rebased(uneven(shape, in_dtype, "cuda"), rounding, dtype, blocks)
    check_rebased(wild(shape, in_dtype, "cuda"), rounding, dtype, blocks)


@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_even(shape: tuple[int, ...], in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    for make in (partly_even, uneven, wild):
        x = make(shape, in_dtype, "cuda")
        check_even(x, rounding, dtype)
        check_even(x.mT, rounding, dtype)
    squares = partly_even((9, 12), in_dtype, "cuda").repeat_interleave(32, 0).repeat_interleave(32, 1)
    check_rebased(squares, rounding, dtype, "32x32 to even")


@pytest.mark.parametrize("blocks", REBASINGS)
def test_strides(blocks: str):
    base = uneven((2, 140, 264), BF16, "cuda")
    for x in (base.mT, base[:, 1::2, 3:99], base[..., ::2]):
        check_rebased(x, "rceil", E4M3, blocks)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rows, groups, cols", [(4096, 8, 256), (3001, 48, 136), (1500, 300, 40)])
def test_ragged(rows: int, groups: int, cols: int, spread: str):
    """All rows in groups, and a tail of 333 that belongs to none."""
    for in_dtype, format_ in zip((BF16, FP32), (("rceil", E4M3), ("floor", E5M2)), strict=True):
        for make in (uneven, wild):
            x = make((rows, cols), in_dtype, "cuda")
            for sizes in (group_sizes(spread, rows, groups), group_sizes(spread, rows - 333, groups)):
                for blocks in ("1x32 to 1x128", "1x32 to 32x128"):
                    check_rebased(x, *format_, blocks, make_offs(sizes, "cuda"))
