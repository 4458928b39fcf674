"""Fixtures of the end-to-end tests: one tiny image model, one bundle of it, and measurements cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makers import apply, image_recipe
from shortcuts import quick_judge, quick_run

__all__ = ["quick_run"]


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model and its data, and a recipe that stands in it. Not to be written to."""
    folder = tmp_path_factory.mktemp("net")
    return folder, image_recipe(folder)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finished results that tests may share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def bundle(net: tuple[Path, dict[str, Any]], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's bundle. Not to be written to."""
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    with quick_judge():
        apply(net[1], out, cache, net[0])
    return out
