"""Times the quantise, dequantise and pad kernels against the copy bandwidth of the same GPU in the same run.

    python scripts/bench_quantize.py results/<date>_<device>_quantize [--quick]

GB/s count each byte of the inputs and of the outputs once; ``share`` is that over the bandwidth of a device-to-device
copy, of which the bytes read and the bytes written count. Times are medians on cold caches (``testing.do_bench``).
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from titan_mxfp8.backends import Backend, load, sm100
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.common.pad import pad_token_groups, unpad_token_groups
from titan_mxfp8.backends.hardware import hardware_of
from titan_mxfp8.backends.sm100.quantize import block_scales
from titan_mxfp8.format.spec import UNQUANTIZED, OperandSpec
from titan_mxfp8.ops.pad import padded_rows
from titan_mxfp8.testing import (
    PAD_SHAPES,
    QUANTIZE_SHAPES,
    README_SHAPES,
    Timing,
    copy_bandwidth,
    do_bench,
    environment,
    format_table,
    group_sizes,
    make_offs,
    write_results,
)

ALIGNMENT = 32
DEVICE = torch.device("cuda", 0)
ONE, REBASED = OperandSpec(), {"span": 128, "scales": "across"}
# Name, what is made, and along which axes.
PORTABLE = (
    ("quantize 1x32", ONE, ("last", "first", "first ragged", "both", "both ragged")),
    ("quantize 32x32", OperandSpec(block="32x32", lines=32), ("last", "both")),
    ("quantize-dequantize", OperandSpec(stored="bf16"), ("last", "first ragged", "both ragged")),
)
HOPPER = (
    ("even 1x32", OperandSpec(stored="even"), ("last",)),
    ("even 32x32", OperandSpec(block="32x32", lines=32, stored="even"), ("last", "both")),
    ("rebase 1x32", OperandSpec(**REBASED), ("last", "first ragged", "both", "both ragged")),
    ("rebase 1x32 to squares", OperandSpec(lines=32, **REBASED), ("last", "first")),
    ("rebase 32x32", OperandSpec(block="32x32", lines=32, **REBASED), ("both",)),
)
# Of backend sm100, whose quantisers run on other NVIDIA GPUs too; its GEMMs do not.
SM100 = (
    ("blocked 1x32", OperandSpec(scales="blocked"), ("last", "last ragged", "first ragged", "both", "both ragged")),
    ("blocked 32x32", OperandSpec(block="32x32", scales="blocked"), ("last", "both")),
)
# Name, FP8 rows, and what they become along the tokens.
REQUANTISED = (("requantise 1x32", ONE, ONE), ("requantise 1x32 to values", ONE, OperandSpec(stored="bf16")))
REQUANTISED_HOPPER = (
    ("requantise rebased", OperandSpec(**REBASED), OperandSpec(**REBASED)),
    ("requantise rebased to unquantised", OperandSpec(**REBASED), UNQUANTIZED),
)


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in ``value``."""
    if isinstance(value, tuple):
        return sum(map(tensor_bytes, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def row(kernel: str, shape: tuple[int, ...], groups: int | None, timing: Timing, moved: int, ceiling: float) -> dict:
    """A row of the CSV."""
    speed = moved / timing.p50 / 1e3
    return {
        "kernel": kernel,
        "shape": "x".join(map(str, shape)),
        "groups": groups,
        "p20_us": round(timing.p20, 2),
        "p50_us": round(timing.p50, 2),
        "p80_us": round(timing.p80, 2),
        "moved_bytes": moved,
        "gb_per_s": round(speed, 1),
        "share": round(speed / ceiling, 4),
    }


def quantize_call(backend: Backend, x: torch.Tensor, spec: OperandSpec, axes: str, offs: torch.Tensor) -> Callable:
    """The call that quantises ``x`` as one of the tables says."""
    cut = offs if "ragged" in axes else None
    if "both" in axes:
        return partial(backend.quantize_both, x, spec, spec, cut)
    return partial(backend.quantize, x, 0 if "first" in axes else 1, spec, cut)


def bench_quantize(ceiling: float, quick: bool) -> Iterator[dict]:
    backend = load("auto", DEVICE)
    hardware = hardware_of(DEVICE)
    tables = PORTABLE + HOPPER * (hardware.arch == "sm_90") + SM100 * ((hardware.capability or (0, 0)) >= (9, 0))
    for shape in QUANTIZE_SHAPES[: 1 if quick else None]:
        offs = make_offs(group_sizes("zipf", shape.rows, shape.groups), DEVICE)
        for dtype, name in ((torch.bfloat16, ""), (torch.float32, " of fp32")):
            x = torch.randn((shape.rows, shape.cols), dtype=dtype, device=DEVICE)
            for kernel, spec, every_axes in tables:
                for axes in every_axes:
                    if dtype == torch.float32 and (quick or "1x32" not in kernel):
                        continue
                    call = quantize_call(sm100 if spec.scales == "blocked" else backend, x, spec, axes, offs)
                    moved = tensor_bytes(x) + tensor_bytes(call())
                    groups = shape.groups if "ragged" in axes else None
                    yield row(f"{kernel} {axes}{name}", x.shape, groups, do_bench(call), moved, ceiling)
        yield from bench_requantize(backend, x.bfloat16(), shape.groups, ceiling)
        operand = backend.quantize(x.bfloat16(), 1, ONE, None)
        call = partial(dequantize, operand)
        moved = tensor_bytes(operand) + tensor_bytes(call())
        yield row("dequantize", x.shape, None, do_bench(call), moved, ceiling)
        if tables[-1] in SM100:
            call = partial(block_scales, operand, offs)
            moved = operand.scale.numel() + call().scale.numel()
            yield row("scales to tiles ragged", operand.scale.shape, shape.groups, do_bench(call), moved, ceiling)
    for layer in README_SHAPES:
        w_ENK = torch.randn((layer.groups, layer.n, layer.k), dtype=torch.bfloat16, device=DEVICE)
        for axis, name in ((2, "last"), (1, "first")):
            call = partial(backend.quantize, w_ENK, axis, ONE, None)
            moved = tensor_bytes(w_ENK) + tensor_bytes(call())
            yield row(f"quantize 1x32 {name}, weights", w_ENK.shape, None, do_bench(call), moved, ceiling)


def bench_requantize(backend: Backend, x: torch.Tensor, groups: int, ceiling: float) -> Iterator[dict]:
    """With all rows in groups; and with an eighth, as where memory is for the worst case, of which an eighth moves."""
    for kernel, rows_spec, spec in REQUANTISED + REQUANTISED_HOPPER * (hardware_of(DEVICE).arch == "sm_90"):
        rows = backend.quantize(x, 1, rows_spec, None)
        for share, name in ((1, ""), (8, ", an eighth of the rows")):
            offs = make_offs(group_sizes("zipf", x.shape[0] // share, groups), DEVICE)
            call = partial(backend.requantize, rows, 0, spec, offs)
            moved = (tensor_bytes(rows) + tensor_bytes(call())) // share
            yield row(f"{kernel} ragged{name}", x.shape, groups, do_bench(call), moved, ceiling)


def pad_by_torch(x: torch.Tensor, offs: torch.Tensor, length: int) -> torch.Tensor:
    """The loop that a user writes: one sync, then a copy per group."""
    ends = offs.tolist()
    groups = [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    padded = torch.cat([F.pad(group, (0, 0, 0, -group.shape[0] % ALIGNMENT)) for group in groups])
    return F.pad(padded, (0, 0, 0, length - padded.shape[0]))


def bench_pad(ceiling: float) -> Iterator[dict]:
    for shape in PAD_SHAPES:
        for dtype, name in ((torch.bfloat16, ""), (torch.float32, " of fp32")):
            x = torch.randn((shape.rows, shape.cols), dtype=dtype, device=DEVICE)
            offs = make_offs(group_sizes("zipf", shape.rows, shape.groups), DEVICE)
            length = padded_rows(shape.rows, shape.groups, ALIGNMENT)
            padded = pad_by_torch(x, offs, length)
            moved = tensor_bytes((x, padded))
            calls = {
                "pad": partial(pad_token_groups, x, offs, alignment=ALIGNMENT, padded_rows=length),
                "unpad": partial(unpad_token_groups, padded, offs, alignment=ALIGNMENT, rows=shape.rows),
                "pad, torch loop": partial(pad_by_torch, x, offs, length),
            }
            assert torch.equal(calls["pad"]()[0], padded) and torch.equal(calls["unpad"](), x)
            for kernel, call in calls.items():
                result = row(kernel + name, x.shape, shape.groups, do_bench(call), moved, ceiling)
                if kernel == "pad" and not name:
                    result |= {"b200_torch_us": shape.b200_us[0], "b200_cuda_us": shape.b200_us[1]}
                yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where data.csv and env.json go")
    parser.add_argument("--quick", action="store_true", help="quantisers of one shape in bf16")
    args = parser.parse_args()
    largest = QUANTIZE_SHAPES[0]
    ceiling = copy_bandwidth(2 * largest.rows * largest.cols / 1e9)
    rows = [{"kernel": "copy", "gb_per_s": round(ceiling, 1), "share": 1.0}]
    rows += [*bench_quantize(ceiling, args.quick), *(() if args.quick else bench_pad(ceiling))]
    again = copy_bandwidth(2 * largest.rows * largest.cols / 1e9)
    rows.append({"kernel": "copy, at the end", "gb_per_s": round(again, 1), "share": round(again / ceiling, 4)})
    write_results(args.folder, rows, environment())
    shown = ("kernel", "shape", "groups", "p50_us", "gb_per_s", "share")
    print(format_table([{key: result.get(key) for key in shown} for result in rows]))


if __name__ == "__main__":
    main()
