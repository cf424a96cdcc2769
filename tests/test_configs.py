"""train_configs/ at full world size: every config is laid out, wrong layouts are refused with the reason."""

import logging
import re
import sys
from collections import Counter
from dataclasses import asdict
from math import inf
from pathlib import Path

import pytest
from script_calls import programs, shell
from tiers import daily
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import moe
from torchtitan.protocols import train_spec

from scripts import check_configs
from titan_mxfp8.backends import recommend
from titan_mxfp8.backends.hardware import CLUSTER_GPUS
from titan_mxfp8.tools.dry_run import Report, converted_model, dry_run, fake_processes, multiplied_here, parse_config
from titan_mxfp8.tools.memory import GIB

ROOT = Path(__file__).parent.parent
TOMLS = {path.stem: path for path in sorted((ROOT / "train_configs").glob("*.toml"))}
CLUSTER_TOMLS = {name: path for name, path in TOMLS.items() if re.search(r"_\d+x\d+$", name)}
LLAMA4 = "llama4_17bx16e_8x8"
EXACT = tuple(f"--quantize.{kind}.mx.recipe_name=mxfp8_2d" for kind in ("linear", "grouped_mm"))

# Others have the layers of these.
LAID_OUT_DAILY = ("debug_gpt_oss", "debug_llama3", "moe_100m", "deepseek_v3_671b_64x8", "llama4_17bx16e_2layers_1x4")

# Billions of parameters that the models' publishers state.
SIZES = {"llama4_17bx16e": 109, "llama4_17bx128e": 400, "deepseek_v3_16b": 16, "deepseek_v3_671b": 671}
SIZES |= {"gpt_oss_20b": 20.9, "llama4_17bx16e_2layers": 6.47}


TOO_FEW_GPUS = ((LLAMA4, 1), ("llama4_17bx128e_8x8", 1), ("deepseek_v3_671b_64x8", 1), ("deepseek_v3_671b_64x8", 8))


def check(name: str, *overrides: str) -> Report:
    return dry_run(parse_config(str(TOMLS[name]), overrides))


@pytest.mark.parametrize("name", daily(TOMLS, *LAID_OUT_DAILY))
def test_every_config_can_be_laid_out_at_its_full_size(name: str) -> None:
    report = check(name)
    assert any(module.endswith("experts") for module in report.converted) or "llama3" in name
    assert 0.3 < report.mxfp8_share < 1
    if name not in CLUSTER_TOMLS:
        return
    model, nodes, gpus = re.fullmatch(r"(.*)_(\d+)x(\d+)", name).groups()
    assert report.world_size == int(nodes) * int(gpus)
    # the furthest are 109, stated rounded up from 107.8, and 16 for 15.7
    assert report.parameters / 1e9 == pytest.approx(SIZES[model], rel=0.02)
    assert report.mesh.get("dp_replicate", 1) * report.mesh["fsdp"] == report.world_size
    # Nothing is lost or held twice: the shards of one replica are the model. TorchTitan's gpt-oss is mostly bf16.
    itemsize = 2.11 if model == "gpt_oss_20b" else 4
    assert report.memory.parameters * report.mesh["fsdp"] / report.parameters == pytest.approx(itemsize, rel=0.001)


@pytest.mark.parametrize("name", [name for name in CLUSTER_TOMLS if "layers" not in name])
def test_a_cluster_takes_the_recipe_that_the_readme_names_for_its_gpu(name: str) -> None:
    config = parse_config(str(TOMLS[name]))
    gpu = "H200" if config.cluster.gpu in ("H20", "H100") else config.cluster.gpu  # their rows say "as H200"
    row = rf"^\| NVIDIA [^|]*\b{gpu}\b[^|]*\| `(\w+)` \|"
    named = re.search(row, (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    mx = config.quantize.grouped_mm.mx, config.quantize.linear.mx
    hardware = CLUSTER_GPUS[config.cluster.gpu]
    assert [recommend(each.recipe_name, each.backend, hardware, each.hopper_rebase).name for each in mx] == [named] * 2
    assert recommend("auto", "auto", hardware).name == named


@pytest.mark.parametrize("name", TOMLS)
def test_the_bf16_half_of_a_pair_differs_in_the_converters_only(name: str) -> None:
    eager = "--training.cuda_graph=off"  # as auto becomes where TorchTitan dispatches the tokens
    mxfp8, bf16 = (asdict(parse_config(str(TOMLS[name]), [eager, *flags])) for flags in ([], ["--model.converters="]))
    assert mxfp8["model"].pop("converters") and bf16["model"].pop("converters") == []
    assert mxfp8["checkpoint"]["last_save_model_only"] is False, "a finished run can be extended"
    assert mxfp8 == bf16 and "MXFP8" not in bf16["job"]["description"], "which both log"


def test_the_published_run_on_64_nodes_of_4() -> None:
    config = parse_config(str(TOMLS["llama4_17bx16e_64x4"]))
    assert (config.training.seq_len, config.training.local_batch_size, config.training.dataset) == (8192, 1, "c4")
    assert (config.optimizer.lr, config.lr_scheduler.warmup_steps, config.training.steps) == (1e-4, 2000, 3000)
    report = dry_run(config)
    assert report.mesh == {"fsdp": 256, "ep": 16, "efsdp": 16}
    blocks = ("attention.wq", "attention.wo", "moe.experts", *(f"moe.shared_experts.w{i}" for i in (1, 2, 3)))
    assert report.converted == Counter({f"layers.*.{name}": 48 for name in blocks})
    left = ("attention.wk", "attention.wv", "moe.router.gate")
    assert report.left == Counter({f"layers.*.{name}": 48 for name in left}) + Counter(["output"])
    # By hand: 6 FLOPs a weight in wq and wo (2 x 5120^2) and four times w1, w2, w3 (shared and one routed expert);
    # left are wk, wv, gate, output, norms, and attention's 6 x 40 heads x 2 x 128 x 8192.
    converted = 48 * (2 * 5120**2 + 2 * 3 * 8192 * 5120)
    whole = converted + 48 * (2 * 1024 * 5120 + 16 * 5120 + 40 * 256 * 8192 + 2 * 5120) + 202048 * 5120 + 5120
    assert report.mxfp8_share == pytest.approx(converted / whole, rel=1e-9)


def test_a_bf16_weight_gradient_and_bf16_runs_lower_the_share() -> None:
    full = check("debug_llama4").mxfp8_share
    recipes = [f"--quantize.{kind}.mx.recipe_name=mxfp8_wgrad_bf16" for kind in ("linear", "grouped_mm")]
    assert check("debug_llama4", *recipes).mxfp8_share == pytest.approx(full * 2 / 3)
    assert check("debug_llama4", "--model.converters=").mxfp8_share == 0


def test_the_memory_estimate_against_the_measured_peak() -> None:
    """4 x H200, bf16, compiled, torch 2.11: TorchTitan logged a peak of 70.9 GiB reserved. The estimate is 70.9."""
    report = check("llama4_17bx16e_2layers_1x4", "--model.converters=")
    assert report.memory.total / GIB == pytest.approx(70.9, rel=0.05)


# Not compiled: blocks are compiled in other parts if FSDP takes their experts, who have so many weights on a rank.
TWO_LAYERS = "llama4_17bx16e_2layers_1x4", "--cluster.gpu=H200", "--compile.no-enable", "--training.local_batch_size=1"
EXPERTS = 4 * 3 * 8192 * 5120


def test_nothing_is_gathered_of_experts_out_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """But backward gets their weights as forward has quantised them: in FP8, with a scale for 32x128."""
    out = check(*TWO_LAYERS).memory
    monkeypatch.setattr("titan_mxfp8.plugin.experts.RoutedExperts.needs_fsdp", "a test")
    taken = check(*TWO_LAYERS).memory
    assert out.parameters == taken.parameters
    assert taken.gathered - out.gathered == 2 * 2 * EXPERTS  # the output layer has the largest gradient
    assert out.activations - taken.activations == 2 * EXPERTS * (1 + 1 / 4096)


def test_what_a_step_of_two_microbatches_keeps_of_weights() -> None:
    """In place of what each block keeps for its backward, and for forward too."""
    two, field = "--training.global_batch_size=8", "--quantize.grouped_mm.mx.quantize_weights_once"
    on, auto, off = (check(*TWO_LAYERS, two, f"{field}={value}").memory.activations for value in ("on", "auto", "off"))
    assert on - off == 2 * EXPERTS * (1 + 1 / 4096) and auto == off
    assert check(*TWO_LAYERS, f"{field}=on").memory.activations == off


@pytest.mark.nightly
def test_what_lowers_the_memory() -> None:
    def activations(*flags: str) -> float:
        return check(LLAMA4, "--cluster.gpu=", *flags).memory.activations

    mode = "--activation_checkpoint.mode="
    full, none = activations(f"{mode}full"), activations(f"{mode}none")
    every_second = activations(f"{mode}selective", "--activation_checkpoint.selective_ac_option=2")
    op = (f"{mode}selective", "--activation_checkpoint.selective_ac_option=op")
    bf16_by_op, by_op = activations(*op, "--model.converters="), activations(*op)
    assert full < bf16_by_op < every_second < none
    assert bf16_by_op < by_op < none  # every MXFP8 GEMM's output is saved, of torch's every second
    assert activations(f"{mode}full", "--training.local_batch_size=3") == pytest.approx(3 * full)


EAGER = ("--activation_checkpoint.mode=none", "--compile.no-enable")
OF_TWO_LAYERS = ("--model.study_flavors", "--model.flavor=17bx16e_2layers")


def saved(*flags: str, recipe: str = "", gpu: str = "GB200") -> float:
    """Bytes that each of Llama4's blocks saves of each of 8192 tokens, without checkpointing or compilation."""
    recipes = [f"--quantize.{kind}.mx.recipe_name={recipe}" for kind in ("linear", "grouped_mm") if recipe]
    config = parse_config(str(TOMLS[LLAMA4]), [f"--cluster.gpu={gpu}", *OF_TWO_LAYERS, *EAGER, *recipes, *flags])
    return dry_run(config, fill=inf).memory.activations / 2 / 8192


def test_what_mxfp8_saves_depends_on_recipe_gpu_and_options() -> None:
    """The rows of titan_mxfp8/numerics.md that begin with "saved: x"."""
    # The inputs of wq, wo, w1, w3 and w2 of the shared expert, and of the routed one, whose w1 and w3 share theirs and
    # whose h is not kept.
    inputs = 2 * 5120 + (2 * 5120 + 8192) + 5120
    off = "--quantize.grouped_mm.mx.dispatch=off"
    requantized = [f"--quantize.{kind}.mx.requantize_input" for kind in ("linear", "grouped_mm")]
    bf16, exact = saved("--model.converters="), saved(off, recipe="mxfp8_2d", gpu="H100")
    # What bf16 keeps once: wq's input is wk's and wv's too, the shared w1's is w3's and the router's, and wo's is
    # attention's output. Routed experts keep gate and up alone, from which backward makes silu(gate) and h.
    assert exact - bf16 == 2 * 4 * 5120 - 2 * 2 * 8192
    assert saved(off, recipe="mxfp8", gpu="H100") == saved(off, *requantized, recipe="mxfp8", gpu="H100") == exact
    assert exact - saved(off, *requantized, recipe="mxfp8_2d", gpu="H100") == inputs * (1 - 1 / 32)
    # FP8 along the tokens: those of an expert are padded to whole blocks.
    rebased, in_blocks = saved(off, recipe="mxfp8_2d_rebased", gpu="H100"), saved(off, recipe="mxfp8")
    assert exact - rebased == pytest.approx(inputs * (1 - 1 / 128), rel=0.01)
    assert exact - in_blocks == pytest.approx(inputs * (1 - 1 / 32), rel=0.01)


def test_what_a_layer_saves_that_dispatches_its_tokens() -> None:
    """A row in FP8 with its scales in place of one in bf16; gate and up as they are."""
    experts = "--model.converters=quantize.grouped_mm.mx"
    names = (f"--quantize.grouped_mm.mx.recipe_name={recipe}" for recipe in ("bf16", "mxfp8", "mxfp8_2d_rebased"))
    bf16, exact, rebased = (saved(experts, name, gpu="H100") for name in names)
    assert (bf16 - exact, bf16 - rebased) == (5120 * (1 - 1 / 32), 5120 * (1 - 1 / 128))


def test_weights_are_kept_for_dgrad_where_fsdp_does_not_free_them() -> None:
    """In FP8 with a scale for 32x32, in place of the copy in bf16 of a weight in fp32."""

    def activations(recipe: str, processes: int) -> float:
        recipes = [f"--quantize.{kind}.mx.recipe_name={recipe}" for kind in ("linear", "grouped_mm")]
        layout = ("--cluster.gpu=H200", f"--cluster.gpus_per_node={processes}", "--quantize.grouped_mm.mx.dispatch=off")
        return check("debug_llama4", *EAGER, *layout, *recipes).memory.activations

    config = parse_config(str(TOMLS["debug_llama4"]))
    with fake_processes(1):
        model, _ = converted_model(config, ParallelDims(*[1] * 7, world_size=1))
    converted = [module for module in model.modules() if hasattr(module, "mxfp8")]
    weights = sum(param.numel() for module in converted for param in module.parameters(recurse=False))
    assert activations("mxfp8", 1) - activations("mxfp8_2d", 1) == weights * (1 - 1 / 1024)
    assert activations("mxfp8", 2) == activations("mxfp8_2d", 2)


@pytest.mark.nightly
def test_compiled_blocks_save_less_and_dry_runs_leave_torchtitan_as_it_was() -> None:
    experts = moe._run_experts_grouped_mm
    flags = ("--cluster.gpu=", "--activation_checkpoint.mode=none")
    for converted in ([], ["--model.converters="]):
        eager = check(LLAMA4, *flags, "--compile.no-enable", *converted).memory.activations
        assert check(LLAMA4, *flags, *converted).memory.activations < 0.95 * eager
    assert moe._run_experts_grouped_mm is experts


MX, TP = "quantize.grouped_mm.mx", "parallelism.tensor_parallel_degree"
REPLICATE, SHARD = (f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard"))
# A config, flags without their dashes, what is said.
REFUSED = [
    (LLAMA4, "parallelism.expert_parallel_degree=32", "expert_parallel_degree 32 does not divide the 16 exp"),
    (LLAMA4, "parallelism.expert_parallel_degree=6", "6 x .* does not divide the 64 ranks"),
    (LLAMA4, "cluster.nodes=7", r"does not fit 56 processes: .*dp_shard\(64\).* Start as many"),
    (LLAMA4, "training.seq_len=8191", "seq_len 8191 is no multiple of 2 ="),
    (LLAMA4, "training.global_batch_size=100", "100 is no multiple of 64"),
    (
        LLAMA4,
        "training.local_batch_size=8",
        r"fit: 12\d\.\d GiB .*70% of H100's 74.5 GiB. To fit: .* lower training.loc",
    ),
    (LLAMA4, "activation_checkpoint.mode=none", "more GPUs, set activation_checkpoint.mode = 'full' or lower train"),
    ("llama4_17bx128e_8x8", f"{MX}.hopper_rebase", rf"\[{MX}\] .*is rebased, but backend 'sm100' \(for NVIDIA B200"),
    (LLAMA4, "validation.enable validation.seq_len=16384", "validation.seq_len = 16384 is more than training.seq_len"),
    (LLAMA4, "model.flavor=18b", "no flavor '18b': use one of .*17bx16e"),
    (LLAMA4, "optimizer.name=AdamX", "optimizer.name = 'AdamX': TorchTitan knows Adam, AdamW"),
    (LLAMA4, "cluster.nodes=0", r"\[cluster\] nodes and gpus_per_node are 1 at least"),
    (LLAMA4, "cluster.gpu=A100", "'A100' is unknown: use one of H20, H100"),
    (LLAMA4, "parallelism.pipeline_parallel_degree=2 cluster.nodes=16", "pipeline.* cannot be checked"),
    (LLAMA4, f"{TP}=16 {SHARD}=4 compile.components=loss", "16 does not divide the 40 attention heads"),
    (
        "deepseek_v3_16b_8x8",
        f"{TP}=8 {REPLICATE}=1 model.converters={MX},quantize.linear.mx",
        r"layers\.0\.feed_forward\.w1\.weight .* cannot be split between 8 tp ranks: each would get 1368 of 10944",
    ),
    (
        "deepseek_v3_16b_64x8",
        f"{REPLICATE}=1 {SHARD}=512 parallelism.expert_parallel_degree=2",
        "TorchTitan cannot lay out .*uneven sharding on dim 1.*1408",
    ),
]


@pytest.mark.parametrize("name, flags, message", REFUSED)
def test_a_wrong_layout_is_refused_with_the_reason(name: str, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(name, *(f"--{flag}" for flag in flags.split()))


def test_layouts_that_training_takes_are_laid_out() -> None:
    """Compiled, with a memory budget; where expert tensor parallelism shards all of the experts; offloaded."""
    compiled = "--compile.enable", "--compile.components=model,loss", "--activation_checkpoint.mode=memory_budget"
    budgets = [check("debug_llama4", *compiled, f"--activation_checkpoint.memory_budget={part}") for part in (0.1, 0.9)]
    assert budgets[0].memory.activations < budgets[1].memory.activations
    degrees = "data_parallel_shard", "tensor_parallel", "expert_parallel", "expert_tensor_parallel"
    flags = [f"--parallelism.{name}_degree=2" for name in degrees]
    assert check("debug_llama4", "--cluster.gpus_per_node=4", *flags).out_of_fsdp > 0
    flags = "--cluster.gpus_per_node=2", "--training.enable_cpu_offload"
    stays, leaves = check("debug_llama4", flags[0]), check("debug_llama4", *flags)
    assert stays.memory.optimizer > leaves.memory.optimizer == leaves.memory.parameters == 0


def test_a_custom_import_brings_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To a dry run and to the doctor, as to a training."""
    monkeypatch.setattr(train_spec, "_extra_train_specs", {})
    monkeypatch.syspath_prepend(tmp_path)
    code = 'from torchtitan.protocols.train_spec import *\nregister_train_spec("own", get_train_spec("llama4"))\n'
    (tmp_path / "brings_a_model.py").write_text(code)
    flags = "--experimental.custom_import=brings_a_model", "--model.name=own"
    assert check("debug_llama4", *flags).model == "own"
    assert list(multiplied_here(str(TOMLS["debug_llama4"]), flags)) == [MX, "quantize.linear.mx"]


def test_a_cluster_captures_cuda_graphs_wherever_its_config_is_checked() -> None:
    """``train.slurm`` looks at a config without GPUs, and ended each job whose config has ``on``."""
    on = "--training.cuda_graph=on"
    assert parse_config(str(TOMLS["deepseek_v3_16b_1x8"]), [on]).training.cuda_graph == "on"
    with pytest.raises(ValueError, match="pipeline parallelism: set pipeline_parallel_degree = 1"):
        parse_config(str(TOMLS["deepseek_v3_16b_1x8"]), [on, "--parallelism.pipeline_parallel_degree=2"])


def test_a_cluster_whose_gpu_is_not_named_may_capture_cuda_graphs() -> None:
    on, unknown, bf16 = "--training.cuda_graph=on", "--cluster.gpu=", "--model.converters="
    for flags in ([on, unknown], [on, "--parallelism.expert_parallel_degree=1", unknown, bf16]):
        assert parse_config(str(TOMLS["deepseek_v3_16b_1x8"]), flags).training.cuda_graph == "on"
    with pytest.raises(ValueError, match="pipeline parallelism: set pipeline_parallel_degree = 1"):
        parse_config(str(TOMLS["deepseek_v3_16b_1x8"]), [on, unknown, "--parallelism.pipeline_parallel_degree=2"])
    assert check("debug_llama4", on).card is None


@pytest.mark.nightly
@pytest.mark.parametrize("name, nodes", TOO_FEW_GPUS)
def test_layouts_that_have_no_config_would_not_fit_the_largest_card(name: str, nodes: int) -> None:
    gpus = 8 * nodes
    layout = [f"--cluster.nodes={nodes}", f"--parallelism.data_parallel_shard_degree={gpus}"]
    smallest = ["--training.local_batch_size=1", "--activation_checkpoint.mode=full", "--cluster.gpu=GB200"]
    with pytest.raises(ValueError, match=r"does not fit: .* GB200"):
        check(name, *layout, f"--parallelism.expert_parallel_degree={min(gpus, 16)}", *smallest, *EXACT)


# What is wrong with a debug config, as (old line, new lines), and what is said of it; test_plugin.py has more.
WRONG = {
    "types": ('["output", "router.gate"]', "[1]", "filter_fqns = [1]: it must be a list of strings"),
    "package": ("titan_mxfp8.plugin", "titan_mxfp8", "use 'titan_mxfp8.plugin'. Set it to"),
    "module": ("titan_mxfp8.plugin", "nope", "No module named 'nope'. Set it to 'titan_mxfp8.plugin'"),
    "no_module": ('custom_config_module = "titan_mxfp8.plugin"', "", "brings no fields of titan_mxfp8. Set it to"),
    "flavor": ("study_flavors = true", "study_flavors = false", "or set model.study_flavors = true"),
    "optimizer": ("[optimizer]", "[optimizer]\nnope = 1", "Invalid field names"),
}


def test_the_script_reports_each_config_and_fails_if_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = TOMLS["debug_llama4"].read_text()
    wrong = [tmp_path / "none.toml"]
    for name, (old, new, _) in WRONG.items():
        wrong.append(tmp_path / f"{name}.toml")
        assert right.count(old) == 1
        wrong[-1].write_text(right.replace(old, new))
    monkeypatch.chdir(tmp_path)  # where one lies; the other is the repository's
    good, bad = "train_configs/llama4_17bx16e_2layers_1x4.toml", Path("too_large.toml")
    bad.write_text(TOMLS[Path(good).stem].read_text().replace("local_batch_size = 4", "local_batch_size = 64"))
    configs = [TOMLS["debug_llama4"], *wrong, good, bad]
    flags = ["--cluster.gpu=H200", "--activation_checkpoint.mode=full"]
    monkeypatch.setattr(sys, "argv", ["check_configs.py", *map(str, configs), *flags])
    try:
        assert check_configs.main() == 1
    finally:
        logging.disable(logging.NOTSET)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert f"ok   {good}" in lines
    assert "  mesh       fsdp 4, ep 4" in lines
    assert any(line.startswith(f"FAIL {bad}: does not fit") for line in lines)
    for name, (_, _, message) in WRONG.items():
        (failure,) = (line for line in lines if line.startswith(f"FAIL {tmp_path}/{name}.toml: "))
        assert message in failure
    missing = f"FAIL {tmp_path}/none.toml: no such file, here or in the repository: ls {ROOT}/train_configs"
    assert missing in lines
    assert lines[-1] == f"2 of {len(configs)} configs can be trained as they are laid out"
    assert printed.err == ""


@pytest.mark.integration
def test_check_configs_finds_a_config_in_the_callers_folder(tmp_path: Path) -> None:
    """With a Python that says where it is called, and how."""
    programs(tmp_path, {"python": 'pwd; echo "$@"; echo "GPUs $CUDA_VISIBLE_DEVICES"'})
    done = shell("sh", "-c", f"cd {tmp_path} && {ROOT}/scripts/check_configs.sh own.toml --x=1", PYTHON="./python")
    assert done.stdout == f"{tmp_path}\n{ROOT}/scripts/check_configs.py own.toml --x=1\nGPUs \n", done.stderr
