"""What other projects have for the same, timed beside ours where it can be imported: no dependencies.

bench_moe_layer.py has SonicMoE (github.com/Dao-AILab/sonic-moe): a bf16 MoE layer in CuTe DSL for Hopper, of one rank,
without shared experts. Its requirements.txt names the commit of quack and the version of nvidia-cutlass-dsl that it
takes. Its variant with ``USE_QUACK_GEMM``, which tunes for minutes, is not taken.

bench_training.py has TorchTitan 0.2.2's own FP8, of torchao: ``quantize.grouped_mm.float8`` for experts and
``quantize.linear.float8`` for linears, E4M3 with a scale per row, on GPUs from SM89 on. It wants a compiled model
(``compile.components`` with ``model``), and refuses pipeline and context parallelism.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from scripts.result_files import installed_version
from scripts.study.conversions import FLOAT8
from titan_mxfp8.recipe import GROUPED_MM, LINEAR

if TYPE_CHECKING:
    from torchtitan.models.moe.moe import MoE

SONICMOE = "sonicmoe"
TORCHAO = "0.16.0"  # later releases have moved what TorchTitan 0.2.2 imports
FLOAT8_MODULE = "torchao.prototype.moe_training.conversion_utils"
FLOAT8_FLAGS = {
    # not "experts", as TorchTitan's documentation has it: that would be the shared experts too, which are linears
    GROUPED_MM: ("fqns=moe.experts",),
    LINEAR: ("recipe_name=rowwise", "filter_fqns=output,router.gate"),
}


def versions() -> dict[str, str]:
    """Commits that pip installed the peers from, where it says so, for env.json."""
    found = {}
    for name in (SONICMOE, "quack-kernels"):
        with suppress(PackageNotFoundError):
            source = json.loads(distribution(name).read_text("direct_url.json") or "{}")
            found[name] = source.get("vcs_info", {}).get("commit_id")
    return {name: commit for name, commit in found.items() if commit}


def check_torchao() -> None:
    """Raises ValueError, which says what to install, unless there is the torchao that TorchTitan 0.2.2's FP8 takes, and
    it can be imported: Triton 3.6 takes its kernels, Triton 3.9 refuses them."""
    found = installed_version("torchao")
    if found != TORCHAO:
        raise ValueError(
            f"{FLOAT8} takes torchao {TORCHAO}, here is {found or 'none'}: pip install --no-deps torchao=={TORCHAO} "
            f"(on Linux the wheel torchao-{TORCHAO}-cp310-abi3-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl)"
        )
    try:
        import_module(FLOAT8_MODULE)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{FLOAT8}: torchao {TORCHAO} cannot be imported here: {error}") from error


def float8_flags(converters: Sequence[str]) -> list[str]:
    """TorchTitan 0.2.2's flags that convert to its own FP8 what these converters of ours would convert."""
    names = {converter: converter.replace(".mx", f".{FLOAT8}") for converter in converters}
    flags = [f"--{name}.{flag}" for converter, name in names.items() for flag in FLOAT8_FLAGS[converter]]
    return [f"--model.converters={','.join(names.values())}", *flags]


def is_installed() -> bool:
    return find_spec(SONICMOE) is not None


class SonicMoE(nn.Module):
    """SonicMoE's layer with the weights and the router of one of TorchTitan's, in SonicMoE's memory layout.

    Its scores are a softmax over the K chosen logits: TorchTitan's with ``score_func="softmax"``, ``route_norm=True``.
    """

    def __init__(self, moe: "MoE") -> None:
        super().__init__()
        experts = moe.experts
        self.top_k = moe.router.top_k
        self.router = nn.Parameter(moe.router.gate.weight.detach())
        in_turns_EHD = torch.stack([experts.w1, experts.w3], dim=2).flatten(1, 2)  # (E, 2 H, D)
        self.w1 = nn.Parameter(in_turns_EHD.detach())
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
        experts = {"moe.experts.w1": w1, "moe.experts.w2": self.w2.grad, "moe.experts.w3": w3}
        return experts | {"moe.router.gate.weight": self.router.grad}
