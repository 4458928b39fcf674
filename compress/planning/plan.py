"""The plan of a recipe: what `apply` will do, and how it is shown on a terminal, in a notebook, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape as html_escape
from itertools import compress
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from compress.facts import LayerDecision, ModelFacts, Note
from compress.planning.cache_keys import CacheKeys
from compress.planning.durations import Duration
from compress.planning.forecast import Forecast, StageForecast
from compress.planning.inputs import Inputs
from compress.planning.measured_speed import LatencyForecast
from compress.planning.measurements import pass_names
from compress.recipe.schema import Recipe
from runtime.words import ms_text, size_text

COLUMNS = ("work", "done already", "weights before", "after", "time", "layers", "memory")
MOST_LAYERS = 12


@dataclass(frozen=True)
class PlannedWork:
    """What is done at once: an export, a pass, the baseline's outputs. `cached`: its result is in the cache already."""

    name: str
    key: str
    cached: bool
    before_bytes: int
    after_bytes: int
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What `apply` will do. `before` and `after` are the model's facts; sizes are those of the weights.

    `device`: what passes compute on where torch does it; "" without passes.
    """

    recipe: Recipe
    inputs: Inputs
    steps: tuple[PlannedWork, ...]
    keys: CacheKeys
    before: ModelFacts
    after: ModelFacts
    notes: tuple[Note, ...]
    forecast: Forecast
    latency: LatencyForecast | None = None
    device: str = ""

    @property
    def stages(self) -> list[StageForecast]:
        """Return the stages of the run; those whose result the cache has take no time."""
        done = {name for name, work in zip(self.work_names, self.steps, strict=True) if work.cached}
        return [
            replace(stage, duration=Duration(0.0)) if stage.name in done else stage for stage in self.forecast.stages
        ]

    @property
    def work_names(self) -> list[str]:
        """Return the name of each of `steps` as the stages and the log have it."""
        return [*(work.name for work in self.steps[:2]), *pass_names(self.recipe.passes)]

    @property
    def duration(self) -> Duration:
        """Return how long the run will take."""
        return Duration.add(stage.duration for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, for `compress plan --json`."""
        return plan_dict(self)

    def render(self, console: Any) -> None:
        """Print the plan (rich)."""
        title = f"[bold]{escape(self.recipe.name)}[/]  {escape(self.before.architecture)} for {self.recipe.target}"
        console.print(f"{title}, torch on {self.device}" if self.device else title)
        (first, *heads), *rows = _tabulate(self)
        table = Table(Column(first, no_wrap=True), *heads)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for work in self.steps:
            _print_layers(work.decisions, work.name, console)
            for note in work.notes:
                console.print(f"  {_format_level(note.level)}{escape(note.text)}")
        for note in self.notes:
            console.print(f"{_format_level(note.level)}{escape(note.text)}")
        console.print(_format_forecast(self))

    def __repr__(self) -> str:
        sizes = f"{size_text(self.before.n_bytes)} -> {size_text(self.after.n_bytes)}"
        return f"<Plan {self.recipe.name}: {', '.join(p.kind for p in self.recipe.passes) or 'no passes'}; {sizes}>"

    def _repr_html_(self) -> str:
        return plan_html(self)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values: steps (name, key, cached, bytes, layers, notes), sizes, data, forecast, notes.

    Seconds of the forecast lie `between` two bounds, which are one where as much work took so long on this machine.
    """
    expected = plan.forecast
    return {
        "name": plan.recipe.name,
        "model": {
            "source": plan.recipe.model.source,
            "architecture": plan.before.architecture,
            "macs": plan.before.macs,
        },
        "target": plan.recipe.target,
        "device": plan.device,
        "size_bytes": {"before": plan.before.n_bytes, "after": plan.after.n_bytes},
        "steps": [
            {
                "name": work.name,
                "key": work.key,
                "cached": work.cached,
                "before_bytes": work.before_bytes,
                "after_bytes": work.after_bytes,
                "layers": [asdict(decision) for decision in work.decisions],
                "notes": [asdict(note) for note in work.notes],
            }
            for work in plan.steps
        ],
        "data": {
            name: {"source": f.source, "samples": f.n_samples, "digest": f.digest}
            for name, f in plan.inputs.data.items()
        },
        "forecast": {
            **plan.duration.to_record(),
            "memory_bytes": expected.memory_bytes,
            "disk_bytes": expected.disk_bytes,
            "bundle_bytes": expected.bundle_bytes,
            "stages": [
                {"name": stage.name, **stage.duration.to_record(), "memory_bytes": stage.memory_bytes}
                for stage in plan.stages
            ],
        },
        "latency": None if plan.latency is None else asdict(plan.latency),
        "notes": [asdict(note) for note in plan.notes],
    }


def plan_html(plan: Plan) -> str:
    """Format the plan as a table for notebooks."""
    heads, *cells = _tabulate(plan)
    rows = "".join(f"<tr>{''.join(f'<td>{html_escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    head = f"<tr>{''.join(f'<th>{title}</th>' for title in heads)}</tr>"
    name, total = html_escape(plan.recipe.name), html_escape(_format_forecast(plan))
    return f"<p><b>{name}</b></p><table>{head}{rows}</table><p>{total}</p>"


def _tabulate(plan: Plan) -> list[tuple[str, ...]]:
    """Return the heads and the rows, without columns that are empty."""
    stages = {stage.name: stage for stage in plan.stages}
    rows: list[tuple[str, ...]] = []
    for name, work in zip(plan.work_names, plan.steps, strict=True):
        if plan.before.classless and name not in stages:
            continue  # nothing runs it
        sizes = size_text(work.before_bytes), size_text(work.after_bytes)
        done = "cached" if work.cached else ""
        seconds, memory = _format_stage(stages.pop(name, None))
        counts = Counter(decision.action for decision in work.decisions)
        rows.append((name, done, *sizes, seconds, ", ".join(f"{n} {action}" for action, n in counts.items()), memory))
    timed = {name: _format_stage(stage) for name, stage in stages.items()}
    others = [(name, "", "", "", seconds, "", memory) for name, (seconds, memory) in timed.items()]
    rows = [*others[:1], *rows, *others[1:]]
    filled = [any(column) for column in zip(*rows, strict=True)]
    return [tuple(compress(row, filled)) for row in (COLUMNS, *rows)]


def _format_stage(stage: StageForecast | None) -> tuple[str, str]:
    """Return the cells "time" and "memory"."""
    return ("", "") if stage is None else (str(stage.duration), size_text(stage.memory_bytes))


def _format_forecast(plan: Plan) -> str:
    expected = plan.forecast
    ratio = plan.before.n_bytes / max(plan.after.n_bytes, 1)
    return (
        f"{_format_latency(plan.latency)}"
        f"weights {size_text(plan.before.n_bytes)} -> {size_text(plan.after.n_bytes)} ({ratio:.1f}x smaller); about "
        f"{plan.duration}, {size_text(expected.memory_bytes)} of memory at the peak, "
        f"{size_text(expected.disk_bytes)} of disk"
    )


def _format_latency(latency: LatencyForecast | None) -> str:
    if latency is None:
        return ""
    what = {"latency_p50": "a call", "tpot": "a token"}[latency.metric]
    how = f"models of this shape with {' and '.join(map(str, latency.blocks))} blocks" if latency.blocks else ""
    lines = [
        f"{what} takes about {ms_text(latency.float_ms)} -> {ms_text(latency.compressed_ms)} on {latency.backend} "
        f"({latency.speedup:.2f}x as fast, measured on {how or 'models of this shape'})"
    ]
    if latency.first_ms:
        before, after = latency.first_ms
        lines.append(f"the first token about {ms_text(before)} -> {ms_text(after)} ({before / after:.2f}x as fast)")
    return "".join(f"{line}\n" for line in lines)


def _print_layers(decisions: Sequence[LayerDecision], work: str, console: Console) -> None:
    """Print the layers that are left, with the reason (many of one together), and the first that are touched."""
    touched = [d for d in decisions if d.action != "kept"]
    for decision in touched[:MOST_LAYERS]:
        _print_layer(decision, f"{decision.action} {decision.reason}", work, console)
    if len(touched) > MOST_LAYERS:
        console.print(f"  {work}: ... and {len(touched) - MOST_LAYERS} more (--json shows all)")
    by_reason: dict[str, list[LayerDecision]] = {}
    for decision in decisions:
        if decision.action == "kept":
            by_reason.setdefault(decision.reason, []).append(decision)
    for reason, kept in by_reason.items():
        for decision in kept if len(kept) <= MOST_LAYERS else ():
            _print_layer(decision, f"stays: {reason}", work, console)
        if len(kept) > MOST_LAYERS:
            text = f"  {work}: {len(kept)} layers stay: {reason} (--json shows all)"
            console.print(text, highlight=False, markup=False)


def _print_layer(decision: LayerDecision, what: str, work: str, console: Console) -> None:
    console.print(f"  {work}: {decision.layer} ({decision.type}) {what}", highlight=False, markup=False)


def _format_level(level: str) -> str:
    return {"info": "", "slow": "[yellow]slower than float: [/]", "warning": "[yellow]note: [/]"}[level]
