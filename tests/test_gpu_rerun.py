"""Steps of TorchTitan 0.2.2 in which rows did not fit run again on one or two GPUs, eagerly and as CUDA graphs."""

import pytest
import torch
from processes import check

from titan_mxfp8.titan.rerun import GraphLook

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_graph_tells_the_host_long_before_it_ends() -> None:
    device = torch.device("cuda", 0)
    look, wanted, x = GraphLook(device), torch.zeros(2, dtype=torch.int32, device=device), torch.ones(8192, 8192)
    x = x.to(device, torch.bfloat16)
    x @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wanted.add_(1)
        look.capture([10, 20], wanted.clone())
        for _ in range(100):
            x @ x
    for replay in (2, 4, 6):
        graph.replay()
        look.forget()
        graph.replay()
        assert look.read() == {10: replay, 20: replay}
        assert not torch.cuda.current_stream().query(), "the host waited for the end"
    look.forget()
    assert look.read() is None, "of a graph that was not replayed"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("how", [(), ("graph",)], ids=["eager", "graph"])
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones(how: tuple[str, ...], processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip("needs two GPUs")
    check(processes, "parallel_rerun.py", "cuda", *how)
