"""Fixtures of the end-to-end tests: one tiny image model, one bundle of it, and measurements cut short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import apply, image_recipe

from compress.models.fresh_reader import answer
from runtime.measure.probe import Probe


@pytest.fixture(autouse=True)
def quick_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge on the main backend alone and without the probes of load time and memory, which each take a process."""
    monkeypatch.setattr("runtime.judge.validate.available_others", lambda manifest, main: ())
    monkeypatch.setattr("runtime.measure.benchmark.probe", lambda *args: Probe((1.0,), (1.0,)))


@pytest.fixture(scope="session", autouse=True)
def read_back_here() -> Iterator[None]:
    """Load checkpoints back in this process: the one of their own, which takes seconds, has its test elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.export.loading_back.ask", lambda work, seconds: answer(work))
        yield


@pytest.fixture(scope="module")
def unprobed() -> Iterator[None]:
    """Without these probes, for the bundles that the tests of a module share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.measure.benchmark.probe", lambda *args: Probe((1.0,), (1.0,)))
        yield


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model and its data, and a recipe that stands in it. Not to be written to."""
    folder = tmp_path_factory.mktemp("net")
    return folder, image_recipe(folder)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished steps that tests may share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def bundle(net: tuple[Path, dict[str, Any]], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's bundle. Not to be written to."""
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    apply(net[1], out, cache, net[0])
    return out
