"""Steps of TorchTitan 0.2.2's trainer in which rows did not fit run again."""

import processes
from test_models import cpu_only


@cpu_only
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones() -> None:
    processes.check(2, "parallel_rerun.py", "cpu")
