"""Calls that OpenVINO profiles: the nodes of its runtime model, with what each took in the last call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.backends import Feeds, Session
from runtime.backends.base import Options
from runtime.backends.openvino import IR, OpenVinoSession, core, name_outputs, read_specs
from runtime.bundle.files import model_files
from runtime.measure.profile import NodeTime, Profile, Profiled, Tensor, average_undisturbed

_NOT_RUN = ("Const", "Constant", "Parameter", "Result", "Input", "Output")
_OPENVINO_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "uint8", "i8": "int8"}
_OPENVINO_TYPES |= {name.upper(): dtype for name, dtype in _OPENVINO_TYPES.items()}


@dataclass
class _OpenVinoProfile:
    session: Session
    request: Any
    compiled: Any
    calls: list[dict[str, float]] = field(default_factory=list)

    def after_call(self) -> None:
        times = self.request.get_profiling_info()
        self.calls.append({info.node_name: info.real_time.total_seconds() * 1000 for info in times})

    def read(self, keep: Callable[[int], bool]) -> Profile:
        kept = [call for number, call in enumerate(self.calls) if keep(number)] or self.calls
        ms = {name: average_undisturbed([call.get(name, 0.0) for call in kept]) for name in kept[0]}
        operators = self.compiled.get_runtime_model().get_ordered_ops()
        nodes = tuple(
            _read_openvino_node(o, ms[o.get_friendly_name()]) for o in operators if o.get_friendly_name() in ms
        )
        return Profile("openvino", tuple(n for n in nodes if n.operator not in _NOT_RUN), len(kept))


def profile_openvino(path: Path, threads: int, options: Options, feeds: Feeds | None, folder: Path) -> Profiled:
    """Compile for the shapes of `feeds`: the executed graph has no others."""
    if feeds is None:
        raise ValueError("decoders are not profiled in openvino")
    if path.suffix != IR:
        model_files(path)
    config: dict[str, object] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    config |= {"PERF_COUNT": True}
    if options.get("precision") is not None:
        config["INFERENCE_PRECISION_HINT"] = options["precision"]
    model = core().read_model(path)
    names = name_outputs(model)
    model.reshape({name: list(values.shape) for name, values in feeds.items()})
    compiled = core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    session = OpenVinoSession(path, read_specs(compiled.inputs), read_specs(compiled.outputs, names), request)
    return _OpenVinoProfile(session, request, compiled)


def _read_openvino_node(operator: Any, ms: float) -> NodeTime:
    info = operator.get_rt_info()

    def tell(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    kind = tell("layerType") or operator.get_type_name()
    inputs = tuple(_read_port(port.get_source_output()) for port in operator.inputs())
    outputs = tuple(_read_port(port) for port in operator.outputs())
    number_type = _OPENVINO_TYPES.get(tell("runtimePrecision"), "float32")
    node = NodeTime(operator.get_friendly_name(), kind, ms, inputs, outputs, {}, number_type)
    return replace(node, source=tell("originalLayersNames")) if node.is_product else node


def _read_port(port: Any) -> Tensor:
    shape = port.get_partial_shape()
    sizes = tuple(size.get_length() for size in shape) if shape.is_static else None
    maker = port.get_node()
    with suppress(RuntimeError):
        dtype = port.get_element_type().to_dtype().name
        return Tensor(maker.get_friendly_name(), dtype, sizes, maker.get_type_name() in ("Const", "Constant"))
    return Tensor(maker.get_friendly_name(), "float32", sizes)
