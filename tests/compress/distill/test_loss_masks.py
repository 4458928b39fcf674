"""What a training set's loss mask lets through: the loss and a row's weight, by hand; packed rows learn the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chats import write_chat_tokenizer

from compress.data.chat import pack_rows
from compress.data.samples import samples_of
from compress.data.training import EncodedSet, make_encoded_set
from compress.distill.batch import part
from compress.distill.datasets import Augment, batch_maker
from compress.distill.objective import Weighted, next_token_logits_term, next_token_term, total_loss
from compress.distill.watch import Seen
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import make_preprocessor

NAMES = ("input_ids", "attention_mask")
SPECS = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in NAMES)
LONGEST = 12


@pytest.fixture
def samples() -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 40, n) for n in (5, 9, 3, 20)]  # the last one is cut
    return {"input_ids": ids, "loss_mask": [rng.integers(0, 2, len(row)).astype(np.uint8) for row in ids]}


def trainset(folder: Path, columns: dict[str, list[np.ndarray]]) -> EncodedSet:
    write_chat_tokenizer(folder, None)
    preprocessor = make_preprocessor(LanguagePreprocess(max_length=LONGEST), SPECS, folder)
    return make_encoded_set(samples_of(columns), preprocessor, "text-generation")


def next_tokens(ids: torch.Tensor, seed: int) -> Seen:
    """Logits that depend on the token alone, whatever row it is in."""
    table = torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))
    return Seen({"logits": table[ids]})


def by_hand(columns: dict[str, list[np.ndarray]], seed: int, teacher: int | None = None) -> float:
    losses = []
    for ids, mask in zip(columns["input_ids"], columns["loss_mask"], strict=True):
        row = torch.from_numpy(ids[:LONGEST])
        own = next_tokens(row, seed).first.log_softmax(-1)
        for t in range(1, len(row)):
            if mask[t]:
                other = None if teacher is None else next_tokens(row, teacher).first.log_softmax(-1)[t - 1]
                gap = (
                    -own[t - 1, row[t]]
                    if other is None
                    else F.kl_div(own[t - 1], other, log_target=True, reduction="sum")
                )
                losses.append(float(gap))
    return float(np.mean(losses))


@pytest.mark.parametrize("packed", [False, True])
def test_losses_are_of_the_marked_tokens_alone(
    tmp_path: Path, samples: dict[str, list[np.ndarray]], packed: bool
) -> None:
    cut = {name: [row[:LONGEST] for row in rows] for name, rows in samples.items()}
    columns = pack_rows(cut["input_ids"], cut["loss_mask"], LONGEST, 2) if packed else samples
    train = trainset(tmp_path, columns)
    assert train.n == (3 if packed else 4)
    batch_of = batch_maker(train, dict(zip(NAMES, NAMES, strict=True)), Augment(), tokens=True)
    batch = batch_of(np.arange(train.n), None)
    ids = batch.feeds["input_ids"]
    for term, expected in (
        (next_token_term, by_hand(samples, 1)),
        (next_token_logits_term(1.0), by_hand(samples, 1, 2)),
    ):
        loss = total_loss([Weighted(1.0, term)], batch, next_tokens(ids, 1), next_tokens(ids, 2))
        assert float(loss) == pytest.approx(expected, rel=1e-5)
    halves = [part(batch, rank, 2) for rank in (0, 1)]
    losses = [
        float(total_loss([Weighted(1.0, next_token_term)], half, next_tokens(half.feeds["input_ids"], 1), Seen({})))
        for half in halves
    ]
    assert np.average(losses, weights=[half.weight for half in halves]) == pytest.approx(by_hand(samples, 1), rel=1e-5)
