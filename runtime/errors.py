"""Every error the deploy side raises on purpose, and the exit code each one ends the process with."""

from __future__ import annotations

from collections.abc import Sequence


class RuntimeFailure(Exception):
    """A failure with a message for the user; `problems` holds one line for each thing that is wrong."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class BundleError(RuntimeFailure):
    """The bundle is not what its manifest says, or cannot be loaded: hash, path, format, missing file, broken model."""


class UsageError(RuntimeFailure):
    """The call is wrong: samples that do not fit the model, an unknown backend or option."""

    exit_code = 2


class MissingDependency(RuntimeFailure):
    """An optional package is not installed; the message names it and the command that installs it."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}', which is not installed: pip install {package}")
        self.package = package


class PluginError(RuntimeFailure):
    """What an installed distribution adds cannot be used; the message names it, what is wrong and the way out."""
