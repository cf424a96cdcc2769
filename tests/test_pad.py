"""``pad_token_groups`` and ``unpad_token_groups`` as a user calls them, on the CPU."""

import pytest
import torch

from scripts.bench.problems import SPREADS, group_sizes, make_offs
from titan_mxfp8.format.mx import ragged_rows
from titan_mxfp8.ops.pad import pad_token_groups, unpad_token_groups


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("alignment", [16, 32, 48, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_there_and_back(dtype: torch.dtype, alignment: int, spread: str):
    """Against rows put together group by group; 20 rows belong to no group."""
    rows, groups = 200, 7
    x = torch.randn(rows, 5).to(dtype)
    sizes = group_sizes(spread, rows - 20, groups)
    offs = make_offs(sizes)
    padded, padded_offs = pad_token_groups(x, offs, alignment)
    parts = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % alignment)) for part in x[: sum(sizes)].split(sizes)]
    assert padded.shape == (ragged_rows(rows, groups, alignment), 5) and padded.dtype == dtype
    assert torch.equal(padded[: padded_offs[-1]], torch.cat(parts)) and not padded[padded_offs[-1] :].any()
    assert padded_offs.dtype == torch.int32 and padded_offs.tolist() == make_offs(list(map(len, parts))).tolist()
    back = unpad_token_groups(padded, offs, alignment, rows)
    assert torch.equal(back[: sum(sizes)], x[: sum(sizes)]) and not back[sum(sizes) :].any()


def test_by_hand():
    x = torch.arange(1.0, 6.0).unsqueeze(1)
    padded, padded_offs = pad_token_groups(x, make_offs([2, 0, 2]), 16)
    assert padded.shape == (48, 1) and padded_offs.tolist() == [16, 16, 32]
    assert padded.flatten().nonzero().flatten().tolist() == [0, 1, 16, 17]
    assert padded.flatten()[[0, 1, 16, 17]].tolist() == [1, 2, 3, 4]
    assert unpad_token_groups(padded, make_offs([2, 0, 2]), 16, 5).flatten().tolist() == [1, 2, 3, 4, 0]


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


def test_compiled():
    def step(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        padded, _ = pad_token_groups(x, offs, 16)
        return unpad_token_groups(padded * 2, offs, 16, x.shape[0])

    x, offs = torch.randn(20, 4, requires_grad=True), make_offs([3, 0, 14])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    ours, theirs = compiled(x, offs), step(x, offs)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)))


def test_empty():
    padded, padded_offs = pad_token_groups(torch.empty(0, 4), make_offs([0, 0]), 32)
    assert padded.shape == (32, 4) and not padded.any() and padded_offs.tolist() == [0, 0]
    assert unpad_token_groups(padded, make_offs([0, 0]), 32, 0).shape == (0, 4)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"alignment": 24}, "multiple of 16, got 24"),
        ({"alignment": 0}, "multiple of 16, got 0"),
        ({"x": torch.zeros(8, 4, dtype=torch.float16)}, "must be bfloat16 or float32, got torch.float16"),
        ({"x": torch.zeros(2, 8, 4)}, r"takes tokens of shape \(rows, features\), got \(2, 8, 4\)"),
        ({"offs": torch.tensor([8])}, "must be an int32 vector"),
        ({"offs": torch.tensor([9], dtype=torch.int32)}, "ends at 9 but there are only 8 rows"),
    ],
)
def test_bad_input(arguments: dict, words: str):
    with pytest.raises(ValueError, match=words):
        pad_token_groups(**{"x": torch.zeros(8, 4), "offs": make_offs([8]), "alignment": 16} | arguments)


def test_unpad_wants_the_rows_of_pad():
    with pytest.raises(ValueError, match="8 rows in 1 groups aligned to 16 are padded to 16 rows, got 32"):
        unpad_token_groups(torch.zeros(32, 4), make_offs([8]), 16, 8)
