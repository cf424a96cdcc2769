"""TorchTitan's expert modules with MXFP8 grouped GEMMs: ``GroupedExperts`` (llama4, deepseek_v3, qwen3) and gpt_oss's.

Each class has one path: the loop over experts that TorchTitan falls back to below SM90 (``use_grouped_mm = false``)
would leave the experts in bf16, and padding of the token groups is not needed. Where the layer dispatches its tokens
itself (moe.py), a module is called with tokens in their own order and their routing, and ``mxfp8_moe`` does all else.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
from torchtitan.models.moe.moe import GroupedExperts

from titan_mxfp8.modules import ConvertedModule, Dispatch, MXConfig, interleaved, own_code
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.observe import observe


class Routing:
    """Where the tokens go. No dataclass and no tuple: in those FSDP would cast the fp32 scores to bf16, as it casts
    every tensor that it finds in a module's arguments.

    Attributes:
        scores: (T, K) fp32.
        expert_ids: (T, K), numbers among all experts.
        scores_first: whether scores multiply the tokens, and not the experts' outputs.
    """

    def __init__(self, scores: torch.Tensor, expert_ids: torch.Tensor, scores_first: bool) -> None:
        self.scores, self.expert_ids, self.scores_first = scores, expert_ids, scores_first


class RoutedExperts(ConvertedModule):
    """Mixed into both classes. ``dispatch`` is None where TorchTitan dispatches."""

    dispatch: Dispatch | None = None


class MXFP8GroupedExperts(RoutedExperts, GroupedExperts):
    """Takes the place of the class of a ``GroupedExperts``."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | Routing) -> torch.Tensor:
        """``x`` sorted by expert and the number of tokens of each; or (T, D) tokens and their ``Routing``."""
        params = (self.w1, self.w2, self.w3)
        if isinstance(tokens, Routing):
            group = expert_parallel_group(self.w1)
            w1, w2, w3 = (_local(param).bfloat16() for param in params)
            return _run_dispatched(self, x, tokens, group, w1, w3, w2)
        return _run(run_experts, self, params, x, tokens)


class MXFP8GptOssGroupedExperts(RoutedExperts, GptOssGroupedExperts):
    """Takes the place of the class of a ``GptOssGroupedExperts``.

    The biases are added in fp32 inside the GEMMs, so nothing waits for the number of tokens on the host as TorchTitan's
    ``repeat_interleave`` and ``int(offsets[-1])`` do.
    """

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | Routing) -> torch.Tensor:
        """As ``MXFP8GroupedExperts.forward``."""
        params = (self.mlp1_weight, self.mlp1_bias, self.mlp2_weight, self.mlp2_bias)
        if isinstance(tokens, Routing):
            group = expert_parallel_group(self.mlp1_weight)
            mlp1, mlp1_bias, w2, b2 = (_local(param) for param in params)
            (w1, w3), (b1, b3) = interleaved(mlp1.bfloat16()), interleaved(mlp1_bias)
            biases = {"b1": b1, "b3": b3, "b2": b2, "swiglu_limit": self.swiglu_limit}
            return _run_dispatched(self, x, tokens, group, w1, w3, w2.bfloat16(), **biases)
        return _run(run_gpt_oss_experts, self, params, x, tokens, self.swiglu_limit, contraction_shards(params[2]))


def run_experts(
    w1_EHD: torch.Tensor,
    w2_EDH: torch.Tensor,
    w3_EHD: torch.Tensor,
    x_MD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    *,
    options: dict[str, object],
    probe: torch.Tensor | None,
) -> torch.Tensor:
    """``w2(silu(w1 x) * w3 x)`` of each expert on its own tokens: E experts of D features and H hidden ones, M tokens
    sorted by expert. Rows past the last expert's give zeros. ``options`` are those of ``mxfp8_grouped_mm``."""
    offs_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

    def grouped_mm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _grouped_mm(a, w, None, offs_E, options, probe)

    h_MH = F.silu(grouped_mm(x_MD.bfloat16(), w1_EHD)) * grouped_mm(x_MD.bfloat16(), w3_EHD)
    return grouped_mm(h_MH, w2_EDH).type_as(x_MD)


def run_gpt_oss_experts(
    w1_EGD: torch.Tensor,
    b1_EG: torch.Tensor,
    w2_EDH: torch.Tensor,
    b2_ED: torch.Tensor,
    x_MD: torch.Tensor,
    num_tokens_per_expert_E: torch.Tensor,
    swiglu_limit: float,
    shares: int,
    *,
    options: dict[str, object],
    probe: torch.Tensor | None,
) -> torch.Tensor:
    """``w2 swiglu(w1 x + b1) + b2`` of each expert on its own tokens, as ``run_experts``; G is 2 H, the gate and the
    linear half interleaved.

    ``shares`` ranks each hold a part of H and their outputs are summed: each adds its share of ``b2``, whose gradient
    is whole on every one.
    """
    offs_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

    def grouped_mm(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _grouped_mm(a, w, bias, offs_E, options, probe)

    h_MH = swiglu(grouped_mm(x_MD.bfloat16(), w1_EGD, b1_EG), limit=swiglu_limit)
    return grouped_mm(h_MH, w2_EDH, ScaleBiasForward.apply(b2_ED, shares))


def _grouped_mm(
    a_MC: torch.Tensor,
    w_EDC: torch.Tensor,
    bias_ED: torch.Tensor | None,
    offs_E: torch.Tensor,
    options: dict[str, object],
    probe: torch.Tensor | None,
) -> torch.Tensor:
    w_EDC = w_EDC.bfloat16()
    y_MD = mxfp8_grouped_mm(a_MC, w_EDC.mT, offs_E, bias=bias_ED, **options)
    return observe(y_MD, a_MC, w_EDC, offs_E, probe, options["recipe"], options["backend"])


def contraction_shards(w2_EDH: torch.Tensor) -> int:
    """Among how many ranks the last axis of a weight is split: their outputs are partial sums.

    TorchTitan asks for a mesh dimension named ``tp`` instead, and under expert tensor parallelism, where its name is
    ``etp``, adds the whole bias on every rank.
    """
    if not isinstance(w2_EDH, DTensor):
        return 1
    degree = 1
    for dim, placement in enumerate(w2_EDH.placements):
        if placement.is_shard(2):
            degree *= w2_EDH.device_mesh.size(dim)
    return degree


def expert_parallel_group(weight: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks among which expert parallelism has split a weight; None for a whole one."""
    if isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ()):
        return weight.device_mesh.get_group("ep")
    return None


def _run_dispatched(
    module: RoutedExperts,
    x_TD: torch.Tensor,
    routing: Routing,
    group: dist.ProcessGroup | None,
    *weights: torch.Tensor,
    **biases: torch.Tensor | float,
) -> torch.Tensor:
    return module.mxfp8_moe(
        x_TD,
        routing.scores,
        routing.expert_ids,
        weights,
        group,
        scores_first=routing.scores_first,
        transport=module.dispatch.transport,
        rows=module.dispatch.rows,
        **biases,
    )


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _run(
    run: Callable[..., torch.Tensor],
    module: ConvertedModule,
    params: tuple[torch.Tensor, ...],
    x_MD: torch.Tensor,
    *args: object,
) -> torch.Tensor:
    """``run`` on this rank's parts of the parameters, compiled if the module's config says so."""
    local_params = [_local(param) for param in params]
    if module.mxfp8.compile_backend is not None:
        run = _compiled(run, module.mxfp8)
        # With expert parallelism the number of rows differs from step to step.
        if isinstance(params[0], DTensor) and "ep" in params[0].device_mesh.mesh_dim_names:
            torch._dynamo.mark_dynamic(x_MD, 0)
        # Parameters cost nothing to keep for backward. Unless told, the compiler may take them for activations and keep
        # FP8 copies, quantised for dgrad.
        for param in local_params:
            torch._dynamo.mark_static_address(param, guard=False)
    return run(*local_params, x_MD, *args, options=module.op_options, probe=module.probe)


@cache
def _compiled(run: Callable, config: MXConfig) -> Callable:
    # TorchTitan compiles its own function of the experts so, apart from the module: FSDP's hooks would break the graph.
    return torch.compile(own_code(run), backend=config.compile_backend, fullgraph=True)
