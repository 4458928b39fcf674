"""The time of each layer of a graph on this machine, from ONNX Runtime's own profile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.commands.switched import run_rows
from compress.store.durable import temporary_folder
from runtime.backends.base import EncoderDecoderSession, Session
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession, open_handle, session_options
from runtime.bundle.files import find_encoder
from runtime.judge.findings import Case

SUFFIX = "_kernel_time"
"""Of a node's name, in the profile."""


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
        sessions = [_open_profiled(file, folder / str(index), case) for index, file in enumerate(files)]
        whole: Session = sessions[0] if len(sessions) == 1 else EncoderDecoderSession(path, sessions[0], sessions[1])
        with closing(whole):
            run_rows(case, whole, rows, single=True)
            profiles = [_end_profile(session) for session in sessions]
        optimized = [ir.load(folder / str(index) / "optimized.onnx") for index in range(len(files))]
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


def _open_profiled(path: Path, folder: Path, case: Case) -> OnnxRuntimeSession:
    folder.mkdir()
    settings: Any = session_options(case.threads or case.manifest.judgement.benchmark.threads)
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / "profile")
    settings.optimized_model_filepath = str(folder / "optimized.onnx")
    handle, inputs, outputs = open_handle(path, settings, ["CPUExecutionProvider"])
    return OnnxRuntimeSession(path, inputs, outputs, handle)


def _end_profile(session: OnnxRuntimeSession) -> dict[str, list[float]]:
    """Return node -> microseconds of each of its calls."""
    handle: Any = session.handle
    durations: dict[str, list[float]] = {}
    for event in json.loads(Path(handle.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith(SUFFIX):
            durations.setdefault(event["name"].removesuffix(SUFFIX), []).append(event["dur"])
    return durations
