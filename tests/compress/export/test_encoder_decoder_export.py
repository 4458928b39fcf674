"""Encoder-decoders as two files: they write token for token what transformers writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decoder_graphs import kinds
from small_answers import make_random

from compress.errors import ExportError
from compress.export.encoder_decoder import export_encoder_decoder
from compress.export.onnx import save_graph
from compress.graph.halves import share_weights
from compress.graph.run import open_session
from compress.models.answers import describe_not_followed, resolve_target
from runtime.backends import BACKENDS, open_model
from runtime.bundle.files import model_files, model_size
from runtime.decode.generate import Answer, collect_results, generate_rows
from runtime.decode.kv_cache import EncodedDecoder
from runtime.decode.rules import find_rules
from runtime.decode.sampling import Sampling
from runtime.encode.seq2seq import TargetPreprocess


class _Silent:
    """Takes tokens of a model without a tokenizer."""

    text, stopped = "", False

    def push(self, token: int) -> str:
        return ""

    def close(self) -> str:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds(["t5", "bart", "marian", "whisper"], ("bart",)))
def test_greedy_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    import torch

    options = {"onnxruntime-cpu": {}, "openvino": {"precision": "f32"}}
    backends = {name: more for name, more in options.items() if BACKENDS[name].available() is None}

    model, samples = make_random(kind)
    model.save_pretrained(tmp_path)
    target = resolve_target(tmp_path, TargetPreprocess())
    with torch.no_grad():
        wanted = model.generate(**samples).tolist()
    model.set_attn_implementation("eager")
    feeds = {name: tensor.numpy() for name, tensor in samples.items()}
    save_graph(export_encoder_decoder(model, feeds), tmp_path / "model.onnx")
    assert [file.name for file in model_files(tmp_path / "model.onnx")] == ["model.onnx", "encoder.onnx"]
    for backend, more in backends.items():
        session = open_model(BACKENDS[backend], tmp_path / "model.onnx", 1, more)
        decoder = EncodedDecoder(session, target.start_tokens)
        for rows in (slice(0, 3), slice(1, 2)):  # a batch, and one that goes on alone in a cache of its own
            batch = {name: values[rows] for name, values in feeds.items()}
            found = _answer(decoder, target, batch)
            for tokens, whole in zip(found, wanted[rows], strict=True):
                assert whole[: len(tokens)] == tokens, backend
                ended = whole[len(tokens) :][:1]  # in transformers the end is shown; Whisper's prompt counts less there
                assert not ended or ended[0] in target.end_tokens or kind == "whisper"
        session.close()
    assert len({tuple(tokens) for tokens in wanted}) > 1, "the encoder says nothing"


def _answer(decoder: EncodedDecoder, target: TargetPreprocess, feeds: dict[str, np.ndarray]) -> list[list[int]]:
    """Return what is generated for each sample, without the end; start tokens first but for Whisper's."""
    start = np.array(target.start_tokens, np.int64)
    rows = [Answer(start, _Silent()) for _ in next(iter(feeds.values()))]  # type: ignore[arg-type]
    sampling = Sampling(repetition_penalty=target.repetition_penalty or 1.0)
    n_new = target.most_tokens - len(start)
    results = collect_results(
        generate_rows(
            lambda: decoder.start(feeds, target.most_tokens),
            decoder.step,
            rows,
            n_new,
            target.end_tokens,
            sampling,
            find_rules(target),
        )
    )
    shown = target.start_tokens if "attention_mask" in feeds else ()
    return [[*shown, *result.token_ids] for result in results]


def test_a_model_without_a_cache_is_refused() -> None:
    from torch import nn

    with pytest.raises(ExportError, match="takes no past_key_values"):
        export_encoder_decoder(nn.Linear(2, 2), {"input_ids": np.ones((1, 2), np.int64)})


def test_beams_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "do_sample": false}')
    assert describe_not_followed(tmp_path) == [
        "generation_config.json asks for num_beams 4: answers are generated greedily here, without it"
    ]


def test_a_table_that_both_halves_read_is_stored_once(tmp_path: Path) -> None:
    import onnx_ir as ir

    rows = np.arange(2**15, dtype=np.float32).reshape(-1, 4)
    halves = []
    table = ir.tensor(rows, name="table")
    for name in ("model", "encoder"):
        floats = ir.TensorType(ir.DataType.FLOAT)
        weight = ir.Value(name="table", const_value=table, type=floats, shape=ir.Shape(rows.shape))
        ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
        node = ir.node("Gather", [weight, ids])
        node.outputs[0].name, node.outputs[0].type = "out", floats
        again = ir.Value(name="tied", const_value=table, type=floats, shape=ir.Shape(rows.shape))
        held = [weight, again]
        graph = ir.Graph([ids], node.outputs, nodes=[node], initializers=held, opset_imports={"": 20}, name=name)
        halves.append(ir.Model(graph, ir_version=10))
    share_weights(halves[1], halves[0], tmp_path / "shared.data")
    for half in halves:
        ir.save(half, tmp_path / f"{half.graph.name}.onnx")
        (found,) = open_session(tmp_path / f"{half.graph.name}.onnx").run(None, {"ids": np.array([7, 0])})
        np.testing.assert_array_equal(found, rows[[7, 0]])
    files = model_files(tmp_path / "model.onnx")
    assert [file.name for file in files] == ["model.onnx", "encoder.onnx", "shared.data"]
    assert model_size(tmp_path / "model.onnx") < 1.1 * rows.nbytes
