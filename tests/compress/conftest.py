"""What tests of torch modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shortcuts import quick_run

__all__ = ["quick_run"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products wait longer for a second thread than they take; and sums come out the same everywhere."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
