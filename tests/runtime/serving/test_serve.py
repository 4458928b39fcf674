"""A bundle behind HTTP: what the Open Inference Protocol says of requests and answers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from starlette.testclient import TestClient

import runtime
from runtime.encode.preprocess import TensorPreprocess
from runtime.serving import ServingLimits
from runtime.serving.app import Service
from runtime.serving.protocol import MOST_NESTED, BinaryTail, ServedModel, read_tensor
from runtime.tasks.manifest import write_bundle

LIMITS = ServingLimits(max_body=2**20, max_batch=16)


@contextmanager
def served(folder: Path) -> Iterator[tuple[runtime.Bundle, Callable[..., tuple[int, Any]]]]:
    """(the open bundle, a call: path, body and headers -> status and answer)."""
    with runtime.open_bundle(folder) as bundle:
        service = Service(ServedModel(bundle, LIMITS.max_batch), LIMITS)
        client = TestClient(service.app)

        def call(path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
            path = path.replace("{at}", f"/v2/models/{bundle.manifest.name}")
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            response = client.request("GET" if body is None else "POST", path, content=data, headers=headers)
            if "Inference-Header-Content-Length" not in response.headers:
                return response.status_code, response.json()
            assert response.headers["Content-Type"] == "application/octet-stream"
            n = int(response.headers["Inference-Header-Content-Length"])
            return response.status_code, (json.loads(response.content[:n]), response.content[n:])

        yield bundle, call
        service.close()


@pytest.fixture
def roots_bundle(tmp_path: Path, tiny: Any) -> Path:
    """a float32 [n, 3] -> its square roots, NaN below 0, and whether they are above 1."""
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, ["batch", 3])
    nodes = [helper.make_node("Sqrt", ["a"], ["roots"]), helper.make_node("Greater", ["roots", "one"], ["above"])]
    roots = helper.make_tensor_value_info("roots", TensorProto.FLOAT, ["batch", 3])
    above = helper.make_tensor_value_info("above", TensorProto.BOOL, ["batch", 3])
    root = tmp_path / "bundle"
    for name in ("model", "baseline"):
        tiny.save(root / name / "model.onnx", nodes, [a], [roots, above], {"one": np.array(1, np.float32)})
    columns = {"a": np.ones((4, 3), np.float32)}
    write_bundle(root, tiny.stage(root, "generic", TensorPreprocess(), columns))
    return root


def tensor(name: str, array: Any, kind: str) -> dict[str, Any]:
    array = np.asarray(array)
    return {"name": name, "shape": list(array.shape), "datatype": kind, "data": array.reshape(-1).tolist()}


def outputs(answer: Any) -> dict[str, np.ndarray]:
    return {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer["outputs"]}


def in_binary(description: dict[str, Any], *tensors: bytes) -> tuple[bytes, dict[str, str]]:
    """(a body, its headers)."""
    head = json.dumps(description).encode()
    return head + b"".join(tensors), {"Inference-Header-Content-Length": str(len(head))}


def test_images_are_classified(image_bundle: Path, image_columns: dict[str, np.ndarray]) -> None:
    images = image_columns["image"]
    with served(image_bundle) as (bundle, call):
        assert [call(path)[0] for path in ("/v2/health/live", "/v2/health/ready", "{at}/ready")] == [200] * 3
        assert call("/v2")[1]["extensions"] == ["binary_tensor_data"]
        status, about = call("{at}")
        assert status == 200 and about["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
        assert [(one["name"], one["datatype"]) for one in about["outputs"]] == [
            ("label", "BYTES"),
            ("score", "FP32"),
            ("logits", "FP32"),
        ]
        request = {"id": "7", "inputs": [tensor("image", images, "UINT8")]}
        status, answer = call("{at}/infer", request)
        assert status == 200 and answer["id"] == "7"
        assert call("{at}/versions/1/infer", request) == (status, answer)
        values, expected = outputs(answer), bundle.predict(images)
    assert np.allclose(values["logits"], expected["logits"], atol=1e-6)
    assert values["label"].ravel().tolist() == [one["label"] for one in expected.predictions]


def test_binary_tensors_in_and_out(image_bundle: Path, image_columns: dict[str, np.ndarray]) -> None:
    images = image_columns["image"]
    about = {"name": "image", "datatype": "UINT8", "shape": list(images.shape)}
    request = {
        "inputs": [{**about, "parameters": {"binary_data_size": images.nbytes}}],
        "outputs": [{"name": "label", "parameters": {"binary_data": True}}, {"name": "logits"}, {"name": "score"}],
        "parameters": {"binary_data_output": True},
    }
    request["outputs"][1]["parameters"] = {"binary_data": False}
    with served(image_bundle) as (bundle, call):
        status, (answer, tail) = call("{at}/infer", *in_binary(request, images.tobytes()))
        expected = bundle.predict(images)
    assert status == 200 and [one["name"] for one in answer["outputs"]] == ["label", "logits", "score"]
    label, logits, score = answer["outputs"]
    assert np.allclose(np.array(logits["data"]).reshape(logits["shape"]), expected["logits"], atol=1e-6)
    texts = b"".join(struct.pack("<I", 1) + one["label"].encode() for one in expected.predictions)
    assert label["parameters"] == {"binary_data_size": len(texts)} and tail.startswith(texts)
    scores = np.frombuffer(tail[len(texts) :], "<f4").tolist()
    assert score["parameters"]["binary_data_size"] == 4 * len(images)
    assert scores == pytest.approx([one["score"] for one in expected.predictions])


def test_binary_floats_may_lie_anywhere(roots_bundle: Path) -> None:
    values = np.array([[1, 4, 9], [0.25, 16, 0]], np.float32)
    request = {
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": values.nbytes}}
        ],
        "outputs": [{"name": "above", "parameters": {"binary_data": True}}, {"name": "roots"}],
    }
    with served(roots_bundle) as (_, call):
        for i in range(4):  # the JSON grows by a byte each time
            _, (answer, tail) = call("{at}/infer", *in_binary({**request, "id": "x" * i}, values.tobytes()))
            assert answer["outputs"][1]["data"] == [1, 2, 3, 0.5, 4, 0]
            assert tail == bytes([0, 1, 1, 0, 1, 0])
    described = {"name": "a", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": values.nbytes}}
    for i in range(4):
        tail = BinaryTail(memoryview(b"x" * i + values.tobytes())[i:])
        array: Any = read_tensor(described, {"a": "FP32"}, tail, 2)[1]
        assert array.flags.aligned and np.array_equal(array, values)


def test_texts_become_embeddings(make_text_bundle: Callable[..., Path]) -> None:
    texts = ["a b c", "d", "b c é e"]
    folder = make_text_bundle("feature-extraction", {"text": texts, "text_pair": texts}, pooling="mean")
    with served(folder) as (bundle, call):
        status, answer = call("{at}/infer", {"inputs": [tensor("text", [[text] for text in texts], "BYTES")]})
        assert status == 200
        assert [one["name"] for one in call("{at}")[1]["outputs"]] == ["embedding"]
        assert np.allclose(outputs(answer)["embedding"], bundle.predict(texts)["embeddings"][:, 0], atol=1e-6)
        tail = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
        about = {"name": "text", "datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": len(tail)}}
        assert call("{at}/infer", *in_binary({"inputs": [about]}, tail)) == (200, answer)


def test_a_decoder_generates(make_decoder_bundle: Callable[..., Path]) -> None:
    with served(make_decoder_bundle()) as (bundle, call):
        status, answer = call("{at}/generate", {"text_input": "ab", "parameters": {"max_new_tokens": 5}})
        assert status == 200 and answer["text_output"] == bundle.generate("ab", max_new_tokens=5).text
        status, answer = call("{at}/generate", {"text_input": "ab", "parameters": {"max_tokens": 5}})
        assert status == 400 and "unknown setting 'max_tokens'; did you mean 'max_new_tokens'?" in answer["error"]
        status, answer = call("{at}/generate", {"text_input": "ab", "max_tokens": 5})
        assert status == 400 and "generate: 'max_tokens' is not known here; known are id, parameters" in answer["error"]
        for name, value in (
            ("max_new_tokens", "5"),
            ("prompt", "x"),
            ("temperature", "hot"),
            ("stop", 5),
            ("stop", ["x"] * 17),
            ("stop", ["\ud800"]),
            ("seed", 1.5),
            ("chat", "yes"),
            ("chat", True),
            ("temperature", 10**400),
            ("temperature", 5e-324),
            ("repetition_penalty", 5e-324),
            ("repetition_penalty", 10**400),
        ):
            status, answer = call("{at}/generate", {"text_input": "ab", "parameters": {name: value}})
            assert status == 400 and name in answer["error"]
        assert [one["name"] for one in call("{at}")[1]["inputs"]] == ["text_input"]
        status, answer = call("{at}/generate", b'{"text_input": "ab", "parameters": {"temperature": 1e999}}')
        assert status == 400 and "temperature' is inf: give a finite number" in answer["error"]
        status, answer = call("{at}/infer", {"inputs": []})
        assert status == 400 and "generates text: POST" in answer["error"]


PIXEL = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 1, 3]}
BINARY = {**PIXEL, "parameters": {"binary_data_size": 3}}


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v2/models/other/infer", {}, 404, "the model here is"),
        ("/v2/models/other", None, 404, "the model here is"),
        ("/v2/nothing", None, 404, "the model here is"),
        ("/v2/nothing/", None, 404, "the model here is"),
        ("{at}/infer", None, 405, "Method Not Allowed"),
        ("{at}/infer", b"{", 400, "the request is not JSON"),
        ("{at}/infer", b'{"id": "a", "id": "b"}', 400, "'id' is there twice"),
        ("{at}/infer", (b"{}", {"Content-Encoding": "gzip"}), 415, "Content-Encoding: gzip is not read here"),
        ("{at}/infer", {"inputs": [PIXEL], "output": []}, 400, "the request: 'output' is not known here; known are"),
        ("{at}/infer", {"inputs": [{**PIXEL, "dtype": 1}]}, 400, "inputs: image: 'dtype' is not known here"),
        ("{at}/infer", {"inputs": [{**PIXEL, "parameters": []}]}, 400, "image: parameters is [], not an object"),
        ("{at}/infer", {"inputs": [PIXEL], "parameters": {"clsification": 1}}, 400, "parameters: 'clsification' is"),
        (
            "{at}/infer",
            {
                "inputs": [tensor("image", [1], "UINT8")],
                "outputs": [{"name": "label", "parameters": {"classification": 3}}],
            },
            400,
            "outputs: label: parameters: 'classification' is not known here; known are binary_data",
        ),
        ("{at}/infer", '{"inputs": []}'.encode("utf-16"), 400, "the request is not JSON"),
        ("{at}/infer", b'{"id": "\xed\xa0\x80"}', 400, "the request is not JSON"),
        ("{at}/infer", b'{"id": NaN}', 400, "NaN is no number of JSON"),
        ("{at}/infer", b"1" * 5000, 400, "the request is not JSON"),
        ("{at}/infer", [], 400, "not a JSON object"),
        ("{at}/infer", {}, 400, "inputs is missing"),
        ("{at}/infer", {"inputs": None}, 400, "inputs is missing"),
        ("{at}/infer", {"id": None}, 400, "id: expected a text"),
        ("{at}/infer", {"id": "\ud800"}, 400, "id: half a surrogate pair"),
        ("{at}/infer", {"inputs": [{"name": "\ud800"}]}, 400, "the model takes image, not '\\ud800'"),
        ("{at}/infer", {"inputs": [{"name": None}]}, 400, "the model takes image, not None"),
        ("{at}/infer", {"inputs": [tensor("image", [1], "UINT9")]}, 400, "takes datatype UINT8, not 'UINT9'"),
        (
            "{at}/infer",
            {"inputs": [tensor("image", ["/etc/passwd"], "BYTES")]},
            400,
            "takes datatype UINT8, not 'BYTES'",
        ),
        ("{at}/infer", {"inputs": [tensor("image", [1.7], "UINT8")]}, 400, "values of another type"),
        ("{at}/infer", {"inputs": [tensor("image", [None], "UINT8")]}, 400, "values of another type"),
        ("{at}/infer", {"inputs": [tensor("image", [256], "UINT8")]}, 400, "image: data does not fit UINT8"),
        ("{at}/infer", {"inputs": [{**PIXEL, "data": None}]}, 400, "give a list"),
        ("{at}/infer", {"inputs": [{**PIXEL, "shape": None, "data": [1]}]}, 400, "shape is None, not a list of sizes"),
        ("{at}/infer", {"inputs": [{**PIXEL, "shape": [10**30]}]}, 400, "at most 16 are taken at once"),
        ("{at}/infer", {"inputs": [tensor("image", [1] * 17, "UINT8")]}, 400, "17 samples; at most 16 are taken"),
        ("{at}/infer", {"inputs": [tensor("image", [1], "UINT8")] * 2}, 400, "image is there twice"),
        ("{at}/infer", b"[" * 100_000, 400, "the request is not JSON"),
        ("{at}/infer", b"[" * (MOST_NESTED + 1), 400, "lists: give data flat, or as binary tensors"),
        ("{at}/infer", b" " * (LIMITS.max_body + 1), 413, "more than 1048576"),
        ("{at}/infer", {"inputs": [{**PIXEL, "shape": [2], "data": [1]}]}, 400, "image: data"),
        ("{at}/infer", {"inputs": [tensor("text", [["a"]], "BYTES")]}, 400, "the model takes image, not 'text'"),
        ("{at}/infer", {"inputs": [PIXEL], "outputs": [{"name": "x"}]}, 400, "gives label, score, logits, not 'x'"),
        ("{at}/infer", {"inputs": [PIXEL], "parameters": 1}, 400, "parameters is 1, not an object"),
        ("{at}/infer", {"inputs": [PIXEL], "parameters": {"binary_data_output": 1}}, 400, "give true or false"),
        ("{at}/infer", {"inputs": [BINARY]}, 400, "binary_data_size is 3, and 0 bytes are left"),
        ("{at}/infer", in_binary({"inputs": [BINARY]}, b"ab"), 400, "binary_data_size is 3, and 2 bytes are left"),
        ("{at}/infer", in_binary({"inputs": [BINARY]}, b"abcd"), 400, "1 bytes behind the JSON belong to no input"),
        ("{at}/infer", in_binary({"inputs": [{**BINARY, "data": [1]}]}, b"abc"), 400, "not both"),
        ("{at}/infer", (b"{}", {"Inference-Header-Content-Length": "3"}), 400, "is 3, and the body has 2 bytes"),
        ("{at}/infer", (b"{}", {"Inference-Header-Content-Length": "-1"}), 400, "is no number of bytes"),
        ("{at}/generate", {"text_input": "a"}, 400, "generates no text"),
    ],
)
def test_what_does_not_fit_is_answered_with_the_reason(
    image_bundle: Path, path: str, body: Any, status: int, reason: str
) -> None:
    with served(image_bundle) as (_, call):
        answered, answer = call(path, *body) if isinstance(body, tuple) else call(path, body)
    assert answered == status and reason in answer["error"]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["a\0"], "inputs: text: sample 0: a NUL character at 1"),
        (["a", "\udc80"], "sample 1: half a surrogate pair at 0"),
        (["a", None], "values of another type are among them"),
        (["a" * 70_000], "a text of 70000 characters; give at most 65536"),
        ([["a", "b"]], r"texts have shape [n] or [n, 1], not [1, 2]"),
    ],
)
def test_texts_that_no_tokenizer_takes(make_text_bundle: Callable[..., Path], texts: list[Any], reason: str) -> None:
    with served(make_text_bundle("feature-extraction", {"text": ["a", "b"]})) as (_, call):
        shape = list(np.array(texts, object).shape)
        about = {"name": "text", "datatype": "BYTES", "shape": shape, "data": texts}
        status, answer = call("{at}/infer", {"inputs": [about]})
    assert status == 400 and reason in answer["error"]


def test_numbers_that_are_none_are_blamed_on_who_gave_them(roots_bundle: Path) -> None:
    """NaN and infinity of the request: 400. Of the model: 500 in JSON, which has no word for them; binary has."""
    about = {"name": "a", "datatype": "FP32", "shape": [1, 3]}
    with served(roots_bundle) as (_, call):
        for data in ("[NaN, 1, 1]", "[1, -Infinity, 1]", "[1, 1, 1e39]", "[1, 1, 1e999]"):
            body = json.dumps({"inputs": [{**about, "data": [0]}]}).replace("[0]", data).encode()
            status, answer = call("{at}/infer", body)
            assert status == 400 and "model" not in answer["error"], data
        binary = {**about, "parameters": {"binary_data_size": 12}}
        body, headers = in_binary({"inputs": [binary]}, struct.pack("<3f", 1, 2, float("nan")))
        assert call("{at}/infer", body, headers) == (
            400,
            {"error": "inputs: a: data holds NaN, infinity or a number too large for FP32"},
        )
        body = {"inputs": [{**about, "data": [-1, 1, 1]}]}
        assert call("{at}/infer", body) == (
            500,
            {"error": "the model gave NaN or infinity, which JSON has no word for"},
        )
        status, (_, tail) = call(
            "{at}/infer", {**body, "outputs": [{"name": "roots", "parameters": {"binary_data": True}}]}
        )
        assert status == 200 and np.isnan(np.frombuffer(tail, "<f4")[0])


class FailingModel(ServedModel):
    """One with a defect."""

    error: BaseException = ZeroDivisionError()

    def infer(self, *_: Any) -> Any:
        raise self.error


def test_an_error_that_nobody_foresaw_is_json_and_raised_for_the_log(image_bundle: Path) -> None:
    with runtime.open_bundle(image_bundle) as bundle:
        service = Service(model := FailingModel(bundle, 16), LIMITS)
        client = TestClient(service.app, raise_server_exceptions=False)
        response = client.post("/v2/models/tiny/infer", content=b"{}")
        assert response.status_code == 500 and "a defect of the server" in response.json()["error"]
        with pytest.raises(ZeroDivisionError):
            TestClient(service.app).post("/v2/models/tiny/infer", content=b"{}")
        model.error = MemoryError()
        response = client.post("/v2/models/tiny/infer", content=b"{}")
        assert response.status_code == 503 and "not enough memory" in response.json()["error"]
        service.close()


def test_questions_with_contexts_of_several_windows(tiny: Any, tmp_path: Path) -> None:
    with served(tiny.span_bundle(tmp_path / "bundle")) as (bundle, call):
        assert [one["name"] for one in call("{at}")[1]["inputs"]] == ["question", "context"]
        columns = {"question": ["the cat", "dog"], "context": ["the mat sat on a dog " * 6, "mat"]}
        asked = [tensor(name, [[text] for text in texts], "BYTES") for name, texts in columns.items()]
        status, answer = call("{at}/infer", {"inputs": asked})
        expected = bundle.predict(columns)
        assert status == 200
        assert outputs(answer)["answer"].ravel().tolist() == [one["label"] for one in expected.predictions]
        assert outputs(answer)["begin"].ravel().tolist() == expected["begin"][:, 0].tolist()
        status, refused = call("{at}/infer", {"inputs": asked[:1]})
        assert status == 400 and "reads the column 'context'" in refused["error"]


def test_maps_are_as_large_as_their_images(tiny: Any, tmp_path: Path) -> None:
    with served(tiny.segment_bundle(tmp_path / "bundle")) as (bundle, call):
        images = np.random.default_rng(0).integers(0, 256, (2, 7, 5, 3), np.uint8)
        (described,) = [one for one in call("{at}")[1]["outputs"] if one["name"] == "classes"]
        assert (described["datatype"], described["shape"]) == ("UINT8", [-1, -1, -1])
        status, answer = call("{at}/infer", {"inputs": [tensor("image", images, "UINT8")]})
        assert status == 200 and np.array_equal(outputs(answer)["classes"], bundle.predict(images)["classes"])


def test_boxes_are_in_pixels_of_the_images_that_were_sent(tiny: Any, tmp_path: Path) -> None:
    with served(tiny.box_bundle(tmp_path / "bundle")) as (bundle, call):
        images = np.random.default_rng(0).integers(0, 256, (2, 8, 6, 3), np.uint8)
        (described,) = [one for one in call("{at}")[1]["outputs"] if one["name"] == "box"]
        assert (described["datatype"], described["shape"]) == ("FP32", [-1, -1, 4])
        status, answer = call("{at}/infer", {"inputs": [tensor("image", images, "UINT8")]})
        expected = bundle.predict(images)
        assert status == 200 and np.array_equal(outputs(answer)["box"], expected["boxes"])
        assert expected["boxes"][:, 1, 3].min() > 5  # of the eight rows, not of the model's four
        assert outputs(answer)["label"][:, :2].tolist() == [["a", "d"]] * 2
