"""Expert classes of Hugging Face Transformers: which of them multiply with ``torch._grouped_mm``.

Since its version 5 most have a forward that asks ``config._experts_implementation`` for the function to run.
"""

from torch import nn

# Implementations that never call torch._grouped_mm. Of others, which a user may register, nobody knows before they run.
_WITHOUT_GROUPED_MM = (None, "batched_mm", "deepgemm", "eager", "sonicmoe")


def is_switchable(cls: type[nn.Module]) -> bool:
    """Whether the forward of an expert class runs what its config says."""
    return "_experts_implementation" in getattr(getattr(cls.forward, "__code__", None), "co_names", ())


def refusal(experts: nn.Module) -> str | None:
    """Why an expert module cannot be converted as it is, and what to do; None if it can, or if nobody knows."""
    cls = type(experts)
    if is_switchable(cls):
        implementation = experts.config._experts_implementation
        if implementation in _WITHOUT_GROUPED_MM:
            return (
                f"runs with experts_implementation={implementation!r}, which never calls torch._grouped_mm: call "
                'model.set_experts_implementation("grouped_mm") before the conversion'
            )
    elif cls.__module__.startswith("transformers."):
        return (
            f"is a {cls.__name__} of Transformers, which never calls torch._grouped_mm, and which "
            "set_experts_implementation does not change: leave it out of fqns, so that only linears are converted"
        )
    return None


class GroupedMMExperts(nn.Module):
    """Mixed into a switchable class: it stays with ``grouped_mm`` when its model is switched to another implementation,
    as ``generate`` does on GPUs while it decodes."""

    def forward(self, *args, **kwargs):
        if self.config._experts_implementation not in _WITHOUT_GROUPED_MM:
            return super().forward(*args, **kwargs)
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, *args, **kwargs)
