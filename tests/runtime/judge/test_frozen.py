"""What a bundle says of its float model is checked: none that was exchanged in part is judged PASS."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanges import FAST, ONE, assert_no_exchange_passes, sign_whole, silence_candidate
from shortcuts import few_rounds, without_processes
from tiny_bundles import load_tiny

from runtime.bundle.detections import Detections, HeadOutputs
from runtime.bundle.manifest import Gate, Judgement
from runtime.encode.preprocess import LanguagePreprocess, TensorPreprocess, TextPreprocess
from runtime.errors import BundleError
from runtime.judge.frozen import check_outputs, find_far_rows
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, write_bundle

tiny = load_tiny()
RNG = np.random.default_rng(1)
IMAGES = RNG.integers(0, 256, (60, 4, 4, 3), np.uint8)
WORDS = ("the", "cat", "sat", "dog", "ran", "far", "on", "mat")
TEXTS = [
    f"{first} {second} {WORDS[(3 * number) % 8]} dog cat"
    for number, (first, second) in enumerate((first, second) for first in WORDS for second in WORDS)
][:60]
"""No two of them alike: copies of a sample count once."""


def _write(root: Path, task: str) -> None:
    """Write a bundle of a task whose candidate is its baseline."""
    detections = None
    labels: Any = RNG.integers(0, 5, 60)
    if task in ("image-classification", "generic", "regression"):
        tiny.image_model(root / "baseline/model.onnx", seed=1)
        spec: Any = tiny.IMAGE if task == "image-classification" else TensorPreprocess()
        columns: dict[str, Any] = {"image": IMAGES, "label": labels}
        if task != "image-classification":
            columns = {"x": RNG.normal(size=(60, 3, 4, 4)).astype(np.float32)}
        if task == "regression":
            columns["label"] = RNG.normal(size=(60, 5))
    elif task == "semantic-segmentation":
        tiny.segment_model(root / "baseline/model.onnx", 1)
        spec, columns = tiny.IMAGE, {"image": IMAGES, "label": RNG.integers(0, 5, (60, 4, 4), np.uint8)}
    elif task == "object-detection":
        tiny.box_model(root / "baseline/model.onnx", 1)
        labels = np.zeros((60, 1, 7))
        labels[:, 0, 3:5] = np.arange(1, 61)[:, None] / 15
        spec, columns = tiny.IMAGE, {"image": IMAGES, "label": labels}
        heads = HeadOutputs(rows="rows")
        detections = Detections(boxes="xyxy", normalized=False, scores="none", suppress="none", outputs=heads, most=3)
    elif task == "question-answering":
        tiny.span_model(root / "baseline/model.onnx", 1)
        questions, answers = TEXTS[1:] + TEXTS[:1], [text.split()[0] for text in TEXTS]
        spec, columns = TextPreprocess(max_length=16), {"question": questions, "context": TEXTS, "label": answers}
    else:
        kind = "hidden" if task == "feature-extraction" else "logits"
        tiny.text_model(root / "baseline/model.onnx", kind, seed=1)
        spec, columns = TextPreprocess(max_length=16), {"text": TEXTS, "label": labels}
        if task == "feature-extraction":
            columns |= {"text_pair": TEXTS[1:] + TEXTS[:1], "label": RNG.normal(size=60)}
        elif task == "text-multi-label-classification":
            columns["label"] = RNG.integers(0, 2, (60, 6), np.uint8)
    (root / "model").mkdir()
    shutil.copy(root / "baseline/model.onnx", root / "model/model.onnx")
    if isinstance(spec, TextPreprocess):
        tiny.write_tokenizer(root / "model")
    manifest = tiny.stage(root, task, spec, columns, detections)
    sign_whole(root, manifest)


def _write_decoder(root: Path) -> None:
    for name in ("model", "baseline"):
        tiny.decoder_model(root / name / "model.onnx", layers=1)
    tiny.write_byte_tokenizer(root / "model", {})
    spec = LanguagePreprocess(max_length=12, bos_token_id=256)
    manifest = tiny.stage(
        root, "text-generation", spec, {"text": [text[i:] for i in (0, 1, 2) for text in tiny.STORIES]}
    )
    artifacts = tuple(replace(artifact, cache=tiny.kv_cache(layers=1)) for artifact in manifest.artifacts)
    generation = tiny.Generation(tiny.CONTEXT, tiny.VOCAB, 256, (257,))
    sign_whole(root, replace(manifest, class_names=(), artifacts=artifacts, generation=generation))


TASKS = (
    *("image-classification", "text-classification", "text-multi-label-classification", "feature-extraction"),
    *("semantic-segmentation", "object-detection", "question-answering", "regression", "generic", "text-generation"),
)
"""The others are built by a run in tests/e2e: test_tags, test_sounds, test_image_text_pairs, test_sequences."""


@pytest.mark.parametrize("task", TASKS)
def test_no_bundle_of_which_a_part_was_exchanged_passes(task: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    if task == "text-generation":
        _write_decoder(whole)
    else:
        _write(whole, task)
    assert_no_exchange_passes(whole, tmp_path)


def test_a_single_row_that_was_exchanged_is_named() -> None:
    frozen = {"logits": RNG.normal(size=(200, 10)).astype(np.float32)}
    outputs = {"logits": frozen["logits"] * np.float32(1 + 1e-5)}
    check_outputs(Path("b"), "image-classification", outputs, frozen)
    for wrong in (frozen["logits"][17], np.full(10, np.nan)):
        outputs["logits"][42] = wrong
        with pytest.raises(BundleError, match="'logits' differs in 1 of 200 rows, the first is row 42"):
            check_outputs(Path("b"), "image-classification", outputs, frozen)
    with pytest.raises(BundleError, match=r"shape \[200, 9\] here, frozen is \[200, 10\]"):
        check_outputs(Path("b"), "image-classification", {"logits": outputs["logits"][:, 1:]}, frozen)


def test_what_differs_by_rounding_is_near_whatever_the_offset() -> None:
    rows = RNG.normal(size=(50, 8)) + 100
    assert not find_far_rows(rows * (1 + 1e-6), rows).any()
    assert find_far_rows(np.roll(rows, 1, axis=0), rows).all()


def test_a_bundle_of_before_the_record_is_judged_and_says_so(image_bundle: Path) -> None:
    with without_processes(), few_rounds():
        report = validate(image_bundle, ONE)
    assert any("recorded no metrics of the float model: the labels are not checked" in note for note in report.advice)


def test_a_report_says_where_a_model_answers_nothing(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    columns = {"image": IMAGES, "label": RNG.permutation(np.repeat(np.arange(5), 12))}
    shutil.rmtree(image_bundle / "evaluation")
    shutil.copy(image_bundle / "baseline/model.onnx", image_bundle / "model/model.onnx")
    silence_candidate(image_bundle)
    silent = tiny.stage(image_bundle, manifest.task, tiny.IMAGE, columns)
    write_bundle(image_bundle, replace(silent, judgement=Judgement((Gate("size_ratio", min=0.5),), benchmark=FAST)))
    with without_processes(), few_rounds():
        report = validate(image_bundle, ONE)
    assert report.verdict == "pass"
    assert (
        report.advice[0].startswith("The float model's top1 is 0.") and "always the commonest class" in report.advice[0]
    )
    assert report.advice[1] == (
        "The candidate gives the same answer to all 60 samples: no gate on nearness says anything."
    )
