"""Audio to a model's input, as a record says how: waveforms, Whisper's log-mel spectrograms, Kaldi's filter banks.

wav files of whole numbers are read by the standard library; soundfile reads other files, soxr changes rates.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take
from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.bundle.tensors import TensorSpec
from runtime.encode.split import Split, keep_whole, repeat_samples
from runtime.errors import MissingDependency, UsageError

AUDIO, RATE = "audio", "rate"
AUDIO_COLUMNS = (AUDIO, RATE)
"""Columns of a sample: its waveform, and the samples of it in a second."""
MASKS = ("attention_mask", "padding_mask")
"""Names of the input that says which places hold sound."""
RATES = range(100, 1_000_000)
LONGEST_SECONDS = 3600.0
"""An hour: a bundle that asks for more would have each of its recordings padded to it."""
MOST_SAMPLES = 2**27
"""Of one waveform: two hours at 16000 a second."""
MOST_FRAMES, MOST_BINS = 2**20, 1024
WHISPER_WINDOW, WHISPER_HOP, WHISPER_HIGH = 400, 160, 8000.0
"""Samples of a frame, samples between frames, the highest frequency in Hz."""
KALDI_WINDOW, KALDI_HOP, KALDI_LOW = 0.025, 0.010, 20.0
"""Seconds of a frame, seconds between frames, the lowest frequency in Hz."""
KALDI_FLOOR, WHISPER_FLOOR = float(np.finfo(np.float32).eps), 1e-10
"""The least energy of which a logarithm is taken."""
VARIANCE_FLOOR = 1e-7
PCM = 32768.0
"""What -1..1 is in 16 bits."""
LongerAudio = Literal["chunks", "pauses", "cut"]
LEAST_REST = 0.1
"""Seconds: a shorter rest behind the last chunk is left out. Models with a mask find no frame in a few samples."""
PAUSE, PAUSES_SHARE = 0.1, 5
"""Seconds of a pause; the part of a chunk's length, one over so many, in which one is sought before its end."""


@dataclass(frozen=True)
class AudioPreprocess:
    """Audio to a model's input: one channel at `rate`, as a waveform or as one of two kinds of log-mel spectrogram."""

    kind: Literal["audio"] = "audio"
    """Discriminator."""
    rate: int = 16000
    """Samples a second that the model takes."""
    resample: bool = False
    """Change audio of another rate (by soxr, quality HQ); false: refuse it."""
    seconds: float | None = None
    """Length of every sample: shorter ones are filled with silence, for others see `longer`. None: as they come."""
    features: Literal["waveform", "whisper", "kaldi"] = "waveform"
    """waveform: [samples]. whisper: log-mel of Whisper, [bins, frames]. kaldi: log-mel of Kaldi's fbank (25 ms each 10
    ms, pre-emphasis 0.97, no dither), [frames, bins]."""
    normalize: bool = False
    """To mean 0 and variance 1: waveforms each as a whole, Kaldi's features in each bin."""
    bins: int = 80
    """Mel bins of a spectrogram."""
    window: Literal["hann", "povey"] = "povey"
    """Of Kaldi's frames."""
    gain: float = 1.0
    """Multiplies samples of -1..1 before Kaldi's features: 32768 for a model that was trained on 16-bit numbers."""
    frames: int | None = None
    """Length of Kaldi's features: shorter ones are filled with `padding_value`, for others see `longer`. None: as they
    come."""
    longer: LongerAudio | None = None
    """How recordings above `seconds` or `frames` are read. chunks: in pieces of that length, the last one shorter.
    pauses: in pieces of at most that length, each to where it is quietest near its end. cut: their beginning alone.
    null: in a recipe as the task has it (chunks of audio-classification, pauses of automatic-speech-recognition, cut of
    others); in a bundle cut."""
    stack: int = 1
    """So many of Kaldi's frames are one: [frames / stack, bins * stack]."""
    padding_value: float = 0.0
    """Fills up features to `frames`; waveforms are filled with it after `normalize`."""
    mean: float = 0.0
    """Subtracted last, from filled-up features."""
    std: float = 1.0
    """Divides after `mean`."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.rate not in RATES:
            raise ValueError(f"rate is {self.rate}: give samples a second, {RATES.start} to {RATES.stop - 1}")
        if self.seconds is not None and not 0 < self.seconds <= LONGEST_SECONDS:
            raise ValueError(f"seconds is {self.seconds}: give more than 0 and at most {LONGEST_SECONDS:g}")
        if not 1 <= self.bins <= MOST_BINS or not 1 <= self.stack <= MOST_BINS:
            raise ValueError(f"bins {self.bins} and stack {self.stack} must be 1 to {MOST_BINS}")
        if self.frames is not None and not 1 <= self.frames <= MOST_FRAMES:
            raise ValueError(f"frames is {self.frames}: give 1 to {MOST_FRAMES}")
        for name in ("gain", "padding_value", "mean", "std"):
            if not abs(getattr(self, name)) <= 1e12:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number of at most 1e12 in size")
        if abs(self.std) < 1e-12:
            raise ValueError(f"std is {self.std}: give a number of at least 1e-12 in size")
        own = {name: getattr(self, name) for name in ("frames", "stack", "gain")}
        if self.features != "kaldi" and own != {"frames": None, "stack": 1, "gain": 1.0}:
            raise ValueError(f"frames, stack and gain are of features: kaldi, not of {self.features}")
        if self.features == "whisper" and self.normalize:
            raise ValueError("normalize is of waveforms and of features: kaldi; Whisper's are between about -1 and 2")
        if self.longer is not None and self.longest is None:
            lengths = "seconds or frames" if self.features == "kaldi" else "seconds"
            raise ValueError(
                f"longer is {self.longer}, and no length is given beyond which audio is long: set {lengths}"
            )

    @property
    def n_samples(self) -> int | None:
        """Return the samples of every waveform at `rate`; None: as they come."""
        return None if self.seconds is None else max(1, round(self.seconds * self.rate))

    @property
    def longest(self) -> int | None:
        """Return the samples at `rate` that are read of a sound at most, by `seconds` or `frames`; None: all."""
        size, hop = _kaldi_sizes(self.rate)
        by_frames = None if self.frames is None else (self.frames - 1) * hop + size
        return min((n for n in (self.n_samples, by_frames) if n is not None), default=None)


@dataclass(frozen=True)
class AudioEncoder:
    """Samples with the columns "audio" and "rate" -> the model's input, and its mask where it takes one."""

    spec: AudioPreprocess
    input: TensorSpec
    mask: TensorSpec | None = None

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch: {input: [n, ...] in its dtype}, with {mask: [n, T]}, 1 where there is sound.

        What is longer than the model reads is cut: `split_samples` makes rows of it. "audio" holds arrays [T] of floats
        in -1..1 or of int16, or [T, channels]; paths; or what `datasets` has: {"array", "sampling_rate"}, {"bytes",
        "path"}. "rate" is needed for arrays alone. UsageError: a sample is none of these, is of another rate than the
        model's without `resample`, or of another length than the model takes.
        """
        waveforms = [
            to_waveform(item, rate, self.spec, f"audio {i}")
            for i, (item, rate) in enumerate(_pair_rates(columns, rows))
        ]
        values, mask = make_features(waveforms, self.spec, self._find_length(), masked=self.mask is not None)
        extra = len(self.input.shape) - values.ndim
        values = values.reshape(len(values), *(1,) * extra, *values.shape[1:])  # [n, 1, ...] for a channel
        wanted = self.input.shape
        if any(isinstance(want, int) and want != have for want, have in zip(wanted[1:], values.shape[1:], strict=True)):
            raise UsageError(
                f"audio is {list(values.shape[1:])} after preprocessing, but the model's input '{self.input.name}' "
                f"takes {list(wanted[1:])}: set seconds{', frames' if self.spec.features == 'kaldi' else ''} or bins"
            )
        feeds = {self.input.name: values.astype(self.input.dtype, copy=False)}
        return feeds if self.mask is None else feeds | {self.mask.name: mask.astype(self.mask.dtype)}

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return the inputs; nothing more is known of them."""
        return self.encode(columns, rows), {}

    def split_samples(self, columns: Columns) -> Split:
        """Return a row for each piece of a recording that is longer than the model reads, as the spec's `longer` says.

        Sizes are samples at the spec's rate. Recordings of one piece stay as they are; the pieces of others are held in
        memory, as {"array", "sampling_rate"}. UsageError as of `encode`.
        """
        if self.spec.longer in (None, "cut"):
            return keep_whole(columns)
        pieces = [
            _split_recording(item, rate, self.spec, f"audio {i}") for i, (item, rate) in enumerate(_pair_rates(columns))
        ]
        if all(len(each) == 1 for each in pieces):
            return keep_whole(columns)
        samples = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
        items, sizes = zip(*(piece for each in pieces for piece in each), strict=True)
        return Split({**repeat_samples(columns, samples), AUDIO: list(items)}, samples, np.array(sizes))

    def _find_length(self) -> int | None:
        """Return how long the model's input is, in samples or in frames; None where it takes any length."""
        axis = -2 if self.spec.features == "kaldi" else -1
        size = self.input.shape[axis]
        return size if isinstance(size, int) else None


def make_audio_encoder(spec: AudioPreprocess, inputs: tuple[TensorSpec, ...]) -> AudioEncoder:
    """Make the encoder; UsageError if the model's inputs are not one of sound, and perhaps its mask."""
    masks = [value for value in inputs if value.name in MASKS]
    others = [value for value in inputs if value.name not in MASKS]
    rank = 2 if spec.features == "waveform" else 3
    if len(others) != 1 or len(masks) > 1 or len(others[0].shape) not in (rank, rank + 1):
        shapes = ", ".join(f"{value.name} {list(value.shape)}" for value in inputs)
        raise UsageError(
            f"audio preprocessing with features: {spec.features} feeds one input of {rank} dimensions (or {rank + 1}, "
            f"with a channel), and one named {' or '.join(MASKS)}; the model has {shapes}: use kind: tensor"
        )
    if others[0].dtype not in ("float16", "float32", "float64"):
        raise UsageError(f"input '{others[0].name}' is {others[0].dtype}; audio is made floating-point")
    return AudioEncoder(spec, others[0], masks[0] if masks else None)


def feature_shape(spec: AudioPreprocess, n_samples: int) -> tuple[int, ...]:
    """Return the shape of one sample's features; `n_samples`: of its waveform at the model's rate."""
    n_samples = spec.n_samples or n_samples
    if spec.features == "waveform":
        return (n_samples,)
    if spec.features == "whisper":
        return (spec.bins, n_samples // WHISPER_HOP)
    n_frames = spec.frames or _count_kaldi_frames(n_samples, spec.rate)
    return (_count_stacked(spec, n_frames), spec.bins * spec.stack)


def make_features(
    waveforms: Sequence[Array], spec: AudioPreprocess, length: int | None = None, masked: bool = False
) -> tuple[Array, Array]:
    """Return features float32 [n, ...] of `feature_shape`, and int64 [n, T], 1 where they are made of sound.

    `waveforms`: float32 [T] each, at the spec's rate. `length`: of the model's input, in samples or frames, where it
    takes one alone. `masked`: the model takes a mask, so that shorter samples may be filled up to others.
    UsageError where lengths differ and may not.

    As transformers' extractors have it, a waveform is normalised over what is filled in, too, unless there is a mask.
    """
    cut = [waveform[: spec.n_samples] for waveform in waveforms]
    fixed = length if masked else None
    if spec.features == "waveform":
        n = _choose_length([len(waveform) for waveform in cut], spec.n_samples, fixed, masked, "samples")
        return _fill_waveforms(cut, n, spec, masked)
    if spec.features == "whisper":
        fixed = fixed and fixed * WHISPER_HOP
        n = _choose_length([len(waveform) for waveform in cut], spec.n_samples, fixed, masked, "samples")
        whole = [np.pad(waveform, (0, n - len(waveform))) for waveform in cut]
        values = np.stack([whisper_features(waveform, spec.rate, spec.bins) for waveform in whole])
        mask = np.arange(n // WHISPER_HOP) * WHISPER_HOP < np.array([[len(waveform)] for waveform in cut])
        return _scale(values, spec), mask.astype(np.int64)
    if spec.n_samples is not None and not masked:
        cut = [np.pad(waveform, (0, spec.n_samples - len(waveform))) for waveform in cut]
    return _fill_frames([kaldi_features(waveform, spec) for waveform in cut], spec, fixed, masked)


def split_chunks(waveform: Array, spec: AudioPreprocess) -> list[Array]:
    """Return a waveform [T] at the spec's rate in the pieces that `spec.longer` says, views; whole if it says cut.

    chunks: of `spec.longest` samples, the last one shorter. A rest of less than LEAST_REST, half a chunk or two of
    Kaldi's frames is left out.
    pauses: each to the middle of the quietest PAUSE in the last fifth of what it may be; the last two share what is
    left about evenly, so that none is a scrap, of which speech models make words that nobody said. To cut where least
    is heard, and not at fixed times: Bain et al. 2023, WhisperX (VAD Cut & Merge).
    """
    n = spec.longest
    if n is None or spec.longer in (None, "cut") or len(waveform) <= n:
        return [waveform]
    if spec.longer == "pauses":
        return _split_at_pauses(waveform, n, round(PAUSE * spec.rate))
    size, hop = _kaldi_sizes(spec.rate)
    least = max(min(round(LEAST_REST * spec.rate), -(-n // 2)), size + hop if spec.features == "kaldi" else 1)
    starts = range(0, max(1, len(waveform) - least + 1), n)
    return [waveform[start : start + n] for start in starts]


def _split_at_pauses(waveform: Array, longest: int, pause: int) -> list[Array]:
    pieces, reach = [], -(-longest // PAUSES_SHARE)
    while len(waveform) > longest:
        end = min(longest, (len(waveform) + reach) // 2)
        begin = end - reach
        size = min(pause, reach)
        # the middle of the quietest `size` samples, rounded up; of equal ones the first
        power = np.concatenate([[0.0], np.cumsum(waveform[begin:end].astype(np.float64) ** 2)])
        end = begin + int((power[size:] - power[:-size]).argmin()) + (size + 1) // 2
        pieces.append(waveform[:end])
        waveform = waveform[end:]
    return [*pieces, waveform]


def whisper_features(waveform: Array, rate: int, bins: int) -> Array:
    """Return Whisper's log-mel spectrogram, float32 [bins, T // 160], of a waveform [T] (Radford et al. 2022, 2.2).

    Power in mel bins (Slaney's scale and norm), log10, at most 8 below the maximum, (x + 4) / 4; frames are centred.
    """
    if len(waveform) <= WHISPER_WINDOW // 2:
        raise UsageError(f"audio of {len(waveform)} samples is too short for a spectrogram: set seconds")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WHISPER_WINDOW) / WHISPER_WINDOW)  # periodic
    frames = _split_frames(np.pad(waveform, WHISPER_WINDOW // 2, mode="reflect"), WHISPER_WINDOW, WHISPER_HOP)[:-1]
    power = np.abs(np.fft.rfft(frames * window)) ** 2  # [frames, 201]
    logs = np.log10(np.maximum(power @ slaney_filters(WHISPER_WINDOW // 2 + 1, bins, rate), WHISPER_FLOOR)).T
    values: Array = ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return values


def kaldi_features(waveform: Array, spec: AudioPreprocess) -> Array:
    """Return Kaldi's log filter banks float32 [frames, bins] of a waveform [T].

    Each frame: mean removed, pre-emphasis, window, power, mel bins from 20 Hz to half the rate, natural log. Without
    dither. Whole frames alone (snip-edges). Then each bin normalised, if the spec says so.
    """
    size, hop = _kaldi_sizes(spec.rate)
    if len(waveform) < size:
        raise UsageError(
            f"audio of {len(waveform)} samples is shorter than a frame of {size}: leave it out, or set seconds"
        )
    frames = _split_frames(waveform * np.float64(spec.gain), size, hop)  # [frames, size]
    frames = frames - frames.mean(axis=1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))  # symmetric
    window = hann if spec.window == "hann" else hann**0.85
    n_fft = 1 << (size - 1).bit_length()
    power = np.abs(np.fft.rfft((frames - 0.97 * before) * window, n_fft)) ** 2
    logs = np.log(np.maximum(power @ kaldi_filters(n_fft // 2 + 1, spec.bins, spec.rate), KALDI_FLOOR))
    if spec.normalize:
        if len(logs) < 2:
            raise UsageError("audio of one frame cannot be normalised: leave it out, or set seconds")
        logs = (logs - logs.mean(axis=0)) / np.sqrt(logs.var(axis=0, ddof=1) + VARIANCE_FLOOR)
    values: Array = logs.astype(np.float32)
    return values


@lru_cache(maxsize=8)
def slaney_filters(n_frequencies: int, bins: int, rate: int) -> Array:
    """Return triangles of equal area over frequencies, float64 [frequencies, bins] (Slaney 1998, Auditory Toolbox)."""
    edges = _slaney_to_hertz(np.linspace(0.0, _hertz_to_slaney(min(WHISPER_HIGH, rate / 2)), bins + 2))
    filters: Array = _triangles(np.linspace(0, rate // 2, n_frequencies), edges) * (2.0 / (edges[2:] - edges[:-2]))
    return filters


@lru_cache(maxsize=8)
def kaldi_filters(n_frequencies: int, bins: int, rate: int) -> Array:
    """Return triangles over mels, 1127 ln(1 + f / 700) from 20 Hz to half the rate, float64 [frequencies, bins]."""
    edges = np.linspace(_hertz_to_kaldi(KALDI_LOW), _hertz_to_kaldi(rate // 2), bins + 2)
    width = rate / (2 * (n_frequencies - 1))
    return _triangles(_hertz_to_kaldi(width * np.arange(n_frequencies)), edges)


def to_waveform(item: Any, rate: Any, spec: AudioPreprocess, name: str = "audio") -> Array:
    """Return one sample as float32 [T] at the spec's rate. UsageError: it cannot be read, or is of another rate."""
    return _change_rate(*load_audio(item, rate, name), spec, name)


def _change_rate(samples: Array, its_rate: int, spec: AudioPreprocess, name: str) -> Array:
    """Return what `load_audio` gave as float32 [T] at the spec's rate. UsageError."""
    waveform = samples.astype(np.float32) / np.float32(PCM) if samples.dtype == np.int16 else samples
    if its_rate == spec.rate:
        return waveform
    if not spec.resample:
        raise UsageError(
            f"{name}: {its_rate} samples a second, and the model takes {spec.rate}: set resample: true in preprocess, "
            "or change the files"
        )
    if len(waveform) * spec.rate > MOST_SAMPLES * its_rate:
        raise UsageError(f"{name}: {len(waveform)} samples at {its_rate} a second become too many: cut it into parts")
    try:
        import soxr
    except ImportError as error:
        raise MissingDependency("soxr", f"changing audio from {its_rate} to {spec.rate} samples a second") from error
    changed: Array = soxr.resample(waveform, its_rate, spec.rate, quality="HQ").astype(np.float32)
    return changed


def _split_recording(item: Any, rate: Any, spec: AudioPreprocess, name: str) -> list[tuple[Any, float]]:
    """Return each piece of one sample as an item of its own, and its samples at the spec's rate. UsageError."""
    samples, its_rate = load_audio(item, rate, name)
    size = len(samples) * spec.rate / its_rate
    if spec.longest is None or size <= spec.longest:
        return [(item, size)]
    waveform = samples if its_rate == spec.rate else _change_rate(samples, its_rate, spec, name)
    pieces = split_chunks(waveform, spec)
    if len(pieces) == 1:
        return [(item, size)]
    return [({"array": piece, "sampling_rate": spec.rate}, float(len(piece))) for piece in pieces]


def _pair_rates(columns: Columns, rows: Rows = None) -> list[tuple[Any, Any]]:
    """Return each row's audio and its rate, None where there is no such column."""
    items = take(columns, AUDIO, rows)
    rates = np.reshape(take(columns, RATE, rows), -1) if RATE in columns else [None] * len(items)
    return list(zip(items, rates, strict=True))


def load_audio(item: Any, rate: float | None = None, name: str = "audio") -> tuple[Array, int]:
    """Return (one channel [T] of float32 in -1..1, or int16 as a file has it; its rate). Channels are mixed.

    `item`: as of `AudioEncoder.encode`. `rate`: of an array that does not tell its own. UsageError.
    """
    if isinstance(item, Mapping):
        if item.get("array") is not None:
            return _check_rate(mix_channels(item["array"], name), item.get("sampling_rate") or rate, name)
        if item.get("bytes") is not None:
            return _read_audio(io.BytesIO(item["bytes"]), name, str(item.get("path") or "bytes"))
        item = item.get("path", item)
    if isinstance(item, (str, Path)):
        path = Path(item)
        if not path.is_file():
            raise UsageError(f"{name}: there is no file {path}")
        return _read_audio(path, name, str(path))
    if isinstance(item, (np.ndarray, list, tuple)):
        return _check_rate(mix_channels(item, name), rate, name)
    raise UsageError(
        f"{name}: expected a path, an array with a rate, or {{array, sampling_rate}}, found {type(item).__name__}"
    )


def mix_channels(samples: Any, name: str = "audio") -> Array:
    """Return [T], or [T, channels] mixed to one, as int16 or float32. UsageError: not a waveform."""
    array = np.asarray(samples)
    if array.dtype.kind != "f" and array.dtype != np.int16:
        raise UsageError(f"{name}: samples are {array.dtype}; give floats in -1..1, or int16")
    if array.ndim not in (1, 2) or not 0 < array.size <= MOST_SAMPLES:
        raise UsageError(f"{name}: shape {array.shape}; a waveform is [samples] or [samples, channels]")
    if array.ndim == 2 and array.shape[1] > array.shape[0]:
        raise UsageError(f"{name}: shape {array.shape}: channels come last, [samples, channels]: transpose it")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    elif array.ndim == 2:
        array = (array / np.float32(PCM) if array.dtype == np.int16 else array).mean(axis=1)
    if array.dtype == np.int16:
        return array
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise UsageError(f"{name}: holds NaN or infinity")
    return array


def stack_waveforms(waveforms: Sequence[Array]) -> Any:
    """Return one array [N, T] where all are of one length and type, else the list."""
    alike = len({(waveform.shape, waveform.dtype) for waveform in waveforms}) == 1
    return np.stack(waveforms) if alike else list(waveforms)


def _check_rate(samples: Array, rate: Any, name: str) -> tuple[Array, int]:
    if rate is None:
        raise UsageError(
            f"{name}: an array says nothing of its rate: give a column 'rate', or {{array, sampling_rate}}"
        )
    numeric = isinstance(rate, (int, float, np.number)) and RATES.start <= rate < RATES.stop  # NaN is not
    if not numeric or int(rate) != rate:
        raise UsageError(f"{name}: rate {rate}: give samples a second, {RATES.start} to {RATES.stop - 1}")
    return samples, int(rate)


def _read_audio(source: Any, name: str, shown: str) -> tuple[Array, int]:
    read = _read_wave(source)
    if read is not None:
        return _check_rate(mix_channels(read[0], name), read[1], name)
    try:
        import soundfile
    except ImportError as error:
        raise MissingDependency("soundfile", f"reading {shown}") from error
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with soundfile.SoundFile(source) as file:
            if file.frames * file.channels > MOST_SAMPLES:
                raise UsageError(f"{name}: {shown} has {file.frames} samples: cut it into parts")
            samples = file.read(dtype="int16" if file.subtype == "PCM_16" else "float32")
            rate = file.samplerate
    except (soundfile.SoundFileError, OSError, ValueError) as error:
        raise UsageError(f"{name}: {shown} cannot be read as audio: {error}") from error
    return _check_rate(mix_channels(samples, name), rate, name)


def _read_wave(source: Any) -> tuple[Array, int] | None:
    """Return (samples [T] or [T, channels], rate) of a wav file of 16-bit numbers; None for any other file."""
    try:
        with wave.open(str(source) if isinstance(source, Path) else source) as file:
            if file.getsampwidth() != 2 or file.getcomptype() != "NONE":
                return None
            if file.getnframes() * file.getnchannels() > MOST_SAMPLES:
                return None
            data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return data.reshape(-1, file.getnchannels()), file.getframerate()
    except (wave.Error, EOFError, OSError, ValueError):
        return None  # soundfile says what is wrong


def _choose_length(lengths: Sequence[int], declared: int | None, fixed: int | None, masked: bool, unit: str) -> int:
    """Return to how many samples or frames all are filled up. UsageError where they differ and nothing says how many.

    `declared`: by the spec. `fixed`: by the model's input.
    """
    if declared is not None:
        return declared
    if not masked and len(set(lengths)) > 1:
        raise UsageError(
            f"audio in one batch differs in length ({min(lengths)} to {max(lengths)} {unit}), and the model takes no "
            "mask: set seconds in preprocess"
        )
    return max([*lengths, fixed or 0])


def _fill_waveforms(waveforms: Sequence[Array], n: int, spec: AudioPreprocess, masked: bool) -> tuple[Array, Array]:
    values = np.full((len(waveforms), n), spec.padding_value, np.float32)
    mask = np.zeros(values.shape, np.int64)
    for row, waveform in enumerate(waveforms):
        mask[row, : len(waveform)] = 1
        known = waveform
        if spec.normalize:
            if not masked:  # transformers' extractor sees no difference between sound and what is filled in
                known = np.pad(waveform, (0, n - len(waveform)), constant_values=spec.padding_value)
            known = (known - known.mean()) / np.sqrt(known.var() + VARIANCE_FLOOR)
        values[row, : len(known)] = known
    return _scale(values, spec), mask


def _fill_frames(
    features: Sequence[Array], spec: AudioPreprocess, fixed: int | None, masked: bool
) -> tuple[Array, Array]:
    declared = spec.frames
    if declared is None and spec.n_samples is not None:
        declared = _count_kaldi_frames(spec.n_samples, spec.rate)
    n = _choose_length([len(rows) for rows in features], declared, fixed and fixed * spec.stack, masked, "frames")
    whole = _count_stacked(spec, n) * spec.stack
    values = np.full((len(features), whole, spec.bins), spec.padding_value, np.float32)
    mask = np.zeros(values.shape[:2], np.int64)
    for row, known in enumerate(features):
        kept = known[:n]
        values[row, : len(kept)], mask[row, : len(kept)] = kept, 1
    values = values.reshape(len(values), -1, spec.bins * spec.stack)  # [n, frames / stack, bins * stack]
    of_stacks = mask.reshape(len(mask), -1, spec.stack)[:, :, min(1, spec.stack - 1)]  # as SeamlessM4T has it
    return _scale(values, spec), of_stacks


def _scale(values: Array, spec: AudioPreprocess) -> Array:
    return values if spec.mean == 0 and spec.std == 1 else (values - np.float32(spec.mean)) / np.float32(spec.std)


def _count_stacked(spec: AudioPreprocess, n_frames: int) -> int:
    return -(-n_frames // spec.stack)


def _kaldi_sizes(rate: int) -> tuple[int, int]:
    return int(rate * KALDI_WINDOW), int(rate * KALDI_HOP)


def _count_kaldi_frames(n_samples: int, rate: int) -> int:
    size, hop = _kaldi_sizes(rate)
    return max(0, 1 + (n_samples - size) // hop)


def _split_frames(waveform: Array, size: int, hop: int) -> Array:
    """Return float64 [frames, size], a view."""
    return np.lib.stride_tricks.sliding_window_view(waveform.astype(np.float64), size)[::hop]


def _triangles(places: Array, edges: Array) -> Array:
    """Return [places, bins], each bin from its left edge up to 1 at its centre and down to its right edge."""
    slopes = edges[None, :] - places[:, None]
    gaps = np.diff(edges)
    filters: Array = np.maximum(0.0, np.minimum(-slopes[:, :-2] / gaps[:-1], slopes[:, 2:] / gaps[1:]))
    return filters


def _hertz_to_kaldi(hertz: Any) -> Any:
    return 1127.0 * np.log(1.0 + np.asarray(hertz) / 700.0)


def _hertz_to_slaney(hertz: float) -> float:
    """Return mels, linear up to 1000 Hz, logarithmic above."""
    return 15.0 + math.log(hertz / 1000.0) * 27.0 / math.log(6.4) if hertz >= 1000.0 else 3.0 * hertz / 200.0


def _slaney_to_hertz(mels: Array) -> Array:
    hertz: Array = np.where(mels >= 15.0, 1000.0 * np.exp(math.log(6.4) / 27.0 * (mels - 15.0)), 200.0 * mels / 3.0)
    return hertz
