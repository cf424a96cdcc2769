"""``python -m titan_mxfp8.doctor [CONFIG.toml] [TorchTitan flags]``: what MXFP8 training is on this machine.

Says which GPU and versions there are, what each recipe multiplies here and why nothing faster, which recipe to use and
what that brought where it was measured, and what is missing, with the command that mends it. Exit status 0 where MXFP8
runs, and the config can be trained if one is given. TorchTitan is imported only where a config is given.
"""

import argparse
import csv
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

import titan_mxfp8
from titan_mxfp8.backends import Gemm, plan_on, recommend, runs_triton, select
from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.logs import by_reason
from titan_mxfp8.modules import training_device
from titan_mxfp8.recipe import AUTO, BF16, RECIPES, Recipe

MEASURED = Path(__file__).with_name("measured.csv")  # scripts/study/measured.py writes it
TORCH, TRITON = ((2, 11), (2, 15)), ((3, 6), (3, 10))  # from, to before; 2.14 has never run on a GPU
INSTALL_TORCH, INSTALL_TRITON = 'pip install "torch>=2.11,<2.14"', 'pip install "triton>=3.6,<3.10"'
REINSTALL_TORCH = 'pip install --force-reinstall "torch>=2.11,<2.14"'
OF_ROCM = " --index-url URL, the one that pytorch.org names (Get Started: Linux, Pip, ROCm)"  # else pip takes CUDA's
# By TorchTitan: the least torch; what its training imports; what some configs and scripts use.
TORCHTITAN = {"0.2.2": ((2, 11), ("tensorboard",), ("wandb", "safetensors", "matplotlib")), "0.3.0": ((2, 13), (), ())}
# pyproject.toml's [train]
INSTALL_TITAN = "pip install torchtitan==0.2.2 tomli 'wandb>=0.31' tensorboard safetensors matplotlib"
CONVERTERS = "--model.converters=quantize.grouped_mm.mx,quantize.linear.mx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to know of a machine."""

    hardware: Hardware  # what training runs on
    gpus: int
    peers: bool  # whether each GPU can read the memory of each other one
    memory: int  # bytes of one GPU
    driver: str  # of NVIDIA's GPUs, or of AMD's, such as amdgpu 6.12; empty where there is none
    cuda: str  # the release that torch was built for, such as 13.0 or hip 7.0; empty for a CPU build
    versions: dict[str, str]  # of the packages that are installed
    ptxas: str  # path and release of the assembler of our kernels
    compiler: str  # of C, with which Triton builds its launchers
    headers: bool  # whether Python's are there


class Problem(NamedTuple):
    """Something that is missing, the command that mends it, and what does not run without."""

    what: str
    command: str
    stops: Literal["MXFP8", "TorchTitan", ""]

    def __str__(self) -> str:
        title = {"MXFP8": "MISSING", "TorchTitan": "MISSING for TorchTitan", "": "better"}[self.stops]
        return f"{title}: {self.what}\n    {self.command}"


def examine() -> Machine:
    """Looks at this machine."""
    device = training_device()
    hardware = hardware_of(device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    packages = ("torch", "triton", "torchtitan", "transformers", *TORCHTITAN["0.2.2"][1], *TORCHTITAN["0.2.2"][2])
    distributions = packages_distributions()  # Triton's is another one on AMD
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    return Machine(
        hardware=hardware,
        gpus=gpus,
        peers=bool(pairs) and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        memory=torch.cuda.get_device_properties(device).total_memory if gpus else 0,
        driver=_driver(),
        cuda=torch.version.cuda or (f"hip {torch.version.hip}" if torch.version.hip else ""),
        versions={name: version(distributions[name][0]) for name in packages if name in distributions},
        ptxas=_ptxas(hardware),
        compiler=os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), ""),
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    )


def problems(machine: Machine) -> list[Problem]:
    """What is missing on ``machine``."""
    versions, on_gpu, found = machine.versions, machine.hardware.arch != "cpu", []

    def need(is_there: object, what: str, command: str, stops: str = "MXFP8") -> None:
        if not is_there:
            found.append(Problem(what, command, stops))

    torch_, torch_at = versions["torch"], _numbers(versions["torch"])
    index = OF_ROCM if machine.cuda.startswith("hip") or machine.driver.startswith("amdgpu") else ""
    install_torch = INSTALL_TORCH + index
    need(torch_at >= TORCH[0], f"torch {torch_} is older than 2.11", install_torch)
    need(torch_at < TORCH[1], f"torch {torch_} is newer than what is tested, 2.11 to 2.14", install_torch, "")
    build = f"is built for {machine.cuda}" if machine.cuda else "is a build for CPUs"
    what = f"this machine has a GPU (driver {machine.driver}) that torch {torch_} cannot use: it {build}"
    need(on_gpu or not machine.driver, what, REINSTALL_TORCH + index)
    triton = versions.get("triton", "is not installed")
    stops = "MXFP8" if on_gpu else "TorchTitan"
    need(_numbers(triton) >= TRITON[0], f"triton {triton}: 3.6 or newer is needed", INSTALL_TRITON, stops)
    what = f"triton {triton} is newer than what is tested, 3.6 to 3.9"
    need(_numbers(triton) < TRITON[1], what, INSTALL_TRITON, "")
    titan = versions.get("torchtitan", "")
    what = f"torchtitan {titan or 'is not installed'}: the plugin is for {' and '.join(TORCHTITAN)}"
    need(titan in TORCHTITAN, what, INSTALL_TITAN, "TorchTitan")
    least, imported, used = TORCHTITAN.get(titan, ((0, 0), (), ()))
    need(torch_at >= least, f"torchtitan {titan} needs torch {least[0]}.{least[1]}", install_torch, "TorchTitan")
    for name in imported:
        need(name in versions, f"{name} is not installed: TorchTitan imports it", f"pip install {name}", "TorchTitan")
    for name in used:
        need(name in versions, f"{name} is not installed: some configs and scripts use it", f"pip install {name}", "")
    what = "no C compiler, with which Triton builds its launchers"
    need(machine.compiler or not on_gpu, what, "apt-get install gcc, or set CC")
    command = f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    need(machine.headers or not on_gpu, "Python.h, which Triton's launchers include", command)
    return found


def symmetric_memory(machine: Machine) -> str:
    """Whether the GPUs of this machine can share memory, which transports between experts may use."""
    if machine.gpus < 2:
        return "no: it needs two GPUs or more"
    if not machine.hardware.capability or not runs_triton(machine.hardware):
        return "no: it needs NVIDIA GPUs of SM80 or newer"
    if not machine.peers:
        return "no: these GPUs cannot read each other's memory (nvidia-smi topo -p2p r says why)"
    return f"yes: each of {machine.gpus} GPUs can read each other one's memory"


def why_not_faster(gemm: Gemm, recipe: Recipe, hardware: Hardware) -> str:
    """Why the tensor cores multiply no narrower numbers in this GEMM; empty where they do."""
    if gemm.mma_dtype == "FP8":
        return ""
    if not gemm.a.is_quantized:
        return "the recipe leaves the weight gradient unquantised"
    if gemm.mma_dtype == "fp32":
        return "the reference multiplies exact values"
    if hardware.arch == "sm_90":
        weights = "" if recipe.weight_block == "32x32" else "32x32 weights bring FP8 to forward and dgrad, "
        return f"SM90's tensor cores know no scales: {weights}a rebased recipe brings FP8 to all three"
    if hardware.capability and hardware.capability >= (12, 0):
        return "its tensor cores know scales, but our tiles for them need more shared memory than it has"
    return "its tensor cores know no scales: they get the values, which bf16 holds exactly"


def recipe_rows(hardware: Hardware) -> list[dict[str, str]]:
    """For each recipe what each GEMM multiplies, by which backend, and why nothing faster."""
    rows = []
    for recipe in dict.fromkeys(RECIPES.values()):
        try:
            name = select("auto", hardware, recipe).name
        except ValueError:
            why = "rebased: needs an H100 or H200, or backend = 'reference'"
            rows.append({"recipe": recipe.name, "backend": "none", "why nothing faster": why})
            continue
        gemms = plan_on(recipe, name, hardware).gemms
        reasons = by_reason((which, why_not_faster(gemm, recipe, hardware)) for which, gemm in gemms.items())
        multiplied = {which: gemm.mma_dtype for which, gemm in gemms.items()}
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items() if reason)
        rows.append({"recipe": recipe.name, "backend": name, **multiplied, "why nothing faster": why})
    return rows


def measured(hardware: Hardware) -> list[dict[str, str]]:
    """The rows of measured.csv of this GPU, see scripts/study/measured.py."""
    with MEASURED.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["gpu"] == hardware.name]


def advice(hardware: Hardware) -> list[str]:
    """Which recipe to use on ``hardware``, and what it brought where it was measured."""
    chosen, found = recommend(AUTO, "auto", hardware), measured(hardware)
    recipe = chosen.name
    if hardware.arch == "cpu":
        return [f"{recipe}: to try things out, slower than bf16; recipe auto takes it"]
    if plan_on(chosen, "auto", hardware).mma_dtypes != {"FP8"}:
        lines = [f"{recipe}: to see what MXFP8 does to a loss; nothing here multiplies FP8, so expect no speed"]
    else:
        inexact = ", a scale per 128 elements: not exact MXFP8" if chosen.block_k == 128 else ""
        lines = [f"{recipe}: all three GEMMs in FP8{inexact}; recipe auto takes it"]
    lines += _times(recipe, found)
    if hardware.arch == "sm_90":
        lines += ["mxfp8_2d: exact MXFP8, in FP8 but for the weight gradient", *_times("mxfp8_2d", found)]
    if not found:
        lines.append("    what it brings is not known: nothing was measured on this GPU")
    return lines


def _times(recipe: str, found: Sequence[dict[str, str]]) -> Iterator[str]:
    """A line for each GEMM and each training that a recipe was measured with: of runs of one training for the one that
    is nearest to the defaults, of those with a control, if any has one. That is what the dispatch alone brought."""
    same, ways = ("kind", "model", "what", "gpus", "checkpointing"), ("dispatch", "graph")  # on or off

    def alike(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[key] for key in same + ways)

    controls = {alike(row): row["x"] for row in found if row["recipe"] == BF16.name}
    rows = [row for row in found if row["recipe"] == recipe]
    rows.sort(key=lambda row: (alike(row) in controls, *(row[way] for way in ways)))
    for _, row in sorted({alike(row)[: len(same)]: row for row in rows}.items()):
        what, alone = f"one grouped GEMM of {row['model']}'s experts, {row['what']}", ""
        if row["kind"] == "training":
            what = f"training {row['model']} {row['what']}, {row['gpus']} GPU{'s' * (row['gpus'] != '1')}"
            what += f", {row['checkpointing']} activation checkpointing" * (row["checkpointing"] != "none")
            what += f", dispatch {row['dispatch']}{', as a CUDA graph' * (row['graph'] == 'on')}"
            control = controls.get(alike(row))
            alone = f" (the dispatch alone, in bf16: {control})" if control else ""
        yield f"    {row['x']} times bf16{alone}: {what}"


def try_layer(recipe: str, device: torch.device) -> float:
    """Runs one grouped GEMM forward and backward on ``device`` and on the CPU: the largest relative RMS difference.
    Raises Exception: whatever stops it."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(size, generator=generator) for size in ((300, 128), (3, 256, 128), (300, 256)))

    def step(there: torch.device, backend: str) -> list[torch.Tensor]:
        x_MK, w_ENK = (t.to(there, torch.bfloat16).requires_grad_() for t in (x, w))
        offs = torch.tensor([100, 100, 300], dtype=torch.int32, device=there)
        y = titan_mxfp8.mxfp8_grouped_mm(x_MK, w_ENK.mT, offs, recipe=recipe, backend=backend)
        y.backward(dy.to(there, torch.bfloat16))
        return [t.double().cpu() for t in (y, x_MK.grad, w_ENK.grad)]

    pairs = zip(step(device, "auto"), step(torch.device("cpu"), "reference"), strict=True)
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)


def report(machine: Machine) -> tuple[str, list[Problem]]:
    """All but a config and the trial, as text, and what is missing."""
    hardware, found, versions = machine.hardware, problems(machine), machine.versions
    is_there = f"{hardware.name} ({hardware.arch})"
    installed = [f"{name} {versions.get(name, 'missing')}" for name in ("torch", "triton", "torchtitan")]
    installed += [f"transformers {versions['transformers']}"] if "transformers" in versions else []
    selection = select("auto", hardware, RECIPES["mxfp8"])
    facts = {
        "hardware": f"{machine.gpus} x {is_there}, {machine.memory / 2**30:.0f} GiB"
        if machine.gpus
        else f"{is_there}, no GPU that torch can use",
        "driver": machine.driver or "none",
        "versions": f"{', '.join(installed)}, {f'CUDA {machine.cuda}' if machine.cuda else 'a CPU build of torch'}",
        "ptxas": machine.ptxas or "not needed",
        "symmetric memory": symmetric_memory(machine),
        "backend": f"{selection.name} ({selection.reason})",
    }
    lines = [f"{title:17} {text}" for title, text in facts.items()]
    if selection.warning:
        lines += ["", f"NEVER RUN HERE: {selection.warning}"]
    known = {(row["torch"], row["triton"]) for row in measured(hardware)}
    ours = tuple(".".join(map(str, _numbers(versions.get(name, "0")))) for name in ("torch", "triton"))
    if known and ours not in known:
        ran = "; ".join(f"torch {torch_} with Triton {triton}" for torch_, triton in sorted(known))
        lines += ["", f"NEVER RUN SO: torch {ours[0]} with Triton {ours[1]} on {hardware.name}. It ran with {ran}"]
    lines += ["", *_table(recipe_rows(hardware)), "", "which recipe to use here:"]
    lines += [f"  {line}" for line in advice(hardware)]
    lines += ["", *map(str, found)] if found else []
    return "\n".join(lines), found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 0 where MXFP8 runs and, if a config is given, that can be trained."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_mxfp8.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="a TOML: is it trained here as it is written?")
    args, flags = parser.parse_known_args(argv)
    machine = examine()
    text, found = report(machine)
    print(text)
    stopped, recipes = {problem.stops for problem in found}, ["mxfp8"]
    if args.config:
        print()
        recipes = _check_config(args.config, flags, machine, "TorchTitan" in stopped)
        if not recipes:
            stopped.add("config")
    if not all([_tries(recipe) for recipe in recipes or ["mxfp8"]]):
        stopped.add("MXFP8")
    print()
    if "MXFP8" in stopped:
        print("MXFP8 will NOT run here as things are")
    elif "config" in stopped:
        print(f"MXFP8 runs here, and {args.config} will NOT run in MXFP8 as things are")
    elif "TorchTitan" in stopped:
        where = f"PyTorch{' and Transformers' * ('transformers' in machine.versions)}"
        print(f"MXFP8 runs here in {where}; for TorchTitan see what is missing above")
    else:
        print("MXFP8 training will run here")
    return 1 if stopped & {"MXFP8", "config"} else 0


def _check_config(path: str, flags: Sequence[str], machine: Machine, is_stopped: bool) -> list[str]:
    """Prints what a config means here. The recipes it asks for, none where it cannot be trained in MXFP8."""
    if is_stopped:
        print(f"{path}: not looked at without what TorchTitan needs")
        return []
    if machine.versions["torchtitan"] != "0.2.2":
        print(f"FAILED: {path}: TOMLs are configs of torchtitan 0.2.2")
        return []
    from titan_mxfp8.tools.dry_run import multiplied_here

    logging.disable(logging.ERROR)  # TorchTitan logs the traceback of a file that it cannot read
    try:
        asked = multiplied_here(path, flags)
    except SystemExit:  # TorchTitan has said why
        print(f"FAILED: {path}, see above")
        return []
    except Exception as error:  # whatever else parsing or building it raises
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"FAILED: {path}: {kind}{error}")
        return []
    finally:
        logging.disable(logging.NOTSET)
    if not asked:
        print(f"{path} converts nothing: it trains in bf16. Add {CONVERTERS}")
    for name, (_, words) in asked.items():
        print(f"{path}: {name} is {words}")
    return list(dict.fromkeys(recipe.name for recipe, _ in asked.values()))


def _tries(recipe: str) -> bool:
    """Prints what came of ``try_layer``, and whether it is right."""
    try:
        error = try_layer(recipe, training_device())
    except Exception as stopped:  # whatever it is, it would stop a training too
        print(f"\nFAILED: one grouped GEMM of {recipe}: {type(stopped).__name__}: {str(stopped)[:2000]}")
        return False
    print(f"\ntried one grouped GEMM of {recipe}, forward and backward: {error:.1e} from the reference")
    if error < 0.01:  # measured: 0 on a CPU; the rounding of outputs to bf16 is 0.002
        return True
    print("FAILED: that is further than another order of additions explains")
    return False


def _table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """In Markdown, with a column for each key of any row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for cells in (columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)):
        yield f"| {' | '.join(cells)} |"


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _driver() -> str:
    nvidia = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    amd = Path("/sys/module/amdgpu/version")
    return nvidia.split("\n")[0] or (f"amdgpu {amd.read_text().strip()}" if amd.is_file() else "")


def _ptxas(hardware: Hardware) -> str:
    """The ptxas that our kernels are compiled with, and its release."""
    if not hardware.capability or find_spec("triton") is None:
        return ""
    try:
        from titan_mxfp8.backends.common.assembler import ptxas

        tool = ptxas(hardware.capability)
    except (ImportError, AttributeError, RuntimeError) as error:  # a Triton that is too old, or has none
        return f"unknown: {error}"
    return f"{tool.path}, release {tool.version}"


if __name__ == "__main__":
    sys.exit(main())
