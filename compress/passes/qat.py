"""`qat`: a model trained while it computes with rounded numbers, so that what is stored is what was learned.

Weights alone (W2A16 ... W8A16, in groups) or weights and activations (W8A8): one record, two ways of working.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from compress.facts import LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.schemes import PRESETS, Scheme
from compress.formats.targets import Format, Target
from compress.passes.base import Stage
from compress.passes.eight_bit import Calibration, Restore
from compress.passes.int8 import Int8
from compress.passes.training import LearningPass, Terms
from compress.passes.weight_only import WeightPass
from compress.specs import LayerPattern, find_changes

LAYER_NUMBERS = ("group_size", "overrides", "indivisible")
"""Keys that weights alone have, and int8 has not."""
INT8_NUMBERS = ("placement", "calibration")
"""Keys that int8 has, and weights alone have not."""


def _choose_ignore(given: dict[str, Any]) -> tuple[LayerPattern, ...]:
    """Return the layers that stay float where the recipe names none: W8A8 ends as `int8` does, which takes them all."""
    scheme = given["scheme"]
    return ("lm_head",) if scheme is None or PRESETS[scheme].activations is None else ()


class Qat(LearningPass, WeightPass):
    """Quantization-aware training: the rest of the loss that rounding costs is learned back.

    Weights alone (the default, W4A16) end as `gptq`'s do. `scheme: W8A8` (the same as W8A8_STATIC) ends as `int8` does,
    with stored ranges. The loss is made of the terms of `distill`; of `labels` alone it needs no teacher. Everything is
    trained: weights, scales, norms, biases, embeddings.
    """

    kind: Literal["qat"] = "qat"
    ignore: tuple[LayerPattern, ...] = Field(default_factory=_choose_ignore, json_schema_extra={"default": ["lm_head"]})
    """Layers that stay float; not given: lm_head, and with W8A8 none."""
    calibration: Calibration = "mse"
    """W8A8: how the ranges that training begins with are chosen."""
    placement: Literal["auto", "all", "inputs"] = "auto"
    """W8A8: which tensors are quantized, as in `int8`."""

    @property
    def integer_inputs(self) -> bool:
        """Return whether activations are rounded, too: W8A8."""
        return self.base().activations is not None

    @property
    def finds_settings(self) -> bool:  # type: ignore[override]
        """Return whether `auto` is found: not of weights alone, which move in levels."""
        return self.integer_inputs

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """Return whether activations are rounded: their ranges start from what the float model gives."""
        return self.integer_inputs

    @property
    def lowest_opset(self) -> int:  # type: ignore[override]
        return Int8.lowest_opset if self.integer_inputs else WeightPass.lowest_opset

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "graph" if self.integer_inputs else "model"

    def terms(self, task: str) -> Terms:
        """Return the terms of the loss for a task.

        W8A8 trains the exported graph, of which the outputs alone are compared.
        """
        terms = super().terms(task)
        return replace(terms, hidden=None, attention=None) if self.integer_inputs else terms

    def int8(self) -> Int8:
        """Return the `int8` pass that W8A8 ends like: what it would do to the model as it is where training begins.

        Gates are not asked and no bias is corrected: training does both better.
        """
        return Int8(
            calibration=self.calibration,
            placement=self.placement,
            bias_correction=False,
            targets=self.targets,
            ignore=self.ignore,
            restore=Restore(max_layers=0),
        )

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        problems = self.training_problems(facts) + self.term_problems(facts) + self._find_contradictions()
        rounded = next((layer for layer in facts.layers if layer.bits < 16), None)
        if rounded is not None:
            return PassPlan(facts, problems=(*problems, _refuse_rounded(rounded)))
        plan = self._plan_int8(facts, target) if self.integer_inputs else self._plan_weights(facts, target)
        texts = [f"qat: learns by {self.describe_loss(facts.task)}"]
        if self.integer_inputs:
            texts.append(
                f"qat: trains the {target.variant} form, for {target.name}; the other is scaled from it, untrained"
            )
        notes = [Note("info", text) for text in texts]
        return PassPlan(
            plan.facts, plan.decisions, (*notes, *plan.notes), (*problems, *plan.problems), schemes=plan.schemes
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        return self.int8().formats if self.integer_inputs else super().formats

    def explain_refusal(self, target: Target) -> str | None:
        return (_refuse_checkpoint(target) if self.integer_inputs else None) or super().explain_refusal(target)

    def _plan_weights(self, facts: ModelFacts, target: Target) -> PassPlan:
        """Plan as any pass that rounds weights does; but a weight that two layers share cannot be trained for one."""
        plan = WeightPass.check(self, facts, target)
        problems = [
            text for layer in facts.layers if layer.name in plan.schemes and (text := _refuse_shared(layer, facts))
        ]
        return PassPlan(plan.facts, plan.decisions, plan.notes, (*plan.problems, *problems), schemes=plan.schemes)

    def _plan_int8(self, facts: ModelFacts, target: Target) -> PassPlan:
        """Plan as `int8` does, which W8A8 ends like."""
        plan = self.int8().check(facts, target)
        problems = [_rename_pass(text) for text in plan.problems]
        problems += [text] if (text := _refuse_checkpoint(target)) else []
        return PassPlan(plan.facts, plan.decisions, plan.notes, tuple(problems))

    def _find_contradictions(self) -> list[str]:
        """Report schemes that training cannot end in, and keys that are for the other way of working."""
        if self.integer_inputs:
            problems = [] if _is_int8(self.base()) else [_refuse_scheme(self.base())]
            odd = find_changes(self, LAYER_NUMBERS)
            odd += [name for name in ("embeddings", "lm_head") if getattr(self, name) is not None]
            problems += [f"qat: W8A8 has no {', '.join(odd)}; leave it out"] if odd else []
            inner = [name for name in ("hidden", "attention") if getattr(self, name) is not None]
            return problems + ([f"qat: {', '.join(inner)}: {_NO_MODULES}; leave it out"] if inner else [])
        problems = [_refuse_scheme(scheme) for scheme in self.schemes() if scheme.activations or _is_float(scheme)]
        odd = find_changes(self, INT8_NUMBERS)
        problems += [f"qat: {', '.join(odd)}: for scheme: W8A8 alone; leave it out"] if odd else []
        if self.takes_tables:
            problems.append(
                "qat: embeddings and lm_head are trained as floats; leave both out, and round them by rtn after qat"
            )
        if self.optimizer == "sgd" or self.weight_decay:
            problems.append(
                "qat: weights alone are learned as positions between levels, by adamw and without weight_decay; leave "
                "both out"
            )
        return problems


_NO_MODULES = "W8A8 trains the exported graph, which has no modules inside"


def _is_int8(scheme: Scheme) -> bool:
    return scheme.name in ("W8A8", "W8A8_STATIC")


def _is_float(scheme: Scheme) -> bool:
    return scheme.weights.kind == "float"


def _refuse_scheme(scheme: Scheme) -> str:
    return f"qat: {scheme.name} cannot be trained for; give one scheme for weights alone (W2A16 to W8A16), or W8A8"


def _refuse_rounded(layer: LayerFacts) -> str:
    return (
        f"qat: {layer.name} is in {layer.bits:g} bits already, and qat rounds by itself; put it before the pass that "
        "rounds, or leave that one out"
    )


def _refuse_shared(layer: LayerFacts, facts: ModelFacts) -> str | None:
    """Explain that a layer which holds another's weight cannot be taken; None where it holds its own."""
    other = next((la.name for la in facts.layers if la.weight == layer.weight and la.name != layer.name), None)
    return other and f"qat: {layer.name} and {other} share one weight; ignore {layer.name}"


def _refuse_checkpoint(target: Target) -> str | None:
    if target.reads == "onnx":
        return None
    return f"qat: W8A8 ends in an ONNX graph, and {target.name} reads a checkpoint; train for weights alone"


def _rename_pass(text: str) -> str:
    """Turn a sentence of the pass `int8` into one of `qat`."""
    return text.replace("int8:", "qat:", 1) if text.startswith("int8:") else text
