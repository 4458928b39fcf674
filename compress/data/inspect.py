"""What the plan knows of a data set before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.chat import ChatEncoder
from compress.data.columns import ColumnReader, resolve_roles, resolve_slices, same_roles, sample_roles
from compress.data.samples import draw_rows, n_rows, open_source
from compress.facts import SampleShapes
from compress.specs import DataSpec
from compress.tasks import find_torch_task
from runtime.encode.audio import AUDIO, RATE


@dataclass(frozen=True)
class DataFacts:
    """`n_rows` are in the file (or files), `n_samples` will be taken. `columns`: role -> the file's column.

    `shapes`: by role, those of the first row's values.
    `n_bytes` of the file or files. `digest`: sha256 of the file; of a list of files and their digests for an image
    folder; of the data set's own fingerprint for hf:.
    """

    source: str
    n_rows: int
    n_samples: int
    columns: Mapping[str, str]
    shapes: SampleShapes
    n_bytes: int
    digest: str
    rate: int | None = None
    """Samples a second of the first row's audio."""

    @property
    def has_labels(self) -> bool:
        return "label" in self.columns


def inspect_data(
    spec: DataSpec,
    root: Path,
    task: str,
    input_names: Sequence[str],
    class_names: Sequence[str] = (),
    images: bool = False,
    slices: Sequence[str] = (),
    chats: ChatEncoder | None = None,
) -> DataFacts:
    """Return the facts of a data set without loading it. Arguments as for `load_samples`.

    Checked are that the file is there and readable, that its columns fit the task and that it has the samples asked
    for; of the values only the first row's. Raises SourceError naming file, column, rule and way out.
    """
    parts = [_inspect_part(part, root, task, input_names, class_names, images, slices, chats) for part in spec.parts]
    same_roles([(part.source, part.columns) for part in parts])
    return parts[0] if len(parts) == 1 else _merge_facts(parts)


def _merge_facts(parts: Sequence[DataFacts]) -> DataFacts:
    """Merge the facts of several files; columns and shapes are those of the first."""
    return replace(
        parts[0],
        source=", ".join(dict.fromkeys(part.source for part in parts)),
        n_rows=sum(part.n_rows for part in parts),
        n_samples=sum(part.n_samples for part in parts),
        n_bytes=sum({part.source: part.n_bytes for part in parts}.values()),
        digest=hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest(),
    )


def _inspect_part(
    spec: DataSpec,
    root: Path,
    task: str,
    input_names: Sequence[str],
    class_names: Sequence[str],
    images: bool,
    slices: Sequence[str],
    chats: ChatEncoder | None,
) -> DataFacts:
    table = open_source(spec, root, task)
    roles = resolve_roles(spec, table, task, input_names, images, slices)
    n = n_rows(table, roles)
    n_samples = len(draw_rows(spec, table, n, seed=0))
    reader = ColumnReader(
        table,
        np.array([0]),
        find_torch_task(task),
        class_names=tuple(class_names),
        images=images,
        masks=spec.masks,
        messages=spec.messages,
        chats=chats,
    )
    first = reader.read_all(roles)
    for name, column in resolve_slices(spec, table, slices).items():
        reader.read_slice(name, column)
    shapes = {role: _shape(values) for role, values in first.items()}
    rate = int(first[RATE][0]) if AUDIO in sample_roles(task, images) and RATE in first else None
    return DataFacts(spec.source, n, n_samples, roles, shapes, table.n_bytes, table.digest, rate)


def _shape(values: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(values[0], str):
        return (), "text"
    first = np.asarray(values[0])
    return first.shape, str(first.dtype)
