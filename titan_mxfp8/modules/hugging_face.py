"""Expert classes of Hugging Face Transformers: which of them multiply with ``torch._grouped_mm``.

Since its version 5 most have a forward that asks ``config._experts_implementation`` for the function to run.
"""

import sys
from pathlib import Path
from types import CodeType

from torch import nn

# Implementations that never call torch._grouped_mm. Of others, which a user may register, nobody knows before they run.
WITHOUT_GROUPED_MM = (None, "batched_mm", "deepgemm", "eager", "sonicmoe")


def is_switchable(cls: type[nn.Module]) -> bool:
    """Whether the forward of an expert class runs what its config says."""
    return "_experts_implementation" in _names(cls.forward)


def refusal(experts: nn.Module) -> str | None:
    """Why an expert module cannot be converted as it is, and what to do; None if it can, or if only its first forward
    will show that: of a user's own, and of remote code (which Transformers imports as ``transformers_modules``) that
    somewhere says ``grouped_mm``."""
    cls = type(experts)
    owner = _owner_of_forward(cls)
    if is_switchable(owner):
        implementation = experts.config._experts_implementation
        if implementation in WITHOUT_GROUPED_MM:
            return (
                f"runs with experts_implementation={implementation!r}, which never calls torch._grouped_mm: call "
                'model.set_experts_implementation("grouped_mm") before the conversion, if the model supports that'
            )
        return None
    package = owner.__module__.partition(".")[0]
    if package == "transformers":
        whose, instead = "Transformers", "convert the model's linears alone"
    elif package == "transformers_modules" and not _says_grouped_mm(owner.__module__):
        whose = "the model's remote code"
        instead = "load the model without trust_remote_code, if Transformers has classes of its own for it"
    else:
        return None
    name = owner.__name__ if cls is owner else f"{cls.__name__} that multiplies with the forward of {owner.__name__}"
    return (
        f"is a {name} of {whose}, which never calls torch._grouped_mm, and which set_experts_implementation does not "
        f"change: {instead}"
    )


def _owner_of_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward multiplies: the first with one, but not a subclass that only calls super's, unless it
    names grouped_mm in a method of its own."""
    owners = [base for base in cls.__mro__ if "forward" in vars(base)]
    for owner in owners[:-1]:  # the last is nn.Module, whose forward is none
        methods = frozenset().union(*map(_names, vars(owner).values()))
        if not {"super", "forward"} <= _names(owner.forward) or methods & {"_grouped_mm", "grouped_mm"}:
            return owner
    return cls


def _names(function: object) -> frozenset[str]:
    """The globals and attributes that a function's code names, in functions within it too: ``torch``, ``exp`` and
    ``data`` of ``lambda x: torch.exp(x.data)``."""
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType):
        return frozenset()
    return frozenset(code.co_names).union(*map(_names, code.co_consts))


def _says_grouped_mm(module: str) -> bool:
    """Whether a module, or one imported from the same folder, has ``grouped_mm`` in its text, or one has no text."""
    folder = module.rpartition(".")[0] + "."
    files = [getattr(part, "__file__", None) for name, part in [*sys.modules.items()] if name.startswith(folder)]
    try:
        texts = [Path(file).read_text(errors="replace") for file in files if file]
    except OSError:
        return True
    return not texts or any("grouped_mm" in text for text in texts)


class GroupedMMExperts(nn.Module):
    """Mixed into a switchable class: it stays with ``grouped_mm`` when its model is switched to another implementation,
    as ``generate`` does on GPUs while it decodes."""

    def forward(self, *args, **kwargs):
        if self.config._experts_implementation not in WITHOUT_GROUPED_MM:
            return super().forward(*args, **kwargs)
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, *args, **kwargs)
