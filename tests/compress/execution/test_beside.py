"""What a float model has made of texts that it has read, block by block, is what it makes of them as a whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from streaming import context, gpt2, llama, streamed, texts

from compress.execution.beside import recall_logits
from compress.facts import BlockFacts, Structure
from compress.work import settle_compute


@pytest.mark.parametrize("form", ["blocks", "one block", "another form", "another library"])
def test_logits_are_recalled_of_any_places(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "another library":
        monkeypatch.setattr(settle_compute, "WORTH", 0.0)
        monkeypatch.setattr(settle_compute, "GAIN_OF_LIBRARY", 1e9)
    model = streamed(gpt2() if form == "another form" else llama(layers=2))
    if form == "one block":
        groups = tuple(model.structure.input_groups)
        model = replace(model, structure=Structure((BlockFacts("", groups),)))
    batches = texts(3)
    module = model.materialise()
    with recall_logits(model, context(batches)) as recall, torch.no_grad():
        for number, feeds in enumerate(batches):
            whole = module(**{name: torch.from_numpy(values) for name, values in feeds.items()}).numpy()[0]
            for places in (slice(0, len(whole)), slice(0, 2), slice(2, 5)):
                np.testing.assert_allclose(recall(number, places), whole[places], rtol=0, atol=1e-5)
