"""What each kernel of ``mxfp8_moe`` takes in a forward and backward, and the layer itself; kernels.csv.

python kernels.py [RECIPE ...]
torchrun --standalone --nproc-per-node 2 kernels.py [RECIPE ...]
"""

import os
import sys
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from titan_mxfp8 import mxfp8_moe

# tokens of a rank, D, H, experts of all ranks, top-k
LAYERS = {"dsv3_16b": (32768, 2048, 1408, 64, 6), "dsv3": (16384, 7168, 2048, 64, 8)}

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
group = None
if ranks > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group = dist.group.WORLD

for name, (tokens, d, h, experts, top_k) in LAYERS.items():
    torch.manual_seed(rank)
    scores, ids = torch.rand(tokens, experts, device=device).topk(top_k, 1)
    shapes = (tokens, d), (experts // ranks, h, d), (experts // ranks, h, d), (experts // ranks, d, h)
    x, *weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    inputs = [x, scores, *(w / w.shape[2] ** 0.5 for w in weights)]
    inputs = [t.detach().requires_grad_() for t in inputs]
    dy = torch.randn_like(x)

    def step(recipe: str, inputs=inputs, ids=ids, dy=dy) -> None:
        for t in inputs:
            t.grad = None
        out = mxfp8_moe(*inputs[:2], ids, *inputs[2:], group, recipe=recipe, keep_quantized_weight=False)
        out.backward(dy)

    for recipe in sys.argv[1:] or ("mxfp8_2d_rebased", "mxfp8_2d"):
        times = []
        for _ in range(11):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step(recipe)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step(recipe)
            torch.cuda.synchronize()
        if rank == 0:
            print(f"{name},{ranks},{recipe},all,,{median(times[3:]):.2f}")
            for event in sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total):
                if event.self_device_time_total > 20:
                    key = event.key.split("(")[0].split("<")[0]
                    print(f"{name},{ranks},{recipe},{key},{event.count},{event.self_device_time_total / 1e3:.3f}")
