"""Finished results, kept by content: a result's key is a digest of all that decides it.

A result is a folder `<cache>/<key>` with its files and `record.json`, which holds their names and digests, the key
and a digest of itself: every byte counts, and so does every name. It is made under another name and renamed when whole,
so a folder under its key is a finished result; one that was damaged or edited later is discarded and said so. Drafts
that a killed run left behind are swept away by the next one that writes. Long work keeps what it has finished in
`<cache>/partial-<key>`, which outlives the run. Who can write here and makes digests anew is believed: the folder is
its user's alone (mode 0700).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compress.errors import PlaceError
from compress.store.durable import MARK, MARK_TEXT, blame, is_named, is_own_folder, link_or_copy, lock, seal, unseal
from runtime.bundle.files import regular_files, sha256_of, sync, sync_tree

LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers", "tokenizers")
RECORD, DRAFT, RESULT, PARTIAL, LABEL = "record.json", ".draft-", "result", "partial-", "label.txt"
HELD_BY = "held_by"
"""In a result's record: the key of another, whose files are this one's, too. Their second names would not do: onnx
reads no weights from a file of two names, which may be an attack."""
CHANGED = "the recipe, its model, its data or the code has changed since a run that did not finish"
NEW_SECONDS = 5.0
"""A draft younger than this is never swept: it may not be locked yet."""


@dataclass(frozen=True)
class CachedResult:
    """A finished result: its folder and the JSON values its maker recorded."""

    folder: Path
    record: dict[str, Any]

    @contextmanager
    def hold(self) -> Iterator[Path]:
        """Yield the folder; an error of the file system while the context is open names it."""
        with blame(self.folder):
            yield self.folder


@dataclass(frozen=True)
class ResultCache:
    """The store. `log` is told when a damaged result is discarded."""

    root: Path
    log: Callable[[str], None] = print

    def has(self, key: str) -> bool:
        """Return whether there is a result of that key; its files are not checked."""
        return (self.root / key / RECORD).is_file()

    def has_partial(self, key: str) -> bool:
        """Return whether a killed run left some of the work of that key."""
        return (self.root / (PARTIAL + key)).is_dir()

    def refuse_file(self) -> None:
        """Raise PlaceError where something that is no folder has the cache's name."""
        if os.path.lexists(self.root) and not self.root.is_dir():
            raise PlaceError(f"{self.root}: a file; the cache is a folder: name another with --cache or COMPRESS_CACHE")

    def check_place(self) -> None:
        """Make the cache's folder, for its user alone. Raises PlaceError where results could not be kept in it."""
        self.refuse_file()
        with blame(self.root, PlaceError):
            self._make_root()
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise PlaceError(f"{self.root}: the cache cannot be written; name another with --cache or COMPRESS_CACHE")

    def _make_root(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def get(self, key: str) -> CachedResult | None:
        """Return the finished result of that key, with every file checked; None if there is none that is whole."""
        folder = self.root / key
        with blame(self.root):
            if not os.path.lexists(folder):
                return None
            record = _read_whole_record(folder)
            if record is not None:
                return CachedResult(folder, record)
            self.log(f"cache: result {key[:12]} is damaged; it is discarded and done again")
            with self._open_draft() as doomed:  # renamed at once, then removed: nobody meets it half removed
                os.rename(folder, doomed if folder.is_dir() and not folder.is_symlink() else doomed / "file")
            return None

    def find_holder(self, cached: CachedResult) -> CachedResult | None:
        """Return the result that holds a result's files, itself or the one that it names; None where that is gone."""
        key = cached.record.get(HELD_BY)
        return cached if key is None else self.get(key)

    def put(self, key: str, write: Callable[[Path], dict[str, Any]]) -> CachedResult:
        """Let `write` fill a folder and give the record; the folder appears under `key` only when it is whole.

        Where another run finished the same work meanwhile, its result is taken.
        """
        with blame(self.root):
            self._make_root()
            self._sweep()
            with self._open_draft() as draft:
                made = write(draft)
                files = {name: sha256_of(path) for name, path in regular_files(draft)[0].items()}
                text = seal({"key": key, "files": files, "record": made})
                (draft / RECORD).write_bytes(text)
                sync_tree(draft)
                theirs = self._publish(draft, key)
        # as it is read back: the order of a record's keys decides the order of rows in a bundle
        return theirs or CachedResult(self.root / key, json.loads(text)["record"])

    @contextmanager
    def partial(self, key: str, label: str) -> Iterator[Path]:
        """Lend a folder for what unfinished work has done, locked meanwhile: kept after a failure, else removed.

        The next run of the same key finds in it what the last one left. `label` names the work as the user knows it:
        unfinished work of that label with another key is removed, and said so. Where another process is at work on the
        key, the folder is a new one.
        """
        folder = self.root / (PARTIAL + key)
        with blame(self.root), ExitStack() as held:
            self._make_root()
            try:
                afresh = _take_folder(folder, held)
            except BlockingIOError:
                self.log(f"cache: another run is at work on result {key[:12]}; this one does not wait for it")
                yield held.enter_context(self._open_draft())
                return
            (folder / LABEL).write_text(label)
            if self._remove_outdated(folder, label) and afresh:
                self.log(f"{label}: {CHANGED}, so this pass starts afresh")
            yield folder
            shutil.rmtree(folder)

    def _remove_outdated(self, folder: Path, label: str) -> int:
        """Remove the other partial folders of that label that nobody works in; return how many there were."""
        count = 0
        for other in self.root.glob(f"{PARTIAL}*"):
            with suppress(OSError), _lock_folder(other):  # one that another run removes or works in is not ours
                if other != folder and (other / LABEL).read_text() == label:
                    shutil.rmtree(other)
                    count += 1
        return count

    def _publish(self, draft: Path, key: str) -> CachedResult | None:
        """Give the draft the result's name; if another run's whole result has it, return that one."""
        theirs = self.get(key)
        if theirs is not None:
            return theirs
        try:
            os.rename(draft, self.root / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return self.get(key)  # it came between the two lines
        sync(self.root)
        return None

    @contextmanager
    def _open_draft(self) -> Iterator[Path]:
        """Make a new folder in one of our own, locked while the context is open, and gone afterwards."""
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.root))
        try:
            with _lock_folder(draft):
                (draft / MARK).write_text(MARK_TEXT)
                (draft / RESULT).mkdir(mode=0o700)
                yield draft / RESULT
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what killed runs left; a draft that is locked, or so new that its lock may be on its way, stays."""
        for draft in self.root.glob(f"{DRAFT}*"):
            with suppress(OSError), _lock_folder(draft):  # another run may sweep the same one
                if is_own_folder(draft) and time.time() - draft.stat().st_mtime > NEW_SECONDS:
                    shutil.rmtree(draft)


def hand_over(folder: Path, draft: Path) -> None:
    """Put the files of a partial folder or a result into a draft as well, not copied where the file system can."""
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (LABEL, RECORD)):
        link_or_copy(file, draft / file.name)


def _take_folder(folder: Path, held: ExitStack) -> bool:
    """Lock the folder, made if it is not there, until `held` ends; return whether it was made.

    Raises BlockingIOError if another process has it.
    """
    while True:
        made = not folder.exists()
        folder.mkdir(exist_ok=True, mode=0o700)
        with ExitStack() as attempt:
            try:
                handle = attempt.enter_context(_lock_folder(folder))
            except FileNotFoundError:
                continue
            if is_named(handle, folder):  # and not one that was removed meanwhile
                held.push(attempt.pop_all())
                return made


@contextmanager
def _lock_folder(folder: Path) -> Iterator[int]:
    """Hold the folder's lock while the context is open, or until the process ends; yield its handle.

    Raises BlockingIOError if another process has it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle)
        yield handle
    finally:
        os.close(handle)


def _read_whole_record(folder: Path) -> dict[str, Any] | None:
    """Return what a result's maker recorded; None unless the folder holds the files that it wrote, and nothing else."""
    try:
        stored = unseal((folder / RECORD).read_bytes())
        files, odd = regular_files(folder)
        if stored is None or stored["key"] != folder.name or odd or files.keys() != {*stored["files"], RECORD}:
            return None
        whole = all(sha256_of(files[name]) == digest for name, digest in stored["files"].items())
        record: dict[str, Any] = stored["record"]
        return record if whole else None
    except (OSError, LookupError, TypeError, AttributeError):  # not there, or not of this form
        return None


def default_root() -> Path:
    """Return $COMPRESS_CACHE, else compress/ in the user's cache folder."""
    named = os.environ.get("COMPRESS_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compress"


def cache_key(*parts: Any) -> str:
    """Hash JSON values and the version of the code and libraries that would do the work: sha256 (hex)."""
    text = json.dumps([code_version(), parts], sort_keys=True, default=_make_plain)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_version() -> str:
    """Return a digest of the sources of `compress` and `runtime`, and of the libraries' versions."""
    sha = hashlib.sha256(json.dumps(library_versions(), sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for room in (package, package.parent / "runtime"):
        for file in sorted(room.rglob("*.py")):
            sha.update(f"{file.relative_to(package.parent)}\n".encode() + file.read_bytes())
    return sha.hexdigest()


def library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that results rest on, by name."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in a result's key")
