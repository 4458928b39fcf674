"""The float graph of a language model whose weights stay in their files: exported, compared with torch, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.materialise import fill
from compress.blocks.store import WeightStore
from compress.blocks.stream import Stream, open_last_block
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.data.sight import Sight
from compress.execution.cached import GRAPH, FloatModel, MakeBatches, find_or_make, find_right, make_parity_feeds
from compress.export.decoder import HELD, export_decoder
from compress.export.parity import compare_padded, cut_text, judge_logits, pad
from compress.graph.pieces import run_in_pieces
from compress.graph.run import MASK, Feeds, clone
from compress.graph.seeing import decoder_of, sees, split_sight
from compress.graph.specs import cache_pairs, input_specs, output_specs
from compress.graph.stored import StoredTensor, make_stored_weight
from compress.rounding.state import GraphState
from compress.store.cache import HELD_BY, CachedResult, ResultCache
from runtime.bundle.records import from_json, to_json
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import CACHE, FEATURES, IDS, POSITIONS


def float_model_in_files(
    cache: ResultCache,
    key: str,
    made_of: str,
    streamed: StreamedModel,
    batches: MakeBatches,
    opset: int,
    context: PassContext,
    sight: Sight | None = None,
    on_reuse: Callable[[], None] = lambda: None,
) -> FloatModel:
    """Return what `float_model` does of a decoder whose weights stay in `streamed.store`; so they do in the cache.

    `made_of`, `on_reuse`: as there. `context`: what the stream that gives torch's logits is made with. Raises
    ExportError.
    """

    def write(folder: Path) -> dict[str, Any]:
        kept = cache.get(made_of)  # all of its key: a decoder is exported with sizes of its own
        given = None if kept is None else _load_graph(kept, streamed.store)
        graph, parity = _export_right(streamed, opset, batches, context, sight, given)
        read = decoder_of(graph)
        held: dict[str, Any] = {HELD_BY: made_of}
        if kept is not None and graph is given:
            on_reuse()
        elif kept is None:
            cache.put(made_of, lambda place: {"weights": _save_without_weights(graph, place / GRAPH)})
        else:
            held = {"weights": _save_without_weights(graph, folder / GRAPH)}
        return {
            **held,
            "inputs": to_json(input_specs(read)),
            "outputs": to_json(output_specs(read)),
            "parity": float(f"{parity:.2e}"),
        }

    cached, holder = find_or_make(cache, key, write)
    graph = _load_graph(holder, streamed.store)
    inputs, outputs = (
        tuple(from_json(TensorSpec, spec, name) for spec in cached.record[name]) for name in ("inputs", "outputs")
    )
    return FloatModel(GraphState(graph), inputs, outputs, class_names=(), parity=cached.record["parity"])


def _export_right(
    streamed: StreamedModel,
    opset: int,
    batches: MakeBatches,
    context: PassContext,
    sight: Sight | None,
    given: ir.Model | None,
) -> tuple[ir.Model, float]:
    """Return the first graph that is the model, and its parity: the given one, one made of a few blocks, or of all."""

    def make_graphs() -> Iterator[ir.Model]:
        if given is not None:
            yield given
        yield export_in_files(streamed, opset, sight=sight)
        yield export_in_files(streamed, opset, False, sight)

    def compare(graph: ir.Model) -> float:
        return compare_in_pieces(streamed, graph, make_parity_feeds(graph, batches, sight), context)

    return find_right(make_graphs(), compare)


def export_in_files(streamed: StreamedModel, opset: int, repeat: bool = True, sight: Sight | None = None) -> ir.Model:
    """Export a decoder with its key-value cache; of large weights the graph knows where they lie, and no value.

    `repeat`, `sight`: as of `export_decoder`.
    """
    module, store = streamed.build(), streamed.store
    choose = getattr(getattr(module, "wrapped", None), "set_attn_implementation", None)
    if choose is not None:
        choose("eager")  # the form that attention is recognized in
    shapes = {name: store.shape(name) for name in store.names()}
    large = {name: shape for name, shape in shapes.items() if prod(shape) > HELD}
    read = _reader(store)

    def give(name: str) -> torch.Tensor:
        # every element is the one zero that is held
        return torch.zeros(()).expand(large[name]) if name in large else store.read(name)

    fill(module, give, store.tied)
    weights = {name: (shape, read) for name, shape in large.items()}
    return export_decoder(getattr(module, "wrapped", module), opset, weights, repeat, sight)


def compare_in_pieces(
    streamed: StreamedModel, graph: ir.Model, batches: Sequence[Feeds], context: PassContext
) -> float:
    """Return the largest difference of any logits from torch's, relative to the largest. Raises as `judge_logits` does.

    `batches`: feeds of one text each, with empty caches; COMPARED_TOKENS of each are read, the last one by the cache,
    and of one with images all; every second one behind padding. Torch's model passes block by block, then the graph
    piece by piece: neither is held whole.
    """
    vision, decoder = split_sight(graph) if sees(graph) else (None, graph)
    pixels = "" if vision is None else str(vision.graph.inputs[0].name)
    texts = [cut_text(feeds, pixels) for feeds in batches]
    expected = _torch_logits(streamed, texts, context)
    features = [{} if vision is None else _look(vision, feeds) for feeds in texts]
    padded = [pad(feeds[IDS], number, seen) for number, (feeds, seen) in enumerate(zip(texts, features, strict=True))]
    given = [{**feeds, IDS: ids, MASK: mask} for feeds, (ids, mask, _) in zip(texts, padded, strict=True)]
    got = _cached_logits(decoder, given, features)
    return judge_logits([(compare_padded(a, b, n), n) for a, b, (_, _, n) in zip(expected, got, padded, strict=True)])


def _look(vision: ir.Model, feeds: Feeds) -> Feeds:
    """Return the features of a text's images, [n, width] by name; {}: it has none."""
    pixels = input_specs(vision)[0]
    if pixels.name not in feeds:
        return {}
    images = [{pixels.name: image} for image in feeds[pixels.name].reshape(-1, *pixels.shape)]
    names = [str(value.name) for value in vision.graph.outputs]
    made = run_in_pieces(vision, images, names)
    return {name: np.concatenate([each[name] for each in made]) for name in names}


def _torch_logits(streamed: StreamedModel, texts: Sequence[Feeds], context: PassContext) -> list[np.ndarray]:
    """Return the logits [1, t, vocab] of each text."""
    own = (CACHE, FEATURES, POSITIONS, MASK)
    known = [{name: array for name, array in each.items() if not name.startswith(own)} for each in texts]
    known = [{**each, MASK: np.ones_like(each[IDS])} for each in known]
    stream = Stream(streamed, replace(context, batches=known, work=None), rows=SCORED_ROWS)
    rows: list[np.ndarray] = []
    with open_last_block(stream) as head, torch.no_grad():
        for i in range(len(head.calls)):
            rows += [row[None] for row in head.forward(i).numpy()]
    return [row[:, : feeds[IDS].shape[1]] for row, feeds in zip(rows, texts, strict=True)]


def _cached_logits(graph: ir.Model, texts: Sequence[Feeds], features: Sequence[Feeds]) -> list[np.ndarray]:
    """Return the logits [1, t, vocab] of each text: all but its last token in one call, then that one.

    `features`: of each text's images.
    """
    names = cache_pairs(graph)
    none = {name: values for name, values in texts[0].items() if name.startswith(FEATURES)}
    starts = [
        {**none, **seen, IDS: feeds[IDS][:, :-1], MASK: feeds[MASK][:, :-1], **{past: feeds[past] for past in names}}
        for feeds, seen in zip(texts, features, strict=True)
    ]
    first = run_in_pieces(graph, starts, ["logits", *names.values()])
    ends = [
        {**none, IDS: feeds[IDS][:, -1:], MASK: feeds[MASK], **{past: now[present] for past, present in names.items()}}
        for feeds, now in zip(texts, first, strict=True)
    ]
    last = run_in_pieces(graph, ends, ["logits"])
    return [np.concatenate([a["logits"], b["logits"]], axis=1) for a, b in zip(first, last, strict=True)]


def _save_without_weights(graph: ir.Model, path: Path) -> dict[str, list[Any]]:
    """Write the graph, its stored weights as inputs; return constant -> (its weight's name, whether transposed)."""
    plain = clone(graph)
    origins: dict[str, list[Any]] = {}
    for name, value in list(plain.graph.initializers.items()):
        tensor = value.const_value
        if isinstance(tensor, StoredTensor) and tensor.origin is not None:
            origins[name] = list(tensor.origin)
            del plain.graph.initializers[name]
            value.const_value = None
            value.type, value.shape = ir.TensorType(tensor.dtype), tensor.shape
            plain.graph.inputs.append(value)
    ir.save(plain, path)
    return origins


def _load_graph(cached: CachedResult, store: WeightStore) -> ir.Model:
    with cached.hold() as folder:
        return _load_with_weights(folder / GRAPH, cached.record["weights"], store)


def _load_with_weights(path: Path, origins: dict[str, list[Any]], store: WeightStore) -> ir.Model:
    graph = ir.load(path)
    read = _reader(store)
    for value in [value for value in graph.graph.inputs if value.name in origins]:
        name, turned = origins[value.name or ""]
        graph.graph.inputs.remove(value)
        value.const_value = make_stored_weight(name, store.shape(name), read, turned)
        value.const_value.name = value.name
        graph.graph.register_initializer(value)
    return graph


def _reader(store: WeightStore) -> Callable[[str], np.ndarray]:
    return lambda name: store.read(name).numpy()
