"""Models: facts agree with the loaded model and its export, and each refusal says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch import nn

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models.facts import model_facts
from compress.models.feeds import feeds_shapes, model_inputs
from compress.models.load import OnnxModel, load_model
from compress.models.preprocess import resolve_preprocess
from compress.models.source import model_digest
from compress.specs import ModelSpec
from compress.zoo.digits_resnet import DIGITS
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import ImagePreprocess, TensorPreprocess, TextPreprocess

DIGITS_SPEC = ModelSpec(
    source="python:compress.zoo.digits_resnet:digits_resnet",
    weights=str(DIGITS / "digits_resnet.safetensors"),
    task="image-classification",
)
DIGITS_FEEDS: SampleShapes = {"pixel_values": ((1, 8, 8), "float32")}
TEXT_FEEDS: SampleShapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ((16,), "int64"))


def text_spec(folder: Path, task: Any = "text-classification") -> ModelSpec:
    return ModelSpec(source=f"dir:{folder}", task=task)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with a tokenizer file."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bert")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = BertConfig(vocab_size=50, max_position_embeddings=64, **sizes)
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("vit")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, **sizes)
    config.num_labels = 5
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def python_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a module body (torch and nn imported) and gives the source of its factory `make`."""

    def write(body: str) -> str:
        (tmp_path / "net.py").write_text(f"import torch\nfrom torch import nn\n{body}")
        return f"python:{tmp_path / 'net.py'}:make"

    return write


def changed_config(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a model folder with other values in config.json."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


# ---- python: sources -----------------------------------------------------------------------------------------------


def test_facts_of_a_convolutional_net_match_hand_counts() -> None:
    facts = model_facts(DIGITS_SPEC, Path(), DIGITS_FEEDS)
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
    facts, loaded = model_facts(DIGITS_SPEC, Path(), DIGITS_FEEDS), load_model(DIGITS_SPEC, Path(), DIGITS_FEEDS)
    assert (loaded.inputs, loaded.outputs, loaded.architecture) == (facts.inputs, facts.outputs, facts.architecture)
    assert loaded.parameters == {"pixel_values": "x"}
    assert not loaded.module.training
    stored = load_file(DIGITS / "digits_resnet.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.module.state_dict().items())


def test_planning_and_loading_leave_the_random_state() -> None:
    state = torch.get_rng_state()
    model_facts(DIGITS_SPEC, Path(), DIGITS_FEEDS)
    load_model(DIGITS_SPEC, Path(), DIGITS_FEEDS)
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
    facts = model_facts(ModelSpec(source=python_file(body), task="generic"), Path(), {"x": ((256,), "float32")})
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
    facts = model_facts(ModelSpec(source=python_file(body), task="generic"), Path(), {"ids": ((5,), "int64")})
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
    facts = model_facts(ModelSpec(source=python_file(body), task="generic"), Path(), {"x": ((4,), "float32")})
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
    assert model_inputs(spec, Path()) == ("a", "b")
    samples: SampleShapes = {"a": ((3,), "float64"), "b": ((3,), "float32")}
    feeds = feeds_shapes(spec, Path(), TensorPreprocess(), samples)
    assert feeds == {"a": ((3,), "float32"), "b": ((3,), "float32")}
    assert load_model(spec, Path(), feeds).output_names == ("sum", "product")
    with pytest.raises(SourceError, match="no data for its input b; the data has: a"):
        feeds_shapes(spec, Path(), TensorPreprocess(), {"a": ((3,), "float32")})


def test_weights_must_fit_exactly(tmp_path: Path) -> None:
    state = load_file(DIGITS / "digits_resnet.safetensors")
    state["extra"] = torch.zeros(1)
    state["linear.weight"] = torch.zeros(9, 64)
    del state["conv1.weight"]
    save_file(state, tmp_path / "w.safetensors")
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    for refused in (model_facts, load_model):
        with pytest.raises(SourceError) as error:
            refused(spec, Path(), DIGITS_FEEDS)
        assert "missing: 'conv1.weight'" in str(error.value)
        assert "not in the model: 'extra'" in str(error.value)
        assert "'linear.weight' is [9, 64] in the file, [10, 64] in the model" in str(error.value)


def test_prefixed_weights_say_the_prefix(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in load_file(DIGITS / "digits_resnet.safetensors").items()}
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(SourceError, match=r"save the file without the prefix 'module\.'"):
        model_facts(DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")}), Path(), DIGITS_FEEDS)


def test_torch_files_load_when_they_hold_tensors_only(tmp_path: Path) -> None:
    state = load_file(DIGITS / "digits_resnet.safetensors")
    torch.save({"state_dict": state}, tmp_path / "w.pt")
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.pt")})
    assert model_facts(spec, Path(), DIGITS_FEEDS) == model_facts(DIGITS_SPEC, Path(), DIGITS_FEEDS)
    loaded = load_model(spec, Path(), DIGITS_FEEDS).module
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(SourceError, match=r"w\.pt: holds Python objects.*could run code.*save_file"):
        load_model(spec, Path(), DIGITS_FEEDS)


def test_damaged_and_unusable_weights(tmp_path: Path) -> None:
    whole = (DIGITS / "digits_resnet.safetensors").read_bytes()
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "w.safetensors")})
    for damaged in (whole[:-100], whole[:20], b"nonsense"):
        (tmp_path / "w.safetensors").write_bytes(damaged)
        with pytest.raises(SourceError, match=r"w\.safetensors: is not a whole safetensors file"):
            model_facts(spec, Path(), DIGITS_FEEDS)
    state = load_file(DIGITS / "digits_resnet.safetensors")
    state["linear.bias"][3] = float("nan")
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(SourceError, match=r"NaN or infinity in 'linear\.bias'"):
        load_model(spec, Path(), DIGITS_FEEDS)


def test_factories_that_cannot_be_used(python_file: Callable[[str], str], tmp_path: Path) -> None:
    source = python_file("def make(depth=1): raise ValueError('deep')\ndef other(): return 1\n")

    def refused(source: str, **spec: Any) -> str:
        with pytest.raises(SourceError) as error:
            model_facts(ModelSpec(source=source, task="generic", **spec), tmp_path, {})
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
    assert model_inputs(ModelSpec(source="python:net.py:make", task="generic"), tmp_path) == ("input",)


def test_outputs_that_cannot_be_exported_are_named_by_their_types(python_file: Callable[[str], str]) -> None:
    body = "class Net(nn.Module):\n    def forward(self, x): return x, None\ndef make(): return Net()"
    spec = ModelSpec(source=python_file(body), task="generic")
    with pytest.raises(
        SourceError, match=r"forward gives tuple of .*Tensor, NoneType; a tensor, or tensors in a tuple"
    ):
        model_facts(spec, Path(), {"x": ((2,), "float32")})


def test_a_task_needs_its_output_shape(python_file: Callable[[str], str]) -> None:
    source = python_file("def make(): return nn.Conv2d(1, 4, 3)")
    spec = ModelSpec(source=source, task="image-classification")
    with pytest.raises(
        SourceError, match=r"needs one output \[batch, classes\], but forward gives output \[1, 4, 6, 6\]"
    ):
        model_facts(spec, Path(), DIGITS_FEEDS)
    with pytest.raises(SourceError, match=r"forward fails on input \[1, 3, 8, 8\] float32: RuntimeError"):
        model_facts(spec, Path(), {"pixel_values": ((3, 8, 8), "float32")})
    with pytest.raises(SourceError, match="2 names, but the model has 10 classes"):
        model_facts(DIGITS_SPEC.model_copy(update={"class_names": ("a", "b")}), Path(), DIGITS_FEEDS)


# ---- Hugging Face folders ------------------------------------------------------------------------------------------


def test_bert_classifier(bert: Path) -> None:
    from transformers import BertForSequenceClassification

    spec = text_spec(bert)
    facts, loaded = model_facts(spec, Path(), TEXT_FEEDS), load_model(spec, Path(), TEXT_FEEDS)
    assert facts.architecture == "BertForSequenceClassification"
    assert facts.inputs == tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in TEXT_FEEDS)
    assert facts.outputs == (TensorSpec("logits", "float32", ("batch", 3)),)
    layers = {layer.name: layer for layer in facts.layers}
    assert layers["bert.encoder.layer.1.intermediate.dense"].macs == 16 * 16 * 32
    assert layers["classifier"].op == "Gemm"
    assert loaded.class_names == ("bad", "fair", "good")
    assert loaded.folder == bert
    reference = BertForSequenceClassification.from_pretrained(bert).eval()
    ids, mask = torch.arange(12).reshape(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask, token_type_ids=mask * 0).logits
        torch.testing.assert_close(loaded.module(ids, mask, mask * 0), expected)


def test_bert_features_have_no_pooler(bert: Path) -> None:
    facts = model_facts(text_spec(bert, "feature-extraction"), Path(), TEXT_FEEDS)
    assert facts.outputs == (TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 16)),)
    assert not any("pooler" in layer.name for layer in facts.layers)
    assert "weights that a feature-extraction model does not use: bert.pooler.dense.bias" in facts.notes[0]


def test_vit(vit: Path) -> None:
    spec = ModelSpec(source=f"dir:{vit}", task="image-classification")
    feeds: SampleShapes = {"pixel_values": ((3, 16, 16), "float32")}
    facts, loaded = model_facts(spec, Path(), feeds), load_model(spec, Path(), feeds)
    patches = next(layer for layer in facts.layers if layer.type == "Conv2d")
    assert patches.macs == 2 * 2 * 16 * 3 * 8 * 8
    assert (facts.outputs, loaded.outputs) == ((TensorSpec("logits", "float32", ("batch", 5)),),) * 2
    assert loaded.class_names == ()  # LABEL_0, ... say nothing


def test_a_checkpoint_without_the_tasks_head_is_refused(bert: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    BertModel.from_pretrained(bert).save_pretrained(tmp_path / "base")
    with pytest.raises(
        SourceError, match=r"the weights lack 'classifier\.bias', which a text-classification model needs"
    ):
        model_facts(text_spec(tmp_path / "base"), Path(), TEXT_FEEDS)


def test_weights_of_another_config_are_refused(bert: Path, tmp_path: Path) -> None:
    other = changed_config(bert, tmp_path / "other", vocab_size=60)
    for refused in (model_facts, load_model):
        with pytest.raises(
            SourceError, match=r"word_embeddings\.weight' is \[50, 16\] in the weights, \[60, 16\] in the"
        ):
            refused(text_spec(other), Path(), TEXT_FEEDS)


def test_damaged_and_unknown_folders(bert: Path, tmp_path: Path) -> None:
    cut = changed_config(bert, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-10])
    unknown = changed_config(bert, tmp_path / "unknown", model_type="no_such_type")
    (tmp_path / "empty").mkdir()
    for folder, message in {
        cut: r"model\.safetensors: is not a whole safetensors file",
        unknown: "config.json cannot be used: .*no_such_type",
        tmp_path / "empty": "has no config.json",
        tmp_path / "absent": "no such file or folder",
    }.items():
        with pytest.raises(SourceError, match=message):
            model_facts(text_spec(folder), Path(), TEXT_FEEDS)
    with pytest.raises(SourceError, match="task generic is for python: and onnx: sources"):
        model_facts(text_spec(bert, "generic"), Path(), TEXT_FEEDS)


def test_an_absent_hub_model_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"hf:nobody/nothing-here: cannot be fetched.*HF_HUB_OFFLINE"):
        model_facts(ModelSpec(source="hf:nobody/nothing-here", task="text-classification"), Path(), TEXT_FEEDS)


# ---- ONNX ----------------------------------------------------------------------------------------------------------


def small_onnx(path: Path, weight: np.ndarray | None = None, external: bool = False) -> Path:
    """x [N, 3, 6, 6] -> Conv 3x3 -> ReduceMean -> MatMul [4, 5] -> logits."""
    kernel = np.ones((4, 3, 3, 3), np.float32) if weight is None else weight
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "matrix"], ["logits"], name="head"),
    ]
    values = {"kernel": kernel, "matrix": np.arange(20, dtype=np.float32).reshape(4, 5)}
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 6, 6])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location="small.data", size_threshold=0)
    return path


def onnx_spec(path: Path) -> ModelSpec:
    return ModelSpec(source=f"onnx:{path}", task="image-classification")


ONNX_FEEDS: SampleShapes = {"x": ((3, 6, 6), "float32")}


@pytest.mark.parametrize("external", [False, True])
def test_onnx_facts(tmp_path: Path, external: bool) -> None:
    spec = onnx_spec(small_onnx(tmp_path / "m.onnx", external=external))
    facts, loaded = model_facts(spec, Path(), ONNX_FEEDS), load_model(spec, Path(), ONNX_FEEDS)
    found = [(layer.name, layer.type, layer.op, layer.shape, layer.macs) for layer in facts.layers]
    assert found == [
        ("conv", "Conv2d", "Conv", (4, 3, 3, 3), 4 * 4 * 4 * 27),
        ("head", "Linear", "MatMul", (5, 4), 20),
    ]
    assert facts.n_bytes == 4 * (4 * 27 + 20)
    assert facts.inputs == loaded.inputs == (TensorSpec("x", "float32", ("batch", 3, 6, 6)),)
    assert facts.outputs == loaded.outputs == (TensorSpec("logits", "float32", ("batch", 5)),)
    assert facts.peak_activation_bytes == 4 * (3 * 36 + 4 * 16)  # the input and the convolution's output
    assert isinstance(loaded, OnnxModel) and loaded.path == tmp_path / "m.onnx"


def test_onnx_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    with pytest.raises(SourceError, match=r"bad\.onnx: cannot be read as ONNX"):
        model_facts(onnx_spec(tmp_path / "bad.onnx"), Path(), ONNX_FEEDS)
    infinite = np.full((4, 3, 3, 3), np.inf, np.float32)
    with pytest.raises(SourceError, match="NaN or infinity in kernel"):
        load_model(onnx_spec(small_onnx(tmp_path / "inf.onnx", infinite)), Path(), ONNX_FEEDS)
    path = small_onnx(tmp_path / "m.onnx", external=True)
    with pytest.raises(SourceError, match=r"input 'x' takes \['batch', 3, 6, 6\], a sample is \[1, 6, 6\]"):
        model_facts(onnx_spec(path), Path(), {"x": ((1, 6, 6), "float32")})
    two = onnx.load(path, load_external_data=False)
    two.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, ["N", 4]))
    onnx.save(two, tmp_path / "named.onnx")
    model_facts(onnx_spec(tmp_path / "named.onnx"), Path(), ONNX_FEEDS)  # one of them is called logits
    two.graph.node[-1].output[0] = two.graph.output[0].name = "y"
    onnx.save(two, tmp_path / "two.onnx")
    with pytest.raises(SourceError, match=r"one output \[batch, classes\], but the graph gives 'y' .*'f' .*'logits'"):
        model_facts(onnx_spec(tmp_path / "two.onnx"), Path(), ONNX_FEEDS)
    (tmp_path / "small.data").unlink()
    with pytest.raises(SourceError, match=r"weights file .*small\.data is missing"):
        model_facts(onnx_spec(path), Path(), ONNX_FEEDS)


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
    spec = onnx_spec(onnx_with_values_everywhere(tmp_path))
    digests = {model_digest(spec, Path())}
    for name in ("constant", "then", "else", "function", "sparse"):
        (tmp_path / name).write_bytes(np.zeros(2, np.float32).tobytes())
        digests.add(model_digest(spec, Path()))
    assert len(digests) == 6
    (tmp_path / "function").unlink()
    with pytest.raises(SourceError, match=r"weights file .*function is missing"):
        model_digest(spec, Path())


EXPORT: dict[str, Any] = {"input_names": ["pixel_values"], "dynamo": True, "verbose": False}


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.slow
def test_exported_graph_has_the_layers_that_the_plan_named(tmp_path: Path, optimize: bool) -> None:
    facts, loaded = model_facts(DIGITS_SPEC, Path(), DIGITS_FEEDS), load_model(DIGITS_SPEC, Path(), DIGITS_FEEDS)
    batch = {0: torch.export.Dim("batch")}
    torch.onnx.export(
        loaded.module,
        (torch.zeros(2, 1, 8, 8),),
        tmp_path / "m.onnx",
        dynamic_shapes=(batch,),
        optimize=optimize,
        **EXPORT,
    )
    exported = model_facts(onnx_spec(tmp_path / "m.onnx"), Path(), DIGITS_FEEDS)
    by_name = {layer.name: layer for layer in exported.layers}
    for layer in facts.layers:
        found = by_name[layer.name]
        assert (found.shape, found.macs, found.op, found.type) == (layer.shape, layer.macs, layer.op, layer.type)


# ---- digests -------------------------------------------------------------------------------------------------------


def test_digest_follows_weights_code_and_arguments(
    python_file: Callable[[str], str], bert: Path, tmp_path: Path
) -> None:
    source = python_file("def make(width=2): return nn.Linear(width, 2)")
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    spec = ModelSpec(source=source, weights=str(tmp_path / "w.safetensors"), task="generic")
    seen = [model_digest(spec, Path()), model_digest(spec.model_copy(update={"args": {"width": 3}}), Path())]
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    seen.append(model_digest(spec, Path()))
    python_file("def make(width=2): return nn.Linear(width, 2, bias=True)")
    seen += [model_digest(spec, Path()), model_digest(text_spec(bert), Path())]
    seen.append(model_digest(text_spec(changed_config(bert, tmp_path / "c", layer_norm_eps=1e-3)), Path()))
    assert len(set(seen)) == len(seen)
    assert model_digest(spec, Path()) == seen[3]


# ---- preprocessing -------------------------------------------------------------------------------------------------


def write_json(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))


def test_text_preprocessing_comes_from_the_folder(bert: Path, tmp_path: Path) -> None:
    folder = changed_config(bert, tmp_path / "st")
    spec = text_spec(folder, "feature-extraction")
    assert resolve_preprocess(spec, None, Path()) == TextPreprocess(max_length=64)
    write_json(folder, tokenizer_config={"model_max_length": 1e30})
    assert resolve_preprocess(spec, None, Path()) == TextPreprocess(max_length=64)
    write_json(
        folder,
        tokenizer_config={"model_max_length": 60},
        sentence_bert_config={"max_seq_length": 32},
        modules=[{"path": "", "type": "x.models.Transformer"}, {"path": "1_Pooling", "type": "x.models.Pooling"}],
        **{"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
    )
    assert resolve_preprocess(spec, None, Path()) == TextPreprocess(max_length=32, pooling="cls", normalize=False)
    write_json(folder, **{"1_Pooling__config": {"pooling_mode_weightedmean_tokens": True}})
    with pytest.raises(SourceError, match="pooling weightedmean_tokens is not one of mean, cls, max"):
        resolve_preprocess(spec, None, Path())
    write_json(folder, modules=[{"path": "2_Dense", "type": "x.models.Dense"}])
    with pytest.raises(SourceError, match="Dense cannot be taken along"):
        resolve_preprocess(spec, None, Path())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"size": {"height": 16, "width": 20}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3},
            ImagePreprocess(resize=(16, 20), mean=(0.5,) * 3, std=(0.25,) * 3, resample="bicubic"),
        ),
        (
            {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}
            | {"do_normalize": False, "do_rescale": False},
            ImagePreprocess(resize=32, crop=(16, 16), scale=1.0),
        ),
        ({"size": 16, "do_normalize": False}, ImagePreprocess(resize=(16, 16))),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "do_normalize": False},
            ImagePreprocess(resize=256, crop=(224, 224)),
        ),
    ],
)
def test_image_preprocessing_comes_from_the_folder(vit: Path, tmp_path: Path, config: Any, expected: Any) -> None:
    folder = changed_config(vit, tmp_path / "vit")
    write_json(folder, preprocessor_config=config)
    assert resolve_preprocess(ModelSpec(source=f"dir:{folder}", task="image-classification"), None, Path()) == expected


def test_preprocessing_that_is_not_told_or_does_not_fit(bert: Path, vit: Path, tmp_path: Path) -> None:
    images = ModelSpec(source=f"dir:{vit}", task="image-classification")
    no_tokenizer = changed_config(bert, tmp_path / "bare")
    (no_tokenizer / "tokenizer.json").unlink()
    cases: list[tuple[ModelSpec, Any, str]] = [
        (images, None, "has no preprocessor_config.json"),
        (DIGITS_SPEC, None, "does not say how its inputs are made.*kind: image"),
        (images, TextPreprocess(), "kind: text does not fit the task image-classification"),
        (text_spec(bert), ImagePreprocess(), "kind: image does not fit the task text-classification"),
        (text_spec(bert, "feature-extraction"), TensorPreprocess(), "needs kind: text"),
        (text_spec(bert), TextPreprocess(max_length=65), "max_length 65 is more than the model's 64 positions"),
        (text_spec(no_tokenizer), None, "has no tokenizer.json; write one with AutoTokenizer"),
    ]
    for spec, declared, message in cases:
        with pytest.raises(SourceError, match=message):
            resolve_preprocess(spec, declared, Path())
    assert resolve_preprocess(DIGITS_SPEC, ImagePreprocess(channels="L"), Path()) == ImagePreprocess(channels="L")


def test_feeds_follow_the_preprocessing(bert: Path, vit: Path) -> None:
    assert feeds_shapes(text_spec(bert), Path(), TextPreprocess(max_length=16), {"text": ((), "text")}) == TEXT_FEEDS
    spec = ModelSpec(source=f"dir:{vit}", task="image-classification")
    sample: SampleShapes = {"image": ((40, 60, 3), "uint8")}
    for preprocess, shape in {
        ImagePreprocess(): (3, 40, 60),
        ImagePreprocess(resize=20): (3, 20, 30),
        ImagePreprocess(resize=20, crop=(16, 16), layout="NHWC"): (16, 16, 3),
        ImagePreprocess(channels="L"): (1, 40, 60),
    }.items():
        assert feeds_shapes(spec, Path(), preprocess, sample) == {"pixel_values": (shape, "float32")}
    with pytest.raises(SourceError, match="the size of the images is not known"):
        feeds_shapes(spec, Path(), ImagePreprocess(), {})


def test_preprocessing_and_digest_need_no_torch(bert: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from compress.recipe.schema import ModelSpec\n"
        "from compress.models.preprocess import resolve_preprocess; from compress.models.source import model_digest\n"
        f"spec = ModelSpec(source='dir:{bert}', task='text-classification')\n"
        "resolve_preprocess(spec, None, Path()); model_digest(spec, Path())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- several outputs


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
    found = model_facts(spec, tmp_path, {"input_ids": ((5,), "int64")}).outputs
    assert [(out.name, out.shape) for out in found] == [(name, ("batch", "sequence")) for name in names]


def test_outputs_that_a_task_lacks(tmp_path: Path) -> None:
    (tmp_path / "spans.py").write_text(SPANS)
    spec = ModelSpec(source="python:spans.py:Spans", task="question-answering", args={"form": "one"})
    with pytest.raises(SourceError, match=r"needs the outputs start_logits \[batch, sequence\] and end_logits"):
        model_facts(spec, tmp_path, {"input_ids": ((5,), "int64")})
    value = helper.make_tensor_value_info
    shape = ["batch", "sequence"]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], [name]) for name in ("first", "second")]
    given = [value(name, TensorProto.FLOAT, shape) for name in ("first", "second")]
    table = onnx.numpy_helper.from_array(np.ones(9, np.float32), "table")
    graph = helper.make_graph(nodes, "spans", [value("input_ids", TensorProto.INT64, shape)], given, [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    by_order = ModelSpec(source=f"onnx:{tmp_path}/m.onnx", task="question-answering")
    with pytest.raises(SourceError, match=r"the graph gives 'first' .*; call them so, or use task: generic"):
        model_facts(by_order, Path(), {"input_ids": ((5,), "int64")})
