"""``python -m titan_mxfp8.doctor [CONFIG.toml] [TorchTitan flags]``: what MXFP8 training is on this machine.

Says which GPU and versions there are, what each recipe multiplies here and why nothing faster, which recipe to use and
what that brought where it was measured, and what is missing, with the command that mends it. Exit status 0 where MXFP8
training will run. TorchTitan is imported only where a config is given.
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import torch

import titan_mxfp8
from titan_mxfp8.backends import Gemm, plan_on, select
from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.modules import training_device
from titan_mxfp8.recipe import RECIPES, Recipe
from titan_mxfp8.testing import format_table, installed_version, make_offs, read_bench, relative_rms, training_gains

ROOT = Path(__file__).parent.parent
TORCH, TRITON, TORCHTITAN = ((2, 11), (2, 14)), (3, 6), "0.2.2"  # from, to before; from; the one
INSTALL_TORCH = 'pip install "torch>=2.11,<2.14"'
# What training imports, and what it can do without, of pyproject.toml's [train].
IMPORTED, OPTIONAL = ("tensorboard",), ("wandb", "safetensors", "matplotlib")
PARTS = ("grouped_mm", "training")  # folders of scripts/bench_all.sh's results
CONVERTERS = "--model.converters=quantize.grouped_mm.mx,quantize.linear.mx"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to know of a machine.

    Attributes:
        hardware: what training runs on.
        gpus: how many; ``peers``: whether each can read the memory of each other one.
        memory: of one GPU, in bytes.
        driver: of NVIDIA's or AMD's GPUs; empty where there is none.
        cuda: the release that torch was built for, such as ``13.0`` or ``hip 7.0``; empty for a CPU build.
        versions: of the packages that are installed, by name.
        ptxas: path and release of the assembler that Triton takes for this GPU; ``newer_ptxas``: of CUDA's, if it is
            a newer 13.
        compiler: of C, with which Triton builds its launchers; ``headers``: whether Python's are there.
    """

    hardware: Hardware
    gpus: int
    peers: bool
    memory: int
    driver: str
    cuda: str
    versions: dict[str, str]
    ptxas: str
    newer_ptxas: str
    compiler: str
    headers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is missing, and the command that mends it. Not ``fatal``: training runs all the same."""

    what: str
    command: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{'MISSING' if self.fatal else 'better'}: {self.what}\n    {self.command}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A committed result: how many times bf16's speed a recipe reached.

    Attributes:
        recipe: canonical name.
        times: bf16's.
        training: whether of a training step; else of one grouped GEMM, forward + backward.
        what: the model or the shape.
        file: where it stands, from the repository's root.
    """

    recipe: str
    times: float
    training: bool
    what: str
    file: str

    def __str__(self) -> str:
        return f"{self.recipe}: {self.times:.2f} times bf16, {self.what} ({self.file})"


def examine() -> Machine:
    """Looks at this machine."""
    device = training_device()
    hardware = hardware_of(device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    packages = ("torch", "triton", "torchtitan", *IMPORTED, *OPTIONAL)
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    ptxas, newer = _ptxas(hardware)
    return Machine(
        hardware=hardware,
        gpus=gpus,
        peers=bool(pairs) and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        memory=torch.cuda.get_device_properties(device).total_memory if gpus else 0,
        driver=_driver(),
        cuda=torch.version.cuda or (f"hip {torch.version.hip}" if torch.version.hip else ""),
        versions={name: version for name in packages if (version := installed_version(name))},
        ptxas=ptxas,
        newer_ptxas=newer,
        compiler=os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), ""),
        headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    )


def problems(machine: Machine) -> Iterator[Problem]:
    """What is missing on ``machine``."""
    versions, on_gpu = machine.versions, machine.hardware.arch != "cpu"
    torch_at = _numbers(versions["torch"])
    if not TORCH[0] <= torch_at:
        yield Problem(what=f"torch {versions['torch']} is older than 2.11", command=INSTALL_TORCH)
    elif not torch_at < TORCH[1]:
        what = f"torch {versions['torch']} is newer than what is tested, 2.11 to 2.13"
        yield Problem(what=what, command=INSTALL_TORCH, fatal=False)
    if machine.driver and not on_gpu:
        build = f"is built for {machine.cuda}" if machine.cuda else "is a build for CPUs"
        what = f"this machine has a GPU (driver {machine.driver}) that torch {versions['torch']} cannot use: it {build}"
        yield Problem(what=what, command=f"pip install --force-reinstall {INSTALL_TORCH.removeprefix('pip install ')}")
    if _numbers(versions.get("triton", "0")) < TRITON:
        what = f"triton {versions.get('triton', 'is not installed')}: 3.6 or newer is needed"
        yield Problem(what=what, command='pip install "triton>=3.6"')
    titan = versions.get("torchtitan", "")
    install = "pip install -e '.[train]'"
    if titan != TORCHTITAN:
        what = f"torchtitan {titan} is installed" if titan else "torchtitan is not installed"
        yield Problem(what=f"{what}: the plugin is for {TORCHTITAN}", command=install)
    for names, what in ((IMPORTED, "TorchTitan imports it"), (OPTIONAL, "some configs and scripts use it")):
        for name in names:
            if name not in versions:
                yield Problem(what=f"{name} is not installed: {what}", command=install, fatal=names is IMPORTED)
    if on_gpu and not machine.compiler:
        yield Problem(
            what="no C compiler, with which Triton builds its launchers", command="apt-get install gcc, or set CC"
        )
    if on_gpu and not machine.headers:
        release = ".".join(map(str, sys.version_info[:2]))
        yield Problem(what="Python.h, which Triton's launchers include", command=f"apt-get install python{release}-dev")
    if machine.hardware.arch == "sm_90" and machine.newer_ptxas:
        yield Problem(
            what="the ptxas of CUDA 13 makes rebased GEMMs some per cent faster than Triton's own, exact ones as much "
            "slower (results/README.md)",
            command=f"export TRITON_PTXAS_PATH={machine.newer_ptxas}",
            fatal=False,
        )


def symmetric_memory(machine: Machine) -> str:
    """Whether the GPUs of this machine can share memory, which transports between experts may use."""
    if machine.gpus < 2:
        return "no: it needs two GPUs or more"
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


def recipe_rows(hardware: Hardware, backend: str = "auto") -> list[dict[str, str]]:
    """For each recipe what each GEMM multiplies, by which backend, and why nothing faster."""
    rows = []
    for recipe in dict.fromkeys(RECIPES.values()):
        try:
            name = select(backend, hardware, recipe).name
        except ValueError:
            able = "an H100 or H200, or backend = 'reference'"
            rows.append({"recipe": recipe.name, "backend": "none", "why nothing faster": f"rebased: needs {able}"})
            continue
        gemms = plan_on(recipe, name, hardware).gemms
        reasons: dict[str, list[str]] = {}
        for gemm_name, gemm in gemms.items():
            reasons.setdefault(why_not_faster(gemm, recipe, hardware), []).append(gemm_name)
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items() if reason)
        multiplied = {gemm_name: gemm.mma_dtype for gemm_name, gemm in gemms.items()}
        rows.append({"recipe": recipe.name, "backend": name, **multiplied, "why nothing faster": why})
    return rows


def measured(hardware: Hardware, results: Path) -> list[Measured]:
    """The committed results of this GPU, of the same thing those of the newest folder.

    Training: ``*table.csv`` with a row for bf16. GEMMs: ``data.csv`` of scripts/bench_grouped_mm.py. Either may lie in
    a folder of scripts/bench_all.sh's.
    """
    if not results.is_dir():
        return []
    found, newest = [], {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        for result in _of_folder(folder, hardware):
            found.append((folder, result))
            newest[result.recipe, result.what] = folder
    return [result for folder, result in found if newest[result.recipe, result.what] == folder]


def combinations(hardware: Hardware, results: Path) -> set[tuple[str, str]]:
    """The releases of torch and Triton, such as 2.11 and 3.6, with which this hardware ran by the committed results."""
    found = set()
    for path in results.glob("*/*env.json"):
        env = json.loads(path.read_text())
        is_same = env.get("gpu", "").endswith(hardware.name) if hardware.arch != "cpu" else "cpu" in env
        if is_same and {"torch", "triton"} <= env.keys():
            found.add((_minor(env["torch"]), _minor(env["triton"])))
    return found


def _of_folder(folder: Path, hardware: Hardware) -> Iterator[Measured]:
    parts = (path for part in PARTS for path in folder.glob(f"{part}/*.csv"))
    for path in sorted((*folder.glob("*.csv"), *parts)):
        prefix, kind = path.stem.rpartition("_")[::2]
        env_path = path.parent / f"{prefix + '_' if prefix else ''}env.json"
        env = json.loads(env_path.read_text()) if env_path.is_file() else {}
        if kind not in ("data", "table") or env.get("gpu") != hardware.name:
            continue
        rows = read_bench(path)
        file_name = path.relative_to(folder.parent.parent).as_posix()
        if kind == "table":
            yield from _of_training(rows, env, file_name)
        elif not prefix:
            yield from _of_gemms(rows, file_name)


def _of_training(rows: list[dict[str, str]], env: dict[str, str], file: str) -> Iterator[Measured]:
    for row, times in training_gains(rows):
        what, _, recipe = row["run"].partition(":")
        what, *options = what.split("+")
        if what != "both":
            continue
        recipe = RECIPES[recipe or "mxfp8"]
        name = (recipe.rebased() if "rebase" in options else recipe).name
        model = row.get("flavor") or Path(env.get("config", "")).stem
        gpus = f"{env['processes']} GPU{'s' * (env['processes'] != '1')}" if "processes" in env else "GPUs not named"
        what = f"training {model}{' with dispatch' * ('dispatch' in options)}, {gpus}"
        yield Measured(recipe=name, times=times, training=True, what=what, file=file)


def _of_gemms(rows: list[dict[str, str]], file: str) -> Iterator[Measured]:
    for row in rows:
        counts = row.get("bench") == "grouped_mm" and row["what"] == "forward + backward" and row["x"]
        if not counts or row["recipe"] not in RECIPES or (row["data"], row["held"]) != ("normal", "0"):
            continue
        what = f"one GEMM of {row['M']} x {row['N']} x {row['K']}, {row['G']} experts, {row['groups']} groups"
        times, recipe = float(row["x"]), RECIPES[row["recipe"]].name
        yield Measured(recipe=recipe, times=times, training=False, what=what, file=file)


def advice(hardware: Hardware, found: Sequence[Measured]) -> list[str]:
    """Which recipe to use on ``hardware``, and what it brought where it was measured."""
    lines = []
    for training in (True, False):
        of_kind = [result for result in found if result.training == training]
        if of_kind:
            break
    for spans, title in (((32, 128), "fastest"), ((32,), "fastest of exact MXFP8")):
        names = sorted({result.recipe for result in of_kind if RECIPES[result.recipe].block_k in spans})
        if not names:
            continue
        average = {name: mean(result.times for result in of_kind if result.recipe == name) for name in names}
        beaten = {name: sum(_is_faster(name, other, of_kind) for other in names) for name in names}
        best = max(names, key=lambda name: (beaten[name], average[name]))
        inexact = " (a scale per 128 elements: not exact MXFP8)" if RECIPES[best].block_k == 128 else ""
        lines.append(f"{best}{inexact}: {title} of what was measured on this GPU; expect")
        lines += [f"    {result}" for result in reversed(of_kind) if result.recipe == best]  # the newest first
    if lines:
        return lines
    fp8 = [row["recipe"] for row in recipe_rows(hardware) if row.get("forward") == row.get("wgrad") == "FP8"]
    if fp8:
        lines = [f"{fp8[0]}: all three GEMMs in FP8"]
    elif hardware.arch == "cpu":
        return ["mxfp8: to try things out, slower than bf16 (results/README.md)"]
    else:
        lines = ["mxfp8: to see what MXFP8 does to a loss; nothing here multiplies FP8, so expect no speed"]
    return [*lines, "    what it brings is not known: no committed result is from this GPU"]


def _is_faster(recipe: str, other: str, found: Sequence[Measured]) -> bool:
    """Whether it is the faster one, on average of what both were measured with in one file."""
    ours, theirs = ({(m.file, m.what): m.times for m in found if m.recipe == name} for name in (recipe, other))
    return sum(ours[key] - theirs[key] for key in ours.keys() & theirs.keys()) > 0


def try_layer(recipe: str, device: torch.device) -> float:
    """Runs one grouped GEMM forward and backward on ``device`` and on the CPU: the largest relative RMS difference.

    Raises:
        Exception: whatever stops it.
    """
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(size, generator=generator) for size in ((300, 128), (3, 256, 128), (300, 256)))

    def step(there: torch.device, backend: str) -> list[torch.Tensor]:
        x_MK, w_ENK = (t.to(there, torch.bfloat16).requires_grad_() for t in (x, w))
        offs = make_offs([100, 0, 200], there)
        y = titan_mxfp8.mxfp8_grouped_mm(x_MK, w_ENK.mT, offs, recipe=recipe, backend=backend)
        y.backward(dy.to(there, torch.bfloat16))
        return [t.float().cpu() for t in (y, x_MK.grad, w_ENK.grad)]

    pairs = zip(step(device, "auto"), step(torch.device("cpu"), "reference"), strict=True)
    return max(relative_rms(ours, theirs) for ours, theirs in pairs)


def report(machine: Machine, results: Path) -> tuple[str, list[Problem]]:
    """All but a config and the trial, as text, and what is missing."""
    hardware, found = machine.hardware, list(problems(machine))
    gpu = (
        f"{machine.gpus} x {hardware.name} ({hardware.arch}), {machine.memory / 2**30:.0f} GiB" if machine.gpus else ""
    )
    versions = [f"{name} {machine.versions.get(name, 'missing')}" for name in ("torch", "triton", "torchtitan")]
    facts = {
        "hardware": gpu or f"{hardware.name} ({hardware.arch}), no GPU that torch can use",
        "driver": machine.driver or "none",
        "versions": f"{', '.join(versions)}, {f'CUDA {machine.cuda}' if machine.cuda else 'a CPU build of torch'}",
        "ptxas": machine.ptxas or "not needed",
        "symmetric memory": symmetric_memory(machine),
    }
    selection = select("auto", hardware, RECIPES["mxfp8"])
    facts["backend"] = f"{selection.name} ({selection.reason})"
    lines = [f"{title:17} {text}" for title, text in facts.items()]
    if selection.warning:
        lines += ["", f"NEVER RUN HERE: {selection.warning}"]
    known = combinations(hardware, results)
    ours = tuple(_minor(machine.versions.get(name, "0")) for name in ("torch", "triton"))
    if known and ours not in known:
        ran = "; ".join(f"torch {torch_} with Triton {triton}" for torch_, triton in sorted(known))
        lines += [
            "",
            f"NEVER RUN SO: torch {ours[0]} with Triton {ours[1]} on {hardware.name}. By results/ it ran with {ran}",
        ]
    lines += ["", format_table(recipe_rows(hardware)), "", "which recipe to use here:"]
    if not (results / "README.md").is_file():
        lines.append("(results/ is not part of this installation: without it nothing measured can be named)")
    lines += [f"  {line}" for line in advice(hardware, measured(hardware, results))]
    if found:
        lines += ["", *map(str, found)]
    return "\n".join(lines), found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 0 where MXFP8 training will run."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_mxfp8.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="a TOML: is it trained here as it is written?")
    args, flags = parser.parse_known_args(argv)
    machine = examine()
    text, found = report(machine, ROOT / "results")
    print(text)
    runs, tried = not any(problem.fatal for problem in found), ["mxfp8"]
    if args.config:
        print()
        if "torchtitan" not in machine.versions:
            print(f"{args.config}: not looked at without torchtitan")
        else:
            runs, tried = _check_config(args.config, flags, machine, runs)
    device = training_device()
    for recipe in tried:
        try:
            error = try_layer(recipe, device)
        except Exception as stopped:  # whatever it is, it would stop a training too
            print(f"\nFAILED: one grouped GEMM of {recipe}: {type(stopped).__name__}: {str(stopped)[:2000]}")
            runs = False
        else:
            agrees = error < 0.01  # measured: 0 on a CPU; the rounding of outputs to bf16 is 0.002
            print(f"\ntried one grouped GEMM of {recipe}, forward and backward: {error:.1e} from the reference")
            if not agrees:
                print("FAILED: that is further than another order of additions explains")
            runs = runs and agrees
    print("\nMXFP8 training will run here" if runs else "\nMXFP8 training will NOT run here as things are")
    return 0 if runs else 1


def _check_config(path: str, flags: Sequence[str], machine: Machine, runs: bool) -> tuple[bool, list[str]]:
    """Prints what a config means here. Whether it can be trained, and the recipes it asks for."""
    from titan_mxfp8.tools.dry_run import recipes_here

    logging.disable(logging.WARNING)
    try:
        asked = recipes_here(path, flags)
    except (ValueError, OSError) as error:
        print(f"FAILED: {path}: {error}")
        return False, []
    except SystemExit:  # TorchTitan has said why
        print(f"FAILED: {path}, see above")
        return False, []
    finally:
        logging.disable(logging.NOTSET)
    if not asked:
        print(f"{path} converts nothing: it trains in bf16. Add {CONVERTERS}")
        return False, []
    for name, (recipe, backend) in asked.items():
        chosen = select(backend, machine.hardware, recipe)
        print(
            f"{path}: {name} is {recipe.name}, backend {chosen.name}: {plan_on(recipe, chosen.name, machine.hardware)}"
        )
    return runs, list(dict.fromkeys(recipe.name for recipe, _ in asked.values()))


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _minor(version: str) -> str:
    return ".".join(map(str, _numbers(version)))


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _driver() -> str:
    nvidia = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    amd = Path("/sys/module/amdgpu/version")
    return nvidia.split("\n")[0] or (amd.read_text().strip() if amd.is_file() else "")


def _ptxas(hardware: Hardware) -> tuple[str, str]:
    """The ptxas that Triton takes, with its release; and the path of CUDA's where that is a newer release 13."""
    spec = find_spec("triton")
    if spec is None or hardware.capability is None:
        return "", ""
    folder = Path(spec.origin).parent / "backends/nvidia/bin"
    own, for_blackwell = folder / "ptxas", folder / "ptxas-blackwell"
    if hardware.capability >= (10, 0) and for_blackwell.is_file():
        own = for_blackwell
    named = os.environ.get("TRITON_PTXAS_PATH", "")
    used = named if os.access(named, os.X_OK) else str(own)
    cuda = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    newer = _release(cuda).startswith("13.") and _numbers(_release(cuda)) > _numbers(_release(used))
    return f"{used}, release {_release(used) or 'unknown'}", cuda if newer else ""


def _release(ptxas: str) -> str:
    found = re.search(r"release ([\d.]+),", _output(ptxas, "--version"))
    return found[1] if found else ""


if __name__ == "__main__":
    sys.exit(main())
