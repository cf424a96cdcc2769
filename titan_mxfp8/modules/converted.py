"""What a converted module carries, and what it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.moe.layer import mxfp8_moe
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.observe import observe
from titan_mxfp8.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class MXConfig:
    """What a converted module's class carries as ``module.mxfp8``.

    Attributes:
        recipe: how its operands are quantised.
        backend: name of the chosen backend, not ``auto``.
        compile_backend: for experts that TorchTitan compiles apart from their module: a ``torch.compile`` backend, or
            None for eager.
        requantize_input: as for ``mxfp8_grouped_mm``.
    """

    recipe: Recipe
    backend: str
    compile_backend: str | None = None
    requantize_input: bool = False


def own_code(function: Callable) -> Callable:
    """A copy of a Python function that ``torch.compile`` compiles apart from it.

    It keeps what it compiled by the code object, at most 8 versions (``torch._dynamo.config.recompile_limit``): too few
    for a function that several configurations share, so each has a copy.
    """
    code = function.__code__.replace()  # another object, of the same contents
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__, copied.__doc__ = function.__qualname__, function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied


# Mesh dimensions that split the GEMMs themselves; FSDP puts whole weights together again before they are used.
SPLITS_GEMMS = frozenset({"tp", "ep", "etp"})


class ConvertedModule:
    """Mixed into converted classes: what a converted module carries.

    It refuses, as soon as TP or EP splits a weight, parts that MXFP8 cannot work with: ``parallelize_module`` registers
    the split weight in place of the whole one, on meta and before anything is trained.
    """

    mxfp8: MXConfig
    mxfp8_fqn: str  # not in MXConfig: torch.compile would compile each layer's experts anew
    probe: torch.Tensor | None = None  # of ops.observe

    @property
    def op_options(self) -> dict[str, object]:
        """What ``mxfp8_grouped_mm`` and ``mxfp8_linear`` are called with. ``fully_shard`` marks the modules whose
        weights it frees after forward."""
        config = self.mxfp8
        return {
            "recipe": config.recipe,
            "backend": config.backend,
            "keep_quantized_weight": not getattr(self, "_is_fsdp_managed_module", False),
            "requantize_input": config.requantize_input,
        }

    def mxfp8_grouped_mm(
        self,
        a: torch.Tensor,
        b_t: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``torch._grouped_mm`` of experts, in MXFP8, and observed."""
        options = self.op_options
        try:
            y = mxfp8_grouped_mm(a, b_t, offs, bias=bias, out_dtype=out_dtype or a.dtype, **options)
        except ValueError as error:
            raise ValueError(f"{self.mxfp8_fqn}: {error}") from error
        return observe(y, a, b_t.mT, offs, self.probe, options["recipe"], options["backend"])

    def mxfp8_moe(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        group: dist.ProcessGroup | None,
        **options: object,
    ) -> torch.Tensor:
        """``mxfp8_moe`` of experts with weights w1, w3, w2, observed.

        A probe sees tokens and output gradients as they are quantised, at home, and the three weights. Not what is
        quantised in the hidden layer, inside ``mxfp8_moe``; what requantising changes is that of tokens in their order
        at home.
        """
        options |= {name: self.op_options[name] for name in ("recipe", "backend", "keep_quantized_weight")}
        try:
            y = mxfp8_moe(x, scores, expert_ids, *weights, group, **options)
        except ValueError as error:
            raise ValueError(f"{self.mxfp8_fqn}: {error}") from error
        return observe(y, x, weights, None, self.probe, options["recipe"], options["backend"], dispatched=True)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, DTensor) and (param.ndim == 3 or name == "weight"):
            _check_shards(f"{self.mxfp8_fqn}.{name}", param)
        super().register_parameter(name, param)


def _check_shards(fqn: str, weight: DTensor) -> None:
    mesh = weight.device_mesh
    for mesh_dim, placement in enumerate(weight.placements):
        axis = mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else None
        if not placement.is_shard() or axis not in SPLITS_GEMMS:
            continue
        is_feature = placement.dim >= weight.ndim - 2
        size, ranks = weight.shape[placement.dim], mesh.size(mesh_dim)
        units, left_over = divmod(size, BLOCK_SIZE if is_feature else 1)
        if left_over or units % ranks:
            wanted = f"no multiple of {BLOCK_SIZE}" if is_feature else "not whole"
            raise ValueError(
                f"MXFP8: {fqn} of shape {tuple(weight.shape)} cannot be split between {ranks} {axis} ranks: each "
                f"would get {size / ranks:g} of {size} {'features' if is_feature else 'experts'}, which is {wanted}. "
                f"Choose a degree that divides {units}, or other sizes for the model, or leave the module in high "
                "precision (filter_fqns for linears, fqns for experts)"
            )
