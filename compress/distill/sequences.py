"""Texts that a teacher writes, for its student to learn from (Kim & Rush 2016, arXiv:1606.07947). Torch.

They are drawn from the teacher, not searched for with a beam as in the paper: a student of language models is to have
the teacher's distribution, not its most likely text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from compress.context import Feeds, TrainSet
from compress.errors import PassError

FILE = "sequences.safetensors"
BATCH = 32
"""Texts that are written together."""
IDS, MASK = "input_ids", "attention_mask"


@dataclass
class Written:
    """A `TrainSet` of texts. `ids`: int64 [n, T], filled up with 0; `lengths`: int64 [n]."""

    ids: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.n = len(self.ids)

    def feeds(self, rows: np.ndarray) -> Feeds:
        """Padded on the right to the longest of the rows."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        return {IDS: self.ids[rows, :width], MASK: (np.arange(width) < lengths[:, None]).astype(np.int64)}


@dataclass(frozen=True)
class Writing:
    """How: the first `prompt` tokens of each text of the training set stay, the rest is drawn at `temperature`.

    No text becomes longer than it was, and one that is no longer than its prompt stays as it is.
    """

    prompt: int
    temperature: float
    seed: int


def written(
    module: nn.Module,
    train: TrainSet,
    how: Writing,
    folder: Path | None,
    progress: Callable[[Sequence[Any], str], Iterable[Any]],
) -> Written:
    """The training set as the teacher goes on with it, kept in `folder` if there is one. PassError: it cannot write."""
    path = None if folder is None else folder / FILE
    if path is not None and path.exists():
        found = load_file(path)
        return Written(found[IDS], found["lengths"])
    writer: Any = getattr(module, "wrapped", None)
    if not hasattr(writer, "generate"):
        raise PassError("distill: sequences: the teacher is no Hugging Face model that generates; leave sequences out")
    starts = range(0, train.n, BATCH)
    parts = [
        _continued(writer, train.feeds(np.arange(start, min(start + BATCH, train.n))), how, start)
        for start in progress(starts, "the teacher writes")
    ]
    width = max(part.ids.shape[1] for part in parts)
    ids = np.concatenate([np.pad(part.ids, ((0, 0), (0, width - part.ids.shape[1]))) for part in parts])
    result = Written(ids, np.concatenate([part.lengths for part in parts]))
    if path is not None:
        draft = path.with_name(f"draft-{os.getpid()}-{FILE}")
        save_file({IDS: result.ids, "lengths": result.lengths}, draft)
        os.replace(draft, path)
    return result


def _continued(writer: Any, feeds: Feeds, how: Writing, start: int) -> Written:
    """The texts of one batch, [b, T] with a mask that begins at the left; what is drawn follows from seed and place."""
    ids, lengths = feeds[IDS].astype(np.int64), feeds[MASK].sum(1).astype(np.int64)
    longer = lengths > how.prompt
    if not longer.any():
        return Written(ids, lengths)
    prompts = torch.from_numpy(ids[longer, : how.prompt])
    drawn = _drawn(writer, prompts, int(lengths.max()) - how.prompt, how, start)
    ends = _ends(writer, drawn, how.prompt)
    ids[longer, : drawn.shape[1]] = drawn
    lengths[longer] = np.minimum(lengths[longer], ends)
    ids[np.arange(ids.shape[1]) >= lengths[:, None]] = 0
    return Written(ids, lengths)


def _drawn(writer: Any, prompts: torch.Tensor, n_new: int, how: Writing, start: int) -> np.ndarray:
    """int64 [b, <= prompt + n_new], prompts included; texts that end early are filled up with 0."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _own_settings_aside(writer):
        torch.manual_seed(int(np.random.default_rng([how.seed, 4, start]).integers(2**62)))
        found: torch.Tensor = writer.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=how.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=n_new,
            pad_token_id=0,
            use_cache=True,
        )
    return found.numpy()


@contextmanager
def _own_settings_aside(writer: Any) -> Iterator[None]:
    """Inside, nothing of its makers' settings (a penalty on repetition, min_p) bends what it draws from."""
    own = writer.generation_config
    writer.generation_config = type(own)(bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id)
    try:
        yield
    finally:
        writer.generation_config = own


def _ends(writer: Any, ids: np.ndarray, prompt: int) -> np.ndarray:
    """int64 [b]: tokens up to and with the first end-of-text that was drawn; all where there is none."""
    config = getattr(writer, "generation_config", None)
    wanted = getattr(config, "eos_token_id", None)
    stops = np.isin(ids[:, prompt:], [] if wanted is None else np.atleast_1d(wanted))
    return np.where(stops.any(1), prompt + stops.argmax(1) + 1, ids.shape[1]).astype(np.int64)
