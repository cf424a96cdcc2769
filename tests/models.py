"""TorchTitan's models in this process: built as its Trainer builds them, run for a step, kernel calls counted."""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed import ParallelDims, activation_checkpoint
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8 import backends
from titan_mxfp8.tools.dry_run import parse_config

ROOT = Path(__file__).parent.parent
MODELS = ("llama4", "deepseek_v3", "qwen3", "gpt_oss", "llama3")
KERNELS = ("quantize", "quantize_both", "gemm_m_grouped", "gemm_k_grouped")
PAIRS = ("dual_gemm_m_grouped", "swiglu_gemm_m_grouped")  # count as two of gemm_m_grouped each


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step gave: the loss, gradients by parameter, and kernel calls of the forward and of the backward."""

    loss: float
    grads: dict[str, torch.Tensor]
    forward: dict[str, int]
    backward: dict[str, int]


def dims_of(world_size: int | None = None, **degrees: int) -> ParallelDims:
    """With 1 for each degree that is not given."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1) | degrees
    product = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["pp"]
    return ParallelDims(**degrees, world_size=world_size or product)


def build(model: str, *flags: str, device: str = "cpu", **degrees: int) -> nn.Module:
    """The model of ``train_configs/debug_<model>.toml`` with small experts, converted, split and initialised. With
    ``degrees``, those of ``ParallelDims`` that are not 1, the process group must be up."""
    config = parse_config(f"{ROOT}/train_configs/debug_{model}.toml", flags)
    dims, spec = dims_of(**degrees), get_train_spec(model)
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    if getattr(args, "moe_args", None):
        args.moe_args.num_experts = 8
        args.moe_args.top_k = min(args.moe_args.top_k, 2)
    if model == "gpt_oss":
        args.moe_inter_dim = 256  # 2880 in its debug flavor: slow on a CPU
    with torch.device("meta"):
        built = spec.model_cls(args)
    build_model_converters(config, dims).convert(built)
    activation_checkpoint._layer_sac_count = 0  # it counts the layers of every model of a process
    built = spec.parallelize_fn(built, dims, config)
    built.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        built.init_weights(buffer_device=torch.device(device))
    if device == "cpu":
        replace_flex_attention(built)
    return built


def run_step(model: nn.Module, tokens: torch.Tensor, *, tensor_parallel: bool = False) -> Step:
    """Forward and backward of the next-token loss over ``tokens`` (batch, length + 1).

    In fp32 where nothing is cast by FSDP or the experts: the rounding of a compiled bf16 model differs from eager's.
    Only gpt_oss, whose layers are bf16, gets the Trainer's autocast.
    """
    inputs, kwargs = tokens[:, :-1], {}
    if any(isinstance(module, FlexAttentionWrapper | PlainAttention) for module in model.modules()):
        length, device = inputs.shape[1], inputs.device.type
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)
        kwargs["attention_masks"] = {"basic_mask": mask, "sliding_window_mask": mask}
    autocast = not isinstance(model, FSDPModule) and any(p.dtype == torch.bfloat16 for p in model.parameters())
    with count_kernels(tokens.device) as counts, dist_utils.get_train_context(tensor_parallel)():
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = cross_entropy_loss(model(inputs, **kwargs), tokens[:, 1:])
        forward = dict(counts())
        loss.backward()
    backward = {name: calls - forward[name] for name, calls in counts().items()}
    grads = {}
    for name, param in model.named_parameters():
        for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
            name = name.replace(wrapper, "")
        grads[name] = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
    model.zero_grad()
    return Step(loss=loss.item(), grads=grads, forward=forward, backward=backward)


@contextmanager
def count_kernels(device: torch.device) -> Iterator:
    """Gives a function that says how often each of the backend's ``KERNELS`` has run, in eager and compiled code; one
    that runs within another does not count."""
    backend = backends.load("auto", device)
    counts, inside = dict.fromkeys(KERNELS, 0), False

    def counted(name: str, kernel: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal inside
            was_inside, inside = inside, True
            try:
                result = kernel(*args, **kwargs)
            finally:
                inside = was_inside
            if was_inside:
                return result
            if name not in PAIRS:
                counts[name] += 1
            elif result is not None:  # None: it cannot do this one
                counts["gemm_m_grouped"] += 2
            return result

        return run

    with ExitStack() as patches:
        if device.type == "cuda":  # what is replayed runs none of the backend's Python
            replay = importlib.import_module("titan_mxfp8.backends.common.replay")
            patches.enter_context(mock.patch.object(replay, "call", lambda function, args, unread: function(*args)))
        for name in (name for name in (*KERNELS, *PAIRS) if getattr(backend, name) is not None):
            patches.enter_context(mock.patch.object(backend, name, counted(name, getattr(backend, name))))
        yield lambda: dict(counts)


class PlainAttention(nn.Module):
    """Causal attention in plain torch with the signature of TorchTitan's FlexAttentionWrapper.

    Flex attention has no backward on CPUs. The sliding window of gpt-oss, 128 tokens, is longer than any test's text.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q.float() @ k.float().mT) * scale
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return (F.softmax(scores, dim=-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def replace_flex_attention(model: nn.Module) -> None:
    """Puts ``PlainAttention`` in the place of each flex attention."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "inner_attention", None), FlexAttentionWrapper):
            module.inner_attention = PlainAttention()
