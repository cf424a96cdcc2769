"""What every backend's SwiGLU must do, whatever runs it: the definition, quantised as the reference quantises it.

Another ``exp`` may round a result to the other neighbour in bf16, so a few elements may differ by a step.
"""

from contextlib import nullcontext

import torch
from contract import BF16

from titan_mxfp8.backends import Backend, Plan, reference
from titan_mxfp8.format import reference as reference_format
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.testing import make_offs, poisoned_empty, relative_rms


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
    specs = plan.forward.a, plan.dgrad.a, plan.wgrad.a, plan.wgrad.b
    is_reference = backend is reference
    with nullcontext() if is_reference else poisoned_empty():
        h = backend.swiglu(there[0], there[1], limit, specs[0], there[4])
        ours = backend.swiglu_backward(*there[:3], there[3] if scored else None, limit, *specs[1:], there[4])
    # on the CPU, from the rows of the groups alone
    gate, up, u = gate[:used], up[:used], u[:used]
    expected_h = reference.swiglu(gate, up, limit, specs[0], offs)
    theirs = reference.swiglu_backward(gate, up, u, None if scores is None else scores[:used], limit, *specs[1:], offs)
    shares = {"h": check_same(h, expected_h, offs, used, "h")}
    for name in ("dgate_last", "dup_last", "dgate_first", "dup_first", "sh_first"):
        shares[name] = check_same(getattr(ours, name), getattr(theirs, name), offs, used, name)
    if scored:
        dscores = ours.dscores[:used].cpu()
        assert ours.dscores.dtype == torch.float32 and ours.dscores.shape == there[3].shape
        size = (u.float() * h_values(gate, up, limit)).abs().sum(1)
        assert ((dscores - theirs.dscores).abs() <= DSCORES * size).all(), "dscores"
    else:
        assert ours.dscores is None
    return shares


# Of the sum of magnitudes: h may be a step of bf16 off in one of its elements.
DSCORES = 2**-12
# Measured in the interpreter: up to TODO of an operand's elements.
SHARE = 1e-3


def h_values(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    return reference.definition.forward(gate, up, limit).float()


def check_same(ours: Operand, theirs: Operand, offs: torch.Tensor | None, used: int, what: str) -> float:
    """The share of elements whose values differ: at most ``SHARE``, each by at most a step of its element type."""
    assert (ours.spec, ours.axis) == (theirs.spec, theirs.axis), what
    assert (ours.scale is None) == (theirs.scale is None), what
    ours = ours._replace(data=ours.data.cpu(), scale=None if ours.scale is None else ours.scale.cpu())
    if used == 0:
        return 0.0
    stored = theirs.data.shape[-1]
    if theirs.scale is not None and theirs.axis == 0 and offs is not None:
        stored = int(reference_format.padded_ends(offs, theirs.spec.span)[-1])  # behind it is anything
    a, b = (cut(operand, used, stored).double() for operand in (ours, theirs))
    differ = (a != b) & ~(a.isnan() & b.isnan())
    share = differ.double().mean().item()
    assert share <= max(SHARE, 2 / a.numel()), f"{what}: {share:.2e} of the elements differ"
    step = step_of(theirs.spec) * torch.maximum(a.abs(), b.abs()) + 2**-9 * b.abs().amax() * (theirs.scale is not None)
    assert ((a - b).abs() <= step)[differ].all(), f"{what}: {(a - b)[differ]} of {b[differ]}"
    assert relative_rms(a.nan_to_num(), b.nan_to_num()) < 2e-3, what
    return share


def cut(operand: Operand, used: int, stored: int) -> torch.Tensor:
    """The values that are defined, as they lie: the groups' rows, or their padded rows along M, gaps included."""
    dequantized = operand.dequantize()
    along_m = operand.axis == 0 and operand.scale is not None
    return dequantized[:, :stored] if along_m else dequantized[:used]


def step_of(spec: OperandSpec) -> float:
    """The largest step between neighbours, relative to them."""
    return {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.bfloat16: 2**-7}[spec.elem_dtype]
