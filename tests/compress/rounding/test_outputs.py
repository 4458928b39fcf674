"""What is compared of models that give several tensors: texts of any length have as many numbers a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress.errors import PassError
from compress.models.huggingface import EncoderDecoderModel, TextModel
from compress.rounding.outputs import first_output, gives_logits, list_outputs, model_output


def test_numbers_of_each_token_are_side_by_side() -> None:
    start, end, hidden = torch.rand(2, 5), torch.rand(2, 5), torch.rand(2, 5, 3)
    feeds = {"attention_mask": torch.ones(2, 5)}
    out = {"start_logits": start, "hidden": hidden, "end_logits": end}
    assert torch.equal(model_output(out, feeds), torch.stack([start, end], -1))
    assert torch.equal(model_output((start, end), feeds), torch.stack([start, end], -1))
    assert model_output(start, feeds).shape == (2, 5, 1)
    assert model_output(out, {}) is start is first_output(out)
    assert model_output((hidden, start), feeds) is hidden


def test_one_number_a_sample_is_a_row_and_choices_alone_are_refused() -> None:
    assert model_output(torch.rand(4), {}).shape == (4, 1)
    with pytest.raises(PassError, match="no floating-point output to compare; let it give its logits, too"):
        list_outputs({"label": torch.zeros(4, dtype=torch.int64)}, {})


def test_wrapped_models_say_whether_they_give_logits() -> None:
    """On it rests by what `tune` compares a model with the float one."""
    inner = nn.Identity()
    assert gives_logits(TextModel(inner, "logits")) and gives_logits(EncoderDecoderModel(inner, "logits"))
    assert gives_logits(TextModel(inner, "start_logits", "end_logits"))
    assert not gives_logits(TextModel(inner, "last_hidden_state")) and not gives_logits(inner)
