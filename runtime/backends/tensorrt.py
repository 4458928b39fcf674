"""TensorRT and TensorRT for RTX: engines on the GPU, inputs and outputs copied to device memory that stays.

Where calls keep their shapes, `cuda_graph` captures one call and launches it again: no kernel is launched by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime import cuda
from runtime import tensorrt_api as api
from runtime.backends.base import Backend, Feeds, Session, check_call, check_feeds, check_open, chosen
from runtime.engine import ENGINES, EngineRecord, Here, why_not_here
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.gpu import NO_GPU, gpu_here, platform_here
from runtime.isolated import trouble
from runtime.manifest import TensorSpec
from runtime.profiles import InputShapes, Profile, profile_for

WEIGHTS = "weights_from"
HOST_CODE = "host_code"
STREAMED = "weight_streaming_budget_mib"
OPTIONS = ("cuda_graph", STREAMED, WEIGHTS, HOST_CODE)
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class TensorrtSession:
    """An engine with its execution context. `device_ms`: what the last call took on the GPU, without the copies."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    engine: Any
    context: Any
    device: cuda.Device
    messages: api.Messages
    cuda_graph: bool = False
    profile: int = 0
    device_ms: float = 0.0
    keeper: object = None
    graphs: dict[Shapes, Any] = field(default_factory=dict)

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        return self.resume(feeds, {}, outputs)

    def resume(
        self, feeds: Feeds, resident: Mapping[str, tuple[int, ...]], outputs: Sequence[str] | None = None
    ) -> Feeds:
        """`run`, where the inputs `resident` (name -> shape) are on the device already; no graph is captured then, for
        their memory moves."""
        check_open(self.path, self.engine)
        check_feeds(tuple(spec for spec in self.inputs if spec.name not in resident), feeds)
        names = chosen(self.outputs, outputs)
        shapes = {name: array.shape for name, array in feeds.items()} | dict(resident)
        self._choose_profile(shapes)
        copied = [self._feed(name, np.asarray(array, order="C")) for name, array in feeds.items()]
        for name, shape in resident.items():
            self._address(name, shape, 0)
        results = {spec.name: self._place(spec) for spec in self.outputs}
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

    def _forget_graphs(self) -> None:
        for graph in self.graphs.values():
            self.device.forget(graph)
        self.graphs = {}

    def _choose_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """UsageError where no profile takes these shapes."""
        found = profile_for(self.profiles, shapes)
        if found is None:
            raise UsageError(f"{self.path}: no profile of the engine takes {shapes}; it has {_said(self.profiles)}")
        if found != self.profile:
            self._done(self.context.set_optimization_profile_async(found, int(self.device.stream)), f"profile {found}")
            self.profile = found

    def _feed(self, name: str, array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
        """`array`, which must live until it has been copied."""
        self.device.copy_in(self._address(name, array.shape, array.nbytes), array)
        return array

    def _address(self, name: str, shape: tuple[int, ...], n_bytes: int) -> int:
        """Where an input of this shape is; 0 bytes: where it has been left."""
        address = self.device.buffer(name, n_bytes)
        self._done(self.context.set_input_shape(name, shape), f"the shape {shape} of {name}")
        self._done(self.context.set_tensor_address(name, int(address)), f"the address of {name}")
        return address

    def _place(self, spec: TensorSpec) -> np.ndarray[Any, np.dtype[Any]]:
        """Room for an output, on the device and here, now that the inputs' shapes are known."""
        result = np.empty(tuple(self.context.get_tensor_shape(spec.name)), np.dtype(spec.dtype))
        address = self.device.buffer(spec.name, result.nbytes)
        self._done(self.context.set_tensor_address(spec.name, int(address)), f"the address of {spec.name}")
        return result

    def _execute(self, shapes: Shapes | None) -> None:
        """Call by call, or as a graph captured for `shapes`. RuntimeFailure where the library cannot."""
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
            self.graphs = {captured: device.captured()}
        device.mark(device.begin)
        if captured is not None:
            device.launch(self.graphs[captured])
        else:
            self._enqueue()
        device.mark(device.end)

    def _enqueue(self) -> None:
        self._done(self.context.execute_async_v3(int(self.device.stream)), "the call")

    def _done(self, accepted: bool, what: str) -> None:
        """RuntimeFailure with what the library said."""
        if not accepted:
            raise RuntimeFailure(f"{self.path}: the engine refused {what}: {_last_error(self.messages)}")


def open_engine(runtime: str) -> Callable[[Path, int, Mapping[str, Any]], Session]:
    """How engines of `runtime` are opened. Options: `cuda_graph`: capture calls whose shapes stay;
    `weight_streaming_budget_mib`: weights on the GPU at a time; `weights_from`: the ONNX file that an engine without
    weights gets them from; `host_code`: the engine may run code of its own on the CPU."""

    def opened(path: Path, threads: int, options: Mapping[str, Any]) -> Session:
        check_call(runtime, threads, options, OPTIONS)
        trt = api.load(runtime)
        messages = api.Messages(trt, errors_only=True)
        engine = api.load_engine(trt, messages, path.read_bytes(), bool(options.get(HOST_CODE)))
        if engine is None:
            said = _last_error(messages)
            raise BundleError(f"{path}: {runtime} {trt.__version__} cannot load the engine: {said}; compile it here")
        if WEIGHTS in options:
            api.refit(trt, messages, engine, Path(options[WEIGHTS]))
        if STREAMED in options:
            api.stream_weights(engine, int(options[STREAMED]) * 2**20)
        inputs, outputs = _specs(path, trt, engine)
        context = engine.create_execution_context()
        if context is None:
            raise RuntimeFailure(f"{path}: the engine found no room on the GPU: {_last_error(messages)}")
        profiles, graphs = _profiles(engine, inputs), bool(options.get("cuda_graph", False))
        device = cuda.Device(cuda.load())
        return TensorrtSession(path, inputs, outputs, profiles, engine, context, device, messages, graphs)

    return opened


def _last_error(messages: api.Messages) -> str:
    return next(reversed(messages.errors()), "no reason given")


def why_unavailable(runtime: str) -> Callable[[], str | None]:
    """Tries the library in a process of its own, for a broken installation crashes the one that loads it."""

    def why() -> str | None:
        if gpu_here() is None:
            return NO_GPU
        return trouble(f"from runtime import cuda, tensorrt_api; tensorrt_api.load({runtime!r}); cuda.load()") or None

    return why


def check_engine(path: Path, record: EngineRecord) -> None:
    """BundleError with every reason why this machine cannot run the engine, before its library tries."""
    problems = engine_problems(record)
    if problems:
        raise BundleError([f"{path}: {text}" for text in problems])


def engine_problems(record: EngineRecord) -> list[str]:
    """Why this machine, where the library works, cannot run the engine; its GPU counts if there is one."""
    gpu = gpu_here()
    capability = gpu.capability if gpu else record.compute_capabilities[0]
    return why_not_here(record, Here(str(api.load(record.runtime).__version__), platform_here(), capability))


def _specs(path: Path, trt: Any, engine: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    found: dict[bool, list[TensorSpec]] = {True: [], False: []}
    for name in names:
        shape = tuple(f"dim{i}" if size < 0 else int(size) for i, size in enumerate(engine.get_tensor_shape(name)))
        kind = engine.get_tensor_dtype(name)
        try:
            dtype = np.dtype(trt.nptype(kind)).name
        except TypeError as error:
            raise BundleError(f"{path}: {name} is {kind}, which numpy has no type for; keep it float32") from error
        found[engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT].append(TensorSpec(name, dtype, shape))
    return tuple(found[True]), tuple(found[False])


def _profiles(engine: Any, inputs: Sequence[TensorSpec]) -> tuple[Profile, ...]:
    numbers = range(engine.num_optimization_profiles)
    return tuple({spec.name: InputShapes(*_ends(engine, spec.name, i)) for spec in inputs} for i in numbers)


def _ends(engine: Any, name: str, number: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, number)]


def _said(profiles: Sequence[Profile]) -> str:
    return "; ".join(
        ", ".join(f"{name} {list(one.min)} to {list(one.max)}" for name, one in profile.items()) for profile in profiles
    )


def _backend(runtime: str) -> Backend:
    return Backend(runtime, why_unavailable(runtime), open_engine(runtime), lambda: api.load(runtime), decoders=True)


TENSORRT, TENSORRT_RTX = map(_backend, ENGINES)
