"""Two processes that share the calibration data make the same model sparse."""

from __future__ import annotations

import pytest
import torch
from child_processes import run_in_two_processes
from streaming import llama, streamed
from test_sparsify_pass import on_images, run
from torch import Tensor

from compress.blocks import activations
from compress.blocks.sharing import wait


def sparsify_both() -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a decoder and of a convolutional network that were made sparse."""
    activations.ROWS = 24
    stores = {"llama": run(streamed(llama())).model.store, "conv": on_images().model.store}
    found = {name: {key: store.read(key).clone() for key in store.names()} for name, store in stores.items()}
    wait()  # the files are the first process's, and go with its stores
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("small_micro_batches")
def test_two_processes_reach_what_one_reaches() -> None:
    """Both the same bytes; those of one process to what rounding of sums does to ten steps of refitting."""
    first, second = run_in_two_processes(sparsify_both)
    for name, alone in (("llama", run(streamed(llama()))), ("conv", on_images())):
        for key, found in first[name].items():
            assert torch.equal(found, second[name][key])
            torch.testing.assert_close(found, alone.model.store.read(key), rtol=0, atol=2e-3)
