"""What the plan knows of a data set before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.roles import resolve_roles
from compress.data.samples import drawn_rows, n_rows
from compress.data.table import open_table
from compress.data.values import ColumnReader
from compress.facts import SampleShapes
from compress.schema import DataSpec


@dataclass(frozen=True)
class DataFacts:
    """`n_rows` are in the file, `n_samples` will be taken. `columns`: role -> the file's column.

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

    @property
    def has_labels(self) -> bool:
        return "label" in self.columns


def inspect_data(
    spec: DataSpec, root: Path, task: str, input_names: Sequence[str], class_names: Sequence[str] = ()
) -> DataFacts:
    """Look without loading: the file is there and readable, its columns fit the task, it has the samples asked for.

    Only the first row's values are read and checked. Raises SourceError naming file, column, rule and way out.
    """
    table = open_table(spec, root)
    roles = resolve_roles(spec, table, task, input_names)
    n = n_rows(table, roles)
    n_samples = len(drawn_rows(spec, table, n, seed=0))
    reader = ColumnReader(table, np.array([0]), task, class_names=tuple(class_names))
    shapes = {role: _shape(reader.values(role, column)) for role, column in roles.items()}
    return DataFacts(spec.source, n, n_samples, roles, shapes, table.n_bytes, table.digest)


def _shape(values: Any) -> tuple[tuple[int, ...], str]:
    if isinstance(values[0], str):
        return (), "text"
    first = np.asarray(values[0])
    return first.shape, str(first.dtype)
