"""Workarounds of runs that log to wandb."""

import configparser
import logging
import netrc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

# wandb's hosted service: the address that `wandb login` has always written, and the one that wandb 0.31 has as default.
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def default_wandb_offline() -> None:
    """Works around: one ERROR line and a run that is not logged, where the user is not logged in to wandb.

    For: TorchTitan 0.2.2 and 0.3.0; wandb up to 0.31.

    wandb logs to disk unless its user is logged in, or has chosen a mode with WANDB_MODE or `wandb offline`. Looks at
    files and the environment only, in the order that wandb does: no network, no prompt, no import of wandb.
    """
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


def log_offline_if_the_start_fails(run_logger: Any, start: Callable[[], None]) -> None:
    """Works around: a run that goes on unlogged where wandb cannot be reached.

    For: TorchTitan 0.2.2 and 0.3.0; wandb up to 0.31.

    The waits are wandb's own settings: 30 s for the start (it takes some seconds more to give up) and 5 minutes for the
    last upload, unless WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT say otherwise.

    Args:
        run_logger: TorchTitan's ``WandBLogger``, which ``start`` initialises.
        start: calls its ``__init__``, a second time if the first one fails.
    """
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")
    try:
        start()
    except ModuleNotFoundError:
        raise  # no wandb: TorchTitan says so
    except Exception as error:  # wandb's errors have no common class
        reason = (str(error) or repr(error)).splitlines()[0]
        logger.warning(f"wandb could not start: {reason}. Logging offline; `wandb sync` uploads it later")
        run_logger.wandb.teardown()  # it has read its settings from the environment once and for all
        os.environ["WANDB_MODE"] = "offline"
        start()


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
