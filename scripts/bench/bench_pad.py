"""Pad and unpad of token groups against the loop that a user writes, and against the copy bandwidth.

    python scripts/bench/bench_pad.py --out results/<date>_<device>_pad [--quick] [--limit SECONDS]

How a time is taken and most columns: ``bench.py``. M tokens of K features in G groups of Zipf sizes; ``share`` is of
the copy bandwidth of the same run. The loop waits for the GPU once, for the sizes, then pads each group and joins them.
``b200_torch_us`` and ``b200_cuda_us`` are what torchao's issue 3998 states for such padding on a B200, by torch and by
its fastest kernel. A result that is not that of the loop ends the run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from scripts.bench.bench import Bench, Entry, Work, parse, parser_of, run
from scripts.bench.problems import group_sizes, make_offs
from titan_mxfp8.format.mx import ragged_rows
from titan_mxfp8.ops.pad import pad_token_groups, unpad_token_groups

ALIGNMENT = 32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class PadShape:
    """(rows, cols) tokens in groups. ``b200_us``: torch / CUDA times that torchao 3998 states, measured on a B200."""

    rows: int
    cols: int
    groups: int
    b200_us: tuple[float, float]


# torchao 3998: the padding that MXFP8 needed without a host sync.
PAD_SHAPES = tuple(
    PadShape(rows=16384, cols=cols, groups=groups, b200_us=b200_us)
    for cols, groups, b200_us in (
        (1536, 1, (436.5, 320.4)),
        (1536, 16, (598.0, 286.3)),
        (2048, 1, (441.9, 292.4)),
        (2048, 16, (585.3, 293.4)),
        (5120, 1, (460.0, 300.0)),
        (5120, 16, (607.2, 296.0)),
        (7168, 1, (465.1, 295.8)),
        (7168, 16, (609.1, 299.0)),
    )
)


def pad_by_torch(x: torch.Tensor, offs: torch.Tensor, length: int) -> torch.Tensor:
    """The loop that a user writes: one sync, then a copy per group."""
    ends = offs.tolist()
    groups = [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    padded = torch.cat([F.pad(group, (0, 0, 0, -group.shape[0] % ALIGNMENT)) for group in groups])
    return F.pad(padded, (0, 0, 0, length - padded.shape[0]))


def measure_shape(bench: Bench, shape: PadShape, dtype: str) -> None:
    """The rows of a shape: padding against the loop, and back."""
    x = torch.randn((shape.rows, shape.cols), dtype=DTYPES[dtype], device=bench.device)
    offs = make_offs(group_sizes("zipf", shape.rows, shape.groups), bench.device)
    length = ragged_rows(shape.rows, shape.groups, ALIGNMENT)
    loop = partial(pad_by_torch, x, offs, length)
    padded = loop()
    pad = partial(pad_token_groups, x, offs, ALIGNMENT)
    unpad = partial(unpad_token_groups, padded, offs, ALIGNMENT, shape.rows)
    if not torch.equal(pad()[0], padded) or not torch.equal(unpad(), x):
        raise ValueError(f"{shape.rows} x {shape.cols} in {shape.groups} groups: not what the loop over groups gives")
    work = Work(moved=x.nbytes + padded.nbytes, ceiling="copy")
    for what, call, base in (("pad", pad, loop), ("unpad", unpad, None)):
        key = bench.key(M=shape.rows, K=shape.cols, G=shape.groups, groups="zipf", dtype=dtype, what=what)
        if bench.is_due(key):
            torch_us, cuda_us = shape.b200_us
            stated = {"b200_torch_us": torch_us, "b200_cuda_us": cuda_us}
            bench.compare([Entry(key=key, call=call, work=work, more=stated)], base)


def main(argv: Sequence[str]) -> None:
    args = parse(parser_of(__doc__), argv)

    def measure(bench: Bench) -> None:
        bench.measure_ceilings()
        for dtype in ("bf16",) if args.quick else DTYPES:
            for shape in PAD_SHAPES:
                measure_shape(bench, shape, dtype)

    run("pad", args, measure)


if __name__ == "__main__":
    main(sys.argv[1:])
