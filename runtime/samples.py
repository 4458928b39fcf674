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

from runtime.columns import Array, Columns, checked_text, count
from runtime.errors import BundleError, UsageError
from runtime.images import check_pixels, load_pixels

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_ITEM = re.compile(r"(.+)\[(\d+)\]")  # an entry of a column whose arrays differ in shape: image[0000012]


def split_columns(columns: Columns) -> tuple[dict[str, list[Array]], dict[str, list[str]]]:
    """Array columns, each as one array in a list or (where shapes differ) one per sample; and text columns.

    Images given as paths or Pillow images are decoded. UsageError for a column that is neither numbers nor texts.
    """
    count(columns)
    arrays: dict[str, list[Array]] = {}
    texts: dict[str, list[str]] = {}
    for name, column in columns.items():
        if name == "image":
            arrays[name] = _pixels(column)
        elif isinstance(column[0], str):
            texts[name] = [checked_text(name, i, item) for i, item in enumerate(column)]
        else:
            arrays[name] = (
                _stack([_array(name, item) for item in column]) if isinstance(column, list) else [_array(name, column)]
            )
    return arrays, texts


def digest_columns(columns: Columns) -> str:
    """sha256 over names, dtypes, shapes and values; neither the columns' order nor their storage changes it."""
    arrays, texts = split_columns(columns)
    sha = hashlib.sha256()
    for name, parts in sorted(arrays.items()):
        for part in parts:
            sha.update(json.dumps([name, part.dtype.str, part.shape]).encode())
            sha.update(part.tobytes())
    for name, column in sorted(texts.items()):
        sha.update(json.dumps([name, column]).encode())
    return sha.hexdigest()


def write_npz(path: Path, arrays: Mapping[str, Array | Sequence[Array]]) -> None:
    """Arrays to an npz that is the same bytes for the same values: no times, no pickles, C order, little endian.

    A list of arrays becomes entries name[0000000], name[0000001], ... np.load reads the file too.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, column in sorted(arrays.items()):
            if isinstance(column, np.ndarray):
                _write_entry(archive, name, column)
            else:
                for i, item in enumerate(column):
                    _write_entry(archive, f"{name}[{i:07d}]", item)


def read_npz(path: Path) -> dict[str, Array | list[Array]]:
    """What `write_npz` wrote; BundleError for anything else (a pickle, a damaged archive, a gap in a list)."""
    columns: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names) or not all(name.endswith(".npy") for name in names):
                raise ValueError("an entry is there twice or is not .npy")
            for name in sorted(names):
                with archive.open(name) as file:
                    _place(columns, name.removesuffix(".npy"), np.lib.format.read_array(file, allow_pickle=False))
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, NotImplementedError) as error:
        raise BundleError(f"{path}: cannot be read as arrays: {error}; build the bundle again") from error
    return columns


def write_jsonl(path: Path, texts: Mapping[str, Sequence[str]]) -> None:
    """Text columns, one JSON object a line."""
    rows = zip(*texts.values(), strict=True)
    lines = [json.dumps(dict(zip(texts, row, strict=True)), ensure_ascii=False, sort_keys=True) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))


def read_jsonl(path: Path) -> dict[str, list[str]]:
    """What `write_jsonl` wrote; BundleError for anything else."""
    columns: dict[str, list[str]] = {}
    try:
        lines = path.read_bytes().decode("utf-8", "surrogatepass").split("\n")
        for i, line in enumerate(lines[:-1]):
            row = json.loads(line)
            if not isinstance(row, dict) or (i and row.keys() != columns.keys()):
                raise ValueError(f"line {i + 1} does not hold the same columns as line 1")
            for name, text in row.items():
                columns.setdefault(name, []).append(checked_text(name, i, text))
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise BundleError(f"{path}: cannot be read as texts: {error}; build the bundle again") from error
    return columns


def _write_entry(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    info.create_system, info.external_attr = 3, 0o644 << 16  # as on Unix, wherever it is written
    shrinks = array.dtype.kind in "biu"  # floats do not
    info.compress_type = zipfile.ZIP_DEFLATED if shrinks else zipfile.ZIP_STORED
    with archive.open(info, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, _array(name, array), version=(1, 0), allow_pickle=False)


def _place(columns: dict[str, Any], name: str, array: Array) -> None:
    """One entry into its column; entries come sorted, so a list grows by one."""
    match = _ITEM.fullmatch(name)
    if match is None:
        columns[name] = array
        return
    column = columns.setdefault(match[1], [])
    if not isinstance(column, list) or int(match[2]) != len(column):
        raise ValueError(f"entry '{name}' is out of order")
    column.append(array)


def _array(name: str, values: Any) -> Array:
    # ascontiguousarray would make a scalar one-dimensional
    array = np.ascontiguousarray(values) if np.ndim(values) else np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"column '{name}' holds {array.dtype} values: give numbers or texts")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _pixels(column: Any) -> list[Array]:
    if isinstance(column, np.ndarray):
        check_pixels(column[0], "image 0")
        return [_array("image", column)]
    return _stack([load_pixels(item, f"image {i}") for i, item in enumerate(column)])


def _stack(items: list[Array]) -> list[Array]:
    """One array in a list if all have one shape and dtype, else the items."""
    if len({(item.shape, item.dtype) for item in items}) == 1:
        return [np.stack(items)]
    return items
