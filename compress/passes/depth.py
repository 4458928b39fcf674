"""What a plan knows of whole blocks: which stay when they are evenly spaced, the model without the others. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compress.facts import BlockFacts, LayerFacts, ModelFacts, Prunable, Reading, Removable, Residual, Structure


def evenly_spaced(n_blocks: int, n_kept: int) -> tuple[int, ...]:
    """Numbers of those that stay, the first and the last among them (as DistilBERT's, arXiv:1910.01108, section 3)."""
    if n_kept == 1:
        return (0,)
    return tuple(round(i * (n_blocks - 1) / (n_kept - 1)) for i in range(n_kept))


def depth_problem(blocks: Sequence[Removable], stay: Sequence[int] | None, n_kept: int | None) -> str | None:
    """What is wrong with leaving `n_kept` of the blocks, or those of the numbers `stay`, if that is given."""
    n = len(blocks)
    if n < 2:
        return (
            f"{n} blocks were found that could go; it needs two: a chain of blocks, or residual ones that keep the "
            "shape of what they read"
        )
    if stay is not None and (beyond := [number for number in stay if number >= n]):
        return f"layers: there is no block {beyond[0]}; the {n} that could go are 0 to {n - 1}"
    if stay is not None and (len(set(stay)) != len(stay) or not stay):
        return f"layers: {list(stay)}: name each block that stays once, and one at least"
    if n_kept is not None and n_kept >= n:
        return f"all {n} blocks that could go would stay; keep 1 to {n - 1} of them"
    return None


def without_blocks(facts: ModelFacts, gone: Sequence[str]) -> ModelFacts:
    """The model's facts once these blocks are gone, and those behind them in a list have moved up; norms uncounted."""
    blocks = facts.removable or ()
    names = renamed_blocks(blocks, gone)
    lost = {layer for one in blocks if one.name in gone for layer in one.layers}
    rename = _Renaming(names, tuple(gone), lost)
    stay = [layer for layer in facts.layers if layer.name not in lost]
    weights = {layer.weight: f"{rename.name(layer.name)}.weight" for layer in reversed(stay)}
    return replace(
        facts,
        layers=tuple(rename.layer(one, weights) for one in stay),
        structure=facts.structure and rename.structure(facts.structure),
        prunable=None if facts.prunable is None else tuple(map(rename.prunable, rename.left(facts.prunable))),
        unprunable={rename.name(layer): why for layer, why in facts.unprunable.items() if layer not in lost},
        removable=tuple(rename.removable(one) for one in blocks if one.name not in gone),
    )


def renamed_blocks(blocks: Sequence[Removable], gone: Sequence[str]) -> dict[str, str]:
    """Block that stays -> its name afterwards, of those whose name changes."""
    found: dict[str, str] = {}
    places: dict[str, int] = {}
    for one in (one for one in blocks if one.listed):
        parent, _, key = one.name.rpartition(".")
        places.setdefault(parent, int(key))
        if one.name not in gone:
            found[one.name] = f"{parent}.{places[parent]}" if parent else str(places[parent])
            places[parent] += 1
    return {old: new for old, new in found.items() if old != new}


class _Renaming:
    """Facts under the names that they have once blocks are gone, and the layers in them `lost`."""

    def __init__(self, names: Mapping[str, str], gone: Sequence[str], lost: set[str]) -> None:
        self.names, self.gone, self.lost = names, gone, lost

    def name(self, old: str) -> str:
        for block, new in self.names.items():
            if old == block or old.startswith(f"{block}."):
                return new + old.removeprefix(block)
        return old

    def layer(self, one: LayerFacts, weights: Mapping[str, str]) -> LayerFacts:
        return replace(one, name=self.name(one.name), weight=weights[one.weight])

    def removable(self, one: Removable) -> Removable:
        return replace(one, name=self.name(one.name), layers=tuple(map(self.name, one.layers)))

    def left(self, dimensions: Sequence[Prunable]) -> list[Prunable]:
        """Those that something still writes, and something reads."""
        cut = [replace(one, writers=self._count(one.writers), readers=self._count(one.readers)) for one in dimensions]
        return [one for one in cut if one.writers and one.readers]

    def prunable(self, one: Prunable) -> Prunable:
        return replace(one, name=next(iter(one.writers)))

    def _count(self, each: Mapping[str, int]) -> dict[str, int]:
        return {self.name(layer): n for layer, n in each.items() if layer not in self.lost}

    def _names(self, layers: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.name(layer) for layer in layers if layer not in self.lost)

    def _readings(self, readings: Sequence[Reading]) -> tuple[Reading, ...]:
        found = (replace(one, layers=self._names(one.layers), source=self._source(one.source)) for one in readings)
        return tuple(one if one.source else Reading(one.layers) for one in found if one.layers)

    def _source(self, source: str) -> str:
        """Nothing where the source went with its block."""
        return "" if any(source.startswith(f"{block}.") for block in self.gone) else self.name(source)

    def structure(self, one: Structure) -> Structure:
        blocks = tuple(
            BlockFacts(self.name(b.name), self._readings(b.readings), tuple(map(self._names, b.experts)))
            for b in one.blocks
            if not b.layers or not set(b.layers) <= self.lost
        )
        residual = one.residual and self._residual(one.residual)
        return Structure(blocks, self._readings(one.before), self._readings(one.after), residual, one.notes)

    def _residual(self, one: Residual) -> Residual:
        norms = tuple((self.name(norm), self._names(layers)) for norm, layers in one.norms)
        return Residual(
            one.width,
            self._names(one.embeddings),
            self._names(one.writers),
            self._names(one.readers),
            tuple((norm, layers) for norm, layers in norms if layers),
        )
