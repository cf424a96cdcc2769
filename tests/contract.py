"""What every backend must do, whatever runs it: this CPU, a GPU, or Triton's interpreter.

Quantisers give the reference's bits. GEMMs of operands that the reference quantised equal the product of their values,
in fp64, up to the order of additions, what tensor cores cut off and the rounding of the output. Outputs start as NaN
(``poisoned_empty``).
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch
from occupy import occupied_multiprocessors
from poison import poisoned_empty

from scripts.bench.problems import largest_row_error, make_offs, relative_rms
from titan_mxfp8 import RECIPES
from titan_mxfp8.backends import BACKENDS, Backend, BackendRow, Gemm, Plan
from titan_mxfp8.backends import reference as reference_backend
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.common.swizzled import swizzle_scales
from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.format import reference, swizzle
from titan_mxfp8.format.mx import ceil_div
from titan_mxfp8.format.spec import Operand, OperandSpec, interleave
from titan_mxfp8.recipe import Recipe, get_recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = tuple((rounding, dtype) for rounding in ("rceil", "floor") for dtype in (E4M3, E5M2))
EXACT = OperandSpec()
SQUARES = OperandSpec(block="32x32", block_mn=32)

# What no named recipe combines.
OTHER = Recipe(name="mxfp8_2d_floor_e5m2_grad", weight_block="32x32", rounding="floor", grad_dtype=E5M2)

# Relative RMS against fp64. bf16: its rounding is at most 2^-8 = 3.9e-3 of an element; measured 2.1e-3. fp32 sums of
# fp32 or bf16 products: measured up to 1.2e-7 in the interpreter and, with 1500 tokens in a group, 1.9e-6 on an H200.
# FP8 tensor cores keep about 14 bits of a sum: up to 3.1e-4.
TOLERANCE = {("FP8", FP32): 6e-4, ("bf16", FP32): 4e-6, ("fp32", FP32): 4e-6}
ROW_FACTOR = 4  # a single row may be that much worse: its own values may cancel

# Group sizes (None: offs is None) and rows past the last group.
CASES: dict[str, tuple[list[int] | None, int]] = {
    "ragged": ([0, 44, 1, 64, 0, 31, 0], 20),
    "one row": ([1], 0),
    "no offs": (None, 70),
    "all in one": ([0, 0, 133, 0], 0),
    "all empty": ([0, 0, 0], 50),
    "no rows": ([0, 0], 0),
    "48 experts": ([0, 1, 3] * 16, 7),
    "straddle": ([50, 50], 0),
    "large": ([700, 0, 1500, 257, 1], 100),
}

ADDED_TO = ("ragged", "no rows", "large")  # in which weight gradients are also added to others


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A backend, the hardware that it takes its plans for, and the device that has the tensors."""

    row: BackendRow
    hardware: Hardware
    device: torch.device

    @property
    def backend(self) -> Backend:
        return importlib.import_module(self.row.module)

    def plan(self, recipe: Recipe | str) -> Plan:
        return self.backend.plan(get_recipe(recipe), self.hardware)

    def recipes(self) -> list[Recipe]:
        recipes = dict.fromkeys([*RECIPES.values(), OTHER])
        return [recipe for recipe in recipes if recipe.block_k == 32 or self.row.rebases]

    def __str__(self) -> str:
        return f"{self.row.name}-{self.device.type}"


ROWS = {row.name: row for row in BACKENDS}


def ids(value: object) -> str:
    """Names parameters of tests."""
    return value.name if isinstance(value, Recipe) else str(value)


def targets_here() -> list[Target]:
    """Each row of ``BACKENDS`` on the CPU and, if there is one, on the GPU."""
    devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
    pairs = [(row, hardware_of(device), device) for device in devices for row in BACKENDS]
    return [
        Target(row=row, hardware=hardware, device=device) for row, hardware, device in pairs if row.runs_on(hardware)
    ]


def wild(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that meet every branch, by rows: random bits (NaN, Inf, subnormals), normal ones of any size, zeros."""
    raw = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    info = torch.iinfo(raw)
    bits = torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(raw).view(dtype)
    kind = torch.randint(0, 4, (*shape[:-1], 1))
    exponent = torch.randint(-150, 128, (*shape[:-1], 1)).double()
    normal = (torch.randn(shape, dtype=torch.float64) * torch.exp2(exponent)).to(dtype)
    zero = torch.where(torch.rand(shape) < 0.5, -0.0, 0.0).to(dtype)
    return torch.where(kind == 0, bits, torch.where(kind == 1, zero, normal))


def every_bfloat16() -> tuple[torch.Tensor, torch.Tensor]:
    """Each of the 65536, in a block of neighbours and in a block whose maximum is 2^8 times larger."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 32)
    high = (every.float().abs().amax(1, keepdim=True) * 256).to(BF16)
    return every, torch.cat([high, every[:, 1:]], 1)


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal values, each block of 32 along either axis at an exponent of its own, 26 steps apart at most."""
    rows, cols = shape[-2:]
    down = torch.randint(-13, 1, (*shape[:-2], -(-rows // 32), cols)).repeat_interleave(32, -2)[..., :rows, :]
    across = torch.randint(-13, 1, (*shape[:-2], rows, -(-cols // 32))).repeat_interleave(32, -1)[..., :cols]
    return (torch.randn(shape) * torch.exp2((down + across).float())).to(dtype)


def partly_coalescible(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of each kind of row some: scales that can be made equal, by a few steps or by 12 to 18, and others."""
    *rest, rows, cols = shape
    steps = torch.tensor([0, 1, 3, 12, 13, 14, 15, 16, 17, 18])[torch.randint(0, 10, (*rest, rows, 1))]
    steps = steps * torch.randint(0, 2, (*rest, rows, -(-cols // 32)))
    powers = torch.randint(-1, 2, shape) * torch.exp2(-steps.repeat_interleave(32, -1)[..., :cols].float())
    kind = torch.rand(*rest, rows, 1)
    values = torch.where(kind < 0.3, torch.randn(shape), uneven(shape, torch.float32))
    return torch.where(kind < 0.6, powers, values).to(dtype)


def coalescible_squares(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """32x32 squares of one value each, so that most scales can be made equal by a few steps."""
    *rest, rows, cols = shape
    values = partly_coalescible((*rest, ceil_div(rows, 32), ceil_div(cols, 32)), dtype)
    return values.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., :rows, :cols].contiguous()


def wide(*shape: int) -> torch.Tensor:
    """Normal values, each row and each column at an exponent of its own, so that scales differ everywhere."""
    rows, cols = torch.randint(-6, 7, (*shape[:-1], 1)), torch.randint(-6, 7, (shape[-1],))
    return torch.randn(shape) * torch.exp2(rows.float()) * torch.exp2(cols.float())


def patchy(*shape: int) -> torch.Tensor:
    """Patches of 200 rows and 64 columns: ``wide``; or whole numbers, whose scales can be made equal; or large ones and
    small ones, whose scales are equal within a patch, but cannot be made so in two."""
    *rest, rows, cols = shape
    row, col = torch.arange(rows) // 200, torch.arange(cols) // 64
    kind, far = (torch.randint(0, n, (*rest, rows // 200 + 1, cols // 64 + 1))[..., row, :][..., col] for n in (3, 2))
    factor = torch.randint(-3, 4, (*rest, rows, cols // 32 + 1)).exp2().repeat_interleave(32, -1)[..., :cols]
    large_or_small = torch.where(torch.rand(shape) < 0.5, -15.0, 2.0**-11) * 2.0 ** (4 * far)
    patches = torch.where(kind == 0, torch.randint(-15, 16, shape) * factor, large_or_small)
    return torch.where(kind == 2, wide(*shape), patches)


def to(operand: Operand, device: torch.device | str) -> Operand:
    """``operand`` on another device."""
    return operand._replace(
        data=operand.data.to(device), scale=None if operand.scale is None else operand.scale.to(device)
    )


def assert_same(ours: Operand, theirs: Operand) -> None:
    """The same bits. What fills up scales does not count."""
    assert (ours.spec, ours.axis) == (theirs.spec, theirs.axis)
    pairs = {"data": (ours.data.cpu(), theirs.data)}
    if ours.spec.stored == "bf16":
        assert ours.scale is None and ours.data.dtype == BF16
        pairs["data"] = tuple(t.view(torch.int16) for t in pairs["data"])
    else:
        assert ours.scale.shape == theirs.scale.shape and ours.scale.is_contiguous()
        pairs["scale"] = ours.scale.cpu(), theirs.scale
        if ours.spec.scales != "swizzled":
            pairs["scale"] = ours._replace(scale=ours.scale.cpu()).row_scales(), theirs.row_scales()
    for name, (a, b) in pairs.items():
        assert a.dtype == b.dtype and a.shape == b.shape, (name, a.shape, b.shape)
        if a.dtype in (E4M3, E5M2):
            assert a.is_contiguous()
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        wrong = (a != b).nonzero()
        if ours.spec.stored == "bf16":  # NaN has many codes
            nan = a.view(BF16).isnan() & b.view(BF16).isnan()
            wrong = ((a != b) & ~nan).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}"


def of_rows(spec: OperandSpec, offs: torch.Tensor | None) -> torch.Tensor | None:
    """What a quantiser along the last axis of activations takes."""
    return offs if spec.grouped_scales else None


def of_groups(operand: Operand, offs: torch.Tensor | None) -> Operand:
    """What groups of tokens that end at ``offs`` fill: rows or, quantised along them, columns; of their swizzled scales
    whole tiles."""
    if offs is None:
        return operand
    spec, scale, is_padded = operand.spec, operand.scale, operand.axis == 0 and operand.scale is not None
    end = int((reference.padded_ends(offs, spec.block_k) if is_padded else offs)[-1])
    if spec.scales == "swizzled":
        tiles = int(ceil_div(offs.diff(prepend=offs.new_zeros(1)), 128).sum())
        across = scale.shape[0] // 128 if is_padded else scale.shape[1] // 4
        scale = scale.flatten()[: tiles * across * 512]
    elif is_padded:
        scale = scale.narrow(1 if spec.scales == "k_major" else 0, 0, end // spec.block_k).contiguous()
    elif spec.scales == "k_major" and scale is not None:
        scale = scale[:end]
    return operand._replace(data=operand.data.narrow(int(is_padded), 0, end).contiguous(), scale=scale)


def assert_same_filled(
    ours: Operand, theirs: Operand, offs: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> None:
    """The same shapes and bits; of swizzled scales in what groups fill that end at ``offs``, of values in bf16 in rows
    up to the last of ``rows``."""
    assert [t.shape for t in ours.tensors()] == [t.shape for t in theirs.tensors()]
    ends = rows if ours.spec.stored == "bf16" else offs if ours.spec.scales == "swizzled" else None
    assert_same(of_groups(ours, ends), of_groups(theirs, ends))


def check_quantize(
    backend: Backend, x: torch.Tensor, axis: int, spec: OperandSpec, offs=None, device: str | torch.device = "cpu"
) -> None:
    """``x`` on the CPU, or a view of something there: strides are kept."""
    with poisoned_empty():
        ours = backend.quantize(_on(x, device), axis, spec, None if offs is None else offs.to(device))
    assert_same_filled(ours, reference.quantize(x, axis, spec, offs), offs, offs)


def check_quantize_both(
    backend: Backend, x: torch.Tensor, rowwise: OperandSpec, columnwise: OperandSpec, offs=None, device="cpu"
) -> None:
    with poisoned_empty():
        made = backend.quantize_both(_on(x, device), rowwise, columnwise, None if offs is None else offs.to(device))
    wanted = (x.ndim - 1, rowwise, of_rows(rowwise, offs)), (x.ndim - 2, columnwise, offs)
    for ours, (axis, spec, own_offs) in zip(made, wanted, strict=True):
        assert_same_filled(ours, reference.quantize(x, axis, spec, own_offs), own_offs, offs)


def check_each_way(backend: Backend, x: torch.Tensor, spec: OperandSpec, device: str | torch.device = "cpu") -> None:
    """Along the last two axes, each alone and both at once."""
    for axis in (x.ndim - 1, x.ndim - 2):
        check_quantize(backend, x, axis, spec, device=device)
    check_quantize_both(backend, x, spec, spec, device=device)


def check_requantize(
    backend: Backend,
    rows: Operand,
    axis: int,
    spec: OperandSpec,
    offs=None,
    device: str | torch.device = "cpu",
    places: torch.Tensor | None = None,
) -> None:
    """``rows`` on the CPU. What lies past the last group, where the reference has zeros, does not count."""
    there = [None if t is None else t.to(device) for t in (offs, places)]
    with poisoned_empty():
        ours = backend.requantize(to(rows, device), axis, spec, *there)
    if places is not None:
        values, rows = rows.dequantize()[places.long()], rows.rows_at(places)
        torch.testing.assert_close(rows.dequantize(), values, rtol=0, atol=0, equal_nan=True)
    theirs = reference.requantize(rows, axis, spec, offs)
    assert [t.shape for t in ours.tensors()] == [t.shape for t in theirs.tensors()]
    assert all(t.is_contiguous() for t in ours.tensors())
    assert_same(of_groups(to(ours, "cpu"), offs), of_groups(theirs, offs))


def check_swizzled_scales(sizes: list[int] | None, cols: int, device: str | torch.device = "cpu") -> None:
    """By the kernel and by the definition, and back, of every layout; and of squares, whose lines share scales."""
    offs = None if sizes is None else make_offs(sizes)
    x, w = wild((1300, cols), BF16), wild((3, 96, 1100), BF16)
    operands = [(reference.quantize(x, axis, EXACT, None if axis else offs), offs) for axis in (0, 1)]
    operands += [(reference.quantize(w, axis, spec), None) for axis in (1, 2) for spec in (EXACT, SQUARES)]
    for rows, cut in operands:
        with poisoned_empty():
            ours = swizzle_scales(to(rows, device), None if cut is None else cut.to(device))
        assert_same_filled(ours, swizzle.swizzle(rows, ours.spec, cut), cut)
        back, (_, known) = swizzle.unswizzle(to(ours, "cpu"), cut), swizzle.positions(rows, cut)
        lines = rows.scale.repeat_interleave(rows.spec.block_mn, -2).narrow(-2, 0, rows.data.shape[-2])
        assert known.any() and torch.equal(back.scale[known], lines[known])
        assert not back.scale[~known].any()


class Pair(NamedTuple):
    """What a plan quantises along both axes, tokens or weights: along the last one, and the one before it."""

    is_weight: bool
    rowwise: OperandSpec
    columnwise: OperandSpec

    def __str__(self) -> str:
        return " ".join(
            ["w" if self.is_weight else "x"]
            + [f"{spec.stored} {spec.scale_block} {spec.elem_dtype} {spec.rounding}" for spec in self[1:]]
        )


def pairs_of(plans: Iterable[Plan]) -> list[Pair]:
    """Each once."""
    found = []
    for plan in plans:
        found += [Pair(False, plan.forward.a, plan.wgrad.b), Pair(False, plan.dgrad.a, plan.wgrad.a)]
        found.append(Pair(True, plan.forward.b, plan.dgrad.b))
    return list(dict.fromkeys(found))


def check_quantisers(target: Target, pair: Pair, dtype: torch.dtype, groups: Iterable[list[int]]) -> None:
    """Along each axis and both, values of all kinds: tokens of ragged groups, at edges, and none; weights, and views of
    them."""
    backend, device = target.backend, target.device
    is_weight, rowwise, columnwise = pair
    for make in (wild, uneven, partly_coalescible, *[coalescible_squares] * is_weight):
        weights = [make((2, 160, 96), dtype)] if is_weight else []
        if is_weight and make is uneven:
            wider = make((2, 160, 192), dtype)
            weights += [make((1, 32, 32), dtype), weights[0].mT, wider[..., ::2], wider[:, ::2, 16:112]]
        for w in weights:
            check_quantize(backend, w, 2, rowwise, device=device)
            check_quantize(backend, w, 1, columnwise, device=device)
            if rowwise.stored != "bf16":
                check_quantize_both(backend, w, rowwise, columnwise, device=device)
        for shape in () if is_weight else ((129, 288), (1, 32), (0, 64)):
            check_quantize_both(backend, make(shape, dtype), rowwise, columnwise, device=device)
        for sizes in () if is_weight else groups:
            x, offs = make((sum(sizes) + 45, 96), dtype), make_offs(sizes)
            check_quantize(backend, x, 1, rowwise, of_rows(rowwise, offs), device)
            if columnwise.is_quantized:
                check_quantize(backend, x, 0, columnwise, offs, device)
                check_quantize_both(backend, x, rowwise, columnwise, offs, device)


def check_requantisers(target: Target, recipe: Recipe, groups: Iterable[list[int]]) -> None:
    """Rows in FP8, also those that are at ``places``; and weights that FSDP gathered in exact 32x32 blocks."""
    backend, plan, device = target.backend, target.plan(recipe), target.device
    for rows_spec, axis, spec in requantised(plan):
        for make in (wild, uneven, partly_coalescible):
            for shape in ((129, 288), (1, 32), (0, 64)):
                rows = reference.quantize(make(shape, BF16), 1, rows_spec)
                check_requantize(backend, rows, axis, spec, device=device)
        for sizes in groups if axis == 0 else ():
            many, offs = sum(sizes) + 45, make_offs(sizes)
            x = torch.where(torch.rand(many, 1) < 0.5, uneven((many, 160), BF16), wild((many, 160), BF16))
            rows, places = reference.quantize(x, 1, rows_spec), torch.randint(0, many, (many,), dtype=torch.int32)
            check_requantize(backend, rows, 0, spec, offs, device)
            check_requantize(backend, rows, 0, spec, offs, device, places)
    for make in (wild, uneven, coalescible_squares) if recipe.weight_block == "32x32" else ():
        w = make((2, 160, 96), FP32)
        squares = to(reference.quantize(w, 2, plan.forward.b.exact), device)
        for axis, spec in ((2, plan.forward.b), (1, plan.dgrad.b)):  # the bits that w itself would become
            with poisoned_empty():
                ours = backend.requantize(squares, axis, spec, None)
            assert_same_filled(ours, reference.quantize(w, axis, spec))


def requantised(plan: Plan) -> Iterator[tuple[OperandSpec, int, OperandSpec]]:
    """What FP8 rows of a plan are requantised to, and exact ones that arrived: rows, axis, result. Not where scales are
    only swizzled: elements then stay as they are."""
    for first, second in dict.fromkeys([(plan.forward.a, plan.wgrad.b), (plan.dgrad.a, plan.wgrad.a)]):
        arrived = OperandSpec(elem_dtype=first.elem_dtype)
        for rows in dict.fromkeys((first, arrived)):
            if rows.stored != "bf16" and not rows.grouped_scales:
                yield rows, 0, second
                if not first.grouped_scales:
                    yield rows, 1, first


def check_dequantize(x: torch.Tensor, spec: OperandSpec, device: str | torch.device = "cpu") -> None:
    for axis in (x.ndim - 2, x.ndim - 1):
        operand = reference.quantize(x, axis, spec)
        for dtype in (BF16, FP32):
            with poisoned_empty():
                ours = dequantize(to(operand, device), dtype)
            assert ours.is_contiguous()
            torch.testing.assert_close(ours.cpu(), operand.dequantize().to(dtype), rtol=0, atol=0, equal_nan=True)


def check_every_byte(dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
    """Each element byte with each scale byte, also those that no quantiser writes."""
    elements = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    operand = Operand(elements, scale, OperandSpec(elem_dtype=dtype), 1)
    ours = dequantize(to(operand, device), FP32).cpu()
    torch.testing.assert_close(ours, operand.dequantize(), rtol=0, atol=0, equal_nan=True)


def _on(x: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """``x`` on another device with the same strides."""
    if torch.device(device).type == "cpu":
        return x
    base = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
    base.copy_(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()))
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def operands_of(plan: Plan) -> Iterator[tuple[str, int, OperandSpec]]:
    """Each operand of a plan: activations, gradients or weights, the axis that it is quantised along, and its spec."""
    yield from (("x", 1, plan.forward.a), ("w", 2, plan.forward.b), ("dy", 1, plan.dgrad.a), ("w", 1, plan.dgrad.b))
    yield from (("dy", 0, plan.wgrad.a), ("x", 0, plan.wgrad.b))


def with_arrived(plan: Plan) -> Plan:
    """``plan`` where activations and gradients come in FP8, say from an all-to-all, and meet weights as planned."""
    exact = OperandSpec()
    forward, dgrad = (replace(gemm, a=exact) for gemm in (plan.forward, plan.dgrad))
    return Plan(forward=forward, dgrad=dgrad, wgrad=replace(plan.wgrad, a=exact, b=exact))


def values(operand: Operand, offs: torch.Tensor | None, rows: int) -> torch.Tensor:
    """The values of an operand in fp64, as its input lay; of padded groups those of the tokens, NaN elsewhere."""
    if operand.spec.scales == "swizzled":
        operand = swizzle.unswizzle(operand, None if offs is None else offs.to(operand.data.device))
    dequantized = reference.dequantize(operand).double()
    if operand.spec.stored == "bf16":
        return dequantized
    dequantized = dequantized.movedim(-1, operand.axis)
    if operand.axis != 0 or dequantized.ndim != 2:
        return dequantized
    if offs is None:
        return dequantized[:rows]
    out = dequantized.new_full((rows, dequantized.shape[1]), torch.nan)
    padded_starts = [0, *reference.padded_ends(offs, operand.spec.block_k).tolist()]
    for (start, end), padded_start in zip(groups_of(offs, rows), padded_starts, strict=False):
        out[start:end] = dequantized[padded_start : padded_start + end - start]
    return out


def groups_of(offs: torch.Tensor | None, rows: int) -> Iterator[tuple[int, int]]:
    """Where each group starts and ends, of all ``rows`` if there are none."""
    return pairwise([0, rows] if offs is None else [0, *offs.tolist()])


def product_m_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Forward or dgrad in fp64."""
    a_MC, b_EXX = values(a, offs, 0), values(b, None, 0)
    b_ECD = b_EXX.mT if b.axis == 2 else b_EXX
    y = a_MC.new_zeros(a_MC.shape[0], b_ECD.shape[2])
    for e, (start, end) in enumerate(groups_of(offs, len(a_MC))):
        y[start:end] = a_MC[start:end] @ b_ECD[e]
        if bias is not None:
            y[start:end] += bias[e].double()
    return y


def product_k_grouped(a: Operand, b: Operand, offs: torch.Tensor | None, rows: int) -> torch.Tensor:
    """wgrad in fp64."""
    a_MN, b_MK = values(a, offs, rows), values(b, offs, rows)
    return torch.stack([a_MN[i:j].mT @ b_MK[i:j] for i, j in groups_of(offs, rows)])


def judge(out: torch.Tensor, expected: torch.Tensor, gemm: Gemm, what: str) -> None:
    """Fails if ``out`` as a whole, or one of its rows, is further from ``expected`` than the arithmetic explains."""
    tolerance = 2**-8 if out.dtype == BF16 else TOLERANCE[gemm.mma_dtype, out.dtype]
    if not gemm.a.is_quantized:
        tolerance = 2**-8  # in and out in bf16
    error, row_error = relative_rms(out, expected), largest_row_error(out, expected)
    assert error <= tolerance, f"{what}: {error:.2e}"
    assert row_error <= ROW_FACTOR * tolerance, f"{what}: a row is off by {row_error:.2e}"


def inputs(case: str, n: int, k: int, make: Callable[..., torch.Tensor]) -> dict:
    """x, w, dy and offs of a case; NaN in the rows that belong to no group, which must not matter."""
    sizes, extra = CASES[case]
    rows, experts = sum(sizes or []) + extra, 1 if sizes is None else len(sizes)
    x, w, dy = make(rows, k), make(experts, n, k), make(rows, n)
    if sizes is not None:
        x[sum(sizes) :] = dy[sum(sizes) :] = torch.nan
    return {"x": x, "w": w, "dy": dy, "offs": None if sizes is None else make_offs(sizes), "rows": rows}


def check_gemms(
    backend: Backend,
    plan: Plan,
    case: str,
    *,
    n: int = 160,
    k: int = 96,
    out_dtype: torch.dtype = FP32,
    bias_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    make: Callable[..., torch.Tensor] = wide,
) -> None:
    """Forward, dgrad and wgrad of a plan. Operands are made on the CPU, products in fp64 on ``device``."""
    given = inputs(case, n, k, make)
    offs, used = given["offs"], given["rows"] if given["offs"] is None else int(given["offs"][-1])
    offs_there = None if offs is None else offs.to(device)
    for name, (a_name, w_axis) in {"forward": ("x", 2), "dgrad": ("dy", 1)}.items():
        gemm: Gemm = getattr(plan, name)
        a = to(reference.quantize(given[a_name], 1, gemm.a, of_rows(gemm.a, offs)), device)
        b = to(reference.quantize(given["w"], w_axis, gemm.b), device)
        expected, bias = product_m_grouped(a, b, offs, None), None
        if bias_dtype is not None and name == "forward":  # as large as the products, or a wrong one would not show
            size = expected[:used].square().mean().sqrt()
            bias = (torch.randn(b.data.shape[0], n, device=device) * size).to(bias_dtype)
            expected = product_m_grouped(a, b, offs, bias)
        with poisoned_empty():
            out = backend.gemm_m_grouped(a, b, offs_there, bias, out_dtype)
            without_tail = backend.gemm_m_grouped(a, b, offs_there, bias, out_dtype, zero_tail=False)
        assert out.dtype == out_dtype and out.shape == expected.shape
        judge(out[:used], expected[:used], gemm, f"{name}, {case}")
        assert not out[used:].any(), f"{name}, {case}: rows of no group"
        assert torch.equal(without_tail[:used], out[:used]), f"{name}, {case}: without a tail"
        if backend is not reference_backend:
            assert without_tail[used:].isnan().all(), f"{name}, {case}: rows of no group were written"
    gemm = plan.wgrad
    dy = to(reference.quantize(given["dy"], 0, gemm.a, offs), device)
    x = to(reference.quantize(given["x"], 0, gemm.b, offs), device)
    expected = product_k_grouped(dy, x, offs, given["rows"])
    product = BF16 if not gemm.a.is_quantized else out_dtype
    with poisoned_empty():
        out = backend.gemm_k_grouped(dy, x, offs_there, product)
    assert out.dtype == product and out.shape == expected.shape
    judge(out, expected, gemm, f"wgrad, {case}")
    for e, size in enumerate(CASES[case][0] or []):
        assert size or not out[e].any(), f"wgrad, {case}: expert {e} has no rows"
    if case in ADDED_TO:
        with poisoned_empty():
            alone = backend.gemm_k_grouped(dy, x, offs_there, FP32)
            before = torch.randn_like(alone) * alone.square().mean().sqrt().clamp(min=1)
            total = before.clone()
            added = backend.gemm_k_grouped(dy, x, offs_there, FP32, total)
        assert added.data_ptr() == total.data_ptr() and torch.equal(added, before + alone), f"wgrad, {case}: added"


def check_sum_of_products(
    backend: Backend,
    plan: Plan,
    case: str,
    *,
    n: int = 160,
    k: int = 96,
    device: torch.device | str = "cpu",
    make: Callable[..., torch.Tensor] = wide,
) -> list[torch.Tensor]:
    """``dual_gemm_m_grouped`` of dgrad, of which the second product is the larger one; of rebased operands of whole
    blocks as they are and interleaved. Returns what it gave."""
    products, expected = [], 0
    for factor in (1, 4):
        given = inputs(case, n, k, make)
        offs, used = given["offs"], given["rows"] if given["offs"] is None else int(given["offs"][-1])
        a = to(reference.quantize(given["dy"] * factor, 1, plan.dgrad.a, of_rows(plan.dgrad.a, offs)), device)
        b = to(reference.quantize(given["w"], 1, plan.dgrad.b), device)
        products.append((a, b))
        expected = expected + product_m_grouped(a, b, offs, None)
    offs_there = None if offs is None else offs.to(device)
    with poisoned_empty():
        outs = backend.dual_gemm_m_grouped(iter(products), offs_there)
        if plan.in_u(n % 128 == 0) == "dgate_dup":
            both = interleave(*(a for a, _ in products))
            again = backend.dual_gemm_m_grouped(zip(both, (b for _, b in products), strict=True), offs_there)
            for out, other in zip(outs, again, strict=True):
                assert torch.equal(out[:used], other[:used]), f"sum, {case}: interleaved"
    assert all(out.dtype == BF16 and out.shape == expected.shape for out in outs)
    judge(sum(out.float() for out in outs).to(BF16)[:used], expected[:used], plan.dgrad, f"sum, {case}")
    if backend is not reference_backend:
        assert all(out[used:].isnan().all() for out in outs), f"sum, {case}: rows of no group were written"
    return outs


def alone_and_beside(multiply: Callable[[], torch.Tensor], held: int) -> torch.Tensor:
    """What ``multiply`` gives, which must be the same where another kernel holds ``held`` multiprocessors."""
    with poisoned_empty():
        alone = multiply()
        with occupied_multiprocessors(held):
            beside = multiply()
    assert torch.equal(alone, beside)
    return alone


def check_nan_stays_in_its_group(backend: Backend, plan: Plan, device: torch.device | str = "cpu") -> None:
    """A NaN in the first row of a group: its row of y, and columns of that group's dw, nothing else. One in a weight:
    columns of its block of y, in its group."""
    offs = make_offs([40, 30, 50])
    x, w, dy = torch.randn(120, 64), torch.randn(3, 96, 64), torch.randn(120, 96)
    x[40, 5] = w[2, 33, 40] = torch.nan
    a = reference.quantize(x, 1, plan.forward.a, of_rows(plan.forward.a, offs))
    b = reference.quantize(w, 2, plan.forward.b)
    y = backend.gemm_m_grouped(to(a, device), to(b, device), offs.to(device), None, FP32).cpu()
    expected = torch.zeros(120, 96, dtype=torch.bool)
    expected[40] = True
    expected[70:, slice(32, 64) if plan.forward.b.block == "32x32" or plan.forward.b.block_mn == 32 else 33] = True
    assert torch.equal(y.isnan(), expected)
    a, b = (reference.quantize(t, 0, spec, offs) for t, spec in ((dy, plan.wgrad.a), (x, plan.wgrad.b)))
    dw = backend.gemm_k_grouped(to(a, device), to(b, device), offs.to(device), BF16).cpu()
    assert dw[1, :, 5].isnan().all() and dw.isnan().sum() == 96


def check_offs_past_the_last_row(backend: Backend, plan: Plan, device: torch.device | str = "cpu") -> None:
    """As on a GPU, where nobody looks: nothing is written behind the output, and nothing is read behind the input."""
    sizes, m, n = [40, 0, 30, 50], 120, 96
    offs, past = make_offs(sizes), make_offs([40, 0, 30, 300]).to(device)
    a = to(reference.quantize(wide(m, 64), 1, plan.forward.a, of_rows(plan.forward.a, offs)), device)
    b = to(reference.quantize(wide(4, n, 64), 2, plan.forward.b), device)
    expected = backend.gemm_m_grouped(a, b, offs.to(device), None, FP32)
    guarded, empty = torch.full((m + 300, n), 7.0, device=device), torch.empty
    with mock.patch.object(torch, "empty", lambda *s, **kw: guarded[:m] if s == ((m, n),) else empty(*s, **kw)):
        out = backend.gemm_m_grouped(a, b, past, None, FP32)
    assert out.data_ptr() == guarded.data_ptr() and torch.equal(out, expected) and (guarded[m:] == 7).all()
    if plan.wgrad.a.is_quantized:
        dy = to(reference.quantize(wide(m, n), 0, plan.wgrad.a, offs), device)
        x = to(reference.quantize(wide(m, 64), 0, plan.wgrad.b, offs), device)
        expected = backend.gemm_k_grouped(dy, x, offs.to(device), FP32)
        assert torch.equal(backend.gemm_k_grouped(dy, x, past, FP32), expected)
