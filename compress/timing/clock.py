"""Time graphs against each other on the runtime that will run them.

In turn in this process while one out of many is looked for; in fresh processes where a choice is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compress.graph.files import write_graph
from compress.graph.run import Feeds
from compress.store.durable import temporary_folder
from compress.timing.kept import Kept
from runtime.backends import find_backend
from runtime.clock.compare import compare_files
from runtime.clock.turns import MIN_ROUNDS, make_call, time_in_turns
from runtime.stats import Estimate, process_interval

CALLS = 200
"""Of each graph, where the budget allows."""
CONFIDENCE = 0.95
PROCESSES = 6
"""The least that give an interval at CONFIDENCE."""
MOST_TIMES = 4
"""As often PROCESSES as that, at most, where a choice is not clear: an interval half as wide."""


@dataclass(frozen=True)
class GraphTimes:
    """Milliseconds of a call of some graphs, in each of several fresh processes."""

    ms: np.ndarray  # [processes, graphs]

    def speed(self, graph: int, than: int = 0) -> Estimate:
        """Return how many times as fast as another a graph is, with the interval that the processes give.

        Of the two alone: a third that is now slow, now fast would widen it.
        """
        return process_interval(self.ms[:, than] / self.ms[:, graph], CONFIDENCE)


@dataclass(frozen=True)
class Clock:
    """A backend and its threads; what was measured there and is kept."""

    backend: str
    threads: int = 1
    seed: int = 0
    kept: Kept = field(default_factory=Kept)

    def time(
        self, graphs: Sequence[ir.Model], feeds: Sequence[Feeds], budget_s: float, backends: Sequence[str] = ()
    ) -> list[float]:
        """Return the milliseconds of a call of each graph, timed in turn over the same batches.

        The first's is its median, the others' follow from their ratios to it. `backends`: of each, where they are not
        all its own. Raises what the backend raises.
        """
        return self.time_each(graphs, [feeds] * len(graphs), budget_s, backends)

    def time_each(
        self,
        graphs: Sequence[ir.Model],
        feeds: Sequence[Sequence[Feeds]],
        budget_s: float,
        backends: Sequence[str] = (),
    ) -> list[float]:
        """Time graphs as `time` does, each over batches of its own."""
        with temporary_folder() as folder, ExitStack() as held:
            calls = []
            for number, (graph, batches) in enumerate(zip(graphs, feeds, strict=True)):
                backend = find_backend(backends[number] if backends else self.backend)
                session = backend.open(_save(graph, folder / str(number)), self.threads, {})
                held.callback(session.close)
                calls.append(make_call(session, batches))
            one_thread = self.threads == 1 and not find_backend(self.backend).on_gpu
            turns = time_in_turns(calls, CALLS, seed=self.seed, budget_s=budget_s, one_thread=one_thread)
        return turns.typical_ms

    def compare(
        self,
        graphs: Sequence[ir.Model],
        feeds: Sequence[Feeds],
        budget_s: float,
        is_clear: Callable[[GraphTimes], bool] = lambda times: True,
    ) -> GraphTimes:
        """Return what fresh processes saw of the graphs.

        In `budget_s`; while `is_clear` says no of what they saw, with more processes, up to MOST_TIMES as many. Raises
        what the backend raises.
        """
        with temporary_folder() as folder:
            files = [_save(graph, folder / str(number)) for number, graph in enumerate(graphs)]
            seen, calls_s = np.empty((0, len(files))), 0.0
            while True:
                seed = self.seed + len(seen)
                ms = compare_files(self.backend, self.threads, files, feeds, PROCESSES, budget_s, seed).ms
                seen = np.concatenate([seen, ms])
                calls_s += max(budget_s, MIN_ROUNDS * float(ms.sum()) / 1000)  # those of a large model outlast a budget
                if calls_s >= MOST_TIMES * budget_s or is_clear(GraphTimes(seen)):
                    break
        return GraphTimes(seen)


def _save(graph: ir.Model, folder: Path) -> Path:
    folder.mkdir()
    write_graph(graph, folder / "model.onnx")
    return folder / "model.onnx"


def middle_batch(feeds: Sequence[Feeds]) -> Feeds:
    """Return the batch of middle size."""
    return sorted(feeds, key=lambda batch: sum(np.asarray(values).size for values in batch.values()))[len(feeds) // 2]
