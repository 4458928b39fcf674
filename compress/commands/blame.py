"""`compress blame`: which layers carry the loss of a bundle, what to do about them, and what that costs.

Two questions about each layer, both answered on one graph with a switch for each (`compress.graph.switches`). *Alone*:
how far do the outputs move if it alone is rounded and all others are float? No other layer's damage hides that, so it
ranks the layers, on a few samples. *Back*: what goes if it alone is put back to float in the model as it is? That is
what a recipe can do, but where several layers have each ruined the outputs, putting one back shows nothing. So the
ranking is confirmed on the metric in sets: the first layers together, as few as give the loss back.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from ruamel.yaml import YAML

from compress.commands.inspect import read_json
from compress.commands.layer_times import time_layers
from compress.commands.switched import CPU, ChangeMeter, SwitchedModel, Vector, open_switched, spread_rows
from compress.errors import ExportError
from compress.planning.measurements import pass_names
from compress.recipe.load import load_recipe
from compress.store.cache import default_root
from compress.store.progress import no_log
from runtime.backends import open_artifact
from runtime.bundle.columns import count, take
from runtime.bundle.format import inside
from runtime.decode.scoring import split_sides
from runtime.errors import UsageError
from runtime.judge.bundle import prepare
from runtime.judge.evidence import Evidence, quality_evidence
from runtime.judge.findings import Case
from runtime.metrics import Metric, NonFiniteOutputs, check_finite
from runtime.progress import Progress, no_progress

MINUTES = 3.0
"""How long it may take if the call does not say."""
PROXY_SHARE = 0.5
"""Of the budget, for the change of outputs; the rest is for the metric."""
MOST_ROWS, LEAST_ROWS = 64, 4
"""Samples on which the outputs are compared."""
LEAST_JUDGED = 32
"""Samples on which the metric is taken, at least, where there are as many."""
CONFIRMED = 3
"""Layers that are put back one by one on the metric."""
ENOUGH = 0.9
"""Share of the loss that the proposed layers give back."""


@dataclass(frozen=True)
class BlamedLayer:
    """One layer, or a rounded tensor that is no layer's (type "tensor").

    `alone`: the outputs' change with it alone rounded. `share`: of the sum over all layers. `back`: the share of the
    whole change that goes when it alone is float; None where the time did not last. `metric`: the metric then, of the
    first few. `time_share`, `size_share`: of the candidate; `more_bytes`, `more_ms`: what float costs beyond that, ms
    for a sample.
    """

    name: str
    type: str
    alone: float
    share: float
    back: float | None
    size_share: float
    more_bytes: int
    metric: float | None = None
    time_share: float | None = None
    more_ms: float | None = None


@dataclass(frozen=True)
class Together:
    """The first `n_layers` of the ranking in float together: the metric, and the outputs' change left."""

    n_layers: int
    metric: float | None
    change: float


@dataclass(frozen=True)
class Snippet:
    """What to write into the recipe. `overrides`: as `--set` takes them; `text`: the same as YAML; `cost`: in words."""

    about: str
    overrides: tuple[str, ...]
    text: str
    cost: str


@dataclass(frozen=True)
class Blame:
    """Who carries the loss. `layers`: worst first. `change`: of the outputs, all rounded against all float.

    `metric` is `baseline` and `candidate` in the bundle's models (None of outputs that are not finite), and
    `float_layers` with every layer in float: what is lost even then is in no layer. `decided_by`: "metric", or
    "outputs" where the metric's loss is within noise. `chosen`: those that give back `ENOUGH` of the loss together.
    """

    bundle: str
    source: str
    metric: str
    baseline: float | None
    candidate: float | None
    float_layers: float
    decided_by: str
    change: float
    layers: tuple[BlamedLayer, ...]
    together: tuple[Together, ...]
    chosen: tuple[str, ...]
    snippets: tuple[Snippet, ...]
    n_compared: int
    n_judged: int
    seconds: float
    notes: tuple[str, ...] = ()
    unmatched: Mapping[str, str] = field(default_factory=dict)


def blame_bundle(
    path: Path | str,
    minutes: float = MINUTES,
    metric: str = "",
    cache: Path | None = None,
    progress: Progress = no_progress,
    times: bool = True,
) -> Blame:
    """Find the layers that carry the loss of the bundle in `path`, within about `minutes`.

    `metric`: one of the bundle's, instead of its first gate's. `cache`: where the float weights of the build may still
    be. `times`: whether layers are timed here. Raises BundleError, UsageError, and ExportError where there is nothing
    that could be put back to float.
    """
    deadline = Deadline(60 * minutes)
    case = prepare(Path(path), [CPU], None)
    with ExitStack() as stack:
        if case.manifest.artifact("candidate").kind == "checkpoint":
            from compress.commands.switched_checkpoint import open_checkpoint  # torch

            model, times = open_checkpoint(case), False
        else:
            _check_runs(case)
            model = stack.enter_context(open_switched(case, cache or default_root(), no_log))
        judge = _Judge(model, _choose_metric(case, metric), stack)
        ranking = rank_units(model, deadline, progress)
        return _confirm(model, judge, ranking, deadline, times)


class Deadline:
    """A time that is to be kept."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, time.monotonic()

    @property
    def seconds_spent(self) -> float:
        return time.monotonic() - self.begun

    @property
    def seconds_left(self) -> float:
        return self.seconds - self.seconds_spent


def _check_runs(case: Case) -> None:
    graph = case.manifest.graph_for(CPU) if not case.is_scored else None
    if graph is None:
        raise ExportError(
            f"{case.root}: its candidate is not run here, but by {case.manifest.target} alone; add an export "
            "{kind: onnx, target: onnxruntime-cpu} to the recipe, and ask that bundle"
        )
    if "bfloat16" in graph.precision or "float4" in graph.precision:
        raise ExportError(f"{case.root}: ONNX Runtime computes no {graph.precision} on CPUs, where layers are compared")


def _choose_metric(case: Case, name: str) -> Metric:
    """Return the metric that is asked for, that of the first gate on quality, or the first that fits."""
    known = {metric.name: metric for metric in case.metrics}
    if name and name not in known:
        raise UsageError(f"--metric {name}: the bundle does not have it; it has {', '.join(known)}")
    gates = [gate.metric for gate in case.manifest.judgement.gates if gate.metric in known]
    against_labels = [metric.name for metric in case.metrics if metric.against != "baseline"]
    chosen = next(iter([*([name] if name else []), *gates, *against_labels, *known]), None)
    if chosen is None:
        raise UsageError(f"{case.root}: no metric of outputs fits it, by which a loss could be told")
    return known[chosen]


class _Judge:
    """Takes the metric of a model with switches, on some of the frozen samples."""

    def __init__(self, model: SwitchedModel, metric: Metric, stack: ExitStack) -> None:
        self.model, self.metric = model, metric
        case = model.case
        self.rows = np.arange(count(case.columns))
        self.reference = None
        if case.manifest.generates:  # what a decoder is compared with runs beside it
            baseline = next((a for a in case.manifest.artifacts if a.name == "baseline"), None)
            self.reference = model.session(model.choose(False))
            if baseline is not None:
                threads = case.manifest.judgement.benchmark.threads
                self.reference = stack.enter_context(closing(open_artifact(case.root, baseline, CPU, threads)))

    def judge(self, vector: Vector) -> Evidence | None:
        """Return what is known of the metric with these switches; None where outputs are not finite."""
        case = self.model.case
        outputs = self.model.run(vector, self.rows, self.reference)
        _, outputs = split_sides(outputs)
        try:
            check_finite(outputs)
        except NonFiniteOutputs:
            return None
        baseline = {name: values[self.rows] for name, values in case.baseline.items()}
        labels = None if case.labels is None else take(case.columns, "label", self.rows)
        judgement = case.manifest.judgement
        return quality_evidence([self.metric], outputs, baseline, labels, judgement)[self.metric.name]

    def lose(self, evidence: Evidence | None) -> float:
        """Return by how much the metric is worse than the baseline's; infinite of broken outputs."""
        if evidence is None or math.isnan(evidence.candidate.value):
            return math.inf
        known = evidence.difference
        if known is None:  # a metric without an ideal, against the baseline
            return -evidence.candidate.value if self.metric.higher_is_better else evidence.candidate.value
        return -known.value if self.metric.higher_is_better else known.value


@dataclass(frozen=True)
class Ranking:
    """Units by number, worst first; `alone` and `back` as of `BlamedLayer`, by number; `whole`: all rounded."""

    order: tuple[int, ...]
    alone: Mapping[int, float]
    back: Mapping[int, float]
    whole: float
    meter: ChangeMeter
    notes: tuple[str, ...]


def rank_units(model: SwitchedModel, deadline: Deadline, progress: Progress = no_progress) -> Ranking:
    """Measure each unit alone rounded, then, worst first, each alone back, on as many samples as time allows."""
    units = range(len(model.units))
    total = count(model.case.columns)
    meter = ChangeMeter(model, spread_rows(total, LEAST_ROWS))
    begun = time.monotonic()
    whole = meter.measure(model.choose(True))
    each = max(time.monotonic() - begun, 1e-6) / len(meter.rows)
    room = PROXY_SHARE * deadline.seconds_left / (2 * len(units) + 2) / each
    if room > LEAST_ROWS:
        meter = ChangeMeter(model, spread_rows(total, min(MOST_ROWS, int(room))))
        whole = meter.measure(model.choose(True))
    alone: dict[int, float] = {}
    for unit in progress(list(units), "each layer alone"):
        if deadline.seconds_left < 0.2 * deadline.seconds and alone:
            break
        alone[unit] = meter.measure(model.choose(False, unit))
    notes = []
    if len(alone) < len(units):
        notes.append(
            f"the time lasted for {len(alone)} of {len(units)} layers alone, in graph order: give --budget "
            f"{math.ceil(deadline.seconds / 60 * 2 * len(units) / len(alone))}"
        )
    order = sorted(alone, key=lambda unit: -alone[unit])
    back: dict[int, float] = {}
    for unit in progress(order, "each layer back"):
        if deadline.seconds_spent > PROXY_SHARE * deadline.seconds and len(back) >= CONFIRMED:
            break
        left = meter.measure(model.choose(True, unit))
        back[unit] = float(math.isfinite(left)) if math.isinf(whole) else 1 - left / whole if whole else 0.0
    return Ranking(tuple(order), alone, back, whole, meter, tuple(notes))


def _confirm(model: SwitchedModel, judge: _Judge, ranking: Ranking, deadline: Deadline, times: bool) -> Blame:
    """Take the metric of the model as it is, of the first layers one by one, then of the first ones together."""
    notes = list(ranking.notes)
    case, n = model.case, len(model.units)
    begun = time.monotonic()
    judge.rows = spread_rows(count(case.columns), LEAST_JUDGED)
    judge.judge(model.choose(True))
    each = max(time.monotonic() - begun, 1e-6) / len(judge.rows)
    n_runs = 2 + CONFIRMED + 2 * math.ceil(math.log2(n + 1))
    judge.rows = spread_rows(count(case.columns), max(LEAST_JUDGED, int(0.8 * deadline.seconds_left / each / n_runs)))
    if len(judge.rows) < count(case.columns):
        notes.append(f"the metric is of {len(judge.rows)} of {count(case.columns)} frozen samples, for the time")
    as_is, floats = judge.judge(model.choose(True)), judge.judge(model.choose(False))
    if floats is None:
        raise ExportError(f"{case.root}: with every layer back to float the outputs are not finite")
    lost, lost_floats = judge.lose(as_is), judge.lose(floats)
    by_metric = _is_beyond_noise(as_is) and lost - lost_floats > 0.1 * abs(lost)
    if not by_metric:
        notes.append(_explain_no_loss(as_is, lost, lost_floats, judge.metric.name))
    singles = {unit: _value(judge.judge(model.choose(True, unit))) for unit in ranking.order[:CONFIRMED]}
    together: dict[int, Together] = {}

    def share_back(k: int) -> float:
        vector = model.choose(True, *ranking.order[:k])
        change, found = ranking.meter.measure(vector), judge.judge(vector) if by_metric else None
        together[k] = Together(k, _value(found) if by_metric else None, change)
        if not by_metric:
            return 1 - change / ranking.whole if ranking.whole else 1.0
        if math.isinf(lost):
            return float(found is not None)
        return 1 - (judge.lose(found) - lost_floats) / (lost - lost_floats)

    k = find_smallest(len(ranking.order), share_back, deadline)
    chosen = tuple(model.units[unit].name for unit in ranking.order[:k])
    rows = _make_rows(model, ranking, singles, times)
    return Blame(
        bundle=str(case.root),
        source=model.source,
        metric=judge.metric.name,
        baseline=None if floats.baseline is None else floats.baseline.value,
        candidate=_value(as_is),
        float_layers=floats.candidate.value,
        decided_by="metric" if by_metric else "outputs",
        change=ranking.whole,
        layers=rows,
        together=tuple(together[count] for count in sorted(together)),
        chosen=chosen,
        snippets=tuple(make_snippets(case.root, [row for row in rows if row.name in chosen], model.own_weights)),
        n_compared=len(ranking.meter.rows),
        n_judged=len(judge.rows),
        seconds=deadline.seconds_spent,
        notes=tuple(notes),
        unmatched=model.unmatched,
    )


def _value(evidence: Evidence | None) -> float | None:
    return None if evidence is None else evidence.candidate.value


def _is_beyond_noise(evidence: Evidence | None) -> bool:
    """Return whether the candidate is worse than the baseline by more than the interval of the difference."""
    if evidence is None:
        return True
    known = evidence.difference
    if known is None:
        return True
    return known.high < 0 if evidence.higher_is_better else known.low > 0


def _explain_no_loss(as_is: Evidence | None, lost: float, lost_floats: float, name: str) -> str:
    if _is_beyond_noise(as_is):
        return (
            f"{name}: {lost_floats:.4g} of the {lost:.4g} that are lost stay lost with every layer in float: look at "
            "the passes that do not round. Layers are chosen by the outputs' change"
        )
    return f"{name}: what is lost ({lost:.4g}) is within noise, so layers are chosen by the outputs' change"


def find_smallest(n: int, share_back: Callable[[int], float], deadline: Deadline) -> int:
    """Return the fewest layers, first of the ranking, that give back ENOUGH: by doubling, then by halves."""
    low, high = 0, 1
    while share_back(high) < ENOUGH and high < n:
        if deadline.seconds_left < 0:
            return high
        low, high = high, min(2 * high, n)
    while high - low > 1 and deadline.seconds_left > 0:
        middle = (low + high) // 2
        low, high = (low, middle) if share_back(middle) >= ENOUGH else (middle, high)
    return high


def _make_rows(
    model: SwitchedModel, ranking: Ranking, singles: Mapping[int, float | None], times: bool
) -> tuple[BlamedLayer, ...]:
    units = model.units
    total = sum(value for value in ranking.alone.values() if math.isfinite(value))
    shares, total_ms, floats = ({}, 0.0, {}) if not times else _time_both(model)
    rows = []
    for number in ranking.order:
        unit, alone = units[number], ranking.alone[number]
        share = alone / total if total and math.isfinite(alone) else float(not math.isfinite(alone))
        own_ms = shares.get(unit.name, 0.0) * total_ms
        timed = unit.name in shares
        rows.append(
            BlamedLayer(
                unit.name,
                unit.type,
                alone,
                share,
                ranking.back.get(number),
                unit.rounded_bytes / model.size_bytes,
                0 if model.own_weights else unit.float_bytes - unit.rounded_bytes,
                singles.get(number),
                shares.get(unit.name) if timed else None,
                floats[unit.name] - own_ms if timed and unit.name in floats else None,
            )
        )
    return tuple(rows)


def _time_both(model: SwitchedModel) -> tuple[dict[str, float], float, dict[str, float]]:
    """Return each layer's share of the candidate's time, that time, and each layer's ms in the bundle's float model."""
    case = model.case
    # samples whose runs the layers' milliseconds are read from
    rows = spread_rows(count(case.columns), 3)
    tensors = {unit.name: unit.tensors for unit in model.units if unit.type != "tensor"}
    path = inside(case.root, case.manifest.graph_for(CPU).path)
    shares, total_ms = time_layers(case, path, tensors, rows)
    baseline = next((a for a in case.manifest.artifacts if a.name == "baseline"), None)
    if baseline is None or not any(shares.values()):
        return shares, total_ms, {}
    float_shares, float_ms = time_layers(case, inside(case.root, baseline.path), tensors, rows)
    return shares, total_ms, {name: share * float_ms for name, share in float_shares.items() if share}


def make_snippets(root: Path, rows: Sequence[BlamedLayer], own_weights: bool = False) -> list[Snippet]:
    """Return what to write into the bundle's recipe for these layers; the recipe was read with each change.

    Layers go to float by `ignore` of the pass that rounded them; where that rounds weights alone to fewer than eight
    bits, eight bits are the other proposal.
    """
    recipe = load_recipe(root / "recipe.yaml")
    names = pass_names(recipe.passes)
    made_by = {row["layer"]: row.get("pass") for row in read_json(root / "layers.json") or [] if "layer" in row}
    snippets: list[Snippet] = []
    for index, (config, name) in enumerate(zip(recipe.passes, names, strict=True)):
        mine = [row for row in rows if made_by.get(row.name) == name]
        if not mine or not hasattr(config, "ignore"):
            continue
        layers = [row.name for row in mine]
        ignore = list(dict.fromkeys([*config.ignore, *layers]))
        cost = _describe_cost(mine, 1.0, own_weights)
        snippets.append(_write_snippet(root, index, config.kind, "back to float", {"ignore": ignore}, cost))
        bits = getattr(config, "bits", None)
        if hasattr(config, "overrides") and isinstance(bits, int) and bits < 8:
            known = [override.model_dump(mode="json", exclude_unset=True) for override in config.overrides]
            overrides = [*known, {"targets": layers, "bits": 8}]
            cost = _describe_cost(mine, (8 - bits) / (32 - bits), own_weights, timed=False)
            snippets.append(_write_snippet(root, index, config.kind, "in 8 bits", {"overrides": overrides}, cost))
    return snippets


def _describe_cost(rows: Sequence[BlamedLayer], part: float, own_weights: bool, timed: bool = True) -> str:
    """Describe what layers cost in float, or a `part` of that: bytes, and milliseconds where they were timed."""
    more = part * sum(row.more_bytes for row in rows)
    text = "sizes not known" if own_weights else f"{more / 1000:+,.0f} kB"
    ms = [row.more_ms for row in rows if row.more_ms is not None]
    return f"{text}, {sum(ms):+.3g} ms a sample (kernels' own time)" if ms and timed else text


def _write_snippet(root: Path, index: int, kind: str, about: str, change: Mapping[str, Any], cost: str) -> Snippet:
    overrides = tuple(f"passes.{index}.{key}={json.dumps(value)}" for key, value in change.items())
    load_recipe(root / "recipe.yaml", overrides)  # raises where the schema refuses it
    yaml, text = YAML(), StringIO()
    yaml.width = 110
    yaml.dump({"passes": [{"kind": kind, **change}]}, text)
    return Snippet(about, overrides, text.getvalue(), cost)


def render_blame(blame: Blame, console: Console, most: int = 12) -> None:
    """Print the ranking, what putting layers back gives, and the change of the recipe."""
    table = Table(Column("layer", overflow="fold"), *(Column(name, justify="right", no_wrap=True) for name in _COLUMNS))
    for row in blame.layers[:most]:
        table.add_row(escape(row.name), *_format_cells(row))
    console.print(table)
    console.print(escape(_LEGEND))
    if len(blame.layers) > most:
        console.print(f"and {len(blame.layers) - most} more, each with less; --json has all")
    for text in describe_blame(blame):
        console.print(escape(text))
    for snippet in blame.snippets:
        console.print(f"\n[bold]{escape(snippet.about)}[/] ({escape(snippet.cost)})")
        console.print(escape(snippet.text), end="")
        console.print(escape(" ".join(f"--set '{change}'" for change in snippet.overrides)), soft_wrap=True)


_COLUMNS = ("alone", "back", "metric", "time", "size")

_LEGEND = (
    "alone: share of the change of the outputs that each layer makes if it alone is rounded; back: share of the whole "
    "change that goes if it alone is put back to float, and the metric then; time, size: share of the candidate's"
)


def _format_cells(row: BlamedLayer) -> list[str]:
    cells = [f"{row.share:.1%}", _format(row.back, ".1%"), _format(row.metric, ".4f")]
    return [*cells, _format(row.time_share, ".1%"), f"{row.size_share:.1%}" if row.type != "tensor" else "-"]


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def describe_blame(blame: Blame) -> list[str]:
    """Return what was found, as sentences."""
    before = "" if blame.baseline is None else f"{blame.baseline:.4f} in the baseline, "
    texts = [
        f"{blame.metric}: {before}{_format(blame.candidate, '.4f')} in the candidate, {blame.float_layers:.4f} with "
        f"every layer in float (weights: {blame.source})"
    ]
    for step in blame.together:
        found = "" if step.metric is None else f"{blame.metric} {step.metric:.4f}, "
        texts.append(f"the first {step.n_layers} back to float: {found}change of the outputs {step.change:.2e}")
    if blame.chosen:
        what = f"{blame.metric}'s loss" if blame.decided_by == "metric" else "the outputs' change"
        n, of = len(blame.chosen), len(blame.layers)
        spread = ": it is spread, and no few layers are to blame" if n > max(of // 2, 1) else ""
        texts.append(f"{n} of {of} layers give back {ENOUGH:.0%} of {what}{spread}: {', '.join(blame.chosen)}")
    types = {row.name: row.type for row in blame.layers}
    if tensors := [name for name in blame.chosen if types[name] == "tensor"]:
        texts.append(f"tensors rounded between layers, which placement: inputs leaves in float: {', '.join(tensors)}")
    texts += [f"note: {note}" for note in blame.notes]
    for name, why in list(blame.unmatched.items())[:1]:
        texts.append(f"note: {len(blame.unmatched)} layers were not switched, such as {name}: {why}")
    return texts


def to_dict(blame: Blame) -> dict[str, Any]:
    """Return the result as JSON values."""
    return asdict(blame)
