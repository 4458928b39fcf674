"""Modules that a program holds: a name stands for all of one but its weights, and only this process has it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.errors import SourceError
from compress.models.factory import build
from compress.models.live import copy_held, digest_code, hold
from compress.models.source import locate, model_digest
from compress.specs import ModelSpec


class Net(nn.Module):
    def __init__(self, scale: float = 1.0, act: object = torch.relu) -> None:
        super().__init__()
        self.linear, self.scale, self.act = nn.Linear(3, 2), scale, act
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.scale + self.shift  # type: ignore[operator]


class Other(Net):
    """Another class of the same tensors."""


def shifted() -> Net:
    net = Net()
    net.shift += 1
    return net


def test_a_name_stands_for_all_but_the_weights() -> None:
    same = {hold(Net()), hold(Net()), hold(copy.deepcopy(Net()).train())}
    assert len(same) == 1
    others = [Net(2.0), Net(act=torch.tanh), Other(), shifted(), Net(act=lambda x: x), nn.Sequential(Net())]
    assert len(same | {hold(net) for net in others}) == 1 + len(others)


def test_what_cannot_be_compared_is_never_taken_for_another() -> None:
    assert hold(Net(act=iter(()))) != hold(Net(act=iter(())))


def test_the_given_module_stays_as_it_is_and_what_is_built_is_its_own() -> None:
    net = Net().train()
    net.linear.weight.grad = torch.ones(2, 3)
    name = hold(net)
    built = copy_held(name)
    assert net.training and net.linear.weight.grad is not None and net.linear.weight.requires_grad
    assert not built.training
    with torch.no_grad():
        built.linear.weight += 1
    assert not torch.equal(copy_held(name).linear.weight, built.linear.weight)


def test_it_is_built_as_a_source_and_its_digest_follows_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net = Net()
    digests = []
    for number in range(2):
        with torch.no_grad():
            net.linear.weight += number
        save_file(net.state_dict(), tmp_path / "w.safetensors")
        spec = ModelSpec(source=f"live:{hold(net)}", weights=str(tmp_path / "w.safetensors"), task="generic")
        source = locate(spec, Path())
        digests.append(model_digest(source))
        assert isinstance(build(source), Net)
    assert digests[0] != digests[1]


def test_another_process_is_told_the_way_out() -> None:
    with pytest.raises(SourceError, match=r"live:Net-0: this model was given as an object.*model=model"):
        locate(ModelSpec(source="live:Net-0", task="generic"), Path())


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(SourceError, match=r"a Net cannot be copied: .*factory"):
        hold(Net(act=file))


def test_the_code_alone_has_a_digest() -> None:
    assert digest_code(Net()) == digest_code(Net(3.0)) != digest_code(Other())
