"""What scripts/check_configs.sh runs: dry-runs configs at their full world size, and prints a table of them."""

import argparse
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

from titan_mxfp8.testing import format_table
from titan_mxfp8.tools.dry_run import Report, dry_run, parse_config
from titan_mxfp8.tools.memory import GIB
from titan_mxfp8.tools.roofline import committed_rates, step_speedup

ROOT = Path(__file__).parent.parent


def predicted(report: Report) -> str:
    """How many times bf16's speed a step can reach, by what was measured on its GPU."""
    if report.card is None:
        return "not known: cluster.gpu names no GPU"
    gpu = report.card[0]
    rates = committed_rates(ROOT / "results", gpu)
    if rates is None:
        return f"not known: no committed result has rates that were measured on {gpu}"
    ceilings, own = (step_speedup(report.step, gpu, each) for each in rates)
    return (
        f"{own:.2f} times bf16's speed with our kernels' rates, {ceilings:.2f} with the {gpu}'s highest; communication "
        "and the host are left out"
    )


def describe(report: Report) -> str:
    """The lines under a config's name."""

    def listing(counts: Counter[str]) -> str:
        names = ", ".join(f"{count} {name}" for name, count in counts.items())
        experts = sum(count for name, count in counts.items() if name.endswith(".experts"))
        return f"{experts} expert modules, {counts.total() - experts} linears: {names}" if names else "nothing"

    card = f" of {report.card[0]}'s {report.card[1] / GIB:.1f}" if report.card else ""
    return "\n".join(
        f"  {title:11}{text}"
        for title, text in {
            "processes": report.world_size,
            "mesh": ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "one process",
            "batch": f"{report.sequences} sequences",
            "MXFP8": listing(report.converted),
            "bf16": listing(report.left),
            "mma_dtype": "; ".join(f"{name} {text}" for name, text in report.multiplied.items() if text) or "not known",
            "parameters": f"{report.parameters / 1e9:.2f} billion",
            "GiB a GPU": f"{report.memory.total / GIB:.1f}{card}: {report.memory}",
            "FLOPs": f"{report.flops_per_token / 1e9:.1f} billion a token, {report.mxfp8_share:.0%} of them MXFP8",
            "speed-up": predicted(report),
        }.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="check_configs.sh [CONFIG.toml ...] [TorchTitan flags]")
    parser.add_argument("configs", nargs="*", help="TOMLs, here or in the repository [all of train_configs/]")
    args, overrides = parser.parse_known_args()
    configs = [Path(path) for path in args.configs] or sorted((ROOT / "train_configs").glob("*.toml"))

    logging.disable(logging.ERROR)  # TorchTitan's account of a run that does not happen
    warnings.filterwarnings("ignore", module="tyro")  # of values that the checks refuse
    rows, failed = [], 0
    for config in configs:
        try:
            found = next(filter(Path.is_file, (config, ROOT / config)), None)
            if found is None:
                raise ValueError(f"no such file, here or in the repository: ls {ROOT / 'train_configs'}")
            report = dry_run(parse_config(str(found), overrides))
        except Exception as error:  # whatever it is, the other configs are to be checked too
            failed += 1
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
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
