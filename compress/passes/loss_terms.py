"""What a loss is made of: terms, the task's usual ones, what they ask of a training set and of a teacher. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.facts import ModelFacts, Note
from compress.passes.training import TrainingPass
from compress.specs import LayerPattern, Record
from compress.tasks import find_torch_task
from compress.tasks.base import Loss

if TYPE_CHECKING:
    from compress.distill.losses import Pooling
    from compress.models.load import TorchModel

Weight = Annotated[float, Field(gt=0)]
Layers = tuple[tuple[str, str], ...] | LayerPattern
"""Pairs, "uniform", or a `re:` pattern."""
UNIFORM = "uniform"
CACHE_BYTES = 2 * 2**30
"""Of a teacher's outputs that `teacher_cache: auto` keeps on disk, at most."""


class LogitsTerm(Record):
    """Divergence between what the teacher and the student hold likely."""

    divergence: Literal["forward", "reverse", "symmetric"] = "forward"
    """KL(teacher || student), KL(student || teacher), or the mean of both."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """What logits are divided by; the loss is multiplied by its square."""
    weight: Weight = 1.0
    """Of this term in the sum."""


class LabelsTerm(Record):
    """Cross-entropy of classes, or of each next token; squared error of scores."""

    weight: Weight = 1.0
    """Of this term in the sum."""


class HiddenTerm(Record):
    """Distance between what modules inside give; a learned projection where their widths differ."""

    loss: Literal["mse", "cosine"] = "mse"
    """mse: squared error over the teacher's mean square; cosine: 1 - cosine."""
    layers: Layers = UNIFORM
    """uniform: the student's blocks on the teacher's, evenly spread; `re:` and a pattern: modules of one name; or pairs
    [student's module, teacher's module]."""
    weight: Weight = 1.0
    """Of this term in the sum."""


class AttentionTerm(Record):
    """Divergence between attention maps, of modules that give them (Hugging Face's, which run as eager)."""

    layers: Layers = UNIFORM
    """As in `hidden`; a block stands for the attention inside it."""
    weight: Weight = 1.0
    """Of this term in the sum."""


class OutputTerm(Record):
    """Distance between the model's outputs: embeddings, regressions."""

    loss: Literal["mse", "cosine"] = "cosine"
    """mse: squared error over the teacher's mean square; cosine: 1 - cosine."""
    pooling: Literal["none", "mean", "cls", "max"] = "mean"
    """How the tokens' states become one embedding first: as `preprocess` says. none: token by token."""
    weight: Weight = 1.0
    """Of this term in the sum."""


@dataclass(frozen=True)
class Terms:
    """What the loss is made of."""

    logits: LogitsTerm | None = None
    labels: LabelsTerm | None = None
    hidden: HiddenTerm | None = None
    attention: AttentionTerm | None = None
    output: OutputTerm | None = None

    @property
    def outputs_alone(self) -> bool:
        """Return whether the teacher's outputs are all that is asked of it."""
        return self.hidden is None and self.attention is None

    def pooling(self, task: str) -> Pooling:
        """Return how outputs become one vector a sample: "none" for all but embeddings."""
        return self.output.pooling if self.output is not None and find_torch_task(task).loss == "embeddings" else "none"


_USUAL: dict[Loss, Terms] = {
    "classes": Terms(logits=LogitsTerm(temperature=4.0)),
    "token classes": Terms(logits=LogitsTerm(temperature=4.0)),
    "next tokens": Terms(logits=LogitsTerm()),
    "embeddings": Terms(output=OutputTerm(), hidden=HiddenTerm()),
    "outputs": Terms(output=OutputTerm(loss="mse", pooling="none")),
}
"""The terms of a loss that a recipe leaves to the task."""


class LearningPass(TrainingPass):
    """A pass that trains by a sum of terms.

    Without any term: for classes KL at temperature 4, for text KL of every predicted token, for embeddings the cosine
    of the pooled ones and the blocks' hidden states, else the squared error of the outputs.
    """

    logits: LogitsTerm | None = None
    """Term of the loss; null: not in it."""
    labels: LabelsTerm | None = None
    """Term of the loss; null: not in it."""
    hidden: HiddenTerm | None = None
    """Term of the loss; null: not in it."""
    attention: AttentionTerm | None = None
    """Term of the loss; null: not in it."""
    output: OutputTerm | None = None
    """Term of the loss; null: not in it."""
    teacher_cache: Literal["auto"] | bool = "auto"
    """Keep the teacher's outputs on disk; auto: where samples come again unchanged and 2 GiB hold them."""

    @property
    def by_default(self) -> bool:
        """Return whether the loss is the task's usual one."""
        return not any((self.logits, self.labels, self.hidden, self.attention, self.output))

    def terms(self, task: str) -> Terms:
        """Return the terms of the loss for a task."""
        if not self.by_default:
            return Terms(self.logits, self.labels, self.hidden, self.attention, self.output)
        return _USUAL[find_torch_task(task).loss]

    def needs_labels(self, task: str) -> bool:
        """Return whether the training set must have labels; those of a text are its own tokens."""
        return self.terms(task).labels is not None and find_torch_task(task).loss != "next tokens"

    def term_problems(self, facts: ModelFacts) -> list[str]:
        """Return what is wrong with the loss for such a model. Modules are looked up in the student, which is to be."""
        problems, terms = [], self.terms(facts.task)
        if find_torch_task(facts.task).loss == "embeddings" and (terms.logits or terms.labels):
            problems.append(f"{self.kind}: an embedding has neither logits nor classes; use output and hidden")
        if self.augment.mixup and self.attention is not None:
            problems.append(
                f"{self.kind}: mixup blends images, and attention maps are compared for texts; use one of them"
            )
        if self.teacher_cache is True and (self.augment.any or not terms.outputs_alone or not self._find_width(facts)):
            problems.append(
                f"{self.kind}: teacher_cache: only one vector a sample can be kept, and only without augment, hidden "
                "and attention; leave it at auto"
            )
        return problems + _layer_problems(self, facts)

    def describe_loss(self, task: str) -> str:
        """Describe the loss in words."""
        terms = self.terms(task)
        parts = []
        if terms.logits is not None:
            parts.append(f"{terms.logits.divergence} KL of the logits at temperature {terms.logits.temperature:g}")
        if terms.labels is not None:
            parts.append("the next tokens" if find_torch_task(task).loss == "next tokens" else "the labels")
        if terms.output is not None:
            pooling = terms.pooling(task)
            parts.append(f"{terms.output.loss} of the outputs" + ("" if pooling == "none" else f" ({pooling} pooling)"))
        parts += [f"{terms.hidden.loss} of hidden states"] if terms.hidden is not None else []
        parts += ["attention maps"] if terms.attention is not None else []
        return ", ".join(parts)

    def train_problems(self, task: str, n_samples: int, has_labels: bool) -> list[str]:
        """Return what is wrong with a training set, for the planner."""
        if self.needs_labels(task) and not has_labels:
            return [f"{self.kind}: labels: the training set has no labels; name their column, or leave the term out"]
        if n_samples - round(self.held_out * n_samples) < 1:
            return [f"{self.kind}: held_out {self.held_out:g} leaves nothing of {n_samples} samples to learn from"]
        return []

    def cache_bytes(self, facts: ModelFacts | TorchModel, n_samples: int) -> int:
        """Return the bytes of the teacher's outputs that are kept on disk; 0: they are computed each time."""
        if self.teacher_cache is False or not self.terms(facts.task).outputs_alone or self.augment.any:
            return 0
        n_bytes, course = 4 * n_samples * self._find_width(facts), self.course(n_samples, 0)
        again = course.steps * course.samples > n_samples
        return n_bytes if self.teacher_cache is True or (again and n_bytes <= CACHE_BYTES) else 0

    def _find_width(self, facts: ModelFacts | TorchModel) -> int:
        """Count the numbers that the teacher's only output has for one sample; 0 where that is not fixed."""
        terms, shapes = self.terms(facts.task), [spec.shape for spec in facts.outputs]
        pooled = terms.pooling(facts.task) != "none"
        fits = len(shapes) == 1 and (len(shapes[0]) == 2 or (pooled and len(shapes[0]) == 3))
        width = shapes[0][-1] if fits else 0
        return width if isinstance(width, int) else 0

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        """Return what the plan says once it knows the training set."""
        course, n_bytes = self.course(n_samples, 0), self.cache_bytes(facts, n_samples)
        kept = f"its outputs are kept on disk ({n_bytes / 1e6:.1f} MB)" if n_bytes else "it is run in every step"
        return [Note("info", f"{self.kind}: {course.steps} steps of {course.samples} samples; the teacher: {kept}")]


def _layer_problems(config: LearningPass, facts: ModelFacts) -> list[str]:
    """Report layer maps that name a module which the student lacks. The teacher's are looked up when it is loaded."""
    terms, problems, known = config.terms(facts.task), [], _list_modules(facts)
    for field, term in (("hidden", terms.hidden), ("attention", terms.attention)):
        if term is None:
            continue
        where = f"{config.kind}: {field}"
        if not isinstance(term.layers, str):
            problems += [_describe_missing(where, name, known) for name, _ in term.layers if name not in known]
        elif term.layers != UNIFORM:
            problems += _check_form(where, term.layers)
        elif not _has_blocks(facts) and not config.by_default:
            problems.append(f"{where}: no chain of blocks was found; give pairs of modules")
    return problems


def _check_form(where: str, layers: str) -> list[str]:
    if layers.startswith("re:"):
        return []
    return [f"{where}: layers: {layers!r} is neither uniform, nor a re: pattern, nor pairs"]


def _describe_missing(where: str, name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{where}: the model has no layer or block '{name}'{hint}"


def _list_modules(facts: ModelFacts) -> dict[str, None]:
    """List the names of layers, and of all modules that hold some."""
    paths = (layer.name.split(".") for layer in facts.layers)
    return dict.fromkeys(".".join(path[:n]) for path in paths for n in range(len(path), 0, -1))


def _has_blocks(facts: ModelFacts) -> bool:
    return facts.structure is not None and len(facts.structure.blocks) > 1
