"""TorchTitan's own train.py on a machine without accelerators: CPU tensors, gloo collectives. Linux only."""

import logging
import os
import platform
import resource
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_mxfp8.workarounds.patch import BOTH, around, workaround

logger = logging.getLogger(__name__)


class CpuDevice:
    """TorchTitan's `device_module` for CPU: torch.cpu, and what TorchTitan calls that torch.cpu lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0  # torch.cpu says "cpu", but barrier(device_ids=[current_device()]) refuses anything except an int

    def get_device_name(self, device: object = None) -> str:
        return f"{platform.machine()} CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """The process's peak resident memory so far as both peaks: torch keeps no counters for its CPU allocations."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


@workaround(
    *(f"torchtitan.tools.utils.{name}" for name in ("device_type", "device_module", "get_device_info")),
    torchtitan=BOTH,
    cpu=True,
)
def use_cpu_device() -> None:
    """`module 'torch._C' has no attribute '_cuda_setDevice'` at the start of the Trainer.

    TorchTitan reads the device once, when tools/utils.py is imported. Modules imported by now hold copies of it under
    the same names; those imported later (the models' parallelize.py) copy what is set here."""
    from torchtitan.tools import utils

    if utils.device_type == "cpu":  # TorchTitan itself never says "cpu": an earlier call did
        return
    device_module = CpuDevice()
    on_cpu = {"device_type": "cpu", "device_module": device_module, "get_device_info": lambda: ("cpu", device_module)}
    copied = {name: getattr(utils, name) for name in on_cpu}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torchtitan":
            for name, value in on_cpu.items():
                if vars(module).get(name) is copied[name]:
                    setattr(module, name, value)
    logger.info("No accelerator found: TorchTitan trains on CPU, with gloo between processes")


@workaround(torchtitan=BOTH, cpu=True)
@around("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor")
def reduce_gradients_by_sum(set_gradient_divide_factor: Any, module: FSDPModule, factor: float) -> None:
    """`Cannot use ReduceOp.PREMUL_SUM with Gloo` in FSDP's first reduce-scatter.

    FSDP picks it once a divide factor is set, and TorchTitan sets one (1.0) on all its FSDP modules."""
    set_gradient_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


@workaround(torchtitan=BOTH, cpu=True)
@around("torch.distributed.tensor.DTensor.normal_", "torch.distributed.tensor.DTensor.uniform_")
def draw_full_tensor_at_random_init(fill_: Any, shard: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Without a word, every rank of FSDP, EP or TP starts with the same shard.

    DTensor keeps a random generator per shard on CUDA-like devices only; on CPU each rank fills its shard from the same
    seed, so under EP 2 experts 0-3 equal experts 4-7. Here each rank draws the full tensor and keeps its shard: all
    layouts start from the same weights. All random functions of torch.nn.init end in one of these two methods. torch's
    warning that random operators `may not have complete support on cpu` stays: it is right for others (dropout)."""
    full = fill_(torch.empty(shard.shape, dtype=shard.dtype, device=shard.device), *args, **kwargs)
    # src_data_rank=None: no broadcast, each rank cuts its own (all drew the same, their seeds are equal)
    return shard.copy_(distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None))
