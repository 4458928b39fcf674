"""Every language model of the installed transformers, tiny: what the plan takes is right, or is refused there.

The recipes are its own, as one would write them under recipes/: `gptq` to W4A16 for target transformers, and an ONNX
file. Each family is built of transformers' own configuration with small sizes and random weights, in a process of its
own with a limit of time and memory. The float graph has to give every greedy token of transformers in our runtime, in a
batch with padding; the checkpoint, loaded by transformers itself, the report's nats. What is found stays in
benchmarks/.census, from where a run that was stopped goes on; a whole run writes docs/reference/census.md, and names
what was right there before and is no longer. `--only` tries a family anew; `--quick` plans, and applies nothing.

A model that also sees, named "FAMILY +images": its checkpoint has to hold every tensor and file of its source, and
transformers, which loads it, has to find the report's nats, and what is not in few bits as it was. Its float graphs
have to give every greedy token of transformers in our runtime, after prompts with an image and without, if its own
image processor, as transformers sets it, makes of any image what a runtime can make.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import multiprocessing
import re
import resource
import string
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from common import HERE, ROOT, Call, Measured, Row, at_least, at_most, run_script, say
from language import load_causal, nats_per_token, write_tokenizer
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.data.patches import find_patches
from compress.data.sight import Sight, draw_images, find_pixels, find_preprocess
from compress.errors import CompressError, NotExportable, SourceError
from compress.execution.run import apply_recipe
from compress.export import loading_back
from compress.export.decoder import export_decoder
from compress.export.onnx import finish, save_graph
from compress.formats.targets import TARGETS
from compress.graph.specs import cache_of
from compress.models.fresh_reader import answer
from compress.models.huggingface import load_config, load_trained
from compress.models.source import Source, locate
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.rounding.state import GraphState
from compress.specs import ModelSpec
from runtime.backends import find_backend, open_model
from runtime.bundle.manifest import PromptImages
from runtime.decode.kv_cache import Decoder
from runtime.encode.images import ImagePreprocess, batch_pixels
from runtime.errors import RuntimeFailure

KEPT, PAGE = HERE / ".census", ROOT / "docs/reference/census.md"
MARK = "<!-- made by make census -->\n"
VOCABULARY, WIDTH, HEADS, HEAD, LAYERS, WINDOW, POSITIONS = 256, 64, 4, 16, 2, 16, 256
N_TEXTS, TOKENS, GREEDY = 8, 40, 16
"""Texts to calibrate and to judge; the longest of them is longer than a window."""
PROMPTS = (9, 5, 21)
LARGEST = 30_000_000
"""Parameters; more is not tiny: a size has a name that SIZES lacks."""
SECONDS, ADDRESS_SPACE = 900, 24 * 2**30
CLOSE = 1e-4
"""Of logits over the largest, and of nats. Measured: 1e-7 to 2e-5 where all is right."""
SIZES: tuple[tuple[str, int], ...] = (
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"pad_token_id", 0),
    (r"token_(id|index)$", 5),
    (r"vocab|n_words", VOCABULARY),
    (r"position_embeddings|n_positions|context_length|(seq|model)_(max_)?len|max_.*length|^n_ctx$|max_seq", POSITIONS),
    (r"sliding_window$|window_size$|local_attention$", WINDOW),
    (r"attention_chunk_size", 2 * WINDOW),
    (r"mm_tokens_per_image", 4),
    (r"chunk_size_feed", 0),
    (r"(^|_)chunk_size$", 8),
    (r"index_topk", 8),
    (r"index(er)?_n_heads", 16),
    (r"^n_group$|topk_group|^num_expert_group|n_limited_groups", 1),
    (r"top_?k$|per_tok$|experts_top|moe_k$|num_selected", 2),
    (r"n(um)?_shared_experts?$|shared_experts?_num|predict_layers|n_predict", 1),
    (r"first_k_dense|num_dense_layers|n_dense|dense_layers$", 1),
    (r"zero_expert|num_memory_blocks", 2),
    (r"kv_shared_layers", 2),
    (r"experts?(_num)?$", 4),
    (r"(num|n)_.*(layers|blocks)$|^n_layers?$|^num_layers$|_layers$", LAYERS),
    (r"(period|interval|pattern)$|_every", 2),
    (r"offset$", 1),
    (r"key_value_heads|num_kv|n_head_kv|kv_heads", 2),
    (r"heads?$", HEADS),
    (r"rank(_|$)", 32),
    (r"rope_head_dim|rotary_dim$", 8),
    (r"global_head_dim|mamba.*head_?dim|mamba_d_head", 32),
    (r"head_?dim$|head_size$|d_head$|d_kv$", HEAD),
    (r"per_layer_input", HEAD),
    (r"(state_size|d_state|ssm_state.*)$", HEAD),
    (r"n_groups$|ngroups$", 1),
    (r"intermediate|ffn|d_ff|n_inner|feed_forward|mlp_(dim|hidden)|d_inner|_ff_", 96),
    (r"hidden|d_model|n_embd|embed_dim|emb_dim|^dim$|width|embedding_size|proj_dim|d_ssm", WIDTH),
)
"""Names of a configuration's numbers -> what they are here; the first that matches is taken."""
NEEDED = r"token_id$|^head_dim$|key_value_heads$|experts$|per_tok$|^n_group$|topk_group$"
"""What code takes for a number though its default is none."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": ["conv", "full_attention"]},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["mamba", "attention"]},
    {"attn_layer_indices": [1]},
    {"num_hidden_layers": 8},
    {"num_heads": 8},
    {"attention_types": [[["global", "local"], 1]]},
    {"num_experts_per_tok": 1},
    {"is_decoder": True},
)
"""What a configuration gets besides, tried in turn until the model is built and runs."""
SECTIONS = ((4, 2, 2), (2, 1, 1), (3, 3, 2))
"""Of a turned head's halves, that are turned by time, height and width: as many of each as some models have here."""
SEEING = " +images"
"""What stands behind the names of families that also see."""
IMAGE_TOKEN, SIDE, LONG = 5, 64, 4096
"""Of an image, as `SIZES` has it; a side of it where a configuration says none; tokens of the longest text with one."""
SIDES = (64, 112, 224, 256, 384, 448, 512, 768, 980)
"""Of images that a processor cuts into patches or tiles, tried in turn: what one size of its own needs."""
OF_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}
"""Settings of image processors -> where a configuration of what sees has them, too."""
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja")
PARTS = ("graph", "checkpoint")
RIGHT, REFUSED, WRONG, FAILED = "right", "refused", "wrong", "failed"


def measure(call: Call) -> Measured:
    known = list_families()
    rows, before = [], read_page()
    for kind in call.choose(known, quick=len(known)):
        path = KEPT / f"{transformers.__version__}{'-quick' * call.quick}" / f"{kind}.json"
        if call.only or not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(try_in_process(kind, call.quick)), encoding="utf-8")
        rows.append(json.loads(path.read_text(encoding="utf-8")))
        say(json.dumps(rows[-1]))
    worse = [row["family"] for row in rows if row["family"] in before and not call.quick and is_worse(row, before)]
    if worse:
        say(f"right before, and no longer: {', '.join(worse)}")
    if not call.only and not call.quick:
        write_page(rows)
    built = [row for row in rows if row["graph"] != "not built"]
    broken = [row for row in built for part in PARTS if row[part].startswith((WRONG, FAILED))]
    return [
        at_least("families built", len(built), 1 if call.only else 150),
        at_most("graphs and checkpoints that the plan takes and that fail, or are wrong", len(broken), 0),
        at_most("families that were right before, and are no longer", len(worse), 0),
    ], rows


def list_families() -> dict[str, type]:
    """Return transformers' names of the configurations that have a language model, and their classes.

    Those that have a model that also sees stand there with SEEING behind their name.
    """
    from transformers.models.auto import modeling_auto

    known, causal = transformers.CONFIG_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    families = {kind: known[kind] for kind in sorted(causal) if kind in known}
    seeing = sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return families | {f"{kind}{SEEING}": known[kind] for kind in seeing if kind in known}


def try_in_process(kind: str, quick: bool) -> Row:
    """Return what becomes of a family, in a process that ends after SECONDS: a fork, for imports take as long."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compress-census-") as name:
        child = multiprocessing.get_context("fork").Process(target=try_family, args=(kind, Path(name), quick))
        child.start()
        child.join(SECONDS)
        why = f"more than {SECONDS} s" if child.is_alive() else f"exit code {child.exitcode}"
        child.kill()
        child.join()
        file = Path(name) / "row.json"
        row: Row = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"family": kind}
    unknown = {part: f"{FAILED}: the process ended: {why}" for part in PARTS if part not in row}
    return {**row, **unknown, "seconds": round(time.monotonic() - started)}


def ask_fork(work: Path, seconds: float) -> None:
    """Load a checkpoint back as `loading_back.ask` does, in a fork."""
    child = multiprocessing.get_context("fork").Process(target=answer, args=(work,))
    child.start()
    child.join(seconds)


def try_family(kind: str, folder: Path, quick: bool) -> None:
    """Write row.json into `folder`, anew after each part."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    loading_back.ask = ask_fork
    row: Row = {"family": kind}

    def keep(**found: str) -> None:
        row.update(found)
        (folder / "row.json").write_text(json.dumps(row), encoding="utf-8")

    sees = kind.endswith(SEEING)
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    try:
        with torch.random.fork_rng(devices=[]):
            module = build(list_families()[kind], auto, sees)
        module.save_pretrained(folder / "model")
        if sees:
            write_letters(folder / "model")
            for name in PROCESSOR_FILES:
                (folder / "model" / name).write_text("{}", encoding="utf-8")
        else:
            write_tokenizer(folder / "model", VOCABULARY)
        write_texts(folder, sees)
        if not all(read_texts(folder)):  # the family's class of tokenizers reads no words
            write_letters(folder / "model")
            write_texts(folder, letters=True)
    except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
        keep(graph="not built", checkpoint="not built", why=shorten(repr(error)))
        return
    row["class"] = type(module).__name__
    if sees:
        keep(graph=try_looking(folder))
        keep(checkpoint=try_part(folder, "seeing", "transformers", None if quick else try_seeing))
        return
    for part, target, judge in (
        ("graph", "onnxruntime-cpu", try_graph),
        ("checkpoint", "transformers", try_checkpoint),
    ):
        keep(**{part: try_part(folder, part, target, None if quick else judge)})


def try_part(folder: Path, part: str, target: str, judge: Callable[[Path, Path], str] | None) -> str:
    """Return what becomes of one export: the plan's refusal, what went wrong, or what `judge` says of its result."""
    recipe = write_recipe(folder, part, target)
    try:
        make_plan(load_recipe(recipe), folder / "cache", timed=False)
    except (CompressError, RuntimeFailure) as error:
        said = shorten("; ".join(error.problems)).replace(f"{folder}/", "")
        return f"{REFUSED if error.exit_code == 2 else FAILED}: {said}"
    except Exception as error:  # noqa: BLE001  (a finding)
        return f"{FAILED}: plan: {shorten(repr(error))}"
    if judge is None:
        return "planned"
    try:
        return judge(folder, recipe)
    except Exception as error:  # noqa: BLE001
        return f"{FAILED}: {shorten(str(error) if isinstance(error, CompressError) else repr(error))}"


def try_graph(folder: Path, recipe: Path) -> str:
    """Compare greedy tokens of the float graph, in our runtime, in a batch with padding, with transformers' own."""
    source = locate(load_recipe(recipe).model, folder)
    reference, module = (load_whole(source) for _ in range(2))
    unstack_experts(module)
    graph, _ = finish(GraphState(export_decoder(module)), TARGETS["onnxruntime-cpu"])
    save_graph(graph, folder / "model.onnx")
    decoder = Decoder(find_backend("onnxruntime-cpu").open(folder / "model.onnx", 1, {}), cache_of(graph))
    random = np.random.default_rng(0)
    rows = [random.integers(3, VOCABULARY, n).tolist() for n in PROMPTS]
    got = decoder.start([np.array(row) for row in rows], max(PROMPTS) + GREEDY)

    def read(rows: list[list[int]]) -> list[torch.Tensor]:
        return [reference(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows]

    return follow(decoder, got, rows, read)


def follow(
    decoder: Decoder, got: np.ndarray, rows: list[list[int]], read: Callable[[list[list[int]]], list[torch.Tensor]]
) -> str:
    """Compare greedy tokens behind `rows`, and their logits, with those that `read` gives; `got`: the first ones."""
    worst = 0.0
    for step in range(GREEDY):
        with torch.no_grad():
            wanted = torch.stack(read(rows)).numpy()
        worst = max(worst, float(np.abs(got - wanted).max() / np.abs(wanted).max()))
        tokens = wanted.argmax(axis=1)
        if got.argmax(axis=1).tolist() != tokens.tolist() or not worst < CLOSE:
            return f"{WRONG}: logits differ by {worst:.1e} at token {step}"
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        got = decoder.step(tokens) if step < GREEDY - 1 else got
    return RIGHT


def try_looking(folder: Path) -> str:
    """Compare greedy tokens of the float graphs, in our runtime, with transformers' own after prompts with an image."""
    source = locate(ModelSpec(source=f"dir:{folder}/model", task="image-text-to-text"), folder)
    lengthen(folder / "model/config.json")
    try:
        look = find_look(load_config(source))
        reference, module = (load_whole(source) for _ in range(2))
        unstack_experts(module)
        sight = make_sight(reference, look)
        if not runs_on(reference, sight):
            return "-: a tiny one of it does not run on an image"
        graph, _ = finish(GraphState(export_decoder(module, sight=sight)), TARGETS["onnxruntime-cpu"])
    except (SourceError, NotExportable) as error:
        return f"{REFUSED}: {shorten('; '.join(error.problems).replace(f'{folder}/', ''))}"
    except Exception as error:  # noqa: BLE001  (a finding)
        return f"{FAILED}: {shorten(repr(error))}"
    save_graph(graph, folder / "model.onnx")
    session = open_model(find_backend("onnxruntime-cpu"), folder / "model.onnx", 1, {})
    decoder, random = Decoder(session, cache_of(graph)), np.random.default_rng(0)
    rows = [random.integers(IMAGE_TOKEN + 1, VOCABULARY, n).tolist() for n in PROMPTS]
    rows = [[*row, *[IMAGE_TOKEN] * sight.n_tokens * (i != 1), *row[::-1]] for i, row in enumerate(rows)]
    shape = sight.example[sight.pixels].shape
    images: list[np.ndarray | None] = [None if i == 1 else draw_pixels(random, shape) for i in range(3)]
    features = decoder.look([image for image in images if image is not None])
    got = decoder.start([np.array(row) for row in rows], max(map(len, rows)) + GREEDY, features)

    def read(rows: list[list[int]]) -> list[torch.Tensor]:
        return [look_and_read(reference, sight, row, image) for row, image in zip(rows, images, strict=True)]

    return follow(decoder, got, rows, read)


def runs_on(reference: Any, sight: Sight) -> bool:
    """Return whether transformers' own code runs on an image and its tokens."""
    try:
        with torch.no_grad():
            look_and_read(reference, sight, sight.example["input_ids"][0].tolist(), sight.example[sight.pixels])
    except Exception:  # noqa: BLE001  (whatever a model's own code raises)
        return False
    return True


def draw_pixels(random: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(random.standard_normal(shape), np.float32)


def lengthen(config: Path) -> None:
    """Let the language part of a model read more tokens than an image has."""
    record = json.loads(config.read_text(encoding="utf-8"))
    record.get("text_config", {})["max_position_embeddings"] = LONG
    config.write_text(json.dumps(record), encoding="utf-8")


def look_and_read(model: Any, sight: Sight, row: Sequence[int], image: np.ndarray | None) -> torch.Tensor:
    """Return the logits after a row of tokens, and an image in the places of its tokens."""
    ids = torch.tensor([row])
    feeds = {name: (ids == IMAGE_TOKEN).to(torch.int64) for name in sight.marks}
    if image is not None:
        others = {name: torch.from_numpy(values) for name, values in sight.example.items() if name not in sight.marks}
        feeds |= {**others, sight.pixels: torch.from_numpy(image)}
        del feeds["input_ids"]
    logits: torch.Tensor = model(input_ids=ids, **feeds, use_cache=False).logits[0, -1]
    return logits


def make_sight(module: Any, look: Mapping[str, np.ndarray]) -> Sight:
    """Return how an image reaches a tiny model: pixels of one size, and the tokens that its code makes of them.

    `look`: what its processor makes of one cut into patches; else pixels of the model's own size are drawn.
    """
    vision = getattr(module.config, "vision_config", None)
    side = getattr(vision, "image_size", None) or SIDE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    look = look or {"pixel_values": draw_pixels(np.random.default_rng(1), (1, 3, height, width))}
    look_at = getattr(getattr(module, "model", module), "get_image_features", None)
    if look_at is None:
        raise SourceError("it has no get_image_features, which gives what its decoder reads of an image")
    known = inspect.signature(look_at).parameters
    given = {name: torch.from_numpy(values) for name, values in look.items() if name in known}
    try:
        with torch.no_grad():
            found = look_at(**given, return_dict=True).pooler_output
    except Exception as error:
        raise SourceError(
            f"what sees of a tiny one does not run on one image's pixels ({shorten(repr(error), 120)})"
        ) from error
    first = found[0] if isinstance(found, list | tuple) else found
    n_tokens = int(np.prod(first.shape[:-1]))
    ids = np.array([[9, *[IMAGE_TOKEN] * n_tokens, 11]])
    marks = tuple({"token_type_ids", "mm_token_type_ids"} & inspect.signature(module.forward).parameters.keys())
    example = {"input_ids": ids, **look, **dict.fromkeys(marks, (ids == IMAGE_TOKEN).astype(np.int64))}
    pixels = next(name for name, values in look.items() if values.dtype.kind == "f")
    return Sight(PromptImages("-", "-", {}), pixels, example, IMAGE_TOKEN, n_tokens, marks)


def fit_to_processor(config: Any) -> Any:
    """Return a configuration whose part that sees reads images of the size that the family's processor makes."""
    size = getattr(find_processor(type(config)), "size", None)
    side = size.get("height") if isinstance(size, dict) else None
    vision: Any = getattr(config, "vision_config", None)
    patch = getattr(vision, "patch_size", 0)
    if side and isinstance(getattr(vision, "image_size", None), int) and isinstance(patch, int) and side % patch == 0:
        vision.image_size = side
    return config


def find_processor(kind: type) -> Any:
    """Return the class of image processors of a family, by its configuration's; None where Pillow runs none."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    known = IMAGE_PROCESSOR_MAPPING.get(kind, None)
    found = known["pil"] if isinstance(known, dict) and known.get("pil") else known
    return found if isinstance(found, type) else None


def find_look(config: Any) -> dict[str, np.ndarray]:
    """Return what the family's image processor, with its own settings, makes of an image that it cuts into patches.

    {}: it makes pixels of one size of any. SourceError where it makes more than a runtime can.
    """
    from PIL.Image import fromarray

    kind = find_processor(type(config))
    if kind is None:
        raise SourceError("transformers has no image processor of it that Pillow runs")
    vision, images = getattr(config, "vision_config", None), draw_images()
    shared = {name: getattr(vision, of_model, None) for name, of_model in OF_PATCHES.items() if hasattr(kind, name)}
    processor = kind(**{name: value for name, value in shared.items() if isinstance(value, int)})

    def make(image: np.ndarray) -> dict[str, np.ndarray]:
        try:
            made = processor(fromarray(image), return_tensors="np")
            return {name: np.asarray(values) for name, values in made.items()}
        except Exception as error:
            raise SourceError(
                f"its image processor has no settings of its own ({shorten(repr(error), 120)})"
            ) from error

    made = [make(image) for image in images]
    try:
        find_preprocess(processor, images, [each[find_pixels(made)] for each in made])
        return {}
    except SourceError as error:
        failure = error
    for side in SIDES:
        try:
            resizing = ImagePreprocess(resize=(side, side))
            sized = [make(batch_pixels([image], resizing)[0]) for image in images]
            pixels = find_pixels(sized)
            find_patches(resizing, lambda image, name=pixels: make(image)[name])  # type: ignore[misc]
            return sized[0]
        except SourceError as error:
            failure = error
    raise failure


def load_whole(source: Source) -> Any:
    return load_trained(source).wrapped


def try_checkpoint(folder: Path, recipe: Path) -> str:
    """Compare the report's nats with those that transformers gives of the folder."""
    apply_recipe(load_recipe(recipe), folder / "bundle", folder / "cache", quiet=True)
    report = json.loads((folder / "bundle/report.json").read_text(encoding="utf-8"))
    model = load_causal(next((folder / "bundle").rglob("config.json")).parent)
    apart = abs(nats_per_token(model, read_texts(folder)) - report["candidate"]["metrics"]["nll"])
    return RIGHT if apart < CLOSE else f"{WRONG}: nats differ by {apart:.1e} from the report's"


def try_seeing(folder: Path, recipe: Path) -> str:
    """Compare names, files and values of a model that also sees with its source's, and the nats of texts."""
    apply_recipe(load_recipe(recipe), folder / "bundle", folder / "cache", quiet=True)
    written = folder / "bundle/model"
    auto = transformers.AutoModelForImageTextToText
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    source, model = (auto.from_pretrained(path, **how).eval() for path in (folder / "model", written))
    had, has = (list_tensors(path) for path in (folder / "model", written))
    anew = (has - had) | {name_as_read(name, source) for name in has - had}
    lost = [name for name in sorted(had - has) if name_as_read(name, source) not in anew]
    lost += [path.name for path in (folder / "model").iterdir() if not (written / path.name).is_file()]
    if lost:
        return f"{WRONG}: {len(lost)} tensors or files of the source are not there: {', '.join(lost[:4])}"
    report = json.loads((folder / "bundle/report.json").read_text(encoding="utf-8"))
    apart = abs(nats_per_token(model, read_texts(folder)) - report["candidate"]["metrics"]["nll"])
    if not apart < CLOSE:
        return f"{WRONG}: nats differ by {apart:.1e} from the report's"
    layers = json.loads((folder / "bundle/layers.json").read_text(encoding="utf-8"))
    rounded = {f"{row['layer']}.weight" for row in layers if row["action"].startswith("w4")}
    found = model.state_dict()
    changed = [
        name
        for name, tensor in source.state_dict().items()
        if name not in rounded and ".experts." not in name and not torch.equal(found.get(name, tensor[:0]), tensor)
    ]
    return RIGHT if not changed else f"{WRONG}: {len(changed)} tensors are changed: {', '.join(changed[:4])}"


def list_tensors(folder: Path) -> set[str]:
    """Return the names of a folder's tensors, of layers in few bits those of their weights."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {name.removesuffix("_packed") for name in file.keys()}  # noqa: SIM118  (no mapping)
    return {name for name in names if not name.endswith(("weight_scale", "weight_shape"))}


def name_as_read(name: str, model: Any) -> str:
    """Return what transformers calls a tensor of a file once it is loaded: one name for those that it puts together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    read: str = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(model.state_dict()))[0]
    return read


def read_texts(folder: Path) -> list[list[int]]:
    """Return the evaluation texts' token ids, as transformers' tokenizer of the folder gives them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"] for line in lines]


def write_letters(folder: Path) -> None:
    """Write a tokenizer of which each letter is a token: families have classes that read no words."""
    words = ["<unk>", "<s>", "</s>", "\u0120", *string.ascii_letters]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    whole.save_pretrained(folder)


def write_texts(folder: Path, letters: bool = False) -> None:
    random = np.random.default_rng(0)
    for name in ("calibration", "evaluation"):
        rows = [random.integers(3, VOCABULARY, n) for n in random.integers(TOKENS // 2, TOKENS, N_TEXTS)]
        texts = [{"text": " ".join(f"w{token}" for token in row)} for row in rows]
        if letters:
            texts = [{"text": "".join(string.ascii_letters[token % 52] for token in row)} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts), encoding="utf-8")


def write_recipe(folder: Path, part: str, target: str) -> Path:
    recipe = {
        "version": 1,
        "name": part,
        "model": {
            "source": f"dir:{folder}/model",
            "task": "image-text-to-text" if part == "seeing" else "text-generation",
        },
        "preprocess": {"kind": "language", "max_length": POSITIONS // 2},
        "data": {name: {"source": f"jsonl:{folder}/{name}.jsonl"} for name in ("calibration", "evaluation")},
        "target": target,
        "passes": [{"kind": "gptq", "scheme": "W4A16", "group_size": 32}],
        "export": [{"kind": "onnx" if part == "graph" else "checkpoint"}],
        "validate": {"gates": [], "benchmark": {"warmup": 1, "iterations": 3, "processes": 1}, "steps": False},
    }
    path = folder / f"{part}.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def build(kind: type, auto: Any, sees: bool = False) -> Any:
    """Return a random model of the family, tiny, whose layers all matter. Raises what its code raises.

    `sees`: one that does not run on texts alone is given, too: the plan has to refuse it.
    """
    first: Exception | None = None
    tries = (
        itertools.product((True, False), VARIANTS, (*SECTIONS, None)) if sees else ((True, v, None) for v in VARIANTS)
    )
    for runs, more, sections in tries:
        if more.keys() <= {field.name for field in dataclasses.fields(kind)}:
            try:
                config = make_config(kind, more, sections)
                return build_once(fit_to_processor(config) if sees else config, auto, runs)
            except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
                first = first or error
    assert first is not None
    raise first


def build_once(config: Any, auto: Any, runs: bool = True) -> Any:
    """Return the model, `runs`: once it has run. ValueError where it is not tiny."""
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if n > LARGEST:
        raise ValueError(f"it has {n} parameters: a size of its configuration is not among those that are made small")
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.mul_(4)
    with torch.no_grad():
        if runs and not model(input_ids=torch.tensor([[1, 7, 9]])).logits.isfinite().all():
            raise ValueError("its logits are not finite")
    return model


def make_config(
    kind: type, more: Mapping[str, Any] = MappingProxyType({}), sections: Sequence[int] | None = None
) -> Any:
    """Return a configuration of the class with small sizes, those of the configurations within it, too.

    Where layers are of several kinds, one after another of each.
    """
    default, fields = kind(), {field.name: field.default for field in dataclasses.fields(kind)}
    sizes = {name: choose_size(name, value) for name, value in fields.items()}
    found: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if fields.get("num_key_value_heads") in (None, fields.get("num_attention_heads")):
        found["num_key_value_heads"] = HEADS
    if fields.get("head_dim") == fields.get("qk_rope_head_dim", 0):
        found["head_dim"] = found["qk_rope_head_dim"]
    for name in fields.keys() & {"layer_types", "layers_block_type"}:
        if isinstance(listed := getattr(default, name, None), Sequence):
            kinds = list(dict.fromkeys(listed))
            found[name] = kinds * (1 if len(kinds) > 1 and "num_kv_shared_layers" not in fields else 2)
            found["num_hidden_layers"] = len(found[name])
    parts: dict[str, type] = getattr(kind, "sub_configs", {})
    for name in parts:
        part = getattr(default, name, None)
        if part is None and sections is not None and name == "vision_config":
            part = parts[name]()
        if dataclasses.is_dataclass(part):
            found[name] = make_config(type(part), sections=sections)
            if name == "vision_config" and hasattr(part, "window_size"):  # in pixels
                found[name].window_size = part.window_size
    if sections is not None and "rope_parameters" in fields:
        rope = getattr(default, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        found["rope_parameters"] = {**rope, "mrope_section": list(sections)}
    return kind(**{name: size for name, size in found.items() if name in fields} | dict(more))


def choose_size(name: str, default: object) -> int | None:
    """Return a small size for a configuration's number; None where it keeps its default."""
    if isinstance(default, bool) or not (isinstance(default, int) or (default is None and re.search(NEEDED, name))):
        return None
    return next((size for pattern, size in SIZES if re.search(pattern, name)), None)


def shorten(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ..."


def is_worse(row: Row, before: Mapping[str, Sequence[str]]) -> bool:
    return any(was == RIGHT != row[part] for was, part in zip(before[row["family"]], PARTS, strict=True))


def read_page() -> dict[str, list[str]]:
    """Return what the page says of each family: graph and checkpoint."""
    table = PAGE.read_text(encoding="utf-8").partition(MARK)[2].splitlines() if PAGE.is_file() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| ")]
    return {row[0]: row[2:4] for row in cells if len(row) > 3}


def write_page(rows: Sequence[Row]) -> None:
    """Write the table into the page, behind MARK."""
    lines = [f"transformers {transformers.__version__}, {datetime.now(UTC):%Y-%m-%d}: {count(rows)}.", ""]
    lines += ["| family | class | ONNX graph | checkpoint | why |", "|---|---|---|---|---|"]
    for row in rows:
        parts = [row[part].partition(": ") for part in PARTS]
        whys = dict.fromkeys(why for _, _, why in parts if why)
        why = row.get("why") or "; ".join(whys)
        cells = (row["family"], row.get("class", ""), parts[0][0], parts[1][0], why.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{text}{MARK}" + "\n".join(lines) + "\n", encoding="utf-8")


def count(rows: Sequence[Row]) -> str:
    """Return how many parts became what, of causal families and of those that also see."""
    told = []
    for sees, title in ((False, ""), (True, "of models that also see ")):
        some = [row for row in rows if row["family"].endswith(SEEING) == sees]
        for part in PARTS if some else ():
            words = [row[part].partition(":")[0] for row in some]
            found = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
            told.append(f"{title}{part}s {found}")
    return "; ".join(told)


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, (), measure))
