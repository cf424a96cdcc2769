"""What a recipe does to the gradients of a model while it is trained: errors against fp32 at the same weights and data.

    torchrun --nproc-per-node=1 scripts/study/compare_gradients.py train_configs/moe_320m.toml --steps 500 1500 \\
        --recipes bf16 mxfp8_2d mxfp8_2d+dispatch --out results/<date>_<device>_gradients -- FLAGS OF TORCHTITAN

Curves of losses say, after many seeds, that two recipes train differently, and not why. Here one training, in the first
of the recipes, stops after each of ``--steps``. The next ``--batches`` of its data, which are left out of it, then go
forward and backward through a model of each recipe that has its weights, and through one in fp32: nothing is cast,
experts are multiplied one by one, nothing is compiled. Recipes are those of ``converge.py``. In one process, on a GPU
or a CPU.

``--reference RECIPE`` takes that one in fp32's place: what two ways to compute the same differ by may be small beside
the error that both have.

With g the gradient of a batch in fp32, or of the reference, q a recipe's and e = q - g; a row is a recipe's kind of
parameter (layer numbers as ``*``), over all parameters of that kind:

    error     sqrt(sum over batches of |e|^2 / sum of |g|^2)
    mean      |mean of e| / |mean of g|: what of the errors stays when batches are averaged, as an optimizer does
    by chance what to expect of ``mean`` if the errors of different batches were independent, and 0 on average:
              sqrt(sum of |e|^2) / n / |mean of g|
    along     <mean of q, mean of g> / |mean of g|^2: 1, unless the gradient as a whole is too short or too long

Weights are rounded alike for every batch, so a quantised model's ``mean`` is above ``by chance``: compare it with that
of another way to compute the same. ``losses.csv`` has the mean losses of the batches.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from scripts.result_files import environment, format_table, write_results, write_rows
from scripts.study.converge import StudyRun, check_flags, check_recipes, flags_of
from scripts.study.runs import split_flags
from scripts.study.train_many import WRAPPERS

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor]

FP32 = "fp32"
IN_FP32 = ("--training.dtype=float32", "--training.mixed_precision_param=float32", "--compile.no-enable")
QUIET = (
    "--metrics.no-enable-wandb",
    "--metrics.no-enable-tensorboard",
    "--validation.no-enable",
    "--checkpoint.no-enable",
    "--quantize.health_every=0",
)


@dataclass(slots=True)
class Sums:
    """Of one parameter over batches, in fp32 and on its device; the squares as scalars."""

    gradient: torch.Tensor
    error: torch.Tensor
    gradient_squares: float = 0.0
    error_squares: float = 0.0

    def add(self, gradient: torch.Tensor, error: torch.Tensor) -> None:
        self.gradient += gradient
        self.error += error
        self.gradient_squares += square(gradient)
        self.error_squares += square(error)


@dataclass(slots=True)
class Comparison:
    """A recipe's gradients against the reference's."""

    batches: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)

    def add(self, exact: Gradients, gradients: Gradients) -> None:
        """Those of one batch, by parameter.

        Raises:
            ValueError: the two have not the same parameters.
        """
        if exact.keys() != gradients.keys():
            raise ValueError(f"one model alone has gradients of {', '.join(sorted(exact.keys() ^ gradients.keys()))}")
        for name, gradient in exact.items():
            if name not in self.sums:
                self.sums[name] = Sums(torch.zeros_like(gradient), torch.zeros_like(gradient))
            self.sums[name].add(gradient, gradients[name] - gradient)
        self.batches += 1

    def rows(self) -> Iterator[dict[str, object]]:
        """A row for each kind of parameter; see above."""
        kinds: dict[str, list[Sums]] = {}
        for name, sums in self.sums.items():
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(sums)
        for kind, many in kinds.items():
            gradient, error = sum(square(s.gradient) for s in many), sum(square(s.error) for s in many)
            error_squares, gradient_squares = sum(s.error_squares for s in many), sum(s.gradient_squares for s in many)
            product = sum((s.error.double() * s.gradient.double()).sum().item() for s in many)
            yield {
                "parameters": kind,
                "batches": self.batches,
                "error": ratio(error_squares, gradient_squares) ** 0.5,
                "mean": ratio(error, gradient) ** 0.5,
                "by chance": ratio(error_squares, gradient) ** 0.5,
                "along": 1 + ratio(product, gradient),
            }


def ratio(a: float, b: float) -> float:
    """NaN of a gradient that is 0."""
    return a / b if b else math.nan


def square(x: torch.Tensor) -> float:
    return x.double().square().sum().item()


def trainer_of(recipe: str, args: argparse.Namespace) -> Trainer:
    """TorchTitan's trainer with a model in this recipe, or in fp32."""
    in_fp32 = recipe == FP32
    run = StudyRun(recipe="bf16" if in_fp32 else recipe, seed=args.seed, folder=args.out / "trainings")
    flags = [*flags_of(run, args.config, 0), *args.flags, *QUIET]
    if in_fp32:
        flags += IN_FP32
    trainer = Trainer(ConfigManager().parse_args(flags))
    if in_fp32:
        multiply_one_by_one(trainer.model_parts[0])
    return trainer


def multiply_one_by_one(model: torch.nn.Module) -> None:
    """Has TorchTitan's experts multiply their tokens in the weights' dtype; their grouped GEMM does so in bf16."""
    for module in model.modules():
        if hasattr(module, "use_grouped_mm"):
            module.use_grouped_mm = False


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and buffers, by the names that they have where nothing is compiled or recomputed."""
    return {plain(name): value for name, value in trainer.model_parts[0].state_dict().items()}


def plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def load(trainer: Trainer, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in state_of(trainer).items():
            value.copy_(state[name])


def gradients_of(trainer: Trainer, batch: Batch) -> tuple[float, Gradients]:
    """The loss, and the gradients in fp32 by parameter. The model itself keeps none."""
    inputs = {name: value.to(trainer.device) for name, value in batch[0].items()}
    labels = batch[1].to(trainer.device)
    tokens = (labels != IGNORE_INDEX).sum().float()
    loss = trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
    gradients = {}
    for name, param in trainer.model_parts[0].named_parameters():
        if param.grad is not None:
            gradients[plain(name)] = param.grad.float()
            param.grad = None
    return loss.item(), gradients


def compare(
    reference: str, trainers: dict[str, Trainer], batches: Sequence[Batch]
) -> tuple[dict[str, Comparison], dict[str, float]]:
    """The comparison with the reference of each other recipe, and the mean losses over the batches of all."""
    comparisons = {recipe: Comparison() for recipe in trainers if recipe != reference}
    losses = dict.fromkeys(trainers, 0.0)
    for batch in batches:
        loss, expected = gradients_of(trainers[reference], batch)
        losses[reference] += loss / len(batches)
        for recipe, comparison in comparisons.items():
            loss, gradients = gradients_of(trainers[recipe], batch)
            losses[recipe] += loss / len(batches)
            comparison.add(expected, gradients)
    return comparisons, losses


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML of the model, its data and its training")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="after which steps of training to compare")
    parser.add_argument("--recipes", nargs="+", required=True, help="of converge.py; the first one trains")
    parser.add_argument("--reference", default=FP32, metavar="RECIPE", help="of the comparison (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=16, help="at each of the steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv, losses.csv and env.json")
    own, flags = split_flags(argv)
    args = parser.parse_args(own)
    args.flags = flags
    if args.steps != sorted({*args.steps}) or args.steps[0] < 1:
        parser.error(f"--steps are increasing numbers from 1 on, got {args.steps}")
    if args.batches < 2:
        parser.error("--batches: at least 2, as their mean is compared with each")
    try:
        check_recipes(args.config, args.recipes if args.reference == FP32 else [*args.recipes, args.reference])
        check_flags(flags, checkpoint_every=0, seeds="--seed")
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("WORLD_SIZE") != "1":
        parser.error("run it in one process: torchrun --nproc-per-node=1 scripts/study/compare_gradients.py ...")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    init_logger()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.config.recompile_limit = 8 * (2 + len(args.recipes))  # all models have the code of their layers
    training = trainer_of(args.recipes[0], args)
    if args.steps[-1] > training.job_config.training.steps:
        raise SystemExit(f"--steps: the training has {training.job_config.training.steps}, see training.steps")
    trainers = {recipe: trainer_of(recipe, args) for recipe in (args.reference, *args.recipes)}
    data = training.batch_generator(training.dataloader)
    rows, losses = [], []
    for step in args.steps:
        while training.step < step:
            training.step += 1
            training.gc_handler.run(training.step)
            training.train_step(data)
        for trainer in trainers.values():
            load(trainer, state_of(training))
        comparisons, mean_losses = compare(args.reference, trainers, [next(data) for _ in range(args.batches)])
        found = [
            {"step": step, "recipe": recipe} | row
            for recipe, comparison in comparisons.items()
            for row in comparison.rows()
        ]
        print(format_table([shown(row) for row in found]), flush=True)
        rows += found
        losses.append({"step": step} | mean_losses)
        print(format_table([shown(losses[-1])]), flush=True)
        write_results(args.out, rows, environment(training.device))
        write_rows(args.out / "losses.csv", losses)
    torch.distributed.destroy_process_group()


def shown(row: dict[str, object]) -> dict[str, object]:
    return {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
