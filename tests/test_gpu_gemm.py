"""What the contract (``test_backends.py``) does not ask of the portable GEMMs on a GPU: every tile, programs that start
late; of the ops on top of them: the reference's results, CUDA graphs, torch.compile; of what ``sm100`` does beside
torch's GEMMs, on any NVIDIA GPU."""

import contract
import pytest
import torch
from contract import BF16, CASES, FP32, ROW_FACTOR, TOLERANCE, check_gemms, ids, inputs, targets_here, wide

from scripts.bench.problems import group_sizes, largest_row_error, make_offs, relative_rms
from titan_mxfp8 import MXTensor, mxfp8_grouped_mm, mxfp8_linear, quantize
from titan_mxfp8.recipe import Recipe, get_recipe

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


from titan_mxfp8.backends import triton
from titan_mxfp8.backends.common import gemm
from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.backends.sm100 import gemm as sm100
from titan_mxfp8.ops.pad import pad_token_groups

DEVICE = torch.device("cuda", 0)
HARDWARE = hardware_of(DEVICE)
CONVERTS = torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
needs_conversion = pytest.mark.skipif(not CONVERTS, reason="needs an NVIDIA GPU that converts to FP8")
ON_GPU = [target for target in targets_here() if target.device == DEVICE]
KERNELS = [(target, recipe) for target in ON_GPU if target.row.name != "reference" for recipe in target.recipes()]
FEW = ("mxfp8", "mxfp8_2d", "mxfp8_wgrad_bf16", "mxfp8_2d_rebased")
FEW_KERNELS = [(target, recipe) for target, recipe in KERNELS if recipe.name in FEW]


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    torch.seed()


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch):
    """Makes the backend take the tiles that it is given, of any variant, and leave nothing to torch."""

    def take(tiles: gemm.Tiles, hardware: Hardware = HARDWARE) -> None:
        monkeypatch.setattr(gemm, "hardware_of", lambda device: hardware)
        monkeypatch.setattr(gemm, "tiles_of", lambda mma: (tiles, tiles))
        monkeypatch.setattr(gemm, "_is_many_tiles", lambda *args: False)

    return take


@pytest.mark.parametrize("tiles", gemm.tiles_of(HARDWARE.mma), ids=str)
def test_each_tile(tiles: gemm.Tiles, take) -> None:
    """Of every case; then more tiles than programs, bands of several rows, features that no tile divides."""
    take(tiles)
    plan = triton.plan(get_recipe("mxfp8"), HARDWARE)
    for case in CASES:
        check_gemms(triton, plan, case, device=DEVICE)
    check_gemms(triton, plan, "large", n=2336, k=800, out_dtype=BF16, bias_dtype=BF16, device=DEVICE)


@pytest.mark.parametrize("tiles", gemm.TILES["bf16"], ids=str)
def test_pointers_and_fp8_operands(tiles: gemm.Tiles, take) -> None:
    """What SM80 runs, and FP8 operands where bf16 is multiplied."""
    hardware = Hardware("sm_80", "A100")
    take(tiles, hardware)
    plan = triton.plan(get_recipe("mxfp8"), hardware)
    for case in CASES:
        check_gemms(triton, plan, case, device=DEVICE)
        check_gemms(triton, contract.with_arrived(plan), case, device=DEVICE)


@pytest.mark.alone
@pytest.mark.parametrize("tiles", gemm.tiles_of(HARDWARE.mma), ids=str)
def test_where_most_programs_start_late(tiles: gemm.Tiles) -> None:
    """Another kernel holds all multiprocessors but 32."""
    plan, given = triton.plan(get_recipe("mxfp8"), HARDWARE), inputs("large", 2336, 800, wide)
    offs, held = given["offs"].to(DEVICE), torch.cuda.get_device_properties(0).multi_processor_count - 32
    x, w, dy = (given[name].to(DEVICE) for name in ("x", "w", "dy"))
    a, b = triton.quantize(x, 1, plan.forward.a, None), triton.quantize(w, 2, plan.forward.b, None)
    y = contract.alone_and_beside(lambda: gemm.multiply_m_grouped(a, b, offs, None, BF16, HARDWARE.mma, tiles), held)
    a, b = triton.quantize(dy, 0, plan.wgrad.a, offs), triton.quantize(x, 0, plan.wgrad.b, offs)
    dw = contract.alone_and_beside(lambda: gemm.multiply_k_grouped(a, b, offs, BF16, HARDWARE.mma, tiles), held)
    assert y.any() and dw.any()


def problem(rows: int, experts: int = 5, n: int = 192, k: int = 160, dtype: torch.dtype = BF16) -> dict:
    return {
        "x": torch.randn(rows, k, dtype=dtype, device=DEVICE, requires_grad=True),
        "w": (torch.randn(experts, n, k, device=DEVICE) / k**0.5).to(dtype).requires_grad_(),
        "dy": torch.randn(rows, n, dtype=dtype, device=DEVICE),
        "offs": make_offs(group_sizes("zipf", max(rows - 17, 0), experts), DEVICE),
    }


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("target, recipe", KERNELS, ids=ids)
def test_ops_against_the_reference_backend(target, recipe: Recipe, dtype: torch.dtype) -> None:
    """Same quantised bits, so results differ by the order of additions, what tensor cores cut off, and rounding."""
    grouped, linear = problem(1000, k=416, dtype=dtype), problem(1000, experts=1, k=416, dtype=dtype)
    bias, results = torch.randn(5, 192, device=DEVICE), {}
    for backend, device in ((target.row.name, DEVICE), ("reference", "cpu")):
        for kind, given in (("grouped", grouped), ("linear", linear)):
            x, w = (given[name].detach().to(device).requires_grad_() for name in ("x", "w"))
            options = {"recipe": recipe, "out_dtype": dtype, "backend": backend}
            if kind == "grouped":
                y = mxfp8_grouped_mm(x, w.mT, given["offs"].to(device), bias=bias.to(device), **options)
            else:
                y = mxfp8_linear(x, w[0], recipe=recipe, backend=backend)
            y.backward(given["dy"].to(device))
            named = {"forward": y, "dgrad": x.grad, "wgrad": w.grad}
            results[device] = results.get(device, {}) | {f"{kind} {name}": out for name, out in named.items()}
    plan = target.backend.plan(recipe, target.hardware)
    for name, value in results[DEVICE].items():
        error, row_error = (f(value.cpu(), results["cpu"][name]) for f in (relative_rms, largest_row_error))
        print(recipe.name, dtype, name, f"{error:.1e} {row_error:.1e}")
        gemm_plan = getattr(plan, name.split()[1])
        # A bf16 sum beside a rounding boundary can fall to the other side: measured up to 5.6e-5.
        rounded = dtype == BF16 or not gemm_plan.a.is_quantized
        tolerance = (3e-4 if rounded else 0) + TOLERANCE[gemm_plan.mma_dtype, FP32]
        assert error < tolerance, name
        assert row_error < (2**-8 if rounded else ROW_FACTOR * tolerance), name


@pytest.mark.parametrize("target", [target for target in ON_GPU if target.row.name != "reference"], ids=ids)
def test_quantised_activations_may_start_anywhere(target) -> None:
    """Such as rows of a larger buffer, whose scales start at an odd byte."""
    w, offs = torch.randn(3, 64, 96, dtype=BF16, device=DEVICE), make_offs([5, 0, 27], DEVICE)
    whole = quantize(torch.randn(33, 96, dtype=BF16, device=DEVICE), backend=target.row.name)
    assert whole.scale[1:].data_ptr() % 16
    x = MXTensor.from_qdata_and_scales(whole.qdata[1:], whole.scale[1:], BF16)
    for recipe in target.recipes():
        y = mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe, out_dtype=FP32, backend=target.row.name)
        on_cpu = MXTensor.from_qdata_and_scales(x.qdata.cpu(), x.scale.cpu(), BF16)
        expected = mxfp8_grouped_mm(on_cpu, w.cpu().mT, offs.cpu(), recipe=recipe, out_dtype=FP32, backend="reference")
        assert largest_row_error(y.cpu(), expected) < ROW_FACTOR * TOLERANCE["FP8", FP32]


@pytest.mark.parametrize("requantize_input", [False, True])
@pytest.mark.parametrize("target, recipe", FEW_KERNELS, ids=ids)
def test_cuda_graph_with_changing_offs(target, recipe: Recipe, requantize_input: bool) -> None:
    """Forward, backward and padding are captured once, then replayed for other groups and values: nothing syncs."""
    static = problem(700)
    x, w, dy, offs = static["x"], static["w"], static["dy"], static["offs"]

    def step() -> tuple[torch.Tensor, ...]:
        options = {"backend": target.row.name, "requantize_input": requantize_input}
        y = mxfp8_grouped_mm(x, w.mT, offs, recipe=recipe, **options)
        return y, *torch.autograd.grad(y, (x, w), dy), *pad_token_groups(x.detach(), offs, 32)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # then all that can be is replayed (replay.py), within the graph too
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in ([0, 0, 700, 0, 0], [1, 44, 300, 0, 200], [140] * 5, [0, 0, 0, 0, 3]):
        with torch.no_grad():
            x.normal_()
            dy.normal_()
            offs.copy_(make_offs(sizes))
        graph.replay()
        for value, expected in zip(captured, step(), strict=True):
            assert torch.equal(value, expected), sizes


@pytest.mark.parametrize("target, recipe", FEW_KERNELS, ids=ids)
def test_compile_with_changing_token_counts(target, recipe: Recipe) -> None:
    name, backend = recipe.name, target.row.name

    def layer(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        y = mxfp8_grouped_mm(x, w1.mT, offs, recipe=name, backend=backend)
        return mxfp8_linear(y, w2, recipe=name, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    w2 = torch.randn(160, 192, dtype=BF16, device=DEVICE, requires_grad=True)
    # Up to 128 tokens a scale of 128 has another number of blocks; what comes again is replayed (replay.py).
    for step, rows in enumerate((300, 513, 177, 1024, 300, 300)):
        given = problem(rows)
        x, w1, offs = given["x"], given["w"], given["offs"]
        torch._dynamo.mark_dynamic(x, 0)
        dy = torch.randn(rows, 160, dtype=BF16, device=DEVICE)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            y = compiled(x, w1, w2, offs)
        grads = torch.autograd.grad(y, (x, w1, w2), dy)
        eager = layer(x, w1, w2, offs)
        for value, expected in zip((y, *grads), (eager, *torch.autograd.grad(eager, (x, w1, w2), dy)), strict=True):
            assert torch.equal(value, expected)


@needs_conversion
@pytest.mark.parametrize("sizes", [None, [1300], [0, 1, 44, 130, 0, 800, 200]])
def test_swizzled_scales_of_sm100(sizes: list[int] | None) -> None:
    contract.check_swizzled_scales(sizes, 416, DEVICE)


@needs_conversion
def test_what_torch_leaves_of_a_product_of_sm100() -> None:
    offs = make_offs([0, 44, 0, 100], DEVICE)
    out, bias = torch.ones(300, 416, dtype=BF16, device=DEVICE), torch.randn(4, 416, device=DEVICE)
    sm100.finish_rows(out, bias, offs, zero_tail=True)
    expected = (1 + torch.cat([bias[1].expand(44, -1), bias[3].expand(100, -1)])).to(BF16)
    assert torch.equal(out[:144], expected) and not out[144:].any()
    dw = torch.ones(4, 416, 288, dtype=BF16, device=DEVICE)
    sm100.zero_empty_groups(dw, offs)
    assert not dw[[0, 2]].any() and (dw[[1, 3]] == 1).all()
