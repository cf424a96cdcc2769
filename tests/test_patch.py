"""The plugin's patches go around those of others, and once around anything."""

import functools
import json
import logging
import runpy
from collections.abc import Callable

import processes
import pytest
import torch

from titan_mxfp8 import workarounds
from titan_mxfp8.workarounds import HOOKS, WORKAROUNDS, Workaround, patch
from titan_mxfp8.workarounds.patch import around

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
        kept |= {"Config._validate_cuda_graphs", "wrap_with_cuda_graph"}
        missing = [name for name in listed if not any(site.endswith(f".{name.rpartition('.')[2]}") for site in changed)]
        assert [name for name in missing if not name.endswith(tuple(kept))] == []


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
def test_workarounds_can_be_left_out_before_the_plugin_is_imported(
    choice: dict, changed: list[bool], threads: bool
) -> None:
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
