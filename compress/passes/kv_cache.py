"""`kv_cache`: scales with which an engine stores the keys and values of a decoder in 8 bits."""

from __future__ import annotations

from typing import ClassVar, Literal, cast

from compress.facts import InputGroup, LayerDecision, ModelFacts, PassPlan
from compress.formats.schemes import KvScheme
from compress.formats.targets import Format, Target
from compress.passes.base import Pass, Stage
from compress.passes.choosing import target_word
from runtime.tasks import find_task


class KvCache(Pass):
    """One scale for each attention's keys and one for its values, from what the calibration data puts there."""

    stage: ClassVar[Stage] = "blocks"
    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.6

    kind: Literal["kv_cache"] = "kv_cache"
    scheme: KvScheme = "fp8"
    """int8, or fp8 (E4M3), which vLLM takes."""

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        structure = facts.structure
        modules = attentions(structure.input_groups) if structure is not None else {}
        notes, problems = target_word(target, self.formats[0], self.kind)
        if not find_task(facts.task).decoder_only:
            problems.append(f"kv_cache: a model of task {facts.task} keeps no keys and values in 8 bits; leave it out")
        elif not modules:
            problems.append("kv_cache: no attention was found in the model: there are no keys and values to store")
        decisions = [LayerDecision(name, "attention", f"kv-{self.scheme}", "one scale each") for name in modules]
        return PassPlan(facts, tuple(decisions), tuple(notes), tuple(problems), kv_cache=self.scheme)

    @property
    def formats(self) -> tuple[Format, ...]:
        return (cast(Format, f"kv-{self.scheme}"),)


def attentions(input_groups: tuple[InputGroup, ...]) -> dict[str, InputGroup]:
    """Map each attention module, the one that holds the value projection, to the input group of its weighted sums."""
    return {
        input_group.source.rpartition(".")[0]: input_group for input_group in input_groups if input_group.how == "value"
    }
