"""Debug models trained by stock TorchTitan 0.3 on GPUs: eager, compiled, resumed from the other's checkpoint; as CUDA
graphs, with the losses of eager runs; and steps that run again, as their rows did not fit."""

import shutil
from pathlib import Path

import processes
import pytest
import torch
from test_gpu_graph import compare
from test_smoke03 import OVERRIDES, STEPS
from training import LAYOUTS, finish, start_torchtitan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COMPILE = ("--compile.enable",)
ROWS = {rows: f'titan_mxfp8.titan03.experts={{"dispatch_rows": "{rows}"}}' for rows in ("counted", "bounded")}
# By name: what is converted, and flags. All of a layout's start from the same weights.
KINDS = {
    "bf16": ((), ()),
    "bf16, compiled": ((), COMPILE),
    "counted": ((ROWS["counted"], OVERRIDES[2]), ()),
    "bounded": ((ROWS["bounded"], OVERRIDES[2]), ()),
    "bounded, compiled": ((ROWS["bounded"], OVERRIDES[2]), COMPILE),
}
BAND = 0.05  # nats per token between any two kinds at any step


def train(out: Path, model: str, layout: str, kinds: list[str], flags: tuple[str, ...]) -> dict[str, dict[int, float]]:
    """The losses of each kind, all of which run at once, in ``out/<kind>``."""
    runs = {}
    for kind in kinds:
        imports, own = KINDS[kind]
        command = ["--module=titan_mxfp8.titan03", f"--config=debug_{model}", f"--dump_folder={out / kind}"]
        command += [*flags, *own, *(["--override.imports", *imports] if imports else [])]
        runs[kind] = start_torchtitan(out / kind, command, layout)
    return {kind: finish(process, out / kind) for kind, process in runs.items()}


@pytest.mark.parametrize("layout", ["1 process", "FSDP 2 + EP 2"])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_mxfp8_tracks_bf16_and_compiled_blocks_dispatch_their_own_tokens(
    model: str, layout: str, tmp_path: Path
) -> None:
    """And bf16 runs go on from MXFP8's checkpoints, and the other way round."""
    if torch.cuda.device_count() < LAYOUTS[layout][0]:
        pytest.skip("needs two GPUs")
    flags = (*STEPS, "--checkpoint.interval=4")
    losses = train(tmp_path, model, layout, list(KINDS), flags)
    for kind, own in losses.items():
        gaps = [abs(own[step] - loss) for step, loss in losses["bf16"].items()]
        print(f"{model}, {layout}, {kind}: {own[1]:.4f} -> {own[8]:.4f}, largest gap {max(gaps):.4f}")
    for kind, own in losses.items():
        assert list(own) == list(range(1, 9)) and own[1] - own[8] > 0.5, kind
        assert max(abs(own[step] - loss) for step, loss in losses["bf16"].items()) < BAND, kind
        log = (tmp_path / kind / "log").read_text()
        assert ("Compiling each TransformerBlock" in log) == ("compiled" in kind)
        assert "TorchTitan dispatches" not in log or kind == "counted"
        if layout != "1 process" and "bf16" not in kind:
            assert "symmetric: " in log, "the transport"
    resumed = tmp_path / "resumed"
    for kind, other in (("bf16", "bounded"), ("bounded", "bf16")):
        shutil.copytree(tmp_path / other / "checkpoint" / "step-4", resumed / kind / "checkpoint" / "step-4")
    for kind, own in train(resumed, model, layout, ["bf16", "bounded"], (*STEPS, "--checkpoint.interval=60")).items():
        assert list(own) == list(range(5, 9))
        assert all(abs(loss - losses[kind][step]) < BAND for step, loss in own.items()), kind


COMMON = ["--module=titan_mxfp8.titan03", "--config=debug_deepseek_v3", "--training.steps=10"]
COMMON += ["--training.seq_len=256"]
WAYS = {"eager": "--training.disable_cuda_graphs", "graph": "--training.no-disable_cuda_graphs"}
ACCUMULATE = {"1 process": "--training.global_batch_size=4", "FSDP 2 + EP 2": "--training.global_batch_size=8"}
# By name: arguments of the override, and flags.
CASES = {"plain": ("", []), "health": (', "health_every": 4', []), "compiled": ("", ["--compile.enable"])}


@pytest.mark.parametrize("accumulates", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ACCUMULATE)
def test_losses_are_those_of_eager_steps(tmp_path: Path, layout: str, case: str, accumulates: bool) -> None:
    if layout != "1 process" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    fields, flags = CASES[case]
    override = f'titan_mxfp8.titan03.experts={{"recipe": "auto", "dispatch_rows": "worst_case"{fields}}}'
    flags = [*COMMON, "--override.imports", override, *flags, *([ACCUMULATE[layout]] if accumulates else [])]
    folders = {tmp_path / kind: own for kind, own in WAYS.items()}
    runs = {to: start_torchtitan(to, [*flags, f"--dump_folder={to}", own], layout) for to, own in folders.items()}
    for folder, process in runs.items():
        finish(process, folder)
    compare(tmp_path, f"{case}, {layout}", 10, measures=case == "health")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [(), ("graph",)], ids=["eager", "graph"])
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones(how: tuple[str, ...]) -> None:
    processes.check(2, "parallel_rerun.py", "cuda", *how)
