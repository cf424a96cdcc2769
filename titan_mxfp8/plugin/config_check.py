"""Checks of a parsed TorchTitan config, before any process group, model or GPU exists."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch
from torchtitan.config import JobConfig, manager

from titan_mxfp8 import backends
from titan_mxfp8.modules import as_list
from titan_mxfp8.plugin.wandb_run import git_commit
from titan_mxfp8.recipe import get_recipe

GROUPED_MM = "quantize.grouped_mm.mx"
LINEAR = "quantize.linear.mx"


def check_job_config(job_config: JobConfig) -> None:
    """Normalises lists that TOML or the command line gave as strings, and checks what the plugin is about to use.
    Fills ``job.git_commit``.

    ``--model.converters=`` (nothing behind the sign) means no converters.

    Raises:
        ValueError: MXFP8 beside another quantisation, an unknown recipe or backend, no tokenizer, no data.
    """
    job_config.model.converters = converters = as_list(",".join(as_list(job_config.model.converters)))
    job_config.job.git_commit = job_config.job.git_commit or git_commit(Path(__file__).parent)
    check_one_quantisation(job_config)
    for name, config in ((GROUPED_MM, job_config.quantize.grouped_mm.mx), (LINEAR, job_config.quantize.linear.mx)):
        if name not in converters:
            continue
        try:
            get_recipe(config.recipe_name)
            backends.select(config.backend, training_device())
        except ValueError as error:
            raise ValueError(f"[{name}] {error}") from error
    if job_config.quantize.health_every < 0:
        raise ValueError(
            f"quantize.health_every = {job_config.quantize.health_every}: a number of steps, or 0 for never"
        )
    job_config.quantize.grouped_mm.mx.fqns = as_list(job_config.quantize.grouped_mm.mx.fqns)
    job_config.quantize.linear.mx.filter_fqns = as_list(job_config.quantize.linear.mx.filter_fqns)
    _check_tokenizer(Path(job_config.model.hf_assets_path))
    if job_config.training.dataset == "c4_test":
        _check_text(Path(job_config.training.dataset_path or "tests/assets/c4_test"))


def check_one_quantisation(job_config: JobConfig) -> None:
    """Raises ValueError if ``model.converters`` mixes MXFP8 with another quantisation, such as float8."""
    quantisations = [name for name in job_config.model.converters if name.startswith("quantize.")]
    if len({name.rsplit(".", 1)[-1] for name in quantisations}) > 1:
        raise ValueError(
            f"model.converters = {quantisations} mixes quantisation formats, which TorchTitan does not support: keep "
            "either the .mx converters or the .float8 ones"
        )


def training_device() -> torch.device:
    """The device of this process's training: its accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def install() -> None:
    """Makes TorchTitan's config manager run ``check_job_config`` once it has parsed and checked a config itself."""
    validate: Callable = manager.ConfigManager._validate_config
    if getattr(validate, "checks_mxfp8", False):
        return

    @wraps(validate)
    def validate_and_check(self: manager.ConfigManager) -> None:
        validate(self)
        check_job_config(self.config)

    validate_and_check.checks_mxfp8 = True
    manager.ConfigManager._validate_config = validate_and_check


def _check_tokenizer(path: Path) -> None:
    # the files that torchtitan.components.tokenizer looks for
    if not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        raise ValueError(
            f"model.hf_assets_path = {str(path)!r} holds no tokenizer (tokenizer.json): point it at one, "
            "such as train_configs/assets/tokenizer here, or make one with scripts/make_data.py"
        )


def _check_text(path: Path) -> None:
    if not any(path.glob("*.json*")):
        raise ValueError(
            f"training.dataset_path = {str(path)!r} holds no data.jsonl: point it at a folder with one, "
            "such as train_configs/assets/kjv here, or make one with scripts/make_data.py"
        )
