"""Squares of what layers read are those that hooks see in one run of the whole model, padding left out."""

from __future__ import annotations

import pytest
import torch
from streaming import context, llama, streamed, texts
from torch import Tensor, nn

from compress.blocks.squares import gather_squares

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def test_every_layer_s_squares_are_those_of_a_plain_run() -> None:
    net, batches = llama(layers=2), texts(5)
    found = gather_squares(streamed(net), context(batches))
    seen: dict[str, Tensor] = {}

    def watch(name: str, rows: Tensor) -> None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            squares = args[0][0][rows].double().square().sum(0)
            seen[name] = seen.get(name, torch.zeros_like(squares)) + squares

        hooks.append(net.get_submodule(name).register_forward_pre_hook(hook))

    for feeds in batches:
        hooks: list[torch.utils.hooks.RemovableHandle] = []
        inputs = {key: torch.from_numpy(values) for key, values in feeds.items()}
        for name in found:
            watch(name, inputs["attention_mask"][0].bool())
        net(**inputs)
        for hook in hooks:
            hook.remove()
    n_rows = sum(int(feeds["attention_mask"].sum()) for feeds in batches)
    assert found.keys() == {n for n, part in net.named_modules() if isinstance(part, nn.Linear)}
    for name, squares in found.items():
        assert squares.n_rows == n_rows
        assert torch.allclose(torch.from_numpy(squares.sums), seen[name], rtol=1e-4)
