"""How a command ends: its exit code, its problems on stderr, and with --json one document on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from compress.errors import CompressError
from runtime.errors import RuntimeFailure

DEBUG = "COMPRESS_DEBUG"


@contextlib.contextmanager
def ending(as_json: bool = False) -> Iterator[None]:
    """Turn what goes wrong inside into a message and an exit code; the command's own exit code passes through."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except (CompressError, RuntimeFailure) as error:
        _trace()
        _end(error.problems, error.exit_code, as_json)
    except KeyboardInterrupt:
        _end(["stopped; finished steps are kept, the same command goes on from there"], 130, as_json)
    except ModuleNotFoundError as error:
        _trace()
        _end([_missing(error)], 1, as_json)
    except Exception as error:  # noqa: BLE001  (the outermost frame: whatever it is, it ends in a message)
        _trace()
        hint = "" if _debugging() else f"; {DEBUG}=1 or `compress --debug ...` shows where"
        _end([f"{type(error).__name__}: {error} (a defect, or a library that failed{hint})"], 1, as_json)


def _missing(error: ModuleNotFoundError) -> str:
    package = str(error.name).partition(".")[0]
    own = package in ("compress", "runtime")
    return f"{error}" + (
        "" if own else "; pip install 'compress[build]' installs what the build side needs, `compress doctor` looks"
    )


def _end(problems: Sequence[str], exit_code: int, as_json: bool) -> None:
    for problem in problems:
        typer.echo(problem, err=True)
    if as_json:
        print_json({"verdict": "error", "exit_code": exit_code, "problems": list(problems)})
    raise typer.Exit(exit_code)


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


@contextlib.contextmanager
def quiet_stdout(wanted: bool) -> Iterator[None]:
    """If wanted, what is printed inside goes to stderr, also by C libraries and child processes."""
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


def _debugging() -> bool:
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _trace() -> None:
    if _debugging():
        traceback.print_exc()
