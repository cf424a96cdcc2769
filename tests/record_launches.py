"""Records what the package launches, to show that a change of its sources changed no launch.

    python tests/record_launches.py --out before.csv            # in one checkout, some minutes of one CPU core
    python tests/record_launches.py --out after.csv             # in another
    python tests/record_launches.py --compare before.csv after.csv

Calls of the public functions, forward and backward, on CPU tensors: kernels are compiled for GPUs that are not here and
do not run (``aot.py``). A row is a launch, or a GEMM that is left to torch: grid (0: a variant that is only compiled),
warps, stages, types and values of the arguments, constants, resources, and a hash of the generated code without names,
comments and line numbers. All is compared but names: of kernels, and strings among the constants.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib
import itertools
import multiprocessing
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout, whichever is installed

import aot
import torch
import torch.distributed as dist
from scaled_mm import as_on_sm100
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.runtime.jit import JITFunction

from titan_mxfp8 import RECIPES, mxfp8_grouped_mm, mxfp8_linear, mxfp8_moe, quantize

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {  # target, backend, what the GPU calls itself
    "hopper": ("sm_90", "hopper", "NVIDIA H200"),
    "triton_sm_90": ("sm_90", "triton", "NVIDIA H200"),
    "sm100": ("sm_100", "sm100", "NVIDIA B200"),
    "triton_gfx950": ("gfx950", "triton", "AMD MI355X"),
    "triton_sm_80": ("sm_80", "triton", "NVIDIA A100"),
}
COLUMNS = "setting case kernel grid warps stages options types values constants shared registers spills code".split()
SIZES = {"small": ((100, 0, 333, 79), 96, 160), "large": ((3000, 0, 1097, 896), 1024, 1056)}  # of groups, N, K
UNWRITTEN = 64  # what the host reads of integers that a kernel would have written


# All that is asked of the package's inside. What is called otherwise now goes behind its earlier names.
PADDING = "titan_mxfp8.ops.pad"  # has pad_token_groups and unpad_token_groups


def inside(*names: str) -> object:
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("titan_mxfp8")]
    found = [vars(module)[name] for name in names for module in modules if callable(vars(module).get(name))]
    if not found:
        raise LookupError(f"nothing in titan_mxfp8 is called {' or '.join(names)}: add its name of today")
    return found[0]


def replace(function: object, other: Callable) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("titan_mxfp8")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            setattr(module, name, other)


def on_hardware(target: str, name: str) -> contextlib.AbstractContextManager:
    replace(inside("multiprocessors", "multiprocessor_count"), lambda device: aot.MULTIPROCESSORS[target])
    return inside("stand_in", "override_hardware")(inside("Hardware")(target, name))


@cache
def use_symmetric() -> None:
    transport = inside("Symmetric", "SymmetricTransport")(Link())
    replace(inside("choose", "choose_transport"), lambda *_: (transport, ""))


class Link:
    """Of two ranks, where nothing comes from the other."""

    ranks, rank, device = 2, 1, torch.device("cpu")

    def gather(self, value: object) -> list:
        return [value] * self.ranks

    def allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        memory = torch.zeros(size, dtype=torch.uint8)
        return memory, [memory.data_ptr()] * self.ranks

    def barrier(self) -> None:
        pass


def cases(target: str, backend: str) -> Iterator[tuple[str, Callable[[], object]]]:
    recipes = [*dict.fromkeys(recipe.name for recipe in RECIPES.values()), "bf16"]
    recipes = [name for name in recipes if backend == "hopper" or not name.endswith("_rebased")]
    for recipe, size in itertools.product(recipes, SIZES):
        call = {"recipe": recipe, "backend": backend}
        for kind in ("plain", "biased", "fp32", "strided", "frees_weight", "requantised", "prequantised"):
            if recipe != "bf16" or not kind.endswith("quantised"):
                yield f"grouped_mm {recipe} {size} {kind}", partial(run_grouped, size, kind, **call)
        for kind in ("plain", "biased", "fp32"):
            yield f"linear {recipe} {size} {kind}", partial(run_linear, size, kind, **call)
        for kind in ("plain", "limited", "biased", "scores_first", "frees_weight"):
            yield f"moe {recipe} {size} {kind}", partial(run_moe, size, kind, 4, **call)
    elements, axes, dtypes = (torch.float8_e4m3fn, torch.float8_e5m2), (-1, -2), (BF16, FP32)
    for *spec, dtype in itertools.product(("rceil", "floor"), elements, ("1x32", "32x32"), axes, dtypes):
        call = {"backend": backend} | dict(zip(("rounding", "elem_dtype", "block", "axis"), spec, strict=True))
        for shape in ((519, 160), (4, 96, 160)):
            yield f"quantize {spec} {dtype} {shape}", partial(quantize, torch.zeros(shape, dtype=dtype), **call)
        if spec[2:] == ["1x32", -2]:
            call["offs"] = ends("small")
            yield f"quantize {spec} {dtype} groups", partial(quantize, torch.zeros(519, 160, dtype=dtype), **call)
    for dtype in dtypes:
        yield f"pad {dtype}", partial(run_pad, dtype)
    # Last, as what is replaced for it stays so. The symmetric transport is NVIDIA's.
    for way in ("collective", "symmetric", "symmetric worst_case")[: 1 if target.startswith("gfx") else 3]:
        for recipe, size in itertools.product(recipes, SIZES):
            call = {"recipe": recipe, "backend": backend, "max_tokens": 5000, "transport": way.split()[0]}
            call |= {"rows": "worst_case"} if way.endswith("worst_case") else {}
            yield f"moe of 2 ranks {way} {recipe} {size}", partial(run_ranks, size, call)


def run_grouped(size: str, kind: str, **options) -> None:
    (groups, n, k), dtype = SIZES[size], FP32 if kind == "fp32" else BF16
    x = torch.zeros(sum(groups) + 7, k, dtype=dtype)  # 7 rows of no group
    x = (x.T.contiguous().T if kind == "strided" else x).requires_grad_()
    w = torch.zeros(len(groups), n, k, dtype=dtype, requires_grad=True)
    bias = torch.zeros(len(groups), n, requires_grad=True) if kind == "biased" else None
    a = quantize(x, backend=options["backend"]) if kind == "prequantised" else x
    options |= {"requantize_input": kind == "requantised", "keep_quantized_weight": kind != "frees_weight"}
    y = mxfp8_grouped_mm(a, w.mT, ends(size), bias=bias, out_dtype=dtype, **options)
    y.backward(torch.zeros((), dtype=dtype).expand(y.shape) if kind == "strided" else torch.zeros_like(y))


def run_linear(size: str, kind: str, **options) -> None:
    (groups, n, k), dtype = SIZES[size], FP32 if kind == "fp32" else BF16
    x, w = (torch.zeros(rows, k, dtype=dtype, requires_grad=True) for rows in (sum(groups), n))
    y = mxfp8_linear(x, w, torch.zeros(n, dtype=dtype, requires_grad=True) if kind == "biased" else None, **options)
    y.backward(torch.zeros_like(y))


def run_moe(size: str, kind: str, experts: int, **options) -> None:
    groups, n, k = SIZES[size]
    x = torch.zeros(sum(groups), k, dtype=BF16, requires_grad=True)
    scores, ids = torch.rand(len(x), experts, generator=torch.Generator().manual_seed(0)).topk(2)
    shapes = {"w1": (4, n, k), "w3": (4, n, k), "w2": (4, k, n)}
    shapes |= {"b1": (4, n), "b3": (4, n), "b2": (4, k)} if kind == "biased" else {}
    options |= {name: torch.zeros(shape, dtype=BF16, requires_grad=True) for name, shape in shapes.items()}
    options |= {"limited": {"swiglu_limit": 7.0}, "scores_first": {"scores_first": True}}.get(kind, {})
    y = mxfp8_moe(x, scores.requires_grad_(), ids, keep_quantized_weight=kind != "frees_weight", **options)
    y.backward(torch.zeros_like(y))


def run_ranks(size: str, options: dict) -> None:
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    if options["transport"] == "symmetric":
        use_symmetric()
    run_moe(size, "plain", 8, group=dist.group.WORLD, **options)


def run_pad(dtype: torch.dtype) -> None:
    module = importlib.import_module(PADDING)
    offs, x = ends("small"), torch.zeros(519, 160, dtype=dtype, requires_grad=True)
    padded, _ = module.pad_token_groups(x, offs, 32)
    module.unpad_token_groups(padded, offs, 32, 519).backward(torch.zeros_like(x))


def ends(size: str) -> torch.Tensor:
    return torch.tensor(SIZES[size][0]).cumsum(0).int()


def record(setting: str, chosen: str) -> list[dict]:
    """A row of each launch of the cases in whose name ``chosen`` is found, in a process that has recorded no other
    setting: the package keeps plans."""
    target, backend, gpu = SETTINGS[setting]
    rows, codes, made = [], {}, []

    def filled(function: Callable, *args, **kwargs) -> torch.Tensor:
        empty = function(*args, **kwargs)
        return empty.fill_(UNWRITTEN) if empty.dtype == torch.int32 and empty.is_cpu else empty

    def left_to_torch(name: str, *args, **kwargs) -> torch.Tensor:
        fake = as_on_sm100(getattr(torch.ops.aten, name).default, *args, **kwargs)
        given = [x for x in (*args, *(x for _, x in sorted(kwargs.items())), fake) if isinstance(x, torch.Tensor)]
        types, values = zip(*((str(x.dtype), (tuple(x.shape), x.stride())) for x in given), strict=True)
        rows.append({"kernel": f"torch.{name}", "types": types, "values": values})
        return torch.zeros(fake.shape, dtype=fake.dtype)

    def receive(out: torch.Tensor, sent: torch.Tensor, *args, **kwargs) -> None:
        if out.dtype == torch.int32 and out.shape == sent.shape:  # how many rows come
            out.copy_(sent)

    def launch(self, *args, grid, warmup=False, **kwargs):
        compiled = compile_launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        kernel, meta = aot._inspected[compiled.hash], compiled.metadata
        if compiled.hash not in codes:
            codes[compiled.hash] = hash_of(kernel)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        values = [(p.is_constexpr, value_of(given.get(p.name, p.default))) for p in self.params]
        row = {"kernel": kernel.name, "grid": 0 if warmup else grid, "warps": meta.num_warps, "stages": meta.num_stages}
        row |= {name: getattr(kernel, name) for name in ("shared", "registers", "spills")}
        row |= {"options": (meta.num_ctas, getattr(meta, "maxnreg", None)), "types": [*compiled.src.signature.values()]}
        row |= {name: [v for const, v in values if const == (name == "constants")] for name in ("values", "constants")}
        rows.append(row | {"code": codes[compiled.hash]})
        return compiled

    with on_hardware(target, gpu), aot.compile_only(target):
        compile_launch, JITFunction.run = JITFunction.run, launch
        for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            function = getattr(holder, name)
            setattr(holder, name, lambda *args, function=function, **kwargs: filled(function, *args, **kwargs))
        for name in ("mm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"):
            setattr(torch, name, partial(left_to_torch, name))
        dist.all_to_all_single = receive
        torch.version.hip = "0" if target.startswith("gfx") else None
        for case, run in cases(target, backend):
            if re.search(chosen, case):
                rows.clear()
                run()
                assert rows, f"{case} launched nothing"
                launched = [(row["code"], row["constants"]) for row in rows if row.get("grid")]
                kept = [row for row in rows if row.get("grid") != 0 or (row["code"], row["constants"]) not in launched]
                made += [{"setting": setting, "case": case} | row for row in kept]
    return made


def value_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return f"{value.numel()} elements"
    if hasattr(value, "block_shape"):  # a descriptor
        return tuple(tuple(map(int, sizes)) for sizes in (value.shape, value.strides, value.block_shape))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def hash_of(kernel: aot.Kernel) -> str:
    """Of what is left of PTX, or of AMD's assembly, without the kernel's name, comments and what debuggers read."""
    text = kernel.ptx or kernel.binary.decode().split(".amdgpu_metadata")[0]
    text = re.split(r"\n\s*\.section\s+\.debug", text)[0]
    text = re.sub(rf"(?<![\w.])(\.L)?{kernel.name}(?=_param_\d|\b)", r"\1kernel", text)
    lines = [re.sub(r"(//|;\s).*", "", line).strip() for line in text.split("\n")]
    debug = re.compile(r"\.(loc|file|ident|section|cfi\w*)\b|[.$]L\w*tmp\w*:|;")
    kept = "\n".join(line for line in lines if line and not debug.match(line))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def compare(*paths: Path) -> int:
    """Prints the first launch that differs of each case that has one, and returns how many have."""
    before, after = defaultdict(list), defaultdict(list)
    for path, launches in zip(paths, (before, after), strict=True):
        with path.open() as file:
            for row in csv.DictReader(file):
                launches[row["setting"], row["case"]].append(row)
    different = 0
    for case in dict.fromkeys((*before, *after)):
        for i, (one, other) in enumerate(itertools.zip_longest(before[case], after[case], fillvalue={})):
            if columns := [name for name in COLUMNS if compared(name, one) != compared(name, other)]:
                different += 1
                counts = f"{len(before[case])} and {len(after[case])} launches"
                print(f"{' '.join(case)}: {counts}, number {i}: {one.get('kernel')}, {other.get('kernel')}")
                for name in columns if one and other else ():
                    print(f"    {name}: {one[name]} -> {other[name]}")
                break  # those behind it may only be shifted
    counts = [sum(map(len, launches.values())) for launches in (before, after)]
    print(f"{counts[0]} and {counts[1]} launches, {different} of {len({*before, *after})} cases differ")
    return different


def compared(column: str, row: dict) -> str | None:
    value = row.get(column)
    if column == "kernel":
        return value if value and value.startswith("torch.") else None
    return re.sub(r"'[^']*'", "'a name'", value) if value and column == "constants" else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="a CSV to write")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--cases", default="", help="a regular expression; the same for both lists")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        sys.exit(compare(*args.compare) > 0)
    if not args.out:
        parser.error("--out or --compare")
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for rows in pool.imap(partial(record, chosen=args.cases), args.settings):
                writer.writerows(rows)
                file.flush()
                kernels, codes = ({row.get(name) for row in rows} for name in ("kernel", "code"))
                print(
                    f"{rows[0]['setting']}: {len(rows)} launches, {len(kernels)} kernels, {len(codes)} codes",
                    flush=True,
                )


if __name__ == "__main__":
    main()
