"""Estimated GPU memory of a training step, from the shapes of a model before and after TorchTitan has sharded it.

Everything that a step needs is added up as if it were all alive at once, which no moment of a step reaches. In exchange
the CUDA context, NCCL's buffers, the allocator's fragmentation and uneven routing are left out.

Held against 77 peaks that TorchTitan logged as reserved on one, two and four GPUs, compiled, without checkpointing,
in MXFP8 or with ``dispatch`` alone (``scripts/bench/roofline.py check``, ``results/2026-11-27_cpu_predictions``; no
term is fitted to them): of the 31 newest, DeepSeek-V3 16B and Qwen3-30B-A3B cut to 4 and 7 layers and Llama4 17Bx16E
cut to 2, from 7% below to 6% above; of older ones, of older code, from 18% below to 12% above. torchao's README
states 145.55 GiB for 2 layers of Llama4 on four B200s with a local batch of 8: 107.5 here, 26% too low.

| part        | bytes on one GPU                                                                                   |
|-------------|----------------------------------------------------------------------------------------------------|
| parameters  | its shards, 4 per element (2 with ``training.dtype = bfloat16``)                                   |
| gradients   | as parameters                                                                                      |
| optimizer   | twice the parameters: Adam's two moments                                                           |
| gathered    | FSDP: the output layer and the two largest blocks, unsharded (a block runs while the next one is   |
|             | gathered), 2 per element, of experts in FP8 1.001; the unsharded gradient of the largest unit, 2,  |
|             | and its copy to reduce, 4. Nothing of experts that stay out of it (titan/fsdp.py)                  |
| activations | saved for backward, see ``saved.py``; with checkpointing, see ``activation_bytes``. Of experts out |
|             | of FSDP, weights of 32x32 blocks as they were quantised: about 1 per element. Rows that MoE layers |
|             | receive as if counted: ``dispatch_rows`` = bounded, what ``auto`` is on GPUs, keeps 1.5 times them. |
|             | With ``quantize_weights_once`` = on and several microbatches what a step keeps of all weights; with |
|             | auto it only keeps it where that much is free                                                      |
| logits      | tokens x vocabulary, times 4 with a compiled loss (bf16 logits and their gradient), else 12 (fp32  |
|             | log-softmax, its gradient and a temporary)                                                         |
"""

from dataclasses import dataclass, fields
from functools import partial
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims

from titan_mxfp8.ops.experts import bytes_ahead
from titan_mxfp8.plugin.experts import RoutedExperts
from titan_mxfp8.plugin.moe import MXFP8MoE
from titan_mxfp8.titan.cuda_graph import fsdp_modules
from titan_mxfp8.titan.dispatch import GIB, local
from titan_mxfp8.titan.fsdp import has_expert_shards
from titan_mxfp8.titan.gather import gathered_itemsize
from titan_mxfp8.titan.once import why_each_time
from titan_mxfp8.tools.saved import saved_by_blocks

FSDP_MESHES = frozenset({"fsdp", "efsdp"})

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
    """Bytes of a GPU's memory. Raises ValueError: unknown GPU."""
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
    shards = sum(local(param).nbytes for param in sharded.parameters())
    tokens = training.local_batch_size * training.seq_len / (dims.cp * dims.tp)
    loss_is_compiled = compiled.enable and "loss" in compiled.components
    once = quantized_once(sharded, job_config, dims)
    kept = [0] * len(sharded.layers) if once else kept_weights(sharded)
    return Memory(
        parameters=shards,
        gradients=shards,
        optimizer=2 * shards,
        gathered=_gathered_bytes(sharded, TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize),
        activations=activation_bytes(whole, job_config, dims, bool(fsdp_modules(sharded)), kept) + once,
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


def experts_out_of_fsdp(sharded: nn.Module) -> dict[str, nn.Module]:
    """The expert modules, by name, that FSDP leaves alone though it takes the rest of the model."""
    if not fsdp_modules(sharded):
        return {}
    return {
        name: module
        for name, module in sharded.named_modules()
        if has_expert_shards(module) and not any(map(_is_in_fsdp, module.parameters(recurse=False)))
    }


def kept_weights(sharded: nn.Module) -> list[int]:
    """Bytes of each block for weights of experts out of FSDP that backward gets as forward has quantised them, or
    of the control cast them."""
    kept = dict.fromkeys(sharded.layers, 0)
    for name, module in experts_out_of_fsdp(sharded).items():
        spec, how = module.mxfp8.plan.dgrad.b, module.mxfp8.kept_weight
        for matrix in (local(param) for param in module.parameters(recurse=False) if param.ndim == 3):
            if how == "quantized" or (how == "bf16" and matrix.dtype == torch.float32):
                kept[name.split(".")[1]] += sum(tensor.nbytes for tensor in spec.empty(matrix, 1, None).tensors())
    return list(kept.values())


def quantized_once(sharded: nn.Module, job_config: JobConfig, dims: ParallelDims) -> int:
    """Bytes of experts' weights that are kept for all microbatches of a step (``titan.once``)."""
    training, total = job_config.training, 0
    if job_config.quantize.grouped_mm.mx.quantize_weights_once != "on":
        return 0
    if training.global_batch_size <= training.local_batch_size * dims.dp_replicate * dims.dp_shard:
        return 0
    for module in sharded.modules():
        if isinstance(module, RoutedExperts) and not why_each_time(module):
            matrices = module.weights(False)[:3]
            sent = sum(local(param).numel() for param in module.parameters(recurse=False) if param.ndim == 3)
            total += sent if module.gathered else bytes_ahead(matrices, module.mxfp8)
    return total


def activation_bytes(
    model: nn.Module, job_config: JobConfig, dims: ParallelDims, frees_weights: bool, kept: list[int]
) -> float:
    """Bytes that the forward pass of all blocks keeps for backward, ``kept`` of each block's weights among them.

    - ``none``: what every block saves (``saved_by_blocks``).
    - ``full``: every block's input; and what one block saves, while backward runs it again.
    - ``selective``, option N: every N-th block as in ``full``.
    - ``selective``, option ``op``: every block's input, and the outputs of the operators on TorchTitan's list, to which
      ``converters.save_gemm_outputs`` adds ours, and of its two all-to-alls; and what one block saves.
    - ``memory_budget`` b: the input, and the share b of the rest.
    """
    ac, training, blocks = job_config.activation_checkpoint, job_config.training, list(model.layers.values())
    tokens = training.local_batch_size * training.seq_len // (dims.cp * dims.tp)
    block_input = 2 * model.tok_embeddings.embedding_dim * tokens
    saved = partial(saved_by_blocks, model, job_config, dims, frees_weights)
    whole = [one + weights for one, weights in zip(saved(), kept, strict=True)]
    if ac.mode == "none":
        return sum(whole)
    if ac.mode == "memory_budget":
        return sum(block_input + ac.memory_budget * (one - block_input) for one in whole)
    if ac.mode == "full":
        kept = [block_input] * len(blocks)
    elif ac.selective_ac_option == "op":
        # TorchTitan's all-to-alls send each token once for each of its experts.
        sends = [dims.ep > 1 and not isinstance(getattr(block, "moe", None), MXFP8MoE | None) for block in blocks]
        copies = [1 + 2 * block.moe.router.top_k if sent else 1 for block, sent in zip(blocks, sends, strict=True)]
        outputs = saved(by_operators=True)
        kept = [block_input * count + sum(of) for count, *of in zip(copies, outputs, kept, strict=True)]
    else:
        every = int(ac.selective_ac_option)
        kept = [one if number % every else block_input for number, one in enumerate(whole, 1)]
    return sum(kept) + max(whole)


def _gathered_bytes(model: nn.Module, itemsize: int) -> float:
    """The FSDP row of the table; 0 without FSDP."""
    managed = fsdp_modules(model)
    units = {name: 0.0 for name, module in model.named_modules() if module in managed}
    if not units:
        return 0.0
    blocks: dict[str, float] = {}
    for name, param in model.named_parameters():
        if not _is_in_fsdp(param):
            continue
        unit = max((unit for unit in units if f"{name}.".startswith(f"{unit}." if unit else "")), key=len)
        elements = prod(model_parallel_shape(param))
        units[unit] += elements
        if unit.startswith("layers."):
            number, owner = unit.split(".")[1], model.get_submodule(name.rpartition(".")[0])
            blocks[number] = blocks.get(number, 0.0) + elements * gathered_itemsize(owner, itemsize)
    output = sum(prod(model_parallel_shape(param)) for param in model.output.parameters())
    two_blocks = sum(sorted(blocks.values())[-2:])
    return itemsize * output + two_blocks + (itemsize + 4) * max(output, *units.values())


def _is_in_fsdp(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) and not FSDP_MESHES.isdisjoint(param.device_mesh.mesh_dim_names)
