"""Module conversion: a module's class is swapped for a subclass with an MXFP8 forward; parameters stay as they are.

So FSDP, TP, EP, checkpoints, optimizers, ``deepcopy`` and meta-device init meet the modules and parameters they know.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from titan_mxfp8 import backends
from titan_mxfp8.format.mx import BLOCK_SIZE
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.health import observe
from titan_mxfp8.ops.linear import mxfp8_linear
from titan_mxfp8.ops.rebase_counter import KINDS, RebaseCounter
from titan_mxfp8.recipe import Recipe, get_recipe

logger = logging.getLogger(__name__)

ModuleKind = Literal["experts", "linears"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MXConfig:
    """What a converted module carries as ``module.mxfp8``.

    Attributes:
        recipe: how its operands are quantised.
        backend: name of the chosen backend, not ``auto``.
        compile_backend: for experts that TorchTitan compiles apart from their module: a ``torch.compile`` backend, or
            None for eager.
        rebase: as for ``mxfp8_grouped_mm``; a module that counts has a ``RebaseCounter`` of its own.
    """

    recipe: Recipe
    backend: str
    compile_backend: str | None = None
    rebase: bool | RebaseCounter = False


def convert_model(
    model: nn.Module,
    *,
    recipe: str | Recipe = "mxfp8",
    grouped_fqns: Iterable[str] = (),
    linear_filter_fqns: Iterable[str] = (),
    backend: str = "auto",
    rebase: bool = False,
    count_rebased: bool = False,
) -> list[str]:
    """Converts a model in place: linears, and the expert modules that ``grouped_fqns`` names.

    For users without TorchTitan. ``convert_linears`` and ``convert_experts`` do one of the two.

    Args:
        model: any module tree, on any device, meta included.
        recipe: a key of ``RECIPES``, or a ``Recipe``.
        grouped_fqns: substrings of the names of expert modules: modules with 3-D parameters of their own whose forward
            calls ``torch._grouped_mm``. Empty: none.
        linear_filter_fqns: substrings of the names of ``nn.Linear`` modules to leave alone. Empty: none, so name the
            output layer and the routers, which the plugin leaves alone by default.
        backend: ``auto`` or a name of ``titan_mxfp8.backends``.
        rebase: as for ``mxfp8_grouped_mm``.
        count_rebased: with ``rebase``, count what it changes, for ``rebase_report``. Eager only.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: nothing converted, an unknown recipe or backend, a backend without ``rebase``, or expert features
            that are no multiple of 32. The model is then as it was.
    """
    config = _config(recipe, backend, model, rebase, count_rebased)
    grouped_fqns = as_list(grouped_fqns)
    choices = []
    if grouped_fqns:
        choices.append(_choose_experts(model, grouped_fqns))
    has_linears = any(type(module) is nn.Linear for module in model.modules())
    if has_linears or not grouped_fqns:
        choices.append(_choose_linears(model, as_list(linear_filter_fqns)))
    return [fqn for choice in choices for fqn in _convert(choice, config, count_rebased)]


def convert_linears(
    model: nn.Module,
    *,
    recipe: str | Recipe,
    filter_fqns: Iterable[str] = (),
    backend: str = "auto",
    rebase: bool = False,
    count_rebased: bool = False,
) -> list[str]:
    """Converts every ``nn.Linear`` whose name contains none of ``filter_fqns``.

    One whose in or out features are not a multiple of 32 stays as it is, with a log line that names it. Subclasses of
    ``nn.Linear`` have a forward of their own and stay as they are too.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: nothing was converted; the message says why each candidate was not.
    """
    config = _config(recipe, backend, model, rebase, count_rebased)
    return _convert(_choose_linears(model, as_list(filter_fqns)), config, count_rebased)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a conversion will change, found before it changes anything: an error leaves the whole model as it was.

    Attributes:
        kind: what the modules are, in words.
        modules: those to convert, by name.
        left: names of those of this kind that stay as they are, and why.
    """

    kind: str
    modules: dict[str, nn.Module]
    left: list[str]


def _choose_linears(model: nn.Module, filter_fqns: list[str]) -> _Choice:
    chosen, left = {}, []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        hit = next((part for part in filter_fqns if part in fqn), None)
        if hasattr(module, "mxfp8"):
            left.append(f"{fqn} (converted already)")
        elif hit is not None:
            left.append(f"{fqn} (filter_fqns has {hit!r})")
        elif type(module) is not nn.Linear:
            left.append(f"{fqn} ({type(module).__name__}, not nn.Linear itself)")
        elif module.in_features % BLOCK_SIZE or module.out_features % BLOCK_SIZE:
            shape = f"{module.in_features} -> {module.out_features}"
            logger.info(f"MXFP8: {fqn} stays in high precision, {shape} features are not multiples of {BLOCK_SIZE}")
            left.append(f"{fqn} ({shape} features, not multiples of {BLOCK_SIZE})")
        else:
            chosen[fqn] = module
    if not chosen:
        raise ValueError(f"MXFP8: no nn.Linear was converted. The model's linears: {_listing(left)}")
    return _Choice(kind="Linear", modules=chosen, left=left)


def convert_experts(
    model: nn.Module,
    *,
    recipe: str | Recipe,
    fqns: Iterable[str],
    backend: str = "auto",
    compile_backend: str | None = None,
    rebase: bool = False,
    count_rebased: bool = False,
) -> list[str]:
    """Converts the expert modules whose name contains one of ``fqns``.

    An expert module holds 3-D parameters of its own. A class of ``EXPERT_CLASSES`` gets the MXFP8 class found there; in
    any other, the calls of ``torch._grouped_mm`` are replaced. A module that only the name matches, such as the linears
    of ``shared_experts``, is not an expert module and stays as it is.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: nothing was converted, or expert features that are not a multiple of 32.
    """
    config = _config(recipe, backend, model, rebase, count_rebased, compile_backend)
    return _convert(_choose_experts(model, as_list(fqns)), config, count_rebased)


def _choose_experts(model: nn.Module, fqns: list[str]) -> _Choice:
    chosen, others = {}, []
    for fqn, module in model.named_modules():
        if not is_expert_module(module):
            continue
        if not any(part in fqn for part in fqns):
            others.append(f"{fqn} ({type(module).__name__})")
            continue
        for name, param in module.named_parameters(recurse=False):
            if param.ndim == 3 and (param.shape[1] % BLOCK_SIZE or param.shape[2] % BLOCK_SIZE):
                raise ValueError(
                    f"MXFP8: {fqn}.{name} has shape {tuple(param.shape)}, but the features of an expert must be "
                    f"multiples of {BLOCK_SIZE}: change the model's sizes, or leave this module out of fqns"
                )
        chosen[fqn] = module
    if not chosen:
        raise ValueError(f"MXFP8: no expert module matches fqns {fqns}. The model's expert modules: {_listing(others)}")
    return _Choice(kind="expert module", modules=chosen, left=others)


def _convert(choice: _Choice, config: MXConfig, count_rebased: bool) -> list[str]:
    for fqn, module in choice.modules.items():
        cls = type(module)
        module.__class__ = MXFP8Linear if cls is nn.Linear else EXPERT_CLASSES.get(cls) or _override_class(cls)
        module.mxfp8 = replace(config, rebase=RebaseCounter()) if count_rebased else config
        module.mxfp8_fqn = fqn
    count = f"{len(choice.modules)} {choice.kind}{'s' * (len(choice.modules) != 1)}"
    logger.info(
        f"MXFP8: converted {count} (recipe {config.recipe.name}, backend {config.backend}); "
        f"left: {_listing(choice.left)}"
    )
    return list(choice.modules)


def rebase_report(model: nn.Module, kind: ModuleKind | None = None) -> str | None:
    """What ``rebase`` changed in the modules of ``model`` since the last report, in words; waits for the device.

    Args:
        model: converted with ``count_rebased``.
        kind: ``experts`` or ``linears``, or None for both.

    Returns:
        None if no such module counts.
    """
    counts = {}
    for module in model.modules():
        own_kind = "linears" if isinstance(module, MXFP8Linear) else "experts"
        counts_here = isinstance(module, ConvertedModule) and isinstance(module.mxfp8.rebase, RebaseCounter)
        if counts_here and kind in (own_kind, None):
            counts[module.mxfp8_fqn] = module.mxfp8.rebase.read()
    if not counts:
        return None
    parts = []
    for operands in KINDS:
        changed, seen = (sum(count[operands][i] for count in counts.values()) for i in (0, 1))
        shares = {fqn: count[operands][0] / max(count[operands][1], 1) for fqn, count in counts.items()}
        most = max(shares, key=shares.get)
        parts.append(f"{operands} {changed / max(seen, 1):.2e} (most in {most}: {shares[most]:.2e})")
    return f"MXFP8: share of elements that rebase changed in {kind or 'all modules'}: {', '.join(parts)}"


def is_expert_module(module: nn.Module) -> bool:
    """Whether the module holds 3-D parameters of its own, one matrix per expert, and is not converted yet."""
    if hasattr(module, "mxfp8"):
        return False
    return any(param.ndim == 3 for param in module.parameters(recurse=False))


def training_device() -> torch.device:
    """The device of this process's training: its accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def as_list(fqns: Iterable[str] | str) -> list[str]:
    """A list of name parts. A plain string, as TOML may have it, is comma-separated, not a list of letters."""
    parts = fqns.split(",") if isinstance(fqns, str) else fqns
    return [part.strip() for part in parts if part.strip()]  # an empty part would match every name


# Mesh dimensions that split the GEMMs themselves; FSDP puts whole weights together again before they are used.
SPLITS_GEMMS = frozenset({"tp", "ep", "etp"})


class ConvertedModule:
    """Mixed into converted classes: what a converted module carries.

    It refuses, as soon as TP or EP splits a weight, parts that MXFP8 cannot work with: ``parallelize_module`` registers
    the split weight in place of the whole one, on meta and before anything is trained.
    """

    mxfp8: MXConfig
    mxfp8_fqn: str  # not in MXConfig: torch.compile would compile each layer's experts anew
    health_probe: torch.Tensor | None = None  # of ops.health

    @property
    def op_options(self) -> dict[str, object]:
        """What ``mxfp8_grouped_mm`` and ``mxfp8_linear`` are called with. ``fully_shard`` marks the modules whose
        weights it frees after forward."""
        config = self.mxfp8
        return {
            "recipe": config.recipe,
            "backend": config.backend,
            "rebase": config.rebase,
            "keep_quantized_weight": not getattr(self, "_is_fsdp_managed_module", False),
        }

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, DTensor) and (param.ndim == 3 or name == "weight"):
            _check_shards(f"{self.mxfp8_fqn}.{name}", param)
        super().register_parameter(name, param)


def _check_shards(fqn: str, weight: DTensor) -> None:
    mesh = weight.device_mesh
    for mesh_dim, placement in enumerate(weight.placements):
        axis = mesh.mesh_dim_names[mesh_dim] if mesh.mesh_dim_names else None
        if not placement.is_shard() or axis not in SPLITS_GEMMS:
            continue
        is_feature = placement.dim >= weight.ndim - 2
        size, ranks = weight.shape[placement.dim], mesh.size(mesh_dim)
        units, left_over = divmod(size, BLOCK_SIZE if is_feature else 1)
        if left_over or units % ranks:
            wanted = f"no multiple of {BLOCK_SIZE}" if is_feature else "not whole"
            raise ValueError(
                f"MXFP8: {fqn} of shape {tuple(weight.shape)} cannot be split between {ranks} {axis} ranks: each "
                f"would get {size / ranks:g} of {size} {'features' if is_feature else 'experts'}, which is {wanted}. "
                f"Choose a degree that divides {units}, or other sizes for the model, or leave the module in high "
                "precision (filter_fqns for linears, fqns for experts)"
            )


class MXFP8Linear(ConvertedModule, nn.Linear):
    """``nn.Linear`` whose three GEMMs are MXFP8, also on DTensors. Made by ``convert_linears``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = self.op_options

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = mxfp8_linear(x, weight, bias, **options)
            return observe(y, x, weight, None, self.health_probe, options["recipe"], options["backend"])

        if isinstance(self.weight, DTensor):
            return _linear_on_dtensors(linear, x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def _linear_on_dtensors(linear: Callable, x: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
    """Runs ``linear`` on the local shards of a tensor-parallel layer.

    Per mesh dimension (S(i) shards axis i, "last" is the feature axis of x and y):

    | weight         | x wanted                 | y        | gradient of x | gradient of weight |
    |----------------|--------------------------|----------|---------------|--------------------|
    | S(0), colwise  | replicated               | S(last)  | partial       | S(0)               |
    | S(1), rowwise  | S(last)                  | partial  | S(last)       | S(1)               |
    | replicated     | as it is, features whole | as x     | as x          | partial if x is S  |
    """
    mesh, last = weight.device_mesh, x.ndim - 1
    x_wanted: list[Placement] = []
    y_is: list[Placement] = []
    dx_is: list[Placement] = []
    dw_is: list[Placement] = []
    for x_placement, w_placement in zip(x.placements, weight.placements, strict=True):
        if w_placement.is_shard(0):
            row = (Replicate(), Shard(last), Partial(), Shard(0))
        elif w_placement.is_shard(1):
            row = (Shard(last), Partial(), Shard(last), Shard(1))
        elif x_placement.is_shard() and not x_placement.is_shard(last):
            row = (x_placement, x_placement, x_placement, Partial())
        else:
            row = (Replicate(), Replicate(), Replicate(), Replicate())
        for placements, placement in zip((x_wanted, y_is, dx_is, dw_is), row, strict=True):
            placements.append(placement)
    x_local = x.redistribute(mesh, x_wanted).to_local(grad_placements=dx_is)
    y_local = linear(x_local, weight.to_local(grad_placements=dw_is), None)
    y = DTensor.from_local(y_local, mesh, y_is, run_check=False)
    return y if bias is None else y + bias


class _GroupedMMOverride(TorchFunctionMode):
    """Replaces the calls of ``torch._grouped_mm`` in its region, and counts them."""

    def __init__(self, options: dict[str, object], health_probe: torch.Tensor | None) -> None:
        super().__init__()
        self.options = options
        self.health_probe = health_probe
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch._grouped_mm and func is not torch.nn.functional.grouped_mm:
            return func(*args, **kwargs)
        self.calls += 1
        return self.grouped_mm(*args, **kwargs)

    def grouped_mm(
        self,
        a: torch.Tensor,
        b_t: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The signature of ``torch._grouped_mm``."""
        y = mxfp8_grouped_mm(a, b_t, offs, bias=bias, out_dtype=out_dtype or a.dtype, **self.options)
        return observe(y, a, b_t.mT, offs, self.health_probe, self.options["recipe"], self.options["backend"])


class _OverrideForward(ConvertedModule):
    """Mixed into an expert class of the user's: its own forward, with MXFP8 grouped GEMMs.

    Under ``torch.compile`` it runs eagerly, after a graph break: Dynamo traces past a ``TorchFunctionMode`` for
    ``torch._grouped_mm``, which would leave the experts in bf16.
    """

    @torch.compiler.disable(reason="register an MXFP8 class in titan_mxfp8.modules.EXPERT_CLASSES to compile it")
    def forward(self, *args, **kwargs):
        with _GroupedMMOverride(self.op_options, self.health_probe) as override:
            out = super().forward(*args, **kwargs)
        if override.calls == 0 and _has_tokens([*args, *kwargs.values()]):
            raise RuntimeError(
                f"{type(self).__name__}.forward made no call of torch._grouped_mm, so nothing ran in MXFP8: call it "
                "there, or register an MXFP8 class of your own in titan_mxfp8.modules.EXPERT_CLASSES"
            )
        return out

    def __reduce__(self):
        # pickle would look for the class by its name, and it is made at run time
        return _empty_override, (self.mxfp8_converted_from,), self.__getstate__()


def _has_tokens(args: list[object]) -> bool:
    """Whether among a forward's arguments no tensor is empty, and none of integers, counts or offsets, is all zeros."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return all(x.numel() > 0 and (x.dtype not in (torch.int32, torch.int64) or bool(x.any())) for x in tensors)


@cache
def _override_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"MXFP8{cls.__name__}", (_OverrideForward, cls), {"mxfp8_converted_from": cls})


def _empty_override(cls: type[nn.Module]) -> nn.Module:
    override = _override_class(cls)
    return override.__new__(override)


# Expert classes with an MXFP8 class of their own; the plugin enters TorchTitan's.
EXPERT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _config(
    recipe: str | Recipe,
    backend: str,
    model: nn.Module,
    rebase: bool,
    count_rebased: bool,
    compile_backend: str | None = None,
) -> MXConfig:
    if count_rebased and not rebase:
        raise ValueError("count_rebased counts what rebase changes: turn rebase on, or count_rebased off")
    selection = backends.select(backend, _device(model), rebase)
    config = MXConfig(recipe=get_recipe(recipe), backend=selection.name, compile_backend=compile_backend, rebase=rebase)
    rebased = ", rebased" if rebase else ""
    logger.info(f"MXFP8: recipe {config.recipe.name}{rebased}, backend {selection.name} ({selection.reason})")
    return config


def _device(model: nn.Module) -> torch.device:
    """Where the model will run: where it is, or for a model on meta the training device."""
    param = next(model.parameters(), None)
    on_meta = param is None or param.device.type == "meta"
    return training_device() if on_meta else param.device


def _listing(names: list[str], most: int = 20) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
