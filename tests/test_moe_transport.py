"""Tokens to their experts and back: one process here, several over gloo in ``parallel_moe.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from moe_cases import CASES, Case, check_against_one_process, tokens_of

from titan_mxfp8.moe import choose
from titan_mxfp8.moe.transport import Local

TESTS = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_processes(ranks: int):
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", TESTS / "parallel_moe.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    result = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=600)
    print(result.stdout)
    assert result.returncode == 0 and result.stdout.count("passed") == ranks, result.stderr[-6000:]


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: Case):
    check_against_one_process(Local(), case, [tokens_of(case, 0, 1)], "cpu")


def test_slots_without_an_expert_are_sent_nowhere():
    x = torch.arange(64.0).view(4, 16)
    expert_ids = torch.tensor([[0, -1], [2, 0], [-1, 7], [1, 1]])  # of 3 experts; the last names one twice
    scores = torch.arange(8.0).view(4, 2)
    (landed,), landing = Local().dispatch([x], expert_ids, scores, 3, False)
    assert landing.offs.tolist() == [2, 4, 5]
    assert landing.rows.tolist() == [[0, -1], [4, 1], [-1, -1], [2, 3]]
    assert torch.equal(landed[:5], x[[0, 1, 3, 3, 1]])
    assert landing.scores[:5].tolist() == [0, 3, 6, 7, 2]
    y = torch.full_like(landed, float("nan"))
    y[:5] = landed[:5]
    out, values = Local().combine([y], False, y[:, 1].contiguous(), landing, torch.float32)
    assert torch.equal(out, x * torch.tensor([1.0, 2, 0, 2])[:, None])
    assert values.tolist() == [[1, 0], [17, 17], [0, 0], [49, 49]]


def test_nothing_of_a_landing_is_an_input():
    expert_ids, scores = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    _, landing = Local().dispatch([torch.ones(3, 32)], expert_ids, scores, 1, True)
    inputs = {expert_ids.data_ptr(), scores.data_ptr()}
    pointers = [x.data_ptr() for x in landing if x.numel()]
    assert inputs.isdisjoint(pointers) and len(set(pointers)) == len(pointers)


def test_bad_input():
    x, ids, scores = torch.ones(3, 32), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for parts, expert_ids, given, message in (
        ([x, x, x], ids, scores, "one or two contiguous"),
        ([x[:2]], ids, scores, "one or two contiguous"),
        ([x.t().contiguous().t()], ids, scores, "one or two contiguous"),
        ([x], ids.float(), scores, "must be integers"),
        ([x], ids, scores.double(), "must be float32"),
        ([x], ids, scores[:, :1], "must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            Local().dispatch(parts, expert_ids, given, 4, False)


def test_choice():
    transport, reason = choose("auto", None, CPU)
    assert isinstance(transport, Local) and "one rank" in reason
    with pytest.raises(ValueError, match="unknown transport 'fast': use one of auto, collective, symmetric"):
        choose("fast", None, CPU)
