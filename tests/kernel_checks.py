"""Checks of the quantise, dequantise and pad kernels against the reference: on the interpreter's CPU, or on a GPU.

Inputs are drawn anew, outputs start as NaN (``poisoned_empty``), the reference always runs on the CPU.
"""

import torch

from titan_mxfp8.backends import hopper
from titan_mxfp8.backends import triton as backend
from titan_mxfp8.format import reference
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.ops import pad
from titan_mxfp8.testing import make_offs, poisoned_empty

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REBASINGS = ("1x32 to 1x128", "1x32 to 32x128", "32x32 to 32x128", "32x32 to even")  # blocks, and what the GEMMs take
FORMATS = tuple((rounding, dtype) for rounding in ("rceil", "floor") for dtype in (E4M3, E5M2))


def wild(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Values that meet every branch, by rows: random bits (NaN, Inf, subnormals), normal ones of any size, zeros."""
    raw = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    info = torch.iinfo(raw)
    bits = torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(raw).view(dtype)
    kind = torch.randint(0, 4, (*shape[:-1], 1))
    exponent = torch.randint(-150, 128, (*shape[:-1], 1)).double()
    normal = (torch.randn(shape, dtype=torch.float64) * torch.exp2(exponent)).to(dtype)
    zero = torch.where(torch.rand(shape) < 0.5, -0.0, 0.0).to(dtype)
    return torch.where(kind == 0, bits, torch.where(kind == 1, zero, normal)).to(device)


def uneven(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Normal values, each block of 32 along either axis at an exponent of its own, 26 steps apart at most."""
    rows, cols = shape[-2:]
    down = torch.randint(-13, 1, (*shape[:-2], -(-rows // 32), cols)).repeat_interleave(32, -2)[..., :rows, :]
    across = torch.randint(-13, 1, (*shape[:-2], rows, -(-cols // 32))).repeat_interleave(32, -1)[..., :cols]
    return (torch.randn(shape) * torch.exp2((down + across).float())).to(dtype).to(device)


def partly_even(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Of each kind of row some: scales that can be made equal, by a few steps or by 12 to 18, and others."""
    *rest, rows, cols = shape
    steps = torch.tensor([0, 1, 3, 12, 13, 14, 15, 16, 17, 18])[torch.randint(0, 10, (*rest, rows, 1))]
    steps = steps * torch.randint(0, 2, (*rest, rows, -(-cols // 32)))
    powers = torch.randint(-1, 2, shape) * torch.exp2(-steps.repeat_interleave(32, -1)[..., :cols].float())
    kind = torch.rand(*rest, rows, 1)
    values = torch.where(kind < 0.3, torch.randn(shape), uneven(shape, torch.float32))
    return torch.where(kind < 0.6, powers, values).to(dtype).to(device)


def assert_same(ours: MXTensor, theirs: MXTensor) -> None:
    assert (ours.axis, ours.block, ours.orig_dtype) == (theirs.axis, theirs.block, theirs.orig_dtype)
    for name in ("qdata", "scale"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        if a.numel() and b.stride() != a.stride():  # those of an axis of length 1 mean nothing
            assert a.movedim(ours.axis, -1).is_contiguous() and b.movedim(ours.axis, -1).is_contiguous(), name
        a, b = a.cpu().movedim(ours.axis, -1).view(torch.uint8), b.movedim(ours.axis, -1).view(torch.uint8)
        wrong = (a != b).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} of {a.numel()} bytes, first at {wrong[0].tolist()}"


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def check_quantize(x: torch.Tensor, axis: int, rounding: str, dtype: torch.dtype, block: str, offs=None) -> None:
    kwargs = {"rounding": rounding, "elem_dtype": dtype, "block": block}
    with poisoned_empty():
        ours = backend.quantize(x, axis, offs=offs, **kwargs)
    assert_same(ours, reference.quantize(x.cpu(), axis, offs=None if offs is None else offs.cpu(), **kwargs))


def check_quantize_both(x: torch.Tensor, rounding: str, dtype: torch.dtype, block: str, offs=None) -> None:
    kwargs = {"rounding": rounding, "elem_dtype": dtype, "block": block}
    with poisoned_empty():
        ours = backend.quantize_both(x, offs=offs, **kwargs)
    theirs = reference.quantize_both(x.cpu(), offs=None if offs is None else offs.cpu(), **kwargs)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def check_rebased(x: torch.Tensor, rounding: str, dtype: torch.dtype, blocks: str, offs=None, one_axis=True) -> None:
    """The kernels that rebase, along both axes at once and, if ``one_axis``, along each alone; and what they count.

    Args:
        blocks: one of ``REBASINGS``.
    """
    block, form = blocks.split(" to ")
    kwargs = {"rounding": rounding, "elem_dtype": dtype, "block": block}
    offs_cpu, forms = None if offs is None else offs.cpu(), (form, form)
    expected = torch.zeros((2,), dtype=torch.int64)
    theirs = [
        reference.quantize_operand(x.cpu(), x.ndim - 1, offs=None, form=form, changed=expected[0], **kwargs),
        reference.quantize_operand(x.cpu(), x.ndim - 2, offs=offs_cpu, form=form, changed=expected[1], **kwargs),
    ]
    changed = torch.zeros((3,), dtype=torch.int64, device=x.device)
    with poisoned_empty():
        ours = list(hopper.quantize_operand_both(x, offs=offs, forms=forms, changed=changed[0], **kwargs))
        if one_axis:
            for i, (axis, given) in enumerate(((x.ndim - 1, None), (x.ndim - 2, offs))):
                options = {"offs": given, "form": form, "changed": changed[1 + i]}
                ours.append(hopper.quantize_operand(x, axis, **options, **kwargs))
    for a, b in zip(ours, theirs * 2, strict=False):
        assert_same(a, b)
    assert changed[0] == expected.sum() and (not one_axis or changed[1:].tolist() == expected.tolist())
    plain = hopper.quantize_operand_both(x, offs=offs, forms=forms, **kwargs)
    for a, b in zip(plain, theirs, strict=True):
        assert_same(a, b)


def check_even(x: torch.Tensor, rounding: str, dtype: torch.dtype) -> None:
    """1x32 blocks evened out, along either axis."""
    for axis in (x.ndim - 1, x.ndim - 2):
        kwargs = {"rounding": rounding, "elem_dtype": dtype, "block": "1x32", "offs": None, "form": "even"}
        with poisoned_empty():
            ours = hopper.quantize_operand(x, axis, **kwargs)
        assert_same(ours, reference.quantize_operand(x.cpu(), axis, **kwargs))


def check_dequantize(x: torch.Tensor, axis: int, dtype: torch.dtype, block: str, offs=None) -> None:
    mx = backend.quantize(x, axis, rounding="rceil", elem_dtype=dtype, block=block, offs=offs)
    on_cpu = MXTensor(mx.qdata.cpu(), mx.scale.cpu(), mx.axis, mx.block, mx.orig_dtype)
    for out_dtype in (torch.bfloat16, torch.float32):
        with poisoned_empty():
            ours = backend.dequantize(mx, out_dtype)
        assert ours.movedim(axis, -1).is_contiguous()
        assert_equal(ours, on_cpu.dequantize(out_dtype))


def check_every_byte(dtype: torch.dtype, device: str = "cpu") -> None:
    """Each element byte with each scale byte, also those that no quantiser writes."""
    elements = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(256, 1)
    mx = MXTensor(elements, torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8), 1, "1x32", torch.float32)
    ours = backend.dequantize(MXTensor(mx.qdata.to(device), mx.scale.to(device), 1, "1x32", torch.float32))
    assert_equal(ours, mx.dequantize())


def rounded_in_place(x: torch.Tensor, axis: int, offs: torch.Tensor | None, **kwargs) -> torch.Tensor:
    """``quantize_dequantize`` by the reference: with ``offs``, group by group."""
    if offs is None:
        return reference.quantize(x, axis, offs=None, **kwargs).dequantize(torch.bfloat16)
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    for start, stop in zip([0, *offs.tolist()], offs.tolist(), strict=False):
        out[start:stop] = reference.quantize(x[start:stop], axis, offs=None, **kwargs).dequantize(torch.bfloat16)
    return out


def check_quantize_dequantize(x: torch.Tensor, rounding: str, dtype: torch.dtype, block: str, offs=None) -> None:
    kwargs = {"rounding": rounding, "elem_dtype": dtype, "block": block}
    offs_cpu = None if offs is None else offs.cpu()
    last = rounded_in_place(x.cpu(), x.ndim - 1, None, **kwargs)
    first = rounded_in_place(x.cpu(), x.ndim - 2, offs_cpu, **kwargs)
    with poisoned_empty():
        assert_equal(backend.quantize_dequantize(x, x.ndim - 2, offs=offs, **kwargs), first)
        if offs is None:
            assert_equal(backend.quantize_dequantize(x, x.ndim - 1, offs=None, **kwargs), last)
        if block == "1x32":
            both = backend.quantize_dequantize_both(x, rounding=rounding, elem_dtype=dtype, offs=offs)
            assert_equal(both[0], last)
            assert_equal(both[1], first)


def check_pad(x: torch.Tensor, sizes: list[int], alignment: int) -> None:
    """There, against rows put together by hand, and back, from a buffer with NaN between the groups."""
    offs = make_offs(sizes)
    length = pad.padded_rows(x.shape[0], len(sizes), alignment)
    groups = x.cpu()[: sum(sizes)].split(sizes)
    rows = [torch.nn.functional.pad(group, (0, 0, 0, -len(group) % alignment)) for group in groups]
    expected = torch.cat([*rows, x.new_zeros((length - sum(map(len, rows)), x.shape[1]), device="cpu")])
    filled = [torch.arange(len(part)) < len(group) for part, group in zip(rows, groups, strict=True)]
    gaps = ~torch.cat([*filled, torch.zeros(length - sum(map(len, rows)), dtype=torch.bool)])
    with poisoned_empty():
        padded, padded_offs = backend.pad_token_groups(x, offs.to(x.device), alignment=alignment, padded_rows=length)
        assert_equal(padded, expected)
        padded[gaps.to(x.device)] = float("nan")
        back = backend.unpad_token_groups(padded, offs.to(x.device), alignment=alignment, rows=x.shape[0])
    assert padded_offs.tolist() == torch.tensor([len(group) for group in rows]).cumsum(0).tolist()
    packed = x.cpu().clone()
    packed[sum(sizes) :] = 0
    assert_equal(back, packed)
