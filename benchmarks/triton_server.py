"""Claims about `compress deploy --to triton`: a real tritonserver loads every model, and answers as the bundle does.

A classifier of images (recipes/quickstart.yaml), and of the script's own a classifier of texts, an embedding of texts
and a model of two tensors. Each is asked over HTTP and gRPC with requests of several sizes, several at once. The server
is nvidia-pytriton's, which has no backend for ONNX Runtime: a model of the Python backend that calls onnxruntime stands
in for it, under the same configuration. It listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, Call, Claim, Measured, Peer, Row, apply_recipe, at_least, at_most, run_job, run_script

import runtime
from compress.deploy.places import deploy
from compress.deploy.triton import Serving
from runtime.bundle.format import read_samples as read_bundle_samples
from runtime.tasks.manifest import read_manifest

NEEDS = ()
PEER = Peer("tritonserver", "triton_ask.py", venv="triton")
SAMPLES = 96
SIZES = (1, 3, 32)
"""Samples in a request."""
TOLERANCE = 1e-5
WORDS = [f"w{i}" for i in range(90)]
QUICK_JUDGE = {"benchmark": {"warmup": 1, "iterations": 10, "throughput_batch_size": 32}}
STAND_IN = '''\
"""Stands in for Triton's ONNX Runtime backend: one run for all the requests that the server gathered."""

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        columns = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        sizes = [len(next(iter(one.values()))) for one in columns]
        feeds = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
        names = [output.name for output in self.session.get_outputs()]
        pieces = [np.split(array, np.cumsum(sizes)[:-1]) for array in self.session.run(names, feeds)]
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, np.ascontiguousarray(rows[i])) for name, rows in zip(names, pieces)]
            )
            for i in range(len(requests))
        ]
'''


def measure(call: Call) -> Measured:
    recipes = {
        "images": ROOT / "recipes" / "quickstart.yaml",
        "texts": text_recipe(call.out / "texts-made", "text-classification"),
        "embeddings": text_recipe(call.out / "embeddings-made", "feature-extraction"),
        "tensors": tensor_recipe(call.out / "tensors-made"),
    }
    bundles = {kind: call.out / kind for kind in recipes}
    for kind, recipe in recipes.items():
        apply_recipe(recipe, (), bundles[kind], call.out / "cache")
    calls = [prepare_call(kind, bundle, call.out) for kind, bundle in bundles.items()]
    job = {
        "repositories": [call.out / f"{kind}-models" for kind in bundles],
        "log": call.out / "tritonserver.log",
        "calls": calls,
        "sizes": SIZES,
        "refused": {"model": calls[1]["model"], "text": b"\xff".hex()},
    }
    answer = run_job(PEER, job, call.out, "triton")
    rows = [compare_answers(kind, bundle, asked) for (kind, bundle), asked in zip(bundles.items(), calls, strict=True)]
    return claims(answer, rows), rows


def prepare_call(kind: str, bundle: Path, out: Path) -> dict[str, str]:
    """Write the bundle's repository, with the stand-in, and the samples to send."""
    repository = deploy(bundle, "triton", out / f"{kind}-models", Serving())
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text(encoding="utf-8")
        if 'platform: "onnxruntime_onnx"' in text:
            config.write_text(text.replace('platform: "onnxruntime_onnx"', 'backend: "python"'), encoding="utf-8")
            (config.parent / "1" / "model.py").write_text(STAND_IN, encoding="utf-8")
    samples = out / f"{kind}-samples.npz"
    np.savez(samples, **read_samples(kind, bundle))  # type: ignore[arg-type]
    name = read_manifest(bundle).name
    return {"model": name, "samples": str(samples), "answers": str(out / f"{kind}-answers.npz")}


def read_samples(kind: str, bundle: Path) -> dict[str, np.ndarray]:
    """Columns of some of the bundle's own samples as a client sends them: images [n, H, W, C], texts [n, 1]."""
    columns = read_bundle_samples(bundle, read_manifest(bundle))
    names = {"images": ("image",), "texts": ("text",), "embeddings": ("text",)}.get(kind, ("first", "second"))
    found = {name: np.array(columns[name][:SAMPLES]) for name in names}
    if kind == "images" and found["image"].ndim == 3:
        found["image"] = found["image"][..., None]
    return {name: array[:, None] if name == "text" else array for name, array in found.items()}


def compare_answers(kind: str, bundle: Path, call: dict[str, str]) -> Row:
    """A row: labels that differ from `predict`'s, and the largest difference of a number, over all ways of asking."""
    with np.load(call["samples"]) as saved:
        columns = dict(saved)
    with runtime.open_bundle(bundle) as opened:
        given = {"images": columns.get("image"), "tensors": columns}.get(kind)
        predicted = opened.predict([str(text) for text in columns["text"][:, 0]] if given is None else given)
    expected = expected_answers(predicted)
    with np.load(call["answers"]) as saved:
        answers = dict(saved)
    labels, largest = 0, 0.0
    for key, array in answers.items():
        wanted = expected[key.split(" ", 2)[2]]
        if array.shape != wanted.shape:
            largest = float("inf")
        elif array.dtype.kind == "U":
            labels += int((array != wanted).sum())
        else:
            largest = max(largest, float(np.abs(array.astype(np.float64) - wanted).max()))
    return {
        "model": kind,
        "outputs": len(expected),
        "compared": len(answers),
        "labels_that_differ": labels,
        "largest_difference": largest if answers else None,
    }


def expected_answers(predicted: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the server must give, of what `predict` gives."""
    rows = predicted.pop("prediction", None)
    if rows is not None:
        predicted["label"] = np.array([[str(row["label"])] for row in rows])
        predicted["score"] = np.array([[row["score"]] for row in rows])
    if "embeddings" in predicted:
        return {"embedding": predicted["embeddings"][:, 0]}
    return {name: array if array.ndim > 1 else array[:, None] for name, array in predicted.items()}


def claims(answer: dict[str, Any], rows: Sequence[Row]) -> list[Claim]:
    """That requests are gathered is claimed of models whose samples have one shape: texts of other lengths wait."""
    ready = answer["ready"]
    requests = 2 * sum(-(-SAMPLES // size) for size in SIZES)
    gathered = [answer["executions"][name][1] for name in ("quickstart-digits_model", "triton-tensors")]
    differences = [row["largest_difference"] for row in rows]
    ways = 2 * len(SIZES)
    return [
        at_least("models_loaded", len(ready), 13),
        at_most("models_not_ready", sum(not state for state in ready.values()), 0),
        at_least("answers_compared", sum(row["compared"] for row in rows), ways * sum(row["outputs"] for row in rows)),
        at_most("labels_that_differ", sum(row["labels_that_differ"] for row in rows), 0),
        at_most("largest_difference", None if None in differences else max(differences), TOLERANCE),
        at_least("requests_per_execution", min(requests / n if n else 0.0 for n in gathered), 1.2),
        at_least("refusals_with_their_reason", int("UsageError: text: not UTF-8" in answer["refusal"]), 1),
    ]


def text_recipe(folder: Path, task: str) -> Path:
    """A random BERT of two layers with a tokenizer of words, texts of three to twelve of them, and its int8 recipe."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = BertConfig(vocab_size=len(WORDS) + 4, max_position_embeddings=64, intermediate_size=64, **sizes)
    kind = BertForSequenceClassification if task == "text-classification" else BertModel
    kind(config).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 13))) for _ in range(2 * SAMPLES)]
    rows = [{"text": text, "label": int(rng.integers(3))} for text in texts]
    for name, part in (("calibration", rows[SAMPLES:]), ("evaluation", rows[:SAMPLES])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    columns = {"text": "text", "label": "label"} if task == "text-classification" else {"text": "text"}
    recipe = {
        "version": 1,
        "name": f"triton-{task}",
        "model": {"source": f"dir:{folder}", "task": task},
        "preprocess": {"kind": "text", "max_length": 32},
        "data": {
            name: {"source": f"jsonl:{folder / name}.jsonl", "columns": columns}
            for name in ("calibration", "evaluation")
        },
        "passes": [{"kind": "int8"}],
        "validate": QUICK_JUDGE,
    }
    return write_recipe(folder, recipe)


def tensor_recipe(folder: Path) -> Path:
    """A graph of two inputs that gives a row and one number for each sample, and its recipe."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    folder.mkdir()
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(24, 8)), "v": rng.normal(size=(8, 1)), "last": np.array([1])}
    tensors = [
        numpy_helper.from_array(array.astype(np.int64 if name == "last" else np.float32), name)
        for name, array in weights.items()
    ]
    nodes = [
        helper.make_node("Concat", ["first", "second"], ["both"], axis=1),
        helper.make_node("MatMul", ["both", "w"], ["row"]),
        helper.make_node("MatMul", ["row", "v"], ["column"]),
        helper.make_node("Squeeze", ["column", "last"], ["number"]),
    ]

    def tensor(name: str, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", *shape])

    inputs, outputs = [tensor("first", 16), tensor("second", 8)], [tensor("row", 8), tensor("number")]
    graph = helper.make_graph(nodes, "tensors", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), folder / "m.onnx")
    arrays = {"first": rng.normal(size=(2 * SAMPLES, 16)), "second": rng.normal(size=(2 * SAMPLES, 8))}
    np.savez(folder / "d.npz", first=arrays["first"].astype("f4"), second=arrays["second"].astype("f4"))
    recipe = {
        "version": 1,
        "name": "triton-tensors",
        "model": {"source": f"onnx:{folder / 'm.onnx'}", "task": "generic"},
        "data": {
            "calibration": {"source": f"npz:{folder / 'd.npz'}", "samples": SAMPLES, "skip": SAMPLES},
            "evaluation": {"source": f"npz:{folder / 'd.npz'}", "samples": SAMPLES, "shuffle": False},
        },
        "passes": [{"kind": "int8"}],
        "validate": QUICK_JUDGE,
    }
    return write_recipe(folder, recipe)


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
