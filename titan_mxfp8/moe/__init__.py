"""How tokens travel to their experts and back: the transports, and which is chosen (``choose``)."""

from functools import cache
from typing import Literal, get_args

import torch
import torch.distributed as dist

from titan_mxfp8.moe.bounds import ROWS, Rows
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.moe.symmetric import symmetric_available, symmetric_of
from titan_mxfp8.moe.transport import DispatchHandle, Local, Transport

__all__ = ["ROWS", "DispatchHandle", "Rows", "Transport", "choose"]

TransportName = Literal["auto", "collective", "symmetric"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


def choose(transport: TransportName, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Transport, str]:
    """The transport of an expert-parallel group, and why, in words for the log.

    Every rank of the group calls this at the same time. Raises ValueError: ``symmetric`` where it cannot be.

    Args:
        transport: ``auto``: ``symmetric`` where it can be, else ``collective``. One rank needs neither.
        group: the ranks among which the experts are divided; None: this one has all.
        device: where the tokens are.
    """
    if device.index is None or device.type == "cpu":  # of cpu and cpu:1, the layers of both share what they share
        device = torch.device(device.type, torch.cuda.current_device() if device.type == "cuda" else 0)
    if group is None or group.size() == 1:
        return _local_of(device), "local: one rank has every expert"
    if transport == "collective":
        return Collective(group), "collective: named by the user"
    available, reason = symmetric_available(group, device)
    if available:
        return symmetric_of(group, device), f"symmetric: {reason}"
    if transport == "symmetric":
        raise ValueError(f"the symmetric transport cannot be used: {reason}; use 'auto' or 'collective'")
    return Collective(group), f"collective: symmetric cannot be used: {reason}"


@cache
def _local_of(device: torch.device) -> Local:
    """What the layers of a device share."""
    return Local()
