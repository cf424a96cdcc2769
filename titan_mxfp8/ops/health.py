"""Health of a converted module: how much of its operands saturates or is flushed to zero, and which scales they have.

    forward:  y = observe(y, x, w, ...)    measures x and w: the GEMM's operands, blocks along K
    backward: dy passes through            measures dy, blocks along N, and adds all three to the module's probe

The measured counts are the *gradient* of a small leaf tensor, the probe. So they need no mutation and no side effect,
which ``torch.compile`` would have to be told of; micro-batches add up; and what activation checkpointing computes twice
counts once. Eager modules are observed within ``recording()`` only. A compiled graph is the same at every step: outside
of ``recording()`` the operator in it returns zeros.
"""

import contextlib
from collections.abc import Iterator

import torch

from titan_mxfp8 import backends
from titan_mxfp8.format.mx import BLOCK_SIZE, SCALE_BIAS, SCALE_NAN, ceil_div, decode_scale
from titan_mxfp8.recipe import Recipe

KINDS = ("activations", "weights", "gradients")
# Per kind: elements that are not zero, of those the saturated and the flushed ones, and the blocks by scale byte.
COUNTS = 3 + 256
# Of an operand with more elements, evenly spaced bands of 32 rows with about as many are measured: more would make no
# share more certain, but take time, and some 40 bytes of memory each.
SAMPLE = 1 << 24

_recording = False


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within, observed modules are measured. One training step, forward and backward, belongs in one such region."""
    global _recording
    _recording = True
    try:
        yield
    finally:
        _recording = False


def make_probe(device: torch.device) -> torch.Tensor:
    """A probe, (kinds, counts) in fp64: its ``grad`` holds the counts."""
    return torch.zeros(len(KINDS), COUNTS, dtype=torch.float64, device=device, requires_grad=True)


def observe(
    y_MN: torch.Tensor,
    x_MK: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor | None,
    probe: torch.Tensor | None,
    recipe: Recipe,
    backend: str,
) -> torch.Tensor:
    """Returns ``y_MN``, the output of a GEMM of ``x_MK`` and ``w``; measures the three operands in ``recording()``.

    Args:
        y_MN: (..., N).
        x_MK: (..., K).
        w: (N, K), or (E, N, K) with ``offs``.
        offs: int32 (E,) end offsets of the groups: rows at and past the last one do not count.
        probe: of ``make_probe``; None observes nothing.
        recipe, backend: those of the GEMM.
    """
    if probe is None or not (torch.compiler.is_compiling() or _recording):
        return y_MN
    return _Observe.apply(y_MN, probe, x_MK.detach(), w.detach(), offs, recipe, backend)


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, probe, x, w, offs, recipe, backend):
        e4m3 = torch.float8_e4m3fn
        measured = [
            _measure(x, offs, recipe.rounding, e4m3, "1x32", backend),
            _measure(w, None, recipe.rounding, e4m3, recipe.weight_block, backend),
        ]
        ctx.save_for_backward(*measured, offs)
        ctx.recipe, ctx.backend = recipe, backend
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        measured_x, measured_w, offs = ctx.saved_tensors
        measured_dy = _measure(dy, offs, ctx.recipe.rounding, ctx.recipe.grad_dtype, "1x32", ctx.backend)
        return dy, torch.stack([measured_x, measured_w, measured_dy]), None, None, None, None, None


@torch.library.custom_op("titan_mxfp8::measure_health", mutates_args=())
def _measure(
    x: torch.Tensor, offs: torch.Tensor | None, rounding: str, elem_dtype: torch.dtype, block: str, backend: str
) -> torch.Tensor:
    """The ``COUNTS`` of ``x``, or of its sample, quantised along its last axis."""
    if not _recording or x.numel() == 0:
        return torch.zeros(COUNTS, dtype=torch.float64, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    index = _sample(rows)
    if len(index) < len(rows):
        rows = rows[index]
    used = None if offs is None else index < offs[-1]
    # 32x32 blocks do not cross from one expert to the next: its rows are a multiple of 32.
    mx = backends.load(backend, x.device).quantize(
        rows, 1, rounding=rounding, elem_dtype=elem_dtype, block=block, offs=None
    )
    return _count(rows, mx.qdata, mx.scale, used, block)


@_measure.register_fake
def _(x, offs, rounding, elem_dtype, block, backend):
    return x.new_empty(COUNTS, dtype=torch.float64)


def _sample(x: torch.Tensor) -> torch.Tensor:
    """The rows to measure, in ascending order: of every n-th band of 32."""
    bands = ceil_div(x.shape[0], BLOCK_SIZE)
    every = ceil_div(bands, max(1, SAMPLE // (BLOCK_SIZE * x.shape[1])))
    first = torch.arange(0, bands, every, device=x.device) * BLOCK_SIZE
    index = (first[:, None] + torch.arange(BLOCK_SIZE, device=x.device)).flatten()
    last_band_too_long = (len(first) - 1) * every * BLOCK_SIZE + BLOCK_SIZE - x.shape[0]
    return index[: len(index) - max(0, last_band_too_long)]


def _count(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, used: torch.Tensor | None, block: str
) -> torch.Tensor:
    """The ``COUNTS`` of rows ``x``, of those that ``used`` names, if given. NaN blocks do not count."""
    row_scale = scale if block == "1x32" else scale.repeat_interleave(BLOCK_SIZE, 0)[: x.shape[0]]
    blocks = x.float().unflatten(1, (-1, BLOCK_SIZE))
    nonzero = (blocks != 0) & (row_scale != SCALE_NAN).unsqueeze(-1)
    if used is not None:
        nonzero &= used[:, None, None]
    saturated = blocks.abs() > torch.finfo(qdata.dtype).max * decode_scale(row_scale).unsqueeze(-1)
    flushed = (qdata.contiguous().view(torch.uint8) & 0x7F).unflatten(1, (-1, BLOCK_SIZE)) == 0
    occupied = nonzero.any(-1)
    if block == "32x32":
        occupied = torch.stack([band.any(0) for band in occupied.split(BLOCK_SIZE)])
    histogram = torch.zeros(256, dtype=torch.float64, device=x.device)
    histogram.index_add_(0, scale.flatten().long(), occupied.flatten().double())
    shares = torch.stack([nonzero.sum(), (nonzero & saturated).sum(), (nonzero & flushed).sum()])
    return torch.cat([shares.double(), histogram])


def summarize(counts: list[list[float]]) -> dict[str, float]:
    """Shares and scale exponents from the counts of one probe, ``probe.grad.tolist()``; keys ``<kind>/<figure>``.

    ``saturated`` and ``flushed_to_zero`` are shares of the elements that are not zero; ``scale_exponent_min`` and
    ``_max`` are those of the blocks that hold such an element. A kind without any gives no keys.
    """
    figures = {}
    for kind, (nonzero, saturated, flushed, *histogram) in zip(KINDS, counts, strict=True):
        exponents = [byte - SCALE_BIAS for byte, blocks in enumerate(histogram) if blocks]
        if exponents:
            figures[f"{kind}/saturated"] = saturated / nonzero
            figures[f"{kind}/flushed_to_zero"] = flushed / nonzero
            figures[f"{kind}/scale_exponent_min"] = min(exponents)
            figures[f"{kind}/scale_exponent_max"] = max(exponents)
    return figures
