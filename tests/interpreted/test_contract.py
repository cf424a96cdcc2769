"""The contract of a backend (``contract.py``) in the interpreter: the portable kernels with every variant of the
GEMMs, and Hopper's quantisers, whose Gluon GEMMs cannot be interpreted."""

from itertools import product

import contract
import pytest
import torch
from contract import BF16, FP32, OTHER, check_gemms, check_quantize, check_quantize_both, check_requantize, uneven, wild
from tiers import daily

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8.backends import hopper, sm100, triton
from titan_mxfp8.backends.common import convert, gemm
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format import reference
from titan_mxfp8.format.spec import OperandSpec
from titan_mxfp8.recipe import RECIPES, Recipe, get_recipe

VARIANTS = {"scaled": "sm_100", "bf16_tma": "sm_90", "bf16": "sm_80"}
# Small tiles: 160 rows then have bands, several tiles for each of the 3 programs, and tails on all sides.
TILES = gemm.Tiles(bm=16, bn=64, bc=64, warps=4, stages=2, programs=1)
EXACT = [recipe.name for recipe in dict.fromkeys(RECIPES.values()) if recipe.block_k == 32]


@pytest.fixture(params=VARIANTS)
def hardware(request, monkeypatch) -> Hardware:
    """Each variant of the GEMMs, with small tiles."""
    here = Hardware(VARIANTS[request.param], request.param)
    monkeypatch.setattr(gemm, "hardware_of", lambda device: here)
    monkeypatch.setattr(gemm, "tiles_of", lambda mma: (TILES, TILES))
    monkeypatch.setattr(gemm, "_is_many_tiles", lambda *args: False)
    return here


@pytest.fixture
def sm_90(monkeypatch) -> None:
    """The conversion of SM90: Hopper's quantisers run on no other."""
    monkeypatch.setattr(convert, "cuda_capability_geq", lambda *capability: True)


GROUP_SIZES = [case for case in contract.CASES if case != "large"]


@pytest.mark.parametrize(
    "hardware, case",
    daily(product(VARIANTS, GROUP_SIZES), "scaled", *product(["bf16_tma", "bf16"], ["ragged", "no offs", "no rows"])),
    indirect=["hardware"],
)
def test_group_sizes(case: str, hardware: Hardware) -> None:
    few_tiles = {"n": 64, "k": 64} if case == "48 experts" else {}  # of many experts: the other cases have tails
    check_gemms(triton, triton.plan(get_recipe("mxfp8"), hardware), case, **few_tiles)


@pytest.mark.parametrize(
    "hardware, recipe",
    daily(product(VARIANTS, EXACT), *product(["scaled"], EXACT[1::2]), ("bf16_tma", "mxfp8_2d"), ("bf16", "mxfp8_2d")),
    indirect=["hardware"],
)
def test_recipes(hardware: Hardware, recipe: str) -> None:
    """Where bf16 is multiplied, the GEMMs get alike operands of all of them, but for the weight gradient's."""
    plan = triton.plan(get_recipe(recipe), hardware)
    check_gemms(triton, plan, "ragged", out_dtype=BF16, bias_dtype=BF16)
    check_gemms(triton, plan, "no offs", bias_dtype=FP32)


@pytest.mark.parametrize("hardware", daily(VARIANTS, "bf16_tma"), indirect=True)
def test_the_control(hardware: Hardware) -> None:
    check_gemms(triton, triton.plan(get_recipe("bf16"), hardware), "ragged", out_dtype=BF16)


def test_any_multiple_of_32_and_nan(hardware: Hardware) -> None:
    plan = triton.plan(get_recipe("mxfp8_2d"), hardware)
    for n, k in ((32, 32), (96, 64), (32, 224)):
        check_gemms(triton, plan, "ragged", n=n, k=k)
    contract.check_nan_stays_in_its_group(triton, plan)


@pytest.mark.parametrize("hardware", daily(VARIANTS, "bf16_tma", "bf16"), indirect=True)
def test_fp8_where_bf16_is_multiplied(hardware: Hardware) -> None:
    """Activations that arrive quantised, say from an all-to-all, meet weights of either kind."""
    for case in ("ragged", "no offs"):
        check_gemms(triton, contract.with_arrived(triton.plan(get_recipe("mxfp8"), hardware)), case)


@pytest.mark.parametrize("hardware", ["bf16_tma"], indirect=True)
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_sums_of_products(recipe: str, hardware: Hardware) -> None:
    plan = hopper.plan(get_recipe(recipe), hardware)
    for case in ("ragged", "all empty", "no offs"):
        assert len(contract.check_sum_of_products(hopper, plan, case)) == 1


def test_what_the_backend_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles that it chooses itself."""
    check_gemms(triton, triton.plan(get_recipe("mxfp8"), Hardware("sm_80", "A100")), "ragged")


def hoppers_pairs() -> dict[str, tuple[str, OperandSpec, OperandSpec]]:
    """What Hopper's plans quantise along both axes, tokens or weights, by the first recipe that does."""
    found: dict[tuple[str, OperandSpec, OperandSpec], str] = {}
    for recipe in map(get_recipe, ("mxfp8_2d", "mxfp8_rebased", "mxfp8_2d_rebased", "mxfp8_e5m2_grad_rebased", OTHER)):
        plan = hopper.plan(recipe, Hardware("sm_90", "H200"))
        found.setdefault(("x", plan.forward.a, plan.wgrad.b), f"x of {recipe.name}")
        found.setdefault(("x", plan.dgrad.a, plan.wgrad.a), f"dy of {recipe.name}")
        found.setdefault(("w", plan.forward.b, plan.dgrad.b), f"w of {recipe.name}")
    return {name: pair for pair, name in found.items()}


@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("dtype", daily([BF16, FP32], BF16))
@pytest.mark.parametrize("pair", hoppers_pairs())
def test_hoppers_quantisers(pair: str, dtype: torch.dtype) -> None:
    what, rowwise, columnwise = hoppers_pairs()[pair]
    for make in (uneven, contract.partly_coalescible, wild):
        if what == "x":
            for shape in ((129, 288), (1, 32), (0, 64)):
                check_quantize_both(hopper, make(shape, dtype), rowwise, columnwise)
            x, offs = make((300, 96), dtype), make_offs([0, 1, 44, 130, 80])
            check_quantize_both(hopper, x, rowwise, columnwise, offs)
            check_quantize(hopper, x, 0, columnwise, offs)
            check_quantize(hopper, x, 1, rowwise)
            continue
        weights = [make((2, 160, 96), dtype)]
        if make is uneven:  # other strides, of one kind of values
            wider = make((2, 160, 192), dtype)
            weights += [
                weights[0].mT,
                wider[..., ::2],
                wider[:, ::2, 3:99],
                contract.coalescible_squares((2, 160, 96), dtype),
            ]
        for x in weights:
            check_quantize_both(hopper, x, rowwise, columnwise)
            check_quantize(hopper, x, 2, rowwise)
            check_quantize(hopper, x, 1, columnwise)


@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize(
    "backend, arch, recipe",
    daily(
        [(hopper, "sm_90", name) for name in ("mxfp8_2d", "mxfp8_wgrad_bf16_rebased", "mxfp8_e5m2_grad_rebased", OTHER)]
        + [(triton, "sm_100", name) for name in ("mxfp8_floor", "mxfp8_wgrad_bf16", "mxfp8_e5m2_grad")],
        (hopper, "sm_90", "mxfp8_2d"),
        (hopper, "sm_90", "mxfp8_e5m2_grad_rebased"),
        (triton, "sm_100", "mxfp8_floor"),
        (triton, "sm_100", "mxfp8_wgrad_bf16"),
    ),
)
def test_requantise(backend, arch: str, recipe: str | Recipe) -> None:
    for rows_spec, axis, spec in contract.requantised(backend.plan(get_recipe(recipe), Hardware(arch, arch))):
        for make in (uneven, wild):
            for shape in ((129, 288), (1, 32), (0, 64)):
                check_requantize(backend, reference.quantize(make(shape, BF16), 1, rows_spec), axis, spec)
        if axis == 0:
            rows = reference.quantize(torch.cat([uneven((220, 160), BF16), wild((80, 160), BF16)]), 1, rows_spec)
            for sizes in ([0, 1, 44, 130, 80], [300], [0, 0], [33, 0, 200]):
                check_requantize(backend, rows, 0, spec, make_offs(sizes))
            places = torch.randint(0, 300, (350,), dtype=torch.int32)
            check_requantize(backend, rows, 0, spec, make_offs([0, 44, 200, 70]), places=places)


@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize(
    "backend, arch, recipe",
    [(hopper, "sm_90", "mxfp8_2d"), (hopper, "sm_90", "mxfp8_2d_rebased"), (sm100, "sm_100", "mxfp8_2d")],
)
def test_gathered_weights(backend, arch: str, recipe: str) -> None:
    for make in (uneven, wild, contract.coalescible_squares):
        contract.check_requantize_squares(
            backend, make((2, 160, 96), FP32), backend.plan(get_recipe(recipe), Hardware(arch, arch))
        )


@pytest.mark.usefixtures("sm_90")
@pytest.mark.parametrize("spread", daily(SPREADS, "empties", "zipf"))
def test_hoppers_ragged_groups(spread: str) -> None:
    """All rows in groups, and a tail of 45 that belongs to none."""
    plan = hopper.plan(get_recipe("mxfp8_rebased"), Hardware("sm_90", "H200"))
    for rows, groups in ((400, 5), (77, 9)):
        x = torch.where(torch.rand(rows, 1) < 0.5, wild((rows, 96), BF16), uneven((rows, 96), BF16))
        for used in (rows, rows - 45):
            offs = make_offs(group_sizes(spread, used, groups))
            check_quantize_both(hopper, x, plan.forward.a, plan.wgrad.b, offs)
            check_quantize(hopper, x, 0, plan.wgrad.b, offs)


@pytest.mark.usefixtures("sm_90")
def test_every_operand_that_a_plan_names_can_be_made() -> None:
    for recipe in dict.fromkeys(RECIPES.values()):
        for what, axis, spec in contract.operands_of(hopper.plan(recipe, Hardware("sm_90", "H200"))):
            check_quantize(hopper, uneven((2, 64, 160) if what == "w" else (70, 160), BF16), axis, spec)
