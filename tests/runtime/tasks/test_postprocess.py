"""Chosen answers: the likeliest few, those that are likely enough; predicted, judged and served alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.__main__ import main
from runtime.bundle.format import Gate, Judgement, Postprocess
from runtime.errors import BundleError, UsageError
from runtime.serving.protocol import ServedModel
from runtime.tasks import TASKS, find_task
from runtime.tasks.base import BatchFacts, mark_chosen, rank_classes, softmax
from runtime.tasks.manifest import write_bundle
from runtime.tasks.metrics import METRICS

LOGITS = np.array([[3.0, 1.0, 2.0], [0.1, 0.0, 0.0], [0.0, 5.0, 5.0]], np.float32)
IMAGE = find_task("image-classification")


def read(how: Postprocess | None) -> dict[str, np.ndarray]:
    return IMAGE.read_batch({"logits": LOGITS}, BatchFacts(3, postprocess=how))


def test_the_likeliest_few_are_in_order_and_equal_ones_by_number() -> None:
    assert read(Postprocess(top_k=2))["top"].tolist() == [[0, 2], [0, 1], [1, 2]]
    assert rank_classes(LOGITS, 3).tolist() == np.argsort(-LOGITS, axis=1, kind="stable").tolist()


def test_an_unlikely_answer_is_none() -> None:
    outputs = read(Postprocess(reject_below=0.5))
    assert outputs["answered"].tolist() == (softmax(LOGITS).max(axis=1) >= 0.5).tolist() == [True, False, False]
    labels = [one["label"] for one in IMAGE.predict(outputs, ("a", "b", "c")) or []]
    assert labels == ["a", None, None]
    assert IMAGE.answers(outputs, ("a", "b", "c"))["label"].ravel().tolist() == ["a", "", ""]


def test_several_labels_are_those_of_at_least_the_threshold() -> None:
    scores = np.array([[0.9, 0.4, 0.6], [0.1, 0.2, 0.3]])
    assert mark_chosen(scores, None).tolist() == [[True, False, True], [False] * 3]
    assert mark_chosen(scores, Postprocess(threshold=0.3)).tolist() == [[True] * 3, [False, False, True]]
    assert mark_chosen(scores, Postprocess(threshold=0.3, top_k=1)).tolist() == [
        [True, False, False],
        [False, False, True],
    ]


def test_a_threshold_decides_which_labels_are_given_and_judged() -> None:
    task, logits = find_task("multi-label-classification"), np.array([[2.0, -0.5], [-3.0, -0.2]], np.float32)
    usual = task.read_batch({"logits": logits}, BatchFacts(2))
    low = task.read_batch({"logits": logits}, BatchFacts(2, postprocess=Postprocess(threshold=0.3)))
    labels = np.array([[1, 1], [0, 1]])
    assert [len(one) for one in task.predict(usual, ("a", "b")) or []] == [1, 0]
    assert [[answer["label"] for answer in one] for one in task.predict(low, ("a", "b")) or []] == [["a", "b"], ["b"]]
    assert METRICS["label_f1_micro"].compute(usual, labels) == pytest.approx(2 / 4)
    assert METRICS["label_f1_micro"].compute(low, labels) == 1.0
    assert METRICS["label_f1_micro_at_0.5"].compute(low, labels) == pytest.approx(2 / 4)
    assert METRICS["label_agreement"].compute(low, {"logits": -logits}) == 0.5
    with pytest.raises(
        UsageError, match=r"postprocess\.reject_below: multi-label-classification takes threshold, top_k"
    ):
        task.check_postprocess(Postprocess(reject_below=0.5))


def test_accuracy_is_of_the_answered_alone() -> None:
    labels = np.array([0, 1, 0])
    silent = read(Postprocess(reject_below=0.5))
    assert METRICS["coverage"].compute(silent, None) == pytest.approx(1 / 3)
    assert METRICS["accuracy_answered"].compute(silent, labels) == 1.0
    assert METRICS["accuracy_answered"].compute(read(Postprocess(top_k=2)), labels) == pytest.approx(2 / 3)
    never = {**silent, "answered": np.zeros(3, bool)}
    assert METRICS["accuracy_answered"].compute(never, labels) == 0.0, "who never answers is not right"


@pytest.mark.parametrize("task", [name for name in TASKS if not TASKS[name].postprocess_fields])
def test_a_task_that_chooses_nothing_takes_nothing(task: str) -> None:
    with pytest.raises(UsageError, match=rf"postprocess.top_k: {task} takes none of its fields"):
        find_task(task).check_postprocess(Postprocess(top_k=2))


def test_a_score_is_no_choice() -> None:
    with pytest.raises(UsageError, match="the model has one output"):
        find_task("text-classification").check_postprocess(Postprocess(reject_below=0.5), 1)


@pytest.fixture
def bundle(tmp_path: Path, tiny: Any) -> Path:
    root, rng = tmp_path / "bundle", np.random.default_rng(0)
    tiny.image_model(root / "model/model.onnx", seed=3)
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    columns = {"image": rng.integers(0, 256, (60, 4, 4, 3), np.uint8), "label": rng.integers(0, 5, 60)}
    manifest = replace(
        tiny.stage(root, "image-classification", tiny.image_spec, columns),
        postprocess=Postprocess(top_k=2, reject_below=0.3),
        judgement=Judgement(gates=(Gate("coverage", min=0.01),)),
    )
    write_bundle(root, manifest)
    return root


def test_it_is_served_as_it_is_predicted(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(1).integers(0, 256, (3, 4, 4, 3), np.uint8)
    with runtime.open_bundle(bundle) as opened:
        predicted = opened.predict(images)
        served = ServedModel(opened, 8)
        described = {spec["name"]: spec["shape"] for spec in served.metadata()["outputs"]}
        tensor = {"name": "image", "datatype": "UINT8", "shape": [3, 4, 4, 3], "data": images.ravel().tolist()}
        answer = json.loads(served.infer(json.dumps({"inputs": [tensor]}).encode()).header)
    outputs = {tensor["name"]: tensor for tensor in answer["outputs"]}
    assert described["label"] == [-1, 2] and described["answered"] == [-1, 1]
    assert outputs["label"]["shape"] == [3, 2]
    assert outputs["answered"]["data"] == predicted["answered"].tolist()
    assert set(outputs) == {"label", "score", "answered", "logits"}


def test_the_command_line_shows_a_rejected_sample_as_none(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(bundle.parent / "in.npz", image=np.zeros((2, 4, 4, 3), np.uint8))
    assert main(["predict", str(bundle), str(bundle.parent / "in.npz"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows[0]) == 2 and {"label", "score"} == rows[0][0].keys()


def test_a_manifest_whose_task_takes_no_such_field_is_refused(bundle: Path) -> None:
    from runtime.tasks.manifest import read_manifest

    manifest = read_manifest(bundle)
    with pytest.raises(BundleError, match=r"manifest\.postprocess.threshold: image-classification takes top_k"):
        write_bundle(bundle, replace(manifest, postprocess=Postprocess(threshold=0.5)))
