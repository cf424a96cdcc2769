"""A program for torchrun: tokens over gloo against one process and TorchTitan's order of rows, on CPU.

Run by tests/test_moe_transport.py.
"""

import pytest
import torch
import torch.distributed as dist
from moe_cases import CASES, Case, capacities, check_against_one_process, tokens_of
from torchtitan.models.moe.kernels import generate_permute_indices

from titan_mxfp8.moe import choose
from titan_mxfp8.moe.collective import Collective


def torchtitan_rows(case: Case, rank: int, ranks: int, which: int) -> torch.Tensor:
    """The rows of the data (0) or scales (1) in the order of TorchTitan's dispatch: what each source sends in the order
    of its experts, then TorchTitan's permutation, less the padding."""
    local = case.experts // ranks
    sent, counts = [], []
    for source in range(ranks):
        tokens = tokens_of(case, source, ranks)
        ids = tokens.expert_ids.view(-1)
        order = torch.argsort(ids, stable=True)
        order = order[ids[order] // local == rank]
        sent.append(tokens.payload[which].view(torch.uint8)[order // case.slots])
        counts.append(torch.bincount(ids, minlength=case.experts)[rank * local : (rank + 1) * local])
    rows, counts = torch.cat(sent), torch.cat(counts).int()
    padded = rows.shape[0] + local * 8
    indices, _, _ = generate_permute_indices(counts, local, ranks, padded, 8, use_cpu=True)
    return rows[indices[indices >= 0].long()]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
transport, reason = choose("auto", dist.group.WORLD, torch.device("cpu"))
assert reason == "collective: symmetric cannot be used: it needs NVIDIA GPUs of SM80 or newer", reason
with pytest.raises(ValueError, match="cannot be used: it needs NVIDIA GPUs"):
    choose("symmetric", dist.group.WORLD, torch.device("cpu"))
for case in CASES:
    if case.experts % ranks:
        continue
    received = check_against_one_process(transport, case)
    for which in (0, 1):
        assert torch.equal(received[which].view(torch.uint8), torchtitan_rows(case, rank, ranks, which)), case
    for capacity in capacities(case, ranks):
        check_against_one_process(transport, case, capacity=capacity)
# in a transport of the same group made later
room, again = max(max(case.tokens) for case in CASES), Collective(dist.group.WORLD)
assert again.shared is transport.shared and again.shared.room == room
many = Case((room + (rank == 1),), 64, 4, 1)
again.dispatch(*tokens_of(many, rank, ranks).arguments(), many.experts)
if rank == 1:  # which alone refuses them
    with pytest.raises(ValueError, match=f"{room + 1} tokens.*name max_tokens"):
        again.dispatch(*tokens_of(many, rank, ranks).arguments(), many.experts, 5)
print(f"{len(CASES)} cases on {ranks} ranks")
del transport  # which has the group: gloo's threads would go on while Python ends, which may abort
dist.destroy_process_group()
