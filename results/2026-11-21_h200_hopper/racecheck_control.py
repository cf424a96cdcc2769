"""A kernel that hands out roles and does next to nothing with them: compute-sanitizer --tool racecheck python ... 0|1

0: no report. 1, which initialises two barriers before: one report, at the same places as those of the GEMM.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def store_number(out, role: gl.constexpr):
    i = gl.program_id(0)
    while i < 64:
        gl.store(out + i * 4 + role, i)
        i += gl.num_programs(0)


@gluon.jit
def kernel(out, BARRIERS: gl.constexpr):
    if BARRIERS:
        barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(barriers.index(i), count=1)
        fence_async_shared()
    gl.warp_specialize(
        [(store_number, (out, 0)), (store_number, (out, 1)), (store_number, (out, 2))], [4, 1], [160, 32]
    )


numbers = torch.zeros(64, 4, dtype=torch.int32, device="cuda")
kernel[(8,)](numbers, bool(int(sys.argv[1])), num_warps=4)
assert torch.equal(numbers[:, :3].cpu(), torch.arange(64, dtype=torch.int32)[:, None].expand(64, 3))
