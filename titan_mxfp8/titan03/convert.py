"""TorchTitan's converters: a model config whose model is converted as soon as it is built."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.trainer import Trainer

from titan_mxfp8 import modules
from titan_mxfp8.arguments import check_types
from titan_mxfp8.backends import recommend
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.recipe import AUTO
from titan_mxfp8.titan import telemetry
from titan_mxfp8.titan.dispatch import dispatches, local
from titan_mxfp8.titan.fields import SAVED, Dispatch, Once, check_fields, compiles_model
from titan_mxfp8.titan.once import quantize_once
from titan_mxfp8.titan.rerun import watch_steps
from titan_mxfp8.titan03.cuda_graph import CONVERTED
from titan_mxfp8.titan03.moe import dispatch_tokens, expert_class, weights_of
from titan_mxfp8.workarounds.patch import around

# The whole config while a trainer is made, which builds the model; None elsewhere.
_trainer_config: ContextVar[Trainer.Config | None] = ContextVar("trainer_config", default=None)


class _Converter(QuantizationConverter):
    """What both converters do. Raises ValueError: a field of another type, an unknown recipe, or periods that are none.
    When the model is built: as ``modules.convert_experts``, ``convert_linears``."""

    kind: str
    dispatches = False

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = AUTO
        backend: str = "auto"
        requantize_input: bool = False
        health_every: int = 0
        hopper_rebase_report: int = 0

    def __init__(self, config: QuantizationConverter.Config) -> None:
        check_types(config)
        self.recipe = recommend(config.recipe, config.backend, hardware_of(modules.training_device()))
        check_fields(self.recipe, self.kind, self.dispatches, config.health_every, config.hopper_rebase_report)
        self.config = config

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """Has the model that ``model_config`` builds converted, after what other conversions it has; gives it back. Its
        class is swapped: TorchTitan's trainer takes it out of the whole config before it applies overrides. Raises
        ValueError: a second conversion of experts, whose layers share their dispatch."""
        cls = type(model_config)
        if self.kind == "experts" and self.kind in getattr(cls, CONVERTED, ()):
            raise ValueError(
                "this model's experts have a converter or an override already: let that one's fqns name them all"
            )

        def build(own: BaseModel.Config, **kwargs: object) -> nn.Module:
            model, config = cls.build(own, **kwargs), self.config
            options = {"backend": config.backend, "requantize_input": config.requantize_input}
            converted = self.convert_modules(model, recipe=config.recipe, **options)
            telemetry.attach(model, converted, self.kind, config.health_every, config.hopper_rebase_report)
            return model

        def to_dict(own: BaseModel.Config) -> dict:
            """What a run saves of its config says what is converted, too; by a second converter of linears as
            ``linears_2``."""
            saved, number = cls.to_dict(own), getattr(cls, CONVERTED, ()).count(self.kind) + 1
            name = self.kind if number == 1 else f"{self.kind}_{number}"
            return saved | {"mxfp8": saved.get("mxfp8", {}) | {name: self.config.to_dict()}}

        def reduce(own: BaseModel.Config, protocol: int) -> tuple:
            """For pickle and deepcopy, which would look for the class by its name: it is made at run time."""
            return self.convert, (cls.__new__(cls),), object.__reduce_ex__(own, 2)[2]

        qualname = f"MXFP8{cls.__qualname__.removeprefix('MXFP8')}"  # TorchTitan logs it
        members = {"__slots__": (), "__qualname__": qualname, "build": build, "to_dict": to_dict}
        members |= {"__reduce_ex__": reduce, CONVERTED: (*getattr(cls, CONVERTED, ()), self.kind)}
        model_config.__class__ = type(cls.__name__, (cls,), members)
        return model_config


class MXFP8Experts(_Converter):
    """Converts the routed experts whose names have one of ``fqns`` as a part.

    With a ``dispatch`` (a transport of ``mxfp8_moe``) tokens travel to them as ``mxfp8_moe`` sends them. The other
    fields are arguments of ``modules.convert_experts``.
    """

    kind = "experts"

    @dataclass(kw_only=True, slots=True)
    class Config(_Converter.Config):
        fqns: Sequence[str] | str = ("experts",)
        dispatch: Dispatch = "auto"
        dispatch_rows: str | float = AUTO
        fsdp_fp8_all_gather: bool = True
        quantize_weights_once: Once = "auto"

    def __init__(self, config: Config) -> None:
        self.dispatches = dispatches(config.dispatch, config.dispatch_rows)
        super().__init__(config)

    def convert_modules(self, model: nn.Module, **options: object) -> list[str]:
        for module in model.modules():
            if isinstance(module, GroupedExperts):
                modules.EXPERT_CLASSES.setdefault(type(module), expert_class(type(module)))
        converted = modules.convert_experts(model, fqns=self.config.fqns, **options)
        for experts in map(model.get_submodule, converted):
            experts.fsdp_fp8_all_gather = self.config.fsdp_fp8_all_gather
            experts.quantize_weights_once = self.config.quantize_weights_once
        if self.dispatches:
            dispatch_tokens(model, converted, self.config.dispatch, self.config.dispatch_rows, _trainer_config.get())
        return converted


class MXFP8TitanLinear(modules.MXFP8Linear, Linear):
    """Takes the place of the class of a ``Linear``."""


class MXFP8ScaledBiasRowwiseLinear(modules.MXFP8Linear, ScaledBiasRowwiseLinear):
    """Takes the place of the class of a ``ScaledBiasRowwiseLinear``, gpt_oss's: each TP rank adds its share of bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = local(self.weight), local(self.bias)
        return self.mxfp8_linear(input, weight, bias / self.tp_degree)


modules.LINEAR_CLASSES |= {Linear: MXFP8TitanLinear, ScaledBiasRowwiseLinear: MXFP8ScaledBiasRowwiseLinear}


class MXFP8Linears(_Converter):
    """Converts the linears whose names have none of ``filter_fqns`` as a part. The fields are arguments of
    ``modules.convert_linears``."""

    kind = "linears"

    @dataclass(kw_only=True, slots=True)
    class Config(_Converter.Config):
        filter_fqns: Sequence[str] | str = ("lm_head", "router.gate")

    def convert_modules(self, model: nn.Module, **options: object) -> list[str]:
        return modules.convert_linears(model, filter_fqns=self.config.filter_fqns, **options)


def convert_config(
    converter: type[_Converter], model_config: BaseModel.Config, given: dict[str, object]
) -> BaseModel.Config:
    """What an override does: builds the converter of these fields, and converts. Raises ValueError: a field that the
    converter does not have, or as the converter."""
    names = [item.name for item in fields(converter.Config)]
    if unknown := set(given) - set(names):
        raise ValueError(f"{converter.kind} has no {', '.join(sorted(unknown))}: its fields are {', '.join(names)}")
    return converter.Config(**given).build().convert(model_config)


@contextmanager
def trainer_config(config: Trainer.Config) -> Iterator[None]:
    """Within, models are built for the trainer with this config."""
    token = _trainer_config.set(config)
    try:
        yield
    finally:
        _trainer_config.reset(token)


@around("torchtitan.trainer.Trainer.__init__")
def know_the_config(init: Any, trainer: Trainer, config: Trainer.Config) -> None:
    """Has the whole config of a trainer known while it builds the model, for the sizes of its batches, and its steps
    run again where rows did not fit, quantise weights once, and log what is measured."""
    with trainer_config(config):
        init(trainer, config)
    watch_steps(trainer)
    quantize_once(trainer, weights_of(trainer.model_parts, compiles_model(config)))
    telemetry.log_steps(trainer)


@around("torchtitan.distributed.activation_checkpoint.SelectiveAC.get_save_ops")
def save_outputs(get_save_ops: Any, checkpointing: Any) -> set:
    """Has selective activation checkpointing save the outputs of ``SAVED``."""
    return get_save_ops(checkpointing) | SAVED
