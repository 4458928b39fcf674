"""Stand-ins for the TensorRT libraries, made from recorded descriptions of their APIs: any other name is an error.

`tests/runtime/nvidia/api/*.json` list, for one version each, the members of the classes and enumerations that the
bindings have.
"""

# The names are those of the CUDA runtime.
# ruff: noqa: N801, N802, N815

from __future__ import annotations

import ctypes
import enum
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from places import ROOT

from runtime.backends import tensorrt
from runtime.bundle.engine import Ranges, profile_of
from runtime.nvidia import cuda, tensorrt_api
from runtime.nvidia.gpu import Gpu

RECORDED = sorted((ROOT / "tests/runtime/nvidia/api").glob("*.json"))
ANSWERS: dict[str, Any] = {
    "serialize": b"timed",
    "build_serialized_network": b"engine",
    "add_optimization_profile": 0,
    "get_engine_information": '{"Layers": []}',
    "num_inputs": 0,
    "num_errors": 0,
}
"""What a method or property of that name gives; others give a stand-in of the class that they would make."""
MAKES = {
    "create_network": "INetworkDefinition",
    "create_builder_config": "IBuilderConfig",
    "create_optimization_profile": "IOptimizationProfile",
    "create_timing_cache": "ITimingCache",
    "get_timing_cache": "ITimingCache",
    "deserialize_cuda_engine": "ICudaEngine",
    "create_execution_context": "IExecutionContext",
    "create_engine_inspector": "EngineInspector",
}
PROPERTIES = {"num_inputs", "num_errors"}


class Library:
    """One recorded version. `without`: names that are taken away, "Class.member"."""

    def __init__(self, path: Path, without: tuple[str, ...] = ()) -> None:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.names = {
            kind: [name for name in members if f"{kind}.{name}" not in without]
            for kind, members in recorded["names"].items()
        }
        self.module = ModuleType(path.stem.rpartition("-")[0].replace("-", "_"))
        self.module.__version__ = recorded["version"]  # type: ignore[attr-defined]
        for kind, members in self.names.items():
            setattr(self.module, kind, self._enumeration(kind, members) if _is_enum(members) else self._class(kind))

    def _enumeration(self, kind: str, members: list[str]) -> Any:
        return enum.IntEnum(kind, {name: index for index, name in enumerate(members)})

    def _class(self, kind: str) -> Any:
        """ILogger is a base class; all others are made by calling them."""
        if kind == "ILogger":
            return type("ILogger", (), {"__init__": lambda self: None})
        return lambda *args: self.stand_in(kind, args)

    def stand_in(self, kind: str, made_with: tuple[Any, ...] = ()) -> Any:
        library, members = self, frozenset(self.names[kind])

        class StandIn:
            def __getattr__(self, name: str) -> Any:
                if name not in members:
                    raise AttributeError(f"{library.module.__name__} has no {kind}.{name}")
                if name in PROPERTIES:
                    return ANSWERS[name]
                return lambda *args: library.called(f"{kind}.{name}", name, args)

            def __setattr__(self, name: str, value: Any) -> None:
                if name not in members:
                    raise AttributeError(f"{library.module.__name__} has no {kind}.{name}")
                library.calls.append((f"{kind}.{name}", (value,)))

        self.calls.append((kind, made_with))
        return StandIn()

    def called(self, place: str, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((place, args))
        return self.stand_in(MAKES[name]) if name in MAKES else ANSWERS.get(name, True)


def _is_enum(members: list[str]) -> bool:
    return all(name == name.upper() for name in members)


class HostCuda:
    """The CUDA runtime with this machine's memory for the device's; `calls` names what was called."""

    class cudaMemcpyKind:
        cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost = range(2)

    class cudaStreamCaptureMode:
        cudaStreamCaptureModeThreadLocal = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.recording: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        """Those whose effect does not matter here: streams and events."""
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[int, Any]:
            self.calls.append(name)
            return 0, 1.5 if name == "cudaEventElapsedTime" else 1

        return call

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        self.calls.append("cudaMalloc")
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        self.calls.append(f"cudaMemcpyAsync {kind}")
        ctypes.memmove(to, source, size)
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, list[Any]]:
        found, self.recording = self.recording, None
        return 0, found or []

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, graph

    def cudaGraphLaunch(self, graph: list[Any], stream: int) -> tuple[int]:
        self.calls.append("cudaGraphLaunch")
        for work in graph:
            work()
        return (0,)


class Doubling:
    """An engine that gives y = 2 x, float32 [n, 3], for n from 1 to 8 in one profile and from 9 to 16 in another."""

    profiles = (((1, 3), (4, 3), (8, 3)), ((9, 3), (12, 3), (16, 3)))
    streamable_weights_size, host_code, budget = 0, False, -1

    def __init__(self, names: dict[str, list[str]], trt: Any, cuda: HostCuda) -> None:
        self.allowed, self.trt, self.cuda = names, trt, cuda
        self.num_io_tensors, self.num_optimization_profiles = 2, 2
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()
        self.active = 0
        self.runs = 0

    weight_streaming_budget = property(fset=lambda self, value: setattr(self, "budget", value))
    weight_streaming_budget_v2 = property(lambda self: self.budget, lambda self, value: setattr(self, "budget", value))

    def as_engine(self) -> Any:
        return Guarded(self, self.allowed["ICudaEngine"])

    def create_execution_context(self) -> Any:
        return Guarded(self, self.allowed["IExecutionContext"])

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name == "x" else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return np.float32

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape or (-1, 3)

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return self.profiles[index]

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.active = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.profiles[self.active]
        assert least[0] <= shape[0] <= most[0], "a shape that the active profile does not take"
        self.shape = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.cuda.recording is not None:
            self.cuda.recording.append(self._double)
        else:
            self._double()
        return True

    def _double(self) -> None:
        self.runs += 1
        count = self.shape[0] * self.shape[1]
        x, y = ((ctypes.c_float * count).from_address(self.addresses[name]) for name in "xy")
        for i in range(count):
            y[i] = 2 * x[i]


class GraphEngine:
    """An engine of one profile that gives what an ONNX Runtime `session` gives; `sizes`: free size -> its range."""

    num_optimization_profiles = 1

    def __init__(self, names: dict[str, list[str]], trt: Any, session: Any, sizes: Ranges) -> None:
        self.allowed, self.trt, self.session = names, trt, session
        self.specs = {spec.name: spec for spec in (*session.inputs, *session.outputs)}
        self.reads = [spec.name for spec in session.inputs]
        self.num_io_tensors = len(self.specs)
        self.profile = profile_of(session.inputs, sizes)
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def as_engine(self) -> Any:
        return Guarded(self, self.allowed["ICudaEngine"])

    def create_execution_context(self) -> Any:
        return Guarded(self, self.allowed["IExecutionContext"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self.reads else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self.specs[name].dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of an output once all inputs have theirs: what comes of zeros."""
        if self.shapes.keys() < set(self.reads):
            return tuple(size if isinstance(size, int) else -1 for size in self.specs[name].shape)
        zeros = {one: np.zeros(self.shapes[one], self.specs[one].dtype) for one in self.reads}
        return tuple(self.session.run(zeros, [name])[name].shape)

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        found = self.profile[name]
        return found.min, found.opt, found.max

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        given = {name: self._memory(name, self.shapes[name], self.specs[name].dtype).copy() for name in self.reads}
        for name, array in self.session.run(given).items():
            self._memory(name, array.shape, array.dtype)[...] = array
        return True

    def _memory(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(self.addresses[name]))


def load_engine(monkeypatch: pytest.MonkeyPatch, library: Library, cuda_runtime: HostCuda, engine: Any) -> None:
    """From here on `engine` is what the library loads from any file that is not empty."""

    class Runtime:
        engine_host_code_allowed = False

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            engine.host_code = self.engine_host_code_allowed
            return engine.as_engine() if data else None

    library.module.Runtime = lambda logger: Guarded(Runtime(), library.names["Runtime"])  # type: ignore[attr-defined]
    library.module.nptype = np.dtype  # type: ignore[attr-defined]
    pretend_machine(monkeypatch, library.module)
    monkeypatch.setattr(cuda, "load", lambda: cuda_runtime)


def pretend_machine(monkeypatch: pytest.MonkeyPatch, module: Any, gpu: Gpu | None = None) -> None:
    """From here on this is a machine with that GPU, on which the module is TensorRT's."""
    monkeypatch.setattr(tensorrt_api, "load", lambda runtime: module)
    monkeypatch.setattr(tensorrt, "platform_here", lambda: "linux-x86_64")
    monkeypatch.setattr(tensorrt, "gpu_here", lambda: gpu)


class Guarded:
    """Only these names of an object."""

    def __init__(self, inner: Any, names: list[str]) -> None:
        self.__dict__.update(inner=inner, names=names)

    def __getattr__(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(f"no version of TensorRT has {name} there")
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.names:
            raise AttributeError(f"no version of TensorRT has {name} there")
        setattr(self.inner, name, value)
