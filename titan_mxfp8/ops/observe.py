"""What quantisation does to the operands of a converted module, measured beside the GEMMs and not inside them: how much
saturates or is flushed to zero, which scales there are, and what rebasing and requantising changed.

    forward:  y = observe(y, x, w, ...)    measures x and w: the GEMM's operands, blocks along K
    backward: dy passes through            measures dy, blocks along N, and adds all three to the module's probe

The measured counts are the *gradient* of a small leaf tensor, the probe. So they need no mutation and no side effect,
which ``torch.compile`` would have to be told of; micro-batches add up; and what activation checkpointing computes twice
counts once. Eager modules are observed within ``recording()`` only. A compiled graph is the same at every step: outside
of ``recording()`` the operator in it returns zeros.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from titan_mxfp8 import backends
from titan_mxfp8.backends.reference import specs
from titan_mxfp8.format import reference
from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.mx import BLOCK_SIZE, SCALE_BIAS, SCALE_NAN, ceil_div, decode_scale
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.ops.autograd import is_exporting
from titan_mxfp8.ops.config import MXConfig

KINDS = ("activations", "weights", "gradients")
# Per kind: elements that are not zero, of those the saturated and the flushed ones; elements that were rebased, of
# those the changed ones; the same of those that were requantised; and the blocks by scale byte.
COUNTS = 7 + 256
# Of an operand with more elements, evenly spaced bands of 128 rows with about as many are measured: more would make no
# share more certain, but take time, and some 40 bytes of memory each.
SAMPLE = 1 << 24
BAND = 128

_recording = False


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within, observed modules are measured. One training step, forward and backward, belongs in one such region."""
    global _recording
    outer, _recording = _recording, True
    try:
        yield
    finally:
        _recording = outer


def is_recording() -> bool:
    """Whether this is within ``recording()``."""
    return _recording


def make_probe(device: torch.device) -> Tensor:
    """A probe, (kinds, counts) in fp64: its ``grad`` holds the counts."""
    return torch.zeros(len(KINDS), COUNTS, dtype=torch.float64, device=device, requires_grad=True)


def observe(
    y_MN: Tensor,
    x_MK: Tensor,
    w: Tensor | Sequence[Tensor] | Callable[[], Sequence[Tensor]],
    offs: Tensor | None,
    probe: Tensor | None,
    config: MXConfig,
    dispatched: bool = False,
) -> Tensor:
    """Returns ``y_MN``, the output of a GEMM of ``x_MK`` and ``w``; measures the three operands in ``recording()``.

    Args:
        y_MN: (..., N).
        x_MK: (..., K).
        w: (N, K), or (E, N, K) with ``offs``; or all weights between ``x_MK`` and ``y_MN``, which count together; or
            what makes those, which costs nothing where nothing is measured.
        offs: int32 (E,) end offsets of the groups: rows at and past the last one do not count.
        probe: of ``make_probe``; None observes nothing, and nor do graphs of ``torch.export``.
        config: that of the GEMM.
        dispatched: whether ``x_MK`` and the gradient travel as FP8 rows, which are requantised for the weight gradient.
    """
    if probe is None or not (torch.compiler.is_compiling() or _recording) or is_exporting():
        return y_MN
    w = w() if callable(w) else w
    weights = [weight.detach() for weight in ([w] if isinstance(w, Tensor) else w)]
    return _Observe.apply(y_MN, probe, x_MK.detach(), offs, config.recipe, config.backend, dispatched, *weights)


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, probe, x, offs, recipe, backend, dispatched, *weights):
        x_spec, dy_spec, w_spec = _spec_keys(recipe.key)
        by_tokens = recipe.wgrad == "mxfp8"
        how = by_tokens, by_tokens and dispatched, backend
        measured_w = sum(_measure(w, None, w_spec, False, False, backend) for w in weights)
        ctx.save_for_backward(_measure(x, offs, x_spec, *how), measured_w, offs)
        ctx.dy_spec, ctx.how = dy_spec, how
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        measured_x, measured_w, offs = ctx.saved_tensors
        measured_dy = _measure(dy, offs, ctx.dy_spec, *ctx.how)
        return dy, torch.stack([measured_x, measured_w, measured_dy]), *[None] * (len(ctx.needs_input_grad) - 2)


@torch.compiler.assume_constant_result
def _spec_keys(recipe: str) -> tuple[str, ...]:
    return tuple(spec.key for spec in specs(decode(recipe)))


@torch.library.custom_op("titan_mxfp8::measure", mutates_args=())
def _measure(x: Tensor, offs: Tensor | None, spec: str, by_tokens: bool, requantized: bool, backend: str) -> Tensor:
    """The ``COUNTS`` of ``x``, or of its sample, quantised along its last axis.

    With ``by_tokens``, what rebasing changes is counted along the tokens too; with ``requantized``, what quantising
    along the tokens changes in rows that were quantised along the last axis. Both as if groups ended nowhere.
    """
    if not _recording or x.numel() == 0:
        return torch.zeros(COUNTS, dtype=torch.float64, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    index = _sample(rows)
    if len(index) < len(rows):
        rows = rows[index]
    used = torch.ones(len(rows), dtype=torch.bool, device=x.device) if offs is None else index < offs[-1]
    wanted, kernels = decode(spec), backends.load(backend, x.device)
    exact = kernels.quantize(rows, 1, wanted.exact, None)  # 32x32 blocks lie in one expert: its rows are whole blocks
    changed = [0, 0, 0, 0]  # of rebased elements and of requantised ones: how many there are, and how many changed
    all_used = used.sum() * rows.shape[1]
    if wanted.block_k > BLOCK_SIZE:
        for axis in (1, 0) if by_tokens else (1,):
            before = exact if axis == 1 else kernels.quantize(rows, 0, wanted.exact, None)
            after = kernels.quantize(rows, axis, wanted, None)
            changed[:2] = changed[0] + all_used, changed[1] + _changed(before, after, used)
    if requantized:
        arrived = exact if wanted.block_k == BLOCK_SIZE else kernels.quantize(rows, 1, wanted, None)
        again = reference.requantize(arrived, 0, wanted)
        changed[2:] = all_used, _changed(arrived, again, used)
    return _count(rows, exact, used, wanted, changed)


@_measure.register_fake
def _(x, offs, spec, by_tokens, requantized, backend):
    return x.new_empty(COUNTS, dtype=torch.float64)


def _sample(x: Tensor) -> Tensor:
    """The rows to measure, in ascending order: of every n-th band."""
    bands = ceil_div(x.shape[0], BAND)
    every = ceil_div(bands, max(1, SAMPLE // (BAND * x.shape[1])))
    first = torch.arange(0, bands, every, device=x.device) * BAND
    index = (first[:, None] + torch.arange(BAND, device=x.device)).flatten()
    last_band_too_long = (len(first) - 1) * every * BAND + BAND - x.shape[0]
    return index[: len(index) - max(0, last_band_too_long)]


def _changed(before: Operand, after: Operand, used: Tensor) -> Tensor:
    """How many elements of the rows in ``used`` have another value in ``after``, NaN aside."""
    changed = reference.changed_elements(before, after)
    return (changed.mT[: len(used)] if before.axis == 0 else changed)[used].sum()


def _count(x: Tensor, exact: Operand, used: Tensor, spec: OperandSpec, changed: list[Tensor | int]) -> Tensor:
    """The ``COUNTS`` of rows ``x``, of those in ``used``. NaN blocks do not count."""
    squares = spec.block == "32x32"
    row_scale = exact.scale.repeat_interleave(BLOCK_SIZE, 0)[: x.shape[0]] if squares else exact.scale
    blocks = x.float().unflatten(1, (-1, BLOCK_SIZE))
    nonzero = (blocks != 0) & (row_scale != SCALE_NAN).unsqueeze(-1) & used[:, None, None]
    saturated = blocks.abs() > torch.finfo(spec.elem_dtype).max * decode_scale(row_scale).unsqueeze(-1)
    flushed = (exact.data.view(torch.uint8) & 0x7F).unflatten(1, (-1, BLOCK_SIZE)) == 0
    occupied = nonzero.any(-1)
    if squares:
        occupied = torch.stack([band.any(0) for band in occupied.split(BLOCK_SIZE)])
    histogram = torch.zeros(256, dtype=torch.float64, device=x.device)
    histogram.index_add_(0, exact.scale.flatten().long(), occupied.flatten().double())
    counts = [nonzero.sum(), (nonzero & saturated).sum(), (nonzero & flushed).sum(), *changed]
    return torch.cat([torch.stack([torch.as_tensor(n, device=x.device).double() for n in counts]), histogram])


def summarize(counts: list[list[float]]) -> dict[str, float]:
    """Shares and scale exponents from the counts of one probe, ``probe.grad.tolist()``; keys ``<kind>/<figure>``.

    ``saturated`` and ``flushed_to_zero`` are shares of the elements that are not zero, ``scale_exponent_min`` and
    ``_max`` those of the blocks that hold such an element, all of exact MXFP8; ``changed_by_rebase`` and
    ``changed_by_requantize`` are the shares of elements whose value that changed. A kind without any gives no keys.
    """
    figures = {}
    for kind, (nonzero, saturated, flushed, *pairs_and_blocks) in zip(KINDS, counts, strict=True):
        changed, histogram = pairs_and_blocks[:4], pairs_and_blocks[4:]
        exponents = [byte - SCALE_BIAS for byte, blocks in enumerate(histogram) if blocks]
        if exponents:
            figures[f"{kind}/saturated"] = saturated / nonzero
            figures[f"{kind}/flushed_to_zero"] = flushed / nonzero
            figures[f"{kind}/scale_exponent_min"] = min(exponents)
            figures[f"{kind}/scale_exponent_max"] = max(exponents)
        for what, elements, differ in (("rebase", *changed[:2]), ("requantize", *changed[2:])):
            if elements:
                figures[f"{kind}/changed_by_{what}"] = differ / elements
    return figures


def rebase_report(counts: Mapping[str, list[list[float]]]) -> str | None:
    """What rebasing changed, in words: per kind of operand the share of changed elements, and the module with the
    largest; None if nothing was rebased. ``counts``: ``probe.grad.tolist()`` of each module, by name."""
    parts = []
    for i, kind in enumerate(KINDS):
        of_modules = {name: (of_module[i][3], of_module[i][4]) for name, of_module in counts.items()}
        elements, changed = (sum(pair[j] for pair in of_modules.values()) for j in (0, 1))
        if elements:
            shares = {name: pair[1] / max(pair[0], 1) for name, pair in of_modules.items()}
            most = max(shares, key=shares.get)
            parts.append(f"{kind} {changed / elements:.2e} (most in {most}: {shares[most]:.2e})")
    return ", ".join(parts) or None
