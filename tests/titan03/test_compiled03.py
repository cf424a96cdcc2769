"""A block of TorchTitan 0.3 compiled whole, as its trainer compiles it, whose MoE layer dispatches its own tokens."""

import copy
from dataclasses import replace

import torch
from test_titan03 import EXPERTS, build, config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchtitan.models.common.attention import VarlenMetadata

LENGTH = 48


def moe_block(rows: str) -> nn.Module:
    """The second block of the debug model of deepseek_v3."""
    block = build(config("deepseek_v3", (EXPERTS, {"dispatch_rows": rows}))).layers["1"].to_empty(device="cpu")
    for name, param in block.named_parameters():
        nn.init.ones_(param) if "norm" in name else nn.init.normal_(param, std=0.05)
    for buffer in block.buffers():
        buffer.zero_()
    return block


def step(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, all gradients, and how many tokens each expert got."""
    x, starts = x.clone().requires_grad_(), torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    y = block(x, VarlenMetadata(starts, starts, LENGTH, LENGTH), torch.arange(LENGTH).repeat(2, 1))
    y.backward(dy)
    tokens = block.moe.tokens_per_expert_E.clone()
    results = {"y": y.detach(), "x": x.grad, "tokens": tokens} | {n: p.grad for n, p in block.named_parameters()}
    block.zero_grad()
    return results


def test_a_whole_block_is_one_graph_that_is_compiled_once_until_rows_grow() -> None:
    """Whatever experts its tokens go to; with all bits of the eager block, where TorchTitan's dispatch has others."""
    torch._dynamo.reset()
    eager = moe_block("bounded")
    block, compiler = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    block.compile(backend=compiler, fullgraph=True)
    features = len(eager.ffn_norm.weight)
    for call, rows in enumerate(("bounded", "bounded", "worst_case")):
        layers = block.moe.routed_experts.mxfp8_layers
        block.moe.routed_experts.mxfp8_layers = replace(layers, rows=rows)
        x, dy = torch.randn(2, 2, LENGTH, features)
        if call:
            x[1] = x[1, :1]  # half of the tokens are alike
        with torch._dynamo.config.patch(error_on_recompile=call == 1):
            expected, actual = step(eager, x, dy), step(block, x, dy)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), (call, name)
    assert compiler.frame_count == 2
