"""What all passes share which train: how long, how fast, on what, when to stop, and what the loss is made of. No torch.

Of the loss: its terms, the task's usual ones, what they ask of a training set and of a teacher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.distill.schedule import EVALUATIONS, MEASURED_BYTES, Optimizer, Precision, TrainingSchedule, fit_samples
from compress.facts import FLOAT_BYTES, LayerFacts, ModelFacts, Note
from compress.passes.base import STATE_COPIES, DataSize, Pass, PassCost, Stage
from compress.specs import LayerPattern, Record
from compress.tasks import find_torch_task
from compress.tasks.base import Loss
from runtime.bundle.detections import Detections
from runtime.clock.machine import cpu_info
from runtime.tasks import find_task
from runtime.words import did_you_mean, size_text

if TYPE_CHECKING:
    from compress.distill.losses import Pooling
    from compress.models.load import TorchModel

EPOCHS = 10.0
"""Where neither steps nor epochs are given."""
WARMUP = 0.05
"""Part of the steps over which the rate rises: with it, and with `MOMENTUM` and `LARGEST_NORM` of
`compress.distill.train`, was measured what `recipes/claims` say of training."""
AUTOMATIC = ("learning_rate", "optimizer", "precision", "augment", "ema_decay")
"""What a pass that finds its settings may be left to find."""
AVERAGED = 20
"""A run's steps over those that `ema_decay: auto` averages."""
TRIED = 0.1
"""Steps that are spent on finding a learning rate, as a part of those that follow."""
FEW_STEPS = 70
"""By which the best rate shows of itself: of ten rates on a network of inverted bottlenecks."""
NOMINAL_RATES: dict[Optimizer, float] = {"adamw": 5e-4, "sgd": 0.02}
"""What stands for a rate that is to be found."""
FORWARDS = 4.0
"""Forward passes that one training step of a sample costs: the teacher's, the student's, twice that backwards."""
BFLOAT16 = 0.65
"""Part of float32's time that a training step takes in bfloat16, where the processor has it."""
LONGEST = 1.5
"""Times what a batch's texts are usually padded to, that the longest of a run is."""
LARGE_TABLE = 2**24
"""Weights of a table of embeddings, or of an output layer, from which on it is left as the teacher has it, and logits
are made of few tokens at a time: with 512 tokens, those of such a layer weigh more than the activations of a block."""
HEADS = ("head", "tied")
"""Roles of an output layer."""
PIECE_BYTES = 2**30
"""Of the logits of few tokens, both models', and what a loss makes of them."""
TRAINED_COPIES = 9
"""Float copies while a model is trained: its own, the teacher's, gradients, two moments, the best, a state as saved."""
Weight = Annotated[float, Field(gt=0)]
Layers = tuple[tuple[str, str], ...] | LayerPattern
"""Pairs, "uniform", or a `re:` pattern."""
UNIFORM = "uniform"
CACHE_BYTES = 2 * 2**30
"""Of a teacher's outputs that are kept on disk, at most."""


class Augmentation(Record):
    """What is done to images at random while training, after they are encoded."""

    flip: bool = False
    """Mirror half of them."""
    crop: Annotated[int, Field(ge=0)] = 0
    """Shift by up to so many pixels; what comes in from outside is the mean colour."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Blend pairs, with shares drawn from Beta(mixup, mixup); 0: do not."""

    @property
    def any(self) -> bool:
        return self.flip or self.crop > 0 or self.mixup > 0


class TrainingPass(Pass):
    """A pass that learns from the training set. The torch module keeps its parameters' names and shapes."""

    stage: ClassVar[Stage] = "model"
    needs_train: ClassVar[bool] = True
    finds_settings: ClassVar[bool] = False
    """Whether it finds by itself what is left to `auto`."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Times that the training set is gone through; 10 unless `steps` is given."""
    steps: Annotated[int, Field(gt=0)] | None = None
    """Steps of the optimizer, instead of `epochs`."""
    batch_size: Annotated[int, Field(gt=0)] = 64
    """Samples of a step, over all processes. Of a large model they go through it in parts where memory holds fewer."""
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = 5e-4
    """The highest: it rises over a twentieth of the steps, then falls to zero as a cosine. auto: found by short trials
    from the state that training begins with, in a tenth of its steps, and raised by as much as longer trials wanted
    more than shorter ones."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices and kernels."""
    optimizer: Literal["adamw", "sgd", "auto"] = "adamw"
    """sgd, with a momentum of 0.9, wants a higher rate. auto, with learning_rate: auto: the better of both."""
    precision: Precision | Literal["auto"] = "float32"
    """Of the products and convolutions; bfloat16 halves the time on processors that have AMX. auto: bfloat16 on GPUs
    that have it, and on a CPU where the model answers sooner in it."""
    augment: Augmentation | Literal["auto"] = Augmentation()
    """Random changes of images. auto: those under which the teacher goes on seeing the same class, and mixup where the
    schedule has 40 epochs or more; none where there are no classes of images."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Part of the training set that is not learned from; on it the best state is chosen. 0: the last state is kept."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop by then, the rate having fallen to zero: the result then depends on the machine's speed."""
    freeze_batchnorm: bool = False
    """Leave running means and variances as they are, and normalise by them."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = 0.0
    """Of the exponential moving average of the weights, which is judged and kept in their place (0.99: over about the
    last hundred steps); 0: the weights as they are; auto: over about a twentieth of the steps."""

    @model_validator(mode="after")
    def _require_one_length(self) -> TrainingPass:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps both say how long; give one of them")
        return self

    @model_validator(mode="after")
    def _check_auto(self) -> TrainingPass:
        left = [name for name in AUTOMATIC if getattr(self, name) == "auto"]
        if left and not self.finds_settings:
            raise ValueError(f"{' and '.join(left)}: auto is for distill, and for qat of W8A8; say what it is to be")
        if self.optimizer == "auto" and self.learning_rate != "auto":
            raise ValueError("optimizer: auto is chosen by its rate; give learning_rate: auto as well, or name it")
        return self

    @property
    def changes(self) -> Augmentation:
        """Return how images are changed; not at all as long as that is to be found."""
        return Augmentation() if self.augment == "auto" else self.augment

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Return those that may be used."""
        return ("adamw", "sgd") if self.optimizer == "auto" else (self.optimizer,)

    @property
    def nominal_rate(self) -> float:
        """Return the rate; what stands for it as long as it is to be found."""
        return NOMINAL_RATES[self.optimizers[0]] if self.learning_rate == "auto" else self.learning_rate

    def settle(self, seconds: float, **found: object) -> Self:
        """Return the same pass with values that were found, in so many seconds of those that it may take."""
        left = None if self.max_seconds is None else max(self.max_seconds - seconds, 1.0)
        return self.model_copy(update={**found, "max_seconds": left})

    def shorten(self, share: float) -> TrainingPass:
        """Return the pass with this share of its epochs or steps, and of its seconds."""
        length: dict[str, float] = {}
        if self.steps is None:
            length["epochs"] = (self.epochs or EPOCHS) * share
        else:
            length["steps"] = max(round(self.steps * share), 1)
        if self.max_seconds is not None:
            length["max_seconds"] = self.max_seconds * share
        return self.model_copy(update=length)

    def make_schedule(self, n_samples: int, seed: int) -> TrainingSchedule:
        """Return the training schedule that the settings give for a training set of that size."""
        learned = max(n_samples - round(self.held_out * n_samples), 1)
        steps = self.steps or math.ceil((self.epochs or EPOCHS) * learned / self.batch_size)
        shared = {name: getattr(self, name) for name in _SHARED}
        return TrainingSchedule(
            **shared,
            precision="float32" if self.precision == "auto" else self.precision,
            ema_decay=max(1 - AVERAGED / steps, 0.0) if self.ema_decay == "auto" else self.ema_decay,
            optimizer=self.optimizers[0],
            learning_rate=self.nominal_rate,
            steps=steps,
            warmup=round(WARMUP * steps),
            evaluate_every=max(steps // EVALUATIONS, 1),
            seed=seed,
        )

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        schedule = self.make_schedule(data.train, 0)
        evaluations = schedule.steps / schedule.evaluate_every * self.held_out * data.train
        tried = 1 + TRIED if self.learning_rate == "auto" else 1
        learner, half = self.find_learner(data.found or facts), self.expects_bfloat16
        kept, pieces = self.kept_tables(facts, learner), self.has_pieces(learner)
        forward = 1 + (FORWARDS - 1) * learner.macs / max(facts.macs, 1) if kept else FORWARDS
        runs = tried * forward * schedule.steps * schedule.batch_size + 2 * evaluations
        counted = [layer for layer in learner.layers if not (pieces and layer.role in HEADS)]
        outputs = FLOAT_BYTES // (1 + half) * sum(layer.n_outputs for layer in counted)
        # Backward needs three copies of what the layers give: it, what norms and activations make of it, gradients.
        sample = int(min(LONGEST * data.filled, 1) * 3 * outputs)
        n_kept = sum(layer.n_bytes for layer in kept)
        learned = learner.n_bytes - n_kept
        held = TRAINED_COPIES * facts.n_bytes
        if kept:
            # Beside itself what is learned has gradients, two moments, the best, and in bfloat16 half a one, or a state
            # as it is saved.
            held = learner.n_bytes + (facts.n_bytes - n_kept) // (1 + half) + int(4.5 * learned)
        held += PIECE_BYTES * pieces
        together = self.batch_size
        if learned >= MEASURED_BYTES and data.free_bytes is not None:
            together = fit_samples(self.batch_size, sample, data.free_bytes - held)
        return PassCost(
            runs * data.filled * (BFLOAT16 if half else 1),
            held + together * sample,
            STATE_COPIES * learned if kept else STATE_COPIES * facts.n_bytes,
        )

    @property
    def expects_bfloat16(self) -> bool:
        """Return whether steps will be made in bfloat16, as far as a plan can tell: of `auto`, by the processor."""
        return self.precision == "bfloat16" or (self.precision == "auto" and "amx_bf16" in cpu_info()[1])

    def has_pieces(self, facts: ModelFacts) -> bool:
        """Return whether logits are made of few tokens at a time: of a language model whose output layer is large."""
        by_token = find_torch_task(facts.task).loss == "next tokens"
        return by_token and any(layer.role in HEADS and layer.n_weights >= LARGE_TABLE for layer in facts.layers)

    def kept_tables(self, facts: ModelFacts, learner: ModelFacts) -> tuple[LayerFacts, ...]:
        """Return the layers that the learner keeps as they are in `facts`, the teacher: none where all are trained."""
        return ()

    def find_learner(self, facts: ModelFacts) -> ModelFacts:
        """Return the facts of the model that is trained, which keeps activations for its gradients."""
        return facts

    def time_notes(self, n_samples: int, shares: tuple[float, float]) -> list[Note]:
        steps = self.make_schedule(n_samples, 0).steps
        low, high = (max(round(share * steps), 1) for share in shares)
        if math.sqrt(low * high) >= FEW_STEPS:
            return []
        text = f"{self.kind}: max_seconds {self.max_seconds:g} has room for about {low} to {high} steps of "
        text += f"{self.batch_size} samples, which teach little: give it a smaller batch_size, or more time"
        return [Note("warning", text)]

    def training_problems(self, facts: ModelFacts) -> list[str]:
        """Return what is wrong with the settings for such a model."""
        if why := facts.explain_no_module():
            return [f"{self.kind}: trains a torch model, and {why}"]
        if self.changes.any and find_task(facts.task).preprocess != "image":
            return [f"{self.kind}: augment is for images, and the task is {facts.task}; leave it out"]
        return [
            f"{self.kind}: augment: the input {spec.name} {list(spec.shape)} has neither 1 nor 3 channels, by which "
            "they are told from height and width; leave augment out"
            for spec in facts.inputs[:1]
            if self.changes.any and len(spec.shape) == 4 and not {1, 3} & {spec.shape[1], spec.shape[3]}
        ]


_SHARED = (
    "batch_size",
    "weight_decay",
    "held_out",
    "max_seconds",
    "freeze_batchnorm",
)
"""Settings that the schedule takes as they are."""


class LogitsTerm(Record):
    """KL(teacher || student): between what the two hold likely."""

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
    """Distance between the model's outputs: embeddings, regressions; of a detector between its boxes, where the teacher
    sees objects (smooth L1 in parts of a box, whatever `loss` says)."""

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
    "label sets": Terms(logits=LogitsTerm(temperature=2.0)),
    "pixel classes": Terms(logits=LogitsTerm()),
    "answer spans": Terms(logits=LogitsTerm(temperature=2.0)),
    "next tokens": Terms(logits=LogitsTerm()),
    "target tokens": Terms(logits=LogitsTerm()),
    "numbers": Terms(logits=LogitsTerm()),
    "embeddings": Terms(output=OutputTerm(), hidden=HiddenTerm()),
    "detections": Terms(logits=LogitsTerm(), output=OutputTerm(loss="mse", pooling="none")),
    "outputs": Terms(output=OutputTerm(loss="mse", pooling="none")),
}
"""The terms of a loss that a recipe leaves to the task."""


class LearningPass(TrainingPass):
    """A pass that trains by a sum of terms.

    Without any term: for classes KL at temperature 4, for answers in a text and for each of a set of labels at 2, for
    pixels and for text KL of each pixel and predicted token, for numbers their squared error, for embeddings the cosine
    of the pooled ones and the blocks' hidden states, for a detector's head the divergence of its classes and smooth L1
    of its boxes, else the squared error of the outputs.
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

    @property
    def by_default(self) -> bool:
        """Return whether the loss is the task's usual one."""
        return not any((self.logits, self.labels, self.hidden, self.attention, self.output))

    def terms(self, task: str) -> Terms:
        """Return the terms of the loss for a task."""
        if not self.by_default:
            return Terms(self.logits, self.labels, self.hidden, self.attention, self.output)
        return _USUAL[find_torch_task(task).loss]

    def needs_teacher(self, task: str) -> bool:
        """Return whether anything but the labels is learned from."""
        terms = self.terms(task)
        return any(term is not None for term in (terms.logits, terms.hidden, terms.attention, terms.output))

    def needs_labels(self, task: str) -> bool:
        """Return whether the training set must have labels; those of a text are its own tokens."""
        return self.terms(task).labels is not None and find_torch_task(task).loss != "next tokens"

    def term_problems(self, facts: ModelFacts) -> list[str]:
        """Return what is wrong with the loss for such a model. Modules are looked up in the student, which is to be."""
        problems, terms = [], self.terms(facts.task)
        if find_torch_task(facts.task).loss == "embeddings" and (terms.logits or terms.labels):
            problems.append(f"{self.kind}: an embedding has neither logits nor classes; use output and hidden")
        softened = terms.logits is not None and terms.logits.temperature != 1.0
        if find_torch_task(facts.task).loss == "numbers" and softened:
            problems.append(f"{self.kind}: logits: numbers have no temperature; leave it out")
        if facts.detections is not None:
            problems += _head_problems(self.kind, terms, facts.detections)
        if self.changes.any and terms.labels and find_torch_task(facts.task).loss == "pixel classes":
            problems.append(
                f"{self.kind}: augment changes images, and labels of pixels would stay: leave one of them out"
            )
        if self.changes.mixup and self.attention is not None:
            problems.append(
                f"{self.kind}: mixup blends images, and attention maps are compared for texts; use one of them"
            )
        return problems + _layer_problems(self, facts)

    def describe_loss(self, task: str) -> str:
        """Describe the loss in words."""
        terms = self.terms(task)
        parts = []
        if terms.logits is not None:
            of_numbers = find_torch_task(task).loss == "numbers"
            softened = f"KL of the logits at temperature {terms.logits.temperature:g}"
            parts.append("squared error of the numbers" if of_numbers else softened)
        if terms.labels is not None:
            learned = {"next tokens": "the next tokens", "target tokens": "the references' tokens"}
            parts.append(learned.get(find_torch_task(task).loss, "the labels"))
        if terms.output is not None and find_torch_task(task).loss == "detections":
            parts.append("smooth L1 of the boxes")
        elif terms.output is not None:
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
        """Return the bytes of the teacher's outputs that are kept on disk; 0: they are computed each time, or never.

        They are kept where samples come again unchanged, and CACHE_BYTES hold them.
        """
        if not self.needs_teacher(facts.task) or not self.terms(facts.task).outputs_alone or self.changes.any:
            return 0
        n_bytes, schedule = 4 * n_samples * self._find_width(facts), self.make_schedule(n_samples, 0)
        again = schedule.steps * schedule.batch_size > n_samples
        return n_bytes if again and n_bytes <= CACHE_BYTES else 0

    def _find_width(self, facts: ModelFacts | TorchModel) -> int:
        """Count the numbers that the teacher's only output has for one sample; 0 where that is not fixed."""
        terms, shapes = self.terms(facts.task), [spec.shape for spec in facts.outputs]
        pooled = terms.pooling(facts.task) != "none"
        fits = len(shapes) == 1 and (len(shapes[0]) == 2 or (pooled and len(shapes[0]) == 3))
        width = shapes[0][-1] if fits else 0
        return width if isinstance(width, int) else 0

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        """Return what the plan says once it knows the training set."""
        schedule, n_bytes = self.make_schedule(n_samples, 0), self.cache_bytes(facts, n_samples)
        text = f"{self.kind}: {schedule.steps} steps of {schedule.batch_size} samples"
        kept = f"its outputs are kept on disk ({size_text(n_bytes)})" if n_bytes else "it is run in every step"
        return [Note("info", f"{text}; the teacher: {kept}" if self.needs_teacher(facts.task) else text)]


def _head_problems(kind: str, terms: Terms, spec: Detections) -> list[str]:
    """Report what a detector's head cannot learn from."""
    problems = []
    if terms.labels is not None:
        problems.append(
            f"{kind}: labels: which place of a head learns which box is for its own training; use logits and output"
        )
    if spec.outputs is not None and spec.outputs.final and (terms.logits or terms.output):
        problems.append(
            f"{kind}: the model ends in boxes, after suppression, which teach nothing: give it without that end"
        )
    return problems


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
    return f"{where}: the model has no layer or block '{name}'{did_you_mean(name, known)}"


def _list_modules(facts: ModelFacts) -> dict[str, None]:
    """List the names of layers, and of all modules that hold some."""
    paths = (layer.name.split(".") for layer in facts.layers)
    return dict.fromkeys(".".join(path[:n]) for path in paths for n in range(len(path), 0, -1))


def _has_blocks(facts: ModelFacts) -> bool:
    return facts.structure is not None and len(facts.structure.blocks) > 1
