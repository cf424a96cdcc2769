"""Experts that nothing shards stay out of FSDP.

Where expert parallelism spreads the experts over all ranks of a replica, or TorchTitan 0.3 trains on one GPU, the mesh
on which FSDP would shard them has one rank. It would gather and reduce nothing, and yet copy each weight to bf16 twice
a step, and each gradient back. Without it optimizer and checkpoints have the same names, shapes and shards.
"""

import inspect
import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

from titan_mxfp8.logs import count_of, log_once
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.titan.gather import gather_quantized

logger = logging.getLogger(__name__)


def shard(apply_fsdp: Callable, *args: object, **kwargs: object) -> None:
    """What adapters put around TorchTitan's ``apply_fsdp``. Experts that FSDP would not shard are hidden from it:
    modules without parameters stand in for them meanwhile. Others are gathered in FP8 where they can be."""
    call = inspect.signature(apply_fsdp).bind(*args, **kwargs)
    call.apply_defaults()
    model, experts = call.arguments["model"], _experts_to_leave_out(call.arguments)
    try:
        for name, module in experts.items():
            stand_in = nn.Module()
            stand_in.num_experts = module.num_experts
            model.set_submodule(name, stand_in)
        apply_fsdp(*args, **kwargs)
    finally:
        for name, module in experts.items():
            model.set_submodule(name, module)
    if call.arguments["edp_mesh"] is None:
        for module in experts.values():
            _distribute(module, call.arguments["dp_mesh"])
    gather_quantized(model)


def _experts_to_leave_out(arguments: Mapping[str, object]) -> dict[str, nn.Module]:
    """By name the experts of a model that FSDP would not shard, which the log says; none where it has to take them, or
    none are converted. ``arguments`` are those of TorchTitan's ``apply_fsdp``."""
    without_ep = arguments["edp_mesh"] is None
    experts = {
        name: module
        for name, module in arguments["model"].named_modules()
        if (getattr(module, "needs_fsdp", None) == "" if without_ep else has_expert_shards(module))
    }
    if not any(isinstance(module, ConvertedModule) for module in experts.values()):
        return {}
    layers = f"the experts of {count_of(len(experts), 'MoE layer')}"
    if reason := why_fsdp(list(experts.values()), arguments):
        log_once(logger, f"MXFP8: FSDP takes {layers}: {reason}")
        return {}
    log_once(logger, f"MXFP8: {layers} stay out of FSDP: on their data-parallel mesh is one rank")
    return experts


def why_fsdp(experts: list[nn.Module], arguments: Mapping[str, object]) -> str:
    """Why FSDP has to take expert modules, all that expert parallelism has sharded, without it converted ones; empty
    where it need not. ``arguments`` are those of TorchTitan's ``apply_fsdp``."""
    mesh = arguments["edp_mesh"]
    if mesh is None:  # no expert parallelism
        mesh = arguments["dp_mesh"]
        if any(isinstance(param, DTensor) for module in experts for param in module.parameters(recurse=False)):
            return "tensor parallelism has sharded them"
    if mesh.size() > 1:
        ways = " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        return f"on their data-parallel mesh are {mesh.size()} ranks ({ways})"
    if arguments.get("cpu_offload"):
        return "it offloads to the CPU"
    if arguments.get("dp_mesh_dims") is not None:
        return "it takes its mesh from the parameters (spmd_backend)"
    dtypes = {param.dtype for module in experts for param in module.parameters(recurse=False)}
    if arguments["pp_enabled"] and dtypes != {torch.float32}:
        return "it adds a pipeline's gradients up in fp32, which the parameters are not in"
    reasons = [getattr(module, "needs_fsdp", "not all of them are converted") for module in experts]
    return next(filter(None, reasons), "")


def has_expert_shards(module: nn.Module) -> bool:
    """Whether expert parallelism has split a module's own parameters."""
    own = module.parameters(recurse=False)
    return any(isinstance(param, DTensor) and "ep" in param.device_mesh.mesh_dim_names for param in own)


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes a module's parameters DTensors on a mesh of one rank, as FSDP does: gradients are clipped together."""
    for name, param in list(module.named_parameters(recurse=False)):
        shards = distribute_tensor(param, mesh, [Shard(0)])
        module.register_parameter(name, nn.Parameter(shards, requires_grad=param.requires_grad))
