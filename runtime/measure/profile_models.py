"""Profile models: each node's time by the runtime's own profile, and the layer of the file that it comes from.

A profiled call is a little slower than another, so that a profile is a short run of its own and never one that is
judged.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from runtime.backends import Feeds, Session, find_backend, open_model
from runtime.backends.base import Options
from runtime.bundle.onnx_file import Graph, read_graph
from runtime.measure.profile import Profile, Profiled, average_undisturbed
from runtime.measure.profile_layers import trace_layers
from runtime.measure.profile_onnxruntime import profile_onnxruntime
from runtime.measure.profile_openvino import profile_openvino

LEAST_CALLS, MOST_CALLS = 5, 50
BUDGET_S = 2.0
"""Seconds for the profiled calls of one model."""
SHORT_MS, PLAIN_CALLS = 1.0, 100
MOST_EVENTS = 50_000
"""Of a profile, which is read as one JSON document."""
PROFILERS: dict[str, Callable[[Path, int, Options, Feeds | None, Path], Profiled]] = {
    "onnxruntime-cpu": profile_onnxruntime,
    "openvino": profile_openvino,
}
"""Backend -> what opens a model so that its calls are profiled."""


@dataclass(frozen=True)
class ProfileOrder:
    """A model to profile: on `feeds`, or of a decoder by a `request`.

    `request` makes a whole request and returns its runs of the graph, of which the first, that reads the prompt, is not
    counted. `layers`: names of layers, by which weights are recognised.
    """

    path: Path
    feeds: Feeds | None = None
    request: Callable[[Session], int] | None = None
    options: Options = field(default_factory=dict)
    layers: Sequence[str] = ()


def profile_model(backend: str, path: Path, threads: int, feeds: Feeds | None, budget_s: float = BUDGET_S) -> Profile:
    """Profile one model's calls on `feeds`, as `profile_models` does."""
    (profile,) = profile_models(backend, threads, [ProfileOrder(path, feeds)], budget_s)
    return profile


def profile_models(
    backend: str, threads: int, orders: Sequence[ProfileOrder], budget_s: float = BUDGET_S
) -> list[Profile]:
    """Profile calls of several models made in turn, so that a change of the machine's pace hits them all.

    Takes about `budget_s` for each model. `backend`: one of PROFILERS. Raises what the backend raises.
    """
    with ExitStack() as stack:
        runs = []
        for order in orders:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="profile.")))
            profiled = PROFILERS[backend](order.path, threads, order.options, order.feeds, folder)
            stack.callback(profiled.session.close)
            runs.append(profiled)
        until, calls, most = time.perf_counter() + budget_s * len(orders), 0, MOST_CALLS
        runs_each = [1] * len(orders)
        while calls < most and (calls < LEAST_CALLS or time.perf_counter() < until):
            for number, (order, profiled) in enumerate(zip(orders, runs, strict=True)):
                runs_each[number] = _call(order, profiled.session)
                profiled.after_call()
            if not calls:
                most = min(_count_calls(order.path, n) for order, n in zip(orders, runs_each, strict=True))
            calls += 1
        found = [
            profiled.read(partial(_counts, order.request is not None, n))
            for order, profiled, n in zip(orders, runs, runs_each, strict=True)
        ]
    return [_complete(backend, threads, *pair) for pair in zip(orders, found, strict=True)]


def _call(order: ProfileOrder, session: Session) -> int:
    """Make a call or a request; return how often that ran the graph."""
    if order.request is not None:
        return order.request(session)
    assert order.feeds is not None
    session.run(order.feeds)
    return 1


def _counts(is_request: bool, runs_each: int, run: int) -> bool:
    """Return whether a run counts: not the first of all, nor those of requests that read a prompt."""
    return run % runs_each > 0 if is_request else run > 0


def _count_calls(path: Path, runs_each: int) -> int:
    """Return how many calls are profiled at most."""
    n_nodes = len(read_graph(path).nodes) if path.suffix == ".onnx" else 1000
    return max(LEAST_CALLS, min(MOST_CALLS // runs_each, MOST_EVENTS // (runs_each * max(1, n_nodes))))


def _complete(backend: str, threads: int, order: ProfileOrder, profile: Profile) -> Profile:
    """Add the runtime's own time of short calls, and the file's layers."""
    file = read_graph(order.path) if order.path.suffix == ".onnx" else Graph((), {})
    if order.request is None and order.feeds is not None and profile.nodes_ms < SHORT_MS:
        call_ms = _time_plain_calls(backend, order.path, threads, order.feeds, order.options)
        profile = replace(profile, call_ms=max(profile.nodes_ms, call_ms))
    return trace_layers(profile, file, order.layers)


def _time_plain_calls(backend: str, path: Path, threads: int, feeds: Feeds, options: Options) -> float:
    """Return the milliseconds of a call that is not profiled: to profile a node costs some microseconds of its own."""
    session, times = open_model(find_backend(backend), path, threads, options), []
    for _ in range(PLAIN_CALLS):
        start = time.perf_counter()
        session.run(feeds)
        times.append(1000 * (time.perf_counter() - start))
    session.close()
    return average_undisturbed(times)
