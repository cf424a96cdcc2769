"""A program for torchrun with 2 processes: every layout through TorchTitan's mesh, parallelize and seeding, then one
forward and backward. Run by tests/test_cpu_plugin.py."""

import copy
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8.plugin.flavors import register_flavors


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


register_flavors()
config = JobConfig()
config.activation_checkpoint.mode = "none"
config.training.seq_len = 32
config.debug.seed = 42
dist_utils.init_distributed(config.comm, base_folder=sys.argv[1])
spec = get_train_spec("llama4")
torch.manual_seed(int(os.environ["RANK"]))  # other draws than the seed's on each rank, until TorchTitan seeds
report = {}
for name, shard, replicate, tp, ep in json.loads(sys.argv[2]):
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=1, tp=tp, pp=1, ep=ep, etp=1, world_size=2)
    dist_utils.set_determinism(dims, torch.device("cpu"), config.debug, distinct_seed_mesh_dims=["pp"])
    args = copy.deepcopy(spec.model_args["debugmodel_2layers"])
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    digest = hashlib.sha256()
    for key, weight in sorted(model.named_parameters()):
        digest.update(key.encode() + full(weight.detach()).contiguous().numpy().tobytes())
    tokens = torch.arange(2 * 33).view(2, 33) * 31 % args.vocab_size
    with dist_utils.get_train_context(dims.tp_enabled)():
        cross_entropy_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    # two ranks with the same tokens: FSDP sums their gradients (TorchTitan divides the loss), DDP averages
    grad = full(dict(model.named_parameters())["layers.1.moe.experts.w1"].grad)
    report[name] = [digest.hexdigest(), grad.norm().item() / (2 if shard == 2 else 1)]
    model.zero_grad()
Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
os.write(1, b"passed\n")
