"""``quantize.grouped_mm.mx.dispatch``: TorchTitan's MoE layers, with ``mxfp8_moe`` in place of all around the experts.

    TorchTitan:  router -> reorderer -> x[order // k] -> all-to-all -> permute -> experts -> the same backwards
    here:        router -> experts(x, Routing), which is mxfp8_moe

The classes of ``moe`` and ``moe.experts`` are swapped; their parameters, buffers and submodules stay. The layer goes
through ``moe.experts``, as FSDP gathers the weights in a hook of that module. Expert parallelism shards the weights as
ever, but TorchTitan's hooks that dispatch and combine are left out.

TorchTitan compiles the parts of a MoE block one by one, as hooks of FSDP and its own dispatch would break a graph. Our
layer is operators that break none. So its block is one region, as TorchTitan's dense blocks are, if FSDP does not take
its experts.
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_module
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.dual_pipe_v import get_dual_pipe_v_flag
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.moe.moe import GroupedExperts, MoE

from titan_mxfp8.logs import count_of
from titan_mxfp8.modules import training_device
from titan_mxfp8.plugin.experts import RoutedExperts, Routing
from titan_mxfp8.plugin.job_config import recipe_of
from titan_mxfp8.recipe import GROUPED_MM
from titan_mxfp8.titan.dispatch import (
    LAYERS,
    DispatchingLayers,
    allow_compiled_versions,
    choose_layers,
    dispatches,
    kept_layers,
    most_tokens,
)
from titan_mxfp8.titan.fsdp import why_fsdp
from titan_mxfp8.workarounds.patch import around

logger = logging.getLogger(__name__)


class MXFP8MoE(MoE):
    """Takes the place of the class of a ``MoE`` whose experts have a ``dispatch``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, D) to the same shape; counts the tokens of each expert as TorchTitan's does."""
        x_TD = x.view(-1, x.shape[-1])
        scores_TK, expert_ids_TK, tokens_per_expert = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(tokens_per_expert)
        out_TD = self.experts(x_TD, Routing(scores_TK, expert_ids_TK, self.score_before_experts))
        if self.shared_experts is not None:
            out_TD = self.shared_experts(x_TD) + out_TD
        return out_TD.reshape(x.shape)


class MXFP8GptOssMoE(MXFP8MoE, GptOssMoE):
    """Takes the place of the class of a ``GptOssMoE``."""


MOE_CLASSES: dict[type[nn.Module], type[nn.Module]] = {MoE: MXFP8MoE, GptOssMoE: MXFP8GptOssMoE}


def dispatch_tokens(model: nn.Module, converted: list[str], job_config: JobConfig, dims: ParallelDims | None) -> None:
    """Has the MoE layers around converted experts, named so, dispatch as ``quantize.grouped_mm.mx.dispatch`` says. The
    model is on meta, not yet parallelised; ``dims`` are of the whole run, None of one process. Raises ValueError as
    ``choose_layers`` and ``DispatchingLayers.connect``."""
    config = job_config.quantize.grouped_mm.mx
    if not dispatches(config.dispatch, config.dispatch_rows):
        return
    of_the_run = _not_for_run(job_config, dims)
    reasons = [(fqn, of_the_run or _not_for_layer(model, fqn)) for fqn in converted]
    chosen = choose_layers(config.dispatch, recipe_of(config), reasons)
    if not chosen:
        return
    layers, group = [model.get_submodule(fqn.rpartition(".")[0]) for fqn in chosen], None
    shared = dispatching_layers(layers, job_config)
    if dims is not None and dims.ep > 1:
        group = dims.get_mesh("ep").get_group()
        shared.why_fsdp = why_fsdp_will(model, job_config, dims)
    device = training_device()
    if device.type != "cpu":  # TorchTitan has set it when a model is converted
        device = torch.device(device.type, torch.accelerator.current_device_index())
    line = shared.connect(group, device, f"[{GROUPED_MM}] ")
    setattr(model, LAYERS, shared)
    for layer in layers:
        layer.__class__ = MOE_CLASSES[type(layer)]
        setattr(layer.experts, LAYERS, shared)
    logger.info(line)


def dispatching_layers(layers: list[MoE], job_config: JobConfig) -> DispatchingLayers:
    """What these layers of a model need. Where scores come first, each of a token's slots is a row of its own."""
    moe, parallelism, config = layers[0], job_config.parallelism, job_config.quantize.grouped_mm.mx
    validation = job_config.validation if job_config.validation.enable else None
    once = "early_step_in_backward" * job_config.optimizer.early_step_in_backward
    _, dim, hidden = moe.experts.get_parameter("mlp2_weight" if isinstance(moe, GptOssMoE) else "w2").shape
    slots = moe.router.top_k if moe.score_before_experts else 1
    return DispatchingLayers(
        transport=config.dispatch,
        rows=config.dispatch_rows,
        once="pipeline parallelism" if parallelism.pipeline_parallel_degree > 1 else once,
        count=len(layers),
        kept=kept_layers(len(layers), parallelism, job_config.activation_checkpoint.mode != "none"),
        max_tokens=most_tokens(job_config.training, parallelism, validation),
        slots=slots,
        top_k=moe.router.top_k // slots,
        experts=moe.experts.num_experts,
        dim=dim,
        hidden=hidden,
    )


def _not_for_run(job_config: JobConfig, dims: ParallelDims | None) -> str:
    """Why no layer of a run can dispatch its own tokens, in words; nothing where they can."""
    if dims is None:
        return ""
    if dims.tp > 1:
        return "tensor parallelism"
    if dims.ep > 1 and job_config.parallelism.expert_parallel_comm_backend != "standard":
        return f"expert_parallel_comm_backend = {job_config.parallelism.expert_parallel_comm_backend!r}"
    return "DualPipeV's overlap" if get_dual_pipe_v_flag(job_config, dims) else ""


def _not_for_layer(model: nn.Module, fqn: str) -> str:
    """The same for the layer around the experts of this name."""
    name, _, child = fqn.rpartition(".")
    layer = model.get_submodule(name)
    if type(layer) not in MOE_CLASSES or child != "experts":
        return f"experts in a {type(layer).__name__}"
    return "" if isinstance(layer.experts, RoutedExperts) else f"experts of class {type(layer.experts).__name__}"


@around("torchtitan.distributed.expert_parallel.ExpertParallel._apply")
def shard_weights_only(apply: Any, parallel: ExpertParallel, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Has expert parallelism shard the weights of layers that dispatch their own tokens, and no more."""
    if getattr(module, LAYERS, None) is None:
        return apply(parallel, module, device_mesh)
    return distribute_module(module, device_mesh, parallel._partition_fn)


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
            allow_compiled_versions()
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
