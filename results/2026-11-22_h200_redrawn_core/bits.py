"""y, dx and dw of every recipe, two dtypes and four shapes on a GPU, as checksums of their bits: run by the code before
the redraw and by the code after it, then compared.

    git worktree add OLD eaae8bc
    PYTHONPATH=OLD python bits.py before.pt
    PYTHONPATH=../.. python bits.py after.pt
    python bits.py before.pt after.pt
"""

import sys

import torch

PROBLEMS = (  # sizes of the groups, rows past the last one, out and in features
    ([300, 0, 77, 513, 1], 45, 96, 160),
    ([4096, 1000, 7, 0, 3000, 20], 0, 1408, 2048),
    ([8192, 3000], 128, 2048, 1024),
    ([5] * 40, 3, 256, 512),
)
RECIPES = ("mxfp8", "mxfp8_floor", "mxfp8_wgrad_bf16", "mxfp8_2d", "mxfp8_2d_wgrad_bf16", "mxfp8_e5m2_grad")
NAMES = ("y", "dx", "dw", "linear y", "linear dx", "linear dw")


def checksum(t: torch.Tensor) -> int:
    """The sum of all bit patterns, each times its place."""
    bits = t.detach().contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32).long().flatten()
    return int((bits * torch.arange(1, len(bits) + 1, device="cuda")).sum())


def run(path: str) -> None:
    from titan_mxfp8 import mxfp8_grouped_mm, mxfp8_linear

    found = {}
    for seed, (sizes, extra, n, k) in enumerate(PROBLEMS):
        for recipe in RECIPES:
            for rebase, backend in ((False, "auto"), (True, "auto"), (False, "triton")):
                for dtype in (torch.bfloat16, torch.float32):
                    generator, m = torch.Generator("cuda").manual_seed(seed), sum(sizes) + extra
                    x = torch.randn(m, k, generator=generator, device="cuda").to(dtype).requires_grad_()
                    w = torch.randn(len(sizes), n, k, generator=generator, device="cuda")
                    w = (w / k**0.5).to(dtype).requires_grad_()
                    dy = torch.randn(m, n, generator=generator, device="cuda").to(dtype)
                    offs = torch.tensor(sizes).cumsum(0).int().cuda()
                    options = {"recipe": recipe, "rebase": rebase, "backend": backend}
                    y = mxfp8_grouped_mm(x, w.mT, offs, out_dtype=dtype, **options)
                    y.backward(dy)
                    x2, w2 = (t.detach().clone().requires_grad_() for t in (x, w[0]))
                    y2 = mxfp8_linear(x2, w2, **options)
                    y2.backward(dy)
                    tensors = (y, x.grad, w.grad, y2, x2.grad, w2.grad)
                    found[seed, recipe, rebase, backend, str(dtype)] = [checksum(t) for t in tensors]
    torch.save(found, path)


if len(sys.argv) == 2:
    run(sys.argv[1])
else:
    before, after = map(torch.load, sys.argv[1:])
    differ = [
        (key, name) for key in before for name, a, b in zip(NAMES, before[key], after[key], strict=True) if a != b
    ]
    print(f"{len(differ)} of {6 * len(before)} tensors differ", *differ, sep="\n")
