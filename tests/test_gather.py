"""FSDP's gather of experts in FP8 (``titan.gather``): bits, bytes, checkpoints, and who keeps the other gather."""

from types import SimpleNamespace

import processes
import pytest
import torch
from models import ROOT
from test_models import cpu_only
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from titan_mxfp8.plugin.experts import MXFP8GptOssGroupedExperts, MXFP8GroupedExperts
from titan_mxfp8.recipe import get_recipe
from titan_mxfp8.titan.gather import why_not
from titan_mxfp8.tools.dry_run import dry_run, parse_config


@pytest.mark.integration
@cpu_only
@pytest.mark.nightly
def test_gathered_in_fp8_the_losses_are_those_of_a_gather_in_fp32() -> None:
    processes.check(4, "parallel_gather.py")


def experts(recipe: str = "mxfp8_2d", cls: type = MXFP8GroupedExperts, on: bool = True) -> SimpleNamespace:
    """What ``why_not`` looks at."""
    config = SimpleNamespace(recipe=get_recipe(recipe))
    return SimpleNamespace(mxfp8=config, fsdp_fp8_all_gather=on, gathers=cls.gathers, mxfp8_converted_from=cls)


def shards(
    names: tuple[str, ...] = ("w1", "w3", "w2"), count: int = 8, axis: int = 0, ranks: int = 4, **others: object
) -> list[SimpleNamespace]:
    mesh = FSDPMeshInfo.__new__(FSDPMeshInfo)
    mesh.shard_mesh_size = ranks
    common = {
        "mesh_info": mesh,
        "post_forward_mesh_info": mesh,
        "offload_to_cpu": False,
        "fsdp_placement": SimpleNamespace(dim=axis),
        "_orig_size": torch.Size((count, 64, 96)),
        "sharded_param": SimpleNamespace(device_mesh=SimpleNamespace(mesh_dim_names=("fsdp", "ep"))),
    }
    return [SimpleNamespace(_module_info=SimpleNamespace(param_name=name), **common | others) for name in names]


REFUSED = {
    "one rank": (experts(), shards(ranks=1)),
    "one": (experts(), shards(mesh_info=DDPMeshInfo.__new__(DDPMeshInfo))),
    "quantises nothing": (experts("bf16"), shards()),
    "take different numbers": (experts("mxfp8_rebased"), shards()),
    "is off": (experts(on=False), shards()),
    "read their parameters": (experts(cls=MXFP8GptOssGroupedExperts), shards(("mlp1_weight", "mlp2_weight"))),
    "tensor parallelism": (
        experts(),
        shards(sharded_param=SimpleNamespace(device_mesh=SimpleNamespace(mesh_dim_names=("fsdp", "ep", "etp")))),
    ),
    "CPU offload": (experts(), shards(offload_to_cpu=True)),
    "resharded to fewer ranks": (experts(), shards(post_forward_mesh_info=object())),
    "hidden features": (experts(), shards(axis=1)),
    "do not divide 6 experts": (experts(), shards(count=6)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_who_keeps_the_other_gather(words: str) -> None:
    assert words in why_not(*REFUSED[words])
    assert not why_not(experts("mxfp8_2d_rebased"), shards())


def test_the_dry_run_counts_what_is_gathered() -> None:
    """Experts of the one MoE block: 1 byte and a scale for 32x32 instead of bf16's 2."""

    def gathered(*flags: str) -> float:
        flags = "--cluster.gpu=H200", "--cluster.gpus_per_node=2", *flags
        return dry_run(parse_config(f"{ROOT}/train_configs/debug_deepseek_v3.toml", flags)).memory.gathered

    field = "--quantize.grouped_mm.mx.no-fsdp_fp8_all_gather"
    elements = 3 * 8 * 256 * 256
    assert gathered(field) - gathered() == elements * (1 - 1 / 1024)
