"""A data file as a table: named columns, read by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.bundle.columns import Array


@dataclass(frozen=True)
class Table:
    """`lengths` is column name -> number of rows (columns of an npz may differ).

    `read(column, rows)` gives an array [n, ...] or a list of n; `label_names` the class names of columns that hold
    class ids, where the file states them. `place(row)` names a row for an error, `hint` ends one about columns. `files`
    is empty for a hub data set, whose `digest` is the data set's own.
    """

    where: str
    lengths: Mapping[str, int]
    read: Callable[[str, Array], Any]
    files: tuple[Path, ...]
    digest: str
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    place: Callable[[int], str] = "row {}".format
    hint: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.lengths)

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)
