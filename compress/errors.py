"""Every error a user can meet on the build side, and the exit code each one ends the process with.

An error names the place, the value, the rule and the way out. `problems` keeps several of them together, so that one
run of `compress check` or `compress plan` shows everything that is wrong at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.errors import UsageError


class CompressError(Exception):
    """A failure with a message for the user; `problems` holds one line for each thing that is wrong."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RecipeError(CompressError):
    """The recipe text is wrong: unknown key, wrong type, bad value or reference. Nothing was loaded."""

    exit_code = 2


class PlanError(CompressError):
    """The recipe is well formed but cannot work: on this model, this data, this target or this machine."""

    exit_code = 2


class SourceError(CompressError):
    """A model or a data set could not be read: missing, corrupt, unsafe, or not what the recipe says it is."""

    exit_code = 2


class PassError(CompressError):
    """A pass failed while it ran, or left something that it may not leave."""


class ExportError(CompressError):
    """The exported graph is not the model: it does not load, does not check, or its outputs differ."""


class NotExportable(ExportError):
    """No graph of the model can be made, whatever its weights are: what the exporter said, and the way out."""


class OutputError(CompressError):
    """The output folder or the cache cannot be written."""


class PushError(CompressError):
    """A bundle could not be sent, or the other side refused it; the message says what is there now."""


class PlaceError(OutputError):
    """The call names an output folder that is in use, not ours to replace, or in a place that cannot be written."""

    exit_code = 2


@contextmanager
def place_errors(place: str) -> Iterator[None]:
    """Raise SourceError, each problem led by its place in the recipe, for a UsageError while the context is open."""
    try:
        yield
    except UsageError as error:
        raise SourceError([f"{place}: {problem}" for problem in error.problems]) from error
