"""Large vocabularies: logits of few tokens at a time give the same loss and slopes; tables are the teacher's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from streaming import TEXT, llama
from torch import Tensor, nn

from compress.distill import vocabulary
from compress.distill.losses import divergence
from compress.distill.vocabulary import Head, find_head, measure_in_pieces, reduce_weights, share_tables
from compress.models.huggingface import TextModel

pytestmark = pytest.mark.usefixtures("one_thread")
FEEDS = {name: torch.ones(1, 5, dtype=torch.int64) for name in TEXT}


class Capped(nn.Module):
    """A model that caps its logits."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, **feeds: Tensor) -> Tensor:
        return 30 * torch.tanh(self.wrapped(**feeds) / 30)


def text_model(**more: Any) -> TextModel:
    return TextModel(llama(**more), "logits").eval().requires_grad_(False)


@pytest.mark.parametrize("trained", [False, True])
def test_pieces_give_the_loss_and_the_slopes_of_the_whole(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, wanted = nn.Linear(8, 20, bias=False).requires_grad_(trained), torch.randn(7, 20)
    states, weights = torch.randn(7, 8, requires_grad=True), torch.rand(7)
    sizes = []

    def measure(tokens: slice) -> Callable[[Tensor, slice], Tensor]:
        sizes.append(len(wanted[tokens]))
        return lambda logits, rows: divergence(logits, wanted[tokens][rows])

    whole = divergence(layer(states), wanted)
    slopes = torch.autograd.grad((whole * weights).sum(), [states, *([layer.weight] if trained else [])])
    monkeypatch.setattr(vocabulary, "PIECE_LOGITS", 3 * 20)
    monkeypatch.setattr(vocabulary, "MEASURED_LOGITS", 2 * 20)
    pieces = measure_in_pieces(measure, states, Head(layer, reduced=False))
    found = torch.autograd.grad((pieces * weights).sum(), [states, *([layer.weight] if trained else [])])
    assert max(sizes) == 3 and torch.allclose(pieces, whole, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, slopes, strict=True))
    with torch.no_grad():
        assert torch.allclose(measure_in_pieces(measure, states, Head(layer, reduced=False)), whole, atol=1e-6)


def test_a_head_is_the_layer_that_gives_the_logits() -> None:
    model: Any = text_model()
    head = find_head(model, FEEDS, least=1)
    assert head is model.wrapped.lm_head
    assert find_head(model, FEEDS, least=10**6) is None
    assert find_head(Capped(model), FEEDS, least=1) is None
    with Head(head, reduced=False).pass_over():
        states = model(**FEEDS)
    assert torch.equal(head(states), model(**FEEDS))


def test_only_tables_that_are_the_teachers_are_shared() -> None:
    student: Any = text_model()
    teacher: Any = copy.deepcopy(student)
    with torch.no_grad():
        teacher.wrapped.lm_head.weight += 1
    student.requires_grad_(True)
    assert share_tables(student, teacher, student.wrapped.lm_head, least=1) == ["wrapped.model.embed_tokens"]
    assert teacher.wrapped.model.embed_tokens.weight is student.wrapped.model.embed_tokens.weight
    assert not student.wrapped.model.embed_tokens.weight.requires_grad
    assert student.wrapped.lm_head.weight.requires_grad


@pytest.mark.parametrize("tied", [False, True])
def test_reduced_weights_change_no_bit_in_autocast(tied: bool) -> None:
    model = text_model(tied=tied)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(**FEEDS)
        reduce_weights(model)
        after = model(**FEEDS)
    assert torch.equal(before, after)
    assert model.wrapped.model.embed_tokens.weight.dtype == torch.float32
