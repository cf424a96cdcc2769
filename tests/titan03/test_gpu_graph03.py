"""TorchTitan 0.3's CUDA graphs of debug models, on GPUs, with the losses of eager runs."""

from pathlib import Path

import pytest
import torch
from training import finish, start_torchtitan

from scripts.study.runs import LOSS, read_tensorboard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 10
COMMON = ["--module=titan_mxfp8.titan03", "--config=debug_deepseek_v3", f"--training.steps={STEPS}"]
COMMON += ["--training.seq_len=256"]
KINDS = {"eager": "--training.disable_cuda_graphs", "graph": "--training.no-disable_cuda_graphs"}
ACCUMULATE = {"1 process": "--training.global_batch_size=4", "FSDP 2 + EP 2": "--training.global_batch_size=8"}
# By name: arguments of the override, and flags.
CASES = {"plain": ("", []), "health": (', "health_every": 4', []), "compiled": ("", ["--compile.enable"])}
BAND = 2e-3  # at any step: atomics add up in any order


def check_case(out: Path, case: str, layout: str, accumulates: bool) -> str:
    """Trains eagerly and as a graph, and compares; returns what was seen."""
    fields, flags = CASES[case]
    override = f'titan_mxfp8.titan03.experts={{"recipe": "auto", "dispatch_rows": "worst_case"{fields}}}'
    flags = [*COMMON, "--override.imports", override, *flags, *([ACCUMULATE[layout]] if accumulates else [])]
    runs = {
        kind: start_torchtitan(out / kind, [*flags, f"--dump_folder={out / kind}", own], layout)
        for kind, own in KINDS.items()
    }
    for kind, process in runs.items():
        finish(process, out / kind)
    seen = {kind: read_tensorboard(out / kind) for kind in KINDS}
    eager, graph = (seen[kind][LOSS] for kind in KINDS)
    gap = max(abs(graph[step] - loss) for step, loss in eager.items())
    said = f"{case}, {layout}: {graph[1]:.4f} -> {graph[STEPS]:.4f}, largest gap {gap}"
    print(said)
    assert "are one CUDA graph from now on" in (out / "graph" / "log").read_text(), said
    assert len(graph) == STEPS and graph.keys() == eager.keys() and gap < BAND, said
    assert graph[STEPS] < graph[1] - 0.1, said
    health = [{tag: log[tag].keys() for tag in log if tag.startswith("mx_health")} for log in seen.values()]
    assert health[0] == health[1] and bool(health[0]) == (case == "health")
    return said


@pytest.mark.parametrize("accumulates", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ACCUMULATE)
def test_losses_are_those_of_eager_steps(tmp_path: Path, layout: str, case: str, accumulates: bool) -> None:
    if layout != "1 process" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_case(tmp_path, case, layout, accumulates)
