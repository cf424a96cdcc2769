"""The parallel layouts that compare_layouts.py trains, and the twin of each in one process."""

from dataclasses import dataclass

BATCH = 2  # sequences of one rank in one microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to spread a training over processes.

    Attributes:
        flags: TorchTitan's, besides those that every run has.
        data_ranks: data-parallel degree: ranks that read data of their own.
        accumulate: microbatches of each of them in a step.
        batch: sequences in a microbatch.
        expert_batch: sequences whose tokens meet in one expert GEMM: ``batch`` times the data ranks that expert
            parallelism joins, or the microbatch of a pipeline times them.
        favoured_experts: so many experts, the first ones, get every token: under EP some ranks get none.
        gpu_only: what TorchTitan cannot do on CPUs, converters or not (CP has no sharding rule for their attention).
    """

    name: str
    processes: int
    flags: tuple[str, ...] = ()
    data_ranks: int = 1
    accumulate: int = 1
    batch: int = BATCH
    expert_batch: int = BATCH
    favoured_experts: int = 0
    gpu_only: bool = False


def parallel(**degrees: int | str) -> tuple[str, ...]:
    """``parallel(tensor=2)`` gives ``--parallelism.tensor_parallel_degree=2``; likewise for each of TorchTitan's."""
    names = {"reshard": "fsdp_reshard_after_forward", "schedule": "pipeline_parallel_schedule"}
    names |= {"shard": "data_parallel_shard_degree", "replicate": "data_parallel_replicate_degree"}
    return tuple(f"--parallelism.{names.get(key, f'{key}_parallel_degree')}={value}" for key, value in degrees.items())


# TorchTitan takes the experts' ranks (EP) from those of FSDP and TP. With "EP 2" on 2 processes every expert is whole.
LAYOUTS = (
    Layout(name="FSDP 2", processes=2, data_ranks=2),
    Layout(name="FSDP 2 accumulate 2", processes=2, data_ranks=2, accumulate=2),
    Layout(name="DDP 2", processes=2, flags=parallel(replicate=2, shard=1), data_ranks=2),
    Layout(name="EP 2", processes=2, flags=parallel(expert=2), data_ranks=2, expert_batch=4),
    Layout(
        name="EP 2 always reshard",
        processes=2,
        flags=parallel(expert=2, reshard="always"),
        data_ranks=2,
        expert_batch=4,
    ),
    Layout(
        name="EP 2 never reshard", processes=2, flags=parallel(expert=2, reshard="never"), data_ranks=2, expert_batch=4
    ),
    Layout(
        name="EP 2 one rank gets every token",
        processes=2,
        flags=parallel(expert=2),
        data_ranks=2,
        expert_batch=4,
        favoured_experts=4,
    ),
    Layout(name="TP 2", processes=2, flags=parallel(tensor=2)),
    Layout(name="PP 2", processes=2, flags=parallel(pipeline=2, schedule="1F1B"), expert_batch=1),
    Layout(
        name="PP 2 interleaved", processes=2, flags=parallel(pipeline=2, schedule="Interleaved1F1B"), expert_batch=1
    ),
    Layout(name="CP 2", processes=2, flags=parallel(context=2), gpu_only=True),
    Layout(name="FSDP 4 + EP 2", processes=4, flags=parallel(expert=2), data_ranks=4, expert_batch=4),
    Layout(name="FSDP 4 + EP 4", processes=4, flags=parallel(expert=4), data_ranks=4, expert_batch=8),
    Layout(name="HSDP 2x2", processes=4, flags=parallel(replicate=2, shard=2), data_ranks=4),
    Layout(
        name="HSDP 2x2 + EP 2",
        processes=4,
        flags=parallel(replicate=2, shard=2, expert=2),
        data_ranks=4,
        expert_batch=4,
    ),
    Layout(
        name="HSDP 2x2 + EP 2 accumulate 2",
        processes=4,
        flags=parallel(replicate=2, shard=2, expert=2),
        data_ranks=4,
        accumulate=2,
        expert_batch=4,
    ),
    Layout(name="TP 4", processes=4, flags=parallel(tensor=4)),
    Layout(name="FSDP 2 + TP 2", processes=4, flags=parallel(tensor=2), data_ranks=2),
    Layout(
        name="FSDP 2 + TP 2 + EP 2",
        processes=4,
        flags=parallel(tensor=2, expert=2),
        data_ranks=2,
    ),
    Layout(
        name="FSDP 2 + TP 2 + EP 4",
        processes=4,
        flags=parallel(tensor=2, expert=4),
        data_ranks=2,
        expert_batch=4,
    ),
    Layout(
        name="FSDP 2 + TP 2 + EP 2 + ETP 2",
        processes=4,
        flags=parallel(tensor=2, expert=2, expert_tensor=2),
        data_ranks=2,
        expert_batch=4,
    ),
    Layout(
        name="PP 2 + FSDP 2 + EP 2",
        processes=4,
        flags=parallel(pipeline=2, schedule="1F1B", expert=2),
        data_ranks=2,
        expert_batch=2,
    ),
    Layout(
        name="PP 2 interleaved + FSDP 2 + EP 2",
        processes=4,
        flags=parallel(pipeline=2, schedule="Interleaved1F1B", expert=2),
        data_ranks=2,
        expert_batch=2,
    ),
    Layout(name="PP 2 + TP 2", processes=4, flags=parallel(pipeline=2, schedule="1F1B", tensor=2), expert_batch=1),
    Layout(name="CP 2 + FSDP 2 + EP 2", processes=4, flags=parallel(context=2, expert=2), data_ranks=2, gpu_only=True),
)


def twin_of(layout: Layout) -> Layout:
    """One process that reads the layout's sequences in microbatches of ``expert_batch``."""
    sequences = layout.data_ranks * layout.accumulate * layout.batch
    favoured = layout.favoured_experts > 0
    return Layout(
        name=f"1 process {sequences // layout.expert_batch} x {layout.expert_batch}" + " favoured" * favoured,
        processes=1,
        accumulate=sequences // layout.expert_batch,
        batch=layout.expert_batch,
        expert_batch=layout.expert_batch,
        favoured_experts=layout.favoured_experts,
    )
