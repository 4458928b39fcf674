"""Files and hub data sets as tables: `open_table`, the one door to all formats, and an opener for each."""

from __future__ import annotations

import csv
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import SourceError
from compress.specs import DataSpec
from compress.store.paths import resolve_path
from runtime.bundle.columns import Array
from runtime.bundle.files import sha256_of
from runtime.bundle.npz import NpzError, read_headers, read_rows
from runtime.tasks.sources import AUDIO_SUFFIXES

if TYPE_CHECKING:
    from datasets import Dataset


LONGEST_LINE = 2**24
"""Characters of a sample in JSON; a line of 100 MB took a plan over two minutes."""


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
    """Open a source as a table; SourceError if it is missing, empty, or not of its format.

    A relative path is tried against the working directory, then against `root`.
    """
    kind, _, rest = spec.source.partition(":")
    if kind == "hf":
        return open_hub(rest, spec.split)
    path = check_path(spec.source, resolve_path(root, rest), folder=kind in FOLDERS)
    if kind in ("csv", "tsv"):
        return open_csv(path, spec, "\t" if kind == "tsv" else ",")
    if kind in FOLDERS:
        return FOLDERS[kind](path, spec.split)
    readers = {"npz": open_npz, "jsonl": open_jsonl, "text": open_text, "parquet": open_parquet}
    return readers[kind](path)


def check_path(source: str, path: Path, folder: bool) -> Path:
    """Return the path if it is a folder, or a file that is not empty, as is needed; SourceError else."""
    if path.is_dir() != folder:
        raise SourceError(f"{source}: {path} is {'a file, a folder is' if folder else 'a folder, a file is'} needed")
    if not folder and path.stat().st_size == 0:
        raise SourceError(f"{source}: {path} is empty (0 bytes)")
    return path


def open_npz(path: Path) -> Table:
    """Open an npz as a table with one column for each array; pickled objects are refused."""
    try:
        headers = read_headers(path)
    except NpzError as error:
        raise SourceError(f"{path}: cannot be read as an npz of arrays: {error}") from error

    def read(column: str, rows: Array) -> Array:
        try:
            return read_rows(path, column, rows)
        except NpzError as error:
            raise SourceError(f"{path}: array '{column}' cannot be read: {error}") from error

    lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
    return Table(str(path), lengths, read, (path,), sha256_of(path))


def open_csv(path: Path, spec: DataSpec, separator: str) -> Table:
    """Open a csv file; a header line gives the names, unless the spec has `names` or an index among its `columns`.

    Without a header, names are the spec's or "0", "1", ..., and further fields at a row's end are passed over. With a
    header, a row with more fields than names is refused: a separator inside a text would shift the columns unseen.
    """
    separator = spec.separator or separator
    rows, lines = _read_csv_rows(path, separator, csv.QUOTE_MINIMAL if spec.quoting else csv.QUOTE_NONE)
    header = spec.names is None and not any(isinstance(column, int) for column in spec.columns.values())
    names = spec.names or tuple(rows[0] if header else map(str, range(len(rows[0]))))
    rows, lines = (rows[1:], lines[1:]) if header else (rows, lines)
    if len(set(names)) != len(names):
        raise SourceError(f"{path}: column names are not distinct: {', '.join(names)}; give `names:` or column numbers")

    def place(row: int) -> str:
        return f"line {lines[row]}"

    def field(row: int, index: int) -> str:
        n = len(rows[row])
        if n <= index or (header and n > len(names)):
            raise SourceError(
                f"{path}: {place(row)} has {n} fields, but column '{names[index]}' needs {index + 1} of {len(names)}; "
                "mend the line, or set `separator:` or `quoting:`"
            )
        return rows[row][index]

    def read(column: str, chosen: Array) -> list[str]:
        index = names.index(column)
        return [field(int(row), index) for row in chosen]

    hint = "; if the file has no header line, give `names:`, or column numbers in `columns:`" if header else ""
    return Table(str(path), dict.fromkeys(names, len(rows)), read, (path,), sha256_of(path), place=place, hint=hint)


def open_jsonl(path: Path) -> Table:
    """Open a file of one JSON object a line as a table; the first object's keys are the columns."""
    lines = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]
    objects = [_parse_json_object(path, number, line) for number, line in lines]

    def place(row: int) -> str:
        return f"line {lines[row][0]}"

    def value(row: int, column: str) -> Any:
        if column not in objects[row]:
            raise SourceError(f"{path}: {place(row)} has no '{column}'; it has: {', '.join(objects[row])}")
        return objects[row][column]

    def read(column: str, rows: Array) -> list[Any]:
        return [value(int(row), column) for row in rows]

    lengths = dict.fromkeys(objects[0], len(objects)) if objects else {}
    return Table(str(path), lengths, read, (path,), sha256_of(path), place=place)


def open_text(path: Path) -> Table:
    """Open a text file of one sample a line, in the column "text"; blank lines are passed over."""
    lines = [(number, line) for number, line in enumerate(_read_lines(path), 1) if line.strip()]

    def read(column: str, rows: Array) -> list[str]:
        return [lines[row][1] for row in rows]

    def place(row: int) -> str:
        return f"line {lines[row][0]}"

    return Table(str(path), {"text": len(lines)}, read, (path,), sha256_of(path), place=place)


def _read_csv_rows(path: Path, separator: str, quoting: Any) -> tuple[list[list[str]], list[int]]:
    """Return the rows that are not blank, and the line on which each ends."""
    rows, lines = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise SourceError(f"{path}: line {reader.line_num}: {error}; check `separator:` and `quoting:`") from error
    if not rows:
        raise SourceError(f"{path}: holds only blank lines")
    return rows, lines


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8 text: {error}") from error


def _parse_json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    if len(line) > LONGEST_LINE:
        raise SourceError(
            f"{path}: line {number}: has {len(line)} characters, and a sample {LONGEST_LINE} at most; cut it, or give "
            "arrays as npz or parquet"
        )
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: line {number}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(
            f"{path}: line {number}: is {type(value).__name__}; each line must be an object {{column: value}}"
        )
    return value


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

    with tempfile.TemporaryDirectory() as cache, hide_bars():
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


IMAGE_FOLDERS, MASK_FOLDERS = ("images", "image"), ("masks", "mask", "annotations", "labels")


def open_maskfolder(folder: Path, split: str | None) -> Table:
    """Open images and their masks as a table: columns image and label, paths of files of one name but for its ending.

    They lie in images/ and masks/ (or annotations/, labels/); those of a split in SPLIT/images or in images/SPLIT.
    """
    images, masks = (_find_half(folder, split, names) for names in (IMAGE_FOLDERS, MASK_FOLDERS))
    halves = [_list_by_stem(half) for half in (images, masks)]
    alone = sorted(set(halves[0]) ^ set(halves[1]))
    if alone:
        where, other = (images, masks) if alone[0] in halves[0] else (masks, images)
        raise SourceError(
            f"{folder}: {where.name}/{alone[0]} has no file of its name in {other} ({len(alone)} such files); give "
            "each image its mask, or use imagefolder: for images without"
        )
    stems = sorted(halves[0])
    columns = {name: [half[stem] for stem in stems] for name, half in zip(("image", "label"), halves, strict=True)}
    files = tuple(sorted(file for column in columns.values() for file in column))
    digests = "".join(f"{sha256_of(file)} {file.relative_to(folder).as_posix()}\n" for file in files)

    def read(column: str, rows: Array) -> list[str]:
        return [str(columns[column][row]) for row in rows]

    def place(row: int) -> str:
        return columns["label"][row].relative_to(folder).as_posix()

    digest = hashlib.sha256(digests.encode()).hexdigest()
    return Table(str(folder), dict.fromkeys(columns, len(stems)), read, files, digest, place=place)


def _find_half(folder: Path, split: str | None, names: tuple[str, ...]) -> Path:
    """Find the one folder of these names that there is."""
    places = [Path(name) for name in names]
    if split is not None:
        places = [place for name in names for place in (Path(split, name), Path(name, split))]
    found = [folder / place for place in places if (folder / place).is_dir()]
    if len(found) != 1:
        has = " and ".join(str(place.relative_to(folder)) for place in found) or "none of them"
        raise SourceError(f"{folder}: one of {', '.join(f'{p.as_posix()}/' for p in places)} is needed; it has {has}")
    return found[0]


def _list_by_stem(folder: Path) -> dict[str, Path]:
    """List the files, those in folders inside too, by their path without the ending."""
    files: dict[str, Path] = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")):
        stem = file.relative_to(folder).with_suffix("").as_posix()
        if stem in files:
            raise SourceError(f"{file}: {files[stem].name} has the same name but for its ending; keep one of them")
        files[stem] = file
    return files


@contextmanager
def hide_bars() -> Iterator[None]:
    """Keep `datasets` from drawing bars while the context is open: it calls reading local files "Downloading data"."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            enable_progress_bars()


def open_audiofolder(folder: Path, split: str | None) -> Table:
    """Open audio files in FOLDER/CLASS/* or FOLDER/SPLIT/CLASS/* as a table: columns audio and label.

    Class names are in alphabetical order; files that lie in FOLDER itself have no label. `datasets` reads such folders
    only where torchcodec is installed. SourceError: no audio, or files of several depths.
    """
    root = folder / split if split else folder
    files = tuple(sorted(file for file in root.rglob("*") if file.suffix.lower() in AUDIO_SUFFIXES))
    depths = {len(file.relative_to(root).parts) for file in files}
    if not files or len(depths) > 1 or max(depths) > 2:
        why = f"no {', '.join(AUDIO_SUFFIXES)} files" if not files else "files at several depths"
        raise SourceError(
            f"{root}: {why}: put each class into a folder of its own, {root.name}/CLASS/*, or name a split"
        )
    names = tuple(sorted({file.parent.name for file in files})) if depths == {2} else ()

    def read(column: str, rows: Array) -> list[Any]:
        chosen = [files[row] for row in rows]
        return (
            [str(file) for file in chosen] if column == "audio" else [names.index(file.parent.name) for file in chosen]
        )

    digests = "".join(f"{sha256_of(file)} {file.relative_to(root).as_posix()}\n" for file in files)
    lengths = dict.fromkeys(("audio", "label") if names else ("audio",), len(files))
    return Table(
        str(root),
        lengths,
        read,
        files,
        hashlib.sha256(digests.encode()).hexdigest(),
        {"label": names} if names else {},
        place=lambda row: files[row].relative_to(root).as_posix(),
    )


FOLDERS = {"imagefolder": open_imagefolder, "audiofolder": open_audiofolder, "maskfolder": open_maskfolder}
"""Kind of source -> what opens such a folder."""


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
    from datasets import Audio

    for name, feature in data.features.items():
        if isinstance(feature, Audio):  # decoding wants torchcodec; the runtime reads the bytes itself
            data = data.cast_column(name, Audio(decode=False))

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
    named = {name: _find_class_label(kind) for name, kind in data.features.items()}
    return {name: tuple(kind.names) for name, kind in named.items() if kind is not None}


def _find_class_label(kind: Any) -> Any:
    """Find the only ClassLabel of a feature, of lists and objects, too; None where there is none, or several."""
    from datasets import ClassLabel

    kind = getattr(kind, "feature", kind)
    if isinstance(kind, ClassLabel):
        return kind
    inside = [_find_class_label(part) for part in kind.values()] if isinstance(kind, dict) else []
    found = [part for part in inside if part is not None]
    return found[0] if len(found) == 1 else None
