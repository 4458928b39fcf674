"""parquet, image folders and hub data sets as tables, through `datasets`; only hub data stays in its cache."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.table import Table
from compress.errors import SourceError
from runtime.bundle.columns import Array
from runtime.bundle.files import sha256_of

if TYPE_CHECKING:
    from datasets import Dataset


def open_parquet(path: Path) -> Table:
    """Open a parquet file as a table; columns that `datasets` has marked as images are decoded."""
    import pyarrow.parquet as pq
    from datasets import Dataset

    try:
        data = Dataset(pq.read_table(path))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise SourceError(f"{path}: cannot be read as parquet: {error}") from error
    return _make_table(str(path), data, (path,), sha256_of(path))


def open_imagefolder(folder: Path, split: str | None) -> Table:
    """Open images in FOLDER/CLASS/* or FOLDER/SPLIT/CLASS/* as a table: columns image and label.

    Class names are in alphabetical order.
    """
    from datasets import Image, load_dataset

    with tempfile.TemporaryDirectory() as cache, _hide_bars():
        try:
            data = load_dataset(
                "imagefolder", data_dir=str(folder), split=split or "train", cache_dir=cache, keep_in_memory=True
            )
        except (OSError, ValueError) as error:
            raise SourceError(f"{folder}: cannot be read as a folder of images: {error}") from error
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    digests = "".join(f"{sha256_of(file)} {file.relative_to(folder).as_posix()}\n" for file in files)
    paths = data.cast_column("image", Image(decode=False))

    def read(column: str, rows: Array) -> list[Any]:
        values = list(paths.select_columns([column]).select(rows)[column])
        return [value["path"] for value in values] if column == "image" else values

    lengths = dict.fromkeys(data.column_names, data.num_rows)
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return Table(str(folder), lengths, read, files, digest, _label_names(data))


@contextmanager
def _hide_bars() -> Iterator[None]:
    """Keep `datasets` from drawing bars while the context is open: it calls reading local files "Downloading data"."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            enable_progress_bars()


def open_hub(name: str, split: str | None) -> Table:
    """Open NAME or NAME:CONFIG of the Hugging Face hub, or a local copy of such a data set; honours HF_HUB_OFFLINE."""
    from datasets import load_dataset

    if split is None:
        raise SourceError(f"hf:{name}: name the split, such as `split: validation`")
    dataset, _, config = name.partition(":")
    try:
        data = load_dataset(dataset, config or None, split=split)
    except (OSError, ValueError) as error:
        raise SourceError(f"hf:{name}: split '{split}' cannot be loaded: {error}") from error
    return _make_table(f"hf:{name}[{split}]", data, (), hashlib.sha256(data._fingerprint.encode()).hexdigest())


def _make_table(where: str, data: Dataset, files: tuple[Path, ...], digest: str) -> Table:
    def read(column: str, rows: Array) -> list[Any]:
        only = data.select_columns([column])
        return [_decode_cell(where, only, column, int(row)) for row in rows]

    return Table(where, dict.fromkeys(data.column_names, data.num_rows), read, files, digest, _label_names(data))


def _decode_cell(where: str, data: Dataset, column: str, row: int) -> Any:
    try:
        return data[row][column]
    except OSError as error:  # what Pillow raises on a broken image
        raise SourceError(f"{where}: column '{column}', row {row}: cannot be decoded: {error}") from error


def _label_names(data: Dataset) -> dict[str, tuple[str, ...]]:
    from datasets import ClassLabel

    kinds = {name: getattr(kind, "feature", kind) for name, kind in data.features.items()}  # lists of them, too
    return {name: tuple(kind.names) for name, kind in kinds.items() if isinstance(kind, ClassLabel)}
