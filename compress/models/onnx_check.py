"""Whether an .onnx file is what it says, found out before anything trusts it.

ONNX's checker and its shape inference are native code that hangs or takes all memory on some graphs (functions that
call each other twice over, lists that double). They run in a process of their own, bounded in time and memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from runtime.processes.isolated import last_line, start_python

SECONDS = 60
"""Of the processor. The graph of a language model with 20,000 operators takes one."""
SPARE_BYTES, COPIES = 2**31, 6
"""Memory of the process: this, and so many times the file."""
_TYPES = {2: (25, 26), 4: (21, 22, 23), 6: (27, 28), 8: (2, 3, 9, 17, 18, 19, 20, 24), 16: (4, 5, 10, 16)}
_TYPES |= {32: (1, 6, 12), 64: (7, 11, 13, 14), 128: (15,)}
_BITS = {number: bits for bits, numbers in _TYPES.items() for number in numbers}
"""TensorProto.DataType -> bits of an element; texts (8) have no size."""
_TEXTS = 8
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def check_onnx(path: Path) -> dict[str, list[int | str | None] | None]:
    """Return the outputs' shapes as ONNX infers them: None where it cannot, or in place of a size that it cannot tell.

    SourceError unless the file is a whole and consistent ONNX model, weights of the right size included.
    """
    stat = path.stat()
    found = _examine_apart(path, stat.st_size, stat.st_mtime_ns)
    if isinstance(found, str):
        raise SourceError(f"{path}: is no valid ONNX model: {found}")
    return found


def run_apart(code: str, *arguments: str, what: str) -> Any:
    """Run `code`, which prints JSON, in a process of its own; return that, or a text: how `what` came to its end."""
    try:
        done = start_python(code, *arguments, str(SECONDS), seconds=10 * SECONDS)
    except subprocess.TimeoutExpired:
        return f"{what} did not end within {10 * SECONDS} s"
    if done.returncode == -signal.SIGXCPU:
        return f"{what} takes more than {SECONDS} s"
    if done.returncode < 0:
        return f"{what} crashes ({signal.Signals(-done.returncode).name})"
    if done.returncode:
        return f"{what} fails: {last_line(done.stderr)[:300]}"
    return json.loads(done.stdout)


@functools.lru_cache(maxsize=64)
def _examine_apart(path: Path, n_bytes: int, changed: int) -> Any:
    """Return what `examine` says of the file in a process of its own, or why that process failed."""
    code = "import sys; from compress.models.onnx_check import main; main(sys.argv[1], int(sys.argv[2]))"
    return run_apart(code, os.fspath(path.absolute()), what="checking it")


def main(path: str, seconds: int) -> None:
    """Examine a file in this process and print what is wrong as JSON; the process takes no more than it may."""
    file = Path(path)
    most = bound_process(SPARE_BYTES + COPIES * file.stat().st_size, seconds)
    try:
        found = examine(file)
    except MemoryError:
        found = f"checking it takes more than {most >> 20} MiB of memory"
    print(json.dumps(found))


def bound_process(most: int, seconds: int) -> int:
    """Let this process have no more than `most` bytes of address space, and so many seconds; return the bytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    return most


def examine(path: Path) -> str | dict[str, list[int | str | None] | None]:
    """Return what is wrong with an ONNX file, else what `check_onnx` returns.

    Tensors have the bytes of their shapes, and ONNX's checker and strict shape inference find no fault. Shapes that the
    file stores of inner tensors and outputs are no fault of the model: they are inferred anew.
    """
    import onnx
    from google.protobuf.message import DecodeError

    refusals = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, DecodeError)
    try:
        model = onnx.load(path, load_external_data=False)
        for message in _iter_messages(model):
            if (name := _find_undecoded(message)) is not None:
                return f"it holds a name that is not UTF-8: {name[:60]!r}"
            if isinstance(message, onnx.TensorProto) and (problem := _find_tensor_problem(message, path.parent)):
                return f"tensor '{message.name}' {problem}"
        has_links = follow_links(model, path)
        if (problem := _find_end_problem(model)) is not None:
            return problem
        if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
            _check(model, path, has_links)
        forget_shapes(model)
        inferred = _infer(_drop_weights(model, path.resolve().parent))
        while not all(value.type.tensor_type.HasField("shape") for value in inferred.graph.output):
            if not _write_ranks(inferred.graph):
                break
            inferred = _infer(inferred)
    except (*refusals, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())[:500] or type(error).__name__
    return {value.name: _list_sizes(value.type.tensor_type) for value in inferred.graph.output}


def follow_links(model: Any, path: Path) -> bool:
    """Name, in place, the files that a graph's weights lie in where its file names links to them, which onnx refuses.

    They are then named as seen from the folder that the file itself lies in. Returns whether there were any.
    """
    import onnx

    folder, found = path.resolve().parent, False
    for message in _iter_messages(model):
        if isinstance(message, onnx.TensorProto) and message.data_location == message.EXTERNAL:
            for entry in (entry for entry in message.external_data if entry.key == "location"):
                beside = path.parent.resolve() / entry.value
                if (whole := beside.resolve()) != beside:
                    entry.value, found = os.fspath(whole.relative_to(folder)), True
    return found


def _check(model: Any, path: Path, has_links: bool) -> None:
    """Let ONNX's checker look at a file; raises what it raises."""
    import onnx

    # not `full_check`: its inference reads no shapes from external data
    if not has_links:
        onnx.checker.check_model(path)
        return
    with contextlib.chdir(path.resolve().parent):  # from where it looks for the weights of bytes
        onnx.checker.check_model(model.SerializeToString())


def _infer(model: Any) -> Any:
    import onnx

    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def _write_ranks(graph: Any) -> bool:
    """Write, in place, how many axes a Reshape gives where inference stopped; return whether there was one.

    Sizes that are computed are lost to it (by a Slice before opset 13), though it is known how many they are.
    """
    values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
    found = False
    for node in graph.node:
        sized = node.op_type == "Reshape" and len(node.input) == 2  # before opset 5 the sizes are an attribute
        if not sized or node.input[1] not in values or node.output[0] not in values:
            continue
        told, given = values[node.input[1]].shape.dim, values[node.output[0]]
        if told and told[0].HasField("dim_value") and not given.HasField("shape"):
            given.shape.SetInParent()  # of a scalar, too, which has no axes
            given.shape.dim.extend([type(told[0])()] * told[0].dim_value)
            found = True
    return found


def forget_shapes(model: Any) -> None:
    """Forget, in place, what a file says that shape inference says anew, and write a size of -1 as a free one."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value == -1:
                dim.dim_param = f"{value.name}_{axis}"


def _find_end_problem(model: Any) -> str | None:
    """Return which input has a size that no sample has, or which output is a constant; None where there is none."""
    constants = {tensor.name for tensor in model.graph.initializer}
    fixed = [value.name for value in model.graph.output if value.name in constants]
    if fixed:
        return f"output '{fixed[0]}' is a constant, and no sample's; take it out of the outputs"
    for value in model.graph.input:
        sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        if value.name not in constants and any(size < 1 and size != -1 for size in sizes):
            return (
                f"input '{value.name}' has a dimension of {min(sizes)}; export it with one of 1 or more, or a free one"
            )
    return None


def _list_sizes(tensor: Any) -> list[int | str | None] | None:
    """Return a tensor's sizes: numbers, names, or None where they are not told; None for all of them."""
    if not tensor.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim]


def _iter_messages(message: Any) -> Iterator[Any]:
    """Yield the message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else (value,):
                yield from _iter_messages(child)


def _find_undecoded(message: Any) -> bytes | None:
    """Return a text of the message that is not UTF-8, which protobuf hands over as bytes; None where all are."""
    texts = [value for field, value in message.ListFields() if field.type == field.TYPE_STRING]
    every = (text for value in texts for text in ((value,) if isinstance(value, (str, bytes)) else value))
    return next((text for text in every if isinstance(text, bytes)), None)


def _find_tensor_problem(tensor: Any, folder: Path) -> str | None:
    """Return why the values of a tensor cannot be those of its shape and type; None where they can."""
    if tensor.data_type != _TEXTS and tensor.data_type not in _BITS:
        return f"has data type {tensor.data_type}, which is none that can be read"
    if min(tensor.dims, default=0) < 0:
        return f"has shape {list(tensor.dims)}"
    n = math.prod(tensor.dims)
    if tensor.data_type == _TEXTS:
        return (
            None
            if len(tensor.string_data) == n
            else f"has shape {list(tensor.dims)} and {len(tensor.string_data)} texts"
        )
    wanted = math.ceil(n * _BITS[tensor.data_type] / 8)
    if tensor.data_location == tensor.EXTERNAL:
        return _find_external_problem(tensor, wanted, folder)
    if tensor.HasField("raw_data"):
        has = len(tensor.raw_data)
        return None if has == wanted else f"has shape {list(tensor.dims)}, of {wanted} bytes, and {has} bytes"
    bits = _BITS[tensor.data_type]  # small ones share an int32, complex ones are two floats
    wanted = math.ceil(n * bits / 8) if bits < 8 else 2 * n if tensor.data_type in (14, 15) else n
    has = max(len(getattr(tensor, field)) for field in _FIELDS)
    return None if has == wanted else f"has shape {list(tensor.dims)} and {has} values"


def _find_external_problem(tensor: Any, wanted: int, folder: Path) -> str | None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    numbers = [entries.get("offset", "0"), entries.get("length", str(wanted))]
    if not all(text.isascii() and text.isdecimal() for text in numbers):
        return f"has external data at offset {numbers[0]!r} of length {numbers[1]!r}"
    offset, length = map(int, numbers)
    if length != wanted:
        return f"has shape {list(tensor.dims)}, of {wanted} bytes, and external data of {length}"
    file = folder / entries.get("location", "")
    if file.is_file() and offset + length > file.stat().st_size:  # that it is there and inside is looked at elsewhere
        return f"has external data up to byte {offset + length} of {file.name}, which has {file.stat().st_size}"
    return None


def _drop_weights(model: Any, folder: Path) -> Any:
    """Drop, in place, the values that no shape depends on, which inference would copy, and load the external others.

    Returns the model.
    """
    import onnx

    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > 64:  # whose values say nothing of shapes
            tensor.ClearField("raw_data")
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    return model
