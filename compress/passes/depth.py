"""What a plan knows of whole blocks: which stay when they are evenly spaced, the model without the others. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Prunable, Removable, Residual, Structure


def evenly_spaced(n_blocks: int, n_kept: int) -> tuple[int, ...]:
    """Return the numbers of the blocks that stay, the first and last too (DistilBERT, arXiv:1910.01108, section 3)."""
    if n_kept == 1:
        return (0,)
    return tuple(round(i * (n_blocks - 1) / (n_kept - 1)) for i in range(n_kept))


def depth_problem(blocks: Sequence[Removable], stay: Sequence[int] | None, n_kept: int | None) -> str | None:
    """Return why `n_kept` blocks, or those of the numbers `stay` if given, cannot be what is left; None if they can."""
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


def without_blocks(facts: ModelFacts, removed: Sequence[str]) -> ModelFacts:
    """Return the facts of the model without these blocks; later ones in a list have moved up. Norms are not counted."""
    blocks = facts.removable or ()
    names = rename_blocks(blocks, removed)
    lost = {layer for block in blocks if block.name in removed for layer in block.layers}
    rename = _Renaming(names, tuple(removed), lost)
    stay = [layer for layer in facts.layers if layer.name not in lost]
    weights = {layer.weight: f"{rename.name(layer.name)}.weight" for layer in reversed(stay)}
    return replace(
        facts,
        layers=tuple(rename.layer(layer, weights) for layer in stay),
        structure=facts.structure and rename.structure(facts.structure),
        prunable=None if facts.prunable is None else tuple(map(rename.prunable, rename.drop_unread(facts.prunable))),
        unprunable={rename.name(layer): why for layer, why in facts.unprunable.items() if layer not in lost},
        removable=tuple(rename.removable(block) for block in blocks if block.name not in removed),
    )


def rename_blocks(blocks: Sequence[Removable], removed: Sequence[str]) -> dict[str, str]:
    """Return, for each block that stays and whose name changes, its name -> its new name."""
    new_names: dict[str, str] = {}
    places: dict[str, int] = {}
    for block in (block for block in blocks if block.listed):
        parent, _, key = block.name.rpartition(".")
        places.setdefault(parent, int(key))
        if block.name not in removed:
            new_names[block.name] = f"{parent}.{places[parent]}" if parent else str(places[parent])
            places[parent] += 1
    return {old: new for old, new in new_names.items() if old != new}


class _Renaming:
    """Facts under the names that they have once blocks are gone, and the layers in them `lost`."""

    def __init__(self, names: Mapping[str, str], removed: Sequence[str], lost: set[str]) -> None:
        self.names, self.removed, self.lost = names, removed, lost

    def name(self, old: str) -> str:
        for block, new in self.names.items():
            if old == block or old.startswith(f"{block}."):
                return new + old.removeprefix(block)
        return old

    def layer(self, facts: LayerFacts, weights: Mapping[str, str]) -> LayerFacts:
        return replace(facts, name=self.name(facts.name), weight=weights[facts.weight])

    def removable(self, block: Removable) -> Removable:
        return replace(block, name=self.name(block.name), layers=tuple(map(self.name, block.layers)))

    def drop_unread(self, dimensions: Sequence[Prunable]) -> list[Prunable]:
        """Return the dimensions that something still writes and something reads."""
        cut = [
            replace(group, writers=self._rename_counts(group.writers), readers=self._rename_counts(group.readers))
            for group in dimensions
        ]
        return [group for group in cut if group.writers and group.readers]

    def prunable(self, group: Prunable) -> Prunable:
        return replace(group, name=next(iter(group.writers)))

    def _rename_counts(self, each: Mapping[str, int]) -> dict[str, int]:
        return {self.name(layer): n for layer, n in each.items() if layer not in self.lost}

    def _rename_layers(self, layers: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.name(layer) for layer in layers if layer not in self.lost)

    def _rename_input_groups(self, input_groups: Sequence[InputGroup]) -> tuple[InputGroup, ...]:
        renamed = (
            replace(
                input_group,
                layers=self._rename_layers(input_group.layers),
                source=self._rename_source(input_group.source),
            )
            for input_group in input_groups
        )
        return tuple(
            input_group if input_group.source else InputGroup(input_group.layers)
            for input_group in renamed
            if input_group.layers
        )

    def _rename_source(self, source: str) -> str:
        """Return the source's new name; "" where the source went with its block."""
        return "" if any(source.startswith(f"{block}.") for block in self.removed) else self.name(source)

    def structure(self, structure: Structure) -> Structure:
        blocks = tuple(
            BlockFacts(
                self.name(b.name), self._rename_input_groups(b.input_groups), tuple(map(self._rename_layers, b.experts))
            )
            for b in structure.blocks
            if not b.layers or not set(b.layers) <= self.lost
        )
        residual = structure.residual and self._rename_residual(structure.residual)
        return Structure(
            blocks,
            self._rename_input_groups(structure.before),
            self._rename_input_groups(structure.after),
            residual,
            structure.notes,
        )

    def _rename_residual(self, residual: Residual) -> Residual:
        norms = tuple((self.name(norm), self._rename_layers(layers)) for norm, layers in residual.norms)
        return Residual(
            residual.width,
            self._rename_layers(residual.embeddings),
            self._rename_layers(residual.writers),
            self._rename_layers(residual.readers),
            tuple((norm, layers) for norm, layers in norms if layers),
        )
