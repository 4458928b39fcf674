"""A decoder in OpenVINO: keys and values are its state, and the text is that of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.backends import BACKENDS, Session, Stateful
from runtime.decode.kv_cache import Decoder
from runtime.errors import BundleError, UsageError

pytestmark = pytest.mark.skipif(BACKENDS["openvino"].available() is not None, reason="openvino is not installed")
PROMPTS = [np.arange(5), np.array([3]), np.arange(9, 2, -1)]
STEPS = 4


@pytest.fixture
def sessions(tmp_path: Path, tiny: Any) -> tuple[Session, Session]:
    """The same decoder in OpenVINO and in ONNX Runtime."""
    path = tiny.decoder_model(tmp_path / "model.onnx")
    return BACKENDS["openvino"].open(path, 1, {"precision": "f32"}), tiny.open_onnx(path)


def logits(decoder: Decoder, prompts: list[np.ndarray]) -> list[np.ndarray]:
    found = [decoder.start(prompts, 16)]
    return found + [decoder.step(np.array([step, 2 * step, 7])[: len(prompts)]) for step in range(STEPS)]


def test_the_logits_are_those_of_onnxruntime(sessions: tuple[Session, Session], tiny: Any) -> None:
    decoder, other = (Decoder(session, tiny.kv_cache()) for session in sessions)
    for prompts in (PROMPTS, PROMPTS[1:2], PROMPTS):  # each batch begins with nothing read, and has a size of its own
        for got, expected in zip(logits(decoder, prompts), logits(other, prompts), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


def test_texts_and_scores_do_not_disturb_each_other(sessions: tuple[Session, Session], tiny: Any) -> None:
    session, _ = sessions
    one, two = (Decoder(session, tiny.kv_cache()) for _ in range(2))
    ids = np.array([PROMPTS[0], PROMPTS[0][::-1]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    feeds = {name: values for name, values in feeds.items() if name in {spec.name for spec in session.inputs}}
    scored = session.run(feeds, ["logits"])["logits"]
    want = logits(one, PROMPTS)
    one.start(PROMPTS, 16)
    two.start(PROMPTS[:1], 16)
    np.testing.assert_array_equal(session.run(feeds, ["logits"])["logits"], scored)
    np.testing.assert_array_equal(one.step(np.array([0, 0, 7])), want[1])


def test_what_a_decoder_shows(sessions: tuple[Session, Session]) -> None:
    session, other = sessions
    assert isinstance(session, Stateful)
    names = {spec.name for spec in session.inputs}
    assert names | {spec.name for spec in session.past} == {spec.name for spec in other.inputs}
    assert [spec.name for spec in session.outputs] == ["logits"]


def test_refusals(tmp_path: Path, tiny: Any) -> None:
    shared = tiny.decoder_model(tmp_path / "shared" / "model.onnx", shared=True)
    with pytest.raises(BundleError, match="attention is GroupQueryAttention, written for onnxruntime-cpu"):
        BACKENDS["openvino"].open(shared, 1, {})
    plain = tiny.decoder_model(tmp_path / "plain" / "model.onnx")
    with pytest.raises(UsageError, match="static is for models whose calls keep their shapes"):
        BACKENDS["openvino"].open(plain, 1, {"static": True})
    with pytest.raises(BundleError, match=r"a file of the IR is missing: model\.xml, model\.bin"):
        BACKENDS["openvino"].open(tmp_path / "model.xml", 1, {})
