"""MoE blocks that ``torch.compile`` takes whole: those whose layer dispatches its own tokens, if FSDP does not take its
experts.

TorchTitan compiles the parts of a MoE block one by one, as hooks of FSDP and its own dispatch would break a graph. Our
layer is operators that break none. So its block is one region, as TorchTitan's dense blocks are.
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts

from titan_mxfp8.logs import count_of
from titan_mxfp8.plugin.moe import MXFP8MoE
from titan_mxfp8.titan.dispatch import LAYERS, DispatchingLayers, let_compiled_layers_grow
from titan_mxfp8.titan.fsdp import why_fsdp
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)


def why_fsdp_will(model: nn.Module, job_config: JobConfig, dims: ParallelDims) -> str:
    """Why FSDP will take the experts of a converted model, which is decided after it is compiled; empty where not."""
    names = ["dp_replicate", "efsdp"] if dims.dp_replicate_enabled else ["efsdp"]
    arguments = {
        "edp_mesh": dims.get_optional_mesh(names),
        "cpu_offload": job_config.training.enable_cpu_offload,
        "pp_enabled": dims.pp_enabled,
    }
    experts = [each for each in model.modules() if isinstance(each, GroupedExperts | GptOssGroupedExperts)]
    return why_fsdp(experts, arguments)


@around(*(f"torchtitan.models.{name}.infra.parallelize.apply_compile" for name in ("llama4", "deepseek_v3", "qwen3")))
def compile_whole_blocks(apply_compile: Any, model: nn.Module, compile_config: Any, ep_enabled: bool) -> None:
    """Compiles MoE blocks whole where that can be, and leaves the others, and dense ones, to TorchTitan."""
    blocks = dict(model.layers.named_children())
    ours = [name for name, block in blocks.items() if isinstance(getattr(block, "moe", None), MXFP8MoE)]
    if ours:
        count = count_of(len(ours), "MoE block")
        if reason := _why_in_parts(getattr(model, LAYERS), ep_enabled):
            logger.info(f"MXFP8: TorchTitan compiles {count} part by part, as {reason}")
            ours = []
        else:
            logger.info(f"MXFP8: {count} compiled whole, each as one region")
            let_compiled_layers_grow()
    rest = nn.ModuleDict({name: block for name, block in blocks.items() if name not in ours})
    apply_compile(SimpleNamespace(layers=rest), compile_config, ep_enabled)
    for name in blocks:
        block = _compile(blocks[name], compile_config.backend) if name in ours else rest[name]
        model.layers.register_module(name, block)


def _why_in_parts(layers: DispatchingLayers, ep_enabled: bool) -> str:
    """Why the blocks of these layers cannot be compiled whole, in words; nothing where they can."""
    if layers.why_fsdp:
        return f"FSDP takes their experts: {layers.why_fsdp}"
    if ep_enabled and layers.rows == "counted":
        return "the host reads in each how many rows its experts get (dispatch_rows = 'counted')"
    return ""


def _compile(block: nn.Module, backend: str) -> nn.Module:
    """Where the host waits for the number of rows nevertheless, the block runs eagerly: Dynamo cannot follow it."""
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    run, experts = compiled.forward, block.moe.experts
    vars(compiled)["checkpoint_impl"] = None  # TorchTitan halves counts of tokens to which recomputation adds once more
    compiled.forward = lambda *args, **kwargs: (block if experts.waits() else run)(*args, **kwargs)
    return compiled
