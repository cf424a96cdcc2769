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
    """

    name: str
    processes: int
    flags: tuple[str, ...] = ()
    data_ranks: int = 1
    accumulate: int = 1
    batch: int = BATCH
    expert_batch: int = BATCH
    favoured_experts: int = 0

    @property
    def gpu_only(self) -> bool:
        """Whether TorchTitan cannot do it on CPUs, converters or not: CP has no sharding rule for their attention."""
        return self.name.startswith("CP")


def parallel(**degrees: int | str) -> tuple[str, ...]:
    """``parallel(tensor=2)`` gives ``--parallelism.tensor_parallel_degree=2``; likewise for each of TorchTitan's."""
    names = {"reshard": "fsdp_reshard_after_forward", "schedule": "pipeline_parallel_schedule"}
    names |= {"shard": "data_parallel_shard_degree", "replicate": "data_parallel_replicate_degree"}
    return tuple(f"--parallelism.{names.get(key, f'{key}_parallel_degree')}={value}" for key, value in degrees.items())


def _layouts() -> tuple[Layout, ...]:
    """By name: processes, data ranks, sequences of an expert GEMM, degrees, and what else a layout has."""
    interleaved, one = "Interleaved1F1B", "1F1B"
    table: dict[str, tuple[int, int, int, dict[str, int | str], dict[str, int]]] = {
        "FSDP 2": (2, 2, 2, {}, {}),
        "FSDP 2 accumulate 2": (2, 2, 2, {}, {"accumulate": 2}),
        "DDP 2": (2, 2, 2, {"replicate": 2, "shard": 1}, {}),
        "EP 2": (2, 2, 4, {"expert": 2}, {}),
        "EP 2 always reshard": (2, 2, 4, {"expert": 2, "reshard": "always"}, {}),
        "EP 2 never reshard": (2, 2, 4, {"expert": 2, "reshard": "never"}, {}),
        "EP 2 one rank gets every token": (2, 2, 4, {"expert": 2}, {"favoured_experts": 4}),
        "TP 2": (2, 1, 2, {"tensor": 2}, {}),
        "PP 2": (2, 1, 1, {"pipeline": 2, "schedule": one}, {}),
        "PP 2 interleaved": (2, 1, 1, {"pipeline": 2, "schedule": interleaved}, {}),
        "CP 2": (2, 1, 2, {"context": 2}, {}),
        "FSDP 4 + EP 2": (4, 4, 4, {"expert": 2}, {}),
        "FSDP 4 + EP 4": (4, 4, 8, {"expert": 4}, {}),
        "HSDP 2x2": (4, 4, 2, {"replicate": 2, "shard": 2}, {}),
        "HSDP 2x2 + EP 2": (4, 4, 4, {"replicate": 2, "shard": 2, "expert": 2}, {}),
        "HSDP 2x2 + EP 2 accumulate 2": (4, 4, 4, {"replicate": 2, "shard": 2, "expert": 2}, {"accumulate": 2}),
        "TP 4": (4, 1, 2, {"tensor": 4}, {}),
        "FSDP 2 + TP 2": (4, 2, 2, {"tensor": 2}, {}),
        "FSDP 2 + TP 2 + EP 2": (4, 2, 2, {"tensor": 2, "expert": 2}, {}),
        "FSDP 2 + TP 2 + EP 4": (4, 2, 4, {"tensor": 2, "expert": 4}, {}),
        "FSDP 2 + TP 2 + EP 2 + ETP 2": (4, 2, 4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
        "PP 2 + FSDP 2 + EP 2": (4, 2, 2, {"pipeline": 2, "schedule": one, "expert": 2}, {}),
        "PP 2 interleaved + FSDP 2 + EP 2": (4, 2, 2, {"pipeline": 2, "schedule": interleaved, "expert": 2}, {}),
        "PP 2 + TP 2": (4, 1, 1, {"pipeline": 2, "schedule": one, "tensor": 2}, {}),
        "CP 2 + FSDP 2 + EP 2": (4, 2, 2, {"context": 2, "expert": 2}, {}),
    }
    return tuple(
        Layout(name=name, processes=n, data_ranks=data, expert_batch=batch, flags=parallel(**degrees), **more)
        for name, (n, data, batch, degrees, more) in table.items()
    )


LAYOUTS = _layouts()  # TorchTitan takes the experts' ranks (EP) from those of FSDP and TP


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
