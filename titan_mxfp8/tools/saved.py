"""What the forward pass of a model's blocks saves for backward: looked at, not computed from recipes and options.

A block of each kind runs forward on the meta device, where nothing is computed and no memory is taken, and what is
given to autograd to keep is counted. So what is kept, and in how many bytes, is said where it is decided: in
``ops/matmul.py``, ``moe/operators.py``, the backend's plan, TorchTitan's modules and, of compiled blocks, Inductor's
partitioner.
"""

import copy
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
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
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.plugin.checks import compiles_model
from titan_mxfp8.recipe import BF16
from titan_mxfp8.titan.dispatch import LAYERS

# Divides forward and backward as Inductor does, and writes no code.
COMPILE_BACKEND = "aot_eager_decomp_partition"


def saved_by_blocks(
    model: nn.Module, job_config: JobConfig, dims: ParallelDims, frees_weights: bool, by_operators: bool = False
) -> list[int]:
    """Bytes that each block of a model keeps on one GPU, in the order of the blocks, if nothing is checkpointed; with
    ``by_operators`` the outputs of the operators that op-level selective checkpointing saves. The model is on meta, not
    sharded, converted or not; experts that are compiled, with ``COMPILE_BACKEND``.

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
    parallelize = get_train_spec(job_config.model.name).parallelize_fn
    operators, found = sys.modules[parallelize.__module__]._op_sac_save_list, {}
    with torch.compiler.set_stance("force_eager") if by_operators else _compiled(model, job_config):
        for name in model.layers:
            kept: dict[int, torch.UntypedStorage] = {}  # by its memory, however many tensors lie in it
            with _Outputs(operators, kept) if by_operators else saved_tensors_hooks(partial(_keep, kept), lambda x: x):
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
    """Has the outputs of some operators ``kept``; of ``mm``, as TorchTitan's policy does, every second one's. Grouped
    GEMMs of bf16 stand for torch's, which are not saved."""

    def __init__(self, operators: Set[torch._ops.OpOverload], kept: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.operators, self.kept, self.products = operators, kept, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func == torch.ops.aten.mm.default
        is_second = func == torch.ops.aten.mm.default and self.products % 2 == 0
        is_bf16 = func == torch.ops.titan_mxfp8.gemm_m_grouped.default and args[2] == UNQUANTIZED.key
        if func in self.operators and not is_second and not is_bf16:
            for tensor in filter(torch.is_tensor, tree_leaves(out)):
                _keep(self.kept, tensor)
        return out


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in."""
    return tensor.untyped_storage()._cdata
