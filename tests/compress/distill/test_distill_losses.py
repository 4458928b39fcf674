"""The arithmetic of distillation against slow references: losses, rows, rates, changed images, layer maps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from distilling import SCHEDULE

from compress.distill.datasets import blend_images, flip_images, is_channels_first, shift_images
from compress.distill.losses import (
    Pooling,
    attention_error,
    average_masked,
    cosine_error,
    divergence,
    each_label,
    label_loss,
    number_error,
    pool_tokens,
    relative_error,
    set_loss,
)
from compress.distill.objective import pair_modules, uniform
from compress.distill.schedule import is_evaluation_due, learning_rate, split_rows, step_random, step_rows
from compress.errors import PassError
from runtime.encode.preprocess import TextPreprocess, pool

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_divergence_is_the_sum_over_classes() -> None:
    student, teacher = logits(0, 3, 5), logits(1, 3, 5)
    found = divergence(student, teacher, 2.0)
    for row in range(3):
        p = [math.exp(float(v) / 2) for v in teacher[row]]
        q = [math.exp(float(v) / 2) for v in student[row]]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert float(found[row]) == pytest.approx(4 * expected, rel=1e-5)


def test_equal_tensors_are_at_distance_zero() -> None:
    x, maps = logits(0, 2, 4, 6), logits(1, 2, 3, 4, 4).softmax(-1)
    assert divergence(x, x, 4.0).abs().max() == 0
    assert relative_error(x, x, MASK).abs().max() == 0
    assert cosine_error(x, x, MASK).abs().max() < 1e-6
    assert attention_error(maps, maps, MASK).abs().max() == 0


def test_labels_one_by_one_are_choices_of_yes_or_no() -> None:
    student, teacher = logits(0, 3, 5), logits(1, 3, 5)
    found = average_masked(divergence(each_label(student), each_label(teacher), 2.0), None)
    p, q = torch.sigmoid(teacher / 2), torch.sigmoid(student / 2)
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean(1)
    torch.testing.assert_close(found, 4 * expected)
    own = student.clone().requires_grad_()
    divergence(each_label(own), each_label(student), 2.0).sum().backward()
    assert own.grad is not None and own.grad.abs().max() == 0, (
        "not even a rounding error, of which Adam would make a step"
    )
    labels = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    likely = torch.where(labels == 1, torch.sigmoid(student), 1 - torch.sigmoid(student))
    torch.testing.assert_close(set_loss(student, labels), -likely.log().mean(1))


def test_numbers_are_compared_by_their_squares() -> None:
    numbers, targets = logits(0, 3, 2), logits(1, 3, 2)
    torch.testing.assert_close(number_error(numbers, targets), (numbers - targets).square().mean(1))
    torch.testing.assert_close(number_error(numbers[:, :1], targets[:, 0]), (numbers - targets)[:, 0].square())
    assert number_error(numbers, numbers).abs().max() == 0


def test_the_square_of_the_temperature_keeps_the_gradient_s_size() -> None:
    """As T grows the gradient tends to that of half the squared difference of centred logits over the classes."""
    student, teacher = (logits(seed, 2, 6, 8) for seed in (0, 1))
    student.requires_grad_()
    divergence(student, teacher, 500.0).sum().backward()
    assert student.grad is not None
    gap = (student - student.mean(-1, keepdim=True)) - (teacher - teacher.mean(-1, keepdim=True))
    assert torch.allclose(student.grad, gap.detach() / 8, atol=2e-3)


def test_padding_does_not_count() -> None:
    a, b = logits(0, 2, 4, 6), logits(1, 2, 4, 6)
    other, target = a.clone(), b.clone()
    other[1, 2:], target[1, 2:] = 9.0, -7.0
    for function in (relative_error, cosine_error):
        assert torch.allclose(function(a, b, MASK), function(other, target, MASK))
        assert torch.allclose(function(a, b, MASK)[1], function(a[1:, :2], b[1:, :2])[0])
    assert float(relative_error(a, b, MASK)[0]) == pytest.approx(float(((a - b)[0] ** 2).sum() / (b[0] ** 2).sum()))
    assert torch.allclose(average_masked(a, MASK)[1], a[1, :2].mean())


def test_maps_of_other_numbers_of_heads_are_compared_by_their_mean() -> None:
    student, teacher = logits(0, 2, 2, 4, 4).softmax(-1), logits(1, 2, 3, 4, 4).softmax(-1)
    mean, target = student.mean(1), teacher.mean(1)
    expected = (target * (target.log() - mean.log())).sum(-1)[1, :2].mean()
    assert torch.allclose(attention_error(student, teacher, MASK)[1], expected)


def test_labels() -> None:
    out = logits(0, 4, 3)
    classes = torch.tensor([0, 2, 1, 1])
    expected = [-float(out[i].log_softmax(-1)[c]) for i, c in enumerate(classes.tolist())]
    assert label_loss(out, classes).tolist() == pytest.approx(expected)
    assert label_loss(out[:, :1], torch.tensor([1.0, 0, 0, 2])).tolist() == pytest.approx(
        [float((out[i, 0] - y) ** 2) for i, y in enumerate((1, 0, 0, 2))]
    )


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_pooling_is_the_runtime_s(pooling: Pooling) -> None:
    hidden, mask = logits(0, 2, 4, 6), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    expected = pool(hidden.numpy(), mask.numpy(), TextPreprocess(pooling=pooling, normalize=False))  # type: ignore[arg-type]
    assert np.allclose(pool_tokens(hidden, mask, pooling).numpy(), expected, atol=1e-6)


def test_every_epoch_has_every_row_once() -> None:
    rows, held = split_rows(30, 0.1, seed=3)
    assert len(held) == 3 and sorted([*rows, *held]) == list(range(30))
    schedule = replace(SCHEDULE, batch_size=12)
    drawn = np.concatenate([step_rows(rows, schedule, step) for step in range(9)])
    for epoch in range(4):
        assert sorted(drawn[27 * epoch : 27 * (epoch + 1)]) == rows.tolist()
    assert drawn[:27].tolist() != drawn[27:54].tolist()


def test_what_is_drawn_follows_from_seed_and_step() -> None:
    assert step_random(SCHEDULE, 3).random() == step_random(SCHEDULE, 3).random()
    assert len({step_random(replace(SCHEDULE, seed=s), step).random() for s in (0, 1) for step in (0, 1)}) == 4


def test_rates_rise_and_fall() -> None:
    schedule = replace(SCHEDULE, steps=100, learning_rate=1.0, warmup=10)
    falls = [(1 + math.cos(math.pi * s / 100)) / 2 for s in range(100)]
    expected = [rise * falls[s] for s, rise in ((0, 0.1), (4, 0.5), (9, 1), (50, 1))]
    assert [learning_rate(schedule, s, 0) for s in (0, 4, 9, 50)] == pytest.approx(expected)
    short = replace(schedule, steps=10_000, warmup=1_000, max_seconds=10.0)
    assert learning_rate(short, 50, 0.5) == pytest.approx(0.5 * falls[5])  # warm-up is a tenth of the time there is
    assert [is_evaluation_due(short, 50, seconds, 1, 0.01) for seconds in (0.4, 0.6)] == [False, True]
    assert not is_evaluation_due(short, 50, 6.0, 1, 0.4) and is_evaluation_due(short, 50, 9.0, 1, 0.4)  # two take 0.8 s
    assert not is_evaluation_due(schedule, 50, 9, 1, 0.0)
    timed = replace(schedule, max_seconds=10.0)
    assert learning_rate(timed, 20, 5.0) == pytest.approx(0.5) and learning_rate(timed, 20, 10.0) == 0


def test_images_are_mirrored_shifted_and_blended() -> None:
    x = np.random.default_rng(0).normal(size=(40, 3, 6, 5)).astype(np.float32)
    turned = flip_images(x, np.random.default_rng(1))
    same = [np.array_equal(a, b) for a, b in zip(turned, x, strict=True)]
    assert 8 < sum(same) < 32
    assert all(one or np.array_equal(a, b[:, :, ::-1]) for one, a, b in zip(same, turned, x, strict=True))
    last = flip_images(x.transpose(0, 2, 3, 1), np.random.default_rng(1)).transpose(0, 3, 1, 2)
    assert np.array_equal(last, turned)
    moved = shift_images(x, 2, np.random.default_rng(2))
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
    windows = {
        (i, j) for i in range(5) for j in range(5) if np.array_equal(moved[7], padded[7][:, i : i + 6, j : j + 5])
    }
    assert len(windows) == 1
    assert np.array_equal(shift_images(x, 0, np.random.default_rng(2)), x)
    mixed, others, share = blend_images(x, 0.4, np.random.default_rng(3))
    assert 0 < share < 1 and mixed.dtype == np.float32
    assert np.allclose(mixed[5], share * x[5] + (1 - share) * x[others[5]], atol=1e-6)


def test_an_image_has_one_or_three_channels() -> None:
    assert is_channels_first((2, 3, 8, 8)) and not is_channels_first((2, 8, 8, 1))
    with pytest.raises(ValueError, match="1 or 3 channels"):
        is_channels_first((2, 8, 8, 8))


def test_uniform_takes_the_last_of_each_share() -> None:
    teacher = [f"t{i}" for i in range(6)]
    assert uniform(["a", "b", "c"], teacher) == (("a", "t1"), ("b", "t3"), ("c", "t5"))
    assert uniform(teacher, teacher) == tuple((name, name) for name in teacher)


def test_layer_maps() -> None:
    names = ["", "body", "body.0", "body.0.fc", "body.1", "body.1.fc"]
    none: tuple[list[str], list[str]] = ([], [])
    assert pair_modules("qat", "re:body\\.\\d$", names, names, none) == (("body.0", "body.0"), ("body.1", "body.1"))
    assert pair_modules("qat", (("body.0", "body.1"),), names, names, none) == (("body.0", "body.1"),)
    with pytest.raises(PassError, match=r"the teacher has no module 'body\.1\.fk'; did you mean 'body\.1\.fc'\?"):
        pair_modules("qat", (("body.0", "body.1.fk"),), names, names, none)
    with pytest.raises(PassError, match=r"the student has no module 'zzz'; it has body, body\.0"):
        pair_modules("qat", (("zzz", "body.0"),), names, names, none)
    with pytest.raises(PassError, match="no chain of blocks was found; name the pairs"):
        pair_modules("qat", "uniform", names, names, none)
    with pytest.raises(PassError, match="'re:x' matches no module"):
        pair_modules("qat", "re:x", names, names, none)
