"""OpenVINO on the CPU: reads the same ONNX file, and is often faster on its Q/DQ operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.backends.base import Backend, Feeds, Session, check_call, check_feeds, check_open
from runtime.errors import BundleError, MissingDependency, UsageError
from runtime.files import model_files
from runtime.manifest import TensorSpec

PRECISIONS = ("f32", "bf16")


@dataclass
class OpenVinoSession:
    """A compiled model and its one inference request."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    request: Any

    def run(self, feeds: Feeds) -> Feeds:
        check_open(self.path, self.request)
        check_feeds(self.inputs, feeds)
        try:
            results = self.request.infer(feeds, share_inputs=True)
        except RuntimeError as error:  # OpenVINO has no classes of its own
            raise UsageError(
                f"{self.path}: OpenVINO could not run the model on these inputs: {_last_line(error)}"
            ) from error
        return {spec.name: results[i] for i, spec in enumerate(self.outputs)}

    def close(self) -> None:
        self.request = None


def open_session(path: Path, threads: int, options: Mapping[str, Any]) -> Session:
    """Compile for the device CPU, tuned for latency, in one stream of `threads` threads.

    The option `precision` is "f32", "bf16" or None (OpenVINO's default: bf16 where the CPU has it) and rules what the
    operators that are not quantized compute in.
    """
    check_call("openvino", threads, options, ("precision",))
    precision = options.get("precision")
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(
            f"openvino: precision is {precision!r}; give {', '.join(PRECISIONS)}, or none for OpenVINO's default"
        )
    openvino = _openvino()
    model_files(path)
    config = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    try:
        model = openvino.Core().read_model(path)
        compiled = openvino.Core().compile_model(model, "CPU", config)
    except RuntimeError as error:
        raise BundleError(
            f"{path}: OpenVINO {openvino.__version__} cannot load the model: {_last_line(error)}; "
            "use the backend onnxruntime-cpu"
        ) from error
    return OpenVinoSession(path, _specs(compiled.inputs), _specs(compiled.outputs), compiled.create_infer_request())


def why_unavailable() -> str | None:
    """None, or that openvino is not installed."""
    try:
        _openvino()
    except MissingDependency as error:
        return str(error)
    return None


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependency("openvino", "the backend openvino") from error
    return openvino


def _specs(ports: list[Any]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(port.get_any_name(), port.element_type.to_dtype().name, _shape(port)) for port in ports)


def _shape(port: Any) -> tuple[int | str, ...]:
    """OpenVINO keeps no names for free dimensions."""
    return tuple(f"dim{i}" if size.is_dynamic else size.get_length() for i, size in enumerate(port.partial_shape))


def _last_line(error: Exception) -> str:
    """OpenVINO puts the place in its C++ source first and the reason last."""
    return [line for line in str(error).splitlines() if line.strip()][-1].strip()


BACKEND = Backend("openvino", why_unavailable, open_session)
