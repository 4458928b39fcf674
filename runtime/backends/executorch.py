"""ExecuTorch on the CPU: runs .pte files, whose operators XNNPACK computes, as an app on a phone does.

Its Python package takes and gives torch tensors, so that it is imported with torch: nothing else of the runtime is. A
.pte does not name its inputs; those that `compress` writes say by a method of their own what they take and give.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from runtime.backends.base import Backend, Feeds, Options, Session, check_call, check_feeds, check_open, choose_outputs
from runtime.bundle.columns import Array
from runtime.bundle.files import single_file
from runtime.bundle.records import from_json, to_json
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, MissingDependency, UsageError

NAME, PTE = "executorch", ".pte"
PURPOSE = "the backend executorch"
FORWARD, DESCRIBE = "forward", "describe_ends"
"""Methods of a file: the model, and what `describe_ends` wrote of it."""


class TorchTensor(Protocol):
    """What is used of torch's tensors."""

    def numpy(self) -> Array: ...


class Method(Protocol):
    """What is used of ExecuTorch's class of that name."""

    def execute(self, inputs: Sequence[object]) -> Sequence[TorchTensor]: ...


@dataclass
class ExecuTorchSession:
    """A loaded method. Threads are the process's: the session that was opened last says how many."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    method: Method | None

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        import torch

        method = check_open(self.path, self.method)
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        arrays = [np.ascontiguousarray(feeds[spec.name]) for spec in self.inputs]
        # torch warns of an array that may not be written to, which nobody does here.
        given = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]
        try:
            results = method.execute(given)
        except RuntimeError as error:  # ExecuTorch has no classes of its own
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise UsageError(f"{self.path}: ExecuTorch could not run the model on {shapes}: {error}") from error
        made = {spec.name: tensor.numpy() for spec, tensor in zip(self.outputs, results, strict=True)}
        return {name: made[name] for name in names}

    def close(self) -> None:
        self.method = None


def describe_ends(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return what a file says of its inputs and outputs."""
    return json.dumps({"inputs": to_json(tuple(inputs)), "outputs": to_json(tuple(outputs))}, sort_keys=True)


def open_session(path: Path, threads: int, options: Options) -> Session:
    """Load a .pte. BundleError for any other file, and one that does not say what it takes."""
    check_call(NAME, threads, options)
    if path.suffix != PTE:
        raise BundleError(f"{path}: ExecuTorch runs {PTE} files; add {{kind: executorch}} to the recipe's export")
    single_file(path)
    library = import_library()
    try:
        with _silent_stderr():
            from executorch.extension.pybindings import portable_lib

            if portable_lib._threadpool_get_thread_count() != threads:
                portable_lib._unsafe_reset_threadpool(threads)
            program = library.runtime.Runtime.get().load_program(path)
            ends = json.loads(program.load_method(DESCRIBE).execute([])[0])
            method = program.load_method(FORWARD)
    except (RuntimeError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: ExecuTorch cannot load the model: {type(error).__name__}: {error}") from error
    inputs, outputs = (
        tuple(from_json(TensorSpec, spec, f"{path}: {end}") for spec in ends[end]) for end in ("inputs", "outputs")
    )
    return ExecuTorchSession(path, inputs, outputs, method)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep from the terminal what ExecuTorch's own code writes to file 2 as it loads: how it looked for the CPU."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def why_unavailable() -> str | None:
    """Return that executorch is not installed; None where it is. Nothing is imported: torch takes seconds."""
    return str(MissingDependency(NAME, PURPOSE)) if find_spec(NAME) is None else None


def import_library() -> ModuleType:
    """Import ExecuTorch's runtime, and torch with it. MissingDependency."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its API is experimental
            import executorch.runtime
    except ImportError as error:
        raise MissingDependency(NAME, PURPOSE) from error
    library: ModuleType = executorch
    return library


BACKEND = Backend(NAME, why_unavailable, open_session, import_library)
