"""`open_table`: the one door to all formats of data."""

from __future__ import annotations

from pathlib import Path

from compress.data.arrow import open_hub, open_imagefolder, open_parquet
from compress.data.formats import open_csv, open_jsonl, open_npz, open_text
from compress.data.table import Table
from compress.errors import SourceError
from compress.specs import DataSpec
from compress.store.paths import resolve_path


def open_table(spec: DataSpec, root: Path) -> Table:
    """Open a source as a table; SourceError if it is missing, empty, or not of its format.

    A relative path is tried against the working directory, then against `root`.
    """
    kind, _, rest = spec.source.partition(":")
    if kind == "hf":
        return open_hub(rest, spec.split)
    path = _check_path(spec.source, resolve_path(root, rest), folder=kind == "imagefolder")
    if kind in ("csv", "tsv"):
        return open_csv(path, spec, "\t" if kind == "tsv" else ",")
    if kind == "imagefolder":
        return open_imagefolder(path, spec.split)
    readers = {"npz": open_npz, "jsonl": open_jsonl, "text": open_text, "parquet": open_parquet}
    return readers[kind](path)


def _check_path(source: str, path: Path, folder: bool) -> Path:
    if path.is_dir() != folder:
        raise SourceError(f"{source}: {path} is {'a file, a folder is' if folder else 'a folder, a file is'} needed")
    if not folder and path.stat().st_size == 0:
        raise SourceError(f"{source}: {path} is empty (0 bytes)")
    return path
