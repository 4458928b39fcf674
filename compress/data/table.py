"""A data file as a table: named columns, read by row. `open_table` is the one door to all formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from compress.paths import resolve_path
from compress.schema import DataSpec
from runtime.columns import Array


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


def open_table(spec: DataSpec, root: Path) -> Table:
    """The table of a source; SourceError if it is missing, empty, or not of its format.

    A relative path is tried against the working directory, then against `root`.
    """
    from compress.data.arrow import open_hub, open_imagefolder, open_parquet
    from compress.data.formats import open_csv, open_jsonl, open_npz, open_text

    kind, _, rest = spec.source.partition(":")
    if kind == "hf":
        return open_hub(rest, spec.split)
    path = _usable(spec.source, resolve_path(root, rest), folder=kind == "imagefolder")
    if kind in ("csv", "tsv"):
        return open_csv(path, spec, "\t" if kind == "tsv" else ",")
    if kind == "imagefolder":
        return open_imagefolder(path, spec.split)
    readers = {"npz": open_npz, "jsonl": open_jsonl, "text": open_text, "parquet": open_parquet}
    return readers[kind](path)


def _usable(source: str, path: Path, folder: bool) -> Path:
    if path.is_dir() != folder:
        raise SourceError(f"{source}: {path} is {'a file, a folder is' if folder else 'a folder, a file is'} needed")
    if not folder and path.stat().st_size == 0:
        raise SourceError(f"{source}: {path} is empty (0 bytes)")
    return path
