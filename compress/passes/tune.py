"""`tune`: rounding, scales and norms of a quantized model learned against the float model (after arXiv:2407.11062)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import FLOAT_BYTES, LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, matches
from compress.formats.targets import Format, Target
from compress.passes.base import STATE_COPIES, DataSize, PassCost, Stage
from compress.passes.weight_only import WeightPass
from compress.specs import find_changes
from runtime.processes.memory import available_bytes
from runtime.tasks import find_task

ROUNDING_BYTES = 40
"""For each weight whose rounding is learned: its value, gradient, position, Adam's two, the best so far, integers."""
SCALING_BYTES = 16
"""For each weight whose scales alone are learned."""
BOTH_MODELS_BYTES = 2 * FLOAT_BYTES
"""For each weight: the model's and the float model's."""
LEARNED_FORWARDS = 3.0
"""Of a step: one, and its gradients with respect to inputs and weights."""
STEP_ROWS = 2048
"""Tokens of one step where blocks are learned one by one: as `compress.work.learning.ROWS`."""
SPARE = 0.7
"""Of the memory available, what these may take; the rest is for activations and the float model's outputs."""
NUMBERS = {"scheme", "bits", "group_size", "symmetric", "overrides", "indivisible", "embeddings", "lm_head"}
"""What says how a weight is stored, and is for a pass that rounds."""
How = Literal["whole", "blocks, then scales", "blocks"]
SAID: dict[How, str] = {
    "whole": "rounding, scales and norms are learned end to end",
    "blocks, then scales": "rounding is learned block by block, then scales and norms end to end",
    "blocks": "rounding, scales and norms are learned block by block",
}


def count_state_bytes(facts: ModelFacts, whole: bool) -> int:
    """Return the bytes in which learned rounding saves its state, of the whole model or of a block."""
    n_blocks = 1 if whole or facts.structure is None else max(len(facts.structure.blocks), 1)
    return STATE_COPIES * facts.n_bytes // n_blocks


class Tune(WeightPass):
    """Learn rounding, scales, norms and biases of a quantized model, so that it gives what the float one gives.

    It goes on from the integers that an earlier pass left; where there are none it rounds with `gptq` first, and the
    fields on bits and groups are for that.
    """

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 2.5
    """As `gptq`, which goes first where nothing is rounded."""
    takes_mixed_bits: ClassVar[bool] = True

    kind: Literal["tune"] = "tune"
    steps: Annotated[int, Field(ge=0)] = 1200
    """Of the whole model; each takes `batch_size` samples."""
    block_steps: Annotated[int, Field(ge=0)] = 100
    """Of each block where they are learned one by one; each takes about 2048 rows (tokens)."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop by then, the rates having fallen to zero: the result then depends on the machine's speed."""
    batch_size: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Samples for each step; auto: as many as have about 256 tokens, one at least. Many small steps learn more than
    few large ones of the same work."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.125
    """Part of the calibration set, the last, on which the best state is chosen: none worse than the start is kept."""
    text_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the loss that is the calibration texts' own next tokens (of conversations the assistant's alone), not the
    float model's outputs: it fits the model to texts like these, and takes it further from the float one."""
    blockwise: Literal["auto"] | bool = "auto"
    """Learn the rounding block by block; auto: where the whole model does not fit into the memory available."""

    def shorten(self, share: float) -> Tune:
        """Return the pass with this share of its steps and seconds."""
        counts = {"steps": self.steps, "block_steps": self.block_steps}
        length: dict[str, float] = {name: max(round(n * share), 1) for name, n in counts.items() if n > 0}
        length |= {} if self.max_seconds is None else {"max_seconds": self.max_seconds * share}
        return self.model_copy(update=length)

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks"

    @property
    def formats(self) -> tuple[Format, ...]:
        return super().formats if find_changes(self, NUMBERS) else ()

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        if facts.has_two_chains:
            return PassPlan(facts, problems=("tune: learns one chain of blocks, and this model has two; use gptq",))
        if facts.structure is None:
            return PassPlan(facts, problems=("tune: works on torch models; an ONNX file has no parameters to learn",))
        if self.text_share and (text := self._explain_no_text(facts)):
            return PassPlan(facts, problems=(f"tune: text_share: {text}",))
        rounded = [layer for layer in facts.layers if layer.bits < 16]
        plan = plan_from_integers(self, facts) if rounded else super().check(facts, target)
        taken = [
            layer for layer in facts.layers if any(d.layer == layer.name and d.action != "kept" for d in plan.decisions)
        ]
        how = self.how(
            sum(layer.n_weights for layer in taken), sum(layer.n_weights for layer in facts.distinct_layers())
        )
        note = Note(
            "info", f"tune: {SAID[how]}" + ("" if self.blockwise == "auto" and how == "whole" else self._explain_how())
        )
        return replace(plan, notes=(*plan.notes, note))

    def how(self, n_learned: int, n_weights: int) -> How:
        """Choose what is learned together: by `blockwise`, or by the memory available at the moment."""
        room = SPARE * available_bytes() - BOTH_MODELS_BYTES * n_weights
        if self.blockwise is False or (self.blockwise == "auto" and ROUNDING_BYTES * n_learned <= room):
            return "whole"
        return "blocks, then scales" if SCALING_BYTES * n_learned <= room else "blocks"

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        n_weights, how = sum(layer.n_weights for layer in facts.distinct_layers()), self._foresee_how(facts)
        learned = {"whole": ROUNDING_BYTES, "blocks, then scales": SCALING_BYTES, "blocks": 0}[how]
        rows = self.find_batch_size(data.sample_rows) * data.sample_rows if how == "whole" else STEP_ROWS
        steps = self.steps if how == "whole" else self.block_steps
        cost = super().estimate_cost(facts, data)
        return replace(
            cost,
            forwards=cost.forwards + LEARNED_FORWARDS * steps * rows / data.sample_rows,
            memory_bytes=0 if how == "blocks" else (BOTH_MODELS_BYTES + learned) * n_weights,
            disk_bytes=count_state_bytes(facts, whole=how == "whole"),
            float_blocks=True,
        )

    def _foresee_how(self, facts: ModelFacts) -> How:
        """Return what is learned together if all weights are."""
        n_weights = sum(layer.n_weights for layer in facts.distinct_layers())
        return self.how(n_weights, n_weights)

    def find_batch_size(self, tokens: float) -> int:
        """Return the samples of a step of the whole model, where one has so many tokens."""
        # a step of the whole model has 256 tokens where the recipe does not say
        return max(1, round(256 / max(tokens, 1))) if self.batch_size == "auto" else self.batch_size

    def _explain_no_text(self, facts: ModelFacts) -> str:
        """Return why the texts' own tokens cannot be learned; "" where they can."""
        if not find_task(facts.task).generates:
            return f"a model of task {facts.task} writes no text; leave it out"
        if self._foresee_how(facts) == "blocks":
            return "blocks are learned one by one, which see no token; leave it out, or give more memory"
        return ""

    def _explain_how(self) -> str:
        if self.blockwise != "auto":
            return f" (blockwise: {str(self.blockwise).lower()})"
        return f", for the whole does not fit into the {available_bytes() / 1e9:.1f} GB available"


def plan_from_integers(config: WeightPass, facts: ModelFacts) -> PassPlan:
    """Plan a pass that learns the integers of an earlier one, which has therefore chosen the bits."""
    rounded = [layer for layer in facts.layers if layer.bits < 16]
    taken = {layer.name for layer in rounded if not layer.is_table and is_selected(config, layer.name, layer.type)}
    problems = [] if taken else [f"{config.kind}: no quantized layer is left to learn; put it after gptq or rtn"]
    given = find_changes(config, NUMBERS)
    if given:
        problems.append(f"{config.kind}: an earlier pass has rounded the layers; leave {', '.join(given)} out")
    names = {layer.name for layer in rounded}
    decisions = tuple(
        LayerDecision(layer.name, layer.type, "tuned", "from the integers of an earlier pass")
        if layer.name in taken
        else LayerDecision(layer.name, layer.type, "kept", _explain_kept(layer, layer.name in names))
        for layer in facts.layers
    )
    return PassPlan(facts, decisions, (), tuple(problems))


def _explain_kept(layer: LayerFacts, rounded: bool) -> str:
    """Return why a pass that learns integers leaves a layer as it is."""
    if not rounded:
        return "float"
    return "a table of embeddings, which stays as it was rounded" if layer.is_table else "not selected"


def is_selected(config: WeightPass, name: str, kind: str) -> bool:
    """Return whether `targets` and `ignore` leave a layer that is quantized already to the pass."""
    if any(matches(pattern, name, kind) for pattern in config.ignore):
        return False
    return not config.targets or any(matches(pattern, name, kind) for pattern in config.targets)
