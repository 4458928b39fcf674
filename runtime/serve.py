"""A bundle behind HTTP: the core of the Open Inference Protocol (KServe v2), with the standard library alone.

```
GET  /v2/health/live, /v2/health/ready        200
GET  /v2/models/NAME                          its inputs and outputs
POST /v2/models/NAME/infer                    {"inputs": [{"name", "shape", "datatype", "data"}]} -> {"outputs": [...]}
POST /v2/models/NAME/generate                 {"text_input", "parameters"} -> {"text_output"}: decoders
```
Samples and answers are those of `runtime.serving`: image, text; label, score, logits, embedding. One request runs at a
time. There is no encryption and no identity here: what faces the outside belongs in front of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import numpy as np

import runtime
from runtime.columns import Array
from runtime.errors import RuntimeFailure, UsageError
from runtime.manifest import CLASSIFICATION, GENERATION, TensorSpec
from runtime.serving import answer_specs, answers_of

LARGEST_BYTES = 256 * 2**20
"""Of a request: more is refused before it is read."""
TYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BYTES": "object",
}  # fmt: skip
"""The protocol's name -> numpy's."""
NAMES = {name: kind for kind, name in TYPES.items()}
SAID: dict[str, set[Any]] = {
    kind: {str} if kind == "BYTES" else {"b"} if kind == "BOOL" else {"i", "u", "f"} if kind[0] == "F" else {"i", "u"}
    for kind in TYPES
}
"""The protocol's name -> what its values may be in JSON: numpy's kinds of them, or a class."""


class Served:
    """An open bundle as the protocol sees it."""

    def __init__(self, bundle: runtime.Bundle) -> None:
        self.bundle, self.lock = bundle, Lock()

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    def metadata(self) -> dict[str, Any]:
        """Of the model."""
        inputs, outputs = (
            [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in found]
            for found in (self._inputs(), self._outputs())
        )
        return {"name": self.name, "versions": ["1"], "platform": "compress", "inputs": inputs, "outputs": outputs}

    def infer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """UsageError where the request does not fit."""
        if self.bundle.manifest.task in GENERATION:
            raise UsageError(f"{self.name} generates text: POST /v2/models/{self.name}/generate")
        kinds = {name: kind for name, kind, _ in self._inputs()}
        kinds |= {"text_pair": kinds["text"]} if "text" in kinds else {}
        columns = dict(_read(one, kinds) for one in _listed(request, "inputs"))
        with self.lock:
            outputs = self.bundle.predict({name: _column(array) for name, array in columns.items()})
        outputs.pop("prediction", None)
        found = answers_of(self.bundle.manifest, outputs)
        return {
            "model_name": self.name,
            "model_version": "1",
            "id": request.get("id", ""),
            "outputs": [_written(name, array) for name, array in found.items()],
        }

    def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """UsageError for a model that generates no text, or settings that there are not."""
        prompt, settings = request.get("text_input"), request.get("parameters") or {}
        if not isinstance(prompt, str) or not isinstance(settings, dict):
            raise UsageError("generate: give text_input, a text, and parameters, an object")
        if settings.pop("stream", False):
            raise UsageError("generate: answers are given whole; leave stream out")
        with self.lock:
            result = self.bundle.generate(prompt, stream=False, **settings)
        return {"model_name": self.name, "model_version": "1", "text_output": result.text}

    def _inputs(self) -> list[tuple[str, str, list[int]]]:
        manifest = self.bundle.manifest
        if manifest.preprocess["kind"] == "image":
            return [("image", "UINT8", [-1, -1, -1, 1 if manifest.preprocess.get("channels") == "L" else 3])]
        if manifest.task in GENERATION:
            return [("text_input", "BYTES", [1])]
        if manifest.preprocess["kind"] == "text":
            return [("text", "BYTES", [-1, 1])]
        return [_described(spec, spec.shape) for spec in self.bundle.session.inputs]

    def _outputs(self) -> list[tuple[str, str, list[int]]]:
        """What `infer` answers; of a decoder what `generate` does."""
        manifest, found = self.bundle.manifest, self.bundle.session.outputs
        if manifest.task in GENERATION:
            return [("text_output", "BYTES", [1])]
        if manifest.task not in (*CLASSIFICATION, "feature-extraction"):
            return [_described(spec, spec.shape) for spec in found]
        return [_described(spec, ("batch", *spec.shape)) for spec in answer_specs(manifest.task, found)]


def serve(bundle: runtime.Bundle, host: str = "127.0.0.1", port: int = 8000) -> ThreadingHTTPServer:
    """A server that is bound and waits for `serve_forever`; port 0: any that is free. UsageError where it is taken."""
    served = Served(bundle)
    handler = type("Handler", (_Handler,), {"served": served})
    try:
        return ThreadingHTTPServer((host, port), handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{host}:{port} cannot be served: {error}; choose another --host or --port") from error


class _Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"
    timeout = 60
    """Seconds that a client may be silent."""

    def do_GET(self) -> None:
        self.close_connection |= self._has_body()  # which is not read
        if self.path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{self.served.name}/ready"):
            self._send(HTTPStatus.OK, {})
        elif self.path == f"/v2/models/{self.served.name}":
            self._send(HTTPStatus.OK, self.served.metadata())
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"{self.path}: the model here is {self.served.name}"})

    def do_POST(self) -> None:
        answers = {"infer": self.served.infer, "generate": self.served.generate}
        start, _, verb = self.path.rpartition("/")
        self.close_connection, kept = True, self.close_connection  # until the body has been read whole
        if start != f"/v2/models/{self.served.name}" or verb not in answers:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"{self.path}: the model here is {self.served.name}"})
            return
        try:
            data = self._body()
            self.close_connection = kept
            self._send(HTTPStatus.OK, answers[verb](_parsed(data)))
        except UsageError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except RuntimeFailure as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})

    def _has_body(self) -> bool:
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"

    def _body(self) -> bytes:
        """UsageError where its size is not told in the one way that is read here, or is too large."""
        told = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(told) != 1 or not re.fullmatch("[0-9]{1,15}", told[0]):
            raise UsageError("the request must tell its bytes in one Content-Length, and may not be chunked")
        if int(told[0]) > LARGEST_BYTES:
            raise UsageError(f"the request has {told[0]} bytes, more than {LARGEST_BYTES}")
        return self.rfile.read(int(told[0]))

    def _send(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
        try:
            data = json.dumps(answer, allow_nan=False).encode()
        except ValueError:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            data = json.dumps({"error": "the model gave NaN or infinity, which JSON has no word for"}).encode()
        self.send_response(status)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a server behind another one has its log there."""


def _parsed(data: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object")
    return body


def _listed(request: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = request.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise UsageError(f"{key} is missing: a list of objects with name, shape, datatype and data")
    return found


def _read(tensor: Mapping[str, Any], kinds: Mapping[str, str]) -> tuple[str, Array]:
    """(name, array) of one input; `kinds`: name -> the datatype that the model takes. UsageError."""
    name, kind, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"inputs: the model takes {', '.join(kinds)}, not {name!r}")
    if kind != kinds[name]:  # a text where pixels are wanted would be read as a path
        raise UsageError(f"inputs: {name}: the model takes datatype {kinds[name]}, not {kind!r}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise UsageError(f"inputs: {name}: shape is {shape!r}, not a list of sizes")
    try:
        array = _array(tensor.get("data"), kind).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"inputs: {name}: data does not fit {kind} {shape}: {error}") from error
    return name, array


def _array(data: Any, kind: str) -> Array:
    """Values as they are sent, none rounded or read as something else. ValueError, TypeError, OverflowError."""
    if not isinstance(data, list):
        raise TypeError("give a list")
    found: Array = np.array(data, object if kind == "BYTES" else None)
    said = {type(one) for one in found.reshape(-1)} if kind == "BYTES" else {found.dtype.kind} if found.size else set()
    if not said <= SAID[kind]:
        raise TypeError("values of another type are among them")
    return found.astype(TYPES[kind]) if kind == "BYTES" or not found.size else np.array(data, TYPES[kind])


def _column(array: Array) -> Any:
    """Texts as a list, one for each row; numbers as they are."""
    return [str(one) for one in array.reshape(-1)] if array.dtype == object else array


def _described(spec: TensorSpec, shape: tuple[int | str, ...]) -> tuple[str, str, list[int]]:
    """(name, the protocol's type, shape with -1 where it is free)."""
    return spec.name, NAMES[spec.dtype], [size if isinstance(size, int) else -1 for size in shape]


def _written(name: str, array: Array) -> dict[str, Any]:
    kind = NAMES["object" if array.dtype == object else array.dtype.name]
    return {"name": name, "datatype": kind, "shape": list(array.shape), "data": array.reshape(-1).tolist()}
