"""`prune_layers`: whole blocks are removed; what is left is a shallower model of the same kind."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.facts import LayerDecision, ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.passes.base import DataSize, Pass, PassCost, Stage
from compress.passes.depth import depth_problem, evenly_spaced, without_blocks
from compress.specs import one_of

BUDGETS = ("keep", "drop", "layers", "speedup")
TRIED_ROWS = 32768
"""Tokens, or 256 for each image, that blocks are tried on one by one."""
TRIED_BYTES = 2**30
"""Of the outputs on which blocks are tried one by one, that are kept in float64."""


class PruneLayers(Pass):
    """Remove whole blocks: those of a transformer's chain, or a conv net's residual blocks that keep the shape.

    Exactly one of `keep`, `drop`, `layers` and `speedup` says how many go. Where `layers` does not say which, they go
    one after another, each time the one without which the outputs err least on calibration data. Blocks are counted
    from 0, in the order in which they run, those alone that can go.
    """

    stage: ClassVar[Stage] = "model"
    needs_calibration: ClassVar[bool] = True
    uses_blocks: ClassVar[bool] = True

    kind: Literal["prune_layers"] = "prune_layers"
    keep: Annotated[int, Field(ge=1)] | None = None
    """So many blocks stay."""
    drop: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the blocks that goes."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the blocks that stay."""
    speedup: Annotated[float, Field(gt=1)] | None = None
    """How many times faster the float model is to be, measured on the target: as few blocks go as that takes."""
    compensate: bool = True
    """Fit the layers that are left to what the whole model gives on the calibration data, by least squares."""

    @model_validator(mode="after")
    def _require_one_budget(self) -> PruneLayers:
        one_of(self, BUDGETS)
        return self

    @property
    def time_budget(self) -> Literal["graph", "module"] | None:
        return None if self.speedup is None else "module"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        blocks = facts.removable
        if blocks is None:
            return PassPlan(facts, problems=(f"{self.kind}: works on torch models; an ONNX file cannot be shortened",))
        if problem := depth_problem(blocks, self.layers, None if self.speedup else self.n_kept(len(blocks))):
            return PassPlan(facts, problems=(f"{self.kind}: {problem}",))
        stay = self.expected(facts)
        removed = [block.name for number, block in enumerate(blocks) if number not in stay]
        after = without_blocks(facts, removed)
        return PassPlan(after, self._decide_layers(facts, removed), self._make_notes(facts, after, len(stay)))

    def n_kept(self, n_blocks: int) -> int:
        """Return how many of `n_blocks` stay; not for `speedup`."""
        if self.layers is not None:
            return len(self.layers)
        return self.keep or max(1, round(n_blocks * (1 - Fraction(str(self.drop)))))

    def expected(self, facts: ModelFacts) -> tuple[int, ...]:
        """Return the numbers of the blocks that stay: a guess for the forecast, where only a run can tell."""
        blocks = facts.removable or ()
        if self.layers is not None:
            return tuple(sorted(self.layers))
        if self.speedup is None:
            return evenly_spaced(len(blocks), self.n_kept(len(blocks)))
        fits = [n for n in range(1, len(blocks)) if self._count_macs(facts, n) * self.speedup <= facts.macs]
        return evenly_spaced(len(blocks), max(fits, default=1))

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        stay, n = len(self.expected(facts)), len(facts.removable or ())
        tried = 0 if self.layers is not None else sum(range(stay + 1, n + 1))  # all that are left before each that goes
        # A block is tried in the time of so many forwards: ResNet-56's 24 took 120 s where a forward takes 0.15.
        return PassCost(1.6 * tried * self._count_tried(facts, data))

    def _count_tried(self, facts: ModelFacts, data: DataSize) -> float:
        """Return on how many samples blocks are tried: of texts on fewer the more words a token's logits have."""
        if data.sample_rows == 1:
            return data.calibration
        widest = max(
            (width for spec in facts.outputs for width in spec.shape[-1:] if isinstance(width, int)), default=1
        )
        rows = min(TRIED_ROWS, TRIED_BYTES // (8 * widest))
        return min(data.calibration, max(rows / data.sample_rows, 1))

    def _count_macs(self, facts: ModelFacts, n_kept: int) -> int:
        blocks = facts.removable or ()
        stay = evenly_spaced(len(blocks), n_kept)
        return without_blocks(facts, [block.name for k, block in enumerate(blocks) if k not in stay]).macs

    def _decide_layers(self, facts: ModelFacts, removed: list[str]) -> tuple[LayerDecision, ...]:
        blocks = facts.removable or ()
        block_of = {layer: block.name for block in blocks for layer in block.layers}
        stay = f"{len(blocks) - len(removed)} of {len(blocks)} blocks stay"
        return tuple(
            LayerDecision(layer.name, layer.type, *self._decide_layer(block_of.get(layer.name), removed, stay))
            for layer in facts.layers
        )

    def _decide_layer(self, block: str | None, removed: list[str], stay: str) -> tuple[str, str]:
        """Return the action and the reason for a layer of that block."""
        if block is None:
            return "kept", "in no block that could go"
        if self.layers is not None:
            return ("pruned", f"{block} goes") if block in removed else ("kept", f"{block} stays")
        return "open", f"{stay}; calibration data tell which" if self.speedup is None else "as few go as it takes"

    def _make_notes(self, facts: ModelFacts, after: ModelFacts, n_kept: int) -> tuple[Note, ...]:
        n, about = len(facts.removable or ()), "about " if self.speedup is not None else ""
        text = (
            f"{self.kind}: {about}{n_kept} of {n} blocks stay, {after.n_bytes / facts.n_bytes:.0%} of the weights and "
            f"{after.macs / max(facts.macs, 1):.0%} of the multiply-accumulates"
        )
        return (Note("info", text),)
