"""TorchTitan's own train.py on a machine without accelerators: CPU tensors, gloo collectives.

TorchTitan assumes "cuda" where it finds no device, and dies. Each function below workarounds one place and names the
symptom it cures; `train_on_cpu` applies them all, before Trainer.__init__ reads the device. Each adapter adds those of
its own TorchTitan, whose modules are arguments here. Where an accelerator exists nothing of this file runs. Linux only,
like the triton that TorchTitan imports.
"""

import functools
import logging
import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

logger = logging.getLogger(__name__)


def train_on_cpu(utils: ModuleType, *own_workarounds: Callable[[], None]) -> bool:
    """Makes TorchTitan train on CPU if this machine has no accelerator; says whether it does. Safe to call again.

    Args:
        utils: ``torchtitan.tools.utils``.
        own_workarounds: what this TorchTitan alone needs.
    """
    if torch.accelerator.is_available():
        return False
    if utils.device_type == "cpu":  # TorchTitan itself never says "cpu": an earlier call did
        return True
    use_cpu_device(utils)
    claim_no_mfu(utils)
    reduce_gradients_by_sum()
    draw_full_tensor_at_random_init()
    for workaround in own_workarounds:
        workaround()
    logger.info("No accelerator found: TorchTitan trains on CPU, with gloo between processes")
    return True


class CpuDevice:
    """TorchTitan's `device_module` for CPU: torch.cpu, and what TorchTitan calls that torch.cpu lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0  # torch.cpu says "cpu", but barrier(device_ids=[current_device()]) refuses anything except an int

    def get_device_name(self, device: object = None) -> str:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return f"{platform.machine()} CPU"  # Arm kernels print no model name

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """The process's peak resident memory as both peaks: torch keeps no counters for its CPU allocations."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        # VmHWM is the peak since the last reset; sandboxed kernels (gVisor) leave it out and have VmRSS only.
        peak = int(status.get("VmHWM", status["VmRSS"]).split()[0]) * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 sets VmHWM back to VmRSS
        except OSError:
            pass  # not writable in some containers: the peak then is that of the whole run

    def empty_cache(self) -> None:
        pass


def use_cpu_device(utils: ModuleType) -> None:
    """Works around: `module 'torch._C' has no attribute '_cuda_setDevice'`, at the start of Trainer.__init__.

    For: TorchTitan 0.2.2 and 0.3.0.

    TorchTitan reads the device once, when tools/utils.py is imported. The modules imported by now (parallel_dims,
    distributed.utils, metrics, profiling) hold copies of it under the same names; the ones imported later (the models'
    parallelize.py) copy what is set here.
    """
    device_module = CpuDevice()
    repaired = {
        "device_type": "cpu",
        "device_module": device_module,
        "get_device_info": lambda: ("cpu", device_module),
    }
    copied = {name: getattr(utils, name) for name in repaired}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torchtitan":
            for name, value in repaired.items():
                if vars(module).get(name) is copied[name]:
                    setattr(module, name, value)


def claim_no_mfu(utils: ModuleType) -> None:
    """Works around: an MFU in the logs that is a share of an A100, which TorchTitan takes for any device it does not
    know.

    For: TorchTitan 0.2.2 and 0.3.0.

    An infinite peak gives `mfu: 0.00%`. The Trainer and the metrics both call it as `utils.get_peak_flops`.
    """
    utils.get_peak_flops = lambda device_name: math.inf


def reduce_gradients_by_sum() -> None:
    """Works around: `Cannot use ReduceOp.PREMUL_SUM with Gloo` in FSDP's first reduce-scatter.

    For: TorchTitan 0.2.2 and 0.3.0, torch up to 2.15.

    FSDP picks PREMUL_SUM once a divide factor is set, and TorchTitan sets one (1.0) on all its FSDP
    modules. So this setter is the one place that serves all models.
    """
    set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor

    @functools.wraps(set_gradient_divide_factor)
    def set_factor_and_force_sum(self: FSDPModule, factor: float) -> None:
        set_gradient_divide_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_force_sum


def draw_full_tensor_at_random_init() -> None:
    """Works around, and nothing else would show it: with FSDP, EP or TP every rank starts with the same shard.

    For: torch up to 2.15.

    DTensor keeps a random generator per shard on CUDA-like devices only; on CPU each rank fills its shard from the same
    seed, so under EP 2 experts 0-3 equal experts 4-7. Here each rank draws the full tensor and keeps its shard: 1
    process, DDP, FSDP, EP and TP all start from the same weights. The random functions of torch.nn.init all end in one
    of these two methods, and plain tensors never see them. torch's warning at start, that random operators `may not
    have complete support on cpu`, stays: it is right for the others (dropout), which no model here uses.
    """
    DTensor.normal_ = fill_full_tensor(torch.Tensor.normal_)
    DTensor.uniform_ = fill_full_tensor(torch.Tensor.uniform_)


def fill_full_tensor(fill_: Callable[..., torch.Tensor]) -> Callable[..., DTensor]:
    """The in-place random `fill_` of a plain tensor, as a method for DTensor."""

    @functools.wraps(fill_)
    def fill_shard_(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        full = fill_(torch.empty(self.shape, dtype=self.dtype, device=self.device), *args, **kwargs)
        # src_data_rank=None: no broadcast, each rank cuts its own (all drew the same, their seeds are equal)
        return self.copy_(distribute_tensor(full, self.device_mesh, self.placements, src_data_rank=None))

    return fill_shard_
