"""What is chosen once for the GEMMs of a layer, and travels from the module to the operators as it is."""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from titan_mxfp8 import backends
from titan_mxfp8.backends import Plan
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.format.codec import Encoded, decode
from titan_mxfp8.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class MXConfig(Encoded):
    """Made when a module is converted, or by ``config_of`` where a public function is called.

    Attributes:
        kept_weight: as what backward gets the weight: ``quantized``, as forward has quantised it for dgrad; ``bf16``,
            as forward multiplies it unquantised, so that it is cast once; or ``itself``.
        keeps_rows: whether backward gets the input as the FP8 rows that forward multiplies.
        keeps_input: whether it gets the input itself, which wgrad multiplies unquantised.
    """

    recipe: Recipe
    backend: str  # name of the chosen one, not ``auto``
    plan: Plan  # the operands of its three GEMMs
    keep_quantized_weight: bool = True  # as for ``mxfp8_grouped_mm``
    requantize_input: bool = False  # likewise
    kept_weight: Literal["quantized", "bf16", "itself"] = field(init=False, repr=False, compare=False)
    keeps_rows: bool = field(init=False, repr=False, compare=False)
    keeps_input: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Values in bf16, two bytes per weight of every layer, would cost more than a second pass.
        quantizes_once = self.recipe.weight_block == "32x32" and self.plan.dgrad.b.stored != "bf16"
        kept_weight = "quantized" if quantizes_once else "itself" if self.recipe.quantized else "bf16"
        object.__setattr__(self, "kept_weight", kept_weight if self.keep_quantized_weight else "itself")
        keeps_rows = self.requantize_input and self.plan.forward.a.stored != "bf16"
        object.__setattr__(self, "keeps_rows", keeps_rows)
        object.__setattr__(self, "keeps_input", not keeps_rows and not self.plan.wgrad.b.is_quantized)


@torch.compiler.assume_constant_result
def config_of(recipe: str, backend: str, device: torch.device, keep: bool = True, requantize: bool = False) -> MXConfig:
    """The config of a layer on ``device``, the same object each time. ``torch.compile`` takes it for a constant, and
    hands on strings where it could not hand on a recipe. Raises ValueError as ``backends.select``.

    Args:
        recipe: ``Recipe.key``.
        backend: ``auto`` or the name of one.
        keep, requantize: ``keep_quantized_weight`` and ``requantize_input`` of ``mxfp8_grouped_mm``.
    """
    return _config(recipe, backend, backends.hardware_of(device), keep, requantize)


@cache
def _config(key: str, backend: str, hardware: Hardware, keep: bool, requantize: bool) -> MXConfig:
    recipe = decode(key)
    name = backends.select(backend, hardware, recipe).name
    return MXConfig(
        recipe=recipe,
        backend=name,
        plan=backends.plan_on(recipe, name, hardware),
        keep_quantized_weight=keep,
        requantize_input=requantize,
    )
