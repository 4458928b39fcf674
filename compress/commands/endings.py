"""How a command of `compress` ends: as those of the runtime do (`runtime.processes.endings`), for typer."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer

from compress.errors import CompressError
from compress.version import BUILD_SIDE
from runtime.errors import RuntimeFailure, UsageError
from runtime.processes.endings import DEBUG, CommandLine, print_json, report_failure, write_any_text
from runtime.processes.interrupts import Terminated, end_orderly

__all__ = ["DEBUG", "ending", "print_json", "quiet_stdout", "run_as_json", "run_program"]

COMPRESS = CommandLine(
    failures=(CompressError, RuntimeFailure),
    interrupted="stopped; finished work is kept, the same command goes on from there",
    missing=f"{BUILD_SIDE}; `compress doctor` lists what is missing",
    debug=f"{DEBUG}=1 or `compress --debug ...`",
)

SPIN_KEY = "GOMP_SPINCOUNT"
"""What says how many turns a thread of libgomp, with which torch computes, waits awake for another before it sleeps."""
SPINS = "2000"
"""Some 30 to 100 us. By itself libgomp waits 150 times as long, and two builds at once then take the cores from each
other's threads for whole time slices: a training step of three small convolutions took 125 ms and more on two cores of
an EPYC, and takes 31. Alone it takes the 9 ms that it took, and 11 with threads that sleep at once. Whole passes:
`benchmarks/two_at_once.py`."""
WRONG_CALL: Any = typer.BadParameter.__base__
"""click's UsageError, of the click that this typer brings or finds."""


@contextlib.contextmanager
def ending(as_json: bool = False) -> Iterator[None]:
    """Turn a failure while the context is open into a message and an exit code.

    A command's own exit code passes through.
    """
    write_any_text()
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except (Exception, KeyboardInterrupt, Terminated) as error:
        raise typer.Exit(report_failure(error, as_json, COMPRESS)) from error


def run_program(app: typer.Typer, words: Sequence[str]) -> NoReturn:
    """Run the command line `words` and end the process, wherever an interrupt meets it."""
    as_json = "--json" in words
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_KEY, SPINS)  # read when torch is imported
    try:
        with end_orderly():
            try:
                sys.exit(run_as_json(app, words) if as_json else app(list(words)))
            finally:
                gc.freeze()  # the interpreter's last collection walks all that imports made: half a second
    except (KeyboardInterrupt, Terminated) as error:  # outside of any command
        sys.exit(report_failure(error, as_json, COMPRESS))


def run_as_json(app: typer.Typer, words: Sequence[str]) -> int:
    """Run the command line `words`, which asks for JSON, and return its exit code.

    A wrong call gives one document, too.
    """
    try:
        return int(app(list(words), standalone_mode=False) or 0)
    except WRONG_CALL as error:
        return report_failure(UsageError(f"{error.format_message()}; `compress --help` shows the calls"), True)


@contextlib.contextmanager
def quiet_stdout(wanted: bool) -> Iterator[None]:
    """Send to stderr what is printed while the context is open, if wanted, also by C libraries and child processes."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
