"""Find attention over a key-value cache in an exported graph, by what its nodes do and what they compute.

Read from the cache's outputs: present = Concat(past, new); scores = query x present keys, scaled, perhaps capped, and
masked; probabilities x present values. Each group of query heads may share a repeated head of the cache. What a mask
and a table of rotary angles are is known by running the nodes that make them, whatever those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.edit import tidy
from compress.graph.layers import constant, int_attribute, is_constant, node_scope
from compress.graph.run import clone, open_session
from compress.graph.specs import POSITIONS, cache_pairs, past_name, present_name

SCALAR_FACTORS = ("Mul", "Div")
UNKNOWN_LENGTH = 2**17
"""Tokens among which a window is looked for where a model does not say how many it was made for."""
VISIBLE = -1e4
"""What a mask adds where a token may not look lies below this."""


class NotMatched(Exception):
    """What stands in the place of a node that attention was expected to have."""


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention. B batch, S sequence, T total, N query heads, K cached heads, H their size."""

    layer: int
    name: str
    """The module that computes it, where the exporter left its path."""
    query: ir.Value
    """[B, N, S, H]"""
    key: ir.Value
    """The new tokens' keys, [B, K, S, H]."""
    value: ir.Value
    """The new tokens' values, [B, K, S, H]."""
    output: ir.Value
    """[B, S, N, H]"""
    mask: ir.Value
    """Added to the scores: 0 where a token may look, very negative elsewhere; broadcasts to [B, N, S, T]."""
    scale: float
    softcap: float
    """Scores are softcap * tanh(scores / softcap) before the mask; 0: as they are."""


def find_attention(model: ir.Model, layer: int) -> Attention:
    """Find the attention of one cached layer. Raises NotMatched, which says what stands where."""
    outputs = {value.name: value for value in model.graph.outputs}
    presents = [outputs[present_name(layer, kind)] for kind in ("key", "value")]
    new_key, new_value = (
        _find_appended(present, past_name(layer, kind))
        for present, kind in zip(presents, ("key", "value"), strict=True)
    )
    keys = _get_only_use(_skip_repetition(presents[0]), "Transpose")
    if tuple(keys.attributes["perm"].as_ints()) != (0, 1, 3, 2):
        raise NotMatched(f"{keys.name} does not transpose keys")
    scores = _get_only_use(keys.outputs[0], "MatMul")
    if scores.inputs[1] is not keys.outputs[0] or scores.inputs[0] is None:
        raise NotMatched(f"{scores.name} does not multiply queries by keys")
    softmax, mask, scale, softcap = _find_mask(scores.outputs[0])
    weighted = _get_only_use(softmax.outputs[0], "MatMul")
    if weighted.inputs[1] is not _skip_repetition(presents[1]):
        raise NotMatched(f"{weighted.name} does not multiply probabilities by the cached values")
    moved = _get_only_use(weighted.outputs[0], "Transpose")
    if tuple(moved.attributes["perm"].as_ints()) != (0, 2, 1, 3):
        raise NotMatched(f"{moved.name} does not bring heads together")
    return Attention(
        layer, node_scope(scores), scores.inputs[0], new_key, new_value, moved.outputs[0], mask, scale, softcap
    )


def _find_appended(present: ir.Value, past: str) -> ir.Value:
    """Return the new part of present = Concat(past, new) along the tokens."""
    node = present.producer()
    if (
        node is None
        or node.op_type != "Concat"
        or len(node.inputs) != 2
        or int_attribute(node, "axis", 0) not in (-2, 2)
    ):
        raise NotMatched(f"{present.name} is not past and new tokens put together")
    before, new = node.inputs
    if before is None or before.name != past or new is None:
        raise NotMatched(f"{present.name} does not begin with {past}")
    return new


def _skip_repetition(present: ir.Value) -> ir.Value:
    """Return the cache with each head repeated for its query heads: after Unsqueeze, Expand, Reshape; or as it is."""
    uses = [use.node for use in present.uses()]
    if len(uses) != 1 or uses[0].op_type != "Unsqueeze":
        return present
    axes = uses[0].inputs[1]
    if not is_constant(axes) or constant(axes).ravel().tolist() not in ([2], [-3]):
        raise NotMatched(f"{uses[0].name} repeats something else than heads")
    return _get_only_use(_get_only_use(uses[0].outputs[0], "Expand").outputs[0], "Reshape").outputs[0]


def _find_mask(value: ir.Value) -> tuple[ir.Node, ir.Value, float, float]:
    """Return (Softmax node, mask, scale, softcap) of what is done to the scores."""
    factor, inner, capped = 1.0, 1.0, False
    while True:
        node = _get_only_use(value)
        if node.op_type in SCALAR_FACTORS:
            first = node.inputs[0] is value
            other = node.inputs[1] if first else node.inputs[0]
            if not is_constant(other) or constant(other).size != 1 or (node.op_type == "Div" and not first):
                raise NotMatched(f"{node.op_type} {node.name} of the scores by what is no constant")
            number = float(constant(other).ravel()[0])
            factor *= 1.0 / number if node.op_type == "Div" else number
        elif node.op_type == "Tanh" and not capped:
            inner, factor, capped = factor, 1.0, True
        elif node.op_type == "Add":
            break
        else:
            raise NotMatched(f"{node.op_type} {node.name} between the scores and their mask")
        value = node.outputs[0]
    mask = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    softmax = _get_only_use(node.outputs[0], "Softmax")
    if mask is None or int_attribute(softmax, "axis", -1) not in (-1, 3):
        raise NotMatched(f"{softmax.name} is not over the tokens")
    return softmax, mask, inner * factor, factor if capped else 0.0


def _get_only_use(value: ir.Value, op: str = "") -> ir.Node:
    nodes = [use.node for use in value.uses()]
    if len(nodes) != 1:
        raise NotMatched(f"{value.name} is read {len(nodes)} times")
    if op and nodes[0].op_type != op:
        raise NotMatched(f"{nodes[0].op_type} {nodes[0].name} where a {op} was expected")
    return nodes[0]


@dataclass(frozen=True, eq=False)
class Rotated:
    """A tensor [B, heads, S, H] whose first channels are turned: x cos + (-second half, first half) sin."""

    source: ir.Value
    cos: ir.Value
    sin: ir.Value


def find_rotation(value: ir.Value) -> Rotated | None:
    """Return the rotation that gives `value`, of all channels or of the first ones only; None for any other."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return _match_rotation(value)
    turned, rest = (_match_rotation(node.inputs[0]) if node.inputs[0] else None), _match_slice(node.inputs[1])
    if turned is None or rest is None:
        return None
    whole, start, end = rest
    size = _last_dim(whole)
    if turned.source is whole:
        return turned if start == size else None  # nothing is left over
    first = _match_slice(turned.source)
    if first is None or first[0] is not whole or first[1] != 0 or first[2] != start or end < size:
        return None
    return Rotated(whole, turned.cos, turned.sin)


def _match_rotation(value: ir.Value) -> Rotated | None:
    add = value.producer()
    if add is None or add.op_type != "Add":
        return None
    products = [term.producer() if term is not None else None for term in add.inputs]
    for straight, crossed in (products, products[::-1]):
        if straight is None or crossed is None or {straight.op_type, crossed.op_type} != {"Mul"}:
            return None
        for index in (0, 1):
            source = _match_half_turn(crossed.inputs[index])
            if source is not None and source in straight.inputs:
                cos = straight.inputs[1 - straight.inputs.index(source)]
                sin = crossed.inputs[1 - index]
                return Rotated(source, cos, sin) if cos is not None and sin is not None else None
    return None


def _match_half_turn(value: ir.Value | None) -> ir.Value | None:
    """Return x where `value` is (-second half of x, first half of x) along the last axis."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    negated = node.inputs[0].producer() if node.inputs[0] is not None else None
    if negated is None or negated.op_type != "Neg":
        return None
    second, first = _match_slice(negated.inputs[0]), _match_slice(node.inputs[1])
    if second is None or first is None or second[0] is not first[0]:
        return None
    size = _last_dim(first[0])
    return first[0] if first[1] == 0 and first[2] == second[1] == size // 2 and second[2] >= size > 0 else None


def _match_slice(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """Return (x, start, end) where `value` is a constant slice of x along its last axis."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Slice" or len(node.inputs) < 4 or node.inputs[0] is None:
        return None
    parts = node.inputs[1:]
    if not all(is_constant(part) and constant(part).size == 1 for part in parts):
        return None
    start, end, axis, step = [*(int(constant(part).ravel()[0]) for part in parts), 1][:4]
    source = node.inputs[0]
    if step != 1 or axis not in (-1, len(source.shape or ()) - 1):
        return None
    return source, start, end


def _last_dim(value: ir.Value) -> int:
    size = value.shape[-1] if value.shape else 0
    return size if isinstance(size, int) else 0


def mask_window(model: ir.Model, mask: ir.Value, length: int) -> int:
    """Return how many tokens back a token may look, itself included; -1: all. Known by running what makes the mask.

    Raises NotMatched for a mask that is not causal, lets padding through, or is another beside other tokens.
    """
    if _reads_values(mask, "input_ids"):
        raise NotMatched(f"the mask {mask.name} is by which tokens there are: those of an image see one another")
    far, near = max(length, 16) if length else UNKNOWN_LENGTH, (5, 4)
    row = _evaluate_mask(model, mask, far - 1, 1)[0]
    window = int(row.sum())
    small = _evaluate_mask(model, mask, *near)
    positions = np.arange(sum(near))
    distance = positions[-near[1] :, None] - positions
    if not (row[far - window :].all() and np.array_equal(small, (distance >= 0) & (distance < window))):
        raise NotMatched(f"the mask {mask.name} is not that of tokens that look back")
    padded = _evaluate_mask(model, mask, *near, padding=2)
    if not np.array_equal(padded, small & (positions >= 2)):
        raise NotMatched(f"the mask {mask.name} lets padding through")
    return -1 if window == far else window


def _reads_values(value: ir.Value, name: str) -> bool:
    """Return whether `value` is computed of what the input of that name holds, and not of its sizes alone."""
    waiting, known = [value], {value}
    while waiting:
        node = waiting.pop().producer()
        read = {each for each in node.inputs if each is not None} if node is not None else set()
        if node is None or node.op_type in ("Shape", "Size"):
            continue
        if any(each.name == name and each.is_graph_input() for each in read):
            return True
        waiting += read - known
        known |= read
    return False


def _evaluate_mask(model: ir.Model, mask: ir.Value, past: int, sequence: int, padding: int = 0) -> np.ndarray:
    """Return which of past + sequence tokens each new one may look at: bool [sequence, past + sequence]."""
    tokens = np.ones((1, past + sequence), np.int64)
    tokens[:, :padding] = 0
    inputs, kept = {value.name: value for value in model.graph.inputs}, cache_pairs(model)
    feeds = {name: _make_past(inputs[name], past) for name in kept}
    feeds |= {"input_ids": np.zeros((1, sequence), np.int64), "attention_mask": tokens}
    results = evaluate(model, [mask.name or ""], feeds)
    if results is None or results[0].size != sequence * (past + sequence):
        raise NotMatched(f"the mask {mask.name} needs more than the sizes and the attention mask")
    values = results[0].reshape(sequence, past + sequence)
    if not np.isin(values[values > VISIBLE], (0,)).all():
        raise NotMatched(f"the mask {mask.name} adds more than 0 and very negative numbers")
    visible: np.ndarray = values > VISIBLE
    return visible


def _make_past(value: ir.Value, length: int) -> np.ndarray:
    """Return a past of one row. One that grows has `length` and no other size: a mask reads that alone."""
    sizes = [size if isinstance(size, int) else 0 for size in list(value.shape or ())[1:]]
    return np.zeros((1, *((1 if size else length) if 0 in sizes else size for size in sizes)), np.float32)


def angle_table(model: ir.Model, angle: ir.Value, length: int) -> np.ndarray | None:
    """Return cos or sin for each position, [length, channels / 2]; None if it is no function of the position alone."""
    width = angle.shape[-1] if angle.shape else None
    # a rotary table is written into the file up to 128 MiB
    if not isinstance(width, int) or length * width // 2 > 2**25 or width % 16:
        return None  # the kernel takes a multiple of 8 angles
    few = np.array([[0, 3 % length, length - 1]], np.int64)
    names = [angle.name or ""]
    whole = evaluate(model, names, {POSITIONS: np.arange(length, dtype=np.int64)[None]})
    parts = [evaluate(model, names, {POSITIONS: few[:, i : i + 1]}) for i in range(few.shape[1])]
    if whole is None or any(part is None or part[0].size != width for part in parts) or whole[0].size != length * width:
        return None
    table = whole[0].reshape(length, width)
    alone = np.concatenate([part[0].reshape(1, width) for part in parts if part is not None])
    first, second = np.split(table, 2, axis=1)
    if not np.allclose(table[few[0]], alone, rtol=0, atol=1e-5) or not np.array_equal(first, second):
        return None
    return np.ascontiguousarray(first)


def evaluate(model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    """Compute the named values where those that `feeds` names, if there are any, are its arrays of fitting shapes.

    None where the values need more than those feeds, or the nodes do not take them.
    """
    part = _cut_part(model, names, feeds)
    if part is None:
        return None
    try:
        session = open_session(part, threads=1)
        wanted = {value.name for value in part.graph.inputs}
        return [np.asarray(output) for output in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            return None
        raise


def _cut_part(model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> ir.Model | None:
    """Return the graph between the fed values and the named ones; None where an input that it needs is not fed."""
    copy = clone(model)
    values = {value.name: value for node in copy.graph for value in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    outputs = [values[name] for name in names]
    copy.graph.outputs.clear()
    copy.graph.inputs.clear()
    for name in filter(values.__contains__, feeds):  # code that counts positions itself has none by their name
        _feed_value(copy, values[name], feeds[name])
    for value in outputs:
        value.type, value.shape = value.type or ir.TensorType(ir.DataType.FLOAT), None
        copy.graph.outputs.append(value)
    for node in copy.graph:
        for value in node.outputs:
            value.shape = None  # they were those of other sizes
    tidy(copy)
    made = {value for node in copy.graph for value in node.outputs} | set(copy.graph.inputs)
    held = set(copy.graph.initializers.values())
    known = made | held
    complete = all(value is None or value in known for node in copy.graph for value in node.inputs)
    unused = [value for value in copy.graph.inputs if not list(value.uses())]
    for value in unused:
        copy.graph.inputs.remove(value)
    return copy if complete and all(value in known for value in outputs) else None


def _feed_value(model: ir.Model, value: ir.Value, array: np.ndarray) -> None:
    name = value.name
    value.name = f"{name}/made"
    fed = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, fed)
    model.graph.inputs.append(fed)
