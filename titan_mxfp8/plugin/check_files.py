"""Checks of what a config reads and writes on this machine: tokenizer, text, dump folder, checkpoints."""

import json
import os
import tempfile
from pathlib import Path

import datasets
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import build_validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
from torchtitan.protocols.train_spec import get_train_spec

from titan_mxfp8.titan.dispatch import microbatches_of

CHECKED_BYTES = 1 << 28  # of a file of text: two seconds; what is behind them is left to the data loader


def check_files(job_config: JobConfig) -> None:
    """Checks that this machine has what the config reads, and can write where the config writes.

    A model with a tokenizer, data loader or validator of its own reads what it likes, and
    ``experimental.custom_import`` may bring the model later. Raises ValueError: no tokenizer, no data, data without
    text, a validation that cannot be, or a dump folder that cannot be written to."""
    folder = Path(job_config.job.dump_folder)
    try:  # permission bits do not tell of read-only or root-squashed file systems
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"job.dump_folder = {str(folder)!r} cannot be written to ({error}): checkpoints and logs go there, "
            "choose another one with --job.dump_folder"
        ) from error
    if job_config.experimental.custom_import:
        return
    spec = get_train_spec(job_config.model.name)
    assets, files = Path(job_config.model.hf_assets_path), ("tokenizer.json", "vocab.json", "vocab.txt")
    if spec.build_tokenizer_fn is build_hf_tokenizer and not any((assets / name).is_file() for name in files):
        raise ValueError(
            f"model.hf_assets_path = {str(assets)!r} holds no tokenizer (tokenizer.json): download the model's "
            "(configs of large models say how), point it at another one, such as train_configs/assets/tokenizer here, "
            "or make one with scripts/make_data.py"
        )
    if spec.build_dataloader_fn is build_text_dataloader:
        _check_data("training", job_config.training.dataset, job_config.training.dataset_path)
    if validates(job_config):
        check_validation(job_config)
        _check_data("validation", job_config.validation.dataset, job_config.validation.dataset_path)


def validates(job_config: JobConfig) -> bool:
    """Whether TorchTitan's own validator runs."""
    return job_config.validation.enable and get_train_spec(job_config.model.name).build_validator_fn is build_validator


def check_validation(job_config: JobConfig) -> None:
    """Raises ValueError if the sizes of TorchTitan's validation do not suit the model, which is built for the length of
    the training's sequences, or its layout."""
    validation, training, parallelism = job_config.validation, job_config.training, job_config.parallelism
    check_positive("validation", validation, "local_batch_size", "seq_len", "freq")
    if validation.seq_len > training.seq_len:
        raise ValueError(
            f"validation.seq_len = {validation.seq_len} is more than training.seq_len = {training.seq_len}, for which "
            "the model is built: set it to as many or fewer"
        )
    if validation.local_batch_size % (microbatches := microbatches_of(training, parallelism)):
        raise ValueError(
            f"validation.local_batch_size = {validation.local_batch_size}: the pipeline divides it into {microbatches} "
            "microbatches, as training.local_batch_size (by pipeline_parallel_microbatch_size): set it to a multiple"
        )
    divisor = parallelism.tensor_parallel_degree * 2 * parallelism.context_parallel_degree
    if validation.seq_len % divisor:
        raise ValueError(
            f"validation.seq_len = {validation.seq_len} is no multiple of {divisor} = 2 x context_parallel_degree x "
            "tensor_parallel_degree, which divide the sequence"
        )


def check_positive(name: str, section: object, *fields: str) -> None:
    """Raises ValueError unless these fields of the section of this name are 1 or more."""
    for field in fields:
        if getattr(section, field) < 1:
            raise ValueError(f"{name}.{field} = {getattr(section, field)}: it must be at least 1")


def _check_data(section: str, name: str, path: str | None) -> None:
    name = name.lower()  # as TorchTitan takes it
    if name not in DATASETS:
        raise ValueError(f"{section}.dataset = {name!r}: TorchTitan knows {', '.join(DATASETS)}; c4_test is local text")
    if name == "c4_test":
        folder = Path(path or DATASETS[name].path)
        if not any(folder.glob("*.json*")):
            raise ValueError(
                f"{section}.dataset_path = {path!r} holds no data.jsonl: point it at a folder with one, "
                "such as train_configs/assets/kjv here, or make one with scripts/make_data.py"
            )
        for file in sorted(folder.glob("*.jsonl")):
            _check_rows(file)
    if name in ("c4", "c4_validation") and not path and datasets.config.HF_HUB_OFFLINE:
        raise ValueError(
            f"{section}.dataset {name!r} is streamed from Hugging Face, but HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is "
            f"set: unset it, or use local text with --{section}.dataset=c4_test and --{section}.dataset_path, a "
            "folder with a data.jsonl"
        )


def _check_rows(file: Path) -> None:
    """All rows on rank 0, whose error ends the job, on others the first one. Lines may be empty, as for TorchTitan."""
    wanted = 'each line must be a JSON object whose "text" is a string, such as {"text": "In the beginning"}'
    rows = size = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            size += len(line)
            line = line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip(b" \t\r\n")
            if not line:
                continue
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                raise ValueError(f"{file}, line {number} is no JSON in UTF-8 ({error}): {wanted}") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                found = f"has {', '.join(map(repr, row))}" if isinstance(row, dict) else f"is {row!r:.40}"
                raise ValueError(f"{file}, line {number} {found}, and no text: {wanted}")
            rows += 1
            if os.environ.get("RANK", "0") != "0" or size > CHECKED_BYTES:
                break
    if not rows:
        raise ValueError(f"{file} has no rows: {wanted}")


def check_checkpoint(job_config: JobConfig, dims: ParallelDims) -> None:
    """Raises ValueError if the checkpoint that the run will find in its own folder was written with another number of
    data-parallel ranks, between which TorchTitan cannot carry the position in the data."""
    config = job_config.checkpoint
    if not config.enable or "dataloader" in config.exclude_from_loading:
        return
    folder = Path(job_config.job.dump_folder) / config.folder
    names = (path.parent.name.removeprefix("step-") for path in folder.glob("step-*/.metadata"))
    steps = [int(name) for name in names if name.isdecimal()]
    step = max(steps, default=-1) if config.load_step == -1 else config.load_step
    if step not in steps or step == 0:  # of a seed checkpoint TorchTitan loads the model alone
        return
    path = folder / f"step-{step}"
    states = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = sum(name.startswith("dataloader.dp_rank_") for name in states)
    ranks = dims.dp_replicate * dims.dp_shard
    if saved not in (0, ranks):
        raise ValueError(
            f"{path} holds the position in the data of {saved} data-parallel ranks, and this run has {ranks}. "
            "TorchTitan cannot carry it over: go on with --checkpoint.exclude_from_loading=dataloader, and the data "
            "begin with their first row again, or with the former number of ranks"
        )
