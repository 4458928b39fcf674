"""Every kind of model goes through its passes into a bundle that serves where nothing of the build side exists."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
import pytest
import torch
from makers import NET, QUICK, apply, changed, plan, serve, text_folder, write_texts
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file

from compress.errors import PlanError
from runtime.backends import BACKENDS

Net = tuple[Path, dict[str, Any]]
IMAGES = "np.zeros((3, 8, 8), np.uint8)"


def kinds(report: Any) -> dict[str, str]:
    """Layer -> what was done to it."""
    return {row["layer"]: row["action"] for row in report.layers if row["layer"]}


def digits_recipe(*passes: str) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "digits",
        "vars": {"digits": "${package:compress}/zoo/digits"},
        "model": {
            "source": "python:compress.zoo.digits_resnet:digits_resnet",
            "weights": "${digits}/digits_resnet.safetensors",
            "task": "image-classification",
        },
        "preprocess": {"kind": "image", "channels": "L", "mean": [0.305], "std": [0.376]},
        "data": {
            "calibration": {"source": "npz:${digits}/train.npz", "samples": 32},
            "evaluation": {"source": "npz:${digits}/test.npz", "samples": 100},
        },
        "passes": [{"kind": kind} for kind in passes],
        "validate": {"gates": [{"metric": "agreement", "min": 0.9}], "benchmark": QUICK},
    }


def test_python_factory_of_a_package(tmp_path: Path, cache: Path) -> None:
    report = apply(digits_recipe("autocast"), tmp_path / "b", cache)
    assert report.verdict == "pass" and report.candidate.metrics["top1"] > 0.95
    assert set(kinds(report).values()) == {"float16"} and report.ratios["size"] > 1.8
    assert serve(tmp_path / "b", IMAGES, tmp_path)["shapes"]["logits"] == [3, 10]


def test_a_pass_that_reaches_little_is_told_of_in_the_end(tmp_path: Path, cache: Path) -> None:
    advice = apply(digits_recipe("gptq"), tmp_path / "b", cache).advice
    assert any("gptq reaches only layer linear (" in text and "use int8, which takes" in text for text in advice)


def test_bfloat16_is_judged_where_it_runs(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install '.[openvino]'")
    gates = {"gates": [{"metric": "top1", "max_drop": 0.5}], "benchmark": QUICK}
    recipe = changed(net[1], passes=[{"kind": "autocast", "dtype": "bfloat16"}], target="openvino", validate=gates)
    report = apply(recipe, tmp_path / "b", tmp_path / "cache", net[0])
    assert report.verdict == "pass" and report.backend == "openvino"
    assert set(kinds(report).values()) == {"bfloat16"} and report.ratios["size"] > 1.5
    monkeypatch.setitem(BACKENDS.own, "openvino", replace(BACKENDS["openvino"], available=lambda: "it is broken"))
    with pytest.raises(
        PlanError, match=r"openvino does not work here \(it is broken\), .* could not be judged; use dtype"
    ):
        plan(recipe, net[0], tmp_path / "cache")


def test_python_file_with_safetensors(net: Net, bundle: Path) -> None:
    served = serve(bundle, IMAGES, net[0])
    assert served["shapes"] == {"logits": [3, 3], "prediction": [3]} and served["finite"]
    assert served["metrics"]["top1"] >= 0.9 and served["metrics"]["agreement"] >= 0.9


def test_a_torch_file_of_the_same_weights_gives_the_same_model(net: Net, bundle: Path, tmp_path: Path) -> None:
    folder, recipe = net
    (tmp_path / "net.py").write_text(NET)
    for name in ("train.npz", "test.npz"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    torch.save({"state_dict": load_file(folder / "net.safetensors")}, tmp_path / "net.pt")
    apply(changed(recipe, model={"weights": "net.pt"}), tmp_path / "b", tmp_path / "cache")
    for model in ("baseline/model.onnx", "model/model.onnx"):
        assert (tmp_path / "b" / model).read_bytes() == (bundle / model).read_bytes()


def test_two_flavours_of_one_calibration(net: Net, cache: Path, tmp_path: Path) -> None:
    exports = [{"kind": "onnx"}, {"kind": "onnx", "target": "tensorrt"}]
    apply(changed(net[1], export=exports), tmp_path / "b", cache, net[0])
    main, other = (onnx.load(tmp_path / "b" / name / "model.onnx") for name in ("model", "model-tensorrt"))
    zeros = {graph: points(model) for graph, model in (("main", main), ("other", other))}
    assert zeros["main"]["uint8"] and not zeros["other"]["uint8"]
    assert all(not array.any() for array in zeros["other"]["int8"]), "TensorRT refuses zero points"
    assert serve(tmp_path / "b", IMAGES, tmp_path)["metrics"]["agreement"] >= 0.9


def points(model: onnx.ModelProto) -> dict[str, list[np.ndarray]]:
    """Zero points of the graph's QuantizeLinear and DequantizeLinear nodes, by dtype."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    arrays = [values[node.input[2]] for node in nodes if len(node.input) > 2 and node.input[2]]
    return {dtype: [a for a in arrays if a.dtype == dtype] for dtype in ("uint8", "int8")}


def test_a_target_that_does_not_run_here_is_judged_on_the_cpu(net: Net, cache: Path, tmp_path: Path) -> None:
    report = apply(changed(net[1], target="tensorrt"), tmp_path / "b", cache, net[0])
    assert (report.verdict, report.backend) == ("pass", "onnxruntime-cpu")
    assert any("made for tensorrt, but it runs on onnxruntime-cpu here" in text for text in report.advice)


def onnx_by_hand(path: Path) -> Path:
    """x [n, 1, 8, 8] -> logits [n, 3], with nodes that have no names, at an opset of some years ago."""
    rng = np.random.default_rng(0)
    shapes = {"k": (4, 1, 3, 3), "w1": (256, 16), "b1": (16,), "w2": (16, 3)}
    weights = {name: rng.normal(0, 1 / np.sqrt(shape[0]), shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "w1", "b1"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", "w2"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_onnx_made_by_hand(net: Net, cache: Path, tmp_path: Path) -> None:
    recipe = changed(net[1], model={"source": f"onnx:{onnx_by_hand(tmp_path / 'm.onnx')}"})
    del recipe["model"]["weights"]
    report = apply(changed(recipe, passes=[{"kind": "int8", "ignore": ["MatMul_5"]}]), tmp_path / "b", cache, net[0])
    assert report.verdict == "pass"
    assert kinds(report) == {"Conv_0": "int8", "Gemm_3": "int8", "MatMul_5": "kept"}
    assert serve(tmp_path / "b", IMAGES, tmp_path)["shapes"]["logits"] == [3, 3]


@pytest.mark.filterwarnings("ignore")
def test_onnx_as_torch_exports_it_in_its_own_words(cache: Path, tmp_path: Path) -> None:
    """task: generic, judged against the float model alone."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = torch.nn.Linear(24, 16), torch.nn.Linear(16, 8)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.up(torch.tanh(self.down(torch.cat([a, b], dim=1))))

    torch.manual_seed(0)
    torch.onnx.export(
        Two().eval(),
        (torch.rand(2, 16), torch.rand(2, 8)),
        tmp_path / "two.onnx",
        dynamo=True,
        input_names=["first", "second"],
        output_names=["result"],
        dynamic_shapes={"a": {0: "rows"}, "b": {0: "rows"}},
        external_data=False,
        verbose=False,
    )
    rng = np.random.default_rng(0)
    arrays = {"first": rng.normal(size=(160, 16)), "second": rng.normal(size=(160, 8))}
    np.savez(tmp_path / "d.npz", **{name: array.astype(np.float32) for name, array in arrays.items()})
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "two",
        "model": {"source": "onnx:two.onnx", "task": "generic"},
        "data": {
            "calibration": {"source": "npz:d.npz", "samples": 32},
            "evaluation": {"source": "npz:d.npz", "samples": 128, "skip": 32},
        },
        "passes": [{"kind": "int8"}],
        "validate": {
            "gates": [{"metric": "cosine", "min": 0.99 if graphs.sums_are_exact() else 0.9}],
            "benchmark": QUICK,
        },
    }
    report = apply(recipe, tmp_path / "b", cache)
    assert report.verdict == "pass" and set(kinds(report)) == {"down", "up"}
    columns = "{'first': np.zeros((3, 16), np.float32), 'second': np.zeros((3, 8), np.float32)}"
    assert serve(tmp_path / "b", columns, tmp_path)["shapes"] == {"result": [3, 8]}


def test_a_detector_of_images_with_a_fixed_batch_is_cleaned_judged_and_served(cache: Path, tmp_path: Path) -> None:
    """task: generic with images, of one opset 11 file of batch 1 with its norm beside the convolution."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(8, 3, 3, 3)), "b": rng.normal(size=8), "v": rng.uniform(1, 2, 8)}
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    nodes = [
        helper.make_node("Conv", ["frames", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "v", "b", "b", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["boxes"]),
    ]
    info = helper.make_tensor_value_info
    frames, boxes = (info("frames", TensorProto.FLOAT, [1, 3, 8, 8]), info("boxes", TensorProto.FLOAT, [1, 8, 8, 8]))
    graph = helper.make_graph(nodes, "detector", [frames], [boxes], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6), tmp_path / "d.onnx")
    np.savez(tmp_path / "d.npz", image=rng.integers(0, 256, size=(144, 12, 10, 3), dtype=np.uint8))
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "detector",
        "model": {"source": "onnx:d.onnx", "task": "generic"},
        "preprocess": {"kind": "image", "resize": [8, 8], "mean": [0.5], "std": [0.5]},
        "data": {
            "calibration": {"source": "npz:d.npz", "samples": 16},
            "evaluation": {"source": "npz:d.npz", "samples": 128, "skip": 16},
        },
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "cosine", "min": 0.99}], "benchmark": QUICK},
    }
    said = [note.text for work in plan(recipe, tmp_path, cache).steps for note in work.notes]
    assert any("opset 11 raised to 20, batch norms and channel scales folded" in text for text in said)
    report = apply(recipe, tmp_path / "b", cache, tmp_path)
    assert report.verdict == "pass" and set(kinds(report).values()) == {"int8"}
    assert any("the ONNX file was cleaned" in row.get("reason", "") for row in report.layers)
    assert serve(tmp_path / "b", f"[{IMAGES}.transpose(1, 2, 0)]", tmp_path)["shapes"] == {"boxes": [1, 8, 8, 8]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for kind in ("classifier", "encoder"):
        text_folder(folder / kind, kind, 1)
    write_texts(folder / "train.jsonl", 24, pairs=True, seed=1)
    write_texts(folder / "test.jsonl", 60, pairs=True, seed=2)
    return folder


def text_recipe(task: str, folder: str, passes: list[dict[str, Any]], gate: dict[str, Any]) -> dict[str, Any]:
    columns = {"text": "text", "label": "label"} | ({"text_pair": "text_pair"} if folder == "encoder" else {})
    return {
        "version": 1,
        "name": "words",
        "model": {"source": f"dir:{folder}", "task": task},
        "data": {
            "calibration": {"source": "jsonl:train.jsonl", "columns": columns},
            "evaluation": {"source": "jsonl:test.jsonl", "columns": columns},
        },
        "passes": passes,
        "validate": {"gates": [gate], "benchmark": {**QUICK, "sequence_length": 16}},
    }


@pytest.mark.parametrize(
    ("passes", "action"),
    [
        ([{"kind": "smoothquant"}, {"kind": "int8"}], "int8"),
        ([{"kind": "int8", "mode": "dynamic"}], "int8"),
        ([{"kind": "rtn", "scheme": "W4A16", "group_size": 16}], "w4"),
    ],
)
def test_a_text_classifier(texts: Path, cache: Path, tmp_path: Path, passes: list[Any], action: str) -> None:
    recipe = text_recipe("text-classification", "classifier", passes, {"metric": "agreement", "min": 0.5})
    report = apply(recipe, tmp_path / "b", cache, texts)
    least = 0.9 if graphs.sums_are_exact() else 0.8
    assert report.verdict == "pass" and report.candidate.metrics["cosine"] > least
    done = kinds(report)
    assert done["classifier"] == action and done["bert.encoder.layer.0.intermediate.dense"] == action
    assert (tmp_path / "b/model/tokenizer.json").is_file() and (tmp_path / "b/model/config.json").is_file()
    served = serve(tmp_path / "b", "['w1 w2', 'w3 w4 w5 and more']", tmp_path)
    assert served["shapes"] == {"logits": [2, 3], "prediction": [2]} and served["finite"]


def test_sentence_embeddings(texts: Path, cache: Path, tmp_path: Path) -> None:
    passes = [{"kind": "smoothquant"}, {"kind": "int8", "calibration": "percentile"}]
    recipe = text_recipe("feature-extraction", "encoder", passes, {"metric": "cosine", "min": 0.95})
    report = apply(recipe, tmp_path / "b", cache, texts)
    assert report.verdict == "pass"
    served = serve(tmp_path / "b", "[('w1 w2', 'w3'), ('w4', 'w5 w6')]", tmp_path)
    assert served["shapes"] == {"embeddings": [2, 2, 32]}
    assert serve(tmp_path / "b", "['w1 w2 w3']", tmp_path)["shapes"] == {"embeddings": [1, 1, 32]}


def test_a_layer_that_readers_build_and_the_model_has_not_is_no_quantized_one(
    texts: Path, cache: Path, tmp_path: Path
) -> None:
    """transformers' BertModel has a pooler, which embeddings leave out: it reads the source's own floats of it."""
    from transformers import AutoModel

    passes = [{"kind": "rtn", "scheme": "W4A16", "group_size": 16}]
    recipe = text_recipe("feature-extraction", "encoder", passes, {"metric": "cosine", "min": 0.5})
    apply({**recipe, "export": [{"kind": "onnx"}, {"kind": "checkpoint"}]}, tmp_path / "b", cache, texts)
    model, said = AutoModel.from_pretrained(tmp_path / "b/checkpoint", output_loading_info=True)
    before = AutoModel.from_pretrained(texts / "encoder").pooler.dense
    assert not said["missing_keys"] and torch.equal(model.pooler.dense.weight, before.weight)
    assert "pooler.dense" in model.config.quantization_config.quantization_config.ignore


def test_a_changed_tokenizer_changes_every_result(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    recipe = text_recipe("text-classification", "classifier", [{"kind": "int8"}], {"metric": "agreement", "min": 0.5})
    before = plan(recipe, texts, tmp_path).keys
    assert plan(recipe, tmp_path / "texts", tmp_path).keys == before
    tokenizer = tmp_path / "texts/classifier/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w1": 5', '"w1": 6').replace('"w2": 6', '"w2": 5'))
    after = plan(recipe, tmp_path / "texts", tmp_path).keys
    assert not {after.float_graph, after.baseline, *after.passes} & {
        before.float_graph,
        before.baseline,
        *before.passes,
    }


def test_a_vision_transformer(cache: Path, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(image_size=16, patch_size=8, intermediate_size=64, **sizes)
    config.num_labels, config.initializer_range = 5, 0.3
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 256)
    np.savez(tmp_path / "d.npz", image=rng.integers(0, 256, (256, 20, 18, 3), dtype=np.uint8), label=labels)
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "vit",
        "model": {"source": "dir:vit", "task": "image-classification"},
        "data": {"calibration": {"source": "npz:d.npz", "samples": 16}, "evaluation": {"source": "npz:d.npz"}},
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "cosine", "min": 0.9}], "benchmark": QUICK},
    }
    report = apply(recipe, tmp_path / "b", cache)
    assert report.verdict == "pass" and kinds(report)["classifier"] == "int8"
    assert serve(tmp_path / "b", "np.zeros((2, 20, 18, 3), np.uint8)", tmp_path)["shapes"]["logits"] == [2, 5]
