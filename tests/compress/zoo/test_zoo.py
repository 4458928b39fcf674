"""The zoo: its committed weights and data are what its trainer writes, and its layouts are the published ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compress.zoo.cifar_resnet import BasicBlock, resnet20, resnet56
from compress.zoo.digits_resnet import DIGITS, DigitsResNet, digits_resnet
from compress.zoo.grid_detector import assign_once, detection_loss, find_corners, one_to_one_detector, place_centres
from compress.zoo.train_digits import accuracy, digits_splits, train

BENCH = Path(os.environ.get("COMPRESS_BENCH", "shared/bench"))
"""Folder of published models and data, where there is one."""


@pytest.fixture(scope="module")
def trained() -> DigitsResNet:
    model = digits_resnet()
    model.load_state_dict(load_file(DIGITS / "digits_resnet.safetensors"))
    return model.eval()


def test_committed_weights_reach_their_accuracy(trained: DigitsResNet) -> None:
    with np.load(DIGITS / "test.npz") as test:
        assert accuracy(trained, dict(test)) == pytest.approx(0.9937, abs=1e-4)


def test_committed_data_is_scikit_learns_split() -> None:
    pytest.importorskip("sklearn")
    for name, split in zip(("train.npz", "test.npz"), digits_splits(), strict=True):
        with np.load(DIGITS / name) as committed:
            assert committed["image"].dtype == np.uint8
            np.testing.assert_array_equal(committed["image"], split["image"])
            np.testing.assert_array_equal(committed["label"], split["label"])


def test_train_and_test_share_no_image() -> None:
    with np.load(DIGITS / "train.npz") as train_set, np.load(DIGITS / "test.npz") as test_set:
        seen = {image.tobytes() for image in train_set["image"]}
        assert not any(image.tobytes() in seen for image in test_set["image"])


def test_digits_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in DIGITS.iterdir()) < 1_000_000


def test_training_is_deterministic_and_leaves_the_random_state() -> None:
    with np.load(DIGITS / "train.npz") as data:
        few = {name: data[name][:60] for name in data.files}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = (train(few, epochs=1).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()


@pytest.mark.parametrize(("factory", "n_blocks", "n_parameters"), [(resnet20, 3, 269_722), (resnet56, 9, 853_018)])
def test_cifar_resnets_have_the_published_layout(factory, n_blocks: int, n_parameters: int) -> None:
    model = factory()
    assert sum(p.numel() for p in model.parameters()) == n_parameters
    blocks = [
        f"layer{s}.{i}.{part}" for s in (1, 2, 3) for i in range(n_blocks) for part in ("conv1", "bn1", "conv2", "bn2")
    ]
    assert {name.rpartition(".")[0] for name in model.state_dict()} == {"conv1", "bn1", "linear", *blocks}


def test_option_a_shortcut_subsamples_and_pads_with_zeros() -> None:
    block = BasicBlock(16, 32, stride=2)
    x = torch.randn(2, 16, 8, 8)
    out = block.shortcut(x)
    assert out.shape == (2, 32, 4, 4)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.skipif(not BENCH.is_dir(), reason="needs COMPRESS_BENCH: published weights, CIFAR-10")
def test_published_resnet20_weights_classify_cifar10() -> None:
    model = resnet20().eval()
    model.load_state_dict(load_file(BENCH / "models/cifar10-resnet20/model.safetensors"))
    with np.load(BENCH / "data/cifar10/test.npz") as test:
        image, label = test["image"][:300], test["label"][:300]
    x = (torch.from_numpy(image).float() / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    with torch.inference_mode():
        assert (model(x.permute(0, 3, 1, 2)).argmax(1).numpy() == label).mean() > 0.85


def test_a_one_to_one_head_ends_in_the_best_boxes() -> None:
    torch.manual_seed(0)
    model, images = one_to_one_detector(2, width=4, depth=1, most=7).eval(), torch.rand(3, 3, 64, 96)
    with torch.no_grad():
        rows = model(images)
        x = model.read_grid(images)
        heads = model.read_heads(x)
        once = model.once(x).flatten(2).transpose(1, 2).sigmoid()
    corners = find_corners(place_centres(64, 96), heads["boxes"])
    assert rows.shape == (3, 7, 6)
    for image in range(3):
        places = once[image].flatten().argsort(descending=True)[:7]
        torch.testing.assert_close(rows[image, :, 4], once[image].flatten()[places])
        torch.testing.assert_close(rows[image, :, 5], (places % 2).float())
        torch.testing.assert_close(rows[image, :, :4], corners[image, places // 2])


def test_an_object_is_learned_by_the_one_cell_that_fits_it_best() -> None:
    centres = place_centres(32, 32)
    labels = torch.tensor([[[1.0, 2, 2, 22, 22], [0.0, 16, 16, 32, 32], [-1.0, 0, 0, 0, 0]]])
    found = torch.cat([centres - 8, centres + 8], -1)[None].clone()  # each cell's own box, as large as the objects
    found[0, 5] = torch.tensor([2.0, 2, 22, 22])  # of the nine cells around (12, 12) the one that has it exactly
    scores = torch.zeros(1, 16, 2)
    classes, overlaps = assign_once(scores, found, centres, labels)
    assert (classes[0] >= 0).sum() == 2
    assert classes[0, 5] == 1 and overlaps[0, 5] == 1
    assert (classes[0] == 0).sum() == 1
    scores[0, 5, 1], scores[0, 6, 1] = -20, 20  # a better score outweighs the box that no one believes
    found[0, 6] = found[0, 5]
    assert assign_once(scores, found, centres, labels)[0][0, 6] == 1


def test_a_detector_of_both_heads_learns() -> None:
    torch.manual_seed(0)
    model = one_to_one_detector(2, width=4, depth=1)
    labels = torch.tensor([[[1.0, 8, 8, 40, 40]], [[0.0, 20, 4, 60, 30]]])
    images, centres = torch.rand(2, 3, 64, 64), place_centres(64, 64)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        loss = detection_loss(model(images), centres, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
