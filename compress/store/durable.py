"""What is written so that it outlives a crash and proves itself afterwards, and errors that name the place.

A folder of ours holds MARK, whose lock says that a process is at work in it; one without MARK belongs to somebody else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compress.errors import CompressError, OutputError, SourceError

MARK = "made-by-compress.txt"
MARK_TEXT = "compress works in this folder; what lies here is its own, and its next run removes it.\n"
DIGEST = "digest"
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def blame(place: Path, kind: type[CompressError] = OutputError) -> Iterator[None]:
    """Turn a file system error while the context is open into one that names the file, or else `place`."""
    try:
        yield
    except OSError as error:
        raise kind(describe_failure(error, place, reads=issubclass(kind, SourceError))) from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in TMPDIR that goes at the end; an error of files meanwhile that names none is TMPDIR's."""
    with blame(Path(tempfile.tempdir or os.environ.get("TMPDIR", "/tmp"))):
        folder = Path(tempfile.mkdtemp())
        try:
            yield folder
        finally:  # TemporaryDirectory recurses without end where it may not remove a folder (CPython 3.11)
            shutil.rmtree(folder, ignore_errors=True)


def describe_failure(error: OSError, place: Path, reads: bool = False) -> str:
    """Say in one sentence which file (or `place`), what cannot be done with it, and why.

    `reads`: nothing was written.
    """
    named = error.filename if isinstance(error.filename, str | os.PathLike) else ""
    file = named if Path(named).is_absolute() else place  # a name alone is relative to a folder that it does not tell
    why = error.strerror or str(error)
    if error.errno in FULL:
        why = "the disk is full; finished work is kept, free some space and run again"
    verb = "read" if reads else "written" if error.errno in (*FULL, errno.EROFS) else "read or written"
    return f"{file}: cannot be {verb}: {why}"


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the JSON text of a document, with the digest of all the rest under `digest`."""
    plain = json.loads(json.dumps(document))  # keys become texts first, so that they sort as they will when read
    digest = hashlib.sha256(_format_canonical(plain)).hexdigest()
    return _format_canonical({**plain, DIGEST: digest})


def unseal(text: bytes) -> dict[str, Any] | None:
    """Return the document that `seal` wrote; None if any byte is another."""
    try:
        document = json.loads(text)
        digest = document.pop(DIGEST)
        return document if seal(document) == text and isinstance(digest, str) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, or not of this form
        return None


def _format_canonical(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system cannot.

    Raises FileExistsError: nothing is overwritten.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        with source.open("rb") as whole, target.open("xb") as copy:
            shutil.copyfileobj(whole, copy)


def lock(handle: int) -> None:
    """Take the lock of an open file or folder; it ends with the process. Raises BlockingIOError if another has it."""
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_named(handle: int, path: Path) -> bool:
    """Return whether the open file or folder still stands under that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


def open_own_folder(folder: Path) -> int:
    """Make the folder, or take over one that an earlier run left, and lock it; return the handle that holds the lock.

    Raises BlockingIOError where another process works in it, FileExistsError where it is not ours.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not is_own_folder(folder):
            raise FileExistsError(errno.EEXIST, "was not made by compress", str(folder))
        try:
            handle = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # its holder ended and removed the folder
        try:
            lock(handle)
            if is_named(handle, folder / MARK):  # and not one that its holder removed meanwhile
                os.pwrite(handle, MARK_TEXT.encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def is_own_folder(folder: Path) -> bool:
    """Return whether the folder has MARK in it, or is empty: a run may be killed just before it puts MARK there."""
    if folder.is_symlink() or not folder.is_dir():
        return not os.path.lexists(folder)  # gone again
    names = os.listdir(folder)
    return not names or MARK in names


def close_own_folder(folder: Path, handle: int) -> None:
    """Let the lock go; the folder goes too if nothing is left in it. MARK goes last, so that it is ours until then."""
    with suppress(OSError):  # what stays is marked, and the next run removes it
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()
    os.close(handle)
