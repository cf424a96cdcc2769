"""What the contract (``test_backends.py``) does not ask of the Hopper GEMMs on an SM90 GPU: both shapes of tiles, each
taken once and on demand, stages of all kinds, exact sums, scales at the ends."""

from collections.abc import Callable
from unittest.mock import Mock

import contract
import pytest
import torch
from contract import BF16, CASES, E4M3, FP32, alone_and_beside, check_gemms, judge, patchy, product_m_grouped, to, wide

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an SM90 GPU", allow_module_level=True)

from poison import poisoned_empty
from triton.backends.nvidia import driver
from triton.runtime.driver import driver as drivers
from watch import look_at

from scripts.bench.problems import group_sizes, make_offs
from titan_mxfp8 import mxfp8_grouped_mm
from titan_mxfp8.backends import Gemm, Plan, hopper
from titan_mxfp8.backends.common import launch
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.backends.hopper import gemm
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import decode_scale
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.recipe import get_recipe

DEVICE = torch.device("cuda", 0)
EVEN, REBASED = (hopper.plan(get_recipe(name), hardware_of(DEVICE)) for name in ("mxfp8_2d", "mxfp8_2d_rebased"))
# Activations that came quantised meet the weights of ``mxfp8_2d``; their scales are as they came.
ARRIVED = Gemm(a=contract.EXACT, b=contract.SQUARES, mma_dtype="FP8")
PLANS = {"arrived": Plan(forward=ARRIVED, dgrad=ARRIVED, wgrad=EVEN.wgrad), "coalesced": EVEN, "rebased": REBASED}
TILES = {f"{64 * tiles.parts} rows": tiles for tiles in (gemm.M_GROUPED, gemm.FEW_ROWS)}
# Besides ``CASES``.
MORE = {
    "first and last empty": ([0, 127, 128, 129, 0], 0),
    "last alone": ([0, 0, 0, 300], 1),
    "160 experts": (group_sizes("zipf", 3000, 160), 0),
    "zipf": (group_sizes("zipf", 5000, 8), 44),
    **{f"{rows} rows": (None, rows) for rows in (1, 31, 64, 65, 200, 700)},
}


@pytest.fixture(autouse=True)
def fresh_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.seed()
    for case, sizes in MORE.items():
        monkeypatch.setitem(CASES, case, sizes)


@pytest.fixture(params=PLANS)
def plan(request) -> Plan:
    return PLANS[request.param]


@pytest.fixture(params=TILES)
def tiles(request, monkeypatch: pytest.MonkeyPatch) -> gemm.Tiles:
    """The backend takes them whatever the number of rows."""
    for name in ("M_GROUPED", "FEW_ROWS"):
        monkeypatch.setattr(gemm, name, TILES[request.param])
    return TILES[request.param]


def quantized(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None = None) -> Operand:
    """By the reference, then on the GPU."""
    return to(reference.quantize(x, axis, spec, offs), DEVICE)


def multiply(a: Operand, b: Operand, offs: torch.Tensor | None, tiles: gemm.Tiles) -> torch.Tensor:
    """Forward with given tiles, in bf16."""
    return gemm.gemm_m_grouped(a, b, offs, None, BF16, tiles=tiles)


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_group_sizes(case: str, plan: Plan, tiles: gemm.Tiles) -> None:
    check_gemms(hopper, plan, case, n=288, k=416, out_dtype=BF16, device=DEVICE, make=patchy)


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_sums_of_products(case: str, plan: Plan, tiles: gemm.Tiles) -> None:
    """One kernel adds up both, also where the contraction ends within a stage."""
    for n, k in ((288, 416), (1312, 160), (32, 32), (384, 96)):
        assert len(contract.check_sum_of_products(hopper, plan, case, n=n, k=k, device=DEVICE, make=patchy)) == 1


def test_shapes_biases_and_types(plan: Plan, tiles: gemm.Tiles) -> None:
    for n, k in ((32, 32), (96, 64), (32, 224), (1312, 160)):
        check_gemms(hopper, plan, "large", n=n, k=k, bias_dtype=BF16, out_dtype=BF16, device=DEVICE, make=patchy)
    check_gemms(hopper, plan, "zipf", bias_dtype=FP32, device=DEVICE, make=patchy)


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_swiglu_in_the_gemm_gives_the_bits_of_separate_kernels(case: str, tiles: gemm.Tiles) -> None:
    """Also where the contraction ends within a stage, and where stages and staging are reused from tile to tile."""
    sizes, extra = CASES[case]
    rows, groups, offs = (
        sum(sizes or []) + extra,
        len(sizes or [0]),
        None if sizes is None else make_offs(sizes, DEVICE),
    )
    used, plan = rows if sizes is None else sum(sizes), REBASED.forward
    for h, d in ((128, 416), (1408 if case == "large" else 384, 256)):
        a = quantized(patchy(rows, d), 1, plan.a)
        w1, w3 = (quantized(patchy(groups, h, d) / 8, 2, plan.b) for _ in range(2))
        with poisoned_empty():
            *ours, h = hopper.swiglu_gemm_m_grouped(a, w1, w3, (None, None), None, plan.a, offs)
            gate, up = (hopper.gemm_m_grouped(a, w, offs, None, BF16, False) for w in (w1, w3))
            theirs = hopper.swiglu(gate, up, None, plan.a, offs)
        for mine, other in zip(ours, (gate, up), strict=True):
            assert torch.equal(mine[:used].view(torch.int16), other[:used].view(torch.int16))
            assert mine[used:].isnan().all(), "rows of no group are not written"
        assert torch.equal(h.data[:used].view(torch.uint8), theirs.data[:used].view(torch.uint8))
        assert torch.equal(h.scale[:, :used], theirs.scale[:, :used])


def test_all_kinds_of_stages_are_tested() -> None:
    """Those that are scaled once, once per half, in one half only, and once per 32."""
    sizes, extra = CASES["large"]
    marks = [[], []]
    for _ in range(8):  # the patches of a weight are few
        a = quantized(patchy(sum(sizes) + extra, 384), 1, EVEN.forward.a)
        b = quantized(patchy(len(sizes), 288, 384), 2, EVEN.forward.b)
        buffer, layout = gemm.decode_scales(a, b, None)
        rows, columns = buffer[: layout.row_size], buffer[layout.row_size : layout.size]
        marks[0].append(rows.view(-1, 4)[:, 0].flatten() & 0b111)
        marks[1].append(columns.view(-1, 4, layout.columns)[:, 0].flatten() & 0b111)
    for found in marks:
        shares = torch.cat(found).bincount(minlength=8) / len(torch.cat(found))
        print(shares.tolist())
        assert (shares[[0b000, 0b001, 0b100, 0b101, 0b111]] > 0.02).all()


def whole(*shape: int) -> torch.Tensor:
    """Whole numbers up to 4, of another magnitude in each block: 400 products of two have sums of few bits."""
    *rest, rows, cols = shape
    factor = torch.randint(1, 3, (*rest, rows // 32 + 1, cols // 32 + 1)).float()
    factor = factor.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :rows, :cols]
    return torch.randint(-2, 3, shape) * factor


def test_nothing_is_lost_where_sums_are_exact(plan: Plan) -> None:
    sizes = [129, 0, 44]
    offs = make_offs(sizes)
    x, w, dy = whole(173, 416), whole(3, 288, 416), whole(173, 96)
    a, b = quantized(x, 1, plan.forward.a), quantized(w, 2, plan.forward.b)
    y = hopper.gemm_m_grouped(a, b, offs.to(DEVICE), None, FP32).cpu()
    assert torch.equal(y[:129], x[:129] @ w[0].T) and torch.equal(y[129:], x[129:] @ w[2].T)
    a, b = quantized(dy, 0, plan.wgrad.a, offs), quantized(x, 0, plan.wgrad.b, offs)
    dw = hopper.gemm_k_grouped(a, b, offs.to(DEVICE), FP32).cpu()
    assert torch.equal(dw[0], dy[:129].T @ x[:129]) and torch.equal(dw[2], dy[129:].T @ x[129:])


@pytest.mark.parametrize("recipe, calls", [("mxfp8", 0), ("mxfp8_2d", 2), ("mxfp8_rebased", 2)])
def test_forward_and_dgrad_go_to_the_fp8_kernel(recipe: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Mock(wraps=gemm.gemm_m_grouped)
    monkeypatch.setattr(gemm, "gemm_m_grouped", launch)
    x, w = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((100, 96), (2, 64, 96)))
    args = x, w.mT, make_offs([30, 70], DEVICE)
    mxfp8_grouped_mm(*args, recipe=recipe).sum().backward()
    assert launch.call_count == calls


def test_many_tiles_give_the_same_bits_again(plan: Plan, tiles: gemm.Tiles) -> None:
    """More tiles than programs, so that stages, barriers and staging are reused from tile to tile."""
    sizes, extra = CASES["large"]
    offs = make_offs(sizes)
    a = quantized(patchy(sum(sizes) + extra, 544), 1, plan.forward.a)
    b = quantized(patchy(len(sizes), 3104, 544), 2, plan.forward.b)
    with poisoned_empty():
        first, *others = (hopper.gemm_m_grouped(a, b, offs.to(DEVICE), None, BF16) for _ in range(6))
    used = sum(sizes)
    judge(first[:used], product_m_grouped(a, b, offs, None)[:used], plan.forward, "many tiles")
    assert all(torch.equal(first, other) for other in others) and not first[used:].any()


@pytest.mark.alone
def test_each_tile_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles that are many, of different lengths, or none; also where most programs start when others have ended."""
    counters = []
    look_at(monkeypatch, gemm, "decode_scales", after=lambda made, *_: counters.append(made.buffer[made.layout.size]))
    for case in ("large", "zipf", "all empty"):
        sizes, extra = CASES[case]
        offs, rows = make_offs(sizes, DEVICE), sum(sizes) + extra
        a, b = (hopper.quantize(wide(rows, d).to(DEVICE), 0, REBASED.wgrad.a, offs) for d in (2048, 2080))
        alone_and_beside(lambda a=a, b=b, offs=offs: hopper.gemm_k_grouped(a, b, offs, BF16), 100)
        tiles = [sum(size > 0 for size in sizes) * 8 * 17] * 2
        for gemms in PLANS.values():
            a = hopper.quantize(patchy(rows, 416).to(DEVICE), 1, gemms.forward.a, None)
            b = hopper.quantize(patchy(len(sizes), 4128, 416).to(DEVICE), 2, gemms.forward.b, None)
            alone_and_beside(lambda a=a, b=b, offs=offs: multiply(a, b, offs, gemm.M_GROUPED), 100)
            tiles += [sum(-(-size // 192) for size in sizes) * 33] * 2
        assert [counter.item() for counter in counters] == tiles
        counters.clear()


def test_tiles_are_taken_on_demand(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """If others have taken all tiles, each program computes but the first, which is its own."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count

    def check(run: Callable[[], torch.Tensor], rows: int) -> None:
        """Of tiles of ``rows`` rows and 128 columns."""
        with poisoned_empty():
            tiles = (~run().isnan()).unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
        assert torch.equal(tiles.any(1).any(-1), tiles.all(1).all(-1)), "tiles are computed in whole or not at all"
        assert tiles.all(1).all(-1).sum() == programs < tiles.shape[0] * tiles.shape[2]

    look_at(monkeypatch, gemm, "decode_scales", after=lambda made, *_: made.buffer[made.layout.size].fill_(2**20))
    rows = 40 * 192
    a = hopper.quantize(wide(rows, 416).to(DEVICE), 1, plan.forward.a, None)
    b = hopper.quantize(wide(1, 1024, 416).to(DEVICE), 2, plan.forward.b, None)
    check(lambda: multiply(a, b, make_offs([rows], DEVICE), gemm.M_GROUPED), 192)
    if plan is REBASED:
        dy, x = (hopper.quantize(wide(416, d).to(DEVICE), 0, plan.wgrad.a, None) for d in (20 * 256, 1024))
        check(lambda: hopper.gemm_k_grouped(dy, x, None, BF16)[0], 256)


def test_a_part_past_the_last_row_is_not_added_to_one_of_another_scale() -> None:
    """The second group starts at row 50: its part goes past row 100, where the next stage's scales begin."""
    x = torch.ones(100, 384)
    x[64:, :32] = 448 * 2.0**-10
    x[64:, 0] = 1.125 * 2.0**-19  # lost if divided by more
    a, b = quantized(x, 1, EVEN.forward.a), quantized(torch.randn(2, 96, 384), 2, EVEN.forward.b)
    offs = make_offs([50, 50])
    y = hopper.gemm_m_grouped(a, b, offs.to(DEVICE), None, FP32)
    judge(y, product_m_grouped(a, b, offs, None), EVEN.forward, "y")


def one_in_each(lines: int, scale: torch.Tensor, spec: OperandSpec, axis: int) -> Operand:
    """Lines of 128 elements, the first one 1 and the others 0, with these scale bytes, the same in all blocks of a
    line."""
    data = torch.zeros(lines, 128)
    data[:, 0] = 1
    if spec.scales == "mn_major":
        stored = torch.zeros(spec.scale_shape(data.shape), dtype=torch.uint8)
        stored[0, : len(scale)] = scale
    else:
        stored = scale[:, None].repeat(1, 4)
    return to(Operand(data.to(E4M3), stored, spec, axis), DEVICE)


def test_scale_bytes_at_the_ends(plan: Plan) -> None:
    """Scales 2^-126 to 2^127, NaN of finite elements, and 2^-127 where the other scale makes the product normal."""
    every = torch.arange(256, dtype=torch.uint8)

    def m_grouped(rows: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        a = one_in_each(len(rows), rows, plan.forward.a, 1)
        b = one_in_each(32 * len(squares), squares, plan.forward.b, 2)
        b = b._replace(data=b.data[None], scale=b.scale[None])
        return hopper.gemm_m_grouped(a, b, None, None, FP32).cpu()

    def k_grouped(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        a, b = (one_in_each(len(scale), scale, plan.wgrad.a, 0) for scale in (rows, columns))
        return hopper.gemm_k_grouped(a, b, None, FP32)[0].cpu()

    for gemm_of, lines in ((m_grouped, 32), (k_grouped, 1))[: 2 if plan is REBASED else 1]:
        one = torch.full((32,), 127, dtype=torch.uint8)
        by_row, by_column = gemm_of(every, one), gemm_of(one, every)[0].view(256, lines)
        for values in (by_row, by_column):
            expected = decode_scale(every)[1:, None].expand_as(values[1:])
            assert torch.equal(values[1:].nan_to_num(3.0), expected.nan_to_num(3.0))
        assert (gemm_of(one * 0, one + 1) == 2.0**-126).all() and (gemm_of(one + 1, one * 0) == 2.0**-126).all()


@pytest.mark.skipif(not hasattr(driver, "_BASE_ARGS_FORMAT"), reason="of Triton 3.6")
def test_descriptors_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caching allocator gives a step the addresses of the step before."""
    x, w = torch.randn(256, 256, device=DEVICE, dtype=BF16), torch.randn(3, 256, 256, device=DEVICE, dtype=BF16)
    offs, counts = make_offs([100, 0, 156], DEVICE), []
    counting = Mock(side_effect=drivers.active.utils.fill_tma_descriptor)
    monkeypatch.setattr(drivers.active.utils, "fill_tma_descriptor", counting)
    launch.kept_descriptor.cache_clear()
    for _ in range(4):
        mxfp8_grouped_mm(x, w.mT, offs, recipe="mxfp8_2d_rebased")
        counts.append(counting.call_count)
    assert counts[0] == 5 and counts[2] == counts[3]
