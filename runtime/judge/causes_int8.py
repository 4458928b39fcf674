"""Why eight bits are slow: signed activations without kernels, Q and DQ that nothing took in, no kernels at all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.bundle.onnx_file import GraphNode
from runtime.clock.peaks import Peaks
from runtime.judge.cause import NOTHING, Cause, Found, advise_placement, is_slower, make_cause, total_ms
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import INTEGER, NodeTime, Profile

MUCH_SLOWER = 0.5
"""Of the rate of unsigned int8, below which signed int8 counts as the slow way: 0.08 on a CPU with VNNI."""
QUANTIZING = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class _LeftFloat:
    """A product that the file has between Q and DQ, and that is executed in float."""

    node: NodeTime
    source: GraphNode
    signed: bool
    """Whether its activation is signed."""


def _find_left_float(profile: Profile) -> list[_LeftFloat]:
    """Return products that read dequantized activations in the file, and floats when they are executed."""
    makers = {output: node for node in profile.file.nodes for output in node.outputs}
    sources = {node.name: node for node in profile.file.nodes}
    found = []
    for node in profile.products:
        source = sources.get(node.source)
        if source is None or node.computes_in in INTEGER or node.operator == "MatMulNBits":
            continue
        unpacked = [makers[name] for name in source.inputs[:2] if _is_dequantized(makers.get(name))]
        activations = [dq for dq in unpacked if dq.inputs[0] not in profile.file.constants]
        if activations and len(unpacked) == 2:
            signed = any(_zero_type(profile, dq) == "int8" for dq in activations)
            found.append(_LeftFloat(node, source, signed))
    return found


def _is_dequantized(maker: GraphNode | None) -> bool:
    return maker is not None and maker.operator == "DequantizeLinear"


def _zero_type(profile: Profile, node: GraphNode) -> str:
    """Return the type of the numbers that a QuantizeLinear gives or a DequantizeLinear reads."""
    if len(node.inputs) > 2 and node.inputs[2] in profile.file.constants:
        return profile.file.constants[node.inputs[2]][0]
    return "uint8"


def _unpacked_weights(profile: Profile, products: Iterable[NodeTime]) -> list[NodeTime]:
    """Return executed DequantizeLinear nodes that unpack the weights of these products, at every call."""
    makers = [profile.makers.get(tensor.name) for product in products for tensor in product.inputs[1:]]
    unpacking = [node for node in makers if node is not None and node.operator == "DequantizeLinear"]
    return [node for node in unpacking if node.inputs[0].constant]


def find_signed_activations(pair: ProfiledPair, told: set[str]) -> Found:
    """Find products of signed activations where signed int8 is much slower here than unsigned, or left in float."""
    profile, peaks = pair.after, pair.peaks
    signed, unsigned = peaks.gflops.get("int8", 0.0), peaks.gflops.get("uint8", 0.0)
    if not unsigned or signed > MUCH_SLOWER * unsigned:
        return NOTHING
    left = [product.node for product in _find_left_float(profile) if product.signed]
    slow = [node for node in profile.products if node.computes_in == "int8"]
    if not left and not slow:
        return NOTHING
    weights = _unpacked_weights(profile, left)
    around = [
        n
        for n in profile.find(*QUANTIZING)
        if any(t.dtype == "int8" and not t.constant and t.shape for t in (n.inputs[0], n.outputs[0]))
    ]
    saves = (
        total_ms(slow) * (1 - signed / unsigned) + total_ms(left) * _int8_saving(peaks) + total_ms([*weights, *around])
    )
    parts = []
    if left:
        anew = f", and their weights are unpacked anew at every call ({total_ms(weights):.3g} ms)" if weights else ""
        parts.append(
            f"{len(left)} of {len(profile.products)} products read signed int8 activations, and are executed in float "
            f"({total_ms(left):.3g} of {profile.call_ms:.3g} ms){anew}"
        )
    if slow:
        parts.append(
            f"{len(slow)} of {len(profile.products)} products multiply signed int8 by int8 ({total_ms(slow):.3g} of "
            f"{profile.call_ms:.3g} ms)"
        )
    change = "quantize activations to unsigned int8: build for the runtime that it runs on"
    recipe = f"target: {profile.backend}\npasses:\n  - kind: int8\n"
    if pair.target not in ("", profile.backend):
        change = (
            f"{pair.target}, which it is made for, wants them signed: judge its speed there; for "
            f"{profile.backend} add an export of its own"
        )
        recipe = f"export:\n  - kind: onnx\n  - kind: onnx\n    target: {profile.backend}\n"
    return make_cause(
        pair,
        "signed_activations",
        [*left, *slow, *weights, *around],
        saves,
        (
            "; ".join(parts),
            f"{profile.backend} multiplies signed by signed int8 at {signed:.0f} GFLOP/s here, unsigned by signed at "
            f"{unsigned:.0f}, float32 at {peaks.gflops.get('float32', 0):.0f}",
            change,
        ),
        recipe,
    )


def _int8_saving(peaks: Peaks) -> float:
    """Return the share of a float product's time that eight bits save, if both reach as much of their peaks."""
    return max(0.0, 1 - 1 / peaks.int8_gain) if peaks.int8_gain else 0.0


def find_unfused_qdq(pair: ProfiledPair, told: set[str]) -> Found:
    """Find Q and DQ that are executed around nodes which compute in float, and products left in float by them."""
    profile = pair.after
    left = [product for product in _find_left_float(profile) if product.node.name not in told]
    unpacking = [n for n in profile.find("DequantizeLinear") if n.name not in told and _is_large(n)]
    between = _between(profile, unpacking)
    packing = [
        n for n in profile.find("QuantizeLinear") if n.name not in told and _reads_from(profile, n, between, unpacking)
    ]
    if not unpacking:
        return NOTHING
    norms = [node for node in between if node.operator == "BatchNormalization"]
    products = [product.node for product in left]
    saves = total_ms([*unpacking, *packing, *norms]) + total_ms(products) * _int8_saving(pair.peaks)
    reading = [n for dq in unpacking for n in profile.readers.get(dq.outputs[0].name, []) if n.is_product]
    computed = {node.name: node for node in (*between, *products, *reading)}
    names = Counter(node.operator for node in computed.values()).most_common(3)
    around = ", ".join(f"{n} {operator}" for operator, n in names) or "the model's outputs"
    seen = (
        f"{len(unpacking) + len(packing)} Q and DQ are executed ({total_ms([*unpacking, *packing]):.3g} of "
        f"{profile.call_ms:.3g} ms) around {around}"
    )
    if products:
        seen += (
            f"; {len(products)} of {len(profile.products)} products between Q and DQ are executed in float "
            f"({total_ms(products):.3g} ms)"
        )
    batch_norm = _follows_batch_norm(profile, left) or bool(norms)
    if batch_norm:
        why = "a batch norm between a convolution and its Q keeps the runtime from fusing them into one int8 kernel"
        change = "fold batch norm into the convolutions and quantize then, as compress does with a float model"
        recipe = "passes:\n  - kind: int8\n"
    else:
        why = (
            f"{profile.backend} fuses Q and DQ only into operators that it has int8 kernels for, and between them "
            "tensors go to float and back"
        )
        change, recipe = advise_placement(pair, "leave out what does not pay: compress's int8 times placements here")
    return make_cause(
        pair, "unfused_qdq", [*unpacking, *packing, *norms, *products], saves, (seen, why, change), recipe
    )


def _is_large(node: NodeTime) -> bool:
    """Return whether a DQ unpacks more than a scale or a bias: those are read once and cost nothing."""
    shape = node.outputs[0].shape
    return shape is None or len(shape) > 1


def _between(profile: Profile, unpacking: Sequence[NodeTime]) -> list[NodeTime]:
    """Return the nodes that are not products and compute in float what a DQ gave, up to the next Q."""
    found: dict[str, NodeTime] = {}
    front = [reader for dq in unpacking for reader in profile.readers.get(dq.outputs[0].name, [])]
    while front:
        node = front.pop()
        if node.name in found or node.is_product or node.operator in QUANTIZING:
            continue
        found[node.name] = node
        if len(found) > MOST_BETWEEN:
            break
        front += [reader for tensor in node.outputs for reader in profile.readers.get(tensor.name, [])]
    return list(found.values())


MOST_BETWEEN = 1000


def _reads_from(profile: Profile, node: NodeTime, between: Sequence[NodeTime], unpacking: Sequence[NodeTime]) -> bool:
    """Return whether a Q packs what was computed in float from a DQ, or by a product that reads one."""
    maker = profile.makers.get(node.inputs[0].name)
    if maker is None:
        return False
    names = {n.name for n in (*between, *unpacking)}
    return maker.name in names or (
        maker.is_product
        and any((m := profile.makers.get(t.name)) is not None and m.name in names for t in maker.inputs)
    )


def _follows_batch_norm(profile: Profile, left: Sequence[_LeftFloat]) -> bool:
    """Return whether a batch norm reads, in the file, what most of these products give."""
    readers: dict[str, list[str]] = defaultdict(list)
    for node in profile.file.nodes:
        for name in node.inputs:
            readers[name].append(node.operator)
    n = sum("BatchNormalization" in readers[product.source.outputs[0]] for product in left)
    return n > len(left) / 2


def find_no_int8_kernels(pair: ProfiledPair, told: set[str]) -> Found:
    """Find that this CPU multiplies eight bits hardly faster than float."""
    integer = [node for node in pair.after.products if node.computes_in in INTEGER]
    peaks = pair.peaks
    if not integer or not peaks.int8_gain or peaks.int8_gain > 1.3 or not is_slower(pair):
        return NOTHING
    cause = Cause(
        "no_int8_kernels",
        f"{len(integer)} products are computed in int8, which this CPU multiplies at "
        f"{peaks.gflops['uint8']:.0f} GFLOP/s, and float32 at {peaks.gflops['float32']:.0f}",
        "without VNNI, AMX or Arm's dot products int8 gains little",
        "look at the size instead, run on another CPU, or make the model smaller with prune_channels",
        "passes:\n  - kind: prune_channels\n    ratio: 0.3\n",
    )
    return cause, {node.name for node in integer}
