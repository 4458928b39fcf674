"""A model's digest follows all that decides what it computes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from model_specs import changed_config, text_spec
from onnx import TensorProto, helper
from safetensors.torch import save_file

from compress.errors import SourceError
from compress.models.source import locate, model_digest
from compress.specs import ModelSpec


def test_digest_follows_weights_code_and_arguments(
    python_file: Callable[[str], str], bert: Path, tmp_path: Path
) -> None:
    source = python_file("def make(width=2): return nn.Linear(width, 2)")
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    spec = ModelSpec(source=source, weights=str(tmp_path / "w.safetensors"), task="generic")
    seen = [
        model_digest(locate(spec, Path())),
        model_digest(locate(spec.model_copy(update={"args": {"width": 3}}), Path())),
    ]
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    seen.append(model_digest(locate(spec, Path())))
    python_file("def make(width=2): return nn.Linear(width, 2, bias=True)")
    seen += [model_digest(locate(spec, Path())), model_digest(locate(text_spec(bert), Path()))]
    seen.append(model_digest(locate(text_spec(changed_config(bert, tmp_path / "c", layer_norm_eps=0.001)), Path())))
    assert len(set(seen)) == len(seen)
    assert model_digest(locate(spec, Path())) == seen[3]


def external(folder: Path, name: str) -> onnx.TensorProto:
    """A float [2] tensor whose values lie in a file of its name."""
    (folder / name).write_bytes(np.ones(2, np.float32).tobytes())
    tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name)
    return tensor


def onnx_with_values_everywhere(folder: Path) -> Path:
    """A graph that keeps values in files, named by a constant, both branches of an If, a function, a sparse tensor."""
    made = {name: external(folder, name) for name in ("constant", "then", "else", "function", "sparse")}
    nodes = {name: helper.make_node("Constant", [], ["v"], value=made[name]) for name in ("constant", "function")}
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Constant", [], [name], value=made[name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])],
        )
        for name in ("then", "else")
    }
    graph = helper.make_graph([nodes["constant"], helper.make_node("If", ["c"], ["y"], **branches)], "g", [], [])
    graph.sparse_initializer.add().values.CopyFrom(made["sparse"])
    function = helper.make_function("own", "f", [], ["v"], [nodes["function"]], [helper.make_opsetid("", 20)])
    path = folder / "everywhere.onnx"
    path.write_bytes(helper.make_model(graph, functions=[function]).SerializeToString())
    return path


def test_a_digest_counts_every_file_that_a_graph_names(tmp_path: Path) -> None:
    spec = ModelSpec(source=f"onnx:{onnx_with_values_everywhere(tmp_path)}", task="image-classification")
    digests = {model_digest(locate(spec, Path()))}
    for name in ("constant", "then", "else", "function", "sparse"):
        (tmp_path / name).write_bytes(np.zeros(2, np.float32).tobytes())
        digests.add(model_digest(locate(spec, Path())))
    assert len(digests) == 6
    (tmp_path / "function").unlink()
    with pytest.raises(SourceError, match=r"weights file .*function is missing"):
        model_digest(locate(spec, Path()))
