"""Many forward passes of one block that advance together: all stop before a layer, something is done, all go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn

from compress.blocks.trace import removed_after
from compress.errors import PassError
from compress.facts import Reading

Tap = tuple[Reading, nn.Module]
"""A reading and the first of its layers."""
Run = Callable[[], Tensor]
Inputs = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class _Pass:
    """One forward: `at`: the reading before which it stands (its number), `x`: what that reads; None: it has ended."""

    thread: Any
    at: int | None = None
    x: Tensor | None = None
    out: Tensor | None = None
    seen: set[int] = field(default_factory=set)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a layer is called with."""
    found = args[0] if args else next(iter(kwargs.values()))
    return found


@contextmanager
def tapped(taps: Sequence[Tap], heard: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While inside, every call of a tap's layer first tells its number and its input."""

    def hook(number: int) -> Callable[..., None]:
        return lambda module, args, kwargs: heard(number, layer_input(args, kwargs))

    handles = [
        module.register_forward_pre_hook(hook(number), with_kwargs=True) for number, (_, module) in enumerate(taps)
    ]
    with removed_after(handles):
        yield


def run_in_lockstep(
    runs: Sequence[Run],
    taps: Sequence[Tap],
    visit: Callable[[Reading, Tensor, int], None],
    act: Callable[[Reading], None],
    step: Callable[[Callable[[], None]], None],
    outputs: bool = True,
) -> list[Tensor]:
    """Their outputs, in order. `visit` is told a reading, what it reads and which run; `act` follows once for each.

    `step` is given every piece of a forward to run, so that it can put it into its surroundings (autocast); `visit` and
    `act` are outside of them. Without `outputs` the passes end at the last reading. PassError where a forward meets
    its readings in another order than `taps`.
    """
    driver = greenlet.getcurrent()
    passes: dict[Any, _Pass] = {}
    acted = 0

    def heard(number: int, x: Tensor) -> None:
        one = passes[greenlet.getcurrent()]
        if number in one.seen:
            return
        one.seen.add(number)
        if number < acted:
            names = " and ".join(taps[n][0].layers[0] for n in (number, acted - 1))
            raise PassError(f"{names}: the first runs after the second; their readings are listed the other way round")
        one.at, one.x = number, x
        driver.switch()

    def advance(one: _Pass) -> None:
        one.at = one.x = None
        step(one.thread.switch)

    def started(run: Run) -> _Pass:
        def body() -> None:
            one.out = run()

        one = _Pass(greenlet.greenlet(body, parent=driver))
        passes[one.thread] = one
        return one

    with tapped(taps, heard):
        order = [started(run) for run in runs]
        for one in order:
            advance(one)
        for number, (reading, _) in enumerate(taps):
            here = [(i, one) for i, one in enumerate(order) if one.at == number]
            for i, one in here:
                assert one.x is not None
                visit(reading, one.x, i)
            act(reading)
            acted = number + 1
            if outputs or acted < len(taps):
                for _, one in here:
                    advance(one)
    if not outputs:
        for one in order:
            if not one.thread.dead:
                one.thread.throw()
        return []
    found = [one.out for one in order if one.out is not None]
    for one in order:
        one.out = None  # the passes and their functions know one another: nothing large may hang on them
    return found
