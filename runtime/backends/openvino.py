"""OpenVINO on the CPU: reads the same ONNX file, or its own IR, and is often faster on Q/DQ operators.

A decoder is rewritten to keep keys and values itself, as OpenVINO GenAI needs it too: what its file has as inputs
(past) and outputs (present) becomes state, which stays where the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from runtime.backends.base import Backend, Feeds, Options, Session, check_call, check_feeds, check_open, choose_outputs
from runtime.bundle.columns import Array
from runtime.bundle.files import ir_files, model_files
from runtime.bundle.manifest import SELF_PAST, SELF_PRESENT, KvCacheSpec, find_cache
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, MissingDependency, UsageError

BEAMS = "beam_idx"
"""A decoder's input, int32 [batch]: which row of the state each row of a call goes on from; OpenVINO GenAI's name."""
READ_STATE, SHARED_ATTENTION = "ReadValue", "GroupQueryAttention"
"""OpenVINO's names of what reads a state, and of ONNX Runtime's own attention."""
IR = ".xml"
"""End of the name of OpenVINO's own format, whose weights lie beside it in a .bin."""
TOKENS = "input_ids"
"""End of the name of what a decoder reads: input_ids, or decoder_input_ids."""
PRECISIONS = ("f32", "bf16")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class InferRequest(Protocol):
    """What is used of OpenVINO's class of that name."""

    def infer(self, feeds: Feeds, *, share_inputs: bool, share_outputs: bool = False) -> Mapping[int, Array]: ...

    def reset_state(self) -> None: ...


class PortSize(Protocol):
    """A size of a port's shape."""

    @property
    def is_dynamic(self) -> bool: ...

    def get_length(self) -> int: ...


class ElementType(Protocol):
    """The type of a port's values."""

    def to_dtype(self) -> np.dtype: ...


class Port(Protocol):
    """OpenVINO's description of an input or output."""

    @property
    def element_type(self) -> ElementType: ...

    @property
    def partial_shape(self) -> Iterable[PortSize]: ...

    def get_any_name(self) -> str: ...


class Model(Protocol):
    """A model that was read and can be bound to sizes."""

    @property
    def inputs(self) -> Sequence[Port]: ...

    @property
    def outputs(self) -> Sequence[Port]: ...

    def clone(self) -> Model: ...

    def reshape(self, shapes: Mapping[str, list[int]]) -> None: ...


class CompiledModel(Protocol):
    """A model for one device."""

    @property
    def inputs(self) -> Sequence[Port]: ...

    @property
    def outputs(self) -> Sequence[Port]: ...

    def create_infer_request(self) -> InferRequest: ...


class Core(Protocol):
    """What is used of OpenVINO's class of that name."""

    def read_model(self, path: Path) -> Model: ...

    def compile_model(self, model: Model, device: str, config: Mapping[str, object]) -> CompiledModel: ...

    def add_extension(self, path: str) -> None: ...

    def get_property(self, device: str, name: str) -> Any: ...


@dataclass
class OpenVinoSession:
    """A compiled model and its inference request; with `specialize`, one more for each set of input shapes it meets."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    request: InferRequest | None
    specialize: Callable[[Feeds], InferRequest] | None = None
    special: dict[Shapes, InferRequest] = field(default_factory=dict)

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        request = check_open(self.path, self.request)
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        try:
            results = self._pick_request(feeds, request).infer(feeds, share_inputs=True)
        except RuntimeError as error:  # OpenVINO has no classes of its own
            if "bad_alloc" in str(error):
                raise MemoryError("OpenVINO could not allocate what the model needs") from error
            raise UsageError(
                f"{self.path}: OpenVINO could not run the model on these inputs: {_last_line(error)}"
            ) from error
        return {spec.name: results[i] for i, spec in enumerate(self.outputs) if spec.name in names}

    def _pick_request(self, feeds: Feeds, general: InferRequest) -> InferRequest:
        """Return the request of these shapes, made where there is none; `general` where all share one."""
        if self.specialize is None:
            return general
        shapes = tuple(sorted((name, values.shape) for name, values in feeds.items()))
        request = self.special.pop(shapes, None) or self.specialize(feeds)
        self.special[shapes] = request  # the newest last
        if len(self.special) > 8:  # the one used longest ago goes
            del self.special[next(iter(self.special))]
        return request

    def close(self) -> None:
        self.request = None
        self.special.clear()


@dataclass
class OpenVinoDecoder:
    """A compiled decoder that keeps keys and values as its state; `run` begins with nothing read."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    past: tuple[TensorSpec, ...]
    compiled: CompiledModel | None
    whole: OpenVinoState | None = None
    """Of calls that read whole texts, once there was one."""

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        self.whole = self.whole or self.make_state()
        self.whole.reset()
        results = self.whole.run(feeds)
        return {name: results[name].copy() for name in names}

    def make_state(self) -> OpenVinoState:
        request = check_open(self.path, self.compiled).create_infer_request()
        return OpenVinoState(self.path, tuple(spec.name for spec in self.outputs), request)

    def close(self) -> None:
        self.compiled = self.whole = None


@dataclass
class OpenVinoState:
    """The keys and values of one batch: the state of an inference request."""

    path: Path
    outputs: tuple[str, ...]
    request: InferRequest

    def reset(self) -> None:
        self.request.reset_state()

    def run(self, feeds: Feeds) -> Feeds:
        n_rows = len(next(iter(feeds.values())))
        given = {**feeds, BEAMS: np.arange(n_rows, dtype=np.int32)}
        try:
            results = self.request.infer(given, share_inputs=True, share_outputs=True)
        except RuntimeError as error:  # OpenVINO has no classes of its own
            raise UsageError(
                f"{self.path}: OpenVINO could not run the decoder on these inputs: {_last_line(error)}"
            ) from error
        return {name: results[index] for index, name in enumerate(self.outputs)}


def open_session(path: Path, threads: int, options: Options) -> Session:
    """Compile for the device CPU, tuned for latency, in one stream of `threads` threads.

    The option `precision` is "f32", "bf16" or None (OpenVINO's default: bf16 where the CPU has it) and rules what the
    operators that are not quantized compute in. The option `static` (default False) compiles the model again for each
    new set of input shapes, which takes as long as loading it and makes every later call with them some per cent
    faster: for callers whose shapes seldom change. A decoder, whose shapes change with every token, has no such option.
    """
    check_call("openvino", threads, options, ("precision", "static"))
    precision = options.get("precision")
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(
            f"openvino: precision is {precision!r}; give {', '.join(PRECISIONS)}, or none for OpenVINO's default"
        )
    _import_openvino()
    (ir_files if path.suffix == IR else model_files)(path)
    config: dict[str, object] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    with _name_failure(path):
        model = core().read_model(path)
        past = keep_decoder_cache(path, model)
        names = name_outputs(model)
        compiled = core().compile_model(model, "CPU", config)
    outputs = read_specs(compiled.outputs, names)
    if past is not None:
        if options.get("static"):
            raise UsageError("openvino: static is for models whose calls keep their shapes; a decoder's do not")
        inputs = tuple(spec for spec in read_specs(compiled.inputs) if spec.name != BEAMS)
        return OpenVinoDecoder(path, inputs, outputs, past, compiled)

    def specialize(feeds: Feeds) -> InferRequest:
        fixed = model.clone()
        fixed.reshape({name: list(values.shape) for name, values in feeds.items()})
        return core().compile_model(fixed, "CPU", config).create_infer_request()

    return OpenVinoSession(
        path,
        read_specs(compiled.inputs),
        outputs,
        compiled.create_infer_request(),
        specialize if options.get("static") else None,
    )


def keep_decoder_cache(path: Path, model: Model) -> tuple[TensorSpec, ...] | None:
    """Make a decoder's keys and values its state, in place; return the inputs that became one, None of other models.

    BundleError for one whose attention OpenVINO computes otherwise than ONNX Runtime.
    """
    if path.suffix == IR:
        return () if has_operator(model, READ_STATE) else None
    specs = read_specs(model.inputs)
    cache = find_decoder_cache(specs)
    if cache is None:
        return None
    if has_operator(model, SHARED_ATTENTION):
        # Its rows have lengths of their own, which OpenVINO (2026.4) reads of the first row alone.
        raise BundleError(
            f"{path}: its attention is {SHARED_ATTENTION}, written for onnxruntime-cpu; for OpenVINO add {{kind: "
            "openvino}, or {kind: onnx, target: openvino}, to the recipe's export"
        )
    names = {past for past, _ in cache.pairs()}
    tokens = next(spec.name for spec in specs if spec.name.endswith(TOKENS))
    keep_cache(model, dict(cache.pairs()), tokens)
    return tuple(spec for spec in specs if spec.name in names)


def has_operator(model: Any, kind: str) -> bool:
    """Return whether an OpenVINO model has an operator of one kind."""
    return any(operator.get_type_name() == kind for operator in model.get_ops())


def keep_cache(model: Any, pairs: Mapping[str, str], tokens: str) -> None:
    """Make the inputs `pairs` (past -> the output that is its present) a state of an OpenVINO model, in place.

    `tokens`: the input whose first size is the batch. A state that was reset holds no token, for the batch of the call.
    """
    import openvino.opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    beams = ops.parameter([-1], np.int32, name=BEAMS)
    beams.output(0).set_names({BEAMS})
    axis = ops.constant(0, np.int64)
    for past in pairs:
        port = model.input(past)
        readers = port.get_target_inputs()
        chosen = ops.gather(port, beams, axis)  # [batch, heads, past, size]
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.add_parameters([beams])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(pairs))
    # Free sizes of a state begin at 0, the batch too, and to join that with one row reads beyond its memory (2026.4):
    # every state begins as [batch, heads, 0, size] instead. But not where keys and values have several sizes: attention
    # stays apart there, and with such a beginning nothing runs, logits are [0, 0, vocabulary] (2026.4).
    shape = ops.shape_of(model.input(tokens), output_type="i64")
    batch = ops.gather(shape, ops.constant([0], np.int64), axis)
    states = [operator for operator in model.get_ops() if operator.get_type_name() == READ_STATE]
    kept = [[0 if size.is_dynamic else size.get_length() for size in op.get_output_partial_shape(0)] for op in states]
    uneven = len({fixed[-1] for fixed in kept if 0 in fixed[1:]}) > 1
    for operator, fixed in zip(states, kept, strict=True):
        if not (uneven and 0 in fixed[1:]):
            shape = ops.concat([batch, *(ops.constant([size], np.int64) for size in fixed[1:])], 0)
            empty = ops.constant(0, dtype=operator.get_output_element_type(0))
            operator.set_arguments([ops.broadcast(empty, shape)])
    model.validate_nodes_and_infer_types()


def find_decoder_cache(inputs: Sequence[TensorSpec]) -> KvCacheSpec | None:
    """Return the cache of a decoder, or of an encoder-decoder's decoder, by its inputs' names; None of other models."""
    return find_cache(inputs) or find_cache(inputs, SELF_PAST, SELF_PRESENT)


@contextmanager
def _name_failure(path: Path) -> Iterator[None]:
    """Turn what OpenVINO raises as it loads a model into a BundleError."""
    try:
        yield
    except RuntimeError as error:
        raise BundleError(
            f"{path}: OpenVINO {_import_openvino().__version__} cannot load the model: {_last_line(error)}; "
            "use the backend onnxruntime-cpu"
        ) from error


def why_unavailable() -> str | None:
    """Return that openvino is not installed; None where it is."""
    try:
        _import_openvino()
    except MissingDependency as error:
        return str(error)
    return None


@cache
def core() -> Core:
    """Return the one Core of the process, which is never given up.

    Its CPU plugin makes memory of its own the stack of signal handlers, and frees that with itself: the next signal
    would end the process by a segmentation fault (2026.4).
    """
    made: Core = _import_openvino().Core()
    return made


def computes_bfloat16() -> bool:
    """Return whether float layers compute in bfloat16 on this processor, unless OpenVINO is told otherwise."""
    precision: str = core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    return precision == "bf16"


def _import_openvino() -> ModuleType:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependency("openvino", "the backend openvino") from error
    library: ModuleType = openvino
    return library


def name_outputs(model: Model) -> list[str]:
    """Return the outputs' names in order, as the file has them: compiling adds those of operators that it takes out."""
    return [port.get_any_name() for port in model.outputs]


def read_specs(ports: Sequence[Port], names: Sequence[str] | None = None) -> tuple[TensorSpec, ...]:
    """Return the ports' names (`names`, where they are known), numpy's names of their types, and shapes."""
    known = [port.get_any_name() for port in ports] if names is None else names
    return tuple(
        TensorSpec(name, port.element_type.to_dtype().name, _shape(port))
        for name, port in zip(known, ports, strict=True)
    )


def _shape(port: Port) -> tuple[int | str, ...]:
    """Return a port's shape; free dimensions get names here, because OpenVINO keeps none."""
    return tuple(f"dim{i}" if size.is_dynamic else size.get_length() for i, size in enumerate(port.partial_shape))


def _last_line(error: Exception) -> str:
    """Return the reason of an error: OpenVINO puts the place in its C++ source first and the reason last."""
    return [line for line in str(error).splitlines() if line.strip()][-1].strip()


BACKEND = Backend(
    "openvino", why_unavailable, open_session, _import_openvino, decoders=True, exact={"precision": "f32"}
)
