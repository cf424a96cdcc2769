"""torch's block-scaled GEMMs as this machine can have them: their argument checks, and their arithmetic in fp64.

``torch._scaled_grouped_mm`` and ``torch._scaled_mm`` refuse arguments in their meta functions, which look at dtypes,
shapes and strides, and run on SM100 alone. ``installed`` puts functions in their place that ask those of meta tensors,
then read scales as the hardware does: tile after tile, and each group where it starts. Nothing here is shared with the
package. What torch's kernels leave uninitialised is NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

BF16 = torch.bfloat16


@contextmanager
def installed() -> Iterator[list[str]]:
    """Within, torch's two functions are those below; the list names what was called."""
    calls: list[str] = []
    real = torch._scaled_mm, torch._scaled_grouped_mm

    def mm(*args, **kwargs):
        calls.append("scaled_mm")
        return scaled_mm(*args, **kwargs)

    def grouped_mm(*args, **kwargs):
        calls.append("scaled_grouped_mm")
        return scaled_grouped_mm(*args, **kwargs)

    torch._scaled_mm, torch._scaled_grouped_mm = mm, grouped_mm
    try:
        yield calls
    finally:
        torch._scaled_mm, torch._scaled_grouped_mm = real


def as_on_sm100(function: torch._ops.OpOverload, *args: object, **kwargs: object) -> torch.Tensor:
    """What torch says of a call on a GPU: a fake result of the right shape and dtype.

    Raises:
        RuntimeError: torch refuses the arguments.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        return function(*map(fake, args), **{name: fake(x) for name, x in kwargs.items()})


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    fake = as_on_sm100(torch.ops.aten._scaled_mm.default, a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    # cuBLAS: the bias is bf16 where the output is, and there is none beside fp32
    assert bias is None or (bias.dtype == out_dtype == BF16 and bias.shape == (b.shape[1],)), bias
    product = _values(a, scale_a) @ _values(b.mT, scale_b).mT
    return _as(fake, product if bias is None else product + bias.double())


def scaled_grouped_mm(a, b, scale_a, scale_b, offs=None, bias=None, out_dtype=None):
    arguments = {"offs": offs, "bias": bias, "out_dtype": out_dtype}
    fake = as_on_sm100(torch.ops.aten._scaled_grouped_mm.default, a, b, scale_a, scale_b, **arguments)
    # what the CUDA function asks besides, torch 2.11 to 2.13 (GroupedBlas.cpp)
    assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0 and out_dtype == BF16
    assert scale_a.shape[0] >= a.shape[0] and (b.ndim == 3 or scale_b.shape[0] >= b.shape[1])
    out = torch.full(fake.shape, torch.nan, dtype=torch.float64)
    lines_a, lines_b = _ceil(a.shape[0], 128), _ceil(b.shape[-1], 128)
    bytes_a, bytes_b = (scale.view(torch.uint8).flatten() for scale in (scale_a, scale_b))
    start = tile_rows = scales = 0
    for g, end in enumerate(offs.tolist()):
        size = end - start
        if b.ndim == 3:
            width = _ceil(a.shape[1] // 32, 4)
            own = bytes_a[tile_rows * width : (tile_rows + _ceil(size, 128)) * width]
            out[start:end] = _values(a[start:end], own) @ _values(b[g].mT, scale_b[g]).mT
            tile_rows += _ceil(size, 128)
        elif size:
            assert size % 32 == 0, "a group of the contraction axis has whole blocks"
            width = _ceil(size // 32, 4)
            own = [t[n * scales : n * (scales + width)] for t, n in ((bytes_a, lines_a), (bytes_b, lines_b))]
            out[g] = _values(a[:, start:end], own[0]) @ _values(b[start:end].mT, own[1]).mT
            scales += width
        start = end
    return _as(fake, out)


def _as(fake: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    assert fake.shape == out.shape
    return out.to(fake.dtype)


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _values(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(R, C) in fp64, from its elements and its tiles of 128 lines x 4 scales. Tensor cores read whole tiles: a NaN
    scale where tiles are filled up would reach results, times the zeros behind the elements."""
    (rows, length), (lines, width) = elements.shape, (_ceil(elements.shape[0], 128), _ceil(elements.shape[1] // 32, 4))
    scale = scale.reshape(-1).view(torch.uint8)
    assert scale.numel() == lines * width, (scale.numel(), lines, width)
    factors = torch.ldexp(torch.ones((), dtype=torch.float64), scale.int() - 127).masked_fill(scale == 255, torch.nan)
    values = torch.zeros(lines, width * 32, dtype=torch.float64)
    values[:rows, :length] = elements.double()
    for tile, factor in enumerate(factors.view(-1, 32, 4, 4)):  # line % 32, line // 32, column
        row, column = tile // (width // 4) * 128, tile % (width // 4) * 128
        values[row : row + 128, column : column + 128] *= (
            factor.transpose(0, 1).reshape(128, 4).repeat_interleave(32, 1)
        )
    assert not values[rows:].isnan().any()
    return values[:rows]
