"""A large decoder's speed, foretold from two of fewer blocks, whose weights are drawn as they are written.

Each further block takes what those between the two take. Both have the whole vocabulary: beside a small one the blocks'
rounded weights stay in the processor's cache, where those of the model do not (8 of Qwen2.5-Coder 0.5B in 4 bits: a
token was foretold a sixth too fast).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from zlib import crc32

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.export.decoder import export_decoder
from compress.export.onnx import Weight
from compress.facts import FLOAT_BYTES
from compress.models.huggingface import build_untrained, make_shallow
from compress.planning.inputs import Inputs
from runtime.processes.memory import available_bytes
from runtime.words import size_text

SHALLOW = (2, 8)
"""Blocks of the two. From 2 and 6 three forecasts of a token of Qwen2.5-Coder 0.5B in 4 bits lay 59 % apart, for its
tables take as long as ten blocks."""
TOKENS = 16
"""Of an answer of theirs."""
BUDGET_S = 12.0
"""Seconds for their answers: five rounds of Qwen2.5-Coder 0.5B's, for a difference scatters more than a time."""
COPIES = 1.8
"""Float copies of all weights of the two that timing them holds. With Qwen2.5-Coder 0.5B they are 2.6 GiB, and the plan
that times them takes 4.7 GiB at its peak, libraries among them."""
HELD = 2**16
"""Elements of a parameter that is held: the exporter may look at it."""
SPREAD = 0.02
"""Standard deviation of what is drawn."""


def explain_none(inputs: Inputs) -> str | None:
    """Return why a large model is not foretold from decoders of a few of its blocks; None where it is."""
    structure = inputs.facts.structure
    assert structure is not None
    n_blocks = len(structure.blocks)
    if n_blocks <= SHALLOW[-1]:
        return f"its {n_blocks} blocks are too few to be foretold from some of them"
    if make_shallow(inputs.source, n_blocks, SHALLOW[-1]) is None:
        return "config.json does not say how many blocks there are"
    assert inputs.facts.structure is not None
    held = {layer.name: FLOAT_BYTES * layer.n_weights for layer in inputs.facts.layers}
    blocks = [sum(held.get(name, 0) for name in block.layers) for block in inputs.facts.structure.blocks]
    tables = inputs.facts.n_bytes - sum(blocks)
    needed, free = int(COPIES * sum(tables + sum(blocks[:n]) for n in SHALLOW)), available_bytes()
    if needed > free:
        return f"to time a few blocks takes {size_text(needed)} of memory, and {size_text(free)} are free"
    return None


def export_shallow(inputs: Inputs) -> Iterator[ir.Model]:
    """Yield the float graphs of the two."""
    assert inputs.facts.structure is not None
    for n in SHALLOW:
        source = make_shallow(inputs.source, len(inputs.facts.structure.blocks), n)
        assert source is not None
        module = build_untrained(source, drawn=False).wrapped
        assert isinstance(module, nn.Module)
        unstack_experts(module)
        weights = _leave_out_weights(module, inputs.recipe.seed)
        yield export_decoder(module.float().eval().requires_grad_(False), inputs.recipe.opset, weights)


def extend(times: Sequence[float], n_blocks: int) -> float:
    """Return what so many blocks take, of what the two took."""
    (few, many), (short, long) = SHALLOW, times
    return short + (n_blocks - few) * max(long - short, 0.0) / (many - few)


def _leave_out_weights(module: nn.Module, seed: int) -> dict[str, Weight]:
    """Draw the small parameters, in place; return what reads the others, which hold no memory."""
    weights: dict[str, Weight] = {}
    random = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        if prod(shape) <= HELD:
            parameter.data.normal_(
                std=SPREAD, generator=random
            )  # no zeros: the exporter would fold a bias of them away
        else:
            parameter.data = torch.zeros(()).expand(shape)  # every element is the one zero that is held
            weights[name] = (shape, _make_reader(shape))
    return weights


def _make_reader(shape: tuple[int, ...]) -> Callable[[str], np.ndarray]:
    """Return what gives a parameter's values, the same at each time: a few random numbers over and over."""

    def read(name: str) -> np.ndarray:
        some = np.random.default_rng(crc32(name.encode())).standard_normal(HELD, np.float32)
        return np.resize(SPREAD * some, shape)

    return read
