"""Many forward passes of one block that advance together: all stop before a layer, something is done, all go on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn

from compress.blocks.forward import remove_hooks_on_exit
from compress.errors import PassError
from compress.facts import InputGroup

Tap = tuple[InputGroup, nn.Module]
"""An input group and the first of its layers."""
Run = Callable[[], Tensor]
Inputs = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class _Pass:
    """One forward: `at`: the input group before which it stands (its number), `x`: what that reads; None: it has
    ended."""

    thread: Any
    at: int | None = None
    x: Tensor | None = None
    out: Tensor | None = None
    seen: set[int] = field(default_factory=set)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that a layer is called with: its first argument, by position or by name."""
    first = args[0] if args else next(iter(kwargs.values()))
    return first


@contextmanager
def tap_inputs(taps: Sequence[Tap], on_input: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `on_input(number of the tap, input)` before every call of a tap's layer while the context is open."""

    def hook(number: int) -> Callable[..., None]:
        return lambda module, args, kwargs: on_input(number, layer_input(args, kwargs))

    handles = [
        module.register_forward_pre_hook(hook(number), with_kwargs=True) for number, (_, module) in enumerate(taps)
    ]
    with remove_hooks_on_exit(handles):
        yield


def run_in_lockstep(
    runs: Sequence[Run],
    taps: Sequence[Tap],
    visit: Callable[[InputGroup, Tensor, int], None],
    advance: Callable[[Callable[[], None]], None],
    outputs: list[Tensor] | None = None,
) -> Generator[InputGroup, None, None]:
    """Run all forwards together and yield each input group before which they stop; what follows goes on through them.

    `visit` gets an input group, its input and the number of the run, before the group is yielded, once. `advance` is
    given every piece of a forward to run, so that it can put it into its surroundings (autocast); `visit`, and what is
    done with the group, are outside of them. The forwards' outputs go into `outputs`, in order; where there is none
    they end at the last input group. PassError where a forward meets its input groups in another order than `taps`.
    """
    driver = greenlet.getcurrent()
    passes: dict[Any, _Pass] = {}
    acted = 0

    def stop_at_tap(number: int, x: Tensor) -> None:
        forward = passes[greenlet.getcurrent()]
        if number in forward.seen:
            return
        forward.seen.add(number)
        if number < acted:
            names = " and ".join(taps[n][0].layers[0] for n in (number, acted - 1))
            raise PassError(
                f"{names}: the first runs after the second; their input groups are listed the other way round"
            )
        forward.at, forward.x = number, x
        driver.switch()

    def continue_pass(forward: _Pass) -> None:
        forward.at = forward.x = None
        advance(forward.thread.switch)

    def start_pass(run: Run) -> _Pass:
        def body() -> None:
            forward.out = run()

        forward = _Pass(greenlet.greenlet(body, parent=driver))
        passes[forward.thread] = forward
        return forward

    with tap_inputs(taps, stop_at_tap):
        order = [start_pass(run) for run in runs]
        for forward in order:
            continue_pass(forward)
        for number, (input_group, _) in enumerate(taps):
            waiting = [(i, forward) for i, forward in enumerate(order) if forward.at == number]
            for i, forward in waiting:
                assert forward.x is not None
                visit(input_group, forward.x, i)
            yield input_group
            acted = number + 1
            if outputs is not None or acted < len(taps):
                for _, forward in waiting:
                    continue_pass(forward)
    for forward in order:
        if outputs is None and not forward.thread.dead:
            forward.thread.throw()
        elif outputs is not None and forward.out is not None:
            outputs.append(forward.out)
        forward.out = None  # the passes and their functions know one another: nothing large may hang on them
