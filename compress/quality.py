"""Holding a graph against the recipe's quality gates while the passes still run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.inputs import Inputs
from compress.steps import quality_gates
from compress.targets import TARGETS
from runtime.backends import find_backend
from runtime.bundle import TensorSpec
from runtime.evidence import quality_evidence, select_metrics
from runtime.gates import judge
from runtime.metrics import NonFiniteOutputs, check_finite
from runtime.predict import run_samples
from runtime.preprocess import make_preprocessor

JUDGE = "onnxruntime-cpu"
"""Where a bundle is judged whose target does not run on the building machine."""


def run_graph(
    path: Path, inputs: Inputs, specs: tuple[TensorSpec, ...], columns: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The outputs of a model file over samples, on the recipe's target if it runs here."""
    recipe = inputs.recipe
    name = recipe.target if TARGETS[recipe.target].runs_here else JUDGE
    backend = find_backend(name)
    if backend.available() is not None:
        backend = find_backend(JUDGE)
    session = backend.open(path, recipe.validate_.benchmark.threads, {})
    try:
        preprocessor = make_preprocessor(inputs.preprocess, specs, inputs.folder)
        return run_samples(session, preprocessor, recipe.model.task, columns, recipe.validate_.batch_size)
    finally:
        session.close()


def shortfall_finder(
    inputs: Inputs,
    specs: tuple[TensorSpec, ...],
    columns: Mapping[str, Any],
    baseline: Mapping[str, np.ndarray],
    save: Callable[[ir.Model, Path], None],
) -> Callable[[ir.Model], list[str]] | None:
    """graph -> the quality gates that it does not hold, as sentences; None when the recipe has no quality gate."""
    judgement = quality_gates(inputs.recipe.validate_)
    if not judgement.gates:
        return None
    labels = columns.get("label")
    metrics = select_metrics(inputs.recipe.model.task, dict(baseline), labels, judgement)

    def find(graph: ir.Model) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save(graph, path)
            outputs = run_graph(path, inputs, specs, columns)
        try:
            check_finite(outputs)
        except NonFiniteOutputs as error:
            return [f"the outputs are broken: {error}"]
        evidence = quality_evidence(metrics, outputs, dict(baseline), labels, judgement)
        return [f"{gate.metric} {gate.rule}: {gate.why}" for gate in judge(judgement, evidence) if not gate.holds]

    return find
