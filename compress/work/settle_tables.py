"""Bits of embeddings and the output layer where a recipe says `auto`: the fewest that cost next to nothing.

Each table alone is rounded to the nearest, all else stays float, and what the model's outputs lose on some calibration
tokens tells its cost. A pass that rounds the output layer by its own method loses less of it than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.facts import Note
from compress.passes.rtn import Rtn
from compress.passes.weight_only import WeightPass
from compress.rounding.outputs import gives_logits
from compress.store.progress import no_log
from compress.work.block_layers import list_layers
from compress.work.confirm_bits import measure_loss, take_first
from compress.work.contexts import BlockContext
from compress.work.rtn import apply_rtn
from compress.work.settled import Settled, keep, recall

FILE = "tables.json"
"""In a pass's folder of unfinished work: what was measured."""
PART = 0.1
"""Of what a gate on nll allows to lose, what tables may cost in all."""
ALLOWED = 0.01
"""The same without such a gate, a judgement: nats for each token, of other outputs parts of their energy."""
NO_LAYER = "re:(?!)"
Pass = TypeVar("Pass", bound=WeightPass)


def settle_tables(config: Pass, model: StreamedModel, context: PassContext) -> tuple[Pass, Settled]:
    """Return the pass with a scheme for each of the tables that its recipe leaves open, of which there are some.

    Those that cost least get the fewer bits first, as long as all of them cost next to nothing. What a killed run
    measured is kept in `context.work`. PassError where there is no data.
    """
    costs: Mapping[str, float] | None = recall(context, FILE)
    if costs is None:
        costs = _measure_costs(config, model, context)
        keep(context, FILE, costs)
    fewer, more = config.table_choices
    allowed, spent, chosen = _find_allowed(context), 0.0, dict.fromkeys(config.open_tables, more)
    for keys, cost in sorted(costs.items(), key=lambda pair: pair[1]):
        spent += cost
        if spent <= allowed:
            chosen |= dict.fromkeys(keys.split(), fewer)
    given = ", ".join(f"{key}: {scheme}" for key, scheme in chosen.items())
    told = " and ".join(f"{cost:.2g} ({keys.replace(' ', ' and ')})" for keys, cost in costs.items())
    unit = "nats for each token" if gives_logits(model.build()) else "of the outputs' energy"
    text = f"{given}: {fewer} costs {told} {unit}; {allowed:.2g} in all is next to nothing"
    context.log(f"{config.kind}: {text}")
    return config.model_copy(update=chosen), Settled(chosen, (Note("info", f"{config.kind}: {text}"),))


def _measure_costs(config: WeightPass, model: StreamedModel, context: PassContext) -> dict[str, float]:
    """Return keys of one table -> what the fewer bits of it cost."""
    tied = any(layer.role == "tied" for layer in list_layers(model))
    tables = [" ".join(config.open_tables)] if tied else list(config.open_tables)
    # Of so many tokens the loss is that of all within 4 % (output layer) and 23 % (embeddings), of Qwen2.5-Coder 0.5B.
    few = replace(context, batches=take_first(context.batches, 512), work=None, log=no_log)
    size = config.base().weights.group_size or -1
    costs = {}
    for keys in context.progress(tables, f"{config.kind}: cost of tables"):
        schemes = dict.fromkeys(keys.split(), config.table_choices[0])
        alone = Rtn(group_size=size, targets=(NO_LAYER,), indivisible=config.indivisible, **schemes)  # type: ignore[arg-type]
        rounded = apply_rtn(alone, model, few).model
        assert isinstance(rounded, StreamedModel)
        # Beside layers that are rounded, too, a table costs more than alone: embeddings of Qwen2.5-Coder 0.5B in four
        # bits 0.003 nats alone, and 0.006 in a model whose blocks are in four bits (two texts, to the nearest).
        costs[keys] = 2.0 * measure_loss(rounded, few, "float32").outputs
    return costs


def _find_allowed(context: PassContext) -> float:
    """Return what tables may cost."""
    allowed = context.nats_allowed if isinstance(context, BlockContext) else None
    return ALLOWED if allowed is None else PART * allowed
