"""A program for torchrun: ``mxfp8_moe`` on several processes against one, on CPUs or, with ``cuda`` behind it, on GPUs.

Run by tests/test_moe_layer.py and test_gpu_moe.py. Each rank has experts and tokens of its own, and runs the whole
layer too.
"""

import os
import sys
import weakref

import torch
import torch.distributed as dist

from titan_mxfp8 import mxfp8_moe
from titan_mxfp8.testing import relative_rms

D, H, EXPERTS, K = 64, 96, 12, 3
NAMES = ("out", "x", "scores", "w1", "w3", "w2")


def check(tokens: list[int], recipe: str, only_expert: int | None, device: str, **options: str) -> list[torch.Tensor]:
    """Everything that does not cross a link as a sum has the bits of one process; sums of tokens are rounded once more,
    to bf16, on each rank that they come from. But FP8 tensor cores may add up a row otherwise among other neighbours.

    Returns:
        What this rank computes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    total, mine = sum(tokens), slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    x, dy = torch.randn(total, D).bfloat16(), torch.randn(total, D).bfloat16()
    scores, ids = torch.rand(total, EXPERTS).topk(1 if only_expert is not None else K, dim=1)
    if only_expert is not None:
        ids[:] = only_expert
    weights = [torch.randn(EXPERTS, *shape).bfloat16() / 8 for shape in ((H, D), (H, D), (D, H))]
    share = EXPERTS // ranks
    held = slice(rank * share, (rank + 1) * share)

    def run(part: slice, experts: slice, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        leaves = [x[part], scores[part], *(w[experts] for w in weights)]
        leaves = [t.to(device, copy=True).requires_grad_() for t in leaves]
        chosen = options if group is not None else {}
        out = mxfp8_moe(leaves[0], leaves[1], ids[part].to(device), *leaves[2:], group, recipe=recipe, **chosen)
        out.backward(dy[part].to(device))
        return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    here = run(mine, held, dist.group.WORLD)
    alone = run(slice(None), slice(None), None)
    for name, value, whole in zip(NAMES, here, alone, strict=True):
        expected = whole[held] if name.startswith("w") else whole[mine]
        if (name in ("out", "x") or device != "cpu") and expected.numel():
            error = relative_rms(value, expected) if expected.any() else value.abs().max().item()
            assert error < (0.003 if device == "cpu" else 0.006), (name, error)  # measured up to 0.0021; 0.0036
        else:
            assert torch.equal(value, expected), (rank, name, tokens, recipe)
    return here


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    ranks = int(os.environ["WORLD_SIZE"])
    ways = [{}]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = f"cuda:{torch.cuda.current_device()}"
        ways = [
            {"transport": "collective"},
            {"transport": "symmetric"},
            {"transport": "symmetric", "rows": "worst_case"},
        ]
    dist.init_process_group("cpu:gloo,cuda:nccl" if device != "cpu" else "gloo")
    uneven = [7 * rank for rank in range(ranks)]  # rank 0 has no token
    cases = [
        (sizes, recipe, None) for recipe in ("mxfp8_2d", "mxfp8_2d_rebased", "bf16") for sizes in ([40] * ranks, uneven)
    ]
    cases.append(([33] * ranks, "mxfp8", EXPERTS - 1))  # one rank gets all rows, the others none
    cases.append(([1] + [0] * (ranks - 1), "mxfp8", 0))
    for case in cases:
        first, *others = (check(*case, device, **way) for way in ways)
        for other in others:
            # Of no rank may a bit depend on what lies behind the last group, where worst_case has memory.
            for name, ours, theirs in zip(NAMES, other, first, strict=True):
                assert torch.equal(ours, theirs), (
                    "the transports give other bits",
                    name,
                    (ours - theirs).abs().max(),
                    case,
                )
    if device == "cpu":
        try:
            check([4] * ranks, "bf16", None, device, transport="symmetric")
        except ValueError as error:
            assert "symmetric" in str(error), error
        else:
            raise AssertionError("the CPU has no peers' memory")
    print(f"rank {dist.get_rank()} agrees")
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert device != "cpu" or group() is None, "gloo's threads go on while Python ends, which may abort"


if __name__ == "__main__":
    main()
