"""An encoder-decoder as one float graph, which passes work on, and as the two files that a bundle holds.

The whole graph. Inputs: the encoder's (input_ids and attention_mask [batch, source], or input_features), then
decoder_input_ids [batch, sequence] and the keys and values of earlier tokens. Outputs: logits [batch, sequence, vocab],
the keys and values of all tokens so far, and cross.{layer}.key and .value [batch, heads, source, head_size]: what the
decoder's layers make of the encoder's output, which is computed once for a text.

`compress.graph.halves.split_halves` cuts the whole graph there. No family's modules are looked for: each half is the
model itself, run with what the other half gives put into its cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.errors import ExportError
from compress.export.onnx import export_program
from compress.graph.edit import tidy
from compress.graph.halves import join_graphs
from runtime.bundle.manifest import CROSS, SELF_PAST, SELF_PRESENT

EXAMPLE = {"batch": 2, "source": 7, "sequence": 3, "past": 5}
"""Sizes that the exporter traces with: all above 1, which it would fix, and no two alike."""
DECODER_IDS = "decoder_input_ids"


@dataclass(frozen=True)
class CacheShape:
    """What each layer keeps for a token: keys and values of [n_heads, head_size] each."""

    n_layers: int
    n_heads: int
    head_size: int


class _Encoder(nn.Module):
    """The encoder's inputs -> keys and values that the decoder's layers make of its output, as a flat list."""

    def __init__(self, wrapped: nn.Module, main: str) -> None:
        super().__init__()
        self.wrapped, self.main = wrapped, main

    def forward(self, source: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        feeds = {self.main: source} | ({} if attention_mask is None else {"attention_mask": attention_mask})
        first = source.new_zeros((source.shape[0], 1), dtype=torch.int64)  # any token: they do not depend on it
        result = self.wrapped(**feeds, decoder_input_ids=first, past_key_values=_make_cache(), use_cache=True)
        return _list_tensors(result.past_key_values.cross_attention_cache)


class _Decoder(nn.Module):
    """Tokens, the cache so far and the encoder's keys and values -> logits, the cache."""

    def __init__(self, wrapped: nn.Module, width: int) -> None:
        super().__init__()
        self.wrapped, self.width = wrapped, width

    def forward(
        self, decoder_input_ids: Tensor, past: list[Tensor], cross: list[Tensor], attention_mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        from transformers.modeling_outputs import BaseModelOutput

        # of the encoder's output the layers read only how long it is: its keys and values are in the cache already
        hidden = cross[0].new_zeros((cross[0].shape[0], cross[0].shape[2], self.width))
        feeds = {} if attention_mask is None else {"attention_mask": attention_mask}
        result = self.wrapped(
            **feeds,
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=decoder_input_ids,
            past_key_values=_make_cache(past, cross),
            use_cache=True,
            return_dict=True,
        )
        return result.logits, _list_tensors(result.past_key_values.self_attention_cache)


def export_encoder_decoder(module: nn.Module, example: dict[str, np.ndarray], opset: int = 21) -> ir.Model:
    """Export a transformers encoder-decoder (eager attention, eval mode) as the whole float32 graph.

    `example`: a batch of the model's inputs, for the shape of what its encoder reads. Layers keep the names of their
    modules. Raises ExportError: a cache that is not keys and values of one shape in every layer, or what the exporter
    said.
    """
    name, main = type(module).__name__, getattr(module, "main_input_name", "input_ids")
    masked = "attention_mask" in example
    given = {
        key: torch.from_numpy(np.ascontiguousarray(example[key])) for key in (main, *(["attention_mask"] * masked))
    }
    shape, cross, width = _measure_cache(module, name, given)
    graph = _export_encoder(module, name, main, given, shape, cross, opset)
    _join_decoder(graph, _export_decoder(module, name, masked, shape, cross, width, opset))
    tidy(graph)
    return graph


def _make_cache(past: Sequence[Tensor] = (), cross: Sequence[Tensor] = ()) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    caches = []
    for tensors in (past, cross):
        cache = DynamicCache()
        for index in range(0, len(tensors), 2):
            cache.update(tensors[index], tensors[index + 1], index // 2)
        caches.append(cache)
    return EncoderDecoderCache(*caches)


def _list_tensors(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _measure_cache(module: nn.Module, name: str, given: dict[str, Tensor]) -> tuple[CacheShape, tuple[int, int], int]:
    """Run the model; return what a layer keeps of a token, (heads, head size) of the encoder's, and its width."""
    if "past_key_values" not in inspect.signature(module.forward).parameters:
        raise ExportError(f"{name}: its forward pass takes no past_key_values; a key-value cache cannot be exported")
    first = torch.zeros((len(next(iter(given.values()))), 1), dtype=torch.int64)
    try:
        with torch.no_grad():
            result = module(**given, decoder_input_ids=first, past_key_values=_make_cache(), use_cache=True)
            own, cross = (
                _list_tensors(cache)
                for cache in (result.past_key_values.self_attention_cache, result.past_key_values.cross_attention_cache)
            )
            width = int(result.encoder_last_hidden_state.shape[-1])
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, NotImplementedError) as error:
        raise ExportError(f"{name}: does not run with keys and values of encoder and decoder: {error}") from error
    sizes = [{(tensor.shape[1], tensor.shape[3]) for tensor in tensors} for tensors in (own, cross)]
    if len(own) != len(cross) or not own or any(len(several) != 1 for several in sizes):
        raise ExportError(f"{name}: its layers keep keys and values of several shapes; the exported cache has one")
    (heads, size), of_encoder = (several.pop() for several in sizes)
    return CacheShape(len(own) // 2, heads, size), of_encoder, width


def _export_encoder(
    module: nn.Module,
    name: str,
    main: str,
    given: dict[str, Tensor],
    shape: CacheShape,
    cross: tuple[int, int],
    opset: int,
) -> ir.Model:
    text = given[main].ndim == 2 and not given[main].is_floating_point()
    batch, source = torch.export.Dim("batch"), torch.export.Dim("source")
    free = {0: batch, 1: source} if text else {0: batch}
    if text:
        given = {key: value.new_ones((EXAMPLE["batch"], EXAMPLE["source"])) for key, value in given.items()}
    elif len(given[main]) < 2:
        given = {key: torch.cat([value, value]) for key, value in given.items()}
    kwargs = {"source": given[main], **{key: value for key, value in given.items() if key != main}}
    names = _list_names(CROSS, shape)
    model = export_program(
        _Encoder(module, main).eval(),
        f"{name}, its encoder",
        kwargs=kwargs,
        input_names=[main, *(key for key in kwargs if key != "source")],
        output_names=names,
        dynamic_shapes=dict.fromkeys(kwargs, free),
        opset=opset,
    )
    length: int | str = "source"
    for value in model.graph.inputs:
        value.shape = ir.Shape(["batch", "source"] if text else ["batch", *given[main].shape[1:]])
    if not text:
        given_length = next(value.shape[2] for value in model.graph.outputs if value.shape is not None)
        length = given_length if isinstance(given_length, int) else "source"
    for value in model.graph.outputs:
        value.shape = ir.Shape(["batch", cross[0], length, cross[1]])
    return model


def _export_decoder(
    module: nn.Module,
    name: str,
    masked: bool,
    shape: CacheShape,
    cross: tuple[int, int],
    width: int,
    opset: int,
) -> ir.Model:
    batch, source, sequence, past = (EXAMPLE[key] for key in ("batch", "source", "sequence", "past"))
    dims = {key: torch.export.Dim(key, min=0 if key == "past" else 1) for key in EXAMPLE}
    kept, given = (
        torch.zeros(batch, heads, length, size)
        for heads, length, size in ((shape.n_heads, past, shape.head_size), (cross[0], source, cross[1]))
    )
    pasts, presents, crosses = (_list_names(pattern, shape) for pattern in (SELF_PAST, SELF_PRESENT, CROSS))
    mask = {"attention_mask": torch.ones(batch, source, dtype=torch.int64)} if masked else {}
    model = export_program(
        _Decoder(module, width).eval(),
        f"{name}, its decoder",
        kwargs={
            DECODER_IDS: torch.zeros(batch, sequence, dtype=torch.int64),
            "past": [kept.clone() for _ in pasts],
            "cross": [given.clone() for _ in crosses],
            **mask,
        },
        input_names=[DECODER_IDS, *pasts, *crosses, *mask],
        output_names=["logits", *presents],
        dynamic_shapes={
            DECODER_IDS: {0: dims["batch"], 1: dims["sequence"]},
            "past": [{0: dims["batch"], 2: dims["past"]} for _ in pasts],
            "cross": [{0: dims["batch"], 2: dims["source"]} for _ in crosses],
            **{key: {0: dims["batch"], 1: dims["source"]} for key in mask},
        },
        opset=opset,
    )
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    values[DECODER_IDS].shape = ir.Shape(["batch", "sequence"])
    for names, length in ((pasts, "past"), (presents, "total")):
        for each in names:
            values[each].shape = ir.Shape(["batch", shape.n_heads, length, shape.head_size])
    return model


def _list_names(pattern: str, shape: CacheShape) -> list[str]:
    return [pattern.format(layer=layer, kind=kind) for layer in range(shape.n_layers) for kind in ("key", "value")]


def _join_decoder(encoder: ir.Model, decoder: ir.Model) -> None:
    """Put the decoder's nodes behind the encoder's, in place; what both hold (a table of embeddings) is there once."""
    given = {value.name: value for value in encoder.graph.outputs}
    for value in list(decoder.graph.inputs):
        if value.name in given:
            value.replace_all_uses_with(given[value.name])
            decoder.graph.inputs.remove(value)
        elif any(value.name == own.name for own in encoder.graph.inputs):
            value.replace_all_uses_with(next(own for own in encoder.graph.inputs if own.name == value.name))
            decoder.graph.inputs.remove(value)
    crosses = list(encoder.graph.outputs)
    encoder.graph.outputs.clear()
    join_graphs(encoder, decoder, "decoder")
    encoder.graph.outputs.extend(crosses)
