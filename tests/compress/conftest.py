"""What tests of torch modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def small_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of the texts of `streaming.texts`, at most."""
    monkeypatch.setattr("compress.blocks.activations.ROWS", 24)


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read whole for a digest that is remembered."""
    from compress.store import digests

    read: list[Path] = []
    whole = digests.sha256_of
    monkeypatch.setattr(digests, "sha256_of", lambda path: read.append(path) or whole(path))
    return read


@pytest.fixture
def saved_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained or learned is written down where a test may break it off."""
    monkeypatch.setattr("compress.store.training_state.SAVE_SECONDS", 0.0)
