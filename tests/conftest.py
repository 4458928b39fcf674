"""What all tests share: nothing written here needs to outlive a power failure."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> None:
    """Without `fsync`, which takes milliseconds for each file, but for those that bring their own."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
