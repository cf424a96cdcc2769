"""Workarounds of torch, on any machine."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint

from titan_mxfp8.workarounds.patch import TITAN02, around, workaround


@workaround("torch.utils.checkpoint.SAC_IGNORED_OPS", since="2.13")
def ignore_profiler_ranges() -> None:
    """`profiler._record_function_enter_new ... not found in storage`: selective checkpointing under EP.

    Op-level checkpointing replays the forward op by op, and counts FSDP's profiler ranges as ops. Under EP the experts
    are an FSDP unit of their own in the checkpointed block, and open more ranges the second time than the first
    (torchtitan#3427). The ranges compute nothing: checkpointing may ignore them."""
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    enter, enter_new, leave = (
        getattr(torch.ops.profiler, f"_record_function_{name}") for name in ("enter", "enter_new", "exit")
    )
    SAC_IGNORED_OPS.update({enter.default, enter_new.default, leave.default, leave._RecordFunction})


@workaround(since="2.13", before="2.14")
@around("torch.distributed.tensor._api._ToTorchTensor.forward")
def wait_before_compiled_regions(to_local: Any, *args: Any) -> torch.Tensor:
    """`'Tensor' object has no attribute '_local_tensor'`, or lost gradients: TP with compile.

    A compiled region waits for those of its inputs that a collective is still filling, and forgets that they need a
    gradient (pytorch#191113): a block behind the embedding dies of it, and a MoE layer's router and shared experts lose
    their part of the gradient without a word. All these inputs come out of DTensor.to_local, so the wait is put there.
    torch 2.14 needs more than this, which the check of a config refuses."""
    local = to_local(*args)
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local  # AsyncCollectiveTensor


@workaround(since="2.13")
@around("torch._functorch.partitioners.functionalize_rng_ops")
def save_random_states_before_meshes(functionalize: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """`expected all tensors_saved_with_vc_check to be Tensors`: TP, compile and checkpointing on CPUs.

    A forward saves for the backward tensors first, then the meshes of DTensors, then sizes. Where checkpointing repeats
    an op that may draw random numbers, as attention on CPUs may, the partitioner puts the generator's state, a tensor,
    behind the meshes, in the outputs of the forward and the inputs of the backward. Both are sorted here."""
    from torch._functorch.partitioners import is_opaque_node, is_sym_node

    forward, backward = functionalize(*args, **kwargs)
    inputs = list(backward.graph.find_nodes(op="placeholder"))
    saved = next(i for i, node in enumerate(inputs) if "tangents" in node.name)  # how many
    for node in filter(is_opaque_node, inputs[:saved]):
        inputs[saved].prepend(node)
    output = forward.graph.output_node()
    values = output.args[0]
    own = len(values) - saved
    in_order = sorted(values[own:], key=lambda node: 2 if is_sym_node(node) else int(is_opaque_node(node)))
    output.args = ((*values[:own], *in_order),)
    forward.recompile()
    backward.recompile()
    return forward, backward


@workaround(since="2.12")
@around("torch._higher_order_ops.wrap._always_prefer_recompute")
def route_tokens_once(choose: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Tokens go to other experts where a compiled block is computed again for backward.

    Its backward has kernels of its own. They may round differently, and the largest of nearly equal scores is another
    one then. Probably so, TorchTitan 0.3.0's own dispatch found other counts in backward than in forward, and failed on
    a GPU (`results/2026-11-27_2xh200_minimal_async_ep`); ours would differentiate experts that the loss has not seen.
    With this the choices are kept."""
    kept = op == torch.ops.aten.topk.default
    return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE if kept else choose(context, op, *args, **kwargs)


@workaround(before="2.12")
@around("torch._higher_order_ops.wrap.TagActivationCheckpoint.tag_nodes")
def recompute_autograd_functions(tag_nodes: Any, module: Any, is_sac: bool) -> Any:
    """Full activation checkpointing in a compiled region keeps all that an autograd.Function saves.

    What checkpointing is to compute again is marked in the graph of the region, but not in those of the functions that
    it calls: H100s ran out of memory (`results/2026-11-28_4xh100_full_checkpointing`). With this they are. The choices
    of experts are kept here too, as in ``route_tokens_once``."""
    from torch._functorch.autograd_function import autograd_function_apply

    tag_nodes(module, is_sac)
    for node in module.graph.find_nodes(op="call_function", target=autograd_function_apply):
        forward = getattr(module, node.args[0].target)
        for inner in forward.graph.nodes:
            if inner.op.startswith("call_"):
                inner.meta |= {key: node.meta[key] for key in ("ac_graph_id", "recompute")}
    if not is_sac:
        for op, target in (("call_function", torch.topk), ("call_method", "topk")):
            for node in module.graph.find_nodes(op=op, target=target):
                node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    return module


@workaround(since="2.13")
@around("torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference")
def infer_shapes_without_a_trace(infer: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Pipelines of MoE layers with expert biases route differently from run to run, without a word.

    The first step finds out its shapes by running each stage on memory that nobody has written. A MoE layer counts that
    run's tokens with the step's own. What it changed is put back; the backward pass that follows reads the others."""
    buffers = list(stage.submod.buffers())
    before = [buffer.detach().clone() for buffer in buffers]
    metadata = infer(stage, *args, **kwargs)
    for buffer, value in zip(buffers, before, strict=True):
        if not torch.equal(buffer, value):
            buffer.detach().copy_(value)
    return metadata


@workaround("torch._functorch.config.enable_autograd_cache", since="2.13")
def compile_for_own_rank_only() -> None:
    """Wrong gradients without a word: a process is given the compiled code of another rank.

    AOTAutograd's cache on disk takes DTensors whose ranks differ for equal. GPUs hide it as long as each rank has a
    device number of its own. Only the tracing is repeated: the inductor's cache of kernels stays in use."""
    from torch._functorch import config

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        config.enable_autograd_cache = False


@workaround("torch.compiler.config.cache_key_tag")
def compile_for_own_edition_only() -> None:
    """`expected size 147456==32768` of an operator: code that another edition of this package compiled.

    The inductor's cache on disk knows a custom operator by its name alone, not by the shapes that its fake gives:
    after an update of this package a run would be given code for the shapes of before. With a hash of the package's
    sources in the keys it finds none."""
    tag, config = f"titan_mxfp8-{hash_of_sources(Path(__file__).parents[1])}", torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.removesuffix(tag) + tag  # once


def hash_of_sources(folder: Path) -> str:
    contents = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


@workaround("torch.autograd.set_multithreading_enabled")
def run_backward_in_the_calling_thread() -> None:
    """Forward and backward take the host twice as long together as each alone, on GPUs.

    Autograd runs backward in a thread of its own. Python code of both, of which custom operators, FSDP's hooks and
    compiled code have much, takes turns on two cores, each of which finds nothing in its cache: 1258 us for a grouped
    GEMM on an H200's host, 580 to 670 in one thread. A training process has one GPU, so nothing runs at once that would
    be in turns now. It holds for the thread that calls this, the one that trains."""
    torch.autograd.set_multithreading_enabled(False)


@workaround(
    "torch._inductor.config.inplace_buffers",
    "torch._inductor.config.allow_buffer_reuse",
    torchtitan=TITAN02,
    by_config=True,
)
def keep_saved_outputs() -> None:
    """Wrong gradients without a word: compiled code and op-level activation checkpointing.

    TorchTitan compiles the parts of a MoE block one by one, within the checkpointed block. So checkpointing saves the
    outputs of our GEMMs while compiled code runs, which knows nothing of it and writes its next result into the same
    memory: a rotary embedding over the queries that it is made from. The inductor is told to allocate anew instead;
    memory that is free the allocator gives it again. What that costs has not been measured. TorchTitan's own `mm` is
    never saved from within compiled code."""
    from torch._inductor import config

    config.inplace_buffers = False
    config.allow_buffer_reuse = False
