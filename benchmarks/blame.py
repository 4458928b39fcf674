"""`compress blame` on three real models: a planted bad layer comes first, and the collapse of MiniLM is explained.

Planted: in a bundle that loses nothing (ResNet-20 and MiniLM in int8, a Llama of 656k parameters in 8-bit weights) one
layer, drawn by chance, is spoiled in the ONNX file: its scales are multiplied by noise, or its weights cut to three
values (2 bits). Twenty times, the layer must come first.

Collapsed: MiniLM in int8 with one range for each tensor, residual stream included, chosen by the largest value, loses
most of its Spearman correlation. Blame must name few layers, and the recipe that it proposes, built anew, must give at
least nine tenths of the loss back. The same is asked of what ONNX Runtime's own static quantizer makes of MiniLM at its
defaults, put into that bundle: which layers and tensors, set to float, give Spearman back.

The bundles are those of recipes/claims/, quickly judged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from common import ROOT, Call, Claim, Measured, Peer, Row, RunError, apply_recipe, at_least, at_most, run_script, say
from measuring import make_peer_models, open_judged

from compress.commands.blame import Blame, blame_bundle
from compress.graph.layers import GraphLayer, find_layers
from runtime.bundle.format import model_size
from runtime.tasks.manifest import read_manifest, write_bundle

CLAIMS = ROOT / "recipes/claims"
NEEDS = ("data/stsb/sts-dev.csv", "data/cifar10/test.npz", "models/cifar10-resnet20", "models/tinystories656k-hf")
QUICKLY = ("validate.gates=[]", "validate.benchmark.iterations=1", "validate.benchmark.warmup=0")
SAMPLES = 400
MINUTES = 1.0

HEALTHY: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "resnet20": (
        "cifar10-resnet56-int8",
        (
            "model.source=python:compress.zoo.cifar_resnet:resnet20",
            "model.weights=${bench}/models/cifar10-resnet20/model.safetensors",
            'passes=[{"kind": "int8", "placement": "all"}]',
        ),
        7,
    ),
    "tinystories": (
        "tinystories-w4-gptq",
        ('passes=[{"kind": "rtn", "bits": 8, "group_size": 32}]', 'export=[{"kind": "onnx"}]'),
        7,
    ),
    "minilm": ("minilm-int8", ('passes=[{"kind": "int8", "placement": "inputs"}]',), 6),
}
"""Model -> (recipe, what is set in it, how often a layer is spoiled)."""
STATIC = Peer("onnxruntime static", "onnxruntime_static.py")
COLLAPSING = 'passes=[{"kind": "int8", "placement": "all", "calibration": "minmax"}]'


def measure(call: Call) -> Measured:
    rows: list[Row] = []
    for name in call.choose([*HEALTHY, "collapse"], 1):
        rows += [measure_collapse(call), measure_foreign(call)] if name == "collapse" else measure_plants(call, name)
    return claims(rows), rows


def measure_plants(call: Call, name: str) -> list[Row]:
    """Spoil one layer after another of a healthy bundle, and ask who is to blame."""
    recipe, sets, n_plants = HEALTHY[name]
    bundle = make(call, name, recipe, sets)
    rng = np.random.default_rng(len(name))
    rows: list[Row] = []
    for number in range(2 if call.quick else n_plants):
        spoiled = call.out / "spoiled"
        shutil.copytree(bundle, spoiled)
        layer = plant(spoiled, rng, "scale" if number % 2 else "two bits")
        found = blame_bundle(spoiled, MINUTES, cache=call.out / "none", times=False)
        first, second = found.layers[0], found.layers[1]
        say(f"{name}: {layer} spoiled; first {first.name} ({first.share:.1%}), second {second.share:.1%}")
        rows.append(
            {
                "model": name,
                "backend": "onnxruntime-cpu",
                "spoiled": layer,
                "first": first.name,
                "share": first.share,
                "next_share": second.share,
                "chosen": len(found.chosen),
                "seconds": found.seconds,
            }
        )
        shutil.rmtree(spoiled)
    return rows


def measure_collapse(call: Call) -> Row:
    """Blame MiniLM's collapse, and build the recipe that is proposed."""
    bundle = make(call, "collapse", "minilm-int8", (COLLAPSING,))
    found = ask(bundle, "cosine", call.out / "collapse-cache")
    mended = make(call, "mended", "minilm-int8", (COLLAPSING, *found.snippets[0].overrides), "collapse-cache")
    reports = [json.loads((folder / "report.json").read_text())["candidate"]["metrics"] for folder in (bundle, mended)]
    return {
        **describe("collapse", found),
        "whole": 1.0,
        "collapsed": reports[0]["cosine"],
        "mended": reports[1]["cosine"],
        "spearman": f"{reports[0]['spearman']:.4f} -> {reports[1]['spearman']:.4f}",
    }


def measure_foreign(call: Call) -> Row:
    """Blame what ONNX Runtime's static quantizer makes of the bundle's float file, and set that to float there."""
    bundle = call.out / "collapse"
    made, failed = make_peer_models([STATIC], open_judged(bundle), CLAIMS / "minilm-int8.yaml", call)
    if failed:
        raise RunError(str(failed[0]["failed"]))
    foreign = call.out / "foreign"
    shutil.copytree(bundle, foreign)
    shutil.copyfile(made[STATIC.name], foreign / "model/model.onnx")
    sign(foreign)
    found = ask(foreign, "spearman", call.out / "none")
    last = next(step for step in found.together if step.n_layers == len(found.chosen))
    row = {"whole": found.baseline, "collapsed": found.candidate, "mended": last.metric}
    return {**describe("onnxruntime static", found), **row}


def ask(bundle: Path, metric: str, cache: Path) -> Blame:
    found = blame_bundle(bundle, 3 * MINUTES, metric, cache, times=False)
    for row in found.layers[:8]:
        say(f"{row.name}: alone {row.alone:.3g}, {row.share:.1%} of all; back {row.back}; {metric} then {row.metric}")
    for step in found.together:
        say(f"the first {step.n_layers} in float: {metric} {step.metric}, change {step.change:.3g}")
    for text in (*found.notes, ", ".join(found.chosen)):
        say(text)
    return found


def describe(name: str, found: Blame) -> Row:
    return {
        "model": name,
        "backend": "onnxruntime-cpu",
        "metric": found.metric,
        "first": found.layers[0].name,
        "share": found.layers[0].share,
        "chosen": len(found.chosen),
        "of": len(found.layers),
        "seconds": found.seconds,
        "layers": ", ".join(found.chosen),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    planted = [row for row in rows if "spoiled" in row]
    found: list[Claim] = []
    if planted:
        found.append(
            at_least("spoiled_layer_first", float(np.mean([row["first"] == row["spoiled"] for row in planted])), 1.0)
        )
        found.append(at_least("spoiled_layers", len(planted), 20))
    for row in (row for row in rows if "mended" in row):
        back = (row["mended"] - row["collapsed"]) / (row["whole"] - row["collapsed"])
        found.append(at_least(f"{row['model']}: share of {row['metric']} given back", back, 0.9))
        found.append(at_most(f"{row['model']}: share of layers and tensors", row["chosen"] / row["of"], 0.5))
    return found


def make(call: Call, name: str, recipe: str, sets: Sequence[str], cache: str = "") -> Path:
    """Build a bundle that is judged as quickly as can be."""
    bundle = call.out / name
    given = [
        f"vars.bench={call.bench}",
        *sets,
        *QUICKLY,
        f"data.evaluation.samples={SAMPLES // 4 if call.quick else SAMPLES}",
    ]
    apply_recipe(CLAIMS / f"{recipe}.yaml", given, bundle, call.out / (cache or f"{name}-cache"))
    return bundle


def plant(bundle: Path, rng: np.random.Generator, how: str) -> str:
    """Spoil one rounded layer of a bundle's candidate, and sign the bundle anew; return the layer's name.

    `how`: "scale" multiplies its scales by exp(N(0, 1)), "two bits" leaves three values of its weights.
    """
    file = bundle / "model/model.onnx"
    model, layers = ir.load(file), find_layers(ir.load(bundle / "baseline/model.onnx"))
    spots = list(find_spots(model, layers))
    layer, node, part = spots[rng.integers(len(spots))]
    if how == "scale":
        scale = node.inputs[1].const_value.numpy().copy()
        part = part if scale.ndim > 1 else ...
        scale[part] *= np.exp(rng.normal(size=scale[part].shape))
        _replace(model, node, 1, ir.Tensor(scale))
    else:
        tensor = node.inputs[0].const_value
        values = tensor.numpy().astype(np.float32)
        largest = np.abs(values[part]).max()
        values[part] = np.clip(np.round(1.5 * values[part] / largest), -1, 1) * largest
        _replace(model, node, 0, ir.Tensor(values.astype(tensor.dtype.numpy()), dtype=tensor.dtype))
    ir.save(model, file)
    sign(bundle)
    return layer


Spot = tuple[str, Any, Any]
"""(layer, the DequantizeLinear of its weight, which part of that is its own)."""


def find_spots(model: ir.Model, layers: Sequence[GraphLayer]) -> list[Spot]:
    """Return the layers whose weights lie in a DequantizeLinear of their own, or side by side in one."""
    known = {str(layer.output.name): layer for layer in layers}
    by_weight = {str(layer.weight.name): layer for layer in layers}
    spots: list[Spot] = []
    nodes: Any = model.graph
    for node in nodes:
        if node.op_type != "DequantizeLinear" or node.inputs[0].const_value is None:
            continue
        stem = str(node.inputs[0].name).removesuffix("/padded").rpartition("/")[0]
        parts = stem.split("+")
        if stem in by_weight and len(node.inputs[0].const_value.shape) > 1:
            spots.append((by_weight[stem].name, node, ...))
        elif len(parts) > 1 and all(part in known for part in parts):
            start = 0
            for part in parts:
                width = known[part].shape[0]
                spots.append((known[part].name, node, (..., slice(start, start + width))))
                start += width
    return spots


def _replace(model: ir.Model, node: Any, index: int, tensor: ir.Tensor) -> None:
    """Give one node a constant of its own."""
    value = ir.Value(name=f"{node.inputs[index].name}/spoiled", const_value=tensor)
    tensor.name = value.name
    model.graph.register_initializer(value)
    node.replace_input_with(index, value)


def sign(bundle: Path) -> None:
    """Write the manifest of a bundle whose files were changed."""
    manifest = read_manifest(bundle)
    (bundle / "manifest.json").unlink()
    artifacts = tuple(replace(one, size_bytes=model_size(bundle / one.path)) for one in manifest.artifacts)
    write_bundle(bundle, replace(manifest, artifacts=artifacts, files={}, digest=""))


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
