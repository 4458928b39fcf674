"""What tests of torch modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compress.models.fresh_reader import answer


@pytest.fixture(autouse=True, scope="session")
def read_back_here() -> Iterator[None]:
    """Load checkpoints back in this process: the one of their own takes seconds, and test_loading_back.py tries it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.export.loading_back.ask", lambda work, seconds: answer(work))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products wait longer for a second thread than they take; and sums come out the same everywhere."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
