"""How the experts of a MoE layer get their tokens, where the layer sends them itself: by ``mxfp8_moe``."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_mxfp8.moe import ROWS, TRANSPORTS, Rows, TransportName, choose
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.recipe import Recipe

GPUS_TRIED = 2  # in expert parallelism, by any run that results/ has


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Arguments of ``mxfp8_moe``.

    Raises:
        ValueError: an unknown name.
    """

    transport: TransportName
    rows: Rows

    def __post_init__(self) -> None:
        for name, value, known in (("dispatch", self.transport, TRANSPORTS), ("dispatch_rows", self.rows, ROWS)):
            if value not in known:
                raise ValueError(f"MXFP8: {name} = {value!r}: use one of {', '.join(known)}")

    def refusal(self, recipe: Recipe) -> str:
        """Why experts with this recipe are not to get their tokens so unless the user names a transport, in words;
        nothing where they may."""
        if self.transport == "auto" and recipe.quantized and recipe.wgrad == "bf16":
            return f"recipe {recipe.name!r}, whose weight gradient takes tokens that were not quantised"
        return ""

    def connect(self, group: dist.ProcessGroup | None, device: torch.device, most_rows: int | None = None) -> str:
        """Which transport ``mxfp8_moe`` will take, and why, in words. Called before anything is trained, by every rank
        of the group at the same time.

        Args:
            most_rows: the most that a rank sends in one forward, which buffers have to hold; None: as many as in the
                first.

        Raises:
            ValueError: a transport that cannot be, or ``worst_case`` without ``symmetric``.
        """
        if group is not None and dist.get_backend(group) == "fake":
            return "not chosen: the other ranks do not exist"
        transport, choice = choose(self.transport, group, device)
        if self.rows == "worst_case" and isinstance(transport, Collective):
            raise ValueError(f"dispatch_rows = 'worst_case' needs the symmetric transport, but it is {choice}")
        if most_rows is not None:
            transport.reserve(most_rows)
        untried = device.type == "cuda" and group is not None and group.size() > GPUS_TRIED
        return choice + f"; never run on more than {GPUS_TRIED} GPUs" * untried


def interleaved(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt_oss's gate and linear half, w1 and w3 or b1 and b3, of a parameter that interleaves them along axis 1."""
    return param.unflatten(1, (-1, 2)).unbind(2)
