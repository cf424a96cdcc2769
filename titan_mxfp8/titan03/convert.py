"""TorchTitan's converters: a model config whose model is converted as soon as it is built."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel

import titan_mxfp8.ops.library  # noqa: F401 - registers torch.ops.titan_mxfp8
from titan_mxfp8 import modules
from titan_mxfp8.modules import Dispatch, as_list, telemetry
from titan_mxfp8.recipe import BF16, get_recipe
from titan_mxfp8.titan03.classes import LINEAR_CLASSES, expert_class
from titan_mxfp8.titan03.moe import dispatch_tokens, remember
from titan_mxfp8.workarounds.patch import is_patched, patch_of

# Of this process's run, for telemetry.
periods = {"health": 0, "experts": 0, "linears": 0}


class _Converter(QuantizationConverter):
    """What both converters do.

    Raises:
        ValueError: an unknown recipe, or periods that are none. When the model is built: as
            ``modules.convert_experts``, ``convert_linears``.
    """

    kind: str

    def __init__(self, config: QuantizationConverter.Config) -> None:
        for name in ("health_every", "hopper_rebase_report"):
            if getattr(config, name) < 0:
                raise ValueError(f"{name} is a number of steps, or 0 for never, got {getattr(config, name)}")
        if config.hopper_rebase_report and get_recipe(config.recipe).block_k == 32:
            raise ValueError("hopper_rebase_report says what rebasing changes: it takes a recipe that is rebased")
        if get_recipe(config.recipe) == BF16 and getattr(config, "dispatch", "off") == "off":
            raise ValueError(f"recipe {BF16.name!r} is the control of dispatch: without it, leave the {self.kind} out")
        self.config = config

    @abstractmethod
    def convert_model(self, model: nn.Module) -> None:
        """Converts modules of a model that has just been built, on meta."""

    def observe(self, model: nn.Module, converted: list[str]) -> None:
        """Prepares the converted modules for ``health_every`` and ``hopper_rebase_report``."""
        health, report = self.config.health_every, self.config.hopper_rebase_report
        periods["health"] = max(periods["health"], health)
        periods[self.kind] = report
        if health or report:
            telemetry.attach(model, converted)

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        """Has the model that ``model_config`` builds converted, after what other conversions it has; gives it back.

        It changes in place: TorchTitan's trainer takes it out of the whole config before it applies overrides. So its
        class is swapped, as a converted module's is.
        """
        cls = type(model_config)

        def build(own: BaseModel.Config, **kwargs: object) -> nn.Module:
            model = cls.build(own, **kwargs)
            self.convert_model(model)
            return model

        def update_from_config(own: BaseModel.Config, *, config: object, **kwargs: object) -> None:
            remember(config)
            cls.update_from_config(own, config=config, **kwargs)

        def to_dict(own: BaseModel.Config) -> dict:
            """What a run saves of its config says what is converted, too."""
            saved = cls.to_dict(own)
            return saved | {"mxfp8": saved.get("mxfp8", {}) | {self.kind: self.config.to_dict()}}

        qualname = f"MXFP8{cls.__qualname__.removeprefix('MXFP8')}"  # TorchTitan logs it
        members = {"__slots__": (), "__qualname__": qualname, "build": build, "to_dict": to_dict}
        members["update_from_config"] = update_from_config
        model_config.__class__ = type(cls.__name__, (cls,), members)
        return model_config


class MXFP8Experts(_Converter):
    """Converts the routed experts whose names have one of ``fqns`` as a part.

    With a ``dispatch`` (a transport of ``mxfp8_moe``) tokens travel to them as ``mxfp8_moe`` sends them. The other
    fields are arguments of ``modules.convert_experts``.
    """

    kind = "experts"

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "mxfp8"
        fqns: Sequence[str] | str = ("experts",)
        backend: str = "auto"
        requantize_input: bool = False
        health_every: int = 0
        hopper_rebase_report: int = 0
        dispatch: str = "auto"
        dispatch_rows: str = "counted"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.dispatch = None
        if config.dispatch != "off":
            self.dispatch = Dispatch(transport=config.dispatch, rows=config.dispatch_rows)

    def convert_model(self, model: nn.Module) -> None:
        config = self.config
        for module in model.modules():
            if isinstance(module, GroupedExperts):
                modules.EXPERT_CLASSES.setdefault(type(module), expert_class(type(module)))
        converted = modules.convert_experts(
            model,
            recipe=config.recipe,
            fqns=as_list(config.fqns),
            backend=config.backend,
            requantize_input=config.requantize_input,
        )
        if self.dispatch is not None:
            dispatch_tokens(model, self.dispatch, get_recipe(config.recipe))
        self.observe(model, converted)


class MXFP8Linears(_Converter):
    """Converts the linears whose names have none of ``filter_fqns`` as a part. The fields are arguments of
    ``modules.convert_linears``."""

    kind = "linears"

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        recipe: str = "mxfp8"
        filter_fqns: Sequence[str] | str = ("lm_head", "router.gate")
        backend: str = "auto"
        requantize_input: bool = False
        health_every: int = 0
        hopper_rebase_report: int = 0

    def convert_model(self, model: nn.Module) -> None:
        config = self.config
        modules.LINEAR_CLASSES.update(LINEAR_CLASSES)
        converted = modules.convert_linears(
            model,
            recipe=config.recipe,
            filter_fqns=as_list(config.filter_fqns),
            backend=config.backend,
            requantize_input=config.requantize_input,
        )
        self.observe(model, converted)


def log_telemetry() -> None:
    """Has every run that asks for it log health, and what rebasing changed. Safe to call again."""
    telemetry.install(MetricsProcessor, lambda processor: periods)


def save_gemm_outputs() -> None:
    """Has selective activation checkpointing save the outputs of the MXFP8 GEMMs, and of layers that dispatch their own
    tokens, as the plugin for 0.2.2 has it."""
    get_save_ops = SelectiveAC.get_save_ops
    if is_patched(get_save_ops):
        return

    @patch_of(get_save_ops)
    def get_save_ops_and_ours(self: SelectiveAC) -> set:
        ours = torch.ops.titan_mxfp8
        return get_save_ops(self) | {
            ours.gemm_m_grouped.default,
            ours.experts_forward.default,
            ours.moe_forward.default,
        }

    SelectiveAC.get_save_ops = get_save_ops_and_ours
