"""The work of `prune_layers`: find the blocks, learn what each is worth, choose, fit what stays, take out the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from compress.blocks.activations import MicroBatch
from compress.blocks.experts import first_expert_only
from compress.blocks.layers import is_layer, layer_type
from compress.blocks.materialise import plain
from compress.blocks.sizes import shapes_of
from compress.context import PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, ModelFacts, Note, Removable
from compress.models.load import TorchModel
from compress.passes.depth import rename_blocks
from compress.passes.prune_layers import TRIED_BYTES, TRIED_ROWS, PruneLayers
from compress.pruning.compensate import compensate, explain_left_alone, follow_data
from compress.pruning.depth import BlockOutputs, Removal, Skipping, least_error, shorten
from compress.pruning.points import find_points
from compress.rounding.layer_products import layers_in
from compress.structure.dataflow import record
from compress.structure.find import structure_of
from compress.structure.removable import find_removable
from compress.work.contexts import ModelContext
from compress.work.prune_batches import pruning_batches, rows_within
from compress.work.settle_compute import find_faster

UNCONFIGURED = (
    "no config.json describes the shallower model: an ONNX file is not affected, a checkpoint needs the shapes.json "
    "that lies beside it"
)


def apply_prune_layers(config: PruneLayers, loaded: TorchModel, context: ModelContext) -> PassResult[TorchModel]:
    """Make `loaded.module` shallower in place. PassError: nothing to remove, a speed-up out of reach."""
    module = loaded.module
    batches = pruning_batches(config.kind, loaded, context)
    sample = batches[0].first
    blocks = removable_blocks(module, sample)
    if len(blocks) < 2:
        raise PassError(f"{config.kind}: {len(blocks)} blocks were found that could go; it needs two")
    skipping = Skipping(module, [block.name for block in blocks], sample)
    n_before, types = _n_weights(module), _types(module)
    few = _take_rows(batches, rows_within(loaded.outputs, TRIED_ROWS, TRIED_BYTES))
    tried = len(blocks) * sum(batch.n_rows for batch in few)
    with layers_in(find_faster(tried * n_before, context.device) or "float32", context.device):
        ranking = _rank_blocks(config, skipping, few, context)
    n_gone, notes = _count_gone(config, skipping, ranking, sample, context)
    removed = ranking.names[:n_gone]
    errors, left = _fit_without(config, skipping, removed, batches, few, context)
    configured = shorten(skipping, removed, sample)
    follow_data(module, [batch.feeds for batch in batches])
    notes += [_make_note(config, errors, _n_weights(module) / n_before, len(blocks), n_gone)]
    notes += [] if configured else [Note("warning", UNCONFIGURED)]
    loaded = replace(loaded, module=module)
    measured = {name: {"output_error": error} for name, error in zip(ranking.names, ranking.errors, strict=False)}
    return PassResult(loaded, decisions(types, blocks, removed, left), tuple(notes), measured)


def removable_blocks(module: nn.Module, sample: Mapping[str, Tensor]) -> tuple[Removable, ...]:
    """Return the blocks that can go, of a module that holds its values."""
    with first_expert_only():
        flow = record(module, sample, compute=True)
    return find_removable(flow, structure_of(flow))


def decisions(
    types: Mapping[str, str], blocks: Sequence[Removable], removed: Sequence[str], left: Mapping[str, str]
) -> tuple[LayerDecision, ...]:
    """Return decisions on the blocks, under their old names, then on the layers that are left, under their new names.

    `types`: layer -> its type, before. `left`: layer -> why it was not fitted.
    """
    taken = [LayerDecision(block.name, "block", "pruned" if block.name in removed else "kept", "") for block in blocks]
    moved = rename_blocks(blocks, removed)
    lost = {layer for removable in blocks if removable.name in removed for layer in removable.layers}
    block_of = {layer: removable.name for removable in blocks for layer in removable.layers}
    layers = []
    for name, kind in ((name, kind) for name, kind in types.items() if name not in lost):
        block = block_of.get(name, "")
        new = moved.get(block, block)
        reasons = [f"was {name}"] if new != block else []
        reasons += [f"not fitted: {left[name]}"] if name in left else []
        layers.append(LayerDecision(new + name.removeprefix(block), kind, "kept", "; ".join(reasons)))
    return (*taken, *layers)


def foresee_prune_layers(
    config: PruneLayers, loaded: TorchModel, facts: ModelFacts, context: ModelContext
) -> TorchModel:
    """Take as many blocks out of the module, in place, as the plan expects: which ones matters little to speed."""
    sample = pruning_batches(config.kind, loaded, context)[0].first
    blocks = [block.name for block in removable_blocks(loaded.module, sample)]
    stay = config.expected(facts)
    shorten(Skipping(loaded.module, blocks, sample), [name for k, name in enumerate(blocks) if k not in stay], sample)
    return loaded


def _rank_blocks(config: PruneLayers, skipping: Skipping, few: Sequence[MicroBatch], context: ModelContext) -> Removal:
    """Rank the blocks that may go, by trying them one by one on `few`; those of `layers` are left as they stand."""
    n = len(skipping.blocks)
    if config.layers is not None:
        return Removal(tuple(name for k, name in enumerate(skipping.blocks) if k not in config.layers), ())
    n_gone = n - 1 if config.speedup is not None else n - config.n_kept(n)
    return least_error(skipping, n_gone, few, context.progress)


def _take_rows(batches: Sequence[MicroBatch], rows: int) -> list[MicroBatch]:
    """Return the first batches, of so many rows together, or one."""
    taken, n_rows = [batches[0]], batches[0].n_rows
    for batch in batches[1:]:
        n_rows += batch.n_rows
        if n_rows > rows:
            break
        taken.append(batch)
    return taken


def _count_gone(
    config: PruneLayers, skipping: Skipping, ranking: Removal, sample: Mapping[str, Tensor], context: ModelContext
) -> tuple[int, list[Note]]:
    """Return how many of the ranking go: as few as the speed-up takes, where one is asked for, found by halving."""
    if config.speedup is None:
        n = len(skipping.blocks)
        return n - config.n_kept(n), []
    timing = context.timing
    if timing is None:
        raise PassError(f"{config.kind}: speedup needs a target that runs here; use keep or drop")
    whole = timing.export(skipping.module)

    def measure_speed(n_gone: int) -> float:
        smaller = copy.deepcopy(skipping.module)
        shorten(Skipping(smaller, skipping.blocks, sample), ranking.names[:n_gone], sample)
        before_ms, after_ms = timing.time([whole, timing.export(smaller)])
        context.log(f"{config.kind}: {before_ms / after_ms:.2f}x without {n_gone} blocks")
        return before_ms / after_ms

    n_gone, reached = _find_fewest_gone(config, len(ranking.names), measure_speed)
    text = f"{config.kind}: {reached:.2f} times as fast as before, measured on {context.target.name}"
    return n_gone, [Note("info", text)]


def _find_fewest_gone(config: PruneLayers, most: int, measure_speed: Callable[[int], float]) -> tuple[int, float]:
    """Return the fewest blocks without which the speed-up is reached, by halving, and the speed-up without them."""
    assert config.speedup is not None
    low, high = 1, most
    reached = measure_speed(high)
    if reached < config.speedup:
        raise PassError(
            f"{config.kind}: speedup {config.speedup:g} is out of reach: without {high} it is {reached:.2f}"
        )
    while low < high:
        middle = (low + high) // 2
        speed = measure_speed(middle)
        if speed >= config.speedup:
            high, reached = middle, speed
        else:
            low = middle + 1
    return high, reached


def _fit_without(
    config: PruneLayers,
    skipping: Skipping,
    removed: Sequence[str],
    batches: Sequence[MicroBatch],
    few: Sequence[MicroBatch],
    context: ModelContext,
) -> tuple[tuple[float, float], dict[str, str]]:
    """Fit anew what is left without the blocks.

    Returns the errors of the outputs without them, before and after, and layer -> why it was not fitted.
    """
    module = skipping.module
    whole, teacher = BlockOutputs(module, few), copy.deepcopy(module) if config.compensate else None
    with skipping.without(removed):
        before = whole.error_of(module)
        if teacher is None:
            return (before, before), {}
        feeds = [batch.feeds for batch in batches]
        compensate(module, teacher, feeds, {}, seed=context.seed, progress=context.progress)
        few_rows = {name: tensor[:2] for name, tensor in feeds[0].items()}
        left = explain_left_alone(module, {point.layer for point in find_points(module, few_rows)})
        return (before, whole.error_of(module)), left


def _types(module: nn.Module) -> dict[str, str]:
    return {plain(name): layer_type(layer) for name, layer in module.named_modules() if is_layer(layer)}


def _n_weights(module: nn.Module) -> int:
    return sum(math.prod(shape) for shape in shapes_of(module).tensors.values())


def _make_note(config: PruneLayers, errors: tuple[float, float], share: float, n: int, n_gone: int) -> Note:
    text = (
        f"{config.kind}: {n - n_gone} of {n} blocks stay, {share:.1%} of the weights; outputs differ by {errors[0]:.3f}"
    )
    if config.compensate:
        text += f" without compensation, by {errors[1]:.3f} with it"
    return Note("info", f"{text} (squared error over the outputs' variance, on calibration data)")
