"""`augment`, `precision` and `ema_decay: auto`: changes that the teacher still knows, numbers that the machine has."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distilling import Arrays
from pydantic import ValidationError
from streaming import model_context
from torch import Tensor, nn

from compress.models.load import TorchModel
from compress.passes.distill import Distill
from compress.passes.qat import Qat
from compress.passes.training import Augmentation
from compress.recipe.repeat import repeat_training
from compress.recipe.schema import Recipe
from compress.work.contexts import ModelContext
from compress.work.settle_changes import FILE, settle_changes
from compress.work.settled import keep
from runtime.bundle.tensors import TensorSpec

IMAGES = (TensorSpec("pixel_values", "float32", ("batch", 1, 16, 16)),)


class Seeing(nn.Module):
    """Two classes: by `what` of an image."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        value = self.what(x)
        return torch.stack([value, -value], dim=-1)


def settle(
    teacher: nn.Module, context: ModelContext | None = None, task: str = "image-classification", **config: Any
) -> Any:
    loaded = TorchModel(
        architecture="Net",
        inputs=IMAGES,
        outputs=(TensorSpec("logits", "float32", ("batch", 2)),),
        module=teacher,
        task=task,
        parameters={"pixel_values": "x"},
    )
    images = np.random.default_rng(0).normal(0.0, 1.0, (200, 1, 16, 16)).astype(np.float32)
    trainset = Arrays({"pixel_values": images})
    return settle_changes(Distill(**config), loaded, teacher, trainset, context or model_context([]))


def test_a_change_is_kept_where_the_teacher_goes_on_seeing_the_same() -> None:
    config, settled = settle(Seeing(lambda x: x.abs().mean((1, 2, 3)) - 0.5), augment="auto")  # how much, not where
    assert config.augment == Augmentation(flip=True, crop=2, mixup=1.0)
    assert settled.fields == {"augment": {"flip": True, "crop": 2, "mixup": 1.0}}


def test_a_change_that_makes_it_another_class_is_left_out() -> None:
    left_and_right = Seeing(lambda x: x[..., :8].mean((1, 2, 3)) - x[..., 8:].mean((1, 2, 3)))
    config, _ = settle(left_and_right, augment="auto")
    assert not config.augment.flip
    one_pixel, _ = settle(Seeing(lambda x: x[:, 0, 5, 5]), augment="auto")
    assert one_pixel.augment.crop == 0


def test_where_there_are_no_classes_of_images_nothing_is_changed() -> None:
    config, _ = settle(Seeing(lambda x: x.mean((1, 2, 3))), task="regression", augment="auto")
    assert config.augment == Augmentation()


@pytest.mark.parametrize(("slow_in", "expected"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_precision_is_what_the_teacher_answers_sooner_in(slow_in: str, expected: str) -> None:
    def look(x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu") == (slow_in == "bfloat16"):
            time.sleep(0.02)
        return x.mean((1, 2, 3))

    assert settle(Seeing(look), precision="auto")[0].precision == expected


def test_an_emulated_precision_is_asked_no_more_than_twice() -> None:
    asked: list[bool] = []

    def look(x: Tensor) -> Tensor:
        asked.append(torch.is_autocast_enabled("cpu"))
        time.sleep(0.2 if asked[-1] else 0.002)
        return x.mean((1, 2, 3))

    assert settle(Seeing(look), precision="auto")[0].precision == "float32"
    assert sum(asked) == 2


def test_a_killed_run_goes_on_in_the_precision_that_it_chose(tmp_path: Path) -> None:
    context = replace(model_context([]), work=tmp_path)
    keep(context, FILE, {"precision": "bfloat16"})
    assert settle(Seeing(lambda x: x.mean((1, 2, 3))), context, precision="auto")[0].precision == "bfloat16"


def test_what_was_found_is_written_into_the_recipe() -> None:
    model = {"source": "python:a:b", "task": "image-classification"}
    auto = {"kind": "distill", "augment": "auto", "ema_decay": "auto", "max_seconds": 60.0, "epochs": 9.0}
    recipe = Recipe.model_validate({"version": 1, "name": "a", "model": model, "passes": (auto,)})
    found = {"steps": 70, "augment": {"flip": True, "crop": 2, "mixup": 1.0}, "ema_decay": 0.99}
    again = repeat_training(recipe, {"0": found}).passes[0].model_dump()
    assert {key: again[key] for key in found} == found
    assert again["max_seconds"] is None and again["epochs"] is None


def test_weights_alone_leave_nothing_to_be_found() -> None:
    for key in ("augment", "precision", "ema_decay"):
        assert getattr(Qat(scheme="W8A8", **{key: "auto"}), key) == "auto"
        with pytest.raises(ValidationError, match=f"{key}: auto is for distill, and for qat of W8A8"):
            Qat(**{key: "auto"})
