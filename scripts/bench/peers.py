"""Layers of other projects that bench_moe_layer.py times beside ours, where they can be imported: no dependencies.

SonicMoE (github.com/Dao-AILab/sonic-moe): a bf16 MoE layer in CuTe DSL for Hopper, of one rank, without shared experts.
Its requirements.txt names the commit of quack and the version of nvidia-cutlass-dsl that it takes. Its variant with
``USE_QUACK_GEMM``, which tunes for minutes, is not taken.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

import torch
from torch import nn
from torchtitan.models.moe.moe import MoE

SONICMOE = "sonicmoe"


def commit(package: str) -> str:
    """What pip installed a package from; empty where it does not say."""
    try:
        source = distribution(package).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    return json.loads(source or "{}").get("vcs_info", {}).get("commit_id", "")


def versions() -> dict[str, str]:
    """Commits of the peers that are installed, for env.json."""
    return {name: commit(name) for name in (SONICMOE, "quack-kernels") if commit(name)}


def is_installed() -> bool:
    return find_spec(SONICMOE) is not None


class SonicMoE(nn.Module):
    """SonicMoE's layer with the weights and the router of one of TorchTitan's, in SonicMoE's memory layout.

    Its scores are a softmax over the K chosen logits: TorchTitan's with ``score_func="softmax"``, ``route_norm=True``.
    """

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        experts = moe.experts
        self.top_k = moe.router.top_k
        self.router = nn.Parameter(moe.router.gate.weight.detach())
        self.w1 = nn.Parameter(
            torch.stack([experts.w1, experts.w3], dim=2).flatten(1, 2).detach()
        )  # in turns: (E, 2 H, D)
        self.w2 = nn.Parameter(experts.w2.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, D) to the same shape."""
        from sonicmoe import moe_TC_softmax_topk_layer

        w1, w2 = self.w1.permute(1, 2, 0), self.w2.permute(1, 2, 0)
        stream = torch.cuda.current_stream().cuda_stream
        rows = x.view(-1, x.shape[-1])
        out, _, _ = moe_TC_softmax_topk_layer(rows, self.router, w1, None, w2, None, self.top_k, stream, "swiglu")
        return out.view_as(x)

    def gradients(self) -> dict[str, torch.Tensor]:
        """By the names of TorchTitan's parameters."""
        w1, w3 = self.w1.grad.unflatten(1, (-1, 2)).unbind(2)
        gradients = {"w1": w1, "w2": self.w2.grad, "w3": w3}
        named = {f"moe.experts.{name}": gradient for name, gradient in gradients.items()}
        return named | {"moe.router.gate.weight": self.router.grad}
