"""The symptom that each workaround is for in TorchTitan 0.3 as it is installed: a test that fails here says that a
workaround is needed no longer. A workaround without a check fails too.

``tests/test_workarounds.py`` has those of torch alone. ``draw_full_tensor_at_random_init`` is one of them, though no
run without a TorchTitan needs it.
"""

import pytest
from symptoms import look

from titan_mxfp8.workarounds import TITAN03, WORKAROUNDS

pytestmark = [pytest.mark.integration, pytest.mark.nightly]  # it changes with the versions of torch and TorchTitan

# Without the adapter: each check says what it found.
SYMPTOMS = """
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock
from symptoms import log_offline_where_wandb_is_out_of_reach, one_rank, symptom, use_cpu_device
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config.override import OverrideConfig, apply_overrides, override
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.models import deepseek_v3
from torchtitan.models.common import attention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.model import BaseModel

symptom(use_cpu_device)
symptom(log_offline_where_wandb_is_out_of_reach)

@override(target=BaseModel.Config)
def whole_model(config):
    return config

@override(target=FeedForward.Config)
def part(config):
    return config

@symptom
def let_parts_be_overridden_too():
    root = SimpleNamespace(traverse=deepseek_v3.model_registry("debugmodel", attn_backend="varlen").traverse)
    apply_overrides(OverrideConfig(imports=["__main__.whole_model", "__main__.part"]), root)

@symptom
def set_timeouts_of_process_groups():
    one_rank()
    dist_utils.device_module = SimpleNamespace(current_device=lambda: 0, synchronize=lambda: None)
    meshes = SimpleNamespace(get_all_one_dimensional_meshes=dict)
    dist_utils.set_pg_timeouts(timedelta(seconds=9), meshes)

qkv = [torch.ones(1, 4, 16, 16, requires_grad=True) for _ in range(3)]

@symptom
def attend_without_cuda():
    ends = torch.tensor([0, 16], dtype=torch.int32)
    attention.varlen_attn(*(x[0].mT.transpose(0, 1) for x in qkv), ends, ends, 16, 16)

@symptom
def attend_with_flex_attention():
    flex_attention(*qkv)

@symptom
def reduce_gradients_by_sum():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    disable_fsdp_gradient_division(model)
    with mock.patch.object(dist, "reduce_scatter_single") as reduce_scatter:  # FSDP's, of torch 2.13
        model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    one_rank()
    dist.all_reduce(torch.ones(1), op=reduce_scatter.call_args.kwargs["op"])
"""


@pytest.fixture(scope="module")
def symptoms() -> dict[str, str]:
    return look(SYMPTOMS)


FOUND = {
    "let_parts_be_overridden_too": "an ancestor of",
    "set_timeouts_of_process_groups": "has no attribute 'set_timeout'",
    "attend_without_cuda": "aten::_flash_attention_forward",
    "attend_with_flex_attention": "does not support backward on CPU",
    "use_cpu_device": "cuda",
    "log_offline_where_wandb_is_out_of_reach": "no network",
    "reduce_gradients_by_sum": "PREMUL_SUM",
}


@pytest.mark.parametrize("workaround, symptom", FOUND.items())
def test_the_symptom_without_its_workaround(symptoms: dict[str, str], workaround: str, symptom: str) -> None:
    assert symptom in symptoms[workaround]


def test_each_workaround_has_a_check() -> None:
    elsewhere = {"draw_full_tensor_at_random_init"}
    wanted = {row.name for row in WORKAROUNDS if TITAN03 in row.torchtitan}
    assert FOUND.keys() - {"attend_with_flex_attention"} | elsewhere == wanted
