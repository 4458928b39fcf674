"""`sparsify_iteratively`: which weights become zero in which round, where the others go back to, zeros that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from distilling import Arrays, ConvNet, Interrupted, conv_net, images, noisy
from onnx import numpy_helper
from places import RECIPES
from pydantic import ValidationError
from streaming import model_context
from torch import Tensor, nn

import compress
import compress.work.sparsify_iteratively as steps_room
from compress.context import PassResult
from compress.distill.rewind import Rewind
from compress.errors import PassError
from compress.facts import LayerFacts, ModelFacts
from compress.formats.targets import TARGETS
from compress.models.load import TorchModel
from compress.passes import SparsifyIteratively
from compress.passes.base import DataSize
from compress.passes.training import LabelsTerm, LogitsTerm
from compress.pruning.masks import round_shares, set_to_zero, smallest
from compress.store.training_state import module_state
from compress.work import apply_pass
from compress.work.contexts import ModelContext
from runtime.bundle.tensors import TensorSpec

RECIPE = RECIPES / "claims/digits-lottery-ticket.yaml"
TARGET = TARGETS["onnxruntime-cpu"]
IMAGES = (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),)
LOGITS = (TensorSpec("logits", "float32", ("batch", 4)),)
MATRICES = ("conv1", "conv2", "fc")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_round_takes_the_same_part_of_what_is_left() -> None:
    shares = round_shares(0.9, 4)
    assert shares[-1] == pytest.approx(0.9)
    left = [1.0, *(1 - share for share in shares)]
    assert [b / a for a, b in pairwise(left)] == pytest.approx([0.1**0.25] * 4)
    assert round_shares(0.5, 1) == (0.5,)


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_the_smallest_are_those_of_a_sorted_list(share: float) -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(5, 8), "b": 0.3 * torch.randn(4, 5, 3)}
    everywhere = torch.cat([weight.abs().reshape(-1) for weight in weights.values()]).sort().values
    edge = everywhere[round(share * len(everywhere)) - 1]
    for name, mask in smallest(weights, share).items():
        assert torch.equal(mask, weights[name].abs() <= edge)


def test_what_is_zero_stays_zero_from_round_to_round() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(20, 20)}
    before = torch.zeros(20, 20, dtype=torch.bool)
    for share in round_shares(0.9, 5):
        masks = smallest(weights, share)
        assert bool(masks["a"][before].all())
        set_to_zero(weights, masks)
        before = masks["a"]
        weights["a"] += torch.where(before, 0.0, torch.randn(20, 20))  # "training"
    assert int((weights["a"] == 0).sum()) == 360


def image_model(net: nn.Module) -> TorchModel:
    names = {"pixel_values": "x"}
    return TorchModel(
        architecture="ConvNet", inputs=IMAGES, outputs=LOGITS, module=net, parameters=names, task="image-classification"
    )


def options(work: Path | None = None, trainset: Any = None, teacher: Callable[[], Any] | None = None) -> ModelContext:
    return model_context(work=work, train=images() if trainset is None else trainset, teacher=teacher)


def small(**more: Any) -> SparsifyIteratively:
    usual = {"steps": 12, "batch_size": 8, "learning_rate": 0.01, "held_out": 0.25, "rounds": 3}
    return SparsifyIteratively(**usual | {"sparsity": 0.8, "labels": LabelsTerm()} | more)


class Watch:
    """What `train` is given and leaves, at each of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.during: list[dict[int, dict[str, Tensor]]] = []
        self.after: list[dict[str, Tensor]] = []
        real = steps_room.train

        def watched(module: nn.Module, dataset: Any, schedule: Any, surroundings: Any) -> Any:
            self.before.append(module_state(module))
            seen: dict[int, dict[str, Tensor]] = {}
            self.during.append(seen)

            def after_step(step: int) -> None:
                surroundings.after_step(step)
                seen[step] = module_state(module)

            log = real(module, dataset, schedule, replace(surroundings, after_step=after_step))
            self.after.append(module_state(module))
            return log

        monkeypatch.setattr(steps_room, "train", watched)


def kernel(state: dict[str, Tensor]) -> Tensor:
    return state["student.conv2.weight"]


@pytest.mark.parametrize(("rewind", "step"), [(0.0, None), (0.25, 2), ("never", None)])
def test_weights_go_back_where_they_were(
    monkeypatch: pytest.MonkeyPatch, rewind: float | str, step: int | None
) -> None:
    """To the start, to a step of the first training, or nowhere: norms, biases and statistics too, zeros excepted."""
    watch, net = Watch(monkeypatch), noisy(conv_net())
    came = {f"student.{name}": value for name, value in module_state(net).items()}
    apply_pass(small(rewind=rewind), image_model(net), options())
    assert len(watch.before) == (3 if rewind == "never" else 4)
    if rewind != "never":
        assert all(torch.equal(watch.before[0][name], value) for name, value in came.items())
    for number in range(1, len(watch.before)):
        point = watch.after[number - 1]
        if rewind != "never":
            point = came if step is None else watch.during[0][step]
        for name, value in watch.before[number].items():
            gone = value == 0
            assert torch.equal(value[~gone], point[name][~gone]), name
            assert value.dim() > 1 or torch.equal(value, point[name])


def test_the_smallest_of_what_was_trained_go_and_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, of one layer: the lowest magnitudes at the end of the training before, during all steps of the next."""
    watch, net = Watch(monkeypatch), noisy(conv_net())
    apply_pass(small(targets=("conv2",), rewind=0.0), image_model(net), options())
    for number, share in enumerate(round_shares(0.8, 3), start=1):
        trained = kernel(watch.after[number - 1]).abs().reshape(-1)
        n = round(share * len(trained))
        gone = torch.zeros(len(trained), dtype=torch.bool)
        gone[trained.argsort(stable=True)[:n]] = True
        for state in (watch.before[number], *watch.during[number].values(), watch.after[number]):
            assert torch.equal((kernel(state) == 0).reshape(-1), gone)
    assert not torch.equal(kernel(watch.before[3]), kernel(watch.after[3]))  # what is left has learned


def zeros(net: ConvNet) -> dict[str, float]:
    return {name: (net.get_submodule(name).weight == 0).double().mean().item() for name in MATRICES}  # type: ignore[operator]


def test_the_share_is_that_of_all_layers() -> None:
    net = conv_net()
    result = apply_pass(small(), image_model(net), options())
    sizes = {name: net.get_submodule(name).weight.numel() for name in MATRICES}  # type: ignore[union-attr, operator]
    n_zero = sum(zeros(net)[name] * sizes[name] for name in MATRICES)
    assert round(n_zero) == round(0.8 * sum(sizes.values()))
    assert len(set(zeros(net).values())) > 1
    assert {name: result.measured[name]["sparsity"] for name in MATRICES} == zeros(net)
    some = conv_net()
    apply_pass(small(ignore=("fc",)), image_model(some), options())
    assert zeros(some)["fc"] == 0


def test_the_report_tells_each_round() -> None:
    net = noisy(conv_net())
    result = apply_pass(small(rewind=0.25, ignore=("fc",)), image_model(net), options())
    assert [decision.action for decision in result.decisions] == ["sparse", "sparse", "kept"]
    assert result.decisions[0].reason.endswith(
        "its part of 0.8 by magnitude in 3 round(s), the rest rewound to 25% of the training"
    )
    rounds = [name for name in result.measured if name.startswith("sparsify_iteratively: with")]
    assert rounds == [f"sparsify_iteratively: with {share}% zeros" for share in ("0.0", "41.5", "65.8", "80.0")]
    assert set(result.measured["sparsify_iteratively: training loss"]) == {str(step) for step in range(1, 13)}
    assert result.notes[0].text.startswith(
        "sparsify_iteratively: 80.1% of 792 weights are zero, after 3 round(s); loss held"
    )
    assert not any(p.requires_grad for p in net.parameters()) and not net.training


@pytest.mark.slow
def test_rounds_lose_less_than_everything_at_once() -> None:
    """The loss held out at the end, the last training being as long."""
    losses = {}
    for rounds in (1, 4):
        # At a rate of 0.02 the processor's rounding decides: weights 1e-6 away gave ratios of 0.6 to 1.07, here 0.46 to
        # 0.49.
        more = {"rewind": "never", "steps": 40, "batch_size": 16, "learning_rate": 0.005}
        result = apply_pass(small(rounds=rounds, **more), image_model(conv_net()), options(None, images(96)))
        losses[rounds] = result.measured["sparsify_iteratively"]["loss_after"]
    assert losses[4] < 0.8 * losses[1]


def test_a_teacher_is_asked_unless_labels_are_all() -> None:
    labels, both = small(), small(logits=LogitsTerm())
    default = small(labels=None)
    assert not labels.needs_teacher("image-classification")
    assert both.needs_teacher("image-classification") and default.needs_teacher("image-classification")
    unlabelled = Arrays(images().columns)
    asked = []

    def teacher() -> TorchModel:
        asked.append(1)
        return image_model(conv_net())

    result = apply_pass(default, image_model(noisy(conv_net())), options(trainset=unlabelled, teacher=teacher))
    assert asked == [1] and result.measured["sparsify_iteratively"]["loss_after"] > 0
    with pytest.raises(PassError, match="sparsify_iteratively: there is no teacher"):
        apply_pass(default, image_model(conv_net()), options())
    with pytest.raises(PassError, match=r"sparsify_iteratively: there is no training set; give the recipe data\.train"):
        apply_pass(labels, image_model(conv_net()), replace(options(), train=None))


@pytest.mark.parametrize("calls", [2, 9, 41])
@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_every_step")
def test_a_run_that_is_broken_off_ends_with_the_same_bytes(tmp_path: Path, calls: int) -> None:
    """Before the point to go back to, after it, and in a later round; the state is saved after every step."""
    config = small(rewind=0.25)
    whole = noisy(conv_net())
    expected = apply_pass(config, image_model(whole), options())
    net, left = noisy(conv_net()), [calls]

    def broken_off(steps: Any, text: str, most_s: float | None = None) -> Iterator[Any]:
        for step in steps:
            if not left[0]:
                raise Interrupted
            left[0] -= 1
            yield step

    with pytest.raises(Interrupted):
        apply_pass(config, image_model(net), replace(options(tmp_path), progress=broken_off))
    again = noisy(conv_net())
    found = apply_pass(config, image_model(again), options(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert without_seconds(found) == without_seconds(expected)


def without_seconds(result: PassResult) -> dict[str, dict[str, float]]:
    return {name: {k: v for k, v in one.items() if k != "seconds"} for name, one in result.measured.items()}


def test_a_training_that_ends_too_early_has_no_point_to_go_back_to() -> None:
    with pytest.raises(
        PassError, match=r"ended before step 9, to which rewind 0\.75 goes back; use a lower rewind, or"
    ):
        apply_pass(small(rewind=0.75, max_seconds=1e-3), image_model(conv_net()), options())


def test_a_state_is_kept_on_disk_once_it_is_reached(tmp_path: Path) -> None:
    net = conv_net()
    point = Rewind(net, 2, tmp_path)
    point.after_step(0)
    assert not point.restore() and not list(tmp_path.iterdir())
    point.after_step(1)
    before = net.conv1.weight.clone()
    net.conv1.weight.mul_(2)
    assert Rewind(net, 2, tmp_path).restore()  # by another run
    assert torch.equal(net.conv1.weight, before)


def test_a_layer_that_would_be_empty_is_refused() -> None:
    net = conv_net()
    net.conv2.weight.mul_(1e-6)
    with pytest.raises(
        PassError, match=r"round 1 of 1 leaves none of the weights of conv2; ignore it, or take a lower"
    ):
        apply_pass(small(sparsity=0.9, rounds=1, rewind="never"), image_model(net), options())


FACTS = ModelFacts(
    source="torch",
    architecture="Net",
    task="image-classification",
    inputs=IMAGES,
    outputs=LOGITS,
    layers=(
        LayerFacts("conv", "Conv2d", "Conv", "conv.weight", (8, 4, 3, 3)),
        LayerFacts("table", "Embedding", "Gather", "table.weight", (10, 8)),
        LayerFacts("head", "Linear", "MatMul", "head.weight", (4, 8)),
    ),
)


def test_the_plan_says_what_each_layer_gets() -> None:
    plan = small().check(FACTS, TARGET)
    assert plan.problems == ()
    assert [(one.layer, one.action) for one in plan.decisions] == [
        ("conv", "sparse"),
        ("head", "sparse"),
        ("table", "kept"),
    ]
    assert [layer.name for layer in plan.facts.layers if layer.sparse] == ["conv", "head"]
    assert "no faster and no smaller than dense" in plan.notes[1].text
    assert plan.notes[0].text == "sparsify_iteratively: learns by the labels"


def test_how_long_it_takes() -> None:
    config = SparsifyIteratively(epochs=2, batch_size=10, held_out=0.1, rounds=4, max_seconds=100, labels=LabelsTerm())
    assert config.make_schedule(1000, 0).steps == 180 and config.make_schedule(1000, 0).max_seconds == 20
    assert config.train_notes(FACTS, 1000)[0].text == "sparsify_iteratively: 5 trainings of 180 steps of 10 samples"
    one = SparsifyIteratively(epochs=2, batch_size=10, held_out=0.1, rounds=1, rewind="never", labels=LabelsTerm())
    all_five, alone = (pass_.estimate_cost(FACTS, DataSize(train=1000)).forwards for pass_ in (config, one))
    assert all_five == pytest.approx(5 * alone)
    assert one.cache_bytes(FACTS, 1000) == 0  # there is no teacher
    assert one.model_copy(update={"labels": None}).cache_bytes(FACTS, 1000) == 4 * 1000 * 4


@pytest.mark.parametrize(
    ("config", "more", "problem"),
    [
        ({"targets": ("nobody",)}, {}, "targets: 'nobody' matches no layer"),
        ({"ignore": ("Conv2d", "Linear")}, {}, "no layer is left to make sparse"),
        ({}, {"source": "onnx"}, "trains a torch model, and an onnx: source is none"),
        ({}, {"layers": (replace(FACTS.layers[0], bits=8),)}, "must come before the pass that rounds conv"),
        (
            {"ignore": ("conv",)},
            {"layers": (FACTS.layers[0], replace(FACTS.layers[2], weight="conv.weight"))},
            "head shares its weight with conv, which keeps its own; ignore head",
        ),
    ],
)
def test_the_plan_refuses(config: dict[str, Any], more: dict[str, Any], problem: str) -> None:
    found = small(**config).check(replace(FACTS, **more), TARGET).problems
    assert f"sparsify_iteratively: {problem}" in " | ".join(found)


@pytest.mark.parametrize("config", [{"sparsity": 1.0}, {"rounds": 0}, {"rewind": 1.0}])
def test_numbers_that_cannot_be_meant_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        small(**config)


def test_labels_are_asked_for() -> None:
    assert "the training set has no labels" in small().train_problems("image-classification", 100, has_labels=False)[0]


@pytest.mark.slow
def test_zeros_stay_through_int8(tmp_path: Path) -> None:
    """The recipe, shortened: what the bundle's integers are is zero where training left zeros."""
    said = [f"passes.0.{key}" for key in ("epochs=null", "steps=4", "rounds=2", "batch_size=16", "sparsity=0.9")]
    fast = [
        "validate.gates=[]",
        "validate.benchmark={iterations: 1, processes: 1}",
        "data.evaluation.samples=50",
        "validate.steps=false",
    ]
    recipe = compress.load_recipe(RECIPE, [*said, *fast])
    report = compress.apply(recipe, tmp_path / "out", tmp_path / "cache", quiet=True)
    rows = {row["layer"]: row for row in report.layers}
    stored = {
        one.name.removesuffix(".weight/int8"): numpy_helper.to_array(one)
        for one in onnx.load(tmp_path / "out/model/model.onnx").graph.initializer
    }
    for name in ("layer1.conv1", "layer1.conv2", "layer2.conv1", "layer2.conv2", "linear"):
        assert stored[name].dtype == np.int8
        assert 0.1 < rows[name]["sparsity"] <= (stored[name] == 0).mean()
