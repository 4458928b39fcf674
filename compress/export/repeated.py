"""A deep model's graph out of that of its first blocks: the last of these once more for each block that was left out.

The exporter takes seconds for each block, and more for each the more there are. A graph of few blocks is made into the
whole one by copies of what one block, or several in turn, became: with their own weights, and their own inputs and
outputs where the blocks before have some of the same names but for a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from compress.graph.halves import same_content
from compress.graph.layers import SCOPES, WRAPPER
from compress.graph.stored import StoredTensor
from compress.structure.alike import CutChain

Place = tuple[int, int]
"""Number of a node among those of a part, and of its output."""
Reread = Callable[[str, ir.TensorProtocol], ir.TensorProtocol]
"""Name of a parameter and the tensor that stands for it in another block -> the parameter's own."""


def repeat_blocks(model: ir.Model, cut: CutChain, reread: Reread) -> bool:
    """Append the blocks that were left out, in place; False, and nothing changed, where the graph does not say how.

    `reread`: gives the weights of blocks left out. What the nodes of a block compute is taken for what its
    module's kind says: whoever calls this compares the outcome with the model.
    """
    parts = _find_parts(model, cut)
    if parts is None:
        return False
    found = _Repetition.find(model, cut, *parts)
    if found is None:
        return False
    found.append_all(reread)
    return True


@dataclass
class _Repetition:
    """The last part of the kept blocks, and what each value that it reads is to be in a copy.

    `own`: outputs of its nodes -> where; `before`: outputs of the part before that it reads -> where. `states`: inputs
    and outputs of the graph that are its own -> their name in the part before. `weights`: constants that are its own.
    """

    model: ir.Model
    cut: CutChain
    nodes: Sequence[ir.Node]
    own: dict[ir.Value, Place]
    before: dict[ir.Value, Place] = field(default_factory=dict)
    states: dict[ir.Value, str] = field(default_factory=dict)
    weights: set[ir.Value] = field(default_factory=set)

    @classmethod
    def find(
        cls, model: ir.Model, cut: CutChain, earlier: Sequence[ir.Node], last: Sequence[ir.Node]
    ) -> _Repetition | None:
        found = cls(model, cut, last, _list_outputs(last))
        earlier_outputs = _list_outputs(earlier)
        for old, new in zip(earlier, last, strict=True):
            pairs = zip(old.inputs, new.inputs, strict=True)
            if old.attributes != new.attributes or not all(found._pair(*pair, earlier_outputs) for pair in pairs):
                return None
        for given, own in zip(earlier_outputs, found.own, strict=True):
            if given.is_graph_output() != own.is_graph_output():
                return None
            if own.is_graph_output():
                found.states[own] = given.name or ""
        # what reads several parts does not read the last of them alone
        tail = [value for node in _list_after(model, last[-1]) for value in node.inputs]
        return None if any(value in earlier_outputs for value in tail if value is not None) else found

    def _pair(self, old: ir.Value | None, new: ir.Value | None, earlier: dict[ir.Value, Place]) -> bool:
        """Note what an input of the last part is, beside the one before; return whether that is known."""
        if old is new:
            return True
        if old is None or new is None:
            return False
        if new in self.own:
            return earlier.get(old) == self.own[new]
        if new in earlier:
            self.before[new] = earlier[new]
            return old not in earlier
        if new.is_graph_input():
            self.states[new] = old.name or ""
            return old.is_graph_input()
        if not (old.is_initializer() and new.is_initializer()):
            return False
        if self._parameter_of(new):
            self.weights.add(new)
            return self._parameter_of(old) != ""
        return same_content(old, new)

    def _parameter_of(self, value: ir.Value) -> str:
        """Return the name of the block's parameter that a constant holds; "" for another constant."""
        tensor = value.const_value
        name = tensor.origin[0] if isinstance(tensor, StoredTensor) and tensor.origin else value.name or ""
        return name if re.match(rf"({re.escape(WRAPPER)})?{re.escape(self.cut.path)}\.\d+\.", name) else ""

    def append_all(self, reread: Reread) -> None:
        graph, behind = self.model.graph, self.nodes[-1]
        tail = list(_list_after(self.model, behind))
        previous: list[ir.Node] = list(self.nodes)
        for shift in range(self.cut.width, len(self.cut.models) + 1, self.cut.width):
            previous = list(self._copy(shift, previous, reread))
            graph.insert_after(behind, previous)
            behind = previous[-1]
        for node in tail:
            for index, value in enumerate(node.inputs):
                if value in self.own:
                    number, output = self.own[value]
                    node.replace_input_with(index, previous[number].outputs[output])

    def _copy(self, shift: int, previous: Sequence[ir.Node], reread: Reread) -> Iterator[ir.Node]:
        """Yield the nodes of the blocks whose numbers are greater by `shift`, in order."""
        graph = self.model.graph
        known = {value: previous[number].outputs[output] for value, (number, output) in self.before.items()}
        for value, before in self.states.items():
            if value.is_graph_input():
                known[value] = ir.Value(name=self._advance(before, value.name or "", shift))
                known[value].type, known[value].shape = value.type, value.shape
                graph.inputs.append(known[value])
        for value in self.weights:
            name, tensor = self._rename(self._parameter_of(value), shift), value.const_value
            assert tensor is not None
            known[value] = ir.Value(name=self._rename(value.name or "", shift))
            known[value].const_value = tensor = reread(name.removeprefix(WRAPPER), tensor)
            tensor.name = known[value].name
            known[value].type, known[value].shape = value.type, value.shape
            graph.register_initializer(known[value])
        for node in self.nodes:
            inputs = [None if value is None else known.get(value, value) for value in node.inputs]
            new = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                node.attributes.values(),
                overload=node.overload,
                num_outputs=len(node.outputs),
                version=node.version,
                name=self._rename(node.name or "", shift),
                metadata_props={
                    key: self._renumber(text, shift) if key == SCOPES else text
                    for key, text in node.metadata_props.items()
                },
            )
            for old, value in zip(node.outputs, new.outputs, strict=True):
                value.name = self._rename(old.name or "", shift)
                value.type, value.shape = old.type, old.shape
                if old in self.states:
                    value.name = self._advance(self.states[old], old.name or "", shift)
                    graph.outputs.append(value)
                known[old] = value
            yield new

    def _advance(self, before: str, name: str, shift: int) -> str:
        """Return the name that goes on as from `before`, of the part before, to `name`."""
        n_parts = shift // self.cut.width
        words = [re.split(r"(\d+)", text) for text in (before, name)]
        return "".join(
            str(int(b) + n_parts * (int(b) - int(a))) if b.isdigit() and a.isdigit() and a != b else b
            for a, b in zip(*words, strict=True)
        )

    def _renumber(self, text: str, shift: int) -> str:
        pattern = rf"\b({re.escape(self.cut.path)}\.)(\d+)\b"
        return re.sub(pattern, lambda match: f"{match[1]}{int(match[2]) + shift}", text)

    def _rename(self, name: str, shift: int) -> str:
        """Return a name of the last part as of a copy: its module's, or one of its own."""
        renumbered = self._renumber(name, shift)
        return renumbered if renumbered != name else f"{name}/{shift}"


def _find_parts(model: ir.Model, cut: CutChain) -> tuple[Sequence[ir.Node], Sequence[ir.Node]] | None:
    """Return the nodes of the last kept blocks that are repeated, and of their like before; None where unequal.

    A part begins where a block does, or some nodes before, which the exporter has written without the module's name.
    """
    nodes = list(model.graph)
    pattern = re.compile(rf"\b{re.escape(WRAPPER + cut.path)}\.(\d+)\b")
    blocks = [int(match[1]) if (match := pattern.search(n.metadata_props.get(SCOPES, ""))) else None for n in nodes]
    last = min(cut.models.values())
    earlier = last - cut.width
    if earlier not in blocks or last not in blocks:
        return None
    size = blocks.index(last) - blocks.index(earlier)
    for start in range(blocks.index(last), blocks.index(earlier), -1):
        parts = nodes[start - size : start], nodes[start : start + size]
        if start < size or len(parts[1]) < size:
            return None
        operators = [[node.op_identifier() for node in part] for part in parts]
        inside, behind = (
            [n for n in some if n is not None] for some in (blocks[start:][:size], blocks[start + size :])
        )
        if operators[0] == operators[1] and not behind and min(inside, default=0) >= last:
            return parts
    return None


def _list_after(model: ir.Model, node: ir.Node) -> Iterator[ir.Node]:
    nodes = iter(model.graph)
    for other in nodes:
        if other is node:
            break
    return nodes


def _list_outputs(nodes: Sequence[ir.Node]) -> dict[ir.Value, Place]:
    return {value: (i, j) for i, node in enumerate(nodes) for j, value in enumerate(node.outputs)}
