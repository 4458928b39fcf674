"""Models that `distill` puts in the recipe's own place: looked at for the plan, and made for the run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch

from compress.blocks.experts import unstack_experts
from compress.errors import SourceError
from compress.facts import ModelFacts, SampleShapes
from compress.models import huggingface
from compress.models.facts import model_facts
from compress.models.load import LoadedModel, load_model
from compress.models.source import Source, locate, model_digest
from compress.passes.distill_student import Student
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec


@dataclass(frozen=True)
class Students:
    """By `Student.key`: facts and digests of those that a recipe's passes build anew; and what is wrong with others."""

    facts: dict[str, ModelFacts] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def look_at_students(recipe: Recipe, feeds: SampleShapes, coupling: bool, blocks: bool) -> Students:
    """Look at all students of a recipe; no weight is read. `feeds`, `coupling`, `blocks`: as for `model_facts`."""
    students, spec, root = Students(), recipe.model, recipe.root
    for number, pass_ in enumerate(recipe.passes):
        student = pass_.find_student()
        if student is None or not student.separate:
            continue
        its_spec = student_spec(spec, student)
        try:
            config = _collect_changes(spec, locate(its_spec, root), student)
            students.facts[student.key] = model_facts(its_spec, root, feeds, coupling, blocks, config)
            students.digests[student.key] = model_digest(its_spec, root)
        except SourceError as error:
            students.problems.extend(f"passes.{number}: distill: {problem}" for problem in error.problems)
    return students


def student_spec(spec: ModelSpec, student: Student) -> ModelSpec:
    """Return where the student comes from, as a model's spec; `spec`: the recipe's own model."""
    if student.source is None:
        return spec
    changes = {"source": student.source, "weights": student.weights, "args": student.args, "revision": None}
    return spec.model_copy(update=changes)


def make_student(recipe: Recipe, feeds: SampleShapes, loaded: LoadedModel, student: Student, seed: int) -> LoadedModel:
    """Build the student that takes the place of `loaded`, with its own weights.

    Given by its configuration, or where its source has none, it gets those of a seed.
    """
    spec, root = recipe.model, recipe.root
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not student.config:
            return load_model(student_spec(spec, student), root, feeds)
        source = locate(spec, root)
        source = replace(source, config=_collect_changes(spec, source, student))
        module = huggingface.build_untrained(spec, source).float().eval().requires_grad_(False)
    unstack_experts(module)
    return replace(loaded, module=module)


def _collect_changes(spec: ModelSpec, source: Source, student: Student) -> dict[str, Any]:
    """Return the values that the student's config.json changes; lists with one entry a block follow their number."""
    if not student.config:
        return {}
    if source.kind != "huggingface" or source.shapes is not None:
        lacks = "has no config.json" if source.shapes is None else "has sizes that its config.json does not say"
        raise SourceError(f"student: config: {spec.source} {lacks}; give the student as a source of its own")
    known = huggingface.load_config(spec, source).to_dict()
    changes: dict[str, Any] = {}
    for key, value in student.config.items():
        if type(known.get(key)) is not int:
            raise SourceError(_explain_unknown(spec, key, known))
        lists = {k: v for k, v in known.items() if isinstance(v, list) and len(v) == known[key]}
        if "layer" in key:
            changes |= {k: [v[i] for i in student.starts(known[key], value)] for k, v in lists.items()}
        changes[key] = value
    return changes


def _explain_unknown(spec: ModelSpec, key: str, known: dict[str, Any]) -> str:
    numbers = [name for name, value in known.items() if type(value) is int]
    near = get_close_matches(key, numbers, n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else f"; its numbers are {', '.join(numbers)}"
    return f"student: config: {spec.source} has no number '{key}' in its config.json{hint}"
