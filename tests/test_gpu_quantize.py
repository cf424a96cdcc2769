"""The quantise, dequantise and pad kernels on a GPU: bit for bit against the reference on the CPU.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest -k "not int32" tests/test_gpu_quantize.py`` must
be clean as well.
"""

import pytest
import torch
from kernel_checks import (
    E4M3,
    E5M2,
    FORMATS,
    assert_same,
    check_dequantize,
    check_every_byte,
    check_pad,
    check_quantize,
    check_quantize_both,
    check_quantize_dequantize,
    wild,
)

from titan_mxfp8 import quantize
from titan_mxfp8.backends import triton as backend
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.ops.pad import pad_token_groups, unpad_token_groups
from titan_mxfp8.testing import SPREADS, group_sizes, make_offs, poisoned_empty

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP32 = torch.bfloat16, torch.float32
# Tile edges (128 rows, 128 columns of bf16), block edges, sizes that 16-byte accesses do not fit, one row, one column.
SHAPES = [(256, 512), (384, 160), (129, 70), (1, 2048), (1000, 1), (33, 4099), (5, 96, 224), (2, 3, 40, 72)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_every_bfloat16(rounding: str, dtype: torch.dtype):
    """Each of the 65536, in a block of neighbours and in a block whose maximum is 2^8 times larger."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 32)
    high = (every.float().abs().amax(1, keepdim=True) * 256).to(BF16)
    for x in (every.cuda(), torch.cat([high, every[:, 1:]], 1).cuda()):
        check_quantize(x, 1, rounding, dtype, "1x32")
        check_quantize_both(x, rounding, dtype, "1x32")


@pytest.mark.parametrize("rounding, dtype", FORMATS)
@pytest.mark.parametrize("in_dtype", [BF16, FP32])
@pytest.mark.parametrize("block", ["1x32", "32x32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_axis(shape: tuple[int, ...], block: str, in_dtype: torch.dtype, rounding: str, dtype: torch.dtype):
    x = wild(shape, in_dtype, "cuda")
    check_quantize(x, x.ndim - 1, rounding, dtype, block)
    check_quantize(x, x.ndim - 2, rounding, dtype, block)
    check_quantize_both(x, rounding, dtype, block)


@pytest.mark.parametrize("block", ["1x32", "32x32"])
def test_strides(block: str):
    base = wild((3, 130, 264), BF16, "cuda")
    for x in (base.mT, base[:, 1::2, 3:99], base[:1].expand(2, 130, 264), base.permute(1, 0, 2), base[..., ::2]):
        for axis in (1, 2):
            check_quantize(x, axis, "rceil", E4M3, block)
        check_quantize_both(x, "rceil", E4M3, block)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rows, groups, cols", [(4096, 8, 256), (3001, 48, 136), (2000, 160, 64), (1500, 300, 40)])
def test_ragged(rows: int, groups: int, cols: int, spread: str):
    """All rows in groups, and a tail of 333 that belongs to none."""
    for in_dtype, format_ in zip((BF16, FP32), (("rceil", E4M3), ("floor", E5M2)), strict=True):
        x = wild((rows, cols), in_dtype, "cuda")
        for sizes in (group_sizes(spread, rows, groups), group_sizes(spread, rows - 333, groups)):
            offs = make_offs(sizes, "cuda")
            check_quantize(x, 0, *format_, "1x32", offs)
            check_quantize_both(x, *format_, "1x32", offs)
            check_quantize_dequantize(x, *format_, "1x32", offs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounding, dtype", FORMATS)
def test_dequantize(rounding: str, dtype: torch.dtype, shape: tuple[int, ...]):
    x = wild(shape, FP32, "cuda")
    for block in ("1x32", "32x32"):
        for axis in (x.ndim - 2, x.ndim - 1):
            check_dequantize(x, axis, dtype, block)
        check_quantize_dequantize(x, rounding, dtype, block)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_byte(dtype: torch.dtype):
    check_every_byte(dtype, "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("alignment", [16, 32, 48, 128])
def test_pad(alignment: int, dtype: torch.dtype):
    for spread in SPREADS:
        for rows, groups, cols in ((1000, 7, 1536), (777, 160, 100), (300, 300, 8), (64, 1, 7)):
            check_pad(wild((rows, cols), dtype, "cuda"), group_sizes(spread, rows, groups), alignment)
            check_pad(wild((rows, cols), dtype, "cuda"), group_sizes(spread, rows - 20, groups), alignment)


@pytest.mark.alone
def test_beyond_int32():
    """2^31 elements and more, in the input and in both outputs: the last rows are where 32-bit offsets would fail."""
    rows, cols, edge = 2**18 + 32, 8192 + 64, 4096
    x = torch.randn((rows, cols), dtype=BF16, device="cuda")
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32", "offs": None}
    with poisoned_empty():
        last, first = backend.quantize_both(x, **kwargs)
    expected = reference.quantize_both(x[-edge:].cpu(), **kwargs)
    assert_same(MXTensor(last.qdata[-edge:], last.scale[-edge:], 1, "1x32", BF16), expected[0])
    tail = MXTensor(
        first.qdata.mT[:, -edge:].contiguous().mT, first.scale.mT[:, -edge // 32 :].contiguous().mT, 0, "1x32", BF16
    )
    assert_same(tail, expected[1])
    one = quantize(x, backend="triton")
    assert torch.equal(one.qdata.view(torch.uint8), last.qdata.view(torch.uint8)) and torch.equal(one.scale, last.scale)


def test_compiles_with_dynamic_tokens():
    """One graph, and one compilation for all token counts."""

    def all_ops(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        last, first = quantize(x), quantize(x, 0, offs=offs)
        padded, _ = pad_token_groups(x, offs, 32)
        back = unpad_token_groups(padded, offs, 32, x.shape[0])
        return last.qdata, last.scale, first.qdata, first.scale, back

    compiled = torch.compile(all_ops, fullgraph=True, dynamic=True)
    for step, rows in enumerate((200, 333, 1024)):
        x, offs = wild((rows, 160), BF16, "cuda"), make_offs(group_sizes("zipf", rows, 6, step), "cuda")
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            outputs = compiled(x, offs)
        for ours, theirs in zip(outputs, all_ops(x.cpu(), offs.cpu()), strict=True):
            raw = torch.uint8 if ours.dtype != BF16 else torch.int16
            assert torch.equal(ours.cpu().view(raw), theirs.view(raw))


def test_cuda_graph_with_changing_groups():
    """A sync cannot be captured; replays see the new offsets."""
    rows, cols, groups = 1000, 256, 9
    x, offs = wild((rows, cols), BF16, "cuda"), make_offs([0] * groups, "cuda")
    kwargs = {"rounding": "rceil", "elem_dtype": E4M3, "block": "1x32", "offs": offs}

    def step():
        padded, padded_offs = pad_token_groups(x, offs, 32)
        return backend.quantize_both(x, **kwargs), padded, padded_offs

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (last, first), padded, padded_offs = step()
    for seed, spread in enumerate(SPREADS):
        x.copy_(wild((rows, cols), BF16))
        offs.copy_(make_offs(group_sizes(spread, rows - 100, groups, seed)))
        graph.replay()
        expected = reference.quantize_both(x.cpu(), **kwargs | {"offs": offs.cpu()})
        assert_same(last, expected[0])
        assert_same(first, expected[1])
        expected_rows, expected_offs = pad_token_groups(x.cpu(), offs.cpu(), 32)
        assert torch.equal(padded.cpu().view(torch.int16), expected_rows.view(torch.int16))
        assert torch.equal(padded_offs.cpu(), expected_offs)
