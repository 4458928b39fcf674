"""A causal language model as one float graph with an explicit cache: prefill, decoding, batches, padding.

Inputs: input_ids [batch, sequence], attention_mask [batch, total] (int64, 1 where a token is; total = past + sequence),
and what each layer keeps between calls, past_key_values.{layer}.{kind}: keys and values [batch, heads, past, size], of
sizes of their own in each layer, and whatever else the model's code keeps, as a convolution's last inputs or a
recurrence's matrix, of fixed size and zeros before the first token. Outputs: logits [batch, sequence, vocab] and
present.{layer}.{kind}. Positions are counted from the mask, so that padding may stand on the left; states of fixed size
see no padding, for the model's own code masks what it puts into them.

Of a model that also sees, the graph reads in the places of images' tokens image_features.{i} [features, width], and
beside it stands the graph of what makes these of one image (`compress.export.seeing`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress.blocks.materialise import plain
from compress.blocks.untouched import leave_untouched
from compress.data.sight import Sight
from compress.errors import ExportError, NotExportable
from compress.export.onnx import Weight, export_program, silence
from compress.export.recurrence import Recurrences, exchange_recurrences
from compress.export.repeated import Reread, repeat_blocks
from compress.export.seeing import Tower, export_vision, find_tower
from compress.graph.edit import append, initializer, reroute, tidy, uses_of
from compress.graph.layers import WRAPPER, find_layers, node_scope
from compress.graph.seeing import put_beside
from compress.graph.specs import MAX_LENGTH, POSITIONS, past_name, present_name
from compress.graph.stored import StoredTensor, make_stored_weight, read_stored
from compress.structure.alike import cut_chain

if TYPE_CHECKING:
    from transformers import DynamicCache

EXAMPLE = {"batch": 2, "sequence": 3, "past": 5}
"""Sizes that the exporter traces with: all above 1, which it would fix, and their sum unlike any of them."""
ARGUMENTS = ("past_key_values", "cache_params")
"""How transformers calls a cache, as an argument and in what a model gives back."""
SHIFT = "position_shift"
"""Kept with a cache whose positions have several axes: how much less than their tokens images have moved them on."""
ROWS = 4
"""Rows of images' features in it."""
HELD = 2**16
"""Elements of the largest parameter whose values are given to the exporter, which may look at them."""
READ = 1
"""Tokens of a first call, fewer than any window keeps."""
SHORT, LONG = (3, 7), 1280
"""Tokens of calls that take as many operators, unless code walks over a text, by tokens or by chunks."""
WAY_OUT = "use target: transformers, which runs the model's own code on a checkpoint"
LOOK_UPS = (torch.ops.aten.embedding, torch.ops.aten.index_select)
COPIES = (torch.ops.aten._to_copy, torch.ops.aten.detach, torch.ops.aten.alias)
FAILURES = (
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    NotImplementedError,
    AssertionError,
)
"""What a model's own code raises on a cache, or on lengths, that it does not take."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that a layer of a cache keeps: an attribute, or an entry of one."""

    layer: int
    attribute: str
    key: int | None
    """Of an entry."""
    shape: tuple[int, ...]
    """Without the batch; 0 along the axis that grows with each token, if any does."""
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """Return its name in the graph: key, value, conv_state, recurrent_state, recurrent_state_1, ..."""
        return self.attribute.removesuffix("s") + (f"_{self.key}" if self.key else "")

    def read(self, cache: DynamicCache) -> Tensor:
        value = getattr(cache.layers[self.layer], self.attribute)
        tensor: Tensor = value if self.key is None else value[self.key]
        return tensor

    def write(self, cache: DynamicCache, tensor: Tensor) -> None:
        layer = cache.layers[self.layer]
        value = tensor if self.key is None else {**getattr(layer, self.attribute), self.key: tensor}
        setattr(layer, self.attribute, value)


@dataclass(frozen=True)
class DecoderCache:
    """What a decoder keeps between calls, found by running it."""

    argument: str
    """Of the forward pass."""
    filled: DynamicCache
    """As it was after a call."""
    states: tuple[KeptTensor, ...]
    recurrent: bool
    """Whether the graph computes a recurrence by an operator that only ONNX Runtime has."""
    tower: Tower | None = None
    """What of the model sees, and gives what it reads in the places of images."""

    def find_fixed(self) -> str:
        """Return the first state that does not grow, by its name in the graph; "" where all do."""
        return next((past_name(state.layer, state.kind) for state in self.states if 0 not in state.shape), "")

    def find_unlike(self) -> str:
        """Return why the layers' caches are not all keys and values of one size; "" where they are."""
        if other := [state for state in self.states if state.kind not in ("key", "value")]:
            return f"layer {other[0].layer} keeps {other[0].kind}"
        shapes: dict[int, set[tuple[int, ...]]] = {}
        for state in self.states:
            shapes.setdefault(state.layer, set()).add(state.shape)
        unlike = next((layer for layer, found in shapes.items() if len(found) > 1), None)
        return "" if unlike is None else f"layer {unlike} keeps values of another size than its keys"


class CachedDecoder(nn.Module):
    """The model as a function of tensors: the past comes in, and the present goes out, as a flat list of tensors."""

    def __init__(self, wrapped: nn.Module, cache: DecoderCache, recurrences: Recurrences) -> None:
        super().__init__()
        self.wrapped, self.cache, self.recurrences = wrapped, cache, recurrences

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: list[Tensor],
        features: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        logits, after = self.call(input_ids, attention_mask, position_ids, past, features)
        return logits, [state.read(after) for state in self.cache.states]

    def call(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past: Sequence[Tensor],
        features: Sequence[Tensor] = (),
    ) -> tuple[Tensor, DynamicCache]:
        """Return the logits, and the cache as the model leaves it. `features`: of what sees, if anything does."""
        cache = _copy_cache(self.cache.filled)
        for state, tensor in zip(self.cache.states, past, strict=True):
            state.write(cache, tensor if 0 in state.shape else tensor.clone())  # transformers writes into it
        self.recurrences.follow(cache)
        # a model without keys reads the mask of the tokens that it is given, one with keys that of all
        keys = any(isinstance(getattr(layer, "keys", None), Tensor) for layer in cache.layers)
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        if not keys:
            feeds["attention_mask"] = attention_mask[:, -input_ids.shape[1] :]
        tower, shift = self.cache.tower, None
        if tower is not None and tower.positions is not None:
            marks, moved = input_ids == tower.sight.token_id, getattr(cache.layers[0], SHIFT)
            position_ids, shift = tower.positions.count(position_ids, marks, moved)
        # without them the model counts positions from the mask itself
        if "position_ids" in inspect.signature(self.wrapped.forward).parameters:
            feeds["position_ids"] = position_ids
        if tower is not None:
            feeds |= tower.list_arguments(input_ids, attention_mask.shape[1])
        with nullcontext() if tower is None else tower.give(features):
            result = self.wrapped(**feeds, **{self.cache.argument: cache}, use_cache=True, return_dict=True)
        after = getattr(result, self.cache.argument)
        if shift is not None:
            setattr(after.layers[0], SHIFT, shift)
        return result.logits, after


def export_decoder(
    module: nn.Module,
    opset: int = 21,
    weights: Mapping[str, Weight] | None = None,
    repeat: bool = True,
    sight: Sight | None = None,
) -> ir.Model:
    """Export a transformers causal language model (eager attention, eval mode) as a float32 graph with a cache.

    Layers keep the names of their modules. A table that embeds tokens and makes logits is one initializer until
    either is quantized. `weights`: as of `export_program`. `repeat`: of a deep model the first blocks alone are
    exported, and the others are made like them (`repeat_blocks`). `sight`: how images reach a model that also sees;
    None: its graph reads texts alone. Raises ExportError: a cache or code that no graph holds, or what the exporter
    said.
    """
    from onnxscript.optimizer import fold_constants_ir

    whole: Any = module
    within = None if sight is None else whole.get_decoder()
    held = _list_held(module) if weights is None else weights
    run = weights is None
    with cut_chain(module, True, within) if repeat else nullcontext() as cut:
        model, tower = _export_cached(module, opset, weights if cut is None else held, sight, run)
    if cut is not None and not repeat_blocks(model, cut, _rereading(module, held)):
        cut = None
        model, tower = _export_cached(module, opset, weights, sight, run)
    if cut is not None or weights is not None:
        fold_constants_ir(model)
    if weights is None:
        read_stored(model)
    _name_tied_tables(model)
    _count_positions(model)
    for length in _list_lengths(module):
        model.metadata_props[MAX_LENGTH] = str(length)
    tidy(model)
    if tower is not None:
        put_beside(model, export_vision(module, tower, opset, weights))
    return model


def _list_lengths(module: nn.Module) -> list[int]:
    """Return of how many tokens a text is at most, as the configuration says it; [] where it does not."""
    whole: Any = getattr(module, "config", None)
    config = getattr(whole, "get_text_config", lambda: whole)()  # of a model that sees: its text part's
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return [int(length)] if length else []


def _list_held(module: nn.Module) -> dict[str, Weight]:
    """Return the large parameters of a module that holds them, as if they lay in files."""
    held = {plain(name): tensor for name, tensor in module.named_parameters() if tensor.numel() > HELD}
    return {name: (tuple(t.shape), lambda name: held[name].detach().numpy()) for name, t in held.items()}


def _rereading(module: nn.Module, weights: Mapping[str, Weight]) -> Reread:
    """Return what gives the tensors of blocks that were not exported: of their files, or held by the module."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def reread(name: str, like: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(like, StoredTensor) and like.origin is not None:
            shape, read = weights[name]
            return make_stored_weight(name, shape, read, like.origin[1])
        return ir.tensor(held[name].detach().numpy())

    return reread


def _export_cached(
    module: nn.Module, opset: int, weights: Mapping[str, Weight] | None, sight: Sight | None, run: bool
) -> tuple[ir.Model, Tower | None]:
    """Return the graph, and what of the model sees; `run`: as of `find_states`."""
    cache = find_states(module, run, sight)
    states, tower, sizes = cache.states, cache.tower, EXAMPLE
    features = {} if tower is None else {"features": tower.make_features(ROWS)}
    seen = [] if tower is None else tower.names
    batch, sequence, past = (sizes[name] for name in ("batch", "sequence", "past"))
    dims = {name: torch.export.Dim(name, min=0 if name == "past" else 1) for name in (*sizes, "total")}
    names = [(state.layer, state.kind) for state in states]
    with exchange_recurrences(module) as recurrences:
        model = export_program(
            CachedDecoder(module, cache, recurrences).eval(),
            type(module).__name__,
            kwargs={
                "input_ids": torch.zeros(batch, sequence, dtype=torch.int64),
                "attention_mask": torch.ones(batch, past + sequence, dtype=torch.int64),
                "position_ids": torch.arange(past, past + sequence).repeat(batch, 1),
                "past": _make_past(states, batch, past),
                **features,
            },
            input_names=["input_ids", "attention_mask", POSITIONS, *(past_name(*name) for name in names), *seen],
            output_names=["logits", *(present_name(*name) for name in names)],
            dynamic_shapes={
                "input_ids": {0: dims["batch"], 1: dims["sequence"]},
                "attention_mask": {0: dims["batch"], 1: dims["total"]},
                "position_ids": {0: dims["batch"], 1: dims["sequence"]},
                "past": [
                    {0: dims["batch"], **({1 + state.shape.index(0): dims["past"]} if 0 in state.shape else {})}
                    for state in states
                ],
                **{name: [{0: torch.export.Dim("features", min=0)}] * len(given) for name, given in features.items()},
            },
            opset=opset,
            weights=weights,
        )
    _declare_shapes(model, states)
    for value in model.graph.inputs:
        if value.name in seen and value.shape is not None:
            value.shape = ir.Shape(("features", value.shape[1]))
    return model, tower


def _make_past(states: Sequence[KeptTensor], batch: int, past: int) -> list[Tensor]:
    return [torch.zeros(batch, *(size or past for size in state.shape), dtype=state.dtype) for state in states]


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Compute shapes and no values while the context is open: a module without its weights can be run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def find_states(module: nn.Module, run: bool = False, sight: Sight | None = None) -> DecoderCache:
    """Return what the model keeps between calls: it is run by shapes alone, a first call and others that go on from it.

    A module on the meta device is of no other use afterwards. `run`: it may be run in earnest where its code looks at
    values. `sight`: how images reach a model that also sees. Raises NotExportable for a cache that is no list of
    tensors, and for code that walks over a text in Python, of which no graph reads another length, or that branches by
    what it computes; ExportError where shapes alone do not show it.
    """
    argument = next((name for name in ARGUMENTS if name in inspect.signature(module.forward).parameters), None)
    if argument is None:
        raise _refuse(module, f"its forward pass takes no {ARGUMENTS[0]}: what it keeps cannot be exported")
    try:
        with shapes_alone():
            if any(tensor.is_meta for tensor in module.parameters()):  # beside which the model's own code makes others
                module.to_empty(device="cpu")
            # one token less than the most: of a table of all positions the whole is taken without a slice (GPT-Neo)
            return _find_states(module, argument, sight, (*(most - READ - 1 for most in _list_lengths(module)), LONG))
    except NotExportable:
        raise
    except ExportError:
        if _chooses_by_values(module, argument, sight):
            raise _refuse(module, "its code goes this way or that by what it computes, and a graph goes one") from None
        if not run:
            raise
        return _find_states(module, argument, sight)


def _chooses_by_values(module: nn.Module, argument: str, sight: Sight | None) -> bool:
    """Return whether code that shapes alone do not run branches by numbers that no exporter knows, either."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            _find_states(module, argument, sight)
    except ExportError as error:
        return isinstance(error.__cause__, GuardOnDataDependentSymNode)
    return False


def _find_states(module: nn.Module, argument: str, sight: Sight | None, long: Sequence[int] = ()) -> DecoderCache:
    """Return what `find_states` does.

    `long`: lengths of a call that shapes alone make cheap; the first that the model runs is read.
    """
    with silence(), leave_untouched(module), exchange_recurrences(module) as recurrences, torch.no_grad():
        tower = None if sight is None else find_tower(module, sight)
        cache = DecoderCache(argument, _copy_cache(_read_first(module, argument)), (), False)
        if tower is not None and tower.positions is not None:
            shift = torch.zeros(EXAMPLE["batch"], 1, dtype=torch.int64, device=_find_device(module))
            setattr(cache.filled.layers[0], SHIFT, shift)
        held = _list_states(cache.filled)
        wrapper = CachedDecoder(module, DecoderCache(argument, cache.filled, held, False, tower), recurrences)
        try:
            (after, few), (longer, many) = (_read_on(wrapper, length) for length in SHORT)
            states = tuple(
                _compare(module, *pair) for pair in zip(_list_states(after), _list_states(longer), strict=True)
            )
        except FAILURES as error:
            raise _refuse(module, f"does not go on from its own cache: {str(error).partition(chr(10))[0]}") from error
        _refuse_counters(module, after, longer)
        counts = [few, many]
        for length in long:
            with suppress(*FAILURES):  # a text that is longer than the model was made for shows nothing
                counts.append(_read_on(wrapper, length)[1])
                break
        if len(set(counts)) > 1:
            raise _refuse(
                module, "its code takes other steps with long texts than with short ones, and a graph takes one way"
            )
    return DecoderCache(argument, cache.filled, states, recurrences.used, tower)


def _refuse(module: nn.Module, reason: str) -> NotExportable:
    return NotExportable(f"{type(module).__name__}: {reason}; {WAY_OUT}")


def _read_first(module: nn.Module, argument: str) -> DynamicCache:
    """Return the cache that the model makes for itself."""
    from transformers import DynamicCache

    ids = torch.zeros(EXAMPLE["batch"], READ, dtype=torch.int64, device=_find_device(module))
    try:
        result = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, return_dict=True)
    except FAILURES as error:
        # of shapes alone this shows nothing: kernels of experts, say, have rules of their own there
        raise ExportError(
            f"{type(module).__name__}: does not run with a cache: {str(error).partition(chr(10))[0]}; {WAY_OUT}"
        ) from error
    cache = getattr(result, argument, None)
    if type(cache) is not DynamicCache:
        raise _refuse(module, f"keeps a {type(cache).__name__}, whose tensors no call can be given")
    return cache


def _read_on(wrapper: CachedDecoder, length: int) -> tuple[DynamicCache, int]:
    """Return the cache after a call that goes on from the first, and how many operators that took."""
    ids = torch.zeros(EXAMPLE["batch"], length, dtype=torch.int64, device=_find_device(wrapper))
    mask = ids.new_ones(len(ids), READ + length)
    positions = torch.arange(READ, READ + length, device=ids.device).repeat(len(ids), 1)
    past = [state.read(wrapper.cache.filled) for state in wrapper.cache.states]
    features = [] if wrapper.cache.tower is None else wrapper.cache.tower.make_features(0, ids.device)
    with _Watch(mask, ids, positions) as watch:
        _, cache = wrapper.call(ids, mask, positions, past, features)
    if watch.ignores_padding:
        raise _refuse(wrapper.wrapped, "it counts positions without the mask: beside padding a text would be another")
    if watch.widens_mask:  # GIT takes it for granted that an image comes first
        raise _refuse(wrapper.wrapped, "it widens the mask by columns of which its cache holds nothing")
    return cache, watch.count


def _find_device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


class _Watch(TorchDispatchMode):
    """Count the operators that run while it is open, and see what would make a text another one beside padding.

    A table is read by numbers that count alone, or the mask is joined to something.
    """

    def __init__(self, mask: Tensor, *others: Tensor) -> None:
        super().__init__()
        self.count, self.ignores_padding, self.widens_mask = 0, False, False
        self.masks = {id(mask)}
        self.counted: set[int] = set()
        self.given = {id(mask), *map(id, others)}
        self.alive: list[Any] = [mask, *others]
        """Another tensor may be where one was that is no more."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        self.alive.append(out)
        made = {id(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        read = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if func.overloadpacket == torch.ops.aten.arange or read & self.counted:
            self.counted |= made
        if read & self.given:
            self.given |= made
        if read & self.masks and func.overloadpacket in COPIES:
            self.masks |= made
        self.widens_mask |= bool(read & self.masks) and func.overloadpacket == torch.ops.aten.cat
        indexed = func.overloadpacket == torch.ops.aten.index and isinstance(args[0], nn.Parameter)
        if indexed or func.overloadpacket in LOOK_UPS:
            rows = {id(leaf) for leaf in tree_leaves(args[1:])}
            self.ignores_padding |= bool(rows & self.counted) and not rows & self.given
        return out


def _copy_cache(cache: DynamicCache) -> DynamicCache:
    """Return a cache of the same tensors whose layers can be given others, and keep all tokens."""
    from transformers.cache_utils import (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
    )

    # The mask hides what lies before a window; one that moves has no size that a graph knows.
    whole = {
        DynamicSlidingWindowLayer: DynamicLayer,
        LinearAttentionAndSlidingWindowAttentionLayer: LinearAttentionAndFullAttentionLayer,
    }
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        layer.__class__ = whole.get(type(layer), type(layer))  # type: ignore[arg-type]
    return other


def _list_states(cache: DynamicCache) -> tuple[KeptTensor, ...]:
    """Return the tensors of all layers, their shapes as they are."""
    states = []
    for index, layer in enumerate(cache.layers):
        for attribute, value in vars(layer).items():
            entries = value.items() if isinstance(value, dict) else [(None, value)]
            states += [
                KeptTensor(index, attribute, key, tuple(tensor.shape), tensor.dtype)
                for key, tensor in entries
                if isinstance(tensor, Tensor) and not attribute.startswith("_")
            ]
    return tuple(states)


def _compare(module: nn.Module, one: KeptTensor, other: KeptTensor) -> KeptTensor:
    """Return the state with 0 along the axis that grew between two calls."""
    extra = SHORT[1] - SHORT[0]
    steps = [b - a for a, b in zip(one.shape, other.shape, strict=True)]
    if one.shape[:1] != (EXAMPLE["batch"],) or sorted(steps)[:-1] != [0] * (len(steps) - 1) or steps[0]:
        raise _refuse(module, f"layer {one.layer} keeps {one.attribute} {one.shape}, which is no row for each text")
    if max(steps) not in (0, extra) or (max(steps) and one.shape[steps.index(extra)] != READ + SHORT[0]):
        raise _refuse(module, f"layer {one.layer} keeps {one.attribute}, which grows by something else than each token")
    shape = tuple(0 if step else size for size, step in zip(one.shape, steps, strict=True))[1:]
    return KeptTensor(one.layer, one.attribute, one.key, shape, one.dtype)


def _refuse_counters(module: nn.Module, one: DynamicCache, other: DynamicCache) -> None:
    """Refuse a layer that counts tokens in Python: a graph would hold the number of the example."""
    for index, (layer, longer) in enumerate(zip(one.layers, other.layers, strict=True)):
        for name, value in vars(layer).items():
            if isinstance(value, int) and value != getattr(longer, name):
                raise _refuse(module, f"layer {index} keeps a {type(layer).__name__} that counts its tokens in {name}")


def _name_tied_tables(model: ir.Model) -> None:
    """Name embedding tables after the embedding, in place, where the exporter took the name of a layer tied to it."""
    for layer in find_layers(model):
        scope = node_scope(layer.node)
        if layer.op == "Gather" and scope and layer.name != scope:
            name = f"{WRAPPER}{scope}.weight"
            if name not in model.graph.initializers:
                tensor = layer.weight.const_value
                assert tensor is not None
                del model.graph.initializers[layer.weight.name or ""]
                layer.weight.name = tensor.name = name
                model.graph.register_initializer(layer.weight)


def _count_positions(model: ir.Model) -> None:
    """Compute position_ids in the graph instead of reading it: tokens before each of the last `sequence` ones."""
    positions = next(value for value in model.graph.inputs if value.name == POSITIONS)
    ids, mask = (next(v for v in model.graph.inputs if v.name == name) for name in ("input_ids", "attention_mask"))
    model.graph.inputs.remove(positions)
    one, zero = (initializer(model, f"positions/{i}", np.array([i], np.int64)) for i in (1, 0))
    axis = initializer(model, "positions/axis", np.array(1, np.int64))
    end = initializer(model, "positions/end", np.array([np.iinfo(np.int64).max], np.int64))
    count = append(model, "CumSum", [mask, axis], "positions/count")
    before = append(model, "Sub", [count, one], "positions/before")
    valid = append(model, "Max", [before, zero], "positions/valid")
    sizes = [append(model, "Shape", [v], f"positions/{n}", {"start": 1}) for v, n in ((mask, "total"), (ids, "length"))]
    start = append(model, "Sub", sizes, "positions/start")
    uses = uses_of(positions)
    positions.name = "positions/input"
    last = append(model, "Slice", [valid, start, end, one], POSITIONS)
    last.type, last.shape = positions.type, positions.shape
    reroute(uses, last)


def _declare_shapes(model: ir.Model, states: Sequence[KeptTensor]) -> None:
    """Set the shape of every input and output, in place, with dimensions by name."""
    sizes = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "total")}
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for name, dims in sizes.items():
        values[name].shape = ir.Shape(dims)
    for state in states:
        for name, length in (
            (past_name(state.layer, state.kind), "past"),
            (present_name(state.layer, state.kind), "total"),
        ):
            values[name].shape = ir.Shape(("batch", *(size or length for size in state.shape)))
