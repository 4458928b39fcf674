"""A decoder on an engine: keys and values stay in device memory, and the text is that of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorrt_fakes import RECORDED, GraphEngine, HostCuda, Library, load_engine

from compress.commands.parity import compare_outputs, sample_batches
from runtime.backends import tensorrt
from runtime.decode.kv_cache import Decoder, ResidentKeys
from runtime.errors import UsageError
from runtime.tasks.manifest import verify

PROMPTS = [np.arange(5), np.array([3]), np.arange(9, 2, -1)]
STEPS = 6


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Any) -> Any:
    """(a session of the tiny decoder as an engine, the CUDA runtime, the same model in ONNX Runtime)."""
    session, library, host = (
        tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx")),
        Library(request.param),
        HostCuda(),
    )
    sizes = {"batch": (1, 1, 4), "sequence": (1, 1, 16), "past": (0, 8, 15), "total": (1, 9, 16)}
    load_engine(monkeypatch, library, host, GraphEngine(library.names, library.module, session, sizes))
    path = tmp_path / "model.engine"
    path.write_bytes(b"engine")
    return tensorrt.TENSORRT.open(path, 1, {"cuda_graph": True}), host, session


def logits(decoder: Decoder) -> list[np.ndarray]:
    found = [decoder.start(PROMPTS, 16)]
    found += [decoder.step(np.array([step, 2 * step, 7])) for step in range(STEPS)]
    return found


def test_the_logits_are_those_of_onnxruntime(stand_in: Any, tiny: Any) -> None:
    engine, host, session = stand_in
    decoder = Decoder(engine, tiny.kv_cache())
    assert isinstance(decoder.keys, ResidentKeys)
    want = logits(Decoder(session, tiny.kv_cache()))
    for _ in range(2):  # a second batch begins with nothing read
        for got, expected in zip(logits(decoder), want, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-6)
    assert "cudaGraphLaunch" not in host.calls  # buffers that change places cannot be captured


def test_keys_and_values_are_not_copied(stand_in: Any, tiny: Any) -> None:
    engine, host, _ = stand_in
    logits(Decoder(engine, tiny.kv_cache()))
    copies = [call for call in host.calls if call.startswith("cudaMemcpyAsync")]
    assert len(copies) == (1 + STEPS) * 3  # in: ids and mask; out: logits


def test_two_texts_at_a_time_are_refused_not_mixed(stand_in: Any, tiny: Any) -> None:
    first, second = (Decoder(stand_in[0], tiny.kv_cache()) for _ in range(2))
    first.start(PROMPTS, 16)
    second.start(PROMPTS, 16)
    second.step(np.array([1, 2, 3]))
    with pytest.raises(UsageError, match="another text has been begun in this session"):
        first.step(np.array([1, 2, 3]))


def test_what_outgrows_the_profiles_is_refused_before_anything_is_read(stand_in: Any, tiny: Any) -> None:
    decoder = Decoder(stand_in[0], tiny.kv_cache())
    with pytest.raises(UsageError, match="17 tokens do not fit into the engine's profiles, which take 16"):
        decoder.start(PROMPTS, 17)
    with pytest.raises(UsageError, match=r"no profile of the engine takes .*'input_ids': \(5, 1\)"):
        decoder.start([np.array([1])] * 5, 16)


def test_parity_of_decoders_reads_whole_texts(make_decoder_bundle: Callable[..., Path], tiny: Any) -> None:
    root = make_decoder_bundle(noise=0.1)
    manifest = verify(root)
    ours, baseline = (tiny.open_onnx(root / manifest.artifact(name).path) for name in ("candidate", "baseline"))
    batches = sample_batches(root, manifest, ours)
    assert manifest.evaluation is not None
    assert sum(len(feeds["input_ids"]) for feeds in batches) == manifest.evaluation.n_samples
    errors, _ = compare_outputs(ours, baseline, batches)
    assert errors.keys() == {spec.name for spec in ours.outputs} and errors["logits"] > 0
    assert errors["present.0.key"] == 0.0  # the noise is in the head
