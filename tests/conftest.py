"""What all tests share: nothing written here needs to outlive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> None:
    """Without `fsync`, which takes milliseconds for each file, but for those that bring their own."""
    os.fsync = lambda handle: None  # type: ignore[assignment]


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each task, with a small model and data under the names that pages and recipes use."""
    from sample_projects import write_projects

    folder = tmp_path_factory.mktemp("projects")
    write_projects(folder)
    return folder
