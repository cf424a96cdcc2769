"""Workarounds of runs that log to wandb."""

import logging
import os
from typing import Any

from titan_mxfp8.workarounds.patch import BOTH, around, workaround

logger = logging.getLogger(__name__)


@workaround(torchtitan=BOTH)
@around("torchtitan.components.metrics.WandBLogger.__init__")
def log_offline_where_wandb_is_out_of_reach(start: Any, *args: Any, **kwargs: Any) -> None:
    """A run goes on unlogged where nobody is logged in to wandb, or wandb cannot start.

    Here it logs to disk instead if nobody is logged in, unless a mode was chosen (WANDB_MODE, `wandb offline`), or if
    wandb cannot start. The waits are wandb's own settings: 30 s for the start (it takes some seconds more to give up)
    and 5 minutes for the last upload, unless WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT say otherwise."""
    try:
        import wandb
    except ModuleNotFoundError:
        return start(*args, **kwargs)  # TorchTitan says so
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")
    try:
        chosen = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode != "online"
        if chosen or wandb.login(prompt=False, verify=False):
            return start(*args, **kwargs)
        logger.info("Not logged in to wandb: logging offline; `wandb sync` uploads it later")
    except Exception as error:  # wandb's errors have no common class
        reason = (str(error) or repr(error)).splitlines()[0]
        logger.warning(f"wandb could not start: {reason}. Logging offline; `wandb sync` uploads it later")
    wandb.teardown()  # it has read its settings from the environment once and for all
    os.environ["WANDB_MODE"] = "offline"
    return start(*args, **kwargs)
