"""Graphs whose weights stay in files: the same as of a model in memory, compared and written without holding it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from child_processes import run_in_process
from decoder_graphs import exported, make, tokens
from streaming import W4, context, nearest, streamed

from compress.blocks.store import HeldLayer
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.execution import in_files
from compress.execution.cached import FloatModel
from compress.export.onnx import finish, save_graph, with_integers
from compress.formats.targets import TARGETS
from compress.graph.edit import append, initializer, reroute, uses_of
from compress.graph.pieces import cut, run_in_pieces
from compress.graph.run import clone, open_session
from compress.graph.specs import cache_of, past_name
from compress.graph.stored import StoredTensor, holds_stored
from compress.rounding.quantized_weight import UnreadWeight
from compress.rounding.state import GraphState
from compress.store.cache import ResultCache

OPSET = 21
KIND = "gemma3"
"""One table for the tokens that it reads and those that it writes; of two, tests/e2e/test_language_in_files.py."""


@pytest.fixture(autouse=True)
def nearly_all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_files, "HELD", 100)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the model, and for what is kept of its export."""
    return tmp_path_factory.mktemp("in-files")


def opened(home: Path) -> StreamedModel:
    return streamed(deepcopy(make(KIND)), home / "model")


def kept(home: Path, key: str = "key", seed: int = 0) -> FloatModel:
    """The graph of a model whose weights lie in files, which is exported once; `key`: of a run with texts of a seed."""
    model, feeds = opened(home), [feeds_of(seed, 9), feeds_of(seed + 1, 10)]
    found = in_files.float_model_in_files(
        ResultCache(home / "cache"), key, "made of", model, lambda specs: feeds, OPSET, context()
    )  # type: ignore[arg-type]
    assert found.parity is not None and found.parity < 1e-5
    return found


def feeds_of(seed: int, length: int) -> dict[str, np.ndarray]:
    ids = tokens(1, length, seed)
    cache = cache_of(exported(KIND))
    assert cache is not None
    empty = np.zeros((1, cache.n_heads, 0, cache.head_size), np.float32)
    names = [name for i in range(cache.n_layers) for name in (past_name(i, "key"), past_name(i, "value"))]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), **dict.fromkeys(names, empty)}


def same(one: ir.Model, other: ir.Model) -> bool:
    def read(model: ir.Model) -> Any:
        nodes = [(node.op_type, [value and value.name for value in node.inputs]) for node in model.graph]
        return nodes, {n: v.const_value.tobytes() for n, v in model.graph.initializers.items() if v.const_value}

    return bool(read(one) == read(other))


def rounded(model: StreamedModel) -> StreamedModel:
    """With two layers of a block in four bits, one of them read beside others."""
    from dataclasses import replace

    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    held = {name: HeldLayer(nearest(model.store.read(f"{name}.weight")), False) for name in names}
    return replace(model, store=model.store.holding(held), schemes=dict.fromkeys(names, W4))


@pytest.mark.slow
def test_the_graph_is_that_of_a_model_in_memory_float_and_rounded(home: Path) -> None:
    whole, graph = exported(KIND), kept(home).state.model
    assert holds_stored(graph) and not holds_stored(whole)
    assert same(whole, graph)
    model = rounded(opened(home))
    finished = []
    for state in (GraphState(whole), GraphState(graph)):
        state, notes = with_integers(state, model)
        assert not notes
        finished.append(finish(state, TARGETS["onnxruntime-cpu"])[0])
    assert isinstance(state.weights["model.layers.1.mlp.down_proj"], UnreadWeight)
    large = [v.const_value for v in finished[1].graph.initializers.values() if v.dtype == ir.DataType.INT4]
    assert large and all(isinstance(tensor, StoredTensor) for tensor in large)
    assert len(large) == 2  # q and k are joined
    assert same(*finished)


@pytest.mark.slow
def test_the_graph_is_kept_without_its_weights_and_taken_up_again(tmp_path: Path, home: Path) -> None:
    first, again = kept(home), kept(home).state.model
    assert [spec.name for spec in first.inputs] == list(feeds_of(0, 1))
    assert same(first.state.model, again) and holds_stored(again)
    tensors = [value.const_value for value in again.graph.initializers.values() if value.const_value]
    held = sum(tensor.nbytes for tensor in tensors if not isinstance(tensor, StoredTensor))
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    assert held < n_bytes / 10
    save_graph(again, tmp_path / "out" / "model.onnx")
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size >= n_bytes - held
    names = ["logits", "present.1.key"]
    feeds = [feeds_of(0, 5), feeds_of(1, 7)]
    session = open_session(tmp_path / "out" / "model.onnx")
    for got, given in zip(run_in_pieces(again, feeds, names), feeds, strict=True):
        for name, want in zip(names, session.run(names, given), strict=True):
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_other_texts_are_compared_with_the_graph_that_is_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept(home)
    monkeypatch.delattr(in_files, "export_in_files")
    again = kept(home, "of another run", seed=5)
    assert same(first.state.model, again.state.model) and again.parity != first.parity


@pytest.mark.slow
def test_a_graph_with_another_weight_is_refused(home: Path) -> None:
    graph = kept(home).state.model
    stored = [(n, v) for n, v in graph.graph.initializers.items() if isinstance(v.const_value, StoredTensor)]
    name, value = stored[-1]
    wrong = np.ascontiguousarray(-value.const_value.numpy())  # type: ignore[union-attr]
    value.const_value = ir.Tensor(wrong, name=name)
    with pytest.raises(ExportError, match="parity: the logits of torch and of ONNX"):
        in_files.compare_in_pieces(opened(home), graph, [feeds_of(0, 9)], context())


@pytest.mark.slow
def test_a_graph_that_reads_its_padding_is_refused(home: Path) -> None:
    graph = clone(kept(home).state.model)
    mask = next(value for value in graph.graph.inputs if value.name == "attention_mask")
    uses = uses_of(mask)
    reroute(uses, append(graph, "Max", [mask, initializer(graph, "one", np.array(1))], "whole"))
    graph.graph.sort()
    texts = [feeds_of(0, 9), feeds_of(1, 9)]
    assert in_files.compare_in_pieces(opened(home), graph, texts[:1], context()) < 1e-5
    with pytest.raises(ExportError, match="parity: beside padding the logits of torch and of ONNX"):
        in_files.compare_in_pieces(opened(home), graph, texts, context())


def make_chain(n: int, size: int) -> ir.Model:
    """x -> x W1 -> ... -> x Wn, Wi = i I made as it is read, and the first product as an output beside the last."""
    x = ir.val("x", ir.DataType.FLOAT, ["n", size])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="chain")
    value = x
    for i in range(n):
        tensor = StoredTensor(partial(scaled_identity, i + 1, size), ir.DataType.FLOAT, (size, size))
        tensor.name = f"w{i}"
        weight = ir.val(tensor.name, const_value=tensor)
        graph.register_initializer(weight)
        node = ir.node("MatMul", [value, weight])
        graph.append(node)
        value = node.outputs[0]
        value.name, value.type, value.shape = f"y{i}", ir.TensorType(ir.DataType.FLOAT), x.shape
        if i in (0, n - 1):
            graph.outputs.append(value)
    return ir.Model(graph, ir_version=10)


def scaled_identity(factor: float, size: int) -> np.ndarray:
    return np.eye(size, dtype=np.float32) * np.float32(factor)


def test_pieces_hold_no_more_weights_than_they_may_and_hand_on_what_is_needed() -> None:
    model = make_chain(5, 4)
    pieces = cut(model, piece_bytes=2 * 64)
    assert [piece.weights for piece in pieces] == [("w0", "w1"), ("w2", "w3"), ("w4",)]
    assert [piece.gives for piece in pieces] == [("y0", "y1"), ("y3",), ("y4",)]
    assert [piece.last for piece in pieces] == [("x",), ("y1",), ("y3",)]
    assert len(cut(model, piece_bytes=1)) == 5
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = run_in_pieces(model, [{"x": x}, {"x": 2 * x}], ["y4", "y0"], piece_bytes=64)
    for outputs, factor in zip(found, (1, 2), strict=True):
        np.testing.assert_allclose(outputs["y4"], factor * 120 * x)
        np.testing.assert_allclose(outputs["y0"], factor * x)


def write_and_run(folder: Path, n: int, size: int) -> None:
    model = make_chain(n, size)
    save_graph(model, folder / "model.onnx", load=False)
    run_in_pieces(model, [{"x": np.ones((2, size), np.float32)}], [f"y{n - 1}"], 32 << 20)


def measure_growth(folder: Path) -> float:
    """MiB by which the process grows at most as it writes and runs 12 weights, after two small ones."""
    write_and_run(folder, 2, 64)
    before = read_peak()
    write_and_run(folder, 12, 2048)
    return read_peak() - before


def read_peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


@pytest.mark.slow
def test_writing_and_running_takes_the_memory_of_a_piece_and_not_of_all_weights(tmp_path: Path) -> None:
    """192 MiB of weights of 16 MiB each, in pieces of at most 32."""
    assert run_in_process(measure_growth, tmp_path) < 120
    assert (tmp_path / "model.onnx.data").stat().st_size >= 192 << 20
