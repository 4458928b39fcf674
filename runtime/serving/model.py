"""The two ends of a served model: samples to its inputs, its outputs to answers, batch by batch.

A server runs the model between them. What both need of the bundle is its manifest, and its tokenizer for texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.encode.pairs import ImageTextEncoder
from runtime.encode.preprocess import spec_from_dict, split_samples
from runtime.encode.texts import TextEncoder
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.base import TEXT_COLUMNS
from runtime.tasks.manifest import read_manifest
from runtime.tasks.predict import bundle_preprocessor, facts_of

IMAGE = "image"


class Encoder:
    """Samples -> inputs. `folder` holds manifest.json, and the tokenizer where the bundle has it."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.preprocessor = bundle_preprocessor(folder, self.manifest, self.manifest.artifact("candidate").inputs)

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Encode `columns`: image uint8 [n, H, W, C], or audio float32 [n, T] and rate int64 [n] or [n, 1], or text
        (and text_pair), arrays [n] of str or UTF-8 bytes.

        Gives the model's inputs, and what the task must know of samples even where the model takes it not. UsageError.
        """
        samples: Columns = columns
        if isinstance(self.preprocessor, TextEncoder | ImageTextEncoder):
            texts = {name: _decode_texts(name, columns[name]) for name in TEXT_COLUMNS if name in columns}
            samples = {**columns, **texts}
        split = split_samples(self.preprocessor, samples)
        if len(split.samples) > len(split.rows_each):
            raise UsageError(
                "a sample is longer than the model reads at once, and here each is one row: send it in parts, or ask "
                "`compress-run serve`"
            )
        feeds, known = self.preprocessor.encode_with_facts(samples, None, find_task(self.manifest.task).facts)
        return known | feeds

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Encode as a server asks: texts are arrays [n, 1] of bytes."""
        return self(tensors)


class Answers:
    """Outputs -> answers. `folder` holds manifest.json."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.spec = spec_from_dict(self.manifest.preprocess)

    def __call__(self, outputs: Mapping[str, Array], known: Mapping[str, Array]) -> dict[str, Array]:
        """Return the task's answers, of a model's outputs and what encoding knows by `Task.facts`. UsageError."""
        task = find_task(self.manifest.task)
        encoded = self.manifest.preprocess["kind"] != "tensor"
        if encoded and (missing := [name for name in task.facts if name not in known]):
            raise UsageError(f"{missing[0]} is missing: {task.name} answers by what encoding knows")
        n, names = len(next(iter(outputs.values()))), self.manifest.class_names
        facts = replace(facts_of(self.manifest), n=n, known=known, spec=self.spec)
        read = task.read_batch(outputs, facts)
        return task.answers(task.join_views([read]), names)

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Answer as a server asks: what encoding knows among the outputs."""
        facts = find_task(self.manifest.task).facts
        known = {name: tensors[name] for name in facts if name in tensors}
        return self({name: array for name, array in tensors.items() if name not in known}, known)


def _decode_texts(name: str, column: Sequence[object] | Array) -> list[str]:
    """Return the strings of an array [n] or [n, 1] of str or bytes. UsageError where bytes are not UTF-8."""
    try:
        return [
            item.decode("utf-8") if isinstance(item, bytes) else str(item)
            for item in np.asarray(column, object).reshape(-1)
        ]
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}") from error
