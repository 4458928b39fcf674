"""The one reader of npz files: what they declare is looked at before any value is read, and objects never are."""

from __future__ import annotations

import io
import math
import stat
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from runtime.bundle.columns import Array
from runtime.processes.memory import available_bytes
from runtime.words import size_text

_DAMAGE = (
    *(OSError, EOFError, ValueError, OverflowError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""What zipfile and zlib raise on damaged bytes (RuntimeError: encrypted), and numpy on shapes that it cannot have."""
_NO_HEADER = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, SyntaxError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)
"""What Python raises where numpy lets it evaluate a header's text."""
_CHUNK = 2**24
SHARE = 0.8
"""Of the memory available, what arrays may take."""


class NpzError(Exception):
    """The file cannot be read, or may not be; the message is the reason. Callers say which file it is, and for what."""


@dataclass(frozen=True)
class Header:
    """What one entry says of its array."""

    name: str
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(path: Path) -> dict[str, Header]:
    """Return what each array of the file says of itself, without a value. Raises NpzError."""
    with _open_archive(path) as archive:
        headers = {}
        for entry in _list_entries(archive):
            with archive.open(entry) as file:
                headers[_array_name(entry)] = _read_header(file, entry)
        return headers


def read_arrays(path: Path) -> dict[str, Array]:
    """Return all arrays of the file, by name. Raises NpzError, also where they need more memory than there is."""
    _check_memory(sum(header.n_bytes for header in read_headers(path).values()))
    with _open_archive(path) as archive:
        return {_array_name(entry): _read_array(archive, entry) for entry in _list_entries(archive)}


def read_rows(path: Path, name: str, rows: Array) -> Array:
    """Return some rows of one array, in their order; no more than these are held, and a piece of the rest.

    Raises NpzError, also for a row that the array does not have.
    """
    with _open_archive(path) as archive:
        entry = next(entry for entry in _list_entries(archive) if _array_name(entry) == name)
        with archive.open(entry) as file:
            header = _read_header(file, entry)
            if header.is_fortran or not header.shape or header.dtype.hasobject:
                _check_memory(header.n_bytes)
                return _read_body(file, header)[rows]
            if len(rows) and not 0 <= rows.min() <= rows.max() < header.shape[0]:
                raise NpzError(f"array '{name}' has {header.shape[0]} rows, not one of number {rows.max()}")
            n, row_bytes = header.shape[0], header.n_bytes // max(1, header.shape[0])
            _check_memory(len(rows) * row_bytes)
            result = np.empty((len(rows), *header.shape[1:]), header.dtype)
            order = np.argsort(rows, kind="stable")
            step = max(1, _CHUNK // max(1, row_bytes))
            piece = np.empty((min(step, n), *header.shape[1:]), header.dtype)
            for start in range(0, n if piece.size else 0, step):
                part = piece[: min(step, n - start)]
                _read_into(file, part)
                first, last = np.searchsorted(rows[order], (start, start + len(part)))
                result[order[first:last]] = part[rows[order[first:last]] - start]
            _read_end(file)
            return result


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Keep the archive open while the context is; whatever is wrong with it meanwhile is an NpzError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise NpzError("a folder, pipe or device, not a file")
        with warnings.catch_warnings(), zipfile.ZipFile(path) as archive:
            warnings.simplefilter("ignore")  # numpy's on headers of Python 2, zipfile's on names
            yield archive
    except _DAMAGE as error:
        raise NpzError(str(error) or type(error).__name__) from error


def _list_entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the archive's entries, by name; NpzError unless each is an array's, once, stored or deflated."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.filename)
    for i, entry in enumerate(entries):
        if not entry.filename.endswith(".npy"):
            raise NpzError(f"entry '{entry.filename}' is no array (.npy)")
        if i and entries[i - 1].filename == entry.filename:
            raise NpzError(f"entry '{entry.filename}' is there twice")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise NpzError(f"entry '{entry.filename}' is neither stored nor deflated")
    return entries


def _array_name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _read_header(file: IO[bytes], entry: zipfile.ZipInfo) -> Header:
    """Read the header of an array; NpzError where the entry's size does not bear it out."""
    magic = file.read(8)
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(magic)
    if width is None:
        raise NpzError(f"entry '{entry.filename}' is no array of numpy's format 1.0 or 2.0")
    length = file.read(width)
    n = int.from_bytes(length, "little")
    # bytes, as numpy has it; a plain array's header has 118
    if n > 10_000:
        raise NpzError(f"entry '{entry.filename}' has a header of {n} bytes")
    read = np.lib.format.read_array_header_1_0 if width == 2 else np.lib.format.read_array_header_2_0
    content = file.read(n)
    try:
        header = Header(_array_name(entry), *read(io.BytesIO(length + content)))
    except _NO_HEADER as error:
        raise NpzError(f"array '{_array_name(entry)}' has a header that is none: {content[:200]!r}") from error
    if header.dtype.hasobject:  # a pickle, of any length: refused where it is wanted
        return header
    if header.dtype.itemsize < 1 or min(header.shape, default=0) < 0:
        raise NpzError(f"array '{_array_name(entry)}' has shape {header.shape} and dtype {header.dtype}")
    if 8 + width + n + header.n_bytes != entry.file_size:
        raise NpzError(
            f"array '{_array_name(entry)}' of shape {header.shape} and dtype {header.dtype} has {header.n_bytes} "
            f"bytes, and its entry has room for {entry.file_size - 8 - width - n}"
        )
    return header


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    with archive.open(entry) as file:
        return _read_body(file, _read_header(file, entry))


def _read_body(file: IO[bytes], header: Header) -> Array:
    """Read the array that follows its header. NpzError if it is pickled."""
    if header.dtype.hasobject:
        raise NpzError(f"array '{header.name}' holds Python objects; save it with a numeric dtype")
    shape = header.shape[::-1] if header.is_fortran else header.shape
    array = np.empty(shape, header.dtype)
    if array.size:
        _read_into(file, array)
    _read_end(file)
    return array.T if header.is_fortran else array


def _read_into(file: IO[bytes], array: Array) -> None:
    """Fill a contiguous array that is not empty; EOFError where there is too little."""
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        content = file.read(min(_CHUNK, len(view) - done))
        if not content:
            raise EOFError("it ends inside an array")
        view[done : done + len(content)] = content
        done += len(content)


def _read_end(file: IO[bytes]) -> None:
    """Read what follows the last byte, which is nothing: only then zipfile compares the checksum."""
    if file.read(1):
        raise NpzError("bytes follow an array")


def _check_memory(n_bytes: int) -> None:
    most = int(SHARE * available_bytes())
    if n_bytes > most:
        raise NpzError(f"arrays of {size_text(n_bytes)}, and {size_text(most)} of memory may be taken")
