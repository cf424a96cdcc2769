"""The conversion of a model: the classes of the modules that ``choose`` names are swapped."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module

import torch
from torch import nn

from titan_mxfp8 import backends
from titan_mxfp8.arguments import check_type
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.logs import count_of, log_once
from titan_mxfp8.modules.choose import (
    EXPERT_CLASSES,
    LINEAR_CLASSES,
    Choice,
    choose_experts,
    choose_linears,
    class_name,
)
from titan_mxfp8.modules.converted import ConvertedModule, MXConfig, own_code
from titan_mxfp8.modules.linear import MXFP8Linear
from titan_mxfp8.modules.override import OverriddenForward, override_class
from titan_mxfp8.recipe import AUTO, BF16, Recipe

logger = logging.getLogger(__name__)


class Conversion(list[str]):
    """The names of the converted modules; as a string the ``report``, what the log says of them."""

    def __init__(self, names: Iterable[str], report: str) -> None:
        super().__init__(names)
        self.report = report

    def __str__(self) -> str:
        return self.report


@contextmanager
def _errors_of(function: str, model: nn.Module) -> Iterator[None]:
    """Within, errors begin with a function's name. Raises ValueError of a model that is no ``nn.Module``."""
    try:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"takes a model, a torch.nn.Module, got {class_name(model)}: load saved weights into a model and "
                "convert that; convert several models one by one"
            )
        yield
    except ValueError as error:
        raise ValueError(f"{function}: {error}") from error.__cause__


def convert_model(
    model: nn.Module,
    *,
    recipe: str | Recipe = AUTO,
    grouped_fqns: Iterable[str] = (),
    linear_filter_fqns: Iterable[str] = (),
    backend: str = "auto",
    rebase: bool = False,
    requantize_input: bool = False,
) -> Conversion:
    """Converts a model in place: linears, and the expert modules that ``grouped_fqns`` names.

    A part of a name stands for every name that has it; ``gate$`` for the names that end so, which ``gate_proj`` does
    not. What is saved is the unconverted model: one that is loaded anew is to be converted again.

    Args:
        model: any module tree, on the device that it will run on, for which kernels are chosen, or on meta.
        recipe: a key of ``RECIPES``, a ``Recipe``, or ``auto``: what is recommended for the hardware.
        grouped_fqns: parts of the names of expert modules: modules with 3-D parameters of their own whose forward calls
            ``torch._grouped_mm``. Empty: none, and the report names those that the model has.
        linear_filter_fqns: parts of the names of ``nn.Linear`` modules to leave alone, such as the output layer,
            besides those that ``convert_linears`` leaves alone by itself.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: take the recipe's rebased form, as for ``mxfp8_grouped_mm``.
        requantize_input: keep inputs for backward as FP8 rows where forward multiplies those, as for
            ``mxfp8_grouped_mm``.

    Returns:
        The names of the converted modules, as a list that ``print`` shows as a report: what the log says at level INFO.

    Raises:
        ValueError: nothing converted, or no expert module though ``grouped_fqns`` names some, an unknown recipe or
            backend, recipe ``bf16``, which quantises nothing, a backend without ``rebase``, expert features that are no
            multiple of 32, experts of Transformers, or of a model's remote code, that never call
            ``torch._grouped_mm``, or a class that refuses to be derived from. The model is then as it was.
    """
    with _errors_of("convert_model", model):
        if recipe in (BF16, BF16.name):
            raise ValueError(
                f"recipe {BF16.name!r} quantises nothing: leave the model as it is, or name an MXFP8 recipe"
            )
        config, chosen = _config(model, recipe, backend, rebase, requantize_input)
        grouped_fqns = as_list(grouped_fqns, "grouped_fqns")
        experts = choose_experts(model, grouped_fqns, "grouped_fqns")
        if grouped_fqns:
            _check_any(experts, f"expert module matches grouped_fqns {grouped_fqns} and is still to be converted")
        linears = choose_linears(model, as_list(linear_filter_fqns, "linear_filter_fqns"), "linear_filter_fqns")
        if not grouped_fqns:
            _check_any(linears, "nn.Linear was converted")
        return _convert(model, [experts, linears] if grouped_fqns or experts.left else [linears], config, chosen)


def convert_linears(model: nn.Module, *, filter_fqns: Iterable[str] = (), **options: object) -> Conversion:
    """Converts every ``nn.Linear`` whose name has none of ``filter_fqns`` as a part, or, of ``gate$``, at its end.

    Left as they are, and named in the report: linears whose in or out features are not a multiple of 32; routers (in a
    child whose class is named a router, or which is named ``gate`` or ``router`` and has experts beside it) and the
    linears of LoRA adapters (below a part of the name that begins with ``lora_``), as a few columns gain nothing, and
    the choice of experts is sensitive; subclasses of ``nn.Linear``, which have a forward of their own; what
    ``nn.MultiheadAttention`` multiplies with itself. Of a module's several names ``filter_fqns`` needs one.

    ``options`` are ``recipe``, ``backend``, ``rebase`` and ``requantize_input`` of ``convert_model``. Returns the names
    of the converted modules, and a report. Raises ValueError if nothing was converted, with the reason for each.
    """
    with _errors_of("convert_linears", model):
        config, chosen = _config(model, **options)
        linears = choose_linears(model, as_list(filter_fqns, "filter_fqns"), "filter_fqns")
        _check_any(linears, "nn.Linear was converted")
        return _convert(model, [linears], config, chosen)


def convert_experts(model: nn.Module, *, fqns: Iterable[str], **options: object) -> Conversion:
    """Converts the expert modules whose name has one of ``fqns`` as a part, or, of ``experts$``, at its end.

    An expert module holds 3-D parameters of its own; the linears of ``shared_experts``, which the name matches too, are
    none. A class of ``EXPERT_CLASSES`` gets the MXFP8 class found there; in any other, the calls of
    ``torch._grouped_mm`` are replaced, also where ``torch.utils.checkpoint`` in its forward computes them again, for
    which this patches torch.

    ``options``, the result and errors are those of ``convert_linears``. ValueError too where an expert's features are
    no multiple of 32, or experts of Transformers or of remote code never call ``torch._grouped_mm``.
    """
    with _errors_of("convert_experts", model):
        config, chosen = _config(model, **options)
        fqns = as_list(fqns)
        experts = choose_experts(model, fqns, "fqns")
        _check_any(experts, f"expert module matches fqns {fqns} and is still to be converted")
        return _convert(model, [experts], config, chosen)


def _check_any(choice: Choice, what: str) -> None:
    if not choice.modules:
        raise ValueError(f"no {what}. The model's {choice.kind}s: {choice.listing()}")


def _convert(model: nn.Module, choices: list[Choice], config: MXConfig, chosen: str) -> Conversion:
    """Swaps the classes. ``chosen``, of ``_config``, is the report's first line."""
    modules = {fqn: module for choice in choices for fqn, module in choice.modules.items()}
    classes = []  # all of them before the first is swapped
    for fqn, module in modules.items():
        try:
            classes.append(_converted_class(type(module), config))
        except Exception as error:  # of whatever kind: the user's class may refuse to be derived from
            raise ValueError(f"no class can be derived from {class_name(module)}, that of {fqn}: {error}") from error
    for (fqn, module), cls in zip(modules.items(), classes, strict=True):
        # a __setattr__ of the user's may refuse
        object.__setattr__(module, "mxfp8_fqn", fqn or class_name(module))  # errors begin with it
        object.__setattr__(module, "__class__", cls)
    report = [chosen]
    for choice in choices:
        count = count_of(len(choice.modules), choice.kind)
        how = f"recipe {config.recipe.name}, backend {config.backend}"
        report.append(f"MXFP8: converted {count} ({how}); left: {choice.listing()}")
        logger.info(report[-1])
    _disable_fast_paths(model)
    return Conversion(modules, "\n".join(report))


def _converted_class(cls: type[nn.Module], config: MXConfig) -> type[nn.Module]:
    base = LINEAR_CLASSES.get(cls) or EXPERT_CLASSES.get(cls) or override_class(cls)
    return _configured_class(base, cls, config)


@cache
def _configured_class(base: type[nn.Module], cls: type[nn.Module], config: MXConfig) -> type[nn.Module]:
    bases = (base,) if issubclass(base, ConvertedModule) else (ConvertedModule, base)
    members = {"mxfp8": config, "mxfp8_converted_from": cls, "__reduce__": _reduce, "__module__": base.__module__}
    if not issubclass(base, OverriddenForward):  # which is never compiled
        members["forward"] = own_code(base.forward)
    return type(base.__name__, bases, members)


def _reduce(module: nn.Module) -> tuple:
    """For pickle and deepcopy, which would look for the class by its name: it is made at run time."""
    return _empty_module, (module.mxfp8_converted_from, module.mxfp8, module.__module__), module.__getstate__()


def _empty_module(cls: type[nn.Module], config: MXConfig, registers: str = __name__) -> nn.Module:
    with suppress(ImportError):  # another process may not know the MXFP8 class of ``cls`` yet
        import_module(registers)
    converted = _converted_class(cls, config)
    return converted.__new__(converted)


def _disable_fast_paths(model: nn.Module) -> None:
    """Keeps torch's encoder layers from reading the weights of converted linears past their forward: in eval mode and
    without gradients the whole layer is one operator, unless its activation is one that this operator lacks. A whole
    encoder makes nested tensors for it."""
    for module in model.modules():
        converted = any(isinstance(part, MXFP8Linear) for part in module.modules())
        if converted and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif converted and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def training_device() -> torch.device:
    """The device of this process's training: its accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def as_list(fqns: Iterable[str] | str, argument: str = "fqns") -> list[str]:
    """A list of name parts. A plain string, as TOML may have it, is comma-separated, not a list of letters. An error
    calls it ``argument``."""
    parts = fqns.split(",") if isinstance(fqns, str) else list(fqns) if isinstance(fqns, Iterable) else fqns
    check_type(argument, parts, list[str])
    return [part.strip() for part in parts if part.strip()]  # an empty part would match every name


def _config(
    model: nn.Module,
    recipe: str | Recipe = AUTO,
    backend: str = "auto",
    rebase: bool = False,
    requantize_input: bool = False,
) -> tuple[MXConfig, str]:
    """The config of all modules that one call converts, and the log line that says what was chosen."""
    check_type("requantize_input", requantize_input, bool)
    check_type("backend", backend, str)
    param = next(model.parameters(), None)
    on_meta = param is None or param.device.type == "meta"  # it will run where this process trains
    asked, hardware = recipe, hardware_of(training_device() if on_meta else param.device)
    recipe = backends.recommend(asked, backend, hardware, rebase)
    selection = backends.select(backend, hardware, recipe)
    plan = backends.plan_on(recipe, selection.name, hardware)
    chosen = f"MXFP8: recipe {recipe.name}, backend {selection.name} ({selection.reason}); MMA {plan}"
    logger.info(chosen)
    if explanation := backends.explain(asked, recipe, selection.name, hardware):
        log_once(logger, f"MXFP8: {explanation}")
    if selection.warning:
        logger.warning(f"MXFP8: {selection.warning}")
    if backend == "auto" and hardware.arch == "cpu" and training_device().type == "cuda":
        logger.warning(
            "MXFP8: the model is on a CPU, so recipe and backend are those of a CPU, and stay so when it moves to the "
            "GPU, where they are slow: convert it after model.to('cuda'), or while it is on meta. To train on the CPU "
            "name backend='reference'"
        )
    if requantize_input and plan.forward.a.stored == "bf16":
        logger.warning(
            f"MXFP8: requantize_input changes nothing, as forward multiplies bf16 values with recipe {recipe.name} on "
            f"backend {selection.name}: leave it out, or take a recipe whose forward multiplies FP8"
        )
    return MXConfig(recipe=recipe, backend=selection.name, plan=plan, requantize_input=requantize_input), chosen
