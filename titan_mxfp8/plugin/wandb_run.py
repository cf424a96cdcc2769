"""What TorchTitan's wandb runs lack: a name and tags from the config, and the git commit."""

import os
import subprocess
from pathlib import Path
from typing import Any

from torchtitan.config import JobConfig

from titan_mxfp8.plugin.job_config import asked_configs, has_our_fields, recipe_of
from titan_mxfp8.recipe import GROUPED_MM, LINEAR
from titan_mxfp8.workarounds.patch import around

ROOT = Path(__file__).resolve().parent.parent.parent


def name_run(job_config: JobConfig) -> None:
    """Gives the run a name and tags, unless WANDB_RUN_NAME and WANDB_TAGS do.

    WANDB_RUN_TAGS counts as WANDB_TAGS: TorchTitan hands it to wandb as one string, which makes each letter a tag.
    """
    model, config_file = job_config.model, job_config.job.config_file
    kinds = {GROUPED_MM: "experts", LINEAR: "linears"}
    formats = [f"{kinds[name]}_{recipe_of(mx).name}" for name, mx in asked_configs(job_config).items()] or ["bf16"]
    subject = Path(config_file).stem if config_file else f"{model.name}-{model.flavor}"
    os.environ.setdefault("WANDB_RUN_NAME", "-".join([subject, *formats]))
    if "WANDB_RUN_TAGS" in os.environ:
        os.environ["WANDB_TAGS"] = os.environ.pop("WANDB_RUN_TAGS")
    os.environ.setdefault("WANDB_TAGS", ",".join([model.name, model.flavor, *formats]))


def git_commit(file: Path) -> str:
    """The commit that a file is of, with ``-dirty`` behind it if the repository was changed since; or an empty string,
    where there is no git, or no repository that tracks the file."""

    def git(*arguments: str) -> str:
        # safe.directory: git refuses a repository of another user's, of which this code may be
        command = ("git", "--no-optional-locks", "-c", f"safe.directory={ROOT}", "-C", str(file.parent), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return ""


def fill_git_commit(job_config: JobConfig) -> None:
    """Fills ``job.git_commit``, unless the user did. For few processes only: git looks at every file of a repository
    that a cluster's nodes may share."""
    job_config.job.git_commit = job_config.job.git_commit or git_commit(Path(__file__))


@around("torchtitan.components.metrics.WandBLogger.__init__")
def name_and_start(start: Any, logger: Any, log_dir: str, job_config: JobConfig, tag: str | None = None) -> None:
    """Has TorchTitan's wandb logger name its run and log the git commit (on a pipeline's last ranks too, while the
    config has it on rank 0 only)."""
    if has_our_fields(job_config):
        name_run(job_config)
        fill_git_commit(job_config)
    start(logger, log_dir, job_config, tag)
