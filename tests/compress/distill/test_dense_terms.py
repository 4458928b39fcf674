"""What is learned of pixels and of answers: torch's own losses, without what has no class and without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, kl_div

from compress.distill.batch import Batch
from compress.distill.objective import (
    pixel_labels_term,
    pixel_logits_term,
    span_labels_term,
    span_logits_term,
)
from compress.distill.watch import Seen


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(n: int, labels: Tensor | None = None, mask: Tensor | None = None) -> Batch:
    return Batch(np.arange(n), {} if mask is None else {"attention_mask": mask}, torch.ones(n), labels)


def test_divergence_of_pixels() -> None:
    student, teacher = draw(0, 2, 5, 3, 4), draw(1, 2, 5, 3, 4)
    found = pixel_logits_term(2.0)(make_batch(2), Seen({"a": student}), Seen({"a": teacher}))
    wanted = kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="none").sum(1).mean((1, 2)) * 4
    assert torch.allclose(found, wanted, atol=1e-6)
    assert pixel_logits_term(1.0)(make_batch(2), Seen({"a": student}), Seen({"a": student})).abs().max() == 0


def test_classes_of_pixels_that_have_one() -> None:
    student, labels = draw(2, 2, 5, 3, 4), torch.from_numpy(np.random.default_rng(0).integers(-1, 5, (2, 6, 8)))
    found = pixel_labels_term(make_batch(2, labels), Seen({"a": student}), Seen({}))
    resized = interpolate(student, (6, 8), mode="bilinear")
    wanted = [cross_entropy(resized[i : i + 1], labels[i : i + 1], ignore_index=-1) for i in range(2)]
    assert torch.allclose(found, torch.stack(wanted))
    nothing = pixel_labels_term(make_batch(2, torch.full((2, 6, 8), -1)), Seen({"a": student}), Seen({}))
    assert nothing.tolist() == [0, 0]


def test_one_channel_of_pixels_is_learned() -> None:
    """Softmax over one channel would be 1 everywhere, and its loss nothing."""
    student, labels = draw(3, 2, 1, 3, 4), (draw(4, 2, 3, 4) > 0).long()
    found = pixel_labels_term(make_batch(2, labels), Seen({"a": student}), Seen({}))
    wanted = binary_cross_entropy_with_logits(student[:, 0], labels.float(), reduction="none").mean((1, 2))
    assert torch.allclose(found, wanted)
    term = pixel_logits_term(1.0)
    assert (term(make_batch(2), Seen({"a": student}), Seen({"a": -student})) > 0.1).all()


def test_spans_go_without_padding() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    student, teacher = ({"start": draw(s, 2, 5), "end": draw(s + 1, 2, 5)} for s in (5, 7))
    found = span_logits_term(1.0)(make_batch(2, mask=mask), Seen(student), Seen(teacher))
    for row, n in enumerate((5, 3)):
        total = 0.0
        for name in ("start", "end"):
            a, b = student[name][row, :n], teacher[name][row, :n]
            total += float(kl_div(a.log_softmax(0), b.softmax(0), reduction="sum")) / 2
        assert found[row] == pytest.approx(total, abs=1e-5)
    labels = torch.tensor([[1, 2], [-100, -100]])
    given = span_labels_term(make_batch(2, labels, mask), Seen(student), Seen({}))
    wanted = [cross_entropy(student[name][:1], labels[:1, k]) for k, name in enumerate(("start", "end"))]
    assert given.tolist() == [pytest.approx(float(sum(wanted)) / 2), 0.0]
