"""The Hopper GEMMs on an SM90 GPU against the reference on the same quantised operands, made by the reference.

Outputs start as NaN (``poisoned_empty``).
"""

from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
from gemm_checks import BF16, CASES, E4M3, E5M2, FP32, wide

from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.backends.triton.hold import held_multiprocessors
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import REBASED, MXTensor, decode_scale
from titan_mxfp8.testing import group_sizes, make_offs, poisoned_empty, relative_rms

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an SM90 GPU", allow_module_level=True)

# Relative RMS against the reference's fp32 output. fp32: tensor cores keep about 14 bits of an FP8 sum: measured up to
# 3.1e-4 on an H200. bf16: its rounding is at most 2^-8 = 3.9e-3 of an element; measured up to 2.1e-3.
TOLERANCE = {FP32: 6e-4, BF16: 2**-8}
SIZES = {
    **CASES,
    "straddle": ([50, 50], 0),
    "first and last empty": ([0, 127, 128, 129, 0], 0),
    "last alone": ([0, 0, 0, 300], 1),
    "160 experts": (group_sizes("zipf", 3000, 160), 0),
    "zipf": (group_sizes("zipf", 5000, 8), 44),
}
# The forms of both operands, by a name.
FORMS = {"mx": ("mx", "mx"), "even": ("even", "even"), "rebased": ("1x128", "32x128")}
ALL_TILES = [(name, tiles) for name in FORMS for tiles in (gemm.M_GROUPED, gemm.FEW_ROWS)]


@pytest.fixture(autouse=True)
def fresh_inputs():
    torch.seed()


def quantized(x: torch.Tensor, axis: int, block: str, form: str, elem_dtype=E4M3, offs=None) -> MXTensor:
    return reference.quantize_operand(
        x, axis, rounding="rceil", elem_dtype=elem_dtype, block=block, offs=offs, form=form
    )


def patchy(*shape: int) -> torch.Tensor:
    """Patches of 200 rows and 64 columns: ``wide``; or whole numbers, whose scales can be made equal; or large ones and
    small ones, whose scales are equal within a patch, but cannot be made so in two."""
    *rest, rows, cols = shape
    row, col = torch.arange(rows) // 200, torch.arange(cols) // 64
    kind, far = (torch.randint(0, n, (*rest, rows // 200 + 1, cols // 64 + 1))[..., row, :][..., col] for n in (3, 2))
    factor = torch.randint(-3, 4, (*rest, rows, cols // 32 + 1)).exp2().repeat_interleave(32, -1)[..., :cols]
    large_or_small = torch.where(torch.rand(shape) < 0.5, -15.0, 2.0**-11) * 2.0 ** (4 * far)
    patches = torch.where(kind == 0, torch.randint(-15, 16, shape) * factor, large_or_small)
    return torch.where(kind == 2, wide(*shape), patches)


def to_gpu(mx: MXTensor) -> MXTensor:
    return MXTensor(mx.qdata.cuda(), mx.scale.cuda(), mx.axis, mx.block, mx.orig_dtype)


def m_grouped_operands(
    sizes: list[int] | None, extra: int, name: str, c: int, d: int, elem_dtype=E4M3
) -> tuple[MXTensor, MXTensor]:
    form, weight_form = FORMS[name]
    m, experts = sum(sizes or []) + extra, 1 if sizes is None else len(sizes)
    a = quantized(patchy(m, c), 1, "1x32", form, elem_dtype)
    return a, quantized(patchy(experts, d, c), 2, "32x32", weight_form).mT


def check_m_grouped(
    case: str, name: str, tiles: gemm.Tiles, *, c=416, d=288, elem_dtype=E4M3, bias_dtype=None, out_dtype=BF16
) -> float:
    sizes, extra = SIZES[case]
    a, b = m_grouped_operands(sizes, extra, name, c, d, elem_dtype)
    offs = None if sizes is None else make_offs(sizes)
    bias = None
    expected = reference.gemm_m_grouped(a, b, offs, bias=None, out_dtype=FP32)
    if bias_dtype is not None:  # as large as the products, or a wrong one would not show
        bias = (torch.randn(b.shape[0], d) * expected.square().mean().sqrt()).to(bias_dtype)
        expected = reference.gemm_m_grouped(a, b, offs, bias=bias, out_dtype=FP32)
    offs, bias = (None if t is None else t.cuda() for t in (offs, bias))
    with poisoned_empty():
        out = gemm.multiply_m_grouped(to_gpu(a), to_gpu(b), offs, bias, out_dtype, tiles)
    assert out.dtype == out_dtype and out.shape == expected.shape
    error = relative_rms(out.cpu(), expected)
    assert error <= TOLERANCE[out_dtype], f"{case} {name}: {error:.2e}"
    assert sizes is None or not out[sum(sizes) :].any()
    return error


def check_k_grouped(case: str, *, n=416, k=288, elem_dtype=E4M3, out_dtype=BF16) -> float:
    sizes, extra = SIZES[case]
    m = sum(sizes or []) + extra
    offs = None if sizes is None else make_offs(sizes)
    a = quantized(wide(m, n), 0, "1x32", "1x128", elem_dtype, offs).mT
    b = quantized(wide(m, k), 0, "1x32", "1x128", E4M3, offs)
    expected = reference.gemm_k_grouped(a, b, offs, out_dtype=FP32)
    with poisoned_empty():
        out = gemm.gemm_k_grouped(to_gpu(a), to_gpu(b), None if offs is None else offs.cuda(), out_dtype=out_dtype)
    assert out.dtype == out_dtype and out.shape == expected.shape
    error = relative_rms(out.cpu(), expected)
    assert error <= TOLERANCE[out_dtype], f"{case}: {error:.2e}"
    for e, size in enumerate(sizes or []):
        assert size or not out[e].any(), f"expert {e} has no rows"
    return error


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("name, tiles", ALL_TILES, ids=lambda x: x if isinstance(x, str) else f"{64 * x.parts} rows")
def test_m_grouped(name: str, tiles: gemm.Tiles, case: str):
    print(f"{check_m_grouped(case, name, tiles):.2e} {check_m_grouped(case, name, tiles, out_dtype=FP32):.2e}")


def test_all_kinds_of_stages_are_tested():
    """Those that are scaled once, once per half, in one half only, and once per 32."""
    marks = [[], []]
    for _ in range(8):  # the patches of a weight are few
        a, b = (to_gpu(x) for x in m_grouped_operands(*SIZES["large"], "even", 384, 288))
        row_out, column_out, _ = gemm.decode_scales(a.scale, b.scale, 4, 3, 1)
        for found, scales in zip(marks, (row_out.view(-1, 4)[:, 0], column_out.view(-1, 4, 12)[:, 0]), strict=True):
            found.append(scales.flatten().view(torch.int32) & 0b111)
    for found in marks:
        shares = torch.cat(found).bincount(minlength=8) / len(torch.cat(found))
        print(shares.tolist())
        assert (shares[[0b000, 0b001, 0b100, 0b101, 0b111]] > 0.02).all()


@pytest.mark.parametrize("case", SIZES)
def test_k_grouped(case: str):
    print(f"{check_k_grouped(case):.2e} {check_k_grouped(case, out_dtype=FP32):.2e}")


@pytest.mark.parametrize("name, tiles", ALL_TILES, ids=lambda x: x if isinstance(x, str) else f"{64 * x.parts} rows")
def test_shapes_biases_and_types(name: str, tiles: gemm.Tiles):
    for c, d in ((32, 32), (64, 96), (224, 32), (160, 1312)):
        check_m_grouped("large", name, tiles, c=c, d=d, bias_dtype=BF16)
    check_m_grouped("ragged", name, tiles, elem_dtype=E5M2, bias_dtype=FP32, out_dtype=FP32)


@pytest.mark.parametrize("name, tiles", ALL_TILES, ids=lambda x: x if isinstance(x, str) else f"{64 * x.parts} rows")
def test_unusual_offs(name: str, tiles: gemm.Tiles):
    """Offsets that lie apart in memory; and some past the last row, where nothing is written."""
    sizes, m, d, empty = [300, 0, 129, 71], 500, 288, torch.empty
    a, b = m_grouped_operands(sizes, 0, name, 416, d)
    expected = reference.gemm_m_grouped(a, b, make_offs(sizes), bias=None, out_dtype=FP32)
    guarded = torch.full((m + 400, d), 7.0, device="cuda")
    for offs in (make_offs(sizes).repeat_interleave(2).cuda()[::2], make_offs([300, 0, 129, 471]).cuda()):
        with patch.object(torch, "empty", lambda *s, **kw: guarded[:m] if s == ((m, d),) else empty(*s, **kw)):
            out = gemm.multiply_m_grouped(to_gpu(a), to_gpu(b), offs, None, FP32, tiles)
        assert out.data_ptr() == guarded.data_ptr() and relative_rms(out.cpu(), expected) <= TOLERANCE[FP32]
        assert (guarded[m:] == 7).all()


def whole(*shape: int) -> torch.Tensor:
    """Whole numbers up to 4, of another magnitude in each block: 400 products of two have sums of few bits."""
    *rest, rows, cols = shape
    factor = torch.randint(1, 3, (*rest, rows // 32 + 1, cols // 32 + 1)).float()
    factor = factor.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :rows, :cols]
    return torch.randint(-2, 3, shape) * factor


@pytest.mark.parametrize("name", FORMS)
def test_fp8_and_dequantised_values_give_the_same_where_sums_are_exact(name: str):
    form, weight_form = FORMS[name]
    sizes = [129, 0, 44]
    offs = make_offs(sizes)
    x, w = whole(173, 416), whole(3, 288, 416)
    a, b = quantized(x, 1, "1x32", form), quantized(w, 2, "32x32", weight_form).mT
    expected = reference.gemm_m_grouped(a, b, offs, bias=None, out_dtype=FP32)
    assert torch.equal(expected[:129], x[:129] @ w[0].T), "nothing is lost by quantising either"
    a_bf16, b_bf16 = (
        MXTensor(t.to(BF16).cuda(), torch.empty(0, dtype=torch.uint8, device="cuda"), axis, block, BF16)
        for t, axis, block in ((x, 1, "1x32"), (w, 2, "32x32"))
    )
    for left, right in ((to_gpu(a), to_gpu(b)), (a_bf16, b_bf16.mT)):
        y = gemm.gemm_m_grouped(left, right, offs.cuda(), bias=None, out_dtype=FP32)
        assert torch.equal(y.cpu(), expected)


def test_k_grouped_is_equal_where_sums_are_exact():
    offs = make_offs([129, 0, 44])
    a, b = (
        quantized(whole(173, 96), 0, "1x32", "1x128", offs=offs).mT,
        quantized(whole(173, 64), 0, "1x32", "1x128", offs=offs),
    )
    dw = gemm.gemm_k_grouped(to_gpu(a), to_gpu(b), offs.cuda(), out_dtype=FP32)
    assert torch.equal(dw.cpu(), reference.gemm_k_grouped(a, b, offs, out_dtype=FP32))


def test_k_grouped_shapes_and_types():
    for n, k in ((32, 32), (64, 96), (32, 1312)):
        check_k_grouped("large", n=n, k=k)
    check_k_grouped("ragged", elem_dtype=E5M2, out_dtype=FP32)


@pytest.mark.parametrize("way", ["exact", "rebased"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_2d", "mxfp8_2d_wgrad_bf16"])
def test_op_against_the_reference_backend(recipe: str, way: str, monkeypatch: pytest.MonkeyPatch):
    """Same quantised bits, so y, dx and dw differ by what tensor cores cut off only."""
    offs = make_offs(group_sizes("zipf", 983, 5))
    given = {"x": torch.randn(1000, 416), "w": torch.randn(5, 192, 416) / 416**0.5}
    dy, bias, results = torch.randn(1000, 192), torch.randn(5, 192), {}
    launch = Mock(wraps=gemm.multiply_m_grouped)
    monkeypatch.setattr(gemm, "multiply_m_grouped", launch)
    for backend, device in (("hopper", "cuda"), ("reference", "cpu")):
        x, w = (t.detach().to(device).requires_grad_() for t in given.values())
        y = mxfp8_grouped_mm(
            x, w.mT, offs.to(device), recipe=recipe, bias=bias.to(device), out_dtype=FP32, backend=backend,
            rebase=way == "rebased",
        )  # fmt: skip
        y.backward(dy.to(device))
        results[backend] = {"y": y, "dx": x.grad, "dw": w.grad}
    in_fp8 = way == "rebased" or recipe.startswith("mxfp8_2d")
    assert launch.call_count == (2 if in_fp8 else 0)  # forward and dgrad
    for name, value in results["hopper"].items():
        error = relative_rms(value.cpu(), results["reference"][name])
        print(recipe, way, name, f"{error:.1e}")
        assert error <= TOLERANCE[BF16 if name == "dw" and recipe.endswith("bf16") else FP32], name


@pytest.mark.parametrize("name", FORMS)
def test_many_tiles_give_the_same_bits_again(name: str):
    """More tiles than programs, so that stages, barriers and staging are reused from tile to tile."""
    check_m_grouped("large", name, gemm.M_GROUPED, c=1056, d=8224)
    sizes, extra = SIZES["large"]
    a, b = (to_gpu(x) for x in m_grouped_operands(sizes, extra, name, 1056, 8224))
    offs = make_offs(sizes, "cuda")
    first, *others = (gemm.gemm_m_grouped(a, b, offs, bias=None, out_dtype=BF16) for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.alone
def test_each_tile_is_taken_once(monkeypatch: pytest.MonkeyPatch):
    """Of tiles that are many, of different lengths, or none; also where most programs start when others have ended."""
    decode, counters = gemm.decode_scales, []

    def decode_and_keep(*args) -> tuple[torch.Tensor, ...]:
        scales = decode(*args)
        counters.append(scales[-1])
        return scales

    def alone_and_beside(multiply: Callable[..., torch.Tensor], *args, **kwargs) -> None:
        with poisoned_empty():
            alone = multiply(*args, **kwargs)
            with held_multiprocessors(100):
                beside = multiply(*args, **kwargs)
        assert torch.equal(alone, beside)

    monkeypatch.setattr(gemm, "decode_scales", decode_and_keep)
    for case in ("large", "zipf", "all empty"):
        sizes, extra = SIZES[case]
        offs = make_offs(sizes)
        a, b = (quantized(wide(sum(sizes) + extra, d), 0, "1x32", "1x128", offs=offs) for d in (2048, 2080))
        alone_and_beside(gemm.gemm_k_grouped, to_gpu(a).mT, to_gpu(b), offs.cuda(), out_dtype=BF16)
        tiles = [sum(size > 0 for size in sizes) * 8 * 17] * 2
        for name in FORMS:
            a, b = (to_gpu(x) for x in m_grouped_operands(sizes, extra, name, 416, 4128))
            alone_and_beside(gemm.multiply_m_grouped, a, b, offs.cuda(), None, BF16, gemm.M_GROUPED)
            tiles += [sum(-(-size // 192) for size in sizes) * 33] * 2
        assert [counter.item() for counter in counters] == tiles
        counters.clear()


def test_tiles_are_taken_on_demand(monkeypatch: pytest.MonkeyPatch):
    """If others have taken all tiles, each program computes but the first, which is its own."""
    decode, programs = gemm.decode_scales, torch.cuda.get_device_properties(0).multi_processor_count

    def decode_and_take_all(*args) -> tuple[torch.Tensor, ...]:
        *scales, taken = decode(*args)
        return *scales, taken.fill_(2**20)

    def check(out: torch.Tensor, rows: int) -> None:
        """Of tiles of ``rows`` rows and 128 columns."""
        tiles = (~out.isnan()).unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
        assert torch.equal(tiles.any(1).any(-1), tiles.all(1).all(-1)), "tiles are computed in whole or not at all"
        assert tiles.all(1).all(-1).sum() == programs < tiles.shape[0] * tiles.shape[2]

    monkeypatch.setattr(gemm, "decode_scales", decode_and_take_all)
    with poisoned_empty():
        for name in FORMS:
            a, b = (to_gpu(x) for x in m_grouped_operands([40 * 192], 0, name, 416, 1024))
            offs = make_offs([40 * 192], "cuda")
            check(gemm.multiply_m_grouped(a, b, offs, None, BF16, gemm.M_GROUPED), 192)
        a, b = (to_gpu(quantized(wide(416, d), 0, "1x32", "1x128")) for d in (20 * 256, 1024))
        check(gemm.gemm_k_grouped(a.mT, b, None, out_dtype=BF16)[0], 256)


def test_a_part_past_the_last_row_is_not_added_to_one_of_another_scale():
    """The second group starts at row 50: its part goes past row 100, where the next stage's scales begin."""
    x = torch.ones(100, 384)
    x[64:, :32] = 448 * 2.0**-10
    x[64:, 0] = 1.125 * 2.0**-19  # lost if divided by more
    a, b = quantized(x, 1, "1x32", "even"), quantized(torch.randn(2, 96, 384), 2, "32x32", "even").mT
    offs = make_offs([50, 50])
    y = gemm.gemm_m_grouped(to_gpu(a), to_gpu(b), offs.cuda(), bias=None, out_dtype=FP32)
    assert relative_rms(y.cpu(), reference.gemm_m_grouped(a, b, offs, bias=None, out_dtype=FP32)) <= TOLERANCE[FP32]


@pytest.mark.parametrize("name", FORMS)
def test_nan_stays_in_its_row_and_column(name: str):
    sizes = [40, 30, 50]
    offs = make_offs(sizes)
    form, weight_form = FORMS[name]
    x, w = torch.randn(120, 256), torch.randn(3, 96, 256)
    x[40, 5] = torch.nan
    w[2, 33, 200] = torch.nan
    a, b = quantized(x, 1, "1x32", form), quantized(w, 2, "32x32", weight_form).mT
    y = gemm.gemm_m_grouped(to_gpu(a), to_gpu(b), offs.cuda(), bias=None, out_dtype=FP32).cpu()
    expected = torch.zeros(120, 96, dtype=torch.bool)
    expected[40] = True
    expected[sum(sizes[:2]) :, 32:64] = True
    assert torch.equal(y.isnan(), expected)
    if form == "1x128":
        a, b = quantized(torch.randn(120, 96), 0, "1x32", form, offs=offs).mT, quantized(x, 0, "1x32", form, offs=offs)
        dw = gemm.gemm_k_grouped(to_gpu(a), to_gpu(b), offs.cuda(), out_dtype=FP32).cpu()
        assert dw[1, :, 5].isnan().all() and dw.isnan().sum() == 96


def one_in_each(lines: int, scale: torch.Tensor, form: str) -> MXTensor:
    """Rows of 128 elements, the first one 1 and the others 0, with these scale bytes, the same in all blocks of one."""
    qdata = torch.zeros(lines, 128)
    qdata[:, 0] = 1
    blocks, block = (1, form) if form in REBASED else (4, "1x32" if len(scale) == lines else "32x32")
    return to_gpu(MXTensor(qdata.to(E4M3), scale[:, None].repeat(1, blocks), 1, block, BF16))


@pytest.mark.parametrize("name", FORMS)
def test_scale_bytes_at_the_ends(name: str):
    """Scales 2^-126 to 2^127, NaN of finite elements, and 2^-127 where the other scale makes the product normal."""
    form, weight_form = FORMS[name]
    every = torch.arange(256, dtype=torch.uint8)

    def m_grouped(rows: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        a, b = one_in_each(len(rows), rows, form), one_in_each(32 * len(squares), squares, weight_form).mT
        b = MXTensor(b.qdata[None], b.scale[None], 1, b.block, BF16)
        return gemm.gemm_m_grouped(a, b, None, bias=None, out_dtype=FP32).cpu()

    def k_grouped(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        a, b = (one_in_each(len(scale), scale, "1x128") for scale in (rows, columns))
        return gemm.gemm_k_grouped(a, b.mT, None, out_dtype=FP32)[0].cpu()

    for multiply, lines in ((m_grouped, 32), (k_grouped, 1))[: 2 if form == "1x128" else 1]:
        one = torch.full((32,), 127, dtype=torch.uint8)
        by_row, by_column = multiply(every, one), multiply(one, every)[0].view(256, lines)
        for values in (by_row, by_column):
            expected = decode_scale(every)[1:, None].expand_as(values[1:])
            assert torch.equal(values[1:].nan_to_num(3.0), expected.nan_to_num(3.0))
        assert (multiply(one * 0, one + 1) == 2.0**-126).all() and (multiply(one + 1, one * 0) == 2.0**-126).all()


def test_one_to_many_rows_without_groups():
    for rows in (1, 2, 31, 64, 65, 200, 700):
        SIZES["rows"] = (None, rows)
        for name in FORMS:
            check_m_grouped("rows", name, gemm.M_GROUPED, c=256, d=512)
        check_k_grouped("rows")
