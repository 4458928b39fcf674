"""A bundle's model with a switch for each layer, opened to be run over samples with any choice of layers in float."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.commands.inspect import read_json
from compress.errors import ExportError
from compress.graph.files import read_graph, write_graph
from compress.graph.run import Feeds
from compress.graph.switches import SWITCHES, SwitchedGraph, Unit, add_switches
from compress.store.cache import ResultCache
from compress.store.durable import temporary_folder
from runtime.backends.base import EncoderDecoderSession, Session
from runtime.backends.onnxruntime_cpu import (
    Argument,
    Binding,
    InferenceSession,
    OnnxRuntimeSession,
    open_handle,
    session_options,
)
from runtime.bundle.columns import count, take
from runtime.bundle.files import ENCODER, find_encoder
from runtime.bundle.format import inside
from runtime.bundle.manifest import Artifact, Manifest
from runtime.judge.divergence import squares
from runtime.judge.findings import Case
from runtime.metrics import Outputs
from runtime.tasks.predict import bundle_preprocessor, encoding_views, facts_of, run_samples, split_batches

GRAPH = "graph.onnx"
"""Of a cached result over a graph: the float graph that the pass worked on, with the names of its layers."""
CPU = "onnxruntime-cpu"
Vector = np.ndarray
"""bool [units]: which are rounded."""


@dataclass(frozen=True)
class SwitchedHandle:
    """A session of ONNX Runtime whose every call has the switches set to `vector`."""

    handle: InferenceSession
    vector: Vector

    def run(self, names: Sequence[str] | None, feeds: Feeds) -> list[np.ndarray]:
        return self.handle.run(names, {**feeds, SWITCHES: self.vector})

    def io_binding(self) -> Binding:
        binding = self.handle.io_binding()
        binding.bind_cpu_input(SWITCHES, self.vector)
        return binding

    def run_with_iobinding(self, binding: Binding) -> None:
        self.handle.run_with_iobinding(binding)

    def get_inputs(self) -> list[Argument]:
        return self.handle.get_inputs()

    def get_outputs(self) -> list[Argument]:
        return self.handle.get_outputs()

    def get_overridable_initializers(self) -> list[Argument]:
        return self.handle.get_overridable_initializers()

    def get_providers(self) -> list[str]:
        return self.handle.get_providers()


@dataclass(frozen=True)
class SwitchedModel:
    """A model with a switch for each of `units`, which are rounded in its bundle; `session` opens it with some of them.

    `size_bytes`: of the bundle's. `source` says where the float weights are from, `own_weights` whether there were none
    that fit, so that only the rounding of activations has switches. `unmatched`: layer -> why it has no switch.
    `graphs`: of ONNX files; of an encoder-decoder the encoder's and the decoder's.
    """

    case: Case
    units: tuple[Unit, ...]
    session: Callable[[Vector], Session]
    size_bytes: int
    source: str
    own_weights: bool = False
    unmatched: Mapping[str, str] = field(default_factory=dict)
    graphs: tuple[SwitchedGraph, ...] = ()

    def choose(self, rounded: bool, *others: int) -> Vector:
        """Return switches that are all `rounded`, but for those of the units of these numbers."""
        vector = np.full(len(self.units), rounded)
        vector[list(others)] = not rounded
        return vector

    def run(self, vector: Vector, rows: np.ndarray, reference: Session | None = None) -> Outputs:
        """Return the task's outputs over these samples, as the runtime judges them."""
        return run_rows(self.case, self.session(vector), rows, reference)


@dataclass(frozen=True)
class _OpenedFiles:
    """Files with switches, opened: calling it gives the model with some of them, which shares what is loaded."""

    sessions: tuple[OnnxRuntimeSession, ...]
    graphs: tuple[SwitchedGraph, ...]

    def __call__(self, vector: Vector) -> Session:
        parts, start = [], 0
        for opened, graph in zip(self.sessions, self.graphs, strict=True):
            part = vector[start : start + len(graph.units)]
            start += len(graph.units)
            own = np.ascontiguousarray(part) if len(part) else np.ones(1, np.bool_)
            assert opened.handle is not None
            parts.append(replace(opened, handle=SwitchedHandle(opened.handle, own)))
        return parts[0] if len(parts) == 1 else EncoderDecoderSession(parts[1].path, parts[0], parts[1])


def run_rows(
    case: Case, session: Session, rows: np.ndarray, reference: Session | None = None, single: bool = False
) -> Outputs:
    """Return the task's outputs of a model of the bundle over the frozen samples `rows`, `single`: one by one."""
    manifest = case.manifest
    preprocessor = bundle_preprocessor(case.root, manifest, session.inputs)
    size = 1 if single else manifest.judgement.batch_size
    columns = take_rows(case.columns, rows)
    return run_samples(session, preprocessor, manifest.task, columns, size, reference, facts_of(manifest))


def take_rows(columns: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return these samples of all columns."""
    return {name: take(columns, name, rows) for name in columns}


class ChangeMeter:
    """Measures how far the outputs are from those with all layers in float, on a few samples.

    Of a model that generates text it is KL(float || model), nats a token; of any other the squared error of its
    outputs over their squares.
    """

    def __init__(self, model: SwitchedModel, rows: np.ndarray) -> None:
        self.model, self.rows = model, rows
        self.exact = model.session(model.choose(False))
        case = model.case
        self.batches = list[Feeds]()
        if case.manifest.generates:
            return
        preprocessor = bundle_preprocessor(case.root, case.manifest, self.exact.inputs)
        view = encoding_views(case.manifest.task, take_rows(case.columns, rows))[0]
        batches = split_batches(np.arange(count(view)), case.manifest.judgement.batch_size, self.exact.inputs)
        self.batches = [preprocessor.encode(view, batch) for batch in batches]
        self.answers = [self.exact.run(feeds) for feeds in self.batches]

    def measure(self, vector: Vector) -> float:
        """Return the change with these switches; infinite where an output is not finite."""
        if not self.batches:
            outputs = self.model.run(vector, self.rows, self.exact)
            change = float(outputs["kl"].sum() / max(outputs["n_tokens"].sum(), 1))
            return change if np.isfinite(change) else float("inf")
        session = self.model.session(vector)
        noise, signal = 0.0, 0.0
        for feeds, answers in zip(self.batches, self.answers, strict=True):
            for name, values in session.run(feeds, list(_list_compared(answers))).items():
                both = _measure_squares(values, answers[name], feeds.get("attention_mask"))
                noise, signal = noise + both[0], signal + both[1]
        return noise / signal if signal else float(noise > 0)


def _list_compared(answers: Feeds) -> list[str]:
    """Return the outputs that are compared: the floating ones, or all where there is none."""
    return [name for name, values in answers.items() if values.dtype.kind == "f"] or list(answers)


def _measure_squares(found: np.ndarray, expected: np.ndarray, mask: np.ndarray | None) -> tuple[float, float]:
    """Return the sums of the squared difference and of `expected` squared; of tokens, padding left out."""
    if mask is not None and expected.shape[:2] == mask.shape:
        found, expected = found[mask != 0], expected[mask != 0]
    if found.shape != expected.shape:  # as many rows as were found: boxes
        size = max(found.size, expected.size)
        found, expected = (np.pad(values.ravel(), (0, size - values.size)) for values in (found, expected))
    if expected.dtype.kind not in "f":
        return float(np.count_nonzero(found != expected)), float(expected.size)
    return squares(found, expected)


@contextmanager
def open_switched(case: Case, cache: Path, log: Any = print) -> Iterator[SwitchedModel]:
    """Open the candidate with switches while the context is open.

    Float weights are those of the graph that the last pass worked on, where `cache` still has it, else those of the
    bundle's baseline, if with them the model answers as the baseline does. Where neither fits (the model was pruned,
    smoothed or trained, and the cache is gone) each layer keeps its own rounded weights, and only the rounding of
    activations is told. ExportError where nothing can be switched.
    """
    if case.manifest.images is not None:
        raise ExportError(f"{case.root}: of a model that also sees no layer is put back alone: its graphs are two")
    with ExitStack() as stack:
        problems: list[str] = []
        for label, files, trusted in _list_sources(case, cache, log):
            model = _open_with(stack, case, label, files, False)
            if not model.units:
                problems.append(f"{label}: {_explain_no_units(model)}")
            elif not trusted and (why := _explain_misfit(model)):
                problems.append(f"{label}: {why}")
            else:
                yield model
                return
        baseline = _find_baseline(case.manifest) or case.manifest.graph_for(CPU)
        files = _load_files(inside(case.root, baseline.path))  # for the layers' names and places alone
        model = _open_with(stack, case, "none", files, True)
        if not model.units:
            why = "; ".join(problems) or "the bundle holds no float model"
            raise ExportError(
                f"{case.root}: no float weights to put back: {why}; "
                f"build it again with a cache that is kept (`compress reproduce {case.root} --cache DIR`), and give "
                "that one with --cache"
            )
        yield replace(model, source=f"none that fit ({'; '.join(problems)}): the rounding of activations alone is told")


def _find_baseline(manifest: Manifest) -> Artifact | None:
    return next((artifact for artifact in manifest.artifacts if artifact.name == "baseline"), None)


Sources = Iterator[tuple[str, list[ir.Model], bool]]
"""(what it is, the float graphs for the candidate's files, whether they are known to be the candidate's)."""


def _list_sources(case: Case, cache: Path, log: Any) -> Sources:
    lock = read_json(case.root / "lock.json") or {}
    steps = lock.get("steps", {}) if isinstance(lock, dict) else {}
    results = ResultCache(cache, log)
    encodes = find_encoder(inside(case.root, case.manifest.graph_for(CPU).path)) is not None
    for key in [*reversed(steps.get("passes", ())), steps.get("graph", "")]:
        found = results.get(key) if key and results.has(key) else None
        cached = None if found is None else results.find_holder(found)
        if cached is not None and (cached.folder / GRAPH).is_file():
            graph = read_graph(cached.folder / GRAPH)  # an encoder-decoder's holds both
            yield "the cache of its build", [graph] * (2 if encodes else 1), True
    if (baseline := _find_baseline(case.manifest)) is not None:
        yield "the bundle's baseline", _load_files(inside(case.root, baseline.path)), False


def _load_files(path: Path) -> list[ir.Model]:
    """Return the graphs of a model: an encoder-decoder's two, the encoder's first."""
    encoder = find_encoder(path)
    return [read_graph(file) for file in ([path] if encoder is None else [encoder, path])]


def _open_with(stack: ExitStack, case: Case, label: str, sources: Sequence[ir.Model], own: bool) -> SwitchedModel:
    artifact = case.manifest.graph_for(CPU)
    files = _load_files(inside(case.root, artifact.path))
    half = "float16" in artifact.precision
    graphs = [add_switches(file, source, own, half) for file, source in zip(files, sources, strict=True)]
    folder = stack.enter_context(temporary_folder())
    names = ["model.onnx"] if len(graphs) == 1 else [ENCODER, "model.onnx"]
    settings = session_options(case.threads or case.manifest.judgement.benchmark.threads)
    opened = []
    for graph, name in zip(graphs, names, strict=True):
        write_graph(graph.model, folder / name)
        handle, inputs, outputs = open_handle(folder / name, settings, ["CPUExecutionProvider"])
        own_inputs = tuple(spec for spec in inputs if spec.name != SWITCHES)
        opened.append(OnnxRuntimeSession(folder / name, own_inputs, outputs, handle))
    units = tuple(unit for graph in graphs for unit in graph.units)
    known = {unit.name for unit in units}  # of an encoder-decoder each file lacks the other's layers
    unmatched = {n: why for graph in graphs for n, why in graph.unmatched.items() if n not in known}
    files_opened = _OpenedFiles(tuple(opened), tuple(graphs))
    return SwitchedModel(case, units, files_opened, artifact.size_bytes, label, own, unmatched, tuple(graphs))


def _explain_no_units(model: SwitchedModel) -> str:
    if not model.unmatched:
        return "no layer differs from it"
    name, why = next(iter(model.unmatched.items()))
    return f"none of the layers is found in the candidate ({name}: {why})"


SAME = 1e-5
"""Squared error over squares up to which outputs are the same but for rounding in float32."""
FIT = 0.1
"""Share of the whole change up to which the outputs with all layers in float may differ from the baseline's."""
FIT_BESIDE_CACHE = 0.8
"""The same where keys and values are rounded, too: that is in no layer."""


def _explain_misfit(model: SwitchedModel) -> str:
    """Return why a float graph's weights are not the candidate's before rounding; "" where they are."""
    case = model.case
    # samples on which it is looked whether float weights are the candidate's
    rows = spread_rows(count(case.columns), 16)
    exact, rounded = (model.run(model.choose(rounded), rows) for rounded in (False, True))
    rest, whole = (_measure_outputs(outputs, case.baseline, rows) for outputs in (exact, rounded))
    cache = case.manifest.graph_for(CPU).cache
    share = FIT_BESIDE_CACHE if cache is not None and cache.dtype != "float32" else FIT
    if rest <= max(share * whole, SAME):
        return ""
    return (
        f"with every layer back to float the outputs differ from the baseline's by {rest:.2g} of their squares, and by "
        f"{whole:.2g} as they are: passes have changed more than the layers' weights"
    )


def _measure_outputs(outputs: Outputs, baseline: Outputs, rows: np.ndarray) -> float:
    """Return the squared error of the outputs that are compared over their squares, against the frozen baseline's."""
    names = [name for name in _list_compared(dict(outputs)) if name in baseline]
    pairs = [_measure_squares(outputs[name], baseline[name][rows], None) for name in names]
    noise, signal = (sum(pair[index] for pair in pairs) for index in (0, 1))
    return noise / signal if signal else float(noise > 0)


def spread_rows(n: int, most: int) -> np.ndarray:
    """Return at most `most` of `n` samples, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))
