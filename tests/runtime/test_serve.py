"""A bundle behind HTTP: what the Open Inference Protocol says, over a real socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import runtime
from runtime.errors import UsageError
from runtime.serve import serve


@contextmanager
def served(folder: Path) -> Iterator[tuple[runtime.Bundle, Callable[..., tuple[int, Any]]]]:
    """(the open bundle, a call: path and body -> status and answer)."""
    with runtime.open_bundle(folder) as bundle, serve(bundle, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def call(path: str, body: Any = None) -> tuple[int, Any]:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                with urlopen(Request(f"http://127.0.0.1:{server.server_port}{path}", data)) as response:
                    return response.status, json.loads(response.read())
            except HTTPError as error:
                return error.code, json.loads(error.read())

        try:
            yield bundle, call
        finally:
            server.shutdown()
            thread.join()


def tensor(name: str, array: Any, kind: str) -> dict[str, Any]:
    array = np.asarray(array)
    return {"name": name, "shape": list(array.shape), "datatype": kind, "data": array.reshape(-1).tolist()}


def outputs(answer: Any) -> dict[str, np.ndarray]:
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer["outputs"]}


def test_images_are_classified(image_bundle: Path, image_columns: dict[str, np.ndarray]) -> None:
    images = image_columns["image"]
    with served(image_bundle) as (bundle, call):
        name = bundle.manifest.name
        assert call("/v2/health/ready")[0] == 200
        status, about = call(f"/v2/models/{name}")
        assert status == 200 and about["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
        assert [(one["name"], one["datatype"]) for one in about["outputs"]] == [
            ("label", "BYTES"),
            ("score", "FP32"),
            ("logits", "FP32"),
        ]
        status, answer = call(f"/v2/models/{name}/infer", {"id": "7", "inputs": [tensor("image", images, "UINT8")]})
        assert status == 200 and answer["id"] == "7"
        found, expected = outputs(answer), bundle.predict(images)
    assert np.allclose(found["logits"], expected["logits"], atol=1e-6)
    assert found["label"].ravel().tolist() == [one["label"] for one in expected["prediction"]]


def test_texts_become_embeddings(make_text_bundle: Callable[..., Path]) -> None:
    texts = ["a b c", "d", "b c d e"]
    folder = make_text_bundle("feature-extraction", {"text": texts, "text_pair": texts}, pooling="mean")
    with served(folder) as (bundle, call):
        body = {"inputs": [tensor("text", [[text] for text in texts], "BYTES")]}
        status, answer = call(f"/v2/models/{bundle.manifest.name}/infer", body)
        assert status == 200
        _, about = call(f"/v2/models/{bundle.manifest.name}")
        assert [one["name"] for one in about["outputs"]] == ["embedding"]
        assert np.allclose(outputs(answer)["embedding"], bundle.predict(texts)["embeddings"][:, 0], atol=1e-6)


def test_a_decoder_generates(make_decoder_bundle: Callable[..., Path]) -> None:
    with served(make_decoder_bundle()) as (bundle, call):
        at = f"/v2/models/{bundle.manifest.name}"
        status, answer = call(f"{at}/generate", {"text_input": "ab", "parameters": {"max_new_tokens": 5}})
        assert status == 200 and answer["text_output"] == bundle.generate("ab", max_new_tokens=5).text
        status, answer = call(f"{at}/generate", {"text_input": "ab", "parameters": {"max_tokens": 5}})
        assert status == 400 and "unknown setting 'max_tokens'; did you mean max_new_tokens?" in answer["error"]
        for name, value in (
            ("max_new_tokens", "5"),
            ("prompt", "x"),
            ("temperature", "hot"),
            ("stop", 5),
            ("seed", 1.5),
        ):
            status, answer = call(f"{at}/generate", {"text_input": "ab", "parameters": {name: value}})
            assert status == 400 and name in answer["error"]
        assert [one["name"] for one in call(at)[1]["inputs"]] == ["text_input"]
        status, answer = call(f"{at}/infer", {"inputs": []})
        assert status == 400 and "generates text: POST" in answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v2/models/other/infer", {}, 404, "the model here is"),
        ("/v2/nothing", None, 404, "the model here is"),
        ("{at}/infer", b"{", 400, "the request is not JSON"),
        ("{at}/infer", [], 400, "not a JSON object"),
        ("{at}/infer", {}, 400, "inputs is missing"),
        ("{at}/infer", {"inputs": [tensor("image", [1], "UINT9")]}, 400, "takes datatype UINT8, not 'UINT9'"),
        (
            "{at}/infer",
            {"inputs": [tensor("image", ["/etc/passwd"], "BYTES")]},
            400,
            "takes datatype UINT8, not 'BYTES'",
        ),
        ("{at}/infer", {"inputs": [tensor("image", [1.7], "UINT8")]}, 400, "values of another type"),
        ("{at}/infer", {"inputs": [tensor("image", [256], "UINT8")]}, 400, "image: data does not fit UINT8"),
        ("{at}/infer", {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1]}]}, 400, "give a list"),
        ("{at}/infer", b"[" * 100_000, 400, "the request is not JSON"),
        (
            "{at}/infer",
            {"inputs": [{"name": "image", "datatype": "UINT8", "shape": [2], "data": [1]}]},
            400,
            "image: data",
        ),
        ("{at}/infer", {"inputs": [tensor("text", [["a"]], "BYTES")]}, 400, "the model takes image, not 'text'"),
        ("{at}/generate", {"text_input": "a"}, 400, "generates no text"),
    ],
)
def test_what_does_not_fit_is_answered_with_the_reason(
    image_bundle: Path, path: str, body: Any, status: int, said: str
) -> None:
    with served(image_bundle) as (bundle, call):
        found, answer = call(path.replace("{at}", f"/v2/models/{bundle.manifest.name}"), body)
    assert found == status and said in answer["error"]


def raw(port: int, request: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "head",
    [
        "POST {at}/infer HTTP/1.1\r\nContent-Length: -1",
        "POST {at}/infer HTTP/1.1\r\nContent-Length: many",
        "POST {at}/infer HTTP/1.1\r\nContent-Length: " + "9" * 5000,
        "POST {at}/infer HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 50",
        "POST {at}/infer HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST {at}/infer HTTP/1.1\r\nContent-Length: 999999999999",
        "POST /v2/nothing HTTP/1.1\r\nContent-Length: 50",
        "GET /v2/health/live HTTP/1.1\r\nContent-Length: 50",
    ],
)
def test_a_body_that_was_not_read_is_never_taken_for_a_request(image_bundle: Path, head: str) -> None:
    with runtime.open_bundle(image_bundle) as bundle, serve(bundle, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        head = head.replace("{at}", f"/v2/models/{bundle.manifest.name}")
        answer = raw(server.server_port, f"{head}\r\n\r\nGET /v2/health/ready HTTP/1.1\r\n\r\n".encode())
        server.shutdown()
        thread.join()
    assert answer.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answer


def test_a_port_that_is_taken(image_bundle: Path) -> None:
    with runtime.open_bundle(image_bundle) as bundle, serve(bundle, port=0) as server:
        with pytest.raises(UsageError, match=r"cannot be served: .* in use; choose another --host or --port"):
            serve(bundle, port=server.server_port)
        with pytest.raises(UsageError, match="choose another --host or --port"):
            serve(bundle, port=70_000)
