"""Workarounds of TorchTitan's validation."""

from collections.abc import Callable

import torch
from torchtitan.components.validate import Validator, build_validator
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.protocols.train_spec import TrainSpec

from titan_mxfp8.workarounds.patch import is_patched, patch_of


def validate_every_model() -> None:
    """Works around: an AssertionError without words where ``validation.enable`` is set for deepseek_v3 or gpt_oss.

    For: TorchTitan 0.2.2.

    Its specs of llama3, llama4 and qwen3 name the validator, which is the same for all text models.
    """
    for model in (deepseek_v3, gpt_oss):
        if is_patched(model.get_train_spec):
            continue

        @patch_of(model.get_train_spec)
        def with_validator(get_train_spec: Callable[[], TrainSpec] = model.get_train_spec) -> TrainSpec:
            spec = get_train_spec()
            spec.build_validator_fn = spec.build_validator_fn or build_validator
            return spec

        model.get_train_spec = with_validator


def validate_as_it_trains() -> None:
    """Works around: ``assert attention_masks is None`` in the attention of llama4 and deepseek_v3 when they are
    validated.

    For: TorchTitan 0.2.2.

    Its trainer makes masks for flex and varlen attention only, its validator for every model that can make them.
    """
    prepare = Validator.post_dataloading_process
    if is_patched(prepare):
        return

    @patch_of(prepare)
    def prepare_without_masks(
        self: Validator, input_dict: dict, labels: torch.Tensor, model_parts: list[torch.nn.Module]
    ) -> tuple:
        inputs, labels, extra_inputs, extra_kwargs = prepare(self, input_dict, labels, model_parts)
        if getattr(model_parts[0].model_args, "attn_type", "sdpa") not in ("flex", "varlen"):
            extra_kwargs.pop("attention_masks", None)
        return inputs, labels, extra_inputs, extra_kwargs

    Validator.post_dataloading_process = prepare_without_masks
