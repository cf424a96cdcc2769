"""Estimated GPU memory of a training step, from the shapes of a model before and after TorchTitan has sharded it.

Everything that a step needs is added up as if it were all alive at once, which no moment of a step reaches. In exchange
the CUDA context, NCCL's buffers, the allocator's fragmentation and uneven routing are left out.

Held against two peaks of Llama4 17Bx16E cut to 2 layers (FSDP 4, EP 4, sequences of 8192, compiled, no checkpointing,
bf16): 70.9 GiB for the 70.9 that TorchTitan logged as reserved on H200s with a local batch of 4, where what is counted
too often and what is left out happen to cancel; and 107.5 GiB for the 145.55 that torchao's README states for B200s
with a local batch of 8, 26% too low. No term is fitted to either.

| part        | bytes on one GPU                                                                                   |
|-------------|----------------------------------------------------------------------------------------------------|
| parameters  | its shards, 4 per element (2 with ``training.dtype = bfloat16``)                                   |
| gradients   | as parameters                                                                                      |
| optimizer   | twice the parameters: Adam's two moments                                                           |
| gathered    | FSDP: the output layer and the two largest blocks, unsharded (a block runs while the next one is   |
|             | gathered), 2 per element; the unsharded gradient of the largest unit, 2, and its copy to reduce, 4 |
| activations | saved for backward, see ``saved_per_token``; with checkpointing, see ``activation_bytes``          |
| logits      | tokens x vocabulary, times 4 with a compiled loss (bf16 logits and their gradient), else 12 (fp32  |
|             | log-softmax, its gradient and a temporary)                                                         |
"""

from dataclasses import dataclass, fields
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.plugin.moe import MXFP8MoE

GIB = 2**30

# Memory in 10^9 bytes, as NVIDIA's data sheets state it: H20 96 GB; H100 SXM 80 GB; H200 141 GB; DGX B200 1,440 GB for
# 8 GPUs; GB200 NVL72 13.4 TB for 72 GPUs.
CARDS = {"H20": 96e9, "H100": 80e9, "H200": 141e9, "B200": 180e9, "GB200": 186e9}
# What the estimate may use of a card: the rest is for what it leaves out. See the second of the two peaks above.
FILL = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one GPU, by what they hold."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        return " + ".join(f"{field.name} {getattr(self, field.name) / GIB:.1f}" for field in fields(self))


def card_memory(gpu: str) -> float:
    """Bytes of a GPU's memory.

    Raises:
        ValueError: unknown GPU.
    """
    if gpu not in CARDS:
        raise ValueError(f"cluster.gpu {gpu!r} is unknown: use one of {', '.join(CARDS)}, or leave it empty")
    return CARDS[gpu]


def estimate_memory(whole: nn.Module, sharded: nn.Module, job_config: JobConfig, dims: ParallelDims) -> Memory:
    """The memory of one GPU by the table above.

    Args:
        whole: the model before TorchTitan's ``parallelize_fn``, converted or not.
        sharded: the same model after it, on rank 0, which holds the largest shards.
        job_config: batch, sequence, checkpointing and compile settings.
        dims: the layout.
    """
    training, compiled = job_config.training, job_config.compile
    local = sum(_local(param).nbytes for param in sharded.parameters())
    tokens = training.local_batch_size * training.seq_len / (dims.cp * dims.tp)
    loss_is_compiled = compiled.enable and "loss" in compiled.components
    return Memory(
        parameters=local,
        gradients=local,
        optimizer=2 * local,
        gathered=_gathered_bytes(sharded, TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize),
        activations=tokens * activation_bytes(whole, job_config),
        logits=tokens * whole.output.out_features * (4 if loss_is_compiled else 12),
    )


def model_parallel_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The shape that a GPU computes with: cut by expert and tensor parallelism, gathered from FSDP's shards."""
    shape = list(param.shape)
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        for name, placement in zip(mesh.mesh_dim_names, param.placements, strict=True):
            if name in ("ep", "tp", "etp") and hasattr(placement, "dim"):
                degree = mesh[name].size()
                if shape[placement.dim] % degree:
                    raise ValueError(f"{name} {degree} does not divide axis {placement.dim} of a weight {tuple(shape)}")
                shape[placement.dim] //= degree
    return tuple(shape)


def activation_bytes(model: nn.Module, job_config: JobConfig) -> float:
    """Bytes per token that the forward pass of all blocks keeps for backward.

    - ``none``: what every block saves.
    - ``full``: every block's input; and what one block saves, while backward runs it again.
    - ``selective``, option N: every N-th block as in ``full``.
    - ``selective``, option ``op``: every block's input, the outputs of MXFP8 GEMMs (``converters.save_gemm_outputs``),
      half of those of bf16 linears (TorchTitan saves every second one), the attention's output, the two all-to-alls;
      and what one block saves.
    - ``memory_budget`` b: the input, and the share b of the rest.
    """
    ac, compiled = job_config.activation_checkpoint, job_config.compile
    fused = compiled.enable and "model" in compiled.components
    dim = model.tok_embeddings.embedding_dim
    blocks = list(model.layers.values())
    saved = [saved_per_token(block, dim, fused) for block in blocks]
    if ac.mode == "none":
        return sum(saved)
    if ac.mode == "memory_budget":
        return sum(2 * dim + ac.memory_budget * (one - 2 * dim) for one in saved)
    if ac.mode == "full":
        kept = [2 * dim] * len(blocks)
    elif ac.selective_ac_option == "op":
        kept = [2 * dim + _saved_by_op_policy(block, dim) for block in blocks]
    else:
        every = int(ac.selective_ac_option)
        kept = [one if number % every else 2 * dim for number, one in enumerate(saved, 1)]
    return sum(kept) + max(saved)


# Linears that read the same input as a sibling, and linears whose output is added to the residual, which saves nothing.
SHARES_INPUT = {"wk", "wv", "wkv_a", "w3"}
ADDED = {"wo", "w2"}


def saved_per_token(block: nn.Module, dim: int, fused: bool) -> float:
    """Bytes per token that the forward pass of a block keeps for backward, without checkpointing.

    Each of 2 bytes: the block's input and the sum after attention; every distinct input of a linear, which converted
    linears and experts that are not compiled keep one by one, each as it quantised it; every output that is not merely
    added up; for latent attention the keys, put together from two linears. A gated MLP that is not
    compiled keeps silu's output too. Each routed copy of a token adds: the experts' input and 3 hidden vectors, and an
    fp32 copy for the gradient of the router's score. Where the layer dispatches its own tokens, a copy adds its row in
    FP8 with its scales, or bf16, and 2 hidden vectors; with ``dispatch_rows = "worst_case"`` more than is counted here.
    """
    elements = 2.0 * dim
    for name, linear in _linears(block).items():
        leaf = name.rsplit(".", 1)[-1]
        # the shared experts and the router read the same tensor
        shares = leaf in SHARES_INPUT or name == "moe.shared_experts.w1"
        if not shares or (hasattr(linear, "mxfp8") and not fused):
            elements += linear.in_features
        if leaf not in ADDED:
            elements += linear.out_features
        if leaf == "wkv_b":
            elements += next(q for end in ("wq_b", "wq") if (q := _linears(block).get(f"attention.{end}"))).out_features
        if leaf == "w1" and not fused:
            elements += linear.out_features
    if hasattr(block, "moe"):
        hidden = _hidden(block, dim)
        if isinstance(block.moe, MXFP8MoE):
            elements += block.moe.router.top_k * _landed(block, dim)
        else:
            inputs = 2 if hasattr(block.moe.experts, "w3") and hasattr(block.moe.experts, "mxfp8") and not fused else 1
            elements += block.moe.router.top_k * (inputs * dim + hidden * (1 if fused else 4 / 3) + 2 * dim)
    return 2 * elements


def _saved_by_op_policy(block: nn.Module, dim: int) -> float:
    linears = _linears(block)
    elements = linears["attention.wo"].in_features
    elements += sum(linear.out_features * (1 if hasattr(linear, "mxfp8") else 0.5) for linear in linears.values())
    if hasattr(block, "moe") and isinstance(block.moe, MXFP8MoE):
        elements += block.moe.router.top_k * _landed(block, dim)
    elif hasattr(block, "moe"):
        elements += 2 * block.moe.router.top_k * dim  # the two all-to-alls
        if hasattr(block.moe.experts, "mxfp8"):
            elements += block.moe.router.top_k * sum(param.shape[1] for param in _experts(block))
    return 2 * elements


def _landed(block: nn.Module, dim: int) -> float:
    """Elements of 2 bytes that a layer which dispatches its own tokens keeps of a routed copy: its row, gate and up."""
    quantized = block.moe.experts.mxfp8.recipe.quantized
    return (dim * (1 + 1 / BLOCK_SIZE) / 2 if quantized else dim) + 2 / 3 * _hidden(block, dim)


def _hidden(block: nn.Module, dim: int) -> float:
    """3 H: of w1, w2, w3 of (E, H, D), (E, D, H), (E, H, D), or gpt-oss's (E, 2H, D), (E, D, H)."""
    return sum(param.numel() for param in _experts(block)) / block.moe.experts.num_experts / dim


def _linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def _experts(block: nn.Module) -> list[nn.Parameter]:
    return [param for param in block.moe.experts.parameters() if param.ndim == 3]


def _gathered_bytes(model: nn.Module, itemsize: int) -> float:
    """The FSDP row of the table; 0 without FSDP."""
    units: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            units[name] = 0.0
    if not units:
        return 0.0
    for name, param in model.named_parameters():
        unit = max((unit for unit in units if f"{name}.".startswith(f"{unit}." if unit else "")), key=len)
        units[unit] += prod(model_parallel_shape(param))
    blocks: dict[str, float] = {}
    for name, elements in units.items():
        if name.startswith("layers."):
            number = name.split(".")[1]
            blocks[number] = blocks.get(number, 0.0) + elements
    output = sum(prod(model_parallel_shape(param)) for param in model.output.parameters())
    two_blocks = sum(sorted(blocks.values())[-2:])
    return itemsize * (output + two_blocks) + (itemsize + 4) * max(output, *units.values())


def _local(param: nn.Parameter) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
