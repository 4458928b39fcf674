"""Calibration batches in one .npz file: the scripts that make them and the peers that read them share this module.

numpy only, so that it runs in every peer's environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
"""{model input: array}; batches may differ in shape."""


def write_batches(path: Path, batches: Sequence[Batch]) -> None:
    """Keys are '<number of the batch>/<input>'."""
    arrays: dict[str, Any] = {f"{i}/{name}": v for i, batch in enumerate(batches) for name, v in batch.items()}
    np.savez(path, **arrays)


def read_batches(path: Path) -> list[Batch]:
    """What `write_batches` was given, in its order."""
    batches: dict[int, Batch] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            number, _, name = key.partition("/")
            batches.setdefault(int(number), {})[name] = file[key]
    return [batches[number] for number in sorted(batches)]
