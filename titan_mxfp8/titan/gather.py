"""FSDP gathers experts' weights in FP8, where what forward and dgrad multiply is one set of 32x32 blocks.

Each rank quantises its shard, from the parameter as it is, and half of bf16's bytes travel, before forward and before
backward:

    fp32 shard --quantise--> E4M3 and E8M0 --all-gather--> ``module.gathered`` --as the GEMM takes it--> GEMM
                                                           NaN in the weight's shape <-- fp32 gradient --'

Blocks lie in one shard each, so these are the bits that the gathered parameter would be quantised to. It is what FSDP2
calls an extension, of plain tensors: parameters, optimizer states and checkpoints are those of any other gather. While
they are gathered the module has parameters that only get gradients, and hold NaN for whoever reads them all the same.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.logs import by_reason, count_of, log_once
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops.library import quantize

logger = logging.getLogger(__name__)

ONE_RANK = "one rank"


def gather_quantized(model: nn.Module) -> None:
    """Has FSDP gather the weights of converted experts in FP8 where it can be, after ``fully_shard`` and before the
    first forward. The log says so, and why others are gathered as they were."""
    found = []
    for group in _groups(model):
        of_experts: dict[nn.Module, list[FSDPParam]] = {}
        for param in group.fsdp_params:
            module = param._module_info.module
            if isinstance(module, ConvertedModule) and any(p.ndim == 3 for p in module.parameters(recurse=False)):
                of_experts.setdefault(module, []).append(param)
        reasons = {module: why_not(module, params) for module, params in of_experts.items()}
        alone = sum(map(len, of_experts.values())) == len(group.fsdp_params) and not any(reasons.values())
        for module, params in of_experts.items():
            found.append((module.mxfp8_fqn, reasons[module]))
            if not reasons[module]:
                _take_over(module, params, alone)
    left = by_reason(found)
    if quantized := left.pop("", []):
        count = count_of(len(quantized), "MoE layer")
        log_once(logger, f"MXFP8: FSDP gathers the experts of {count} in FP8 (32x32 blocks)")
    left.pop(ONE_RANK, None)
    for reason, names in left.items():
        count = count_of(len(names), "MoE layer")
        log_once(logger, f"MXFP8: FSDP gathers the experts of {count} unquantised: {reason}")


def why_not(module: ConvertedModule, params: list[FSDPParam]) -> str:
    """Why the weights of an experts module cannot be gathered in FP8, in words; empty where they can."""
    recipe = module.mxfp8.recipe
    mesh = params[0].mesh_info
    if not isinstance(mesh, FSDPMeshInfo) or mesh.shard_mesh_size == 1:
        return ONE_RANK
    if not recipe.quantized:
        return f"recipe {recipe.name} quantises nothing"
    if recipe.weight_block != "32x32":
        return f"with recipe {recipe.name} forward and dgrad take different numbers"
    if not module.fsdp_fp8_all_gather:
        return "fsdp_fp8_all_gather is off"
    if {param._module_info.param_name for param in params} != set(module.gathers):
        return f"experts of class {module.mxfp8_converted_from.__name__} read their parameters"
    if getattr(mesh, "is_spmd_mesh", False):
        return "it takes its mesh from the parameters (spmd_backend)"
    for param in params:
        axes = set(param.sharded_param.device_mesh.mesh_dim_names or ())
        if axes & {"tp", "etp"}:
            return "tensor parallelism"
        if param.offload_to_cpu:
            return "CPU offload"
        if param.post_forward_mesh_info not in (None, mesh):
            return "they are resharded to fewer ranks after forward"
        if param.fsdp_placement.dim != 0:
            return "with more ranks than experts FSDP shards hidden features"
        if param._orig_size[0] % mesh.shard_mesh_size:
            return f"{mesh.shard_mesh_size} ranks do not divide {param._orig_size[0]} experts"
    return ""


def gathered_itemsize(module: nn.Module, itemsize: int) -> float:
    """Bytes that FSDP gathers for an element of a module's own parameters, scales included, before forward and again
    before backward; ``itemsize``: of those that it does not gather in FP8."""
    return 1 + 1 / BLOCK_SIZE**2 if getattr(module, "gathered", ()) else itemsize


class BlocksParam(FSDPParam):
    """A weight (E, R, C) that FSDP gathers in exact 32x32 blocks. FSDP asks the tensor that holds a shard for the
    extension. That is replaced whenever a model is moved or loaded, so the parameter itself answers here."""

    mxfp8_backend: str
    mxfp8_spec: str  # the key of the blocks' spec
    mxfp8_grad_dtype: torch.dtype
    kept: Sequence[torch.Tensor] = ()  # of ``quantize_shard``, while a trainer's step makes it hold

    @property
    def _sharded_local_tensor(self) -> "BlocksParam":
        return self

    def size(self) -> torch.Size:
        """Of the shard, none of which is padded."""
        return self.sharded_size

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> tuple[tuple, None]:
        """What this rank sends. FSDP counts the arguments."""
        return tuple(self.kept or self.quantize_shard()), None

    @property
    def shard(self) -> torch.Tensor:
        """Of this rank, (E / ranks, R, C), in the parameter's dtype."""
        return self._sharded_param_data.view(self.sharded_size)

    def quantize_shard(self) -> list[torch.Tensor]:
        """Elements (E / ranks, R, C) and scales (E / ranks, R / 32, C / 32), as bytes."""
        elements, scale = quantize(self.shard, 2, self.mxfp8_spec, None, self.mxfp8_backend)
        return [elements.view(torch.uint8), scale]

    def fsdp_post_all_gather(self, *args: object, **kwargs: object) -> None:
        """FSDP looks whether there is one; ``init_unsharded_param`` does all."""

    def init_unsharded_param(self) -> None:
        """Hands the module what arrived: views of memory that FSDP frees and fills again, always the same."""
        if not hasattr(self, "_unsharded_param"):
            elements, scale = self._unflatten_all_gather_outputs()
            module, name = self._module_info.module, self._module_info.param_name
            at = 2 * module.gathers.index(name)
            module.gathered[at : at + 2] = elements.view(torch.float8_e4m3fn), scale
            weight = torch.full((), torch.nan, dtype=self.mxfp8_grad_dtype, device=self.device).expand(self._orig_size)
            if self.is_dtensor:
                spec = self._tp_spec if hasattr(self, "_tp_spec") else self._unsharded_dtensor_spec  # before torch 2.12
                meta = spec.tensor_meta._replace(dtype=weight.dtype)
                weight = _from_local_no_grad(weight, replace(spec, tensor_meta=meta))
            self._unsharded_param = nn.Parameter(weight, requires_grad=self.sharded_param.requires_grad)
        self._extensions_data.clear()


def _take_over(module: ConvertedModule, params: list[FSDPParam], alone: bool) -> None:
    """``alone``: FSDP reduces gradients of such weights only, which may then have the dtype that it reduces in. All
    that it reduces together must have one."""
    module.gathered = [None] * (2 * len(params))
    module.shards = lambda: [param.shard for param in params]
    for param in params:
        policy = param.mp_policy
        dtype = policy.reduce_dtype if alone and policy.reduce_dtype else policy.param_dtype
        param.__class__ = BlocksParam
        param.mxfp8_backend, param.mxfp8_spec = module.mxfp8.backend, module.mxfp8.plan.forward.b.exact.key
        param.mxfp8_grad_dtype = dtype or param.sharded_param.dtype
        param._init_extensions()


def blocks_params(model: nn.Module) -> list[BlocksParam]:
    """The weights that FSDP gathers so."""
    return [param for group in _groups(model) for param in group.fsdp_params if isinstance(param, BlocksParam)]


def _groups(model: nn.Module) -> list[FSDPParamGroup]:
    """What FSDP gathers and reduces together, of all of a model."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [*dict.fromkeys(group for several in groups for group in several if group is not None)]
