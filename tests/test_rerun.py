"""Steps of TorchTitan 0.2.2's trainer in which rows did not fit run again."""

from test_models import cpu_only
from training import check_reruns


@cpu_only
def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones() -> None:
    check_reruns("cpu")
