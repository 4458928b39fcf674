"""What became of a graph's layers in an engine: which kernels run them, in which types, and which got less than asked.

The engine inspector says it, where the engine can be loaded; the builder's own log says the same at
`ProfilingVerbosity.DETAILED`, without a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TYPES = {
    "float": "float32", "half": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "float8", "int8": "int8",
    "fp4e2m1": "float4",
    "int4": "int4", "fp32": "float32", "fp16": "float16", "int32": "int32", "int64": "int64", "bool": "bool",
}  # fmt: skip
"""TensorRT's words -> ours."""
ON_INPUTS = ("int8", "float4", "float8", "float16", "bfloat16", "float32")
"""Precisions of a product's inputs; int4 is that of its weights."""


@dataclass(frozen=True)
class EngineLayer:
    """One kernel, or several that run as one. `nodes`: of the ONNX graph, as far as the library names them."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    tactic: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one node: `asked`, `got`: precisions; `got` is "" where the engine does not name the node."""

    node: str
    asked: str
    got: str
    kernels: tuple[str, ...]

    @property
    def as_asked(self) -> bool:
        return self.asked == self.got


def layers_in_log(lines: Iterable[str]) -> list[EngineLayer]:
    """Parse layers from the builder's messages: those after the line "Layers:", one text or several."""
    matches = (
        re.match(r"Name: (.*?), LayerType: (\S+?), Inputs: ", line) for text in lines for line in text.splitlines()
    )
    return [_parse_log_line(match) for match in matches if match]


def layers_in_json(text: str) -> list[EngineLayer]:
    """Parse layers from `EngineInspector.get_engine_information(LayerInformationFormat.JSON)`."""
    rows = json.loads(text)["Layers"]
    return [_parse_row(row) for row in rows if isinstance(row, Mapping)]


def outcomes(asked: Mapping[str, str], layers: Sequence[EngineLayer]) -> list[Outcome]:
    """Return for each node of `asked` (name -> precision) what it got.

    That is the asked one if a kernel of the node computes in it.
    """
    by_node: dict[str, list[EngineLayer]] = {}
    for layer in layers:
        for node in layer.nodes:
            by_node.setdefault(node, []).append(layer)
    return [_judge_node(node, precision, by_node.get(node, ())) for node, precision in asked.items()]


def share_as_asked(found: Sequence[Outcome]) -> float:
    """Return the part of the nodes that got what was asked, in [0, 1]; 1 of none."""
    return sum(outcome.as_asked for outcome in found) / len(found) if found else 1.0


def _judge_node(node: str, asked: str, layers: Sequence[EngineLayer]) -> Outcome:
    kernels = tuple(layer.name for layer in layers)
    if any(_computes_in(asked, layer) for layer in layers):
        return Outcome(node, asked, asked, kernels)
    got = [kind for kind in ON_INPUTS if kind != asked and any(kind in layer.inputs for layer in layers)]
    return Outcome(node, asked, got[0] if got else "", kernels)


def _computes_in(precision: str, layer: EngineLayer) -> bool:
    """Return whether a kernel computes a product in a precision.

    Both factors of a product in 8 bits, or in FP4, are so; a kernel that only rounds or adds reads one such tensor.
    """
    if precision == "int4":
        return precision in layer.weights
    if precision in ("int8", "float8", "float4"):
        return precision in layer.inputs and (*layer.inputs, *layer.weights).count(precision) > 1
    return precision in layer.inputs


def _parse_log_line(match: re.Match[str]) -> EngineLayer:
    line = match.string
    parts = {key: _extract_brackets(line, f"{key}: [") for key in ("Inputs", "Constants", "Outputs")}
    tactic = re.search(r"TacticName: ([^,]*),", line)
    types = {key: _translate_types(re.findall(r"Datatype: (\w+)", text)) for key, text in parts.items()}
    return EngineLayer(
        match[1],
        match[2],
        types["Inputs"],
        types["Constants"],
        types["Outputs"],
        tactic[1] if tactic else "",
        _parse_nodes(line.rpartition("Metadata: ")[2]),
    )


def _extract_brackets(line: str, start: str) -> str:
    """Return what stands between `start`, which ends with "[", and the bracket that closes it."""
    begin = line.find(start)
    if begin < 0:
        return ""
    begin, depth = begin + len(start), 1
    for place, letter in enumerate(line[begin:], begin):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth == 0:
            return line[begin:place]
    return line[begin:]


def _parse_row(row: Mapping[str, object]) -> EngineLayer:
    def types(key: str) -> tuple[str, ...]:
        tensors = row.get(key) or ()
        assert isinstance(tensors, Sequence)
        return _translate_types(
            [str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "") for tensor in tensors]
        )

    weights = row.get("Weights")  # TensorRT's convolutions; RTX lists them among its constants
    weight_types = _translate_types([str(weights.get("Type", ""))]) if isinstance(weights, Mapping) else ()
    return EngineLayer(
        str(row.get("Name", "")),
        str(row.get("LayerType", "")),
        types("Inputs"),
        (*weight_types, *types("Constants")),
        types("Outputs"),
        str(row.get("TacticName", "")),
        _parse_nodes(str(row.get("Metadata", ""))),
    )


def _translate_types(words: Sequence[str]) -> tuple[str, ...]:
    """Translate "Half", or "Row major linear FP16 format (kLINEAR)", to our type names; unknown words stay."""
    translated = []
    for word in words:
        known = [TYPES[part] for part in re.findall(r"[a-z0-9]+", word.lower()) if part in TYPES]
        translated.append(known[0] if known else word)
    return tuple(translated)


def _parse_nodes(metadata: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"\[ONNX Layer: ([^\]]+)\]", metadata)))
