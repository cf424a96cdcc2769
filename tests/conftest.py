"""For every test: the scripts can be imported by name, and random numbers do not depend on which tests ran before."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
