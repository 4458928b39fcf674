"""What a run says while it works: a log file always, one live line on a terminal, elsewhere a line every minute."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from compress.errors import OutputError
from compress.store.durable import blame

T = TypeVar("T")
BEAT_S = 60.0
"""How long a run may be silent: a log in CI that stands still for minutes looks dead."""


LEAST_SHOWN_S = 0.05
"""Below which a stage is in the file alone: "0.0 s" tells nothing."""
MARKS = 128
"""Of a stage's items whose times are kept."""
UNBROKEN = 10_000
"""Columns of what is no terminal: a line that is broken there is found by half its words."""


def open_console(stderr: bool = False) -> Console:
    """Return a console that breaks lines and tables at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    return console if console.file.isatty() or console.is_jupyter else Console(stderr=stderr, width=UNBROKEN)


@dataclass(eq=False)
class RunPosition:
    """Where a run is: a stage, or an item of several in it.

    `expected_s`: how long it took here the last time; `most_s`: after which it ends, whatever is left.
    """

    name: str
    total: int = 0
    done: int = 0
    expected_s: float | None = None
    most_s: float | None = None
    since: float = field(default_factory=time.monotonic)
    marks: list[tuple[int, float]] = field(default_factory=list)
    """How many items were done, and when: of each at first, of every `stride`th once there are MARKS."""
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.done} of {self.total}" if self.total else self.name

    def estimate_left_s(self) -> float:
        """Return the seconds that are left, by what is done, else by the last time; none above 0 where neither tells.

        The pace is that of the later half of what is done. The first item tells none: of three blocks of a story teller
        gptq's first took 34 s, with what is loaded once, and the others 11; and of nine processes that time a bundle
        the first three time more than the rest.
        """
        now = time.monotonic()
        if self.done < 2:
            return self.since + (self.most_s or self.expected_s or 0.0) - now
        (n_before, begun), (n_done, last) = self.marks[(len(self.marks) - 1) // 2], self.marks[-1]
        left_s = (last - begun) / (n_done - n_before) * (self.total - n_done) - (now - last)
        return left_s if self.most_s is None else min(left_s, self.since + self.most_s - now)

    def count(self) -> None:
        """Note that one more item is done."""
        self.done += 1
        if self.done % self.stride == 0:
            self.marks.append((self.done, time.monotonic()))
        if len(self.marks) > MARKS:
            self.marks, self.stride = self.marks[1::2], 2 * self.stride


class RunLog:
    """`log` writes a line to the file (with seconds since the start) and, unless quiet, to the terminal.

    While a stage lasts, a terminal has one line that says where it is and counts down; the file, and what is no
    terminal, get a line every `beat_s` seconds. `expected_s`: how long the plan expects stages to take, by name;
    `took_s`: how long those took that are done. The file is a new one: FileExistsError where something has its name, a
    link included.
    """

    def __init__(self, file: Path, quiet: bool = False, console: Console | None = None, beat_s: float = BEAT_S) -> None:
        self.file = file
        self.beat_s = beat_s
        self.expected_s: dict[str, float] = {}
        self.took_s: dict[str, float] = {}
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

    def progress(self, items: Sequence[T], text: str, most_s: float | None = None) -> Iterable[T]:
        """Return the items, counted for the lines that say where a stage is."""
        with self._stand_at(RunPosition(text, len(items), most_s=most_s)) as place:
            for item in items:
                yield item
                place.count()

    @contextmanager
    def time_stage(self, name: str, detail: str = "") -> Iterator[None]:
        """Log how long a stage took, and while it lasts where it is. `detail`: what it works on, for that."""
        place = RunPosition(f"{name}: {detail}" if detail else name, expected_s=self.expected_s.get(name))
        ended = threading.Event()
        with self._stand_at(place):
            beating = threading.Thread(target=self._beat, args=(place, ended), daemon=True)
            beating.start()
            try:
                yield
            finally:
                ended.set()
                beating.join()
        took_s = self.took_s[name] = time.monotonic() - place.since
        tell = self.log if took_s >= LEAST_SHOWN_S else self._write
        tell(f"{name}: {took_s:.1f} s")

    @contextmanager
    def _stand_at(self, place: RunPosition) -> Iterator[RunPosition]:
        """Keep a place among those where the run is; the first brings the live line, which goes with it."""
        live = not (self._places or self.quiet) and self.console.is_terminal
        self._places.append(place)
        try:
            with Live(console=self.console, get_renderable=self._describe, transient=True) if live else nullcontext():
                yield place
        finally:
            self._places.remove(place)

    def _describe(self) -> Text:
        """Return the live line: "judging: 797 samples, timing 3 of 9, about 17 s left"."""
        places = list(self._places)
        passed = f"{time.monotonic() - places[-1].since:.0f} s so far" if places else ""
        text = ", ".join([_name_places(places), _say_left(places) or passed])
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _beat(self, stage: RunPosition, ended: threading.Event) -> None:
        """Say every `beat_s` seconds where a stage is, unless another one within it does."""
        while not ended.wait(self.beat_s):
            places = list(self._places)
            inner = places[places.index(stage) :]
            if any(place is not stage and not place.total for place in inner):
                continue
            passed = f"{time.monotonic() - stage.since:.0f} s so far"
            text = f"{_name_places(inner)}: {', '.join(filter(None, [passed, _say_left(inner)]))}"
            with suppress(OutputError):  # of a full disk the work itself will tell
                self._write(text)
            if not self.console.is_terminal:
                self.show(text)


def _say_left(places: Sequence[RunPosition]) -> str:
    """Return "about 17 s left", of the outermost place that can tell; "" where none can."""
    left_s = next((left for place in places if (left := place.estimate_left_s()) >= 1), None)
    return "" if left_s is None else f"about {left_s:.0f} s left"


def _name_places(places: Sequence[RunPosition]) -> str:
    """Return places from the stage inwards; one whose name the next place begins with is not told twice."""
    follow = [*(place.name for place in places[1:]), ""]
    return ", ".join(
        str(place) for place, after in zip(places, follow, strict=True) if not after.startswith(f"{place.name}:")
    )
