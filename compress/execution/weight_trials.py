"""Try what schemes of weights come to before they are chosen: bytes of the file, times of layers and of the model.

Neither asks for the integers that a pass will leave: graphs are written with weights rounded as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import onnx_ir as ir

from compress.blocks.streamed import StreamedModel
from compress.export.gguf import make_byte_counter
from compress.export.onnx import finish, float_graph
from compress.formats.schemes import Scheme
from compress.graph.files import write_graph
from compress.graph.layers import find_layers
from compress.planning.inputs import Inputs
from compress.planning.latency import BUDGET_S, round_as_planned, time_decoders
from compress.planning.timing import explain_untimed, make_clock, make_writer, variant_of
from compress.recipe.exports import GgufExport
from compress.rounding.latency import LayerCall, StateTimer, describe_calls, time_weights
from compress.rounding.state import GraphState
from compress.store.durable import temporary_folder
from compress.timing.clock import middle_batch
from compress.work.contexts import LayerSchemes, WeightTrials
from runtime.backends import Feeds
from runtime.bundle.format import model_size
from runtime.errors import RuntimeFailure


def make_weight_trials(
    inputs: Inputs,
    cache: Path,
    graph: Callable[[], GraphState] | None,
    make_feeds: Callable[[], Sequence[Feeds]],
    log: Callable[[str], None],
) -> WeightTrials:
    """Return how a pass over blocks tries schemes. `graph`: gives the float graph of what it works on; None: no file.

    `make_feeds`: the batches that the result will be timed on, of a model that is no decoder.
    """
    if graph is None:
        return WeightTrials(float_bytes=inputs.facts.float_bytes)
    tried = _TriedWeights(inputs, cache, graph, make_feeds, log)
    if explain_untimed(inputs.recipe, layers=False) is not None:
        return WeightTrials(tried.count_bytes, float_bytes=inputs.facts.float_bytes)
    return WeightTrials(tried.count_bytes, tried.time, tried.time_layers, inputs.facts.float_bytes)


def make_gguf_trials(inputs: Inputs, model: StreamedModel, export: GgufExport) -> WeightTrials:
    """Return how a pass over blocks of `model` counts what schemes come to in the GGUF file that is written of it."""
    whole = sum(path.stat().st_size for path in inputs.source.weights) - sum(inputs.facts.unread.values())

    @cache
    def make_counter() -> Callable[[LayerSchemes], int]:
        return make_byte_counter(model, export, inputs.recipe.name)

    def count(choices: Sequence[LayerSchemes]) -> list[int]:
        return [whole, *map(make_counter(), choices)]

    return WeightTrials(count, float_bytes=inputs.facts.float_bytes)


class _TriedWeights:
    """The graph, read when it is first asked for, and what is tried with it."""

    def __init__(
        self,
        inputs: Inputs,
        cache: Path,
        graph: Callable[[], GraphState],
        make_feeds: Callable[[], Sequence[Feeds]],
        log: Callable[[str], None],
    ) -> None:
        self.inputs, self.cache, self.graph, self.make_feeds, self.log = inputs, cache, graph, make_feeds, log
        self.recipe = inputs.recipe

    def write(self, choices: Sequence[LayerSchemes]) -> Iterator[ir.Model]:
        """Yield the float graph, and that of each choice, as the target gets it."""
        state = self.graph()
        yield float_graph(state.model)
        for schemes in choices:
            yield finish(round_as_planned(state, schemes), variant_of(self.recipe))[0]

    def count_bytes(self, choices: Sequence[LayerSchemes]) -> list[int]:
        sizes = []
        with temporary_folder() as folder:
            for number, model in enumerate(self.write(choices)):
                path = folder / str(number) / "model.onnx"
                path.parent.mkdir()
                write_graph(model, path)
                sizes.append(model_size(path))
        return sizes

    def time(self, choices: Sequence[LayerSchemes]) -> list[float]:
        graphs = list(self.write(choices))
        if self.recipe.unit == "token":
            return time_decoders(self.recipe, graphs, self.inputs)[1]
        return make_clock(self.recipe, self.cache).time(graphs, self.make_feeds(), BUDGET_S)

    def time_layers(self, schemes: Mapping[str, Sequence[Scheme]]) -> dict[str, list[float]]:
        clock = make_clock(self.recipe, self.cache)
        timer = StateTimer(clock, make_writer(self.recipe), ())
        calls = self._describe_calls(list(schemes))
        key = [clock.backend, clock.threads]
        kept: dict[str, float] = (clock.kept.read("weights", key) or {}).get("ms", {})
        measured: dict[str, list[float]] = {}
        missing = {call for name, call in calls.items() if any(_key(call, s) not in kept for s in schemes[name])}
        if missing:
            self.log(f"measuring {len(missing)} layer shapes at each choice of bits, on {clock.backend}")
        for name, call in calls.items():
            keys = [_key(call, scheme) for scheme in schemes[name]]
            if any(key not in kept for key in keys):
                with suppress(RuntimeFailure):  # a layer that is refused alone counts with the rest of the model
                    kept |= zip(keys, time_weights(call, schemes[name], timer), strict=True)
            if all(key in kept for key in keys):
                measured[name] = [kept[key] for key in keys]
        if missing:
            clock.kept.write("weights", key, {"ms": kept})
        return measured

    def _describe_calls(self, names: Sequence[str]) -> dict[str, LayerCall]:
        model = self.graph().model
        if self.recipe.unit == "call":
            return describe_calls(model, names, middle_batch(self.make_feeds()))
        batch = self.recipe.validate_.benchmark.batch_size
        layers = {layer.name: layer for layer in find_layers(model)}
        calls = {}
        for name in (name for name in names if name in layers and layers[name].op != "Gather"):
            weight = tuple(int(size) for size in layers[name].matrix().shape)  # [out, in]
            calls[name] = LayerCall("MatMul", weight, (batch, 1, weight[1]), (), layers[name].bias is not None, "")
        return calls


def _key(call: LayerCall, scheme: Scheme) -> str:
    numbers = scheme.weights
    return f"{scheme.name} {numbers.group_size} {call.to_text()}"
