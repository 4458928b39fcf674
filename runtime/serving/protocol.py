"""What the Open Inference Protocol says: requests, in JSON and binary tensors, to samples; outputs to answers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, NoReturn

import numpy as np

from runtime import Bundle
from runtime.bundle.columns import Array
from runtime.bundle.format import refuse_duplicates
from runtime.bundle.tensors import TensorSpec
from runtime.encode.audio import AUDIO, RATE
from runtime.encode.pairs import ImageTextPreprocess
from runtime.errors import RuntimeFailure, UsageError
from runtime.tasks import find_task
from runtime.tasks.base import TEXT

TYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BYTES": "object",
}  # fmt: skip
"""The protocol's name -> numpy's."""
NAMES = {name: kind for kind, name in TYPES.items()}
JSON_KINDS: dict[str, set[Any]] = {
    kind: {str} if kind == "BYTES" else {"b"} if kind == "BOOL" else {"i", "u", "f"} if kind[0] == "F" else {"i", "u"}
    for kind in TYPES
}
"""The protocol's name -> what its values may be in JSON: numpy's kinds of them, or a class."""
EXTENSIONS = ("binary_tensor_data",)
ORDERING = frozenset(("sequence_id", "sequence_start", "sequence_end", "priority", "timeout"))
"""Parameters that clients send to any server, and that change no answer of this one."""
LONGEST_TEXT, LONGEST_PROMPT = 2**16, 2**20
"""Characters of a text among many, and of one: a tokenizer takes 150 bytes for each, before it cuts anything."""
MOST_NESTED = 2**19
"""Lists and objects of one request: an empty one of two bytes takes eighty."""
MOST_STOPS = 16
"""Stop strings of one request: each is looked for after each token."""
SHORT = Repr()
"""Shows a value from a request in an error, however long or deep it is."""
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 80


@dataclass(frozen=True)
class HttpAnswer:
    """A JSON object, and the binary tensors behind it."""

    header: bytes
    tensors: tuple[bytes, ...] = ()


class ServedModel:
    """An open bundle as the protocol sees it. Its calls are made one at a time."""

    def __init__(self, bundle: Bundle, max_batch: int) -> None:
        self.bundle, self.max_batch = bundle, max_batch

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    def metadata(self) -> dict[str, Any]:
        """Return the model's name, inputs and outputs."""
        inputs, outputs = (
            [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in tensors]
            for tensors in (self._describe_inputs(), self._describe_outputs())
        )
        return {"name": self.name, "versions": ["1"], "platform": "compress", "inputs": inputs, "outputs": outputs}

    def infer(self, body: bytes | bytearray, header_length: int | None = None) -> HttpAnswer:
        """Run the model on a request; its first `header_length` bytes are JSON, the others binary tensors.

        UsageError where the request does not fit; RuntimeFailure where the model gave what JSON has no word for.
        """
        if self.bundle.manifest.generates:
            raise UsageError(f"{self.name} generates text: POST /v2/models/{self.name}/generate")
        if header_length is not None and header_length > len(body):
            raise UsageError(f"Inference-Header-Content-Length is {header_length}, and the body has {len(body)} bytes")
        length = len(body) if header_length is None else header_length
        request, tail = parse_object(memoryview(body)[:length]), BinaryTail(memoryview(body)[length:])
        _refuse_unknown("the request", request, ("id", "parameters", "inputs", "outputs"))
        request_id = read_text("id", request.get("id", ""))
        wanted = _read_wanted_outputs(request, [name for name, _, _ in self._describe_outputs()])
        columns = self._read_columns(request, tail)
        manifest = self.bundle.manifest
        answers = find_task(manifest.task).answers(self.bundle.predict(columns), manifest.class_names)
        described, tensors = [], []
        for name, binary in wanted.items():
            description, data = write_tensor(name, answers[name], binary)
            described.append(description)
            tensors += [data] if binary else []
        answer = {"model_name": self.name, "model_version": "1", "id": request_id, "outputs": described}
        return HttpAnswer(dump_json(answer), tuple(tensors))

    def generate(self, body: bytes | bytearray, header_length: int | None = None) -> HttpAnswer:
        """Continue a request's text. UsageError for a model that generates none, or settings that there are not."""
        manifest = self.bundle.manifest
        if manifest.generates and TEXT not in find_task(manifest.task).columns:  # a text would name a file of ours
            raise UsageError(f"{self.name} reads no texts, and requests bring nothing else: use compress-run generate")
        request = parse_object(memoryview(body))
        _refuse_unknown("generate", request, ("id", "text_input", "parameters"))
        prompt, settings = request.get("text_input"), request.get("parameters") or {}
        if not isinstance(prompt, str) or not isinstance(settings, dict):
            raise UsageError("generate: give text_input, a text, and parameters, an object")
        if settings.pop("stream", False):
            raise UsageError("generate: answers are given whole; leave stream out")
        if "chat" in settings:
            settings["chat"] = _read_flag(settings, "chat", False)
        stops = settings.get("stop")
        if isinstance(stops, list):
            if len(stops) > MOST_STOPS:
                raise UsageError(f"generate: stop has {len(stops)} texts; give at most {MOST_STOPS}")
            settings["stop"] = [read_text("stop", text) for text in stops]
        for name, value in settings.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"generate: {SHORT.repr(name)} is {value}: give a finite number")
        prompt = read_text("text_input", prompt, LONGEST_PROMPT)
        result = self.bundle.generate(prompt, stream=False, **settings)
        return HttpAnswer(dump_json({"model_name": self.name, "model_version": "1", "text_output": result.text}))

    def _read_columns(self, request: Mapping[str, Any], tail: BinaryTail) -> dict[str, Any]:
        kinds = {name: kind for name, kind, _ in self._describe_inputs()}
        if self.bundle.manifest.preprocess["kind"] == "text":
            kinds |= dict.fromkeys(find_task(self.bundle.manifest.task).columns, "BYTES")
        columns: dict[str, Any] = {}
        for tensor in _read_objects(request, "inputs", "with name, shape, datatype and data"):
            name, values = read_tensor(tensor, kinds, tail, self.max_batch)
            if name in columns:
                raise UsageError(f"inputs: {name} is there twice")
            columns[name] = values
        tail.check_used_up()
        return columns

    def _describe_inputs(self) -> list[tuple[str, str, list[int]]]:
        manifest = self.bundle.manifest
        if manifest.preprocess["kind"] == "image":
            return [("image", "UINT8", [-1, -1, -1, 1 if manifest.preprocess.get("channels") == "L" else 3])]
        spec = self.bundle.preprocessor.spec
        if isinstance(spec, ImageTextPreprocess):
            return [("image", "UINT8", [-1, -1, -1, spec.image.n_channels]), (TEXT, "BYTES", [-1, 1])]
        if manifest.preprocess["kind"] == "audio":
            return [(AUDIO, "FP32", [-1, -1]), (RATE, "INT64", [-1])]
        if manifest.generates:
            return [("text_input", "BYTES", [1])]
        if manifest.preprocess["kind"] == "text":
            task = find_task(manifest.task)
            return [(name, "BYTES", [-1, 1]) for name in task.columns[: task.required]]
        return [_describe_tensor(spec, spec.shape) for spec in self.bundle.session.inputs]

    def _describe_outputs(self) -> list[tuple[str, str, list[int]]]:
        """Describe what `infer` answers; of a decoder what `generate` does."""
        manifest, outputs = self.bundle.manifest, self.bundle.session.outputs
        task = find_task(manifest.task)
        added = task.postprocess_specs(manifest.postprocess, outputs[0].shape[0])
        return [_describe_tensor(spec, spec.shape) for spec in task.answer_specs((*outputs, *added))]


class BinaryTail:
    """The bytes behind a request's JSON, which tensors take in their order."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._taken = data, 0

    def take(self, name: str, size: Any) -> memoryview:
        """Return the next `size` bytes. UsageError where there are not as many."""
        left = len(self._data) - self._taken
        if type(size) is not int or not 0 <= size <= left:
            raise UsageError(f"inputs: {name}: binary_data_size is {SHORT.repr(size)}, and {left} bytes are left")
        self._taken += size
        return self._data[self._taken - size : self._taken]

    def check_used_up(self) -> None:
        """Raise UsageError where bytes are left that no tensor takes."""
        if self._taken != len(self._data):
            raise UsageError(
                f"{len(self._data) - self._taken} bytes behind the JSON belong to no input: give each its "
                "parameters.binary_data_size"
            )


def parse_object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse the JSON object that `data` is. UsageError for anything else."""
    try:
        text = str(data, "utf-8")  # json.loads of bytes would take UTF-16 and lone surrogates, too
        if text.count("[") + text.count("{") > MOST_NESTED:
            raise UsageError(f"the request has more than {MOST_NESTED} lists: give data flat, or as binary tensors")
        parsed = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError("the request is not a JSON object")
    return parsed


def dump_json(answer: Mapping[str, Any]) -> bytes:
    """Encode an answer as JSON; RuntimeFailure where a value is NaN or infinity."""
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except ValueError as error:
        raise RuntimeFailure("the model gave NaN or infinity, which JSON has no word for") from error


def read_text(where: str, value: Any, longest: int = LONGEST_TEXT) -> str:
    """Return the text `value`. UsageError where it is none, or holds what no tokenizer takes."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected a text, found {SHORT.repr(value)}")
    if len(value) > longest:
        raise UsageError(f"{where}: a text of {len(value)} characters; give at most {longest}, cut it into parts")
    if "\0" in value:
        raise UsageError(f"{where}: a NUL character at {value.index(chr(0))}; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: half a surrogate pair at {error.start}, which is no character") from error
    return value


def read_tensor(
    tensor: Mapping[str, Any], kinds: Mapping[str, str], tail: BinaryTail, max_batch: int
) -> tuple[str, Array | list[str]]:
    """Return (name, values) of one input: an array, or a list of texts. UsageError.

    `kinds`: name -> the datatype that the model takes.
    """
    name, kind, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"inputs: the model takes {', '.join(kinds)}, not {SHORT.repr(name)}")
    _refuse_unknown(f"inputs: {name}", tensor, ("name", "datatype", "shape", "data", "parameters"))
    if kind != kinds[name]:  # a text where pixels are wanted would be read as a path
        raise UsageError(f"inputs: {name}: the model takes datatype {kinds[name]}, not {SHORT.repr(kind)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise UsageError(f"inputs: {name}: shape is {SHORT.repr(shape)}, not a list of sizes")
    if kind == "BYTES" and (not shape or shape[1:] not in ([], [1])):
        raise UsageError(f"inputs: {name}: texts have shape [n] or [n, 1], not {SHORT.repr(shape)}")
    if shape and shape[0] > max_batch:
        raise UsageError(f"inputs: {name}: {SHORT.repr(shape[0])} samples; at most {max_batch} are taken at once")
    parameters = _read_parameters(f"inputs: {name}: ", tensor, ("binary_data_size",))
    try:
        if "binary_data_size" in parameters:
            if "data" in tensor:
                raise UsageError(f"inputs: {name}: give data or binary_data_size, not both")
            array = _decode_binary(tail.take(name, parameters["binary_data_size"]), kind).reshape(shape)
        else:
            array = _decode_json(tensor.get("data"), kind).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"inputs: {name}: data does not fit {kind} {SHORT.repr(shape)}: {error}") from error
    if kind == "BYTES":
        return name, [read_text(f"inputs: {name}: sample {i}", text) for i, text in enumerate(array.reshape(-1))]
    if kind.startswith("F") and not np.isfinite(array).all():
        raise UsageError(f"inputs: {name}: data holds NaN, infinity or a number too large for {kind}")
    return name, array


def write_tensor(name: str, array: Array, binary: bool) -> tuple[dict[str, Any], bytes]:
    """Return (what the answer's JSON says of an output, its bytes behind the JSON where `binary`)."""
    kind = NAMES["object" if array.dtype == object else array.dtype.name]
    description = {"name": name, "datatype": kind, "shape": list(array.shape)}
    if not binary:
        return {**description, "data": array.reshape(-1).tolist()}, b""
    if kind == "BYTES":
        texts = [str(text).encode() for text in array.reshape(-1)]
        data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    else:
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {**description, "parameters": {"binary_data_size": len(data)}}, data


def _read_wanted_outputs(request: Mapping[str, Any], names: list[str]) -> dict[str, bool]:
    """Return output -> whether it is wanted in binary: those that the request lists, or all. UsageError."""
    parameters = _read_parameters("", request, ("binary_data_output", *ORDERING))
    binary = _read_flag(parameters, "binary_data_output", False)
    if request.get("outputs") is None:
        return dict.fromkeys(names, binary)
    wanted = {}
    for output in _read_objects(request, "outputs", "with a name"):
        name = output.get("name")
        if name not in names:
            raise UsageError(f"outputs: the model gives {', '.join(names)}, not {SHORT.repr(name)}")
        _refuse_unknown(f"outputs: {name}", output, ("name", "parameters"))
        own_parameters = _read_parameters(f"outputs: {name}: ", output, ("binary_data",))
        wanted[str(name)] = _read_flag(own_parameters, "binary_data", binary)
    return wanted


def _read_parameters(where: str, described: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """Return the parameters of a request, an input or an output, {} where it has none. UsageError for unknown ones."""
    parameters = described.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UsageError(f"{where}parameters is {SHORT.repr(parameters)}, not an object")
    _refuse_unknown(f"{where}parameters", parameters, known)
    return parameters


def _refuse_unknown(where: str, described: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UsageError for a key that this server does not have: what it asks for would not be done."""
    for name in described:
        if name not in known:
            raise UsageError(f"{where}: {SHORT.repr(name)} is not known here; known are {', '.join(sorted(known))}")


def _read_flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {SHORT.repr(value)}: give true or false")
    return value


def _read_objects(request: Mapping[str, Any], key: str, about: str) -> list[Mapping[str, Any]]:
    objects = request.get(key)
    if not isinstance(objects, list) or not objects or not all(isinstance(item, dict) for item in objects):
        raise UsageError(f"{key} is missing: a list of objects {about}")
    return objects


def _decode_json(data: Any, kind: str) -> Array:
    """Return values as they are sent, none rounded or read as something else. ValueError, TypeError, OverflowError."""
    if not isinstance(data, list):
        raise TypeError("give a list")
    values: Array = np.array(data, object if kind == "BYTES" else None)
    kinds = {type(value) for value in values.reshape(-1)} if kind == "BYTES" else {values.dtype.kind}
    if values.size and not kinds <= JSON_KINDS[kind]:
        raise TypeError("values of another type are among them")
    if kind == "BYTES" or not values.size:
        return values.astype(TYPES[kind])
    with np.errstate(over="ignore"):  # becomes infinity, which is refused
        return np.array(data, TYPES[kind])


def _decode_binary(data: memoryview, kind: str) -> Array:
    """Return the values of little-endian bytes [n]. ValueError."""
    if kind == "BYTES":
        texts, at = [], 0
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if end > len(data):
                raise ValueError(f"the text at byte {at} goes on behind the end")
            texts.append(str(data[at + 4 : end], "utf-8"))
            at = end
        return np.array(texts, object)
    if kind == "BOOL":
        flags = np.frombuffer(data, np.uint8)
        if flags.size and flags.max() > 1:
            raise ValueError("a BOOL is a byte 0 or 1")
        return flags.astype(bool)
    dtype = np.dtype(TYPES[kind])
    # bytes behind JSON of any length lie anywhere; kernels take arrays whose numbers are aligned
    return np.require(np.frombuffer(data, dtype.newbyteorder("<")), dtype, "A")


def _describe_tensor(spec: TensorSpec, shape: tuple[int | str, ...]) -> tuple[str, str, list[int]]:
    """Return (name, the protocol's type, shape with -1 where it is free)."""
    return spec.name, NAMES[spec.dtype], [size if isinstance(size, int) else -1 for size in shape]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
