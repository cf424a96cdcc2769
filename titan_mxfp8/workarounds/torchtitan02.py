"""Workarounds of TorchTitan 0.2.2."""

import logging
from typing import Any

import torch

from titan_mxfp8.workarounds.patch import TITAN02, around, workaround

_LLAMA4_ADAPTER = "torchtitan.models.llama4.model.state_dict_adapter.Llama4StateDictAdapter"
_MOE_ROUTER = "torchtitan.models.moe.moe.TokenChoiceTopKRouter"


@workaround(torchtitan=TITAN02)
@around(f"{_MOE_ROUTER}.init_weights")
def initialise_router_bias(init_weights: Any, router: Any, init_std: float) -> None:
    """A router of gpt_oss routes differently from run to run, or to NaN.

    It initialises the weight but not the bias, which keeps whatever the memory held. Here it starts from 0."""
    init_weights(router, init_std)
    if router.gate.bias is not None:
        torch.nn.init.zeros_(router.gate.bias)


@workaround(torchtitan=TITAN02)
@around("torchtitan.models.deepseek_v3.get_train_spec", "torchtitan.models.gpt_oss.get_train_spec")
def validate_every_model(get_train_spec: Any) -> Any:
    """An AssertionError without words where `validation.enable` is set for deepseek_v3 or gpt_oss.

    Its specs of llama3, llama4 and qwen3 name the validator, which is the same for all text models."""
    from torchtitan.components.validate import build_validator

    spec = get_train_spec()
    spec.build_validator_fn = spec.build_validator_fn or build_validator
    return spec


@workaround(torchtitan=TITAN02)
@around("torchtitan.components.validate.Validator.post_dataloading_process")
def validate_as_it_trains(prepare: Any, validator: Any, input_dict: dict, labels: Any, model_parts: list) -> tuple:
    """`assert attention_masks is None` where llama4 or deepseek_v3 is validated.

    Its trainer makes masks for flex and varlen attention only, its validator for every model that can make them."""
    inputs, labels, extra_inputs, extra_kwargs = prepare(validator, input_dict, labels, model_parts)
    if getattr(model_parts[0].model_args, "attn_type", "sdpa") not in ("flex", "varlen"):
        extra_kwargs.pop("attention_masks", None)
    return inputs, labels, extra_inputs, extra_kwargs


@workaround(torchtitan=TITAN02)
@around(f"{_LLAMA4_ADAPTER}.to_hf")
def export_contiguous_tensors(to_hf: Any, adapter: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`non contiguous tensor`: llama4's last save with `checkpoint.last_save_in_hf`.

    Experts' weights are transposed for Transformers, and safetensors takes no view. The tensors of a load, which are
    written to, come this way too: what is read into a copy comes back by ``from_hf``."""
    return {name: value.contiguous() for name, value in to_hf(adapter, state_dict).items()}


@workaround(torchtitan=TITAN02)
@around(f"{_LLAMA4_ADAPTER}.__init__")
def export_dense_layers(init: Any, adapter: Any, *args: Any) -> None:
    """Without a word, llama4's exports lack the feed-forward of its dense layers.

    17bx128e and the debug model have such layers. Nor would it be loaded from an export."""
    init(adapter, *args)
    for theirs, ours in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        name = f"language_model.model.layers.{{}}.feed_forward.{theirs}.weight"
        adapter.from_hf_map.setdefault(name, f"layers.{{}}.feed_forward.{ours}.weight")


@workaround(torchtitan=TITAN02, cpu=True)
@around("torchtitan.models.moe.utils.generate_permute_indices")
def permute_tokens_without_triton(generate_permute_indices: Any, *args: Any, **kwargs: Any) -> tuple:
    """`0 active drivers` from the Triton kernel that orders tokens by expert.

    It has a path for CPUs, which its one caller, `_permute` in moe/utils.py, never asks for. The function in
    moe/kernels.py stays as it is."""
    return generate_permute_indices(*args, **kwargs | {"use_cpu": True})


@workaround(torchtitan=TITAN02, cpu=True)
@around("torch.histc")
def count_integers_with_histc(histc: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`"histogram_cpu" not implemented for 'Long'` in the MoE router.

    The reorderer calls `torch.histc(...)` too. float64 counts exactly to 2**53."""
    if input.device.type != "cpu" or input.is_floating_point():
        return histc(input, *args, **kwargs)
    return histc(input.double(), *args, **kwargs).to(input.dtype)  # CUDA, too, answers in the input's dtype


@workaround(torchtitan=TITAN02, cpu=True)
@around("torch.profiler.profile.__init__")
def profile_without_device_activity(init: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
    """`profiling.enable_profiling` dies: TorchTitan passes an activity of None where there is no CUDA or XPU."""
    if activities is not None:
        activities = [activity for activity in activities if activity is not None]
    init(*args, activities=activities, **kwargs)


def _is_no_grouped_mm_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to use grouped mm")


@workaround("torchtitan.tools.logging.logger.filters", torchtitan=TITAN02, by_config=True)
def hide_grouped_mm_warning(hide: bool) -> None:
    """`Failed to use grouped mm, which is only supported on SM90 or later`, of converted experts.

    ``hide``: whether a parsed config converts experts, which never take the loop that the warning is about."""
    from torchtitan.tools.logging import logger

    change = logger.addFilter if hide else logger.removeFilter  # twice is as once
    change(_is_no_grouped_mm_warning)
