"""The plugin's patches go around those of others, and once around anything."""

import functools
import inspect
from collections.abc import Callable

import pytest
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch.distributed.tensor import _api as dtensor_api
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.config import ConfigManager
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.tools.utils import GarbageCollection

from titan_mxfp8.plugin import compat, config_check, health, wandb_run

WAITS = "act_input_indices" in inspect.signature(ViewAndMutationMeta).parameters
SITES = {
    health.install: [(MetricsProcessor, "__init__"), (MetricsProcessor, "should_log"), (GarbageCollection, "run")],
    wandb_run.install: [(WandBLogger, "__init__")],
    config_check.install: [(ConfigManager, "_validate_config")],
    compat.initialise_router_bias: [(TokenChoiceTopKRouter, "init_weights")],
    compat.wait_before_compiled_regions: [(dtensor_api._ToTorchTensor, "forward")] * WAITS,
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
