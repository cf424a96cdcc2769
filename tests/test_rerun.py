"""Steps of TorchTitan 0.2.2's trainer in which rows did not fit run again."""

import processes
import pytest
import torch
from test_models import cpu_only

from titan_mxfp8.moe import choose


@pytest.mark.integration
@cpu_only
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones() -> None:
    processes.check(2, "parallel_rerun.py", "cpu")


def test_what_was_wanted_is_one_number_whatever_a_device_is_called() -> None:
    """Rank 1 of a trainer calls its device cpu:1, its tensors say cpu."""
    first, second, unnamed = (choose("auto", None, torch.device(name))[0] for name in ("cpu:0", "cpu:1", "cpu"))
    assert first.shared.wanted is second.shared.wanted is unnamed.shared.wanted
