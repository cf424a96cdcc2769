"""The plugin's config: fields, names, defaults, and what a bad config gets before anything is built; TorchTitan on a
machine without accelerators, and the flavors for studies."""

import copy
import logging
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchtitan.config import ConfigManager, JobConfig, job_config
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.moe import MoE
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import train_spec
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8 import modules
from titan_mxfp8.backends.hardware import CLUSTER_GPUS, override_hardware
from titan_mxfp8.plugin import checks, flavors
from titan_mxfp8.plugin.converters import GroupedMMConverter
from titan_mxfp8.plugin.experts import RoutedExperts
from titan_mxfp8.plugin.flavors import register_flavors
from titan_mxfp8.plugin.job_config import Job, Model, MXGroupedMM, MXLinear, Quantize
from titan_mxfp8.tools.dry_run import converted_model
from titan_mxfp8.workarounds.cpu import CpuDevice

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "train_configs"
TOMLS = sorted(CONFIGS.glob("debug_*.toml"))
PLUGIN = "--job.custom_config_module=titan_mxfp8.plugin"
ASSETS = [f"--model.hf_assets_path={CONFIGS}/assets/tokenizer", "--training.dataset=c4_test"]
ASSETS += [f"--training.dataset_path={CONFIGS}/assets/kjv"]
VALIDATE = ["--validation.enable", *(flag.replace("training", "validation") for flag in ASSETS[1:])]
VALIDATE += ["--training.seq_len=1024", "--validation.seq_len=1024"]
ROW = b'{"text": "a"}\n'
GROUPED, LINEAR = "quantize.grouped_mm.mx", "quantize.linear.mx"
EXPERTS, LINEARS = f"--model.converters={GROUPED}", f"--model.converters={LINEAR}"
REBASE = f"--{GROUPED}.hopper_rebase"
RECIPE, DISPATCH, ROWS = (f"--{GROUPED}.{field}" for field in ("recipe_name", "dispatch", "dispatch_rows"))


def parse(*flags: str) -> JobConfig:
    return ConfigManager().parse_args([PLUGIN, *ASSETS, *flags])


def convert(config: JobConfig, name: str = "llama4", flavor: str = "debugmodel_2layers") -> nn.Module:
    """The model on the meta device."""
    register_flavors()
    config.model.name, config.model.flavor, config.model.study_flavors = name, flavor, True
    return converted_model(config, ParallelDims(*[1] * 7, world_size=1))[0]


def kinds(model: nn.Module) -> dict[str, int]:
    classes = {"linears": modules.MXFP8Linear, "experts": RoutedExperts}
    return {name: sum(isinstance(module, cls) for module in model.modules()) for name, cls in classes.items()}


def test_each_converter_converts_its_kind_and_nothing_else() -> None:
    model = convert(parse(EXPERTS))
    assert kinds(model) == {"linears": 0, "experts": 1}
    assert type(model.layers["1"].moe.shared_experts.w1) is nn.Linear
    assert isinstance(model.layers["1"].moe.experts, GroupedExperts)
    # 4 of attention in each layer, 3 of the dense layer's feed-forward, 3 of the shared expert
    assert kinds(convert(parse(LINEARS))) == {"linears": 14, "experts": 0}
    flag = "--quantize.linear.mx.filter_fqns=output,router.gate,attention.wk,attention.wv"
    assert kinds(convert(parse(LINEARS, flag))) == {"linears": 10, "experts": 0}


# Linears and expert modules that each TOML converts: of 2 layers, the first dense in llama4 and deepseek_v3.
CONVERTED = {"llama4": (14, 1), "deepseek_v3": (14, 1), "qwen3": (8, 2), "gpt_oss": (8, 2), "llama3": (14, 0)}


@pytest.mark.parametrize("toml", TOMLS, ids=lambda path: path.stem)
def test_a_debug_toml_parses_converts_and_its_model_is_exported_and_read_back(
    toml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ``checkpoint.last_save_in_hf`` saves it, and ``initial_load_in_hf`` loads it."""
    monkeypatch.chdir(ROOT)
    config = ConfigManager().parse_args([f"--job.config_file={toml}"])
    assert config.metrics.enable_wandb and config.metrics.enable_tensorboard
    model, args = converted_model(config, ParallelDims(*[1] * 7, world_size=1))
    assert (*kinds(model).values(),) == CONVERTED[toml.stem.removeprefix("debug_")]

    weights = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    adapter = get_train_spec(config.model.name).state_dict_adapter(args, None)
    exported = adapter.to_hf(weights)
    save_file(exported, tmp_path / "model.safetensors")
    assert sum(value.numel() for value in exported.values()) == sum(value.numel() for value in weights.values())
    room = adapter.to_hf({name: torch.zeros_like(param) for name, param in weights.items()})
    for name, value in load_file(tmp_path / "model.safetensors").items():
        room[name].copy_(value)
    read = adapter.from_hf(room)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], value) for name, value in weights.items())


def test_existing_tomls_keep_working(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As written for TorchTitan's own converters: every field it has, fqns as a plain string."""
    toml = tmp_path / "old.toml"
    toml.write_text(
        f"""
        [job]
        custom_config_module = "titan_mxfp8.plugin"
        [model]
        converters = ["{LINEAR}", "{GROUPED}"]
        [quantize.linear.mx]
        recipe_name = "mxfp8_cublas"
        mxfp8_dim1_cast_kernel_choice = "cuda"
        filter_fqns = ["output"]
        [quantize.grouped_mm.mx]
        recipe_name = "mxfp8"
        fqns = "experts"
        """
    )
    config = ConfigManager().parse_args([f"--job.config_file={toml}", *ASSETS])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "mxfp8_dim1_cast_kernel_choice = 'cuda' has no effect" in warnings[0], warnings
    model = convert(config)
    assert kinds(model) == {"linears": 14, "experts": 1}
    assert model.layers["0"].attention.wq.mxfp8.recipe.name == "mxfp8_floor"
    assert model.layers["1"].moe.experts.mxfp8.recipe.name == "mxfp8"


def test_only_a_field_without_effect_that_was_set_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for theirs, ours in ((job_config.MXLinear, MXLinear), (job_config.MXGroupedMM, MXGroupedMM)):
        ignored = {field.name for field in fields(theirs)} - {field.name for field in fields(ours)}
        assert ignored == ({"mxfp8_dim1_cast_kernel_choice"} if ours is MXLinear else set())
    parse(LINEARS)
    parse(EXPERTS, "--quantize.linear.mx.mxfp8_dim1_cast_kernel_choice=torch")
    assert "has no effect" not in caplog.text


def test_a_config_module_of_the_user_can_extend_the_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan takes one ``custom_config_module``."""
    (tmp_path / "own_config.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from titan_mxfp8.plugin import JobConfig as MX\n"
        "@dataclass\n"
        "class Own:\n"
        "    depth: int = 3\n"
        "@dataclass\n"
        "class JobConfig(MX):\n"
        "    own: Own = field(default_factory=Own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = [EXPERTS, "--own.depth=5", "--quantize.grouped_mm.mx.recipe_name=mxfp8_2d", REBASE]
    config = ConfigManager().parse_args(["--job.custom_config_module=own_config", *ASSETS, *flags])
    assert config.own.depth == 5 and config.quantize.grouped_mm.mx.fqns == ["experts"]
    assert config.quantize.linear.mx.filter_fqns == ["output", "router.gate"] and config.quantize.health_every == 0
    experts = convert(config).layers["1"].moe.experts
    assert experts.mxfp8.recipe.name == "mxfp8_2d_rebased"
    with pytest.raises(ValueError, match="unknown recipe"):
        ConfigManager().parse_args(["--job.custom_config_module=own_config", *ASSETS, *flags, f"{RECIPE}=mxfp9"])


@dataclass
class Own:
    speed: int = 1


@dataclass
class OwnConfig:
    own: Own = field(default_factory=Own)


def test_a_config_without_our_fields_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan's own, and that of somebody whose config module does not extend the plugin's."""
    monkeypatch.setitem(sys.modules, "own_config", SimpleNamespace(JobConfig=OwnConfig))
    own, words = "--job.custom_config_module=own_config", "fields this config lacks.* to 'titan_mxfp8.plugin'"
    for flags in ([], [own], [own, "--own.speed=2", "--model.converters=quantize.linear.float8"]):
        config = ConfigManager().parse_args([*ASSETS, *flags])
        assert not hasattr(config, "cluster") and not hasattr(config.quantize, "health_every")
        assert (own in flags) == hasattr(config, "own")
        config.model.converters = []
        build_model_converters(config, None).convert(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=words):
        ConfigManager().parse_args([*ASSETS, own, EXPERTS])
    config = job_config.JobConfig()
    config.model.converters = [GROUPED]
    with pytest.raises(ValueError, match=words):
        build_model_converters(config, None)


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{EXPERTS} {RECIPE}=mxfp4", r"grouped_mm.*'mxfp4'.*mxfp8_2d"),
        (f"{LINEARS} --{LINEAR}.recipe_name=float8", "unknown recipe 'float8'"),
        (f"{LINEARS} --{LINEAR}.backend=cutlass", "unknown backend 'cutlass'"),
        (f"{LINEARS} --{LINEAR}.hopper_rebase_report=5", r"linear.mx\] .*a recipe that is rebased, not 'mxfp8'"),
        (f"{EXPERTS} {REBASE} {REBASE}_report=-1", "number of steps, or 0 for never, got -1"),
        (f"{EXPERTS} {ROWS}=all", "dispatch_rows is one of counted, bounded, worst_case, or a factor .* got 'all'"),
        (f"{EXPERTS} {DISPATCH}=off {ROWS}=1.25", "dispatch_rows = '1.25' and dispatch = 'off'"),
        (f"{EXPERTS} {DISPATCH}=off {RECIPE}=bf16", "'bf16' is the control of dispatch: without it, leave the experts"),
        (f"{EXPERTS} {RECIPE}=bf16 {REBASE}", "'bf16' quantises nothing"),
        (f"{LINEARS} --{LINEAR}.recipe_name=bf16", "is the control of dispatch: without it, leave the linears out"),
        (f"{LINEARS},quantize.grouped_mm.float8", "mixes quantisation formats"),
        (f"--model.converters=quantize.linear.float8,{GROUPED}", "mixes quantisation formats"),
        (f"{EXPERTS},quantize.nope.mx", r"has 'quantize.nope.mx', which nobody registered: use"),
        (f"{EXPERTS} --quantize.health_every=5", "5 has nowhere to log to: set metrics.enable_tensorboard"),
        ("--optimizer.name=AdamX", "optimizer.name = 'AdamX': TorchTitan knows Adam, AdamW"),
        ("--model.hf_assets_path=/nonexistent", "holds no tokenizer.*make_data.py"),
        ("--training.dataset_path=/nonexistent", r"holds no data.jsonl.*make_data.py"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_parsed(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*flags.split())
    if "mixes" in message:  # a config that was built in Python is never parsed
        config = parse()
        config.model.converters = flags.partition("=")[2].split(",")
        with pytest.raises(ValueError, match=message):
            GroupedMMConverter(config, None)


@pytest.mark.parametrize(
    "section, value, message",
    [
        (LINEAR, "filter_fqns = [1]", r"filter_fqns = \[1\]: it must be a list of strings"),
        (GROUPED, "backend = 1", "quantize.grouped_mm.mx.backend = 1: it must be a string"),
        (GROUPED, 'requantize_input = "false"', "grouped_mm.mx.requantize_input = 'false': it must be true or false"),
        ("model", "converters = [1]", r"model.converters = \[1\]: it must be a list of strings"),
        ("activation_checkpoint", "selective_ac_option = 0", "selective_ac_option = '0': use 'op'"),
        ("cluster", "nodes = 2.0", "cluster.nodes = 2.0: it must be a whole number"),
        ("optimizer", 'lr = "1e-3"', "optimizer.lr = '1e-3': it must be a number"),
        ("activation_checkpoint", 'mode = "None"', "'None': it must be one of 'selective', 'full', 'memory_budget'"),
        ("training", 'cuda_graph = "yes"', "training.cuda_graph = 'yes': it must be one of 'off', 'on', 'auto'"),
        (GROUPED, 'quantize_weights_once = "yes"', "quantize_weights_once = 'yes': it must be one of 'off', 'on'"),
        (GROUPED, 'dispatch = "deepep"', "dispatch = 'deepep': it must be one of 'off', 'auto', 'collective', 'sy"),
        ("debug", 'seed = "0"', "debug.seed = '0': it must be a whole number"),
    ],
)
@pytest.mark.filterwarnings("ignore:The field:UserWarning")
def test_a_value_of_another_type_in_a_toml_is_refused(section: str, value: str, message: str, tmp_path: Path) -> None:
    toml = tmp_path / "wrong.toml"
    toml.write_text(f"[{section}]\n{value}\n")
    with pytest.raises(ValueError, match=message):
        parse(f"--job.config_file={toml}")


def test_health_may_be_logged_to_either_and_needs_no_log_without_converters() -> None:
    every = "--quantize.health_every=5"
    for flag in ("--metrics.enable_tensorboard", "--metrics.enable_wandb"):
        assert parse(EXPERTS, every, flag).quantize.health_every == 5
    assert parse("--model.converters=", every).quantize.health_every == 5


def test_data_without_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte order mark and empty lines are none of our business; all rows are rank 0's."""
    for text, message in (
        (b'\n{"content": "a", "id": 1}\n', r"data.jsonl, line 2 has 'content', 'id', and no text: each line must"),
        (b'["a"]\n', r"line 1 is \['a'\], and no text"),
        (b"In the beginning\n", "line 1 is no JSON"),
        (b" \n\n", "has no rows: each line must"),
        (ROW * 2 + b"\n" + b'{"text": null}\n', "line 4 has 'text', and no text"),
        (ROW * 2 + '{"text": "é"}'.encode("latin-1"), "line 3 is no JSON in UTF-8 .*can't decode byte"),
        (b"\xef\xbb\xbf" + ROW + b"\r\n\n" + ROW.strip(), None),
    ):
        (tmp_path / "data.jsonl").write_bytes(text)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            parse(f"--training.dataset_path={tmp_path}")
    (tmp_path / "data.jsonl").write_bytes(ROW + b"x")
    monkeypatch.setenv("RANK", "1")
    parse(f"--training.dataset_path={tmp_path}")


@pytest.mark.parametrize(
    "flag, message",
    [
        ("seq_len=2048", "validation.seq_len = 2048 is more than training.seq_len = 1024, for which the model is"),
        ("seq_len=1001", "validation.seq_len = 1001 is no multiple of 2"),
        ("local_batch_size=0", "validation.local_batch_size = 0: it must be at least 1"),
        ("freq=0", "validation.freq = 0: it must be at least 1"),
        ("dataset=c5", "validation.dataset = 'c5': TorchTitan knows c4, c4_test"),
        ("dataset_path=/nonexistent", "validation.dataset_path = '/nonexistent' holds no data.jsonl"),
    ],
)
def test_a_validation_that_cannot_be_is_refused(flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*VALIDATE, f"--validation.{flag}")
    parse(*VALIDATE, f"--validation.{flag}", "--validation.no-enable")


def test_a_validation_that_a_pipeline_cannot_divide_is_refused() -> None:
    """It would fail at the first validation, after ``validation.freq`` steps."""
    size = "--validation.local_batch_size={}".format
    flags = [*VALIDATE, "--training.local_batch_size=8", "--parallelism.pipeline_parallel_microbatch_size=2"]
    pipeline = [*flags, "--parallelism.pipeline_parallel_degree=2"]
    with pytest.raises(
        ValueError, match=r"local_batch_size = 6: the pipeline divides it into 4 microbatches, .* a multiple"
    ):
        parse(*pipeline, size(6))
    parse(*pipeline, size(12))
    parse(*flags, size(6))


def test_under_torchrun_a_refusal_is_the_last_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It stood in the middle of 50 lines: two tracebacks of the process before it, torchrun's report behind it."""
    record = tmp_path / "error.json"
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(record))
    with pytest.raises(ValueError, match="unknown recipe 'mxfp9'") as refused:
        parse(EXPERTS, f"{RECIPE}=mxfp9")
    sys.excepthook(refused.type, refused.value, refused.tb)
    assert capsys.readouterr().err == f"ValueError: {refused.value}\n"
    sys.excepthook(KeyError, KeyError("another"), refused.tb)
    assert "Traceback" in capsys.readouterr().err
    report = ChildFailedError("train", {0: ProcessFailure(0, pid=1, exitcode=1, error_file=str(record))})
    *_, said, border = str(report).strip().splitlines()
    assert said.strip() == f"traceback : ValueError: {refused.value}" and set(border) == {"="}


def test_compiled_tensor_parallelism_is_refused_where_torchtitan_fails_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_parallel, compiled = "--parallelism.tensor_parallel_degree=2", "--compile.enable"
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.15.0+cpu"))
    with pytest.raises(ValueError, match=r"TorchTitan 0.2.2 fails at them with torch 2.15.0.*Use torch 2.11 to 2.13"):
        parse(tensor_parallel, compiled)
    parse(tensor_parallel)
    parse(compiled)
    parse(tensor_parallel, compiled, "--compile.components=loss")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.1+cpu"))
    parse(tensor_parallel, compiled)


def test_help_shows_the_plugins_own_texts(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = re.sub(r"[│\s]+", "", capsys.readouterr().out)
    documented = 0
    for cls in (MXLinear, MXGroupedMM, Quantize, Model, Job):
        for text in (each.metadata["help"] for each in fields(cls) if "help" in each.metadata):
            assert "".join(text.split()) in shown, text
            documented += 1
    assert documented >= 14
    assert 'Options:["mxfp8"]' not in shown, "TorchTitan's"


@pytest.mark.parametrize("converters, warned", [("", True), (LINEAR, True), (GROUPED, False)])
def test_converted_experts_are_not_said_to_run_in_a_loop(
    converters: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchtitan.models.llama4.model.args.has_cuda_capability", lambda *_: False)
    copy.deepcopy(llama4_args["debugmodel"]).update_from_config(parse(f"--model.converters={converters}"))
    assert ("Failed to use grouped mm" in caplog.text) == warned


def test_a_run_that_cannot_start_is_refused_when_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"dump_folder = .*file/run' cannot be written to .*--job.dump_folder"):
        parse(f"--job.dump_folder={tmp_path}/file/run")
    with pytest.raises(ValueError, match=r"dump_folder = '/proc/run' cannot be written to"):
        parse("--job.dump_folder=/proc/run")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'c4' is streamed .*HF_HUB_OFFLINE.*dataset=c4_test"):
        ConfigManager().parse_args([PLUGIN, ASSETS[0], "--training.dataset=c4", f"--job.dump_folder={tmp_path}"])


@pytest.mark.parametrize("model", checks.MODELS)
def test_optimizers_that_torchtitan_knows_are_taken(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And any other of a model that builds its own, or may be another one of that name."""
    dims, build = ParallelDims(*[1] * 7, world_size=1), get_train_spec(model).build_optimizers_fn
    part = nn.Module()
    part.layers, part.weight = nn.ModuleDict(), nn.Parameter(torch.ones(1))
    for name in checks.OPTIMIZERS:
        config = parse(f"--model.name={model}", f"--optimizer.name={name}").optimizer
        assert type(next(iter(build([part], config, dims)))).__name__ == name
    config.name = "AdamX"
    with pytest.raises(NotImplementedError, match="AdamX not added"):
        build([part], config, dims)
    flags = f"--model.name={model}", "--optimizer.name=AdamX"
    parse(*flags, "--experimental.custom_import=later")
    own = replace(get_train_spec(model), build_optimizers_fn=lambda *_: None)
    monkeypatch.setitem(train_spec._extra_train_specs, model, own)
    parse(*flags)


@pytest.mark.parametrize("converters", ["", GROUPED])
def test_other_tokenizers_and_data_are_not_asked_for_ours(converters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none = ["--model.hf_assets_path=/nonexistent", "--training.dataset_path=/nonexistent"]
    flags = [PLUGIN, f"--model.converters={converters}", *none]
    llama4 = get_train_spec("llama4")
    for builder in (None, lambda config: None):
        spec = replace(llama4, build_tokenizer_fn=builder, build_dataloader_fn=lambda **_: iter(()))
        monkeypatch.setitem(train_spec._extra_train_specs, "own", spec)
        assert ConfigManager().parse_args([*flags, "--model.name=own"]).model.name == "own"
    spec = replace(llama4, build_tokenizer_fn=None)
    monkeypatch.setitem(train_spec._extra_train_specs, "own", spec)
    with pytest.raises(ValueError, match=r"holds no data.jsonl"):
        ConfigManager().parse_args([*flags, "--model.name=own"])
    # custom_import is imported later: it may bring the model, or another one of this name
    for name in ("later", "llama4"):
        ConfigManager().parse_args([*flags, f"--model.name={name}", "--experimental.custom_import=later"])


def test_one_process_asks_git_for_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="0123abc\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("RANK", raising=False)
    assert parse().job.git_commit == "0123abc"
    monkeypatch.setenv("RANK", "1")
    assert parse().job.git_commit == ""
    assert parse("--job.git_commit=mine").job.git_commit == "mine"
    monkeypatch.setenv("RANK", "0")
    assert parse().job.git_commit == "0123abc"
    assert len(commands) == 4 and all("--no-optional-locks" in command for command in commands)


def test_the_layout_is_checked_in_each_process_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    shard_4 = "--parallelism.data_parallel_shard_degree=4"
    assert parse(shard_4).parallelism.data_parallel_shard_degree == 4
    monkeypatch.setenv("WORLD_SIZE", "4")  # as torchrun does
    parse(shard_4)
    with pytest.raises(ValueError, match=r"expert_parallel_degree 3 x .* does not divide the 4 ranks"):
        parse(shard_4, "--parallelism.expert_parallel_degree=3")
    with pytest.raises(ValueError, match=r"training.local_batch_size = 0: it must be at least 1"):
        parse(shard_4, "--training.local_batch_size=0")
    alone = ["--parallelism.expert_parallel_degree=4", "--parallelism.tensor_parallel_degree=4", "--model.name=llama4"]
    with pytest.raises(ValueError, match=r"takes its ranks from tensor_parallel_degree 4 alone, .* FSDP: set data_"):
        parse(*alone)
    parse("--parallelism.expert_parallel_degree=4", "--parallelism.tensor_parallel_degree=2", "--model.name=llama4")
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match=r"does not fit 6 processes: .*dp_shard\(4\)"):
        parse(shard_4)


def test_a_symmetric_dispatch_that_cannot_be_is_refused_at_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [EXPERTS, f"{DISPATCH}=symmetric", "--parallelism.expert_parallel_degree=4"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"needs NVIDIA GPUs of SM80 or newer, and trains on cpu: .* or 'collective'"):
        parse(*asked)
    for flags in ([LINEARS, *asked[1:]], [*asked, f"{DISPATCH}=auto"], asked[:2]):
        parse(*flags)
    with override_hardware(CLUSTER_GPUS["H200"]):
        for per_host in ("8", "4"):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", per_host)
            parse(*asked)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="expert_parallel_degree 4 does not divide the 2 processes of a host"):
            parse(*asked)
        parse(*asked, "--parallelism.tensor_parallel_degree=2")


def test_a_checkpoint_of_other_data_parallel_ranks_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    state = {"dataloader": {f"dp_rank_{rank}": b"" for rank in range(4)} | {"world_size": 4}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-5", no_dist=True)
    dcp.save({"weight": torch.ones(1)}, checkpoint_id=tmp_path / "checkpoint/step-4", no_dist=True)  # the model alone
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-0", no_dist=True)
    (tmp_path / "checkpoint/step-6").mkdir()  # as a kill in the middle of a save leaves it
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse(*flags)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"step-5 holds .* of 4 data-parallel ranks, and this run has 2.*exclude_from"):
        parse(*flags)
    parse(*flags, "--checkpoint.exclude_from_loading=dataloader")
    parse(*flags, "--checkpoint.load_step=4")
    parse(*flags, "--checkpoint.load_step=0")
    parse(flags[1])


@pytest.mark.parametrize(
    "flags, recipes, probed, again",
    [
        ([f"{RECIPE}=mxfp8_2d", REBASE, f"{REBASE}_report=2"], "mxfp8_2d_rebased mxfp8", "experts", ""),
        ([f"{RECIPE}=mxfp8_2d_rebased", f"{REBASE}_report=2"], "mxfp8_2d_rebased mxfp8", "experts", ""),
        ([f"--{GROUPED}.requantize_input"], "mxfp8 mxfp8", "", "experts"),
        ([f"--{LINEAR}.requantize_input"], "mxfp8 mxfp8", "", "linear"),
    ],
)
def test_fields_reach_the_modules_of_their_section(flags: list[str], recipes: str, probed: str, again: str) -> None:
    model = nn.ModuleDict({"experts": GroupedExperts(64, 96, 4, True), "linear": nn.Linear(64, 64)})
    build_model_converters(parse(f"--model.converters={GROUPED},{LINEAR}", *flags), parallel_dims=None).convert(model)
    assert [module.mxfp8.recipe.name for module in model.values()] == recipes.split()
    assert [name for name, module in model.items() if module.probe is not None] == probed.split()
    assert [name for name, module in model.items() if module.mxfp8.requantize_input] == again.split()


def test_peak_memory_follows_allocations() -> None:
    device, gib = CpuDevice(), 1024**3
    big = torch.ones(gib // 4)  # fp32: 1 GiB
    peak = device.memory_stats()["reserved_bytes.all.peak"]
    assert peak > gib
    del big
    assert device.memory_stats()["active_bytes.all.peak"] >= peak, "the peak outlives the tensor"
    assert device.get_device_properties().total_memory > peak
    assert device.get_device_name() and device.current_device() == 0
    device.synchronize()  # torch.cpu's own


# How many layers of each have MoE.
FEW_LAYERS = {
    "llama4": {"debugmodel_2layers": 1, "17bx16e_2layers": 2, "17bx16e_4layers": 4},
    "deepseek_v3": {"debugmodel_2layers": 1, "16B_2layers": 1, "16B_4layers": 3, "671B_2layers": 1},
    "qwen3": {"debugmodel_moe_2layers": 2, "30B-A3B_2layers": 2},
    "gpt_oss": {"debugmodel_2layers": 2, "20b_2layers": 2},
    "llama3": {"debugmodel_2layers": 0},
}
# What changes besides the number of layers.
CHANGES = {("deepseek_v3", "671B"): {"n_dense_layers"}, ("gpt_oss", "debugmodel"): {"vocab_size"}}


@pytest.mark.parametrize("model, flavor", [(model, flavor) for model in FEW_LAYERS for flavor in FEW_LAYERS[model]])
def test_a_flavor_of_few_layers_has_its_moe_layers_and_keeps_the_rest(model: str, flavor: str) -> None:
    made, all_args = convert(parse(), model, flavor), get_train_spec(model).model_args
    name, layers = re.fullmatch(r"(.*)_(\d)layers", flavor).groups()
    args, original = all_args[flavor], all_args[name]
    assert len(made.layers) == int(layers)
    assert sum(isinstance(module, MoE) for module in made.modules()) == FEW_LAYERS[model][flavor]
    names = [field.name for field in fields(args)]
    changed = {name for name in names if getattr(args, name) != getattr(original, name)}
    assert changed - {"max_seq_len", "moe_args"} == {"n_layers"} | CHANGES.get((model, name), set())
    if FEW_LAYERS[model][flavor]:
        assert args.moe_args is not original.moe_args, "update_from_config writes into it"


def test_the_small_moe_is_of_honest_size() -> None:
    model = convert(parse(), "llama4", "moe_100m")
    assert sum(weight.numel() for weight in model.parameters()) == 111_174_144
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(experts) == 4 and {tuple(moe.experts.w1.shape) for moe in experts} == {(8, 1536, 512)}
    sizes = {size for name, weight in model.named_parameters() if "gate" not in name for size in weight.shape[-2:]}
    assert all(size % 128 == 0 for size in sizes)


def test_flavors_twice_and_over_a_flavor_of_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    register_flavors()
    ours = llama4_args["17bx16e_2layers"]
    ours_seq_len = ours.max_seq_len
    ours.max_seq_len = 256  # as a run does
    register_flavors()
    assert llama4_args["17bx16e_2layers"] is ours
    ours.max_seq_len = ours_seq_len
    monkeypatch.setattr(flavors, "_registered", [])
    with pytest.raises(ValueError, match="flavor 'moe_100m', which exists already"):
        register_flavors()
