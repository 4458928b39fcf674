"""Rows of several samples: each sample is read as if it stood alone, where the model lets transformers see to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from streaming import VOCABULARY, gpt2, llama, streamed, sum_grams

from compress.data.chat import pack_rows
from compress.data.training import pad_rows
from compress.models.huggingface import TextModel, reads_samples_apart
from compress.rounding.learned_batches import arrange_batches
from compress.work.learning import samples

LENGTHS = (9, 7, 6, 5, 3)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}


def make(kind: str, **sizes: Any) -> TextModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    net.config.use_cache = False
    return TextModel(net, "logits").requires_grad_(False)


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, n) for n in LENGTHS]


def packed_feeds(separator: int | None = None) -> list[dict[str, np.ndarray]]:
    """Batches of one row, as calibration has them."""
    rows = pack_rows(sequences(), [np.ones(n, np.uint8) for n in LENGTHS], 16, separator)
    return [
        {"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64), "position_ids": places[None]}
        for ids, places in zip(rows["input_ids"], rows["position_ids"], strict=True)
    ]


def test_positions_begin_anew_with_each_sample() -> None:
    for separator in (None, 2):
        for feeds in packed_feeds(separator):
            ids, places = feeds["input_ids"][0], feeds["position_ids"][0]
            starts = np.flatnonzero(places == 0)
            assert len(ids) == len(places) and starts[0] == 0 and (np.diff(places)[np.diff(places) != 1] < 0).all()
            assert all(ids[start - 1] == 2 for start in starts[1:]) or separator is None, "a separator ends a sample"
            found = {tuple(part[: len(part) - (part[-1] == 2)]) for part in np.split(ids, starts[1:])}
            assert found <= {tuple(ids) for ids in sequences()}


@pytest.mark.parametrize(
    ("kind", "sizes", "apart"),
    [
        ("Llama", {}, True),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 4}, True),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}, True),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, False),
        ("Mamba", {}, False),
    ],
)
def test_a_model_is_asked_whether_it_reads_samples_apart(kind: str, sizes: dict[str, Any], apart: bool) -> None:
    """And one that says so does: each sample of a row has the logits that it has alone."""
    module = make(kind, **sizes)
    assert reads_samples_apart(make(kind, **sizes).to("meta")) == apart
    feeds = {name: torch.from_numpy(values) for name, values in packed_feeds()[0].items()}
    starts = (feeds["position_ids"][0] == 0).nonzero().flatten().tolist()
    pieces = feeds["input_ids"].tensor_split(starts[1:], 1)
    assert len(pieces) > 1
    with torch.no_grad():
        alone = torch.cat([module(piece, torch.ones_like(piece)) for piece in pieces], 1)
        together = module(feeds["input_ids"], feeds["attention_mask"])
        assert not torch.allclose(together, alone, atol=1e-3), "packed plainly, a sample attends to those before it"
        if apart:
            torch.testing.assert_close(module(**feeds), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("net", [llama, gpt2])
@pytest.mark.parametrize("lockstep", [False, True])
def test_calibration_sees_of_packed_rows_what_it_sees_of_the_samples_alone(net: Any, lockstep: bool) -> None:
    alone = [{"input_ids": ids[None], "attention_mask": np.ones((1, len(ids)), np.int64)} for ids in sequences()]
    found, wanted = (sum_grams(streamed(net()), batches, lockstep) for batches in (packed_feeds(), alone))
    for layer, gram in wanted.items():
        torch.testing.assert_close(found[layer], gram, rtol=1e-4, atol=1e-4 * float(gram.abs().max()), msg=layer)


def test_rows_of_differing_length_share_a_batch_and_are_still_read_apart() -> None:
    """As tuning and training arrange them: padded on the right, where positions are 0."""
    module = make("Llama")
    parameters = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    rows = samples(packed_feeds(), parameters)
    (batch,) = arrange_batches(rows, len(rows))
    tokens = batch["attention_mask"].bool()
    assert batch["position_ids"].shape == tokens.shape and not bool(tokens.all())
    with torch.no_grad():
        out = module(**batch)
        alone = sorted((module(**row)[0] for row in rows), key=len)
    for got, kept, want in zip(out, tokens, alone, strict=True):
        torch.testing.assert_close(got[kept], want, atol=1e-5, rtol=1e-4)
    assert pad_rows([np.arange(2), np.arange(3)]).tolist() == [[0, 1, 0], [0, 1, 2]]
