"""Running samples: every batch size and order gives the same outputs, and they are what a plain loop gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

import runtime
from runtime.encode.preprocess import ImagePreprocess, TensorPreprocess, TextPreprocess, make_preprocessor
from runtime.errors import BundleError, UsageError
from runtime.tasks.base import classify
from runtime.tasks.manifest import verify
from runtime.tasks.predict import bundle_preprocessor, encoding_views, run_samples

TEXTS = ["the cat sat on the mat", "dog", "", "the dog ran far", "dog", "cat", "the mat", "a b c d e f g h i j"]
PAIRS = ["dog ran", "dog", "cat", "", "dog", "the cat sat on the mat", "far", "a"]


def run(
    tiny: Any, path: Path, spec: Any, task: str, columns: dict[str, Any], batch_size: int = 32
) -> dict[str, np.ndarray]:
    session = tiny.open_onnx(path)
    return run_samples(session, make_preprocessor(spec, session.inputs, path.parent), task, columns, batch_size)


@pytest.fixture
def text_folder(tmp_path: Path, tiny: Any) -> Path:
    folder: Path = tiny.write_tokenizer(tmp_path / "text")
    tiny.text_model(folder / "hidden.onnx", "hidden")
    tiny.text_model(folder / "logits.onnx", "logits")
    return folder


def test_images_in_any_batch_size(tmp_path: Path, tiny: Any, image_columns: dict[str, np.ndarray]) -> None:
    path = tiny.image_model(tmp_path / "m.onnx")
    one_by_one = run(tiny, path, tiny.image_spec, "image-classification", image_columns, 1)["logits"]
    assert one_by_one.shape == (7, 5)
    for batch_size in (2, 7, 100):
        out = run(tiny, path, tiny.image_spec, "image-classification", image_columns, batch_size)["logits"]
        np.testing.assert_allclose(out, one_by_one, rtol=1e-6, atol=1e-6)


def test_fixed_batch_of_the_model_is_kept(tmp_path: Path, tiny: Any, image_columns: dict[str, np.ndarray]) -> None:
    free, fixed = tiny.image_model(tmp_path / "a.onnx"), tiny.image_model(tmp_path / "b.onnx", batch=4)
    expected = run(tiny, free, tiny.image_spec, "image-classification", image_columns)["logits"]
    out = run(tiny, fixed, tiny.image_spec, "image-classification", image_columns)["logits"]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_a_manifest_with_an_input_of_no_type_is_refused(image_bundle: Path) -> None:
    manifest = verify(image_bundle)
    (spec,) = manifest.artifact("candidate").inputs
    with pytest.raises(BundleError, match="the input 'x' is onnx, which numpy does not have"):
        bundle_preprocessor(image_bundle, manifest, (replace(spec, dtype="onnx"),))


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_embeddings_are_each_texts_own(text_folder: Path, tiny: Any, batch_size: int) -> None:
    columns = {"text": TEXTS, "text_pair": PAIRS, "label": np.zeros(8)}
    out = run(tiny, text_folder / "hidden.onnx", TextPreprocess(), "feature-extraction", columns, batch_size)[
        "embeddings"
    ]
    assert out.shape == (8, 2, 6)
    session = tiny.open_onnx(text_folder / "hidden.onnx")
    table = session.run(
        {
            name: np.eye(1, 12, dtype=np.int64) * 0 + (np.arange(12) if name == "input_ids" else 1)
            for name in ("input_ids", "attention_mask")
        }
    )
    vectors = table["hidden"][0].astype(float)  # [words, 6]
    for column, texts in enumerate((TEXTS, PAIRS)):
        for i, text in enumerate(texts):
            words = [2, *(tiny.words.index(w) if w in tiny.words else 1 for w in text.split()), 3]
            mean = sum(vectors[w] for w in words) / len(words)
            np.testing.assert_allclose(out[i, column], mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6)


class Recorder:
    """A session that also keeps what it was given."""

    def __init__(self, session: Any) -> None:
        self.session, self.inputs, self.outputs = session, session.inputs, session.outputs
        self.calls: list[Any] = []

    def run(self, feeds: dict[str, np.ndarray]) -> Any:
        self.calls.append(feeds["input_ids"].tolist())
        return self.session.run(feeds)

    def close(self) -> None:
        self.session.close()


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_the_model_sees_the_same_batches_whatever_the_order(text_folder: Path, tiny: Any, task: str) -> None:
    path = text_folder / ("hidden.onnx" if task == "feature-extraction" else "logits.onnx")
    columns = {"text": TEXTS, "text_pair": PAIRS}
    expected = None
    for order in (np.arange(8), *map(np.random.default_rng(0).permutation, [8] * 5)):
        session = Recorder(tiny.open_onnx(path))
        preprocessor = make_preprocessor(TextPreprocess(), session.inputs, text_folder)
        shuffled = {name: [column[i] for i in order] for name, column in columns.items()}
        (out,) = run_samples(session, preprocessor, task, shuffled, 2).values()
        expected = expected or (out, session.calls)
        np.testing.assert_array_equal(out, expected[0][order])
        assert session.calls == expected[1]
    if task == "feature-extraction":
        lengths = [len(call[0]) for call in session.calls[:4]]
        assert lengths == sorted(lengths, reverse=True)


def test_pair_is_joint_for_classification_and_apart_for_embeddings(text_folder: Path, tiny: Any) -> None:
    columns = {"text": ["the cat"], "text_pair": ["dog"]}
    assert encoding_views("text-classification", {**columns, "label": [0]}) == [columns]
    assert encoding_views("feature-extraction", columns) == [{"text": ["the cat"]}, {"text": ["dog"]}]
    joint = run(tiny, text_folder / "logits.onnx", TextPreprocess(), "text-classification", columns)["logits"]
    first, second = run(
        tiny, text_folder / "logits.onnx", TextPreprocess(), "text-classification", {"text": ["the cat", "dog"]}
    )["logits"]
    table = onnx.numpy_helper.to_array(onnx.load(text_folder / "logits.onnx").graph.initializer[0])
    np.testing.assert_allclose(
        joint[0], first + second - table[2], atol=1e-5
    )  # the model sums tokens; one [CLS] for both


def generic_model(tmp_path: Path, tiny: Any) -> Path:
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 2])
    b = helper.make_tensor_value_info("b", TensorProto.FLOAT, ["n", 2])
    shapes: dict[str, list[str | int | None]] = {"total": ["n", 2], "all": []}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Add", ["a", "b"], ["total"]),
        helper.make_node("ReduceSum", ["total"], ["all"], keepdims=0),
    ]
    tiny.save(tmp_path / "sum.onnx", nodes, [a, b], outputs, {})
    path: Path = tiny.save(tmp_path / "add.onnx", nodes[:1], [a, b], outputs[:1], {})
    return path


def test_generic_models_give_their_outputs(tmp_path: Path, tiny: Any) -> None:
    path = generic_model(tmp_path, tiny)
    a, b = np.random.default_rng(0).normal(size=(2, 5, 2))
    out = run(tiny, path, TensorPreprocess(), "generic", {"a": a, "b": b, "label": np.zeros(5)}, 2)
    np.testing.assert_allclose(out["total"], a + b, rtol=1e-5)
    with pytest.raises(
        BundleError, match=r"output 'all' has shape \(\) for a batch of 2: it is not one value for each sample"
    ):
        run(tiny, path.with_name("sum.onnx"), TensorPreprocess(), "generic", {"a": a, "b": b}, 2)


def test_what_does_not_fit(tmp_path: Path, text_folder: Path, tiny: Any, image_columns: dict[str, np.ndarray]) -> None:
    image = tiny.image_model(tmp_path / "m.onnx")
    hidden, texts = text_folder / "hidden.onnx", {"text": TEXTS}
    for call, kind, message in (
        (
            (image, tiny.image_spec, "chat", image_columns),
            UsageError,
            "unknown task 'chat'; known: image-classification",
        ),
        ((image, tiny.image_spec, "image-classification", image_columns, 0), UsageError, "batch_size is 0, below 1"),
        (
            (image, tiny.image_spec, "image-classification", {"image": []}),
            UsageError,
            "no samples: the columns image are empty",
        ),
        (
            (image, tiny.image_spec, "image-classification", texts),
            UsageError,
            "column 'image' is missing; the samples have: text",
        ),
        ((image, tiny.image_spec, "feature-extraction", texts), UsageError, "needs preprocess kind: text, not image"),
        (
            (hidden, TextPreprocess(), "feature-extraction", image_columns),
            UsageError,
            "feature-extraction reads the column 'text'",
        ),
        (
            (hidden, TextPreprocess(), "text-classification", image_columns),
            UsageError,
            "column 'text' is missing; the samples have",
        ),
        (
            (hidden, TextPreprocess(), "text-classification", texts),
            BundleError,
            r"this model: hidden \(7, 12, 6\); call that output 'logits'",
        ),
        (
            (hidden, TextPreprocess(pooling="none"), "feature-extraction", texts),
            BundleError,
            r"needs an output \[B, D\]; this model has hidden",
        ),
        (
            (hidden, TextPreprocess(), "generic", texts, 3),
            UsageError,
            "output 'hidden' differs in shape from batch to batch",
        ),
    ):
        with pytest.raises(kind, match=message):
            run(tiny, *call)


def test_classify() -> None:
    logits = np.array([[0, 1000, 0], [np.log(3), 0, 0]], np.float32)
    assert classify(logits, ["a", "b", "c"])[0] == {"label": "b", "score": 1.0}
    second = classify(logits, [])[1]
    assert second["label"] == 0
    assert second["score"] == pytest.approx(3 / 5)


# the open bundle


def test_bundle_predicts_what_users_have(
    image_bundle: Path, image_columns: dict[str, np.ndarray], tmp_path: Path
) -> None:
    images = image_columns["image"]
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(7)]
    with runtime.open_bundle(image_bundle) as bundle:
        expected = bundle.predict(image_columns)
        for given in (images, list(images), paths, [str(p) for p in paths], [Image.open(p) for p in paths]):
            out = bundle.predict(given)
            np.testing.assert_array_equal(out["logits"], expected["logits"])
        (tmp_path / "r.jsonl").write_text("".join(f'{{"image": "{i}.png", "id": {i}}}\n' for i in range(7)))
        for given in (tmp_path, f"imagefolder:{tmp_path}", tmp_path / "r.jsonl", str(tmp_path / "r.jsonl")):
            np.testing.assert_array_equal(bundle.predict(given)["logits"], expected["logits"])
        (tmp_path / "empty").mkdir()
        (tmp_path / "odd.jsonl").write_text('{"picture": "0.png"}\n')
        for given, message in (
            (tmp_path / "empty", r"empty: holds no image files \(\.png"),
            ("imagefolder:nowhere", "imagefolder:nowhere: no such file or folder"),
            (tmp_path / "odd.jsonl", "sample 1 has no 'image'; it has: picture"),
        ):
            with pytest.raises(UsageError, match=message):
                bundle.predict(given)
        best = expected["logits"].argmax(axis=1)
        assert [p["label"] for p in expected.predictions] == ["abcde"[c] for c in best]
        assert expected["prediction"] is expected.predictions and list(expected) == ["logits"]
        for wrong in ("one.png", tmp_path / "one.png"):
            with pytest.raises(UsageError, match=r"give a list of samples; for a single one: \[sample\]"):
                bundle.predict(wrong)
        with pytest.raises(UsageError, match="image 0: expected a uint8 array"):
            bundle.predict([3])
    with pytest.raises(UsageError, match="the session is closed"):
        bundle.predict(images)


def test_bundle_predicts_texts_and_pairs(make_text_bundle: Callable[..., Path]) -> None:
    root = make_text_bundle("text-classification", {"text": TEXTS, "text_pair": PAIRS, "label": np.arange(8) % 6})
    with runtime.open_bundle(str(root)) as bundle:
        by_column = bundle.predict({"text": TEXTS, "text_pair": PAIRS})
        np.testing.assert_array_equal(
            bundle.predict(list(zip(TEXTS, PAIRS, strict=True)))["logits"], by_column["logits"]
        )
        assert not np.allclose(bundle.predict(TEXTS)["logits"], by_column["logits"])
        assert "top1" in bundle.evaluate()


def test_bundle_of_embeddings(make_text_bundle: Callable[..., Path]) -> None:
    root = make_text_bundle("feature-extraction", {"text": TEXTS})
    with runtime.open_bundle(root) as bundle:
        out = bundle.predict(TEXTS)
        assert out.keys() == {"embeddings"}
        np.testing.assert_allclose(np.linalg.norm(out["embeddings"], axis=2), 1, rtol=1e-6)
        np.testing.assert_array_equal(out["embeddings"][1], out["embeddings"][4])  # the same text twice


def test_evaluation_of_a_model_against_itself(image_bundle: Path) -> None:
    baseline = (image_bundle / "baseline/model.onnx").read_bytes()
    with runtime.open_bundle(image_bundle) as bundle:
        assert bundle.evaluate()["agreement"] < 1
    (image_bundle / "model/model.onnx").write_bytes(baseline)
    with runtime.open_bundle(image_bundle, verify=False) as bundle:
        assert bundle.evaluate()["agreement"] == 1
        assert bundle.evaluate()["kl"] == 0


def test_a_damaged_bundle_does_not_open(image_bundle: Path) -> None:
    verify(image_bundle)
    path = image_bundle / "model/model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(BundleError, match=r"model/model\.onnx: its sha256 is not the manifest's"):
        runtime.open_bundle(image_bundle)
    with pytest.raises(UsageError, match="unknown backend 'tpu'"):
        runtime.open_bundle(image_bundle, backend="tpu")


def test_images_of_any_size_through_the_whole_path(tmp_path: Path, tiny: Any) -> None:
    path = tiny.image_model(tmp_path / "m.onnx")
    images = [np.full((h, w, 3), 60, np.uint8) for h, w in ((9, 5), (4, 4), (6, 20))]
    out = run(tiny, path, ImagePreprocess(resize=4, crop=(4, 4)), "image-classification", {"image": images})["logits"]
    np.testing.assert_allclose(out, out[:1].repeat(3, axis=0), rtol=1e-6)
    with pytest.raises(UsageError, match="differ in size after preprocessing"):
        run(tiny, path, ImagePreprocess(), "image-classification", {"image": images})


def test_a_backend_that_gives_nothing_is_an_error(tmp_path: Path, tiny: Any, image_columns: dict[str, Any]) -> None:
    session = tiny.open_onnx(tiny.image_model(tmp_path / "m.onnx"))
    session.run = lambda feeds: {"logits": np.zeros((0, 5), np.float32)}
    preprocessor = make_preprocessor(tiny.image_spec, session.inputs, tmp_path)
    with pytest.raises(BundleError, match=r"output 'logits' has shape \(0, 5\) for a batch of 7: it is not one value"):
        run_samples(session, preprocessor, "image-classification", image_columns, 32)
