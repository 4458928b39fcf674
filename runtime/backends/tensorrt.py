"""TensorRT and TensorRT for RTX: engines on the GPU, inputs and outputs copied to device memory that stays.

Where calls keep their shapes, `cuda_graph` captures one call and launches it again: no kernel is launched by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from runtime.backends.base import Backend, Feeds, Options, Session, check_call, check_feeds, check_open, choose_outputs
from runtime.bundle.columns import Array
from runtime.bundle.engine import ENGINES, EngineRecord, Here, InputShapes, Profile, profile_for, why_not_here
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.nvidia import cuda
from runtime.nvidia import tensorrt_api as api
from runtime.nvidia.gpu import NO_GPU, gpu_here, platform_here
from runtime.processes.isolated import trouble

WEIGHTS = "weights_from"
HOST_CODE = "host_code"
STREAMED = "weight_streaming_budget_mib"
OPTIONS = ("cuda_graph", STREAMED, WEIGHTS, HOST_CODE)
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class ExecutionContext(Protocol):
    """What is used of TensorRT's IExecutionContext; what returns bool says whether the call was accepted."""

    def set_optimization_profile_async(self, number: int, stream: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, address: int) -> bool: ...

    def get_tensor_shape(self, name: str) -> Iterable[int]: ...

    def execute_async_v3(self, stream: int) -> bool: ...


class CudaEngine(Protocol):
    """What is used of TensorRT's ICudaEngine; kinds and modes are values of its enumerations."""

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def num_optimization_profiles(self) -> int: ...

    def create_execution_context(self) -> ExecutionContext | None: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_shape(self, name: str) -> Iterable[int]: ...

    def get_tensor_dtype(self, name: str) -> object: ...

    def get_tensor_mode(self, name: str) -> object: ...

    def get_tensor_profile_shape(self, name: str, number: int) -> Sequence[Iterable[int]]: ...


@dataclass
class TensorrtSession:
    """An engine with its execution context. `device_ms`: what the last call took on the GPU, without the copies."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    engine: CudaEngine | None
    context: ExecutionContext | None
    device: cuda.Device
    messages: api.Messages
    cuda_graph: bool = False
    profile: int = 0
    device_ms: float = 0.0
    keeper: object = None
    graphs: dict[Shapes, object] = field(default_factory=dict)

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        return self.resume(feeds, {}, outputs)

    def resume(
        self, feeds: Feeds, resident: Mapping[str, tuple[int, ...]], outputs: Sequence[str] | None = None
    ) -> Feeds:
        """Run one call as `run` does, where the inputs `resident` (name -> shape) are on the device already.

        No graph is captured then, for their memory moves.
        """
        check_open(self.path, self.engine)
        check_feeds(tuple(spec for spec in self.inputs if spec.name not in resident), feeds)
        names = choose_outputs(self.outputs, outputs)
        shapes = {name: array.shape for name, array in feeds.items()} | dict(resident)
        self._choose_profile(shapes)
        copied = [self._copy_input(name, np.asarray(array, order="C")) for name, array in feeds.items()]
        for name, shape in resident.items():
            self._bind_input(name, shape, 0)
        results = {spec.name: self._bind_output(spec) for spec in self.outputs}
        self._execute(None if resident else tuple(shapes.items()))
        for name in names:
            self.device.copy_out(results[name], self.device.buffer(name, results[name].nbytes))
        self.device.wait()
        del copied  # was read until here
        self.device_ms = self.device.elapsed_ms()
        return {name: results[name] for name in names}

    def exchange(self, first: str, second: str) -> None:
        self.device.exchange(first, second)

    def largest(self, name: str) -> tuple[int, ...]:
        ends = [profile[name].max for profile in self.profiles]
        return tuple(map(max, *ends)) if len(ends) > 1 else ends[0]

    def close(self) -> None:
        if self.engine is not None:
            self._forget_graphs()
            self.engine = self.context = None
            self.device.close()

    @property
    def _open_context(self) -> ExecutionContext:
        """Return the context; UsageError once the session is closed."""
        return check_open(self.path, self.context)

    def _forget_graphs(self) -> None:
        for graph in self.graphs.values():
            self.device.forget(graph)
        self.graphs = {}

    def _choose_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Switch to the profile that takes these shapes; UsageError where none does."""
        number = profile_for(self.profiles, shapes)
        if number is None:
            raise UsageError(
                f"{self.path}: no profile of the engine takes {shapes}; it has {_format_profiles(self.profiles)}"
            )
        if number != self.profile:
            self._check_accepted(
                self._open_context.set_optimization_profile_async(number, int(self.device.stream)), f"profile {number}"
            )
            self.profile = number

    def _copy_input(self, name: str, array: Array) -> Array:
        """Start to copy an input to the device; return `array`, which must live until it has been copied."""
        self.device.copy_in(self._bind_input(name, array.shape, array.nbytes), array)
        return array

    def _bind_input(self, name: str, shape: tuple[int, ...], n_bytes: int) -> int:
        """Tell the engine where an input of this shape is, and return that; 0 bytes: where it has been left."""
        address = self.device.buffer(name, n_bytes)
        self._check_accepted(self._open_context.set_input_shape(name, shape), f"the shape {shape} of {name}")
        self._check_accepted(self._open_context.set_tensor_address(name, int(address)), f"the address of {name}")
        return address

    def _bind_output(self, spec: TensorSpec) -> Array:
        """Make room for an output, on the device and here, now that the inputs' shapes are known."""
        result = np.empty(tuple(self._open_context.get_tensor_shape(spec.name)), np.dtype(spec.dtype))
        address = self.device.buffer(spec.name, result.nbytes)
        self._check_accepted(
            self._open_context.set_tensor_address(spec.name, int(address)), f"the address of {spec.name}"
        )
        return result

    def _execute(self, shapes: Shapes | None) -> None:
        """Execute call by call, or as a graph captured for `shapes`. RuntimeFailure where the library cannot."""
        device = self.device
        captured = shapes if self.cuda_graph else None
        if captured is not None and captured not in self.graphs:
            self._enqueue()  # what is made by a first call may not be captured
            device.wait()
            self._forget_graphs()  # of other shapes the buffers may have moved
            device.capture()
            try:
                self._enqueue()
            except RuntimeFailure:
                device.abandon()
                raise
            self.graphs = {captured: device.end_capture()}
        device.mark(device.begin)
        if captured is not None:
            device.launch(self.graphs[captured])
        else:
            self._enqueue()
        device.mark(device.end)

    def _enqueue(self) -> None:
        self._check_accepted(self._open_context.execute_async_v3(int(self.device.stream)), "the call")

    def _check_accepted(self, accepted: bool, what: str) -> None:
        """Raise RuntimeFailure with what the library said, unless it accepted `what`."""
        if not accepted:
            raise RuntimeFailure(f"{self.path}: the engine refused {what}: {_last_error(self.messages)}")


def open_engine(runtime: str) -> Callable[[Path, int, Options], Session]:
    """Return the function that opens engines of `runtime`.

    Options: `cuda_graph`: capture calls whose shapes stay; `weight_streaming_budget_mib`: weights on the GPU at a time;
    `weights_from`: the ONNX file that an engine without weights gets them from; `host_code`: the engine may run code of
    its own on the CPU.
    """

    def open_session(path: Path, threads: int, options: Options) -> Session:
        check_call(runtime, threads, options, OPTIONS)
        trt = api.load(runtime)
        messages = api.Messages(trt, errors_only=True)
        engine: CudaEngine | None = api.load_engine(trt, messages, path.read_bytes(), bool(options.get(HOST_CODE)))
        if engine is None:
            reason = _last_error(messages)
            raise BundleError(f"{path}: {runtime} {trt.__version__} cannot load the engine: {reason}; compile it here")
        if WEIGHTS in options:
            api.refit(trt, messages, engine, Path(str(options[WEIGHTS])))
        if STREAMED in options:
            api.stream_weights(engine, int(options[STREAMED]) * 2**20)
        inputs, outputs = _read_specs(path, trt, engine)
        context = engine.create_execution_context()
        if context is None:
            raise RuntimeFailure(f"{path}: the engine found no room on the GPU: {_last_error(messages)}")
        numbers = range(engine.num_optimization_profiles)
        profiles = tuple(
            {spec.name: InputShapes(*_read_profile_shapes(engine, spec.name, i)) for spec in inputs} for i in numbers
        )
        graphs = bool(options.get("cuda_graph", False))
        device = cuda.Device(cuda.load())
        return TensorrtSession(path, inputs, outputs, profiles, engine, context, device, messages, graphs)

    return open_session


def _last_error(messages: api.Messages) -> str:
    return next(reversed(messages.errors()), "no reason given")


def why_unavailable(runtime: str) -> Callable[[], str | None]:
    """Return the function that says why `runtime` cannot be used here; None where it can.

    It tries the library in a process of its own, for a broken installation crashes the one that loads it.
    """

    def find_reason() -> str | None:
        if gpu_here() is None:
            return NO_GPU
        return (
            trouble(f"from runtime.nvidia import cuda, tensorrt_api; tensorrt_api.load({runtime!r}); cuda.load()")
            or None
        )

    return find_reason


def check_engine(path: Path, record: EngineRecord) -> None:
    """Raise BundleError with every reason why this machine cannot run the engine, before its library tries."""
    problems = engine_problems(record)
    if problems:
        raise BundleError([f"{path}: {text}" for text in problems])


def engine_problems(record: EngineRecord) -> list[str]:
    """Return why this machine, where the library works, cannot run the engine; its GPU counts if there is one."""
    gpu = gpu_here()
    capability = gpu.capability if gpu else record.compute_capabilities[0]
    return why_not_here(record, Here(str(api.load(record.runtime).__version__), platform_here(), capability))


def _read_specs(
    path: Path, trt: ModuleType, engine: CudaEngine
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    specs: dict[bool, list[TensorSpec]] = {True: [], False: []}
    for name in names:
        shape = tuple(f"dim{i}" if size < 0 else int(size) for i, size in enumerate(engine.get_tensor_shape(name)))
        kind = engine.get_tensor_dtype(name)
        try:
            dtype = np.dtype(trt.nptype(kind)).name
        except TypeError as error:
            raise BundleError(f"{path}: {name} is {kind}, which numpy has no type for; keep it float32") from error
        specs[engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT].append(TensorSpec(name, dtype, shape))
    return tuple(specs[True]), tuple(specs[False])


def _read_profile_shapes(engine: CudaEngine, name: str, number: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, number)]


def _format_profiles(profiles: Sequence[Profile]) -> str:
    return "; ".join(
        ", ".join(f"{name} {list(shapes.min)} to {list(shapes.max)}" for name, shapes in profile.items())
        for profile in profiles
    )


def _make_backend(runtime: str) -> Backend:
    return Backend(
        runtime, why_unavailable(runtime), open_engine(runtime), lambda: api.load(runtime), decoders=True, on_gpu=True
    )


TENSORRT, TENSORRT_RTX = map(_make_backend, ENGINES)
