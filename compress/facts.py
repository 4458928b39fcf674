"""What is known of a model before any of its weights are read: names, shapes, sizes, work. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from compress.formats.schemes import KvScheme, Scheme
from runtime.bundle.detections import Detections
from runtime.bundle.tensors import State, TensorSpec
from runtime.tasks import find_task

LOWEST_OPSET = 17
"""Of the graphs that passes work on."""
FLOAT_BYTES = 4
"""Of a float32, in which weights and activations are computed with, whatever type files hold."""
SMALL_TABLE = 0.1
"""Of the largest table of embeddings: smaller ones (positions, token types) save next to nothing in fewer bits."""
WORTH_NAMING = 0.05
"""Of a model's bytes: a part of them that a name is given for where it stays float."""
Role = Literal["", "table", "head", "tied", "router", "beside", "idle"]
SampleShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Input or role -> (shape of one sample, without the batch dimension; dtype by numpy's name, or "text")."""


def sample_bytes(shapes: SampleShapes) -> int:
    """Return the bytes of one sample; texts count for none."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values() if dtype != "text")


@dataclass(frozen=True)
class LayerFacts:
    """One layer that holds a weight.

    `name` is the module path (torch) or the node name (ONNX); `type` the class name a user would write in `targets:` or
    `ignore:` (Linear, Conv2d, Embedding); `op` the ONNX operator it becomes. `shape` is [out, in / groups, *kernel] for
    Linear and Conv, [rows, width] for Embedding. `macs` counts multiply-accumulates for one sample.
    `weight` is the name of the parameter or initializer, shared by tied layers. `bits` is what a weight is stored in.
    `sparse`: a pass has made weights zero that are to stay so. `role`: "table" of a torch model's embeddings whose size
    counts (see `assign_roles`), "head" of its output layer, "tied" of both where they hold one weight, "router" where
    the largest of its outputs choose what runs. Two are of layers outside a language model's chain of blocks: "beside",
    told by names alone, of a model that nothing here runs (a tower, blocks that config.json does not count), which no
    pass takes; and "idle", told by a run, which did not call it (a tower that texts do not reach), and which a pass
    takes if `targets` names it.
    `custom`: a torch layer whose class has a forward of its own, which is lost where an engine puts its own layer in
    its place. `unpackable`: transformers reads it as floats alone: an expert's, which its files hold in one tensor with
    the others', or one that the model's code sets, or reads in a forward pass of the layer's own.
    """

    name: str
    type: str
    op: str
    weight: str
    shape: tuple[int, ...]
    macs: int = 0
    bits: float = 32
    sparse: bool = False
    role: Role = ""
    custom: bool = False
    unpackable: bool = False
    alias: str = ""
    """Another name by which patterns select it: OUTPUT of what makes a vocabulary's logits."""

    @property
    def is_table(self) -> bool:
        """Return whether the weight is looked up as embeddings, perhaps beside being multiplied with."""
        return self.role in ("table", "tied")

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def n_outputs(self) -> int:
        """Count the numbers that it gives for one sample, by its multiplications; 0 for a table."""
        return self.macs * self.shape[0] // max(self.n_weights, 1)

    @property
    def n_bytes(self) -> int:
        return math.ceil(self.n_weights * self.bits / 8)


@dataclass(frozen=True)
class InputGroup:
    """Layers that read one tensor, in the order in which they run; found by running the model once.

    `source`: the module whose output that tensor is, where a scale for each of its channels can be folded into that
    module exactly; `how`: "norm" (a normalisation with a weight), "linear" (a layer whose outputs reach this tensor
    channel by channel through nothing but multiplications and moves: up_proj -> down_proj), "value" (the same through
    attention's weighted sums, each output channel of the source serving `source_repeat` query heads: v_proj -> o_proj).
    """

    layers: tuple[str, ...]
    source: str = ""
    how: Literal["", "norm", "linear", "value"] = ""
    source_repeat: int = 1
    head_size: int = 0


@dataclass(frozen=True)
class BlockFacts:
    """One of a chain of modules, each reading what the one before gives (a transformer layer).

    `input_groups` in the order in which they run. `experts`: the layers of each expert of a mixture.
    """

    name: str
    input_groups: tuple[InputGroup, ...]
    experts: tuple[tuple[str, ...], ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(layer for input_group in self.input_groups for layer in input_group.layers)


@dataclass(frozen=True)
class Residual:
    """The stream that blocks add to, for rotations. Names of layers, in the order in which they run.

    `embeddings` and `writers` give it, `readers` read it through a norm of `norms` (norm, the layers that read it).
    """

    width: int
    embeddings: tuple[str, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    norms: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Structure:
    """How a torch model is made, found by running it once. `before` and `after`: what layers outside the blocks read.

    A model without a chain of blocks is one block, named "". `residual`: None where it is not a plain one, and `notes`
    say why.
    """

    blocks: tuple[BlockFacts, ...]
    before: tuple[InputGroup, ...] = ()
    after: tuple[InputGroup, ...] = ()
    residual: Residual | None = None
    notes: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    """Layers of whose outputs the largest choose what runs, as those that choose experts."""
    unpackable: tuple[str, ...] = ()
    """Layers, and modules of them, that transformers reads as floats alone."""
    beside: tuple[str, ...] = ()
    """Modules that stand beside a language model whose class is not there to say so."""
    named: bool = False
    """Whether names alone tell it, of a model without a class, which no run shows."""

    @property
    def input_groups(self) -> tuple[InputGroup, ...]:
        """Return all input groups, in the order in which they run."""
        return (
            *self.before,
            *(input_group for block in self.blocks for input_group in block.input_groups),
            *self.after,
        )

    def find_block(self, name: str) -> str | None:
        """Return the block that a module or a parameter lies in, by its name; None outside of them."""
        if "" in self._block_names:
            return ""
        words = name.split(".")
        return next(
            (inner for n in range(1, len(words) + 1) if (inner := ".".join(words[:n])) in self._block_names), None
        )

    @cached_property
    def _block_names(self) -> frozenset[str]:
        return frozenset(block.name for block in self.blocks)

    @property
    def head(self) -> tuple[str, ...]:
        """Return the output layers: what reads last, behind the blocks or in a model that is one block."""
        whole = [block.input_groups for block in self.blocks if not block.name]
        last = (self.after or (whole[0] if whole else ()))[-1:]
        return last[0].layers if last else ()


@dataclass(frozen=True)
class Prunable:
    """A coupled dimension (see `compress.pruning.coupling`): `n_units` units, each removable with all that carries it.

    `writers` and `readers`: layer -> how many of its outputs, or inputs, one unit is.
    """

    name: str
    kind: Literal["channels", "neurons", "heads", "width"]
    n_units: int
    writers: Mapping[str, int]
    readers: Mapping[str, int]


@dataclass(frozen=True)
class Removable:
    """A block that the model would run without (see `compress.structure.removable`).

    `listed`: it lies in a list that the model's code goes through, in which those behind it would move up.
    """

    name: str
    layers: tuple[str, ...]
    listed: bool


@dataclass(frozen=True)
class ModelFacts:
    """A model as the plan sees it. `other_bytes` is everything outside `layers` (norms, biases, buffers)."""

    source: Literal["torch", "onnx"]
    architecture: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[LayerFacts, ...]
    other_bytes: int = 0
    outside: Mapping[str, int] = field(default_factory=dict)
    """What of that is worth a name: a module with parameters of its own (a recurrent one), or a constant -> bytes."""
    float_bytes: int = FLOAT_BYTES
    """Of a number in the source's files, the commonest: what a checkpoint's size is compared with."""
    peak_activation_bytes: int = 0
    operators: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    opset: int | None = None
    """Of an ONNX file, cleaned; a torch model gets that of its export."""
    clean_up: Mapping[str, int] = field(default_factory=dict)
    """Of an ONNX file: what was done to its graph before everything else, and how often."""
    rebuilt: bool = False
    """Of an ONNX file: a torch module that computes the same can be made of it, for passes that prune and train."""
    not_rebuilt: str = ""
    """Of an ONNX file, where a pass needs such a module: why none can be made."""
    structure: Structure | None = None
    """Of a torch model."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Tensors of a torch model's files that are no part of it -> their bytes; `notes` say so."""
    prunable: tuple[Prunable, ...] | None = None
    """Of a torch model, where a pass asks for it (`Pass.uses_coupling`)."""
    unprunable: Mapping[str, str] = field(default_factory=dict)
    """Layer -> why its outputs, or some of them, have to stay."""
    removable: tuple[Removable, ...] | None = None
    """Blocks of a torch model that can go, in order, where a pass asks for them (`Pass.uses_blocks`)."""
    states: tuple[State, ...] = ()
    """What a call hands on to the next: a sample is then a whole sequence of calls."""
    detections: Detections | None = None
    """Of a detector: what its outputs mean."""
    reads_apart: bool = False
    """Of rows that hold several samples, a torch model attends within each sample alone."""
    students: Mapping[str, ModelFacts] = field(default_factory=dict)
    """Other models that passes put in this one's place, by `Student.key`."""
    classless: bool = False
    """No class of the model is at hand: it is known by the names in its files, and nothing can run it."""

    def keep_worth_naming(self, parts: Mapping[str, int]) -> ModelFacts:
        """Return the same model with those `parts` of its other bytes, the largest first, that are worth a name."""
        named = {name: n_bytes for name, n_bytes in parts.items() if n_bytes >= WORTH_NAMING * self.n_bytes}
        return replace(self, outside=dict(sorted(named.items(), key=lambda part: -part[1])))

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the weights, tied ones counted once."""
        return self.other_bytes + sum(layer.n_bytes for layer in self.distinct_layers())

    def find_layer(self, name: str) -> LayerFacts:
        """Return the layer of that name. KeyError if there is none."""
        return {layer.name: layer for layer in self.layers}[name]

    @property
    def has_two_chains(self) -> bool:
        """Return whether an encoder's blocks stand beside a decoder's, so that no single chain is the model."""
        return find_task(self.task).encodes

    def explain_no_module(self) -> str:
        """Return why passes over a torch module cannot work on an ONNX file; "" where they can."""
        if self.source == "torch" or self.rebuilt:
            return ""
        return "an onnx: source is none" + (f": {self.not_rebuilt}" if self.not_rebuilt else "")

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    def distinct_layers(self) -> tuple[LayerFacts, ...]:
        """Return the layers, those with tied weights once."""
        return tuple({layer.weight: layer for layer in self.layers}.values())

    def with_bits(self, bits: dict[str, float]) -> ModelFacts:
        """Return the same model with the named layers' weights stored in that many bits."""
        return replace(
            self, layers=tuple(replace(layer, bits=bits.get(layer.name, layer.bits)) for layer in self.layers)
        )

    def with_zeros(self, names: Iterable[str]) -> ModelFacts:
        """Return the same model with the named layers made sparse."""
        sparse = set(names)
        return replace(
            self, layers=tuple(replace(layer, sparse=layer.sparse or layer.name in sparse) for layer in self.layers)
        )


@dataclass(frozen=True)
class LayerDecision:
    """What a pass will do, or did, to one layer: `action` is 'int8', 'float16', 'kept', ...; `reason`: why, or how."""

    layer: str
    type: str
    action: str
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """What the user should know before the work starts. `level`: info, slow (slower than float), warning."""

    level: Literal["info", "slow", "warning"]
    text: str
    here: bool = False
    """Whether it is of this machine, as times are, and what its memory let be compared: in no file that the manifest
    hashes."""


@dataclass(frozen=True)
class PassPlan:
    """What `Pass.check` promises: the model afterwards, a decision for each layer, and what is worth saying."""

    facts: ModelFacts
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()
    problems: tuple[str, ...] = field(default=())
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    """Layer -> how a checkpoint would store it, of the layers that the pass rounds."""
    kv_cache: KvScheme | None = None
    """How an engine is to store keys and values after the pass; None where it says nothing of them."""
    units: Mapping[str, int] = field(default_factory=dict)
    """How many units of each coupled group that is cut are to stay; under a budget, about."""
    offers: Mapping[str, str] = field(default_factory=dict)
    """Key of the pass -> the value with which it would make the result much smaller and lose nothing."""


def matches(pattern: str, name: str, *types: str) -> bool:
    """Return whether `pattern` selects a layer.

    A pattern is a name, a type (Linear, Conv, ...), or `re:` and a regex for the start of a name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or pattern in types


OUTPUT = "lm_head"
"""What recipes call a language model's output layer, and readers one that shares the embeddings' weight, so that no
file names it."""


def assign_roles(layers: Sequence[LayerFacts], structure: Structure | None) -> tuple[LayerFacts, ...]:
    """Return a torch model's layers with their roles, and what transformers cannot unpack.

    A table is an embedding of at least SMALL_TABLE of the largest one's size; a matrix product that holds a table's
    weight is tied to it, whatever the structure shows.
    """
    largest = max((layer.n_weights for layer in layers if layer.type == "Embedding"), default=0)
    tables = {
        layer.weight for layer in layers if layer.type == "Embedding" and layer.n_weights >= SMALL_TABLE * largest
    }
    heads = {layer.weight for layer in layers if layer.type != "Embedding" and layer.weight in tables}
    last = structure.head if structure is not None else ()

    routers = structure.routers if structure is not None else ()
    unpackable, beside = (
        tuple(f"{name}." for name in names)
        for names in ((structure.unpackable, structure.beside) if structure is not None else ((), ()))
    )
    idle = {layer.name for layer in find_uncalled(layers, structure)} if structure is not None else set()

    def find_role(layer: LayerFacts) -> Role:
        if f"{layer.name}.".startswith(beside):
            return "beside"
        if layer.weight in tables:
            return "tied" if layer.weight in heads else "table"
        if layer.name in routers:
            return "router"
        if layer.name in idle:
            return "idle"
        return "head" if layer.name in last and layer.type != "Embedding" else ""

    vocabularies = {layer.shape[0] for layer in layers if layer.weight in tables}

    def describe(layer: LayerFacts) -> LayerFacts:
        role = find_role(layer)
        makes_logits = role in ("head", "tied") and layer.type != "Embedding" and layer.shape[0] in vocabularies
        return replace(
            layer,
            role=role,
            unpackable=f"{layer.name}.".startswith(unpackable),
            alias=OUTPUT if makes_logits else "",
        )

    return tuple(map(describe, layers))


def find_uncalled(layers: Sequence[LayerFacts], structure: Structure) -> list[LayerFacts]:
    """Return the layers outside the blocks that read nothing: a stream of calibration data never comes to them.

    Tables of embeddings, which read tokens, are none of them; nor is any where names alone tell how the model is made.
    """
    if structure.named:
        return []
    read = {name for input_group in structure.input_groups for name in input_group.layers}
    inside = tuple(f"{block.name}." if block.name else "" for block in structure.blocks)
    return [
        layer
        for layer in layers
        if layer.name not in read and not layer.name.startswith(inside) and layer.type != "Embedding"
    ]


def group_names(names: Sequence[str], others: Iterable[str]) -> dict[str, list[str]]:
    """Return names of layers by the largest module around them that has none of `others`; a layer may be its own."""
    around = {".".join(parts[:n]) for parts in (name.split(".") for name in others) for n in range(1, len(parts) + 1)}
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        module = next((path for n in range(1, len(parts)) if (path := ".".join(parts[:n])) not in around), name)
        groups.setdefault(module, []).append(name)
    return groups


def describe_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """Return what `group_names` found in few words, such as "vision_tower (26 layers), projector"."""
    told = [members[0] if len(members) == 1 else f"{name} ({len(members)} layers)" for name, members in groups.items()]
    return ", ".join(told)


def select(layers: Sequence[LayerFacts], patterns: Sequence[str]) -> dict[str, str]:
    """Return, for each layer that some pattern selects, its name -> the first such pattern."""
    chosen: dict[str, str] = {}
    for layer in layers:
        for pattern in patterns:
            if matches(pattern, layer.name, layer.type, layer.op, layer.alias):
                chosen[layer.name] = pattern
                break
    return chosen
