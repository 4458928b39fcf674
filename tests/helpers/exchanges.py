"""Exchange one part of a bundle after the other, and sign it anew: no verdict over what is left may be PASS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from shortcuts import few_rounds, without_processes
from tiny_bundles import sign_files

from runtime.bundle.files import model_files
from runtime.bundle.format import Manifest, read_outputs, read_samples, write_outputs, write_samples
from runtime.bundle.manifest import Benchmark, Gate, Judgement
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.judge.evidence import select_metrics
from runtime.judge.frozen import record_metrics
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, write_bundle

ONE = ("onnxruntime-cpu",)
FAST = Benchmark(1, 2, 1, 2)
PREPROCESSES: dict[str, dict[str, Any]] = {
    "image": {"mean": [0.1]},
    "text": {"max_length": 3},
    "language": {"bos_token_id": 255},
    "audio": {"gain": 0.01},
    "image-text": {"image": {"mean": [0.1]}},
    "seq2seq": {},
}
"""Kind -> what the preprocessing is changed in."""


def copy_baseline(bundle: Path, root: Path) -> None:
    """Copy a bundle of the same float model twice: what differs by an exchange differs by nothing else."""
    shutil.copytree(bundle, root, ignore=shutil.ignore_patterns("report*", "compress.log", "host.json"))
    manifest = read_manifest(root)
    before, after = (root / manifest.artifact(name).path for name in ("baseline", "candidate"))
    for file in model_files(after):
        file.unlink()
    for file in model_files(before):
        shutil.copy(file, after.parent / file.name)
    baseline = manifest.artifact("baseline")
    candidate = replace(baseline, name="candidate", path=after.relative_to(root).as_posix())
    sign_whole(root, replace(manifest, artifacts=(baseline, candidate)))


def sign_whole(root: Path, manifest: Manifest) -> None:
    """Sign a bundle with the metrics of its baseline, as a build does, and a gate on nearness alone."""
    frozen, labels = read_outputs(root, manifest), read_samples(root, manifest).get("label")
    metrics = select_metrics(manifest.task, frozen, labels, Judgement())
    near = next(metric for metric in metrics if metric.against == "baseline" and metric.ideal == 1.0)
    speed = replace(FAST, prompt_tokens=4, new_tokens=2) if manifest.generates else FAST
    judgement = Judgement(gates=(Gate(near.name, min=0.8),), benchmark=speed)
    evaluation = replace(manifest.evaluation, baseline_metrics=record_metrics(metrics, frozen, labels))
    write_bundle(root, replace(manifest, evaluation=evaluation, judgement=judgement))


def assert_no_exchange_passes(whole: Path, folder: Path) -> None:
    """Assert that the bundle passes, and that none passes of which a part was exchanged; `folder`: for these."""
    manifest = read_manifest(whole)
    left_out = {
        "labels": "label" not in read_samples(whole, manifest),
        "preprocess": not PREPROCESSES.get(manifest.preprocess["kind"]),
    }
    with without_processes(), few_rounds():
        report = validate(whole, ONE)
        assert report.verdict == "pass", [gate.why for gate in report.gates]
        for part, exchange in EXCHANGES.items():
            if left_out.get(part):
                continue
            root = folder / part
            shutil.copytree(whole, root, ignore=shutil.ignore_patterns("report*"))
            exchange(root)
            sign_files(root)
            try:
                verdict = validate(root, ONE).verdict
            except (BundleError, RuntimeFailure, UsageError) as error:
                verdict = str(error)
            assert verdict != "pass", part
            if part in ("baseline", "outputs", "preprocess"):
                assert "row" in verdict or "tokens" in verdict, (part, verdict)


def _change_weights(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write an ONNX model anew whose float32 weights of more than one number are changed."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if values.dtype == np.float32 and values.size > 1:
            weight.CopyFrom(numpy_helper.from_array(change(values), weight.name))
    onnx.save(model, path)


def _exchange_model(name: str) -> Callable[[Path], None]:
    def exchange(root: Path) -> None:
        """Give the model other weights of the same shapes: for a decoder's, those of its head."""

        def shuffle(values: np.ndarray) -> np.ndarray:
            return np.random.default_rng(7).permuted(values.reshape(-1)).reshape(values.shape)

        _change_weights(root / name / "model.onnx", shuffle)

    return exchange


def silence_candidate(root: Path) -> None:
    """Make the candidate a model of the same answer to everything."""
    _change_weights(root / "model/model.onnx", np.zeros_like)


def _double_candidate(root: Path) -> None:
    """Make the candidate a model whose outputs are twice as wide, as of other classes; its manifest says so, too."""
    import onnx
    from onnx import helper

    model = onnx.load(root / "model/model.onnx")
    widths = {}
    for output in model.graph.output:
        shape = output.type.tensor_type.shape.dim
        if not output.name.startswith("present"):
            for node in model.graph.node:
                node.output[:] = [f"{name}/once" if name == output.name else name for name in node.output]
                node.input[:] = [f"{name}/once" if name == output.name else name for name in node.input]
            once = f"{output.name}/once"
            model.graph.node.append(helper.make_node("Concat", [once, once], [output.name], axis=len(shape) - 1))
            if shape[-1].dim_value:
                shape[-1].dim_value *= 2
                widths[output.name] = shape[-1].dim_value
            else:
                shape[-1].dim_param = f"twice {shape[-1].dim_param}"
    onnx.save(model, root / "model/model.onnx")
    data = json.loads((root / "manifest.json").read_text())
    for artifact in data["artifacts"]:
        for spec in artifact["outputs"] if artifact["name"] == "candidate" else ():
            if spec["name"] in widths:
                spec["shape"][-1] = widths[spec["name"]]
    (root / "manifest.json").write_text(json.dumps(data))


def _exchange_outputs(root: Path) -> None:
    frozen = read_outputs(root, read_manifest(root))
    write_outputs(root, {name: values[::-1] for name, values in frozen.items()})


def _exchange_labels(root: Path) -> None:
    columns = read_samples(root, read_manifest(root))
    labels = columns["label"]
    columns["label"] = labels[1:] + labels[:1] if isinstance(labels, list) else np.roll(labels, 1, axis=0)
    write_samples(root, columns)


def _exchange_preprocess(root: Path) -> None:
    data = json.loads((root / "manifest.json").read_text())
    for key, value in PREPROCESSES[data["preprocess"]["kind"]].items():
        given = data["preprocess"].get(key)
        data["preprocess"][key] = given | value if isinstance(given, dict) else value
    (root / "manifest.json").write_text(json.dumps(data))


EXCHANGES: dict[str, Callable[[Path], None]] = {
    "baseline": _exchange_model("baseline"),
    "candidate": _exchange_model("model"),
    "silent": silence_candidate,
    "classes": _double_candidate,
    "outputs": _exchange_outputs,
    "labels": _exchange_labels,
    "preprocess": _exchange_preprocess,
}
