"""Batch norms after pruning: their statistics are the data's, and the model gives what it gave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress.pruning.compensate import follow_data


def stale() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A net whose norms hold statistics of other data."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    )
    for norm in (net[1], net[4]):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
        norm.running_mean.normal_(), norm.running_var.uniform_(0.2, 5.0)
    net.requires_grad_(False)
    return net.eval(), [{"input": 3 * torch.randn(n, 3, 8, 8) + 1} for n in (16, 5)]


def test_outputs_stay_and_statistics_are_those_of_the_data() -> None:
    net, batches = stale()
    everything = torch.cat([batch["input"] for batch in batches])
    before = net(everything)
    follow_data(net, batches)
    torch.testing.assert_close(net(everything), before, rtol=1e-4, atol=1e-4)
    read = net[0](everything)
    torch.testing.assert_close(net[1].running_mean, read.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, read.var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-5)


def test_training_then_begins_with_the_same_model() -> None:
    net, batches = stale()
    everything = torch.cat([batch["input"] for batch in batches])
    before = net(everything)
    far = (net.train()(everything) - before).abs().mean()
    net, batches = stale()
    follow_data(net, batches)
    near = (net.train()(everything) - before).abs().mean()
    assert near < 1e-4 < 0.1 < far


def test_a_norm_of_its_own_form_is_left_alone() -> None:
    norm = nn.BatchNorm1d(3, affine=False).eval()
    state = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    follow_data(norm, [{"input": torch.randn(9, 3)}])
    assert all(torch.equal(tensor, state[name]) for name, tensor in norm.state_dict().items())


def test_a_channel_that_never_changes() -> None:
    norm = nn.BatchNorm1d(2).eval().requires_grad_(False)
    x = torch.stack([torch.zeros(9), torch.randn(9)], 1)
    before = norm(x)
    follow_data(norm, [{"input": x}])
    torch.testing.assert_close(norm(x), before)
    assert float(norm.running_var[0]) == pytest.approx(0)
