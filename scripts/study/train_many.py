"""A program for torchrun: TorchTitan trainings one after the other in the same processes, which start up once.

    torchrun --nproc-per-node=2 scripts/study/train_many.py runs.json

runs.json lists {"out": folder, "flags": [flag of torchtitan.train, ...], "favoured_experts": 0}; of the last, another
number has so many experts, the first ones of each layer, get every token. Each run leaves in its folder the clipped
full gradients of the first step, gradients_<rank>.pt, and at its end ``done``.
"""

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from torchtitan import train
from torchtitan.config import ConfigManager
from torchtitan.models.moe import MoE
from torchtitan.tools.logging import init_logger

WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # torch.compile's and checkpointing's, in names


class RecordingTrainer(train.Trainer):
    """TorchTitan's trainer, and what it first computes, for comparison with other layouts."""

    favoured_experts = 0

    def train_step(self, data_iterator) -> None:
        if self.step > 1:
            return super().train_step(data_iterator)
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, MoE):
                module.expert_bias[: self.favoured_experts] += 100  # to scores between 0 and 1
        super().train_step(data_iterator)
        gradients = {}
        for name, param in (item for part in self.model_parts for item in part.named_parameters()):
            whole = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad  # every rank gathers
            gradients[WRAPPERS.sub("", name)] = whole.cpu()
        rank = int(os.environ["RANK"])
        if rank % (self.parallel_dims.world_size // self.parallel_dims.pp) == 0:  # the first rank of a stage
            torch.save(gradients, Path(self.job_config.job.dump_folder) / f"gradients_{rank}.pt")


def train_once(flags: list[str], favoured_experts: int) -> None:
    """What ``torchtitan.train.main`` does, which reads the command line only once in a process.

    The process groups stay: DTensor's caches know a mesh by its shape, and lead later runs to the groups of this one.
    """
    trainer = RecordingTrainer(ConfigManager().parse_args(flags))
    trainer.favoured_experts = favoured_experts
    if trainer.job_config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    torch.distributed.barrier()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="runs.json")
    runs = json.loads(parser.parse_args(argv).runs.read_text())
    init_logger()
    train.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # rank 0 waits 2 s after each run
    for run in runs:
        out = Path(run["out"])
        out.mkdir(parents=True, exist_ok=True)
        os.write(2, f"=== {out.name}\n".encode())
        torch.compiler.reset()
        train_once(run["flags"], run.get("favoured_experts", 0))
        gc.collect()  # TorchTitan switches the automatic one off
        if os.environ["RANK"] == "0":
            (out / "done").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
