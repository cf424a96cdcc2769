"""A program for torchrun: one of TorchTitan's trainers, whichever version is installed, with FSDP and EP 2, or in one
process, whose steps run again where rows did not fit. On CPUs; with ``cuda`` behind it on GPUs, with ``cuda graph`` as
CUDA graphs.

Run by tests/test_rerun.py, tests/test_gpu_rerun.py, and test_smoke03.py and test_gpu_smoke03.py in tests/titan03/.
"""

import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from titan_mxfp8.ops.observe import summarize
from titan_mxfp8.titan.dispatch import token_counts
from titan_mxfp8.titan.once import QuantizedOnce

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
IS_03 = importlib.util.find_spec("torchtitan.trainer") is not None
IS_GRAPH = sys.argv[2:] == ["graph"]  # of eager forward passes alone health is measured, and the host draws numbers
STEPS, MICROBATCHES, TOKENS = 8 if IS_GRAPH else 3, 2, 128 if DEVICE == "cpu" else 512

LEAST = {"counts": STEPS, "measured": 0 if IS_GRAPH else STEPS}  # so many are compared


def make_trainer() -> Any:
    """Of debug_deepseek_v3: a dense layer and a MoE one with a load-balancing bias, MXFP8, bounded rows, health."""
    ranks = int(os.environ["WORLD_SIZE"])
    degree, rows = min(2, ranks), 1.5 if ranks > 1 else 0.6  # one rank never gets more than balanced rows
    if IS_03:
        from torchtitan.config.override import OverrideConfig
        from torchtitan.trainer import Trainer

        from titan_mxfp8.titan03 import config_registry

        config = config_registry.debug_deepseek_v3()
        options = {"recipe": "mxfp8_2d", "dispatch_rows": rows, "health_every": 0 if IS_GRAPH else 1}
        config.override = OverrideConfig(imports=[("titan_mxfp8.titan03.experts", options)])
        config.training.disable_cuda_graphs = not IS_GRAPH
        config.training.seq_len, config.training.local_batch_size = TOKENS, 1
        config.training.global_batch_size = ranks * MICROBATCHES
        config.parallelism.expert_parallel_degree = degree
        config.metrics.enable_wandb = config.metrics.enable_tensorboard = False
        config.debug.save_config_file = None
        return Trainer(config)
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    mx = "--quantize.grouped_mm.mx"
    flags = ["--job.config_file=train_configs/debug_deepseek_v3.toml", f"--job.dump_folder={tempfile.mkdtemp()}"]
    flags += [f"--training.seq_len={TOKENS}", "--training.local_batch_size=1"]
    flags += [f"--training.global_batch_size={ranks * MICROBATCHES}", f"{mx}.recipe_name=mxfp8_2d"]
    flags += [
        f"--parallelism.expert_parallel_degree={degree}",
        "--model.converters=quantize.grouped_mm.mx",
        f"{mx}.dispatch_rows={rows}",
        *(["--training.cuda_graph=on"] if IS_GRAPH else ["--training.cuda_graph=off", "--quantize.health_every=1"]),
    ]
    return Trainer(ConfigManager().parse_args(flags))


class Run(NamedTuple):
    """What the steps of a run leave.

    Attributes:
        losses: as logged.
        counts: of tokens of each expert, before each optimizer's step.
        measured: health's counts, then; of the one module that is converted.
        tensors: the model's, its random number generator's, after all steps.
        health: what was logged of it, by step.
        batches: how many microbatches ran.
    """

    losses: list[float]
    counts: list[Tensor]
    measured: list[Tensor]
    tensors: dict[str, Tensor]
    health: dict[int, dict[str, float]]
    batches: int


class Steps:
    """Runs the same steps with rows of different kinds."""

    def __init__(self, trainer: Any, batches: list[tuple[dict[str, Tensor], Tensor]]) -> None:
        self.trainer, self.batches = trainer, batches
        (self.model,) = trainer.model_parts
        self.layers = self.model.mxfp8_layers
        self.parts = {"model": self.model, "optimizer": trainer.optimizers, "schedule": trainer.lr_schedulers}
        self.graph = getattr(trainer, "mxfp8_graph", None)
        assert (self.graph is not None) == IS_GRAPH
        self.start = {name: copied(part.state_dict()) for name, part in self.parts.items()}

    def run(self, rows_of: Callable[[int], str | None]) -> Run:
        """Begins at the start; ``rows_of`` a step is what rows are set to before it, unless it is None."""
        trainer = self.trainer
        for name, part in self.parts.items():
            part.load_state_dict(copied(self.start[name]))
        trainer.step = trainer.ntokens_seen = 0
        if self.graph is not None:
            self.graph.discard()
        torch.manual_seed(3)
        logged, counts, measured, health, batches = [], [], [], {}, []
        probes = [module.probe for module in self.model.modules() if getattr(module, "probe", None) is not None]
        update = trainer.optimizers.step

        def step(*args: object, **kwargs: object) -> None:
            names = [name for name, _ in self.model.named_buffers() if "tokens_per_expert" in name]
            counts.append(torch.cat([self.model.get_buffer(name) for name in names]).clone())
            measured.extend(probe.grad.clone() for probe in probes if probe.grad is not None)
            update(*args, **kwargs)

        def draw(*_: object) -> None:  # a model with dropout
            batches.append(None if IS_GRAPH else torch.rand(()))

        hook = self.model.register_forward_pre_hook(draw)
        metrics = trainer.metrics_processor
        log = lambda step, loss, *rest, **kwargs: logged.append(loss)  # noqa: E731
        with (
            mock.patch.object(trainer.optimizers, "step", step),
            mock.patch.object(metrics, "log", log),
            mock.patch.object(metrics.logger, "log", lambda figures, step: health.update({step: figures})),
        ):
            data = iter(self.batches)
            for number in range(STEPS):
                self.layers.set_rows(rows_of(number) or self.layers.rows)
                trainer.step += 1
                trainer.train_step(copied(batch) for batch in data)
        hook.remove()
        tensors = {name: local(value).clone() for name, value in self.model.state_dict().items()}
        tensors |= {"random": torch.get_rng_state(), "seen": torch.tensor(trainer.ntokens_seen)}
        return Run(logged, counts, measured, tensors, health, len(batches))


def copied(state: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, state)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(what: str, actual: Run, expected: Run) -> None:
    """Equal in all bits."""
    print(what, actual.losses, actual.batches, steps.layers.rows)
    assert actual.losses == expected.losses, (what, actual.losses, expected.losses)
    assert len(set(expected.losses)) == STEPS
    for name in ("counts", "measured"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs) >= LEAST[name], (what, name)
        assert all(map(torch.equal, ours, theirs)), (what, name, ours, theirs)
    assert actual.tensors.keys() == expected.tensors.keys()
    wrong = [name for name, value in expected.tensors.items() if not torch.equal(actual.tensors[name], value)]
    assert not wrong, (what, wrong)


logging.basicConfig(level=logging.WARNING)
trainer = make_trainer()
assert isinstance(trainer.forward_backward_step.__self__, QuantizedOnce)
vocabulary = 2048
generator = torch.Generator().manual_seed(dist.get_rank())
batches = []
for _ in range(STEPS * MICROBATCHES):
    ids = torch.randint(vocabulary, (1, TOKENS + 1), generator=generator)
    inputs = {"input": ids[:, :-1]}
    if IS_03:
        inputs["positions"] = torch.arange(TOKENS)[None]
    batches.append((inputs, ids[:, 1:]))
steps = Steps(trainer, batches)
with steps.graph.eager() if IS_GRAPH else nullcontext():
    with mock.patch.object(QuantizedOnce, "begin", lambda steps: None):
        counted = steps.run(lambda number: "counted")  # and weights quantised each time, in other runs once
assert counted.batches == STEPS * MICROBATCHES

once = steps.run(lambda number: "0.6" if number == 0 else None)
check("0.6", once, counted)
assert IS_GRAPH or once.batches == counted.batches + MICROBATCHES
assert 1 <= float(steps.layers.rows) <= 2, steps.layers.rows
SHARE = "mx_health/experts/rows_of_balanced"
shares = [figures[SHARE] for figures in once.health.values() if SHARE in figures]
assert all(1 <= share < 2 for share in shares) and len(shares) >= LEAST["measured"], shares
for number, measured in enumerate(once.measured, start=1):
    dist.all_reduce(measured)
    own = summarize(measured.tolist())
    logged = {tag: figure for tag, figure in once.health[number].items() if "/experts/" not in tag}
    assert [*own.values()] == [*logged.values()], f"step {number} logged {logged}, and its own tokens were {own}"

if not IS_GRAPH:  # one of another bound goes on with it
    always = steps.run(lambda number: "bounded" if number % 2 else "0")
    check("every second step overflows", always, counted)
    assert always.batches == counted.batches + 2 * MICROBATCHES

if not IS_GRAPH:  # a trainer that goes on after an error in a second microbatch
    begin, calls = trainer.post_dataloading_process, iter((True, False))
    steps.layers.set_rows("0.6")
    with suppress(TypeError):
        with mock.patch.object(trainer, "post_dataloading_process", lambda *batch: next(calls) and begin(*batch)):
            trainer.train_step(copied(batch) for batch in batches)
        raise AssertionError("no error")
    for count in token_counts(steps.model).values():
        count.zero_()  # TorchTitan's keep what was counted before the error
    assert not any(steps.layers.wanted(trainer.device).read().values()), "what the failed step wanted"
    check("after an error", steps.run(lambda number: "0.6" if number == 0 else None), counted)
    assert steps.layers.wanted(trainer.device).raises, "outside of steps"

with mock.patch.object(steps.model.mxfp8_layers, "bytes_needed", lambda rows: float("nan")):
    without_memory = steps.run(lambda number: "0.6" if number == 0 else None)  # no bound fits, so rows are counted
check("no memory", without_memory, counted)
assert steps.layers.rows == "counted"

outputs = []
for rows in ("counted", "0.1"):
    steps.layers.set_rows(rows)
    with torch.no_grad():
        inputs = {name: value.to(trainer.device) for name, value in batches[0][0].items()}
        arguments, _, *more = trainer.post_dataloading_process(inputs, batches[0][1])
        outputs.append(
            steps.model.eval()(arguments, **{name: value for kwargs in more for name, value in kwargs.items()})
        )
assert torch.equal(*map(local, outputs)), "a validation that counts rows"
trainer.close()
dist.destroy_process_group()
