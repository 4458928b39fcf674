"""Judge a bundle on this machine: is it intact, good enough, fast enough? `runtime.report.validate` writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtime.backends import find_backend
from runtime.backends.base import Session
from runtime.bundle.columns import Array, Columns
from runtime.bundle.engine import COMPILED
from runtime.bundle.format import (
    Manifest,
    inside,
    read_candidate_outputs,
    read_layers,
    read_outputs,
    read_recorded,
    read_samples,
    read_slices,
)
from runtime.bundle.onnx_file import graph_facts
from runtime.clock.machine import count_cores, environment
from runtime.decode.scoring import split_sides
from runtime.errors import BundleError, RuntimeFailure
from runtime.judge.advice import Subject, advise, asks_why, find_doubts, larger, reason_not_smaller
from runtime.judge.alternatives import Way, add_latencies, available_others, find_ways, list_other_files, only_main
from runtime.judge.changes import Changes, count_confusions, find_changes
from runtime.judge.copies import describe_copies, find_draws
from runtime.judge.evidence import Evidence, quality_evidence, select_metrics
from runtime.judge.explain import explain_apart, explain_unprofiled
from runtime.judge.findings import Case, Findings, differences, ratio_intervals, ratios, side, tabulate_slices
from runtime.judge.frozen import check_metrics, check_outputs, note_unrecorded
from runtime.judge.gates import Verdict, check_gates, judge, overall
from runtime.judge.passes import PassModel, make_pass_table, read_pass_table
from runtime.judge.recorded import recorded_evidence
from runtime.judge.samples import describe_evaluation
from runtime.judge.slices import find_groups
from runtime.judge.speed import size_evidence, speed_evidence
from runtime.judge.why import Explanation
from runtime.measure.answering import STAGES
from runtime.measure.benchmark import BenchmarkResult, Beside, backend_of, list_variants, measure, open_variant, pair
from runtime.measure.workload import UNUSED, settings_for
from runtime.metrics import MEASURED, SIZES, NonFiniteOutputs, Outputs, check_finite
from runtime.progress import Progress, no_progress
from runtime.tasks import find_task
from runtime.tasks.manifest import verify
from runtime.tasks.metrics import METRICS, is_own
from runtime.tasks.predict import bundle_preprocessor, facts_of, run_samples


def judge_model(
    case: Case,
    passes: Sequence[PassModel] = (),
    forecast: float | None = None,
    progress: Progress = no_progress,
) -> tuple[Findings, Mapping[str, Evidence]]:
    """Judge a candidate that is run and timed here, and return the report and what is known of each metric."""
    candidate = case.outputs or run_candidate(case, progress)
    evidence, failures = quality(case, candidate)
    if case.backend in COMPILED:  # what a pass left is an ONNX file
        passes = [replace(model, path=None) for model in passes]
    between = [Beside(model.path, case.backend, {}, model.cache) for model in passes if model.path is not None]
    ways = other_ways(case)
    beside = [*between, *(way for _, way in ways if way is not None)]
    timed = measure(case.root, case.manifest, case.columns, case.backend, case.threads, beside, progress)
    evidence |= speed_evidence(timed, case.manifest.judgement)
    rows = only_main(case.manifest, case.backend, timed)
    if ways:
        speedup = evidence[find_task(case.manifest.task).latency].speedup
        assert speedup is not None
        rows = add_latencies(ways, timed, len(between), speedup.value)
    graph = graph_facts(inside(case.root, case.manifest.graph_for(case.backend).path))
    stages = {} if timed.answers is None else dict(zip(STAGES, find_median_ms(timed.answers[:, 1]), strict=True))
    explanation, trouble = explain_slow(case, evidence, forecast)
    subject = Subject(
        backend=case.backend,
        target=case.manifest.target,
        environment=timed.environment,
        graph=graph,
        speed_counts=not case.elsewhere,
        explanation=explanation,
        forecast=forecast,
        stages_ms=stages,
        narrow=any(str(row.get("reason", "")).startswith("W7A8") for row in case.layers),
    )
    doubts = [] if failures else find_doubts(case.manifest.task, candidate, case.baseline, case.labels, evidence)
    advice = [*list(failures.values())[:1], *doubts, *advise(evidence, subject, rows, case.notes, not_smaller(case))]
    report = assemble(case, timed, evidence, failures, rows, [*advice, *trouble])
    report = replace(report, explanation=explanation)
    if not failures:
        names = case.manifest.class_names
        confusion = count_confusions(case.manifest.task, candidate, case.baseline, case.labels, names)
        report = replace(report, confusion=confusion, changes=_changes(case, candidate))
    if passes:
        report = replace(report, steps=make_pass_table(case, passes, candidate, timed, report))
    return report, evidence


def explain_slow(
    case: Case, evidence: Mapping[str, Evidence], forecast: float | None
) -> tuple[Explanation | None, list[str]]:
    """Explain a candidate that is no faster, or less than was forecast, on what it is made for or was asked for.

    None for others, and where there is no profile; a profile that fails is said in a sentence, and no more.
    """
    if case.elsewhere or case.alone or not asks_why(evidence, forecast):
        return None, []
    if (reason := explain_unprofiled(case.manifest, case.backend)) is not None:
        return None, [f"Why it is no faster is not known: {reason}."]
    try:
        return explain_apart(case.root, case.backend, case.threads), []
    except (RuntimeFailure, MemoryError) as error:
        return None, [f"Why it is no faster is not known: its profile failed: {error}"]


def judge_scored(case: Case, passes: Sequence[PassModel] = ()) -> tuple[Findings, Mapping[str, Evidence]]:
    """Judge a candidate that another engine runs, as `judge_model`; its quality is the build's, no speed is known."""
    candidate = run_candidate(case)
    evidence, broken = quality(case, candidate)
    sizes = {artifact.name: artifact.size_bytes for artifact in case.manifest.artifacts}
    evidence |= size_evidence(
        sizes.get("baseline", case.manifest.source_bytes), case.manifest.candidate_for(case.backend).size_bytes
    )
    not_run = f"it was not measured: {_explain_not_run(case.manifest, case.backend)}"
    failures = {**{name: not_run for name in MEASURED if name not in evidence}, **broken}
    doubts = [] if broken else find_doubts(case.manifest.task, candidate, case.baseline, case.labels, evidence)
    advice = [*list(broken.values())[:1], *doubts, *larger(evidence, not_smaller(case)), *case.notes]
    report = assemble(case, None, evidence, failures, (), advice, broken=bool(broken))
    if not broken:
        report = replace(report, changes=_changes(case, candidate))
    if passes:
        report = replace(report, steps=make_pass_table(case, passes, candidate, None, report))
    return report, evidence


def judge_size(case: Case) -> tuple[Findings, Mapping[str, Evidence]]:
    """Judge a candidate that came without samples, as nothing could run its model: its size is all that is known."""
    manifest = case.manifest
    evidence = size_evidence(manifest.source_bytes, manifest.candidate_for(case.backend).size_bytes)
    failures = dict.fromkeys((*METRICS, *MEASURED), "the bundle has no samples: nothing ran the model that it holds")
    failures = {name: why for name, why in failures.items() if name not in evidence}
    advice = [*larger(evidence, not_smaller(case)), *case.notes]
    report = assemble(case, None, evidence, failures, (), advice, broken=False)
    verdict: Verdict | Literal["unjudged"] = "unjudged" if report.verdict == "pass" else report.verdict
    return replace(report, verdict=verdict, backend="", scored_by=""), evidence


def _changes(case: Case, candidate: Outputs) -> Changes | None:
    return find_changes(case.manifest.task, candidate, case.baseline, case.labels, case.manifest.class_names)


def not_smaller(case: Case) -> str:
    """Return why the candidate's files can be no smaller than the baseline's."""
    return reason_not_smaller(case.manifest.candidate_for(case.backend).precision, case.layers)


_NOT_COMPARED = "the bundle holds no float model to be timed beside the candidate: it was too large when it was built"
_CHECKPOINT = "the candidate is a checkpoint for {}, which is not run here"
_GRAPH = "the candidate is a graph for {0}, and nothing but {0} computes with its numbers"


def _explain_not_run(manifest: Manifest, backend: str) -> str:
    candidate = manifest.candidate_for(backend)
    return (_CHECKPOINT if candidate.is_checkpoint else _GRAPH).format(candidate.target)


def prepare(root: Path, backends: Sequence[str] | None, threads: int | None) -> Case:
    """Read the bundle and refuse what cannot be judged, before any model runs; errors as `validate` says."""
    manifest = verify(root)
    if manifest.evaluation is None and manifest.artifact("candidate").is_checkpoint and not backends:
        check_gates(manifest.judgement, manifest.task, has_labels=False)
        layers = read_layers(root, manifest)
        return Case(root, manifest, {}, {}, layers, (), manifest.target, (), threads, _list_said(layers))
    columns, baseline, layers = read_samples(root, manifest), read_outputs(root, manifest), read_layers(root, manifest)
    find_task(manifest.task).check_frozen(f"{root}: the baseline's outputs", baseline)
    labels = columns.get("label")
    check_gates(manifest.judgement, manifest.task, labels is not None, manifest.postprocess)
    recorded = read_recorded(root, manifest)
    groups = find_groups(manifest.judgement, read_slices(root, manifest), labels, manifest.task, manifest.class_names)
    _, batch_note = settings_for(manifest, threads)
    main, backend_note = backend_of(manifest, backends[0] if backends else None)
    others = [backend_of(manifest, name)[0] for name in (backends or [])[1:]]
    if not backends:
        others = available_others(manifest, main)
    if manifest.is_scored(main):
        why = _explain_not_run(manifest, main)
        backend_note = f"Quality was measured by {_name_scorer(manifest)} at the build: {why}."
        others = []
    elif manifest.alone:
        batch_note = " ".join(filter(None, (batch_note, _describe_alone(manifest))))
    else:
        pair(manifest, main)
    try:
        metrics = select_metrics(manifest.task, baseline, labels, manifest.judgement)
    except NonFiniteOutputs as error:
        raise BundleError(f"{root}: the baseline cannot be compared with: {error}") from error
    draws = find_draws(columns)
    found = (
        backend_note,
        batch_note,
        _note_uncounted(manifest.task, baseline),
        note_unrecorded(manifest),
        describe_copies(draws),
    )
    notes = [*_list_said(layers), *(note for note in found if note)]
    elsewhere = "" if backends or main == manifest.target else f"not judged here: {_ELSEWHERE.format(manifest.target)}"
    return Case(
        root,
        manifest,
        columns,
        baseline,
        layers,
        metrics,
        main,
        others,
        threads,
        notes,
        elsewhere,
        groups,
        recorded,
        draws,
    )


def _list_said(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the build had to say beyond single layers."""
    return [str(row["reason"]) for row in layers if row.get("type") == "note" and "reason" in row]


def _note_uncounted(task: str, baseline: Outputs) -> str | None:
    """Return which metrics are of a part of the samples alone, because the others have no tokens to score; or None."""
    if "n_tokens" not in baseline or baseline["n_tokens"].all():
        return None
    outputs, n_tokens = find_task(task).outputs, baseline["n_tokens"]
    names = [name for name, metric in METRICS.items() if metric.shape == "tokens" and metric.suits(outputs)]
    return (
        f"{', '.join(names)} are of {np.count_nonzero(n_tokens)} of {len(n_tokens)} samples: the others are read in "
        "several parts, and which words of a reference are of which part is not known."
    )


_ELSEWHERE = "the bundle is for {}, which does not run on this machine; judge it there: compress-run validate DIR"
"""Where the candidate is judged on another backend than its own, and nobody asked for that one."""


def quality(case: Case, candidate: Outputs) -> tuple[dict[str, Evidence], dict[str, str]]:
    """Return evidence of the quality metrics or, where the candidate's outputs are broken, why there is none.

    BundleError where the baseline's metrics are not those that the build recorded.
    """
    check_metrics(case.root, case.manifest, case.baseline, case.labels)
    try:
        check_finite(candidate)
        judgement = case.manifest.judgement
        evidence = quality_evidence(
            case.metrics, candidate, case.baseline, case.labels, judgement, case.groups, case.draws
        )
        return evidence | recorded_evidence(case.manifest, case.recorded, case.groups, case.draws), {}
    except NonFiniteOutputs as error:
        named = (gate.metric for gate in case.manifest.judgement.gates if is_own(gate.metric))
        return {}, dict.fromkeys((*METRICS, *named), f"The candidate's outputs are broken: {error}.")


def run_candidate(case: Case, progress: Progress = no_progress) -> Outputs:
    """Return the candidate's outputs over the frozen samples.

    The baseline runs, too: BundleError where its outputs are not the frozen ones. A decoder's is run beside it.
    """
    manifest = case.manifest
    if case.is_scored:
        outputs = read_candidate_outputs(case.root, manifest)
        find_task(manifest.task).check_frozen(f"{case.root}: the candidate's outputs", outputs)
        return outputs
    if manifest.generates and not case.alone:
        again, beside = run_beside(case.root, manifest, case.columns, case.backend, case.threads, progress)
        check_outputs(case.root, manifest.task, again, case.baseline)
        # Nats per token: rounding on another machine or in torch.
        check_sums(case.root, "baseline", 1e-3, again["nll"], again["n_tokens"], case.baseline)
        return beside
    with ExitStack() as stack:
        threads = case.threads or manifest.judgement.benchmark.threads
        *before, after = list_variants(manifest, case.backend)
        session = open_variant(stack, case.root, after, threads)
        if case.alone:
            return run_candidate_alone(case.root, manifest, case.columns, session)
        # OpenVINO computes float in bfloat16 where the processor can: 1.2 times the distance of two rows, of a detector
        exact = find_backend(case.backend).exact if _has_record(manifest) else {}
        reference = open_variant(stack, case.root, replace(before[0], options=exact), threads)
        check_outputs(case.root, manifest.task, _run(case.root, manifest, case.columns, reference), case.baseline)
        return _run(case.root, manifest, case.columns, session)


def run_beside(
    root: Path,
    manifest: Manifest,
    columns: Columns,
    backend: str,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> tuple[Outputs, Outputs]:
    """Run a decoder beside its float model; return the sums of both over the samples, the float model's first.

    `threads`: not given, all cores, however many the benchmark times: it is the sums that are asked for.
    """
    before, after = pair(manifest, backend)
    with ExitStack() as stack:
        # The larger one first: its largest weight is held twice while it is opened.
        reference, session = (
            open_variant(stack, root, variant, threads or count_cores())
            for variant in (replace(before, options=find_backend(backend).exact), after)
        )
        return split_sides(_run(root, manifest, columns, session, reference, progress))


def _run(
    root: Path,
    manifest: Manifest,
    columns: Columns,
    model: Session,
    beside: Session | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Return a model's outputs over the samples; a decoder's sums, with those of one beside it where there is one."""
    preprocessor = bundle_preprocessor(root, manifest, model.inputs)
    size, facts = manifest.judgement.batch_size, facts_of(manifest)
    return run_samples(model, preprocessor, manifest.task, columns, size, beside, facts, progress)


def _has_record(manifest: Manifest) -> bool:
    """Return whether the build is one that recorded the baseline's metrics, of its exact outputs."""
    return manifest.evaluation is not None and manifest.evaluation.baseline_metrics is not None


def run_candidate_alone(root: Path, manifest: Manifest, columns: Columns, session: Session) -> Outputs:
    """Return a decoder's sums over the frozen samples, run here; those beside the baseline are torch's, of the build.

    Raises BundleError where the two do not speak of the same model.
    """
    outputs = _run(root, manifest, columns, session)
    frozen = read_candidate_outputs(root, manifest)
    # torch computed the candidate's sums from its weights alone: kernels round inputs, too
    check_sums(root, "candidate", 2e-2, outputs["nll"], outputs["n_tokens"], frozen)
    return {**frozen, **outputs}


def _describe_alone(manifest: Manifest) -> str:
    scorer = f"{_name_scorer(manifest)} at the build"
    return (
        "The bundle holds no float model, so the candidate ran alone: nll and perplexity are measured here, against "
        f"those of the baseline by {scorer}; kl_token and token_agreement are {scorer}, of both; no speed is compared."
    )


def check_sums(root: Path, which: str, tolerance: float, nll: Any, n_tokens: Any, frozen: Outputs) -> None:
    """Raise BundleError where a model, run again, scores other tokens than its frozen sums or differs by much."""
    if not np.array_equal(n_tokens, frozen["n_tokens"]):
        raise BundleError(
            f"{root}: {n_tokens.sum()} tokens are scored, the frozen sums are of {frozen['n_tokens'].sum()}"
        )
    if not n_tokens.sum():  # samples in several parts, all of them: the texts alone are judged
        return
    here, then = float(nll.sum() / n_tokens.sum()), float(frozen["nll"].sum() / n_tokens.sum())
    if not abs(here - then) <= tolerance:
        raise BundleError(
            f"{root}: the {which} has {here:.6f} nats per token here, its frozen outputs say {then:.6f}: it is not "
            "the model that they were made with, or this machine computes otherwise"
        )


def other_ways(case: Case) -> list[Way]:
    """Return every way to run the bundle beside the judged one; none where there is one alone."""
    several = case.others or list_other_files(case.manifest, case.backend)
    if case.alone or (not several and (case.backend != "openvino" or case.manifest.generates)):
        return []
    return find_ways(case.root, case.manifest, case.columns, case.baseline, case.backend, case.others, case.threads)


def assemble(
    case: Case,
    timed: BenchmarkResult | None,
    evidence: Mapping[str, Evidence],
    failures: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    advice: Sequence[str],
    broken: bool | None = None,
) -> Findings:
    """Make the report of what is known.

    A candidate with broken outputs (default: any failure) fails even without a gate.
    """
    manifest = case.manifest
    unknown = unknown_here(case)
    if case.alone:
        unknown |= {f"{name} {rule}": _NOT_COMPARED for name in MEASURED for rule in ("min_speedup", "max_drop")}
        for name in SIZES:
            unknown.pop(f"{name} max_drop", None)
    if timed is not None and isinstance(timed.energy, str):
        unknown.setdefault("energy", timed.energy)
    gates = judge(manifest.judgement, evidence, failures, unknown)
    return Findings(
        verdict="fail" if (bool(failures) if broken is None else broken) else overall(gates),
        gates=gates,
        backends=tuple(rows),
        advice=tuple(advice),
        layers=tuple(case.layers),
        steps=read_pass_table(case.root, manifest),
        n_samples=manifest.evaluation.n_samples if manifest.evaluation else 0,
        evaluation=describe_evaluation(manifest),
        **_collect_common_fields(manifest, timed, evidence, case.backend),
        scored_by=_name_scorer(manifest) if case.is_scored else "",
    )


def unknown_here(case: Case) -> dict[str, str]:
    """Return, by metric, why its gates cannot be decided: speed on another backend, quality scored otherwise."""
    unknown = dict.fromkeys((name for name in MEASURED if name not in SIZES), case.elsewhere) if case.elsewhere else {}
    gaps = case.manifest.score.gaps if case.manifest.score is not None else ()
    if case.is_scored and gaps:
        own = (record.name for record in case.manifest.recorded)
        unknown |= dict.fromkeys((*METRICS, *own), f"its engine computes otherwise than was scored: {'; '.join(gaps)}")
    return unknown


def _name_scorer(manifest: Manifest) -> str:
    return manifest.score.by if manifest.score is not None else "torch"


def report_unjudged(manifest: Manifest, timed: BenchmarkResult) -> Findings:
    """Return a benchmark alone in a report's form."""
    evidence = speed_evidence(timed, manifest.judgement)
    return Findings(verdict="unjudged", **_collect_common_fields(manifest, timed, evidence, timed.backend))


def _collect_common_fields(
    manifest: Manifest,
    timed: BenchmarkResult | None,
    evidence: Mapping[str, Evidence],
    backend: str,
) -> dict[str, Any]:
    batch_size = timed.settings.throughput_batch_size if timed else None
    return {
        "bundle": manifest.name,
        "target": manifest.target,
        "backend": backend if timed else "torch",
        "task": manifest.task,
        "manifest_digest": manifest.digest,
        "confidence": manifest.judgement.confidence,
        "baseline": side(evidence, "baseline", batch_size),
        "candidate": side(evidence, "candidate", batch_size),
        "ratios": ratios(evidence),
        "ratio_intervals": ratio_intervals(evidence),
        "differences": differences(evidence),
        "slices": tabulate_slices(evidence),
        "distributions": describe_times(timed) if timed else {},
        "recorded": tuple(name for name, known in evidence.items() if known.recorded),
        "environment": timed.environment if timed else _describe_machine(),
        "benchmark": _describe_benchmark(manifest, timed) if timed else {},
    }


def _describe_machine() -> dict[str, Any]:
    """Describe the machine on which frozen outputs were judged, and nothing was run or timed."""
    machine = environment(threads=1)
    return {name: machine[name] for name in ("cpu", "os", "python")}


def _describe_benchmark(manifest: Manifest, timed: BenchmarkResult) -> dict[str, Any]:
    """Return the settings that fit such a model, the processes that timed, what others took, and a GPU's own clock."""
    unused = UNUSED[find_task(manifest.task).unit]
    settings = {name: value for name, value in asdict(timed.settings).items() if name not in unused}
    record = {**settings, "processes": timed.n_processes, "taken": timed.taken, "set_apart": timed.set_apart}
    if timed.requests is not None and timed.requests.timed_tokens < timed.settings.new_tokens:
        record["timed_tokens"] = timed.requests.timed_tokens
    if timed.device is not None:
        before, after = (1000 * float(np.median(timed.device[:, m])) for m in range(2))
        record["device_p50_ms"] = {"baseline": before, "candidate": after}
    if timed.answers is not None:
        record["stages_p50_ms"] = {
            which: dict(zip(STAGES, find_median_ms(timed.answers[:, m]), strict=True))
            for m, which in enumerate(("baseline", "candidate"))
        }
    if isinstance(timed.energy, str):
        record["energy"] = f"not measured: {timed.energy}"
    return record


QUANTILES = np.linspace(0, 100, 101)
"""Of all times, in percent: what a report keeps of them."""


def describe_times(timed: BenchmarkResult) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return the quantiles of every kind of time that was taken, ms to four digits; see `Findings.distributions`."""
    if timed.requests is not None:
        seconds = {"ttft": timed.requests.first, "itl": timed.requests.steps}
    else:
        assert timed.calls is not None
        seconds = {"latency": timed.calls}
    if timed.answers is not None:
        seconds["end_to_end"] = timed.answers.sum(axis=3)
    return {
        name: {
            which: tuple(float(f"{ms:.4g}") for ms in 1000 * np.percentile(times[:, m], QUANTILES))
            for m, which in enumerate(("baseline", "candidate")[-times.shape[1] :])
            if times.size
        }
        for name, times in seconds.items()  # [processes, models, ...]
    }


def find_median_ms(seconds: Array) -> list[float]:
    """Return the median of each stage of seconds [processes, rounds, stages], in ms."""
    return [1000 * float(median) for median in np.median(seconds, axis=(0, 1))]
