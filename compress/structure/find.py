"""How a torch model is made, found by running it once: blocks, what each layer reads, where scales fold, experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from compress.blocks.experts import Experts, first_expert_only, is_stacked
from compress.blocks.materialise import plain
from compress.facts import BlockFacts, InputGroup, Residual, Structure
from compress.structure.dataflow import DataFlow, ModuleCall, record, within
from compress.structure.residual import find_residual
from compress.structure.sources import Sources, is_matrix, n_inputs, n_outputs

KEEPS_SCORES = (
    *("_softmax", "softmax", "_log_softmax", "sigmoid", "softplus", "sqrt", "add", "mul", "div", "sub", "tanh"),
    *("_to_copy", "view", "_unsafe_view", "reshape", "clone", "alias", "detach", "slice", "select", "unsqueeze"),
    *("squeeze", "masked_fill", "clamp", "where", "t", "transpose"),
)
"""Operators between a router's scores and the top-k of them."""
N_TOKENS = 8
"""Enough for a text model's structure, whatever `max_length` is."""


def find_structure(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Structure:
    """Return blocks, input groups, experts and the residual stream of `module`, from one run on `feeds`.

    `feeds`: by parameter of forward. Unless `compute`, no values are needed: the module may lie on meta, and feeds of
    zeros will do (two rows or more of text, `N_TOKENS` tokens). Layers are Linear and Hugging Face's Conv1D; one that
    forward does not call as a module is in no reading, unless it is an expert's. Raises whatever forward raises:
    RuntimeError where it looks at values.
    """
    with first_expert_only():
        return structure_of(record(module, feeds, compute))


def one_block(module: nn.Module, *notes: str) -> Structure:
    """Return the structure of a model as one block, each layer an input group of its own."""
    layers = [plain(name) for name, layer in module.named_modules() if is_matrix(layer)]
    return Structure((BlockFacts("", tuple(InputGroup((name,)) for name in layers)),), notes=notes)


def structure_of(flow: DataFlow) -> Structure:
    """Return the structure that a recorded run shows, of a mixture's experts the first alone."""
    if sum(map(is_matrix, flow.modules.values())) <= 1:  # a convolutional network: its blocks hold no matrices
        return one_block(flow.module)
    notes = [
        f"{name} holds stacked experts, which are no layers; `unstack_experts` makes them so"
        for name, module in flow.modules.items()
        if is_stacked(module)
    ]
    chain, more = _find_blocks(flow)
    mixtures = _find_mixtures(flow, chain)
    parts = _find_input_groups(flow, chain, mixtures)
    residual: Residual | None = None
    if chain:
        residual, why = find_residual(flow, chain[0], Sources(flow))
        more += [f"no plain residual stream: {why}"] if residual is None else []
        residual = residual and _extend_to_experts(residual, mixtures)
    blocks = tuple(
        BlockFacts(
            name,
            parts.by_block.get(name, ()),
            tuple(layers for mixture in mixtures if within(mixture.name, name) for _, layers in mixture.experts),
        )
        for name in chain or ("",)
    )
    return Structure(blocks, parts.before, parts.after, residual, tuple(notes + more), _find_routers(flow))


def _find_routers(flow: DataFlow) -> tuple[str, ...]:
    """Return the layers that a top-k reads, through what keeps each of their outputs apart: scores of experts."""
    given = {
        call.outputs[0]: name
        for name, calls in flow.calls.items()
        if is_matrix(flow.modules[name])
        for call in calls
        if call.outputs
    }
    routers = dict[str, None]()
    values = [op.inputs[0] for op in flow.ops if op.name == "topk" and op.inputs]
    seen: set[int] = set()
    while values:
        value = values.pop()
        if value in given:
            routers[given[value]] = None
        elif value not in seen and (op := flow.producers.get(value)) is not None and op.name in KEEPS_SCORES:
            values += op.inputs
        seen.add(value)
    return tuple(routers)


@dataclass
class _Parts:
    """Readings by where they are."""

    by_block: dict[str, tuple[InputGroup, ...]] = field(default_factory=dict)
    before: tuple[InputGroup, ...] = ()
    after: tuple[InputGroup, ...] = ()


@dataclass(frozen=True)
class _Mixture:
    """A list of experts: their names, and for each the layers in its module's order."""

    name: str
    experts: tuple[tuple[str, tuple[str, ...]], ...]


def _find_blocks(flow: DataFlow) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of the longest chain of sibling modules that holds most of what chains hold, and notes."""
    chains = [chain for name in flow.modules if (chain := _find_longest_chain(flow, name))]
    weights = {chain: sum(_count_weights(flow, name) for name in chain) for chain in chains}
    most = max(weights.values(), default=0)
    held = [chain for chain in chains if 2 * weights[chain] >= most]
    if not held:
        return (), ["no chain of blocks was found: the model is one block"]
    chain = max(held, key=lambda c: (len(c), weights[c]))
    if (leak := _find_leak(flow, chain)) is not None:
        return (), [f"no chain of blocks: {leak}; the model is one block"]
    return chain, []


def _find_longest_chain(flow: DataFlow, parent: str) -> tuple[str, ...]:
    """Return the longest chain among the children of a list; () where there is none.

    In a chain each is called once, reads what the one before gave, and holds layers inside.
    """
    module = flow.modules[parent]
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or isinstance(module, Experts):
        return ()
    called = [name for name in _list_children(parent, module) if len(flow.calls.get(name, ())) == 1]
    called.sort(key=lambda name: flow.calls[name][0].start)
    best: list[str] = []
    current: list[str] = []
    for name in called:
        call = flow.calls[name][0]
        linked = bool(current) and bool(set(flow.calls[current[-1]][0].outputs[:1]) & set(call.inputs))
        current = [*current, name] if linked else [name]
        if is_matrix(flow.modules[name]) or not _count_weights(flow, name):  # a layer itself, or it holds none
            current = []
        best = max(best, current, key=len)
    return tuple(best) if len(best) > 1 else ()


def _list_children(name: str, module: nn.Module) -> list[str]:
    """Return the full names of a module's children."""
    return [f"{name}.{key}" if name else key for key, _ in module.named_children()]


def _count_weights(flow: DataFlow, name: str) -> int:
    return sum(n_inputs(m) * n_outputs(m) for m in flow.modules[name].modules() if is_matrix(m))


def _find_leak(flow: DataFlow, chain: Sequence[str]) -> str | None:
    """Return a text on what is computed inside a block and read outside it, if not as an input of the next block.

    Of all blocks before the last; None where there is no such value. What a block gives beside its hidden state, which
    of several it is or a state, the next one may read, too, and hand on.
    """
    calls = [flow.calls[name][0] for name in chain]
    handed = [set(before.outputs) & set(after.inputs) for before, after in itertools.pairwise(calls)]
    for number, (name, call) in enumerate(zip(chain[:-1], calls, strict=False)):
        made = {value for op in flow.ops[call.start : call.stop] for value in op.outputs}
        for value in made:
            for reader in flow.consumers.get(value, ()):
                k = next((k for k, block in enumerate(chain) if within(reader.module, block)), -1)
                if not call.start <= reader.index < call.stop and (k < 1 or value not in handed[k - 1]):
                    return f"{reader.module or 'the model'} reads what {name} computed inside"
        for following, before, after in zip(
            chain[number + 2 :], calls[number + 1 :], calls[number + 2 :], strict=False
        ):
            if made & (set(after.inputs) - set(before.outputs)):
                return f"{following} reads what {name} computed inside"
    return None


def _find_mixtures(flow: DataFlow, chain: Sequence[str]) -> list[_Mixture]:
    """Return the lists of alike modules that hold layers and are no chain: of which a router may call some."""
    mixtures = []
    for name, module in flow.modules.items():
        if not isinstance(module, nn.ModuleList) or (chain and chain[0] in _list_children(name, module)):
            continue
        experts = [(child, layers) for child in _list_children(name, module) if (layers := _list_layers(flow, child))]
        if len(experts) < 2 or len({_list_shapes(flow, *expert) for expert in experts}) != 1:
            continue
        if not any(flow.calls.get(layer) for _, layers in experts for layer in layers):
            continue  # blocks of a tower that this run does not come to
        if isinstance(module, Experts) or not (_find_longest_chain(flow, name) or _are_branches(flow, experts)):
            mixtures.append(_Mixture(name, tuple(experts)))
    return mixtures


def _list_shapes(flow: DataFlow, expert: str, layers: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Return the names of an expert's layers inside it, and their sizes."""
    return tuple(
        (layer.removeprefix(expert), n_inputs(flow.modules[layer]), n_outputs(flow.modules[layer])) for layer in layers
    )


def _are_branches(flow: DataFlow, experts: Sequence[tuple[str, tuple[str, ...]]]) -> bool:
    """Return whether all are layers themselves, or are called on the same tensor: branches, not experts."""
    if any(name in layers for name, layers in experts):
        return True
    calls = [flow.calls.get(name, []) for name, _ in experts]
    return all(len(c) == 1 for c in calls) and len({c[0].inputs[:1] for c in calls}) == 1


def _list_layers(flow: DataFlow, name: str) -> tuple[str, ...]:
    inside = ((f"{name}.{path}" if path else name, m) for path, m in flow.modules[name].named_modules())
    return tuple(full for full, module in inside if is_matrix(module))


def _extend_to_experts(residual: Residual, mixtures: Sequence[_Mixture]) -> Residual:
    """Return the stream with what the first expert of a mixture, which alone ran, shows extended to all experts."""
    alike = {
        layer: tuple(others[k] for _, others in mixture.experts)
        for mixture in mixtures
        for k, layer in enumerate(mixture.experts[0][1])
    }

    def every(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member for name in names for member in alike.get(name, (name,))))

    norms = tuple((norm, every(layers)) for norm, layers in residual.norms)
    return replace(residual, writers=every(residual.writers), readers=every(residual.readers), norms=norms)


def _find_input_groups(flow: DataFlow, chain: Sequence[str], mixtures: Sequence[_Mixture]) -> _Parts:
    """Return all input groups, in order, sorted into blocks and what is before and after them."""
    sources = Sources(flow)
    expert_of = {layer: expert for m in mixtures for expert, layers in m.experts for layer in layers}
    matrices = [name for name, module in flow.modules.items() if is_matrix(module)]
    block_of = {name: next((b for b in chain if within(name, b)), "") for name in matrices}
    groups: dict[tuple[object, ...], list[str]] = {}
    for call in flow.in_order():
        name = call.module
        if is_matrix(flow.modules[name]) and call is flow.calls[name][0]:
            key = (
                tuple(sources.canonical(call.inputs[0]) if call.inputs else -1 for call in flow.calls[name]),
                block_of[name],
                expert_of.get(name),
            )
            groups.setdefault(key, []).append(name)
    experts = {expert for m in mixtures for expert, _ in m.experts}
    input_groups = [_drop_outside_source(sources.resolve(tuple(layers)), experts) for layers in groups.values()]
    input_groups = _add_uncalled(input_groups, mixtures)
    parts = _Parts()
    if not chain:
        parts.by_block[""] = tuple(input_groups)
        return parts
    first = flow.calls[chain[0]][0]
    for input_group in input_groups:
        block = block_of[input_group.layers[0]]
        if block:
            if input_group.source and not within(
                input_group.source, block
            ):  # an encoder's output, which every block reads
                input_group = InputGroup(input_group.layers)
            parts.by_block[block] = (*parts.by_block.get(block, ()), input_group)
        elif _find_start(flow, input_group) < first.start:
            parts.before = (*parts.before, input_group)
        else:
            parts.after = (*parts.after, input_group)
    return parts


def _find_start(flow: DataFlow, input_group: InputGroup) -> int:
    calls: list[ModuleCall] = flow.calls.get(input_group.layers[0], [])
    return calls[0].start if calls else len(flow.ops)


def _drop_outside_source(input_group: InputGroup, experts: set[str]) -> InputGroup:
    """Return the input group without a source on another side of an expert's border.

    One expert alone need not tell what all of them read.
    """
    if _find_expert(input_group.source, experts) == _find_expert(input_group.layers[0], experts):
        return input_group
    return InputGroup(input_group.layers)


def _find_expert(name: str, experts: set[str]) -> str | None:
    parts = name.split(".")
    return next((path for n in range(len(parts), 0, -1) if (path := ".".join(parts[:n])) in experts), None)


def _add_uncalled(input_groups: list[InputGroup], mixtures: Sequence[_Mixture]) -> list[InputGroup]:
    """Return the input groups and, after a mixture's others, copies for its experts that got no token."""
    called = {layer for input_group in input_groups for layer in input_group.layers}
    later: dict[int, list[InputGroup]] = {}
    for mixture in mixtures:
        model = next((expert for expert, layers in mixture.experts if set(layers) <= called), None)
        inside = [(i, r) for i, r in enumerate(input_groups) if within(r.layers[0], mixture.name)]
        copied = [r for _, r in inside if model is not None and within(r.layers[0], model)]
        place = later.setdefault(inside[-1][0] if inside else len(input_groups) - 1, [])
        for expert, layers in mixture.experts:
            if not set(layers) & called:
                place += [_rename_expert(r, str(model), expert) for r in copied] or [
                    InputGroup((name,)) for name in layers
                ]
    return [r for i, input_group in enumerate(input_groups) for r in (input_group, *later.get(i, ()))]


def _rename_expert(input_group: InputGroup, old: str, new: str) -> InputGroup:
    def name(of: str) -> str:
        return new + of.removeprefix(old) if of else ""

    return replace(input_group, layers=tuple(map(name, input_group.layers)), source=name(input_group.source))
