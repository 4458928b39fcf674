"""OpenVINO's IR: the same bytes for the same graph, weights in few bits, a state; and a bundle that holds it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoder_graphs import ALWAYS, exported, kinds, tokens
from graphs import images, residual_cnn
from makers import apply
from tiny_lm import language_folder, language_recipe, write_tokenizer

from compress.errors import PlanError
from compress.export import openvino as ir_export
from compress.export.onnx import finish, save_graph
from compress.formats.targets import TARGETS
from compress.graph.layers import find_layers
from compress.graph.specs import cache_of
from compress.rounding.quantized_weight import round_to_nearest
from compress.rounding.state import GraphState
from runtime.backends import BACKENDS
from runtime.bundle.files import ir_files
from runtime.decode.kv_cache import Decoder
from runtime.errors import BundleError
from runtime.tasks.manifest import verify

pytestmark = pytest.mark.skipif(BACKENDS["openvino"].available() is not None, reason="openvino is not installed")
PRECISE = {"precision": "f32"}


def in_four_bits(kind: str, path: Path) -> Path:
    model = exported(kind)
    layers = [layer for layer in find_layers(model) if layer.op == "MatMul"]
    weights = {layer.name: round_to_nearest(layer.matrix(), 4, 32) for layer in layers}
    graph, _ = finish(GraphState(model, weights=weights, weight_only=list(weights)), TARGETS["openvino"])
    save_graph(graph, path)
    return path


@pytest.mark.parametrize("kind", kinds(ALWAYS))
def test_an_ir_decodes_as_its_graph_does(kind: str, tmp_path: Path) -> None:
    graph = in_four_bits(kind, tmp_path / "model.onnx")
    path, inputs, outputs = ir_export.write_ir(graph, tmp_path / "ir")
    assert [spec.name for spec in (*inputs, *outputs)] == ["input_ids", "attention_mask", "beam_idx", "logits"]
    prompts = [tokens(1, 5)[0], tokens(1, 9, seed=1)[0]]
    found = []
    cache = cache_of(exported(kind))
    for backend, file, options in (("onnxruntime-cpu", graph, {}), ("openvino", path, PRECISE)):
        decoder = Decoder(BACKENDS[backend].open(file, 1, options), cache)
        found.append([decoder.start(prompts, 16), *(decoder.step(tokens(1, 2, seed)[0]) for seed in range(3))])
    np.testing.assert_allclose(found[1], found[0], atol=2e-2 * np.abs(found[0]).max())  # int8 inputs in ONNX Runtime


def test_the_same_graph_gives_the_same_bytes_and_weights_in_four_bits(tmp_path: Path) -> None:
    graph = in_four_bits("llama", tmp_path / "model.onnx")
    made = []
    for name in ("one", "two"):  # what was made before would change names
        path, _, _ = ir_export.write_ir(graph, tmp_path / name)
        made.append([file.read_bytes() for file in ir_files(path)])
    assert made[0] == made[1]
    weights = len(made[0][1])
    assert weights < 1.05 * graph.stat().st_size


def test_a_model_that_writes_no_text(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    save_graph(residual_cnn(), graph)
    path, _, outputs = ir_export.write_ir(graph, tmp_path / "ir")
    feeds = images(1)[0]
    runs = (("onnxruntime-cpu", graph, {}), ("openvino", path, PRECISE))
    found = [BACKENDS[name].open(file, 1, more).run(feeds)[outputs[0].name] for name, file, more in runs]
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


RECIPE: dict[str, Any] = {"export": [{"kind": "openvino"}], "target": "openvino"}


def test_a_bundle_with_an_ir(tmp_path: Path) -> None:
    pytest.importorskip("openvino_tokenizers")
    out = tmp_path / "bundle"
    language_folder(tmp_path / "lm", num_hidden_layers=1)
    report = apply(
        language_recipe(tmp_path, [{"kind": "rtn", "group_size": 32}], **RECIPE), out, tmp_path / "cache", tmp_path
    )
    manifest = verify(out)
    artifact = manifest.candidate_for("openvino")
    assert (artifact.name, artifact.path) == ("ir-openvino", "openvino/openvino_model.xml")
    assert (report.backend, report.verdict) == ("openvino", "pass")
    assert manifest.graph_for("openvino").path == "model/model.onnx"
    assert {"openvino_tokenizer.xml", "openvino_detokenizer.xml", "config.json", "generation_config.json"} <= {
        file.name for file in (out / "openvino").iterdir()
    }
    assert not [row for row in report.layers if "gives other tokens" in row.get("reason", "")]
    # a .bin is weights where it lies beside an .xml of its name, and nowhere else
    shutil.copyfile(out / "openvino/openvino_model.bin", out / "openvino/more.bin")
    with pytest.raises(BundleError, match=r"more\.bin: a file that could be run as a program"):
        verify(out)


def test_what_is_missing_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("openvino", "openvino_tokenizers"):
        monkeypatch.setitem(sys.modules, module, None)
    recipe = language_recipe(tmp_path, [{"kind": "rtn", "group_size": 32}], **RECIPE)
    with pytest.raises(PlanError, match=r"export\.0: openvino needs the packages openvino and openvino-tokenizers"):
        apply(recipe, tmp_path / "bundle", tmp_path / "cache", tmp_path)


def test_the_same_tokenizer_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("openvino_tokenizers")
    write_tokenizer(tmp_path)
    made = []
    for _ in range(2):
        assert ir_export.write_tokenizer(tmp_path, ["abc", "the end of it", ""]) == []
        made.append({file.name: file.read_bytes() for file in tmp_path.glob("openvino_*")})
    assert made[0] == made[1]
    assert len(made[0]) == 4
