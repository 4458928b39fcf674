"""Data sets: every format gives the same samples, rows are drawn reproducibly, and each refusal says what is wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.data import DataFacts, Samples, inspect_data, load_samples, overlap
from compress.errors import SourceError
from compress.specs import DataSpec

TEXTS = ["one", "two, with a comma", 'three "quoted"', "vier: ä"]
LABELS = [0, 1, 1, 0]


def load(
    source: str, root: Path, task: str = "text-classification", inputs: tuple[str, ...] = (), **spec: Any
) -> Samples:
    spec_only = {key: value for key, value in spec.items() if key in DataSpec.model_fields}
    rest = {key: value for key, value in spec.items() if key not in spec_only}
    return load_samples(DataSpec(source=source, **spec_only), root, task, inputs, seed=0, **rest)


def inspect(source: str, root: Path, task: str = "text-classification", **spec: Any) -> DataFacts:
    return inspect_data(DataSpec(source=source, **spec), root, task, ())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 6, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", image=pixels, label=np.arange(10) % 3)
    return tmp_path


# ---- formats -------------------------------------------------------------------------------------------------------


def write_text_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The same four texts in every format; source -> further keys of its DataSpec."""
    rows = list(zip(TEXTS, LABELS, strict=True))
    quoted = [(text.replace('"', '""'), label) for text, label in rows]
    (folder / "a.csv").write_text("text,label\n" + "".join(f'"{t}",{n}\n' for t, n in quoted), encoding="utf-8")
    (folder / "a.tsv").write_text("".join(f"{t}\t{n}\n" for t, n in rows), encoding="utf-8")
    lines = [json.dumps({"text": t, "label": n}) for t, n in rows]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    np.savez(folder / "a.npz", text=np.array(TEXTS), label=np.array(LABELS))
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": TEXTS, "label": LABELS}), folder / "a.parquet")
    no_header: dict[str, Any] = {"columns": {"text": 0, "label": 1}, "quoting": False}
    named: dict[str, Any] = {"names": ("text", "label"), "quoting": False}
    return {"csv:a.csv": {}, "tsv:a.tsv": no_header, "csv:a.tsv": {"separator": "\t", **named}} | {
        f"{kind}:a.{kind}": {} for kind in ("jsonl", "npz", "parquet")
    }


def test_all_formats_give_the_same_samples(tmp_path: Path) -> None:
    found = {source: load(source, tmp_path, **spec) for source, spec in write_text_files(tmp_path).items()}
    for source, samples in found.items():
        assert samples.columns["text"] == TEXTS, source
        assert samples.columns["label"].dtype == np.int64, source
        assert samples.columns["label"].tolist() == LABELS, source
    assert len({samples.digest for samples in found.values()}) == 1
    assert len({samples.row_digests for samples in found.values()}) == 1


def test_inspect_agrees_with_load(tmp_path: Path) -> None:
    for source, spec in write_text_files(tmp_path).items():
        facts = inspect(source, tmp_path, **spec)
        path = tmp_path / source.partition(":")[2]
        assert (facts.n_rows, facts.n_samples, facts.n_bytes) == (4, 4, path.stat().st_size)
        assert facts.shapes == {"text": ((), "text"), "label": ((), "int64")}
        assert facts.digest == hashlib.sha256(path.read_bytes()).hexdigest()
        assert facts.has_labels


def test_text_file_is_one_sample_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n  two\nthree")
    assert load("text:a.txt", tmp_path).columns == {"text": ["one", "  two", "three"]}


def test_image_folder_matches_the_same_pixels_in_npz_and_parquet(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    for i, name in enumerate(["cat/0", "cat/1", "dog/0", "dog/1"]):
        (tmp_path / "im" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[i]).save(tmp_path / "im" / f"{name}.png")
    np.savez(tmp_path / "im.npz", image=pixels, label=[0, 0, 1, 1])
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["cat", "dog"])})
    rows = {"image": [Image.fromarray(p) for p in pixels], "label": [0, 0, 1, 1]}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "im.parquet"))
    found = [load(s, tmp_path, "image-classification") for s in ("imagefolder:im", "npz:im.npz", "parquet:im.parquet")]
    for samples in found:
        np.testing.assert_array_equal(samples.columns["image"], pixels)
        assert samples.columns["label"].tolist() == [0, 0, 1, 1]
    assert len({samples.digest for samples in found}) == 1


def test_folder_names_follow_the_models_class_order(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "im" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "im" / name / "0.png")
    samples = load("imagefolder:im", tmp_path, "image-classification", class_names=("dog", "cat"))
    assert samples.columns["label"].tolist() == [1, 0]
    with pytest.raises(SourceError, match="the file's classes cat, dog are not all among the model's, dog, bird"):
        load("imagefolder:im", tmp_path, "image-classification", class_names=("dog", "bird"))


def test_images_of_different_sizes_stay_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for width in (3, 4):
        (tmp_path / "im" / "x").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, 5)).save(tmp_path / "im" / "x" / f"{width}.png")
    column = load("imagefolder:im", tmp_path, "image-classification").columns["image"]
    assert [image.shape for image in column] == [(5, 3, 3), (5, 4, 3)]
    assert capsys.readouterr().err == "", "no bars of another library"


def test_ragged_rows_are_fine_without_a_header_and_refused_with_one(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\t0.5\nb\t1.5\tmore\textra\n")
    samples = load("tsv:a.tsv", tmp_path, "feature-extraction", columns={"text": 0, "label": 1})
    assert samples.columns["text"] == ["a", "b"]
    assert samples.columns["label"].tolist() == [0.5, 1.5]
    (tmp_path / "b.csv").write_text("text,label\nwell, then,1\n")
    with pytest.raises(SourceError, match=r"b\.csv: line 2 has 3 fields"):
        load("csv:b.csv", tmp_path)
    with pytest.raises(SourceError, match=r"a\.tsv: line 1 has 2 fields, but column 'note' needs 3"):
        load("tsv:a.tsv", tmp_path, names=("text", "label", "note"), columns={"text": "note"})


def test_generic_inputs_are_columns_of_their_names(tmp_path: Path) -> None:
    a, b = np.ones((5, 3), np.float32), np.arange(5)
    np.savez(tmp_path / "g.npz", a=a, b=b, label=np.zeros(5))
    samples = load("npz:g.npz", tmp_path, "generic", ("a", "b"))
    assert samples.columns["a"].dtype == np.float32
    assert set(samples.columns) == {"a", "b", "label"}
    (tmp_path / "g.csv").write_text("a,b\n1.5,2\n2.5,3\n")
    assert load("csv:g.csv", tmp_path, "generic", ("a", "b")).columns["a"].tolist() == [1.5, 2.5]


def test_a_local_hub_data_set_needs_a_split(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(SourceError, match="name the split"):
        load(f"hf:{tmp_path}/set", tmp_path)


# ---- drawing -------------------------------------------------------------------------------------------------------


def test_a_whole_set_keeps_the_files_order(images: Path) -> None:
    with np.load(images / "images.npz") as file:
        np.testing.assert_array_equal(
            load("npz:images.npz", images, "image-classification").columns["image"], file["image"]
        )


def test_skip_and_samples_split_a_file_without_overlap(images: Path) -> None:
    whole = load("npz:images.npz", images, "image-classification")
    first = load("npz:images.npz", images, "image-classification", samples=4)
    rest = load("npz:images.npz", images, "image-classification", skip=4)
    assert (first.n, rest.n) == (4, 6)
    assert overlap(first, rest) == overlap(rest, first) == 0
    assert overlap(whole, rest) == 6
    assert overlap(rest, whole) == 6
    assert sorted(first.row_digests + rest.row_digests) == sorted(whole.row_digests)


def test_draws_depend_on_the_seed_alone(images: Path) -> None:
    def rows(**spec: Any) -> tuple[str, ...]:
        return load("npz:images.npz", images, "image-classification", samples=5, **spec).row_digests

    assert rows() == rows() == rows(seed=0)  # the recipe's seed is 0 here
    assert rows() != rows(seed=1)
    assert rows(shuffle=False) == load("npz:images.npz", images, "image-classification").row_digests[:5]


def test_row_digests_ignore_labels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,0\na,1\nb,0\n")
    samples = load("csv:a.csv", tmp_path)
    assert samples.row_digests[0] == samples.row_digests[1] != samples.row_digests[2]


# ---- labels --------------------------------------------------------------------------------------------------------


def test_label_names_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,neg\nb,pos\n")
    assert load("csv:a.csv", tmp_path, class_names=("pos", "neg")).columns["label"].tolist() == [1, 0]
    with pytest.raises(SourceError, match=r"line 2: label 'neg' is neither a number nor one of the class names"):
        load("csv:a.csv", tmp_path)


def test_labels_are_checked(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", text=np.array(["a", "b", "c"]), label=np.array([0, 3, 1]), half=np.array([0, 0.5, 1]))
    np.savez(tmp_path / "b.npz", text=np.array(["a"]), label=np.array([[1]]))
    assert load("npz:a.npz", tmp_path, n_classes=4).columns["label"].tolist() == [0, 3, 1]
    with pytest.raises(SourceError, match=r"column 'label', row 1: label 3 is not in 0\.\.2"):
        load("npz:a.npz", tmp_path, n_classes=3)
    with pytest.raises(SourceError, match=r"row 1: label 0\.5 is not a class number"):
        load("npz:a.npz", tmp_path, columns={"text": "text", "label": "half"})
    with pytest.raises(SourceError, match="one number a row"):
        load("npz:b.npz", tmp_path)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_missing_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "blank.csv").write_text("\n\n")
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "folder").mkdir()
    for source, message in {
        "npz:none.npz": "none.npz: no such file",
        "imagefolder:none": "no such file or folder",
        "csv:empty.csv": "is empty",
        "csv:blank.csv": "only blank lines",
        "csv:header.csv": "holds no samples",
        "csv:folder": "is a folder, a file is needed",
        "imagefolder:folder": "cannot be read as a folder of images",
    }.items():
        with pytest.raises(SourceError, match=message):
            inspect(source, tmp_path, "image-classification" if "imagefolder" in source else "text-classification")


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sentense,lable\na,0\n")
    with pytest.raises(SourceError, match=r"no column for text; the file has: sentense, lable.*no header line"):
        inspect("csv:a.csv", tmp_path)
    with pytest.raises(SourceError) as error:
        inspect("csv:a.csv", tmp_path, columns={"text": "sentence", "lbl": "lable"})
    assert "there is no column 'sentence' (for text); did you mean 'sentense'?" in str(error.value)
    assert "role 'lbl' is not one of text, text_pair, label; did you mean 'label'?" in str(error.value)
    with pytest.raises(SourceError, match=r"there is no column 7 \(for text\): the file has 2"):
        inspect("csv:a.csv", tmp_path, columns={"text": 7})
    with pytest.raises(SourceError, match="no column for text"):
        inspect("csv:a.csv", tmp_path, columns={"label": "lable"})


def test_more_samples_than_there_are(images: Path) -> None:
    with pytest.raises(SourceError, match=r"images\.npz: samples: 8 wanted, but there are 7 of 10 rows after skip: 3"):
        inspect("npz:images.npz", images, "image-classification", samples=8, skip=3)
    with pytest.raises(SourceError, match="skip: 10 passes over all 10 rows"):
        inspect("npz:images.npz", images, "image-classification", skip=10)


def test_nan_is_named_by_column_and_row(tmp_path: Path) -> None:
    x = np.ones((4, 2), np.float32)
    x[2, 1] = np.nan
    np.savez(tmp_path / "x.npz", x=x)
    with pytest.raises(SourceError, match="column 'x', row 2: holds NaN or infinity"):
        load("npz:x.npz", tmp_path, "generic", ("x",))


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", image=np.array([{"a": 1}], dtype=object))
    with pytest.raises(SourceError, match="array 'image' cannot be read"):
        load("npz:p.npz", tmp_path, "image-classification")


def test_float_images_and_differing_lengths(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", image=np.ones((2, 4, 4), np.float32))
    np.savez(tmp_path / "d.npz", image=np.ones((2, 4, 4), np.uint8), label=np.zeros(3, int))
    with pytest.raises(SourceError, match="pixels are float32"):
        inspect("npz:f.npz", tmp_path, "image-classification")
    with pytest.raises(SourceError, match="columns differ in length: image 2, label 3"):
        inspect("npz:d.npz", tmp_path, "image-classification")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("npz:a.npz", b"PK\x03\x04 not a zip", "cannot be read as an npz"),
        ("jsonl:a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: is not JSON"),
        pytest.param("jsonl:a.jsonl", b"[" * 10_000 + b"]" * 10_000, "line 1: is not JSON", id="nested"),
        pytest.param("jsonl:a.jsonl", b"1" * (2**24 + 1), "line 1: has 16777217 characters", id="long"),
        ("jsonl:a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "line 2 has no 'text'"),
        ("jsonl:a.jsonl", b'{"text": "a"}\n{"text": 5}\n', "column 'text', line 2: expected a text, found int"),
        ("jsonl:a.jsonl", b"[1]\n", "line 1: is list; each line must be an object"),
        ("csv:a.csv", b'text\n"open', "line 2: unexpected end of data"),
        ("csv:a.csv", b"text,text\na,b\n", "column names are not distinct"),
        ("csv:a.csv", b"text\n\xff\xfe\n", "is not UTF-8"),
        ("parquet:a.parquet", b"not parquet", "cannot be read as parquet"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name.partition(":")[2]).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        load(name, tmp_path)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "im" / "x").mkdir(parents=True)
    (tmp_path / "im" / "x" / "bad.png").write_bytes(b"\x89PNG no")
    with pytest.raises(SourceError, match=r"column 'image', row 0: .*bad\.png cannot be read as an image"):
        load("imagefolder:im", tmp_path, "image-classification")


def test_paths_are_tried_against_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (("here", "from here"), ("recipe", "from the recipe")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    assert load("text:a.txt", tmp_path / "recipe").columns["text"] == ["from here"]
    (tmp_path / "here" / "a.txt").unlink()
    assert load("text:a.txt", tmp_path / "recipe").columns["text"] == ["from the recipe"]


def test_no_torch_is_imported(images: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from compress.data import load_samples; from compress.recipe.schema import DataSpec\n"
        f"load_samples(DataSpec(source='npz:{images}/images.npz'), Path(), 'image-classification', (), 0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_also_appends_the_samples_of_further_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.tsv", tmp_path / "b.csv"
    first.write_text("one\t1\ntwo\t2\n")
    second.write_text("x,three\ny,four\nz,five\n")
    spec = DataSpec(
        source=f"tsv:{first}",
        columns={"text": 0},
        also=(DataSpec(source=f"csv:{second}", columns={"text": 1}, skip=1, samples=2, shuffle=False),),
    )
    samples = load_samples(spec, tmp_path, "text-generation", [], seed=0)
    facts = inspect_data(spec, tmp_path, "text-generation", [])
    assert samples.columns == {"text": ["one", "two", "four", "five"]} and samples.n == facts.n_samples == 4
    alone = inspect_data(DataSpec(source=f"tsv:{first}", columns={"text": 0}), tmp_path, "text-generation", [])
    assert facts.digest != alone.digest and facts.n_bytes == first.stat().st_size + second.stat().st_size


def test_also_joins_arrays_of_one_shape_and_lists_others(tmp_path: Path) -> None:
    for name, size in (("a", 4), ("b", 4), ("c", 6)):
        np.savez(tmp_path / f"{name}.npz", image=np.zeros((2, size, size, 3), np.uint8), label=np.array([0, 1]))
    even = DataSpec(source="npz:a.npz", also=(DataSpec(source="npz:b.npz"),))
    odd = DataSpec(source="npz:a.npz", also=(DataSpec(source="npz:c.npz"),))
    together = load_samples(even, tmp_path, "image-classification", [], seed=0).columns
    assert together["image"].shape == (4, 4, 4, 3) and together["label"].tolist() == [0, 1, 0, 1]
    apart = load_samples(odd, tmp_path, "image-classification", [], seed=0).columns["image"]
    assert [image.shape[0] for image in apart] == [4, 4, 6, 6]


def test_also_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nhello,1\n")
    (tmp_path / "b.csv").write_text("text\nhello\n")
    spec = DataSpec(source="csv:a.csv", also=(DataSpec(source="csv:b.csv"),))
    for read in (
        lambda: inspect_data(spec, tmp_path, "text-classification", []),
        lambda: load_samples(spec, tmp_path, "text-classification", [], seed=0),
    ):
        with pytest.raises(SourceError, match=r"b\.csv: also: has text, but csv:a\.csv has label, text"):
            read()
