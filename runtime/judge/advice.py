"""What the numbers mean for the user: is it slower and why, can it be run faster, does the verdict rest on chance?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.bundle.onnx_file import GraphFacts
from runtime.clock.machine import say_busy
from runtime.judge.causes import FIXED_COST_MS
from runtime.judge.evidence import Evidence
from runtime.judge.why import Explanation
from runtime.metrics import Outputs
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS
from runtime.words import interval_words

VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Any of these x86 instruction sets makes int8 products fast."""
MOST_REASONS = 2
"""Said in the advice; the report's table has all."""
OTHERWISE = {
    "ttft": ("The first token comes", "ms"),
    "throughput": ("Many samples at once are", "samples a second"),
}
"""Metrics of speed beside `latency_p50`: what is slow by them, and their unit."""
AS_IT_WAS = ("float32", "as it was")
"""An artifact's precision where nothing was rounded."""
DISAGREEING = 1.1
"""The ratio of two medians over the median of the rounds' ratios (or the other way round) that needs a word."""
WORTHWHILE = 1.05
"""Speed-ups below this are not worth a sentence."""


@dataclass(frozen=True)
class Subject:
    """What is judged, and where."""

    backend: str
    target: str
    """What the bundle is made for."""
    environment: Mapping[str, Any]
    graph: GraphFacts
    speed_counts: bool = True
    """False where the target does not run here, so that `backend` stands in for it."""
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    """What each stage of a whole answer of the candidate takes (`runtime.measure.answering.STAGES`), where measured."""
    explanation: Explanation | None = None
    """What the profile of both models shows, where one was taken."""
    forecast: float | None = None
    """How many times as fast as the baseline the plan expected it to be."""
    narrow: bool = False
    """The weights of its int8 products are in 7 bits."""


def advise(
    evidence: Mapping[str, Evidence],
    subject: Subject,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    not_smaller: str,
) -> list[str]:
    """Return sentences for the user, the most important first; `not_smaller`: as `why` of `larger`."""
    size, noise = larger(evidence, not_smaller), noisy(evidence, subject.environment)
    if not subject.speed_counts:  # it is no fault of what is made for an engine that it is slow elsewhere
        return [*notes, *size, *explain_other_backend(evidence, subject), *noise]
    around = explain_time_around_call(subject)
    return [
        *slower(evidence, subject),
        *slower_otherwise(evidence),
        *size,
        *less_exact(subject),
        *notes,
        *faster_elsewhere(rows),
        *around,
        *noise,
    ]


def explain_other_backend(evidence: Mapping[str, Evidence], subject: Subject) -> list[str]:
    """Say what a time on a backend that the bundle is not made for is worth."""
    latency = evidence["latency_p50"]
    if latency.speedup is None or latency.baseline is None:
        return []
    return [
        f"Its times here ({latency.candidate.value:.3g} ms against {latency.baseline.value:.3g} ms) are those of "
        f"{subject.backend}: they say nothing about its speed on {subject.target}, which it is made for."
    ]


def slower(evidence: Mapping[str, Evidence], subject: Subject) -> list[str]:
    """Say where the candidate is not faster at `latency_p50`, or less so than was forecast, and why; else nothing."""
    latency = evidence["latency_p50"]
    speedup, before = latency.speedup, latency.baseline
    if speedup is None or before is None:
        return []
    times = f"{latency.candidate.value:.3g} ms against {before.value:.3g} ms on {subject.backend}"
    sure = f"interval {interval_words(speedup.low, speedup.high, '.2f', 'x')}"
    if speedup.low > 1:
        if not falls_short(evidence, subject.forecast):
            return []
        first = (
            f"The candidate is {speedup.value:.2f}x as fast ({sure}), less than the {subject.forecast:.2f}x that the "
        )
        return [f"{first}plan forecast: {times}.", *reasons(latency.candidate.value, subject)[:MOST_REASONS]]
    why = reasons(latency.candidate.value, subject)[:MOST_REASONS]
    if speedup.high >= 1:
        first = f"The candidate is not measurably faster than the baseline: {times}, {speedup.value:.2f}x ({sure})."
        return [first, *why]
    first = f"The candidate is SLOWER than the baseline: {times}, {speedup.value:.2f}x."
    return [first, *(why or ["No reason for it can be seen from here."])]


def slower_otherwise(evidence: Mapping[str, Evidence]) -> list[str]:
    """Say where the candidate is surely slower in what `latency_p50` does not show, be that faster; else nothing."""
    found = [(*words, evidence[name]) for name, words in OTHERWISE.items() if name in evidence]
    return [
        f"{what} SLOWER than with the baseline: {one.candidate.value:.4g} {unit} against {one.baseline.value:.4g} "
        f"{unit}, {one.speedup.value:.2f}x."
        for what, unit, one in found
        if one.baseline is not None and one.speedup is not None and one.speedup.high < 1
    ]


def falls_short(evidence: Mapping[str, Evidence], forecast: float | None) -> bool:
    """Return whether the candidate is surely less fast than was forecast; False without a forecast."""
    speedup = evidence["latency_p50"].speedup
    # less than four fifths of what was promised
    return forecast is not None and speedup is not None and speedup.high < 0.8 * forecast


def asks_why(evidence: Mapping[str, Evidence], forecast: float | None) -> bool:
    """Return whether the candidate's speed wants a profile: it is not measurably faster, or less so than forecast."""
    speedup = evidence["latency_p50"].speedup
    return speedup is not None and (speedup.low <= 1 or falls_short(evidence, forecast))


def explain_time_around_call(subject: Subject) -> list[str]:
    """Say where most of an answer's time is not the model's, so that a faster model gains little; else nothing."""
    whole, call = sum(subject.stages_ms.values()), subject.stages_ms.get("call", 0.0)
    if not whole or call > whole / 2 or whole < FIXED_COST_MS:
        return []
    longest = max((stage for stage in subject.stages_ms if stage != "call"), key=lambda s: subject.stages_ms[s])
    return [
        f"The model's call is {100 * call / whole:.0f} % of the {whole:.3g} ms that an answer takes, {longest} is "
        f"{100 * subject.stages_ms[longest] / whole:.0f} %: even a model that takes no time would make an answer only "
        f"{whole / (whole - call):.2f}x faster."
    ]


def larger(evidence: Mapping[str, Evidence], why: str) -> list[str]:
    """Say where the candidate's files are not smaller, and why (`reason_not_smaller`'s words); else nothing."""
    size = evidence["size"]
    if size.baseline is None or size.candidate.value < size.baseline.value:
        return []
    return [
        f"The candidate is NOT SMALLER than the baseline: {size.candidate.value:.0f} bytes against "
        f"{size.baseline.value:.0f}. {_make_sentence(why)}"
    ]


def reason_not_smaller(precision: str, layers: Sequence[Mapping[str, Any]]) -> str:
    """Return why the files of a candidate with weights in `precision` can be no smaller; `layers`: its layers.json."""
    if precision not in AS_IT_WAS:
        return "the weights are too few for what their scales and operators add"
    histories = [[str(row.get("action", "")), *map(str, row.get("history", []))] for row in layers]
    if any(action == "sparse" or ": sparse " in f"{action} " for history in histories for action in history):
        return (
            "zeros are stored as any other number, in ONNX files and float checkpoints alike: what makes the files "
            "smaller is fewer bits (int8) or fewer channels (prune_channels)"
        )
    return "no pass left fewer weights, or stored them in fewer bits"


def less_exact(subject: Subject) -> list[str]:
    """Say where this CPU computes int8 products less exactly than most do; else nothing.

    Measured on an emulated CPU: outputs of two int8 models that are 43 and 46 dB above their difference from the float
    models' with VNNI are 31 and 30 dB above it without.
    """
    rounded = subject.backend == "onnxruntime-cpu" and subject.graph.activations.get("uint8")
    if not rounded or subject.narrow or not _lacks_vnni(subject):
        return []
    return [
        "This CPU has no VNNI or AMX: onnxruntime adds pairs of int8 products in 16 bits here, which may saturate, "
        "so that outputs are less exact than on a CPU that has one of them. The quality measured here is that of CPUs "
        "like this one; int8 with `weight_bits: 7` never saturates."
    ]


def _lacks_vnni(subject: Subject) -> bool:
    flags = subject.environment.get("cpu_flags", [])
    return "avx2" in flags and not any(flag in flags for flag in VNNI)


def reasons(latency_ms: float, subject: Subject) -> list[str]:
    """Return what makes the candidate slow: causes that its profile shows, and that a call is too short to gain."""
    causes = [cause.sentence for cause in subject.explanation.causes] if subject.explanation is not None else []
    if not causes and latency_ms < FIXED_COST_MS:
        return ["A call is so short that its fixed cost dominates: compare throughput at a larger batch."]
    return causes


def faster_elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where another way to run it beats the candidate on its own backend; `rows` are `alternatives.compare`'s."""
    timed = [row for row in rows if "latency_ms" in row]
    if len(timed) < 3 or timed[1] is not rows[1]:
        return []
    ours, best = timed[1], max(timed, key=lambda row: float(row["speedup"]))
    sentences = []
    for row in timed:
        if (
            row["artifact"] == "baseline"
            and row["precision"] == "bf16"
            and row["speedup"] > WORTHWHILE * max(ours["speedup"], rows[0]["speedup"])
        ):
            sentences.append(
                f"{row['name']} runs the float model in bf16 {row['speedup']:.2f}x as fast as {rows[0]['name']} runs it"
                f" in {rows[0]['precision']}, faster than the {ours['precision']} candidate"
                f" ({ours['speedup']:.2f}x on {ours['name']}): consider it before quantization{_format_closeness(row)}."
            )
    if best is not ours and best["artifact"] != "baseline" and best["speedup"] > WORTHWHILE * ours["speedup"]:
        sentences.append(
            f"{best['name']} is the fastest way to run the candidate here: {best['speedup']:.2f}x,"
            f" against {ours['speedup']:.2f}x on {ours['name']}{_format_closeness(best)}."
        )
    return sentences


def _format_closeness(row: Mapping[str, Any]) -> str:
    fidelity = row.get("fidelity", {})
    parts = [f"{name} {value:.4f}" for name, value in fidelity.items() if name != "n_samples"]
    return f" (to the baseline on {fidelity['n_samples']} samples: {', '.join(parts)})" if parts else ""


def noisy(evidence: Mapping[str, Evidence], environment: Mapping[str, Any]) -> list[str]:
    """Warn where the machine had other work, or p99 is far above p50: then no latency here is worth much."""
    sentences = list(filter(None, [say_busy(environment)]))
    p50, p99 = evidence["latency_p50"], evidence["latency_p99"]
    sides = [(p50.candidate, p99.candidate), *([(p50.baseline, p99.baseline)] if p50.baseline and p99.baseline else [])]
    spread = max(late.value / usual.value for usual, late in sides)
    if spread >= 3.0:  # p99 over p50 of a busy machine
        sentences.append(
            f"Timings varied much (p99 is {spread:.1f}x p50): other work, or inputs of very different sizes."
        )
    return sentences + disagreeing(evidence)


def disagreeing(evidence: Mapping[str, Evidence]) -> list[str]:
    """Say why a ratio is not that of the two times beside it, where it is not."""
    sentences = []
    for name in ("latency_p50", "throughput"):
        timing = evidence.get(name)
        if timing is None or timing.baseline is None or timing.speedup is None:
            continue
        better, worse = timing.candidate.value, timing.baseline.value
        medians = better / worse if timing.higher_is_better else worse / better
        if max(medians, timing.speedup.value) > DISAGREEING * min(medians, timing.speedup.value):
            sentences.append(
                f"{name}: the machine's speed changed during the run: {timing.speedup.value:.2f}x is from calls timed "
                f"side by side, and counts, not the {medians:.2f}x of the two times in the table."
            )
    return sentences


def _make_sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def find_doubts(
    task: str, candidate: Outputs, baseline: Outputs, labels: Any | None, evidence: Mapping[str, Evidence]
) -> list[str]:
    """Return sentences on models that are no better than chance, or give one answer to samples of several labels."""
    classes = None if labels is None else find_task(task).find_classes(labels)
    doubts = []
    for name, known in evidence.items():
        chance, answer = _find_chance(name, classes)
        before = known.baseline
        if chance is not None and before is not None and math.isfinite(before.low) and before.low <= chance:
            doubts.append(
                f"The float model's {name} is {before.value:.3g}, not surely above {chance:.3g}, {answer}: "
                "a change from it says little. Look at its classes' order (model.class_names), preprocess and labels."
            )
    alike = classes is not None and len(np.unique(classes)) == 1
    for which, outputs in (("float model", baseline), ("candidate", candidate)):
        if not alike and gives_one_answer(task, outputs):
            n = len(next(iter(outputs.values())))
            doubts.append(f"The {which} gives the same answer to all {n} samples: no gate on nearness says anything.")
    return doubts


def _find_chance(name: str, classes: np.ndarray | None) -> tuple[float | None, str]:
    """Return the value of a metric that needs no model, and what reaches it; None where that is not known."""
    if name == "top1" and classes is not None:
        return float(np.unique(classes, return_counts=True)[1].max() / len(classes)), "always the commonest class"
    if name == "r2":
        return 0.0, "always the mean"
    if name in METRICS and METRICS[name].unit == "correlation":
        return 0.0, "chance"
    return None, ""


def gives_one_answer(task: str, outputs: Outputs) -> bool:
    """Return whether several samples all get the same class or, where none is chosen, the same outputs."""
    answers = dict(outputs)
    if find_task(task).outputs == "classes" and outputs["logits"].shape[1] > 1:
        answers = {"class": outputs["logits"].argmax(axis=1)}
    return all(len(rows) > 1 and all(np.array_equal(row, rows[0]) for row in rows[1:]) for rows in answers.values())
