"""What a converted module carries, and what it refuses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import WRAPPER_ASSIGNMENTS, update_wrapper
from types import FunctionType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.moe.layer import DispatchOptions, moe
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.grouped_experts import grouped_experts
from titan_mxfp8.ops.grouped_mm import grouped_mm
from titan_mxfp8.ops.observe import observe


def own_code(function: Callable) -> Callable:
    """A copy of a Python function that ``torch.compile`` compiles apart from it: of one code object it keeps at most 8
    versions, too few for a function that several configurations share."""
    code = function.__code__.replace()  # another object, of the same contents
    copied = FunctionType(code, function.__globals__, closure=function.__closure__)
    update_wrapper(copied, function, assigned=(*WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__"))
    del copied.__wrapped__
    return copied


# Mesh dimensions that split the GEMMs themselves; FSDP puts whole weights together again before they are used.
SPLITS_GEMMS = frozenset({"tp", "ep", "etp"})


class ConvertedModule:
    """Mixed into converted classes. It refuses parts of a weight that MXFP8 cannot work with as soon as TP or EP splits
    it: ``parallelize_module`` registers the split weight in place of the whole one, on meta, before training."""

    mxfp8: MXConfig
    mxfp8_fqn: str  # not in MXConfig, which the classes of all layers share
    probe: torch.Tensor | None = None  # of ops.observe
    gathers: tuple[str, ...] = ()  # names of w1, w3 and w2, of experts that FSDP may gather in FP8
    gathered: Sequence[torch.Tensor] = ()  # elements and scales of each, where it does
    shards: Callable[[], Sequence[torch.Tensor]] | None = None  # gives what this rank has of each, unquantised, there
    kept: Sequence[torch.Tensor] = ()  # of experts.quantize_ahead, while a trainer's step makes it hold
    fsdp_fp8_all_gather = True
    quantize_weights_once = "off"
    needs_fsdp = "a class that may take weights in bf16 only"  # or why else; empty: fp32 parameters will do

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "mxfp8" in vars(cls):
            cls.mxfp8_freed = replace(cls.mxfp8, keep_quantized_weight=False)

    @property
    def mx_config(self) -> MXConfig:
        """The config of a call now. Backward is given no quantised weight where ``fully_shard`` frees weights after
        forward, for which it marks the module, nor where ``kept`` has it for longer."""
        return self.mxfp8_freed if self.kept or getattr(self, "_is_fsdp_managed_module", False) else self.mxfp8

    @property
    def op_options(self) -> dict[str, object]:
        """The same as arguments of ``mxfp8_grouped_mm`` and ``mxfp8_linear``."""
        config, names = self.mx_config, ("recipe", "backend", "keep_quantized_weight", "requantize_input")
        return {name: getattr(config, name) for name in names}

    def mxfp8_call(self, function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        """``function(*args)``, whose errors begin with the module's name."""
        try:
            return function(*args)
        except ValueError as error:
            raise ValueError(f"{self.mxfp8_fqn}: {error}") from error

    def mxfp8_grouped_mm(
        self,
        a: torch.Tensor,
        b_t: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``torch._grouped_mm`` of experts, in MXFP8, and observed."""
        config = self.mx_config
        y = self.mxfp8_call(grouped_mm, a, b_t, offs, bias, out_dtype or a.dtype, config)
        return y if self.probe is None else observe(y, a, b_t.mT, offs, self.probe, config)

    def mxfp8_experts(
        self, x: torch.Tensor, weights: Weights, offs: torch.Tensor, limit: float | None = None
    ) -> torch.Tensor:
        """``grouped_experts`` of rows that are sorted by expert, observed as ``mxfp8_moe`` is."""
        config = self.mx_config
        y = self.mxfp8_call(grouped_experts, x, weights, offs, config, limit, self.gathered or self.kept)
        return y if self.probe is None else observe(y, x, self._matrices(weights), offs, self.probe, config)

    def mxfp8_moe(
        self,
        x: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: Weights,
        group: dist.ProcessGroup | None,
        options: DispatchOptions,
        scores_first: bool = False,
    ) -> torch.Tensor:
        """``mxfp8_moe`` of experts, observed: tokens and output gradients as the source rank quantises them, in its
        order, and the three weights. Not what is quantised in the hidden layer."""
        config, quantized = self.mx_config, self.gathered or self.kept
        y = self.mxfp8_call(moe, x, scores, expert_ids, weights, group, options, config, scores_first, quantized)
        if self.probe is None:
            return y
        return observe(y, x, self._matrices(weights), None, self.probe, config, dispatched=True)

    def _matrices(self, weights: Weights) -> Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]:
        """The three weights for ``observe``, unquantised: where they were gathered in FP8, of which nothing is flushed
        to zero any more, this rank's shards."""
        return self.shards if self.gathered else weights[:3]

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
