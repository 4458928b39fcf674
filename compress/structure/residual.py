"""The residual stream of a pre-norm model: what writes to it and what reads it, where a rotation can be folded in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compress.facts import Residual
from compress.structure.channels import Stop
from compress.structure.dataflow import DataFlow, Op, Ref
from compress.structure.sources import Sources, is_matrix

MOVES = (
    "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "clone", "contiguous", "_to_copy",
    "alias", "detach", "expand", "slice", "select", "index", "transpose", "permute", "neg",
)  # fmt: skip
"""Operators that leave the last dimension as it is, where its size and place do not change."""


def find_residual(flow: DataFlow, first_block: str, sources: Sources) -> tuple[Residual | None, str]:
    """Return the stream that enters `first_block`; or None and why it cannot be rotated."""
    call = flow.calls[first_block][0]
    start = next((value for value in call.inputs if len(flow.shapes[value]) >= 2 and value in flow.producers), None)
    if start is None:
        return None, f"{first_block} reads no tensor that the model computes"
    search = _Search(flow, sources, flow.shapes[start][-1])
    try:
        search.demand(start, first_block)
        search.run()
        return search.find(), ""
    except Stop as stop:
        return None, str(stop)


@dataclass(eq=False)
class _Search:
    """Marks all tensors that are (part of) the stream; Stop as soon as one is used in a way that no rotation allows."""

    flow: DataFlow
    sources: Sources
    width: int
    marked: dict[int, None] = field(default_factory=dict)
    embeddings: dict[str, None] = field(default_factory=dict)
    writers: dict[str, None] = field(default_factory=dict)
    readers: dict[str, None] = field(default_factory=dict)
    norms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pending: list[Op] = field(default_factory=list)

    def find(self) -> Residual:
        """Return the stream's modules in the order in which they run.

        Stop if weights are shared, but for an embedding and a reader (the head).
        """
        for name in (*self.writers, *self.norms):
            if self.sources.is_shared(name):
                raise Stop(f"{name} shares its weight with another module")
        tables = {id(self.flow.modules[name].weight) for name in self.embeddings}
        for name in self.readers:
            if self.sources.is_shared(name) and id(self.flow.modules[name].weight) not in tables:
                raise Stop(f"{name} shares its weight with another module")

        def begins(name: str) -> int:
            return self.flow.calls[name][0].start

        def order(names: dict[str, None]) -> tuple[str, ...]:
            return tuple(sorted(names, key=begins))

        norms = tuple(sorted(self.norms.items(), key=lambda item: begins(item[0])))
        return Residual(self.width, order(self.embeddings), order(self.writers), order(self.readers), norms)

    def demand(self, value: int, where: str) -> None:
        """Mark `value` and what it comes from as the stream.

        It must be something that a rotation of what writes to it rotates; Stop if not.
        """
        queue = [value]
        for item in queue:
            if item in self.marked:
                continue
            self._mark(item)
            op = self.flow.producers.get(item)
            if op is None:
                what = self.flow.parameters.get(item, "an input")
                raise Stop(f"{what} is added to it in {where or 'the model'}")
            queue.extend(self._find_origins(op, item))

    def _mark(self, value: int) -> None:
        if self.flow.shapes[value][-1:] != (self.width,):
            raise Stop("its last dimension is divided")
        self.marked[value] = None
        self.pending.extend(self.flow.consumers.get(value, ()))

    def _find_origins(self, op: Op, value: int) -> list[int]:
        """Return what must be the stream for the result of `op` to be."""
        module = self.flow.modules[op.module]
        if isinstance(module, nn.Embedding):
            self.embeddings[op.module] = None
            return []
        if is_matrix(module):
            self.writers[op.module] = None
            return []
        if self._is_norm(module):
            return self._fail(op, f"{self._describe_place(op)} normalises what is written to it (a post-norm)")
        if op.name in ("add", "sub"):
            return (
                [arg.value for arg in op.args[:2] if isinstance(arg, Ref)] if _takes_two_tensors(op) else self._fail(op)
            )
        if op.name in ("mul", "div"):
            return [self._find_stream_factor(op)]
        if op.name in MOVES and self._keeps_last_dimension(op):
            return [op.args[0].value]
        return self._fail(op, f"{self._describe_place(op)} writes to it")

    def run(self) -> None:
        """Follow everything marked to all its readers."""
        for value in self.flow.outputs:
            if value in self.marked:
                raise Stop("the model gives it out")
        while self.pending:
            self._follow(self.pending.pop())
        for value in self.flow.outputs:
            if value in self.marked:
                raise Stop("the model gives it out")

    def _follow(self, op: Op) -> None:
        if all(value in self.marked for value in op.outputs):
            return
        module = self.flow.modules[op.module]
        if is_matrix(module):
            calls = self.flow.calls[op.module]
            if not all(call.inputs[0] in self.marked for call in calls):
                raise Stop(f"{op.module} reads it at one call and not at another")
            if any(op.module in layers for layers in self.norms.values()):
                raise Stop(f"{op.module} reads it in two ways")
            self.readers[op.module] = None
        elif self._is_norm(module):
            self._note_norm(op.module)
        elif op.name in ("add", "sub") and _takes_two_tensors(op):
            for argument in op.args[:2]:
                self.demand(argument.value, op.module)
            self._mark(op.outputs[0])
        elif (op.name in ("mul", "div") and self._find_stream_factor(op) in self.marked) or (
            op.name in MOVES and self._keeps_last_dimension(op)
        ):
            self._mark(op.outputs[0])
        else:
            self._fail(op)

    def _is_norm(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return isinstance(weight, Tensor) and weight.shape == (self.width,) and not list(module.children())

    def _note_norm(self, norm: str) -> None:
        if norm in self.norms:
            return
        module = self.flow.modules[norm]
        offset = self.sources.offset(norm)
        if offset is None:
            raise Stop(f"{norm} ({type(module).__name__}) is no norm that is known")
        if not turns(module, offset):
            raise Stop(
                f"{norm} is a {type(module).__name__}: one that subtracts the mean or has a bias cannot be folded"
            )
        try:
            reached = self.sources.reach(norm, (0, self.width), routers=True)
        except Stop as stop:
            raise Stop(f"what {norm} gives is not read by layers alone: {stop}") from None
        if twice := [layer for layer in reached.layers if layer in self.readers]:
            raise Stop(f"{twice[0]} reads it in two ways")
        self.norms[norm] = tuple(reached.layers)
        self.readers.update(dict.fromkeys(reached.layers))

    def _find_stream_factor(self, op: Op) -> int:
        """Return the stream among the two factors: the other one must be the same for all channels."""
        refs = [arg for arg in op.args[:2] if isinstance(arg, Ref)]
        full = [ref.value for ref in refs if self.flow.shapes[ref.value][-1:] == (self.width,)]
        if len(full) != 1 or (op.name == "div" and full[0] != getattr(op.args[0], "value", None)):
            self._fail(op, f"{self._describe_place(op)} multiplies its channels with different factors")
        return full[0]

    def _keeps_last_dimension(self, op: Op) -> bool:
        """Return whether the operator keeps the last dimension whole and last."""
        before, after = self.flow.shapes[op.args[0].value], self.flow.shapes[op.outputs[0]]
        if before[-1:] != (self.width,) or after[-1:] != (self.width,):
            return False
        last = len(before) - 1
        if op.name == "transpose":
            return all(d % len(before) != last for d in op.args[1:3])
        if op.name == "permute":
            return op.args[1][-1] % len(before) == last
        if op.name == "select":
            return op.args[1] % len(before) != last
        if op.name == "index":
            return len(op.args[1]) < len(before)
        return True

    def _describe_place(self, op: Op) -> str:
        module = self.flow.modules[op.module]
        return f"{op.module or 'the model'} ({type(module).__name__})"

    def _fail(self, op: Op, why: str = "") -> list[int]:
        raise Stop(why or f"{self._describe_place(op)} uses it in {op.name}")


def _takes_two_tensors(op: Op) -> bool:
    return len(op.args) >= 2 and all(isinstance(argument, Ref) for argument in op.args[:2])


def turns(norm: nn.Module, offset: float) -> bool:
    """Return whether the norm, its weight folded away, gives Q-rotated outputs for Q-rotated inputs.

    Found by trying.
    """
    if getattr(norm, "bias", None) is not None:
        return False
    width = len(norm.weight)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(width, generator=generator)
    direction /= direction.norm()
    x = torch.randn(2, 3, width, generator=generator) + 0.5

    def reflect(t: Tensor) -> Tensor:
        return t - 2 * (t @ direction)[..., None] * direction

    state = {"weight": torch.full((width,), 1 - offset)}
    state |= {name: torch.ones(t.shape) for name, t in norm.named_buffers() if t.is_floating_point()}
    with torch.no_grad():
        plain, turned = (torch.func.functional_call(norm, state, (t,)) for t in (x, reflect(x)))
    return torch.allclose(turned, reflect(plain), rtol=1e-4, atol=1e-4)
