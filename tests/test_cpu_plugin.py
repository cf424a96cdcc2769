"""TorchTitan on a machine without accelerators, and the flavors for studies."""

import copy
import dataclasses
import re

import pytest
import torch
from torchtitan.config import JobConfig
from torchtitan.models.llama4 import Transformer as Llama4
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.moe import MoE
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec

import titan_mxfp8.plugin  # noqa: F401 - installs the workarounds
from titan_mxfp8.plugin import flavors
from titan_mxfp8.plugin.flavors import register_flavors
from titan_mxfp8.workarounds.cpu import CpuDevice


def test_peak_memory_follows_allocations() -> None:
    device = CpuDevice()
    gib = 1024**3
    big = torch.ones(gib // 4)  # fp32: 1 GiB
    peak = device.memory_stats()["reserved_bytes.all.peak"]
    assert peak > gib
    del big
    assert device.memory_stats()["active_bytes.all.peak"] >= peak, "the peak outlives the tensor"
    assert device.get_device_properties().total_memory > peak
    assert device.get_device_name()
    assert device.current_device() == 0
    device.synchronize()  # torch.cpu's own


# How many layers of each have MoE.
FEW_LAYERS = {
    "llama4": {"debugmodel_2layers": 1, "17bx16e_2layers": 2, "17bx16e_4layers": 4},
    "deepseek_v3": {"debugmodel_2layers": 1, "16B_2layers": 1, "16B_4layers": 3, "671B_2layers": 1},
    "qwen3": {"debugmodel_moe_2layers": 2, "30B-A3B_2layers": 2},
    "gpt_oss": {"debugmodel_2layers": 2, "20b_2layers": 2},
    "llama3": {"debugmodel_2layers": 0},
}
# What changes besides the number of layers.
CHANGES = {("deepseek_v3", "671B"): {"n_dense_layers"}, ("gpt_oss", "debugmodel"): {"vocab_size"}}


def configured(args: BaseModelArgs, seq_len: int = 32) -> BaseModelArgs:
    """A copy of a flavor's values, as the Trainer completes them from the config."""
    config = JobConfig()
    config.training.seq_len = seq_len
    args = copy.deepcopy(args)
    args.update_from_config(config)
    return args


@pytest.mark.parametrize("model, flavor", [(model, flavor) for model in FEW_LAYERS for flavor in FEW_LAYERS[model]])
def test_a_flavor_of_few_layers_has_its_moe_layers_and_keeps_the_rest(model: str, flavor: str) -> None:
    register_flavors()
    spec, (name, layers) = get_train_spec(model), re.fullmatch(r"(.*)_(\d)layers", flavor).groups()
    args, original = spec.model_args[flavor], spec.model_args[name]
    with torch.device("meta"):
        made = spec.model_cls(configured(args))
    assert len(made.layers) == int(layers)
    assert sum(isinstance(module, MoE) for module in made.modules()) == FEW_LAYERS[model][flavor]
    changed = {
        field.name for field in dataclasses.fields(args) if getattr(args, field.name) != getattr(original, field.name)
    }
    assert changed - {"max_seq_len", "moe_args"} == {"n_layers"} | CHANGES.get((model, name), set())
    if FEW_LAYERS[model][flavor]:
        assert args.moe_args is not original.moe_args, "update_from_config writes into it"


def test_the_small_moe_is_of_honest_size() -> None:
    register_flavors()
    with torch.device("meta"):
        model = Llama4(configured(llama4_args["moe_100m"]))
    assert sum(weight.numel() for weight in model.parameters()) == 111_174_144
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(experts) == 4 and {tuple(moe.experts.w1.shape) for moe in experts} == {(8, 1536, 512)}
    sizes = {size for name, weight in model.named_parameters() if "gate" not in name for size in weight.shape[-2:]}
    assert all(size % 128 == 0 for size in sizes)


def test_flavors_twice_and_over_a_flavor_of_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    register_flavors()
    ours = llama4_args["17bx16e_2layers"]
    ours_seq_len = ours.max_seq_len
    ours.max_seq_len = 256  # as a run does
    register_flavors()
    assert llama4_args["17bx16e_2layers"] is ours
    ours.max_seq_len = ours_seq_len
    monkeypatch.setattr(flavors, "_registered", [])
    with pytest.raises(ValueError, match="flavor 'moe_100m', which exists already"):
        register_flavors()
