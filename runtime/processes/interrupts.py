"""How a program of ours ends when it is told to: Ctrl-C and SIGTERM unwind it, and nothing temporary is left behind.

Two things go wrong by themselves. SIGTERM ends a Python process at once, with its temporary folders left where they
are: here it is an exception. And an exception that a signal's handler raises inside a finalizer (`__del__`, a weak
reference's callback) is printed and lost, and the run goes on: here the signal is given again.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX, MARK = "compress-run-", ".of-compress"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM. Not an Exception, so that nothing that handles errors takes it for one."""


class _Delivery:
    """Signals as exceptions in the main thread. One for the process, as its signal handlers are."""

    def __init__(self) -> None:
        self.undisturbed = 0
        self.waiting: int | None = None
        """A signal that came while nothing was to be disturbed, or that a finalizer swallowed."""
        self.swallowed = 0
        """How many finalizers have swallowed, by which a signal that is given again knows whether it is the last."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.undisturbed:
            self.waiting = number
            return
        self.waiting = None
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def raise_waiting(self) -> None:
        """Raise what has not reached the run yet."""
        if self.waiting is not None and not self.undisturbed:
            self.handle(self.waiting, None)

    def swallow(self, lost: Any) -> bool:
        """Return whether a finalizer swallowed an interrupt, which is then given again."""
        if lost.exc_type is None or not issubclass(lost.exc_type, (KeyboardInterrupt, Terminated)):
            return False
        self.waiting = signal.SIGINT if issubclass(lost.exc_type, KeyboardInterrupt) else signal.SIGTERM
        # Given at once, it would be raised in the finalizer again. A plain thread: threading's locks may be held here.
        self.swallowed += 1
        _thread.start_new_thread(self._repeat_signal, (signal.Signals(self.waiting), self.swallowed))
        return True

    def _repeat_signal(self, number: signal.Signals, swallowed: int) -> None:
        # for the finalizer that swallowed the signal to have ended
        time.sleep(0.05)
        if self.waiting is not None and self.swallowed == swallowed:
            _thread.interrupt_main(number)


_DELIVERY = _Delivery()


@contextmanager
def end_orderly() -> Iterator[None]:
    """Keep interrupts and temporary files in order while the context is open.

    SIGTERM raises Terminated, no interrupt is lost, and temporary files lie in one folder that goes at the end. The
    folders that killed runs left are swept away. For the outermost frame of a program.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_raise_signals())
        stack.enter_context(_use_temporary_folder())
        yield


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Keep an interrupt waiting while the context is open: for what must be cleaned up whole."""
    _DELIVERY.undisturbed += 1
    try:
        yield
    finally:
        _DELIVERY.undisturbed -= 1
    _DELIVERY.raise_waiting()


@contextmanager
def _raise_signals() -> Iterator[None]:
    before = {number: signal.signal(number, _DELIVERY.handle) for number in SIGNALS}
    hook = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if _DELIVERY.swallow(lost) else hook(lost)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
        _DELIVERY.raise_waiting()  # it was swallowed, and the run ended before it came again


@contextmanager
def _use_temporary_folder() -> Iterator[None]:
    """Keep `tempfile` and child processes in a folder of this run's own while the context is open.

    Without any place for one, change nothing.
    """
    default, environment, owner = tempfile.tempdir, os.environ.get("TMPDIR"), os.getpid()
    made: tuple[Path, int] | None = None
    try:
        with delay_interrupts(), suppress(OSError):  # read-only everywhere: what needs temporary files says so itself
            made = _make_folder(Path(tempfile.gettempdir()))
            tempfile.tempdir = os.environ["TMPDIR"] = str(made[0])
        yield
    finally:
        with delay_interrupts():
            tempfile.tempdir = default
            if environment is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = environment
            if made is not None and os.getpid() == owner:  # and not a fork that unwinds
                shutil.rmtree(made[0], ignore_errors=True)
                os.close(made[1])


def _make_folder(parent: Path) -> tuple[Path, int]:
    """Make a folder with our mark; return it and its descriptor, which is locked as long as the process lives."""
    sweep(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # another run swept it away before it was locked
            _lock_folder(handle)
            (folder / MARK).touch()
            return folder, handle
        os.close(handle)


def sweep(parent: Path) -> None:
    """Remove the temporary folders of runs that were killed: with our mark, of this user, and locked by nobody."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or swept by another run
            handle = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            try:
                _lock_folder(handle)
                if os.fstat(handle).st_uid != os.geteuid():
                    continue
                if (folder / MARK).is_file():
                    shutil.rmtree(folder, ignore_errors=True)
                else:
                    folder.rmdir()  # killed before its mark was there; with anything in it, it is not ours
            finally:
                os.close(handle)


def _lock_folder(handle: int) -> None:
    """Lock a folder; BlockingIOError where another process holds the lock."""
    import fcntl  # not on Windows, where os.open refuses folders before

    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
