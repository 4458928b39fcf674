"""The output folder: one writer at a time, never half a bundle under its name, nothing of anyone else's touched.

While a run works, everything of its own lies in one folder beside `out`, `.<out>.partial`, which carries our mark:
`new` is the bundle that grows, `old` the one that stood under the name, moved aside while the new one takes it,
`gone` what may be removed without a look. After a kill at any instant the next run finds in these names what to
put right.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compress.errors import OutputError, PlaceError
from compress.store.durable import blame, close_own_folder, link_or_copy, open_own_folder
from runtime.bundle.files import MAX_NAME_BYTES, regular_files, sha256_of, sync, sync_tree
from runtime.bundle.format import MANIFEST, is_hashed
from runtime.errors import BundleError
from runtime.processes.interrupts import delay_interrupts
from runtime.tasks.manifest import read_manifest

NEW, OLD, DISCARDED = "new", "old", "gone"
MAX_PATH_BYTES = 4095
ROOM = 320
"""Bytes of the longest path inside a bundle, and of the work folder's name."""
Survey = dict[str, tuple[int, int, int] | None]


def name_output(name: str) -> Path:
    """Return where the bundle of that name goes where nobody said."""
    return Path("bundles", name)


def resolve_output(out: Path) -> Path:
    """Return an output folder's absolute path. PlaceError where links lead to each other."""
    try:
        return out.resolve()
    except (OSError, RuntimeError) as error:
        raise PlaceError(f"{out}: is no place to write to: {error}; give another --out") from error


@contextmanager
def reserve_output(out: Path) -> Iterator[Path]:
    """Hold `out` (absolute) for this run and yield an empty staging folder beside it.

    What an earlier run left there half-done is removed; a bundle that it had moved aside is moved back.
    Raises PlaceError when another run writes `out`, it is not ours to replace, or the place does not let a bundle be
    put there: all of it before any work.
    """
    work = out.parent / f".{out.name}.partial"
    with blame(out, PlaceError):
        _check_name(out, work)
        _refuse_working_directory(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = open_own_folder(work)
        except BlockingIOError as error:
            raise PlaceError(f"{out}: another run is writing it; wait for it or choose another --out") from error
        except FileExistsError as error:
            why = "stands where the run would work, and was not made by compress"
            raise PlaceError(f"{work}: {why}; move it away or choose another --out") from error
    try:
        with blame(out, PlaceError):
            _recover(out, work)
            refuse_foreign(out, PlaceError)
            _try_to_move(out, work)
            (work / NEW).mkdir()
        yield work / NEW
    finally:
        with delay_interrupts():
            if not (work / OLD).exists():  # else the next run needs to see how far this one came
                shutil.rmtree(work / NEW, ignore_errors=True)
            shutil.rmtree(work / DISCARDED, ignore_errors=True)
            close_own_folder(work, handle)


def publish(staging: Path, out: Path) -> None:
    """Put a whole bundle under its name; the one that stood there goes. Each step is one rename.

    Raises OutputError where something was added to the old bundle, or changed in it, while the run worked: it stays.
    """
    old, discarded = staging.parent / OLD, staging.parent / DISCARDED
    with blame(out):
        sync_tree(staging)
        if os.path.lexists(out):
            seen = _survey(out)  # before the check, which takes long
            refuse_foreign(out, OutputError)
            try:
                os.rename(out, old)
                if _survey(old) != seen:
                    raise OutputError(f"{out}: was changed while it was about to be replaced; {_WAY_OUT}")
                os.rename(staging, out)
            except BaseException:
                _put_back(old, out)
                raise
            sync(out.parent)
            os.rename(old, discarded)
            shutil.rmtree(discarded, ignore_errors=True)
        else:
            os.rename(staging, out)
            sync(out.parent)


def keep_log(log: Path, out: Path) -> Path:
    """Put the log of a run that failed beside `out`, under a name that nothing has; return that name."""
    number = 1
    while True:
        kept = out.with_name(f"{out.name}.{log.name}" if number == 1 else f"{out.name}.{number}.{log.name}")
        try:
            link_or_copy(log, kept)
        except FileExistsError:
            number += 1
        else:
            return kept


_WAY_OUT = "finished work is kept: move away what was added, or choose another --out, and run again"


def refuse_foreign(out: Path, kind: type[OutputError]) -> None:
    """Raise `kind` unless `out` may be replaced: absent, an empty folder, or a bundle with nothing added or changed."""
    _refuse_working_directory(out)
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise kind(f"{out}: a file; --out names a folder")
    if not os.listdir(out):
        return
    try:
        records = read_manifest(out).files
    except BundleError as error:
        raise kind(f"{out}: holds other things than a whole bundle; choose another --out or empty it") from error
    files, odd = regular_files(out)
    added = [*odd, *sorted(name for name in files if name not in records and name != MANIFEST and is_hashed(name))]
    used = {parent for path in files.values() for parent in path.parents}
    added += sorted(
        f"the folder {path.relative_to(out)}" for path in out.rglob("*") if path.is_dir() and path not in used
    )
    if added:
        raise kind(f"{out}: a bundle to which {added[0]} was added; move that away or choose another --out")
    edited = [name for name, record in records.items() if name in files and sha256_of(files[name]) != record.sha256]
    if edited:
        raise kind(
            f"{out}: {edited[0]} is not as the run that made the bundle wrote it; move the bundle away to keep the "
            f"change, remove {edited[0]} to lose it, or choose another --out"
        )


def _refuse_working_directory(out: Path) -> None:
    if Path.cwd().is_relative_to(out):
        raise PlaceError(f"{out}: the working directory lies in it; --out names a folder of the bundle's own")


def _check_name(out: Path, work: Path) -> None:
    """Raise PlaceError for a name that is no text, or leaves no room for the work folder's or for the names inside."""
    try:
        str(out.absolute()).encode()
    except UnicodeEncodeError as error:  # ONNX, protobuf and JSON have no such names
        raise PlaceError(f"{str(out)!r}: a name that is not UTF-8; choose another --out") from error
    name, path = len(os.fsencode(work.name)), len(os.fsencode(out))
    if name > MAX_NAME_BYTES:
        most = MAX_NAME_BYTES - (name - len(os.fsencode(out.name)))
        raise PlaceError(f"{out}: its last part has more than {most} bytes; choose a shorter --out")
    if path > MAX_PATH_BYTES - ROOM:
        raise PlaceError(f"{out}: {path} bytes, more than {MAX_PATH_BYTES - ROOM}; choose a shorter --out")


def _try_to_move(out: Path, work: Path) -> None:
    """Raise PlaceError where the folder `out` cannot be renamed, which is how a bundle is put in its place.

    Only doing it tells: a mount point, a layer of a container's image, a folder of another user in /tmp.
    """
    if not os.path.lexists(out):
        return
    try:
        os.rename(out, work / OLD)
    except OSError as error:
        mounted = error.errno in (errno.EBUSY, errno.EXDEV)
        why = "it is a mount point, or part of a container's image" if mounted else f"{error.strerror}"
        raise PlaceError(
            f"{out}: cannot be replaced, as a bundle is put in its place by renaming the folder: {why}; name a folder "
            f"inside it, as --out {out / 'bundle'}"
        ) from error
    finally:
        _put_back(work / OLD, out)


def _put_back(old: Path, out: Path) -> None:
    """Give the bundle that was moved aside its name again, if it has none now."""
    if not old.exists() or os.path.lexists(out):
        return
    with suppress(OSError):  # a disk that fails for a moment would leave nothing under the name
        os.rename(old, out)
        return
    try:
        os.rename(old, out)
    except OSError as error:
        raise OutputError(
            f"{out}: cannot be put back: {error.strerror or error}; the bundle lies whole in {old}, and the next run "
            "with this --out puts it back"
        ) from error


def _recover(out: Path, work: Path) -> None:
    """Put right what a killed run left: the old bundle comes back, unless the new one had arrived."""
    old, new = work / OLD, work / NEW
    _put_back(old, out)
    if old.exists() and new.exists():
        raise PlaceError(f"{out}: stands where the bundle in {old} stood; move one of the two away and run again")
    shutil.rmtree(work / DISCARDED, ignore_errors=True)
    if old.exists():
        os.rename(old, work / DISCARDED)
    for left in (work / DISCARDED, new):
        if left.exists():
            shutil.rmtree(left)


def _survey(root: Path) -> Survey:
    """Return every name under a folder; for a file with what changes when it does."""
    files: Survey = {}
    for path in root.rglob("*"):
        status = path.lstat()
        files[path.relative_to(root).as_posix()] = (
            None if path.is_dir() else (status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return files
