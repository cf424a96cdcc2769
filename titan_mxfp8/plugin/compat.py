"""Repairs and defaults that do not depend on the device."""

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.utils.checkpoint

# wandb's hosted service: the address that `wandb login` has always written, and the one that wandb 0.31 has as default.
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def repair_selective_ac() -> None:
    """Cures: `profiler._record_function_enter_new ... encountered during backward but not found in storage`.

    Selective op-level activation checkpointing replays the forward op by op, and from torch 2.13 on counts FSDP's
    profiler ranges as ops. Under EP the experts are an FSDP unit of their own in the checkpointed block, and opens
    more ranges the second time than the first (torchtitan#3427). The ranges compute nothing: SAC may ignore them.
    """
    if hasattr(torch.utils.checkpoint, "SAC_IGNORED_OPS"):
        torch.utils.checkpoint.SAC_IGNORED_OPS.update(
            {
                torch.ops.profiler._record_function_enter.default,
                torch.ops.profiler._record_function_enter_new.default,
                torch.ops.profiler._record_function_exit.default,
                torch.ops.profiler._record_function_exit._RecordFunction,
            }
        )


def default_wandb_offline() -> None:
    """Have wandb log to disk unless its user is logged in, in the project `titan_mxfp8`, unless told otherwise.

    Without a login wandb gives one ERROR line and the run goes on unlogged. Set WANDB_MODE or WANDB_PROJECT to choose.
    Looks at files and the environment only, in the order that wandb does: no network, no prompt, no import of wandb.
    """
    os.environ.setdefault("WANDB_PROJECT", "titan_mxfp8")
    settings = wandb_settings()
    # `wandb offline`, `wandb disabled` and `wandb online` leave their choice in the settings
    if os.environ.get("WANDB_MODE") or "mode" in settings:
        return
    logged_in = (
        os.environ.get("WANDB_API_KEY")
        or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        or wandb_key_in_netrc(os.environ.get("WANDB_BASE_URL") or settings.get("base_url"))
        or settings.get("api_key")
    )
    if not logged_in:
        os.environ["WANDB_MODE"] = "offline"


def wandb_settings() -> dict[str, str]:
    """What wandb's settings files say: the user's own, overridden by the working folder's."""
    config_folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    run_folder = Path(os.environ.get("WANDB_DIR") or ".").expanduser()
    run_folder /= ".wandb" if (run_folder / ".wandb").exists() else "wandb"
    settings: dict[str, str] = {}
    for path in (config_folder / "settings", run_folder / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path)
        except (OSError, configparser.Error):
            continue  # wandb warns of an unreadable file and goes on without it
        if parser.has_section("default"):
            settings.update(parser["default"])
    return settings


def wandb_key_in_netrc(base_url: str | None) -> str | None:
    """The API key in the netrc file for a wandb server (None: wandb's own)."""
    host = urlsplit(base_url).netloc if base_url else WANDB_HOSTS[0]
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((path for name in paths if (path := Path(name).expanduser()).exists()), None)
    if path is None:
        return None
    try:
        logins = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return None  # wandb warns of an unreadable file and goes on without it
    for name in WANDB_HOSTS if host in WANDB_HOSTS else (host,):
        login = logins.authenticators(name)
        if login:
            return login[2]
    return None
