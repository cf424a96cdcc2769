"""What is wrong in torch and TorchTitan without a workaround: scripts of checks that run without the plugin and the
adapter, or with one, in a process of their own.

A script imports ``symptom`` from here and decorates with it functions that have the names of the workarounds.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from torchtitan.components.metrics import WandBLogger
from torchtitan.tools import utils

found: dict[str, str] = {}


def look(script: str, adapter: str = "", **environment: str) -> dict[str, str]:
    """By its name, what each check of ``script`` gave or raised, where the module ``adapter`` was imported before."""
    if torch.accelerator.is_available():
        pytest.skip("looks for the symptoms on a CPU")
    script = f"import {adapter}\n{script}" if adapter else script
    script += f"\nimport json\nimport sys\nfrom {__name__} import found\n"
    script += f"assert ('titan_mxfp8' in sys.modules) == {bool(adapter)}\nprint(json.dumps(found))\n"
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    return json.loads(processes.python(script, **{"PYTHONPATH": path} | environment).splitlines()[-1])


def symptom(check: Callable[[], object]) -> None:
    """Runs a check in the script's process."""
    try:
        found[check.__name__] = str(check())
    except Exception as error:
        found[check.__name__] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.destroy_process_group()


def one_rank() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


# Of both TorchTitans.
def use_cpu_device() -> str:
    return utils.device_type


def log_offline_where_wandb_is_out_of_reach() -> None:
    def init(**kwargs: object) -> None:
        raise ConnectionError("no network")

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(sys.modules, wandb=SimpleNamespace(init=init)):
        WandBLogger(folder, SimpleNamespace(to_dict=dict))
