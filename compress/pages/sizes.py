"""What a model's file holds: bytes of each tensor, by number format and by layer."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import onnx

from runtime.bundle.format import Artifact, inside
from runtime.errors import BundleError

REST = "everything else"
"""Tensors of no module: constants, and what has no name."""
BITS = ("bits", "expert_weight_bits")
"""Attributes of operators that read integers packed into bytes."""
WRAPPER = "wrapped."
"""What the exporter puts before a module's name."""
PARAMETERS = ("weight", "bias", "weight_packed", "weight_scale", "qweight", "scales")
ONNX_NAMES = {"float": "float32", "double": "float64"}
PACKED, PACKED_NAMES = "packed integers", ("weight_packed", "qweight", "qzeros")
CHECKPOINT_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}


@dataclass(frozen=True)
class SizedTensor:
    """A tensor as a file holds it. `users`: names of what is made of it, the nearest first, where the file has such."""

    name: str
    number_format: str
    n_bytes: int
    users: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Return the name of the float weight that it came of: "val_7" of "val_7/int8"."""
        return self.name.partition("/")[0]


@dataclass
class LayerSize:
    """Bytes of a layer's tensors; `formats`: of each number format of the candidate."""

    name: str
    before: int = 0
    after: int = 0
    formats: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def number_format(self) -> str:
        """Return the format that most of the candidate's bytes have."""
        return max(self.formats, key=lambda name: self.formats[name], default="")


def list_tensors(root: Path, artifact: Artifact) -> list[SizedTensor]:
    """List the tensors of a model of the bundle in `root`; none of what is neither an ONNX file nor a checkpoint.

    Weights are passed over, not read. Raises BundleError for a damaged file.
    """
    file = inside(root, artifact.path)
    try:
        if artifact.is_checkpoint:
            return [tensor for part in sorted(file.parent.glob("*.safetensors")) for tensor in _read_header(part)]
        if file.suffix != ".onnx":
            return []
        encoder = file.with_name("encoder.onnx")
        files = [file, *([encoder] if encoder.is_file() else [])]
        return [tensor for part in files for tensor in _read_graph(part)]
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise BundleError(f"{file}: its tensors cannot be listed: {error}; build the bundle again") from error


def _read_graph(file: Path) -> Iterator[SizedTensor]:
    try:
        graph = onnx.load(file, load_external_data=False).graph
    except Exception as error:  # protobuf's own, which has no public name
        raise ValueError(error) from error
    stored = {tensor.name: tensor for tensor in graph.initializer}
    packed = {
        name: f"int{attribute.i}"
        for node in graph.node
        for attribute in node.attribute
        if attribute.name in BITS
        for name in node.input
        if name in stored and stored[name].data_type == onnx.TensorProto.UINT8
    }
    users = _find_users(graph, stored)
    for name, tensor in stored.items():
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        n_bytes = -(-prod(tensor.dims) * _count_bits(kind) // 8)
        yield SizedTensor(name, packed.get(name, ONNX_NAMES.get(kind, kind)), n_bytes, users[name])


def _count_bits(kind: str) -> int:
    """Return how many bits a number of this ONNX type takes: the digits in its name."""
    special = {"float": 32, "double": 64, "bool": 8, "string": 0, "complex64": 64, "complex128": 128}
    digits = "".join(character if character.isdecimal() else " " for character in kind).split()
    return special[kind] if kind in special else int(digits[0])


def _find_users(graph: onnx.GraphProto, constants: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the operators that read each constant, and of what they give.

    What is made of constants alone (an unpacked weight) is followed to the first operator that computes with it.
    """
    origins: dict[str, list[str]] = {name: [name] for name in constants}
    users: dict[str, list[str]] = {name: [] for name in constants}
    for node in graph.node:
        given = [name for name in node.input if name]
        of_node = [origin for name in given for origin in origins.get(name, ())]
        for origin in of_node:
            users[origin] += [name for name in (node.name, *node.output) if name]
        if given and all(name in origins for name in given):
            origins |= dict.fromkeys(node.output, of_node)
    return {name: tuple(names) for name, names in users.items()}


def _read_header(file: Path) -> Iterator[SizedTensor]:
    """Read what a safetensors file says of its tensors: a length, and JSON of so many bytes."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError("its header says that it is longer than the file")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = (
                PACKED if name.endswith(PACKED_NAMES) else CHECKPOINT_NAMES.get(entry["dtype"], entry["dtype"].lower())
            )
            yield SizedTensor(name, kind, end - begin)


def sum_formats(tensors: Iterable[SizedTensor]) -> dict[str, int]:
    """Return bytes by number format, the most first."""
    sums: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        sums[tensor.number_format] += tensor.n_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def sum_layers(
    layers: Mapping[str, str], before: Sequence[SizedTensor], after: Sequence[SizedTensor]
) -> list[LayerSize]:
    """Return the sizes of the layers, in their order, and of the rest.

    `layers`: name -> its weight's name in the float graph, "" where that is not known. Layers whose weights were
    merged into one share it as theirs were large.
    """
    sizes = {name: LayerSize(name) for name in (*layers, REST)}
    known = {weight: name for name, weight in layers.items() if weight}
    for tensor in after:  # "val_7" may be told by the "val_7/int8" that came of it
        if (layer := find_layer(tensor, sizes)) in layers:
            known.setdefault(tensor.stem, layer)
    weights: dict[str, int] = {}
    for tensor in before:
        layer = known.get(tensor.name) or find_layer(tensor, sizes)
        sizes.setdefault(layer, LayerSize(layer)).before += tensor.n_bytes
        if layer in layers:
            known |= dict.fromkeys((name for name in tensor.users if name not in known), layer)
            weights[layer] = weights.get(layer, 0) + tensor.n_bytes
    for tensor in after:
        merged = [known[part] for part in tensor.stem.split("+") if part in known]
        shares = merged or [find_layer(tensor, sizes)]
        whole = sum(weights.get(layer, 0) for layer in shares)
        for layer in shares:
            share = weights.get(layer, 0) / whole if whole else 1 / len(shares)
            size = sizes.setdefault(layer, LayerSize(layer))
            size.after += round(share * tensor.n_bytes)
            size.formats[tensor.number_format] += round(share * tensor.n_bytes)
    return [size for size in sizes.values() if size.before or size.after]


def find_layer(tensor: SizedTensor, layers: Collection[str]) -> str:
    """Return the layer that a tensor is of: the one whose name its own begins with, or that of what is made of it.

    Of none of them it is the module that the tensor's name says, or `REST`.
    """
    for name in (tensor.name, *tensor.users):
        ends = [place for place, character in enumerate(name) if character in "./"] + [len(name)]
        start = len(WRAPPER) if name.startswith(WRAPPER) else 0
        for end in reversed(ends):
            if name[start:end] in layers:
                return name[start:end]
    module, _, parameter = tensor.stem.removeprefix(WRAPPER).rpartition(".")
    return module if module and parameter in PARAMETERS else REST
