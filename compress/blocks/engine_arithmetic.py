"""A streamed model that computes what an engine computes of its checkpoint: inputs, keys and values in few bits.

This is the one place that turns a layer's scheme into the rounding that happens while the model runs. What is rounded
is decided by the schemes, and by what an engine is known not to round; there is no table of model families.

Keys and values are seen and exchanged where attention computes with them: after norms and positions were put into the
keys, as a cache holds them; a projection's output shows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.blocks.experts import Expert
from compress.blocks.materialise import plain
from compress.blocks.skeleton import StopForward
from compress.blocks.streamed import StreamedModel
from compress.errors import PassError
from compress.facts import Note
from compress.formats.schemes import ActivationScheme, KvScheme, Scheme
from compress.rounding.activations import round_cached, round_inputs

Exchange = Callable[[Literal["key", "value"], Tensor], Tensor]
"""Takes keys or values [..., tokens, head size], and gives what attention goes on with."""
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_WRITTEN_OUT: tuple[Literal["key", "value"], ...] = ("key", "value")
"""What the products of four dimensions read on their right, in order: q k^T and p v."""


def compute_as_engine(model: StreamedModel, engine: str) -> StreamedModel:
    """Return the model whose modules round what they read as `engine` ("vllm", "transformers") does; weights as before.

    A module that `build()` gives of it must not be copied: its hooks belong to it.
    """
    if model.kv_cache is None and all(scheme.activations is None for scheme in model.schemes.values()):
        return model
    return replace(model, build=partial(_build_as_engine, model, engine))


def _build_as_engine(model: StreamedModel, engine: str) -> nn.Module:
    module = model.build()
    for layer, part, scheme in _find_rounded_inputs(model, module, engine):
        scale = model.activation_scales[layer] if scheme.has_stored_scale else None
        symmetric = not _takes_zero_point(model.schemes[layer], engine)
        part.register_forward_pre_hook(_make_rounding_hook(scheme, scale, symmetric), with_kwargs=True)
    for attention, part in _find_rounded_caches(model, module, engine):
        assert model.kv_cache is not None
        exchange_keys_and_values(part, attention, _make_cache_exchange(model.kv_cache, *model.kv_scales[attention]))
    return module


def _find_rounded_inputs(
    model: StreamedModel, module: nn.Module, engine: str
) -> Iterator[tuple[str, nn.Module, ActivationScheme]]:
    """Yield the layers whose inputs the engine rounds: (plain name, module, scheme)."""
    parts = {plain(path): part for path, part in module.named_modules()}
    single = {id(layer) for part in parts.values() if isinstance(part, Expert) for layer in part.children()}
    for layer in model.quantized_layers():
        scheme = model.schemes[layer].activations
        # transformers stacks experts as it loads them, dequantized: tried, it rounds none of their inputs
        stacked = engine == "transformers" and id(parts[layer]) in single
        if scheme is not None and not stacked:
            yield layer, parts[layer], scheme


def _find_rounded_caches(model: StreamedModel, module: nn.Module, engine: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention modules whose keys and values the engine rounds: (plain name, module)."""
    parts = {plain(path): part for path, part in module.named_modules()}
    for attention in model.kv_scales if model.kv_cache is not None else ():
        if engine != "transformers" or _is_library_attention(parts[attention]):
            yield attention, parts[attention]


def rounding_notes(model: StreamedModel, engine: str) -> list[Note]:
    """Return the report's notes on what was rounded while the model was scored, and on what the engine leaves float."""
    module = model.build()
    inputs = [layer for layer, _, _ in _find_rounded_inputs(model, module, engine)]
    caches = [attention for attention, _ in _find_rounded_caches(model, module, engine)]
    asked = [layer for layer in model.quantized_layers() if model.schemes[layer].activations is not None]
    bits = " or ".join(sorted({str(a.bits) for name in inputs if (a := model.schemes[name].activations)}))
    done = [f"{len(inputs)} layers read inputs in {bits} bits"] * bool(inputs)
    done += [f"{len(caches)} attentions keep keys and values in {model.kv_cache}"] * bool(caches)
    notes = [Note("info", f"scored as {engine} computes: {', '.join(done)}")] if done else []
    for what, wanted, found in (("reads inputs", asked, inputs), ("keeps keys and values", model.kv_scales, caches)):
        if left := [name for name in wanted if name not in set(found)]:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            text = f"{engine} {what} of {left[0]}{more} in float, and was scored so"
            notes.append(Note("warning", f"{text}; other engines round them and lose more"))
    return notes


def _takes_zero_point(scheme: Scheme, engine: str) -> bool:
    """Return whether the engine's kernel gives each token's inputs a zero point, whatever the checkpoint says.

    vLLM's one of W4A8 (torch's _dyn_quant_matmul_4bit) does: of a Llama with outliers it adds 0.192 nats, a zero point
    here 0.191, none 0.307.
    """
    whole = scheme.weights.kind == "int" and scheme.activations is not None and scheme.activations.kind == "int"
    return engine == "vllm" and whole and scheme.weights.bits == 4


def _is_library_attention(attention: nn.Module) -> bool:
    """Return whether compressed-tensors takes the module for an attention with a cache: those alone it rounds."""
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module

    return bool(is_cached_attention_module(attention))


def _make_rounding_hook(scheme: ActivationScheme, scale: float | None, symmetric: bool) -> Callable[..., Any]:
    """Return a forward pre-hook that rounds the first argument of a call."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (round_inputs(args[0], scheme, scale, symmetric), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: round_inputs(kwargs[name], scheme, scale, symmetric)}

    return hook


def _make_cache_exchange(
    scheme: KvScheme, key_scale: float, value_scale: float
) -> Callable[[Literal["key", "value"], Tensor], Tensor]:
    scales = {"key": key_scale, "value": value_scale}
    return lambda kind, x: round_cached(x, scheme, scales[kind])


def exchange_keys_and_values(attention: nn.Module, name: str, exchange: Exchange) -> None:
    """Let `exchange` see and replace all keys and values of a module; `del attention.forward` ends it.

    PassError, naming the module, from a call whose attention is neither torch's fused one nor two matrix products.
    """
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode = _Attention(exchange)
        try:
            with mode:
                out = inner(*args, **kwargs)
        except StopForward:
            mode.check(name)
            raise
        mode.check(name)
        return out

    attention.forward = forward


class _Attention(TorchFunctionMode):
    """One call of an attention module."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.n_products, self.fused = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.fused = True
            for place, kind in enumerate(_WRITTEN_OUT, 1):
                if len(args) > place:
                    args[place] = self.exchange(kind, args[place])
                else:
                    kwargs[kind] = self.exchange(kind, kwargs[kind])
        elif func in _PRODUCTS and args[1].dim() == 4:
            if self.n_products < len(_WRITTEN_OUT):
                kind = _WRITTEN_OUT[self.n_products]
                args[1] = self.exchange(kind, args[1].mT).mT if kind == "key" else self.exchange(kind, args[1])
            self.n_products += 1
        return func(*args, **kwargs)

    def check(self, name: str) -> None:
        if not self.fused and self.n_products != len(_WRITTEN_OUT):
            raise PassError(
                f"kv_cache: {name}: no keys and values were seen; its attention is neither "
                "scaled_dot_product_attention nor two matrix products"
            )
