"""The doctor: what it says of this machine, and of machines that are not here."""

import logging
import runpy
import shlex
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from triton.backends.nvidia import compiler

from scripts.result_files import read_rows
from scripts.study import measured
from titan_mxfp8 import doctor
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, Hardware
from titan_mxfp8.doctor import Machine

ROOT = Path(__file__).parent.parent
H200, B200 = CLUSTER_GPUS["H200"], CLUSTER_GPUS["B200"]
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "torchtitan": "0.2.2"}
VERSIONS |= dict.fromkeys(("tensorboard", "wandb", "safetensors", "matplotlib"), "1.0")
SYSTEM = {"driver": "580.1", "cuda": "13.0", "ptxas": "ptxas, release 13.0", "compiler": "/usr/bin/cc", "headers": True}
HEALTHY = Machine(hardware=H200, gpus=8, peers=True, memory=140 * 2**30, versions=VERSIONS, **SYSTEM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says of a CPU what it is")
def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    flag = "--quantize.linear.mx.recipe_name=mxfp8_2d"
    monkeypatch.setattr("sys.argv", ["doctor", str(ROOT / "train_configs/debug_llama4.toml"), flag])
    monkeypatch.delitem(sys.modules, "titan_mxfp8.doctor")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("titan_mxfp8.doctor", run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    for said in (
        f"torch {version('torch')}, triton",
        "backend           reference (for cpu; hopper needs",
        "| mxfp8_2d_rebased | reference | fp32 | fp32 | fp32 |",
        "quantize.linear.mx is mxfp8_2d, backend reference: forward fp32",
        "tried one grouped GEMM of mxfp8_2d, forward and backward: 0.0e+00 from the reference",
        "MXFP8 training will run here",
    ):
        assert said in printed


def test_a_config_that_cannot_be_trained_here(capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> None:
    config = "train_configs/debug_llama4.toml"
    for flag, said in (
        ("--quantize.linear.mx.backend=hopper", "backend 'hopper' needs an NVIDIA GPU of SM90"),
        ("--model.converters=", "converts nothing: it trains in bf16"),
        ("--nonesuch=1", "FAILED: train_configs/debug_llama4.toml, see above"),
        ("--model.flavor=nope", "llama4 has no flavor 'nope'"),
        ("--training.seq_len=0", "training.seq_len = 0: it must be at least 1"),
        ("--optimizer.name=AdamX", "optimizer.name = 'AdamX': TorchTitan knows Adam, AdamW"),
        ("--quantize.grouped_mm.mx.fqns=exprts", "no expert module matches fqns ['exprts']"),
        ("--activation_checkpoint.mode=memory_budget", "mode = 'memory_budget' works in a compiled model only"),
        ("--model.flavor=17bx16e_irope", "attention of kind flex, with which TorchTitan trains"),
        ("--experimental.custom_import=none", "custom_import = 'none' cannot be imported: No module named 'none'"),
    ):
        assert doctor.main([str(ROOT / config), flag]) == 1
        printed = capsys.readouterr().out
        assert said.replace("train_configs", str(ROOT / "train_configs")) in printed
        assert f"MXFP8 runs here, and {ROOT / config} will NOT run in MXFP8 as things are" in printed
    deepep = "--parallelism.expert_parallel_degree=2", "--parallelism.expert_parallel_comm_backend=deepep"
    assert doctor.main([str(ROOT / "train_configs/debug_deepseek_v3.toml"), *deepep]) == 1
    assert "debug_deepseek_v3.toml: ImportError: DeepEP is required" in capsys.readouterr().out
    caplog.clear()
    assert doctor.main([str(ROOT / "none.toml")]) == 1
    assert "none.toml: [Errno 2] No such file" in capsys.readouterr().out and not caplog.records, "not its traceback"
    assert logging.root.manager.disable == logging.NOTSET  # who calls main() goes on logging


def test_a_failing_or_wrong_backend_is_no_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fails(recipe: str, device: torch.device) -> float:
        raise RuntimeError("no kernel image")

    for trial, said in ((fails, "RuntimeError: no kernel image"), (lambda *_: 0.5, "further than another order")):
        monkeypatch.setattr(doctor, "try_layer", trial)
        assert doctor.main([]) == 1
        assert said in capsys.readouterr().out


def with_versions(**versions: str) -> dict[str, dict[str, str]]:
    """A change of a healthy machine."""
    return {"versions": HEALTHY.versions | versions}


def test_which_ptxas_compiles_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "release" in doctor._ptxas(H200)
    monkeypatch.setattr(compiler, "get_ptxas", Mock(side_effect=RuntimeError("Cannot find ptxas")))
    assert doctor._ptxas(H200) == "unknown: Cannot find ptxas"
    assert doctor._ptxas(Hardware("cpu", "cpu")) == ""


def test_what_is_missing_comes_with_the_command_that_mends_it() -> None:
    assert doctor.problems(HEALTHY) == []
    cpu = Hardware("cpu", "cpu")
    core = {name: version for name, version in HEALTHY.versions.items() if name in ("torch", "triton")}
    for change, said, command, stops in (
        (with_versions(torch="2.9.1"), "older than 2.11", "pip install", "MXFP8"),
        (with_versions(torch="2.15.0"), "newer than what is tested", "pip install", ""),
        (with_versions(triton="3.5.1"), "3.6 or newer", "pip install", "MXFP8"),
        (with_versions(triton="3.10.0"), "newer than what is tested", "pip install", ""),
        (with_versions(torchtitan="0.2.1"), "torchtitan 0.2.1", "torchtitan==0.2.2", "TorchTitan"),
        (with_versions(torchtitan="0.3.0"), "0.3.0 needs torch 2.13", "pip install", "TorchTitan"),
        ({"versions": core}, "torchtitan is not installed", "torchtitan==0.2.2", "TorchTitan"),
        ({"versions": core | {"torchtitan": "0.2.2"}}, "tensorboard is not", "install tensorboard", "TorchTitan"),
        ({"versions": core | {"torchtitan": "0.2.2"}}, "wandb is not installed", "install wandb", ""),
        ({"hardware": cpu, "cuda": ""}, "is a build for CPUs", "--force-reinstall", "MXFP8"),
        ({"compiler": ""}, "no C compiler", "apt-get install gcc", "MXFP8"),
        ({"headers": False}, "Python.h", "-dev", "MXFP8"),
    ):
        found = [problem for problem in doctor.problems(replace(HEALTHY, **change)) if said in problem.what]
        assert len(found) == 1 and command in found[0].command and found[0].stops == stops, said
        assert " -e" not in found[0].command, "a wheel has no folder to install from"
    assert len(doctor.problems(replace(HEALTHY, versions=core))) == 1, "without TorchTitan nothing of it is missed"
    assert doctor.problems(replace(HEALTHY, **with_versions(torch="2.13.0", torchtitan="0.3.0"))) == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(shlex.split(doctor.INSTALL_TITAN)[2:]) == set(project["optional-dependencies"]["train"])
    assert shlex.split(doctor.INSTALL_TRITON)[-1] in project["dependencies"]
    for same in ("README.md", "scripts/setup.sh"):  # not the dependency, which allows more than has run on a GPU
        assert f'"{shlex.split(doctor.INSTALL_TORCH)[-1]}"' in (ROOT / same).read_text()
    assert "each of 8 GPUs" in doctor.symmetric_memory(HEALTHY)
    assert "two GPUs" in doctor.symmetric_memory(replace(HEALTHY, gpus=1))
    assert "cannot read" in doctor.symmetric_memory(replace(HEALTHY, peers=False))
    for arch in ("gfx950", "sm_75"):
        assert "it needs NVIDIA GPUs" in doctor.symmetric_memory(replace(HEALTHY, hardware=Hardware(arch, arch)))


def test_on_amd_torch_comes_from_the_index_of_rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else pip finds a build for CUDA, which the doctor would have replaced again and again."""
    (tmp_path / "version").write_text("6.12.12\n")
    monkeypatch.setattr(doctor, "_output", lambda *command: "")
    monkeypatch.setattr(doctor, "Path", lambda path: tmp_path / "version")
    driver, mi355x = doctor._driver(), Hardware("gfx950", "AMD Instinct MI355X")
    assert driver == "amdgpu 6.12.12"
    for change in (
        {"hardware": Hardware("cpu", "cpu"), "driver": driver},
        {"hardware": mi355x, "driver": "", "cuda": "hip 7.0", **with_versions(torch="2.9.1")},
        {"hardware": mi355x, "driver": driver, "cuda": "hip 7.0", **with_versions(torchtitan="0.3.0")},
    ):
        commands = [problem.command for problem in doctor.problems(replace(HEALTHY, **change))]
        assert commands and all("torch>=" in each and each.endswith(doctor.OF_ROCM) for each in commands)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_mxfp8_runs_where_torchtitan_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """But a TOML does not."""
    here = doctor.examine()
    core = {name: here.versions[name] for name in ("torch", "triton")}
    for versions, where in ((core, "PyTorch;"), (core | {"transformers": "5.5"}, "PyTorch and Transformers;")):
        monkeypatch.setattr(doctor, "examine", lambda versions=versions: replace(here, driver="", versions=versions))
        assert doctor.main([]) == 0
        printed = capsys.readouterr().out
        assert f"MXFP8 runs here in {where} for TorchTitan see what is missing" in printed and "NOT" not in printed
    assert doctor.main(["train_configs/debug_llama4.toml"]) == 1
    printed = capsys.readouterr().out
    assert "not looked at without what TorchTitan needs" in printed and "will NOT run in MXFP8" in printed


def test_what_other_gpus_multiply_and_why() -> None:
    def rows(hardware: Hardware) -> dict[str, tuple[str, ...]]:
        gemms = ("backend", "forward", "dgrad", "wgrad", "why nothing faster")
        return {row["recipe"]: tuple(row.get(key, "") for key in gemms) for row in doctor.recipe_rows(hardware)}

    h200, b200, cpu = rows(H200), rows(B200), rows(Hardware("cpu", "cpu"))
    fp8, bf16 = ("FP8",) * 3, ("bf16",) * 3
    for found, recipe, multiplied in (
        (h200, "mxfp8", bf16),
        (h200, "mxfp8_2d", ("FP8", "FP8", "bf16")),
        (h200, "mxfp8_rebased", fp8),
        (h200, "mxfp8_wgrad_bf16_rebased", ("FP8", "FP8", "bf16")),
        (b200, "mxfp8_2d", fp8),
        (b200, "mxfp8_e5m2_grad", fp8),
        (b200, "mxfp8_wgrad_bf16", ("FP8", "FP8", "bf16")),
        (cpu, "mxfp8_wgrad_bf16", ("fp32", "fp32", "bf16")),
        (rows(Hardware("sm_103", "NVIDIA B300")), "mxfp8", fp8),
        (rows(Hardware("sm_80", "NVIDIA A100")), "mxfp8_2d", bf16),
    ):
        assert found[recipe][1:4] == multiplied, recipe
    assert h200["mxfp8_2d"][0] == "hopper" and b200["mxfp8_rebased"][0] == "none"
    assert h200["mxfp8_2d"][4].startswith("wgrad: SM90's tensor cores know no scales: a rebased recipe")
    assert "32x32 weights" in h200["mxfp8"][4] and h200["mxfp8_2d_rebased"][4] == b200["mxfp8"][4] == ""
    assert "leaves the weight gradient unquantised" in h200["mxfp8_wgrad_bf16_rebased"][4]
    for name, arch, why in (
        ("NVIDIA L40S", "sm_89", "its tensor cores know no scales"),
        ("NVIDIA GeForce RTX 5090", "sm_120", "our tiles for them need more shared memory"),
    ):
        hardware = Hardware(arch, name)
        assert rows(hardware)["mxfp8"][:4] == ("triton", "bf16", "bf16", "bf16") and why in rows(hardware)["mxfp8"][4]
        text, _ = doctor.report(replace(HEALTHY, hardware=hardware))
        assert f"NEVER RUN HERE: backend 'triton' was never run on {name}" in text
        assert "nothing here multiplies FP8, so expect no speed" in text and "what it brings is not known" in text


def test_a_gpu_gets_the_recipe_of_its_kind_and_what_it_brought() -> None:
    h100, pcie = (Hardware("sm_90", f"NVIDIA H100 {name}") for name in ("80GB HBM3", "PCIe"))
    for hardware in (H200, h100, pcie, CLUSTER_GPUS["H20"]):
        first, *lines = doctor.advice(hardware)
        assert first.startswith("mxfp8_2d_rebased: all three GEMMs in FP8, a scale per 128 elements: not exact MXFP8")
        assert any(line.startswith("mxfp8_2d: exact MXFP8") for line in lines)
        assert ("nothing was measured on this GPU" in lines[-1]) == (hardware not in (H200, h100))
    for hardware in (B200, Hardware("gfx950", "AMD Instinct MI355X")):
        assert doctor.advice(hardware)[0] == "mxfp8: all three GEMMs in FP8; recipe auto takes it"
    key = ("what", "gpus", "checkpointing", "dispatch", "graph", "recipe")
    rows = {tuple(row[name] for name in key): row["x"] for row in doctor.measured(H200)}
    own = "16B_7layers", "2", "full", "on", "on"
    rebased, control = (rows[*own, recipe] for recipe in ("mxfp8_2d_rebased", "bf16"))
    what = "training deepseek_v3 16B_7layers, 2 GPUs, full activation checkpointing, dispatch on"
    line, _ = (line for line in doctor.advice(H200) if what in line)  # and that of mxfp8_2d
    assert line == f"    {rebased} times bf16 (the dispatch alone, in bf16: {control}): {what}, as a CUDA graph"
    assert (*own[:-1], "off", "mxfp8_2d_rebased") in rows, "a run without a graph, which is further from the defaults"
    # Of Llama4's the graph was run without its control.
    line, _ = (line for line in doctor.advice(H200) if ": training llama4 17bx16e_2layers, 2 GPUs" in line)
    assert "(the dispatch alone, in bf16: " in line and "CUDA graph" not in line
    assert any("one grouped GEMM of llama4's experts, 131072 x 8192 x 5120" in each for each in doctor.advice(h100))


def test_a_combination_that_never_ran_is_named() -> None:
    newer = replace(HEALTHY, **with_versions(torch="2.13.0", triton="3.9.0"))
    said = "NEVER RUN SO: torch 2.13 with Triton 3.9 on NVIDIA H200. It ran with torch 2.11 with Triton 3.6"
    assert said in doctor.report(newer)[0]
    assert "NEVER RUN SO" not in doctor.report(HEALTHY)[0]


def test_the_table_that_ships_is_what_the_folders_that_count_say(monkeypatch: pytest.MonkeyPatch) -> None:
    there = measured.measured(ROOT / "results")
    assert read_rows(doctor.MEASURED) == there, "python scripts/study/measured.py writes it anew"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packed == [doctor.MEASURED.parent.name], "a wheel has every file of the package's folder"
    measured.main(["--check"])
    monkeypatch.setattr(measured, "RESULTS", ROOT / "tests")
    with pytest.raises(SystemExit, match=r"measured.csv differs from results/"):
        measured.main(["--check"])
