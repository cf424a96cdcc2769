"""What a process of a training imports, for the fork server of ``processes.py``; nothing of this package, whose import
changes TorchTitan."""

import importlib.util
import sys
import time

import datasets.distributed  # noqa: F401
import tensorboard  # noqa: F401
import torch.distributed.pipelining
import torch.utils.tensorboard  # noqa: F401
import torchdata.stateful_dataloader  # noqa: F401
import torchtitan.train  # noqa: F401
import tyro
from torchtitan.config import ConfigManager

if importlib.util.find_spec("torchtitan.trainer") is None:
    import wandb  # noqa: F401

tyro._docstrings.get_field_docstring = lambda cls, name, markers: None  # as in conftest.py


def begin(arguments: list[str]) -> None:
    """``torchtitan.train`` is the program's ``__main__``, and its command line was read when it was imported."""
    sys.modules.pop("torchtitan.train", None)
    sys.argv = arguments
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0 if seconds == 2 else seconds)  # which rank 0 does after its last step
    ConfigManager.parse_args.__defaults__ = (arguments[1:],)
