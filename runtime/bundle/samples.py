"""The files that keep samples and outputs, npz and jsonl: same bytes for same values, nothing executable."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.columns import Array, Columns, check_text, count, stack_rows
from runtime.bundle.npz import NpzError, read_arrays
from runtime.bundle.pixels import check_pixels, load_pixels
from runtime.errors import BundleError, UsageError

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_ITEM = re.compile(r"(.+)\[(\d+)\]")  # an entry of a column whose arrays differ in shape: image[0000012]


def split_columns(columns: Columns) -> tuple[dict[str, list[Array]], dict[str, list[str]]]:
    """Split columns into arrays and texts; arrays are one in a list or (where shapes differ) one per sample.

    Images given as paths or Pillow images are decoded. UsageError for a column that is neither numbers nor texts.
    """
    count(columns)
    arrays: dict[str, list[Array]] = {}
    texts: dict[str, list[str]] = {}
    for name, column in columns.items():
        tensor = isinstance(column, np.ndarray) and column.dtype.kind == "f"  # an input called "image", not pixels
        if name == "image" and not tensor:
            arrays[name] = _decode_images(column)
        elif isinstance(column[0], str):
            texts[name] = [check_text(name, i, item) for i, item in enumerate(column)]
        else:
            arrays[name] = (
                _stack_items([_to_array(name, item) for item in column])
                if isinstance(column, list)
                else [_to_array(name, column)]
            )
    return arrays, texts


def digest_columns(columns: Columns) -> str:
    """Return the sha256 over names, dtypes, shapes and values; the columns' order and storage do not change it."""
    arrays, texts = split_columns(columns)
    sha = hashlib.sha256()
    for name, parts in sorted(arrays.items()):
        for part in parts:
            sha.update(json.dumps([name, part.dtype.str, part.shape]).encode())
            sha.update(part.tobytes())
    for name, column in sorted(texts.items()):
        sha.update(json.dumps([name, column]).encode())
    return sha.hexdigest()


def digest_rows(columns: Columns) -> tuple[str, ...]:
    """Return a sha256 for each sample, over names, dtypes, shapes and values of its cells."""
    rows = range(count(columns))
    return tuple(_digest_row([(name, columns[name][row]) for name in sorted(columns)]) for row in rows)


def _digest_row(cells: list[tuple[str, Any]]) -> str:
    sha = hashlib.sha256()
    for role, value in cells:
        array = np.asarray(value)
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else array.tobytes()
        kind = "text" if isinstance(value, str) else f"{array.dtype.str}{array.shape}"
        sha.update(f"{role}:{kind}:{len(content)}:".encode() + content)
    return sha.hexdigest()


def write_npz(path: Path, arrays: Mapping[str, Array | Sequence[Array]]) -> None:
    """Write arrays to an npz that is the same bytes for the same values: no times, no pickles, C order, little endian.

    A list of arrays, or an array of them, becomes entries name[0000000], name[0000001], ... np.load reads it, too.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, column in sorted(arrays.items()):
            if isinstance(column, np.ndarray) and column.dtype != object:
                _write_entry(archive, name, column)
            else:
                for i, item in enumerate(column):
                    _write_entry(archive, f"{name}[{i:07d}]", item)


def read_npz(path: Path) -> dict[str, Array | list[Array]]:
    """Read what `write_npz` wrote; BundleError for anything else (a pickle, a damaged archive, a gap in a list)."""
    columns: dict[str, Any] = {}
    try:
        for name, array in read_arrays(path).items():
            _add_entry(columns, name, array)
    except (NpzError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read as arrays: {error}; build the bundle again") from error
    return columns


def read_outputs_npz(path: Path) -> dict[str, Array]:
    """Read outputs as `read_npz` does; what differs in shape from sample to sample becomes an array of objects."""
    return {
        name: column if isinstance(column, np.ndarray) else stack_rows(column)
        for name, column in read_npz(path).items()
    }


def write_jsonl(path: Path, texts: Mapping[str, Sequence[str]]) -> None:
    """Write text columns, one JSON object a line."""
    rows = zip(*texts.values(), strict=True)
    lines = [json.dumps(dict(zip(texts, row, strict=True)), ensure_ascii=False, sort_keys=True) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))


def read_jsonl(path: Path) -> dict[str, list[str]]:
    """Read what `write_jsonl` wrote; BundleError for anything else."""
    columns: dict[str, list[str]] = {}
    try:
        lines = path.read_bytes().decode("utf-8", "surrogatepass").split("\n")
        for i, line in enumerate(lines[:-1]):
            row = json.loads(line)
            if not isinstance(row, dict) or (i and row.keys() != columns.keys()):
                raise ValueError(f"line {i + 1} does not hold the same columns as line 1")
            for name, text in row.items():
                columns.setdefault(name, []).append(check_text(name, i, text))
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise BundleError(f"{path}: cannot be read as texts: {error}; build the bundle again") from error
    return columns


def _write_entry(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    info.create_system, info.external_attr = 3, 0o644 << 16  # as on Unix, wherever it is written
    shrinks = array.dtype.kind in "biu"  # floats do not
    info.compress_type = zipfile.ZIP_DEFLATED if shrinks else zipfile.ZIP_STORED
    with archive.open(info, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, _to_array(name, array), version=(1, 0), allow_pickle=False)


def _add_entry(columns: dict[str, Any], name: str, array: Array) -> None:
    """Add one entry to its column; entries come sorted, so a list grows by one."""
    match = _ITEM.fullmatch(name)
    if match is None:
        columns[name] = array
        return
    column = columns.setdefault(match[1], [])
    if not isinstance(column, list) or int(match[2]) != len(column):
        raise ValueError(f"entry '{name}' is out of order")
    column.append(array)


def _to_array(name: str, values: Any) -> Array:
    # ascontiguousarray would make a scalar one-dimensional
    array = np.ascontiguousarray(values) if np.ndim(values) else np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"column '{name}' holds {array.dtype} values: give numbers or texts")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _decode_images(column: Any) -> list[Array]:
    if isinstance(column, np.ndarray):
        check_pixels(column[0], "image 0")
        return [_to_array("image", column)]
    return _stack_items([load_pixels(item, f"image {i}") for i, item in enumerate(column)])


def _stack_items(items: list[Array]) -> list[Array]:
    """Return one array in a list if all have one shape and dtype, else the items."""
    if len({(item.shape, item.dtype) for item in items}) == 1:
        return [np.stack(items)]
    return items
