"""What installed distributions add through entry points. Imports the standard library alone.

An entry point's name is the name of what it names, so that a table knows its names without importing anything; an
entry is imported when it is first looked up. Nothing is found in the working directory, in a bundle or in a recipe.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from runtime.errors import PluginError
from runtime.processes.search_path import keep_trusted

PASS_GROUP, METRIC_GROUP, BACKEND_GROUP = "compress.passes", "runtime.metrics", "runtime.backends"
TASK_GROUP, TORCH_TASK_GROUP = "runtime.tasks", "compress.tasks"
GROUPS = (PASS_GROUP, METRIC_GROUP, BACKEND_GROUP, TASK_GROUP, TORCH_TASK_GROUP)
"""Groups of entry points that are read."""
OBJECT = re.compile(r"(?P<module>\w+(?:\.\w+)*):(?P<attribute>\w+(?:\.\w+)*)")

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed distribution. `path`: "package.module:attribute"."""

    group: str
    name: str
    path: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plug-in '{self.name}' of {self.group}, {self.path} in {self.distribution} {self.version}"

    def refuse(self, problem: str) -> PluginError:
        """Return the error that says what is wrong with the plug-in, and how to get rid of it."""
        return PluginError(f"{self}: {problem}; mend it, or remove it: pip uninstall {self.distribution}")

    def import_object(self, path: str) -> Any:
        """Import what "package.module:attribute" names; PluginError says why that is not possible."""
        match = OBJECT.fullmatch(path)
        if match is None:
            raise self.refuse(f"'{path}' is not of the form package.module:attribute")
        try:
            value: Any = import_module(match["module"])
            for attribute in match["attribute"].split("."):
                value = getattr(value, attribute)
        except Exception as error:
            raise self.refuse(
                f"importing {path} ends in {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
        return value

    def to_record(self) -> dict[str, str]:
        """Return who the plug-in is and a digest of its package's sources, as JSON values."""
        top = self.path.partition(":")[0].partition(".")[0]
        spec = find_spec(top)
        folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
        files = [(file, file.relative_to(folder)) for folder in folders for file in sorted(folder.rglob("*.py"))]
        if spec is not None and spec.origin is not None and not files:
            files = [(Path(spec.origin), Path(Path(spec.origin).name))]
        # every .py of the outermost package: while it is developed, its version stays
        sha = hashlib.sha256()
        for file, name in files:
            sha.update(f"{name.as_posix()}\n".encode() + file.read_bytes())
        return {"distribution": self.distribution, "version": self.version, "code": sha.hexdigest()}


def find_plugins(group: str) -> tuple[Plugin, ...]:
    """Return what the installed distributions add to a group, in the order of the search path; nothing is imported."""
    return tuple(plugin for plugin in _read_entry_points() if plugin.group == group)


def find_plugin(group: str, name: str) -> Plugin | None:
    """Return the plug-in of that name; None where none is installed, as for what is our own."""
    return next((plugin for plugin in find_plugins(group) if plugin.name == name), None)


def plugin_versions() -> dict[str, str]:
    """Return distribution -> version of the plug-ins that this process has imported, for records of its environment."""
    return {plugin.distribution: plugin.version for plugin in _LOADED}


_LOADED: list[Plugin] = []


@cache
def _read_entry_points() -> tuple[Plugin, ...]:
    from importlib import metadata  # slow to import, and `--help` does without

    plugins: list[Plugin] = []
    seen: set[str] = set()
    for distribution in metadata.distributions(path=keep_trusted(sys.path, os.environ.get("PYTHONPATH", ""))):
        text = distribution.read_text("entry_points.txt") or ""
        if not any(f"[{group}]" in text for group in GROUPS):
            continue
        name = distribution.metadata["Name"]
        if name in seen:  # installed twice: the first on the search path is the one that is imported
            continue
        seen.add(name)
        try:
            points = [point for point in distribution.entry_points if point.group in GROUPS]
        except (TypeError, ValueError) as error:
            text = f"{name} {distribution.version}: its entry_points.txt cannot be read: {error}"
            raise PluginError(f"{text}; mend it, or remove it: pip uninstall {name}") from error
        plugins += [Plugin(point.group, point.name, point.value, name, distribution.version) for point in points]
    return tuple(plugins)


class PluginTable(Mapping[str, Entry], Generic[Entry]):
    """What a room lists by name: its own entries, then those of installed distributions.

    `accept` takes what an entry point names, and its name, and returns the entry; ValueError says which rule it breaks.
    `taken`: further names that no plug-in may have. Looking up an entry of our own reads nothing of the others.
    """

    def __init__(
        self,
        group: str,
        own: Mapping[str, Entry],
        accept: Callable[[object, str], Entry],
        taken: Collection[str] = (),
    ) -> None:
        self.group, self.own = group, dict(own)
        self._accept, self._taken = accept, taken
        self._accepted: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name in self.own:
            return self.own[name]
        if name not in self._accepted:
            self._accepted[name] = self._load(self._plugins[name])
        return self._accepted[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        yield from (*self.own, *self._plugins)

    def __len__(self) -> int:
        return len(self.own) + len(self._plugins)

    @cached_property
    def _plugins(self) -> dict[str, Plugin]:
        """Return the entry points by name. PluginError where two have one name, or one has that of what is built in."""
        plugins: dict[str, Plugin] = {}
        for plugin in find_plugins(self.group):
            if plugin.name in self.own or plugin.name in self._taken:
                raise plugin.refuse("the name is taken by what is built in")
            if plugin.name in plugins:
                raise plugin.refuse(f"the name is taken by the {plugins[plugin.name]}")
            plugins[plugin.name] = plugin
        return plugins

    def _load(self, plugin: Plugin) -> Entry:
        loaded = plugin.import_object(plugin.path)
        try:
            entry = self._accept(loaded, plugin.name)
        except ValueError as error:
            raise plugin.refuse(str(error)) from error
        _LOADED.append(plugin)
        return entry


def check_entry(entry: object, name: str, kind: type[Entry]) -> Entry:
    """Return the entry; ValueError if it is no record of `kind`, or has another name than its entry point."""
    if not isinstance(entry, kind):
        raise ValueError(f"it is a {type(entry).__name__}, and must be a {kind.__module__}.{kind.__qualname__}")
    own_name = getattr(entry, "name", None)
    if own_name != name:
        raise ValueError(f"it calls itself '{own_name}', and must have the name of its entry point")
    return entry
