"""`distill`: a student learns to give what the model gave as it came (Hinton et al. 2015, arXiv:1503.02531)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.passes.choosing import refuse_rounded
from compress.passes.distill_student import Student, student_facts
from compress.passes.training import HEADS, LARGE_TABLE, LearningPass
from compress.specs import Record
from compress.tasks import find_torch_task
from runtime.tasks import find_task


class Sequences(Record):
    """Texts that the teacher writes, in place of the training set's (sequence-level distillation)."""

    prompt_tokens: Annotated[int, Field(gt=0)] = 8
    """Of the beginning of each text in the training set, which stay."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """What the teacher's logits are divided by when it draws the next token."""


class Distill(LearningPass):
    """Train the model as it is now to give what it gave before all passes; no labels are needed.

    Without any term: for classes KL at temperature 4, for text KL of every predicted token, for embeddings the cosine
    of the pooled ones and the blocks' hidden states, else the squared error of the outputs.
    """

    finds_settings: ClassVar[bool] = True

    kind: Literal["distill"] = "distill"
    sequences: Sequences | None = None
    """Learn from what the teacher writes; null: from the texts as they are. With `labels`, its words are the target."""
    student: Student | None = None
    """Who learns; null: the model as the passes before left it."""

    @property
    def uses_blocks(self) -> bool:  # type: ignore[override]
        return self.student is not None and not self.student.separate

    @property
    def rewrites_texts(self) -> bool:
        return self.sequences is not None

    def find_student(self) -> Student | None:
        return self.student

    def find_learner(self, facts: ModelFacts) -> ModelFacts:
        return student_facts(self.student, facts)[0]

    def kept_tables(self, facts: ModelFacts, learner: ModelFacts) -> tuple[LayerFacts, ...]:
        if find_torch_task(facts.task).loss != "next tokens" or self.output is not None:
            return ()
        sizes = {layer.name: layer.shape for layer in facts.layers}
        large = [layer for layer in learner.distinct_layers() if layer.n_weights >= LARGE_TABLE]
        return tuple(
            layer for layer in large if (layer.is_table or layer.role in HEADS) and sizes.get(layer.name) == layer.shape
        )

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        problems, task = self.training_problems(facts), find_task(facts.task)
        given = facts
        facts, more, who = student_facts(self.student, facts)
        problems += [f"distill: {problem}" for problem in more]
        problems += [*refuse_rounded(self.kind, facts), *self.term_problems(facts)]
        if self.sequences is not None and not task.decoder_only:
            problems.append(f"distill: sequences: a {facts.task} model writes no text; leave it out")
        decisions = tuple(LayerDecision(layer.name, layer.type, "distilled") for layer in facts.layers)
        notes = [Note("info", f"distill: learns by {self.describe_loss(facts.task)}")]
        notes += [Note("info", f"distill: the student: {who}")] if who else []
        if kept := self.kept_tables(given, facts):
            names = ", ".join(layer.name for layer in kept)
            notes.append(Note("info", f"distill: not trained, as they are the teacher's: {names}"))
        return PassPlan(facts, decisions, tuple(notes), tuple(problems))
