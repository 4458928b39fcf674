"""The output folder: one writer at a time, and never a half-written bundle under its name."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import OutputError


@contextmanager
def reserved(out: Path) -> Iterator[Path]:
    """Hold `out` for this run and yield an empty staging folder beside it.

    What an earlier run left there half-done is removed; a bundle that it had moved aside is moved back.
    Raises OutputError when another run writes `out`, it is not ours to replace, or the place cannot be written.
    """
    parent = out.absolute().parent
    with explained(out):
        parent.mkdir(parents=True, exist_ok=True)
        lock = (parent / f".{out.name}.lock").open("w")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{out}: another run is writing it; wait for it or choose another --out") from error
        with explained(out):
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
        (parent / f".{out.name}.lock").unlink(missing_ok=True)
        lock.close()


def publish(staging: Path, out: Path) -> None:
    """Put a whole bundle under its name; the one that stood there goes. Each step is one rename."""
    previous = _beside(out, "previous")
    with explained(out):
        if out.exists():
            os.rename(out, previous)
        os.rename(staging, out)
        shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Turn what the file system says into one clear OutputError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full; finished steps are kept, free some space and run again" if full else error.strerror
        raise OutputError(f"{error.filename or place}: cannot be written: {why}") from error


def _recover(out: Path) -> None:
    previous = _beside(out, "previous")
    if previous.exists() and not out.exists():
        os.rename(previous, out)
    shutil.rmtree(previous, ignore_errors=True)


def _refuse_foreign(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / "manifest.json").is_file():
        raise OutputError(f"{out}: a folder with other things in it; choose another --out or empty it")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: a file; --out names a folder")


def _beside(out: Path, word: str) -> Path:
    return out.absolute().parent / f".{out.name}.{word}"
