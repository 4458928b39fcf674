"""What a teacher gives for a batch: computed, read from disk where its outputs were kept, or remembered. Torch.

Kept outputs are worth their disk where every sample is seen again as it is: no augmentation, more than one epoch.
Where samples are changed at random and come again so, answers are remembered by the batch.
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
from compress.store.progress import Progress
from runtime.bundle.files import put_in_place, sha256_of

Answer = Callable[[Batch], Seen]
"""What a model gives for a batch, no gradients."""
PREFIX = "teacher-"
BATCH = 64
"""Samples that the teacher answers together when its outputs are kept."""


@dataclass(frozen=True)
class Kept:
    """A teacher's only output for every row of the training set. `values`: float32 [n, width], on disk."""

    name: str
    values: np.ndarray

    def __call__(self, batch: Batch) -> Seen:
        values = torch.from_numpy(np.ascontiguousarray(self.values[batch.rows]))
        return Seen({self.name: values.to(batch.weights.device)})


class Remembering:
    """A teacher that is asked once for each batch. Its answers stay in memory, on the CPU, as long as this does.

    Of one training set and one way of changing it: a batch is known by its rows and by when it was first drawn.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.known: dict[tuple[bytes, tuple[int, int] | None], dict[str, Tensor]] = {}

    def __call__(self, batch: Batch) -> Seen:
        key = (batch.rows.tobytes(), batch.drawn)
        if key not in self.known:
            seen = self.answer(batch)
            self.known[key] = {name: tensor.detach().cpu() for name, tensor in seen.outputs.items()}
            return seen
        return Seen({name: tensor.to(batch.weights.device) for name, tensor in self.known[key].items()})


def keep_outputs(
    answer: Answer,
    batch_of: Callable[[np.ndarray], Batch],
    n: int,
    folder: Path,
    progress: Progress,
) -> Kept:
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
    return Kept(name, np.load(path, mmap_mode="r"))


def _name_by_digest(file: Path) -> str:
    """Return the name of a file of kept outputs: any other byte is another name."""
    return f"{PREFIX}{sha256_of(file)}.npy"


def _to_array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()
