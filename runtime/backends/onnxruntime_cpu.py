"""ONNX Runtime on the CPU: the default, and the only backend that a bundle needs."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol

import numpy as np

from runtime.backends.base import Backend, Feeds, Options, Session, check_call, check_feeds, check_open, choose_outputs
from runtime.bundle.columns import Array
from runtime.bundle.files import model_files
from runtime.bundle.onnx_file import holds_float8
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, MissingDependency, RuntimeFailure, UsageError

_DTYPES = {"float": "float32", "double": "float64"}  # the others have numpy's name
MOST_SAID = 300
"""Characters of an error that are shown."""
ORT = ".ort"
"""How the name of a file in ONNX Runtime's own format ends, by which it knows it."""


class Argument(Protocol):
    """ONNX Runtime's description of an input or output."""

    name: str
    type: str
    shape: list[int | str | None]


class DeviceValue(Protocol):
    """A tensor of ONNX Runtime's that stays where it is: an OrtValue."""

    def shape(self) -> Sequence[int]: ...

    def update_inplace(self, array: Array) -> None: ...

    def numpy(self) -> Array: ...


class Binding(Protocol):
    """Where the inputs of a call lie and its outputs go: an IOBinding."""

    def bind_cpu_input(self, name: str, array: Array) -> None: ...

    def bind_ortvalue_input(self, name: str, value: DeviceValue) -> None: ...

    def bind_ortvalue_output(self, name: str, value: DeviceValue) -> None: ...

    def bind_output(self, name: str, device: str = "cpu") -> None: ...

    def get_outputs(self) -> list[DeviceValue]: ...

    def copy_outputs_to_cpu(self) -> list[Array]: ...


class InferenceSession(Protocol):
    """What is used of onnxruntime's class of that name."""

    def run(self, names: Sequence[str] | None, feeds: Feeds) -> list[Array]: ...

    def run_with_iobinding(self, binding: Binding) -> None: ...

    def io_binding(self) -> Binding: ...

    def get_inputs(self) -> list[Argument]: ...

    def get_outputs(self) -> list[Argument]: ...

    def get_overridable_initializers(self) -> list[Argument]: ...

    def get_providers(self) -> list[str]: ...


class SessionOptions(Protocol):
    """What is set of onnxruntime's class of that name; modes and levels are values of its enumerations."""

    intra_op_num_threads: int
    inter_op_num_threads: int
    execution_mode: object
    graph_optimization_level: object
    log_severity_level: int


Opened = tuple[InferenceSession, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


@dataclass
class OnnxRuntimeSession:
    """An `onnxruntime.InferenceSession` with names and dtypes as the bundle has them."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    handle: InferenceSession | None
    device: ClassVar[str] = "cpu"
    """ONNX Runtime's name of where the model's tensors are."""

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        handle = check_open(self.path, self.handle)
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        try:
            results = handle.run(names, feeds)
        except _invalid_argument() as error:
            raise UsageError(f"{self.path}: the inputs do not fit the model: {error}") from error
        except failures() as error:
            raise BundleError(f"{self.path}: ONNX Runtime could not run the model: {error}") from error
        return dict(zip(names, results, strict=True))

    def run_into(self, feeds: Feeds, out: Feeds, others: Sequence[str] = ()) -> Feeds:
        """Run one call; the outputs in `out` are written there, C-contiguous arrays of their shapes and dtypes.

        Returns the outputs `others`. `run` gives a copy of what ONNX Runtime then keeps for the next call, in memory
        that grows in powers of two: of 512 tokens' logits over 152,000 words 0.3 GiB and 0.5. BundleError.
        """
        handle = check_open(self.path, self.handle)
        check_feeds(self.inputs, feeds)
        binding, held = handle.io_binding(), {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        for name, array in held.items():
            binding.bind_ortvalue_input(name, make_value(array, "cpu"))
        for name, array in out.items():
            binding.bind_ortvalue_output(name, make_value(array, "cpu"))
        for name in others:
            binding.bind_output(name)
        try:
            handle.run_with_iobinding(binding)
        except failures() as error:
            raise BundleError(f"{self.path}: ONNX Runtime could not run the model: {error}") from error
        results = binding.get_outputs()[len(out) :]
        return {name: value.numpy() for name, value in zip(others, results, strict=True)}

    def takes(self, name: str) -> bool:
        """Return whether the graph has an input of that name that need not be given."""
        handle = check_open(self.path, self.handle)
        return any(argument.name == name for argument in handle.get_overridable_initializers())

    def close(self) -> None:
        self.handle = None


def open_session(path: Path, threads: int, options: Options) -> Session:
    """Load with every graph optimisation, `threads` inside an operator, one operator at a time. No options."""
    check_call("onnxruntime-cpu", threads, options)
    handle, inputs, outputs = open_handle(path, session_options(threads), ["CPUExecutionProvider"])
    return OnnxRuntimeSession(path, inputs, outputs, handle)


def session_options(threads: int) -> SessionOptions:
    """Return the options that every session here is opened with. RuntimeFailure where there is no room for threads."""
    check_threads_start(threads)
    ort = onnxruntime_library()
    settings: SessionOptions = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # of ONNX Runtime's log levels: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal
    settings.log_severity_level = 3
    return settings


def make_value(array: Array, device: str) -> DeviceValue:
    """Return the array as a tensor on a device: on the CPU its own memory, which is kept alive."""
    value: DeviceValue = onnxruntime_library().OrtValue.ortvalue_from_numpy(array, device)
    return value


def check_threads_start(threads: int) -> None:
    """Raise RuntimeFailure where so many threads cannot be started.

    ONNX Runtime (1.31) waits forever for those that are missing, under a limit of memory (ulimit -v) or of processes.
    """
    if threads == 1:
        return
    ended, started = threading.Event(), []
    try:
        # two beside a session's, for what it needs of the same limits
        for _ in range(threads + 2):
            one = threading.Thread(target=ended.wait, daemon=True)
            one.start()
            started.append(one)
    except (RuntimeError, MemoryError) as error:
        raise RuntimeFailure(
            f"threads: {threads} cannot be started here, only {len(started)}: memory or processes are limited (ulimit, "
            "a container's pids); give fewer with --threads"
        ) from error
    finally:
        ended.set()
        for one in started:
            one.join()


def open_handle(path: Path, settings: SessionOptions, providers: list[str]) -> Opened:
    """Open the session, with its inputs and outputs, on the first of `providers` that can.

    BundleError names the file.
    """
    ort = onnxruntime_library()
    if path.suffix != ORT:  # which is one file, and no ONNX that could name others
        model_files(path)
    try:
        handle = create(str(path), settings, providers)
        # reading them fails, too: a name in a damaged file is no UTF-8
        return handle, _read_specs(handle.get_inputs()), _read_specs(handle.get_outputs())
    except failures() as error:
        raise BundleError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load the model: {error}; "
            "upgrade onnxruntime, or build the bundle again for this version"
        ) from error


def create(model: str | bytes, settings: SessionOptions, providers: list[str]) -> InferenceSession:
    """Create onnxruntime's InferenceSession of a file's path or of its content.

    Float8 is kept as it is written (`runtime.bundle.onnx_file.holds_float8`). Raises whatever onnxruntime raises.
    """
    ort = onnxruntime_library()
    converted = isinstance(model, str) and model.endswith(ORT)
    if (
        not converted
        and holds_float8(model)
        and settings.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ):
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session: InferenceSession = ort.InferenceSession(model, settings, providers=providers)
    return session


def why_unavailable() -> str | None:
    """Return that onnxruntime is not installed; None where it is."""
    try:
        onnxruntime_library()
    except MissingDependency as error:
        return str(error)
    return None


def onnxruntime_library() -> ModuleType:
    """Return the imported onnxruntime. MissingDependency."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency("onnxruntime", "the backend onnxruntime-cpu") from error
    library: ModuleType = onnxruntime
    return library


def _read_specs(arguments: list[Argument]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(arg.name, _dtype(arg.type), _shape(arg.shape)) for arg in arguments)


def _dtype(type_name: str) -> str:
    """Return numpy's name of one of ONNX Runtime's types: tensor(float) -> float32."""
    element = type_name.removeprefix("tensor(").removesuffix(")")
    return _DTYPES.get(element, element)


def _shape(shape: list[int | str | None]) -> tuple[int | str, ...]:
    return tuple(f"dim{i}" if size is None else size for i, size in enumerate(shape))


def failures() -> tuple[type[Exception], ...]:
    """Return every class that ONNX Runtime raises, InvalidArgument among them; they have no base of their own.

    A bound call raises RuntimeError itself, and a message that names a damaged model's bytes is no Unicode.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    classes = (kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
    return (*classes, RuntimeError, UnicodeDecodeError)


def describe_failure(error: Exception) -> str:
    """Return an error of ONNX or ONNX Runtime as one line, without its number and its own code's places."""
    text = " ".join(str(error).rpartition("[ONNXRuntimeError] : ")[2].split())
    return re.sub(r"^\d+ : \w+ : |/onnxruntime_src/\S+ .*?\) (?=[A-Z'\"])", "", text)[:MOST_SAID]


def _invalid_argument() -> type[Exception]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    invalid: type[Exception] = state.InvalidArgument
    return invalid


BACKEND = Backend("onnxruntime-cpu", why_unavailable, open_session, onnxruntime_library, decoders=True)
