"""What a run says while it works: a log file always, progress bars on a terminal, nothing else in CI."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class Journal:
    """`log` writes a line to the file (with seconds since the start) and, unless quiet, to the terminal."""

    def __init__(self, file: Path, quiet: bool = False, console: Console | None = None) -> None:
        self.file = file
        self.quiet = quiet
        self.console = console or Console(stderr=True)
        self.start = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    def log(self, text: str) -> None:
        self._write(text)
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Write into the file, not on the terminal, what ends the run before its end."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # a full disk may be why
                self._write(f"failed: {type(error).__name__}: {error}")
            raise

    def _write(self, text: str) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(f"{time.monotonic() - self.start:9.2f}s  {text}\n")

    def progress(self, items: Sequence[T], text: str) -> Iterable[T]:
        """The items, with a bar on a terminal."""
        if self.quiet or not self.console.is_terminal:
            return items
        return self._bar(items, text)

    def _bar(self, items: Sequence[T], text: str) -> Iterator[T]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            yield from bar.track(items, description=text)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Log how long a step took."""
        begun = time.monotonic()
        yield
        self.log(f"{name}: {time.monotonic() - begun:.1f} s")


def silent(items: Sequence[Any], text: str) -> Iterable[Any]:
    """No bar."""
    return items
