"""A graph with other values of its parameters: those of a model changed in torch; none where a place is not sure."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from decoder_graphs import Decoder, exported, make, relative, stepwise, tokens
from torch import nn

from compress.export.refill import refill

pytestmark = pytest.mark.slow


def changed(kind: str, but: str = "nothing") -> nn.Module:
    """The model with other values of all its parameters, but those in whose names `but` is."""
    net = deepcopy(make(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in net.named_parameters():
            if but not in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    return net


def values_of(net: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in net.state_dict().items()}


def filled(kind: str, net: nn.Module) -> ir.Model | None:
    before, after = values_of(make(kind)), values_of(net)
    return refill(exported(kind), list(before), before.__getitem__, after.__getitem__)


@pytest.mark.parametrize(("kind", "but"), [("llama", "nothing"), ("gpt2", "nothing"), ("gemma3", "norm")])
def test_the_graph_is_the_other_model(kind: str, but: str) -> None:
    net, ids = changed(kind, but), tokens(2, 9)
    mask = np.ones_like(ids)
    positions = torch.from_numpy(mask.cumsum(1) - 1)
    with torch.no_grad():
        want = net(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), position_ids=positions).logits.numpy()
    graph = filled(kind, net)
    assert graph is not None
    assert relative(want, stepwise(Decoder(graph), ids, mask, 6)) < 1e-5
    assert relative(want, stepwise(Decoder(exported(kind)), ids, mask, 6)) > 1e-2


def test_a_folded_parameter_is_not_found() -> None:
    assert filled("gemma3", changed("gemma3")) is None, "1 + a norm's weight"


def test_parameters_that_may_be_each_other_s_are_not_told_apart() -> None:
    before, after = values_of(make("llama")), values_of(changed("llama"))
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    before[other] = before[one]
    assert refill(exported("llama"), list(before), before.__getitem__, after.__getitem__) is None
    after[one] = after[one][:-1]
    assert refill(exported("llama"), [one], before.__getitem__, after.__getitem__) is None, "another shape"


def test_an_all_equal_parameter_is_found_by_its_name_alone() -> None:
    """Which of the two a constant without a name stands for is not known."""
    graph, norm = exported("llama"), "model.norm.weight"
    ones, twos = np.ones(64, np.float32), np.full(64, 2, np.float32)
    value = next(value for name, value in graph.graph.initializers.items() if name.endswith(norm))
    value.const_value = ir.Tensor(ones, name=value.name)
    found = refill(graph, [norm], lambda name: ones, lambda name: twos)
    assert found is not None
    np.testing.assert_array_equal(found.graph.initializers[value.name].const_value.numpy(), twos)
    assert refill(graph, ["other.weight"], lambda name: ones, lambda name: twos) is None
