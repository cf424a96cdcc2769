"""The Hopper GEMMs compiled for SM90 without a GPU: FP8 tensor cores, not serialised, no spills where it counts.

``pytest -rP tests/test_hopper_gemm_aot.py`` prints what was found.
"""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from aot import SHARED_BYTES, Kernel, compile_only
from triton import __version__ as triton_version

from titan_mxfp8.backends import hopper
from titan_mxfp8.backends.hopper import gemm, swiglu_gemm
from titan_mxfp8.format.spec import Operand, OperandSpec, interleave
from titan_mxfp8.logs import log_once

pytestmark = pytest.mark.integration
NIGHTLY = pytest.mark.nightly

M, N, K, E = 4096, 512, 1056, 8  # K is a multiple of 32 but of no tile
BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


def operand(*shape: int, axis: int, elem_dtype: torch.dtype = E4M3, **fields) -> Operand:
    """An operand made from a tensor of this shape."""
    scales = "mn_major" if fields.get("block_k") == 128 else "k_major"
    spec = OperandSpec(elem_dtype=elem_dtype, scales=scales, **fields)
    return spec.empty(torch.empty(shape, dtype=BF16), axis, None)


def exact(tiles: gemm.Tiles) -> None:
    x = operand(M, K, axis=1, elem_dtype=E5M2, stored="coalesced")
    forward(x, operand(E, N, K, axis=2, block="32x32", block_mn=32, stored="coalesced"), tiles)


def rebased(tiles: gemm.Tiles) -> None:
    x, w = operand(M, K, axis=1, elem_dtype=E5M2, block_k=128), operand(E, N, K, axis=2, block_mn=32, block_k=128)
    forward(x, w, tiles)


def rebased_sum(tiles: gemm.Tiles) -> None:
    """Of interleaved operands."""
    dy, w = operand(M, 512, axis=1, block_k=128), operand(E, N, 512, axis=2, block_mn=32, block_k=128)
    dgate, dup = interleave(dy, dy)
    forward(dgate, w, tiles, second=(dup, w))


def forward(x: Operand, w: Operand, tiles: gemm.Tiles, second: tuple[Operand, Operand] | None = None) -> None:
    offs, bias = torch.zeros(E, dtype=torch.int32), torch.empty(E, N, dtype=BF16)
    gemm.gemm_m_grouped(x, w, offs, None if second else bias, BF16, second=second, tiles=tiles)


def wgrad(tiles: gemm.Tiles, add: bool = False) -> None:
    dy, x = operand(M, N, axis=0, block_k=128), operand(M, K, axis=0, block_k=128)
    out = torch.empty(E, N, K, dtype=FP32) if add else None
    gemm.gemm_k_grouped(dy, x, torch.zeros(E, dtype=torch.int32), FP32, out, tiles)


def loops_that_multiply(kernel: Kernel, count: int) -> list[str]:
    """The machine code of the ``count`` shortest loops that multiply; others are around them."""
    lines = kernel.assembly.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"\s*(\.L_[\w.]+):", line))}
    ends = ((i, re.search(r"\bBRA\S*\s.*?(\.L_[\w.]+)", line)) for i, line in enumerate(lines))
    loops = ["\n".join(lines[labels[match[1]] : i + 1]) for i, match in ends if match and labels.get(match[1], i) < i]
    return sorted((loop for loop in loops if " QGMMA" in loop), key=len)[:count]


@pytest.mark.parametrize(
    "launch, tiles, fp32_operations",
    [
        pytest.param(exact, gemm.M_GROUPED, 64 * 4, id="exact"),
        pytest.param(rebased, gemm.M_GROUPED, 64, id="rebased"),
        pytest.param(rebased_sum, gemm.M_GROUPED, 64, id="sum of two", marks=NIGHTLY),
        pytest.param(exact, gemm.FEW_ROWS, 64 * 4, id="exact-few-rows", marks=NIGHTLY),
        pytest.param(rebased, gemm.FEW_ROWS, 64, id="rebased-few-rows", marks=NIGHTLY),
        pytest.param(wgrad, gemm.K_GROUPED, 2 * 2 * 64, id="wgrad"),
        pytest.param(partial(wgrad, add=True), gemm.K_GROUPED, 2 * 2 * 64, id="wgrad, added", marks=NIGHTLY),
    ],
)
def test_compiles(launch: Callable[[gemm.Tiles], None], tiles: gemm.Tiles, fp32_operations: int):
    """``fp32_operations``: that a thread needs for a stage, an FMUL or FFMA each."""
    with compile_only("sm_90") as compiled:
        launch(tiles)
    (kernel,) = (kernel for kernel in compiled if kernel.name == "_gemm_kernel")
    print(kernel)
    assert kernel.assembly.count(" ATOMG") == 1  # takes the next tile
    assert not kernel.warnings  # such as C7510 to C7515, multiplications serialised
    assert kernel.shared <= SHARED_BYTES["sm_90"]
    # Some of what a role knows of its tile may be spilled, not what the loops over stages use.
    assert kernel.spills <= 256
    for loop in loops_that_multiply(kernel, tiles.warpgroups):
        print({opcode: loop.count(f" {opcode}") for opcode in ("QGMMA", "FFMA", "FMUL", "LDS", "STL", "LDL")})
        assert loop.count(" QGMMA") == 4 * tiles.parts // tiles.warpgroups
        assert " STL" not in loop and loop.count(" LDL") <= 1  # none with Triton 3.6
        # With squares also the scales' products, one for 8 sums.
        assert fp32_operations <= loop.count(" FFMA") + loop.count(" FMUL") <= fp32_operations * 9 // 8


@pytest.mark.parametrize(
    "tiles", [gemm.M_GROUPED, pytest.param(gemm.FEW_ROWS, marks=NIGHTLY)], ids=["192 rows", "128 rows"]
)
def test_swiglu_in_the_gemm_compiles(tiles: gemm.Tiles) -> None:
    x, w = operand(M, K, axis=1, block_k=128), operand(E, N, K, axis=2, block_mn=32, block_k=128)
    with compile_only("sm_90") as compiled:
        swiglu_gemm.swiglu_gemm(x, w, w, x.spec, torch.zeros(E, dtype=torch.int32), tiles)
    (kernel,) = (kernel for kernel in compiled if kernel.name == "_swiglu_gemm_kernel")
    print(kernel)
    assert not kernel.warnings and kernel.shared <= SHARED_BYTES["sm_90"]
    assert kernel.spills <= (0 if triton_version.startswith("3.6.") else 384)
    for loop in loops_that_multiply(kernel, 2 * tiles.warpgroups):  # over the stages of gate and of up
        assert loop.count(" QGMMA") == 4 and " STL" not in loop and " LDL" not in loop
        assert 64 <= loop.count(" FFMA") + loop.count(" FMUL") <= 72
    # A thread has 64 features of a tile.
    assert kernel.count("MUFU.EX2") == 64 * tiles.warpgroups and kernel.count("F2F.") == 0
    assert kernel.count("UTMASTG") == 3 * tiles.warpgroups  # gate, up and h are stored by TMA


# Which call, and what the log says of it.
SWIGLU = {
    "nothing": "in the GEMM that",
    "clamped": "their SwiGLU is clamped",
    "gate's bias": "they have biases",
    "up's bias": "they have biases",
    "features": "these are not whole blocks",
    "exact": "their operands are not rebased",
    "values in bf16": "their operands are not rebased",
}


@pytest.mark.parametrize("case", SWIGLU)
def test_swiglu_in_the_gemm_is_chosen_where_it_can(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []
    log_once.cache_clear()
    caplog.set_level("INFO")
    monkeypatch.setattr(hopper.swiglu_gemm, "swiglu_gemm", lambda *args: calls.append(args))
    features, bias = 192 if case == "features" else 256, torch.empty(2, 256)
    of_a, of_w = {
        "exact": ({}, {"block": "32x32", "block_mn": 32}),
        "values in bf16": ({"stored": "bf16"}, {"stored": "bf16"}),
    }.get(case, ({"block_k": 128}, {"block_k": 128, "block_mn": 32}))
    a, w = operand(64, 32, axis=1, **of_a), operand(2, features, 32, axis=2, **of_w)
    biases = bias if case == "gate's bias" else None, bias if case == "up's bias" else None
    hopper.swiglu_gemm_m_grouped(a, w, w, biases, 7.0 if case == "clamped" else None, a.spec, None)
    assert len(calls) == (case == "nothing")
    assert [SWIGLU[case] in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("in_bf16", ["a", "b", "neither"])
def test_what_has_no_kernel_here_goes_to_the_portable_gemms(in_bf16: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in bf16 on either side, say where activations that came quantised meet weights in bf16; 1x32 by 1x32."""
    calls = []
    monkeypatch.setattr(hopper.portable, "gemm_m_grouped", lambda *args: calls.append(args))
    stored = {name: "bf16" if name == in_bf16 else "fp8" for name in ("a", "b")}
    a, b = operand(64, 32, axis=1, stored=stored["a"]), operand(1, 96, 32, axis=2, stored=stored["b"])
    hopper.gemm_m_grouped(a, b, None, None, BF16)
    assert len(calls) == 1


def test_blocks_that_do_not_belong_together_raise() -> None:
    exact, rebased = operand(64, 32, axis=1), operand(64, 32, axis=1, block_k=128)
    squares = operand(1, 96, 32, axis=2, block="32x32", block_mn=32)
    with pytest.raises(ValueError, match="cannot multiply blocks of 1x128 by blocks of 32x32"):
        hopper.gemm_m_grouped(rebased, squares, None, None, BF16)
    with pytest.raises(ValueError, match="cannot multiply blocks of 1x32 by blocks of 1x128"):
        hopper.gemm_k_grouped(exact._replace(axis=0), rebased._replace(axis=0), None, BF16)
