"""The doctor: what it says of this machine, and of machines that are not here."""

import csv
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from result_files import SPEED

from titan_mxfp8 import doctor
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.doctor import Machine

ROOT = Path(__file__).parent.parent
H200, B200 = CLUSTER_GPUS["H200"], CLUSTER_GPUS["B200"]
HEALTHY = Machine(
    hardware=H200,
    gpus=8,
    peers=True,
    memory=140 * 2**30,
    driver="580.1",
    cuda="13.0",
    versions={"torch": "2.11.0+cu130", "triton": "3.6.0", "torchtitan": "0.2.2"}
    | dict.fromkeys((*doctor.IMPORTED, *doctor.OPTIONAL), "1.0"),
    ptxas="ptxas, release 13.0",
    newer_ptxas="",
    compiler="/usr/bin/cc",
    headers=True,
)


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = (sys.executable, "-m", "titan_mxfp8.doctor", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says of a CPU what it is")
def test_this_machine() -> None:
    done = run("train_configs/debug_llama4.toml", "--quantize.linear.mx.recipe_name=mxfp8_2d")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        f"torch {torch.__version__}, triton",
        "backend           reference (for cpu; hopper needs",
        "| mxfp8_2d_rebased | reference | fp32 | fp32 | fp32 |",
        "quantize.linear.mx is mxfp8_2d, backend reference: forward fp32",
        "tried one grouped GEMM of mxfp8_2d, forward and backward: 0.0e+00 from the reference",
        "MXFP8 training will run here",
    ):
        assert said in done.stdout


def test_a_config_that_cannot_be_trained_here(capsys: pytest.CaptureFixture) -> None:
    config = "train_configs/debug_llama4.toml"
    for flag, said in (
        ("--quantize.linear.mx.backend=hopper", "backend 'hopper' needs an NVIDIA GPU of SM90"),
        ("--model.converters=", "converts nothing: it trains in bf16"),
        ("--nonesuch=1", "FAILED: train_configs/debug_llama4.toml, see above"),
        ("--model.flavor=nope", "llama4 has no flavor 'nope'"),
        ("--training.seq_len=0", "training.seq_len = 0: it must be at least 1"),
        ("--quantize.grouped_mm.mx.fqns=exprts", "no expert module matches fqns ['exprts']"),
    ):
        assert doctor.main([str(ROOT / config), flag]) == 1
        printed = capsys.readouterr().out
        assert said.replace("train_configs", str(ROOT / "train_configs")) in printed and "will NOT run" in printed
    assert logging.root.manager.disable == logging.NOTSET  # who calls main() goes on logging


def test_a_backend_that_fails_or_is_wrong_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fails(recipe: str, device: torch.device) -> float:
        raise RuntimeError("no kernel image")

    for trial, said in ((fails, "RuntimeError: no kernel image"), (lambda *_: 0.5, "further than another order")):
        monkeypatch.setattr(doctor, "try_layer", trial)
        assert doctor.main([]) == 1
        assert said in capsys.readouterr().out


def test_what_is_missing_comes_with_the_command_that_mends_it() -> None:
    assert list(doctor.problems(HEALTHY)) == []
    cpu = Hardware("cpu", "cpu")
    without = {name: version for name, version in HEALTHY.versions.items() if name not in ("torchtitan", "wandb")}
    for change, said, command, fatal in (
        ({"versions": HEALTHY.versions | {"torch": "2.9.1"}}, "older than 2.11", "pip install", True),
        ({"versions": HEALTHY.versions | {"torch": "2.15.0"}}, "newer than what is tested", "pip install", False),
        ({"versions": HEALTHY.versions | {"triton": "3.5.1"}}, "3.6 or newer", "pip install", True),
        ({"versions": HEALTHY.versions | {"torchtitan": "0.3.0"}}, "torchtitan 0.3.0 is installed", "[train]", True),
        ({"versions": without}, "torchtitan is not installed", "[train]", True),
        ({"versions": without}, "wandb is not installed", "[train]", False),
        ({"versions": {"torch": "2.13.0", "triton": "3.9.0"}}, "tensorboard is not installed", "[train]", True),
        ({"hardware": cpu, "cuda": ""}, "is a build for CPUs", "--force-reinstall", True),
        ({"compiler": ""}, "no C compiler", "apt-get install gcc", True),
        ({"headers": False}, "Python.h", "-dev", True),
        ({"newer_ptxas": "/cuda/ptxas"}, "some per cent faster", "TRITON_PTXAS_PATH=/cuda/ptxas", False),
    ):
        found = [problem for problem in doctor.problems(replace(HEALTHY, **change)) if said in problem.what]
        assert len(found) == 1 and command in found[0].command and found[0].fatal == fatal, said
    assert len(list(doctor.problems(replace(HEALTHY, versions=without)))) == 2
    assert "each of 8 GPUs" in doctor.symmetric_memory(HEALTHY)
    assert "two GPUs" in doctor.symmetric_memory(replace(HEALTHY, gpus=1))
    assert "cannot read" in doctor.symmetric_memory(replace(HEALTHY, peers=False))


def test_what_other_gpus_multiply_and_why() -> None:
    def rows(hardware: Hardware) -> dict[str, tuple[str, ...]]:
        gemms = ("backend", "forward", "dgrad", "wgrad", "why nothing faster")
        return {row["recipe"]: tuple(row.get(key, "") for key in gemms) for row in doctor.recipe_rows(hardware)}

    h200 = rows(H200)
    assert h200["mxfp8_2d"][:4] == ("hopper", "FP8", "FP8", "bf16")
    assert h200["mxfp8_2d"][4].startswith("wgrad: SM90's tensor cores know no scales: a rebased recipe")
    assert "32x32 weights" in h200["mxfp8"][4] and h200["mxfp8_2d_rebased"][4] == ""
    assert "leaves the weight gradient unquantised" in h200["mxfp8_wgrad_bf16_rebased"][4]
    b200 = rows(B200)
    assert b200["mxfp8"][1:] == ("FP8", "FP8", "FP8", "") and b200["mxfp8_rebased"][0] == "none"
    for name, arch, why in (
        ("NVIDIA L40S", "sm_89", "its tensor cores know no scales"),
        ("NVIDIA GeForce RTX 5090", "sm_120", "our tiles for them need more shared memory"),
    ):
        hardware = Hardware(arch, name)
        assert rows(hardware)["mxfp8"][:4] == ("triton", "bf16", "bf16", "bf16") and why in rows(hardware)["mxfp8"][4]
        text, _ = doctor.report(replace(HEALTHY, hardware=hardware), ROOT / "results")
        assert f"NEVER RUN HERE: backend 'triton' was never run on {name}" in text
        assert "nothing here multiplies FP8, so expect no speed" in text and "what it brings is not known" in text


def test_what_to_expect_is_read_from_the_results_that_count() -> None:
    found = doctor.measured(H200, ROOT / "results")
    what = "one GEMM of 131072 x 8192 x 5120, 8 experts, balanced groups"
    gemms = [result.file for result in found if (result.recipe, result.what) == ("mxfp8", what)]
    assert gemms == ["results/2026-11-25_h200_bench/grouped_mm/data.csv"], "the newest of three"
    table = "results/2026-11-22_h200_redrawn_core/training_table.csv"
    with (ROOT / table).open(newline="") as file:
        times = {row["run"]: float(row["x"]) for row in csv.DictReader(file)}
    ours = {result.recipe: result.times for result in found if result.file == table}
    assert ours == pytest.approx(
        {name.removeprefix("both:"): x for name, x in times.items() if name != "bf16"}, abs=1e-3
    )
    first, *lines = doctor.advice(H200, found)
    assert first.startswith("mxfp8_2d_rebased (a scale per 128 elements: not exact MXFP8): fastest") and any(
        table in line for line in lines
    )
    assert any(line.startswith("mxfp8_2d: fastest of exact MXFP8") for line in lines)
    h100 = Hardware("sm_90", "NVIDIA H100 80GB HBM3")
    newest = doctor.measured(h100, ROOT / "results")
    first, training = doctor.advice(h100, newest)
    assert "fastest" in first and "training 16B_4layers with dispatch, 2 GPUs (results/2026-11-25_2xh100" in training
    gemms = [result for result in newest if not result.what.startswith("training")]
    _, gemm, *_ = doctor.advice(h100, gemms)
    assert "one GEMM of 131072 x 8192 x 5120" in gemm and "results/2026-11-25_h100_bench/grouped_mm/data.csv" in gemm


def test_a_combination_that_never_ran_is_named() -> None:
    assert doctor.combinations(H200, ROOT / "results") == {("2.11", "3.6")}
    assert ("2.13", "3.9") in doctor.combinations(Hardware("cpu", "cpu"), ROOT / "results")
    newer = replace(HEALTHY, versions=HEALTHY.versions | {"torch": "2.13.0", "triton": "3.9.0"})
    said = "NEVER RUN SO: torch 2.13 with Triton 3.9 on NVIDIA H200. By results/ it ran with torch 2.11 with Triton 3.6"
    assert said in doctor.report(newer, ROOT / "results")[0]
    assert "NEVER RUN SO" not in doctor.report(HEALTHY, ROOT / "results")[0]


def test_what_bench_all_leaves_is_read(tmp_path: Path) -> None:
    """And of it only what trains alike: on normal numbers, with all multiprocessors, forward and backward."""
    (tmp_path / "README.md").touch()
    folder = tmp_path / "2027-01-31_h200_bench" / "grouped_mm"
    folder.mkdir(parents=True)
    (folder / "env.json").write_text('{"gpu": "NVIDIA H200"}')
    columns = "bench,M,N,K,G,groups,data,held,recipe,what,x\n"
    rows = "grouped_mm,{0},4,5,6,balanced,{1},{2},{3},{4},{0}\n"
    both = "forward + backward"
    (folder / "data.csv").write_text(
        columns
        + rows.format(1, "normal", 0, "mxfp8_2d_rebased", both)
        + rows.format(2, "products", 0, "mxfp8_2d", both)
        + rows.format(3, "normal", 16, "mxfp8_2d", both)
        + rows.format(4, "normal", 0, "mxfp8_2d", "forward")
        + rows.format(5, "normal", 0, "bf16", both)
    )
    (found,) = doctor.measured(H200, tmp_path)
    assert (found.recipe, found.times, found.training) == ("mxfp8_2d_rebased", 1.0, False)
    assert found.what == "one GEMM of 1 x 4 x 5, 6 experts, balanced groups"


def test_a_training_with_dispatch_is_not_taken_for_a_rebased_one(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    folder = tmp_path / "2027-01-31_h200_training"
    folder.mkdir()
    (folder / "env.json").write_text('{"gpu": "NVIDIA H200", "processes": "2", "config": "a/m.toml"}')
    rows = "bf16,100,1\nboth+dispatch:mxfp8_2d,109,1.1\nboth+rebase+dispatch:mxfp8_2d,121,1.2\n"
    (folder / "table.csv").write_text(f'run,"{SPEED}",x\n{rows}')
    found = doctor.measured(H200, tmp_path)
    assert [(one.recipe, one.times) for one in found] == [("mxfp8_2d", 1.1), ("mxfp8_2d_rebased", 1.2)]
    assert {one.what for one in found} == {"training m with dispatch, 2 GPUs"}


def test_without_results_it_says_so(tmp_path: Path) -> None:
    text, _ = doctor.report(HEALTHY, tmp_path)
    assert "results/ is not part of this installation" in text and "is not known" in text


def test_a_recipe_is_compared_where_both_were_measured() -> None:
    """An easy shape that one of them alone was measured with does not make it the faster one."""
    results = [
        doctor.Measured(recipe=recipe, times=times, training=True, what=what, file="f")
        for recipe, times, what in (("mxfp8", 1.0, "a"), ("mxfp8_2d", 1.1, "a"), ("mxfp8", 2.0, "b"))
    ]
    assert doctor.advice(H200, results)[0].startswith("mxfp8_2d:")
