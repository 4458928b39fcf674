"""The time of each layer of a graph on this machine, from ONNX Runtime's own profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx_ir as ir

from compress.commands.switched import run_rows
from compress.store.durable import temporary_folder
from runtime.backends.base import EncoderDecoderSession, Session
from runtime.bundle.files import find_encoder
from runtime.judge.findings import Case
from runtime.measure.profile_onnxruntime import end_profile, list_durations, open_profiled


def time_layers(
    case: Case, path: Path, tensors: Mapping[str, Iterable[str]], rows: np.ndarray
) -> tuple[dict[str, float], float]:
    """Return each layer's share of the time that a model's kernels take, and that time, ms for each sample.

    `tensors`: layer -> names of what its nodes give and of its weights. A kernel is a layer's if it gives one of these,
    or else reads one; several layers' if their products are merged. The samples run one by one.
    """
    owners: dict[str, list[str]] = {}
    for layer, names in tensors.items():
        for name in names:
            owners.setdefault(name, []).append(layer)
    files = [file for file in (find_encoder(path), path) if file is not None]
    with temporary_folder() as folder:
        threads = case.threads or case.manifest.judgement.benchmark.threads
        opened = [open_profiled(file, threads, folder / str(index)) for index, file in enumerate(files)]
        sessions = [session for session, _ in opened]
        whole: Session = sessions[0] if len(sessions) == 1 else EncoderDecoderSession(path, sessions[0], sessions[1])
        with closing(whole):
            run_rows(case, whole, rows, single=True)
            profiles = [list_durations(end_profile(session)) for session in sessions]
        optimized = [ir.load(executed) for _, executed in opened]
    taken, total = dict.fromkeys(tensors, 0.0), 0.0
    for durations, graph in zip(profiles, optimized, strict=True):
        nodes = {node.name: node for node in graph.graph}
        for name, times in durations.items():
            spent = statistics.median(times) * len(
                times
            )  # a first call, or an interrupted one, takes many times as long
            total += spent
            node = nodes.get(name)
            values = [] if node is None else [*node.outputs, *(value for value in node.inputs if value is not None)]
            layers = next((owners[str(value.name)] for value in values if value.name in owners), [])
            for layer in layers:
                taken[layer] += spent / len(layers)
    return {layer: spent / total if total else 0.0 for layer, spent in taken.items()}, total / 1000 / len(rows)
