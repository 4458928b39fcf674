"""Time model files against each other in fresh processes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import Feeds, find_backend, open_model
from runtime.bundle.columns import Array
from runtime.bundle.files import name_file
from runtime.clock.fresh import Answer, read_batches, run_fresh, write_batches
from runtime.clock.machine import peak_memory_bytes
from runtime.clock.turns import Call, make_call, time_in_turns

CALLS = 200
"""Calls of a file in one process, where the budget has room for them."""
FEEDS = "feeds.npz"
RUNS = 3
"""Calls after which memory is read: the first allocates, the next may still grow the arena."""


@dataclass(frozen=True)
class Compared:
    """What fresh processes saw of some files: milliseconds of a call, and the peak memory of those opened first."""

    ms: Array  # [processes, files]
    peak_memory_bytes: tuple[tuple[float, ...], ...]  # of each file


def compare_files(
    backend: str,
    threads: int,
    files: Sequence[Path],
    feeds: Sequence[Feeds],
    processes: int,
    budget_s: float,
    seed: int,
) -> Compared:
    """Time calls of the files in turn, over the same batches, in each of several processes.

    `budget_s`: of all processes' calls together. Raises what the backend raises.
    """
    records = []
    with tempfile.TemporaryDirectory(prefix="compare.") as folder:
        with name_file(Path(folder) / FEEDS):
            write_batches(Path(folder) / FEEDS, {"": feeds})
        for index in range(processes):
            task = {
                "backend": backend,
                "threads": threads,
                "files": [str(file) for file in files],
                "feeds": str(Path(folder) / FEEDS),
                "first": index % len(files),
                "budget_s": budget_s / processes,
                "seed": seed + index,
            }
            records.append(run_fresh("runtime.clock.compare:time_files", task, "timing")[0])
    memory = [tuple(r["peak_memory_bytes"] for r in records if r["first"] == file) for file in range(len(files))]
    return Compared(np.array([record["ms"] for record in records]), tuple(memory))


def time_files(task: Mapping[str, Any]) -> Answer:
    """Do one process's part of `compare_files`."""
    batches = read_batches(Path(task["feeds"]))[""]
    backend, files, first = find_backend(task["backend"]), task["files"], task["first"]
    backend.library()
    peak, calls = 0, dict[int, Call]()
    with ExitStack() as held:
        for file in dict.fromkeys((first, *range(len(files)))):
            bare = peak_memory_bytes()
            session = open_model(backend, Path(files[file]), task["threads"], {})
            held.callback(session.close)
            calls[file] = make_call(session, batches)
            if file == first:
                for turn in range(RUNS):
                    calls[file](turn)
                peak = max(peak_memory_bytes() - bare, 0)
        turns = time_in_turns(
            [calls[file] for file in range(len(files))],
            CALLS,
            seed=task["seed"],
            budget_s=task["budget_s"],
            one_thread=task["threads"] == 1 and not backend.on_gpu,
        )
    return {"ms": turns.typical_ms, "first": first, "peak_memory_bytes": peak}, {}
