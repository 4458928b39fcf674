"""Time whole answers: a sample as a server gets it is decoded and encoded, the model runs, its outputs become answers.

The time of the model's call alone says little where an image takes longer to decode than to classify.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np

from runtime.backends import Session
from runtime.bundle.columns import Array, Columns, count, take
from runtime.bundle.pixels import load_pixels
from runtime.clock.turns import MIN_ROUNDS, no_garbage_collection, take_off_others
from runtime.encode.images import ImagePreprocess
from runtime.encode.pairs import ImageTextPreprocess
from runtime.encode.preprocess import Preprocessor, split_samples
from runtime.tasks.base import BatchFacts, Task
from runtime.tasks.predict import split_batches

STAGES = ("decode", "encode", "call", "answer")
"""An image's bytes to pixels; samples to the model's inputs; the model's call; outputs to answers."""
BATCHES, MOST_SENT = 32, 512
"""Different batches that the rounds go through in turn, and samples of all of them, if one batch is not more."""


@dataclass(frozen=True)
class Answerer:
    """A model with all that stands before and behind its call."""

    session: Session
    preprocessor: Preprocessor
    task: Task
    facts: BatchFacts
    """What is known of every batch."""

    def answer(self, sent: Columns, one_thread: bool = False) -> Array:
        """Answer one batch as a client sends it; return the seconds of each of STAGES.

        `one_thread`: all of it is computed on one thread, and what other work took of the processor is taken off.
        """
        marks = [_read_clocks()]
        columns = {name: [_decode(item) for item in column] for name, column in sent.items()}
        marks.append(_read_clocks())
        split = split_samples(self.preprocessor, columns)
        n = len(split.samples)
        batches = list(split_batches(np.arange(n), n, self.session.inputs))
        encoded = [self.preprocessor.encode_with_facts(split.columns, batch, self.task.facts) for batch in batches]
        marks.append(_read_clocks())
        outputs = [self.session.run(feeds) for feeds, _ in encoded]
        marks.append(_read_clocks())
        facts = replace(self.facts, spec=self.preprocessor.spec)
        read = [
            self.task.read_batch(given, replace(facts, n=len(batch), known=known))
            for given, batch, (_, known) in zip(outputs, batches, encoded, strict=True)
        ]
        joined = {name: self.task.join_batches(name, [one[name] for one in read])[:n] for name in read[0]}
        joined = self.task.join_rows(joined, split, columns, facts)
        self.task.answers(self.task.join_views([joined]), self.facts.class_names)
        marks.append(_read_clocks())
        seconds: Array = np.diff(marks, axis=0)  # [stages, 2]: of the wall, of the processor
        return take_off_others(*seconds.T) if one_thread else seconds[:, 0]


def _read_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def make_sent(preprocessor: Preprocessor, columns: Columns, batch_size: int, seed: int) -> list[dict[str, Any]]:
    """Return batches of samples as a client sends them: images as JPEG (PNG with alpha), texts and numbers as they are.

    Images stay pixels where Pillow is not installed, and nothing is decoded then.
    """
    order = np.random.default_rng(seed).permutation(count(columns))
    n_batches = min(BATCHES, -(-len(order) // batch_size), max(1, MOST_SENT // batch_size))
    batches = []
    for index in range(n_batches):
        rows = np.take(order, range(index * batch_size, (index + 1) * batch_size), mode="wrap")
        batch = {name: take(columns, name, rows) for name in columns}
        if isinstance(preprocessor.spec, ImagePreprocess | ImageTextPreprocess):
            batch["image"] = [_compress(load_pixels(image)) for image in batch["image"]]
        batches.append(batch)
    return batches


def time_answers(
    answerers: Sequence[Answerer],
    sent: Sequence[Columns],
    rounds: int,
    warmup: int,
    seed: int,
    budget_s: float,
    one_thread: bool = False,
    exactly: int | None = None,
) -> Array:
    """Return the seconds of each stage, float64 [models, rounds, len(STAGES)], models in a random order each round.

    All of them get the same batches, those of `sent` in turn. At most `rounds`; fewer, but at least MIN_ROUNDS (or
    `rounds`, if less), where they take more than `budget_s`; `exactly` so many where that is given.
    """
    rng = np.random.default_rng(seed)
    pace = 0.0
    for answerer in answerers:
        for turn in range(max(1, min(warmup, len(sent)))):
            seconds = float(answerer.answer(sent[turn]).sum())
        pace += seconds
    made = exactly or max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / max(pace, 1e-9))))
    stages = np.empty((len(answerers), made, len(STAGES)))
    with no_garbage_collection():
        for turn in range(made):
            for m in rng.permutation(len(answerers)):
                stages[m, turn] = answerers[m].answer(sent[turn % len(sent)], one_thread)
    return stages


def _compress(pixels: Array) -> Any:
    try:
        from PIL import Image
    except ImportError:
        return pixels
    alpha = pixels.ndim == 3 and pixels.shape[2] == 4
    file = BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    image.save(file, "PNG") if alpha else image.save(file, "JPEG", quality=95)
    return file.getvalue()


def _decode(item: Any) -> Any:
    if not isinstance(item, bytes):
        return item
    from PIL import Image

    return load_pixels(Image.open(BytesIO(item)))
