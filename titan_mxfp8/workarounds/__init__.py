"""What this package changes in torch, TorchTitan and wandb: the one list of it, and how to leave something out.

``python -m titan_mxfp8.workarounds`` prints the list. An adapter installs what is needed when it is imported. A config
module of your own can switch workarounds off before:

    from titan_mxfp8 import workarounds
    workarounds.install(leave_out=["run_backward_in_the_calling_thread"])  # or install(False), for all of them
    from titan_mxfp8.plugin import JobConfig
"""

import logging
from collections.abc import Iterable

import torch

from titan_mxfp8.workarounds import cpu, pytorch, torchtitan02, torchtitan03, wandb_offline  # noqa: F401 - list theirs
from titan_mxfp8.workarounds.patch import TITAN02, TITAN03, WORKAROUNDS, Workaround

__all__ = ["HOOKS", "TITAN02", "TITAN03", "WORKAROUNDS", "Workaround", "apply", "install"]

logger = logging.getLogger(__name__)

# What is changed besides, to have a part in TorchTitan at all: by dotted name, what for. Not to be left out.
HOOKS = {
    "torch.utils.checkpoint.CheckpointFunction.forward": "experts of a class of your own are recomputed in MXFP8",
    "torch.utils.checkpoint._CheckpointFrame.__init__": "the same, where checkpoints are not reentrant",
    "torchtitan.protocols.model_converter._registry_model_converter_cls": "our converters in the place of TorchTitan's",
    "torchtitan.models.*.infra.parallelize._op_sac_save_list": "selective checkpointing saves outputs of our operators",
    "torchtitan.config.manager.ConfigManager._validate_config": "refuses a config of ours that cannot run",
    "torchtitan.distributed.expert_parallel.ExpertParallel._apply": "not for layers that dispatch their own tokens",
    "torchtitan.models.*.infra.parallelize.apply_fsdp": "FSDP takes no experts that nothing shards, and gathers in FP8",
    "torchtitan.models.*.infra.parallelize.apply_compile": "MoE blocks that dispatch their own tokens are one region",
    "torchtitan.components.checkpoint.CheckpointManager.__init__": "changes what a trainer's steps do (0.2.2)",
    "torchtitan.components.checkpoint.CheckpointManager.close": "destroys the graphs (0.2.2)",
    "torchtitan.components.metrics.WandBLogger.__init__": "a run's name, tags and commit (0.2.2)",
    "torchtitan.distributed.activation_checkpoint.SelectiveAC.get_save_ops": "as _op_sac_save_list (0.3.0)",
    "torchtitan.trainer.Trainer.Config._validate_cuda_graphs": "expert parallelism is left to us (0.3.0)",
    "torchtitan.trainer.wrap_with_cuda_graph": "no capture where the host waits; health runs eagerly (0.3.0)",
    "torchtitan.*.apply_fsdp_to_decoder": "as apply_fsdp (0.3.0)",
    "torchtitan.trainer.Trainer.close": "destroys the graphs (0.3.0)",
    "torchtitan.trainer.Trainer.__init__": "its model knows its config; changes what its steps do (0.3.0)",
}

_left_out: set[str] = set()


def install(enabled: bool = True, *, leave_out: Iterable[str] = ()) -> None:
    """Installs the workarounds that this machine needs, with its versions of torch and TorchTitan.

    Each adapter calls it when it is imported. Whoever calls it before says what stays out in this process, for then
    too. What is installed stays so; a second call changes nothing. Raises ValueError: an unknown name.

    Args:
        enabled: False leaves all of them out.
        leave_out: names of those to leave out.
    """
    names, leave_out = {row.name for row in WORKAROUNDS}, set(leave_out)
    if unknown := leave_out - names:
        raise ValueError(
            f"no workarounds are named {', '.join(sorted(unknown))}: use some of {', '.join(sorted(names))}"
        )
    _left_out.update(leave_out if enabled else names)
    for row in WORKAROUNDS:
        if not row.by_config:
            apply(row.name)


def apply(name: str, *arguments: object) -> None:
    """Calls the function of a workaround, if this machine needs it and nobody has left it out."""
    row = next(row for row in WORKAROUNDS if row.name == name)
    if name in _left_out or not row.is_for_this_machine():
        return
    try:
        row.install(*arguments)
    except (AttributeError, ImportError) as error:  # much of what they change is private
        logger.warning(f"MXFP8: the workaround {name} does not fit torch {torch.__version__}: {error}")
