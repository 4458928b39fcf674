"""What a teacher gives for a batch: computed, or read from disk where its outputs were kept. Torch.

Kept outputs are worth their disk where every sample is seen again as it is: no augmentation, more than one epoch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.distill.batch import Batch
from compress.distill.watch import Seen

Answer = Callable[[Batch], Seen]
"""What a model gives for a batch, no gradients."""
FILE = "teacher.npy"
BATCH = 64
"""Samples that the teacher answers together when its outputs are kept."""


@dataclass(frozen=True)
class Kept:
    """A teacher's only output for every row of the training set. `values`: float32 [n, width], on disk."""

    name: str
    values: np.ndarray

    def __call__(self, batch: Batch) -> Seen:
        found = torch.from_numpy(np.ascontiguousarray(self.values[batch.rows]))
        return Seen({self.name: found.to(batch.weights.device)})


def keep_outputs(
    answer: Answer,
    batch_of: Callable[[np.ndarray], Batch],
    n: int,
    folder: Path,
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> Kept:
    """Ask for every row once and keep the answers in `folder`, under their name when whole; one output [b, width]."""
    path = folder / FILE
    name, first = next(iter(answer(batch_of(np.arange(1))).outputs.items()))
    if not path.exists():
        draft = folder / f"draft-{os.getpid()}-{FILE}"  # of several processes each makes its own; the last one stays
        values = np.lib.format.open_memmap(draft, "w+", np.float32, (n, first.shape[1]))
        for start in progress(range(0, n, BATCH), "the teacher's outputs"):
            rows = np.arange(start, min(start + BATCH, n))
            values[rows] = _array(answer(batch_of(rows)).outputs[name])
        values.flush()
        del values
        os.replace(draft, path)
    return Kept(name, np.load(path, mmap_mode="r"))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()
