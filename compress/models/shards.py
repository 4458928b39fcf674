"""A language model whose class is not at hand: its layers and blocks, found in the names that its files have.

Nothing is run and no code of the model is needed. What can be told by a name and a shape is told; the rest stays as it
is: stacks of experts, whose halves may follow one another or alternate, towers beside the language model, and blocks
that config.json does not count.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from compress.blocks.layers import is_layer
from compress.blocks.materialise import NamedParts, tied_names
from compress.blocks.store import Entry, Stored, WeightStore
from compress.blocks.streamed import StreamedModel
from compress.blocks.tables import layer_facts
from compress.errors import SourceError
from compress.facts import OUTPUT, WORTH_NAMING, BlockFacts, InputGroup, ModelFacts, Structure, assign_roles
from compress.formats.targets import FUSED
from compress.models.checkpoint import TensorPlaces, list_tensors
from compress.models.facts import count_other_bytes, find_float_bytes
from compress.models.packed import PARTS, Parts, decode_weights, group_by_layer, quantization_of
from compress.models.source import Source, read_object
from compress.models.weights import safetensors_bytes, safetensors_types
from runtime.bundle.tensors import TensorSpec

COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
"""Keys of config.json for the number of blocks."""
TEXT_PART = re.compile(r"text|language|llm|decoder|thinker")
"""In the key of the part of config.json that describes a language model beside others."""
TABLE = re.compile(r"(?!.*(?:_out|proj|projection|head)$)(?:.*embed.*|wte|wpe)")
"""Last word of a table's name; `embed_out` and its like are output layers."""
NORM = re.compile(r".*norm.*|ln(?:_.*|\d*)")
NUMBERED = re.compile(r"(.+?)\.(\d+)\.")
"""A name inside a list of modules: the list, and which of it."""
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.")
BLOCK_WEIGHTS = 2**28
"""Of a block, whose integers are held until it is written, a byte each: larger ones, as those with hundreds of experts,
are taken apart. A bound on memory (256 MiB), not measured."""
FLOATS = ("F32", "F16", "BF16")
CACHE_SCALES = ("k_scale", "v_scale", "q_scale")
"""Of the cache in 8 bits that a rounded source may ask for; the result asks for none."""
Layers = Mapping[str, tuple[int, int]]
"""Name -> [out, in]."""


@dataclass(frozen=True)
class NamedModel:
    """What the files of a model tell. `module`: its tensors as their names nest them, on the meta device.

    `entries`: parameter -> where its floats are, or what they are decoded of. `copied`: tensors of other types than
    floats -> their bytes; they are no part of `module`.
    """

    module: NamedParts
    structure: Structure
    entries: Mapping[str, Entry]
    copied: Mapping[str, int]
    architecture: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Chain:
    """The list of modules that is the language model: its name, and how many blocks it has by config.json.

    `beside`: modules that hold other lists. `parted`: config.json has parts, of which one is the language model's.
    """

    name: str
    n_blocks: int
    present: frozenset[int]
    beside: tuple[str, ...]
    parted: bool

    @property
    def blocks(self) -> list[str]:
        return [f"{self.name}.{number}" for number in range(self.n_blocks)]

    @property
    def root(self) -> str:
        """Return the module that is the language model alone: the list itself, where something else lies around it."""
        parent = self.name.rpartition(".")[0]
        shared = not parent or any(f"{name}.".startswith(f"{parent}.") for name in self.beside)
        return self.name if shared else parent

    def list_beside(self) -> list[str]:
        """Return what holds the other lists, and the blocks that config.json does not count."""
        return [*self.beside, *(f"{self.name}.{number}" for number in sorted(self.present) if number >= self.n_blocks)]


def read_named_model(source: Source) -> NamedModel:
    """Find the layers of a folder's files; no weight is read. SourceError where they cannot be told."""
    assert source.folder is not None
    if not source.spec.decoder_only:
        raise SourceError(f"{source.name}: layers are told by their names in language models alone; use dir:")
    config, record = read_object(source.folder / "config.json"), quantization_of(source.folder)
    held = dict(sorted(list_tensors(source.weights).items(), key=lambda item: _sort_naturally(item[0])))
    paths = {path for path, _ in held.values()}
    types = {name: kind for path in paths for name, kind in safetensors_types(path).items()}
    _refuse_packed_stacks(source, held, types, record)
    chain = _find_chain(source, held, config)
    grouped = group_by_layer(held)
    sizes = {name: _find_shape(name, parts, types, record) for name, parts in grouped.items()}
    layers = {name: size for name, size in sizes.items() if size is not None}
    tables = _find_tables(layers, chain, config)
    module, entries, copied = NamedParts(), dict[str, Entry](), dict[str, int]()
    for name, tensors in grouped.items():
        part = _put_layer(module, name, layers[name], name in tables) if name in layers else _find_part(module, name)
        for leaf, (path, key, shape) in tensors.items():
            if types[key] in FLOATS and leaf not in PARTS and not (record and leaf in CACHE_SCALES):
                part._parameters[leaf] = _make_empty(shape)
                entries[key] = Stored(path, key)
            elif not (record and leaf in (*PARTS, *CACHE_SCALES)) and not (leaf == "weight" and name in layers):
                copied[key] = safetensors_bytes(path)[key]
    entries |= decode_weights(module, record, held) if record else {}
    _refuse_unfit(source, layers, grouped, entries, types)
    head = _find_head(layers, tables, chain)
    if head is None and tables and config.get("tie_word_embeddings") is not False:
        _share_table(module, max(tables, key=lambda name: math.prod(layers[name])))
        head = OUTPUT
    structure = _find_structure(module, layers, tables, chain, head, _find_routers(layers, held))
    architecture = str((config.get("architectures") or [config.get("model_type", "")])[0])
    return NamedModel(module, structure, entries, copied, architecture, tuple(_describe_stacks(held, types)))


def facts_by_names(source: Source, named: NamedModel) -> ModelFacts:
    """Return what a plan knows of a model by the names and shapes in its files."""
    module, tied = named.module, tied_names(named.module)
    found = [layer_facts(name, part) for name, part in module.named_modules() if is_layer(part)]
    macs = [layer.n_weights if layer.op == "MatMul" else 0 for layer in found]  # of one token
    owned = [
        replace(layer, weight=tied.get(layer.weight, layer.weight), macs=n)
        for layer, n in zip(found, macs, strict=True)
    ]
    layers = assign_roles(owned, named.structure)
    other_bytes = count_other_bytes(module, layers)
    n_bytes = sum(path.stat().st_size for path in source.weights) - sum(named.copied.values())
    width = max((layer.shape[0] for layer in layers if layer.role in ("table", "tied", "head")), default=1)
    return ModelFacts(
        source="torch",
        architecture=named.architecture,
        task=source.task,
        inputs=(TensorSpec("input_ids", "int64", ("batch", "sequence")),),
        outputs=(TensorSpec("logits", "float32", ("batch", "sequence", width)),),
        layers=layers,
        other_bytes=other_bytes,
        float_bytes=find_float_bytes(n_bytes, other_bytes, layers),
        unread=named.copied,
        notes=named.notes,
        structure=named.structure,
        classless=True,
    )


def open_named_model(source: Source) -> StreamedModel:
    """Return the model with its weights left in their files, those in few bits as the floats that they stand for."""
    named = read_named_model(source)
    build = functools.partial(copy.deepcopy, named.module)
    store = WeightStore(named.entries, tied_names(named.module))
    return StreamedModel(build, store, named.structure, {}, named.architecture, source.folder)


def is_stack(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape holds the matrices of several experts."""
    # a convolution over time has three axes, too; above 16, a bound not measured, experts' matrices
    return len(shape) == 3 and min(shape[1:]) > 16


def _sort_naturally(name: str) -> list[tuple[int, str]]:
    """Return a key by which layers.10 comes behind layers.9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]


def _find_chain(source: Source, held: TensorPlaces, config: Mapping[str, Any]) -> _Chain:
    """Return the list of modules that holds most of the weights, of those as long as config.json says.

    SourceError where no name has a number, or a block in between is missing.
    """
    sizes, present = dict[str, int](), dict[str, set[int]]()
    for name, (_, shape) in held.items():
        match = NUMBERED.match(name)
        if match and name.count(".", match.end()):  # not of layers alone, as projections of a stream's parts
            sizes[match[1]] = sizes.get(match[1], 0) + math.prod(shape)
            present.setdefault(match[1], set()).add(int(match[2]))
    if not sizes:
        raise SourceError(f"{source.name}: no numbers in names (layers.0., layers.1.) tell its blocks; use dir:")
    parts = [part for key, part in config.items() if isinstance(part, dict) and TEXT_PART.search(key)]
    counts = [part[key] for part in (config, *parts) for key in COUNTS if isinstance(part.get(key), int)]
    long_enough = [name for name in sizes if counts and max(present[name]) + 1 >= counts[0]]
    chain = max(long_enough or sizes, key=sizes.__getitem__)
    n_blocks = counts[0] if long_enough else 1 + max(present[chain])
    if missing := sorted(set(range(n_blocks)) - present[chain]):
        raise SourceError(f"{source.name}: its files hold nothing of {chain}.{missing[0]}; copy or download them again")
    parted = not any(key in config for key in COUNTS) and bool(parts)
    beside = {_find_holder(chain, name): None for name in sizes if not _is_sibling(chain, name, present)}
    return _Chain(chain, n_blocks, frozenset(present[chain]), tuple(beside), parted)


def _is_sibling(chain: str, name: str, present: Mapping[str, set[int]]) -> bool:
    """Return whether a list is the language model's, too: another part of each of its blocks."""
    parents = chain.rpartition(".")[0], name.rpartition(".")[0]
    return name == chain or (parents[0] == parents[1] and present[name] == present[chain])


def _find_holder(chain: str, other: str) -> str:
    """Return the largest module that holds another list and not the language model's."""
    own, words = chain.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(own, words, strict=False)) if a != b), len(words) - 1)
    return ".".join(words[: common + 1])


def _find_shape(name: str, parts: Parts, types: Mapping[str, str], record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return [out, in] of a layer by what it is stored as; None of what is none."""
    sizes = {leaf: shape for leaf, (_, _, shape) in parts.items()}
    if NORM.fullmatch(_leaf(name)):
        return None
    if "weight_shape" in parts:
        path, key, _ = parts["weight_shape"]
        with safe_open(path, framework="pt") as file:
            rows, columns = file.get_tensor(key).tolist()
        return rows, columns
    if "weight_packed" in parts:
        return sizes["weight_packed"][0], 2 * sizes["weight_packed"][1]
    if "qweight" in parts and record.get("quant_method") == "awq":
        return sizes["scales"][1], sizes["qweight"][0]
    if "qweight" in parts and "g_idx" in parts:
        return sizes["qweight"][1], sizes["g_idx"][0]
    if len(sizes.get("weight", ())) != 2:
        return None
    rows, columns = sizes["weight"]
    return rows, 2 * columns if types[parts["weight"][1]] == "U8" else columns


def _find_tables(layers: Layers, chain: _Chain, config: Mapping[str, Any]) -> set[str]:
    """Return the tables of embeddings; where no name tells, what lies outside the blocks and is a vocabulary high."""
    named = {name for name in layers if TABLE.fullmatch(_leaf(name))}
    texts = [part for key, part in config.items() if isinstance(part, dict) and TEXT_PART.search(key)]
    heights = {part["vocab_size"] for part in (config, *texts) if "vocab_size" in part}
    return named or {
        name for name, (rows, _) in layers.items() if rows in heights and not name.startswith(f"{chain.name}.")
    }


def _find_part(module: nn.Module, name: str) -> nn.Module:
    """Return the module of that path, made where it is not there."""
    for word in name.split(".") if name else ():
        inner = module._modules.get(word)
        if inner is None:
            inner = module._modules[word] = NamedParts()  # not add_module: a word may be a method's name (`half`)
        module = inner
    return module


def _put_layer(module: nn.Module, name: str, shape: tuple[int, int], is_table: bool) -> nn.Module:
    """Put a layer without weights at a path, over what is inside of it already, and return it."""
    parent, _, leaf = name.rpartition(".")
    rows, columns = shape
    layer: nn.Module = (
        nn.Embedding(rows, columns, device="meta") if is_table else nn.Linear(columns, rows, bias=False, device="meta")
    )
    inside, parts = _find_part(module, name)._modules, _find_part(module, parent)._modules
    layer._modules |= inside
    parts[leaf] = layer.requires_grad_(False)
    return layer


def _make_empty(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _share_table(module: nn.Module, table: str) -> None:
    """Add the output layer that multiplies with a table's weight."""
    weight = _find_part(module, table)._parameters["weight"]
    assert weight is not None
    _put_layer(module, OUTPUT, (weight.shape[0], weight.shape[1]), is_table=False)._parameters["weight"] = weight


def _find_head(layers: Layers, tables: set[str], chain: _Chain) -> str | None:
    """Return the layer outside of the blocks that is as high as the largest table: the output layer; None: no file
    has one."""
    largest = max((layers[name] for name in tables), key=math.prod, default=(0, 0))
    beside = tuple(f"{name}." for name in (chain.name, *chain.list_beside()))
    fitting = [name for name in layers if name not in tables and layers[name][0] == largest[0]]
    return next((name for name in reversed(fitting) if not f"{name}.".startswith(beside)), None)


def _find_routers(layers: Layers, held: TensorPlaces) -> tuple[str, ...]:
    """Return the layers beside a mixture's experts that have an output for each of these."""
    counts = dict[str, int]()
    for name, (_, shape) in held.items():
        if match := EXPERT.match(name):
            counts[match[1]] = max(counts.get(match[1], 0), 1 + int(match[2]))
        elif is_stack(shape):
            counts[find_mixture(name)] = shape[0]
    routers = []
    for name, (rows, _) in layers.items():
        words = name.split(".")
        around = [counts[mixture] for n in range(1, len(words)) if (mixture := ".".join(words[:n])) in counts]
        # more outputs than experts: of shared ones, and of such that compute nothing
        most = 2 if any(word == "gate" or "router" in word for word in words) else 1
        if not EXPERT.match(name) and any(n <= rows <= most * n for n in around):
            routers.append(name)
    return tuple(routers)


def find_mixture(stack: str) -> str:
    """Return the module that has the experts of which a stack holds all."""
    return stack.removesuffix(".weight").rpartition(".")[0].removesuffix(".experts")


def _find_structure(
    module: nn.Module, layers: Layers, tables: set[str], chain: _Chain, head: str | None, routers: tuple[str, ...]
) -> Structure:
    parts = dict(module.named_modules())
    names = [name for block in chain.blocks for name in _take_apart(parts[block], block)]
    blocks = tuple(BlockFacts(name, _group_layers(name, parts[name])) for name in names)
    beside = chain.list_beside()
    if chain.parted:  # whatever joins a tower to the language model is no part of that
        own = (f"{chain.root}.", *(f"{name}." for name in (*tables, *([head] if head else []))))
        beside += [name for name in layers if not f"{name}.".startswith(own)]
    after = () if head is None else (InputGroup((head,)),)
    beside = list(dict.fromkeys(beside))
    return Structure(blocks, after=after, routers=routers, beside=tuple(beside), named=True)


def _take_apart(part: nn.Module, name: str) -> Iterator[str]:
    """Yield the modules with layers that a block is, or, of a large one, those that it is made of."""
    weights = [layer.weight for layer in part.modules() if is_layer(layer)]
    inner = {f"{name}.{key}": child for key, child in part.named_children() if any(map(is_layer, child.modules()))}
    if is_layer(part) or all(map(is_layer, inner.values())) or sum(map(_count, weights)) <= BLOCK_WEIGHTS:
        if weights:
            yield name
        return
    for path, child in inner.items():
        yield from _take_apart(child, path)


def _count(weight: Any) -> int:
    return int(weight.numel())


def _group_layers(block: str, module: nn.Module) -> tuple[InputGroup, ...]:
    """Return a block's layers, those together that an engine runs as one: formats with one scale give them the same."""
    groups: dict[tuple[str, Sequence[str]], list[str]] = {}
    for path, part in module.named_modules():
        if is_layer(part):
            name = f"{block}.{path}" if path else block
            parent, _, leaf = name.rpartition(".")
            together = next((names for names in FUSED if leaf in names), (leaf,))
            groups.setdefault((parent, together), []).append(name)
    # in the order in which they run, as a sum of errors depends on it
    ordered = (sorted(names, key=lambda name: order.index(_leaf(name))) for (_, order), names in groups.items())
    return tuple(InputGroup(tuple(names)) for names in ordered)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _describe_stacks(held: TensorPlaces, types: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on weights that stay float because they lie in stacks, where they are much of the model."""
    sizes = {name: math.prod(shape) for name, (_, shape) in held.items()}
    stacks = [name for name, (_, shape) in held.items() if is_stack(shape) and types[name] in FLOATS]
    share = sum(sizes[name] for name in stacks) / max(sum(sizes.values()), 1)
    if share >= WORTH_NAMING:
        yield (
            f"{share:.0%} of the weights lie in stacks ({stacks[0]}, ...), of which no name tells the parts: they stay "
            "as they are; with the model's class, source: dir:, target: vllm takes them apart"
        )


def _refuse_packed_stacks(
    source: Source, held: TensorPlaces, types: Mapping[str, str], record: Mapping[str, Any]
) -> None:
    stack = next((n for n, (_, shape) in held.items() if record and len(shape) > 2 and types[n] not in FLOATS), None)
    if stack is not None:
        raise SourceError(
            f"{source.name}: '{stack}' is a stack of experts in few bits, of which no name tells the parts, and beside "
            "other formats nobody reads it; use source: dir: where transformers has the model's class"
        )


def _refuse_unfit(
    source: Source, layers: Layers, grouped: Mapping[str, Parts], entries: Mapping[str, Entry], types: Mapping[str, str]
) -> None:
    """Raise SourceError for a weight whose numbers are not known, and for weights that lie as [in, out]."""
    for name, shape in layers.items():
        parts = grouped[name]
        if f"{name}.weight" not in entries:
            kind = types[next(iter(parts.values()))[1]]
            raise SourceError(
                f"{source.name}: '{name}' is stored as {kind}, and config.json has no quantization_config that says "
                "what it stands for; get the folder again"
            )
        bias = parts["bias"][2] if "bias" in parts else ()
        if len(bias) == 1 and bias[0] != shape[0] and bias[0] == shape[1]:
            raise SourceError(
                f"{source.name}: '{name}' is {list(shape)} with a bias of {bias[0]}: this model's weights lie as "
                "[in, out], of which a square one is not told apart; use dir:"
            )
