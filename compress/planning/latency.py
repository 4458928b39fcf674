"""Forecast how long the model and the compressed model will take, by timing graphs that are made like them.

Speed does not ask for trained weights. So the plan makes twins: the ONNX file as it is, or a torch model built
untrained and exported; then what each pass will leave, with as many channels and blocks, and weights rounded as they
come. Both are timed on the target's runtime in turn. Where that gains little, what else there is on this machine is
timed, too. What was measured is kept for the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compress.errors import CompressError, NotExportable, PlanError
from compress.export.executorch import check_lowers
from compress.export.model import export_model
from compress.export.onnx import float_graph, flush_denormals, with_row_groups
from compress.facts import ModelFacts, Note
from compress.formats.schemes import Scheme, WeightScheme
from compress.formats.targets import TARGETS
from compress.graph.fast_forms import own_transposes
from compress.graph.files import write_graph
from compress.graph.layers import find_layers
from compress.graph.run import clone
from compress.graph.specs import cache_of
from compress.models.factory import USER_ERRORS
from compress.models.facts import short_feeds
from compress.models.load import OnnxModel, TorchModel, build_torch_model, load_model, load_torch_model
from compress.planning import shallow
from compress.planning.cache_keys import CacheKeys
from compress.planning.in_files import stays_in_files
from compress.planning.inputs import Inputs
from compress.planning.measured_speed import FLOAT_ELSEWHERE, GAINS, LatencyForecast
from compress.planning.measurements import LARGEST_BYTES
from compress.planning.sets import example_feeds, text_fill
from compress.planning.students import make_student
from compress.planning.timing import describe_call, explain_untimed, is_timing_off, make_timer, variant_of
from compress.recipe.exports import ExecutorchExport
from compress.recipe.schema import Recipe
from compress.rounding.int8 import with_integer_layers
from compress.rounding.latency import StateTimer, round_roughly
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import GraphState
from compress.store.durable import temporary_folder
from compress.store.run_log import choose_log
from compress.timing.kept import Kept
from compress.work import WORK, foresee_pass
from compress.work.contexts import GraphContext, ModelContext
from runtime.backends import BACKENDS, Feeds, find_backend
from runtime.backends.openvino import computes_bfloat16
from runtime.bundle.manifest import fixed_batch
from runtime.clock.machine import peak_memory_bytes
from runtime.decode.kv_cache import Decoder
from runtime.errors import RuntimeFailure
from runtime.measure.benchmark import choose_backend
from runtime.measure.requests import time_requests
from runtime.progress import no_progress
from runtime.words import size_text

BUDGET_S = 6.0
"""Seconds for the calls of one comparison."""
REQUESTS = 12
"""Requests of a decoder's forecast; each times its prompt once and every further token."""
WEIGHT_GROUP = 32
MOST_NAMED = 8
Log = Callable[[str], None]


def forecast_latency(
    inputs: Inputs, keys: CacheKeys, cache: Path, twins: bool = True, log: Log | None = None
) -> tuple[LatencyForecast | None, list[Note]]:
    """Measure the forecast, or take up the one that is kept for this machine; and what the plan says of it.

    `twins`: a torch model is built and exported for it, which takes as long as an export; else only an ONNX file, or
    what is kept, gives a forecast. PlanError for a model of which no graph can be made; what cannot be timed is said in
    a note.
    """
    recipe, keep = inputs.recipe, Kept(cache)
    reason = _explain_no_forecast(inputs)
    if reason is not None:
        if twins:
            _try_export(inputs, keys, keep)
        return None, [Note("info", f"latency is not forecast, nothing was measured: {reason}")]
    key = [keys.float_graph, list(keys.passes), describe_call(recipe)]
    if inputs.facts.n_bytes > LARGEST_BYTES:  # whose weights may not have been read yet, and count for nothing
        shapes = [(layer.name, list(layer.shape)) for layer in inputs.facts.layers]
        key = [shapes, [pass_.model_dump(mode="json") for pass_ in recipe.passes], describe_call(recipe)]
    kept = keep.read("forecast", key)
    if kept is not None:
        lists = {name: tuple(kept["forecast"].get(name, ())) for name in ("parts", "in_float", "first_ms", "blocks")}
        latency = LatencyForecast(**{**kept["forecast"], **lists})
        return latency, _describe_gain(recipe, latency)
    if not twins and inputs.facts.source != "onnx":
        return None, []
    try:
        latency = _measure_forecast(inputs, cache, log or choose_log(quiet=False))
    except NotExportable as error:
        raise PlanError(error.problems) from error
    except (CompressError, RuntimeFailure, ValueError, *USER_ERRORS) as error:
        first = str(error).partition("\n")[0]
        return None, [Note("info", f"latency is not forecast: {type(error).__name__}: {first}")]
    keep.write("forecast", key, {"forecast": asdict(latency)})
    return latency, _describe_gain(recipe, latency)


def _try_export(inputs: Inputs, keys: CacheKeys, keep: Kept) -> None:
    """Export a torch model that is not timed, untrained, unless that went well before. PlanError where it cannot be."""
    recipe = inputs.recipe
    small = inputs.facts.n_bytes <= LARGEST_BYTES
    if is_timing_off() or not (recipe.has_onnx and inputs.facts.source == "torch" and small):
        return
    key = [keys.made_of[keys.float_graph]]
    if keep.read("exported", key) is not None:
        return
    try:
        loaded = build_torch_model(inputs.source, inputs.feeds)
        graph = _export(loaded, recipe, make_call(inputs))
    except NotExportable as error:
        raise PlanError(error.problems) from error
    except (CompressError, RuntimeFailure, ValueError, *USER_ERRORS):
        return  # of a twin: the run says it of the model itself
    keep.write("exported", key, {"inputs": [value.name for value in graph.graph.inputs]})


def _explain_no_forecast(inputs: Inputs) -> str | None:
    """Return why nothing is forecast, or None. Decoders, of which no layer is timed, are timed whole."""
    if reason := explain_untimed(inputs.recipe, layers=False):
        return reason
    if inputs.facts.has_two_chains:
        return "an encoder and its decoder are exported together, which no twin is yet"
    return _explain_no_shallow(inputs) if inputs.facts.n_bytes > LARGEST_BYTES else None


def _explain_no_shallow(inputs: Inputs) -> str | None:
    """Return why a large model is not foretold from decoders of a few of its blocks; None where it is."""
    large = f"the weights are larger than {size_text(LARGEST_BYTES)}"
    if inputs.facts.structure is None or not stays_in_files(inputs.recipe, inputs.facts):
        return large
    reason = shallow.explain_none(inputs)
    return reason and f"{large}, and {reason}"


def _measure_forecast(inputs: Inputs, cache: Path, log: Log) -> LatencyForecast:
    recipe = inputs.recipe
    timer = make_timer(recipe, cache, [make_call(inputs)])
    log(f"measuring how long the model takes on {timer.clock.backend}, before and after the passes")
    if recipe.unit == "token":
        return _measure_decoder(inputs, timer, log)
    before, after, parts = make_twins(inputs, timer, log)
    flushed = clone(before.model)
    denormal = flush_denormals(flushed)
    graphs = [before, after, *([replace(before, model=flushed)] if denormal else [])]
    ms = [round(value, 4) for value in timer.time(graphs, BUDGET_S)]
    in_float, held = _list_in_float(recipe, inputs.facts, after), peak_memory_bytes()
    latency = LatencyForecast("latency_p50", timer.clock.backend, ms[0], ms[1], parts, in_float, held_bytes=held)
    if denormal:
        latency = replace(latency, denormal=denormal, flushed_ms=ms[2])
    if recipe.passes:
        log("measuring what else there is")
        others = _time_others(recipe, before, timer, forms=latency.speedup < GAINS)
        latency = replace(latency, others=others)
    return latency


def _measure_decoder(inputs: Inputs, timer: StateTimer, log: Log) -> LatencyForecast:
    """Time a decoder's twins, and what another runtime does with the float one.

    A large one is foretold from two of fewer blocks. No other runtime gets these: OpenVINO's copies of the
    tables took 3.3 GiB more at the peak of Qwen2.5-Coder 0.5B's plan.
    """
    recipe, structure, backend = inputs.recipe, inputs.facts.structure, timer.clock.backend
    large = inputs.facts.n_bytes > LARGEST_BYTES
    elsewhere = {} if large else _list_elsewhere(backend)
    made: Iterable[GraphState | None] = map(GraphState, shallow.export_shallow(inputs)) if large else [None]
    found: dict[str, tuple[str, ...]] = {}

    def make_graphs() -> Iterator[ir.Model]:  # one after the other: their tables are most of the memory
        for state in made:
            before, after, found["parts"] = make_twins(inputs, timer, log, state)
            found["in_float"] = () if large else _list_in_float(recipe, inputs.facts, after)
            yield timer.write(before)
            yield timer.write(after)
            yield from (float_graph(before.model) for _ in elsewhere)

    backends = [backend, backend, *elsewhere.values()]
    if large:
        assert structure is not None
        n_tokens = min(recipe.validate_.benchmark.new_tokens, shallow.TOKENS)
        times = time_decoders(recipe, make_graphs(), inputs, n_tokens, budget_s=shallow.BUDGET_S)
        first, token = ([shallow.extend(ms[number::2], len(structure.blocks)) for number in (0, 1)] for ms in times)
    else:
        first, token = time_decoders(recipe, make_graphs(), inputs, backends=backends)
    first, token = ([round(ms, 4) for ms in part] for part in (first, token))
    return LatencyForecast(
        "tpot",
        backend,
        token[0],
        token[1],
        found["parts"],
        found["in_float"],
        others=dict(zip(elsewhere, token[2:], strict=True)),
        held_bytes=0 if large else peak_memory_bytes(),
        first_ms=tuple(first[:2]),
        blocks=shallow.SHALLOW if large else (),
    )


def _list_in_float(recipe: Recipe, facts: ModelFacts, after: GraphState) -> tuple[str, ...]:
    """Return the layers that a pass would put into eight bits and that are computed in float for their speed."""
    planned: list[str] = []
    for pass_ in recipe.passes:
        plan = pass_.check(facts, TARGETS[recipe.target])
        if pass_.chooses_by_time:
            products = {layer.name for layer in plan.facts.layers if layer.op != "Gather"}
            planned += [d.layer for d in plan.decisions if d.action != "kept" and d.layer in products]
        facts = plan.facts
    in_graph = {layer.name for layer in find_layers(after.model)}
    return tuple(name for name in planned if name in in_graph and name not in after.integer)


def make_call(inputs: Inputs) -> Feeds:
    """Return one call as it will be timed: batch size and length of texts as the recipe says, or as its samples are."""
    recipe, speed = inputs.recipe, inputs.recipe.validate_.benchmark
    size = fixed_batch(inputs.facts.inputs) or speed.batch_size
    rng = np.random.default_rng(recipe.seed)
    feeds = {state.input.name: np.full(state.shape, state.initial, state.input.dtype) for state in inputs.facts.states}
    for name, (shape, dtype) in inputs.feeds.items():
        shape = shape[1:] if inputs.facts.states else shape
        if getattr(inputs.preprocess, "max_length", None) and len(shape) == 1:
            usual = round(shape[0] * text_fill(inputs, "evaluation"))
            shape = (speed.sequence_length or max(usual, 1),)
        kind = np.dtype(dtype)
        if kind.kind == "f":
            feeds[name] = rng.standard_normal((size, *shape)).astype(kind)
        else:
            feeds[name] = np.full((size, *shape), "mask" in name, kind)
    return feeds


def make_twins(
    inputs: Inputs, timer: StateTimer, log: Log, made: GraphState | None = None
) -> tuple[GraphState, GraphState, tuple[str, ...]]:
    """Return the float graph and what the passes will leave, as far as speed goes, and what that does not hold.

    `made`: the float graph of an earlier call, for passes over graphs alone.
    """
    recipe = inputs.recipe
    missing: list[str] = []
    facts, resized, loaded = inputs.facts, False, None
    if made is not None:
        before = after = made
    elif inputs.source.onnx is not None:
        model = load_model(inputs.source, inputs.feeds)
        assert isinstance(model, OnnxModel)
        before = after = GraphState(model.graph)
        if inputs.facts.rebuilt:
            loaded = load_torch_model(inputs.source, inputs.feeds)
    else:
        loaded = build_torch_model(inputs.source, inputs.feeds)
        fill_zeros(loaded.module, recipe.seed)
        before = after = GraphState(_export(loaded, recipe, timer.feeds[0]))
    timing = timer if explain_untimed(recipe) is None else None
    target, feeds = variant_of(recipe), timer.feeds
    context = GraphContext((), target, recipe.seed, log, no_progress, timing=timing)
    for pass_ in recipe.passes:
        stage = pass_.stage_on(inputs.facts)
        plan = pass_.check(facts, TARGETS[recipe.target])
        if loaded is not None and stage == "model":
            student = pass_.find_student()
            if student is not None and student.separate:
                loaded, resized = make_student(inputs.source, inputs.feeds, loaded, student, recipe.seed), True
            elif student is not None or plan.facts.macs != facts.macs:
                sample = ModelContext([_make_sample(inputs)], target, recipe.seed, log, no_progress)
                loaded, known = foresee_pass(pass_, loaded, facts, sample)
                resized |= known
                missing += [] if known else [pass_.kind]
        if resized and loaded is not None and stage != "model":
            after, resized = replace(after, model=_export(loaded, recipe, feeds[0])), False
        if plan.schemes:
            after = round_as_planned(after, plan.schemes)
        elif stage == "graph" or pass_.kind not in WORK:
            after, known = foresee_pass(pass_, after, facts, context)
            missing += [] if known else [pass_.kind]
        facts = plan.facts
    if resized and loaded is not None:
        after = replace(after, model=_export(loaded, recipe, feeds[0]))
    return before, after, tuple(missing)


def fill_zeros(module: nn.Module, seed: int) -> None:
    """Give weights and statistics that are all zero small values, in place; `module` is untrained.

    A bias of zeros is folded away as a graph is made, and a trained model's is not: the twin's layers were others, and
    the run timed its own anew.
    """
    random = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point() and tensor.numel() and not tensor.any():
            tensor.copy_(0.01 * torch.randn(tensor.shape, generator=random))


def _make_sample(inputs: Inputs) -> Feeds:
    """Return one short sample of zeros for each input, on which a torch model shows how it is built."""
    shapes = short_feeds(inputs.recipe.model, inputs.feeds)
    return {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def _export(loaded: TorchModel, recipe: Recipe, call: Feeds) -> ir.Model:
    graph = export_model(loaded, example_feeds(call, loaded.inputs), recipe.opset)
    if any(isinstance(export, ExecutorchExport) for export in recipe.export):
        check_lowers(graph)
    return graph


def round_as_planned(state: GraphState, schemes: Mapping[str, Scheme]) -> GraphState:
    """Return the state with layers' weights rounded to nearest in these schemes, those that the graph has.

    A table that is looked up and multiplied with is rounded once for both, as the bundle will have it.
    """
    layers = {layer.name: layer for layer in find_layers(state.model)}
    if any(name not in layers or layers[name].op == "Gather" for name in schemes):  # a head that shares a table
        state = replace(state, model=clone(state.model))
        own_transposes(state.model)
        layers = {layer.name: layer for layer in find_layers(state.model)}
    chosen = {name: scheme for name, scheme in schemes.items() if name in layers and scheme.weights.kind == "int"}
    integer = [name for name, scheme in chosen.items() if scheme.activations is not None]
    if integer:
        state = with_integer_layers(state, integer, "inputs", False, True, round_roughly)
    weights = {
        name: with_row_groups(layers[name], _draw_levels(layers[name].matrix(), w.weights))
        for name, w in chosen.items()
        if name not in integer
    }
    return replace(state, weights={**state.weights, **weights}, weight_only=[*state.weight_only, *weights])


def _draw_levels(matrix: np.ndarray, scheme: WeightScheme) -> QuantizedWeight:
    """Return random levels for a weight [out, in], one that is equal to it has the same: no speed hangs on them.

    ValueError where groups do not divide the inputs.
    """
    rows, inputs = matrix.shape
    size = inputs if scheme.group_size == -1 else scheme.group_size
    if size < 1 or inputs % size:
        raise ValueError(f"group_size {size} does not divide {inputs} inputs")
    random, half = np.random.default_rng(crc32(np.ascontiguousarray(matrix[0]).tobytes())), 2 ** (scheme.bits - 1)
    low, dtype = (1 - half, np.int8) if scheme.symmetric else (0, np.uint8)
    levels = random.integers(low, low + 2 * half - 1, matrix.shape, dtype)
    # unlike another weight's: equal constants become one, and ONNX Runtime fuses no product that shares its scales
    scales = random.uniform(1, 2, (rows, inputs // size)).astype(np.float32) / np.float32(half * inputs**0.5)
    zeros = None if scheme.symmetric else np.full(scales.shape, half, np.uint8)
    return QuantizedWeight(levels, scales, zeros, scheme.bits, scheme.group_size)


def time_decoders(
    recipe: Recipe,
    graphs: Iterable[ir.Model],
    inputs: Inputs,
    new_tokens: int | None = None,
    backends: Sequence[str] | None = None,
    budget_s: float = BUDGET_S,
) -> tuple[list[float], list[float]]:
    """Return milliseconds of the first token and of a further one, of each decoder, written as it is taken.

    `new_tokens`: of an answer; None: as many as the recipe times. `backends`: of each; None: the recipe's.
    """
    speed, rng = recipe.validate_.benchmark, np.random.default_rng(recipe.seed)
    vocab_size = inputs.facts.outputs[0].shape[-1]
    assert isinstance(vocab_size, int)
    main = choose_backend(recipe)[0]
    with temporary_folder() as folder, ExitStack() as held:
        decoders = []
        for number, graph in enumerate(graphs):
            backend = backends[number] if backends else main
            path = folder / str(number) / "model.onnx"
            path.parent.mkdir()
            write_graph(graph, path, apart=True)
            session = find_backend(backend).open(path, speed.threads, {})
            held.callback(session.close)
            decoders.append(Decoder(session, cache_of(graph)))
        prompt = rng.integers(0, vocab_size, (speed.batch_size, speed.prompt_tokens))
        n_tokens = new_tokens or speed.new_tokens
        times = time_requests(decoders, [list(prompt)], n_tokens, REQUESTS, 1, recipe.seed, budget_s)

    def compare(seconds: np.ndarray) -> list[float]:
        """Return milliseconds of seconds [graphs, requests]: the first one's, and those of others by their ratios."""
        return [1000 * float(np.median(seconds[0]) * ratio) for ratio in np.median(seconds / seconds[0], axis=1)]

    return compare(times.first), compare(times.per_token)


def _time_others(recipe: Recipe, before: GraphState, timer: StateTimer, forms: bool) -> dict[str, float]:
    """Time what else there is here: `forms` of the layers on the target, other runtimes for the float file."""
    graphs, names, backends = [float_graph(before.model)], ["float"], [timer.clock.backend]
    products = {layer.name: layer for layer in find_layers(before.model) if layer.op in ("MatMul", "Gemm")}
    formats = TARGETS[recipe.target].formats
    if forms and products and formats["int8-dynamic"].verdict == "fast":
        state = with_integer_layers(before, list(products), "inputs", False, True, round_roughly)
        names.append("int8 with mode: dynamic")
        graphs.append(timer.write(state))
    if forms and products and formats["w4"].verdict == "fast":
        wide = [name for name, layer in products.items() if layer.matrix().shape[1] % WEIGHT_GROUP == 0]
        four_bits = Scheme(WeightScheme(4, WEIGHT_GROUP))
        if wide:
            names.append(f"weights in 4 bits (rtn, scheme: W4A16, group_size: {WEIGHT_GROUP})")
            graphs.append(timer.write(round_as_planned(before, dict.fromkeys(wide, four_bits))))
    backends *= len(graphs)
    for name, backend in _list_elsewhere(timer.clock.backend).items():
        names.append(name)
        graphs.append(graphs[0])
        backends.append(backend)
    if len(graphs) == 1:
        return {}
    ms = timer.clock.time(graphs, timer.feeds, BUDGET_S, backends)
    return {name: round(value, 4) for name, value in zip(names, ms, strict=True)}


def _list_elsewhere(backend: str) -> dict[str, str]:
    """Return what another runtime does with the float file, in words -> that runtime."""
    if backend == "openvino" or BACKENDS["openvino"].available() is not None:
        return {}
    return {f"{FLOAT_ELSEWHERE}{'bf16' if computes_bfloat16() else 'float32'}": "openvino"}


def _describe_gain(recipe: Recipe, latency: LatencyForecast) -> list[Note]:
    """Return what the plan says of a forecast: that it gains, or that it does not, and what does."""
    notes = [Note("warning", text)] if (text := latency.describe_denormals()) else []
    if latency.parts:
        notes.append(Note("warning", f"latency: not in the forecast: what {', '.join(latency.parts)} changes"))
    if latency.in_float:
        n, some = len(latency.in_float), ", ".join(latency.in_float[:MOST_NAMED])
        layers = "1 layer computes" if n == 1 else f"{n} layers compute"
        text = f"latency: {layers} in float here, where int8 would be slower: {some}"
        notes.append(Note("info", text + (", ..." if n > MOST_NAMED else "")))
    if not recipe.passes:
        return notes
    base = latency.base_ms
    least = GAINS * max(1.0, latency.speedup)
    better = {name: base / ms for name, ms in latency.others.items() if name != "float" and base / ms >= least}
    notes += [Note("info", text)] if (text := latency.describe_unrounded()) else []
    ranked = sorted(better.items(), key=lambda item: -item[1])
    found = "; ".join(f"{name} {gain:.2f}x" for name, gain in ranked)
    if latency.speedup >= GAINS:
        text = f"another way to run the model is faster here than this recipe's {latency.speedup:.2f}x: {found}"
        return [*notes, Note("info", text)] if found else notes
    what = " and ".join(dict.fromkeys(pass_.kind for pass_ in recipe.passes))
    text = f"{what} makes this model no faster on {latency.backend} here ({latency.speedup:.2f}x), at most smaller"
    if found:
        text += f". Faster, measured in the same way: {found}"
    elif len(latency.others) > 1:
        text += f". Also tried, no faster: {', '.join(name for name in latency.others if name != 'float')}"
    return [*notes, Note("warning", text)]
