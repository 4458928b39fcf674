"""How a torch model is made, found by running it once: blocks, what each layer reads, where scales fold, experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from compress.blocks.experts import Experts, first_expert_only, is_stacked
from compress.blocks.materialise import plain
from compress.facts import BlockFacts, Reading, Residual, Structure
from compress.structure.dataflow import Call, Flow, record, within
from compress.structure.residual import find_residual
from compress.structure.sources import Sources, is_matrix, n_inputs, n_outputs

N_TOKENS = 8
"""Enough for a text model's structure, whatever `max_length` is."""


def find_structure(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Structure:
    """Blocks, readings, experts and the residual stream of `module`, from one run on `feeds` (by forward's parameter).

    Unless `compute`, no values are needed: the module may lie on meta, and feeds of zeros will do (two rows or more of
    text, `N_TOKENS` tokens). Layers are Linear and Hugging Face's Conv1D; one that forward does not call as a module is
    in no reading, unless it is an expert's. Raises whatever forward raises: RuntimeError where it looks at values.
    """
    matrices = [name for name, layer in module.named_modules() if is_matrix(layer)]
    if len(matrices) <= 1:  # a convolutional network: nothing to learn from a run
        return Structure((BlockFacts("", tuple(Reading((plain(name),)) for name in matrices)),))
    with first_expert_only():
        return structure_of(record(module, feeds, compute))


def one_block(module: nn.Module, note: str) -> Structure:
    """For a model that cannot be run: one block, each layer a reading of its own, and why."""
    layers = [plain(name) for name, layer in module.named_modules() if is_matrix(layer)]
    return Structure((BlockFacts("", tuple(Reading((name,)) for name in layers)),), notes=(note,))


def structure_of(flow: Flow) -> Structure:
    """The structure that a recorded run shows."""
    notes = [
        f"{name} holds stacked experts, which are no layers; `unstack_experts` makes them so"
        for name, module in flow.modules.items()
        if is_stacked(module)
    ]
    chain, more = _blocks(flow)
    mixtures = _mixtures(flow, chain)
    parts = _readings(flow, chain, mixtures)
    residual: Residual | None = None
    if chain:
        residual, why = find_residual(flow, chain[0], Sources(flow))
        more += [f"no plain residual stream: {why}"] if residual is None else []
        residual = residual and _of_all_experts(residual, mixtures)
    blocks = tuple(
        BlockFacts(name, parts.by_block.get(name, ()), _experts_of(flow, name, mixtures)) for name in chain or ("",)
    )
    return Structure(blocks, parts.before, parts.after, residual, tuple(notes + more))


@dataclass
class _Parts:
    """Readings by where they are."""

    by_block: dict[str, tuple[Reading, ...]] = field(default_factory=dict)
    before: tuple[Reading, ...] = ()
    after: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class _Mixture:
    """A list of experts: their names, and for each the layers in its module's order."""

    name: str
    experts: tuple[tuple[str, tuple[str, ...]], ...]


def _blocks(flow: Flow) -> tuple[tuple[str, ...], list[str]]:
    """Names of the longest chain of sibling modules that holds most of what chains hold, and notes."""
    chains = [chain for name in flow.modules if (chain := _longest_chain(flow, name))]
    weights = {chain: sum(_n_weights(flow, name) for name in chain) for chain in chains}
    most = max(weights.values(), default=0)
    held = [chain for chain in chains if 2 * weights[chain] >= most]
    if not held:
        return (), ["no chain of blocks was found: the model is one block"]
    chain = max(held, key=lambda c: (len(c), weights[c]))
    if (leak := _leak(flow, chain)) is not None:
        return (), [f"no chain of blocks: {leak}; the model is one block"]
    return chain, []


def _longest_chain(flow: Flow, parent: str) -> tuple[str, ...]:
    """Among the children of a list: each called once, reading what the one before gave, and holding layers inside."""
    module = flow.modules[parent]
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or isinstance(module, Experts):
        return ()
    called = [name for name in _children(parent, module) if len(flow.calls.get(name, ())) == 1]
    called.sort(key=lambda name: flow.calls[name][0].start)
    best: list[str] = []
    current: list[str] = []
    for name in called:
        call = flow.calls[name][0]
        linked = bool(current) and bool(set(flow.calls[current[-1]][0].outputs[:1]) & set(call.inputs))
        current = [*current, name] if linked else [name]
        if not _is_block(flow, name):
            current = []
        best = max(best, current, key=len)
    return tuple(best) if len(best) > 1 else ()


def _children(name: str, module: nn.Module) -> list[str]:
    """Full names."""
    return [f"{name}.{key}" if name else key for key, _ in module.named_children()]


def _is_block(flow: Flow, name: str) -> bool:
    """Not a layer itself, and holding some."""
    return not is_matrix(flow.modules[name]) and _n_weights(flow, name) > 0


def _n_weights(flow: Flow, name: str) -> int:
    return sum(n_inputs(m) * n_outputs(m) for m in flow.modules[name].modules() if is_matrix(m))


def _leak(flow: Flow, chain: Sequence[str]) -> str | None:
    """What, computed inside a block before the last, is read outside it and is not the next block's input."""
    for name, following in itertools.pairwise(chain):
        call = flow.calls[name][0]
        for op in flow.ops[call.start : call.stop]:
            for value in op.outputs:
                for reader in flow.consumers.get(value, ()):
                    if not call.start <= reader.index < call.stop and not (
                        value == call.outputs[0] and within(reader.module, following)
                    ):
                        return f"{reader.module or 'the model'} reads what {name} computed inside"
    return None


def _mixtures(flow: Flow, chain: Sequence[str]) -> list[_Mixture]:
    """Lists of alike modules that hold layers and are no chain: of which a router may call some."""
    found = []
    for name, module in flow.modules.items():
        if not isinstance(module, nn.ModuleList) or (chain and chain[0] in _children(name, module)):
            continue
        experts = [(child, layers) for child in _children(name, module) if (layers := _layers_in(flow, child))]
        if len(experts) < 2 or len({_shapes(flow, *expert) for expert in experts}) != 1:
            continue
        if isinstance(module, Experts) or not (_longest_chain(flow, name) or _branches(flow, experts)):
            found.append(_Mixture(name, tuple(experts)))
    return found


def _shapes(flow: Flow, expert: str, layers: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """What an expert's layers are called inside it, and their sizes."""
    return tuple((la.removeprefix(expert), n_inputs(flow.modules[la]), n_outputs(flow.modules[la])) for la in layers)


def _branches(flow: Flow, experts: Sequence[tuple[str, tuple[str, ...]]]) -> bool:
    """True if all are layers themselves, or are called on the same tensor: branches, not experts."""
    if any(name in layers for name, layers in experts):
        return True
    calls = [flow.calls.get(name, []) for name, _ in experts]
    return all(len(c) == 1 for c in calls) and len({c[0].inputs[:1] for c in calls}) == 1


def _layers_in(flow: Flow, name: str) -> tuple[str, ...]:
    inside = ((f"{name}.{path}" if path else name, m) for path, m in flow.modules[name].named_modules())
    return tuple(full for full, module in inside if is_matrix(module))


def _of_all_experts(residual: Residual, mixtures: Sequence[_Mixture]) -> Residual:
    """With what was found for the first expert of a mixture, which alone ran, said of all."""
    alike = {
        layer: tuple(others[k] for _, others in mixture.experts)
        for mixture in mixtures
        for k, layer in enumerate(mixture.experts[0][1])
    }

    def every(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one for name in names for one in alike.get(name, (name,))))

    norms = tuple((norm, every(layers)) for norm, layers in residual.norms)
    return replace(residual, writers=every(residual.writers), readers=every(residual.readers), norms=norms)


def _experts_of(flow: Flow, block: str, mixtures: Sequence[_Mixture]) -> tuple[tuple[str, ...], ...]:
    return tuple(layers for mixture in mixtures if within(mixture.name, block) for _, layers in mixture.experts)


def _readings(flow: Flow, chain: Sequence[str], mixtures: Sequence[_Mixture]) -> _Parts:
    """All readings, in order, sorted into blocks and what is before and after them."""
    sources = Sources(flow)
    expert_of = {la: expert for m in mixtures for expert, layers in m.experts for la in layers}
    matrices = [name for name, module in flow.modules.items() if is_matrix(module)]
    block_of = {name: next((b for b in chain if within(name, b)), "") for name in matrices}
    groups: dict[tuple[object, ...], list[str]] = {}
    for call in flow.in_order():
        name = call.module
        if is_matrix(flow.modules[name]) and call is flow.calls[name][0]:
            key = (_reads(flow, sources, name), block_of[name], expert_of.get(name))
            groups.setdefault(key, []).append(name)
    experts = {expert for m in mixtures for expert, _ in m.experts}
    readings = [_inside_one(sources.resolve(tuple(layers)), experts) for layers in groups.values()]
    readings = _with_uncalled(readings, mixtures)
    found = _Parts()
    if not chain:
        found.by_block[""] = tuple(readings)
        return found
    first = flow.calls[chain[0]][0]
    for reading in readings:
        block = block_of[reading.layers[0]]
        if block:
            found.by_block[block] = (*found.by_block.get(block, ()), reading)
        elif _begins(flow, reading) < first.start:
            found.before = (*found.before, reading)
        else:
            found.after = (*found.after, reading)
    return found


def _begins(flow: Flow, reading: Reading) -> int:
    calls: list[Call] = flow.calls.get(reading.layers[0], [])
    return calls[0].start if calls else len(flow.ops)


def _reads(flow: Flow, sources: Sources, name: str) -> tuple[int, ...]:
    """The tensor that the layer reads, at each of its calls."""
    return tuple(sources.canonical(call.inputs[0]) if call.inputs else -1 for call in flow.calls[name])


def _inside_one(reading: Reading, experts: set[str]) -> Reading:
    """Without a source on another side of an expert's border: one expert alone need not tell what all of them read."""
    if _expert(reading.source, experts) == _expert(reading.layers[0], experts):
        return reading
    return Reading(reading.layers)


def _expert(name: str, experts: set[str]) -> str | None:
    parts = name.split(".")
    return next((path for n in range(len(parts), 0, -1) if (path := ".".join(parts[:n])) in experts), None)


def _with_uncalled(readings: list[Reading], mixtures: Sequence[_Mixture]) -> list[Reading]:
    """The readings of experts that got no token too, made like those of one that did, after the mixture's others."""
    called = {layer for reading in readings for layer in reading.layers}
    later: dict[int, list[Reading]] = {}
    for mixture in mixtures:
        model = next((expert for expert, layers in mixture.experts if set(layers) <= called), None)
        own = [(i, r) for i, r in enumerate(readings) if within(r.layers[0], mixture.name)]
        copied = [r for _, r in own if model is not None and within(r.layers[0], model)]
        place = later.setdefault(own[-1][0] if own else len(readings) - 1, [])
        for expert, layers in mixture.experts:
            if not set(layers) & called:
                place += [_renamed(r, str(model), expert) for r in copied] or [Reading((la,)) for la in layers]
    return [r for i, reading in enumerate(readings) for r in (reading, *later.get(i, ()))]


def _renamed(reading: Reading, old: str, new: str) -> Reading:
    def name(of: str) -> str:
        return new + of.removeprefix(old) if of else ""

    return replace(reading, layers=tuple(map(name, reading.layers)), source=name(reading.source))
