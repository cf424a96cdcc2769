"""What is quantised how: a recipe is a row of this table, nothing else in the package branches on its name."""

from dataclasses import dataclass
from typing import Literal

import torch

from titan_mxfp8.format.mx import BLOCKS, ELEM_DTYPES, ROUNDINGS, Block, Rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the operands of the three GEMMs are quantised. Activations are always 1x32 E4M3.

    Attributes:
        name: the canonical name, a key of ``RECIPES``.
        weight_block: ``1x32`` blocks along each GEMM's contraction axis (the weight is quantised once per axis), or
            ``32x32`` blocks (the same values serve forward and dgrad; quantised once, unless FSDP frees the weight).
        grad_dtype: element type of the output gradient, in dgrad and in wgrad.
        wgrad: ``mxfp8``, or ``bf16`` for a weight gradient from unquantised operands.
        rounding: scale rounding, see ``format/reference.py``.

    Raises:
        ValueError: a value that is none of these.
    """

    name: str
    weight_block: Block = "1x32"
    grad_dtype: torch.dtype = torch.float8_e4m3fn
    wgrad: Literal["mxfp8", "bf16"] = "mxfp8"
    rounding: Rounding = "rceil"

    def __post_init__(self) -> None:
        for field, known in (
            ("weight_block", BLOCKS),
            ("grad_dtype", ELEM_DTYPES),
            ("wgrad", ("mxfp8", "bf16")),
            ("rounding", ROUNDINGS),
        ):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"recipe {self.name!r}: unknown {field} {getattr(self, field)!r}, use one of "
                    f"{', '.join(map(str, known))}"
                )


_TABLE = {
    Recipe(name="mxfp8"): ("mxfp8_rceil", "mxfp8_cublas_rceil"),
    Recipe(name="mxfp8_floor", rounding="floor"): ("mxfp8_cublas",),
    Recipe(name="mxfp8_wgrad_bf16", wgrad="bf16"): ("mxfp8_rceil_wgrad_with_hp",),
    Recipe(name="mxfp8_2d", weight_block="32x32"): (),
    Recipe(name="mxfp8_2d_wgrad_bf16", weight_block="32x32", wgrad="bf16"): (),
    Recipe(name="mxfp8_e5m2_grad", grad_dtype=torch.float8_e5m2): (),
}

# Every accepted name. The aliases are the names that existing TorchTitan TOMLs and torchao use.
RECIPES: dict[str, Recipe] = {name: recipe for recipe, aliases in _TABLE.items() for name in (recipe.name, *aliases)}


# TorchTitan's names for the converters of the routed experts and of the linears, each of which takes a recipe.
GROUPED_MM = "quantize.grouped_mm.mx"
LINEAR = "quantize.linear.mx"


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The ``Recipe`` of a name or alias; a ``Recipe`` is returned as it is.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: use one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
