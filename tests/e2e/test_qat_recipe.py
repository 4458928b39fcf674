"""A tiny Llama trained in few bits by a recipe: its graph and its checkpoint hold the integers that training left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from makers import apply
from onnx import numpy_helper
from safetensors.numpy import load_file
from test_language import BOTH, CHECKPOINT, EXACT, ROUNDED, actions, load_checkpoint, reported, torch_nll
from tiny_lm import LIKELY, language_folder, language_recipe, write_texts

from compress.errors import PlanError
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe

QAT: dict[str, Any] = {"kind": "qat", "scheme": "W4A16", "group_size": 32, "steps": 6, "batch_size": 8}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qat")
    language_folder(folder / "lm", **LIKELY)
    write_texts(folder / "train.jsonl", 40, seed=2)
    return folder


def recipe(home: Path, passes: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    found = language_recipe(home, passes, **parts)
    found["data"] = {**found["data"], "train": {"source": "jsonl:train.jsonl"}}
    return found


@pytest.fixture(scope="module")
def bundle(home: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In 4 bits, as a graph and as a checkpoint. Not to be written to."""
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    assert apply(recipe(home, [QAT], export=BOTH), out, cache, home).verdict == "pass"
    return out


def integers_of(folder: Path) -> dict[bytes, np.ndarray]:
    """Of a graph: scales [groups, in] as bytes -> what is multiplied by them, int64."""
    model = onnx.load(folder / "model.onnx")
    arrays = {one.name: numpy_helper.to_array(one, str(folder)) for one in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in arrays:
            values = arrays[node.input[0]].astype(np.int64)
            for start in range(0, values.shape[1], 32):
                scales = np.ascontiguousarray(arrays[node.input[1]][:, start : start + 32])
                found[scales.tobytes()] = values[:, start : start + 32]
    return found


def test_what_training_left_is_in_the_graph_bit_for_bit(bundle: Path, cache: Path) -> None:
    (folder,) = (
        path.parent
        for path in cache.glob("*/block-00000.safetensors")
        if (path.parent / "weights.safetensors").exists()
    )
    kept = load_file(folder / "block-00000.safetensors")
    graph = integers_of(bundle / "model")
    for layer in ROUNDED:
        values, scales = kept[f"{layer}:values"].astype(np.int64), kept[f"{layer}:scales"]
        for row in range(0, len(values), 32):  # layers with one input are one product: whole columns of it are compared
            part = np.ascontiguousarray(scales[row : row + 32].T)
            assert np.array_equal(graph[part.tobytes()], values[row : row + 32].T), layer
    assert {name for name, action in actions(bundle).items() if action == "w4"} == ROUNDED


def test_graph_and_checkpoint_are_one_model(bundle: Path, home: Path) -> None:
    assert reported(bundle)["nll"] == pytest.approx(torch_nll(load_checkpoint(bundle / "checkpoint"), home), rel=1e-3)


def test_a_second_run_takes_all_from_the_cache(bundle: Path, home: Path, cache: Path, tmp_path: Path) -> None:
    apply(recipe(home, [QAT], export=BOTH), tmp_path / "again", cache, home)
    assert "held out" not in (tmp_path / "again/compress.log").read_text().split("qat", 1)[0]
    for name in ("model/model.onnx", "checkpoint/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (bundle / name).read_bytes()


def test_a_checkpoint_alone_is_judged_against_the_model_as_it_came(home: Path, cache: Path, tmp_path: Path) -> None:
    judged = {"gates": [{"metric": "nll", "max": 20}]}
    apply(recipe(home, [QAT], **CHECKPOINT, validate=judged), tmp_path / "b", cache, home)
    stored = load_checkpoint(tmp_path / "b/model")
    assert reported(tmp_path / "b")["nll"] == pytest.approx(torch_nll(stored, home), rel=EXACT)
    came = torch_nll(load_checkpoint(home / "lm"), home)
    assert reported(tmp_path / "b", "baseline")["nll"] == pytest.approx(came, rel=EXACT)


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ([QAT, {"kind": "distill"}], "passes.1: distill would change what qat rounded, and must come before it"),
        ([QAT, QAT], "passes.1: qat would change what qat rounded, and must come before it"),
        ([QAT, {"kind": "gptq"}], "passes.1: gptq: no matrix product is left to round"),
        ([{"kind": "gptq"}, QAT], "passes.1: qat rewrites the whole torch model and must come before gptq"),
    ],
)
def test_the_plan_refuses(passes: list[dict[str, Any]], said: str, home: Path, tmp_path: Path) -> None:
    path = home / "refused.json"
    path.write_text(json.dumps(recipe(home, passes)))
    with pytest.raises(PlanError, match=said.replace(".", r"\.")):
        make_plan(load_recipe(path), tmp_path)
