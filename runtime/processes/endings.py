"""How a command line ends: problems on stderr, an exit code, with --json one document on stdout; never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from runtime.errors import RuntimeFailure, UsageError
from runtime.processes.interrupts import Terminated, end_orderly

DEBUG = "COMPRESS_DEBUG"
"""The environment variable that shows tracebacks."""
INTERRUPTED, READER_GONE, TERMINATED = 130, 141, 143
"""Exit codes as shells have them: 128 and the signal (SIGINT, SIGPIPE, SIGTERM)."""


@dataclass(frozen=True)
class CommandLine:
    """What a command line adds to how every one of ours ends."""

    failures: tuple[type[Exception], ...] = (RuntimeFailure,)
    """Errors that are raised on purpose; each has `problems` and an `exit_code`."""
    interrupted: str = "stopped"
    """What to say after Ctrl-C or SIGTERM."""
    missing: str = "pip install compress-models installs what bundles need"
    """What to do about a module that is not installed."""
    debug: str = f"{DEBUG}=1"
    """How to see a traceback."""


RUNTIME = CommandLine()


def end_command(run: Callable[[], int], as_json: bool) -> int:
    """Run one command to its end; return its exit code, or that of what went wrong."""
    write_any_text()
    try:
        with end_orderly():
            exit_code = run()
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt, Terminated) as error:  # noqa: BLE001  (outermost: it ends in a message)
        return report_failure(error, as_json)
    return exit_code


def report_failure(error: BaseException, as_json: bool, line: CommandLine = RUNTIME) -> int:
    """Say what went wrong on stderr, and with `as_json` as one document on stdout; return the exit code."""
    if isinstance(error, BrokenPipeError):
        silence_stdout()
        return READER_GONE
    if is_debugging() and isinstance(error, Exception):
        traceback.print_exception(error)
    problems, exit_code = explain(error, line)
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(problems), file=sys.stderr)
    if as_json:
        try:
            print_json({"verdict": "error", "exit_code": exit_code, "problems": list(problems)})
            sys.stdout.flush()
        except OSError:  # stdout itself is what failed
            silence_stdout()
    return exit_code


def explain(error: BaseException, line: CommandLine = RUNTIME) -> tuple[Sequence[str], int]:
    """Return (the problems in words, the exit code) of whatever ended a command."""
    if isinstance(error, line.failures):
        failure: Any = error
        return failure.problems, failure.exit_code
    if isinstance(error, KeyboardInterrupt):
        return [line.interrupted], INTERRUPTED
    if isinstance(error, Terminated):
        return [line.interrupted], TERMINATED
    if isinstance(error, ModuleNotFoundError):
        is_ours = str(error.name).partition(".")[0] in ("compress", "runtime")
        return [str(error) if is_ours else f"{error}; {line.missing}"], 1
    if isinstance(error, MemoryError):
        return [f"out of memory: {error or 'free some, or use smaller batches'}"], 1
    if isinstance(error, OSError) and error.strerror:
        places = " -> ".join(str(place) for place in (error.filename, error.filename2) if place is not None)
        return [f"{places}: {error.strerror}" if places else error.strerror], 1
    hint = "" if is_debugging() else f"; {line.debug} shows where"
    return [f"{type(error).__name__}: {error} (a defect, or a library that failed{hint})"], 1


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print one JSON document on stdout, texts as they are where it can hold them."""
    utf_8 = (sys.stdout.encoding or "utf-8").lower() in ("utf-8", "utf8")
    print(json.dumps(document, indent=indent, ensure_ascii=not utf_8))


def write_any_text() -> None:
    """Let what the terminal's encoding lacks be written as escapes, on stdout as on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def read_stdin(most: int) -> str:
    """Read all of stdin. UsageError where it is closed, is not text, or has more than `most` characters."""
    text = _read(lambda stdin: stdin.read(most + 1))
    if len(text) > most:
        raise UsageError(f"stdin has more than {most} characters: split it")
    return text


def read_stdin_line(most: int) -> str:
    """Read a line of stdin, or as many characters of it; "" at its end. UsageError as of `read_stdin`."""
    return _read(lambda stdin: stdin.readline(most))


def _read(read: Callable[[TextIO], str]) -> str:
    if sys.stdin is None:
        raise UsageError("stdin is closed: give the input as an argument")
    try:
        return read(sys.stdin)
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not {error.encoding}: {error.reason} at byte {error.start}") from error


def silence_stdout() -> None:
    """Let nothing more be written there: Python flushes it once more at its exit, and would complain."""
    with contextlib.suppress(OSError, ValueError):  # in a test stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def is_debugging() -> bool:
    """Return whether tracebacks are asked for."""
    return os.environ.get(DEBUG, "0") not in ("", "0")
