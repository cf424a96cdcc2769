"""Experts out of FSDP against experts in it, and which of them are."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_models import cpu_only
from test_plugin import parse
from test_plugin_moe import CONVERT, layer
from torch import nn
from torch.distributed.tensor import DTensor

from titan_mxfp8.plugin.converters import GroupedMMConverter
from titan_mxfp8.titan.fsdp import why_fsdp


@pytest.mark.integration
@cpu_only
def test_experts_out_of_fsdp_train_and_are_saved_as_those_in_it(tmp_path: Path) -> None:
    """Losses, norms and gradients to the last digit; checkpoints with Adam's states among 2 ranks, each way read by the
    other."""
    processes.check(2, "parallel_fsdp.py", tmp_path)


@pytest.mark.integration
@cpu_only
@pytest.mark.nightly
def test_checkpoints_of_experts_out_of_fsdp_go_to_other_layouts(tmp_path: Path) -> None:
    """From 2 ranks to 4, from 4 to one, and between layouts, whoever wrote them."""
    processes.check(2, "parallel_fsdp.py", tmp_path)
    processes.check(4, "parallel_fsdp.py", tmp_path)
    whole = torch.load(tmp_path / "full0.pt")
    read = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load(read, checkpoint_id=tmp_path / "of 4", no_dist=True)
    assert all(torch.equal(value, whole[name]) for name, value in read.items())


def test_torchft_reduces_gradients_in_a_hook_of_fsdp() -> None:
    for enabled, reason in ((False, ""), (True, "fault_tolerance.enable")):
        config = parse(CONVERT)
        config.fault_tolerance.enable = enabled
        holder = nn.ModuleDict({"moe": layer("llama4")})
        GroupedMMConverter(config, None).convert(holder)
        assert holder["moe"].experts.needs_fsdp == reason


@pytest.mark.parametrize(
    "changed, says",
    [
        ({}, ""),
        ({"pp_enabled": True}, ""),
        ({"pp_enabled": True, "dtype": torch.bfloat16}, "adds a pipeline's gradients up in fp32"),
        ({"dtype": torch.bfloat16}, ""),
        ({"ranks": (1, 4)}, "4 ranks (dp_replicate 1 x efsdp 4)"),
        ({"ranks": (2, 1)}, "2 ranks (dp_replicate 2 x efsdp 1)"),
        ({"edp_mesh": None}, ""),
        ({"edp_mesh": None, "ranks": (1, 4)}, "4 ranks"),
        ({"edp_mesh": None, "shards": True}, "tensor parallelism has sharded them"),
        ({"cpu_offload": True}, "offloads to the CPU"),
        ({"dp_mesh_dims": object()}, "spmd_backend"),
        ({"converted": 1}, "not all of them are converted"),
        ({"needs_fsdp": "fault_tolerance.enable"}, "fault_tolerance.enable"),
    ],
)
def test_why_fsdp_takes_experts(changed: dict[str, object], says: str) -> None:
    given = {"pp_enabled": False, "cpu_offload": False, "ranks": (1, 1), "converted": 2, "needs_fsdp": ""} | changed
    experts = [nn.Linear(1, 1, dtype=given.get("dtype", torch.float32)) for _ in range(2)]
    for module in experts[: given["converted"]]:
        module.needs_fsdp = given["needs_fsdp"]
    if "shards" in given:
        experts[0] = Mock(parameters=lambda recurse: [Mock(spec=DTensor)])
    shape = given["ranks"]
    mesh = SimpleNamespace(size=lambda: shape[0] * shape[1], shape=shape, mesh_dim_names=("dp_replicate", "efsdp"))
    reason = why_fsdp(experts, {"edp_mesh": mesh, "dp_mesh": mesh} | given)
    assert says in reason and bool(says) == bool(reason)
