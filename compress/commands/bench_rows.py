"""The table of `compress bench`: a row for each format on each backend, which ones win by a stated rule, as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from compress.search.trials import Run
from runtime.bundle.records import to_json
from runtime.report.report import finite
from runtime.tasks.metrics import METRICS
from runtime.words import interval_brackets, size_text

State = Literal["measured", "not possible", "not built", "failed", "late"]
FLOAT, PLACED = "float32", "int8-static"
"""Formats: what all are held against; the one whose layers can be chosen by their times."""
SAME = 0.02
"""Of a ratio around 1: as fast as float32, whatever the noise of few rounds."""
MOST_SHOWN = 2
"""Metrics of quality that a row shows."""
ABSENT = "does not work here"
"""How the reason begins of a backend that runs nothing on this machine."""
HEADS = ("backend", "format", "size", "quality", "p50", "against float32", "throughput", "peak memory", "remarks")


@dataclass(frozen=True)
class BenchRow:
    """One format on one backend. `why`: of a row that was not measured; of one that is slower, the reason if known.

    `speedup` is how many times as fast as float32 on the same backend, timed in the same rounds, with its interval.
    `keeps`: whether the quality is within the table's bounds; None: there is no data to tell. `quality`: metric ->
    value. `passes`: kinds, in their order. `trial`: its number in the study.
    """

    backend: str
    format: str
    state: State
    why: str = ""
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    size_bytes: int | None = None
    quality: dict[str, float] = field(default_factory=dict)
    keeps: bool | None = None
    broken: str = ""
    """Why there is no quality although there is data."""
    latency_ms: float | None = None
    speedup: float | None = None
    speedup_interval: tuple[float | None, float | None] | None = None
    throughput_per_s: float | None = None
    throughput_batch_size: int | None = None
    peak_memory_bytes: float | None = None
    final: bool = False
    """Whether `latency_ms` is of the last rounds, in which the fastest of all backends took turns."""
    seconds: float = 0.0
    """That building and measuring took."""
    stages: dict[str, float] = field(default_factory=dict)
    """Of these, by what was done."""
    placement: Literal["", "searched", "usual"] = ""
    """Of int8: the result of a search by times; the usual one, and the search found nothing faster; "": no search."""
    trial: int = -1

    @property
    def name(self) -> str:
        """Return the row's name."""
        return f"{self.backend}-{self.format}"

    @property
    def is_slower(self) -> bool:
        """Return whether the format is slower than float32 on its backend."""
        return self.format != FLOAT and self.speedup is not None and self.speedup < 1 - SAME

    @property
    def may_gain(self) -> bool:
        """Return whether a search for the layers that gain from int8 may make the row faster: where it gains little."""
        timed = self.state == "measured" and self.speedup is not None and self.speedup < 1.2
        return timed and self.format == PLACED and not self.placement

    @property
    def may_win(self) -> bool:
        """Return whether the row was measured and nothing is known against its quality."""
        return self.state == "measured" and self.keeps is not False and not self.broken

    def describe(self) -> str:
        """Return what there is to say beside the numbers, in a few words."""
        said = [self.broken or self.why] if self.state != "measured" else []
        if self.is_slower:
            said.append("slower than float32" + (f": {self.why}" if self.why else ""))
        if self.broken and self.state == "measured":
            said.append(self.broken)
        elif self.keeps is False:
            said.append("loses too much")
        return "; ".join([*said, *self.notes])


@dataclass(frozen=True)
class BenchTable:
    """What `bench.json` holds. `question`: a digest of model, data and versions; rows of another are not gone on with.

    `bounds`: what a row's quality must keep to, as gates read. `synthetic`: there is no data, so that times are of
    samples drawn at random, and nothing is known of quality.
    """

    model: str
    task: str
    question: str
    synthetic: bool
    bounds: tuple[str, ...]
    speed: str
    """The metric that `latency_ms` is."""
    machine: str
    threads: int
    rows: tuple[BenchRow, ...] = ()
    fastest: str = ""
    smallest: str = ""
    recipe: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def find(self, name: str) -> BenchRow | None:
        """Return the row of that name."""
        return next((row for row in self.rows if row.name == name), None)

    def with_winners(self) -> BenchTable:
        """Return the table with the names of its fastest and smallest rows among those that may win."""
        able = [row for row in self.rows if row.may_win]
        finals = [row for row in able if row.final and row.latency_ms is not None]
        timed = finals or [row for row in able if row.latency_ms is not None]
        sized = [row for row in able if row.size_bytes is not None]
        return replace(
            self,
            fastest=min(timed, key=lambda row: row.latency_ms or 0.0).name if timed else "",
            smallest=min(sized, key=lambda row: row.size_bytes or 0).name if sized else "",
        )

    @property
    def rule(self) -> str:
        """Return the rule by which rows win, as a sentence."""
        if self.synthetic:
            return (
                "Fastest: the lowest p50 of all; smallest: the smallest file. No quality is known: there is no --data"
            )
        kept = " and ".join(self.bounds) or "finite outputs"
        return (
            f"Fastest: the lowest p50 of those that keep {kept} (values, no verdict); smallest: the least bytes of them"
        )


def read_row(row: BenchRow, run: Run, report: Mapping[str, Any], speed: str) -> BenchRow:
    """Return a row with what its report (JSON values) says. `speed`: the metric that its time is."""
    time, side, decodes = run.goals[speed], report["candidate"], report["candidate"]["generation"]
    broken = "" if report["verdict"] != "fail" or side["metrics"] else next(iter(report["advice"]), "")
    return replace(
        row,
        state="measured",
        notes=row.notes if broken else (*row.notes, *report["advice"]),
        size_bytes=side["size_bytes"],
        quality={} if broken else _choose_shown(side["metrics"], [gate.metric for gate in run.gates]),
        keeps=None if broken else all(gate.short == 0 for gate in run.gates),
        broken=broken,
        latency_ms=time.value,
        speedup=1.0 if time.ratio is None else time.ratio,
        speedup_interval=None if time.ratio is None else (time.low, time.high),
        throughput_per_s=decodes["decode_rate"] if decodes else side["throughput_per_s"],
        throughput_batch_size=report["benchmark"]["batch_size"] if decodes else side["throughput_batch_size"],
        peak_memory_bytes=side["peak_memory_bytes"],
    )


def _choose_shown(values: Mapping[str, float], gated: list[str]) -> dict[str, float]:
    """Return a metric against the labels where there are some, those of the bounds, the first against float32."""
    labelled = [name for name in values if METRICS[name].against == "labels"]
    near = [name for name in values if METRICS[name].against == "baseline" and METRICS[name].ideal == 1.0]
    names = dict.fromkeys([*(labelled[:1] if not set(gated) & set(labelled) else ()), *gated, *near])
    return {name: round(values[name], 6) for name in list(names)[:MOST_SHOWN] if name in values}


def to_dict(table: BenchTable) -> dict[str, Any]:
    """Return the table as JSON values, as bench.json has it."""
    values: dict[str, Any] = finite(to_json(table))
    return values


def list_cells(row: BenchRow) -> tuple[str, ...]:
    """Return the texts of a row that was measured, as HEADS has them."""
    rate = "-" if row.throughput_per_s is None else f"{row.throughput_per_s:.4g}/s (batch {row.throughput_batch_size})"
    return (
        row.backend,
        row.format,
        size_text(row.size_bytes),
        ", ".join(f"{name} {value:.4g}" for name, value in row.quality.items()) or "-",
        "-" if row.latency_ms is None else f"{row.latency_ms:.4g} ms",
        _format_ratio(row),
        rate,
        size_text(row.peak_memory_bytes),
        row.describe(),
    )


def _format_ratio(row: BenchRow) -> str:
    if row.speedup is None or row.format == FLOAT:
        return "-" if row.speedup is None else "1"
    low, high = row.speedup_interval or (None, None)
    ends = -math.inf if low is None else low, math.inf if high is None else high
    return f"{row.speedup:.2f}x {interval_brackets(ends, '.2f')}"


def list_others(table: BenchTable) -> list[str]:
    """Return a line for each reason why rows were not measured, with the rows that it is of."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in table.rows:
        if row.state != "measured":
            what = "any format" if row.why.startswith(ABSENT) else row.format
            groups.setdefault((what, row.state, row.why), []).append(row.backend)
    return [f"{what} on {', '.join(backends)}: {state}: {why}" for (what, state, why), backends in groups.items()]


def list_conclusions(table: BenchTable) -> list[str]:
    """Return the lines below the table: the rule, the winners, where the recipe is, what should be known."""
    lines = [f"{table.rule}."]
    for what, name in (("fastest", table.fastest), ("smallest", table.smallest)):
        row = table.find(name)
        if row is not None:
            _, _, size, _, latency, ratio, *_ = list_cells(row)
            lines.append(f"{what}: {row.format} on {row.backend}: {latency}, {ratio} of float32 there, {size}")
    winner = table.find(table.fastest)
    if winner is not None and winner.format == FLOAT:
        lines.append("nothing that was measured is faster than float32 here")
    lines += [f"recipe of the fastest: {table.recipe}"] if table.recipe else []
    return [*lines, *(f"- {note}" for note in table.notes)]


def render_table(table: BenchTable) -> str:
    """Return the table and what follows from it as text."""
    data = "times on synthetic inputs" if table.synthetic else "quality on the evaluation set"
    head = f"{table.model} ({table.task}), {table.machine}, {table.threads} thread(s); {data}; {table.seconds:.0f} s"
    rows = [HEADS, *(list_cells(row) for row in table.rows if row.state == "measured")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    others = list_others(table)
    told = ["", "not measured", *(f"  {line}" for line in others)] if others else []
    return "\n".join([head, "", *(f"  {line}" for line in lines), *told, "", *list_conclusions(table)])
