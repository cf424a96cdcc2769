"""Estimated GPU memory of a training step, from the shapes of a model before and after TorchTitan has sharded it.

Everything that a step needs is added up as if it were all alive at once, which no moment of a step reaches. In exchange
the CUDA context, NCCL's buffers, the allocator's fragmentation and uneven routing are left out.

What a block saves for backward is looked at, not computed from recipes and options: a block of each kind runs forward
on the meta device, where nothing is computed and no memory is taken, and what is given to autograd to keep is counted.
``train_configs/README.md`` says how far off that is (``scripts/bench/roofline.py check``); no term is fitted.

| part        | bytes on one GPU                                                                                   |
|-------------|----------------------------------------------------------------------------------------------------|
| parameters  | its shards, 4 per element (2 with ``training.dtype = bfloat16``); none where FSDP offloads to CPUs |
| gradients   | as parameters                                                                                      |
| optimizer   | twice the parameters: Adam's two moments                                                           |
| gathered    | FSDP: the output layer and the two largest blocks, unsharded (a block runs while the next one is   |
|             | gathered), 2 per element, of experts in FP8 1.001; the unsharded gradient of the largest unit, 2,  |
|             | and its copy to reduce, 4. Nothing of experts that stay out of it (titan/fsdp.py)                  |
| activations | saved for backward; with checkpointing, see ``activation_bytes``. Of experts out of FSDP, weights  |
|             | of 32x32 blocks as they were quantised: about 1 per element. Rows that MoE layers receive as if    |
|             | counted: ``dispatch_rows`` = bounded, what ``auto`` is on GPUs, keeps 1.5 times them. With         |
|             | ``quantize_weights_once`` = on and several microbatches what a step keeps of all weights; with     |
|             | auto it only keeps it where that much is free                                                      |
| logits      | tokens x vocabulary, times 4 with a compiled loss (bf16 logits and their gradient), else 12 (fp32  |
|             | log-softmax, its gradient and a temporary)                                                         |
"""

import copy
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, swiglu
from torchtitan.models.moe import moe
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8.format.spec import UNQUANTIZED
from titan_mxfp8.modules import is_expert_module
from titan_mxfp8.ops.experts import bytes_ahead
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.plugin.experts import RoutedExperts
from titan_mxfp8.plugin.moe import MXFP8MoE
from titan_mxfp8.recipe import BF16
from titan_mxfp8.titan.cuda_graph import fsdp_modules
from titan_mxfp8.titan.dispatch import GIB, LAYERS, local
from titan_mxfp8.titan.fields import compiles_model
from titan_mxfp8.titan.fsdp import has_expert_shards
from titan_mxfp8.titan.gather import gathered_itemsize
from titan_mxfp8.titan.once import why_each_time

COMPILE_BACKEND = "aot_eager_decomp_partition"  # divides forward and backward as Inductor does, and writes no code
FSDP_MESHES = frozenset({"fsdp", "efsdp"})

# Memory in 10^9 bytes, as NVIDIA's data sheets state it: H20 96 GB; H100 SXM 80 GB; H200 141 GB; DGX B200 1,440 GB for
# 8 GPUs; GB200 NVL72 13.4 TB for 72 GPUs.
CARDS = {"H20": 96e9, "H100": 80e9, "H200": 141e9, "B200": 180e9, "GB200": 186e9}
# What the estimate may use of a card: the rest is for what it leaves out. It is 26% below one peak that was published.
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
    offloads = training.enable_cpu_offload and fsdp_modules(sharded)
    shards = 0 if offloads else sum(local(param).nbytes for param in sharded.parameters())
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
      ``converters.register`` adds ours, and of its two all-to-alls; and what one block saves.
    - ``memory_budget`` b: the input, and the share b of the rest.
    """
    ac, training, blocks = job_config.activation_checkpoint, job_config.training, list(model.layers.values())
    tokens = training.local_batch_size * training.seq_len // (dims.cp * dims.tp)
    block_input = 2 * model.tok_embeddings.embedding_dim * tokens
    parallelize = get_train_spec(job_config.model.name).parallelize_fn
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
        outputs = saved(operators=sys.modules[parallelize.__module__]._op_sac_save_list)
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


def saved_by_blocks(
    model: nn.Module,
    job_config: JobConfig,
    dims: ParallelDims,
    frees_weights: bool,
    operators: Set[torch._ops.OpOverload] = frozenset(),
) -> list[int]:
    """Bytes that each block of a model keeps on one GPU, in the order of the blocks, if nothing is checkpointed; or of
    the outputs of ``operators``, which op-level selective checkpointing saves. The model is on meta, not sharded,
    converted or not; experts that are compiled, with ``COMPILE_BACKEND``.

    One block of each kind runs, with the tokens of one GPU and its experts. Nothing is sent, as those experts get as
    many rows as leave: if tokens are balanced, and memory is for the rows that come (``dispatch_rows = "counted"``).
    With tensor parallelism a GPU is taken to keep its share of the tokens, each with all features. Unless FSDP frees
    weights after forward, the copies that are kept for backward beside the optimizer's are counted too.
    """
    model = copy.deepcopy(model)
    kinds = [_kind(block) for block in model.layers.values()]
    model.layers = nn.ModuleDict({str(kinds.index(kind)): model.layers[str(kinds.index(kind))] for kind in set(kinds)})
    copies = _prepare(model, job_config, dims.ep, frees_weights)
    training = job_config.training
    shape = training.local_batch_size, training.seq_len // (dims.cp * dims.tp), model.tok_embeddings.embedding_dim
    known = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())} - copies
    found = {}
    with torch.compiler.set_stance("force_eager") if operators else _compiled(model, job_config):
        for name in model.layers:
            kept: dict[int, torch.UntypedStorage] = {}  # by its memory, however many tensors lie in it
            keep = partial(_keep, kept)
            with _Outputs(operators, keep) if operators else saved_tensors_hooks(keep, lambda x: x):
                _forward(model, name, job_config, shape)
            found[name] = sum(storage.nbytes() for memory, storage in kept.items() if memory not in known)
    return [found[str(kinds.index(kind))] for kind in kinds]


def _kind(block: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, param.shape) for name, param in block.named_parameters())


def _keep(kept: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> torch.Tensor:
    kept[_memory(tensor)] = tensor.untyped_storage()
    return tensor


def _prepare(model: nn.Module, job_config: JobConfig, ranks: int, frees_weights: bool) -> set[int]:
    """Has a model run forward on meta, in the dtype of training, with the experts of one of so many ranks. Returns the
    memory of parameters that stand for copies: without FSDP, autocast makes one of each weight, and layers that
    dispatch their own tokens do, unless it is kept quantised; compiled code makes them again in backward."""
    dtype, compiled = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param], compiles_model(job_config)
    copies, plain = set(), torch.compile(_plain_experts, backend=COMPILE_BACKEND) if compiled else _plain_experts
    for module in model.modules():
        is_compiled = compiled
        if is_expert_module(module) and not hasattr(module, "mxfp8"):
            module.forward = partial(plain, module)
        elif is_expert_module(module):
            is_compiled = False  # ours are one operator
        if frees_weights:
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # as ``fully_shard`` marks it
        if hasattr(module, "inner_attention"):
            module.inner_attention, module.attn_type = _Attention(), "sdpa"
        if isinstance(module, nn.RMSNorm) and not compiled:
            module.forward = _RMSNorm.apply
        dispatches = getattr(module, LAYERS, None) is not None
        # A layer that dispatches pads no tokens, and looks for all experts that a token names.
        parts = ranks if is_expert_module(module) and not dispatches else 1
        if parts > 1:
            # rows, and how many each expert has, with a rank's experts alone
            module.register_forward_pre_hook(lambda _, args: (args[0], args[1][: args[1].shape[0] // ranks]))
        for param in module.parameters(recurse=False):
            is_copied = param.dtype != dtype and not frees_weights and not is_compiled
            param.data = param.data.to(dtype)[: param.shape[0] // parts]
            if is_copied:
                copies.add(_memory(param))
    return copies


def _forward(model: nn.Module, name: str, job_config: JobConfig, shape: tuple[int, int, int]) -> None:
    """Runs a block on an input of this shape."""
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    masks = None
    if job_config.model.name == "gpt_oss":  # asks for them, and nothing here looks into them
        masks = dict.fromkeys(("basic_mask", "sliding_window_mask"), BlockMask.__new__(BlockMask))
    positions = next(model.buffers(recurse=False))
    model.layers[name](torch.empty(shape, dtype=dtype, device="meta", requires_grad=True), positions, masks)


class _Attention(nn.Module):
    """cuDNN's: keeps its inputs, its output and a float for each row. So does flex attention."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: object
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        return (out, lse.squeeze(-1)) if return_lse else out


def _plain_experts(module: nn.Module, x_MD: torch.Tensor, tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
    """TorchTitan's own experts, which on meta would read their tokens' counts: keeps the same tensors, and reads
    none."""
    offs_E = torch.cumsum(tokens_per_expert_E, 0, dtype=torch.int32)

    def grouped_mm(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return mxfp8_grouped_mm(a, w.bfloat16().mT, offs_E, bias=bias, recipe=BF16)

    x_MD = x_MD.bfloat16()
    if isinstance(module, GptOssGroupedExperts):
        h_MH = swiglu(grouped_mm(x_MD, module.mlp1_weight, module.mlp1_bias), limit=module.swiglu_limit)
        return grouped_mm(h_MH, module.mlp2_weight, module.mlp2_bias)
    return grouped_mm(F.silu(grouped_mm(x_MD, module.w1)) * grouped_mm(x_MD, module.w3), module.w2)


class _RMSNorm(torch.autograd.Function):
    """CUDA's, which is one operator: keeps its input and a float for each row. On meta it would be many."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


@contextmanager
def _compiled(model: nn.Module, job_config: JobConfig) -> Iterator[None]:
    """Within, the blocks are compiled as TorchTitan does it, if the config says so."""
    if not compiles_model(job_config):
        yield
        return
    job_config, experts = copy.deepcopy(job_config), moe._run_experts_grouped_mm
    job_config.compile.backend, job_config.activation_checkpoint.mode = COMPILE_BACKEND, "none"
    one_process = ParallelDims(*[1] * 7, world_size=1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # which TorchTitan sets
        try:
            get_train_spec(job_config.model.name).parallelize_fn(model, one_process, job_config)
            yield
        finally:
            moe._run_experts_grouped_mm = experts  # for which TorchTitan has put a compiled one
            torch._dynamo.reset()  # it keeps a few versions of a function only


class _Outputs(TorchDispatchMode):
    """Gives the outputs of some operators to ``keep``; of ``mm``, as TorchTitan's policy does, every second one's.
    Grouped GEMMs of bf16 stand for torch's, which are not saved."""

    def __init__(self, operators: Set[torch._ops.OpOverload], keep: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.operators, self.keep, self.products = operators, keep, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_product = func == torch.ops.aten.mm.default
        self.products += is_product
        is_bf16 = func == torch.ops.titan_mxfp8.gemm_m_grouped.default and args[2] == UNQUANTIZED.key
        if func in self.operators and not (is_product and self.products % 2 == 0) and not is_bf16:
            for tensor in filter(torch.is_tensor, tree_leaves(out)):
                self.keep(tensor)
        return out


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage()._cdata
