"""Caches of any named states: as a graph's inputs name them, in the manifest, and between the calls of a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime.backends import find_backend
from runtime.bundle.manifest import KeptState, KvCacheSpec, find_cache
from runtime.bundle.records import Mismatch, from_json, to_json
from runtime.bundle.tensors import TensorSpec
from runtime.decode.kv_cache import Decoder, ResidentKeys
from runtime.encode.language import empty_past
from runtime.errors import BundleError, UsageError

KEY = TensorSpec("past_key_values.1.key", "float32", ("batch", 2, "past", 4))
VALUE = TensorSpec("past_key_values.1.value", "float32", ("batch", 2, "past", 3))
SUM = TensorSpec("past_key_values.0.recurrent_state", "float32", ("batch", 1))


def test_what_a_graph_keeps_is_read_from_its_inputs() -> None:
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    assert find_cache([ids]) is None
    alike = [
        TensorSpec(f"past_key_values.{i}.{kind}", "int8", ("b", 2, "p", 4)) for i in (0, 1) for kind in ("key", "value")
    ]
    assert find_cache([ids, *alike]) == KvCacheSpec(2, 2, 4, "int8")
    cache = find_cache([ids, SUM, KEY, VALUE])
    assert (
        cache is not None
        and cache.n_layers == 2
        and cache.pairs()
        == (
            (SUM.name, "present.0.recurrent_state"),
            (KEY.name, "present.1.key"),
            (VALUE.name, "present.1.value"),
        )
    )
    assert cache.shapes(3, 5) == {SUM.name: (3, 1), KEY.name: (3, 2, 5, 4), VALUE.name: (3, 2, 5, 3)}
    assert cache.fixed() == (SUM.name,)
    assert [empty_past(spec, 3).shape for spec in (SUM, KEY)] == [(3, 1), (3, 2, 0, 4)]
    with pytest.raises(BundleError, match="all sizes but the batch and one must be numbers"):
        find_cache([TensorSpec("past_key_values.0.key", "float32", ("batch", "heads", "past", 4))])


def test_a_manifest_says_it_and_an_older_one_is_read() -> None:
    cache = KvCacheSpec(2, 0, 0, states=(KeptState(SUM, "present.0.recurrent_state"),))
    assert from_json(KvCacheSpec, to_json(cache), "cache") == cache
    older = {"n_layers": 2, "n_heads": 2, "head_size": 4, "dtype": "float32", "shared_buffer": False}
    assert from_json(KvCacheSpec, older, "cache") == KvCacheSpec(2, 2, 4)
    with pytest.raises(Mismatch, match="n_heads is 0, below 1"):
        from_json(KvCacheSpec, {**older, "n_heads": 0}, "cache")


def test_some_states_may_have_a_buffer() -> None:
    inputs, keys = [SUM, KEY, VALUE], [KEY.name, VALUE.name]
    cache = find_cache(inputs, shared=keys)
    assert cache is not None and cache.buffers() == tuple(keys) and not cache.shared_buffer
    assert from_json(KvCacheSpec, to_json(cache), "cache") == cache
    whole = find_cache(inputs[1:], shared=keys)
    assert whole is not None and whole.buffers() == tuple(keys) and whole.shared_buffer
    alike = [replace(KEY, name=f"past_key_values.{i}.{kind}") for i in (0, 1) for kind in ("key", "value")]
    some = find_cache(alike, shared=[each.name for each in alike[:2]])
    assert some is not None and some.n_heads == 0 and len(some.states) == 4 and len(some.buffers()) == 2


def test_an_engine_is_not_given_what_begins_as_zeros() -> None:
    cache = KvCacheSpec(1, 0, 0, states=(KeptState(SUM, "present.0.recurrent_state"),))
    with pytest.raises(UsageError, match=r"begins no text with zeros, which past_key_values.0.recurrent_state needs"):
        ResidentKeys(None, cache)  # type: ignore[arg-type]


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A decoder whose logits [b, s, 2] are the sum of all real tokens before a call, and how many there were."""
    nodes = [
        ("Shape", ["input_ids"], ["n"], {"start": 1}),
        ("Shape", ["attention_mask"], ["total"], {"start": 1}),
        ("Sub", ["total", "n"], ["from"], {}),
        ("Slice", ["attention_mask", "from", "total", "one"], ["mask"], {}),
        ("Mul", ["input_ids", "mask"], ["real"], {}),
        ("ReduceSum", ["real", "one"], ["new"], {"keepdims": 1}),
        ("Cast", ["new"], ["new_float"], {"to": TensorProto.FLOAT}),
        ("Add", [SUM.name, "new_float"], ["present.0.recurrent_state"], {}),
        ("Cast", ["mask"], ["mask_float"], {"to": TensorProto.FLOAT}),
        ("Concat", ["past_key_values.1.key", "mask_float"], ["present.1.key"], {"axis": 1}),
        ("ReduceSum", ["past_key_values.1.key", "one"], ["before"], {"keepdims": 1}),
        ("Concat", [SUM.name, "before"], ["both"], {"axis": 1}),
        ("Unsqueeze", ["both", "one"], ["row"], {}),
        ("Concat", ["one", "n", "one"], ["sizes"], {"axis": 0}),
        ("Expand", ["row", "sizes"], ["logits"], {}),
    ]
    makers = [helper.make_node(op, inputs, outputs, **attributes) for op, inputs, outputs, attributes in nodes]
    shapes = {
        "input_ids": ["b", "s"],
        "attention_mask": ["b", "t"],
        SUM.name: ["b", 1],
        "past_key_values.1.key": ["b", "p"],
    }
    kinds = {name: TensorProto.INT64 if "past" not in name else TensorProto.FLOAT for name in shapes}
    inputs = [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()]
    given = {"logits": ["b", "s", 2], "present.0.recurrent_state": ["b", 1], "present.1.key": ["b", "t"]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in given.items()]
    one = onnx.numpy_helper.from_array(np.array([1], np.int64), "one")
    graph = helper.make_graph(makers, "counting", inputs, outputs, [one])
    imports = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_states_are_replaced_and_keys_grow_between_calls(counting: Path) -> None:
    session = find_backend("onnxruntime-cpu").open(counting, 1, {})
    decoder = Decoder(session, find_cache(session.inputs))
    for _ in range(2):  # a second text begins anew
        prompts = [np.array([5, 6, 7]), np.array([9])]
        np.testing.assert_array_equal(decoder.start(prompts, 8), np.zeros((2, 2)))
        np.testing.assert_array_equal(decoder.step(np.array([1, 2])), [[18, 3], [9, 1]])
        np.testing.assert_array_equal(decoder.step(np.array([1, 2])), [[19, 4], [11, 2]])
