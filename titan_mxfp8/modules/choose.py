"""Which modules of a model are converted: those of a kind, but for the first reason that holds for one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.logs import by_reason
from titan_mxfp8.modules import hugging_face
from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.modules.linear import MXFP8Linear

# Expert classes with an MXFP8 class of their own, derived from them, which finds its ``op_options`` (ConvertedModule);
# the plugin enters TorchTitan's.
EXPERT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
# Linears, and the MXFP8 class of each: titan03 enters TorchTitan 0.3's, which is a subclass of nn.Linear.
LINEAR_CLASSES: dict[type[nn.Linear], type[nn.Linear]] = {nn.Linear: MXFP8Linear}

# Words, with {} for what the test finds in a module of these names; it finds nothing where the reason does not hold.
Reason = tuple[str, Callable[[nn.Module, list[str]], object]]


@dataclass(slots=True, kw_only=True)
class Choice:
    """What a conversion will change, found before it changes anything: an error leaves the whole model as it was."""

    kind: str  # what the modules are, in words
    modules: dict[str, nn.Module] = field(default_factory=dict)  # those to convert, by name
    left: dict[str, str] = field(default_factory=dict)  # those that stay as they are, and why each does

    def listing(self, most: int = 8) -> str:
        """The names of ``left`` by reason, at most so many of each."""
        shown = []
        for reason, names in by_reason(self.left.items()).items():
            more = f" and {len(names) - most} more" if len(names) > most else ""
            shown.append(f"{', '.join(names[:most])}{more} ({reason})")
        return ", ".join(shown) or "none"


_ALREADY = ("converted already", lambda module, names: isinstance(module, ConvertedModule))
_NOT_OURS = (  # both replace a module's forward, past which its class cannot reach
    (
        "is split by Transformers' own tensor or expert parallelism: load the model without tp_plan, tp_size and "
        "distributed_config, convert it, then split it (fully_shard, parallelize_module)",
        lambda module, names: getattr(module, "_is_hooked", False),
    ),
    (
        "has a forward of its own, as from accelerate's hooks: convert before they are added",
        lambda module, names: "forward" in vars(module),
    ),
)


def choose_linears(model: nn.Module, filters: list[str], argument: str) -> Choice:
    """The linears to convert; ``argument`` is what the user calls ``filters``."""
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    read_by_attention = {child for attention in attentions for child in attention.children()}
    routers = _routers(model)

    def filtered(linear: nn.Linear, names: list[str]) -> str | None:
        for name, part in product(names, filters):
            if _matches(name, part):
                return f"also named {name}, and " * (name != names[0]) + f"{argument} has {part!r}"
        return None

    reasons = (
        _ALREADY,
        ("{}", filtered),
        ("router", lambda linear, names: linear in routers),
        ("LoRA adapter", lambda linear, names: any(part.startswith("lora_") for part in names[0].split("."))),
        ("{}, not nn.Linear itself", lambda linear, names: type(linear) not in LINEAR_CLASSES and class_name(linear)),
        *_NOT_OURS,
        ("nn.MultiheadAttention reads its weight itself", lambda linear, names: linear in read_by_attention),
        (
            f"{{0.in_features}} -> {{0.out_features}} features, not multiples of {BLOCK_SIZE}",
            lambda linear, names: (linear.in_features % BLOCK_SIZE or linear.out_features % BLOCK_SIZE) and linear,
        ),
    )
    return _choose("Linear", model, lambda module: isinstance(module, nn.Linear), reasons)


def choose_experts(model: nn.Module, fqns: list[str], argument: str) -> Choice:
    """The expert modules that ``fqns`` names, which the user calls ``argument``. Raises ValueError: one of them cannot
    be converted."""

    def unnamed(module: nn.Module, names: list[str]) -> str | None:
        return None if any(_matches(name, part) for name in names for part in fqns) else class_name(module)

    refused = (
        ("{}", lambda module, names: type(module) not in EXPERT_CLASSES and hugging_face.refusal(module)),
        *_NOT_OURS,
        ("{}", lambda module, names: _off_blocks(module)),
    )
    unless = "" if fqns else f", unless {argument} names it"
    choice = _choose("expert module", model, is_expert_module, (_ALREADY, ("{}" + unless, unnamed)))
    for fqn, module in choice.modules.items():
        if why := _first(refused, module, [fqn]):
            raise ValueError(f"{fqn} {why}; or leave this module out of {argument}")
    return choice


def _choose(
    kind: str, model: nn.Module, is_of_kind: Callable[[nn.Module], bool], reasons: tuple[Reason, ...]
) -> Choice:
    """Those for which no reason to leave them as they are holds. A module that is registered twice has two names."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    choice = Choice(kind=kind)
    for module in filter(is_of_kind, names):
        if why := _first(reasons, module, names[module]):
            choice.left[names[module][0] or class_name(module)] = why  # the whole model has no name
        else:
            choice.modules[names[module][0]] = module
    return choice


def _first(reasons: tuple[Reason, ...], module: nn.Module, names: list[str]) -> str | None:
    """The first reason that holds, in words."""
    return next((words.format(found) for words, test in reasons if (found := test(module, names))), None)


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
            if class_name(child).endswith("Router") or (beside_experts and name in ("gate", "router")):
                routers.update(child.modules())
    return routers


def _off_blocks(experts: nn.Module) -> str | None:
    """Why no GEMM takes an expert's matrices. What is narrower than a block is a bias or a scale, unless all is."""
    shapes = {name: tuple(param.shape) for name, param in experts.named_parameters(recurse=False) if param.ndim == 3}
    matrices = {name: shape for name, shape in shapes.items() if min(shape[1:]) >= BLOCK_SIZE} or shapes
    for name, shape in matrices.items():
        if shape[1] % BLOCK_SIZE or shape[2] % BLOCK_SIZE:
            return (
                f"holds {name} of shape {shape}, but the features of an expert must be multiples of {BLOCK_SIZE}: "
                "change the model's sizes, or, if no GEMM multiplies it, give it other than three axes"
            )
    return None


def is_expert_module(module: nn.Module) -> bool:
    """Whether the module holds 3-D parameters of its own, one matrix per expert, parametrized ones among them. The list
    that makes a parametrized one is none."""
    holders = [module, *module.parametrizations.values()] if is_parametrized(module) else [module]
    params = [param for holder in holders for param in holder.parameters(recurse=False)]
    return not isinstance(module, ParametrizationList) and any(param.ndim == 3 for param in params)


def class_name(instance: object) -> str:
    return type(instance).__name__
