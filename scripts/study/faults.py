"""What happens to a training of recovery.py. TorchTitan's ``experimental.custom_import`` loads it, and the run's
``job.description`` says what and in which steps, as a ``Plan``:

    nan, dead, collapse         a token's embedding is NaN; expert 0 gets no token; the first K experts get all
    step, checkpoint, rerun     a process kills itself in the first step: amid a forward pass, when data are written and
                                metadata are not, amid a second pass

What each step was goes to ``steps.csv`` in the run's folder.
"""

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan_mxfp8.workarounds.patch import around

MODULE = "scripts.study.faults"
COLUMNS = ("step", "loss", "grad_norm", "tokens of expert 0", "largest share")


class Plan(NamedTuple):
    """What is to happen, in which steps, the last one included."""

    what: tuple[str, ...] = ()
    first: int = 0
    last: int = 0

    def flags(self) -> list[str]:
        """TorchTitan's, which load this module and tell it the plan."""
        return [f"--experimental.custom_import={MODULE}", f"--job.description={json.dumps(self)}"]

    def has(self, what: str, step: int) -> bool:
        return what in self.what and self.first <= step <= self.last


class Watch:
    """What one process does with a plan. That of rank 0 has the token that is NaN, and writes ``steps.csv`` into the
    run's folder."""

    def __init__(self, plan: Plan, folder: Path, rank: int) -> None:
        self.plan, self.folder, self.rank = plan, folder, rank
        self.step = 0  # that runs, or has just ended
        self.runs_again = False
        self.counts: list[Tensor] = []  # of tokens, (experts,), of each MoE layer of this step

    def reach(self, point: str) -> None:
        if point in self.plan.what and self.step == self.plan.first:
            os.kill(os.getpid(), signal.SIGKILL)

    def embed(self, embedded: Tensor) -> Tensor:
        """(batch, length, D), in which one token becomes NaN if it is to."""
        if not self.plan.has("nan", self.step) or self.rank:
            return embedded
        embedded = embedded.clone()
        embedded[0, embedded.shape[1] // 2] = torch.nan
        return embedded

    def bias(self, router: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """By which experts are chosen, (experts,): added to the scores of (tokens, D) ``x``, but not to the weights of
        what experts give."""
        dead, collapse = (self.plan.has(fault, self.step) for fault in ("dead", "collapse"))
        if dead or collapse:
            bias = torch.zeros(router.num_experts, device=x.device) if bias is None else bias.clone()
            bias[: 1 if dead else router.top_k] = -torch.inf if dead else 1e3
        return bias

    def end_step(self, loss: float, grad_norm: float) -> None:
        counts = torch.stack(self.counts)
        self.counts = []
        if self.rank == 0:
            shares = counts / counts.sum(1, keepdim=True)
            with (self.folder / "steps.csv").open("a", newline="") as file:
                row = self.step, loss, grad_norm, int(counts[:, 0].sum()), round(float(shares.max()), 4)
                csv.writer(file, lineterminator="\n").writerow(row)


def install(watch: Watch) -> None:
    """Has the trainer of this process do as ``watch`` says."""

    @around("torchtitan.tools.utils.GarbageCollection.run")
    def begin(run: Any, collection: Any, step: int) -> None:
        watch.step = step
        run(collection, step)

    @around("torch.nn.Embedding.forward")
    def embed(forward: Any, *args: Any) -> Tensor:
        return watch.embed(forward(*args))

    @around("torchtitan.models.moe.moe.TokenChoiceTopKRouter.forward")
    def route(forward: Any, router: nn.Module, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        watch.reach("rerun" if watch.runs_again else "step")
        routed = forward(router, x, watch.bias(router, x, bias))
        watch.counts.append(routed[2].detach())
        return routed

    @around("titan_mxfp8.titan.rerun.Rerun._begin_again")
    @contextmanager
    def begin_again(begin: Any, *args: Any) -> Iterator[None]:
        with begin(*args):
            watch.runs_again, watch.counts = True, []
            yield
            watch.runs_again = False

    @around("torch.distributed.checkpoint.filesystem._FileSystemWriter.write_data")
    def write(write_data: Any, *args: Any) -> Any:
        written = write_data(*args)
        watch.reach("checkpoint")
        return written

    @around("torchtitan.components.metrics.MetricsProcessor.log")
    def log(log: Any, metrics: Any, step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        log(metrics, step, loss, largest, norm, **more)
        watch.end_step(float(loss), float(norm))

    for patch in (begin, embed, route, begin_again, write, log):
        patch()


def value_of(option: str) -> str:
    """Of this process's command line."""
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"{option}="))


if f"--experimental.custom_import={MODULE}" in sys.argv:
    folder = Path(value_of("--job.dump_folder"))
    install(Watch(Plan(*json.loads(value_of("--job.description"))), folder, int(os.environ["RANK"])))
