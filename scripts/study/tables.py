"""Writes the tables of README.md and results/README.md from the CSVs that they name, so that no figure is typed.

    python scripts/study/tables.py --check    # prints those that differ, as the exit status says; without it writes all

A table stands right below a comment with its kind, a function below, the paths under results/ and options for it:
<!-- table: grouped_mm 2026-11-25_h200_bench/grouped_mm/data.csv recipes=mxfp8,mxfp8_2d -->.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.progress import ends_in_words
from scripts.result_files import env_of, format_table, gpu_of, read_rows, steps_of_8, training_gains
from scripts.study.conversions import FLOAT8, conversion_of
from scripts.study.runs import value_of
from titan_mxfp8.recipe import BF16

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "results" / "README.md")
MARKER = re.compile(r"<!-- table: (.+?) -->\n((?:\|.*\n)*)")
MODELS = {f"16B_{layers}layers": f"DeepSeek-V3 16B, {layers} layers" for layers in (4, 7)}
MODELS |= {f"deepseek_v3_{flavor.lower()}": f"{model}, TorchTitan 0.3" for flavor, model in MODELS.items()}
MODELS |= {"16B": "DeepSeek-V3 16B, all 27 layers"}
MODELS |= {f"17bx16e_{layers}layers": f"Llama4 17Bx16E, {layers} layers" for layers in (2, 4)}
MODELS |= {f"30B-A3B_{layers}layers": f"Qwen3-30B-A3B, {layers} layers" for layers in (4, 7)}
# By N, K of a grouped GEMM; by name of a layer.
SHAPES = {("8192", "5120"): "Llama4", ("2048", "7168"): "DeepSeek-V3"}
LAYERS = {"dsv3": "DeepSeek-V3", "llama4": "Llama4", "qwen3_30b": "Qwen3-30B-A3B"}
LAYERS |= dict.fromkeys(("dsv3_16b", "dsv3_16b_routed"), "DeepSeek-V3 16B")
LAYERS["fine_grained"] = "128 experts, 8 of a token, D 4096, H 1024"
CONTROLS = ("torch bf16, compiled", "bf16")
OURS = "bf16, ours"  # the control: our kernels, or our dispatch, with nothing quantised
EXTRAS = {"dispatch": ", `dispatch`", "graph": ", CUDA graph"}
ALONE = {"grouped": ", experts alone", "linears": ", linears alone"}  # behind a model of which no more is converted

Row = dict[str, str]
Cells = dict[str, str]


def code(recipe: str) -> str:
    """A recipe's name as a column's: that of a control says whose bf16 it is."""
    own = f"`{recipe}`" if recipe.startswith("mxfp8") else recipe
    return {BF16.name: OURS, FLOAT8: "TorchTitan's FP8"}.get(recipe, own)


def recipe_of(run: str) -> str:
    """The recipe of a run of bench_training.py: of ``both+rebase:mxfp8_2d`` ``mxfp8_2d_rebased``; ``bf16`` is the
    baseline, the control, ``bf16+dispatch``, ``OURS``, and TorchTitan's own FP8 ``FLOAT8``."""
    conversion = conversion_of(run)
    if not conversion.converters:
        return run
    return OURS if conversion.recipe == BF16.name else conversion.full_recipe or "mxfp8"


def times(values: Sequence[float], digits: int = 2) -> str:
    """One ratio, or a range."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def between(text: str) -> str:
    """A range that bench_training.py wrote, as it stands behind a median: `` (1.17-1.24)``, or nothing."""
    low, _, high = text.partition(" to ")
    return f" ({float(low):.2f}-{float(high):.2f})" if high and low != high else ""


def render(rows: Sequence[Cells]) -> str:
    """Markdown; columns that no row fills are left out."""
    named = dict.fromkeys(name for row in rows for name in row)
    filled = [name for name in named if any(row.get(name) for row in rows)]
    return format_table([{name: row.get(name) for name in filled} for row in rows]) + "\n"


class Trained(NamedTuple):
    """A row of bench_training.py: times bf16's speed, what it converts (bf16: nothing, or it is the control), and what
    of ``EXTRAS`` it is besides."""

    row: Row
    gain: float
    recipe: str
    what: str
    extras: tuple[str, ...]


def end_to_end(*paths: Path, recipes: str = "mxfp8_2d,mxfp8_2d_rebased", layers: str = "any") -> list[Cells]:
    """Tokens/s of training times bf16's with their range over repeats, and memory, of table.csv of bench_training.py: a
    row for each flavor and what was converted, one for runs with ``dispatch``, which has their control in a column, and
    one for those that are a CUDA graph. TorchTitan's FP8, where ``recipes`` names it, has a column in each.
    With ``layers`` of ``most`` each file's flavors with fewer layers than another one's are left out."""
    table, shown = [], [OURS, *recipes.split(",")]
    for path in paths:
        env, trained = env_of(path), []
        gpus = f"{env.get('processes', '')} {gpu_of(env) or 'CPU'}".strip() if env else ""
        folder = next((part for part in path.parts if re.match(r"20\d\d-\d\d-\d\d_", part)), path.parent.name)
        for row, gain in training_gains(read_rows(path)):
            recipe, run = recipe_of(row["run"]), conversion_of(row["run"])
            extras = tuple(extra for extra in EXTRAS if extra in run.options)
            if recipe != FLOAT8 or FLOAT8 in shown:
                trained.append(Trained(row, gain, recipe, "bf16" if recipe == OURS else run.what, extras))
        flavors = dict.fromkeys(run.row.get("flavor", "") for run in trained)
        if layers == "most":
            most = sorted(flavors, key=lambda name: int((re.findall(r"(\d+)layers", name) or [0])[0]))
            flavors = {re.sub(r"\d+layers", "", name): name for name in most}.values()
        for flavor, extras in itertools.product(flavors, ((), ("dispatch",), ("dispatch", "graph"))):
            of_kind = [run for run in trained if run.row.get("flavor", "") == flavor]
            of_kind = [run for run in of_kind if run.recipe in ("bf16", FLOAT8) or run.extras == extras]
            for what in [name for name in dict.fromkeys(run.what for run in of_kind) if name != "bf16"] or ["bf16"]:
                by_recipe = {run.recipe: run for run in of_kind if run.what in ("bf16", what)}
                if not by_recipe.keys() - {"bf16", FLOAT8}:
                    continue
                name = flavor_of(by_recipe["bf16"].row, env)
                model = MODELS.get(name, name) + ALONE.get(what, "") + "".join(EXTRAS[extra] for extra in extras)
                there = [by_recipe[recipe] for recipe in shown if recipe in by_recipe]
                cells = {"model": model, "GPUs": gpus} | dict.fromkeys(map(code, shown), "")
                cells |= {code(run.recipe): f"{run.gain:.2f}{between(run.row.get('x, range') or '')}" for run in there}
                gib = [float(run.row["memory GiB"]) / float(by_recipe["bf16"].row["memory GiB"]) for run in there]
                repeats = {int(run.row.get("repeats") or 1) for run in by_recipe.values() if run.recipe != "bf16"}
                cells["memory"], cells["runs"] = times(gib), times([*repeats], 0)
                table.append(cells | {"folder": f"`{folder}`"})
    return table


def flavor_of(row: Row, env: Row) -> str:
    """The flavor of a row of bench_training.py: its own, or that of the config that ``env`` names."""
    return row.get("flavor") or (value_of("model.flavor", ROOT / env["config"], []) if env.get("config") else "")


def beside_peer(*paths: Path) -> list[Cells]:
    """MoE layers of bench_moe_layer.py on one GPU: speed times SonicMoE's, and the peak of memory."""
    table: dict[tuple[Path, str], Cells] = {}
    for path in paths:
        rows = read_rows(path)
        peers = {row["layer"]: row for row in rows if row["way"] == "sonicmoe"}
        for row in rows:
            layer, way = row["layer"], row["way"].split()[0]
            x = float(peers[layer]["p50_us"]) / float(row["p50_us"])
            name = {"torchtitan": "TorchTitan", "sonicmoe": "SonicMoE"}.get(way) or code(way)
            cells = table.setdefault((path, layer), {"layer": LAYERS[layer], "GPU": gpu_of(env_of(path))})
            cells[name] = f"{x:.2f}; {float(row['peak_gib']):.1f} GiB"
    return list(table.values())


def grouped_mm(*paths: Path, recipes: str) -> list[Cells]:
    """Forward + backward of one grouped GEMM of 8 experts times bf16's, a row for each GPU and problem, by the controls
    and ``recipes``."""
    table = []
    shown = (*CONTROLS, *recipes.split(","))
    for path in paths:
        problems: dict[str, Cells] = {}
        for row in steps_of_8(path):
            sizes = ", ".join(row[name] for name in ("M", "N", "K", "G"))
            cells = {"GPU": gpu_of(env_of(path)), "M, N, K, experts": f"{sizes} ({SHAPES[row['N'], row['K']]})"}
            cells = problems.setdefault(sizes, cells | {code(recipe): "" for recipe in shown})
            if row["recipe"] in shown:
                cells[code(row["recipe"])] = f"{float(row['x']):.2f}"
        table += problems.values()
    return table


def convergence(path: Path) -> list[Cells]:
    """Final losses and their distance from bf16's, by runs: of a table.csv of compare_runs.py."""
    table = []
    for row in read_rows(path):
        cells = {"runs": run_label(row["run"]), "final loss": row["final loss"], "pairs": row["pairs"]}
        cells["difference from bf16"] = row["difference"]
        cells["95% interval"] = f"{row['95% low']} to {row['95% high']}" if row["difference"] else ""
        cells["held-out loss"] = row.get("held-out loss", "")
        table.append(cells | {"verdict": row["verdict"]})
    return table


def run_label(name: str) -> str:
    """A run of converge.py as a table names it: of ``mxfp8_2d+dispatch`` its recipe and ``dispatch``."""
    recipe, *options = name.split("+")
    said = {"repeat": " again, same seeds", "rebase": ", `hopper_rebase`"}
    shown = f"`{recipe}`" if recipe.startswith("mxfp8") else recipe
    return shown + "".join(said.get(option, f", `{option}`") for option in options)


KINDS: dict[str, Callable[..., list[Cells]]] = {
    function.__name__: function for function in (end_to_end, beside_peer, grouped_mm, convergence)
}


def table_of(query: str) -> str:
    """The table that a marker asks for. Raises ValueError for an unknown kind or option, or a file that is not
    there."""
    kind, *words = query.split()
    if kind not in KINDS:
        raise ValueError(f"table: {query}: unknown kind {kind!r}, use one of {', '.join(KINDS)}")
    paths = [ROOT / "results" / word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    try:
        return render(KINDS[kind](*paths, **options))
    except (OSError, TypeError) as error:
        raise ValueError(f"table: {query}: {error}") from error


def rewritten(text: str) -> str:
    """Markdown with every table as its CSVs have it."""
    return MARKER.sub(lambda found: f"<!-- table: {found[1]} -->\n{table_of(found[1])}", text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where a table differs")
    args = parser.parse_args(argv)
    stale = []
    with ends_in_words("tables"):
        for path in FILES:
            text = path.read_text()
            for found in MARKER.finditer(text):
                if found[2] != (table := table_of(found[1])):
                    stale.append(f"{path.relative_to(ROOT)}: {found[1]}\nis\n{found[2]}and its CSVs say\n{table}")
            if not args.check:
                path.write_text(rewritten(text))
    if args.check and stale:
        sys.exit("\n".join(stale) + "python scripts/study/tables.py writes them anew")
    print(f"{len(stale)} tables {'differ' if args.check else 'written anew'}")


if __name__ == "__main__":
    main(sys.argv[1:])
