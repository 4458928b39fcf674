"""Requests to a served bundle: an answer of 2xx or 4xx in JSON, whatever comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import assert_done_or_refused, corpus, fuzz
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import runtime
from runtime.serving import ServingLimits
from runtime.serving.app import Service
from runtime.serving.protocol import TYPES, ServedModel
from tests.runtime.conftest import write_decoder_bundle, write_image_bundle, write_text_bundle

TENSOR = {"shape": [1, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48}
BASES: dict[str, dict[str, Any]] = {
    "image": {"id": "1", "inputs": [{"name": "image", **TENSOR}], "outputs": [{"name": "label"}]},
    "text": {"inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["the cat", "sat"]}]},
    "decoder": {"text_input": "ab", "parameters": {"max_new_tokens": 2, "temperature": 1.0, "stop": ["x"], "seed": 3}},
}
"""A request that is right, for each kind of model."""
WORDS = st.sampled_from(
    ["name", "shape", "datatype", "data", "inputs", "outputs", "parameters", "binary_data_size", "binary_data",
     "binary_data_output", "image", "text", "text_pair", "logits", "chat", "stop", "stream", "temperature", "top_p",
     "top_k", "min_p", "repetition_penalty", "seed", "\0", "\ud800", *TYPES]
)  # fmt: skip
NUMBERS = st.sampled_from([0, 1, -1, 255, 256, 2**31, 2**63, 2**64, 10**40, 0.5, 1e39, float("nan"), float("inf")])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn, base: dict[str, Any]) -> tuple[bytes, int | None]:
    """(body, bytes of JSON or None): `base` with values, keys or bytes that are others, and a binary tail."""
    request = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 3))):
        at: Any = request
        while isinstance(at, (dict, list)) and at:
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], (dict, list)) or not at[key] or draw(st.booleans()):
                at[key] = draw(VALUES)
                break
            at = at[key]
        if isinstance(at, dict):
            at[draw(WORDS)] = draw(VALUES)
    body = json.dumps(request).encode("utf-8", "surrogatepass")
    length = draw(st.none() | st.just(len(body)) | st.integers(0, len(body) + 9))
    if draw(st.integers(0, 5)) == 0:
        start, end = sorted(draw(st.tuples(st.integers(0, len(body)), st.integers(0, len(body)))))
        body = body[:start] + draw(st.binary(max_size=6)) + body[end:]
    return body + (draw(st.binary(max_size=60)) if length is not None else b""), length


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TestClient]]:
    """A client of each kind of model; what an application raises, it raises."""
    folder = tmp_path_factory.mktemp("served")
    columns = {"image": np.zeros((7, 4, 4, 3), np.uint8), "label": np.zeros(7, np.int64)}
    folders = {
        "image": write_image_bundle(folder / "image", columns),
        "text": write_text_bundle(folder / "text", "feature-extraction", {"text": ["the", "cat"]}),
        "decoder": write_decoder_bundle(folder / "decoder"),
    }
    bundles = {kind: runtime.open_bundle(path) for kind, path in folders.items()}
    services = [Service(ServedModel(bundle, 64), ServingLimits(max_body=2**16)) for bundle in bundles.values()]
    yield {kind: TestClient(service.app) for kind, service in zip(bundles, services, strict=True)}
    for service, bundle in zip(services, bundles.values(), strict=True):
        service.close()
        bundle.close()


def assert_answered(client: TestClient, path: str, body: bytes, length: int | None) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    response = client.post(path, content=body, headers=headers)
    assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, response.text
    content = response.content[: int(response.headers.get("Inference-Header-Content-Length", len(response.content)))]
    answer = json.loads(content.decode("ascii"), parse_constant=pytest.fail)
    assert ("error" in answer) == (response.status_code >= 400)


@pytest.mark.parametrize("path", corpus("requests"), ids=lambda path: path.name)
def test_what_broke_once_is_answered(path: Path, clients: dict[str, TestClient]) -> None:
    """Files: KIND-NAME.json, the body of a request to a model of that kind."""
    kind = path.name.partition("-")[0]
    verb = "generate" if kind == "decoder" else "infer"
    assert_done_or_refused(
        "requests (corpus)", lambda: assert_answered(clients[kind], f"/v2/models/tiny/{verb}", path.read_bytes(), None)
    )


@pytest.mark.parametrize("kind", BASES)
@fuzz(share=0.05, quick=15)
@given(data=st.data())
def test_any_request_is_answered(clients: dict[str, TestClient], kind: str, data: st.DataObject) -> None:
    body, length = data.draw(requests(BASES[kind]))
    verb = "generate" if kind == "decoder" else "infer"
    assert_done_or_refused("requests", lambda: assert_answered(clients[kind], f"/v2/models/tiny/{verb}", body, length))
