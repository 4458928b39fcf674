"""Graphs of decoders that compute the logits of as few of the last tokens as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import exported, tokens

from compress.export.onnx import finish, float_graph, save_graph
from compress.formats.schemes import PRESETS, Scheme, WeightScheme
from compress.formats.targets import TARGETS
from compress.graph.specs import cache_of, input_specs
from compress.planning.latency import round_as_planned
from compress.rounding.state import GraphState
from runtime.backends import find_backend
from runtime.bundle.manifest import LOGITS_TO_KEEP
from runtime.decode.kv_cache import Decoder

KINDS = ("llama", "gemma3", "gpt2")  # with a head of its own, capped logits, a table that is tied
CPU = TARGETS["onnxruntime-cpu"]


@contextmanager
def opened(model: ir.Model, folder: Path, backend: str = "onnxruntime-cpu", **options: str) -> Iterator[Decoder]:
    save_graph(model, folder / "model.onnx")
    session = find_backend(backend).open(folder / "model.onnx", 1, options)
    yield Decoder(session, cache_of(model))
    session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_unlike_length_get_the_logits_of_their_last_tokens(kind: str, tmp_path: Path) -> None:
    model = exported(kind)
    graphs = {"plain": float_graph(model), "shared buffer": finish(GraphState(model), CPU)[0]}
    assert cache_of(graphs["shared buffer"]) != cache_of(graphs["plain"])  # padding stands on the other side
    prompts = [row[:n] for row, n in zip(tokens(3, 9), (9, 2, 6), strict=True)]
    for name, graph in graphs.items():
        with opened(graph, tmp_path / name) as decoder:
            assert decoder.keys._keeps  # type: ignore[attr-defined]
            few = [decoder.start(prompts, 12), decoder.step(np.array([5, 6, 7]))]
            decoder.keys._keeps = False  # type: ignore[attr-defined]
            all_ = [decoder.start(prompts, 12), decoder.step(np.array([5, 6, 7]))]
        np.testing.assert_array_equal(few, all_)


def test_a_reader_that_does_not_know_the_input_gets_the_logits_of_all_tokens(tmp_path: Path) -> None:
    model = float_graph(exported("llama"))
    assert LOGITS_TO_KEEP in [value.name for value in model.graph.inputs]
    assert LOGITS_TO_KEEP not in [spec.name for spec in input_specs(model)]
    prompts = [tokens(1, 7)[0]]
    with opened(model, tmp_path) as own, opened(model, tmp_path, "openvino", precision="f32") as other:
        np.testing.assert_allclose(own.start(prompts, 8), other.start(prompts, 8), atol=1e-4)
    past = {name: np.zeros(shape, np.float32) for name, shape in own.cache.shapes(1, 0).items()}
    feeds = past | {name: np.ones((1, 7), np.int64) for name in ("input_ids", "attention_mask")}
    session = find_backend("onnxruntime-cpu").open(tmp_path / "model.onnx", 1, {})
    assert session.run(feeds, ("logits",))["logits"].shape[:2] == (1, 7)
    session.close()


@pytest.mark.parametrize("scheme", [Scheme(WeightScheme(4, 32)), PRESETS["W8A8"]], ids=["W4A16", "W8A8"])
def test_the_product_and_what_rounds_its_input_stay_together(scheme: Scheme) -> None:
    graph, _ = finish(round_as_planned(GraphState(exported("llama")), {"lm_head": scheme}), CPU)
    (sliced,) = [node for node in graph.graph if node.name == f"{LOGITS_TO_KEEP}/hidden"]
    hidden = sliced.inputs[0]
    assert hidden is not None and hidden.producer().op_type == "Mul"  # the last of the norm's
