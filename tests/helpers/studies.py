"""What tests of searches share: a recipe that is searched, and workers that answer at once without any model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from compress.recipe.load import load_recipe
from compress.recipe.points import SearchSpace, open_space
from compress.recipe.schema import Recipe
from compress.search.workers import TrialAnswer, TrialOrder

SEARCHED: dict[str, Any] = {
    "version": 1,
    "name": "searched",
    "model": {"source": "dir:model", "task": "image-classification"},
    "passes": [{"kind": "prune_channels"}, {"kind": "int8", "placement": "all"}],
    "search": {
        "space": {
            "passes.0.ratio": {"range": [0.1, 0.6]},
            "passes.1.calibration": {"choice": ["mse", "minmax", "percentile"]},
        },
        "goals": ["minimize size"],
        "constraints": [{"metric": "top1", "max_drop": 0.05}],
        "trials": 6,
        "batch": 2,
    },
    "validate": {"metrics": ["top1"]},
}


def write_searched(folder: Path, parts: Mapping[str, Any] = {}, **search: Any) -> Path:
    """Write SEARCHED with other parts, and other values in its search; return the file."""
    recipe = {**SEARCHED, **parts, "search": {**SEARCHED["search"], **search}}
    file = folder / "searched.yaml"
    file.write_text(json.dumps(recipe))
    return file


def searched(folder: Path, parts: Mapping[str, Any] = {}, **search: Any) -> Recipe:
    return load_recipe(write_searched(folder, parts, **search))


def searched_space(folder: Path, **search: Any) -> SearchSpace:
    return open_space(searched(folder, **search))


def make_report(size_ratio: float, drop: float, limit: float = 0.05, **values: float) -> dict[str, Any]:
    """Make what is read of a report: of size, top1 and its gate, and further ratios by name."""
    holds = drop <= limit
    return {
        "verdict": "pass" if holds else "fail",
        "backend": "pretended",
        "candidate": {
            "metrics": {"top1": 0.9 - drop},
            "intervals": {"top1": [0.88 - drop, 0.92 - drop]},
            "latency_ms": dict.fromkeys(("p50", "p95"), 1.0),
            "generation": {},
            "further": {},
            "size_bytes": 1000 / size_ratio,
        },
        "ratios": {"size": size_ratio, **values},
        "ratio_intervals": {},
        "gates": [
            {
                "metric": "top1",
                "rule": f"max_drop {limit:g}",
                "kind": "max_drop",
                "limit": limit,
                "value": drop,
                "interval": [drop - 0.01, drop + 0.01],
                "verdict": "pass" if holds else "fail",
                "holds": holds,
                "why": "as made",
            }
        ],
    }


class PretendedWorkers:
    """Answers orders by a function of the trial's recipe; a bundle is a folder with one file.

    `done`: (what was done, the trial's folder's name, its share), in order; `waves`: what was done at once, how often.
    `after`: orders before a kill.
    """

    def __init__(self, make: Callable[[Mapping[str, Any], float], Any], n: int = 1, after: float = math.inf) -> None:
        self.make, self.n, self.after = make, n, after
        self.done: list[tuple[str, str, float]] = []
        self.waves: list[tuple[str, int]] = []

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        self.waves.append((orders[0].do, len(orders)))
        return [self._build(order) for order in orders]

    def _build(self, order: TrialOrder) -> TrialAnswer:
        if order.do == "start":
            return TrialAnswer("done")
        self._count("build", order.out, order.share)
        found = self.make(yaml.safe_load(Path(order.recipe).read_text()), order.share)
        if isinstance(found, TrialAnswer):
            return found
        Path(order.out).mkdir()
        (Path(order.out) / "report").write_text(json.dumps(found))
        return TrialAnswer("done", seconds=1.0, host="nowhere")

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer:
        self._count("judge", order.out, 0)
        return TrialAnswer("done", report=json.loads((Path(order.out) / "report").read_text()))

    def _count(self, what: str, out: str, share: float) -> None:
        if len(self.done) >= self.after:
            raise KeyboardInterrupt
        self.done.append((what, Path(out).name, share))


W = TypeVar("W")


@contextmanager
def pretend(workers: W, what: str = "sweep") -> Iterator[W]:
    """Let sweeps, or what searches otherwise (the module of that name), be done by these workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"compress.search.{what}.start_workers", lambda *arguments: nullcontext(workers))
        yield workers
