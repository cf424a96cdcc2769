"""The Hopper GEMMs compiled for SM90 without a GPU: FP8 tensor cores, not serialised, no spills where it counts.

``pytest -rP tests/test_hopper_gemm_aot.py`` prints what was found.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from aot import SHARED_BYTES, Kernel, compile_only

from titan_mxfp8.backends.hopper import gemm, operands
from titan_mxfp8.format.mx import Block, MXTensor, ceil_div

M, N, K, E = 4096, 512, 1056, 8  # K is a multiple of 32 but of no tile
BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


def operand(*shape: int, block: Block, elem_dtype: torch.dtype = E4M3) -> MXTensor:
    """An operand of this shape, quantised along the last axis."""
    *rest, rows, length = shape
    across, along = (int(size) for size in block.split("x"))
    scale = torch.empty(*rest, ceil_div(length, along), ceil_div(rows, across), dtype=torch.uint8).mT
    return MXTensor(torch.empty(shape, dtype=elem_dtype), scale, len(shape) - 1, block, BF16)


def forward(weight_block: Block, tiles: gemm.Tiles) -> None:
    a = operand(M, K, block="1x32" if weight_block == "32x32" else "1x128", elem_dtype=E5M2)
    b, offs = operand(E, N, K, block=weight_block).mT, torch.zeros(E, dtype=torch.int32)
    gemm.multiply_m_grouped(a, b, offs, torch.empty(E, N, dtype=BF16), BF16, tiles)


def wgrad(tiles: gemm.Tiles) -> None:
    a, b = operand(N, M, block="1x128"), operand(K, M, block="1x128").mT
    gemm.multiply_k_grouped(a, b, torch.zeros(E, dtype=torch.int32), FP32, tiles)


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
        pytest.param(lambda tiles: forward("32x32", tiles), gemm.M_GROUPED, 64 * 4, id="32x32"),
        pytest.param(lambda tiles: forward("32x128", tiles), gemm.M_GROUPED, 64, id="32x128"),
        pytest.param(lambda tiles: forward("32x32", tiles), gemm.FEW_ROWS, 64 * 4, id="32x32-few-rows"),
        pytest.param(lambda tiles: forward("32x128", tiles), gemm.FEW_ROWS, 64, id="32x128-few-rows"),
        pytest.param(wgrad, gemm.K_GROUPED, 2 * 2 * 64, id="wgrad"),
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


def test_operands_are_fp8_where_that_is_faster() -> None:
    device, bf16 = torch.device("cuda", 0), ("bf16", "bf16")
    assert operands.operand_forms("m_grouped", "32x32", False, device) == ("even", "even")
    assert operands.operand_forms("m_grouped", "1x32", False, device) == bf16
    assert operands.operand_forms("k_grouped", "32x32", False, device) == bf16
    assert operands.operand_forms("m_grouped", "1x32", True, device) == ("1x128", "32x128")


@pytest.mark.parametrize("dequantized", ["a", "b"])
def test_dequantised_operands_go_to_the_portable_gemm(dequantized: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either operand: activations that came quantised meet weights in bf16."""
    calls = []
    monkeypatch.setattr(gemm.portable, "gemm_m_grouped", lambda *args, **kwargs: calls.append(args))
    operands = {"a": operand(64, 32, block="1x32"), "b": operand(1, 96, 32, block="32x32").mT}
    operands[dequantized] = replace(operands[dequantized], qdata=operands[dequantized].qdata.bfloat16())
    gemm.gemm_m_grouped(*operands.values(), None, bias=None, out_dtype=BF16)
    assert len(calls) == 1
