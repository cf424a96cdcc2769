"""Expert classes of the user's: their own forward, in which ``torch._grouped_mm`` is MXFP8's."""

from functools import cache

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.health import observe


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
def override_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"MXFP8{cls.__name__}", (_OverrideForward, cls), {"mxfp8_converted_from": cls})


def _empty_override(cls: type[nn.Module]) -> nn.Module:
    override = override_class(cls)
    return override.__new__(override)
