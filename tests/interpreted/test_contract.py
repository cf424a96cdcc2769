"""The contract of a backend (``contract.py``) in the interpreter: the portable kernels with every variant of the GEMMs,
and the quantisers and the SwiGLU of Hopper and SM100. Hopper's Gluon GEMMs cannot be interpreted; those of SM100 are
torch's, as ``scaled_mm.py`` has them."""

from collections.abc import Iterator
from itertools import product

import contract
import pytest
import scaled_mm
import swiglu_contract
import torch
from contract import BF16, FP32, OTHER, ROWS, Pair, Target, check_gemms, check_quantize, ids, uneven, wild
from tiers import daily

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8.backends import hopper, triton
from titan_mxfp8.backends.common import convert, gemm, swizzled
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.recipe import RECIPES, Recipe, get_recipe


def on(backend: str, arch: str) -> Target:
    return Target(row=ROWS[backend], hardware=Hardware(arch, arch), device=torch.device("cpu"))


VARIANTS = {"scaled": on("triton", "sm_100"), "bf16_tma": on("triton", "sm_90"), "bf16": on("triton", "sm_80")}
GEMMS = VARIANTS | {"sm100": on("sm100", "sm_100")}
HOPPER, SM100, TRITON = on("hopper", "sm_90"), GEMMS["sm100"], GEMMS["scaled"]
# Small tiles, in bands of 2: 160 rows then have several bands and tiles for each of the 3 programs, and groups tails.
TILES = gemm.Tiles(bm=32, bn=64, bc=64, warps=4, stages=2, programs=1)
EXACT = [recipe.name for recipe in dict.fromkeys(RECIPES.values()) if recipe.block_k == 32]


@pytest.fixture(params=GEMMS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """Each variant of the portable GEMMs, with small tiles, and SM100's."""
    here = GEMMS[request.param]
    monkeypatch.setattr(gemm, "hardware_of", lambda device: here.hardware)
    monkeypatch.setattr(gemm, "tiles_of", lambda mma: (TILES, TILES))
    monkeypatch.setattr(gemm, "GROUP_M", 2)
    monkeypatch.setattr(gemm, "_is_many_tiles", lambda *args: False)
    with scaled_mm.installed():
        yield here


@pytest.fixture
def converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion of SM90 and newer: the quantisers of Hopper and SM100 run on no other."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)


GROUP_SIZES = [case for case in contract.CASES if case != "large"]
BOTH_16 = {"out_dtype": BF16, "bias_dtype": BF16}


@pytest.mark.parametrize(
    "target, case",
    daily(
        product(GEMMS, GROUP_SIZES),
        "scaled",
        "sm100",
        *product(["bf16_tma", "bf16"], ["no rows"]),
    ),
    indirect=["target"],
)
def test_group_sizes(case: str, target: Target) -> None:
    """Ragged groups and none are among the next two tests' for those that multiply bf16."""
    few_tiles = {"n": 64, "k": 64} if case == "48 experts" else {}  # of many experts: the other cases have tails
    check_gemms(target.backend, target.plan("mxfp8"), case, **few_tiles, **BOTH_16 if target is SM100 else {})


@pytest.mark.parametrize(
    "target, recipe",
    daily(
        product(GEMMS, EXACT),
        *product(["scaled"], ["mxfp8_2d", "mxfp8_e5m2_grad"]),
        ("bf16_tma", "mxfp8_2d"),
        ("bf16", "mxfp8_2d"),
        *product(["sm100"], ["mxfp8_2d", "mxfp8_e5m2_grad", "mxfp8_wgrad_bf16"]),
    ),
    indirect=["target"],
)
def test_recipes(target: Target, recipe: str) -> None:
    """Where bf16 is multiplied, the GEMMs get alike operands of all of them, but for the weight gradient's."""
    plan = target.plan(recipe)
    check_gemms(target.backend, plan, "ragged", **BOTH_16)
    check_gemms(target.backend, plan, "no offs", bias_dtype=FP32)


@pytest.mark.parametrize("target", daily(VARIANTS, "bf16_tma"), indirect=True)
def test_the_control(target: Target) -> None:
    check_gemms(triton, target.plan("bf16"), "ragged", out_dtype=BF16)


def test_any_multiple_of_32_and_nan(target: Target) -> None:
    plan = target.plan("mxfp8_2d")
    for n, k in ((32, 32), (96, 64), (32, 224)):
        check_gemms(target.backend, plan, "ragged", n=n, k=k, out_dtype=BF16 if target is SM100 else FP32)
    contract.check_nan_stays_in_its_group(target.backend, plan)


@pytest.mark.parametrize("target", daily(GEMMS, "bf16_tma", "bf16", "sm100"), indirect=True)
def test_activations_that_arrive_quantised(target: Target) -> None:
    """Say from an all-to-all. They meet weights of either kind, and scales in rows meet those in tiles."""
    for case in ("ragged", "no offs"):
        plan = contract.with_arrived(target.plan("mxfp8"))
        check_gemms(target.backend, plan, case, **BOTH_16 if target is SM100 else {})


@pytest.mark.parametrize("target", ["bf16_tma"], indirect=True)
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_sums_of_products(recipe: str, target: Target) -> None:
    plan = hopper.plan(get_recipe(recipe), target.hardware)
    for case in ("ragged", "all empty", "no offs"):
        assert len(contract.check_sum_of_products(hopper, plan, case)) == 1


def test_what_the_backend_launches() -> None:
    """With the tiles that it chooses itself."""
    check_gemms(triton, on("triton", "sm_80").plan("mxfp8"), "ragged")


@pytest.mark.parametrize(
    "case, out_dtype, called",
    [
        ("no offs", BF16, {"scaled_mm"}),
        ("no offs", FP32, {"scaled_mm"}),
        ("ragged", BF16, {"scaled_grouped_mm"}),
        ("ragged", FP32, set()),
    ],
)
def test_what_torch_multiplies_on_sm100(case: str, out_dtype: torch.dtype, called: set[str]) -> None:
    with scaled_mm.installed() as calls:
        check_gemms(SM100.backend, SM100.plan("mxfp8"), case, out_dtype=out_dtype, bias_dtype=BF16)
    assert set(calls) == called


QUANTISED = {
    HOPPER: ("mxfp8_2d", "mxfp8_rebased", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased", OTHER),
    SM100: ("mxfp8", "mxfp8_2d", "mxfp8_floor"),
}
PAIRS = [(target, pair) for target, names in QUANTISED.items() for pair in contract.pairs_of(map(target.plan, names))]


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("dtype", daily([BF16, FP32], BF16))
@pytest.mark.parametrize("target, pair", PAIRS, ids=ids)
def test_quantisers(target: Target, pair: Pair, dtype: torch.dtype) -> None:
    contract.check_quantisers(target, pair, dtype, [[0, 1, 130, 44]])


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize(
    "target, recipe",
    daily(
        [
            *product([HOPPER], ["mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_wgrad_bf16_rebased", "mxfp8_e5m2_grad_rebased"]),
            *product([TRITON], ["mxfp8_floor", "mxfp8_wgrad_bf16", "mxfp8_e5m2_grad"]),
            *product([SM100], ["mxfp8_2d", "mxfp8_floor", "mxfp8_e5m2_grad"]),
            (HOPPER, OTHER),
        ],
        *product([HOPPER], ["mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased"]),
        *product([TRITON], ["mxfp8_floor", "mxfp8_wgrad_bf16"]),
        *product([SM100], ["mxfp8_2d", "mxfp8_e5m2_grad"]),
    ),
    ids=ids,
)
def test_requantisers(target: Target, recipe: str | Recipe) -> None:
    contract.check_requantisers(target, get_recipe(recipe), [[0, 1, 0, 130, 44], [70], [0, 0]])


# The quantisers of each, and of values in bf16.
RAGGED = HOPPER, SM100, TRITON, VARIANTS["bf16"]


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize(
    "target, spread",
    daily(product(RAGGED, SPREADS), *product(RAGGED, ["empties"]), (TRITON, "zipf")),
    ids=ids,
)
def test_ragged_groups(target: Target, spread: str) -> None:
    """All rows in groups, and a tail of 45 that belongs to none; then more groups than a step of the map takes."""
    (_, rowwise, columnwise), *_ = contract.pairs_of([target.plan("mxfp8_rebased" if target is HOPPER else "mxfp8")])
    for rows, used, groups in ((340, 340, 5), (340, 295, 5), (200, 155, 40)):
        x = torch.where(torch.rand(rows, 1) < 0.5, wild((rows, 96), BF16), uneven((rows, 96), BF16))
        offs = make_offs(group_sizes(spread, used, groups))
        contract.check_quantize_both(target.backend, x, rowwise, columnwise, offs)
        check_quantize(target.backend, x, 0, columnwise, offs)


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("target", [HOPPER, SM100], ids=ids)
def test_every_operand_that_a_plan_names_can_be_made(target: Target) -> None:
    for recipe in target.recipes():
        for what, axis, spec in contract.operands_of(target.plan(recipe)):
            check_quantize(target.backend, uneven((2, 64, 160) if what == "w" else (70, 160), BF16), axis, spec)


SWIGLU = [*product([HOPPER], ["mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_2d_wgrad_bf16"])]
SWIGLU += product([HOPPER], ["mxfp8_e5m2_grad", "mxfp8_e5m2_grad_rebased", "mxfp8_wgrad_bf16_rebased"])
SWIGLU += product([TRITON], ["mxfp8", "mxfp8_floor", "mxfp8_e5m2_grad", "mxfp8_wgrad_bf16", "bf16"])
SWIGLU += product([SM100], ["mxfp8", "mxfp8_floor", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad"])
SWIGLU_DAILY = [(HOPPER, "mxfp8_2d"), (HOPPER, "mxfp8_wgrad_bf16_rebased"), (TRITON, "mxfp8_e5m2_grad")]
SWIGLU_DAILY += [(TRITON, "bf16"), (SM100, "mxfp8_floor")]


@pytest.mark.usefixtures("converts")
@pytest.mark.parametrize("target, recipe", daily(SWIGLU, *SWIGLU_DAILY), ids=ids)
def test_swiglu(target: Target, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's bits, but for the last one of an exponential; SM100's scales in tiles, with no pass over them."""
    monkeypatch.setattr(swizzled, "_swizzle_scales", None)
    wide = [([3, 0, 30], 7, 1408, None, True)] * (target is HOPPER and "2d" in recipe and "bf16" not in recipe)
    swiglu_contract.check_cases(target, recipe, [*swiglu_contract.CASES, *wide])
