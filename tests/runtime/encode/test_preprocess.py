"""Preprocessing against slow, obvious references: Pillow image by image, tokens one text at a time, means in a loop."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.bundle.tensors import TensorSpec
from runtime.encode.images import compute_resized
from runtime.encode.preprocess import (
    ImagePreprocess,
    Preprocessor,
    TensorPreprocess,
    TextPreprocess,
    make_preprocessor,
    pool,
    spec_from_dict,
    spec_to_dict,
)
from runtime.errors import BundleError, UsageError

FREE = TensorSpec("x", "float32", ("batch", 3, "height", "width"))


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encode(spec: ImagePreprocess, images: Any, tensor: TensorSpec = FREE, rows: Any = None) -> np.ndarray:
    return make_preprocessor(spec, (tensor,)).encode({"image": images}, rows)[tensor.name]


def reference(image: Image.Image, spec: ImagePreprocess) -> np.ndarray:
    """One image, with Pillow for every step and a loop over channels: [C, H, W]."""
    image = image.convert(spec.channels)
    width, height = image.size
    if isinstance(spec.resize, int):
        short = min(width, height)
        w, h = (spec.resize if side == short else int(spec.resize * side / short) for side in (width, height))
        image = image.resize((w, h), Image.Resampling[spec.resample.upper()])
    elif spec.resize is not None:
        image = image.resize(spec.resize[::-1], Image.Resampling[spec.resample.upper()])
    if spec.crop is not None:
        width, height = image.size
        top, left = (  # torchvision's rounding, which differs for a smaller image
            round((have - want) / 2) if have > want else -((want - have) // 2)
            for have, want in zip((height, width), spec.crop, strict=True)
        )
        image = image.crop((left, top, left + spec.crop[1], top + spec.crop[0]))  # black where it reaches outside
    values = np.asarray(image, np.float32).reshape(image.size[1], image.size[0], -1)
    channels = []
    for c in range(values.shape[2]):
        mean, std = spec.mean[c % len(spec.mean)], spec.std[c % len(spec.std)]
        channels.append((values[:, :, c] * np.float32(spec.scale) - np.float32(mean)) / np.float32(std))
    return np.stack(channels)


SIDES, SEEDS = st.integers(1, 20), st.integers(0, 2**32 - 1)
NUMBERS = st.floats(-2, 2)


@st.composite
def image_specs(draw: st.DrawFn) -> ImagePreprocess:
    """Any way to make an image the model's, to sides of at most 20 pixels."""
    channels = draw(st.sampled_from(["RGB", "L"]))
    numbers = st.sampled_from([1, 3 if channels == "RGB" else 1])
    n_means, n_stds = draw(numbers), draw(numbers)
    return ImagePreprocess(
        resize=draw(st.none() | SIDES | st.tuples(SIDES, SIDES)),
        crop=draw(st.none() | st.tuples(SIDES, SIDES)),
        channels=channels,
        scale=draw(st.sampled_from([1 / 255, 1 / 127.5, 1.0])),
        mean=tuple(draw(st.lists(NUMBERS, min_size=n_means, max_size=n_means))),
        std=tuple(draw(st.lists(st.floats(0.1, 2), min_size=n_stds, max_size=n_stds))),
        resample=draw(st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"])),
    )


@settings(max_examples=80)
@given(image_specs(), SIDES, SIDES, st.sampled_from([(), (1,), (3,), (4,)]), SEEDS)
@example(spec=ImagePreprocess(resize=7, crop=(6, 5), resample="nearest"), height=14, width=11, channels=(3,), seed=0)
def test_images_are_what_pillow_makes_of_them(
    spec: ImagePreprocess, height: int, width: int, channels: tuple[int, ...], seed: int
) -> None:
    assume(channels or width not in (3, 4))  # a batch of one such image could as well be an image in colour
    image = pixels(height, width, *channels, seed=seed)
    pillow = Image.fromarray(image[..., 0] if channels == (1,) else image)
    tensor = replace(FREE, shape=("batch", spec.n_channels, "h", "w"))
    expected = reference(pillow, spec)
    for images in (image[None], [image], [pillow]):
        np.testing.assert_array_equal(encode(spec, images, tensor)[0], expected)
    nhwc = encode(replace(spec, layout="NHWC"), [image], replace(FREE, shape=("b", "h", "w", spec.n_channels)))
    np.testing.assert_array_equal(nhwc[0], expected.transpose(1, 2, 0))


@given(*[st.integers(1, 4096)] * 3)
@example(height=1, width=999, short=256)
def test_the_shorter_side_becomes_what_was_asked_for(height: int, width: int, short: int) -> None:
    found = compute_resized(height, width, short)
    assert min(found) == short and found == compute_resized(width, height, short)[::-1]
    assert max(found) == short * max(height, width) // min(height, width)


def test_batch_is_its_images_one_by_one() -> None:
    images = pixels(6, 9, 7, 3)
    whole = encode(ImagePreprocess(), images)
    np.testing.assert_array_equal(
        whole, np.concatenate([encode(ImagePreprocess(), images[i : i + 1]) for i in range(6)])
    )
    np.testing.assert_array_equal(encode(ImagePreprocess(), images, rows=slice(2, 4)), whole[2:4])
    np.testing.assert_array_equal(encode(ImagePreprocess(), images, rows=np.array([5, 0])), whole[[5, 0]])
    np.testing.assert_array_equal(encode(ImagePreprocess(), list(images), rows=np.array([5, 0])), whole[[5, 0]])
    assert whole.flags.c_contiguous


def test_image_dtypes() -> None:
    images = pixels(2, 4, 4, 3)
    raw = encode(ImagePreprocess(scale=1), images, replace(FREE, dtype="uint8"))
    assert raw.dtype == np.uint8
    np.testing.assert_array_equal(raw, images.transpose(0, 3, 1, 2))
    half = encode(ImagePreprocess(), images, replace(FREE, dtype="float16"))
    np.testing.assert_array_equal(half, (images.transpose(0, 3, 1, 2) * np.float32(1 / 255)).astype(np.float16))


def test_files_are_read_upright(tmp_path: Path) -> None:
    image = pixels(5, 8, 3)
    Image.fromarray(image).save(tmp_path / "plain.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees to look at it
    Image.fromarray(np.rot90(image).copy()).save(tmp_path / "turned.png", exif=exif)
    out = encode(ImagePreprocess(), [tmp_path / "plain.png", str(tmp_path / "turned.png")])
    np.testing.assert_array_equal(out[0], reference(Image.fromarray(image), ImagePreprocess()))
    np.testing.assert_array_equal(out[0], out[1])


def test_a_long_thin_image_does_not_become_a_thousand_times_larger() -> None:
    spec = ImagePreprocess(resize=256, crop=(224, 224))
    assert encode(spec, [np.zeros((1, 32, 3), np.uint8)]).shape == (1, 3, 224, 224)
    with pytest.raises(UsageError, match=r"image 0: 1x1000 becomes 256x256000 .* differ by at most 32 times"):
        encode(spec, [np.zeros((1, 1000, 3), np.uint8)])


def test_images_of_the_right_size_need_no_pillow() -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import numpy as np\n"
        "from runtime.bundle.tensors import TensorSpec\n"
        "from runtime.errors import MissingDependency\n"
        "from runtime.encode.preprocess import ImagePreprocess, make_preprocessor\n"
        "def run(size, **spec):\n"
        "    x = TensorSpec('x', 'float32', ('b', 3, 8, 8))\n"
        "    images = np.zeros((2, size, size, 3), np.uint8)\n"
        "    make_preprocessor(ImagePreprocess(**spec), (x,)).encode({'image': images})\n"
        "run(8); run(8, resize=8); run(8, resize=(8, 8), crop=(8, 8)); run(12, crop=(8, 8))\n"
        "try:\n    run(12, resize=8)\n"
        "except MissingDependency as error:\n    assert 'pip install pillow' in str(error), error\n"
        "else:\n    raise SystemExit('resized without Pillow')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NOT_IMAGES = [
    (np.zeros((2, 8, 8, 3), np.float32), "image 0: pixels are float32; give uint8"),
    (np.zeros((2, 3, 8, 8), np.uint8), r"has 8 channels, not 1, 3 or 4; channels come last: transpose it"),
    (np.zeros((2, 8, 8, 2), np.uint8), r"image 0: shape \(8, 8, 2\) has 2 channels, not 1, 3 or 4$"),
    (np.zeros((8, 8, 3), np.uint8), r"one image, not a batch; give image\[None\] or a list"),
    (np.zeros((0, 8, 8, 3), np.uint8), "column 'image' holds no samples"),
    (
        np.zeros((2, 9, 7, 3), np.uint8),
        r"images are 9x7 after preprocessing, .* takes 8x8 .*: set preprocess.resize: \[8, 8\], or crop",
    ),
    ([], "column 'image' holds no samples"),
    (["no such file.png"], "image 0: no such file.png cannot be read as an image"),
    ([pixels(8, 8, 3), 5], "image 1: expected a uint8 array, a path or a Pillow image, found int"),
    ([pixels(8, 8, 3), pixels(8, 9, 3)], "differ in size after preprocessing \\(8x8, 8x9\\): set resize"),
    ([pixels(8)], r"image 0: shape \(8,\); an image is \[height, width\]"),
    ([Image.new("I;16", (8, 8))], "image 0: mode I;16 has more than 8 bits a channel"),
]


@pytest.mark.parametrize(("images", "message"), NOT_IMAGES)
def test_what_is_not_an_image(images: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(ImagePreprocess(), images, TensorSpec("x", "float32", ("b", 3, 8, 8)))


def test_text_where_an_image_is_expected() -> None:
    with pytest.raises(UsageError, match="column 'image' is missing; the samples have: text"):
        make_preprocessor(ImagePreprocess(), (FREE,)).encode({"text": ["a cat"]})


@pytest.mark.parametrize(
    ("inputs", "spec", "message"),
    [
        ((FREE, FREE), ImagePreprocess(), "image preprocessing feeds one input of 4 dimensions; the model has x"),
        (
            (replace(FREE, shape=("b", 1, 8, 8)),),
            ImagePreprocess(),
            "has 1 channels in layout NCHW, but channels: RGB makes 3",
        ),
        ((FREE,), ImagePreprocess(layout="NHWC"), None),
        ((replace(FREE, dtype="uint8"),), ImagePreprocess(), "takes uint8 pixels as they are: set scale: 1"),
        ((replace(FREE, dtype="int64"),), ImagePreprocess(), "is int64; images can be made uint8 or floating-point"),
        ((FREE,), TextPreprocess(), "texts make input_ids, attention_mask, token_type_ids, but the model takes x"),
        (
            (TensorSpec("input_ids", "int64", ("b", 64)),),
            TextPreprocess(),
            "max_length is 128, but the model takes 64 tokens",
        ),
        (
            (TensorSpec("input_ids", "int64", ("b", "t")),),
            TextPreprocess(),
            "reads a tokenizer: give the model's folder",
        ),
    ],
)
def test_spec_that_cannot_feed_the_model(inputs: Any, spec: Any, message: str | None) -> None:
    if message is None:
        make_preprocessor(spec, inputs)
        return
    with pytest.raises(UsageError, match=message):
        make_preprocessor(spec, inputs)


# specs


TEXT_SPECS = st.builds(
    TextPreprocess,
    max_length=st.integers(1, 2**20),
    padding=st.sampled_from(["longest", "max_length"]),
    pooling=st.sampled_from(["mean", "cls", "max", "none"]),
    normalize=st.booleans(),
)


@given(image_specs() | TEXT_SPECS | st.just(TensorPreprocess()))
def test_spec_through_json(spec: Any) -> None:
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"preprocess\.kind: None is not one of image, "),
        ({"kind": "image", "size": 3}, r"preprocess\.size: unknown key; known: kind, resize"),
        ({"kind": "image", "resize": 0}, "must be at least 1 pixel"),
        ({"kind": "image", "mean": [1, 2]}, r"mean is \(1.0, 2.0\): give 1 or 3 numbers for RGB images"),
        ({"kind": "image", "std": [0]}, r"std is \(0.0,\): give numbers of at least 1e-12"),
        ({"kind": "text", "max_length": 0}, "max_length is 0, below 1"),
        (
            {"kind": "text", "tokenizer": "../t.json"},
            "tokenizer is '../t.json': give the name of a file inside the model's folder",
        ),
        ({"kind": "text", "normalize": 1}, r"preprocess\.normalize: expected true or false, found a whole number"),
    ],
)
def test_spec_that_is_wrong(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_dict(data)


# texts


def text_encoder(folder: Path, names: str = "input_ids attention_mask token_type_ids", **spec: Any) -> Preprocessor:
    inputs = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names.split())
    return make_preprocessor(TextPreprocess(**spec), inputs, folder)


def test_texts_token_by_token(tmp_path: Path, tiny: Any) -> None:
    texts = ["the cat sat on the mat", "dog", ""]
    feeds = text_encoder(tiny.write_tokenizer(tmp_path), max_length=6).encode({"text": texts})
    for row, text in enumerate(texts):
        words = [2, *[tiny.words.index(word) for word in text.split()][:4], 3]
        padding = 6 - len(words)
        assert feeds["input_ids"][row].tolist() == words + [0] * padding
        assert feeds["attention_mask"][row].tolist() == [1] * len(words) + [0] * padding
    assert not feeds["token_type_ids"].any()
    assert feeds["input_ids"].dtype == np.int64


def test_a_pair_is_read_jointly_and_the_longer_text_is_cut(tmp_path: Path, tiny: Any) -> None:
    encoder = text_encoder(tiny.write_tokenizer(tmp_path), max_length=7)
    feeds = encoder.encode({"text": ["the cat sat on"], "text_pair": ["dog"]})
    assert feeds["input_ids"].tolist() == [[2, 4, 5, 6, 3, 9, 3]]
    assert feeds["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def test_widths(tmp_path: Path, tiny: Any) -> None:
    folder, columns = tiny.write_tokenizer(tmp_path), {"text": ["cat", "the cat sat"]}
    assert text_encoder(folder).encode(columns)["input_ids"].shape == (2, 5)  # not the file's 99, nor its truncation
    assert text_encoder(folder).encode(columns, slice(0, 1))["input_ids"].shape == (1, 3)
    assert text_encoder(folder, padding="max_length", max_length=9).encode(columns)["input_ids"].shape == (2, 9)
    fixed = (TensorSpec("input_ids", "int32", ("batch", 8)),)
    feeds = make_preprocessor(TextPreprocess(max_length=8), fixed, folder).encode(columns)
    assert list(feeds) == ["input_ids"]
    assert feeds["input_ids"].shape == (2, 8)
    assert feeds["input_ids"].dtype == np.int32


def test_padding_token_and_side_from_the_configuration(tmp_path: Path, tiny: Any) -> None:
    config = {"pad_token": {"content": "far"}, "padding_side": "left", "truncation_side": "left"}
    encoder = text_encoder(tiny.write_tokenizer(tmp_path, padding=False, config=config), max_length=5)
    feeds = encoder.encode({"text": ["dog", "the cat sat on"]})
    assert feeds["input_ids"].tolist() == [[11, 11, 2, 9, 3], [2, 5, 6, 7, 3]]
    assert feeds["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_texts_that_cannot_be_encoded(tmp_path: Path, tiny: Any) -> None:
    encoder = text_encoder(tiny.write_tokenizer(tmp_path / "a"))
    with pytest.raises(UsageError, match="column 'text', sample 1: expected a text, found int"):
        encoder.encode({"text": ["a", 3]})
    with pytest.raises(UsageError, match="column 'text' is missing; the samples have: image"):
        encoder.encode({"image": pixels(1, 2, 2, 3)})
    with pytest.raises(UsageError, match="column 'text' holds no samples"):
        encoder.encode({"text": []})
    with pytest.raises(UsageError, match="max_length 3 leaves no room for a text: the tokenizer adds 3 tokens"):
        text_encoder(tmp_path / "a", max_length=3)
    bare = text_encoder(tiny.write_tokenizer(tmp_path / "b", padding=False))
    assert bare.encode({"text": ["dog", "cat"]})["input_ids"].shape == (2, 3)
    with pytest.raises(
        BundleError, match=r"tokenizer.json names no padding token, .* set pad_token in tokenizer_config.json"
    ):
        bare.encode({"text": ["dog", "the cat"]})


def test_tokenizer_that_cannot_be_read(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(BundleError, match=r"tokenizer.json: the tokenizer cannot be read: No such file"):
        text_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="not a tokenizer of the tokenizers library"):
        text_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"single_word":' * (2**16 + 1))
    with pytest.raises(BundleError, match="adds 65537 tokens to its vocabulary, and 65536 are the most"):
        text_encoder(tmp_path)
    tiny.write_tokenizer(tmp_path)
    for content, message in (("{", "cannot be read"), ("[]", "expected a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(BundleError, match=message):
            text_encoder(tmp_path)


@given(st.sampled_from(["mean", "cls", "max"]), st.lists(st.integers(1, 6), min_size=1), *[st.booleans()] * 2, SEEDS)
def test_pooling_in_a_loop(pooling: Any, lengths: list[int], left: bool, normalize: bool, seed: int) -> None:
    hidden = np.random.default_rng(seed).normal(size=(len(lengths), 6, 3)).astype(np.float32) - 5
    mask = np.array([[1] * n + [0] * (6 - n) for n in lengths])[:, :: -1 if left else 1]
    out = pool(hidden, mask, TextPreprocess(pooling=pooling, normalize=normalize))
    for i in range(len(lengths)):
        tokens = [hidden[i, t].astype(float) for t in range(6) if mask[i, t]]
        expected: Any = {"mean": sum(tokens) / len(tokens), "cls": tokens[0], "max": np.max(tokens, axis=0)}[pooling]
        if normalize:
            expected = expected / math.sqrt(sum(v * v for v in expected))
        np.testing.assert_allclose(out[i], expected, rtol=1e-5)
    assert out.dtype == np.float32


def test_large_values_are_normalised_and_not_zeroed() -> None:
    hidden = np.array([[[3e30, 4e30]], [[3.0, 4.0]]], np.float32)
    assert pool(hidden, np.ones((2, 1)), TextPreprocess(pooling="cls")) == pytest.approx(np.tile([0.6, 0.8], (2, 1)))
    lost = pool(np.array([[[np.inf, 1.0]]], np.float32), np.ones((1, 1)), TextPreprocess(pooling="mean"))
    assert np.isnan(lost).any()


def test_pooling_none_takes_what_is_pooled() -> None:
    vectors = np.array([[3, 4], [0, 0]], np.float32)
    out = pool(vectors, np.ones((2, 1)), TextPreprocess(pooling="none"))
    np.testing.assert_allclose(out, np.array([[0.6, 0.8], [0, 0]]))
    with pytest.raises(UsageError, match=r"pooling: none needs an output of 2 dimensions, the model's has \(2, 1, 2\)"):
        pool(vectors[:, None], np.ones((2, 1)), TextPreprocess(pooling="none"))


# tensors


def test_tensors_pass_in_the_models_dtype() -> None:
    inputs = (TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "int64", ("batch",)))
    encoder = make_preprocessor(TensorPreprocess(), inputs)
    a = np.arange(6, dtype=np.float64).reshape(3, 2)
    feeds = encoder.encode({"a": a, "b": [1, 2, 3], "label": [0, 0, 0]}, slice(1, None))
    assert {name: array.dtype.name for name, array in feeds.items()} == {"a": "float32", "b": "int64"}
    np.testing.assert_array_equal(feeds["a"], a[1:])
    with pytest.raises(UsageError, match="column 'b' holds float64, but the model's input is int64"):
        encoder.encode({"a": a, "b": [0.5, 1, 2]})
    with pytest.raises(UsageError, match=r"column 'a' has shape \(3, 3\), but the model's input is \('batch', 2\)"):
        encoder.encode({"a": np.zeros((3, 3)), "b": [1, 2, 3]})
    with pytest.raises(UsageError, match="column 'b' is missing; the samples have: a"):
        encoder.encode({"a": a})
    with pytest.raises(UsageError, match="column 'a' holds <U1"):
        encoder.encode({"a": ["x"], "b": [1]})
