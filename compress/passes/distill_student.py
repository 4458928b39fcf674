"""Who learns in `distill`, where it is not the model as the passes before left it; what a plan knows of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.facts import ModelFacts
from compress.passes.depth import depth_problem, evenly_spaced, without_blocks
from compress.specs import NAMES_PLACE, Record
from runtime.bundle.tensors import TensorSpec

Number = Annotated[int, Field(ge=0)]


class Student(Record):
    """One of: some blocks of the model; a model of its class by a smaller configuration; another model."""

    layers: Literal["uniform"] | tuple[Number, ...] | None = None
    """Blocks of the model that the student has, or with `config` starts from: their numbers, counted from 0; uniform:
    evenly spaced, the first and the last among them."""
    keep: Annotated[int, Field(ge=1)] | None = None
    """How many, of uniform ones."""
    config: dict[str, int] = {}
    """Numbers of config.json that are to be others: hidden_size, num_hidden_layers, ... The student starts from the
    model's tensors, cut to size."""
    source: Annotated[Annotated[str, Field(pattern=r"^(hf|dir|python):.+")] | None, NAMES_PLACE] = None
    """Another model, as model.source: hf:<hub id>, dir:<folder>, python:<module or file.py>:<factory>."""
    weights: Annotated[str | None, NAMES_PLACE] = None
    """For python: sources, a .safetensors file; without it the student starts as its factory gives it."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory."""

    @model_validator(mode="after")
    def _require_one_form(self) -> Student:
        if self.source is not None and (self.config or self.layers is not None or self.keep is not None):
            raise ValueError("source is another model; leave out layers, keep and config")
        if self.source is None and (self.weights is not None or self.args):
            raise ValueError("weights and args belong to a python: source; give it, or leave them out")
        if not (self.source or self.config or self.layers is not None):
            raise ValueError("say who learns: layers, config or source")
        if (self.layers == "uniform" and not self.config) != (self.keep is not None):
            raise ValueError("keep says how many blocks uniform layers are; give both, or the blocks' numbers")
        return self

    @property
    def separate(self) -> bool:
        """Return whether the student is built anew, not cut out of the model as it is."""
        return self.source is not None or bool(self.config)

    @property
    def key(self) -> str:
        """Return a text that names the student among those of a recipe."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def stay(self, n_blocks: int) -> tuple[int, ...]:
        """Return the numbers of the model's blocks that the student has."""
        if isinstance(self.layers, tuple):
            return tuple(sorted(self.layers))
        return evenly_spaced(n_blocks, min(self.keep or 1, n_blocks))

    def starts(self, n_blocks: int, n_own: int) -> tuple[int, ...]:
        """Return the numbers of the model's blocks that the blocks of a student by `config` start from."""
        if isinstance(self.layers, tuple) and len(self.layers) == n_own and max(self.layers) < n_blocks:
            return self.layers
        return evenly_spaced(n_blocks, n_own)


def student_facts(student: Student | None, facts: ModelFacts) -> tuple[ModelFacts, list[str], str]:
    """Return the facts of the model that learns, what is wrong with it, and what is to be said of it.

    `student` None: the model as it is. A student that could not be looked at is not told of here: `read_inputs` has.
    """
    if student is None:
        return facts, [], ""
    if student.separate:
        return _describe_separate(student, facts)
    blocks = facts.removable or ()
    layers = student.layers if isinstance(student.layers, tuple) else None
    if problem := depth_problem(blocks, layers, student.keep if layers is None else len(layers)):
        return facts, [f"student: {problem}"], ""
    stay = student.stay(len(blocks))
    text = f"{', '.join(map(str, stay))} of {len(blocks)} blocks"
    removed = [block.name for number, block in enumerate(blocks) if number not in stay]
    return without_blocks(facts, removed), [], text


def _describe_separate(student: Student, facts: ModelFacts) -> tuple[ModelFacts, list[str], str]:
    learner = facts.students.get(student.key)
    if learner is None:
        return facts, [], ""
    problems = [
        f"student: it {verb} {_format_specs(own)}, the teacher {_format_specs(other)}; give one that {verb} the same"
        for verb, own, other in (("takes", learner.inputs, facts.inputs), ("gives", learner.outputs, facts.outputs))
        if _format_specs(own) != _format_specs(other)
    ]
    problems += _start_problems(student, facts, learner)
    return learner, problems, f"{learner.architecture} of {learner.n_bytes / 4e6:.2f} million parameters"


def _start_problems(student: Student, facts: ModelFacts, learner: ModelFacts) -> list[str]:
    """Report blocks to start from that are too few, too many, or not there."""
    if not isinstance(student.layers, tuple):
        return []
    n_own, n = (len(model.structure.blocks) if model.structure is not None else 1 for model in (learner, facts))
    if len(student.layers) == n_own and max(student.layers) < n:
        return []
    return [f"student: layers: name one of the model's {n} blocks, from 0, for each of the student's {n_own}"]


def _format_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {list(spec.shape)}" for spec in specs)
