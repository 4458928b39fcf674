"""What a run says while it works: a log file always, a live line on a terminal, a bar in a notebook, else its lines."""

from __future__ import annotations

import html
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from compress.errors import OutputError
from compress.store.durable import blame
from compress.store.progress import no_log

T = TypeVar("T")
BEAT_S = 60.0
"""How long a run may be silent: a log in CI that stands still for minutes looks dead."""


LEAST_SHOWN_S = 0.05
"""Below which a stage is in the file alone: "0.0 s" tells nothing."""
MARKS = 128
"""Of a stage's items whose times are kept."""


def open_console(stderr: bool = False) -> Console:
    """Return a console that breaks lines and tables at the terminal's width, and nowhere where there is none."""
    console = Console(stderr=stderr)
    # no terminal: a line that is broken there is found by half its words
    return console if console.file.isatty() or console.is_jupyter else Console(stderr=stderr, width=10_000)


def is_unwatched_notebook(console: Console) -> bool:
    """Return whether a notebook is run in CI, where what is drawn meanwhile would be kept among its outputs."""
    return console.is_jupyter and bool(os.environ.get("CI"))


def choose_log(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line on stderr, as of each trial of a search; nothing does in a notebook that runs in CI."""
    console = open_console(stderr=True)
    return no_log if quiet or is_unwatched_notebook(console) else partial(console.print, markup=False, highlight=False)


class NotebookBar:
    """A context in which the output of a notebook's cell has a bar and a line; left, they are gone. It may be again.

    `describe`: gives the line, and what part is done, in [0, 1]; None: not known. IPython's displays alone are needed:
    rich draws live lines in notebooks by ipywidgets only.
    """

    def __init__(self, describe: Callable[[], tuple[str, float | None]]) -> None:
        self._describe = describe
        self._place: Any = None

    def __enter__(self) -> None:
        from IPython.display import HTML, display

        self._html: Callable[[str], Any] = HTML
        if self._place is None:
            self._place = display(HTML(self._draw()), display_id=True)
        self._ended = threading.Event()
        self._drawing = threading.Thread(target=self._redraw, daemon=True)
        self._drawing.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._drawing.join()
        self._place.update(self._html(""))

    def _redraw(self) -> None:
        while True:
            self._place.update(self._html(self._draw()))
            # a notebook's bar is drawn anew twice a second
            if self._ended.wait(0.5):
                return

    def _draw(self) -> str:
        text, done = self._describe()
        return f"<progress {'' if done is None else f'value={done:.3f}'}></progress> {html.escape(text)}"


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

    def estimate_part(self) -> float | None:
        """Return what part is done, by the time that is left, else by items; None where neither tells."""
        passed, left = time.monotonic() - self.since, self.estimate_left_s()
        if left > 0:
            return passed / (passed + left)
        return self.done / self.total if self.total else None

    def count(self) -> None:
        """Note that one more item is done."""
        self.done += 1
        if self.done % self.stride == 0:
            self.marks.append((self.done, time.monotonic()))
        if len(self.marks) > MARKS:
            self.marks, self.stride = self.marks[1::2], 2 * self.stride


class RunLog:
    """`log` writes a line to the file (with seconds since the start) and, unless quiet, to the terminal.

    While a stage lasts, a terminal has one line that says where it is and counts down, and a notebook a bar with it, in
    the place of all lines (none of it in CI); the file, and what is neither, get a line every `beat_s` seconds.
    `expected_s`: how long the plan expects stages to take, by name; `took_s`: how long those took that are done. The
    file is a new one: FileExistsError where something has its name, a link included.
    """

    def __init__(self, file: Path, quiet: bool = False, console: Console | None = None, beat_s: float = BEAT_S) -> None:
        self.file = file
        self.beat_s = beat_s
        self.expected_s: dict[str, float] = {}
        self.took_s: dict[str, float] = {}
        self._places: list[RunPosition] = []
        self.console = console or open_console(stderr=True)
        self.quiet = quiet or is_unwatched_notebook(self.console)
        self._bar: NotebookBar | None = None
        self.start = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND
        self._handle = os.open(file, flags, 0o644)  # held, as the folder gets another name when it is published
        weakref.finalize(self, os.close, self._handle)

    def log(self, text: str) -> None:
        self._write(text)
        if not self.console.is_jupyter:
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
        shown = not (self._places or self.quiet)
        self._places.append(place)
        try:
            with self._show_live() if shown else nullcontext():
                yield place
        finally:
            self._places.remove(place)

    def _show_live(self) -> AbstractContextManager[object]:
        """Return what shows where the run is while it is open."""
        if self.console.is_jupyter:
            self._bar = self._bar or NotebookBar(self._describe_bar)
            return self._bar
        if not self.console.is_terminal:
            return nullcontext()
        return Live(
            console=self.console,
            get_renderable=lambda: Text(self._describe(), no_wrap=True, overflow="ellipsis"),
            transient=True,
        )

    def _describe(self) -> str:
        """Return the live line: "judging: 797 samples, timing 3 of 9, about 17 s left"."""
        places = list(self._places)
        passed = f"{time.monotonic() - places[-1].since:.0f} s so far" if places else ""
        return ", ".join([_name_places(places), _say_left(places) or passed])

    def _describe_bar(self) -> tuple[str, float | None]:
        """Return the live line, and what part is done of the outermost place that can tell."""
        places = list(self._places)
        return self._describe(), next((part for place in places if (part := place.estimate_part()) is not None), None)

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
            if not (self.console.is_terminal or self.console.is_jupyter):
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
