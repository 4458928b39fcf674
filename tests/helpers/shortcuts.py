"""What tests leave out of a run where it is not what they test: each of these takes seconds in processes of its own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS

from runtime.clock.fresh import Answer
from runtime.report.report import Report, Side

COMMAND = f"""
import sys
sys.path.append({str(HELPERS)!r})
from shortcuts import few_rounds, quick_judge
from compress.cli import main
"""
QUICK_COMMAND = f"{COMMAND}with quick_judge(): main()"
"""What `python -m compress` does, cut short, in a process of its own."""
FEW_ROUNDS_COMMAND = f"{COMMAND}with few_rounds(): main()"
"""What `python -m compress` does, on all backends and in fresh processes, which measure no longer than they must."""
FEW_ROUNDS: dict[str, Any] = {
    "measure.benchmark.LASTING_S": 0.0,
    "measure.benchmark.LATENCY_BUDGET_S": 0.0,
    "measure.benchmark.THROUGHPUT_BUDGET_S": 0.0,
    "measure.benchmark.ANSWERS_BUDGET_S": 0.0,
    "measure.benchmark.LIMIT_BUDGET_S": 0.02,
    "measure.energy.BLOCK_S": 0.0,
    "clock.turns.BLOCK_S": 0.0,
    "clock.turns.WARMUP_BUDGET_S": 0.1,
    "clock.turns.MIN_ROUNDS": 2,
    "clock.turns.DISTURBED": inf,  # no round again because other tests run beside it
    "clock.turns.no_garbage_collection": nullcontext,  # it takes longer than all the rest
    "measure.answering.no_garbage_collection": nullcontext,
    "measure.requests.no_garbage_collection": nullcontext,
    "judge.bundle.asks_why": lambda evidence, forecast: False,  # few rounds say nothing
}
"""Name -> what it is while calls are timed just to go through the motions."""
PASSED = Report("pass", "tiny", "onnxruntime-cpu", Side(), Side())


def run_here(function: str, task: Mapping[str, Any], what: str) -> Answer:
    """Do what `runtime.clock.fresh.run_fresh` has a process of its own do."""
    module, _, name = function.partition(":")
    record, arrays = getattr(importlib.import_module(module), name)(json.loads(json.dumps(task)))
    return json.loads(json.dumps(record)), arrays


@contextmanager
def without_processes() -> Iterator[None]:
    """Measure in this process what is measured in fresh ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("runtime.measure.benchmark", "runtime.clock.compare", "runtime.judge.explain"):
            patch.setattr(f"{module}.run_fresh", run_here)
        yield


@contextmanager
def few_rounds() -> Iterator[None]:
    """Time in the fewest calls that give an interval."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW_ROUNDS.items():
            patch.setattr(f"runtime.{name}", value)
        yield


@contextmanager
def quick_judge() -> Iterator[None]:
    """Judge on the main backend alone, in few rounds, in this process."""
    with without_processes(), few_rounds(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.judge.bundle.available_others", lambda manifest, main: ())
        yield


@contextmanager
def unjudged(judge: Callable[..., Any] = lambda path, **more: PASSED) -> Iterator[None]:
    """Let runs be judged by `judge`, which finds nothing wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.execution.run.validate", judge)
        yield


@contextmanager
def quick_reader() -> Iterator[None]:
    """Load checkpoints back in this process; test_loading_back.py tries the one of their own."""
    from compress.models.fresh_reader import answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.export.loading_back.ask", lambda work, seconds: answer(work))
        yield


@contextmanager
def quick_check() -> Iterator[None]:
    """Check and run .onnx files in this process; test_onnx_check.py tries those of their own."""
    from compress.models import onnx_check, onnx_graph

    def examine(path: Path, *marks: Any) -> Any:
        return onnx_check.examine(path)

    def run_samples(path: Path, order: str, marks: Any) -> Any:
        return onnx_graph._run_samples(path, **json.loads(order))

    with pytest.MonkeyPatch.context() as patch:
        for place, name, here in ((onnx_check, "_examine_apart", examine), (onnx_graph, "_run_apart", run_samples)):
            patch.setattr(place, name, here)
        yield


@pytest.fixture(scope="module")
def judge_here() -> Iterator[None]:
    """Judge on all backends, in few rounds, in this process."""
    with without_processes(), few_rounds():
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_run() -> Iterator[None]:
    """All of them, for the tests of a folder whose conftest.py imports this."""
    with quick_judge(), quick_reader(), quick_check():
        yield
