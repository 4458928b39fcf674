"""Holding a graph against the recipe's quality gates while the passes still run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.planning.cache_keys import quality_gates
from compress.planning.inputs import Inputs
from compress.store.durable import temporary_folder
from runtime.backends import find_backend
from runtime.bundle.tensors import TensorSpec
from runtime.decode.scoring import score
from runtime.encode.preprocess import make_preprocessor
from runtime.judge.evidence import quality_evidence, select_metrics
from runtime.judge.gates import GateResult, judge
from runtime.measure.benchmark import graph_backend
from runtime.metrics import NonFiniteOutputs, Outputs, check_finite
from runtime.tasks.predict import run_samples

VERDICTS = ("fail", "undecided", "pass")
"""From worst to best."""


def run_graph(
    path: Path, inputs: Inputs, specs: tuple[TensorSpec, ...], columns: Mapping[str, Any], beside: Path | None = None
) -> dict[str, np.ndarray]:
    """Return the outputs of a model file over samples, from the backend that will judge the bundle.

    `beside`: of a language model, the file of the float one, which its tokens are compared with.
    """
    recipe = inputs.recipe
    name = graph_backend(recipe.target, recipe.model.generates)  # the plan says where it is not the target
    with ExitStack() as stack:
        sessions = []
        for file in (path, beside):
            if file is not None:
                sessions.append(find_backend(name).open(file, recipe.validate_.benchmark.threads, {}))
                stack.callback(sessions[-1].close)
        preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.tokenizer)
        if recipe.model.generates:
            return score(sessions[0], preprocessor, columns, recipe.validate_.batch_size, *sessions[1:])
        size, names = recipe.validate_.batch_size, inputs.class_names
        return run_samples(sessions[0], preprocessor, recipe.model.task, columns, size, class_names=names)


def shortfall_finder(
    inputs: Inputs,
    specs: tuple[TensorSpec, ...],
    columns: Mapping[str, Any],
    baseline: Outputs,
    save: Callable[[ir.Model, Path], None],
    log: Callable[[str], None],
) -> Callable[[ir.Model], list[str]] | None:
    """Return a function: graph -> the quality gates that it holds less well than the float model ([]: none).

    Gates come as sentences.

    A gate that the float model itself does not hold (too few samples, a bound out of reach) asks for no better than
    what the float model reaches. None when the recipe has no quality gate, and for language models.
    """
    judgement = quality_gates(inputs.recipe.validate_)
    if not judgement.gates or inputs.recipe.model.generates:
        return None
    labels = columns.get("label")
    metrics = select_metrics(inputs.recipe.model.task, baseline, labels, judgement)

    def judge_gates(outputs: Outputs) -> tuple[GateResult, ...]:
        return judge(judgement, quality_evidence(metrics, outputs, baseline, labels, judgement))

    @cache
    def reachable_verdicts() -> dict[tuple[str, str], int]:
        of_float = judge_gates(baseline)
        for gate in of_float:
            if not gate.holds:
                log(f"the float model itself does not hold {gate.metric} {gate.rule}: {gate.why}")
        return {(gate.metric, gate.rule): VERDICTS.index(gate.verdict) for gate in of_float}

    def find(graph: ir.Model) -> list[str]:
        with temporary_folder() as folder:
            path = folder / "model.onnx"
            save(graph, path)
            outputs = run_graph(path, inputs, specs, columns)
        try:
            check_finite(outputs)
        except NonFiniteOutputs as error:
            return [f"the outputs are broken: {error}"]
        short = [gate for gate in judge_gates(outputs) if not gate.holds]
        worse = [g for g in short if VERDICTS.index(g.verdict) < reachable_verdicts()[g.metric, g.rule]]
        return [f"{gate.metric} {gate.rule}: {gate.why}" for gate in worse]

    return find
