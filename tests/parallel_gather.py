"""A program for torchrun with 4 processes: experts that FSDP gathers in FP8, on CPUs.

Run by tests/test_gather.py. Prints what it measures.
"""

import tempfile
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Step, build, run_step
from test_models import AC_MODES, tokens
from test_once import MICROBATCHES, Trainer, experts_of
from test_plugin_moe import CONVERT, DISPATCH, RECIPE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import titan_mxfp8.plugin  # noqa: F401 - what a run's config loads
from titan_mxfp8.ops.experts import Weights
from titan_mxfp8.ops.observe import make_probe, recording, summarize
from titan_mxfp8.plugin.experts import MXFP8GroupedExperts
from titan_mxfp8.titan import gather

FP32 = "--training.mixed_precision_param=float32"
OFF = "--quantize.grouped_mm.mx.no-fsdp_fp8_all_gather"
LAYOUTS = {
    "EP 2": {"dp_shard": 4, "ep": 2},  # experts are an FSDP unit of their own, of DTensors
    "HSDP 2 x 2": {"dp_shard": 2, "dp_replicate": 2},  # one with the rest of the block
}


class CopiesIn(TorchDispatchMode):
    """Records how many bytes each of FSDP's all-gathers brings."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self.bytes.append(args[1].nbytes)
        return func(*args, **kwargs or {})


def unrounded_weights(self: MXFP8GroupedExperts, is_sorted: bool) -> Weights:
    """Those that FSDP has gathered in fp32, as they are."""
    return Weights(*(w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w3, self.w2)))


def step_of(model: nn.Module) -> Step:
    return run_step(model, tokens(dist.get_rank()))


def check_steps(layout: str, *flags: str, frozen: str = "") -> None:
    """The bits of a gather in fp32 whose result is quantised, in one step and, with other weights, in the next."""
    models = [build("deepseek_v3", CONVERT, FP32, *flags, *off, **LAYOUTS[layout]) for off in ((), (OFF,))]
    assert experts_of(models[0]).gathered and not experts_of(models[1]).gathered
    for step in range(2):
        made = []
        for model, plain in zip(models, (False, True), strict=True):
            for name, param in model.named_parameters():
                param.requires_grad_(not (frozen and name.endswith(frozen)))
            with mock.patch.object(MXFP8GroupedExperts, "weights", unrounded_weights) if plain else nullcontext():
                made.append(step_of(model))
            with torch.no_grad():
                for param, grad in zip(model.parameters(), made[-1].grads.values(), strict=True):
                    if grad is not None:
                        param.to_local().sub_(grad, alpha=0.5)
        ours, theirs = made
        print(f"{layout} {flags} step {step}: {ours.loss} {theirs.loss}")
        assert ours.loss == theirs.loss
        for name, grad in theirs.grads.items():
            assert (grad is None) == (ours.grads[name] is None) == bool(frozen and name.endswith(frozen)), name
            assert grad is None or torch.equal(grad, ours.grads[name]), name


def check_bytes(layout: str, reshard: str) -> None:
    """Experts take 1 byte for an element and 1 for 1024 instead of 2, as often as before."""
    flags = CONVERT, f"{RECIPE}=mxfp8_2d", f"--parallelism.fsdp_reshard_after_forward={reshard}"
    gathered = []
    for off in ((), (OFF,)):
        model = build("deepseek_v3", *flags, *off, **LAYOUTS[layout])
        step_of(model)  # FSDP knows the order of its units after the first step
        with CopiesIn() as copies:
            step_of(model)
        gathered.append(copies.bytes)
    elements = sum(param.numel() for param in experts_of(model).parameters()) // LAYOUTS[layout].get("ep", 1)
    times = 1 if reshard == "never" else 2
    print(f"{layout}, reshard {reshard}: {gathered}, {elements} elements {times} times")
    assert len(gathered[0]) == len(gathered[1])
    assert sum(gathered[1]) - sum(gathered[0]) == times * (2 * elements - elements - elements // 1024)
    if "ep" in LAYOUTS[layout]:
        assert gathered[0].count(elements + elements // 1024) == times


def check_once(layout: str) -> None:
    """Shards are quantised once a step, and not before each gather: the same losses and weights, to the last bit."""
    results, counts = [], []
    for on in (False, True):
        model = build("deepseek_v3", CONVERT, f"{RECIPE}=mxfp8_2d", **LAYOUTS[layout])
        with mock.patch.object(gather, "quantize", side_effect=gather.quantize) as quantize:
            trainer = Trainer(model, on=on)
            ids = tokens(dist.get_rank())
            losses = []
            for _ in range(2):
                losses += [trainer.forward_backward_step(x=ids[:, i : i + 32]) for i in range(MICROBATCHES)]
                trainer.optimizers[0].step()
                trainer.optimizers[0].zero_grad()
        counts.append(quantize.call_count)
        results.append([*losses, *(param.to_local() for param in model.parameters())])
    print(f"{layout}: shards quantised {counts} times")
    assert counts == [2 * 2 * MICROBATCHES * 3, 2 * 3]
    assert all(map(torch.equal, *results)) and len(set(map(float, results[0][: 2 * MICROBATCHES]))) > 2  # bf16


def check_health(layout: str) -> None:
    """Weights are measured before they are quantised, whoever gathers them."""
    figures = []
    for off in ((), (OFF,)):
        model = build("deepseek_v3", CONVERT, FP32, f"{RECIPE}=mxfp8_2d", *off, **LAYOUTS[layout])
        probe = experts_of(model).probe = make_probe(torch.device("cpu"))
        with recording():
            step_of(model)
        dist.all_reduce(probe.grad)
        figures.append(summarize(probe.grad.tolist()))
    print(f"{layout}: {figures[0]}")
    assert figures[0] == figures[1] and figures[0]["weights/flushed_to_zero"] > 0


def check_checkpoint(folder: str) -> None:
    """What is saved is what any gather would save, and either loads it."""
    flags, layout = (CONVERT, f"{RECIPE}=mxfp8_2d"), LAYOUTS["EP 2"]
    ours, plain = (build("deepseek_v3", *flags, *off, **layout) for off in ((), (OFF,)))
    step_of(ours)
    with torch.no_grad():
        for param in ours.parameters():
            param.to_local().normal_()
    dcp.save(ours.state_dict(), checkpoint_id=folder)
    loaded = plain.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    plain.load_state_dict(loaded)
    assert ours.state_dict().keys() == loaded.keys()
    for name, param in ours.named_parameters():
        theirs, local = dict(plain.named_parameters())[name], param.to_local()
        assert type(local) is torch.Tensor and local.dtype == torch.float32 and torch.equal(local, theirs.to_local())
        assert param.placements == theirs.placements
    ours.load_state_dict(loaded)
    assert step_of(ours).loss == step_of(ours).loss


dist.init_process_group("gloo")
for layout in LAYOUTS:
    check_steps(layout, f"{RECIPE}=mxfp8_2d_rebased", *AC_MODES["full"], f"{DISPATCH}=off")
check_steps("EP 2", f"{RECIPE}=mxfp8_2d", frozen="experts.w1")
check_bytes("EP 2", "always")
check_once("EP 2")
check_bytes("HSDP 2 x 2", "never")
for layout in LAYOUTS:
    check_health(layout)
names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(names)
check_checkpoint(names[0])
dist.destroy_process_group()
