"""A bundle as a Triton model repository: by Triton's own schema and rules, and what its two ends compute.

A real server is asked by `benchmarks/triton_server.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install 'tritonclient[grpc]'")
from triton_rules import find_problems, read_repository

import runtime
from compress.deploy.triton import Serving, write_repository
from compress.errors import ExportError
from runtime.backends import BACKENDS
from runtime.errors import UsageError
from runtime.serving.model import Answers, Encoder


def run_ends(repository: Path, name: str, samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the ensemble computes: its ends, as the Python backend calls them, around the model in ONNX Runtime."""
    ends, maps = {}, {}
    for step in read_repository(repository)[name].ensemble_scheduling.step:
        ends[step.model_name] = repository / step.model_name
        maps[step.model_name] = step
    encode, model, answer = ends
    known = dict(samples)
    session = BACKENDS["onnxruntime-cpu"].open(ends[model] / "1" / "model.onnx", 1, {})
    calls = {
        encode: Encoder(ends[encode] / "1" / "bundle").respond,
        model: session.run,
        answer: Answers(ends[answer] / "1" / "bundle").respond,
    }
    for part, respond in calls.items():
        made = respond({key: known[value] for key, value in maps[part].input_map.items()})
        known |= {value: made[key] for key, value in maps[part].output_map.items()}
    return known


def test_images_go_through_an_ensemble(
    image_bundle: Path, image_columns: dict[str, np.ndarray], tmp_path: Path
) -> None:
    folders = write_repository(image_bundle, tmp_path / "models", Serving(max_batch_size=8, instances=2))
    configs, name = read_repository(tmp_path / "models"), folders[0].name
    assert find_problems(tmp_path / "models", configs) == []
    assert sorted(configs) == sorted([name, f"{name}_encode", f"{name}_model", f"{name}_answer"])
    config = configs[f"{name}_model"]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500 and config.max_batch_size == 8
    assert [(group.count, group.kind) for group in config.instance_group] == [(2, 2)]  # 2: KIND_CPU
    answers = run_ends(tmp_path / "models", name, {"image": image_columns["image"]})
    with runtime.open_bundle(image_bundle) as bundle:
        expected = bundle.predict(image_columns["image"])
    assert np.allclose(answers["logits"], expected["logits"], atol=1e-6)
    assert answers["label"].ravel().tolist() == [str(row["label"]) for row in expected.predictions]
    assert np.allclose(answers["score"].ravel(), [row["score"] for row in expected.predictions])


@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_texts_go_through_an_ensemble(task: str, make_text_bundle: Callable[..., Path], tmp_path: Path) -> None:
    texts = ["the cat sat", "dog", "far far dog ran"]
    columns = {"text": texts, "label": [0, 1, 2]} if task == "text-classification" else {"text": texts}
    folder = make_text_bundle(task, columns, **({} if "label" in columns else {"pooling": "mean"}))
    name = write_repository(folder, tmp_path / "models", Serving())[0].name
    assert find_problems(tmp_path / "models", read_repository(tmp_path / "models")) == []
    sent = np.array([text.encode() for text in texts], np.object_).reshape(-1, 1)
    answers = run_ends(tmp_path / "models", name, {"text": sent})
    with runtime.open_bundle(folder) as bundle:
        expected = bundle.predict(texts)
    if task == "text-classification":
        assert answers["label"].ravel().tolist() == [str(row["label"]) for row in expected.predictions]
        assert np.allclose(answers["logits"], expected["logits"], atol=1e-6)
    else:
        assert np.allclose(answers["embedding"], expected["embeddings"][:, 0], atol=1e-6)


def test_a_text_that_is_none_is_answered_with_the_reason(make_text_bundle: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_text_bundle("text-classification", {"text": ["a", "b"], "label": [0, 1]})
    folders = write_repository(folder, tmp_path / "models", Serving())
    with pytest.raises(UsageError, match="text: not UTF-8"):
        Encoder(folders[1] / "1" / "bundle").respond({"text": np.array([[b"\xff"]], np.object_)})


def break_steps(change: Callable[[Any], None], configs: dict[str, Any]) -> dict[str, Any]:
    """The configurations with the first ensemble's steps changed."""
    broken = copy.deepcopy(configs)
    change(next(config for config in broken.values() if config.platform == "ensemble"))
    return broken


def write_twice(ensemble: Any) -> None:
    _, model, answer = ensemble.ensemble_scheduling.step
    model.output_map["logits"] = "logits"
    answer.input_map["logits"] = "logits"


def starve(ensemble: Any) -> None:
    del ensemble.ensemble_scheduling.step[1].input_map["x"]


def rename(ensemble: Any) -> None:
    ensemble.ensemble_scheduling.step[2].input_map["logits"] = "nobody"


def leave_unwritten(ensemble: Any) -> None:
    del ensemble.ensemble_scheduling.step[2].output_map["label"]


def widen(ensemble: Any) -> None:
    ensemble.max_batch_size = 1000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (write_twice, "ensemble tensor 'logits' can appear in an output map only once"),
        (starve, "input x of tiny_model is not mapped to any ensemble tensors"),
        (rename, "ensemble tensor 'nobody' is unused"),
        (leave_unwritten, "output 'label' is not written"),
        (widen, "tiny_model only allows maximum batch size to be 64"),
    ],
)
def test_the_rules_refuse_what_triton_refuses(
    change: Callable[[Any], None], problem: str, image_bundle: Path, tmp_path: Path
) -> None:
    write_repository(image_bundle, tmp_path / "models", Serving())
    configs = read_repository(tmp_path / "models")
    assert problem in find_problems(tmp_path / "models", break_steps(change, configs))


def test_the_python_backends_stub_gets_a_numpy_that_it_reads(image_bundle: Path, tmp_path: Path) -> None:
    folders = write_repository(image_bundle, tmp_path / "models", Serving())
    lines = (folders[1] / "1" / "bundle" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("numpy")] == ["numpy==1.26.4"]
    assert lines[0].startswith("# ") and any(line.startswith("pillow==") for line in lines)


def test_the_two_ends_need_no_build_side(image_bundle: Path, tmp_path: Path) -> None:
    folders = write_repository(image_bundle, tmp_path / "models", Serving())
    code = folders[1] / "1" / "bundle" / "runtime"
    assert (code / "serving/model.py").is_file() and not list(code.rglob("*.pyc"))
    assert not list(folders[1].rglob("*.onnx"))


def test_decoders_go_elsewhere(make_decoder_bundle: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a decoder with a key-value cache is served by onnxruntime-genai or vLLM"):
        write_repository(make_decoder_bundle(), tmp_path / "models", Serving())
    assert not (tmp_path / "models").exists()


def test_maps_go_through_an_ensemble(tiny: Any, tmp_path: Path) -> None:
    root = tiny.segment_bundle(tmp_path / "bundle")
    name = write_repository(root, tmp_path / "models", Serving())[0].name
    assert find_problems(tmp_path / "models", read_repository(tmp_path / "models")) == []
    images = np.random.default_rng(0).integers(0, 256, (2, 7, 5, 3), np.uint8)
    answers = run_ends(tmp_path / "models", name, {"image": images})
    with runtime.open_bundle(root) as bundle:
        assert np.array_equal(answers["classes"], bundle.predict(images)["classes"])


def test_windows_are_no_rows_of_an_ensemble(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a long text is several rows of the model"):
        write_repository(tiny.span_bundle(tmp_path / "bundle"), tmp_path / "models", Serving())


def test_boxes_go_through_an_ensemble(tiny: Any, tmp_path: Path) -> None:
    root = tiny.box_bundle(tmp_path / "bundle")
    name = write_repository(root, tmp_path / "models", Serving())[0].name
    assert find_problems(tmp_path / "models", read_repository(tmp_path / "models")) == []
    images = np.random.default_rng(0).integers(0, 256, (2, 7, 5, 3), np.uint8)
    answers = run_ends(tmp_path / "models", name, {"image": images})
    with runtime.open_bundle(root) as bundle:
        assert np.array_equal(answers["box"], bundle.predict(images)["boxes"])
