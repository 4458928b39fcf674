"""Models of python: sources: facts agree with the loaded model, outputs are the task's, refusals say what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from model_specs import DIGITS_FEEDS, DIGITS_SPEC
from onnx import TensorProto, helper
from safetensors.torch import load_file, save_file
from torch import nn

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models.facts import model_facts
from compress.models.feeds import feeds_shapes, model_inputs
from compress.models.load import load_model
from compress.models.meta import open_on_meta
from compress.models.source import locate
from compress.specs import ModelSpec
from compress.zoo.digits_resnet import DIGITS
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import TensorPreprocess


def test_facts_of_a_convolutional_net_match_hand_counts() -> None:
    facts = model_facts(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS)
    layers = {layer.name: layer for layer in facts.layers}
    assert layers["conv1"].macs == 8 * 8 * 48 * 1 * 9
    assert layers["layer2.conv1"].shape == (64, 48, 3, 3)
    assert layers["layer2.shortcut.0"].macs == 8 * 8 * 64 * 48
    assert (layers["linear"].type, layers["linear"].op, layers["linear"].macs) == ("Linear", "Gemm", 64 * 10)
    assert facts.inputs == (TensorSpec("pixel_values", "float32", ("batch", 1, 8, 8)),)
    assert facts.outputs == (TensorSpec("logits", "float32", ("batch", 10)),)
    stored = load_file(DIGITS / "digits_resnet.safetensors")
    assert facts.n_bytes == sum(t.numel() * 4 for t in stored.values() if t.is_floating_point())
    assert facts.notes == ()


def test_loaded_model_agrees_with_its_facts() -> None:
    facts, loaded = (
        model_facts(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS),
        load_model(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS),
    )
    assert (loaded.inputs, loaded.outputs, loaded.architecture) == (facts.inputs, facts.outputs, facts.architecture)
    assert loaded.parameters == {"pixel_values": "x"}
    assert not loaded.module.training
    stored = load_file(DIGITS / "digits_resnet.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.module.state_dict().items())


def test_planning_and_loading_leave_the_random_state() -> None:
    state = torch.get_rng_state()
    model_facts(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS)
    load_model(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS)
    assert torch.equal(state, torch.get_rng_state())


def test_peak_activation_is_what_is_alive_at_once(python_file: Callable[[str], str]) -> None:
    body = """
class Net(nn.Module):
    def forward(self, x):
        a = x + 1
        b = a * 2
        return a + b
def make(): return Net()
"""
    facts = model_facts(locate(ModelSpec(source=python_file(body), task="generic"), Path()), {"x": ((256,), "float32")})
    assert facts.peak_activation_bytes == 3 * 256 * 4  # a, b and their sum; the caller holds the input


def test_layer_kinds_and_tied_weights(python_file: Callable[[str], str]) -> None:
    body = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.up = nn.ConvTranspose1d(8, 6, 4, stride=2, groups=2)
        self.conv = nn.Conv1d(6, 8, 3, groups=2)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(3, 3)
    def forward(self, ids):
        x = self.conv(self.up(self.table(ids).transpose(1, 2)))
        return self.head(x.transpose(1, 2))
def make(): return Net()
"""
    facts = model_facts(locate(ModelSpec(source=python_file(body), task="generic"), Path()), {"ids": ((5,), "int64")})
    found = {layer.name: (layer.type, layer.op, layer.shape, layer.macs) for layer in facts.layers}
    assert found == {
        "table": ("Embedding", "Gather", (20, 8), 0),
        "up": ("ConvTranspose1d", "ConvTranspose", (6, 4, 4), 5 * 8 * 3 * 4),
        "conv": ("Conv1d", "Conv", (8, 3, 3), 10 * 8 * 3 * 3),
        "head": ("Linear", "MatMul", (20, 8), 10 * 8 * 20),
        "spare": ("Linear", "MatMul", (3, 3), 0),
    }
    assert facts.layers[0].weight == facts.layers[3].weight == "table.weight"
    assert "tied weights: table, head share table.weight" in facts.notes
    assert "the forward pass does not call spare as a module" in facts.notes
    assert facts.n_bytes == 4 * (20 * 8 + 8 * 3 * 4 + 6 + 8 * 3 * 3 + 8 + 9 + 3)


def test_what_cannot_run_on_meta_runs_on_the_cpu_and_says_so(python_file: Callable[[str], str]) -> None:
    body = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.scale = float(torch.ones(1).item())
    def forward(self, x):
        return self.linear(x) if x.sum().item() == 0 else x
def make(): return Net()
"""
    facts = model_facts(locate(ModelSpec(source=python_file(body), task="generic"), Path()), {"x": ((4,), "float32")})
    assert facts.layers[0].macs == 8
    assert any("cannot build on the meta device" in note for note in facts.notes)
    assert any("the forward pass needs values" in note for note in facts.notes)
    assert any("no `weights` are given" in note for note in facts.notes)


def test_generic_models_name_their_inputs_and_outputs(python_file: Callable[[str], str]) -> None:
    body = """
class Net(nn.Module):
    def forward(self, a, b, flag=True):
        return {"sum": a + b, "product": a * b}
def make(): return Net()
"""
    spec = ModelSpec(source=python_file(body), task="generic")
    names = model_inputs(open_on_meta(locate(spec, Path())))
    assert names == ("a", "b")
    samples: SampleShapes = {"a": ((3,), "float64"), "b": ((3,), "float32")}
    feeds = feeds_shapes(locate(spec, Path()), TensorPreprocess(), samples, names)
    assert feeds == {"a": ((3,), "float32"), "b": ((3,), "float32")}
    assert load_model(locate(spec, Path()), feeds).output_names == ("sum", "product")
    with pytest.raises(SourceError, match="no data for its input b; the data has: a"):
        feeds_shapes(locate(spec, Path()), TensorPreprocess(), {"a": ((3,), "float32")}, names)


def test_weights_must_fit_exactly(tmp_path: Path) -> None:
    state = load_file(DIGITS / "digits_resnet.safetensors")
    state["extra"] = torch.zeros(1)
    state["linear.weight"] = torch.zeros(9, 64)
    del state["conv1.weight"]
    save_file(state, tmp_path / "w.safetensors")
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    for refused in (model_facts, load_model):
        with pytest.raises(SourceError) as error:
            refused(locate(spec, Path()), DIGITS_FEEDS)
        assert "missing: 'conv1.weight'" in str(error.value)
        assert "not in the model: 'extra'" in str(error.value)
        assert "'linear.weight' is [9, 64] in the file, [10, 64] in the model" in str(error.value)


def test_prefixed_weights_say_the_prefix(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in load_file(DIGITS / "digits_resnet.safetensors").items()}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(SourceError, match=r"save the file without the prefix 'module\.'"):
        model_facts(
            locate(DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")}), Path()), DIGITS_FEEDS
        )


def test_torch_files_load_when_they_hold_tensors_only(tmp_path: Path) -> None:
    state = load_file(DIGITS / "digits_resnet.safetensors")
    torch.save({"state_dict": state}, tmp_path / "w.pt")
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.pt")})
    assert model_facts(locate(spec, Path()), DIGITS_FEEDS) == model_facts(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS)
    loaded = load_model(locate(spec, Path()), DIGITS_FEEDS).module
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(SourceError, match=r"w\.pt: holds Python objects.*could run code.*save_file"):
        load_model(locate(spec, Path()), DIGITS_FEEDS)


def test_damaged_and_unusable_weights(tmp_path: Path) -> None:
    whole = (DIGITS / "digits_resnet.safetensors").read_bytes()
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    for damaged in (whole[:-100], whole[:20], b"nonsense"):
        (tmp_path / "w.safetensors").write_bytes(damaged)
        with pytest.raises(SourceError, match=r"w\.safetensors: is not a whole safetensors file"):
            model_facts(locate(spec, Path()), DIGITS_FEEDS)
    state = load_file(DIGITS / "digits_resnet.safetensors")
    state["linear.bias"][3] = float("nan")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(SourceError, match=r"NaN or infinity in 'linear\.bias'"):
        load_model(locate(spec, Path()), DIGITS_FEEDS)


def test_factories_that_cannot_be_used(python_file: Callable[[str], str], tmp_path: Path) -> None:
    source = python_file("def make(depth=1): raise ValueError('deep')\ndef other(): return 1\n")

    def refused(source: str, **spec: Any) -> str:
        with pytest.raises(SourceError) as error:
            model_facts(locate(ModelSpec(source=source, task="generic", **spec), tmp_path), {})
        return str(error.value)

    assert "the factory failed: ValueError: deep" in refused(source)
    assert "got an unexpected keyword argument 'dept'; the factory is make(depth=1)" in refused(
        source, args={"dept": 2}
    )
    assert "there is no such function; the module has: make, other" in refused(source.replace(":make", ":maker"))
    assert "the factory gave int, not a torch.nn.Module" in refused(source.replace(":make", ":other"))
    assert "no such file" in refused("python:absent.py:make")
    assert "give its file: python:no_such_package/nets.py:make" in refused("python:no_such_package.nets:make")
    assert "write python:package.module:factory" in refused("python:net")
    assert "`weights` and `args` belong to python: sources" in refused(f"dir:{tmp_path}", weights="w.safetensors")
    (tmp_path / "net.py").write_text("import no_such_package\n")
    assert "importing failed: ModuleNotFoundError" in refused(source)


def test_a_relative_file_is_found_beside_the_recipe(python_file: Callable[[str], str], tmp_path: Path) -> None:
    python_file("def make(): return nn.Linear(2, 2)")
    opened = open_on_meta(locate(ModelSpec(source="python:net.py:make", task="generic"), tmp_path))
    assert model_inputs(opened) == ("input",)


def test_outputs_that_cannot_be_exported_are_named_by_their_types(python_file: Callable[[str], str]) -> None:
    body = "class Net(nn.Module):\n    def forward(self, x): return x, None\ndef make(): return Net()"
    spec = ModelSpec(source=python_file(body), task="generic")
    with pytest.raises(
        SourceError, match=r"forward gives tuple of .*Tensor, NoneType; a tensor, or tensors in a tuple"
    ):
        model_facts(locate(spec, Path()), {"x": ((2,), "float32")})


def test_a_task_needs_its_output_shape(python_file: Callable[[str], str]) -> None:
    source = python_file("def make(): return nn.Conv2d(1, 4, 3)")
    spec = ModelSpec(source=source, task="image-classification")
    with pytest.raises(
        SourceError, match=r"needs one output \[batch, classes\], but forward gives output \[1, 4, 6, 6\]"
    ):
        model_facts(locate(spec, Path()), DIGITS_FEEDS)
    with pytest.raises(
        SourceError, match=r"channels: python:.* takes images with 1 of them, and gets 3: set channels: L"
    ):
        model_facts(locate(spec, Path()), {"pixel_values": ((3, 8, 8), "float32")})
    with pytest.raises(SourceError, match=r"forward fails on input \[1, 1, 2, 2\] float32: RuntimeError"):
        model_facts(locate(spec, Path()), {"pixel_values": ((1, 2, 2), "float32")})
    with pytest.raises(SourceError, match="2 names, but the model has 10 classes"):
        model_facts(locate(DIGITS_SPEC.model_copy(update={"class_names": ("a", "b")}), Path()), DIGITS_FEEDS)


SPANS = """
from torch import nn


class Spans(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.table = form, nn.Embedding(9, 2)

    def forward(self, input_ids):
        start, end = self.table(input_ids).unbind(-1)
        named = {"end_logits": end, "start_logits": start}
        return {"tuple": (start, end), "dict": named, "one": start, "other": {"a": start, "b": end}}[self.form]
"""


@pytest.mark.parametrize(
    ("form", "names"),
    [("tuple", ["start_logits", "end_logits"]), ("dict", ["end_logits", "start_logits"])],
)
def test_outputs_are_named_by_the_task(tmp_path: Path, form: str, names: list[str]) -> None:
    (tmp_path / "spans.py").write_text(SPANS)
    spec = ModelSpec(source="python:spans.py:Spans", task="question-answering", args={"form": form})
    found = model_facts(locate(spec, tmp_path), {"input_ids": ((5,), "int64")}).outputs
    assert [(out.name, out.shape) for out in found] == [(name, ("batch", "sequence")) for name in names]


def test_outputs_that_a_task_lacks(tmp_path: Path) -> None:
    (tmp_path / "spans.py").write_text(SPANS)
    spec = ModelSpec(source="python:spans.py:Spans", task="question-answering", args={"form": "one"})
    with pytest.raises(SourceError, match=r"needs the outputs start_logits \[batch, sequence\] and end_logits"):
        model_facts(locate(spec, tmp_path), {"input_ids": ((5,), "int64")})
    value = helper.make_tensor_value_info
    shape = ["batch", "sequence"]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], [name]) for name in ("first", "second")]
    given = [value(name, TensorProto.FLOAT, shape) for name in ("first", "second")]
    table = onnx.numpy_helper.from_array(np.ones(9, np.float32), "table")
    graph = helper.make_graph(nodes, "spans", [value("input_ids", TensorProto.INT64, shape)], given, [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    by_order = ModelSpec(source=f"onnx:{tmp_path}/m.onnx", task="question-answering")
    with pytest.raises(SourceError, match=r"the graph gives 'first' .*; call them so, or use task: generic"):
        model_facts(locate(by_order, Path()), {"input_ids": ((5,), "int64")})
