"""Expert classes of the user's: their own forward, in which ``torch._grouped_mm`` is MXFP8's."""

from collections.abc import Callable
from functools import cache

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from titan_mxfp8.modules import hugging_face
from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.workarounds.patch import around

_aten = torch.ops.aten._grouped_mm
_GROUPED_MM = frozenset((torch._grouped_mm, torch.nn.functional.grouped_mm, _aten, _aten.default))  # of one signature


class _GroupedMMOverride(TorchFunctionMode):
    """Replaces the calls of ``torch._grouped_mm`` in its region, and counts them."""

    def __init__(self, module: "OverriddenForward") -> None:
        super().__init__()
        self.module = module
        self.with_grad = torch.is_grad_enabled()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _GROUPED_MM:
            return func(*args, **kwargs)
        self.calls += 1
        if self.with_grad and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.module.mxfp8_fqn}: its forward, with gradients on, calls torch._grouped_mm with gradients off, "
                "in a torch.autograd.Function, in a function that torch.compile compiles or under torch.no_grad: what "
                "backward computes of it would not be MXFP8. Call it with gradients on and not compiled, and use "
                "torch.utils.checkpoint where it is to be computed again, or register an MXFP8 class of your own in "
                "titan_mxfp8.modules.EXPERT_CLASSES"
            )
        return self.module.mxfp8_grouped_mm(*args, **kwargs)

    def again(self, function: Callable) -> Callable:
        """``function``, which activation checkpointing runs once more in backward, where this region has ended."""

        def run(*args, **kwargs):
            override = _GroupedMMOverride(self.module)
            try:
                with override:
                    return function(*args, **kwargs)
            finally:
                self.calls += override.calls

        return run


def _carried(function: Callable) -> Callable:
    """``function`` with the override of the innermost region that it is called in, if there is one."""
    overrides = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _GroupedMMOverride)]
    return overrides[-1].again(function) if overrides else function


# A checkpoint in an expert class's forward runs again within the override, which would be in bf16 otherwise. What torch
# checkpoints elsewhere stays as it is.
@around("torch.utils.checkpoint.CheckpointFunction.forward")
def _carry_into_reentrant_backward(forward: Callable, ctx: object, run_function: Callable, *args: object) -> object:
    return forward(ctx, _carried(run_function), *args)


@around("torch.utils.checkpoint._CheckpointFrame.__init__")
def _carry_into_backward(init: Callable, frame: object, recompute_fn: Callable, *args: object) -> None:
    init(frame, _carried(recompute_fn), *args)


class OverriddenForward(ConvertedModule):
    """Mixed into an expert class of the user's: its own forward, with MXFP8 grouped GEMMs. It is not compiled: Dynamo
    traces past a ``TorchFunctionMode`` for ``torch._grouped_mm``, which would leave the experts in bf16."""

    @torch.compiler.disable(reason="register an MXFP8 class in titan_mxfp8.modules.EXPERT_CLASSES to compile it")
    def forward(self, *args, **kwargs):
        with _GroupedMMOverride(self) as override:
            out = super().forward(*args, **kwargs)
        if override.calls == 0 and _has_tokens([*args, *kwargs.values()]):
            raise RuntimeError(
                f"{self.mxfp8_fqn}: {type(self).__name__}.forward made no call of torch._grouped_mm, so nothing ran in "
                "MXFP8. If the class is yours, call it there. If not, leave the module out of the names of experts to "
                "convert, or register an MXFP8 subclass of it in titan_mxfp8.modules.EXPERT_CLASSES. Some classes of "
                'Transformers call it after model.set_experts_implementation("grouped_mm")'
            )
        return out


def _has_tokens(args: list[object]) -> bool:
    """Whether among a forward's arguments no tensor is empty, and none of integers, counts or offsets, is all zeros."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return all(x.numel() > 0 and (x.dtype not in (torch.int32, torch.int64) or bool(x.any())) for x in tensors)


@cache
def override_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that takes the place of ``cls``: its forward with MXFP8 grouped GEMMs."""
    _carry_into_reentrant_backward()
    _carry_into_backward()
    between = (hugging_face.GroupedMMExperts,) if hugging_face.is_switchable(cls) else ()
    return type(f"MXFP8{cls.__name__}", (OverriddenForward, *between, cls), {})
