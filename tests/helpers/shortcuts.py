"""What tests leave out of a run where it is not what they test: each of these takes seconds in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime.measure.probe import Probe


@contextmanager
def without_probes() -> Iterator[None]:
    """Judge without the probes of load time and memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.measure.benchmark.probe", lambda *args: Probe((1.0,), (1.0,)))
        yield


@contextmanager
def quick_judge() -> Iterator[None]:
    """Judge on the main backend alone, without the probes of load time and memory."""
    with without_probes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.judge.validate.available_others", lambda manifest, main: ())
        yield


@contextmanager
def quick_reader() -> Iterator[None]:
    """Load checkpoints back in this process; test_loading_back.py tries the one of their own."""
    from compress.models.fresh_reader import answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.export.loading_back.ask", lambda work, seconds: answer(work))
        yield


@pytest.fixture(scope="module")
def no_probes() -> Iterator[None]:
    """Judge on all backends, without the probes."""
    with without_probes():
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_run() -> Iterator[None]:
    """Both, for the tests of a folder whose conftest.py imports this."""
    with quick_judge(), quick_reader():
        yield
