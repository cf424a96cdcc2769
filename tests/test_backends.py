"""The contract of a backend (``contract.py``), for every row of ``BACKENDS`` that runs here: CPU and, if any, GPU."""

import importlib
import inspect
from dataclasses import replace

import contract
import pytest
import torch
from contract import BF16, FP32, Target, check_gemms, check_quantize, check_quantize_both, partly_coalescible, uneven

from scripts.bench.problems import SPREADS, group_sizes, make_offs, relative_rms
from titan_mxfp8.backends import BACKENDS, Backend, BackendRow, load, select
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware, hardware_of
from titan_mxfp8.format import reference
from titan_mxfp8.format.codec import decode
from titan_mxfp8.recipe import RECIPES, Recipe, get_recipe

TARGETS = contract.targets_here()
# The reference is what the others are compared with: its GEMMs are judged too, with a few recipes that tell them apart.
FEW = ("mxfp8", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad", "mxfp8_2d_rebased")
KERNELS = [(target, recipe) for target in TARGETS for recipe in target.recipes() if target.row.name != "reference"]
PAIRS = KERNELS + [(t, get_recipe(name)) for t in TARGETS if t.row.name == "reference" for name in FEW]


def ids(value: object) -> str:
    return value.name if isinstance(value, Recipe) else str(value)


@pytest.mark.parametrize("row", BACKENDS, ids=[row.name for row in BACKENDS])
def test_it_has_every_function_with_the_protocols_signature(row: BackendRow) -> None:
    """A parameter that the protocol asks for may have a default besides."""
    empty, backend = inspect.Parameter.empty, importlib.import_module(row.module)
    for name, wanted in inspect.getmembers(Backend, inspect.isfunction):
        if not name.startswith("_"):
            own, wanted = inspect.signature(getattr(backend, name)), inspect.signature(wanted)
            required = [p.replace(default=empty) for p in wanted.parameters.values() if p.default is empty]
            given = [*own.parameters.values()]
            given[: len(required)] = [p.replace(default=empty) for p in given[: len(required)]]
            assert given == [*required, *list(wanted.parameters.values())[len(required) :]], f"{name}{own}"
            assert own.return_annotation == wanted.return_annotation, f"{name}{own}"


@pytest.mark.parametrize("target, recipe", KERNELS, ids=ids)
def test_quantisers_give_the_references_bits(target: Target, recipe: Recipe) -> None:
    """Of every operand, with ragged groups and without, edges and values of all kinds, along one axis and both."""
    plan, device = target.backend.plan(recipe, target.hardware), target.device
    activations = {(plan.forward.a, plan.wgrad.b), (plan.dgrad.a, plan.wgrad.a)}
    for dtype in (BF16, FP32):
        for make in (contract.wild, uneven, partly_coalescible, contract.coalescible_squares):
            for spread in SPREADS:
                x, offs = make((300, 96), dtype), make_offs(group_sizes(spread, 260, 7))
                for rowwise, columnwise in activations:
                    check_quantize(target.backend, x, 1, rowwise, device=device)
                    if columnwise.is_quantized:
                        check_quantize(target.backend, x, 0, columnwise, offs, device)
                        check_quantize_both(target.backend, x, rowwise, columnwise, offs, device)
            for rowwise, columnwise in activations:
                for shape in ((129, 160), (1, 32), (0, 64), (77, 96)):
                    check_quantize_both(target.backend, make(shape, dtype), rowwise, columnwise, device=device)
            for shape in ((3, 96, 160), (1, 32, 32), (2, 288, 64)):
                w = make(shape, dtype)
                check_quantize(target.backend, w, 2, plan.forward.b, device=device)
                check_quantize(target.backend, w, 1, plan.dgrad.b, device=device)
                check_quantize(target.backend, w.mT, 1, plan.dgrad.b, device=device)
                if plan.forward.b.stored != "bf16":
                    check_quantize_both(target.backend, w, plan.forward.b, plan.dgrad.b, device=device)


@pytest.mark.parametrize("target, recipe", KERNELS, ids=ids)
def test_requantised_rows_have_the_references_bits(target: Target, recipe: Recipe) -> None:
    for rows_spec, axis, spec in contract.requantised(target.backend.plan(recipe, target.hardware)):
        for make in (contract.wild, uneven, partly_coalescible):
            for shape in ((129, 288), (77, 96), (1, 32), (0, 64)):
                rows = reference.quantize(make(shape, BF16), 1, rows_spec)
                contract.check_requantize(target.backend, rows, axis, spec, device=target.device)
            for spread in SPREADS if axis == 0 else ():
                rows = reference.quantize(make((700, 416), BF16), 1, rows_spec)
                offs = make_offs(group_sizes(spread, 560, 7))
                contract.check_requantize(target.backend, rows, 0, spec, offs, target.device)


@pytest.mark.parametrize("target, recipe", [pair for pair in PAIRS if pair[1].weight_block == "32x32"], ids=ids)
def test_gathered_weights_have_the_bits_of_whole_ones(target: Target, recipe: Recipe) -> None:
    for make in (contract.wild, uneven, partly_coalescible, contract.coalescible_squares):
        for shape in ((3, 96, 160), (1, 32, 32), (2, 288, 64)):
            plan = target.backend.plan(recipe, target.hardware)
            contract.check_requantize_squares(target.backend, make(shape, FP32), plan, target.device)


@pytest.mark.parametrize("case", contract.CASES)
@pytest.mark.parametrize("target, recipe", PAIRS, ids=ids)
def test_gemms(target: Target, recipe: Recipe, case: str) -> None:
    plan = target.backend.plan(recipe, target.hardware)
    check_gemms(target.backend, plan, case, device=target.device)
    check_gemms(target.backend, plan, case, n=288, k=416, out_dtype=BF16, device=target.device, make=contract.patchy)


@pytest.mark.parametrize("target, recipe", PAIRS, ids=ids)
def test_sums_of_products(target: Target, recipe: Recipe) -> None:
    plan = target.backend.plan(recipe, target.hardware)
    for case in ("ragged", "large", "all empty", "no offs"):
        contract.check_sum_of_products(target.backend, plan, case, device=target.device)
    contract.check_sum_of_products(
        target.backend, plan, "ragged", n=288, k=416, device=target.device, make=contract.patchy
    )


@pytest.mark.parametrize("target, recipe", PAIRS, ids=ids)
def test_shapes_and_biases(target: Target, recipe: Recipe) -> None:
    plan = target.backend.plan(recipe, target.hardware)
    for n, k in ((32, 32), (96, 64), (32, 224)):
        check_gemms(target.backend, plan, "ragged", n=n, k=k, device=target.device)
    for bias_dtype in (BF16, FP32):
        for out_dtype in (BF16, FP32):
            for case in ("ragged", "no offs"):
                options = {"bias_dtype": bias_dtype, "out_dtype": out_dtype, "device": target.device}
                check_gemms(target.backend, plan, case, **options)


@pytest.mark.parametrize("target, recipe", PAIRS, ids=ids)
def test_nan_and_offs_past_the_last_row(target: Target, recipe: Recipe) -> None:
    plan = target.backend.plan(recipe, target.hardware)
    contract.check_nan_stays_in_its_group(target.backend, plan, target.device)
    if target.device.type == "cuda" and target.row.name != "reference":  # torch does look
        contract.check_offs_past_the_last_row(target.backend, plan, target.device)


@pytest.mark.parametrize("target", TARGETS, ids=ids)
def test_an_operand_quantised_along_another_axis_raises(target: Target) -> None:
    plan = target.backend.plan(get_recipe("mxfp8"), target.hardware)
    x, w = torch.randn(64, 64, device=target.device), torch.randn(1, 64, 64, device=target.device)
    along = {axis: target.backend.quantize(x, axis, plan.forward.a, None) for axis in (0, 1)}
    w_along = {axis: target.backend.quantize(w, axis, plan.forward.b, None) for axis in (1, 2)}
    target.backend.gemm_m_grouped(along[1], w_along[1], None, None, BF16)
    for a, b in ((along[0], w_along[2]), (along[1], w_along[2]._replace(axis=0))):
        with pytest.raises(ValueError, match="this GEMM contracts axis 1"):
            target.backend.gemm_m_grouped(a, b, None, None, BF16)
    for a, b in ((along[1], along[0]), (along[0], along[1])):
        with pytest.raises(ValueError, match="this GEMM contracts axis 0"):
            target.backend.gemm_k_grouped(a, b, None, BF16)


def test_values_in_bf16_with_scales_are_no_operand() -> None:
    backend, cpu = load("reference", torch.device("cpu")), hardware_of(torch.device("cpu"))
    plan = backend.plan(get_recipe("mxfp8"), cpu)
    x, w = torch.randn(64, 64), torch.randn(1, 64, 64)
    a, b = backend.quantize(x, 1, plan.forward.a, None), backend.quantize(w, 2, plan.forward.b, None)
    for wrong in (a._replace(scale=None), a._replace(spec=replace(a.spec, stored="bf16"))):
        with pytest.raises(AssertionError, match="have no scales"):
            backend.gemm_m_grouped(wrong, b, None, None, BF16)


def test_the_judge_sees_one_wrong_row_and_one_wrong_tile() -> None:
    """Relative to all of the output neither is as large as its rounding to bf16 may be."""
    plan = load("reference", torch.device("cpu")).plan(get_recipe("mxfp8"), hardware_of(torch.device("cpu")))
    expected = contract.wide(2000, 64).double()
    small = expected.norm(dim=1).argmin()
    row, tile = expected.to(BF16), expected.to(BF16)
    contract.judge(row, expected, plan.forward, "right")
    row[small] = 0
    tile[small, :32] += tile[small, :32].abs().max()
    for wrong in (row, tile):
        assert relative_rms(wrong, expected) < 2**-8
        with pytest.raises(AssertionError, match="a row is off by"):
            contract.judge(wrong, expected, plan.forward, "wrong")


def test_plans_say_what_is_multiplied() -> None:
    def plan_of(backend: str, arch: str, recipe: str) -> str:
        module = __import__(f"titan_mxfp8.backends.{backend}", fromlist=["plan"])
        return str(module.plan(get_recipe(recipe), Hardware(arch, arch)))

    assert plan_of("hopper", "sm_90", "mxfp8") == "forward bf16, dgrad bf16, wgrad bf16"
    assert plan_of("hopper", "sm_90", "mxfp8_2d") == "forward FP8, dgrad FP8, wgrad bf16"
    assert plan_of("hopper", "sm_90", "mxfp8_rebased") == "forward FP8, dgrad FP8, wgrad FP8"
    assert plan_of("hopper", "sm_90", "mxfp8_wgrad_bf16_rebased") == "forward FP8, dgrad FP8, wgrad bf16"
    assert plan_of("triton", "sm_100", "mxfp8_wgrad_bf16") == "forward FP8, dgrad FP8, wgrad bf16"
    assert plan_of("sm100", "sm_100", "mxfp8_2d") == "forward FP8, dgrad FP8, wgrad FP8"
    assert plan_of("sm100", "sm_100", "mxfp8_e5m2_grad") == "forward FP8, dgrad FP8, wgrad FP8"
    assert plan_of("sm100", "sm_100", "mxfp8_wgrad_bf16") == "forward FP8, dgrad FP8, wgrad bf16"
    assert plan_of("triton", "sm_80", "mxfp8_2d") == "forward bf16, dgrad bf16, wgrad bf16"
    assert plan_of("reference", "cpu", "mxfp8_wgrad_bf16") == "forward fp32, dgrad fp32, wgrad bf16"


def test_every_operand_of_every_plan_has_a_key_that_says_all_of_it() -> None:
    specs = set()
    for row in BACKENDS:
        module = __import__(row.module, fromlist=["plan"])
        for hardware in (*CLUSTER_GPUS.values(), Hardware("cpu", "cpu"), Hardware("gfx950", "MI355X")):
            for recipe in RECIPES.values():
                if row.runs_on(hardware) and (row.rebases or recipe.block_k == 32):
                    specs |= {spec for _, _, spec in contract.operands_of(module.plan(recipe, hardware))}
    assert all(decode(spec.key) == spec for spec in specs)
    assert len({spec.key for spec in specs}) == len(specs)


def test_hardware_that_was_never_tried_warns() -> None:
    recipe = get_recipe("mxfp8")
    for hardware, backend in (
        (Hardware("sm_100", "NVIDIA B200"), "auto"),
        (Hardware("gfx950", "AMD MI355X"), "triton"),
    ):
        assert "never run on" in select(backend, hardware, recipe).warning
    assert "never run on" in select("auto", CLUSTER_GPUS["H20"], recipe).warning
    for hardware in (CLUSTER_GPUS["H200"], hardware_of(torch.device("cpu"))):
        assert select("auto", hardware, recipe).warning is None


def test_selection() -> None:
    cpu, h200, b200 = hardware_of(torch.device("cpu")), CLUSTER_GPUS["H200"], CLUSTER_GPUS["B200"]
    exact, rebased = get_recipe("mxfp8_2d"), get_recipe("mxfp8_2d_rebased")
    chosen = [select("auto", hardware, exact).name for hardware in (cpu, h200, b200)]
    assert chosen == ["reference", "hopper", "sm100"]
    assert (
        select("triton", b200, exact).name == "triton"
        and select("auto", Hardware("sm_103", "B300"), exact).name == "triton"
    )
    assert select("auto", h200, rebased).name == "hopper"
    for backend, hardware, recipe, message in (
        ("nonesuch", cpu, exact, "unknown backend 'nonesuch': use one of auto, hopper, sm100, triton, reference"),
        ("hopper", cpu, exact, "'hopper' needs an NVIDIA GPU of SM90"),
        ("auto", b200, rebased, "recipe 'mxfp8_2d_rebased' is rebased, but backend 'sm100'"),
    ):
        with pytest.raises(ValueError, match=message):
            select(backend, hardware, recipe)


def test_assert_same_is_no_formality() -> None:
    operand = reference.quantize(torch.randn(40, 64), 1, load("reference", torch.device("cpu")).plan(
        get_recipe("mxfp8"), hardware_of(torch.device("cpu"))).forward.a)  # fmt: skip
    for field in ("data", "scale"):
        changed = getattr(operand, field).clone()
        changed.view(torch.uint8)[-1, -1] ^= 1
        with pytest.raises(AssertionError, match=f"{field}: 1 of"):
            contract.assert_same(operand._replace(**{field: changed}), operand)
