"""The contract of a backend (``contract.py``), for every row of ``BACKENDS`` that runs here: CPU and, if any, GPU."""

from dataclasses import replace

import contract
import pytest
import swiglu_contract
import torch
from contract import BF16, FP32, Pair, Target, check_gemms, ids

from scripts.bench.problems import SPREADS, group_sizes, relative_rms
from titan_mxfp8.backends import BACKENDS, select
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware, hardware_of
from titan_mxfp8.format import reference
from titan_mxfp8.format.codec import decode
from titan_mxfp8.recipe import Recipe, get_recipe

CPU = hardware_of(torch.device("cpu"))
REFERENCE = Target(row=contract.ROWS["reference"], hardware=CPU, device=torch.device("cpu"))
TARGETS = contract.targets_here()
# The reference is what the others are compared with: its GEMMs are judged too, with a few recipes that tell them apart.
FEW = ("mxfp8", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad", "mxfp8_2d_rebased")
KERNELS = [(target, recipe) for target in TARGETS for recipe in target.recipes() if target.row.name != "reference"]
TESTED = KERNELS + [(t, get_recipe(name)) for t in TARGETS if t.row.name == "reference" for name in FEW]
# The quantisers and the SwiGLU of SM100 run on any NVIDIA GPU that converts to FP8.
CONVERTS = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
SM100 = Target(row=contract.ROWS["sm100"], hardware=CLUSTER_GPUS["B200"], device=torch.device("cuda", 0))
AS_SM100 = [(SM100, recipe) for recipe in SM100.recipes() if CONVERTS and SM100.row not in {t.row for t in TARGETS}]
PAIRS = [
    (target, pair)
    for target in dict.fromkeys(target for target, _ in KERNELS + AS_SM100)
    for pair in contract.pairs_of(map(target.plan, target.recipes()))
]
GROUPS = [group_sizes(spread, 260, 7) for spread in SPREADS]
GROUPS += [group_sizes("zipf", 1200, 37), group_sizes("tiny", 1500, 300), group_sizes("balanced", 4096, 8)]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("target, pair", PAIRS, ids=ids)
def test_quantisers_give_the_references_bits(target: Target, pair: Pair, dtype: torch.dtype) -> None:
    contract.check_quantisers(target, pair, dtype, GROUPS)


@pytest.mark.parametrize("target, recipe", [*TESTED, *AS_SM100], ids=ids)
def test_requantised_rows_have_the_references_bits(target: Target, recipe: Recipe) -> None:
    contract.check_requantisers(target, recipe, GROUPS if target != REFERENCE else [])


@pytest.mark.parametrize("target, recipe", [*KERNELS, *AS_SM100], ids=ids)
def test_swiglu(target: Target, recipe: Recipe) -> None:
    """Twice the same bits, the scores' gradient included."""
    large = swiglu_contract.LARGE if recipe.name in FEW else ()
    swiglu_contract.check_cases(target, recipe, [*swiglu_contract.CASES, *large])
    plan = target.plan(recipe)
    inputs = swiglu_contract.swiglu_inputs([700, 0, 1500, 257, 1], 0, 1408)
    gate, up, u, scores, offs = (t.to(target.device) for t in inputs)
    args = scores, 7.0, plan, offs
    one, other = (target.backend.swiglu_backward([gate, up, u.clone()], *args) for _ in range(2))
    assert torch.equal(one.dscores, other.dscores)
    for a, b in zip(one[:5], other[:5], strict=True):
        assert all(map(torch.equal, *(swiglu_contract.bits(operand, inputs[4]) for operand in (a, b))))


@pytest.mark.parametrize(
    "target, recipe, case",
    # The reference multiplies group by group, however large they are.
    [(*each, case) for each in TESTED for case in contract.CASES if case != "large" or each in KERNELS],
    ids=ids,
)
def test_gemms(target: Target, recipe: Recipe, case: str) -> None:
    plan = target.plan(recipe)
    check_gemms(target.backend, plan, case, device=target.device)
    check_gemms(target.backend, plan, case, n=288, k=416, out_dtype=BF16, device=target.device, make=contract.patchy)


@pytest.mark.parametrize("target, recipe", TESTED, ids=ids)
def test_sums_of_products(target: Target, recipe: Recipe) -> None:
    plan = target.plan(recipe)
    for case in ("ragged", "large", "all empty", "no offs"):
        contract.check_sum_of_products(target.backend, plan, case, device=target.device)
    for n, k in ((288, 416), (256, 160)):
        contract.check_sum_of_products(
            target.backend, plan, "ragged", n=n, k=k, device=target.device, make=contract.patchy
        )


@pytest.mark.parametrize("target, recipe", TESTED, ids=ids)
def test_shapes_and_biases(target: Target, recipe: Recipe) -> None:
    plan = target.plan(recipe)
    for n, k in ((32, 32), (96, 64), (32, 224)):
        check_gemms(target.backend, plan, "ragged", n=n, k=k, device=target.device)
    for bias_dtype in (BF16, FP32):
        for out_dtype in (BF16, FP32):
            for case in ("ragged", "no offs"):
                options = {"bias_dtype": bias_dtype, "out_dtype": out_dtype, "device": target.device}
                check_gemms(target.backend, plan, case, **options)


@pytest.mark.parametrize("target, recipe", TESTED, ids=ids)
def test_nan_and_offs_past_the_last_row(target: Target, recipe: Recipe) -> None:
    plan = target.plan(recipe)
    contract.check_nan_stays_in_its_group(target.backend, plan, target.device)
    if target.device.type == "cuda" and target.row.name != "reference":  # torch does look
        contract.check_offs_past_the_last_row(target.backend, plan, target.device)


@pytest.mark.parametrize("target", TARGETS, ids=ids)
def test_an_operand_quantised_along_another_axis_raises(target: Target) -> None:
    plan = target.plan("mxfp8")
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
    backend, plan = REFERENCE.backend, REFERENCE.plan("mxfp8")
    x, w = torch.randn(64, 64), torch.randn(1, 64, 64)
    a, b = backend.quantize(x, 1, plan.forward.a, None), backend.quantize(w, 2, plan.forward.b, None)
    for wrong in (a._replace(scale=None), a._replace(spec=replace(a.spec, stored="bf16"))):
        with pytest.raises(AssertionError, match="have no scales"):
            backend.gemm_m_grouped(wrong, b, None, None, BF16)


def test_the_judge_sees_one_wrong_row_and_one_wrong_tile() -> None:
    """Relative to all of the output neither is as large as its rounding to bf16 may be."""
    plan = REFERENCE.plan("mxfp8")
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


def test_every_operand_of_every_plan_has_a_key_that_says_all_of_it() -> None:
    here = (*CLUSTER_GPUS.values(), CPU, Hardware("gfx950", "MI355X"))
    targets = [Target(row=row, hardware=hardware, device=torch.device("cpu")) for row in BACKENDS for hardware in here]
    plans = [t.plan(recipe) for t in targets if t.row.runs_on(t.hardware) for recipe in t.recipes()]
    specs = {spec for plan in plans for _, _, spec in contract.operands_of(plan)}
    assert all(decode(spec.key) == spec for spec in specs)
    assert len({spec.key for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    "backend, hardware, recipe, chosen, was_run",
    [
        ("auto", CPU, "mxfp8_2d", "reference", True),
        ("auto", CLUSTER_GPUS["H200"], "mxfp8_2d", "hopper", True),
        ("auto", CLUSTER_GPUS["H200"], "mxfp8_2d_rebased", "hopper", True),
        ("auto", CLUSTER_GPUS["H20"], "mxfp8", "hopper", False),
        ("auto", CLUSTER_GPUS["B200"], "mxfp8_2d", "sm100", False),
        ("triton", CLUSTER_GPUS["B200"], "mxfp8_2d", "triton", False),
        ("auto", Hardware("sm_103", "B300"), "mxfp8_2d", "triton", False),
        ("triton", Hardware("gfx950", "AMD MI355X"), "mxfp8", "triton", False),
    ],
)
def test_selection(backend: str, hardware: Hardware, recipe: str, chosen: str, was_run: bool) -> None:
    found = select(backend, hardware, get_recipe(recipe))
    assert found.name == chosen
    assert found.warning is None if was_run else "never run on" in found.warning


@pytest.mark.parametrize(
    "backend, hardware, recipe, message",
    [
        ("nonesuch", CPU, "mxfp8_2d", "unknown backend 'nonesuch': use one of auto, hopper, sm100, triton, reference"),
        ("hopper", CPU, "mxfp8_2d", "'hopper' needs an NVIDIA GPU of SM90"),
        ("auto", CLUSTER_GPUS["B200"], "mxfp8_2d_rebased", "'mxfp8_2d_rebased' is rebased, but backend 'sm100'"),
    ],
)
def test_what_cannot_be_selected(backend: str, hardware: Hardware, recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(backend, hardware, get_recipe(recipe))


def test_assert_same_is_no_formality() -> None:
    operand = reference.quantize(torch.randn(40, 64), 1, contract.EXACT)
    for field in ("data", "scale"):
        changed = getattr(operand, field).clone()
        changed.view(torch.uint8)[-1, -1] ^= 1
        with pytest.raises(AssertionError, match=f"{field}: 1 of"):
            contract.assert_same(operand._replace(**{field: changed}), operand)
