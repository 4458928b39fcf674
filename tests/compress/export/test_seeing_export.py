"""Models that also see as two graphs: every greedy token of transformers, with images and without, in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from PIL.Image import fromarray
from seeing import VOCABULARY, write_gemma, write_json, write_llava, write_qwen, write_vip

from compress.data.chat import ChatEncoder
from compress.data.patches import find_loops, find_patches
from compress.data.sight import find_sight
from compress.errors import CompressError, NotExportable, SourceError
from compress.export.decoder import export_decoder, find_states
from compress.export.onnx import finish, save_graph
from compress.export.seeing import place_rows, take_rows
from compress.formats.targets import TARGETS
from compress.graph.seeing import split_sight
from compress.graph.specs import cache_of, input_specs, output_specs
from compress.models.huggingface import build_on_meta, load_trained
from compress.models.language import read_generation
from compress.models.processor import Processor
from compress.models.source import Source, locate
from compress.rounding.state import GraphState
from compress.specs import ChatSpec, ModelSpec
from runtime.backends import BACKENDS, open_model
from runtime.bundle.manifest import PixelOrder
from runtime.decode.generate import Generator, Request
from runtime.decode.kv_cache import Decoder
from runtime.encode.chat import ask_about, take_parts
from runtime.encode.images import ImagePreprocess, batch_pixels, normalize_pixels, order_pixels
from runtime.encode.language import LanguagePreprocess, make_language_encoder
from runtime.errors import UsageError

WIDE = (16, 48)
FAMILIES: dict[str, tuple[Callable[[Path], Path], tuple[int, int] | None]] = {
    "llava": (write_llava, None),
    "vip": (write_vip, None),
    "gemma": (write_gemma, None),
    "qwen": (write_qwen, WIDE),
}
"""How a model is written, and the size that its images are brought to."""
GREEDY, CLOSE = 16, 1e-4


def chats_of(folder: Path, size: tuple[int, int] | None = None) -> ChatEncoder:
    return ChatEncoder(ChatSpec(image_size=size), folder, folder, perceives="image")


def source_of(folder: Path) -> Source:
    return locate(ModelSpec(source=f"dir:{folder}", task="image-text-to-text"), folder)


def load_whole(folder: Path) -> Any:
    return load_trained(source_of(folder)).wrapped


def draw_images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def write_graphs(folder: Path, out: Path, size: tuple[int, int] | None) -> Generator:
    """Write the graphs that a bundle would get of the float model, and open them."""
    sight = find_sight(chats_of(folder, size))
    exported = export_decoder(load_whole(folder), sight=sight)
    check_cut(exported, sight.n_tokens)
    graph, _ = finish(GraphState(exported), TARGETS["onnxruntime-cpu"])
    save_graph(graph, out / "model.onnx")
    assert sorted(path.name for path in out.iterdir()) == ["model.onnx", "vision.onnx"]
    session = open_model(BACKENDS["onnxruntime-cpu"], out / "model.onnx", 1, {})
    encoder = make_language_encoder(LanguagePreprocess(), session.inputs, folder, VOCABULARY)
    decoder = Decoder(session, cache_of(split_sight(graph)[1]))
    return Generator(decoder, encoder, read_generation(folder, VOCABULARY), folder, sight.images)


def check_cut(graph: ir.Model, n_tokens: int) -> None:
    """The first feature is as long as an image has tokens, and neither graph holds the other's weights."""
    vision, decoder = split_sight(graph)
    (pixels, *_), (first, *others) = input_specs(vision), output_specs(vision)
    assert pixels.name == "pixel_values" and (first.name, first.shape[0]) == ("image_features.0", n_tokens)
    read = {spec.name: spec.shape for spec in input_specs(decoder)}
    assert [read[each.name] for each in (first, *others)] == [("features", each.shape[1]) for each in (first, *others)]
    assert "pixel_values" not in read
    assert not vision.graph.initializers.keys() & decoder.graph.initializers.keys()


def next_logits(model: Any, chats: ChatEncoder, turns: list[dict[str, Any]], made: list[int]) -> np.ndarray:
    """The logits after a conversation and what was said since, of transformers' model and processor alone."""
    texts, images = take_parts(turns)
    text = chats.render_prompt(texts)
    if images:
        if chats.chat.image_size is not None:
            images = [np.asarray(fromarray(each).resize(chats.chat.image_size[::-1])) for each in images]
        seen = Processor(chats.folder or Path()).encode(text, images)
        feeds = {name: torch.from_numpy(each) for name, each in seen.items()}
    else:
        feeds = {"input_ids": torch.tensor(chats.tokenizer(text)["input_ids"])}
    ids = torch.cat([feeds.pop("input_ids"), torch.tensor(made, dtype=torch.int64)])[None]
    feeds = {
        name: torch.nn.functional.pad(each, (0, len(made))) if name.endswith("type_ids") else each
        for name, each in feeds.items()
    }
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=ids, **feeds, use_cache=False).logits[0, -1].numpy()
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_greedy_token_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """One text with an image, one with two, and one without, side by side."""
    write, size = FAMILIES[kind]
    folder = write(tmp_path / "lm")
    chats, model = chats_of(folder, size), load_whole(folder)
    generator = write_graphs(folder, tmp_path / "out", size)
    first, second, third = draw_images((20, 33), (40, 24), (300, 200))
    asked = [ask_about([first], "abc"), ask_about([second, third], "de"), ask_about([], "fa b")]
    read = [generator.encode(turns, chat=True) for turns in asked]
    prompts = [ids for ids, _ in read]
    features = generator.decoder.look([image for _, images in read for image in images])
    got = generator.decoder.start(prompts, max(map(len, prompts)) + GREEDY, features)
    made: list[list[int]] = [[] for _ in asked]
    for step in range(GREEDY):
        wanted = np.stack([next_logits(model, chats, turns, tokens) for turns, tokens in zip(asked, made, strict=True)])
        assert np.abs(got - wanted).max() < CLOSE * np.abs(wanted).max(), step
        tokens = wanted.argmax(axis=1)
        assert (got.argmax(axis=1) == tokens).all(), step
        made = [[*row, int(token)] for row, token in zip(made, tokens, strict=True)]
        got = generator.decoder.step(tokens) if step < GREEDY - 1 else got
    ends = generator.settings.eos_token_ids
    answers = generator.generate(asked, Request(chat=True, max_new_tokens=GREEDY))
    for answer, tokens_of_row in zip(answers, made, strict=True):
        end = next((i for i, token in enumerate(tokens_of_row) if token in ends), GREEDY)
        assert list(answer.token_ids) == tokens_of_row[:end]


def test_rows_are_put_where_the_mask_is() -> None:
    """As `masked_scatter` does it; and places without a row of their own stay."""
    random = torch.Generator().manual_seed(0)
    embeddings = torch.randn(2, 5, 3, generator=random)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)[..., None]
    rows = torch.randn(4, 3, generator=random)
    assert torch.equal(place_rows(embeddings, mask, rows), embeddings.masked_scatter(mask, rows))
    assert torch.equal(place_rows(embeddings, mask.expand(2, 5, 3), rows[None]), embeddings.masked_scatter(mask, rows))
    some = place_rows(embeddings, mask, rows[:2])
    assert torch.equal(some[0], embeddings.masked_scatter(mask, rows)[0]) and torch.equal(some[1], embeddings[1])
    assert torch.equal(place_rows(embeddings, mask, rows[:0]), embeddings)
    assert torch.equal(take_rows(embeddings, mask[..., 0], 4), embeddings[mask[..., 0]])
    assert torch.equal(take_rows(embeddings, mask[..., 0], 1), embeddings[mask[..., 0]][:1])


def test_what_a_processor_does_with_an_image_is_found(tmp_path: Path) -> None:
    sight = find_sight(chats_of(write_gemma(tmp_path / "lm")))
    rows = "<|image_pad|>" * 4
    assert sight.images.marker == "<|vision_start|>"
    assert sight.images.text == f"\n\n<|vision_start|>{rows}<|vision_end|>\n\n"
    assert (sight.pixels, sight.n_tokens, sight.marks) == ("pixel_values", 4, ("token_type_ids",))
    assert sight.images.preprocess["resize"] == [32, 32]


def test_positions_that_a_second_image_counts_otherwise_are_refused(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "lm")
    module, _ = build_on_meta(source_of(folder))
    sight, inner = find_sight(chats_of(folder, WIDE)), module.wrapped.model  # type: ignore[union-attr]
    count = inner.get_rope_index  # type: ignore[union-attr]

    def count_images(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        positions, shifts = count(ids, *args, **kwargs)
        return positions + (len(kwargs["image_grid_thw"]) > 1), shifts

    inner.get_rope_index = count_images  # type: ignore[union-attr]
    with pytest.raises(NotExportable, match="positions of its texts depend on their images"):
        find_states(module.wrapped, sight=sight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "said"), [(None, r"set chat.image_size: \[32, 32\]"), ((32, 48), "32 x 48"), ((17, 48), "17 x 48")]
)
def test_patches_by_the_size_of_an_image_need_one_that_is_kept(
    size: tuple[int, int] | None, said: str, tmp_path: Path
) -> None:
    """As many tokens as an image is large; more pixels than the processor keeps; a side that no patch divides."""
    with pytest.raises(SourceError, match=said) as error:
        find_sight(chats_of(write_qwen(tmp_path / "lm"), size))
    assert all("target: transformers" in problem for problem in error.value.problems)


PROCESSORS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "patches of two frames": (
        "Qwen2VLImageProcessorPil",
        {"patch_size": 8, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        (32, 48),
    ),
    "tiles": (
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 16]]},
        (16, 16),
    ),
    "padded": ("Siglip2ImageProcessorPil", {"patch_size": 8, "max_num_patches": 9}, (16, 32)),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_pixels_are_ordered_as_a_processor_orders_them(kind: str) -> None:
    import transformers

    name, settings, size = PROCESSORS[kind]
    processor = getattr(transformers, name)(**settings)

    def make(image: np.ndarray) -> np.ndarray:
        return np.asarray(processor(fromarray(image), return_tensors="np")["pixel_values"])

    spec, order = find_patches(ImagePreprocess(resize=size), make)
    (image,) = draw_images((40, 70))
    sized = batch_pixels([image], spec)
    own = order_pixels(normalize_pixels(sized, spec), order)
    assert own.shape == make(sized[0]).shape and np.abs(own - make(sized[0])).max() < 1e-5


def test_loops_count_what_they_were_made_of() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(random.integers(1, 5, random.integers(1, 6)))
        axes = tuple(random.permutation(len(shape)))
        index = np.arange(np.prod(shape)).reshape(shape).transpose(axes).reshape(-1)
        loops = find_loops(index)
        order = PixelOrder((len(index),), loops)
        assert (order_pixels(np.arange(len(index), dtype=np.float32), order) == index).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padded": ({"do_pad": True, "do_center_crop": False, "size": {"longest_edge": 16}}, "target: transformers"),
    "of any size": ({"do_center_crop": False}, "by the size of an image|as many tokens of an image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_runtime_cannot_do_with_an_image_is_refused(case: str, tmp_path: Path) -> None:
    folder, (settings, said) = write_llava(tmp_path / "lm"), REFUSED[case]
    kept = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, **settings}
    write_json(folder, "preprocessor_config.json", image_processor_type="CLIPImageProcessor", **kept)
    with pytest.raises(CompressError, match=said):
        find_sight(chats_of(folder))


def test_an_image_is_not_named_by_a_text(tmp_path: Path) -> None:
    """What the template writes for an image cannot be smuggled in by what a user says."""
    folder = write_llava(tmp_path / "lm")
    images = find_sight(chats_of(folder)).images
    generator = Generator(None, None, read_generation(folder, VOCABULARY), folder, images)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="names 0 images, and its chat template writes '<image>' 1 times"):
        generator.encode("what is <image>?", chat=True)
