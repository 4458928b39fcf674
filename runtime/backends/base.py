"""What a backend is: a name, whether it works here, and how it opens a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from runtime.errors import UsageError
from runtime.manifest import TensorSpec

Feeds = dict[str, np.ndarray[Any, np.dtype[Any]]]


class Session(Protocol):
    """A loaded model."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        """One call: {input name: array} -> {output name: array} that the caller may keep; `outputs`: only these.

        UsageError, BundleError.
        """
        ...

    def close(self) -> None:
        """Free the model; `run` may not be called afterwards."""
        ...


@runtime_checkable
class DeviceTimed(Protocol):
    """A session whose device has a clock of its own."""

    device_ms: float
    """Milliseconds that the last call took there, without the copies."""


@runtime_checkable
class Resident(Protocol):
    """A session that can leave tensors on its device between calls."""

    path: Path
    keeper: object
    """Whose tensors they are."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def resume(
        self, feeds: Feeds, resident: Mapping[str, tuple[int, ...]], outputs: Sequence[str] | None = None
    ) -> Feeds:
        """`run`, where the inputs `resident` (name -> shape) are on the device already."""
        ...

    def exchange(self, first: str, second: str) -> None:
        """The device memory of one tensor becomes the other's: what was given is read next."""
        ...

    def largest(self, name: str) -> tuple[int, ...]:
        """The largest shape that an input may have."""
        ...


@dataclass(frozen=True)
class Backend:
    """One runtime."""

    name: str
    available: Callable[[], str | None]
    """None where it works on this machine, else the reason and the mend."""
    open: Callable[[Path, int, Mapping[str, Any]], Session]
    """(model.onnx, threads, options) -> Session. BundleError names the file; UsageError for an unknown option."""
    library: Callable[[], object]
    """Imports what the backend needs, so that a model's memory can be told from its library's. MissingDependency."""
    decoders: bool = False
    """Whether it generates text: keys and values stay in its sessions between calls."""


def check_call(backend: str, threads: int, options: Mapping[str, Any], known: tuple[str, ...] = ()) -> None:
    """UsageError for threads below 1 or an option that the backend does not have."""
    if threads < 1:
        raise UsageError(f"{backend}: threads is {threads}; give 1 or more")
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UsageError(f"{backend}: unknown option '{unknown[0]}'; known: {', '.join(known) or 'none'}")


def check_open(path: Path, handle: object) -> None:
    """UsageError if the session was closed, so that its handle is None."""
    if handle is None:
        raise UsageError(f"{path}: the session is closed; open the model again")


def check_feeds(inputs: tuple[TensorSpec, ...], feeds: Feeds) -> None:
    """UsageError if a call does not give exactly the model's inputs, or gives one in another dtype."""
    names = {spec.name for spec in inputs}
    if names != feeds.keys():
        raise UsageError(
            f"the model takes the inputs {', '.join(sorted(names))}; given: {', '.join(sorted(feeds)) or 'none'}"
        )
    for spec in inputs:
        if feeds[spec.name].dtype.name != spec.dtype:
            raise UsageError(f"input '{spec.name}' is {feeds[spec.name].dtype}, but the model takes {spec.dtype}")


def chosen(specs: tuple[TensorSpec, ...], outputs: Sequence[str] | None) -> list[str]:
    """The names of the outputs to give; UsageError for one that the model does not have."""
    names = [spec.name for spec in specs]
    unknown = [name for name in outputs or () if name not in names]
    if unknown:
        raise UsageError(f"the model has no output '{unknown[0]}'; its outputs: {', '.join(names)}")
    return names if outputs is None else list(outputs)
