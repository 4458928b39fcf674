"""What a model takes: the names of its inputs, and one sample's shapes after preprocessing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from torch import nn

from compress.errors import SourceError, place_errors
from compress.facts import SampleShapes
from compress.models import huggingface
from compress.models.meta import OpenedModel
from compress.models.onnx_ends import onnx_io
from compress.models.source import Source
from compress.specs import OF_FOLDERS, ModelSpec
from compress.tasks import find_torch_task
from compress.tasks.base import FREE_AXES
from runtime.bundle.tensors import TensorSpec
from runtime.encode.audio import MASKS, feature_shape
from runtime.encode.images import compute_resized
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
from runtime.encode.seq2seq import DECODER_IDS
from runtime.encode.texts import FEEDS, find_width
from runtime.tasks import find_task


def model_inputs(opened: OpenedModel) -> tuple[str, ...]:
    """Return the names of the model's inputs, as the ONNX file will have them."""
    if opened.source.onnx is not None:
        return tuple(value.name for value in onnx_io(opened.source.spec, opened.source.onnx).inputs)
    assert opened.module is not None
    return tuple(parameters(opened.source, opened.module))


def feeds_shapes(
    source: Source, preprocess: PreprocessSpec, samples: SampleShapes, names: Sequence[str]
) -> SampleShapes:
    """Return shape and dtype of what each input is fed with for one sample, by name. `samples`: the data's, by role.

    `names`: of the model's inputs. Texts are taken at `max_length`. SourceError where preprocessing and samples do not
    say the size of an input.
    """
    if not isinstance(preprocess, Seq2SeqPreprocess):
        dtypes = _declared_dtypes(source)
        shapes = _shapes_of(source, preprocess, samples, names)
        return {name: (shape, dtypes.get(name, dtype)) for name, (shape, dtype) in shapes.items()}
    read = [name for name in names if name != DECODER_IDS]
    given = _shapes_of(source, preprocess.source or TensorPreprocess(), samples, read)
    return {**given, DECODER_IDS: ((preprocess.target.most_tokens - 1,), "int64")}


def _shapes_of(source: Source, preprocess: PreprocessSpec, samples: SampleShapes, names: Sequence[str]) -> SampleShapes:
    """Return shape and dtype of what these inputs are fed with for one sample, made by one kind of preprocessing."""
    if isinstance(preprocess, TextPreprocess) and source.onnx is not None:
        with place_errors("preprocess"):
            width = find_width(preprocess, onnx_io(source.spec, source.onnx).inputs)
        return dict.fromkeys(names, ((width or preprocess.max_length,), "int64"))
    if isinstance(preprocess, TextPreprocess | LanguagePreprocess):
        return dict.fromkeys(names, ((preprocess.max_length,), "int64"))
    if isinstance(preprocess, ImagePreprocess):
        shape = _image_shape(preprocess, samples)
        return dict.fromkeys(names, (shape, "float32"))
    if isinstance(preprocess, ImageTextPreprocess):
        text, image = (preprocess.text.max_length,), _image_shape(preprocess.image, samples)
        return {name: (text, "int64") if name in FEEDS else (image, "float32") for name in names}
    if isinstance(preprocess, AudioPreprocess):
        return _audio_shapes(source, preprocess, samples, names)
    missing = [name for name in names if name not in samples]
    if missing:
        raise SourceError(
            f"model: no data for its input {', '.join(missing)}; the data has: {', '.join(samples)}. Say which column "
            "it is: columns: {INPUT: COLUMN} in each set of data"
        )
    return {name: (samples[name][0], _tensor_dtype(samples[name][1])) for name in names}


def parameters(source: Source, module: nn.Module) -> dict[str, str]:
    """Return input name -> the parameter of the module's forward that takes it, in forward's order.

    An image model's input is always "pixel_values". Parameters with a default are not fed, but for a text model's own.
    """
    if source.kind == "huggingface":
        names = huggingface.input_names(source.spec, module.wrapped, huggingface.load_config(source), source.folder)  # type: ignore[arg-type]
        return dict(zip(names, inspect.signature(module.forward).parameters, strict=False))
    taken = inspect.signature(module.forward).parameters
    positional = [p for p in taken.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    task = find_task(source.task)
    if task.reads_texts:
        positional = [p for p in positional if p.name in FEEDS]
    else:
        optional = {"audio": MASKS, "image-text": FEEDS}.get(task.preprocess or "", ())
        positional = [p for p in positional if p.default is p.empty or p.name in optional]
    of_images = task.preprocess == "image"
    single = [p for p in positional if p.name not in MASKS]
    if not positional or (task.preprocess in ("image", "audio") and len(single) != 1):
        wanted = "one input" if task.preprocess in ("image", "audio") else "named inputs"
        raise SourceError(
            f"{source.name}: task {source.task} needs {wanted}, but forward is {inspect.signature(module.forward)}"
        )
    if of_images:
        return {"pixel_values": positional[0].name}
    return {p.name: p.name for p in positional}


def check_feeds(spec: ModelSpec, names: Mapping[str, str], feeds: Mapping[str, object]) -> None:
    """Raise SourceError if an input is not fed."""
    missing = [name for name in names if name not in feeds]
    if missing:
        raise SourceError(f"{spec.source}: input {', '.join(missing)} is not fed; the feeds are: {', '.join(feeds)}")


def input_specs(spec: ModelSpec, names: Mapping[str, str], feeds: SampleShapes) -> tuple[TensorSpec, ...]:
    """Return the inputs with dynamic dimensions named: the first "batch", a text model's second "sequence"."""
    task = find_torch_task(spec.task)
    texts = [name for name in names if task.task.reads_texts and len(feeds[name][0]) == 1]
    lengths = task.lengths or dict.fromkeys(texts, "sequence")
    return tuple(
        TensorSpec(name, feeds[name][1], ("batch", *((lengths[name],) if name in lengths else feeds[name][0])))
        for name in names
    )


def output_specs(spec: ModelSpec, outputs: SampleShapes) -> tuple[TensorSpec, ...]:
    """Return the outputs under their final names: "logits", "last_hidden_state", or forward's own for a generic task.

    Of several outputs a forward gives a dict with the task's names, or a tuple in the task's order. The shapes in
    `outputs` are [1, ...]: batch dimension included. SourceError where the task needs other outputs.
    """
    task = find_torch_task(spec.task)
    any_fit = task.any_outputs and not spec.source.startswith(OF_FOLDERS)
    if any_fit or not any(task.outputs.values()):
        return tuple(TensorSpec(name, dtype, ("batch", *shape[1:])) for name, (shape, dtype) in outputs.items())
    names = tuple(outputs if outputs.keys() == task.outputs.keys() else task.outputs)  # or in the task's order
    ranks = [len(shape) for shape, _ in outputs.values()]
    if len(outputs) != len(names) or ranks != [len(task.outputs[name]) for name in names]:
        shown = ", ".join(f"{key} {list(s)}" for key, (s, _) in outputs.items())
        raise SourceError(f"{spec.source}: task {spec.task} needs {task.describe_outputs()}, but forward gives {shown}")
    specs = []
    for name, (shape, dtype) in zip(names, outputs.values(), strict=True):
        dims = (axis if axis in FREE_AXES else size for axis, size in zip(task.outputs[name], shape, strict=True))
        specs.append(TensorSpec(name, dtype, tuple(dims)))
    n_classes = task.count_classes(specs)
    if n_classes is not None and spec.class_names and len(spec.class_names) != n_classes:
        raise SourceError(f"model.class_names: {len(spec.class_names)} names, but the model has {n_classes} classes")
    return tuple(specs)


def _image_shape(preprocess: ImagePreprocess, samples: SampleShapes) -> tuple[int, ...]:
    size = _image_size(preprocess, samples)
    return (preprocess.n_channels, *size) if preprocess.layout == "NCHW" else (*size, preprocess.n_channels)


def _image_size(preprocess: ImagePreprocess, samples: SampleShapes) -> tuple[int, int]:
    if preprocess.letterbox is not None:
        return preprocess.letterbox
    if preprocess.crop is not None:
        return preprocess.crop
    if isinstance(preprocess.resize, tuple):
        return preprocess.resize
    if "image" not in samples:
        raise SourceError(
            "preprocess: the size of the images is not known; set resize [h, w], crop or letterbox, or give data"
        )
    height, width = samples["image"][0][:2]
    return compute_resized(height, width, preprocess.resize)


def _audio_shapes(
    source: Source, preprocess: AudioPreprocess, samples: SampleShapes, names: Sequence[str]
) -> SampleShapes:
    """Return the feeds of a model of sound, at the declared length, else at that of the first sample."""
    if "audio" not in samples and preprocess.n_samples is None and preprocess.frames is None:
        raise SourceError("preprocess: the length of the audio is not known; set seconds, or give data")
    if preprocess.resample and preprocess.n_samples is None and preprocess.frames is None:
        raise SourceError("preprocess: resample changes the length of audio: set seconds")
    n_samples = samples["audio"][0][0] if "audio" in samples else 0
    shape = feature_shape(preprocess, n_samples)
    n_places = shape[0] if preprocess.features == "kaldi" else shape[-1]
    declared = {value.name: value for value in onnx_io(source.spec, source.onnx).inputs} if source.onnx else {}
    feeds = {}
    for name in names:
        value = declared.get(name)
        own = (n_places,) if name in MASKS else shape
        with_channel = value is not None and name not in MASKS and len(value.shape) == len(own) + 2
        dtype = value.dtype if value is not None else ("int64" if name in MASKS else "float32")
        feeds[name] = ((1, *own) if with_channel else own, dtype)
    return feeds


def _declared_dtypes(source: Source) -> dict[str, str]:
    """Return the dtypes of an ONNX file's inputs, which its samples are encoded in; {} of another source."""
    if source.onnx is None:
        return {}
    return {value.name: value.dtype for value in onnx_io(source.spec, source.onnx).inputs}


def _tensor_dtype(dtype: str) -> str:
    return "float32" if dtype.startswith("float") else dtype
