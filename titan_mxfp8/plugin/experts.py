"""TorchTitan's ``GroupedExperts`` (llama4, deepseek_v3, qwen3) with MXFP8 grouped GEMMs."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts

from titan_mxfp8.modules import ConvertedModule, MXConfig
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.health import observe


class MXFP8GroupedExperts(ConvertedModule, GroupedExperts):
    """Takes the place of the class of a ``GroupedExperts``.

    It has one path: the loop over experts that TorchTitan falls back to below SM90 (``use_grouped_mm``) would leave the
    experts in bf16, and padding of the token groups is not needed.
    """

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        run = run_experts
        if self.mxfp8.compile_backend is not None:
            # With expert parallelism the number of rows differs from step to step.
            if isinstance(self.w1, DTensor) and "ep" in self.w1.device_mesh.mesh_dim_names:
                torch._dynamo.mark_dynamic(x, 0)
            run = _compiled(self.mxfp8.compile_backend)
        return run(w1, w2, w3, x, num_tokens_per_expert, self.mxfp8, self.health_probe)


def run_experts(
    w1_EHD: torch.Tensor,
    w2_EDH: torch.Tensor,
    w3_EHD: torch.Tensor,
    x_MD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    config: MXConfig,
    health_probe: torch.Tensor | None = None,
) -> torch.Tensor:
    """``w2(silu(w1 x) * w3 x)`` of each expert on its own tokens: E experts of D features and H hidden ones, M tokens
    sorted by expert. Rows past the last expert's give zeros."""
    offs_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

    def grouped_mm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.bfloat16()
        y = mxfp8_grouped_mm(a, w.mT, offs_E, recipe=config.recipe, backend=config.backend)
        return observe(y, a, w, offs_E, health_probe, config.recipe, config.backend)

    h_MH = F.silu(grouped_mm(x_MD.bfloat16(), w1_EHD)) * grouped_mm(x_MD.bfloat16(), w3_EHD)
    return grouped_mm(h_MH, w2_EDH).type_as(x_MD)


@cache
def _compiled(backend: str) -> Callable:
    # TorchTitan compiles its own function of the experts so, apart from the module: FSDP's hooks would break the graph.
    return torch.compile(run_experts, backend=backend, fullgraph=True)
