"""The knobs that all passes share which train: how long, how fast, on what, and when to stop."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.distill.course import LOOKS, Course
from compress.facts import ModelFacts
from compress.passes.base import STATE_COPIES, Pass, Stage, TrainingCost
from compress.specs import Record
from runtime.tasks import find_task

EPOCHS = 10.0
FORWARDS = 4.0
"""Forward passes that one training step of a sample costs: the teacher's, the student's, twice that backwards."""
BFLOAT16 = 0.65
"""Part of float32's time that a training step takes in bfloat16, where the processor has it."""
TRAINED_COPIES = 9
"""Float copies while a model is trained: its own, the teacher's, gradients, two moments, the best, a state as saved."""


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

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Times that the training set is gone through; 10 unless `steps` is given."""
    steps: Annotated[int, Field(gt=0)] | None = None
    """Steps of the optimizer, instead of `epochs`."""
    batch_size: Annotated[int, Field(gt=0)] = 64
    """Samples that go through the model together, over all processes."""
    accumulate: Annotated[int, Field(gt=0)] = 1
    """Such batches whose gradients are added up for one step."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    """The highest."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices and kernels."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd: with `momentum`; it wants a higher rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of sgd."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls, to zero at the end or not at all."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the steps over which the rate rises first."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """The largest norm of all gradients together; 0: any."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products and convolutions; bfloat16 halves the time on processors that have it (AVX512-BF16, AMX)."""
    augment: Augmentation = Augmentation()
    """Random changes of images."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Part of the training set that is not learned from; on it the best state is chosen. 0: the last state is kept."""
    evaluate_every: Annotated[int, Field(gt=0)] | None = None
    """Steps between two looks at the samples held out; 20 looks in all if not given."""
    patience: Annotated[int, Field(gt=0)] | None = None
    """Stop after so many looks without a better one."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop by then, the rate having fallen to zero: the result then depends on the machine's speed."""
    dropout: bool = False
    """Let the model's own dropout work."""
    freeze_batchnorm: bool = False
    """Leave running means and variances as they are, and normalise by them."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the exponential moving average of the weights, which is judged and kept in their place (0.99: over about the
    last hundred steps); 0: the weights as they are."""
    keep_zeros: bool = True
    """Weights of matrices and kernels that are exactly 0 stay so, as a sparse model's must."""
    seed: int | None = None
    """Default: the recipe's seed."""

    @model_validator(mode="after")
    def _require_one_length(self) -> TrainingPass:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps both say how long; give one of them")
        return self

    def course(self, n_samples: int, seed: int) -> Course:
        """Return the training schedule that the settings give for a training set of that size."""
        learned = max(n_samples - round(self.held_out * n_samples), 1)
        per_step = self.batch_size * self.accumulate
        steps = self.steps or math.ceil((self.epochs or EPOCHS) * learned / per_step)
        shared = {name: getattr(self, name) for name in _SHARED}
        return Course(
            **shared,
            steps=steps,
            warmup=round(self.warmup * steps),
            evaluate_every=self.evaluate_every or max(steps // LOOKS, 1),
            seed=seed if self.seed is None else self.seed,
        )

    def train_runs(self, n_samples: int) -> float:
        """Count the forward passes of one sample that training costs: for the forecast."""
        course = self.course(n_samples, 0)
        looks = course.steps / course.evaluate_every * self.held_out * n_samples
        return FORWARDS * course.steps * course.samples + 2 * looks

    def estimate_training(self, facts: ModelFacts, n_samples: int, forward_seconds: float) -> TrainingCost:
        seconds = self.train_runs(n_samples) * forward_seconds * (BFLOAT16 if self.precision == "bfloat16" else 1)
        # what backward needs is half a forward pass's peak of each layer
        activations = self.batch_size * facts.peak_activation_bytes * len(facts.layers) // 2
        return TrainingCost(
            seconds=seconds if self.max_seconds is None else min(seconds, self.max_seconds),
            memory_bytes=TRAINED_COPIES * facts.n_bytes + activations,
            disk_bytes=STATE_COPIES * facts.n_bytes,
        )

    def training_problems(self, facts: ModelFacts) -> list[str]:
        """Return what is wrong with the settings for such a model."""
        if facts.source == "onnx":
            return [f"{self.kind}: trains a torch model, and an onnx: source is none"]
        if self.augment.any and find_task(facts.task).preprocess != "image":
            return [f"{self.kind}: augment is for images, and the task is {facts.task}; leave it out"]
        return [
            f"{self.kind}: augment: the input {spec.name} {list(spec.shape)} has neither 1 nor 3 channels, by which "
            "they are told from height and width; leave augment out"
            for spec in facts.inputs[:1]
            if self.augment.any and len(spec.shape) == 4 and not {1, 3} & {spec.shape[1], spec.shape[3]}
        ]


_SHARED = (
    "batch_size",
    "accumulate",
    "learning_rate",
    "weight_decay",
    "optimizer",
    "momentum",
    "schedule",
    "clip",
    "precision",
    "held_out",
    "patience",
    "max_seconds",
    "dropout",
    "freeze_batchnorm",
    "ema_decay",
)
"""Knobs that the course takes as they are."""
