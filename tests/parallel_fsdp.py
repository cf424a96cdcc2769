"""A program for torchrun with 2 or 4 processes: experts out of FSDP and in it, on CPU.

Run by tests/test_plugin_moe.py. The argument is a folder for checkpoints: the 4 processes read what the 2 have
written, and write one more.
"""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import build, run_step
from test_models import tokens
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.utils import clip_grad_norm_

import titan_mxfp8.plugin  # noqa: F401 - what a run's config loads
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.plugin.experts import MXFP8GptOssGroupedExperts, MXFP8GroupedExperts, RoutedExperts

FOLDER = Path(sys.argv[1])
COMMON = "--activation_checkpoint.mode=none", "--training.mixed_precision_param=float32"  # as the layer takes them
EXPERTS = "--model.converters=quantize.grouped_mm.mx"
QUANTIZED = EXPERTS, "--quantize.grouped_mm.mx.recipe_name=mxfp8_2d", "--quantize.grouped_mm.mx.dispatch=off"
CONTROL = EXPERTS, "--quantize.grouped_mm.mx.recipe_name=bf16"


def round_weights(cls: type[RoutedExperts]) -> None:
    """To bf16, their gradients too, as FSDP does: then both ways are alike to the last digit."""
    weights = cls.weights

    def rounded(experts: RoutedExperts, is_sorted: bool) -> Weights:
        given = weights(experts, is_sorted)
        return Weights(*(w.bfloat16() for w in given[:3]), *given[3:])

    cls.weights = rounded


class Training:
    """DeepSeek-V3 with Adam, whose experts are on a mesh with these dimensions."""

    def __init__(self, mesh: str, *flags: str, model: str = "deepseek_v3", **degrees: int) -> None:
        whole = "" if mesh == "ep" else "for comparison"
        with mock.patch.object(RoutedExperts, "needs_fsdp", whole):
            self.model = build(model, *COMMON, *flags, **degrees)
        self.optimizer = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 1e-2})
        for module in self.model.modules():
            if isinstance(module, RoutedExperts):
                for param in module.parameters():
                    assert " ".join(param.device_mesh.mesh_dim_names) == mesh

    def state(self) -> dict[str, object]:
        return {"model": ModelWrapper(self.model), "optimizer": self.optimizer}

    def step(self, seed: int, microbatches: int = 1) -> list[float]:
        """The loss of each microbatch on this rank, and the norm of their gradients' sum."""
        losses = []
        for number in range(microbatches):
            text = tokens(1000 * seed + 100 * number + dist.get_rank())
            losses.append(cross_entropy_loss(self.model(text[:, :-1]), text[:, 1:]))
            losses[-1].backward()
        norm = clip_grad_norm_(list(self.model.parameters()), 0.5, foreach=True, ep_enabled=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in (*losses, norm)]

    def full(self) -> dict[str, torch.Tensor]:
        """Parameters and the optimizer's states, whole, with the names that a checkpoint has."""
        values = {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}
        values |= {f"optimizer.{name}": value for name, value in self.optimizer.state_dict().items()}
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }


def check_equal(read: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert read.keys() == wanted.keys() and "optimizer.state.layers.1.moe.experts.w1.exp_avg_sq" in read
    different = [name for name, value in read.items() if not torch.equal(value, wanted[name])]
    assert not different, different


def two_processes() -> None:
    degrees = {"dp_shard": 2, "ep": 2}
    for flags, microbatches in ((QUANTIZED, [1, 1]), (CONTROL, [1, 2])):
        runs = {mesh: Training(mesh, *flags, **degrees) for mesh in ("ep", "efsdp ep")}
        steps = {mesh: [run.step(*numbers) for numbers in enumerate(microbatches)] for mesh, run in runs.items()}
        assert steps["ep"] == steps["efsdp ep"], steps
    gpt_oss = [Training(mesh, *CONTROL, model="gpt_oss", **degrees).model for mesh in runs]  # bf16, with biases
    plain, fsdp = (run_step(model, tokens(dist.get_rank())) for model in gpt_oss)
    assert plain.loss == fsdp.loss and plain.grads.keys() == fsdp.grads.keys()
    assert all(torch.equal(grad, fsdp.grads[name]) for name, grad in plain.grads.items())
    check_equal(runs["ep"].full(), runs["efsdp ep"].full())
    for mesh, run in runs.items():
        dcp.save(run.state(), checkpoint_id=FOLDER / mesh)
    wanted = runs["ep"].step(2)
    for mesh, written in zip(runs, reversed(runs), strict=True):
        run = Training(mesh, *flags, **degrees)
        dcp.load(run.state(), checkpoint_id=FOLDER / written)
        assert run.step(2) == wanted
    torch.save(runs["efsdp ep"].full(), FOLDER / f"full{dist.get_rank()}.pt")


def four_processes() -> None:
    wanted = torch.load(FOLDER / "full0.pt")
    for mesh, written, degrees in (
        ("dp_replicate efsdp ep", "ep", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        ("efsdp ep", "ep", {"dp_shard": 4, "ep": 2}),
        ("ep", "efsdp ep", {"dp_shard": 4, "ep": 4}),
    ):
        run = Training(mesh, *CONTROL, **degrees)
        dcp.load(run.state(), checkpoint_id=FOLDER / written)
        check_equal(run.full(), wanted)
    dcp.save(run.state(), checkpoint_id=FOLDER / "of 4")


dist.init_process_group("gloo")
for experts_class in (MXFP8GroupedExperts, MXFP8GptOssGroupedExperts):
    round_weights(experts_class)
two_processes() if dist.get_world_size() == 2 else four_processes()
dist.destroy_process_group()
