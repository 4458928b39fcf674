"""Whole answers: what is timed stage by stage, and that an answer so timed is the task's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from runtime.backends import open_artifact
from runtime.bundle.format import read_samples
from runtime.bundle.pixels import load_pixels
from runtime.encode.images import ImagePreprocess
from runtime.measure.answering import STAGES, Answerer, make_sent, time_answers
from runtime.tasks import find_task
from runtime.tasks.manifest import read_manifest
from runtime.tasks.predict import bundle_preprocessor, facts_of


def open_answerer(root: Path, stack: ExitStack) -> Answerer:
    manifest = read_manifest(root)
    session = open_artifact(root, manifest.artifact("candidate"), "onnxruntime-cpu", 1)
    stack.callback(session.close)
    preprocessor = bundle_preprocessor(root, manifest, session.inputs)
    return Answerer(session, preprocessor, find_task(manifest.task), facts_of(manifest))


def test_images_are_sent_as_files_and_every_stage_takes_time(image_bundle: Path) -> None:
    columns = read_samples(image_bundle, read_manifest(image_bundle))
    with ExitStack() as stack:
        answerer = open_answerer(image_bundle, stack)
        assert isinstance(answerer.preprocessor.spec, ImagePreprocess)
        sent = make_sent(answerer.preprocessor, columns, 2, seed=0)
        assert all(isinstance(image, bytes) and image[:2] == b"\xff\xd8" for image in sent[0]["image"])
        stages = time_answers([answerer, answerer], sent, 3, 1, 0, budget_s=60.0)
    assert stages.shape == (2, 3, len(STAGES)) and (stages > 0).all()


def test_texts_are_sent_as_they_are(make_text_bundle: Callable[..., Path]) -> None:
    root = make_text_bundle("feature-extraction", {"text": ["a b", "b", "a"], "text_pair": ["b", "a", "a b"]})
    given = read_samples(root, read_manifest(root))
    columns = find_task("feature-extraction").split_views(given)[0]
    with ExitStack() as stack:
        answerer = open_answerer(root, stack)
        (sent,) = make_sent(answerer.preprocessor, columns, 4, seed=0)
        assert len(sent["text"]) == 4 and set(sent["text"]) <= set(given["text"])
        assert len(answerer.answer(sent)) == len(STAGES)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1), (5, 4, 3), (5, 4, 4)])
def test_an_image_sent_is_the_image_decoded(shape: tuple[int, ...]) -> None:
    from runtime.measure.answering import _compress, _decode

    image = np.full(shape, 77, np.uint8)
    decoded = _decode(_compress(load_pixels(image)))
    assert decoded.shape == (shape[:2] if shape[2:] == (1,) else shape)
    assert np.abs(decoded.astype(int) - 77).max() <= 1
