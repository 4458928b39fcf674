"""What a run says while it works: a log file always, progress bars on a terminal, elsewhere a line every minute."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compress.errors import OutputError
from compress.store.durable import blame

T = TypeVar("T")
BEAT_S = 60.0
"""How long a run may be silent: a log in CI that stands still for minutes looks dead."""


UNBROKEN = 10_000
"""Columns of what is no terminal: a line that is broken there is found by half its words."""


def open_console(stderr: bool = False) -> Console:
    """Return a console that breaks lines and tables at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    return console if console.file.isatty() or console.is_jupyter else Console(stderr=stderr, width=UNBROKEN)


@dataclass(eq=False)
class RunPosition:
    """Where a run is: a stage, or an item of several in it."""

    name: str
    total: int = 0
    done: int = 0
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} {self.done} of {self.total}" if self.total else self.name


class Journal:
    """`log` writes a line to the file (with seconds since the start) and, unless quiet, to the terminal.

    While a stage lasts, a line every `beat_s` seconds says where it is: in the file, and on what is no terminal. The
    file is a new one: FileExistsError where something has its name, a link included.
    """

    def __init__(self, file: Path, quiet: bool = False, console: Console | None = None, beat_s: float = BEAT_S) -> None:
        self.file = file
        self.beat_s = beat_s
        self._places: list[RunPosition] = []
        self.quiet = quiet
        self.console = console or open_console(stderr=True)
        self.start = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND
        self._handle = os.open(file, flags, 0o644)  # held, as the folder gets another name when it is published
        weakref.finalize(self, os.close, self._handle)

    def log(self, text: str) -> None:
        self._write(text)
        self.show(text)

    def show(self, text: str) -> None:
        """Print a line on the terminal, unless quiet."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Write into the file, not on the terminal, what ends the run before its end."""
        try:
            yield
        except BaseException as error:
            with suppress(OutputError):  # a full disk may be why
                self._write(f"failed: {type(error).__name__}: {error}")
            raise

    def _write(self, text: str) -> None:
        line = f"{time.monotonic() - self.start:9.2f}s  {text}\n".encode("utf-8", "backslashreplace")
        with blame(self.file):
            while line:
                line = line[os.write(self._handle, line) :]

    def progress(self, items: Sequence[T], text: str) -> Iterable[T]:
        """Return the items; on a terminal with a bar, elsewhere counted for the lines that say where a stage is."""
        counted = self._count(items, text)
        return counted if self.quiet or not self.console.is_terminal else self._bar(counted, len(items), text)

    def _count(self, items: Sequence[T], text: str) -> Iterator[T]:
        place = RunPosition(text, len(items))
        self._places.append(place)
        try:
            for item in items:
                yield item
                place.done += 1
        finally:
            self._places.remove(place)

    def _bar(self, items: Iterable[T], total: int, text: str) -> Iterator[T]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield from bar.track(items, total=total, description=text)

    @contextmanager
    def time_stage(self, name: str) -> Iterator[None]:
        """Log how long a stage took, and while it lasts where it is."""
        place, ended = RunPosition(name), threading.Event()
        self._places.append(place)
        beating = threading.Thread(target=self._beat, args=(place, ended), daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            self._places.remove(place)
        self.log(f"{name}: {time.monotonic() - place.since:.1f} s")

    def _beat(self, stage: RunPosition, ended: threading.Event) -> None:
        """Say every `beat_s` seconds where a stage is, unless another one within it does."""
        while not ended.wait(self.beat_s):
            places = list(self._places)
            inner = places[places.index(stage) :]
            if any(place is not stage and not place.total for place in inner):
                continue
            text = f"{', '.join(map(str, inner))}: {time.monotonic() - stage.since:.0f} s so far"
            with suppress(OutputError):  # of a full disk the work itself will tell
                self._write(text)
            if not self.console.is_terminal:
                self.show(text)
