"""What was measured on this machine, kept by content: one form of file, one key, one notion of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.store.cache import cache_key
from compress.store.durable import seal, unseal
from runtime.bundle.files import write_whole
from runtime.bundle.records import to_json
from runtime.clock.machine import cpu_info


@dataclass(frozen=True)
class Kept:
    """Measurements under `root`, the cache's folder; None: nothing is kept, and nothing is found.

    A key is a name for the kind of measurement, and JSON values or records of all that it depends on beside the machine
    and the versions of the code and the libraries.
    """

    root: Path | None = None

    def read(self, kind: str, key: Sequence[object] = ()) -> dict[str, Any] | None:
        """Return what was kept for a key on this machine; None where nothing was, or where it is damaged."""
        path = self._find(kind, key)
        return unseal(path.read_bytes()) if path is not None and path.is_file() else None

    def write(self, kind: str, key: Sequence[object], record: Mapping[str, Any]) -> None:
        """Keep a record of JSON values for a key, in place of what was there."""
        path = self._find(kind, key)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, seal(record))

    def read_given(self, kind: str, key: Sequence[object]) -> dict[str, Any] | None:
        """Return what a bundle's lock gave for a key, on whatever machine it was measured; None where none did."""
        path = None if self.root is None else self.root / "given" / f"{name_given(kind, key)}.json"
        return unseal(path.read_bytes()) if path is not None and path.is_file() else None

    def give(self, name: str, record: Mapping[str, Any]) -> None:
        """Let a record stand for the key of that name (`name_given`) from now on, on any machine."""
        if self.root is not None:
            path = self.root / "given" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, seal(record))

    def _find(self, kind: str, key: Sequence[object]) -> Path | None:
        if self.root is None:
            return None
        return self.root / "measured" / f"{cache_key('measured', *cpu_info(), kind, to_json(list(key)))}.json"


def name_given(kind: str, key: Sequence[object]) -> str:
    """Return the name of a key that does not depend on the machine, as a bundle's lock has it."""
    return cache_key("given", kind, to_json(list(key)))
