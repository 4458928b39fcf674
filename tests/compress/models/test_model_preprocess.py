"""How samples become inputs, as a model's folder says it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_specs import DIGITS_SPEC, TEXT_FEEDS, changed_config, text_spec

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models.feeds import feeds_shapes
from compress.models.preprocess import resolve_preprocess
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.encode.preprocess import ImagePreprocess, TensorPreprocess, TextPreprocess


def write_json(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))


def test_text_preprocessing_comes_from_the_folder(bert: Path, tmp_path: Path) -> None:
    folder = changed_config(bert, tmp_path / "st")
    spec = text_spec(folder, "feature-extraction")
    assert resolve_preprocess(locate(spec, Path()), None) == TextPreprocess(max_length=64)
    write_json(folder, tokenizer_config={"model_max_length": 1e30})
    assert resolve_preprocess(locate(spec, Path()), None) == TextPreprocess(max_length=64)
    write_json(
        folder,
        tokenizer_config={"model_max_length": 60},
        sentence_bert_config={"max_seq_length": 32},
        modules=[{"path": "", "type": "x.models.Transformer"}, {"path": "1_Pooling", "type": "x.models.Pooling"}],
        **{"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
    )
    assert resolve_preprocess(locate(spec, Path()), None) == TextPreprocess(
        max_length=32, pooling="cls", normalize=False
    )
    write_json(folder, **{"1_Pooling__config": {"pooling_mode_weightedmean_tokens": True}})
    with pytest.raises(SourceError, match="pooling weightedmean_tokens is not one of mean, cls, max"):
        resolve_preprocess(locate(spec, Path()), None)
    write_json(folder, modules=[{"path": "2_Dense", "type": "x.models.Dense"}])
    with pytest.raises(SourceError, match="Dense cannot be taken along"):
        resolve_preprocess(locate(spec, Path()), None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"size": {"height": 16, "width": 20}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3},
            ImagePreprocess(resize=(16, 20), mean=(0.5,) * 3, std=(0.25,) * 3, resample="bicubic"),
        ),
        (
            {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 16, "width": 16}}
            | {"do_normalize": False, "do_rescale": False},
            ImagePreprocess(resize=32, crop=(16, 16), scale=1.0),
        ),
        ({"size": 16, "do_normalize": False}, ImagePreprocess(resize=(16, 16))),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "do_normalize": False},
            ImagePreprocess(resize=256, crop=(224, 224)),
        ),
    ],
)
def test_image_preprocessing_comes_from_the_folder(vit: Path, tmp_path: Path, config: Any, expected: Any) -> None:
    folder = changed_config(vit, tmp_path / "vit")
    write_json(folder, preprocessor_config=config)
    assert (
        resolve_preprocess(locate(ModelSpec(source=f"dir:{folder}", task="image-classification"), Path()), None)
        == expected
    )


def test_images_each_of_another_size_are_refused_with_the_way_out(vit: Path, tmp_path: Path) -> None:
    folder = changed_config(vit, tmp_path / "vit")
    write_json(folder, preprocessor_config={"size": {"shortest_edge": 800, "longest_edge": 1333}})
    with pytest.raises(SourceError, match=r"makes each image of another size.*letterbox: \[1333, 1333\]"):
        resolve_preprocess(locate(ModelSpec(source=f"dir:{folder}", task="image-classification"), Path()), None)


def test_preprocessing_that_is_not_told_or_does_not_fit(bert: Path, vit: Path, tmp_path: Path) -> None:
    images = ModelSpec(source=f"dir:{vit}", task="image-classification")
    no_tokenizer = changed_config(bert, tmp_path / "bare")
    (no_tokenizer / "tokenizer.json").unlink()
    cases: list[tuple[ModelSpec, Any, str]] = [
        (images, None, "has no preprocessor_config.json"),
        (DIGITS_SPEC, None, "does not say how its inputs are made.*kind: image"),
        (images, TextPreprocess(), "kind: text does not fit the task image-classification"),
        (text_spec(bert), ImagePreprocess(), "kind: image does not fit the task text-classification"),
        (text_spec(bert, "feature-extraction"), TensorPreprocess(), "needs kind: text"),
        (text_spec(bert, "text-generation"), TensorPreprocess(), "kind: tensor does not fit.*; use kind: language"),
        (text_spec(bert), TextPreprocess(max_length=65), "max_length 65 is more than the model's 64 positions"),
        (text_spec(no_tokenizer), None, "has no tokenizer.json; write one with AutoTokenizer"),
    ]
    for spec, declared, message in cases:
        with pytest.raises(SourceError, match=message):
            resolve_preprocess(locate(spec, Path()), declared)
    assert resolve_preprocess(locate(DIGITS_SPEC, Path()), ImagePreprocess(channels="L")) == ImagePreprocess(
        channels="L"
    )


def test_feeds_follow_the_preprocessing(bert: Path, vit: Path) -> None:
    shapes = feeds_shapes(
        locate(text_spec(bert), Path()), TextPreprocess(max_length=16), {"text": ((), "text")}, [*TEXT_FEEDS]
    )
    assert shapes == TEXT_FEEDS
    spec = ModelSpec(source=f"dir:{vit}", task="image-classification")
    sample: SampleShapes = {"image": ((40, 60, 3), "uint8")}
    for preprocess, shape in {
        ImagePreprocess(): (3, 40, 60),
        ImagePreprocess(resize=20): (3, 20, 30),
        ImagePreprocess(resize=20, crop=(16, 16), layout="NHWC"): (16, 16, 3),
        ImagePreprocess(channels="L"): (1, 40, 60),
    }.items():
        assert feeds_shapes(locate(spec, Path()), preprocess, sample, ["pixel_values"]) == {
            "pixel_values": (shape, "float32")
        }
    with pytest.raises(SourceError, match="the size of the images is not known"):
        feeds_shapes(locate(spec, Path()), ImagePreprocess(), {}, ["pixel_values"])


def test_preprocessing_and_digest_need_no_torch(bert: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from compress.recipe.schema import ModelSpec\n"
        "from compress.models.preprocess import resolve_preprocess\n"
        "from compress.models.source import locate, model_digest\n"
        f"source = locate(ModelSpec(source='dir:{bert}', task='text-classification'), Path())\n"
        "resolve_preprocess(source, None); model_digest(source)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
