"""Steps of TorchTitan 0.3's trainer in which rows did not fit run again."""

from training import check_reruns


def test_a_step_whose_rows_did_not_fit_ends_as_with_counted_ones() -> None:
    check_reruns("cpu")
