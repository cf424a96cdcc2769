"""One training carried from layout to layout by its checkpoints, against one that was never interrupted. The first part
ends as one of its ranks dies."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training import kill_rank_1, losses, start, train, wait_until

from scripts.study import compare_layouts

pytestmark = pytest.mark.integration

IN_STEP, STEPS = 4, 7  # sequences in a step
# Largest loss difference at any step; measured 3.6e-4 (and 1.0e-4 at the last) of a fall by 1.2.
TOLERANCE = 2e-3
FLAGS = (
    f"--training.seq_len={compare_layouts.SEQ_LEN}",
    f"--training.global_batch_size={IN_STEP}",
    "--training.mixed_precision_param=float32",  # what differs then is the order of summation
    "--lr_scheduler.warmup_steps=0",
    "--lr_scheduler.decay_ratio=0.0",  # a rate that does not depend on training.steps
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.exclude_from_loading=dataloader",  # TorchTitan's does not carry over to other data-parallel degrees
)


def data(folder: Path, first_step: int, ranks: int) -> list[str]:
    """Flags for the sequences from a step on, in the order in which data-parallel ranks read them."""
    rows = compare_layouts.make_rows(STEPS * IN_STEP)[(first_step - 1) * IN_STEP :]
    batch = IN_STEP // ranks
    shares = [[row for i, row in enumerate(rows) if i % IN_STEP // batch == rank] for rank in range(ranks)]
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for share in shares for row in share))
    return [f"--training.dataset_path={folder}", f"--training.local_batch_size={batch}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``whole``: 7 steps in one process. ``carried``: 2 steps with FSDP 2 + EP 2 until one rank is killed, 2 in one
    process, 2 with TP 2 and an export to the Hugging Face format; the first 4 with MoE layers that dispatch their own
    tokens. ``from_hf``: one more in one process."""
    tmp = tmp_path_factory.mktemp("runs")
    whole, carried, from_hf = (tmp / name for name in ("whole", "carried", "from_hf"))
    train(whole, "deepseek_v3", *FLAGS, f"--training.steps={STEPS}", *data(tmp / "all", 1, 1))

    ours, one = "--quantize.grouped_mm.mx.dispatch=collective", "--quantize.grouped_mm.mx.dispatch=auto"
    first = [*FLAGS, ours, "--training.steps=100", *data(tmp / "1", 1, 2)]
    process = start(carried, "deepseek_v3", *first, layout="FSDP 2 + EP 2")
    wait_until(lambda: "step:  3" in (carried / "log").read_text(), process, logs=[carried / "log"])
    assert kill_rank_1(process), "the other rank, which waits for it, ends with an error"
    # the kill may have come after another checkpoint
    second = [*FLAGS, one, "--checkpoint.load_step=2", "--training.steps=4", *data(tmp / "3", 3, 1)]
    train(carried, "deepseek_v3", *second)
    export = ["--checkpoint.load_step=4", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    train(carried, "deepseek_v3", *FLAGS, "--training.steps=6", *export, *data(tmp / "5", 5, 1), layout="TP 2")

    load = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={carried}/checkpoint/step-6"]
    train(from_hf, "deepseek_v3", *FLAGS, *load, "--training.steps=1", *data(tmp / "7", 7, 1))
    return {"whole": whole, "carried": carried, "from_hf": from_hf}


def test_a_training_goes_on_under_other_layouts(runs: dict[str, Path]) -> None:
    log = (runs["carried"] / "log").read_text()
    assert "Training starts at step 3" in log and "Training starts at step 5" in log
    assert all(way in log for way in ("itself, collective: named", "itself, local: one rank"))
    whole, carried = losses(runs["whole"]), losses(runs["carried"])
    differences = {step: carried[step] - whole[step] for step in carried}
    print(differences)
    assert sorted(carried) == [1, 2, 3, 4, 5, 6]
    assert whole[1] - whole[6] > 0.8  # measured: 0.97 with torch 2.11, which draws other weights, more with 2.13
    assert max(map(abs, differences.values())) < TOLERANCE


def test_export_to_hugging_face_and_back(runs: dict[str, Path]) -> None:
    """The next loss after the way through the other format is that of the training that never left its process."""
    folder = runs["carried"] / "checkpoint" / "step-6"
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (256, 256)
    assert losses(runs["from_hf"])[1] == pytest.approx(losses(runs["whole"])[7], abs=TOLERANCE)
