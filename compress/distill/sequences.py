"""Texts that a teacher writes, for its student to learn from (Kim & Rush 2016, arXiv:1606.07947). Torch.

They are drawn from the teacher, not searched for with a beam as in the paper: a student of language models is to have
the teacher's distribution, not its most likely text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.context import Feeds, TrainSet
from compress.errors import PassError
from compress.store.training_state import read_state, write_state
from runtime.progress import Progress

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
    redraw: None = None

    def __post_init__(self) -> None:
        self.n = len(self.ids)

    def feeds(self, rows: np.ndarray) -> Feeds:
        """Return the rows' texts, padded on the right to the longest of the rows."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        return {IDS: self.ids[rows, :width], MASK: (np.arange(width) < lengths[:, None]).astype(np.int64)}

    def loss_masks(self, rows: np.ndarray) -> None:
        """Return None: all tokens are learned."""


@dataclass(frozen=True)
class Writing:
    """How: the first `prompt` tokens of each text of the training set stay, the rest is drawn at `temperature`.

    No text becomes longer than it was, and one that is no longer than its prompt stays as it is.
    """

    prompt: int
    temperature: float
    seed: int


def write_sequences(
    module: nn.Module,
    train: TrainSet,
    how: Writing,
    folder: Path | None,
    progress: Progress,
) -> Written:
    """Let the teacher continue the training set's texts.

    The result is kept in `folder` if there is one. PassError: the teacher cannot write.
    """
    path = None if folder is None else folder / FILE
    kept = None if path is None else read_state(path)
    if kept is not None:
        return Written(kept[0][IDS].numpy(), kept[0]["lengths"].numpy())
    writer: Any = getattr(module, "wrapped", None)
    if not hasattr(writer, "generate"):
        raise PassError("distill: sequences: the teacher is no Hugging Face model that generates; leave sequences out")
    starts = range(0, train.n, BATCH)
    parts = [
        _continue_texts(writer, train.feeds(np.arange(start, min(start + BATCH, train.n))), how, start)
        for start in progress(starts, "the teacher writes")
    ]
    width = max(part.ids.shape[1] for part in parts)
    ids = np.concatenate([np.pad(part.ids, ((0, 0), (0, width - part.ids.shape[1]))) for part in parts])
    result = Written(ids, np.concatenate([part.lengths for part in parts]))
    if path is not None:
        write_state(path, {IDS: torch.from_numpy(result.ids), "lengths": torch.from_numpy(result.lengths)}, {})
    return result


def _continue_texts(writer: Any, feeds: Feeds, how: Writing, start: int) -> Written:
    """Continue the texts of one batch, [b, T] with a mask that begins at the left.

    What is drawn follows from seed and place.
    """
    ids, lengths = feeds[IDS].astype(np.int64), feeds[MASK].sum(1).astype(np.int64)
    longer = lengths > how.prompt
    if not longer.any():
        return Written(ids, lengths)
    prompts = torch.from_numpy(ids[longer, : how.prompt])
    drawn = _draw_tokens(writer, prompts, int(lengths.max()) - how.prompt, how, start)
    ends = _find_ends(writer, drawn, how.prompt)
    ids[longer, : drawn.shape[1]] = drawn
    lengths[longer] = np.minimum(lengths[longer], ends)
    ids[np.arange(ids.shape[1]) >= lengths[:, None]] = 0
    return Written(ids, lengths)


def _draw_tokens(writer: Any, prompts: torch.Tensor, n_new: int, how: Writing, start: int) -> np.ndarray:
    """Draw int64 [b, <= prompt + n_new], prompts included; texts that end early are filled up with 0."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _suspend_settings(writer):
        torch.manual_seed(int(np.random.default_rng([how.seed, 4, start]).integers(2**62)))
        ids: torch.Tensor = writer.generate(
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
    return ids.numpy()


@contextmanager
def _suspend_settings(writer: Any) -> Iterator[None]:
    """Suspend the model's own settings (a penalty on repetition, min_p), which bend what it draws from.

    They are back when the context closes.
    """
    settings = writer.generation_config
    writer.generation_config = type(settings)(bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id)
    try:
        yield
    finally:
        writer.generation_config = settings


def _find_ends(writer: Any, ids: np.ndarray, prompt: int) -> np.ndarray:
    """Return int64 [b]: tokens up to and with the first end-of-text that was drawn; all where there is none."""
    config = getattr(writer, "generation_config", None)
    wanted = getattr(config, "eos_token_id", None)
    stops = np.isin(ids[:, prompt:], [] if wanted is None else np.atleast_1d(wanted))
    return np.where(stops.any(1), prompt + stops.argmax(1) + 1, ids.shape[1]).astype(np.int64)
