"""Bits of embeddings and the output layer where a recipe says `auto`: the fewest that cost next to nothing.

Only the tables are rounded, to the nearest, and what the model's outputs then lose on some calibration tokens is the
cost. A pass that rounds the output layer by its own method loses less of it than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TypeVar

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.facts import Note
from compress.passes.rtn import Rtn
from compress.passes.weight_only import TABLE_KEYS, WeightPass
from compress.rounding.outputs import gives_logits
from compress.store.progress import no_log
from compress.work.block_layers import list_layers
from compress.work.confirm_bits import measure_loss, take_first
from compress.work.contexts import BlockContext
from compress.work.rtn import apply_rtn
from compress.work.settled import Settled, keep, recall

FILE = "tables.json"
TRIED_TOKENS = 1024
"""Of the calibration data, on which the loss is measured."""
PART = 0.1
"""Of what a gate on nll allows to lose, what tables may take of it."""
ALLOWED = 0.01
"""The same where there is no such gate: nats for each token, of other outputs parts of their energy."""
NO_LAYER = "re:(?!)"
Pass = TypeVar("Pass", bound=WeightPass)
Schemes = Mapping[str, str]
"""Key of the recipe -> the scheme of its table."""


@dataclass(frozen=True)
class Trial:
    """Tables rounded as `schemes` says, and what that costs; None: not measured."""

    schemes: Schemes
    cost: float | None = None

    def describe(self) -> str:
        """Format it for a report: "embeddings: W4A16, lm_head: W8A16 cost 0.0012"."""
        given = ", ".join(f"{key}: {scheme}" for key, scheme in self.schemes.items())
        return given if self.cost is None else f"{given} costs {self.cost:.2g}"


def settle_tables(config: Pass, model: StreamedModel, context: PassContext) -> tuple[Pass, Settled]:
    """Return the pass with a scheme for each table that the recipe leaves open; as it is where there is none.

    The schemes of least bytes are tried first; those of most are taken unmeasured. What a killed run found is kept in
    `context.work`. PassError where there is no data.
    """
    if not config.open_tables:
        return config, Settled()
    found = recall(context, FILE)
    if found is None:
        found = {"trials": [asdict(trial) for trial in _try_tables(config, model, context)]}
        keep(context, FILE, found)
    trials = [Trial(**trial) for trial in found["trials"]]
    *dearer, chosen = trials
    logits = gives_logits(model.build())
    text = f"{chosen.describe()}"
    if dearer:
        text += f"; {'; '.join(trial.describe() for trial in dearer)}"
    unit = "nats for each token" if logits else "of the outputs' energy"
    text += f" ({unit}; up to {_find_allowed(context):.2g} is next to nothing)"
    note = Note("info", f"{config.kind}: {text}")
    context.log(note.text)
    return config.model_copy(update=dict(chosen.schemes)), Settled(dict(chosen.schemes), (note,))


def _try_tables(config: WeightPass, model: StreamedModel, context: PassContext) -> Iterator[Trial]:
    """Yield what was tried, up to what is taken."""
    few = replace(context, batches=take_first(context.batches, TRIED_TOKENS), work=None, log=no_log)
    *fewer, most = _list_choices(config, model)
    for schemes in context.progress(fewer, f"{config.kind}: cost of tables"):
        rounded = apply_rtn(_round_tables_alone(config, schemes), model, few).model
        assert isinstance(rounded, StreamedModel)
        trial = Trial(schemes, measure_loss(rounded, few, "float32").outputs)
        yield trial
        if trial.cost is not None and trial.cost <= _find_allowed(context):
            return
    yield Trial(most)


def _list_choices(config: WeightPass, model: StreamedModel) -> list[Schemes]:
    """Return the schemes that the open tables may have, those of least bytes first."""
    keys = config.open_tables
    sizes: dict[str, int] = {}
    for layer in list_layers(model):
        if layer.role in TABLE_KEYS:
            sizes[TABLE_KEYS[layer.role]] = layer.n_weights
    chosen = [dict(zip(keys, names, strict=True)) for names in product(config.table_choices, repeat=len(keys))]
    if any(layer.role == "tied" for layer in list_layers(model)):  # one table
        chosen = [schemes for schemes in chosen if len({*schemes.values()}) == 1]
    order = {name: number for number, name in enumerate(config.table_choices)}
    return sorted(chosen, key=lambda schemes: sum(order[name] * sizes.get(key, 1) for key, name in schemes.items()))


def _round_tables_alone(config: WeightPass, schemes: Schemes) -> Rtn:
    size = config.base().weights.group_size or -1
    return Rtn(group_size=size, targets=(NO_LAYER,), indivisible=config.indivisible, **schemes)  # type: ignore[arg-type]


def _find_allowed(context: PassContext) -> float:
    """Return what tables may cost."""
    allowed = context.nats_allowed if isinstance(context, BlockContext) else None
    return ALLOWED if allowed is None else PART * allowed
