"""A program for torchrun: tokens over gloo against one process and TorchTitan's order of rows, on CPU.

Run by tests/test_moe_transport.py.
"""

import torch
import torch.distributed as dist
from moe_cases import CASES, Case, Tokens, capacities, check_against_one_process, tokens_of
from torchtitan.models.moe.kernels import generate_permute_indices

from titan_mxfp8.moe import choose
from titan_mxfp8.moe.collective import Collective


def torchtitan_rows(case: Case, all_tokens: list[Tokens], rank: int, which: int) -> torch.Tensor:
    """The rows of the data (0) or scales (1) in the order of TorchTitan's dispatch: what each source sends in the order
    of its experts, then TorchTitan's permutation, less the padding."""
    local = case.experts // len(all_tokens)
    sent, counts = [], []
    for tokens in all_tokens:
        ids = tokens.expert_ids.view(-1)
        order = torch.argsort(ids, stable=True)
        order = order[ids[order] // local == rank]
        sent.append(tokens.payload[which].view(torch.uint8)[order // case.slots])
        counts.append(torch.bincount(ids, minlength=case.experts)[rank * local : (rank + 1) * local])
    rows, counts = torch.cat(sent), torch.cat(counts).int()
    padded = rows.shape[0] + local * 8
    indices, _, _ = generate_permute_indices(counts, local, len(all_tokens), padded, 8, use_cpu=True)
    return rows[indices[indices >= 0].long()]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
transport, reason = choose("auto", dist.group.WORLD, torch.device("cpu"))
assert reason == "collective: symmetric cannot be used: it needs NVIDIA GPUs of SM80 or newer", reason
try:
    choose("symmetric", dist.group.WORLD, torch.device("cpu"))
except ValueError as error:
    assert "cannot be used: it needs NVIDIA GPUs" in str(error)
else:
    raise AssertionError("symmetric memory of CPUs")
for case in CASES:
    if case.experts % ranks:
        continue
    all_tokens = [tokens_of(case, source, ranks) for source in range(ranks)]
    received, _ = check_against_one_process(transport, case, all_tokens, "cpu")
    for which in (0, 1):
        expected = torchtitan_rows(case, all_tokens, rank, which)
        assert torch.equal(received[which].view(torch.uint8), expected), case
transport.shared.wanted.raises = False
for case in CASES:
    if not case.experts % ranks:
        all_tokens = [tokens_of(case, source, ranks) for source in range(ranks)]
        for capacity in capacities(case, ranks):
            check_against_one_process(transport, case, all_tokens, "cpu", capacity)
# in a transport of the same group made later
room, again = max(max(case.tokens) for case in CASES), Collective(dist.group.WORLD)
assert again.shared is transport.shared and again.shared.room == room
many = Case((room + (rank == 1),), 64, 4, 1)
again.dispatch(*tokens_of(many, rank, ranks).arguments(), many.experts)
if rank == 1:  # which alone refuses them
    try:
        again.dispatch(*tokens_of(many, rank, ranks).arguments(), many.experts, 5)
    except ValueError as error:
        assert f"{room + 1} tokens" in str(error) and "name max_tokens" in str(error), error
    else:
        raise AssertionError("more tokens than there is room for")
print(f"{len(CASES)} cases on {ranks} ranks")
del transport  # which has the group: gloo's threads would go on while Python ends, which may abort
dist.destroy_process_group()
