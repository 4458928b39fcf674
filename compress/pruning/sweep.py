"""Two models side by side, the teacher and what became of it, stopped at one point after another; a fit at each.

Every batch of either model is a forward pass in a thread of its own, of which one runs at a time. All stand at the same
point while a layer is fitted there, and go on with what the new weight gives: the whole model is fitted, each layer on
inputs as they will be, at the price of one forward pass of either. Memory: what a forward holds at any time, of all
batches at once.

Threads, and not the greenlets of `compress.blocks.lockstep`: sums are seen by a dispatch mode, which torch keeps for
each thread and puts aside while it handles one; it cannot be left in the middle of that.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.blocks.lockstep import layer_input
from compress.blocks.materialise import plain
from compress.pruning.points import Point
from compress.pruning.statistics import Batch

Stop = tuple[Point, ...]
"""Points at one place of the forward."""


def stops_of(points: Sequence[Point]) -> tuple[Stop, ...]:
    """Group points that are one place: layers whose outputs are added to each other."""
    return tuple(tuple(group) for _, group in itertools.groupby(points, lambda point: point.index))


_RUNNING = threading.local()
"""`forward`: what this thread runs."""


class Forward:
    """One forward pass. `value`: what it gives at the stop where it stands, may be written to; `inputs`: what
    layers read, and the number of writes to it by then."""

    def __init__(self, module: nn.Module, batch: Batch, stops: Sequence[Stop]) -> None:
        self.batch = batch
        self.additions = {stop[0].addition: number for number, stop in enumerate(stops) if stop[0].addition is not None}
        self.value: Tensor | None = None
        self.inputs: dict[str, tuple[Tensor, int]] = {}
        self.at = -1
        self._error: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._over = self._dropped = False
        self._thread = threading.Thread(target=self._run, args=(module,), daemon=True)

    def advance(self) -> None:
        """Run to the next point, or to the end. Raises what the forward raises."""
        self.value = None
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the forward where it stands."""
        self._dropped = True
        while self._thread.ident is not None and not self._over:
            self._go.release()
            self._stopped.acquire()

    def stop(self, number: int, value: Tensor) -> None:
        """Stand still until told to go on; called from inside the forward."""
        self.at, self.value = number, value
        self._stopped.release()
        self._go.acquire()
        if self._dropped:
            raise _Dropped

    def _run(self, module: nn.Module) -> None:
        self._go.acquire()
        try:
            _RUNNING.forward = self
            with torch.no_grad(), _Additions(self):
                module(**self.batch)
        except _Dropped:
            pass
        except BaseException as error:  # noqa: BLE001  told to who waits
            self._error = error
        self._over = True
        self._stopped.release()


class _Dropped(BaseException):
    """Ends a forward pass that is not needed any more."""


class _Additions(TorchDispatchMode):
    """Counts the sums of a forward, and stops it after those that are points."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.forward, self.seen = forward, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__.rstrip("_") == "add":
            number = self.forward.additions.get(self.seen)
            self.seen += 1
            if number is not None:
                self.forward.stop(number, out)
        return out


@contextmanager
def stopping(module: nn.Module, stops: Sequence[Stop], inputs: bool) -> Iterator[None]:
    """Stop forwards that a `Forward` runs at the stops while the context is open.

    `inputs`: and keep what layers read.
    """
    parts = {plain(name): part for name, part in module.named_modules()}

    def keep(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if (forward := getattr(_RUNNING, "forward", None)) is not None:
                x = layer_input(args, kwargs)
                forward.inputs[name] = (x, x._version)

        return hook

    def halt(number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, out: Tensor) -> None:
            if (forward := getattr(_RUNNING, "forward", None)) is not None:
                forward.stop(number, out)

        return hook

    with ExitStack() as stack:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for number, stop in enumerate(stops):
            for point in stop:
                layer = parts[point.layer]
                if inputs:
                    stack.callback(layer.register_forward_pre_hook(keep(point.layer), with_kwargs=True).remove)
                if point.addition is None:
                    stack.callback(parts[point.norm or point.layer].register_forward_hook(halt(number)).remove)
        yield
