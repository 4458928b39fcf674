"""The output folder: one writer at a time, and never a half-written bundle under its name."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compress.errors import OutputError, PlaceError
from runtime.bundle import MANIFEST, is_hashed, read_manifest
from runtime.errors import BundleError
from runtime.files import regular_files


@contextmanager
def reserved(out: Path) -> Iterator[Path]:
    """Hold `out` (absolute) for this run and yield an empty staging folder beside it.

    What an earlier run left there half-done is removed; a bundle that it had moved aside is moved back.
    Raises PlaceError when another run writes `out`, it is not ours to replace, or the place cannot be written.
    """
    with explained(out, PlaceError):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(out)
    try:
        with explained(out, PlaceError):
            _recover(out)
            _refuse_foreign(out)
            staging = _beside(out, "partial")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        _beside(out, "lock").unlink(missing_ok=True)
        os.close(handle)


def publish(staging: Path, out: Path) -> None:
    """Put a whole bundle under its name; the one that stood there goes. Each step is one rename."""
    previous = _beside(out, "previous")
    with explained(out):
        if out.exists():
            os.rename(out, previous)
        os.rename(staging, out)
        shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def explained(place: Path, kind: type[OutputError] = OutputError) -> Iterator[None]:
    """Turn what the file system says while something is written into one clear error."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; finished steps are kept, free some space and run again" if full else error.strerror
        raise kind(f"{error.filename or place}: cannot be written: {why or error}") from error


def _lock(out: Path) -> int:
    """The descriptor of the lock file, locked; the lock ends with the process, whatever happens to the file."""
    path = _beside(out, "lock")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise PlaceError(f"{out}: another run is writing it; wait for it or choose another --out") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # its holder ended and removed the file; the next round makes it anew


def _recover(out: Path) -> None:
    previous = _beside(out, "previous")
    if previous.exists() and not out.exists():
        os.rename(previous, out)
    shutil.rmtree(previous, ignore_errors=True)


def _refuse_foreign(out: Path) -> None:
    """Only an absent or empty folder, or a bundle with nothing added to it, is replaced."""
    if Path.cwd().is_relative_to(out):
        raise PlaceError(f"{out}: the working directory lies in it; --out names a folder of the bundle's own")
    if out.exists() and not out.is_dir():
        raise PlaceError(f"{out}: a file; --out names a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        ours = {MANIFEST, *read_manifest(out).files}
    except BundleError as error:
        raise PlaceError(f"{out}: holds other things than a whole bundle; choose another --out or empty it") from error
    files, odd = regular_files(out)
    added = [*odd, *sorted(name for name in files if name not in ours and is_hashed(name))]
    if added:
        raise PlaceError(f"{out}: a bundle to which {added[0]} was added; move that away or choose another --out")


def _beside(out: Path, word: str) -> Path:
    return out.parent / f".{out.name}.{word}"
