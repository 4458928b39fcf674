"""What surrounds the blocks of a model: one run in which every block only notes what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.activations import HeldTensor, Interned, map_tensors
from compress.errors import PassError

Slot = int | str
"""Where a block takes the hidden state: a position, or a keyword."""
Called = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a block's number and the arguments that it is called with."""
NO_STREAM = "it cannot be worked on in a stream"


class StopForward(BaseException):
    """Ends a forward pass that has shown what it was run for. No Exception, so that no model catches it."""

    def __init__(self, hidden: Tensor | None = None) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Form:
    """What a block gives: the hidden state itself (`element` None), or a tuple of `length` with it at `element`.

    `nothing`: the elements that are None.
    """

    element: int | None
    length: int = 0
    nothing: tuple[int, ...] = ()

    def take_hidden(self, out: Any) -> Tensor:
        hidden = out if self.element is None else out[self.element]
        return hidden

    def give_hidden(self, hidden: Tensor, block: int) -> Any:
        """Return what the k-th block gives, in a run in which it does not run."""
        if self.element is None:
            return hidden
        given = (None if k in self.nothing else HandedOn(block, k) for k in range(self.length))
        return tuple(hidden if k == self.element else other for k, other in enumerate(given))

    def exchange_hidden(self, out: Any, hidden: Tensor) -> Any:
        """Return what a block gave, with another hidden state."""
        if self.element is None:
            return hidden
        return tuple(hidden if k == self.element else item for k, item in enumerate(out))


@dataclass(frozen=True)
class HandedOn:
    """Stands for what the k-th block gives beside its hidden state, in a run in which it did not run."""

    block: int
    element: int


@dataclass(frozen=True)
class Template:
    """The arguments of one call of one block, without its hidden state, which goes into `slot`.

    `added`: what is added to the hidden state on its way from the block before; None: nothing. Where the block reads
    more of the one before, at these elements `beside` of what it gives, the arguments hold `HandedOn`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    slot: Slot
    added: Tensor | None = None
    beside: tuple[int, ...] = ()

    def fill(self, hidden: Tensor, beside: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call. `beside`: what the block before gave at those elements, its tensors held."""
        hidden = hidden if self.added is None else hidden + self.added
        args, kwargs = self.args, dict(self.kwargs)
        if self.beside:
            given = {k: map_tensors(value, HeldTensor.get, HeldTensor) for k, value in beside.items()}
            args, kwargs = map_tensors((args, kwargs), lambda mark: given[mark.element], HandedOn)
        if isinstance(self.slot, int):
            return (*args[: self.slot], hidden, *args[self.slot + 1 :]), kwargs
        return args, {**kwargs, self.slot: hidden}


@dataclass(frozen=True)
class Passage:
    """One micro-batch: what the first block reads, and a template for each block."""

    hidden: Tensor
    templates: tuple[Template, ...]


@contextmanager
def standing_in(
    blocks: Sequence[nn.Module], call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Make `call(k, args, kwargs)` the k-th block's forward while the context is open.

    With forwards in lockstep, the context that was entered last decides.
    """

    def stub(number: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(number, args, kwargs)

    for number, block in enumerate(blocks):
        block.__dict__["forward"] = stub(number)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)  # the first forward to end may have taken it away


def forms_of(
    run: Callable[[], Any], names: Sequence[str], blocks: Sequence[nn.Module], real: Called
) -> tuple[Form, ...]:
    """Return the form of each block's output. The first block of each class runs for real: `real(k, args, kwargs)`."""
    known: dict[type, tuple[Form, Any]] = {}
    forms: list[Form] = []

    def call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(blocks[number]) not in known:
            out = real(number, args, kwargs)
            known[type(blocks[number])] = _find_form(out, names[number]), out
        form, out = known[type(blocks[number])]
        forms.append(form)
        if len(forms) == len(blocks):
            raise StopForward
        return form.exchange_hidden(out, first_hidden(args, kwargs, names[number]))

    with standing_in(blocks, call):
        try:
            run()
        except StopForward:
            return tuple(forms)
    raise PassError(f"{names[len(forms)]}: the model's forward does not run it; {NO_STREAM}")


def passage(
    run: Callable[[], Any], names: Sequence[str], blocks: Sequence[nn.Module], forms: Sequence[Form], intern: Interned
) -> Passage:
    """Return what every block is called with in `run`, where each block hands its hidden state on unchanged.

    The hidden state is the argument that is the very tensor which the block before gave, or that with something added
    which does not depend on it (features of an image): seen by a second run, in which blocks hand on zeros. PassError
    where there is none, or where a block reads something else of what one gave that is not the one before.
    """
    entered = _record_passage(run, names, blocks, forms, intern, lambda hidden: hidden.view_as(hidden))
    if all(template.added is None for template in entered.templates):
        return entered
    alone = _record_passage(run, names, blocks, forms, intern, torch.zeros_like)
    for name, before, template, bare in zip(names[1:], names, entered.templates[1:], alone.templates[1:], strict=False):
        pair = template.added, bare.added
        if any(part is None for part in pair) and pair != (None, None):
            raise PassError(_explain_between(name, before))
        if template.added is not None and bare.added is not None and not _is_close(template.added, bare.added):
            raise PassError(_explain_between(name, before))
    templates = zip(entered.templates, alone.templates, strict=True)
    return replace(entered, templates=tuple(replace(template, added=bare.added) for template, bare in templates))


CLOSE = 1e-4
"""Of what is added to a hidden state between blocks, over the largest of it: what two runs may differ by, or it depends
on the states and is refused. A bound above what float32 leaves of a difference of hidden states, not measured."""


def _is_close(added: Tensor, bare: Tensor) -> bool:
    return bool((added - bare).abs().max() <= CLOSE * bare.abs().max().clamp_min(1.0))


def _record_passage(
    run: Callable[[], Any],
    names: Sequence[str],
    blocks: Sequence[nn.Module],
    forms: Sequence[Form],
    intern: Interned,
    hand_on: Callable[[Tensor], Tensor],
) -> Passage:
    """Return what every block is called with in `run`. `hand_on`: gives a new tensor of what the first block reads."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    slots: list[Slot] = []
    added: list[Tensor | None] = [None]
    read: list[tuple[int, ...]] = []
    given: Tensor | None = None

    def call(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal given
        if number != len(calls):
            raise PassError(f"{names[number]}: runs out of order or more than once; {NO_STREAM}")
        read.append(_list_beside(number, args, kwargs, names))
        if given is not None:
            slot, more = _find_slot(given, args, kwargs, names[number], names[number - 1])
            slots.append(slot)
            added.append(more)
        calls.append((args, kwargs))
        if len(calls) == len(blocks):
            raise StopForward
        given = hand_on(first_hidden(args, kwargs, names[0]) if given is None else given)  # an object of its own
        return forms[number].give_hidden(given, number)

    with standing_in(blocks, call):
        try:
            run()
        except StopForward:
            pass
        else:
            raise PassError(f"{names[len(calls)]}: the model's forward does not run it; {NO_STREAM}")
    hidden = first_hidden(*calls[0], names[0])
    slots.insert(0, _find_slot(hidden, *calls[0], names[0], names[0])[0])
    templates = tuple(
        replace(_make_template(*call_args, slot, intern), added=more, beside=beside)
        for call_args, slot, more, beside in zip(calls, slots, added, read, strict=True)
    )
    intern.forget()
    return Passage(hidden, templates)


def until_reached(run: Callable[[], Any]) -> Tensor:
    """Return the hidden state with which `run` was ended. AssertionError if it came to its own end.

    StopForward where somebody who watches had seen enough: the part before the first block may have layers, too.
    """
    try:
        run()
    except StopForward as reached:
        if reached.hidden is None:
            raise
        return reached.hidden
    raise AssertionError("no block was reached")


def without_cache(module: nn.Module) -> None:
    """Turn off what grows from call to call, in place: `use_cache` in every configuration inside."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def _find_form(out: Any, name: str) -> Form:
    if isinstance(out, Tensor):
        return Form(None)
    if isinstance(out, tuple):
        tensors = [k for k, item in enumerate(out) if isinstance(item, Tensor) and item.is_floating_point()]
        if tensors:
            return Form(tensors[0], len(out), tuple(k for k, item in enumerate(out) if item is None))
    raise PassError(f"{name}: gives {type(out).__name__}, not a tensor or a tuple; {NO_STREAM}")


def first_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Tensor:
    """Return the first floating-point tensor among the arguments. PassError where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise PassError(f"{name}: is called without a floating-point tensor; {NO_STREAM}")


def _find_slot(
    hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, before: str
) -> tuple[Slot, Tensor | None]:
    """Return where the hidden state stands among the arguments, and what was added to it; None: nothing. PassError."""
    places: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if value is hidden:
            return place, None
    for place, value in places:
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape:
            return place, value - hidden
    raise PassError(_explain_between(name, before))


def _explain_between(name: str, before: str) -> str:
    return (
        f"{name}: does not read what {before} gives as it is: something outside the blocks works between them; "
        f"{NO_STREAM}"
    )


def _list_beside(
    number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
) -> tuple[int, ...]:
    """Return at which elements the k-th block reads what the one before gives. PassError for an earlier one's."""
    found: list[HandedOn] = []
    map_tensors((args, dict(kwargs)), found.append, HandedOn)
    if far := [mark for mark in found if mark.block != number - 1]:
        between = (
            f"{names[number]}: reads more of {names[far[0].block]} than its hidden state, and is not the next block"
        )
        raise PassError(f"{between}; {NO_STREAM}")
    return tuple(sorted({mark.element for mark in found}))


def _make_template(args: tuple[Any, ...], kwargs: Mapping[str, Any], slot: Slot, intern: Interned) -> Template:
    """Return the arguments as a template: the hidden state taken out and equal tensors kept once."""
    plain = Template(args, kwargs, slot)
    if isinstance(slot, int):
        plain = replace(plain, args=(*args[:slot], None, *args[slot + 1 :]))
    else:
        plain = replace(plain, kwargs={name: value for name, value in kwargs.items() if name != slot})
    return replace(plain, args=map_tensors(plain.args, intern), kwargs=map_tensors(dict(plain.kwargs), intern))
