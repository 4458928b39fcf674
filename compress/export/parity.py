"""Compare an exported graph with the model that it was made from, on real inputs.

Of a graph the first layer that differs is named. Of a decoder a real prompt is read in one call, then token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.forward import run
from compress.blocks.materialise import plain
from compress.errors import ExportError, SourceError
from compress.graph.cleanup import HALVES
from compress.graph.halves import split_halves
from compress.graph.layers import find_layers
from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.graph.seeing import sees, split_sight
from compress.graph.specs import cache_pairs
from compress.models.batch_axis import MOST_CHOICES, SMALLEST, TOLERANCE
from compress.models.load import OnnxModel, TorchModel
from compress.rounding.measure import CHOOSERS, relative_difference, share_of_strangers
from runtime.backends.onnxruntime_cpu import InferenceSession, failures
from runtime.encode.language import CACHE, FEATURES, IDS, MASK, POSITIONS
from runtime.encode.seq2seq import DECODER_IDS

HALF_TOLERANCE = 2e-2
"""Of a file that computes in half precision, whose own rounding is what differs."""
DECODED = 4
"""Tokens of each prompt that are read one at a time."""
COMPARED_TOKENS = 64
"""Of each text: the logits of 512 tokens over the 151,936 words of Qwen2.5-Coder are 311 MB, twice."""
PADDED = 3
"""Tokens of padding before a text that is compared beside some. A tiny GIT, whose mask is wrong there, differed by 0.26
of the largest logit behind 12."""


def check_parity(loaded: TorchModel | OnnxModel, model: ir.Model, batches: Sequence[Feeds]) -> float | None:
    """Compare torch with the graph over batches of real inputs and return the largest relative difference.

    Of an ONNX source its file as it is and the cleaned graph are compared; None where ONNX Runtime does not run that
    file. Of choices, which are whole numbers and rows in an order of their own, a share of MOST_CHOICES may differ.
    Raises ExportError that names the first layer whose outputs differ beyond the tolerance, and SourceError where
    those of an ONNX file are not finite.
    """
    if isinstance(loaded, OnnxModel):
        return _check_clean_up(loaded, model, batches)
    session = open_session(model)
    worst, choices = 0.0, 0.0
    for feeds, outputs in zip(batches, run_batches(session, batches), strict=True):
        expected = _run_torch(loaded, feeds)
        for name, values in outputs.items():
            if values.shape != expected[name].shape:
                raise ExportError(
                    f"parity: output {name!r} has shape {values.shape}, torch gives {expected[name].shape}"
                )
            differs, share = _compare_outputs(expected[name], values, TOLERANCE, _puts_in_order(model))
            worst, choices = max(worst, differs), max(choices, share)
    if worst > TOLERANCE or choices > MOST_CHOICES:
        where = first_difference(loaded, model, batches)
        what = f"by {worst:.2e} of the largest output (allowed {TOLERANCE:.0e})"
        what += f" and in {choices:.1%} of the choices (allowed {MOST_CHOICES:.0%})" if choices else ""
        raise ExportError(f"parity: torch and ONNX differ {what}; {where}")
    return worst


def _check_clean_up(loaded: OnnxModel, model: ir.Model, batches: Sequence[Feeds]) -> float | None:
    """Compare an ONNX file as it is with its cleaned graph, in ONNX Runtime; None where it does not run the file."""
    try:
        expected = list(run_batches(open_session(loaded.path), ({**feeds, **loaded.shared} for feeds in batches)))
    except failures():  # bfloat16 has no kernels for CPUs; cleaned it computes in float32
        return None
    tolerance, worst = HALF_TOLERANCE if HALVES in loaded.clean_up.done else TOLERANCE, 0.0
    for want, got in zip(expected, run_batches(open_session(model), batches), strict=True):
        for name, values in got.items():
            if values.shape != want[name].shape:
                raise ExportError(
                    f"{loaded.path}: output '{name}' has shape {want[name].shape}, cleaned {values.shape}"
                )
            differs, share = _compare_outputs(want[name], values, tolerance, _puts_in_order(model))
            if differs > tolerance and not np.isfinite(want[name]).all():
                raise SourceError(f"{loaded.path}: its output '{name}' holds NaN or infinity for samples of the data")
            if differs > tolerance or share > MOST_CHOICES:
                difference, allowed = (differs, tolerance) if differs > tolerance else (share, MOST_CHOICES)
                raise ExportError(
                    f"{loaded.path}: output '{name}' of the file and of its cleaned graph differ by {difference:.2e} "
                    f"(allowed {allowed:.0e}); done was: {loaded.clean_up}. A file that draws random numbers cannot be "
                    "compared: export it without"
                )
            worst = max(worst, differs)
    return worst


def _puts_in_order(model: ir.Model) -> bool:
    """Return whether the graph chooses by scores, so that two rows of nearly equal ones may change places."""
    return any(node.op_type in CHOOSERS for node in model.graph)


def _compare_outputs(expected: np.ndarray, got: np.ndarray, tolerance: float, ordered: bool) -> tuple[float, float]:
    """Return the largest relative difference, and the share of choices that fell otherwise, as ties do.

    Choices are whole numbers, texts, yes and no; in `ordered` outputs rows [n, rows, ...] in another order, too.
    """
    if expected.dtype.kind not in "fc":
        return 0.0, float(np.mean(expected != got)) if expected.size else 0.0
    differs = relative_difference(expected, got, SMALLEST)
    if differs <= tolerance or not ordered:
        return differs, 0.0
    share = share_of_strangers(expected, got, tolerance, MOST_CHOICES, SMALLEST)
    return (0.0, share) if share <= MOST_CHOICES else (differs, 0.0)


def first_difference(loaded: TorchModel, model: ir.Model, batches: Sequence[Feeds]) -> str:
    """Return a sentence that names the first layer, in graph order, whose output differs."""
    calls = _record_module_outputs(loaded, batches[0])
    known = {name for name, _ in calls}
    layers = [layer for layer in find_layers(model) if layer.name in known and layer.output.name]
    names = {layer.name for layer in layers}
    outputs = [layer.output.name or "" for layer in layers]
    # ONNX Runtime opens no graph without outputs
    got = next(run_batches(open_session(tap(model, outputs)), batches[:1])) if layers else {}
    for layer in layers:
        values = got[layer.output.name or ""]
        same = [array for array in _take_until_next_layer(calls, layer.name, names) if array.size == values.size]
        differences = [relative_difference(array.ravel(), values.ravel()) for array in same]
        if differences and min(differences) > TOLERANCE:
            return f"the first layer to differ is {layer.name} ({layer.op}), by {min(differences):.2e}"
    return "every layer with a weight agrees: the difference is in what stands between or after them"


Calls = list[tuple[str, np.ndarray]]
"""(module, its output) in the order of the calls."""


def _take_until_next_layer(calls: Calls, layer: str, layers: Collection[str]) -> list[np.ndarray]:
    """Return outputs of a layer and of modules up to the next layer: the exporter folds batch norms into it."""
    start = next(i for i, (name, _) in enumerate(calls) if name == layer)
    after = takewhile(lambda call: call[0] not in layers, calls[start + 1 :])
    return [calls[start][1], *(array for _, array in after)]


def _record_module_outputs(loaded: TorchModel, feeds: Feeds) -> Calls:
    """Record the outputs of every module without modules of its own, in the order of the calls."""
    calls: Calls = []
    leaves = [(name, module) for name, module in loaded.module.named_modules() if not any(module.children())]
    hooks = [module.register_forward_hook(_make_recording_hook(calls, plain(name))) for name, module in leaves]
    try:
        _run_torch(loaded, feeds)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _make_recording_hook(calls: Calls, name: str) -> Callable[[torch.nn.Module, object, object], None]:
    def hook(module: torch.nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            calls.append((name, output.detach().numpy().copy()))

    return hook


def _run_torch(loaded: TorchModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {loaded.parameters[n]: torch.from_numpy(np.ascontiguousarray(feeds[n])) for n in loaded.input_names}
    outputs = run(loaded.module, tensors)
    return {name: part.numpy() for name, part in zip(loaded.output_names, outputs.values(), strict=True)}


def check_decoder_parity(loaded: TorchModel, model: ir.Model, batches: Sequence[Feeds]) -> float:
    """Return the largest difference of any logits, relative to the largest logit. ExportError beyond the tolerance.

    `batches`: feeds of one text each, with empty caches, and what the model reads of its images, if it has some; of
    texts without any COMPARED_TOKENS are read.
    """
    vision, decoder = split_sight(model) if sees(model) else (None, model)
    session, looking = open_session(decoder), None if vision is None else open_session(vision)
    pixels = "" if looking is None else str(looking.get_inputs()[0].name)
    differences = []
    for number, feeds in enumerate(cut_text(feeds, pixels) for feeds in batches):
        given = {name: values for name, values in feeds.items() if not name.startswith((CACHE, FEATURES, POSITIONS))}
        tensors = {name: torch.from_numpy(values) for name, values in given.items()}
        expected = next(iter(run(loaded.module, tensors).values())).numpy()  # [1, t, vocab]
        features = {} if looking is None else look(looking, feeds)
        ids, mask, n = pad(feeds[IDS], number, features)
        pieces = _run_by_pieces(session, cache_pairs(model), {**feeds, IDS: ids, MASK: mask}, features)
        differences.append((compare_padded(expected, np.concatenate(list(pieces), axis=1), n), n))
    return judge_logits(differences)


def cut_text(feeds: Feeds, pixels: str) -> Feeds:
    """Return the feeds of a text's first COMPARED_TOKENS tokens; those of one with images, fed as `pixels`, whole."""
    if pixels in feeds:
        return feeds
    read = {name: part for name, part in feeds.items() if not name.startswith(CACHE) and part.shape == feeds[IDS].shape}
    return feeds | {name: part[:, :COMPARED_TOKENS] for name, part in read.items()}


def pad(ids: np.ndarray, number: int, features: Feeds) -> tuple[np.ndarray, np.ndarray, int]:
    """Return every second text of ids, int64 [1, t], without its last tokens and behind as many of padding; its mask.

    And how many these are: 0 of the others, of short texts, and of one with images, of which `features` are.
    """
    n = PADDED if number % 2 and ids.shape[1] > 2 * PADDED and not features else 0
    mask = np.ones_like(ids)
    mask[:, :n] = 0
    return np.pad(ids[:, : ids.shape[1] - n], ((0, 0), (n, 0))), mask, n


def compare_padded(expected: np.ndarray, got: np.ndarray, n_padded: int) -> float:
    """Return the relative difference of logits [1, t, vocab], the second of a text as `pad` gives it."""
    return relative_difference(expected[:, : expected.shape[1] - n_padded], got[:, n_padded:])


def judge_logits(differences: Sequence[tuple[float, int]]) -> float:
    """Return the largest difference of (difference, tokens of padding before the text). ExportError above TOLERANCE."""
    worst = max(differs for differs, _ in differences)
    if worst > TOLERANCE:
        plain = max(differs for differs, n_padded in differences if not n_padded)
        beside = "beside padding " if plain <= TOLERANCE else ""
        raise ExportError(
            f"parity: {beside}the logits of torch and of ONNX with its key-value cache differ by {worst:.2e} of the "
            f"largest (allowed {TOLERANCE:.0e})"
        )
    return worst


def look(vision: InferenceSession, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the features of a text's images, [n, width] by name; {}: it has none."""
    pixels = vision.get_inputs()[0]
    if pixels.name not in feeds:
        return {}
    images = feeds[pixels.name].reshape(-1, *pixels.shape)
    made = list(run_batches(vision, [{pixels.name: image} for image in images]))
    return {name: np.concatenate([each[name] for each in made]) for name in made[0]}


def check_encoder_decoder_parity(loaded: TorchModel, model: ir.Model, batches: Sequence[Feeds]) -> float:
    """Return the largest difference of any logits, relative to the largest logit. ExportError beyond the tolerance.

    `batches`: feeds with empty caches. The encoder runs once, the decoder reads all but the last tokens of a text in
    one call and those one at a time.
    """
    encoder, decoder = (open_session(half) for half in split_halves(model))
    worst = 0.0
    for feeds in batches:
        tensors = {loaded.parameters[name]: torch.from_numpy(feeds[name]) for name in loaded.input_names}
        expected = next(iter(run(loaded.module, tensors).values())).numpy()  # [n, t, vocab]
        got = np.concatenate(list(_run_halves(encoder, decoder, feeds)), axis=1)
        worst = max(worst, relative_difference(expected, got))
    if worst > TOLERANCE:
        raise ExportError(
            f"parity: the logits of torch and of ONNX, encoder and decoder, differ by {worst:.2e} of the largest "
            f"(allowed {TOLERANCE:.0e})"
        )
    return worst


def _run_halves(
    encoder: InferenceSession, decoder: InferenceSession, feeds: Mapping[str, np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the logits [n, t, vocab] of the texts' first part, then of each of their last tokens."""
    crosses = [value.name for value in encoder.get_outputs()]
    given = encoder.run(crosses, {value.name: feeds[value.name] for value in encoder.get_inputs()})
    names = [value.name for value in decoder.get_inputs()]
    state = {**feeds, **dict(zip(crosses, given, strict=True))}
    presents = [value.name for value in decoder.get_outputs() if value.name != "logits"]
    ids = feeds[DECODER_IDS]
    length = ids.shape[1]
    start = max(length - DECODED, 1)
    for low, high in [(0, start), *((t, t + 1) for t in range(start, length))]:
        state[DECODER_IDS] = ids[:, low:high]
        logits, *present = decoder.run(["logits", *presents], {name: state[name] for name in names})
        state |= {n.replace("present", "past_key_values", 1): v for n, v in zip(presents, present, strict=True)}
        yield logits


def _run_by_pieces(
    session: InferenceSession,
    pairs: Mapping[str, str],
    feeds: Mapping[str, np.ndarray],
    features: Mapping[str, np.ndarray],
) -> Iterator[np.ndarray]:
    """Yield the logits [1, n, vocab] of the prompt's first part, then of each of its last tokens.

    `features`: of the prompt's images, if it has some.
    """
    none = {name: values for name, values in feeds.items() if name.startswith(FEATURES)}
    ids, mask = feeds[IDS], feeds[MASK]
    length = ids.shape[1]
    cache = {past: feeds[past] for past in pairs}
    start = max(length - DECODED, 1)
    for low, high in [(0, start), *((t, t + 1) for t in range(start, length))]:
        seen = {**none, **features} if low == 0 else none
        inputs = {IDS: ids[:, low:high], MASK: mask[:, :high], **cache, **seen}
        logits, *present = session.run(["logits", *pairs.values()], inputs)
        cache = dict(zip(pairs, present, strict=True))
        yield logits
