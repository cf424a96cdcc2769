"""Which modules of a model are converted, and their conversion."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from titan_mxfp8 import backends
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.modules import hugging_face
from titan_mxfp8.modules.converted import ConvertedModule, MXConfig, own_code
from titan_mxfp8.modules.linear import MXFP8Linear
from titan_mxfp8.modules.override import OverriddenForward, override_class
from titan_mxfp8.recipe import BF16, Recipe, get_recipe

logger = logging.getLogger(__name__)

# Expert classes with an MXFP8 class of their own, derived from them, which finds its ``op_options`` (ConvertedModule);
# the plugin enters TorchTitan's.
EXPERT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
# Linears, and the MXFP8 class of each: titan03 enters TorchTitan 0.3's, which is a subclass of nn.Linear.
LINEAR_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: MXFP8Linear}


class Conversion(list[str]):
    """The names of the converted modules; as a string, what the log says of them.

    Attributes:
        report: that string.
    """

    def __init__(self, names: Iterable[str], report: str) -> None:
        super().__init__(names)
        self.report = report

    def __str__(self) -> str:
        return self.report


def convert_model(
    model: nn.Module,
    *,
    recipe: str | Recipe = "mxfp8",
    grouped_fqns: Iterable[str] = (),
    linear_filter_fqns: Iterable[str] = (),
    backend: str = "auto",
    rebase: bool = False,
    requantize_input: bool = False,
) -> Conversion:
    """Converts a model in place: linears, and the expert modules that ``grouped_fqns`` names.

    For users without TorchTitan. ``convert_linears`` and ``convert_experts`` do one of the two. A part of a name stands
    for every name that has it; ``gate$`` for the names that end so, which ``gate_proj`` does not. What is saved is the
    unconverted model: one that is loaded anew is to be converted again.

    Args:
        model: any module tree, on any device, meta included.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        grouped_fqns: parts of the names of expert modules: modules with 3-D parameters of their own whose forward calls
            ``torch._grouped_mm``. Empty: none.
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
            multiple of 32, or experts of Transformers, or of a model's remote code, that never call
            ``torch._grouped_mm``. The model is then as it was.
    """
    if get_recipe(recipe) == BF16:
        raise ValueError(f"recipe {BF16.name!r} quantises nothing: leave the model as it is, or name an MXFP8 recipe")
    config, chosen = _config(recipe, backend, model, rebase, requantize_input=requantize_input)
    grouped_fqns = as_list(grouped_fqns)
    experts = [_choose_experts(model, grouped_fqns)] if grouped_fqns else []
    linears = _choose_linears(model, as_list(linear_filter_fqns), at_least_one=not grouped_fqns)
    return _convert(model, [*experts, linears], config, chosen)


def convert_linears(
    model: nn.Module,
    *,
    recipe: str | Recipe,
    filter_fqns: Iterable[str] = (),
    backend: str = "auto",
    rebase: bool = False,
    requantize_input: bool = False,
) -> Conversion:
    """Converts every ``nn.Linear`` whose name has none of ``filter_fqns`` as a part, or, of ``gate$``, at its end.

    One whose in or out features are not a multiple of 32 stays as it is, with a log line that names it. So do routers
    (in a child whose class is named a router, or which is named ``gate`` or ``router`` and has experts beside it) and
    the linears of LoRA adapters (below a part of the name that begins with ``lora_``): a few columns gain nothing, and
    the choice of experts is sensitive. Subclasses of ``nn.Linear`` have a forward of their own and stay as they are
    too, and so does what ``nn.MultiheadAttention`` multiplies with itself. A module with several names is left alone if
    ``filter_fqns`` has one of them.

    Returns:
        The names of the converted modules, and a report.

    Raises:
        ValueError: nothing was converted; the message says why each candidate was not.
    """
    config, chosen = _config(recipe, backend, model, rebase, requantize_input=requantize_input)
    return _convert(model, [_choose_linears(model, as_list(filter_fqns))], config, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a conversion will change, found before it changes anything: an error leaves the whole model as it was.

    Attributes:
        kind: what the modules are, in words.
        modules: those to convert, by name.
        left: names of those of this kind that stay as they are, and why each does.
    """

    kind: str
    modules: dict[str, nn.Module]
    left: dict[str, str]


def _choose_linears(model: nn.Module, filter_fqns: list[str], at_least_one: bool = True) -> _Choice:
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    read_by_attention = {child for attention in attentions for child in attention.children()}
    routers = _routers(model)
    chosen: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for module, names in _names(model).items():
        if not isinstance(module, nn.Linear):
            continue
        fqn = names[0]
        filtered = next(((name, part) for name in names for part in filter_fqns if _matches(name, part)), None)
        if isinstance(module, ConvertedModule):
            left[fqn] = "converted already"
        elif filtered is not None:
            name, part = filtered
            left[fqn] = f"{'' if name == fqn else f'also named {name}, and '}filter_fqns has {part!r}"
        elif module in routers:
            left[fqn] = "router"
        elif any(part.startswith("lora_") for part in fqn.split(".")):
            left[fqn] = "LoRA adapter"
        elif type(module) not in LINEAR_CLASSES:
            left[fqn] = f"{type(module).__name__}, not nn.Linear itself"
        elif "forward" in vars(module):
            left[fqn] = "has a forward of its own, as from accelerate's hooks: convert before they are added"
        elif module in read_by_attention:
            left[fqn] = "nn.MultiheadAttention reads its weight itself"
        elif module.in_features % BLOCK_SIZE or module.out_features % BLOCK_SIZE:
            shape = f"{module.in_features} -> {module.out_features}"
            logger.info(f"MXFP8: {fqn} stays in high precision, {shape} features are not multiples of {BLOCK_SIZE}")
            left[fqn] = f"{shape} features, not multiples of {BLOCK_SIZE}"
        else:
            chosen[fqn] = module
    if at_least_one and not chosen:
        raise ValueError(f"MXFP8: no nn.Linear was converted. The model's linears: {_listing(left)}")
    return _Choice(kind="Linear", modules=chosen, left=left)


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The modules with all of their names: one that is registered twice has two."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    return names


def _matches(name: str, part: str) -> bool:
    """Whether a module's name has ``part`` in it, or at its end where ``part`` ends with a dollar sign."""
    return name.endswith(part[:-1]) if part.endswith("$") else part in name


def _routers(model: nn.Module) -> set[nn.Module]:
    """The modules that choose experts, with all that they hold."""
    routers = set()
    for parent in model.modules():
        children = dict(parent.named_children())
        beside_experts = any("expert" in name or is_expert_module(child) for name, child in children.items())
        for name, child in children.items():
            if type(child).__name__.endswith("Router") or (beside_experts and name in ("gate", "router")):
                routers.update(child.modules())
    return routers


def convert_experts(
    model: nn.Module,
    *,
    recipe: str | Recipe,
    fqns: Iterable[str],
    backend: str = "auto",
    rebase: bool = False,
    requantize_input: bool = False,
) -> Conversion:
    """Converts the expert modules whose name has one of ``fqns`` as a part, or, of ``experts$``, at its end.

    An expert module holds 3-D parameters of its own. A class of ``EXPERT_CLASSES`` gets the MXFP8 class found there; in
    any other, the calls of ``torch._grouped_mm`` are replaced, also where ``torch.utils.checkpoint`` in its forward
    computes them again, for which this patches torch. A module that only the name matches, such as the linears of
    ``shared_experts``, is not an expert module and stays as it is.

    Returns:
        The names of the converted modules, and a report.

    Raises:
        ValueError: nothing was converted, expert features that are not a multiple of 32, or experts of Transformers,
            or of a model's remote code, that never call ``torch._grouped_mm``.
    """
    config, chosen = _config(recipe, backend, model, rebase, requantize_input)
    return _convert(model, [_choose_experts(model, as_list(fqns))], config, chosen)


def _choose_experts(model: nn.Module, fqns: list[str]) -> _Choice:
    chosen: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for module, names in _names(model).items():
        if not is_expert_module(module):
            continue
        fqn = names[0]
        if isinstance(module, ConvertedModule):
            left[fqn] = "converted already"
            continue
        if not any(_matches(name, part) for name in names for part in fqns):
            left[fqn] = type(module).__name__
            continue
        if type(module) not in EXPERT_CLASSES and (why := hugging_face.refusal(module)):
            raise ValueError(f"MXFP8: {fqn} {why}")
        if "forward" in vars(module):
            raise ValueError(
                f"MXFP8: {fqn} has a forward of its own, as from accelerate's hooks, which conversion cannot reach: "
                "convert before such hooks are added, or leave this module out of fqns"
            )
        for name, param in module.named_parameters(recurse=False):
            if param.ndim == 3 and (param.shape[1] % BLOCK_SIZE or param.shape[2] % BLOCK_SIZE):
                raise ValueError(
                    f"MXFP8: {fqn}.{name} has shape {tuple(param.shape)}, but the features of an expert must be "
                    f"multiples of {BLOCK_SIZE}: change the model's sizes, or leave this module out of fqns"
                )
        chosen[fqn] = module
    if not chosen:
        raise ValueError(
            f"MXFP8: no expert module matches fqns {fqns} and is still to be converted. The model's expert modules: "
            f"{_listing(left)}"
        )
    return _Choice(kind="expert module", modules=chosen, left=left)


def _convert(model: nn.Module, choices: list[_Choice], config: MXConfig, chosen: str) -> Conversion:
    """Swaps the classes. ``chosen``, of ``_config``, is the report's first line."""
    report = [chosen]
    for choice in choices:
        for fqn, module in choice.modules.items():
            module.mxfp8_fqn = fqn or type(module).__name__  # errors begin with it
            module.__class__ = _converted_class(type(module), config)
        count = f"{len(choice.modules)} {choice.kind}{'s' * (len(choice.modules) != 1)}"
        report.append(
            f"MXFP8: converted {count} (recipe {config.recipe.name}, backend {config.backend}); "
            f"left: {_listing(choice.left)}"
        )
        logger.info(report[-1])
    _disable_fast_paths(model)
    return Conversion((fqn for choice in choices for fqn in choice.modules), "\n".join(report))


def _converted_class(cls: type[nn.Module], config: MXConfig) -> type[nn.Module]:
    """The class that a module of ``cls`` gets."""
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
    return _empty_module, (module.mxfp8_converted_from, module.mxfp8), module.__getstate__()


def _empty_module(cls: type[nn.Module], config: MXConfig) -> nn.Module:
    converted = _converted_class(cls, config)
    return converted.__new__(converted)


def _disable_fast_paths(model: nn.Module) -> None:
    """Keeps torch's encoder layers from reading the weights of converted linears past their forward.

    In eval mode and without gradients the whole layer is one operator on its weights, unless its activation is one that
    this operator lacks, which these attributes say. A whole encoder makes nested tensors for it.
    """
    for module in model.modules():
        is_layer, is_encoder = (isinstance(module, cls) for cls in (nn.TransformerEncoderLayer, nn.TransformerEncoder))
        if (is_layer or is_encoder) and any(isinstance(part, MXFP8Linear) for part in module.modules()):
            if is_layer:
                module.activation_relu_or_gelu = 0
            else:
                module.use_nested_tensor = False


def is_expert_module(module: nn.Module) -> bool:
    """Whether the module holds 3-D parameters of its own, one matrix per expert."""
    return any(param.ndim == 3 for param in module.parameters(recurse=False))


def training_device() -> torch.device:
    """The device of this process's training: its accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def as_list(fqns: Iterable[str] | str) -> list[str]:
    """A list of name parts. A plain string, as TOML may have it, is comma-separated, not a list of letters."""
    parts = fqns.split(",") if isinstance(fqns, str) else fqns
    return [part.strip() for part in parts if part.strip()]  # an empty part would match every name


def _config(
    recipe: str | Recipe,
    backend: str,
    model: nn.Module,
    rebase: bool,
    requantize_input: bool = False,
) -> tuple[MXConfig, str]:
    """The config of all modules that one call converts, and the log line that says what was chosen."""
    recipe, hardware = get_recipe(recipe, rebase), hardware_of(_device(model))
    selection = backends.select(backend, hardware, recipe)
    plan = backends.plan_on(recipe, selection.name, hardware)
    chosen = f"MXFP8: recipe {recipe.name}, backend {selection.name} ({selection.reason}); MMA {plan}"
    logger.info(chosen)
    if selection.warning:
        logger.warning(f"MXFP8: {selection.warning}")
    if requantize_input and plan.forward.a.stored == "bf16":
        logger.warning(
            f"MXFP8: requantize_input changes nothing, as forward multiplies bf16 values with recipe {recipe.name} on "
            f"backend {selection.name}: leave it out, or take a recipe whose forward multiplies FP8"
        )
    return MXConfig(recipe=recipe, backend=selection.name, plan=plan, requantize_input=requantize_input), chosen


def _device(model: nn.Module) -> torch.device:
    """Where the model will run: where it is, or for a model on meta the training device."""
    param = next(model.parameters(), None)
    on_meta = param is None or param.device.type == "meta"
    return training_device() if on_meta else param.device


def _listing(left: dict[str, str], most: int = 8) -> str:
    """Names by why they are left, at most so many of each."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    shown = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        shown.append(f"{', '.join(names[:most])}{more} ({reason})")
    return ", ".join(shown) or "none"
