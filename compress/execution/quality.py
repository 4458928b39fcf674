"""Hold a graph against the quality gates while passes still run, and score models that no file is written of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.block import BlockWork
from compress.blocks.engine_arithmetic import compute_as_engine
from compress.blocks.stream import Stream, open_last_block
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.context import Feeds, PassContext
from compress.execution.own_metrics import load_own_metrics
from compress.planning.cache_keys import quality_gates
from compress.planning.inputs import Inputs
from compress.planning.own_metrics import find_own_metrics
from compress.store.durable import temporary_folder
from runtime.backends import find_backend, open_model
from runtime.backends.base import STATES, write_states
from runtime.bundle.format import Judgement
from runtime.bundle.tensors import TensorSpec
from runtime.decode.scoring import TokenNumbers, measure_tokens, split_sides, sum_tokens
from runtime.encode.preprocess import make_preprocessor
from runtime.judge.copies import find_draws
from runtime.judge.evidence import quality_evidence, select_metrics
from runtime.judge.gates import GateResult, judge
from runtime.judge.slices import find_groups
from runtime.measure.benchmark import graph_backend
from runtime.metrics import NonFiniteOutputs, Outputs, check_finite
from runtime.metrics.language import NLL
from runtime.tasks.base import BatchFacts
from runtime.tasks.predict import run_samples

Columns = dict[str, np.ndarray]


def run_graph(
    path: Path,
    inputs: Inputs,
    specs: tuple[TensorSpec, ...],
    columns: Mapping[str, Any],
    beside: Path | None = None,
    exact: bool = False,
) -> dict[str, np.ndarray]:
    """Return the outputs of a model file over samples, from the backend that will judge the bundle.

    `beside`: of a language model, the file of the float one, which its tokens are compared with. `exact`: compute what
    is float32 in float32, as `beside` always is.
    """
    recipe = inputs.recipe
    name = graph_backend(recipe)  # the plan says where it is not the target
    with ExitStack() as stack:
        sessions = []
        backend, threads = find_backend(name), recipe.validate_.benchmark.threads
        states = {STATES: write_states(inputs.facts.states)} if inputs.facts.states else {}
        for file, options in ((path, backend.exact if exact else {}), (beside, backend.exact)):
            if file is not None:
                sessions.append(open_model(backend, file, threads, {**options, **states}))
                stack.callback(sessions[-1].close)
        preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
        facts = BatchFacts(
            class_names=inputs.class_names, detections=inputs.facts.detections, postprocess=recipe.postprocess
        )
        size, beside_session = recipe.validate_.batch_size, sessions[1] if beside is not None else None
        return run_samples(sessions[0], preprocessor, recipe.model.task, columns, size, beside_session, facts)


RunGraph = Callable[[ir.Model], dict[str, np.ndarray]]


def graph_runner(
    inputs: Inputs,
    specs: tuple[TensorSpec, ...],
    columns: Mapping[str, Any],
    save: Callable[[ir.Model, Path], None],
) -> RunGraph:
    """Return a function: graph -> its outputs over the samples. Those of the last graph are kept, and given again."""
    last: list[tuple[ir.Model, dict[str, np.ndarray]]] = []

    def run(graph: ir.Model) -> dict[str, np.ndarray]:
        if not last or last[0][0] is not graph:
            with temporary_folder() as folder:
                path = folder / "model.onnx"
                save(graph, path)
                last[:] = [(graph, run_graph(path, inputs, specs, columns))]
        return last[0][1]

    return run


def shortfall_finder(
    inputs: Inputs,
    columns: Mapping[str, Any],
    baseline: Outputs,
    run: RunGraph,
    log: Callable[[str], None],
    slices: Mapping[str, Sequence[str]] | None = None,
) -> Callable[[ir.Model], dict[str, str]] | None:
    """Return a function: graph -> the quality gates that it fails and the float model does not, each with a sentence.

    `slices`: the samples' own, for gates on the worst of them.

    What the samples cannot decide is no failure that layers in float would mend: it is logged, once. None when the
    recipe has no quality gate, and without a baseline: for language models, and in a further process.
    """
    judgement = quality_gates(inputs.recipe.validate_)
    if not judgement.gates or not baseline:
        return None
    labels = columns.get("label")
    task = inputs.recipe.model.task
    metrics = select_metrics(task, baseline, labels, judgement)
    gated = {gate.metric for gate in judgement.gates}
    own = [metric for metric in find_own_metrics(inputs.recipe) if metric.name in gated]
    metrics += [loaded.as_live() for loaded in load_own_metrics(own, baseline, labels)]
    groups = find_groups(judgement, slices or {}, labels, task, inputs.class_names)
    draws = find_draws(columns)

    def judge_gates(outputs: Outputs) -> tuple[GateResult, ...]:
        return judge(judgement, quality_evidence(metrics, outputs, baseline, labels, judgement, groups, draws))

    @cache
    def list_out_of_reach() -> set[tuple[str, str]]:
        of_float = [gate for gate in judge_gates(baseline) if gate.verdict == "fail"]
        for gate in of_float:
            log(f"the float model itself does not hold {gate.metric} {gate.rule}: {gate.why}")
        return {(gate.metric, gate.rule) for gate in of_float}

    undecided: set[tuple[str, str]] = set()

    def find(graph: ir.Model) -> dict[str, str]:
        outputs = run(graph)
        try:
            check_finite(outputs)
        except NonFiniteOutputs as error:
            return {"outputs": f"the outputs are broken: {error}"}
        gates = judge_gates(outputs)
        for gate in gates:
            if gate.verdict == "undecided" and (gate.metric, gate.rule) not in undecided:
                undecided.add((gate.metric, gate.rule))
                log(f"{gate.metric} {gate.rule} is not decided, and no layer stays float for it: {gate.why}")
        short = [gate for gate in gates if gate.verdict == "fail"]
        worse = [gate for gate in short if (gate.metric, gate.rule) not in list_out_of_reach()]
        return {f"{gate.metric} {gate.rule}": f"{gate.metric} {gate.rule}: {gate.why}" for gate in worse}

    return find


def find_nats_allowed(judgement: Judgement) -> float | None:
    """Return the nats that a token may lose by the gates, the strictest; None where no gate says."""
    gates = (gate for gate in judgement.gates if gate.metric == NLL.name)
    return min((gate.max_drop for gate in gates if gate.max_drop is not None), default=None)


def score_finder(
    inputs: Inputs, columns: Mapping[str, Any], baseline: Outputs, run: RunGraph
) -> Callable[[ir.Model], float] | None:
    """Return a function: graph -> the task's main metric over the samples, turned so that more is better.

    That is the first against labels, or, of samples without labels, the first against the float model's outputs. None
    where there is none, and without a baseline. Broken outputs score minus infinity.
    """
    if not baseline:
        return None
    labels = columns.get("label")
    metrics = select_metrics(inputs.recipe.model.task, baseline, labels, quality_gates(inputs.recipe.validate_))
    main = next((metric for metric in metrics if metric.against == "labels"), metrics[0] if metrics else None)
    if main is None:
        return None

    def score(graph: ir.Model) -> float:
        try:
            value = main.statistic(main.columns(run(graph), labels if main.against == "labels" else baseline))
        except NonFiniteOutputs:
            return -math.inf
        return float(value if main.higher_is_better else -value)

    return score


def score_streamed(
    before: StreamedModel,
    after: StreamedModel,
    context: PassContext,
    masks: Sequence[np.ndarray] | None = None,
) -> tuple[Columns, Columns]:
    """Return (baseline, candidate): sums over each text's predicted tokens, as `runtime.decode.scoring.score` has them.

    `context.batches`: the evaluation texts, one in each. Both models pass through block by block, side by side only at
    their heads. The candidate computes as the engine `context.target` does. `masks`: which of each text's tokens count,
    bool [t] each; None: all.

    What a language model that no ONNX file is written of loses: scored by torch, block by block, at the build.
    """
    after = compute_as_engine(after, context.target.name)
    with ExitStack() as held:
        heads = [
            held.enter_context(open_last_block(Stream(model, context, rows=SCORED_ROWS))) for model in (after, before)
        ]
        _share(*heads)
        sums = sum_tokens(list(_score_rows(heads, context.batches, masks)), with_reference=True)
    return split_sides(sums)


def _share(one: BlockWork, other: BlockWork) -> None:
    """Let `other` hold the tensors of `one` that are the same in both models: embeddings, a head that stays float."""
    held, also = one.part.holders, other.part.holders
    for name in held.keys() & also.keys():
        if one.part.store.same(name, other.part.store):
            module, key = held[name][0]
            for twin, own in also[name]:
                twin._parameters[own] = module._parameters[key]


def _score_rows(
    heads: Sequence[BlockWork], batches: Sequence[Feeds], masks: Sequence[np.ndarray] | None
) -> Iterator[TokenNumbers]:
    """Yield what is scored of each text's tokens, in order."""
    texts = enumerate(batches)
    for i in range(len(heads[0].calls)):
        with torch.no_grad():
            logits = [head.forward(i).cpu().numpy() for head in heads]  # [b, t, vocab] each
        for row in range(len(logits[0])):
            text, feeds = next(texts)
            ids, counted = feeds["input_ids"][0], None if masks is None else masks[text][1:]
            yield measure_tokens([one[row, : len(ids) - 1] for one in logits], ids[1:], counted)
