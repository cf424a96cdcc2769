"""What TorchTitan's wandb runs lack: a name and tags from the config, the git commit, and survival of an outage."""

import os
import subprocess
from pathlib import Path

from torchtitan.components.metrics import WandBLogger
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_mxfp8.plugin.job_config import converter_configs
from titan_mxfp8.plugin.patch import is_patched, patch_of
from titan_mxfp8.recipe import GROUPED_MM, get_recipe


def name_run(job_config: JobConfig) -> None:
    """Gives the run a name and tags, unless WANDB_RUN_NAME and WANDB_TAGS do.

    WANDB_RUN_TAGS counts as WANDB_TAGS: TorchTitan hands it to wandb as one string, which makes each letter a tag.
    """
    model, formats = job_config.model, number_formats(job_config)
    config_file = job_config.job.config_file
    subject = Path(config_file).stem if config_file else f"{model.name}-{model.flavor}"
    os.environ.setdefault("WANDB_RUN_NAME", "-".join([subject, *formats]))
    if "WANDB_RUN_TAGS" in os.environ:
        os.environ["WANDB_TAGS"] = os.environ.pop("WANDB_RUN_TAGS")
    os.environ.setdefault("WANDB_TAGS", ",".join([model.name, model.flavor, *formats]))


def number_formats(job_config: JobConfig) -> list[str]:
    """``["bf16"]``, or what is converted and how: ``["experts_mxfp8", "linears_mxfp8_2d"]``."""
    formats = []
    for name, config in converter_configs(job_config).items():
        if name in job_config.model.converters:
            what = "experts" if name == GROUPED_MM else "linears"
            formats.append(f"{what}_{get_recipe(config.recipe_name).name}" + "_rebased" * config.hopper_rebase)
    return formats or ["bf16"]


def git_commit(folder: Path) -> str:
    """The commit that the files in ``folder`` are of, with ``-dirty`` behind it if some were changed since; or an empty
    string, where there is no git or no repository."""
    try:
        git = ("git", "--no-optional-locks", "-C", str(folder))
        describe = (*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def fill_git_commit(job_config: JobConfig) -> None:
    """Fills ``job.git_commit``, unless the user did. For few processes only: git looks at every file of a repository
    that a cluster's nodes may share."""
    job_config.job.git_commit = job_config.job.git_commit or git_commit(Path(__file__).parent)


def install() -> None:
    """Has TorchTitan's wandb logger name its run, log the git commit (on a pipeline's last ranks too, while the config
    has it on rank 0 only) and, if wandb cannot start online, log offline. Safe to call again.

    TorchTitan goes on unlogged if wandb's start fails. The waits are wandb's own settings: 30 s for the start (it takes
    some seconds more to give up) and 5 minutes for the last upload, unless WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT
    say otherwise.
    """
    start = WandBLogger.__init__
    if is_patched(start):
        return

    @patch_of(start)
    def start_or_log_offline(self: WandBLogger, log_dir: str, job_config: JobConfig, tag: str | None = None) -> None:
        name_run(job_config)
        fill_git_commit(job_config)
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")
        try:
            start(self, log_dir, job_config, tag)
        except ModuleNotFoundError:
            raise  # no wandb: TorchTitan says so
        except Exception as error:  # wandb's errors have no common class
            reason = (str(error) or repr(error)).splitlines()[0]
            logger.warning(f"wandb could not start: {reason}. Logging offline; `wandb sync` uploads it later")
            self.wandb.teardown()  # it has read its settings from the environment once and for all
            os.environ["WANDB_MODE"] = "offline"
            start(self, log_dir, job_config, tag)

    WandBLogger.__init__ = start_or_log_offline
