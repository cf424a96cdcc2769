"""Dry-runs configs at their full world size, and prints a table of them.

./scripts/check_configs.sh train_configs/llama4_17bx16e_8x8.toml    # which runs this in its environment
"""

import argparse
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

from scripts.bench.roofline import FSDP_COPIES, committed_rates, step_speedup
from scripts.result_files import format_table, gpu_of, read_rows
from scripts.study.tables import times
from titan_mxfp8.recipe import BF16
from titan_mxfp8.tools.dry_run import Report, dry_run, parse_config
from titan_mxfp8.tools.memory import GIB

ROOT = Path(__file__).parent.parent


def predicted(report: Report) -> str:
    """How many times bf16's speed a step can reach, by what was measured on its GPU: what the number format changes, by
    the model of passes, times what the dispatch gains where nothing is quantised, as it was measured in training."""
    if not report.converted:
        return "none, as nothing is converted"
    if report.card is None:
        return "not known: cluster.gpu names no GPU"
    gpu = report.card[0]
    rates = committed_rates(ROOT / "results", gpu)
    if rates is None:
        return f"not known: no committed result has rates that were measured on {gpu}"
    ceilings, own = (step_speedup(report, gpu, each) for each in rates)
    left_out = "communication and the host are left out"
    by_format = f"by the number format with our kernels' rates ({ceilings:.2f} with the {gpu}'s highest)"
    if not report.dispatching:
        return f"{own:.2f} times bf16's speed {by_format}; {left_out}"
    gains = dispatch_gains(gpu, report.model)
    if not gains:
        unknown = f"what the dispatch gains besides was not measured for {report.model} on {gpu}"
        return f"{own:.2f} times bf16's speed {by_format}; {unknown}; {left_out}"
    both = times([own * gain for gain in gains])
    by_dispatch = f"{times(gains)} by the dispatch, as measured in bf16 on models of 2 to 7 layers"
    return f"{both} times bf16's speed: {own:.2f} {by_format}, times {by_dispatch}; {left_out}"


def dispatch_gains(gpu: str, model: str) -> list[float]:
    """How many times as fast trainings of a model were with the dispatch alone, by measured.csv."""
    control = gpu, model, "training", BF16.name
    rows = read_rows(ROOT / "titan_mxfp8" / "measured.csv")
    return [float(row["x"]) for row in rows if (gpu_of(row), row["model"], row["kind"], row["recipe"]) == control]


def fsdp_of(report: Report) -> str:
    """What it does to a GPU's experts, in words."""
    if not report.frees_weights:
        return "none"
    if not report.out_of_fsdp:
        return "takes all parameters"
    elements, spared = report.out_of_fsdp / 1e9, FSDP_COPIES * report.out_of_fsdp / 1e9
    return f"leaves {elements:.2f} billion parameters of experts alone: {spared:.0f} GB fewer to copy in a step"


def describe(report: Report) -> str:
    """The lines under a config's name."""

    def listing(counts: Counter[str]) -> str:
        names = ", ".join(f"{count} {name}" for name, count in counts.items())
        experts = sum(count for name, count in counts.items() if name.endswith(".experts"))
        return f"{experts} expert modules, {counts.total() - experts} linears: {names}" if names else "nothing"

    words = "; ".join(f"{name} {text}" for name, text in report.multiplied.items())
    multiplies = words or ("not known: cluster.gpu names no GPU" if report.converted else "bf16 in all GEMMs")
    card = f" of {report.card[0]}'s {report.card[1] / GIB:.1f}" if report.card else ""
    return "\n".join(
        f"  {title:11}{text}"
        for title, text in {
            "processes": report.world_size,
            "mesh": ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "one process",
            "batch": f"{report.sequences} sequences",
            "MXFP8": listing(report.converted),
            "bf16": listing(report.left),
            "MMA dtype": multiplies,
            "parameters": f"{report.parameters / 1e9:.2f} billion",
            "GiB a GPU": f"{report.memory.total / GIB:.1f}{card}: {report.memory}",
            "FSDP": fsdp_of(report),
            "FLOPs": f"{report.flops_per_token / 1e9:.1f} billion a token, {report.mxfp8_share:.0%} of them MXFP8",
            "speed-up": predicted(report),
        }.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="TOMLs, here or in the repository [all of train_configs/]")
    args, overrides = parser.parse_known_args()
    configs = [Path(path) for path in args.configs] or sorted((ROOT / "train_configs").glob("*.toml"))

    logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
    warnings.filterwarnings("ignore", module="tyro")  # of values that the checks refuse
    rows = []
    for config in configs:
        try:
            found = next(filter(Path.is_file, (config, ROOT / config)), None)
            if found is None:
                raise ValueError(f"no such file, here or in the repository: ls {ROOT / 'train_configs'}")
            report = dry_run(parse_config(str(found), overrides))
        except Exception as error:  # whatever it is, the other configs are to be checked too
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            print(f"FAIL {config}: {kind}{error}", flush=True)
            continue
        print(f"ok   {config}\n{describe(report)}", flush=True)
        rows.append(
            {
                "config": config.stem,
                "GPUs": report.world_size,
                "parameters, billion": round(report.parameters / 1e9, 2),
                "GiB a GPU": f"{report.memory.total / GIB:.1f}",
                "of": f"{report.card[0]} {report.card[1] / GIB:.1f}" if report.card else "",
                "MXFP8 FLOPs": f"{report.mxfp8_share:.0%}",
            }
        )
    print()
    if rows:
        print(format_table(rows))
    print(f"{len(rows)} of {len(configs)} configs can be trained as they are laid out")
    return int(len(rows) < len(configs))


if __name__ == "__main__":
    sys.exit(main())
