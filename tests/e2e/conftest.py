"""Fixtures of the end-to-end tests: one tiny image model, one bundle of it, and measurements cut short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import REPOSITORY, apply, cli, image_recipe

from runtime.probe import Probe


@pytest.fixture(autouse=True)
def quick_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge on the main backend alone and without the probes of load time and memory, which each take a process."""
    monkeypatch.setattr("runtime.validate.available_others", lambda manifest, main: ())
    monkeypatch.setattr("runtime.benchmark.probe", lambda *args: Probe((1.0,), (1.0,)))


@pytest.fixture(scope="module")
def unprobed() -> Iterator[None]:
    """Without these probes, for the bundles that the tests of a module share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.benchmark.probe", lambda *args: Probe((1.0,), (1.0,)))
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


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The bundle of recipes/quickstart.yaml by the real command, its speed gate made lenient, and what was printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    speed = ["--set", "validate.gates.3.min_speedup=0.001", "--set", "validate.benchmark.iterations=20"]
    recipe = str(REPOSITORY / "recipes/quickstart.yaml")
    done = cli(["apply", recipe, "--out", "out/q", "--cache", "cache", *speed], folder)
    assert done.returncode == 0, done.stderr
    return folder / "out/q", done.stdout
