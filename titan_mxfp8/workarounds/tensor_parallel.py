"""Workarounds of compiled tensor parallelism."""

import dataclasses
import os

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as dtensor_api

from titan_mxfp8.workarounds.patch import is_patched, patch_of


def wait_before_compiled_regions() -> None:
    """Works around: `'Tensor' object has no attribute '_local_tensor'` in the backward of tensor parallelism with
    compile.

    For: torch 2.13. Newer ones need more than this, and checks.py refuses them.

    A compiled region waits for those of its inputs that a collective is still filling, and forgets
    that they need a gradient (pytorch#191113): a block behind the embedding dies of it, and a MoE layer's router and
    shared experts lose their part of the gradient without a word. All these inputs come out of DTensor.to_local, so the
    wait is put there. On a GPU it is the compute stream that waits, a little earlier than it would have.
    """
    if not any(field.name == "act_input_indices" for field in dataclasses.fields(ViewAndMutationMeta)):
        return
    to_local = dtensor_api._ToTorchTensor.forward
    if is_patched(to_local):
        return

    @patch_of(to_local)
    def to_local_and_wait(ctx: object, input: DTensor, grad_placements: object) -> torch.Tensor:
        local = to_local(ctx, input, grad_placements)
        return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local

    dtensor_api._ToTorchTensor.forward = staticmethod(to_local_and_wait)


def save_random_states_before_meshes() -> None:
    """Works around: `expected all tensors_saved_with_vc_check to be Tensors, got types: [...DeviceMesh...]`.

    For: torch 2.13 and newer, on CPUs.

    A forward compiled under tensor parallelism saves the DeviceMesh of DTensors for the backward:
    tensors come first, then meshes, then sizes. Where activation checkpointing repeats an op that may draw random
    numbers, as attention on CPUs may, the partitioner puts the generator's state, a tensor, behind the meshes, in the
    outputs of the forward and the inputs of the backward. Both are sorted here. On GPUs such a state is no output.
    """
    if not hasattr(partitioners, "is_opaque_node"):
        return
    functionalize = partitioners.functionalize_rng_ops
    if is_patched(functionalize):
        return

    def place(node: torch.fx.Node) -> int:
        return 2 if partitioners.is_sym_node(node) else int(partitioners.is_opaque_node(node))

    @patch_of(functionalize)
    def functionalize_and_sort(*args: object, **kwargs: object) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        forward, backward = functionalize(*args, **kwargs)
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        saved = next(i for i, node in enumerate(inputs) if "tangents" in node.name)  # how many
        for node in filter(partitioners.is_opaque_node, inputs[:saved]):
            inputs[saved].prepend(node)
        output = forward.graph.output_node()
        values = output.args[0]
        own = len(values) - saved
        output.args = ((*values[:own], *sorted(values[own:], key=place)),)
        forward.recompile()
        backward.recompile()
        return forward, backward

    partitioners.functionalize_rng_ops = functionalize_and_sort


def compile_for_own_rank_only() -> None:
    """Works around: wrong gradients, without a word, where one process is given the compiled code of another.

    For: torch 2.13 and newer.

    AOTAutograd's cache on disk takes DTensors whose ranks differ for equal: a process is given the
    code of another rank of its machine, or of an earlier run, and takes that rank's shard. GPUs hide it as long as each
    rank has a device number of its own. Only the tracing is repeated: the inductor's cache of kernels stays in use.
    """
    if hasattr(DTensor, "_stable_hash_for_caching") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        functorch_config.enable_autograd_cache = False
