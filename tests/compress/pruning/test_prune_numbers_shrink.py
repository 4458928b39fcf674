"""Points of a forward, compensation and the whole of shrinking: against direct solutions, and relations."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compress.errors import PassError
from compress.pruning import curves as curves_room
from compress.pruning.compensate import compensate
from compress.pruning.coupling import find_coupling
from compress.pruning.curves import calibrate_curve, find_curves, measure_damage, readers_of
from compress.pruning.dimensions import Dimension
from compress.pruning.importance import draw_label_loss
from compress.pruning.obs import Elimination
from compress.pruning.points import find_points
from compress.pruning.shrink import find_kept_outputs, output_error, remove_all, renumber_dimension, shrink
from compress.pruning.statistics import gather_inputs
from compress.pruning.surgery import remove
from compress.zoo.cifar_resnet import CifarResNet


class Block(nn.Module):
    """A residual block without a ReLU at its end, and two layers that are added to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 3, 1, bias=False)
        self.after = nn.BatchNorm2d(3)
        self.one, self.two = nn.Linear(3, 4, bias=False), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.down(self.norm(self.up(x)).relu())) + x
        h = x.mean((2, 3))
        return self.one(h) + self.two(h)


def varied(module: nn.Module) -> None:
    """Batch norms as training leaves them."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low, high in (
                (part.weight, 0.5, 1.5),
                (part.bias, -0.3, 0.3),
                (part.running_mean, -0.2, 0.2),
                (part.running_var, 0.5, 2.0),
            ):
                nn.init.uniform_(tensor, low, high)


def blocks(n_batches: int = 5) -> tuple[Block, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    module = Block().eval().requires_grad_(False)
    varied(module)
    return module, [{"x": torch.randn(8, 3, 5, 5)} for _ in range(n_batches)]


def resnet() -> tuple[CifarResNet, list[dict[str, Tensor]], list[Dimension]]:
    torch.manual_seed(1)
    module = CifarResNet(1).eval().requires_grad_(False)
    varied(module)
    batches = [{"x": torch.randn(16, 3, 16, 16)} for _ in range(4)]
    dimensions = [one for one in find_coupling(module, batches[0]).dimensions if one.kind == "channels"]
    return module, batches, dimensions


def test_points_are_where_outputs_arrive() -> None:
    module, batches = blocks()
    points = {point.layer: point for point in find_points(module, batches[0])}
    assert (points["up"].norm, points["up"].addition, points["up"].rectified) == ("norm", None, True)
    assert (points["down"].norm, points["down"].addition, points["down"].rectified) == ("after", 0, False)
    assert points["one"].addition == points["two"].addition == 1
    assert [*points] == ["up", "down", "one", "two"]


def test_a_model_fitted_to_itself_stays_as_it_is() -> None:
    module, batches, _ = resnet()
    student = copy.deepcopy(module)
    found = compensate(student, module, batches, {})
    assert len(found) == 8
    assert all(one.before == 0 and one.ridge == 0 for one in found)
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name])


def test_a_layer_that_writes_to_a_sum_makes_up_for_what_came_before() -> None:
    """Only the last layer may change; what is wrong is its shortcut. The answer is that of a direct solver."""
    module, batches = blocks(3)  # too few to hold any out
    student = copy.deepcopy(module)
    moved = torch.tensor([0.5, -1.0, 0.25])
    student.up.weight.add_(0.1)
    student.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"x": kwargs["x"] - -moved.view(-1, 1, 1)}), with_kwargs=True
    )
    (found,) = compensate(student, module, batches, {}, layers=["down"])

    def sums(model: Block, shift: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([batch["x"] for batch in batches]) + shift.view(-1, 1, 1)
        h = model.norm(model.up(x)).relu()
        return h, model.after(model.down(h)) + x

    h, now = sums(student, moved)
    wanted = sums(module, torch.zeros(3))[1]
    rows = torch.cat([h.movedim(1, -1).reshape(-1, 6), torch.ones(h[:, 0].numel(), 1)], 1)
    before = copy.deepcopy(module)
    before.up = student.up
    lacking = (wanted - sums(before, moved)[1]).movedim(1, -1).reshape(-1, 3)
    best = float((lacking - rows @ torch.linalg.lstsq(rows, lacking).solution).square().sum() / len(rows))
    left = float((wanted - now).square().sum() / len(rows))
    assert found.before == pytest.approx(float(lacking.square().sum() / len(rows)), rel=1e-4)
    assert found.after == pytest.approx(left, rel=1e-3)
    assert best <= left < 1.02 * best + 1e-6  # the ridge costs a little
    assert left < 0.8 * found.before


def test_targets_below_zero_are_free_where_a_relu_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batches, dimensions = resnet()
    errors = {}
    for steps in (0, 3):
        student = copy.deepcopy(module)
        kept = [np.arange(one.n_units // 2) for one in dimensions]
        remove_all(student, dimensions, kept, remove)
        kept_outputs = find_kept_outputs(module, dimensions, kept)
        monkeypatch.setattr("compress.pruning.compensate.RECTIFIED_STEPS", steps)
        compensate(student, module, batches, kept_outputs)
        errors[steps] = output_error(student, module, batches)
    assert errors[3] < errors[0]


def test_layers_added_to_each_other_are_fitted_at_one_place() -> None:
    module, batches = blocks()
    student = copy.deepcopy(module)
    student.one.weight.mul_(0.5)
    student.two.weight.mul_(0.8)
    found = compensate(student, module, batches, {}, layers=["one", "two"])
    assert [one.layer for one in found] == ["one", "two"]
    assert output_error(student, module, batches) < 1e-4


def test_a_head_tied_to_its_table_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.up(self.table(ids)))

    torch.manual_seed(3)
    module = Tied().eval().requires_grad_(False)
    student = copy.deepcopy(module)
    student.up.weight.mul_(0.5)
    found = compensate(student, module, [{"ids": torch.arange(20).reshape(4, 5)}] * 4, {})
    assert [one.layer for one in found] == ["up"]
    assert torch.equal(student.table.weight, module.table.weight)
    assert student.head.weight is student.table.weight


def test_a_layer_whose_input_is_changed_later_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            y = self.layer(h)
            h.mul_(0)
            return y + h

    module = InPlace().eval().requires_grad_(False)
    student = copy.deepcopy(module)
    student.layer.weight.add_(1)
    with pytest.raises(PassError, match="layer: what it reads is changed in place"):
        compensate(student, module, [{"x": torch.randn(4, 3)}], {})


def test_what_a_forward_raises_comes_through() -> None:
    module, batches = blocks(2)
    with pytest.raises(RuntimeError, match="expected input"):
        compensate(copy.deepcopy(module), module, [batches[0], {"x": torch.zeros(2, 4, 5, 5)}], {})


def test_shrinking_removes_fits_and_tells() -> None:
    module, batches, dimensions = resnet()
    whole = copy.deepcopy(module)
    curves = find_curves(module, dimensions, batches, loss=draw_label_loss())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])  # measuring leaves no trace
    widths = [one.n_units // 2 for one in dimensions]
    bare = copy.deepcopy(module)
    without = shrink(bare, dimensions, curves, widths, batches, remove, compensation=False)
    found = shrink(module, dimensions, curves, widths, batches, remove)
    assert module.layer2[0].conv1.weight.shape == (16, 16, 3, 3)
    assert module.layer2[0].conv2.weight.shape == (32, 16, 3, 3)
    assert without.error_with == without.error_without == found.error_without
    assert found.error_with < 0.5 * found.error_without
    assert [one.layer for one in found.layers][:3] == ["conv1", "layer1.0.conv1", "layer1.0.conv2"]
    assert all(len(one.kept) == width for one, width in zip(found.dimensions, widths, strict=True))
    assert found.error_with == pytest.approx(output_error(module, whole, batches[-2:]))


def test_full_widths_change_nothing() -> None:
    module, batches, dimensions = resnet()
    whole = copy.deepcopy(module)
    curves = [Elimination(np.arange(one.n_units - 1), np.ones(one.n_units - 1)) for one in dimensions]
    found = shrink(module, dimensions, curves, [one.n_units for one in dimensions], batches, remove)
    assert found.error_with == 0
    assert found.layers == ()
    assert torch.equal(module(**batches[0]), whole(**batches[0]))
    with pytest.raises(PassError, match=r"layer1.0.conv1: 0 of 16 units cannot be left"):
        shrink(module, dimensions, curves, [0, 32, 64], batches, remove)


@pytest.mark.parametrize("importance", ["obd", "activation", "l1", "l2", "bn_scale", "taylor", "fisher", "random"])
def test_every_importance_gives_an_order_of_all_units(importance: curves_room.Importance) -> None:
    module, batches, dimensions = resnet()
    found = find_curves(module, dimensions, batches, importance, loss=draw_label_loss())
    for one, curve in zip(dimensions, found, strict=True):
        assert len(set(curve.order.tolist())) == len(curve.errors) == one.n_units - 1
        assert np.all(np.diff(curve.errors) >= 0)
        assert curve.errors[0] >= 0
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
def test_obs_loses_less_than_chance() -> None:
    module, batches, dimensions = resnet()
    errors = {}
    for importance in ("obs", "random"):
        student = copy.deepcopy(module)
        curves = find_curves(student, dimensions, batches, importance)  # type: ignore[arg-type]
        found = shrink(student, dimensions, curves, [one.n_units // 2 for one in dimensions], batches, remove)
        errors[importance] = found.error_with
    assert errors["obs"] < errors["random"]


def test_curves_refuse_what_they_cannot_do() -> None:
    module, batches, dimensions = resnet()
    with pytest.raises(PassError, match="importance: taylor needs a loss"):
        find_curves(module, dimensions, batches, "taylor")
    with pytest.raises(PassError, match="importance: 'l3' is unknown; known: obs"):
        find_curves(module, dimensions, batches, "l3")  # type: ignore[arg-type]
    with pytest.raises(PassError, match=r"layer1.0.conv1: the Gram matrices of its 1 readers"):
        find_curves(module, dimensions, batches, most_bytes=2**10)


def test_one_pass_or_several_over_the_data_give_the_same_curves() -> None:
    module, batches, dimensions = resnet()
    whole = find_curves(module, dimensions, batches)
    parts = find_curves(module, dimensions, batches, most_bytes=8 * 576**2)  # the widest alone
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a.errors, b.errors, rtol=0.2)  # other rows are drawn


def test_the_measured_damage_is_that_of_the_model_without_the_units() -> None:
    module, batches, dimensions = resnet()
    one = dimensions[1]
    points = {point.layer: point for point in find_points(module, batches[0])}
    readers = readers_of(module, one, points, gather_inputs(module, one.readers, batches))
    targets = [[module(**batch)] for batch in batches]
    assert measure_damage(module, readers, np.array([], np.int64), batches, targets) < 1e-4
    some, more = (measure_damage(module, readers, np.arange(n), batches, targets) for n in (4, 24))
    assert 0 < some < more
    curve = Elimination(np.arange(31), np.arange(1.0, 32))
    at_half = calibrate_curve(curve, 32, {16: 8.0})
    assert [at_half.error_at(width, 32) for width in (16, 8, 24)] == [8, 12, 4]
    at_both = calibrate_curve(curve, 32, {16: 8.0, 8: 48.0})
    assert [at_both.error_at(width, 32) for width in (24, 16, 8, 1)] == [4, 8, 48, 62]
    assert at_both.error_at(12, 32) == pytest.approx(20 * 1.25) and (np.diff(at_both.errors) >= 0).all()
    assert calibrate_curve(curve, 32, {16: 0.0}) is curve


def test_dimensions_on_one_axis_are_renumbered() -> None:
    torch.manual_seed(2)
    layer = nn.Linear(10, 2)
    members = [np.array([[0, 1], [2, 3], [4, 5]]), np.array([[6], [7], [8], [9]])]
    both = [Dimension(f"d{i}", "neurons", {("weight", 1): m}, (), ()) for i, m in enumerate(members)]
    after = renumber_dimension(both[1], {("weight", 1): np.array([2, 3])})
    assert after.members["weight", 1][:, 0].tolist() == [4, 5, 6, 7]
    old = layer.weight.detach().clone()
    remove_all(layer, both, [np.array([0, 2]), np.array([1, 3])], remove)
    torch.testing.assert_close(layer.weight.detach(), old[:, [0, 1, 4, 5, 7, 9]])


def test_kept_outputs_are_those_of_all_dimensions() -> None:
    module, _, dimensions = resnet()
    kept = [np.array([0, 3]), np.arange(32), np.arange(1, 64)]
    found = find_kept_outputs(module, dimensions, kept)
    assert {name: own.tolist() for name, own in itertools.islice(found.items(), 2)} == {
        "layer1.0.conv1": [0, 3],
        "layer3.0.conv1": [*range(1, 64)],
    }
