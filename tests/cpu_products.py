"""bf16 products of CPUs that have no instructions for bf16, in fp32, which takes a third of oneDNN's time there.

A product is rounded to bf16 once, as oneDNN's is, and adds up in another order. Trainings spend half of their time so.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_OPERATORS = ("mm", "bmm", "_scaled_dot_product_flash_attention_for_cpu_backward")
_library = torch.library.Library("aten", "IMPL")  # the kernels live as long as this


def speed_up() -> None:
    """In this process, until it ends."""
    if torch.cpu._is_avx512_bf16_supported():
        return
    for name in _OPERATORS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel already
            _library.impl(name, _in_fp32(kernel.call_boxed), "CPU", with_keyset=True, allow_override=True)


def _in_fp32(call: Callable) -> Callable:
    def computed(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        if not args[0].dtype == args[1].dtype == torch.bfloat16:
            return call(keys, *args, **kwargs)
        wide = tree_map_only(Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, args)
        return tree_map_only(Tensor, Tensor.bfloat16, call(keys, *wide, **kwargs))

    return computed
