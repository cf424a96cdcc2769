"""The plugin's patches go around those of others, and once around anything."""

import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch.distributed.tensor import _api as dtensor_api
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

from titan_mxfp8 import plugin
from titan_mxfp8.plugin import checks, telemetry, wandb_run
from titan_mxfp8.plugin.workarounds import moe, validation
from titan_mxfp8.workarounds import tensor_parallel

WAITS = "act_input_indices" in inspect.signature(ViewAndMutationMeta).parameters
SITES = {
    telemetry.install: [(MetricsProcessor, "should_log")],
    wandb_run.install: [(WandBLogger, "__init__")],
    checks.install: [(ConfigManager, "_validate_config")],
    moe.initialise_router_bias: [(TokenChoiceTopKRouter, "init_weights")],
    validation.validate_every_model: [(deepseek_v3, "get_train_spec"), (gpt_oss, "get_train_spec")],
    validation.validate_as_it_trains: [(Validator, "post_dataloading_process")],
    tensor_parallel.wait_before_compiled_regions: [(dtensor_api._ToTorchTensor, "forward")] * WAITS,
}


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    def theirs(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return theirs


@pytest.mark.parametrize("install", SITES, ids=lambda install: f"{install.__module__}.{install.__name__}")
def test_what_others_have_wrapped_is_patched_too_and_once(
    install: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(owner: type, name: str, function: Callable) -> None:
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(function) if static else function)

    def now() -> list[Callable]:
        return [getattr(owner, name) for owner, name in SITES[install]]

    theirs = [decorated(inspect.unwrap(function)) for function in now()]
    for (owner, name), function in zip(SITES[install], theirs, strict=True):
        put(owner, name, function)
    install()
    ours = now()
    assert [function.__wrapped__ for function in ours] == theirs, "ours, around theirs"
    install()
    assert now() == ours
    around = [decorated(function) for function in ours]
    for (owner, name), function in zip(SITES[install], around, strict=True):
        put(owner, name, function)
    install()
    assert now() == around, "theirs around ours is patched already"


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
assert not any("titan_mxfp8.tools" in name for name in sys.modules), "a run that does not ask imports no tools"
torch.accelerator.is_available = lambda: False
before = snapshot()
titan_mxfp8.plugin.workarounds.cpu.enable_cpu_training()
print(json.dumps([everywhere, changed(before)]))
"""


def test_all_that_importing_the_plugin_changes_is_listed() -> None:
    result = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, check=True)
    lists = plugin.__doc__.split("Where there is no accelerator")
    for changed, text in zip(json.loads(result.stdout.splitlines()[-1]), lists, strict=True):
        rows = [line.partition("``: ")[0] + "``" for line in text.splitlines() if line.startswith("- ")]
        listed = [name for row in rows for name in re.findall("``(.+?)``", row)]
        assert len(listed) > 8
        sites = [f".{site}" for site in changed]
        assert [site for site in sites if not site.endswith(tuple(f".{name}" for name in listed))] == []
        if WAITS:  # older versions of torch need less
            assert [name for name in listed if not any(site.endswith(f".{name}") for site in sites)] == []
