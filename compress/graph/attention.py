"""Attention as com.microsoft GroupQueryAttention, which keeps past and present keys and values in one buffer.

Found by pattern, in any architecture; masks and rotary angles are known by running the nodes that make them. The form
is exact: float results differ by rounding alone. It counts tokens from the attention mask, so each row begins with its
first token. Where all that a graph keeps are such buffers, its texts are padded on the right. Beside layers that keep
something else, which see no padding on the left alone, texts are padded there, and the layers that have a buffer move
their rows to the left and back. Several new tokens at once after a past go one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from compress.graph.attention_parts import (
    Attention,
    NotMatched,
    Rotated,
    angle_table,
    find_attention,
    find_rotation,
    mask_window,
)
from compress.graph.edit import append, initializer, replace_output, reroute, tidy, uses_of
from compress.graph.layers import constant, int_attribute, is_constant
from compress.graph.run import clone
from compress.graph.specs import (
    ATTENTION,
    MAX_LENGTH,
    POSITIONS,
    attention_layers,
    cache_pairs,
    past_name,
    present_name,
    shared_pasts,
)

DOMAIN = "com.microsoft"
SCALE_INPUT = 12
"""Place of the keys' scale among the node's inputs; the values' comes next."""


@dataclass
class _Plan:
    """What each layer of a copy becomes; `notes` say what keeps its form."""

    model: ir.Model
    layers: list[tuple[Attention, int, tuple[Rotated, Rotated] | None]] = field(default_factory=list)
    """(attention, window, how query and key are rotated inside the node or None)."""
    tables: dict[ir.Value, np.ndarray] = field(default_factory=dict)
    """[positions, rotated channels / 2] for each cos and sin."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Moved:
    """Which token of a row stands at each place [B, S, 1], where its first one comes first, and where it was."""

    begun: ir.Value
    back: ir.Value


def to_group_query_attention(
    model: ir.Model, max_length: int | None = None, scales: Mapping[str, Sequence[float]] | None = None
) -> tuple[ir.Model, list[str]]:
    """Return a new graph whose cached layers are GroupQueryAttention where they can be, and notes on those that cannot.

    It is the same graph where none can. `max_length`: the longest sequence; the graph's own where it is None. `scales`:
    attention module -> (scale of its keys, of its values), for a cache of int8. Raises KeyError for a module that has
    none.
    """
    length = max_length or int(model.metadata_props.get(MAX_LENGTH, 0))
    plan = _plan_layers(model, length)
    if not plan.layers:
        return model, plan.notes
    whole = 2 * len(plan.layers) == len(cache_pairs(model))
    _rewrite(plan, scales or {}, None if whole else _find_first_tokens(plan.model))
    inputs = ["attention_mask"] if whole else []
    readers = [
        use.node for name in inputs for use in _find_input(plan.model, name).uses() if use.node.op_type != "Shape"
    ]
    for past in shared_pasts(plan.model):
        readers += [use.node for use in _find_input(plan.model, past).uses() if not _is_size(use.node, 0)]
    names = [node.name or node.op_type for node in readers]
    if stray := ", ".join(name for name in names if not name.startswith(("tokens/", "attention."))):
        return model, [*plan.notes, f"attention keeps its plain form: {stray} reads the mask or the past too"]
    return plan.model, plan.notes


def _plan_layers(model: ir.Model, length: int) -> _Plan:
    plan = _Plan(clone(model))
    windows: dict[ir.Value, int] = {}
    for layer in attention_layers(plan.model):
        try:
            attention = find_attention(plan.model, layer)
            if _get_size(attention.key, 3) != _get_size(attention.value, 3):
                raise NotMatched("its values have another size than its keys")
            if attention.mask not in windows:
                windows[attention.mask] = mask_window(plan.model, attention.mask, length)
        except NotMatched as error:
            plan.notes.append(f"attention of layer {layer} keeps its plain form: {error}")
            continue
        rotations = _find_rotations(attention, length, plan)
        plan.layers.append((attention, windows[attention.mask], rotations))
    return plan


def _find_rotations(attention: Attention, length: int, plan: _Plan) -> tuple[Rotated, Rotated] | None:
    """Find how query and key are rotated, where it is a plain rotation by position with tables of a fair size."""
    query, key = find_rotation(attention.query), find_rotation(attention.key)
    if query is None or key is None or not length:
        return None
    if query.cos is not key.cos or query.sin is not key.sin:
        return None
    for angle in (query.cos, query.sin):
        if angle not in plan.tables:
            table = angle_table(plan.model, angle, length)
            if table is None:
                return None
            plan.tables[angle] = table
    return query, key


def _rewrite(plan: _Plan, scales: Mapping[str, Sequence[float]], moved: _Moved | None) -> None:
    """Rewrite the plan's copy in place. `moved`: None where its texts are to be padded on the right."""
    model = plan.model
    model.opset_imports[DOMAIN] = 1
    # tokens of each sequence less one, int32 [B]; the most of any, int32
    mask = _find_input(model, "attention_mask")
    one, axis = _add_number(model, [1]), _add_number(model, [1])
    lengths = append(model, "ReduceSum", [mask, axis], "tokens/count", {"keepdims": 0})
    last = append(model, "Sub", [lengths, one], "tokens/last")
    total = append(model, "Shape", [mask], "tokens/shape", {"start": 1})
    most = append(model, "Squeeze", [total], "tokens/most")
    counts = [append(model, "Cast", [v], f"{v.name}/int32", {"to": ir.DataType.INT32}) for v in (last, most)]
    tables = {
        angle: initializer(model, f"rotary/{index}", table) for index, (angle, table) in enumerate(plan.tables.items())
    }
    for attention, window, rotations in plan.layers:
        node = _rewrite_layer(model, attention, window, rotations, counts, tables, moved)
        if scales:
            _keep_integers(model, attention.layer, node, scales[attention.name])
    if moved is None:
        _count_positions(model)
    else:
        _count_past(model, [attention.layer for attention, *_ in plan.layers])
    tidy(model)


def _find_first_tokens(model: ir.Model) -> _Moved:
    """Find where each row's tokens stand that are new to this call. Beyond its end a row has its last token again."""
    new, zero, one = _count_new(model), _add_number(model, [0]), _add_number(model, [1])
    end = _add_number(model, [np.iinfo(np.int64).max])
    start = append(model, "Neg", [new], "tokens/start")
    valid = append(model, "Slice", [_find_input(model, "attention_mask"), start, end, one], "tokens/valid")
    padding = append(model, "ArgMax", [valid], "tokens/padding", {"axis": 1, "keepdims": 1})  # [B, 1]
    steps = _count_steps(model, new)
    last = append(model, "Sub", [new, one], "tokens/new/last")
    begun = append(model, "Min", [append(model, "Add", [steps, padding], "tokens/after"), last], "tokens/begun")
    back = append(model, "Max", [append(model, "Sub", [steps, padding], "tokens/before"), zero], "tokens/back")
    axis = _add_number(model, [2])
    return _Moved(*(append(model, "Unsqueeze", [v, axis], f"{v.name}/index") for v in (begun, back)))


def _move_tokens(model: ir.Model, value: ir.Value, index: ir.Value, name: str) -> ir.Value:
    """Return the tokens of `value` [B, S, width] in another order."""
    moved = append(model, "GatherND", [value, index], name, {"batch_dims": 1})
    moved.type, moved.shape = value.type, value.shape
    return moved


def _count_new(model: ir.Model) -> ir.Value:
    return append(model, "Shape", [_find_input(model, "input_ids")], "tokens/new", {"start": 1})


def _count_steps(model: ir.Model, new: ir.Value) -> ir.Value:
    """Count the tokens of a call, int64 [S] from 0. `new`: how many they are."""
    scalars = [_add_number(model, 0), append(model, "Squeeze", [new], "tokens/new/scalar"), _add_number(model, 1)]
    return append(model, "Range", scalars, "tokens/steps")


def _count_past(model: ir.Model, layers: Sequence[int]) -> None:
    """Let what reads how long a past is read how many tokens came before: a buffer has the length of its room."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    length = append(model, "Sub", [values["tokens/shape"], values["tokens/new"]], "tokens/past")
    for past in (_find_input(model, past_name(layer, kind)) for layer in layers for kind in ("key", "value")):
        for node in [use.node for use in past.uses() if _is_size(use.node, 2)]:
            reroute(uses_of(node.outputs[0]), length)


def _rewrite_layer(
    model: ir.Model,
    attention: Attention,
    window: int,
    rotations: tuple[Rotated, Rotated] | None,
    counts: Sequence[ir.Value],
    tables: Mapping[ir.Value, ir.Value],
    moved: _Moved | None,
) -> ir.Node:
    layer, query, key = attention.layer, attention.query, attention.key
    heads, kept = _get_size(attention.query, 1), _get_size(attention.key, 1)
    angles: list[ir.Value] = []
    if rotations is not None:
        query, key = (rotated.source for rotated in rotations)
        angles = [tables[rotations[0].cos], tables[rotations[0].sin]]
    flat = [_flatten_heads(model, value) for value in (query, key, attention.value)]
    if moved is not None:
        flat = [_move_tokens(model, value, moved.begun, f"attention.{layer}/{i}") for i, value in enumerate(flat)]
    past = [_find_input(model, past_name(layer, kind)) for kind in ("key", "value")]
    attributes: dict[str, int | float] = {"num_heads": heads, "kv_num_heads": kept, "scale": attention.scale}
    attributes |= {"do_rotary": 1} if angles else {}
    attributes |= {"local_window_size": window} if window > 0 else {}
    attributes |= {"softcap": attention.softcap} if attention.softcap else {}
    inputs = [*flat, *past, *counts, *angles]
    node = ir.node(ATTENTION, inputs, attributes, domain=DOMAIN, num_outputs=3, name=f"attention.{layer}")
    model.graph.append(node)
    _replace_present(model, layer, node)
    output = node.outputs[0]
    output.name = f"attention.{layer}/output"
    if moved is not None:
        output = _move_tokens(model, output, moved.back, f"{output.name}/moved")
    _replace_output(model, attention.output, output, heads)
    return node


def _keep_integers(model: ir.Model, layer: int, node: ir.Node, scales: Sequence[float]) -> None:
    """Make past and present int8, one scale for a layer's keys and one for its values."""
    values = [
        initializer(model, f"attention.{layer}/{kind}_scale", np.array([scale], np.float32))
        for kind, scale in zip(("key", "value"), scales, strict=True)
    ]
    node.resize_inputs(SCALE_INPUT + 2)
    for index, value in enumerate(values):
        node.replace_input_with(SCALE_INPUT + index, value)
    attributes = [ir.AttrString(f"{kind}_quant_type", "PER_TENSOR") for kind in "kv"]
    for attribute in (*attributes, ir.AttrInt64("kv_cache_bit_width", 8)):
        node.attributes[attribute.name] = attribute
    for kind, present in zip(("key", "value"), node.outputs[1:], strict=True):
        _find_input(model, past_name(layer, kind)).type = present.type = ir.TensorType(ir.DataType.INT8)


def _replace_present(model: ir.Model, layer: int, node: ir.Node) -> None:
    """Let the node give the layer's present. The buffer goes in and comes out: past and present have one shape."""
    for kind, new in zip(("key", "value"), node.outputs[1:], strict=True):
        old = next(value for value in model.graph.outputs if value.name == present_name(layer, kind))
        past = _find_input(model, past_name(layer, kind))
        assert past.shape is not None
        past.shape = ir.Shape((past.shape[0], past.shape[1], "length", past.shape[3]))
        new.name, old.name = old.name, f"{old.name}/plain"
        new.type, new.shape = old.type, ir.Shape(list(past.shape))
        replace_output(model, old, new)


def _replace_output(model: ir.Model, old: ir.Value, new: ir.Value, heads: int) -> None:
    """Let readers of `old` [B, S, N, H] read `new` [B, S, N x H], as it is where they only bring heads together."""
    size = _get_size(old, 3)
    new.type = old.type
    new.shape = ir.Shape((*list(old.shape or ())[:2], heads * size))
    for use in list(old.uses()):
        if use.node.op_type == "Reshape" and _is_flat(use.node.outputs[0], old, heads * size):
            reroute(uses_of(use.node.outputs[0]), new)
    if list(old.uses()):
        split = _add_number(model, [0, 0, heads, size])
        reroute(uses_of(old), append(model, "Reshape", [new, split], f"{new.name}/heads"))


def _is_flat(value: ir.Value, old: ir.Value, width: int) -> bool:
    """Return whether `value` has the batch and sequence of `old`, and its heads in one dimension."""
    return value.shape is not None and old.shape is not None and list(value.shape) == [*list(old.shape)[:2], width]


def _flatten_heads(model: ir.Model, value: ir.Value) -> ir.Value:
    """Return [B, heads, S, H] as [B, S, heads x H]: what it was made of where that is it, else transposed."""
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == (0, 2, 1, 3):
        split = node.inputs[0]
    else:
        split = append(model, "Transpose", [value], f"{value.name}/tokens", {"perm": [0, 2, 1, 3]})
        shape = list(value.shape or ())
        split.type, split.shape = value.type, ir.Shape([shape[0], shape[2], shape[1], shape[3]])
    assert split is not None
    width = _get_size(value, 1) * _get_size(value, 3)
    maker = split.producer()
    source = maker.inputs[0] if maker is not None and maker.op_type == "Reshape" else None
    if source is not None and _is_flat(source, split, width):
        return source
    known = [use.node for use in split.uses() if use.node.name == f"{split.name}/flat"]
    if known:
        return known[0].outputs[0]
    flat = append(model, "Reshape", [split, _add_number(model, [0, 0, width])], f"{split.name}/flat")
    flat.type, flat.shape = value.type, ir.Shape((*list(split.shape or ())[:2], width))
    return flat


def _count_positions(model: ir.Model) -> None:
    """Write positions where they are still read: from 0 in a first call, else those after each sequence's own past."""
    old = next((value for node in model.graph for value in node.outputs if value.name == POSITIONS), None)
    if old is None:
        return
    values = {value.name: value for node in model.graph for value in node.outputs}
    zero, one, new = _add_number(model, [0]), _add_number(model, [1]), _count_new(model)
    first = append(model, "Equal", [new, values["tokens/shape"]], "tokens/first")
    before = append(model, "Sub", [values["tokens/count"], new], "tokens/before")
    start = append(model, "Where", [first, zero, before], "tokens/start")
    column = append(model, "Unsqueeze", [start, one], "tokens/column")
    steps = _count_steps(model, new)
    positions = append(model, "Add", [column, steps], "tokens/positions")
    positions.type, positions.shape = old.type, old.shape
    reroute(uses_of(old), positions)
    old.name, positions.name = f"{POSITIONS}/plain", POSITIONS


def _is_size(node: ir.Node, axis: int) -> bool:
    """Return whether `node` is the Shape that gives this dimension alone."""
    span = int_attribute(node, "start", 0), int_attribute(node, "end", 4)
    return node.op_type == "Shape" and span == (axis, axis + 1)


def _add_number(model: ir.Model, value: int | list[int]) -> ir.Value:
    """Return an int64 constant, shared by all that use the same."""
    array = np.array(value, np.int64)
    name = f"int64/{'x'.join(map(str, array.ravel()))}" + ("" if array.ndim else "/scalar")
    held = model.graph.initializers.get(name)
    same = held is not None and is_constant(held) and np.array_equal(constant(held), array)
    return held if held is not None and same else initializer(model, name, array)


def _find_input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)


def _get_size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise NotMatched(f"{value.name} has no fixed size along axis {axis}")
    return size
