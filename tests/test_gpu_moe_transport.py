"""Tokens to their experts and back on GPUs: kernels on one, and ``gpu_moe_ranks.py`` on all there are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from moe_cases import BF16, CASES, E4M3, Case, check_against_one_process

from titan_mxfp8.moe import kernels, rows
from titan_mxfp8.moe.transport import Local, read_later

PROGRAM = Path(__file__).parent / "gpu_moe_ranks.py"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs GPUs that read each other's memory")


@pytest.mark.parametrize("case", CASES)
def test_one_rank(case: Case):
    check_against_one_process(Local(), case, "cuda")


def test_large():
    """Kernels against the definition on the same GPU, where addresses pass 2^31."""
    tokens, dim, experts, k = 70_000, 7168, 160, 6
    ids = torch.rand(tokens, experts, device="cuda").topk(k, 1).indices.int()
    scores = torch.rand(tokens, k, device="cuda")
    found, expected = kernels.make_metadata(ids, scores, experts), rows.make_metadata(ids, scores, experts)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    x = torch.randint(0, 120, (tokens, dim), dtype=torch.uint8, device="cuda").view(E4M3)
    (received,), handle = Local().dispatch([x], ids, scores, experts, tokens * k)
    for slot in range(k):
        assert torch.equal(received.view(torch.uint8)[handle.destinations[:, slot].long()], x.view(torch.uint8)), slot
    sums, _ = Local().combine([received.to(BF16)], False, None, handle, torch.float32)
    assert torch.equal(sums, x.float() * k)  # sums of six equal numbers of 4 bits are exact


def test_the_host_waits_for_counts_alone():
    """Not for what it asked of the GPU after them."""
    second = int(2e9)  # cycles: a second of an H200
    torch.cuda._sleep(second // 10)
    counts = read_later(torch.full((3,), 7, dtype=torch.int32, device="cuda").cumsum(0))
    torch.cuda._sleep(second)
    end = torch.cuda.Event()
    end.record()
    assert counts().tolist() == [7, 14, 21] and not end.query()


@several
@pytest.mark.alone
def test_several_ranks():
    ranks = min(torch.cuda.device_count(), 8)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", PROGRAM]
    result = subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=900)
    print(result.stdout)
    assert result.returncode == 0 and result.stdout.count("passed") == ranks, result.stderr[-6000:]


@several
@pytest.mark.alone
def test_a_rank_that_died_ends_the_others():
    """Not under torchrun, which would end them itself. The process group's timeout is 10 s."""
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
    started = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, "die"],
            env=environment() | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    print(f"{time.monotonic() - started:.0f} s", *outputs)
    assert processes[1].returncode == 0 and processes[0].returncode != 0
    assert "rank 0 failed to receive signal from rank 1" in outputs[0] and "CUDA error" in outputs[0]


def environment() -> dict[str, str]:
    paths = os.pathsep.join((str(PROGRAM.parent.parent), str(PROGRAM.parent)))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
