"""Finished steps, kept by content: a step's key is a digest of all that decides its result.

A step is a folder `<cache>/<key>` with its files and `record.json`, which holds their digests. It is made under another
name and renamed when whole, so a folder under its key is a finished step; one that was damaged later is discarded and
said so. Drafts that a killed run left behind are swept away by the next one that writes. Work that takes long keeps
what it has finished in `<cache>/partial-<key>`, which outlives the run.
"""

from __future__ import annotations

import errno
import fcntl
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

from runtime.files import sha256_of

LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers", "tokenizers")
RECORD, DRAFT, PARTIAL, LABEL = "record.json", ".draft-", "partial-", "label.txt"
CHANGED = "the recipe, its model, its data or the code has changed since a run that did not finish"
NEW_SECONDS = 5.0
"""A draft younger than this is never swept: it may not be locked yet."""


@dataclass(frozen=True)
class Step:
    """A finished step: its folder and the JSON values its maker recorded."""

    folder: Path
    record: dict[str, Any]


@dataclass(frozen=True)
class StepCache:
    """The store. `log` is told when a damaged step is discarded."""

    root: Path
    log: Callable[[str], None] = print

    def has(self, key: str) -> bool:
        """True if there is a step of that key; its files are not checked."""
        return (self.root / key / RECORD).is_file()

    def get(self, key: str) -> Step | None:
        """The finished step of that key, with every file checked; None if there is none that is whole."""
        folder = self.root / key
        if not folder.exists():
            return None
        record = _whole_record(folder)
        if record is not None:
            return Step(folder, record)
        self.log(f"cache: step {key[:12]} is damaged; it is discarded and done again")
        self._discard(folder)
        return None

    def put(self, key: str, write: Callable[[Path], dict[str, Any]]) -> Step:
        """Let `write` fill a folder and give the record; the folder appears under `key` only when it is whole.

        Where another run finished the same step meanwhile, its result is taken.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        with self._draft() as draft:
            record = write(draft)
            files = {str(p.relative_to(draft)): sha256_of(p) for p in sorted(draft.rglob("*")) if p.is_file()}
            (draft / RECORD).write_text(json.dumps({"files": files, "record": record}, indent=1, sort_keys=True))
            theirs = self._publish(draft, key)
        return theirs or Step(self.root / key, record)

    @contextmanager
    def partial(self, key: str, label: str) -> Iterator[Path]:
        """A folder for what an unfinished step has done, locked while inside: kept after a failure, gone after success.

        The next run of the same key finds in it what the last one left. `label` names the step as the user knows it: an
        unfinished one of that label with another key is removed, and said so. Where another process is at work on the
        key, the folder is a new one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self.root / (PARTIAL + key)
        with ExitStack() as held:
            try:
                afresh = _taken(folder, held)
            except BlockingIOError:
                self.log(f"cache: another run is at work on step {key[:12]}; this one does not wait for it")
                yield held.enter_context(self._draft())
                return
            (folder / LABEL).write_text(label)
            if self._outdated(folder, label) and afresh:
                self.log(f"{label}: {CHANGED}, so this step starts afresh")
            yield folder
            shutil.rmtree(folder)

    def _outdated(self, folder: Path, label: str) -> int:
        """Remove the other partial folders of that label that nobody works in; how many there were."""
        count = 0
        for other in self.root.glob(f"{PARTIAL}*"):
            with suppress(OSError), _locked(other):  # one that another run removes or works in is not ours
                if other != folder and (other / LABEL).read_text() == label:
                    shutil.rmtree(other)
                    count += 1
        return count

    def _publish(self, draft: Path, key: str) -> Step | None:
        """Give the draft the step's name; if another run's whole result has it, that one is returned."""
        theirs = self.get(key)
        if theirs is not None:
            return theirs
        try:
            os.rename(draft, self.root / key)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return self.get(key)  # it came between the two lines
        return None

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A new folder, locked as long as it is worked in, and gone afterwards unless it was renamed."""
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.root))
        try:
            with _locked(draft):
                yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _discard(self, folder: Path) -> None:
        """Take a folder's name away at once, then its files: nobody meets it half removed."""
        doomed = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.root))
        os.rename(folder, doomed / "step")
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Remove what killed runs left; a draft that is locked, or so new that its lock may be on its way, stays."""
        for draft in self.root.glob(f"{DRAFT}*"):
            with suppress(OSError), _locked(draft):  # another run may sweep the same one
                if time.time() - draft.stat().st_mtime > NEW_SECONDS:
                    shutil.rmtree(draft)


def hand_over(partial: Path, draft: Path) -> None:
    """Put the files of a partial folder into a draft as well, without copying them where the file system can."""
    for file in sorted(path for path in partial.iterdir() if path.is_file() and path.name != LABEL):
        try:
            os.link(file, draft / file.name)
        except OSError:
            shutil.copyfile(file, draft / file.name)


def _taken(folder: Path, held: ExitStack) -> bool:
    """Lock the folder, made if it is not there, until `held` ends; True if it was made.

    BlockingIOError if another process has it.
    """
    while True:
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        with ExitStack() as attempt:
            try:
                handle = attempt.enter_context(_locked(folder))
            except FileNotFoundError:
                continue
            if _is_open(folder, handle):  # and not one that was removed meanwhile
                held.push(attempt.pop_all())
                return made


def _is_open(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the folder's lock, which ends with the process; its handle. BlockingIOError if another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def _whole_record(folder: Path) -> dict[str, Any] | None:
    """What a step's maker recorded, if every file is the one that it wrote."""
    try:
        stored = json.loads((folder / RECORD).read_text())
        whole = all(sha256_of(folder / name) == digest for name, digest in stored["files"].items())
        return stored["record"] if whole else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not there, not JSON, not of this form
        return None


def default_root() -> Path:
    """$COMPRESS_CACHE, else compress/ in the user's cache folder."""
    named = os.environ.get("COMPRESS_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compress"


def step_key(*parts: Any) -> str:
    """sha256 (hex) over JSON values and the version of the code and libraries that would do the step."""
    text = json.dumps([code_version(), parts], sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_version() -> str:
    """A digest of the sources of `compress` and `runtime`, and of the libraries' versions."""
    sha = hashlib.sha256(json.dumps(library_versions(), sort_keys=True).encode())
    package = Path(__file__).parent
    for room in (package, package.parent / "runtime"):
        for file in sorted(room.rglob("*.py")):
            sha.update(f"{file.relative_to(package.parent)}\n".encode() + file.read_bytes())
    return sha.hexdigest()


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that results rest on."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in a step's key")
