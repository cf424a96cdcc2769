"""Times the quantise, dequantise and pad kernels against the copy bandwidth of the same GPU in the same run.

    python scripts/bench_quantize.py results/<date>_<device>_quantize

GB/s count each byte of the inputs and of the outputs once; ``share`` is that over the bandwidth of a device-to-device
copy, of which the bytes read and the bytes written count. Times are medians on cold caches (``testing.do_bench``).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from titan_mxfp8.backends import load, select
from titan_mxfp8.backends import triton as backend
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.ops import library
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

PLAIN = {"rounding": "rceil", "elem_dtype": torch.float8_e4m3fn}
ALIGNMENT = 32


def tensor_bytes(value: object) -> int:
    """Bytes of all tensors in ``value``."""
    if isinstance(value, MXTensor):
        return tensor_bytes((value.qdata, value.scale))
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


def quantize_calls(x: torch.Tensor, offs: torch.Tensor) -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """Name, whether the groups matter, and call."""
    one, squares = PLAIN | {"block": "1x32"}, PLAIN | {"block": "32x32"}
    yield "quantize 1x32 last", False, lambda: backend.quantize(x, 1, offs=None, **one)
    yield "quantize 1x32 first", False, lambda: backend.quantize(x, 0, offs=None, **one)
    yield "quantize 1x32 first ragged", True, lambda: backend.quantize(x, 0, offs=offs, **one)
    yield "quantize 1x32 both", False, lambda: backend.quantize_both(x, offs=None, **one)
    yield "quantize 1x32 both ragged", True, lambda: backend.quantize_both(x, offs=offs, **one)
    yield "quantize 32x32 last", False, lambda: backend.quantize(x, 1, offs=None, **squares)
    yield "quantize 32x32 both", False, lambda: backend.quantize_both(x, offs=None, **squares)
    mx = backend.quantize(x, 1, offs=None, **one)
    yield "dequantize", False, lambda: backend.dequantize(mx, torch.bfloat16)
    yield "quantize-dequantize last", False, lambda: backend.quantize_dequantize(x, 1, offs=None, **one)
    yield "quantize-dequantize first ragged", True, lambda: backend.quantize_dequantize(x, 0, offs=offs, **one)
    yield "quantize-dequantize both ragged", True, lambda: backend.quantize_dequantize_both(x, offs=offs, **PLAIN)


def rebased_calls(x: torch.Tensor, offs: torch.Tensor) -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """The same where the backend rebases."""
    if select("auto", x.device).name != "hopper":
        return
    hopper = load("hopper", x.device)
    one, squares = PLAIN | {"block": "1x32"}, PLAIN | {"block": "32x32"}
    form, forms = {"form": "1x128"}, {"forms": ("1x128", "1x128")}
    square, squares_both = {"form": "32x128"}, {"forms": ("32x128", "32x128")}
    yield "rebase 1x32 last", False, lambda: hopper.quantize_operand(x, 1, offs=None, **form, **one)
    yield "rebase 1x32 first ragged", True, lambda: hopper.quantize_operand(x, 0, offs=offs, **form, **one)
    yield "rebase 1x32 both", False, lambda: hopper.quantize_operand_both(x, offs=None, **forms, **one)
    yield "rebase 1x32 both ragged", True, lambda: hopper.quantize_operand_both(x, offs=offs, **forms, **one)
    yield "rebase 1x32 to squares last", False, lambda: hopper.quantize_operand(x, 1, offs=None, **square, **one)
    yield "rebase 1x32 to squares first", False, lambda: hopper.quantize_operand(x, 0, offs=None, **square, **one)
    yield "rebase 32x32 both", False, lambda: hopper.quantize_operand_both(x, offs=None, **squares_both, **squares)


def bench_quantize(ceiling: float) -> Iterator[dict]:
    for shape in QUANTIZE_SHAPES:
        offs = make_offs(group_sizes("zipf", shape.rows, shape.groups), "cuda")
        for dtype, name in ((torch.bfloat16, ""), (torch.float32, " of fp32")):
            x = torch.randn((shape.rows, shape.cols), dtype=dtype, device="cuda")
            for kernel, ragged, call in (*quantize_calls(x, offs), *rebased_calls(x, offs)):
                if dtype == torch.float32 and "1x32" not in kernel:
                    continue
                source = x if kernel != "dequantize" else backend.quantize(x, 1, block="1x32", offs=None, **PLAIN)
                moved = tensor_bytes(source) + tensor_bytes(call())
                yield row(kernel + name, x.shape, shape.groups if ragged else None, do_bench(call), moved, ceiling)
            del x
    for layer in README_SHAPES:
        w_ENK = torch.randn((layer.groups, layer.n, layer.k), dtype=torch.bfloat16, device="cuda")
        for axis, name in ((2, "last"), (1, "first")):

            def call(w_ENK: torch.Tensor = w_ENK, axis: int = axis) -> MXTensor:
                return backend.quantize(w_ENK, axis, block="1x32", offs=None, **PLAIN)

            moved = tensor_bytes(w_ENK) + tensor_bytes(call())
            yield row(f"quantize 1x32 {name}, weights", w_ENK.shape, None, do_bench(call), moved, ceiling)


def pad_by_torch(x: torch.Tensor, offs: torch.Tensor, length: int) -> torch.Tensor:
    """The loop that a user writes: one sync, then a copy per group."""
    ends = offs.tolist()
    groups = [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    padded = torch.cat([F.pad(group, (0, 0, 0, -group.shape[0] % ALIGNMENT)) for group in groups])
    return F.pad(padded, (0, 0, 0, length - padded.shape[0]))


def bench_pad(ceiling: float) -> Iterator[dict]:
    for shape in PAD_SHAPES:
        for dtype, name in ((torch.bfloat16, ""), (torch.float32, " of fp32")):
            x = torch.randn((shape.rows, shape.cols), dtype=dtype, device="cuda")
            offs = make_offs(group_sizes("zipf", shape.rows, shape.groups), "cuda")
            length = padded_rows(shape.rows, shape.groups, ALIGNMENT)
            padded = pad_by_torch(x, offs, length)
            moved = tensor_bytes((x, padded))
            calls = {
                "pad": lambda x=x, offs=offs, length=length: backend.pad_token_groups(
                    x, offs, alignment=ALIGNMENT, padded_rows=length
                )[0],
                "unpad": lambda padded=padded, offs=offs, rows=shape.rows: backend.unpad_token_groups(
                    padded, offs, alignment=ALIGNMENT, rows=rows
                ),
                "pad, torch loop": lambda x=x, offs=offs, length=length: pad_by_torch(x, offs, length),
            }
            assert torch.equal(calls["pad"](), padded) and torch.equal(calls["unpad"](), x)
            for kernel, call in calls.items():
                result = row(kernel + name, x.shape, shape.groups, do_bench(call), moved, ceiling)
                if kernel == "pad" and not name:
                    result |= {"b200_torch_us": shape.b200_us[0], "b200_cuda_us": shape.b200_us[1]}
                yield result


def host_us(call: Callable[[], object], calls: int = 300) -> float:
    """Microseconds that the host spends on one call whose kernels take less."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls * 1e6


def bench_host() -> Iterator[dict]:
    """What a call costs the host, which CUDA graphs take away."""
    x, offs = torch.randn(256, 256, device="cuda").bfloat16(), make_offs([100, 156], "cuda")
    kwargs = PLAIN | {"block": "1x32"}
    for kernel, call in {
        "host: backend.quantize": lambda: backend.quantize(x, 1, offs=None, **kwargs),
        "host: backend.quantize_both ragged": lambda: backend.quantize_both(x, offs=offs, **kwargs),
        "host: op quantize": lambda: library.quantize(x, 1, offs=None, backend="auto", **kwargs),
        "host: op quantize_operand_both ragged": lambda: library.quantize_operand_both(
            x, offs=offs, backend="triton", forms=("bf16", "bf16"), **kwargs
        ),
    }.items():
        yield {"kernel": kernel, "shape": "256x256", "p50_us": round(host_us(call), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where data.csv and env.json go")
    folder = parser.parse_args().folder
    largest = QUANTIZE_SHAPES[0]
    ceiling = copy_bandwidth(2 * largest.rows * largest.cols / 1e9)
    rows = [{"kernel": "copy", "gb_per_s": round(ceiling, 1), "share": 1.0}]
    for group in (bench_quantize(ceiling), bench_pad(ceiling), bench_host()):
        rows += group
    again = copy_bandwidth(2 * largest.rows * largest.cols / 1e9)
    rows.append({"kernel": "copy, at the end", "gb_per_s": round(again, 1), "share": round(again / ceiling, 4)})
    write_results(folder, rows, environment())
    shown = ("kernel", "shape", "groups", "p50_us", "gb_per_s", "share")
    print(format_table([{key: result.get(key) for key in shown} for result in rows]))


if __name__ == "__main__":
    main()
