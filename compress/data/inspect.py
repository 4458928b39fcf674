"""What the plan knows of a data set before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.chat import ChatEncoder
from compress.data.columns import CheckSize, ColumnReader, resolve_roles, resolve_slices, same_roles, sample_roles
from compress.data.samples import draw_rows, n_rows, open_source
from compress.facts import SampleShapes
from compress.specs import DataSpec
from compress.store.digests import READ_AT_ONCE_BYTES
from compress.tasks import find_torch_task
from runtime.bundle.columns import Columns
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
    readers: tuple[tuple[ColumnReader, Mapping[str, str]], ...] = field(default=(), compare=False, repr=False)
    """Of each file: what reads the rows that are drawn, and its roles."""

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
    seed: int = 0,
) -> DataFacts:
    """Return the facts of a data set without loading it. Arguments as for `load_samples`.

    Checked are that the file is there and readable, that its columns fit the task and that it has the samples asked
    for; of the values only the first row's: `check_values` looks at the others. Raises SourceError naming file, column,
    rule and way out.
    """
    about = root, task, input_names, class_names, images, slices, chats, seed
    parts = [_inspect_part(part, *about) for part in spec.parts]
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
        readers=tuple(reader for part in parts for reader in part.readers),
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
    seed: int,
) -> DataFacts:
    table = open_source(spec, root, task)
    roles = resolve_roles(spec, table, task, input_names, images, slices)
    n = n_rows(table, roles)
    rows = draw_rows(spec, table, n, seed)
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
    drawn = (replace(reader, rows=rows), roles)
    return DataFacts(spec.source, n, len(rows), roles, shapes, table.n_bytes, table.digest, rate, (drawn,))


def check_values(
    facts: DataFacts, n_classes: int | None, look: Callable[[Columns], list[str]], check_size: CheckSize
) -> list[str]:
    """Look at the values of the samples drawn, and return what was not looked at, for it takes what loading takes.

    Labels and texts are read whole; of image files the headers; of arrays what lies in files of READ_AT_ONCE_BYTES.
    `look`: looks at the columns that were read, too, and returns what it passes over; `check_size`: raises UsageError
    for an image's (height, width). SourceError for a value that no sample may have.
    """
    passed_over = []
    for reader, roles in facts.readers:
        reader, rest = replace(reader, n_classes=n_classes), dict(roles)
        names = sample_roles(reader.task.name, reader.images)
        pictures = ["image", *(["label"] if reader.task.loss == "pixel classes" else [])] if "image" in names else []
        for role in (role for role in pictures if role in rest):
            if reader.check_headers(rest.pop(role), role == "label", check_size):
                passed_over.append(f"the pixels of {len(reader.rows)} images")
        if AUDIO in names and rest.pop(AUDIO, None) is not None:
            passed_over.append(f"{len(reader.rows)} recordings")
        if reader.table.n_bytes > READ_AT_ONCE_BYTES:
            large = [role for role in rest if role not in (*names, "label")]
            passed_over += [f"the numbers of '{rest.pop(role)}'" for role in large]
        passed_over += look(reader.read_all(rest))
    return list(dict.fromkeys(passed_over))


def _shape(values: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(values[0], str):
        return (), "text"
    first = np.asarray(values[0])
    return first.shape, str(first.dtype)
