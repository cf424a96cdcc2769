"""Draws README.md's pictures into results/pictures/, from the CSVs under results/ that they show.

    python scripts/study/pictures.py

Each PNG says in its metadata which files it was drawn from and what they held: a test tells where they are others now.
"""

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from scripts.result_files import env_of, gpu_of, read_rows
from scripts.study import compare_runs, tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
OUT = RESULTS / "pictures"
SEEDS = [
    RESULTS / folder / "losses.csv"
    for folder in ("2026-11-23_2xh200_convergence", "2026-11-23_2xh200_convergence_12_seeds")
]
DEFAULT = [RESULTS / "2026-11-27_4xh200_convergence_default" / "losses.csv"]
FOURTEEN = [RESULTS / "2026-11-28_2xh200_convergence_fourteen_seeds" / "losses.csv"]
LONGER = [
    RESULTS / folder / "losses.csv" for folder in ("2026-11-27_2xh200_longer_run", "2026-11-27_h200_longer_run_control")
]
LAYERS = [RESULTS / "2026-11-24_2xh200_dispatch_default" / "layers.csv"]
SCALING, SCALING_FORMER = (
    [RESULTS / folder / name for name in ("scaling/data.csv", "roofline.csv")]
    for folder in ("2026-11-27_h200_scaling", "2026-11-25_h200_bench")
)
STEPS_350 = [RESULTS / "2026-11-28_2xh200_350_steps" / "data.csv"]
TOKENS = 4 * 4096  # of a step of those runs, on each GPU
SHOWN = ("bf16", "mxfp8_2d", "mxfp8_2d_rebased")
# What groups of runs are called, by their names.
RECIPES = {name: name for name in ("bf16", "mxfp8", "mxfp8_2d", "mxfp8_2d_rebased")}
WAYS = {
    "bf16": "bf16",
    "bf16+dispatch": "bf16, our dispatch",
    "mxfp8_2d+experts+dispatch+rebase": "mxfp8_2d_rebased",
    "mxfp8_2d+experts+dispatch": "mxfp8_2d",
    "mxfp8+experts+dispatch": "mxfp8",
}
AS_GRAPHS = {  # the first three, as CUDA graphs where the plugin dispatches
    "bf16": "bf16",
    "bf16+dispatch+graph": "bf16, our dispatch",
    "mxfp8_2d+experts+dispatch+rebase+graph": "mxfp8_2d_rebased",
}
SHIFT = 0.5  # nats between two recipes' losses, which would hide each other
BITS_16, BITS_8 = "#a6bddb", "#fdae6b"  # the colours of what is stored in so many bits
# A token's way through a layer's forward where scores multiply outputs: what is done, in how many bits the result lies.
TORCHTITAN = (
    ("copy each token\nonce per expert", BITS_16),
    ("send\n2 D bytes per\ntoken and expert", BITS_16),
    ("sort by expert,\npad", BITS_16),
    ("GEMMs w1, w3", BITS_16),
    ("SwiGLU", BITS_16),
    ("GEMM w2", BITS_16),
    ("unsort", BITS_16),
    ("send back\n2 D bytes per\ntoken and expert", BITS_16),
    ("unsort, times\nscores, sum", BITS_16),
)
OURS = (
    ("quantise each\ntoken once", BITS_8),
    ("send\n1.03 D bytes per\ntoken and GPU,\ninto place", BITS_8),
    ("GEMMs w1, w3", BITS_16),
    ("SwiGLU\nand quantise", BITS_8),
    ("GEMM w2", BITS_16),
    ("times scores,\nsum on the GPU", BITS_16),
    ("send back\n2 D bytes per\ntoken and GPU", BITS_16),
    ("sum over GPUs", BITS_16),
)


def way_of_a_token() -> Figure:
    """TorchTitan's forward of a MoE layer, and the one with ``dispatch`` among ranks of one host."""
    figure, axes = pyplot.subplots(figsize=(12, 3), layout="constrained")
    lanes = (1, "TorchTitan, bf16", TORCHTITAN), (0, "the plugin, mxfp8_2d", OURS)
    for height, name, boxes in lanes:
        axes.text(-0.2, height, name, ha="right", va="center", weight="bold")
        axes.annotate("", (len(boxes) + 0.1, height), (0, height), arrowprops={"arrowstyle": "->", "color": "0.5"})
        for place, (text, colour) in enumerate(boxes):
            box = {"boxstyle": "round", "facecolor": colour, "edgecolor": "0.3"}
            axes.text(place + 0.5, height, text, ha="center", va="center", fontsize=8.5, bbox=box)
    axes.text(0, -0.75, "result in bf16", fontsize=9, bbox={"boxstyle": "round", "facecolor": BITS_16})
    axes.text(1.4, -0.75, "result in FP8 with scales", fontsize=9, bbox={"boxstyle": "round", "facecolor": BITS_8})
    axes.text(3.6, -0.75, "D: features of a token", fontsize=9)
    title = "The experts of a MoE layer, forward: what happens to a token of DeepSeek-V3 on Hopper GPUs of one host"
    axes.set_title(title, fontsize=11)
    axes.set(xlim=(-1.7, len(TORCHTITAN) + 0.1), ylim=(-0.9, 1.4))
    axes.axis("off")
    return figure


def moe_layers() -> Figure:
    """Milliseconds of each layer's forward + backward, p50, with p20 to p80."""
    rows = read_rows(*LAYERS)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    names = {"torchtitan": "TorchTitan in bf16, compiled", "bf16": "control: our dispatch in bf16"}
    figure, axes = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    width = 0.8 / (1 + len(SHOWN))
    for place, layer in enumerate(layers):
        by_recipe = {row["way"].split()[0]: row for row in rows if row["layer"] == layer}
        for turn, recipe in enumerate(("torchtitan", *SHOWN)):
            row, label = by_recipe[recipe], names.get(recipe, recipe)
            p20, p50, p80 = (float(row[name]) / 1e3 for name in ("p20_us", "p50_us", "p80_us"))
            x = place + (turn - len(SHOWN) / 2) * width
            spread = [[p50 - p20], [p80 - p50]]
            axes.bar(x, p50, 0.92 * width, yerr=spread, color=f"C{turn}", label=label if place == 0 else None)
            if recipe != "torchtitan":
                axes.text(x, p80 + 1, f"{float(row['x']):.2f}x", ha="center", fontsize=8)
    axes.set_xticks(range(len(layers)), [tables.LAYERS[layer] for layer in layers])
    axes.set_ylabel("forward + backward, ms")
    gpus = f"{rows[0]['ranks']} {gpu_of(env_of(LAYERS[0]))}s"
    title = f"One MoE layer on {gpus}, expert parallel: median time, with 20th and 80th percentile"
    axes.set_title(f"{title}\nabove each bar: speed relative to TorchTitan in bf16", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def tokens(files: list[Path]) -> Figure:
    """Speed-up of forward + backward of one grouped GEMM by its tokens, as measured and as the ceilings allow."""
    measured, predicted = map(read_rows, files)
    measured = [row for row in measured if row["groups"] == "balanced"]
    shapes = ("8192", "5120"), ("2048", "7168")
    repeats = [int(row["repeats"]) for row in measured if (row["N"], row["K"]) in shapes and row["G"] == "8"]
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(10, 3.6), layout="constrained", sharey=True)
    for axes, (n, k) in zip(panels, shapes, strict=True):
        for turn, recipe in enumerate(SHOWN, 1):
            label = "control: our kernel in bf16" if recipe == "bf16" else recipe
            key = n, k, "8", recipe, "forward + backward"
            for rows, column, style in ((measured, "x", "-o"), (predicted, "predicted_x", ":")):
                here = [row for row in rows if tuple(row[name] for name in ("N", "K", "G", "recipe", "what")) == key]
                if points := sorted((int(row["M"]), float(row[column])) for row in here):
                    dotted = {} if style == ":" else {"label": label}
                    axes.plot(*zip(*points, strict=True), style, color=f"C{turn}", markersize=4, **dotted)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens, in 8 groups of equal size")
        axes.set_title(f"{tables.SHAPES[n, k]}'s experts: {k} features in, {n} out", fontsize=10)
    panels[0].set_ylabel("speed relative to torch in bf16")
    panels[0].legend(fontsize=8)
    title = f"One grouped GEMM of 8 experts on an {gpu_of(env_of(files[0]))}, forward + backward"
    title += f"\nlines with dots: medians of {tables.times(repeats, 0)} repeats"
    figure.suptitle(f"{title}; dotted: what the GPU's measured peak rates allow", fontsize=10)
    return figure


def over_time() -> Figure:
    """Losses of runs of the same steps by the time that they took, without the first step, which compiles."""
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    names = {"bf16": "TorchTitan in bf16", "bf16+dispatch+graph": "bf16, our dispatch"}
    names["grouped+rebase+dispatch+graph:mxfp8_2d"] = "mxfp8_2d_rebased, our dispatch"
    for index, (run, name) in enumerate(names.items()):
        rows = [row for row in read_rows(*STEPS_350) if row["run"] == run and row["step"] != "1"]
        seconds = list(accumulate(TOKENS / float(row["tokens/s"]) for row in rows))
        losses = [float(row["loss"]) for row in rows]
        axes.plot(seconds, losses, color=f"C{index}", linewidth=1, label=f"{name}: {seconds[-1]:.0f} s")
        axes.plot(seconds[-1], losses[-1], "o", color=f"C{index}", markersize=5)
    axes.set(xlabel="seconds after the first step", ylabel="loss (nats per token)", xlim=(0, None), ylim=(2.5, 8))
    axes.legend()
    title = "7 layers of DeepSeek-V3 16B on two H200s, expert parallel: steps 2 to 350 of one run each"
    axes.set_title(title, fontsize=10)
    return figure


def convergence(files: list[Path], model: str, share: float, shown: dict[str, str]) -> Figure:
    """Losses of the recipes with all seeds, each recipe's some way above the last one's, and the differences from
    bf16's: by step, and at the end with their verdicts.

    Args:
        share: the margin, as a share of bf16's loss.
        shown: what each group of runs is called, bf16's first.
    """
    runs = compare_runs.read(files)
    comparison = compare_runs.Comparison([run for name in shown for run in runs if run.group == name], share=share)
    steps, margin = comparison.steps, comparison.margin
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 8), height_ratios=(5, 4, 2), layout="constrained")
    for index, (name, curves) in enumerate(comparison.smooth.items()):
        label = f"{shown[name]}, drawn {index * SHIFT:g} higher" if index else shown[name]
        curves = curves + index * SHIFT
        top.fill_between(steps, curves.min(axis=1), curves.max(axis=1), color=f"C{index}", label=label)
    top.set(ylabel="loss (nats per token), smoothed", ylim=(3, 9.5))
    top.legend(title="from the lowest to the highest seed")
    top.set_title(f"{model} on H200s: {len(comparison.groups['bf16'])} seeds for each recipe", fontsize=11)
    comparison.plot_differences(middle)
    middle.set(xlabel="step", ylabel="loss minus bf16's")
    title = f"mean over seeds, 95% interval; dotted: the margin, {100 * share:.2g}% of bf16's loss"
    middle.set_title(title, fontsize=10)
    others, behind = list(shown)[1:], margin
    for index, name in enumerate(others, 1):
        differences, colour = comparison.differences(name), f"C{index}"
        end = compare_runs.interval(differences, 0.95)[1]
        half = end - differences.mean()
        bottom.errorbar(differences.mean(), -index, xerr=half, fmt="o", color=colour, capsize=4)
        behind, right = max(behind, end), max(margin, end) + 0.1 * margin
        bottom.text(right, -index, comparison.judge(name), va="center", color=colour, fontsize=9)
    for x in (-margin, margin):
        bottom.axvline(x, color="0.3", linewidth=0.8, linestyle=":")
    bottom.axvline(0, color="0.6", linewidth=0.8)
    bottom.set_yticks([-index for index in range(1, len(shown))], [shown[name] for name in others])
    bottom.set(xlim=(-1.5 * margin, behind + 1.7 * margin), ylim=(-len(shown) + 0.4, -0.4))
    bottom.set_xlabel("final loss minus bf16's (mean of the last tenth of the steps), 95% interval")
    return figure


def longer_run(files: list[Path]) -> Figure:
    """Losses of one run each of bf16, the default and, where a file has it, the control, and their differences."""
    bf16, default, *control = compare_runs.read(files)
    runs = [replace(run, name=f"{WAYS[run.group]}-seed{run.seed}") for run in (bf16, *control, default)]
    figure = compare_runs.Comparison(runs, share=0.0028785).figure()  # 0.005 nats
    top, bottom = figure.axes
    top.set_title("A DeepSeek-V3-style MoE model of 320M parameters on H200s: one run each, 226M tokens", fontsize=11)
    title = "smoothed; pale: 95% interval of the smoothed steps, not of other seeds; dotted: 0.005 nats"
    bottom.set_title(title, fontsize=10)
    return figure


# By file name: what draws it, and the files that it is drawn from.
PICTURES: dict[str, tuple[Callable[[], Figure], list[Path]]] = {
    "way_of_a_token.png": (way_of_a_token, []),
    "moe_layers.png": (moe_layers, LAYERS),
    "tokens.png": (partial(tokens, SCALING_FORMER), SCALING_FORMER),
    "tokens_ptxas_12_9.png": (partial(tokens, SCALING), SCALING),
    "over_time.png": (over_time, STEPS_350),
    "convergence.png": (
        partial(convergence, SEEDS, "A Llama4-style MoE model of 111M parameters", 0.005, RECIPES),
        SEEDS,
    ),
    "convergence_320m.png": (  # 0.005 nats
        partial(convergence, DEFAULT, "A DeepSeek-V3-style MoE of 320M parameters", 0.00138885, WAYS),
        DEFAULT,
    ),
    "convergence_320m_fourteen_seeds.png": (  # 0.005 nats
        partial(convergence, FOURTEEN, "A DeepSeek-V3-style MoE of 320M parameters", 0.00139063, AS_GRAPHS),
        FOURTEEN,
    ),
    "longer_320m.png": (partial(longer_run, LONGER[:1]), LONGER[:1]),
    "longer_320m_control.png": (partial(longer_run, LONGER), LONGER),
}


def source(files: list[Path]) -> str:
    """The files, each with a hash of what it holds."""
    hashes = {path: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}
    return ", ".join(f"{path.relative_to(ROOT)} {value}" for path, value in hashes.items())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pyplot.switch_backend("Agg")
    OUT.mkdir(exist_ok=True)
    for name, (draw, files) in PICTURES.items():
        figure = draw()
        figure.savefig(OUT / name, dpi=110, metadata={"Source": source(files)})
        pyplot.close(figure)
        print(OUT / name)


if __name__ == "__main__":
    main()
