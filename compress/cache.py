"""Finished steps, kept by content: a step's key is a digest of all that decides its result.

A step is a folder `<cache>/<key>` with its files and `record.json`, which holds their digests. It is made under another name
and renamed when whole, so a folder under its key is a finished step; one that was damaged later is discarded and said so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOMS = ("data", "export", "graph", "models", "passes", "quantize")
"""The folders of `compress` whose code decides a step's result."""
LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "torch", "transformers", "tokenizers")
RECORD = "record.json"


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
        return (self.root / key / RECORD).is_file()

    def get(self, key: str) -> Step | None:
        """The finished step of that key, with every file checked; None if there is none that is whole."""
        folder = self.root / key
        if not self.has(key):
            return None
        try:
            stored = json.loads((folder / RECORD).read_text())
            whole = all(file_digest(folder / name) == digest for name, digest in stored["files"].items())
        except (OSError, ValueError, KeyError):
            whole = False
        if whole:
            return Step(folder, stored["record"])
        self.log(f"cache: step {key[:12]} is damaged; it is discarded and done again")
        shutil.rmtree(folder)
        return None

    def put(self, key: str, write: Callable[[Path], dict[str, Any]]) -> Step:
        """Let `write` fill a folder and give the record; the folder appears under `key` only when it is whole."""
        self.root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=self.root))
        try:
            record = write(draft)
            files = {str(p.relative_to(draft)): file_digest(p) for p in sorted(draft.rglob("*")) if p.is_file()}
            (draft / RECORD).write_text(json.dumps({"files": files, "record": record}, indent=1, sort_keys=True))
            folder = self.root / key
            if not folder.exists():
                os.rename(draft, folder)
            return Step(folder, record)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


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
    """A digest of the sources of the rooms that decide results, and of the libraries' versions."""
    sha = hashlib.sha256(json.dumps(library_versions(), sort_keys=True).encode())
    package = Path(__file__).parent
    runtime = package.parent / "runtime"
    files = [file for room in ROOMS for file in sorted((package / room).rglob("*.py"))]
    for file in [*files, *sorted(runtime.rglob("*.py"))]:
        sha.update(f"{file.name}\n".encode() + file.read_bytes())
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


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in a step's key")
