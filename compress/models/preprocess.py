"""How samples become the model's inputs, read from the model's own files. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from compress.models.answers import resolve_target
from compress.models.source import Source, read_text_config
from compress.specs import OF_FOLDERS, ModelSpec
from compress.tasks import find_torch_task
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import (
    AudioPreprocess,
    ImagePreprocess,
    ImageTextPreprocess,
    PreprocessSpec,
    Seq2SeqPreprocess,
    TensorPreprocess,
    TextPreprocess,
)
from runtime.tasks import find_task
from runtime.tasks.base import OFFSETS

USUAL_CONTEXT = 2048
"""Tokens of a language model's text where a recipe does not say."""
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's filter numbers, as preprocessor_config.json has them."""
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")
"""Model types whose position table starts after the padding index, so that fewer positions are usable."""


def resolve_preprocess(source: Source, declared: PreprocessSpec | None) -> PreprocessSpec:
    """Return `declared`, checked against the task and the model's folder; or, if None, what the folder's files say.

    Raises SourceError: no statement to be found, one that cannot be expressed here, or one that contradicts the model.
    """
    kind = find_task(source.task).preprocess
    if kind == "seq2seq":
        return _resolve_seq2seq(source, declared)
    if declared is not None:
        return _check_fit(source, _fill_first_token(declared, source))
    if kind is None:
        return TensorPreprocess()
    if source.folder is None:
        raise SourceError(explain_missing(source.spec))
    return _check_fit(source, _READERS[kind](source.folder))


def explain_missing(spec: ModelSpec) -> str:
    """Say what a recipe without `preprocess` lacks, of a model that has no files which say it; "" where nothing."""
    task = find_task(spec.task)
    if task.preprocess in (None, "seq2seq") or spec.source.startswith(OF_FOLDERS):
        return ""
    return (
        f"preprocess: {spec.source} does not say how its inputs are made of samples; add "
        f"`preprocess: {{kind: {task.preprocess}, ...}}` as in its training, or `{{kind: tensor}}` if the data holds "
        "its inputs ready"
    )


def _resolve_seq2seq(source: Source, declared: PreprocessSpec | None) -> Seq2SeqPreprocess:
    """Return the preprocessing of an encoder-decoder: of its encoder's inputs alone where only these are declared."""
    if source.kind != "huggingface" or source.folder is None:
        raise SourceError(f"{source.name}: a {source.task} model is a Hugging Face folder: give dir: or hf:")
    kind = find_task(source.task).columns[0]
    if isinstance(declared, ImagePreprocess | ImageTextPreprocess | LanguagePreprocess):
        raise _make_misfit(declared.kind, source.task)
    whole = declared if isinstance(declared, Seq2SeqPreprocess) else Seq2SeqPreprocess(source=declared)
    read = whole.source or _READERS[kind](source.folder)
    if not isinstance(read, TextPreprocess | AudioPreprocess | TensorPreprocess) or read.kind not in (kind, "tensor"):
        raise SourceError(
            f"preprocess: source of kind: {read.kind} does not fit the task {source.task}; use {kind}, or tensor"
        )
    if isinstance(read, TextPreprocess):
        _check_tokenizer(source, "text", read.tokenizer)
        _check_positions(source.folder, read.max_length)
        _check_stride(source.spec, read)
    if isinstance(read, AudioPreprocess):
        read = _resolve_longer(source.spec, read)
    _check_tokenizer(source, "seq2seq", whole.target.tokenizer)
    return replace(whole, source=read, target=resolve_target(source.folder, whole.target))


def find_class_names(source: Source) -> tuple[str, ...]:
    """Return the names that the recipe gives the classes; else, where the task uses them, those of config.json.

    SourceError where the task needs them and there are none.
    """
    task = find_torch_task(source.task)
    if source.spec.class_names or not (task.needs_class_names or task.uses_class_names or task.read_class_names):
        return source.spec.class_names
    folder = source.folder
    if task.read_class_names is not None:
        if folder is None:
            raise SourceError(f'model.class_names: {source.task} needs what each output writes, "" for the blank')
        return task.read_class_names(folder)
    labels = _read_object(folder / "config.json").get("id2label") if folder is not None else None
    if isinstance(labels, dict) and not all(str(key).isdecimal() for key in labels):
        raise SourceError(f"{folder}: config.json: id2label has keys that are no numbers; give model.class_names")
    names = tuple(str(labels[key]) for key in sorted(labels, key=int)) if isinstance(labels, dict) else ()
    if not names or all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        if not task.needs_class_names:
            return ()
        some = "O, B-PER" if task.loss == "token classes" else "cat, dog"
        raise SourceError(f"model.class_names: {source.task} needs them, in the order of the outputs: [{some}, ...]")
    return names


def _check_fit(source: Source, preprocess: PreprocessSpec) -> PreprocessSpec:
    if isinstance(preprocess, TextPreprocess | LanguagePreprocess):
        _check_text(source, preprocess)
    task = find_task(source.task)
    others = ImagePreprocess | AudioPreprocess | ImageTextPreprocess | Seq2SeqPreprocess
    given = ("image", None) if isinstance(preprocess, ImagePreprocess) else (preprocess.kind,)
    if isinstance(preprocess, others) and task.preprocess not in given:
        raise _make_misfit(preprocess.kind, source.task)
    if isinstance(preprocess, ImageTextPreprocess):
        _check_tokenizer(source, preprocess.kind, preprocess.tokenizer)
    if isinstance(preprocess, TensorPreprocess) and not task.takes_tensors:
        if not task.facts:
            raise _make_misfit(preprocess.kind, source.task)
        parts = "tokens" if task.reads_texts else "the pixels of images as they came"
        raise SourceError(f"preprocess: {task.name} answers by {parts}, so it needs kind: {task.preprocess}")
    if isinstance(preprocess, TextPreprocess) and OFFSETS in task.facts and preprocess.stride is None:
        # tokens that two windows of a long context share, as in BERT's own code
        return replace(preprocess, stride=min(128, preprocess.max_length // 3))
    if isinstance(preprocess, TextPreprocess) and OFFSETS not in task.facts:
        _check_stride(source.spec, preprocess)
    return _resolve_longer(source.spec, preprocess) if isinstance(preprocess, AudioPreprocess) else preprocess


def _check_stride(spec: ModelSpec, preprocess: TextPreprocess) -> None:
    if preprocess.stride is not None:
        raise SourceError(f"preprocess: stride: {spec.task} reads the beginning of a text alone; leave stride out")


def _resolve_longer(spec: ModelSpec, preprocess: AudioPreprocess) -> AudioPreprocess:
    """Return the preprocessing with how recordings above its length are read; SourceError where the task cannot."""
    usual = find_task(spec.task).longer_audio
    if preprocess.longer not in (None, "cut") and usual == "cut":
        raise SourceError(
            f"preprocess: longer: {preprocess.longer}: {spec.task} reads the beginning of a recording alone; leave "
            "longer out"
        )
    return preprocess if preprocess.longest is None else replace(preprocess, longer=preprocess.longer or usual)


def _make_misfit(kind: str, task: str) -> SourceError:
    """Return the error of preprocessing that makes other inputs than a task's models read."""
    known = find_task(task)
    ways = [f"kind: {known.preprocess}"] if known.preprocess else []
    if known.takes_tensors:
        ways.append("kind: tensor where the data holds the model's inputs")
    return SourceError(f"preprocess: kind: {kind} does not fit the task {task}; use {' or '.join(ways)}")


def shifts_masks(folder: Path | None) -> bool:
    """Return whether a model's folder says that its first class is 1 in masks, and 0 there is none."""
    config = _read_object(folder / "preprocessor_config.json") if folder is not None else {}
    return bool(config.get("do_reduce_labels", config.get("reduce_labels", False)))


def _check_text(source: Source, preprocess: TextPreprocess | LanguagePreprocess) -> None:
    if find_task(source.task).preprocess != preprocess.kind:
        raise _make_misfit(preprocess.kind, source.task)
    _check_positions(_check_tokenizer(source, preprocess.kind, preprocess.tokenizer), preprocess.max_length)


def _check_positions(folder: Path, max_length: int) -> None:
    positions = _count_positions(read_text_config(folder))
    if positions is not None and max_length > positions:
        raise SourceError(f"preprocess: max_length {max_length} is more than the model's {positions} positions")


def _check_tokenizer(source: Source, kind: str, tokenizer: str) -> Path:
    """Return the folder that holds the tokenizer. SourceError where there is none."""
    if source.folder is None:
        raise SourceError(f"preprocess: kind: {kind} needs {tokenizer} beside the weights; copy it there")
    if not (source.folder / tokenizer).is_file():
        raise SourceError(
            f"preprocess: {source.folder} has no {tokenizer}; write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return source.folder


def reads_token_mask(folder: Path) -> bool:
    """Return whether the folder's tokenizer gives its model a mask; SigLIP's does not."""
    names = _read_object(folder / "tokenizer_config.json").get("model_input_names")
    return names is None or "attention_mask" in names


def _read_pair(folder: Path) -> ImageTextPreprocess:
    """Read both halves; a text is as long as the model's text tower has positions."""
    positions = (_read_object(folder / "config.json").get("text_config") or {}).get("max_position_embeddings")
    stated = _read_object(folder / "tokenizer_config.json").get("model_max_length")
    known = [int(length) for length in (stated, positions) if length is not None and length < 1e6]
    length = min(known, default=TextPreprocess.max_length)
    text = TextPreprocess(max_length=length, padding="max_length", pooling="none")
    return ImageTextPreprocess(image=_read_image(folder), text=text)


def _read_language(folder: Path) -> LanguagePreprocess:
    """Read a language model's preprocessing from its folder.

    `max_length` is what the model can read, at most USUAL_CONTEXT; the first token is the tokenizer's own rule.
    """
    positions = _count_positions(read_text_config(folder))
    return LanguagePreprocess(
        max_length=min(positions or USUAL_CONTEXT, USUAL_CONTEXT), bos_token_id=_read_first_token(folder)
    )


def _fill_first_token(declared: PreprocessSpec, source: Source) -> PreprocessSpec:
    """Return `declared` with the tokenizer's own first token, where a language model's recipe names none."""
    if not isinstance(declared, LanguagePreprocess) or declared.bos_token_id is not None or source.folder is None:
        return declared
    return replace(declared, bos_token_id=_read_first_token(source.folder))


def _read_first_token(folder: Path) -> int | None:
    tokenizer = _read_object(folder / "tokenizer_config.json")
    bos = read_text_config(folder).get("bos_token_id")
    adds = tokenizer.get("add_bos_token")
    if adds is None:
        path = folder / "tokenizer.json"
        # else the tokenizer itself may put it before every text
        token = tokenizer.get("bos_token")
        text = token.get("content") if isinstance(token, dict) else token
        adds = bool(text) and json.dumps(text) in json.dumps(_read_object(path).get("post_processor"))
    return bos if adds and isinstance(bos, int) else None


def _read_text(folder: Path) -> TextPreprocess:
    """Read a text encoder's folder: mean and normalised where it is not sentence-transformers' or says nothing."""
    modules = _read_json(folder / "modules.json")
    modules = [] if modules is None else modules
    if not isinstance(modules, list):
        raise SourceError(f"{folder / 'modules.json'}: is not a JSON list")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if other or any(module.get("path") for module, kind in zip(modules, kinds, strict=True) if kind == "Transformer"):
        named = ", ".join(other) or "a Transformer in a subfolder"
        raise SourceError(
            f"{folder / 'modules.json'}: {named} cannot be taken along; give a model without, or as python:"
        )
    paths = [module["path"] for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    config = _read_object(folder / (paths[0] if paths else "1_Pooling") / "config.json")
    modes = [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on
    ]
    modes = modes or [str(config[name]) for name in ("pooling_mode",) if name in config]
    known = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "mean": "mean", "cls": "cls", "max": "max"}
    if len(modes) > 1 or any(mode not in known for mode in modes):
        raise SourceError(f"{folder}: pooling {' + '.join(modes)} is not one of mean, cls, max; declare `preprocess:`")
    pooling, normalize = known[modes[0]] if modes else "mean", not kinds or "Normalize" in kinds
    stated = _read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    stated = stated or _read_object(folder / "tokenizer_config.json").get("model_max_length")
    positions = _count_positions(_read_object(folder / "config.json"))  # no text is longer than these
    lengths = [int(n) for n in (stated, positions) if n is not None and n < 1e6]  # 1e30 means unknown
    longest = min(lengths, default=TextPreprocess.max_length)
    return TextPreprocess(max_length=longest, pooling=pooling, normalize=normalize)  # type: ignore[arg-type]


def _count_positions(config: dict[str, Any]) -> int | None:
    n = config.get("max_position_embeddings")
    if n is not None and config.get("model_type") in OFFSET_POSITIONS:
        return int(n) - int(config.get("pad_token_id") or 0) - 1
    return n


def _read_image(folder: Path) -> ImagePreprocess:
    path = folder / "preprocessor_config.json"
    config = _read_object(path)
    if not config:
        raise SourceError(
            f"preprocess: {folder} has no preprocessor_config.json; add `preprocess: {{kind: image, ...}}`"
        )
    return make_image_preprocess(config, path, grey=_read_object(folder / "config.json").get("num_channels") == 1)


def make_image_preprocess(config: dict[str, Any], path: Path, grey: bool = False) -> ImagePreprocess:
    """Make the preprocessing that an image processor of transformers is described by. SourceError: it makes more."""
    resize, crop = _read_resize_and_crop(config, path)
    normalize = config.get("do_normalize", True)
    return ImagePreprocess(
        resize=resize,
        crop=crop,
        channels="L" if grey else "RGB",
        scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        mean=tuple(map(float, config["image_mean"])) if normalize else (0.0,),
        std=tuple(map(float, config["image_std"])) if normalize else (1.0,),
        resample=RESAMPLE.get(config.get("resample", 2), "bilinear"),  # type: ignore[arg-type]
    )


def reads_audio_mask(folder: Path) -> bool:
    """Return whether the folder's feature extractor gives its model a mask."""
    config = _read_extractor(folder)
    usual = config.get("feature_extractor_type") == "SeamlessM4TFeatureExtractor"
    return bool(config.get("return_attention_mask", usual))


def _read_extractor(folder: Path) -> dict[str, Any]:
    """Return what the folder says of its feature extractor, in a file of its own or in the processor's; {}: nothing."""
    config = _read_object(folder / "preprocessor_config.json")
    return config or _read_object(folder / "processor_config.json").get("feature_extractor") or {}


def _read_audio(folder: Path) -> AudioPreprocess:
    """Read a feature extractor of transformers: Wav2Vec2's, Whisper's, AST's or SeamlessM4T's, which most models share.

    SourceError: there is none, it is another, or one of its numbers cannot be expressed here.
    """
    config = _read_extractor(folder)
    path, kind = folder / "preprocessor_config.json", config.get("feature_extractor_type")
    if kind not in _EXTRACTORS:
        what = f"feature_extractor_type {kind} is not one of {', '.join(_EXTRACTORS)}" if config else "is missing"
        raise SourceError(
            f"preprocess: {path}: {what}; add `preprocess: {{kind: audio, ...}}` as in the model's training"
        )
    for key, value in _FIXED_NUMBERS.get(kind, {}).items():
        if config.get(key, value) != value:
            raise SourceError(f"preprocess: {path}: {key} is {config[key]}, and only {value} can be made here")
    try:
        return _EXTRACTORS[kind](config)
    except (TypeError, ValueError) as error:
        raise SourceError(f"preprocess: {path}: {error}") from error


def _read_waveform(config: dict[str, Any]) -> AudioPreprocess:
    return AudioPreprocess(
        rate=int(config.get("sampling_rate", 16000)),
        normalize=bool(config.get("do_normalize", True)),
        padding_value=float(config.get("padding_value", 0.0)),
    )


def _read_whisper(config: dict[str, Any]) -> AudioPreprocess:
    return AudioPreprocess(
        rate=int(config.get("sampling_rate", 16000)),
        features="whisper",
        bins=int(config.get("feature_size", 80)),
        seconds=float(config.get("chunk_length", 30)),
    )


def _read_ast(config: dict[str, Any]) -> AudioPreprocess:
    scaled = config.get("do_normalize", True)
    return AudioPreprocess(
        rate=int(config.get("sampling_rate", 16000)),
        features="kaldi",
        window="hann",
        bins=int(config.get("num_mel_bins", 128)),
        frames=int(config.get("max_length", 1024)),
        mean=float(config.get("mean", -4.2677393)) if scaled else 0.0,
        std=2 * float(config.get("std", 4.5689974)) if scaled else 1.0,  # AST divides by twice its std
    )


def _read_seamless(config: dict[str, Any]) -> AudioPreprocess:
    return AudioPreprocess(
        rate=int(config.get("sampling_rate", 16000)),
        features="kaldi",
        gain=2.0**15,
        normalize=True,
        bins=int(config.get("num_mel_bins", 80)),
        stack=int(config.get("stride", 2)),
        padding_value=float(config.get("padding_value", 0.0)),
    )


_EXTRACTORS: dict[str, Callable[[dict[str, Any]], AudioPreprocess]] = {
    "Wav2Vec2FeatureExtractor": _read_waveform,
    "WhisperFeatureExtractor": _read_whisper,
    "ASTFeatureExtractor": _read_ast,
    "SeamlessM4TFeatureExtractor": _read_seamless,
}
"""Transformers' feature extractor -> what reads its numbers."""
_FIXED_NUMBERS: dict[str, dict[str, float]] = {
    "Wav2Vec2FeatureExtractor": {"feature_size": 1},
    "WhisperFeatureExtractor": {"n_fft": 400, "hop_length": 160, "padding_value": 0.0, "dither": 0.0},
}
"""Feature extractor -> numbers of its that are the same in every known model."""


def _read_resize_and_crop(
    config: dict[str, Any], path: Path
) -> tuple[int | tuple[int, int] | None, tuple[int, int] | None]:
    resize = _parse_size(config.get("size"), path) if config.get("do_resize", True) else None
    if config.get("keep_aspect_ratio") and isinstance(resize, tuple):
        raise SourceError(
            f"{path}: keep_aspect_ratio makes each image of another size; give all one: preprocess: {{kind: image, "
            f"resize: [{resize[0]}, {resize[1]}], mean: ..., std: ...}}"
        )
    crop_size = _parse_size(config.get("crop_size"), path) if config.get("do_center_crop", False) else None
    crop = (crop_size, crop_size) if isinstance(crop_size, int) else crop_size
    fraction = config.get("crop_pct")  # ConvNeXt: resize to size / crop_pct, then cut; whole from 384 on
    if fraction is not None and isinstance(resize, int):
        return (int(resize / fraction), (resize, resize)) if resize < 384 else ((resize, resize), None)
    return resize, crop


def _parse_size(size: Any, path: Path) -> int | tuple[int, int] | None:
    """Return an int (shorter side) or (height, width). A bare number is both sides, as for image processors."""
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    if "height" in size and "width" in size:
        return int(size["height"]), int(size["width"])
    if set(size) == {"shortest_edge"}:
        return int(size["shortest_edge"])
    if set(size) == {"shortest_edge", "longest_edge"}:
        longest = int(size["longest_edge"])
        raise SourceError(
            f"{path}: size {size} makes each image of another size; give all one: "
            f"preprocess: {{kind: image, letterbox: [{longest}, {longest}], mean: ..., std: ...}}, or a smaller square"
        )
    raise SourceError(f"{path}: size {size} is neither height and width nor shortest_edge; declare `preprocess:`")


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file."""
    value = _read_json(path)
    if value is not None and not isinstance(value, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return value or {}


def _read_json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{path}: is not JSON: {error}") from error


_READERS: dict[str, Callable[[Path], PreprocessSpec]] = {
    "text": _read_text,
    "language": _read_language,
    "image": _read_image,
    "audio": _read_audio,
    "image-text": _read_pair,
}
"""Kind -> what reads it from a model's folder."""
