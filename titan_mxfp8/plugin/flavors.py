"""Flavors for studies, added where a config sets ``model.study_flavors``: TorchTitan's own models cut to two, four or
seven layers, and two small MoEs for convergence studies. TorchTitan has no setting for the number of layers: a layer
count is a flavor."""

import copy
import dataclasses
from typing import Any

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs, deepseekv3_args
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama4 import TransformerModelArgs, llama4_args
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import qwen3_args

# Flavor table, flavor, counts of layers, what to change besides. Layer 1 of 0, 1 must be a MoE layer: it is in both
# debug models, in 16B (one dense layer) and in 17bx16e (MoE in every layer); 671B begins with three dense ones. Qwen3's
# MoE models and gpt-oss have no dense layer, llama3 has nothing else. What more than two layers take longer is the time
# of MoE layers alone, without embedding, output and loss.
FEW_LAYERS: tuple[tuple[dict[str, Any], str, tuple[int, ...], dict[str, int]], ...] = (
    (llama4_args, "debugmodel", (2,), {}),
    (llama4_args, "17bx16e", (2, 4), {}),
    (deepseekv3_args, "debugmodel", (2,), {}),
    (deepseekv3_args, "16B", (2, 4, 7), {}),
    (deepseekv3_args, "671B", (2,), {"n_dense_layers": 1}),
    (qwen3_args, "debugmodel_moe", (2,), {}),
    (qwen3_args, "30B-A3B", (2, 4, 7), {}),
    (gptoss_configs, "debugmodel", (2,), {"vocab_size": 2048}),  # its 201088 would be nearly all of the model
    (gptoss_configs, "20b", (2,), {}),
    (llama3_args, "debugmodel", (2,), {}),
)

# A Llama4-style MoE of 111M parameters, 45M of them active, small enough for many runs of thousands of steps. 8 layers,
# every second one with 8 routed experts of 512 -> 1536 -> 512 and a shared one.
MOE_100M = TransformerModelArgs(
    dim=512,
    n_layers=8,
    n_heads=8,
    vocab_size=8192,
    rope_theta=500000,
    moe_args=MoEArgs(num_experts=8),
    auto_scale_hidden_dim=False,
)

# A DeepSeek-V3-style MoE of 320M parameters, 88M of them active: latent attention, one dense layer, then seven with 32
# experts of 768 -> 512 -> 768, of which a token takes four, and a shared one; routed as the 671B model routes.
MOE_320M = DeepSeekV3ModelArgs(
    vocab_size=16384,
    dim=768,
    inter_dim=2048,
    moe_inter_dim=512,
    n_layers=8,
    n_dense_layers=1,
    n_heads=6,
    kv_lora_rank=256,
    moe_args=MoEArgs(
        num_experts=32,
        num_shared_experts=1,
        top_k=4,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        score_before_experts=False,
    ),
)

_registered: list[Any] = []


def register_flavors() -> None:
    """Adds to TorchTitan's tables `<flavor>_<n>layers` for the flavors above, and both small MoEs, once."""
    if _registered:
        return
    rows = [(llama4_args, "moe_100m", copy.deepcopy(MOE_100M)), (deepseekv3_args, "moe_320m", copy.deepcopy(MOE_320M))]
    for table, flavor, counts, changes in FEW_LAYERS:
        for count in counts:
            # deepcopy: update_from_config writes into a flavor's moe_args, which replace() alone would share
            cut = dataclasses.replace(copy.deepcopy(table[flavor]), n_layers=count, **changes)
            rows.append((table, f"{flavor}_{count}layers", cut))
    if taken := [name for table, name, _ in rows if name in table]:
        raise ValueError(
            f"model.study_flavors adds a flavor {taken[0]!r}, which exists already: register yours under another name"
        )
    for table, name, args in rows:
        table[name] = args
        _registered.append(args)


def is_study_flavor(args: Any) -> bool:
    """Whether these are the arguments of a flavor that ``register_flavors`` has added."""
    # by identity: a run changes the values (max_seq_len, moe_args) of the flavor that it trains
    return any(registered is args for registered in _registered)
