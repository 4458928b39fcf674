"""What a teacher gives for a batch: computed, or read from disk where its outputs were kept. Torch.

Kept outputs are worth their disk where every sample is seen again as it is: no augmentation, more than one epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.distill.batch import Batch
from compress.distill.watch import Seen
from runtime.bundle.files import put_in_place, sha256_of
from runtime.progress import Progress

Answer = Callable[[Batch], Seen]
"""What a model gives for a batch, no gradients."""
PREFIX = "teacher-"
BATCH = 64
"""Samples that the teacher answers together when its outputs are kept."""


@dataclass(frozen=True)
class KeptOutputs:
    """A teacher's only output for every row of the training set. `values`: float32 [n, width], on disk."""

    name: str
    values: np.ndarray

    def __call__(self, batch: Batch) -> Seen:
        values = torch.from_numpy(np.ascontiguousarray(self.values[batch.rows]))
        return Seen({self.name: values.to(batch.weights.device)})


def keep_outputs(
    answer: Answer,
    batch_of: Callable[[np.ndarray], Batch],
    n: int,
    folder: Path,
    progress: Progress,
) -> KeptOutputs:
    """Ask for every row once and keep the answers in `folder`, under their digest when whole; one output [b, width]."""
    path = next((file for file in folder.glob(f"{PREFIX}*.npy") if file.name == _name_by_digest(file)), None)
    name, first = next(iter(answer(batch_of(np.arange(1))).outputs.items()))
    if path is None:
        draft = folder / f"draft-{os.getpid()}.npy"  # of several processes each makes its own
        values = np.lib.format.open_memmap(draft, "w+", np.float32, (n, first.shape[1]))
        for start in progress(range(0, n, BATCH), "the teacher's outputs"):
            rows = np.arange(start, min(start + BATCH, n))
            values[rows] = _to_array(answer(batch_of(rows)).outputs[name])
        values.flush()
        del values
        path = folder / _name_by_digest(draft)
        put_in_place(draft, path)
    return KeptOutputs(name, np.load(path, mmap_mode="r"))


def _name_by_digest(file: Path) -> str:
    """Return the name of a file of kept outputs: any other byte is another name."""
    return f"{PREFIX}{sha256_of(file)}.npy"


def _to_array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()
