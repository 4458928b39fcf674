"""Why a candidate is slow: mechanisms that are seen in its executed graph, each with what would end it and the gain.

None is a list of models: products left in float between Q and DQ, signed activations without kernels, casts, weights
of few bits that are computed in float, layers that are bound by their products so that smaller weights cannot help,
widths that kernels do not like. A cause is told where ending it would save WORTH of the call; what cannot be told
apart from noise is not told.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.bundle.onnx_file import GraphNode
from runtime.clock.peaks import Peaks, Product
from runtime.judge.twins import ProfiledPair
from runtime.measure.profile import INTEGER, NodeTime, Profile

WORTH, WORTH_OF_FAST = 0.05, 0.1
"""Share of a call below which a saving is not worth a word: of a candidate that is no faster than its baseline, and of
one that is, where silence is better than a false alarm."""
MOST_NAMED = 8
QUANTIZING = ("QuantizeLinear", "DequantizeLinear")
SLOWER = 1.25
"""A layer that takes this many times its twin's time counts as slower: two profiles of one layer differ by less."""
KERNEL_WIDTH = 8
"""Channels that kernels take at once, or a divisor of it."""
LARGE_GROUP = 128
"""Weights that share a scale where kernels take it in one step. Products of Qwen2.5-Coder 0.5B's and 1.5B's sizes, two
threads, AVX-512 with VNNI: one row 1.2 to 2.3 times as fast as in groups of 32, 128 rows 1.5 to 1.8 times; in groups of
64 as in 32."""
LAYOUT = ("ReorderInput", "ReorderOutput")
FIXED_COST_MS = 0.2
"""A call below this may be mostly the runtime's own cost."""
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Cause:
    """One reason, and what would end it."""

    kind: str
    """A name that stays: signed_activations, unfused_qdq, casts, computed_in_float, small_groups, compute_bound,
    odd_widths, no_int8_kernels, zeros_computed, slower_layers, other_operators, fixed_cost."""
    seen: str
    """What the profile shows, with its numbers."""
    why: str
    """Why that is slow."""
    change: str
    """What to do."""
    recipe: str = ""
    """A piece of a recipe that does it, YAML, as the build put it into the bundle; "" where no recipe does."""
    saves_ms: float = 0.0
    """About what that saves of a call; 0 where it cannot be told."""
    speedup: float = 1.0
    """The call's time over what would be left."""
    layers: tuple[str, ...] = ()
    """The costliest layers or nodes concerned."""

    @property
    def sentence(self) -> str:
        """Return the cause as sentences for a report."""
        gain = f" (about {self.speedup:.2f}x)" if self.saves_ms else ""
        return f"{_begin(self.seen)}: {self.why}. {_begin(self.change)}{gain}."


Found = tuple[Cause | None, set[str]]
NOTHING: Found = (None, set())


def advise_placement(pair: ProfiledPair, remedy: str, change: str) -> tuple[str, str]:
    """Return what to do about operators around int8 layers, and its recipe: nothing that is in force already."""
    if pair.timed_placement:
        return "placements were timed at the build already, and this was the fastest: ignore layers, or nothing", ""
    return f"{change}; or ignore these layers", pair.fill_remedy(remedy)


def total_ms(nodes: Iterable[NodeTime]) -> float:
    """Return the time of the nodes together."""
    return sum(node.ms for node in nodes)


def make_cause(
    pair: ProfiledPair,
    kind: str,
    nodes: Sequence[NodeTime],
    saves_ms: float,
    words: tuple[str, str, str],
    recipe: str = "",
) -> Found:
    """Make a cause of what `nodes` take, unless it saves too little. `words`: what is seen, why, what to change."""
    call = pair.after.call_ms
    if saves_ms < (WORTH if is_slower(pair) else WORTH_OF_FAST) * call:
        return NOTHING
    costly = sorted(nodes, key=lambda node: -node.ms)[:MOST_NAMED]
    layers = tuple(dict.fromkeys(node.layer or node.name for node in costly))
    left = max(call - saves_ms, 0.05 * call)
    cause = Cause(kind, *words, recipe, round_digits(saves_ms), round(call / left, 2), layers)
    return cause, {node.name for node in nodes}


def is_slower(pair: ProfiledPair) -> bool:
    """Return whether the candidate's profile is hardly shorter than the baseline's, or there is none."""
    return pair.before is None or pair.after.call_ms > 0.9 * pair.before.call_ms


def round_digits(value: float) -> float:
    """Round to four digits, for a record that is read by people."""
    return 0.0 if not value or not math.isfinite(value) else round(value, 3 - math.floor(math.log10(abs(value))))


def _begin(text: str) -> str:
    return text[0].upper() + text[1:]


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
    # below half of unsigned int8's rate signed int8 is the slow way: 0.08 of it on a CPU with VNNI
    if not unsigned or signed > 0.5 * unsigned:
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
    recipe = pair.fill_remedy("signed_activations")
    if pair.target not in ("", profile.backend):
        change = (
            f"{pair.target}, which it is made for, wants them signed: judge its speed there; for "
            f"{profile.backend} add an export of its own"
        )
        recipe = pair.fill_remedy("signed_activations_elsewhere")
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
    readers = [n for dq in unpacking for n in profile.readers.get(dq.outputs[0].name, []) if n.is_product]
    computed = {node.name: node for node in (*between, *products, *readers)}
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
        recipe = pair.fill_remedy("unfused_batch_norm")
    else:
        why = (
            f"{profile.backend} fuses Q and DQ only into operators that it has int8 kernels for, and between them "
            "tensors go to float and back"
        )
        change, recipe = advise_placement(
            pair, "unfused_qdq", "leave out what does not pay: compress's int8 times placements here"
        )
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
        # behind so many nodes a layer's other end is no longer looked for
        if len(found) > 1000:
            break
        front += [reader for tensor in node.outputs for reader in profile.readers.get(tensor.name, [])]
    return list(found.values())


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
        pair.fill_remedy("no_int8_kernels"),
    )
    return cause, {node.name for node in integer}


def _weight_only(profile: Profile) -> list[NodeTime]:
    return [node for node in profile.products if node.operator == "MatMulNBits" and node.flops]


def _as_trial(node: NodeTime, level: int, block: int = 0) -> Product:
    settings = node.integers
    return Product(
        node.rows,
        node.input_width,
        node.output_width,
        "bits",
        settings.get("bits", 4),
        block or settings.get("block_size", 32),
        level,
    )


def find_computed_in_float(pair: ProfiledPair, told: set[str]) -> Found:
    """Find weights of few bits that are unpacked to multiply in float32, where eight bits are faster in a trial."""
    nodes = [node for node in _weight_only(pair.after) if node.computes_in == "float32"]
    if not nodes:
        return NOTHING
    heaviest = max(nodes, key=lambda node: node.ms)
    level = heaviest.integers.get("accuracy_level", 0)
    now, then = pair.trials([_as_trial(heaviest, level), _as_trial(heaviest, 4)])
    if not now or not then or then > now:
        return NOTHING
    share = 1 - then / now
    return make_cause(
        pair,
        "computed_in_float",
        nodes,
        share * total_ms(nodes),
        (
            f"{len(nodes)} MatMulNBits have accuracy_level {level} ({total_ms(nodes):.3g} of "
            f"{pair.after.call_ms:.3g} ms)",
            f"below level 4 the weights are unpacked and multiplied in float32; the largest, alone, takes {now:.3g} ms "
            f"so and {then:.3g} ms at level 4",
            "write accuracy_level 4; compress writes Q/DQ, which onnxruntime fuses at that level",
        ),
        pair.fill_remedy("computed_in_float"),
    )


def find_small_groups(pair: ProfiledPair, told: set[str]) -> Found:
    """Find weights of few bits in groups that a trial shows to be slower than groups of LARGE_GROUP."""
    nodes = [
        node
        for node in _weight_only(pair.after)
        if node.computes_in != "float32"
        and node.integers.get("block_size", 32) < LARGE_GROUP
        and node.input_width % LARGE_GROUP == 0
    ]
    if not nodes:
        return NOTHING
    heaviest = max(nodes, key=lambda node: node.ms)
    size, level = heaviest.integers.get("block_size", 32), heaviest.integers.get("accuracy_level", 0)
    now, then = pair.trials([_as_trial(heaviest, level), _as_trial(heaviest, level, LARGE_GROUP)])
    if not now or not then or then > now:
        return NOTHING
    return make_cause(
        pair,
        "small_groups",
        nodes,
        (1 - then / now) * total_ms(nodes),
        (
            f"{len(nodes)} MatMulNBits have a scale for every {size} weights ({total_ms(nodes):.3g} of "
            f"{pair.after.call_ms:.3g} ms)",
            f"kernels here take longer groups in one step: the largest, alone, takes {now:.3g} ms so and {then:.3g} ms "
            f"in groups of {LARGE_GROUP}",
            f"group_size: {LARGE_GROUP}, which costs some accuracy and gives a smaller file",
        ),
        pair.fill_remedy("small_groups"),
    )


def find_compute_bound(pair: ProfiledPair, told: set[str]) -> Found:
    """Find weights of few bits in products that read so many rows that reading the weights is a small part of them."""
    twins, profile, peaks = pair.twins, pair.after, pair.peaks
    floats = peaks.gflops.get("float32", 0.0)
    bound: list[tuple[NodeTime, float]] = []
    for node in _weight_only(profile):
        twin = twins.get(node.name)
        if twin is not None and not twin.flops:
            continue
        before_ms = twin.ms if twin is not None else node.flops / floats / 1e6 if floats else 0.0
        reading_ms = 4 * node.input_width * node.output_width / pair.before_peaks.gb_per_s / 1e6
        # a float layer that its products bound reads its weights in less than a quarter of its time
        if before_ms and reading_ms < 0.25 * before_ms and node.ms > 0.7 * before_ms:
            bound.append((node, reading_ms / before_ms))
    nodes = [node for node, _ in bound]  # also those that are computed in float: this may save more
    if not nodes or total_ms(nodes) < 0.3 * profile.call_ms:
        return NOTHING
    share = max(part for _, part in bound)
    heaviest = max(nodes, key=lambda node: node.ms)
    faster_ms = (
        sum(min(node.ms, 1.2 * node.flops / peaks.gflops["uint8"] / 1e6) for node in nodes)
        if peaks.gflops.get("uint8")
        else total_ms(nodes)
    )
    return make_cause(
        pair,
        "compute_bound",
        nodes,
        total_ms(nodes) - faster_ms,
        (
            f"{len(nodes)} products of few-bit weights take {total_ms(nodes):.3g} of {profile.call_ms:.3g} ms with "
            f"{heaviest.rows} rows in a call, at {heaviest.gflops:.0f} GFLOP/s where float32 peaks at {floats:.0f}",
            f"they are bound by the products: reading even the float weights is at most {100 * share:.0f} % of their "
            "time, so that smaller weights cannot save more",
            f"quantize activations too, for products in int8 (peak here {peaks.gflops.get('uint8', 0):.0f} GFLOP/s); "
            "few-bit weights pay with few rows in a call, as in decoding",
        ),
        pair.fill_remedy("compute_bound"),
    )


def _file_widths(profile: Profile, node: NodeTime) -> tuple[int, ...]:
    """Return a layer's channels or columns as the file has them: a runtime pads what it executes."""
    source = next((n for n in profile.file.nodes if n.name == node.source), None)
    shapes = [
        profile.file.constants[name][1]
        for name in (source.inputs[1:2] if source else ())
        if name in profile.file.constants
    ]
    return shapes[0][:2] if shapes and len(shapes[0]) > 1 else (node.output_width, node.input_width)


def _needed_flops(profile: Profile, node: NodeTime) -> float:
    """Return a layer's operations at the widths of the file: what a runtime pads is computed for nothing."""
    executed = node.output_width * node.input_width
    return node.flops * min(1.0, math.prod(_file_widths(profile, node)) / executed) if executed else node.flops


def find_odd_widths(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers whose widths were changed to no multiple of KERNEL_WIDTH, at a much lower rate than their twins."""
    profile, before = pair.after, pair.before
    odd: list[tuple[NodeTime, NodeTime]] = []
    rates: dict[str, tuple[float, float]] = {}
    saves = 0.0
    for node in profile.products:
        twin = pair.twins.get(node.name)
        if twin is None or before is None or not (node.flops and twin.flops and node.ms) or node.name in told:
            continue
        ours, theirs = _file_widths(profile, node), _file_widths(before, twin)
        changed = [a for a, b in zip(ours, theirs, strict=False) if a != b and a % KERNEL_WIDTH]
        rate, usual = _needed_flops(profile, node) / node.ms / 1e6, _needed_flops(before, twin) / twin.ms / 1e6
        # its width counts as one that kernels do not like
        if changed and node.computes_in == twin.computes_in and rate < 0.85 * usual:
            odd.append((node, twin))
            rates[node.name] = rate, usual
            saves += node.ms * (1 - rate / usual)
    if not odd:
        return NOTHING
    assert before is not None
    after, twin = max(odd, key=lambda pair: pair[0].ms)
    widths, usual_widths = (
        " x ".join(map(str, _file_widths(side, node))) for side, node in ((profile, after), (before, twin))
    )
    rate, usual = rates[after.name]
    reorders = profile.find(*LAYOUT)  # from kernels that take channels in blocks to those that do not, and back
    saves += max(0.0, total_ms(reorders) - total_ms(before.find(*LAYOUT)))
    moved = f", and {len(reorders)} copies between layouts take {total_ms(reorders):.3g} ms" if reorders else ""
    return make_cause(
        pair,
        "odd_widths",
        [*(node for node, _ in odd), *reorders],
        saves,
        (
            f"{len(odd)} layers have widths that are no multiple of {KERNEL_WIDTH} and run slower for it: "
            f"{after.layer} ({widths}) at {rate:.0f} GFLOP/s, its twin ({usual_widths}) at {usual:.0f}{moved}",
            f"{profile.backend}'s kernels take channels in blocks: they fill up other widths, or compute them by a "
            "slower way",
            "prune to multiples of 8 or 16",
        ),
        pair.fill_remedy("odd_widths"),
    )


def find_zeros_computed(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers with zeros that are multiplied as any other number."""
    sparse = {layer for layer, history in pair.histories.items() if any("sparse " in h for h in history)}
    twins = pair.twins
    same = [
        node
        for node in pair.after.products
        if node.layer in sparse
        and (t := twins.get(node.name)) is not None
        and t.flops == node.flops
        and t.computes_in == node.computes_in
    ]
    if not same or not is_slower(pair):
        return NOTHING
    cause = Cause(
        "zeros_computed",
        f"{len(same)} layers with zeros in their weights multiply as much as before "
        f"({sum(node.flops for node in same) / 1e9:.3g} GFLOP of a call)",
        f"{pair.after.backend} multiplies zeros as any other number",
        "remove whole channels, or use fewer bits",
        pair.fill_remedy("zeros_computed"),
        layers=tuple(node.layer for node in same[:MOST_NAMED]),
    )
    return cause, {node.name for node in same}


def find_slower_layers(pair: ProfiledPair, told: set[str]) -> Found:
    """Find layers that take much longer than their twins, for no reason that was told already."""
    twins = pair.twins
    slow = [
        (node, twin)
        for node in pair.after.products
        if node.name not in told
        and (twin := twins.get(node.name)) is not None
        and node.ms > SLOWER * twin.ms
        and node.computes_in != twin.computes_in
    ]
    if not slow:
        return NOTHING
    nodes = [node for node, _ in slow]
    after, twin = max(slow, key=lambda pair: pair[0].ms - pair[1].ms)
    names = [node.layer for node in sorted(nodes, key=lambda node: -node.ms)][:MOST_NAMED]
    return make_cause(
        pair,
        "slower_layers",
        nodes,
        sum(node.ms - twin.ms for node, twin in slow),
        (
            f"{len(nodes)} layers take {total_ms(nodes):.3g} ms, in the baseline {sum(t.ms for _, t in slow):.3g} ms: "
            f"{after.layer} {after.ms:.3g} ms as {after.operator}, {twin.ms:.3g} ms as {twin.operator}",
            f"{pair.after.backend}'s kernels in {after.computes_in} are slower for these shapes than those in "
            f"{twin.computes_in}",
            "leave these layers as they were",
        ),
        pair.fill_remedy("slower_layers", names),
    )


def find_casts(pair: ProfiledPair, told: set[str]) -> Found:
    """Find casts between float types that are executed: what has no kernel in half precision is computed in float32."""
    profile = pair.after
    casts = [n for n in profile.find("Cast", "Convert") if {t.dtype for t in (n.inputs[0], n.outputs[0])} & set(HALF)]
    return make_cause(
        pair,
        "casts",
        casts,
        total_ms(casts),
        (
            f"{len(casts)} casts between float types are executed ({total_ms(casts):.3g} of {profile.call_ms:.3g} ms)",
            f"{profile.backend} has few half-precision kernels for CPUs, and computes the rest in float32",
            "keep float32 here; half precision pays on a GPU or, as bfloat16, in openvino on CPUs that have it",
        ),
        pair.fill_remedy("casts"),
    )


def find_other_operators(pair: ProfiledPair, told: set[str]) -> Found:
    """Find operators that multiply nothing and take more of a call than they did in the baseline."""
    before = pair.before
    if before is None or not is_slower(pair):
        return NOTHING
    ours, theirs = (_sum_others(side, told) for side in (pair.after, before))
    grown = {name: ms - theirs.get(name, 0.0) for name, ms in ours.items() if ms > SLOWER * theirs.get(name, 0.0)}
    nodes = [n for n in pair.after.nodes if not n.is_product and n.name not in told and _family(n) in grown]
    shrunk = sum(max(0.0, ms - ours.get(name, 0.0)) for name, ms in theirs.items())  # fused into another operator
    top = sorted(grown, key=lambda name: -grown[name])[:3]
    change, recipe = advise_placement(pair, "other_operators", "quantize the inputs of products alone")
    listed = ", ".join(f"{name} {ours[name]:.3g} ms (before {theirs.get(name, 0.0):.3g})" for name in top)
    return make_cause(
        pair,
        "other_operators",
        nodes,
        sum(grown.values()) - shrunk,
        (
            f"operators beside the products take {sum(ours.values()):.3g} ms, and {sum(theirs.values()):.3g} ms in the "
            f"baseline: {listed}",
            "what was done to the layers brought these operators, or slower ones than before",
            change,
        ),
        recipe,
    )


def _sum_others(profile: Profile, told: set[str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for node in profile.nodes:
        if not node.is_product and node.name not in told:
            sums[_family(node)] += node.ms
    return dict(sums)


def _family(node: NodeTime) -> str:
    """Return the name that an operator and its form in eight bits, or one with a sum in it, share."""
    return node.operator.removeprefix("QLinear").removeprefix("Skip").removeprefix("Bias")


def find_fixed_cost(pair: ProfiledPair, told: set[str]) -> Found:
    """Find calls so short that most of them is the runtime's own cost."""
    profile = pair.after
    outside = profile.call_ms - profile.nodes_ms
    if profile.call_ms > FIXED_COST_MS or not is_slower(pair) or outside < 0.4 * profile.call_ms:
        return NOTHING
    cause = Cause(
        "fixed_cost",
        f"a call takes {profile.call_ms:.3g} ms, and its {len(profile.nodes)} nodes {profile.nodes_ms:.3g} of that",
        "the rest is the runtime's own cost for each call and node, which no smaller layer saves",
        "judge throughput at a larger batch",
        pair.fill_remedy("fixed_cost"),
    )
    return cause, set()


FINDERS: tuple[Callable[[ProfiledPair, set[str]], Found], ...] = (
    find_signed_activations,
    find_unfused_qdq,
    find_casts,
    find_computed_in_float,
    find_small_groups,
    find_compute_bound,
    find_odd_widths,
    find_no_int8_kernels,
    find_zeros_computed,
    find_slower_layers,
    find_other_operators,
    find_fixed_cost,
)
"""In the order in which nodes are explained: what one has told, those behind it leave out."""
