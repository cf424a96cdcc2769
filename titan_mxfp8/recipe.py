"""What is quantised how: a recipe is a row of this table, nothing else in the package branches on its name."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from titan_mxfp8.format.codec import Encoded
from titan_mxfp8.format.mx import BLOCK_KS, BLOCKS, ELEM_DTYPES, ROUNDINGS, Block, BlockK, Rounding


@dataclass(frozen=True, kw_only=True)
class Recipe(Encoded):
    """How the operands of the three GEMMs are quantised. Activations are always 1x32 E4M3.

    Attributes:
        name: the canonical name, a key of ``RECIPES``, or ``bf16``.
        quantized: False for ``BF16`` alone, whose operands are bf16 and of whose other fields none counts.
        weight_block: ``1x32`` blocks along each GEMM's contraction axis (the weight is quantised once per axis), or
            ``32x32`` blocks (the same values serve forward and dgrad; quantised once, unless FSDP frees the weight).
        grad_dtype: element type of the output gradient, in dgrad and in wgrad.
        wgrad: ``mxfp8``, or ``bf16`` for a weight gradient from unquantised operands.
        rounding: scale rounding, see ``format/reference.py``.
        block_k: how many elements along the contraction axis share a scale: 32, exact MXFP8, or 128, where the
            operands are rebased (``format.reference.rebase``), which Hopper's FP8 tensor cores multiply much faster.
        key: the recipe as one string, which ``torch.compile`` can hand on where it could not hand on a recipe.

    Raises:
        ValueError: a value that is none of these.
    """

    name: str
    quantized: bool = True
    weight_block: Block = "1x32"
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    wgrad: Literal["mxfp8", "bf16"] = "mxfp8"
    rounding: Rounding = "rceil"
    block_k: BlockK = 32

    def __post_init__(self) -> None:
        for name, known in (
            ("quantized", (True, False)),
            ("weight_block", BLOCKS),
            ("grad_dtype", ELEM_DTYPES),
            ("wgrad", ("mxfp8", "bf16")),
            ("rounding", ROUNDINGS),
            ("block_k", BLOCK_KS),
        ):
            value = getattr(self, name)
            if value not in known or type(value) is not type(known[0]):  # 1 == True
                raise ValueError(
                    f"recipe {self.name!r}: unknown {name} {value!r}, use one of {', '.join(map(str, known))}"
                )
        super().__post_init__()

    def rebased(self) -> "Recipe":
        """The same recipe with a scale per 128 elements; itself where it has one already. Raises ValueError of
        ``BF16``, which has no scales."""
        if not self.quantized:
            raise ValueError(f"recipe {self.name!r} quantises nothing, so it cannot be rebased")
        return self if self.block_k == 128 else replace(self, name=f"{self.name}_rebased", block_k=128)


_EXACT = {
    Recipe(name="mxfp8"): ("mxfp8_rceil", "mxfp8_cublas_rceil"),
    Recipe(name="mxfp8_floor", rounding="floor"): ("mxfp8_cublas",),
    Recipe(name="mxfp8_wgrad_bf16", wgrad="bf16"): ("mxfp8_rceil_wgrad_with_hp",),
    Recipe(name="mxfp8_2d", weight_block="32x32"): (),
    Recipe(name="mxfp8_2d_wgrad_bf16", weight_block="32x32", wgrad="bf16"): (),
    Recipe(name="mxfp8_e5m2_grad", grad_dtype=torch.float8_e5m2): (),
}

# Every accepted name. The aliases are the names that existing TorchTitan TOMLs and torchao use.
RECIPES: dict[str, Recipe] = {name: recipe for recipe, aliases in _EXACT.items() for name in (recipe.name, *aliases)}
RECIPES |= {recipe.rebased().name: recipe.rebased() for recipe in _EXACT}
_REBASED = {name: RECIPES[recipe.rebased().name] for name, recipe in RECIPES.items()}

# The control: the same operators and kernels on unquantised operands. Not in ``RECIPES``, as it is no MXFP8.
BF16 = Recipe(name="bf16", quantized=False)


# In a config: the recipe that is recommended for the hardware (``backends.recommend``).
AUTO = "auto"

# TorchTitan's names for the converters of the routed experts and of the linears, each of which takes a recipe.
GROUPED_MM = "quantize.grouped_mm.mx"
LINEAR = "quantize.linear.mx"


def get_recipe(recipe: str | Recipe, rebase: bool = False) -> Recipe:
    """The ``Recipe`` of a name, ``bf16`` included, or alias; a ``Recipe`` is returned as it is. With ``rebase`` its
    rebased form. Raises ValueError: unknown name (the message lists the known ones), ``auto``, which depends on the
    hardware, or ``rebase`` that is no bool."""
    if not isinstance(rebase, bool):
        raise ValueError(f"rebase is True or False, got {rebase!r}")
    if isinstance(recipe, Recipe):
        return recipe.rebased() if rebase else recipe
    if recipe == BF16.name:
        return BF16.rebased() if rebase else BF16
    if not isinstance(recipe, str) or recipe not in RECIPES:
        what = "recipe 'auto' is for configs and conversions" if recipe == AUTO else f"unknown recipe {recipe!r}"
        raise ValueError(f"{what}: use one of {', '.join(RECIPES)}")
    return (_REBASED if rebase else RECIPES)[recipe]
