"""TorchTitan 0.3's CUDA graphs of debug models, on GPUs, with the losses of eager runs; and steps that run again, as
their rows did not fit."""

from pathlib import Path

import processes
import pytest
import torch
from test_gpu_graph import compare
from training import finish, start_torchtitan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 10
COMMON = ["--module=titan_mxfp8.titan03", "--config=debug_deepseek_v3", f"--training.steps={STEPS}"]
COMMON += ["--training.seq_len=256"]
KINDS = {"eager": "--training.disable_cuda_graphs", "graph": "--training.no-disable_cuda_graphs"}
ACCUMULATE = {"1 process": "--training.global_batch_size=4", "FSDP 2 + EP 2": "--training.global_batch_size=8"}
# By name: arguments of the override, and flags.
CASES = {"plain": ("", []), "health": (', "health_every": 4', []), "compiled": ("", ["--compile.enable"])}


def check_case(out: Path, case: str, layout: str, accumulates: bool) -> None:
    """Trains eagerly and as a graph, and compares."""
    fields, flags = CASES[case]
    override = f'titan_mxfp8.titan03.experts={{"recipe": "auto", "dispatch_rows": "worst_case"{fields}}}'
    flags = [*COMMON, "--override.imports", override, *flags, *([ACCUMULATE[layout]] if accumulates else [])]
    folders = {out / kind: own for kind, own in KINDS.items()}
    runs = {to: start_torchtitan(to, [*flags, f"--dump_folder={to}", own], layout) for to, own in folders.items()}
    for folder, process in runs.items():
        finish(process, folder)
    compare(out, f"{case}, {layout}", STEPS, measures=case == "health")


@pytest.mark.parametrize("accumulates", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ACCUMULATE)
def test_losses_are_those_of_eager_steps(tmp_path: Path, layout: str, case: str, accumulates: bool) -> None:
    if layout != "1 process" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_case(tmp_path, case, layout, accumulates)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", [(), ("graph",)], ids=["eager", "graph"])
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones(how: tuple[str, ...]) -> None:
    processes.check(2, "parallel_rerun.py", "cuda", *how)
