"""How the experts of a MoE layer get their tokens, where the layer sends them itself: by ``mxfp8_moe``."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_mxfp8.moe import TRANSPORTS, Transport, TransportName, choose
from titan_mxfp8.moe.bounds import factor_of
from titan_mxfp8.recipe import Recipe

GPUS_TRIED = 2  # in expert parallelism, by any run that results/ has


@dataclass(kw_only=True)
class Dispatch:
    """Arguments of ``mxfp8_moe``. The layers of a model share one: ``rows`` may change between two steps, for all.

    Attributes:
        transport: as of ``mxfp8_moe``.
        rows: likewise, as text: in compiled layers another text is another constant, a number might become a variable.

    Raises:
        ValueError: an unknown name, or no factor.
    """

    transport: TransportName
    rows: str

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"MXFP8: dispatch = {self.transport!r}: use one of {', '.join(TRANSPORTS)}")
        factor_of(self.rows, "MXFP8: dispatch_rows")
        self.rows = f"{self.rows}"

    def __deepcopy__(self, memo: dict) -> "Dispatch":
        return self

    def refusal(self, recipe: Recipe) -> str:
        """Why experts with this recipe are not to get their tokens so unless the user names a transport, in words;
        nothing where they may."""
        if self.transport == "auto" and recipe.quantized and recipe.wgrad == "bf16":
            return f"recipe {recipe.name!r}, whose weight gradient takes tokens that were not quantised"
        return ""

    def connect(
        self, group: dist.ProcessGroup | None, device: torch.device, most_rows: int | None = None
    ) -> tuple[Transport | None, str]:
        """The transport that ``mxfp8_moe`` will take, and why, in words; None where the other ranks do not exist.
        Called before anything is trained, by every rank of the group at the same time.

        Args:
            most_rows: the most that a rank sends in one forward, which buffers have to hold; None: as many as in the
                first.

        Raises:
            ValueError: a transport that cannot be.
        """
        if group is not None and dist.get_backend(group) == "fake":
            return None, "not chosen: the other ranks do not exist"
        transport, choice = choose(self.transport, group, device)
        if most_rows is not None:
            transport.reserve(most_rows)
        untried = device.type == "cuda" and group is not None and group.size() > GPUS_TRIED
        return transport, choice + f"; never run on more than {GPUS_TRIED} GPUs" * untried


def interleaved(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gpt_oss's gate and linear half, w1 and w3 or b1 and b3, of a parameter that interleaves them along axis 1."""
    return param.unflatten(1, (-1, 2)).unbind(2)
