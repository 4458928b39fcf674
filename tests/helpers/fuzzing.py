"""What every fuzz test stands on: how many cases there are, how they may end, and within what time and memory."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings
from places import ROOT

from compress.errors import CompressError
from runtime.errors import RuntimeFailure

Test = TypeVar("Test", bound=Callable[..., Any])

CORPUS = ROOT / "tests/fuzz/corpus"
"""Inputs that broke something once, by kind; every run begins with them."""
FULL = int(os.environ.get("FUZZ_CASES", "0"))
"""Cases of all kinds together, in `make fuzz`; 0 in `make test`, where each test has a few."""
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SECONDS, WAITING, GIB = 10, 60, 2**30
"""Of processor time for a case; of the clock, which other work on the machine takes from; of memory."""
COUNTS: dict[str, dict[str, int]] = {}
"""Kind -> how its cases ended -> how many, in this process."""


class TookTooLong(BaseException):
    """A case that did not end in time; not an Exception, so that no handler of the product swallows it."""


def fuzz(share: float, quick: int) -> Callable[[Test], Test]:
    """Run a hypothesis test on `share` (0 to 1) of FUZZ_CASES, or on `quick` cases; seeded, so that a run repeats."""

    def decorate(test: Test) -> Test:
        chosen = settings(
            max_examples=max(1, round(FULL * share)) if FULL else quick,
            deadline=None,  # `bounded` keeps time
            database=None,  # what failed goes to the corpus by hand
            derandomize=not FULL,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )
        return chosen(seed(SEED)(test)) if FULL else chosen(test)

    return decorate


@contextmanager
def bounded(seconds: float = SECONDS) -> Iterator[None]:
    """Fail what takes more than `seconds` of the processor or WAITING (TookTooLong), or GIB of memory (MemoryError)."""
    before = [(number, signal.signal(number, _end)) for number in (signal.SIGPROF, signal.SIGALRM)]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + GIB, limits[1]))
    _set_timers(seconds, WAITING)
    try:
        yield
    finally:
        _set_timers(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in before:
            signal.signal(number, handler)


def _set_timers(busy: float, waiting: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, busy)
    signal.setitimer(signal.ITIMER_REAL, waiting)


def assert_done_or_refused(
    kind: str, call: Callable[[], Any], allowed: tuple[int, ...] = (1, 2), seconds: float = SECONDS
) -> Any:
    """Assert what every fuzz test does: a case ends within bounds, with a result or with an error of ours that speaks.

    That is a `CompressError` or `RuntimeFailure` with an exit code among `allowed` and a message; whatever else the
    call raises (a KeyError, a crash of a library, too much time or memory) fails the test. Returns what the call gives,
    or None where it was refused. Counts the case under `kind`.
    """
    result, error = None, None
    try:
        with bounded(seconds):
            result = call()
    except (CompressError, RuntimeFailure) as refusal:
        error = refusal
    assert error is None or error.exit_code in allowed, f"exit code {getattr(error, 'exit_code', 0)}: {error}"
    assert error is None or str(error).strip(), f"{type(error).__name__} says nothing"
    end = "done" if error is None else type(error).__name__
    counts = COUNTS.setdefault(kind, {})
    counts[end] = counts.get(end, 0) + 1
    return result


def in_fork(call: Callable[[], Any]) -> Callable[[], None]:
    """The same call in a copy of this process: for native code, which may crash and which no signal handler ends.

    What it raises is raised here; that it died or took too long is TookTooLong.
    """

    def run() -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            for number in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            _set_timers(SECONDS, WAITING)
            end: BaseException | None = None
            try:
                call()
            except BaseException as error:  # noqa: BLE001  (the parent raises it)
                end = error
                end.add_note(traceback.format_exc())
            try:
                answer = pickle.dumps(end)
            except (pickle.PicklingError, TypeError, AttributeError):
                answer = pickle.dumps(AssertionError(f"{type(end).__name__}: {end}"))
            os.write(writer, answer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            answer = file.read()
        status = os.waitpid(child, 0)[1]
        if status:
            raise TookTooLong(f"ended by signal {status}")
        error = pickle.loads(answer)
        if error is not None:
            raise error

    return run


def corpus(kind: str) -> list[Path]:
    """The files of past failures of one kind, by name."""
    return sorted(path for path in (CORPUS / kind).glob("*") if path.is_file())


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _end(number: int, frame: FrameType | None) -> None:
    raise TookTooLong
