"""Steps of TorchTitan 0.3's trainer in which rows did not fit run again on two GPUs, eagerly and as CUDA graphs."""

import processes
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("how", [(), ("graph",)], ids=["eager", "graph"])
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones(how: tuple[str, ...]) -> None:
    processes.check(2, "parallel_rerun.py", "cuda", *how)
