"""Students: models that passes put in the place of a recipe's own, looked at for the plan and made for the run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compress.blocks.experts import unstack_experts
from compress.errors import SourceError
from compress.facts import ModelFacts, SampleShapes
from compress.models import huggingface
from compress.models.facts import model_facts
from compress.models.load import TorchModel, load_torch_model
from compress.models.source import Source, locate, model_digest
from compress.passes.distill_student import Student
from compress.recipe.schema import Recipe
from compress.specs import ModelSpec
from compress.store.digests import identify_file
from runtime.words import suggest


def list_students(recipe: Recipe) -> list[Student]:
    """Return the models that passes put in the given one's place."""
    found = [pass_.find_student() for pass_ in recipe.passes]
    return [student for student in found if student is not None and student.separate]


@dataclass(frozen=True)
class Students:
    """By `Student.key`: facts and digests of those that a recipe's passes build anew; and what is wrong with others."""

    facts: dict[str, ModelFacts] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def look_at_students(recipe: Recipe, source: Source, feeds: SampleShapes, coupling: bool, blocks: bool) -> Students:
    """Look at all students of a recipe; no weight is read. `feeds`, `coupling`, `blocks`: as for `model_facts`."""
    students = Students()
    for number, pass_ in enumerate(recipe.passes):
        student = pass_.find_student()
        if student is None or not student.separate:
            continue
        try:
            its = locate_student(source, student)
            changed = replace(its, config=_collect_changes(its, student))
            students.facts[student.key] = model_facts(changed, feeds, coupling, blocks)
            students.digests[student.key] = model_digest(its, identify_file)
        except SourceError as error:
            students.problems.extend(f"passes.{number}: distill: {problem}" for problem in error.problems)
    return students


def locate_student(source: Source, student: Student) -> Source:
    """Return where the student comes from; `source`: the recipe's own model. SourceError if it is not there."""
    if student.source is None:
        return source
    changes = {"source": student.source, "weights": student.weights, "args": student.args, "revision": None}
    return locate(source.spec.model_copy(update=changes), source.root)


def locate_result(recipe: Recipe, source: Source) -> Source:
    """Return the model whose code the result has: the last that a pass puts in the place of `source`."""
    for pass_ in recipe.passes:
        if (student := pass_.find_student()) is not None:
            source = locate_student(source, student)
    return source


def make_student(source: Source, feeds: SampleShapes, loaded: TorchModel, student: Student, seed: int) -> TorchModel:
    """Build the student that takes the place of `loaded`, the recipe's own model of `source`, with its own weights.

    Given by its configuration, or where its source has none, it gets those of a seed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not student.config:
            return load_torch_model(locate_student(source, student), feeds)
        changed = replace(source, config=_collect_changes(source, student))
        module = huggingface.build_untrained(changed).float().eval().requires_grad_(False)
    unstack_experts(module)
    return replace(loaded, module=module)


def _collect_changes(source: Source, student: Student) -> dict[str, Any]:
    """Return the values that the student's config.json changes; lists with one entry a block follow their number."""
    if not student.config:
        return {}
    if source.kind != "huggingface" or source.shapes is not None:
        lacks = "has no config.json" if source.shapes is None else "has sizes that its config.json does not say"
        raise SourceError(f"student: config: {source.name} {lacks}; give the student as a source of its own")
    known = huggingface.load_config(source).to_dict()
    changes: dict[str, Any] = {}
    for key, value in student.config.items():
        if type(known.get(key)) is not int:
            raise SourceError(_explain_unknown(source.spec, key, known))
        lists = {k: v for k, v in known.items() if isinstance(v, list) and len(v) == known[key]}
        if "layer" in key:
            changes |= {k: [v[i] for i in student.starts(known[key], value)] for k, v in lists.items()}
        changes[key] = value
    return changes


def _explain_unknown(spec: ModelSpec, key: str, known: dict[str, Any]) -> str:
    numbers = [name for name, value in known.items() if type(value) is int]
    hint = suggest(key, numbers)
    return f"student: config: {spec.source} has no number '{key}' in its config.json{hint}"
