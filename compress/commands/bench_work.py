"""What is measured for `compress bench`: a bundle in a few rounds, a twin, why a row is slow; the fastest in turns."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.export.onnx import float_graph
from compress.graph.files import write_graph
from compress.planning.inputs import read_inputs
from compress.planning.latency import make_call as make_feeds_of
from compress.planning.latency import make_twins
from compress.planning.timing import make_timer
from compress.recipe.load import load_recipe
from compress.rounding.state import GraphState
from compress.search import trying
from compress.search.trying import answer, time_stage
from compress.search.workers import TrialAnswer, TrialOrder
from compress.store.cache import default_root
from compress.store.progress import no_log
from compress.timing.clock import CONFIDENCE, PROCESSES
from runtime.bundle.records import from_json
from runtime.clock.compare import compare_files
from runtime.clock.turns import Call, make_call, time_in_turns
from runtime.errors import RuntimeFailure
from runtime.judge.bundle import assemble, prepare, quality, run_candidate
from runtime.judge.explain import explain_apart, explain_unprofiled
from runtime.judge.findings import Side
from runtime.judge.speed import speed_evidence
from runtime.measure.benchmark import measure, open_variant, pair
from runtime.measure.workload import make_feeds, settings_for
from runtime.report.report import Report, to_dict
from runtime.stats import process_interval
from runtime.tasks.predict import bundle_preprocessor, encoding_views

WORK = "compress.commands.bench_work:obey"
LATENCY_S, FINAL_S = 3.0, 6.0
"""Seconds of calls that time a row, and that time the fastest rows in the same rounds."""
MOST_CALLS = 200
FLOATS: dict[str, GraphState] = {}
"""Model -> its float graph, which all twins that this process makes begin with."""


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Do what an `TrialOrder` says and return the answer, both as JSON values. Failures are answers."""
    told = from_json(TrialOrder, order, "order")
    if told.do == "build":
        return trying.obey(order)
    work = {"judge": measure_bundle, "explain": find_cause, "twin": measure_twin}[told.do]
    return answer(lambda: work(told))


def measure_bundle(order: TrialOrder) -> TrialAnswer:
    """Return the report of a bundle without what takes long and no row shows: other backends, why it is slow."""
    stages: dict[str, float] = {}
    with time_stage(stages, "quality"):
        case = prepare(Path(order.out), None, None)
        evidence, failures = quality(case, run_candidate(case))
    with time_stage(stages, "timing"):
        timed = measure(case.root, case.manifest, case.columns, case.backend, case.threads)
    evidence |= speed_evidence(timed, case.manifest.judgement)
    report = assemble(case, timed, evidence, failures, (), list(failures.values())[:1])
    return TrialAnswer("done", report=to_dict(report), stages=stages)


def find_cause(order: TrialOrder) -> TrialAnswer:
    """Return the first reason for which a bundle's candidate is no faster; "" where no profile tells."""
    try:
        case = prepare(Path(order.out), None, None)
        if explain_unprofiled(case.manifest, case.backend) is not None:
            return TrialAnswer("done")
        causes = explain_apart(case.root, case.backend, case.threads).causes
    except RuntimeFailure:
        return TrialAnswer("done")  # the row stands without a reason
    return TrialAnswer("done", causes[0].seen.rstrip(".") if causes else "")


def measure_twin(order: TrialOrder) -> TrialAnswer:
    """Measure a graph made like the result, of which only speed and size count: nothing is calibrated."""
    recipe, cache = load_recipe(order.recipe), Path(order.cache) if order.cache else default_root()
    inputs = replace(read_inputs(recipe.model_copy(update={"passes": ()}), cache), recipe=recipe)
    feeds = make_feeds_of(inputs)
    timer = make_timer(recipe, cache, [feeds])
    before, after, missing = make_twins(inputs, timer, no_log, FLOATS.get(str(recipe.model)))
    FLOATS[str(recipe.model)] = before
    paths = [Path(order.out) / name / "model.onnx" for name in ("before", "after")]
    for path, graph in zip(paths, (float_graph(before.model), timer.write(after)), strict=True):
        path.parent.mkdir(parents=True)
        write_graph(graph, path)
    threads = recipe.validate_.benchmark.threads
    compared = compare_files(recipe.target, threads, paths, [feeds], PROCESSES, LATENCY_S, 0)
    ms, batch_size = float(np.median(compared.ms[:, 1])), len(next(iter(feeds.values())))
    speedup = process_interval(compared.ms[:, 0] / compared.ms[:, 1], CONFIDENCE)
    candidate = Side(
        latency_ms={"p50": ms},
        throughput_per_s=1000 * batch_size / ms,
        throughput_batch_size=batch_size,
        peak_memory_bytes=float(np.median(compared.peak_memory_bytes[1])),
        size_bytes=sum(file.stat().st_size for file in paths[1].parent.iterdir() if file.is_file()),
    )
    shutil.rmtree(order.out)  # no bundle: nothing of it is kept
    report = Report(
        "unjudged",
        recipe.name,
        recipe.target,
        Side(),
        candidate,
        ratios={"latency_p50": speedup.value},
        ratio_intervals={"latency_p50": (speedup.low, speedup.high)},
        advice=(f"not in its time: what {', '.join(missing)} changes",) if missing else (),
    )
    return TrialAnswer("done", report=to_dict(report))


def time_finalists(bundles: Sequence[tuple[Path, str]]) -> list[float]:
    """Return the p50 (ms) of several bundles' candidates, each on its backend, all timed in the same rounds."""
    with ExitStack() as stack:
        calls: list[Call] = []
        for folder, backend in bundles:
            case = prepare(folder, [backend], None)
            (settings, _), (_, variant) = settings_for(case.manifest, case.threads), pair(case.manifest, backend)
            session = open_variant(stack, folder, variant, settings.threads)
            encoder = bundle_preprocessor(folder, case.manifest, session.inputs)
            given = encoding_views(case.manifest.task, case.columns)[0]
            batches = make_feeds(
                encoder, given, settings.batch_size, 0, settings.sequence_length, streams=case.manifest.streams
            )
            calls.append(make_call(session, batches))
        return time_in_turns(calls, MOST_CALLS, budget_s=FINAL_S, one_thread=settings.threads == 1).typical_ms
