"""The symptom that each workaround is for, in torch and TorchTitan 0.2.2 as they are installed: a test that fails here
says that a workaround is needed no longer. A workaround without a check fails too. The plugin's patches go around those
of others, and once around anything.

Not here is ``keep_saved_outputs``, whose symptom takes a whole model: test_models.py.
"""

import functools
import json
import logging
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
import test_models
import torch
from symptoms import look

from titan_mxfp8 import workarounds
from titan_mxfp8.workarounds import HOOKS, TITAN03, WORKAROUNDS, Workaround, patch
from titan_mxfp8.workarounds.patch import around
from titan_mxfp8.workarounds.pytorch import compile_for_own_edition_only, hash_of_sources

NEW_TORCH = torch.__version__ >= (2, 13)

# Without the plugin: each check says what it found.
SYMPTOMS = """
import copy, logging, os, warnings
from types import SimpleNamespace
from symptoms import log_offline_where_wandb_is_out_of_reach, one_rank, symptom, use_cpu_device
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
import torchtitan.models.moe.utils as moe_utils
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.llama4.model.state_dict_adapter import Llama4StateDictAdapter
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.protocols.train_spec import get_train_spec

warnings.filterwarnings("ignore")
symptom(use_cpu_device)
symptom(log_offline_where_wandb_is_out_of_reach)

@symptom
def run_backward_in_the_calling_thread():
    return torch.autograd.is_multithreading_enabled()

@symptom
def export_dense_layers():
    return Llama4StateDictAdapter(llama4_args["debugmodel"], None).to_hf({"layers.0.feed_forward.w1.weight": None})

@symptom
def export_contiguous_tensors():
    w2 = torch.zeros(2, 3, 4)
    adapter = Llama4StateDictAdapter(llama4_args["debugmodel"], None)
    return [value.is_contiguous() for value in adapter.to_hf({"layers.1.moe.experts.w2": w2}).values()]

def rank_of_two(rank):
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    torch._dynamo.reset()
    return init_device_mesh("cpu", (2,))

@symptom
def count_integers_with_histc():
    counts = torch.histc(torch.tensor([0, 4, 2, 4, 7]), bins=8, min=0, max=8)
    return counts.dtype, counts.tolist(), torch.histc(torch.tensor([0.5, 1.5, 1.5]), bins=2, min=0, max=2).tolist()

@symptom
def permute_tokens_without_triton():
    # rank 0 sent [2, 0, 1] rows to 3 experts: 0 1 | - | 2; rank 1 sent [1, 0, 4]: 3 | - | 4 5 6 7. Groups are padded to
    # 4 rows: -1 is padding, an empty expert gets 4 rows of it.
    permuted = moe_utils.generate_permute_indices(torch.tensor([2, 0, 1, 1, 0, 4]), 3, 2, 20, 4)
    return [tensor.tolist() for tensor in permuted]

@symptom
def profile_without_device_activity():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, None]) as profiler:
        torch.ones(8) + 1
    return any(event.key == "aten::add" for event in profiler.key_averages())

@symptom
def initialise_router_bias():
    router = TokenChoiceTopKRouter(32, 4, None, None, 2, "softmax", False, 1.0, gate_bias=True)
    router.requires_grad_(False)
    router.gate.bias.fill_(torch.nan)
    router.init_weights(0.02)
    return router.gate.bias.isnan().all().item()

@symptom
def validate_every_model():
    return [get_train_spec(name).build_validator_fn for name in ("deepseek_v3", "gpt_oss")]

@symptom
def validate_as_it_trains():
    model = SimpleNamespace(get_attention_masks=lambda **inputs: "masks", model_args=SimpleNamespace(attn_type="sdpa"))
    validator = SimpleNamespace(tokenizer=None, parallel_dims=SimpleNamespace(cp_enabled=False))
    return Validator.post_dataloading_process(validator, {"input": torch.zeros(1, 1)}, None, [model])[-1]

@symptom
def hide_grouped_mm_warning():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    copy.deepcopy(llama4_args["debugmodel"]).update_from_config(JobConfig())
    return "; ".join(record.getMessage() for record in records)

@symptom
def ignore_profiler_ranges():
    calls = []

    def block(x):
        calls.append(x)
        if len(calls) > 1:
            with torch.profiler.record_function("FSDP::all_gather"):
                pass
        return (x @ x).sin()

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.ones(4, 4, requires_grad=True)
    contexts = lambda: create_selective_checkpoint_contexts(policy)
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()

@symptom
def draw_full_tensor_at_random_init():
    shards = []
    for rank in (0, 1):
        whole = distribute_tensor(torch.empty(4, 4), rank_of_two(rank), [Shard(0)], src_data_rank=None)
        torch.manual_seed(0)
        shards.append([getattr(whole, fill)().to_local().clone() for fill in ("normal_", "uniform_")])
        dist.destroy_process_group()
    return any(map(torch.equal, *shards))

@symptom
def compile_for_own_rank_only():
    assert "WITHOUT_INDUCTOR" not in os.environ
    shards = []
    for rank in (1, 0):
        whole = DTensor.from_local(torch.arange(4.0), rank_of_two(rank), [Replicate()])
        shards.append(torch.compile(lambda x: x.redistribute(placements=[Shard(0)]).to_local())(whole))
        dist.destroy_process_group()
    return torch.equal(*shards)

@symptom
def compile_for_own_edition_only():
    assert "WITHOUT_INDUCTOR" not in os.environ
    library = torch.library.Library("editions", "DEF")
    library.define("rows(Tensor x) -> Tensor")
    for rows in (1, 2):
        make = lambda x: x.new_zeros(rows)
        library.impl("rows", make, "CompositeExplicitAutograd", allow_override=True)
        torch.library.register_fake("editions::rows", make, lib=library, allow_override=True)
        torch._dynamo.reset()
        torch.compile(lambda x: torch.ops.editions.rows(x))(torch.ones(4))

@symptom
def wait_before_compiled_regions():
    sharded = DTensor.from_local(torch.ones(4, requires_grad=True), rank_of_two(0), [Shard(0)])
    gathered = sharded.redistribute(placements=[Replicate()], async_op=True).to_local()
    return torch.compile(lambda x: x * 2, backend="aot_eager")(gathered).requires_grad

@symptom
def save_random_states_before_meshes():
    mesh = rank_of_two(0)
    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(16, 32), mesh, [Shard(0)]))

    def attend(x):
        q = (x @ weight.t()).to_local()
        return DTensor.from_local(F.scaled_dot_product_attention(q, q, q), mesh, [Shard(3)])

    compiled = torch.compile(lambda x: checkpoint(attend, x, use_reentrant=False), backend="aot_eager_decomp_partition")
    compiled(DTensor.from_local(torch.randn(2, 4, 8, 32), mesh, [Replicate()])).to_local().sum().backward()

@symptom
def route_tokens_once():
    saved = []
    block = lambda x: checkpoint(lambda x: x.gather(1, torch.topk(x, 1).indices), x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        torch.compile(block, backend="aot_eager_decomp_partition")(torch.ones(4, 4, requires_grad=True))
    return torch.int64 in [x.dtype for x in saved]

@symptom
def recompute_autograd_functions():
    library = torch.library.Library("functions", "DEF")
    library.define("double(Tensor x) -> Tensor[]")
    for kind in ("CompositeExplicitAutograd", "Meta"):
        library.impl("double", lambda x: [2 * x, x.new_ones(3)], kind)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            double, saved = torch.ops.functions.double(x)
            ctx.save_for_backward(saved)
            return double

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].sum()

    saved = []
    block = lambda x: checkpoint(lambda x: Double.apply(x).sin(), x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        torch.compile(block, backend="aot_eager_decomp_partition")(torch.ones(4, requires_grad=True))
    return f"{len(saved)} saved"

@symptom
def infer_shapes_without_a_trace():
    class Counts(torch.nn.Linear):
        def forward(self, x):
            self.count += 1
            return super().forward(x) * self.scale  # which backward reads

    one_rank()
    module = Counts(4, 4)
    module.register_buffer("count", torch.zeros(()))
    module.register_buffer("scale", torch.ones(4))
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, 2, loss_fn=F.mse_loss).step(torch.ones(2, 4), target=torch.ones(2, 4))
    return module.count.item()

@symptom
def reduce_gradients_by_sum():
    one_rank()
    dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))
"""


@pytest.fixture(scope="module")
def symptoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return look(SYMPTOMS, TORCHINDUCTOR_CACHE_DIR=str(tmp_path_factory.mktemp("inductor")))


FOUND = {
    "use_cpu_device": "cuda",
    "log_offline_where_wandb_is_out_of_reach": "no network",
    "run_backward_in_the_calling_thread": "True",
    "export_dense_layers": "{}",
    "export_contiguous_tensors": "[False]",
    "count_integers_with_histc": "not implemented for 'Long'",
    "permute_tokens_without_triton": "0 active drivers",
    "profile_without_device_activity": "None",
    "draw_full_tensor_at_random_init": "True",
    "reduce_gradients_by_sum": "PREMUL_SUM",
    "initialise_router_bias": "True",
    "validate_every_model": "[None, None]",
    "validate_as_it_trains": "{'attention_masks': 'masks'}",
    "hide_grouped_mm_warning": "Failed to use grouped mm, which is only supported on SM90",
    # of torch 2.13
    "ignore_profiler_ranges": "encountered during backward" if NEW_TORCH else "None",
    "wait_before_compiled_regions": str(not NEW_TORCH),
    "save_random_states_before_meshes": "got types: [" if NEW_TORCH else "None",
    "compile_for_own_edition_only": "expected size 2==1",
    "compile_for_own_rank_only": str(NEW_TORCH),
    "route_tokens_once": "False",
    "recompute_autograd_functions": "1 saved" if torch.__version__ >= (2, 12) else "2 saved",
    "infer_shapes_without_a_trace": "3.0",
}


@pytest.mark.integration
@pytest.mark.nightly  # it changes with the versions of torch and TorchTitan
@pytest.mark.parametrize("workaround, symptom", FOUND.items())
def test_the_symptom_without_its_workaround(symptoms: dict[str, str], workaround: str, symptom: str) -> None:
    if workaround.startswith("compile_for_own_") and shutil.which("g++") is None:
        pytest.skip("the inductor needs a C++ compiler on CPUs")
    assert symptom in symptoms[workaround]


PERMUTED = [0, 1, 3, -1] + [-1] * 4 + [2, 4, 5, 6, 7, -1, -1, -1] + [-1] * 4
# What a check says with its workaround, where it is more than nothing of the symptom.
CURED = {
    "count_integers_with_histc": "(torch.int64, [1, 0, 1, 0, 2, 0, 0, 1], [1.0, 2.0])",
    "permute_tokens_without_triton": f"[{PERMUTED}, [4, 4, 8], [4, 8, 16]]",
    "profile_without_device_activity": "True",
    "use_cpu_device": "cpu",
    "initialise_router_bias": "False",
}
# Whose symptom is in a start of wandb's, in FSDP, in another edition, and in what the inductor compiles.
ELSEWHERE = {
    "log_offline_where_wandb_is_out_of_reach": "test_wandb.py",
    "reduce_gradients_by_sum": "each training with FSDP",
    "compile_for_own_edition_only": "below",
    "compile_for_own_rank_only": "parallel_models.py",
}


@pytest.mark.integration
def test_no_symptom_is_left_with_the_workarounds() -> None:
    cured = look(SYMPTOMS, "titan_mxfp8.plugin", WITHOUT_INDUCTOR="1")
    needed = {row.name for row in WORKAROUNDS if row.is_for_this_machine() and not row.by_config} - ELSEWHERE.keys()
    assert len(needed) > 10
    for name in needed:
        assert CURED[name] == cured[name] if name in CURED else FOUND[name] not in cured[name], (name, cured[name])


def test_compiled_code_is_known_by_the_edition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for source in ("1", "2", "1"):
        (tmp_path / "fakes.py").write_text(source)
        hashes.append(hash_of_sources(tmp_path))
    assert hashes[0] != hashes[1] and hashes[0] == hashes[2]
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "user's")
    for _ in range(2):
        compile_for_own_edition_only()
    own = hash_of_sources(Path(workarounds.__file__).parents[1])
    assert torch.compiler.config.cache_key_tag == f"user'stitan_mxfp8-{own}"


def test_each_workaround_has_a_check() -> None:
    elsewhere = test_models.test_code_compiled_within_a_checkpointed_block_does_not_overwrite_what_is_saved
    assert "keep_saved_outputs" in elsewhere.__doc__
    assert FOUND.keys() | {"keep_saved_outputs"} == {row.name for row in WORKAROUNDS if row.torchtitan != TITAN03}


HERE = [row for row in WORKAROUNDS if row.is_for_this_machine()]


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    def theirs(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return theirs


class Owner:
    @staticmethod
    def static(x: int) -> int:
        return x

    def method(self, x: int) -> int:
        return x


@around(f"{__name__}.Owner.static", f"{__name__}.Owner.method")
def add_one(original: Callable[..., int], *args: object) -> int:
    return original(*args) + 1


@around(f"{__name__}.Owner.static")
def double(original: Callable[..., int], x: int) -> int:
    return 2 * original(x)


def test_what_others_have_wrapped_is_patched_too_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    static, method = Owner.static, Owner.method
    monkeypatch.setattr(Owner, "static", staticmethod(decorated(static)))
    monkeypatch.setattr(Owner, "method", decorated(method))
    add_one()
    assert Owner.static(1) == Owner().static(1) == Owner().method(1) == 2
    ours = Owner.static, Owner.method
    add_one()
    assert (Owner.static, Owner.method) == ours
    monkeypatch.setattr(Owner, "static", staticmethod(decorated(ours[0])))
    add_one()
    assert Owner.static(1) == 2, "theirs around ours is patched already"
    double()
    double()
    assert Owner.static(1) == 4, "another patch of ours goes around it"


# What the import of the plugin changes in modules and classes of TorchTitan and torch that were there before.
CHANGES = """
import inspect, json, sys
import torch, torch.distributed.fsdp, torch.distributed.tensor, torch.profiler, torch.utils.checkpoint
import torchtitan.train, titan_mxfp8
from torchtitan.models import deepseek_v3, gpt_oss, llama3, llama4, qwen3

seen = []  # keeps ids unique

def content(value):
    seen.append(value)
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    return sorted(map(id, value)) if isinstance(value, (set, list)) else id(value)

def snapshot():
    owners = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "torchtitan"):
            owners[name] = module
            classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
            owners |= {f"{name}.{value.__name__}": value for value in classes}
    return {name: {key: content(value) for key, value in vars(owner).items()} for name, owner in owners.items()}

def changed(before):
    return sorted(
        f"{name}.{key}"
        for name, now in snapshot().items()
        for key in (now if name in before else ())
        if now[key] != before[name].get(key) and not inspect.ismodule(getattr(sys.modules.get(name), key, None))
        and key not in ("__slotnames__", "_abc_impl")
    )

torch.accelerator.is_available = lambda: True
before = snapshot()
import titan_mxfp8.plugin
everywhere = changed(before)
unasked = ("titan_mxfp8.tools", "titan_mxfp8.doctor")
assert not any(name.startswith(unasked) for name in sys.modules), "a run that does not ask imports no tools"
torch.accelerator.is_available = lambda: False
before = snapshot()
titan_mxfp8.workarounds.install()
on_cpus = changed(before)
before = snapshot()
titan_mxfp8.workarounds.install()
print(json.dumps([everywhere, on_cpus, changed(before)]))
"""


@pytest.mark.integration
def test_all_that_importing_the_plugin_changes_is_listed() -> None:
    *seen, again = json.loads(processes.python(CHANGES).splitlines()[-1])
    assert again == []
    everywhere, on_cpus = ({name for row in HERE if row.cpu == cpu for name in row.changes} for cpu in (False, True))
    hooks = {name.replace("*", "[a-z0-9_]+") for name in HOOKS}
    # which hold copies of the device
    copies = {rf"torchtitan\..+\.{name}" for name in ("device_type", "device_module", "get_device_info")}
    for changed, listed in zip(seen, (everywhere | hooks, on_cpus | copies), strict=True):
        ends = [f".{name.rpartition('.')[2]}" for name in listed]
        assert len(listed) > 8
        assert [site for site in changed if not site.endswith(tuple(ends))] == []
        # states that are not attributes, of a config or the environment
        kept = {"set_multithreading_enabled", "enable_autograd_cache", "cache_key_tag", "filters"}
        kept |= {"inplace_buffers", "allow_buffer_reuse"}
        kept |= {"get_save_ops", "Trainer.__init__", "WandBLogger.__init__", "apply_fsdp_to_decoder"}
        kept |= {"CheckpointFunction.forward", "Config._validate_cuda_graphs", "wrap_with_cuda_graph"}
        missing = [name for name in listed if not any(site.endswith(f".{name.rpartition('.')[2]}") for site in changed)]
        assert [name for name in missing if not name.endswith(tuple(kept))] == []


def test_all_that_is_patched_is_listed() -> None:
    """With either TorchTitan, when it is imported or later, by the decorator ``around``, of which the first name."""
    sources = [path for path in Path(patch.__file__).parents[1].rglob("*.py") if path.parent.name != "workarounds"]
    patched = re.findall(r'^@around\(.*?"(.+?)"', "\n".join(path.read_text() for path in sources), re.MULTILINE)
    assert len(patched) > 9 and {name.replace("{name}", "*") for name in patched} <= HOOKS.keys()


OWN_CHOICE = """
import json, sys
import torch
from titan_mxfp8 import workarounds
torch.accelerator.is_available = lambda: False
histc, init = torch.histc, torch.profiler.profile.__init__
kwargs = json.loads(sys.argv[1])
workarounds.install(**kwargs)
import titan_mxfp8.plugin
from torchtitan.config import ConfigManager
from torchtitan.tools import utils
changed = torch.histc is not histc, torch.profiler.profile.__init__ is not init, utils.device_type == "cpu"
checks = hasattr(ConfigManager._validate_config, "__wrapped__")
print(json.dumps([changed, torch.autograd.is_multithreading_enabled(), checks]))
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "choice, changed, threads",
    [
        ({}, [True, True, True], False),
        ({"enabled": False}, [False, False, False], True),
        ({"leave_out": ["count_integers_with_histc", "run_backward_in_the_calling_thread"]}, [False, True, True], True),
    ],
)
def test_workarounds_can_be_left_out_before_the_import(choice: dict, changed: list[bool], threads: bool) -> None:
    printed = processes.python(OWN_CHOICE, json.dumps(choice))
    assert json.loads(printed.splitlines()[-1]) == [changed, threads, True]


def test_an_unknown_workaround_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no workarounds are named nope: use some of .*ignore_profiler_ranges"):
        workarounds.install(leave_out=["nope"])


def test_a_workaround_is_for_the_versions_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Workaround(install=print, torchtitan="0.2.2 0.3.0", since="2.12", before="2.14")
    for torch_version, titan_version, wanted in (
        ("2.13.0+cpu", "0.2.2", True),
        ("2.12.0", "0.3.0", True),
        ("2.11.1", "0.2.2", False),
        ("2.14.0", "0.2.2", False),
        ("2.13.0", "0.2.1", False),
        ("2.13.0", "", False),
    ):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(torch_version))
        monkeypatch.setattr(patch, "installed_version", lambda package, version=titan_version: version)
        assert row.is_for_this_machine() == wanted, (torch_version, titan_version)


def test_what_no_longer_fits_is_said_and_the_rest_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def gone() -> None:
        torch.no_such_function()

    def fits() -> None:
        called.append(1)

    monkeypatch.setattr(workarounds, "WORKAROUNDS", [Workaround(install=gone), Workaround(install=fits)])
    with caplog.at_level(logging.WARNING, logger="titan_mxfp8"):
        workarounds.install()
    assert called == [1] and "the workaround gone does not fit torch" in caplog.text


def test_the_list_can_be_printed(capsys: pytest.CaptureFixture) -> None:
    runpy.run_module("titan_mxfp8.workarounds", run_name="__main__")
    printed = capsys.readouterr().out
    assert all(row.name in printed and row.install.__doc__.partition("\n")[0] in printed for row in WORKAROUNDS)
    assert all(name in printed for name in HOOKS)
