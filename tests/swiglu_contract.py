"""What every backend's SwiGLU must do, whatever runs it: the definition, quantised as the reference quantises it.

Another ``exp`` may round a result to the other neighbour in bf16, so a few elements may differ by a step.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from contract import BF16, Target, assert_same, of_groups, to, values
from poison import poisoned_empty

from scripts.bench.problems import make_offs, relative_rms
from titan_mxfp8.backends import Backend, Plan, SwigluGradients, reference
from titan_mxfp8.format import swizzle
from titan_mxfp8.format.spec import Operand, OperandSpec, separate
from titan_mxfp8.recipe import Recipe

Case = tuple[list[int] | None, int, int, float | None, bool]  # sizes, extra, hidden, limit, scored of ``check_swiglu``
CASES: tuple[Case, ...] = (
    ([0, 44, 1, 130, 0, 31, 0], 20, 160, None, True),
    ([3, 0, 130], 0, 256, 1.5, False),
    (None, 150, 96, 1.5, True),
    ([0, 0], 40, 96, None, True),
)
LARGE: tuple[Case, ...] = (
    (None, 300, 224, None, False),
    ([3, 0, 300], 7, 1408, None, True),
    ([700, 0, 1500, 257, 1], 5000, 2048, 7.0, True),
)


def check_cases(target: Target, recipe: Recipe | str, cases: Iterable[Case]) -> None:
    """Each, and what becomes of NaN."""
    plan = target.plan(recipe)
    for case in cases:
        shares = check_swiglu(target.backend, plan, *case, target.device)
        print(recipe, *case, {name: f"{share:.1e}" for name, share in shares.items()})
    check_nan_stays_in_its_group(target.backend, plan, target.device)


def swiglu_inputs(sizes: list[int] | None, extra: int, hidden: int) -> tuple[torch.Tensor | None, ...]:
    """gate, up, u, scores and offs, rows at exponents of their own, NaN in the rows that belong to no group. gate and
    up are halves of one tensor."""
    rows = sum(sizes or []) + extra
    both = torch.randn(rows, 2 * hidden) * 2
    u = torch.randn(rows, hidden) * torch.randint(-6, 7, (rows, 1)).exp2()
    scores = torch.rand(rows)
    if sizes is not None:
        both[sum(sizes) :] = u[sum(sizes) :] = scores[sum(sizes) :] = torch.nan
    gate, up = both.to(BF16).chunk(2, 1)
    return gate, up, u.to(BF16), scores, None if sizes is None else make_offs(sizes)


def check_swiglu(
    backend: Backend,
    plan: Plan,
    sizes: list[int] | None,
    extra: int,
    hidden: int,
    limit: float | None,
    scored: bool,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Forward and backward of one case. Returns the share of elements that differ, by operand."""
    inputs = gate, up, u, scores, offs = swiglu_inputs(sizes, extra, hidden)
    if not scored:
        scores = None
    used = gate.shape[0] if sizes is None else sum(sizes)
    there = [None if t is None else t.to(device) for t in inputs]
    there[0], there[1] = torch.cat([gate, up], 1).to(device).chunk(2, 1)
    there[2] = u.to(device, copy=True)  # it is lost
    is_reference = backend is reference
    with nullcontext() if is_reference else poisoned_empty():
        h = backend.swiglu(there[0], there[1], limit, plan.forward.a, there[4])
        ours = backend.swiglu_backward(there[:3], there[3] if scored else None, limit, plan, there[4])
    # on the CPU, from the rows of the groups alone
    gate, up, u = gate[:used], up[:used], u[:used]
    expected_h = reference.swiglu(gate, up, limit, plan.forward.a, offs)
    theirs = reference.swiglu_backward(
        [gate, up, u.clone()], None if scores is None else scores[:used], limit, plan, offs
    )
    shares = {"h": check_same(h, expected_h, offs, used, "h")}
    check_in_u(ours, plan, there[2])
    ours, theirs = separated(ours), separated(theirs)
    for name in OPERANDS:
        shares[name] = check_same(getattr(ours, name), getattr(theirs, name), offs, used, name)
    if scored:
        dscores = ours.dscores[:used].cpu()
        assert ours.dscores.dtype == torch.float32 and ours.dscores.shape == there[3].shape
        size = (u.float() * reference.definition.forward(gate, up, limit).float()).abs().sum(1)
        assert ((dscores - theirs.dscores).abs() <= DSCORES * size).all(), "dscores"
    else:
        assert ours.dscores is None
    return shares


OPERANDS = SwigluGradients._fields[:5]
# By what ``Plan.in_u`` says.
IN_U = {"dgate_dup": OPERANDS[:2], "dgate": OPERANDS[2:3], "nothing": ()}


def check_in_u(made: SwigluGradients, plan: Plan, u: torch.Tensor) -> None:
    """The memory of u has what the plan says, and nothing else."""
    expected = IN_U[plan.in_u(u.shape[1] % 128 == 0)]
    if not plan.dgrad.a.is_quantized:
        expected += OPERANDS[:1]  # dgate, along either axis
    found = {name for name in OPERANDS if getattr(made, name).data.data_ptr() == u.data_ptr()}
    assert found == set(expected) and all(getattr(made, name).data.is_contiguous() for name in OPERANDS)


def separated(made: SwigluGradients) -> SwigluGradients:
    """The same, not interleaved."""
    return SwigluGradients(*separate(*made[:2]), *made[2:])


# Of the sum of magnitudes: h may be a step of bf16 off in one of its elements.
DSCORES = 2**-12
# Of the elements, and of the scales. Measured in the interpreter: up to 7e-5 of an operand's elements, no scale.
SHARE = 1e-3


def check_same(ours: Operand, theirs: Operand, offs: torch.Tensor | None, used: int, what: str) -> float:
    """The share of elements with other bits: at most ``SHARE``, whose values differ by at most a step of their type."""
    assert (ours.spec, ours.axis) == (theirs.spec, theirs.axis), what
    assert (ours.scale is None) == (theirs.scale is None), what
    if used == 0:
        return 0.0
    if theirs.spec.scales == "swizzled":  # their tiles are whole, too: zeros fill them up
        whole = swizzle.swizzle(in_rows(ours, offs), ours.spec, offs)
        assert_same(of_groups(ours, offs), of_groups(whole, offs))
    shares = []
    for name, a, b in zip(("elements", "scales"), bits(ours, offs), bits(theirs, offs), strict=False):
        shares.append((a != b).double().mean().item() if a.numel() else 0.0)
        assert shares[-1] <= max(SHARE, 2 / max(a.numel(), 1)), f"{what}: {name}, {shares[-1]:.2e} differ"
    a, b = (of_groups(in_rows(operand, offs), offs).dequantize().double() for operand in (ours, theirs))
    differ = (a != b) & ~(a.isnan() & b.isnan())
    # an element's own step, or the smallest step of its block
    step = step_of(theirs.spec) * torch.maximum(a.abs(), b.abs()) + 2**-9 * b.abs().amax() * theirs.spec.is_quantized
    assert ((a - b).abs() <= step)[differ].all(), f"{what}: {(a - b)[differ]} of {b[differ]}"
    assert relative_rms(a.nan_to_num(), b.nan_to_num()) < 2e-3, what
    return shares[0]


def in_rows(operand: Operand, offs: torch.Tensor | None) -> Operand:
    """The same with scales in rows, on the CPU."""
    operand = to(operand, "cpu")
    return swizzle.unswizzle(operand, offs) if operand.spec.scales == "swizzled" else operand


def bits(operand: Operand, offs: torch.Tensor | None) -> list[torch.Tensor]:
    """Elements and scales of what groups fill, gaps between padded ones included; or its values in bf16."""
    cut = of_groups(in_rows(operand, offs), offs)
    if cut.scale is None:
        return [cut.dequantize().nan_to_num(7e30)]  # NaN has many codes
    return [cut.data.view(torch.uint8), cut.row_scales()]


def step_of(spec: OperandSpec) -> float:
    """The largest step between neighbours, relative to them."""
    return {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.bfloat16: 2**-7}[spec.elem_dtype]


def check_nan_stays_in_its_group(backend: Backend, plan: Plan, device: torch.device | str = "cpu") -> None:
    """NaN in one element of u, then in a token's score: along H it stays in the token's row, along M in its group."""
    row, col = 45, 70  # of the third group, whose first block the one before it would read if it read on
    inputs = swiglu_inputs([40, 0, 30, 50], 0, 128)
    gate, up, u, scores, offs = (t.to(device, copy=True) for t in inputs)
    clean = separated(backend.swiglu_backward([gate, up, u], scores, None, plan, offs))
    for in_score in (False, True):
        gate, up, u, scores, offs = (t.to(device, copy=True) for t in inputs)
        if in_score:
            scores[row] = torch.nan
        else:
            u[row, col] = torch.nan
        ours = separated(backend.swiglu_backward([gate, up, u], scores, None, plan, offs))
        for name in OPERANDS:
            _check_nan(getattr(clean, name), getattr(ours, name), name, row, None if in_score else col, inputs[4])
        assert ours.dscores.isnan().sum() == (not in_score), "dscores"
        assert in_score or ours.dscores[row].isnan(), "dscores"


def _check_nan(clean: Operand, ours: Operand, name: str, row: int, col: int | None, offs: torch.Tensor) -> None:
    before, after = (values(to(operand, "cpu"), offs, int(offs[-1])) for operand in (clean, ours))
    changed = ((before != after) | after.isnan()).nonzero()
    if name == "sh_columnwise" and col is not None:  # u is not in it
        assert not len(changed), name
        return
    assert after.isnan().any(), name
    tokens, features = changed.T
    if ours.axis == 1:
        assert (tokens == row).all(), name
    else:
        assert (tokens >= 40).all() and (tokens < 70).all(), name  # of the group
        assert col is None or (features == col).all(), name
