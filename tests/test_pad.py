"""``pad_token_groups`` and ``unpad_token_groups`` as a user calls them, on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from contract import wild
from torch._subclasses import FakeTensorMode

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8.format.mx import ragged_rows
from titan_mxfp8.ops.pad import pad_token_groups, unpad_token_groups


def check(x: torch.Tensor, sizes: list[int], alignment: int) -> None:
    """There, against rows put together by hand, and back, from a buffer with NaN between the groups."""
    offs, used = make_offs(sizes), sum(sizes)
    groups = x[:used].split(sizes)
    rows = torch.cat([F.pad(group, (0, 0, 0, -len(group) % alignment)) for group in groups])
    filled = torch.cat([F.pad(torch.ones(len(group)), (0, -len(group) % alignment)) for group in groups]).bool()
    padded, padded_offs = pad_token_groups(x, offs, alignment)
    expected = F.pad(rows, (0, 0, 0, ragged_rows(x.shape[0], len(sizes), alignment) - len(rows)))
    torch.testing.assert_close(padded, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(padded_offs, make_offs([len(group) + -len(group) % alignment for group in groups]))
    padded[: len(rows)][~filled] = padded[len(rows) :] = torch.nan
    back = unpad_token_groups(padded, offs, alignment, x.shape[0])
    expected = F.pad(x[:used], (0, 0, 0, x.shape[0] - used))
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_and_back(dtype: torch.dtype):
    for alignment in (16, 32, 48, 128):
        for spread in SPREADS:
            check(wild((200, 5), dtype), group_sizes(spread, 180, 7), alignment)
        check(wild((0, 5), dtype), [0, 0], alignment)


def test_gradients():
    """Each is the other's: a row's gradient comes back from where the row went."""
    offs = make_offs([3, 0, 14, 2])
    x = torch.randn(20, 4, requires_grad=True)
    padded, _ = pad_token_groups(x, offs, 16)
    weight = torch.randn_like(padded)
    (dx,) = torch.autograd.grad(padded, x, weight)
    assert torch.equal(dx, unpad_token_groups(weight, offs, 16, 20))

    padded = padded.detach().requires_grad_()
    weight = torch.randn(20, 4)
    (dpadded,) = torch.autograd.grad(unpad_token_groups(padded, offs, 16, 20), padded, weight)
    assert torch.equal(dpadded, pad_token_groups(weight, offs, 16)[0])


def test_shapes_without_values():
    with FakeTensorMode():
        padded, ends = pad_token_groups(torch.empty(40, 32), torch.empty(3, dtype=torch.int32))
        back = unpad_token_groups(padded, ends, 32, 40)
    assert padded.shape == (ragged_rows(40, 3), 32) and back.shape == (40, 32)


def test_compiled():
    def step(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        padded, _ = pad_token_groups(x, offs, 16)
        return unpad_token_groups(padded * 2, offs, 16, x.shape[0])

    x, offs = torch.randn(20, 4, requires_grad=True), make_offs([3, 0, 14])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    ours, theirs = compiled(x, offs), step(x, offs)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"alignment": 24}, "multiple of 16, got 24"),
        ({"alignment": 0}, "multiple of 16, got 0"),
        ({"alignment": 16.0}, "alignment must be an int, got 16.0"),
        ({"x": torch.zeros(8, 4, dtype=torch.float16)}, "must be bfloat16 or float32, got torch.float16"),
        ({"x": torch.zeros(2, 8, 4)}, r"takes tokens of shape \(rows, features\), got \(2, 8, 4\)"),
        ({"offs": torch.tensor([8])}, "must be an int32 vector"),
        ({"offs": torch.tensor([9], dtype=torch.int32)}, "ends at 9 but there are only 8 rows"),
    ],
)
def test_bad_input(arguments: dict, words: str):
    with pytest.raises(ValueError, match=words):
        pad_token_groups(**{"x": torch.zeros(8, 4), "offs": make_offs([8]), "alignment": 16} | arguments)
    with pytest.raises(ValueError, match="rows must be an int, got '8'"):
        unpad_token_groups(torch.zeros(32, 4), make_offs([8]), 16, "8")
    with pytest.raises(ValueError, match="8 rows in 1 groups aligned to 16 are padded to 16 rows, got 32"):
        unpad_token_groups(torch.zeros(32, 4), make_offs([8]), 16, 8)
