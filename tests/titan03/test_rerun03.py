"""Steps of TorchTitan 0.3's trainer in which rows did not fit run again."""

import processes
import pytest

pytestmark = pytest.mark.integration


def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones() -> None:
    processes.check(2, "parallel_rerun.py", "cpu")
