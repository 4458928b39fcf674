"""Data that a program holds: whatever form it has, the file has the same columns, or it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from compress.api.datasets import Reads, write_set
from compress.data.live import check_held, draw_held
from compress.data.table import open_table
from compress.errors import SourceError
from compress.specs import DataSpec

X, Y = torch.arange(60.0).reshape(10, 6), torch.arange(10)


class Rows(Dataset[Any]):
    """A data set of torch's: places and a length, and no iteration."""

    def __init__(self, *columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, place: int) -> Any:
        return tuple(column[place] for column in self.columns)


class Mappings(Rows):
    def __getitem__(self, place: int) -> Any:
        return {"x": X[place], "labels": int(Y[place])}


def samples() -> Iterator[Any]:
    yield from zip(X, Y, strict=True)


def batches() -> Iterator[Any]:
    yield from zip(X.split(4), Y.split(4), strict=True)


def read(spec: Any) -> dict[str, Any]:
    table = open_table(DataSpec.model_validate(spec, strict=False), Path())
    return {name: table.read(name, np.arange(table.lengths[name])) for name in table.names}


def call(inputs: Any) -> None:
    (x,) = inputs
    if x.shape[1:] != (6,):
        raise RuntimeError(f"expected [N, 6], got {list(x.shape)}")


ONE = Reads(("x",), call)
FORMS: dict[str, Any] = {
    "loader": DataLoader(TensorDataset(X, Y), 4),
    "loader of mappings": DataLoader(Mappings(), 4),
    "loader of single samples": DataLoader(TensorDataset(X, Y), None),
    "data set": Rows(X, Y),
    "data set of mappings": Mappings(),
    "list of tuples": list(zip(X.numpy(), Y.tolist(), strict=True)),
    "function of samples": samples,
    "function of batches": batches,
    "columns": {"x": X, "y": Y.numpy()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_file(form: str, tmp_path: Path) -> None:
    spec = write_set(FORMS[form], tmp_path / "set", "data", ONE)
    columns = read(spec)
    assert spec == {"source": f"npz:{tmp_path / 'set'}.npz"} and list(tmp_path.iterdir()) == [tmp_path / "set.npz"]
    np.testing.assert_array_equal(columns["x"], X.numpy())
    np.testing.assert_array_equal(columns["label"], np.arange(10))


def test_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    given = []

    def endless() -> Iterator[Any]:
        while True:
            given.append(1)
            yield X[0], Y[0]

    columns = read(write_set(endless, tmp_path / "set", "data", ONE, most=7))
    assert len(columns["x"]) == 7 == len(given)
    assert len(read(write_set(DataLoader(TensorDataset(X, Y), 4), tmp_path / "s", "data", ONE, most=7))["x"]) == 7


@pytest.mark.parametrize("form", ["loader", "data set", "list of tuples", "columns"])
def test_a_part_of_what_stands_in_order_is_drawn(form: str, tmp_path: Path) -> None:
    labels = read(write_set(FORMS[form], tmp_path / "set", "data", ONE, most=4))["label"]
    assert len(set(labels)) == 4 and max(labels) > 4 and list(labels) == sorted(labels)


@pytest.mark.parametrize(
    "items", [[((X[0], X[1]), Y[0])], [(X[0], X[1], Y[0])], [[X[0], [X[1]], Y[0]]]], ids=["nested", "flat", "lists"]
)
def test_inputs_are_named_as_the_model_does(items: Any, tmp_path: Path) -> None:
    columns = read(write_set(items, tmp_path / "set", "data", Reads(("left", "right"))))
    assert set(columns) == {"left", "right", "label"}
    np.testing.assert_array_equal(columns["right"][0], X[1].numpy())


def test_without_labels(tmp_path: Path) -> None:
    assert set(read(write_set([(x,) for x in X], tmp_path / "a", "data", ONE))) == {"x"}
    assert set(read(write_set(list(X), tmp_path / "b", "data", ONE))) == {"x"}


def test_a_function_says_which_is_which(tmp_path: Path) -> None:
    items = [{"picture": x, "kind": y, "name": "n"} for x, y in zip(X, Y, strict=True)]
    columns = read(write_set(items, tmp_path / "set", "data", ONE, lambda item: (item["picture"], item["kind"])))
    np.testing.assert_array_equal(columns["label"], np.arange(10))


def _collate(pairs: Any) -> Any:
    return torch.stack([image for image, _ in pairs]), [target for _, target in pairs]


def test_boxes_of_a_detector_are_rows(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 4, 4)
    targets = [
        {"boxes": torch.tensor([[0.0, 1.0, 2.0, 3.0]]), "labels": torch.tensor([2])},
        {"boxes": torch.zeros(2, 4), "labels": torch.tensor([0, 1])},
    ]
    pairs: Any = list(zip(images, targets, strict=True))
    for name, loader in (("single", DataLoader(pairs, None)), ("batches", DataLoader(pairs, 2, collate_fn=_collate))):
        columns = read(write_set(loader, tmp_path / name, "data", Reads(("image",))))
        assert columns["label"].tolist() == [[[2, 0, 1, 2, 3], [-1] * 5], [[0] * 5, [1, 0, 0, 0, 0]]]


def test_texts_conversations_and_images(tmp_path: Path) -> None:
    from PIL import Image

    told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pictures = [Image.new("RGB", (size, 2), "red") for size in (3, 4)]
    any_model = Reads()
    assert read(write_set(["one", "two"], tmp_path / "a", "data", any_model)) == {"text": ["one", "two"]}
    assert read(write_set([("one", "uno", 1), ("two", "dos", 0)], tmp_path / "b", "data", any_model)) == {
        "text": ["one", "two"],
        "text_pair": ["uno", "dos"],
        "label": [1, 0],
    }
    assert read(write_set([told, told], tmp_path / "c", "data", any_model))["messages"] == [told, told]
    columns = read(write_set(list(zip(pictures, (0, 1), strict=True)), tmp_path / "d", "data", any_model))
    assert [image.size for image in columns["image"]] == [(3, 2), (4, 2)] and columns["label"] == [0, 1]


def test_a_set_of_datasets_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    given = Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 1]}, features=features)
    spec = write_set(given, tmp_path / "set", "data", Reads(), most=2)
    table = open_table(DataSpec.model_validate(spec, strict=False), Path())
    assert table.label_names == {"label": ("bad", "good")} and table.lengths["text"] == 2


class Augmented(Rows):
    """Each time that a sample is asked for, its values have other noise; its label stays."""

    def __getitem__(self, place: int) -> Any:
        return X[place] + torch.rand(6) + float(np.random.rand()), int(Y[place])


def test_samples_drawn_at_random_are_drawn_anew_where_they_are_learned_from(tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = DataLoader(Augmented(), 4, shuffle=True, drop_last=True)
    spec = write_set(loader, tmp_path / "set", "data", ONE, learned=True)
    assert torch.equal(torch.get_rng_state(), before), "the program's own draws go on as they would have"
    assert isinstance(spec, dict) and write_set(loader, tmp_path / "set", "data", ONE, learned=True) == spec
    kept = read({"source": spec["source"]})
    np.testing.assert_array_equal(kept["label"], np.arange(10), "in the order of the data set, all of it")
    rows = np.array([7, 2, 2])
    first, again, other = (draw_held(spec["redraw"], rows, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["label"], rows)
    np.testing.assert_array_equal(first["x"], again["x"])
    assert (first["x"] != other["x"]).all() and (first["x"][1] != first["x"][2]).all()
    np.testing.assert_allclose(first["x"], X[rows].numpy() + 1, atol=1.0001)
    with pytest.raises(SourceError, match=r"redraw: nobody was given as an object, .* leave `redraw` out"):
        check_held("nobody")


@pytest.mark.parametrize(
    "dataset",
    [DataLoader(TensorDataset(X, Y), 4, shuffle=True), samples, DataLoader(Augmented(), 4, sampler=[3, 1, 1, 0])],
    ids=["always the same", "no places", "an own sampler"],
)
def test_what_is_not_drawn_anew(dataset: Any, tmp_path: Path) -> None:
    spec = write_set(dataset, tmp_path / "set", "data", ONE, learned=True)
    assert isinstance(spec, dict) and set(spec) == {"source"}


def test_what_a_recipe_says_stays(tmp_path: Path) -> None:
    assert write_set(tmp_path, tmp_path / "set", "data", ONE) == str(tmp_path)
    assert write_set("org/name", tmp_path / "set", "data", ONE) == "org/name"
    spec = {"source": "npz:x.npz", "columns": {"x": "a"}}
    assert write_set(spec, tmp_path / "set", "data", ONE) is spec and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dataset", "reads", "says"),
    [
        (5, ONE, "data: a int is no data; give a DataLoader"),
        (iter(()), ONE, "data: gives no samples; give a generator as the function that makes it"),
        (
            [(X[0], X[1], Y[0])],
            ONE,
            "data: an item has 3 parts, and the model reads x; say which is which",
        ),
        ([{"z": X[0]}], ONE, "data: the model reads x, and an item has z, without x"),
        (
            [(X[0][:2], Y[0])],
            ONE,
            "data: the model cannot be called with its first item, x [1, 2] float32: Run",
        ),
        ([(X[0], Y[0]), (X[0],)], ONE, "data: sample 1 has x, the first has x, label"),
        ([(X[0], 0), (X[0][:3], 1)], Reads(("x",)), "data: x is"),
        ([(X[0], Y[0])], Reads(), "data: an item has 2 parts, and what they are is not known"),
        (lambda: iter(X.split(4)), ONE, "data: whether it yields samples or batches cannot be told"),
    ],
    ids=range(9),
)
def test_what_cannot_be_told_is_asked(dataset: Any, reads: Reads, says: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as refused:
        write_set(dataset, tmp_path / "set", "data", reads)
    assert str(refused.value).startswith(says) and list(tmp_path.iterdir()) == []
