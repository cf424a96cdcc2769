"""Two-layer model flavors: TorchTitan has no setting for the number of layers, a layer count is a flavor."""

import copy
import dataclasses
from typing import Any

from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.llama4 import llama4_args

# (flavor table, flavor, what to change besides n_layers). Layer 1 of 0, 1 must be a MoE layer: it is in both debug
# models, in 16B (one dense layer) and in 17bx16e (MoE in every layer); 671B begins with three dense ones.
TWO_LAYER_FLAVORS: tuple[tuple[dict[str, Any], str, dict[str, int]], ...] = (
    (llama4_args, "debugmodel", {}),
    (llama4_args, "17bx16e", {}),
    (deepseekv3_args, "debugmodel", {}),
    (deepseekv3_args, "16B", {}),
    (deepseekv3_args, "671B", {"n_dense_layers": 1}),
)

_registered: list[Any] = []


def register_flavors() -> None:
    """Add `<flavor>_2layers` for each of TWO_LAYER_FLAVORS to TorchTitan's tables. Safe to call again."""
    for table, flavor, changes in TWO_LAYER_FLAVORS:
        name = f"{flavor}_2layers"
        if name not in table:
            # deepcopy: update_from_config writes into a flavor's moe_args, which replace() alone would share
            table[name] = dataclasses.replace(copy.deepcopy(table[flavor]), n_layers=2, **changes)
            _registered.append(table[name])
        # by identity: a run changes the values (max_seq_len, moe_args) of the flavor that it trains
        elif not any(args is table[name] for args in _registered):
            raise ValueError(
                f"the flavor {name!r} exists already and is not the one that titan_mxfp8 would add "
                f"({type(table[name]).__name__}); register yours under another name"
            )
