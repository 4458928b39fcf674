"""Gradients sent back block by block are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from streaming import bert, context, gpt2, llama, streamed, texts, together
from torch import Tensor, nn

from compress.blocks.backward import first_micro_batches, send_back
from compress.facts import BlockFacts, Structure


def whole(model: Structure) -> Structure:
    """The same layers as one block."""
    return Structure((BlockFacts("", model.input_groups),))


def pull(number: int, out: Tensor, rows: Tensor | None) -> Tensor:
    """Some gradient of the output, the same wherever it is asked for; none at padding."""
    gradient = out.cos()
    return gradient if rows is None else gradient * rows[:, :, None]


def square(layers: dict[str, nn.Module], into: dict[str, Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that add up the square of the gradient with respect to what each layer gives."""

    def hook(name: str) -> Callable[..., Tensor]:
        def add(gradient: Tensor) -> None:
            into[name] = into.get(name, torch.zeros(())) + gradient.square().sum((0, 1))

        def on_output(module: nn.Module, args: object, out: Tensor) -> Tensor:
            out = out if out.requires_grad else out.detach().requires_grad_()
            out.register_hook(add)
            return out

        return on_output

    return [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]


@pytest.mark.parametrize("make", [llama, bert, gpt2])
@pytest.mark.parametrize("held", [2**28, 0])
@pytest.mark.parametrize("one_block", [False, True])
def test_they_are_those_of_autograd(
    make: Callable[[], nn.Module], held: int, one_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.blocks.backward.HELD_BYTES", held)
    net = make()
    model = streamed(net)
    if one_block:
        model = streamed(make(), structure=whole(model.structure))
    said = context(texts())
    batches = first_micro_batches(model, said, 10**6, 24)
    squares: dict[str, Tensor] = {}
    for block in send_back(model, said, batches, pull):
        handles = square({name: layer for name, layer in block.work.layers.items() if "embed" not in name}, squares)
        block.run(lambda number: None)
        for handle in handles:
            handle.remove()
    expected: dict[str, Tensor] = {}
    module = model.materialise()
    module.requires_grad_(False)
    names = {name.removeprefix("wrapped."): part for name, part in module.named_modules()}
    handles = square({name: names[name] for name in squares}, expected)
    for feeds in texts():
        out = module(**together([feeds]))
        (out * pull(0, out.detach(), torch.from_numpy(feeds["attention_mask"]))).sum().backward()
    layers = {name for input_group in model.structure.input_groups for name in input_group.layers}
    assert layers <= squares.keys()
    for name in layers:
        torch.testing.assert_close(squares[name], expected[name], rtol=1e-3, atol=1e-7)


def test_the_first_tokens_are_taken_and_one_sample_at_least() -> None:
    model, said = streamed(llama()), context(texts(8, padded=False))
    for most, rows in ((0, 24), (50, 48), (10**6, 96)):
        assert sum(batch.n_rows for batch in first_micro_batches(model, said, most, 24)) == rows
