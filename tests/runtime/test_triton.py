"""A bundle as a Triton model repository: read with Triton's own schema, run as Triton would, answers as `predict`'s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'tritonclient[grpc]'")
from triton_server import Server

import runtime
from compress.deploy.triton import Serving, write_repository
from compress.errors import ExportError


def test_images_go_through_an_ensemble(
    image_bundle: Path, image_columns: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folders = write_repository(image_bundle, tmp_path / "models", Serving(max_batch_size=8, instances=2))
    server = Server(tmp_path / "models")
    name = folders[0].name
    assert sorted(server.configs) == sorted([name, f"{name}_encode", f"{name}_model", f"{name}_answer"])
    config = server.configs[f"{name}_model"]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500 and config.max_batch_size == 8
    assert [(one.count, one.kind) for one in config.instance_group] == [(2, 2)]  # 2: KIND_CPU
    images = image_columns["image"]
    found = server.infer(name, {"image": images})
    with runtime.open_bundle(image_bundle) as bundle:
        expected = bundle.predict(images)
    assert np.allclose(found["logits"], expected["logits"], atol=1e-6)
    assert found["label"].ravel().tolist() == [one["label"] for one in expected["prediction"]]
    assert np.allclose(found["score"].ravel(), [one["score"] for one in expected["prediction"]])


def test_texts_become_embeddings(make_text_bundle: Callable[..., Path], tmp_path: Path) -> None:
    texts = ["a b c", "d", "b c d e"]
    folder = make_text_bundle("feature-extraction", {"text": texts, "text_pair": texts}, pooling="mean")
    name = write_repository(folder, tmp_path / "models", Serving())[0].name
    sent = np.array([text.encode() for text in texts], np.object_).reshape(-1, 1)
    found = Server(tmp_path / "models").infer(name, {"text": sent})
    with runtime.open_bundle(folder) as bundle:
        expected = bundle.predict(texts)["embeddings"][:, 0]
    assert np.allclose(found["embedding"], expected, atol=1e-6)


def test_a_text_that_is_none_is_answered_with_the_reason(make_text_bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_text_bundle("text-classification", {"text": ["a", "b"], "label": [0, 1]})
    server = Server(tmp_path / "models") if write_repository(folder, tmp_path / "models", Serving()) else None
    assert server is not None
    name = next(name for name, config in server.configs.items() if config.platform == "ensemble")
    with pytest.raises(RuntimeError, match="UsageError: text: not UTF-8"):
        server.infer(name, {"text": np.array([[b"\xff"]], np.object_)})


def test_the_two_ends_need_no_build_side(image_bundle: Path, tmp_path: Path) -> None:
    folders = write_repository(image_bundle, tmp_path / "models", Serving())
    code = folders[1] / "bundle" / "runtime"
    assert (code / "serving.py").is_file() and not list(code.rglob("*.pyc"))
    assert not list(folders[1].rglob("*.onnx"))


def test_decoders_go_elsewhere(make_decoder_bundle: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a decoder with a key-value cache is served by onnxruntime-genai or vLLM"):
        write_repository(make_decoder_bundle(), tmp_path / "models", Serving())
    assert not (tmp_path / "models").exists()
