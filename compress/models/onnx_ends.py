"""What an ONNX file reads and gives for each sample: its batch, what all samples share, what a call hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models.onnx_graph import check_runs
from compress.models.source import read_onnx
from compress.specs import ModelSpec
from compress.tasks import find_torch_task
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import State, TensorSpec, as_sequence
from runtime.tasks import find_task

DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "float32",  # numpy has no bfloat16: the cleaned graph reads and gives float32
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.BOOL: "bool",
}


@dataclass(frozen=True)
class OnnxEnds:
    """Inputs and outputs as samples see them. Dynamic dimensions have names: the first "batch", a text's "sequence".

    With `states`, which are neither of the two, a sample is a sequence of calls, [1, "time", ...].
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[State, ...] = ()
    alone: bool = False
    """A free batch that samples cannot share: each is run by itself."""
    rowless: tuple[str, ...] = ()
    """Outputs that have no axis for the one sample of a call; `outputs` have it in front."""

    def fix_batch(self, model: ir.Model) -> None:
        """Write into the graph, in place, that it takes one sample at a time, where it does."""
        if not self.alone and not self.states:
            return
        shapes = {name: state.input.shape for state in self.states for name in (state.input.name, state.output)}
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name in shapes:
                value.shape = ir.Shape(shapes[value.name])
            elif value.name in self.rowless:
                pass  # its first axis is its own
            elif value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
                value.shape = ir.Shape([1, *value.shape[1:]])

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the user should know of how samples are run."""
        if self.rowless:
            some = ", ".join(f"'{name}'" for name in self.rowless)
            return (
                f"output {some} has no row for each sample, so that samples are run one at a time, and it is read as "
                "[1, ...]; to have samples share calls, put a Reshape or Transpose before it that gives [batch, ...], "
                "or leave it out of the outputs",
            )
        if not self.alone:
            return ()
        return (
            "the model's answer for a sample is another beside other samples: two run together differ from each alone, "
            "along every axis; it is taken with a batch of 1: calibrated, judged and served one sample at a time",
        )


def onnx_io(spec: ModelSpec, path: Path) -> OnnxEnds:
    """Return the ends of an ONNX file as it declares them; whether samples may share a call is not asked yet."""
    return _declared_ends(read_onnx(path, spec.inputs), path, spec.task, spec.state)


def read_ends(
    path: Path, task: str, feeds: SampleShapes, values: Mapping[str, Any], state: Mapping[str, str]
) -> OnnxEnds:
    """Return the ends of an ONNX file after samples of the shapes in `feeds` were run, together and alone.

    SourceError where the file does not take them, or has no row of its outputs for each.
    """
    ends = _declared_ends(read_onnx(path, values), path, task, state)
    _check_feeds(path, ends.inputs, feeds)
    _check_outputs(path, task, ends.outputs)
    given = {spec.name: feeds[spec.name] for spec in ends.inputs}
    if ends.states:
        calls = {name: (shape[1:], dtype) for name, (shape, dtype) in given.items()}
        begin = {each.input.name: (each.shape, each.input.dtype) for each in ends.states}
        axis = check_runs(path, calls, 1, values, begin, state)
    else:
        axis = check_runs(path, given, fixed_batch(ends.inputs), values)
    if axis.problem:
        raise SourceError(f"{path}: {axis.problem}")
    if ends.states or axis.together or (axis.rowless and find_task(task).outputs == "boxes"):  # a row for each box
        return ends
    outputs = tuple(
        replace(spec, shape=(1, *(spec.shape if spec.name in axis.rowless else spec.shape[1:])))
        for spec in ends.outputs
    )
    if (fixed := fixed_batch(ends.inputs)) is not None:
        return replace(ends, outputs=outputs if fixed == 1 else ends.outputs, rowless=axis.rowless)
    inputs = tuple(replace(spec, shape=(1, *spec.shape[1:])) for spec in ends.inputs)
    return replace(ends, inputs=inputs, outputs=outputs, alone=True, rowless=axis.rowless)


def _declared_ends(proto: onnx.ModelProto, path: Path, task: str, state: Mapping[str, str]) -> OnnxEnds:
    constants = {tensor.name for tensor in proto.graph.initializer}
    declared = [_make_tensor_spec(value, task) for value in proto.graph.input if value.name not in constants]
    given = [_make_tensor_spec(value, task) for value in proto.graph.output]
    states = tuple(_make_state(path, output, name, declared, given) for output, name in state.items())
    handed = {name for each in states for name in (each.input.name, each.output)}
    inputs = tuple(spec for spec in declared if spec.name not in handed)
    outputs = tuple(spec for spec in given if spec.name not in handed)
    if states and not (inputs and outputs):
        raise SourceError(f"model.state: {path} has nothing but states; name those alone that the next call reads")
    _check_shared(path, inputs, outputs)
    if not states:
        return OnnxEnds(inputs, outputs)
    if (fixed := fixed_batch(inputs)) not in (None, 1):
        raise SourceError(
            f"model.state: {path} takes {fixed} sequences at once; export it with a batch of 1, or a free one"
        )
    return OnnxEnds(tuple(map(as_sequence, inputs)), tuple(map(as_sequence, outputs)), states)


def _make_state(
    path: Path, output: str, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> State:
    """Return a state with the shape of one sequence: its free axis is the batch."""
    read = next((spec for spec in inputs if spec.name == name), None)
    given = next((spec for spec in outputs if spec.name == output), None)
    if read is None or given is None:
        what, has = ("output", outputs) if given is None else ("input", inputs)
        missing = output if given is None else name
        raise SourceError(
            f"model.state: {path} has no {what} '{missing}'; write OUTPUT: INPUT. Its {what}s are "
            f"{', '.join(spec.name for spec in has)}"
        )
    free = [size for size in read.shape if isinstance(size, str)]
    if len(free) > 1:
        raise SourceError(
            f"model.state: input '{name}' {list(read.shape)} of {path} has {len(free)} free axes; export it with none "
            "but the batch, as what it begins with has a size"
        )
    if given.dtype != read.dtype:
        raise SourceError(f"model.state: output '{output}' of {path} is {given.dtype}, and input '{name}' {read.dtype}")
    return State(output, replace(read, shape=tuple(1 if isinstance(size, str) else size for size in read.shape)))


def _check_shared(path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Raise SourceError for inputs that have no samples along their first axis, where the declared sizes tell."""
    sizes = {spec.shape[0] for spec in inputs if spec.shape}
    shared = 1 if any(isinstance(size, str) or size == 1 for size in sizes) else min(sizes, key=str, default=1)
    problems = []
    for spec in inputs:
        if not spec.shape:
            problems.append(
                f"{path}: input '{spec.name}' has no axes: it is one value for all samples; say which in the recipe: "
                f"model.inputs: {{{spec.name}: VALUE}}"
            )
        elif isinstance(spec.shape[0], int) and spec.shape[0] not in (1, shared):
            shown = ", ".join(map(str, spec.shape))
            problems.append(
                f"{path}: input '{spec.name}' [{shown}] has a first axis of its own, where others have the batch; "
                f"{suggest_state(spec, outputs)}"
            )
    if problems:
        raise SourceError(problems)


def suggest_state(spec: TensorSpec, outputs: Sequence[TensorSpec]) -> str:
    """Return what a recipe can say of an input that is none of a sample's."""
    return (
        "if the next call reads there what a call gives, say model.state: "
        f"{{{find_alike(spec, outputs) or 'OUTPUT'}: {spec.name}}}; if it is the same "
        f"for all samples, model.inputs: {{{spec.name}: VALUE}}"
    )


def find_alike(spec: TensorSpec, outputs: Sequence[TensorSpec]) -> str:
    """Return the first output that has an input's type and shape, as far as they are known; "" where none has."""
    for out in outputs:
        pairs = list(zip(spec.shape, out.shape, strict=False))
        if (out.dtype, len(out.shape)) == (spec.dtype, len(spec.shape)) and all(
            a == b or isinstance(a, str) or isinstance(b, str) for a, b in pairs
        ):
            return out.name
    return ""


def _make_tensor_spec(value: Any, task: str) -> TensorSpec:
    tensor = value.type.tensor_type
    if tensor.elem_type not in DTYPES:
        kind, known = onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), dict.fromkeys(DTYPES.values())
        raise SourceError(f"onnx: '{value.name}' is {kind}; what is fed and answered is {', '.join(known)}")
    if not tensor.HasField("shape"):
        raise SourceError(
            f"onnx: how many axes '{value.name}' has cannot be told from the graph; write its shape into the file, "
            "with names for free sizes"
        )
    dims = tuple(_name_dim(dim, axis, task) for axis, dim in enumerate(tensor.shape.dim))
    return TensorSpec(value.name, DTYPES[tensor.elem_type], dims)


def _name_dim(dim: Any, axis: int, task: str) -> int | str:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if axis == 0:
        return "batch"
    if axis == 1 and find_task(task).reads_texts:
        return "sequence"
    return str(dim.dim_param or f"dim_{axis}")


def _check_feeds(path: Path, inputs: tuple[TensorSpec, ...], feeds: SampleShapes) -> None:
    problems = []
    for spec in inputs:
        if spec.name not in feeds:
            problems.append(
                f"{path}: input '{spec.name}' {list(spec.shape)} is not fed; the feeds are: {', '.join(feeds)}"
            )
            continue
        shape = feeds[spec.name][0]
        fits = len(shape) == len(spec.shape) - 1 and all(
            isinstance(want, str) or want == have for want, have in zip(spec.shape[1:], shape, strict=True)
        )
        if not fits:
            problems.append(
                f"{path}: input '{spec.name}' takes {list(spec.shape)}, a sample is {list(shape)} (without batch)"
            )
    if problems:
        raise SourceError(problems)


def _check_outputs(path: Path, task: str, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise SourceError unless the outputs of a task that needs certain ones are there.

    Of classes there is one output: that by its name, else the only one. Several are told by their names alone.
    """
    wanted = find_torch_task(task)
    if wanted.any_outputs or (not wanted.chooses and len(wanted.outputs) < 2):
        return
    for name, axes in wanted.outputs.items():
        rank = len(axes)
        named = [out for out in outputs if out.name == name]
        candidates = named or [out for out in outputs if len(out.shape) == rank and len(wanted.outputs) == 1]
        if len(candidates) != 1 or len(candidates[0].shape) != rank:
            shown = ", ".join(f"'{out.name}' {list(out.shape)}" for out in outputs)
            called = f"that output '{name}'" if len(wanted.outputs) == 1 else "them so"
            raise SourceError(
                f"{path}: task {task} needs {wanted.describe_outputs()}, but the graph gives {shown}; call {called}, "
                "or use task: generic"
            )
