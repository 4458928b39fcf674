"""What all tests share: nothing written here needs to outlive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    # The first cases import and compile; and fixtures by which a test changes a setting hold for all of its cases.
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.function_scoped_fixture),
)
settings.load_profile("repeatable")


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
