"""Steps of TorchTitan 0.2.2's trainer in which rows did not fit run again on two GPUs, eagerly and as CUDA graphs."""

import pytest
import torch
from training import check_reruns

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("how", [(), ("graph",)], ids=["eager", "graph"])
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones(how: tuple[str, ...]) -> None:
    check_reruns("cuda", *how)
