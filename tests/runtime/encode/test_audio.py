"""Audio against transformers' own feature extractors, files against soundfile's reading of them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from transformers import (
    ASTFeatureExtractor,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from runtime.bundle.tensors import TensorSpec
from runtime.encode.audio import AudioPreprocess, feature_shape, load_audio, split_chunks
from runtime.encode.preprocess import make_preprocessor, spec_from_dict, spec_to_dict, split_samples
from runtime.encode.split import Split
from runtime.errors import UsageError

RATE = 16000
TOLERANCE = 1e-4


def sound(n: int, seed: int = 0) -> np.ndarray:
    """A chirp with noise, loud and quiet in turn, float32 [n]."""
    time = np.arange(n) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.02, n)
    chirp = 0.5 * np.sin(2 * np.pi * (200 + 900 * time + 40 * seed) * time) * (0.5 + 0.5 * np.sin(6 * time))
    return (chirp + noise).astype(np.float32)


SOUNDS = [sound(9000, 1), sound(16000, 2), sound(12345, 3)]
INPUT = TensorSpec("x", "float32", ("batch", "a"))
FEATURES = TensorSpec("x", "float32", ("batch", "a", "b"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "t"))


def encode(spec: AudioPreprocess, sounds: Any, *inputs: TensorSpec, rate: Any = RATE) -> dict[str, np.ndarray]:
    columns = {"audio": sounds} if rate is None else {"audio": sounds, "rate": np.full(len(sounds), rate)}
    return make_preprocessor(spec, inputs).encode(columns)


def test_waveforms_with_a_mask_as_wav2vec2() -> None:
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    wanted = extractor(SOUNDS, sampling_rate=RATE, padding=True, return_tensors="np")
    found = encode(AudioPreprocess(normalize=True), SOUNDS, INPUT, MASK)
    np.testing.assert_allclose(found["x"], wanted["input_values"], atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(found["attention_mask"], wanted["attention_mask"])


def test_waveforms_of_a_fixed_length_as_wav2vec2() -> None:
    wanted = Wav2Vec2FeatureExtractor()(
        SOUNDS, sampling_rate=RATE, padding="max_length", max_length=12000, truncation=True, return_tensors="np"
    )
    found = encode(AudioPreprocess(normalize=True, seconds=0.75), SOUNDS, INPUT)
    np.testing.assert_allclose(found["x"], wanted["input_values"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("bins", [80, 128])
def test_log_mel_as_whisper(bins: int) -> None:
    """Both ways that transformers has: by torch in float32, as users get it, and by numpy in float64."""
    extractor = WhisperFeatureExtractor(feature_size=bins)
    found = encode(AudioPreprocess(features="whisper", bins=bins, seconds=30), SOUNDS[:2], FEATURES)["x"]
    assert found.shape == (2, bins, 3000)
    by_torch = extractor(SOUNDS[:2], sampling_rate=RATE, return_tensors="np")["input_features"]
    np.testing.assert_allclose(found, by_torch, atol=TOLERANCE, rtol=0)
    padded = np.stack([np.pad(each, (0, 30 * RATE - len(each))) for each in SOUNDS[:2]])
    by_numpy = extractor._np_extract_fbank_features(padded, "cpu")
    np.testing.assert_allclose(found, by_numpy, atol=TOLERANCE / 10, rtol=0)


def test_the_mask_of_whispers_frames() -> None:
    extractor = WhisperFeatureExtractor(chunk_length=1)
    wanted = extractor(SOUNDS, sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    found = encode(AudioPreprocess(features="whisper", seconds=1), SOUNDS, FEATURES, MASK)
    np.testing.assert_array_equal(found["attention_mask"], wanted["attention_mask"])


@pytest.mark.parametrize("frames", [128, 60])
def test_kaldi_features_as_ast(frames: int) -> None:
    extractor = ASTFeatureExtractor(max_length=frames, num_mel_bins=64)
    wanted = extractor(SOUNDS, sampling_rate=RATE, return_tensors="np")["input_values"]
    spec = AudioPreprocess(
        features="kaldi", window="hann", bins=64, frames=frames, mean=extractor.mean, std=2 * extractor.std
    )
    np.testing.assert_allclose(encode(spec, SOUNDS, FEATURES)["x"], wanted, atol=TOLERANCE, rtol=0)


def test_kaldi_features_as_seamless() -> None:
    wanted = SeamlessM4TFeatureExtractor(padding_value=1.0)(SOUNDS, sampling_rate=RATE, return_tensors="np")
    spec = AudioPreprocess(features="kaldi", gain=2.0**15, normalize=True, stack=2, padding_value=1.0)
    found = encode(spec, SOUNDS, FEATURES, MASK)
    np.testing.assert_allclose(found["x"], wanted["input_features"], atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(found["attention_mask"], wanted["attention_mask"])


@pytest.mark.parametrize(
    "spec",
    [
        AudioPreprocess(),
        AudioPreprocess(seconds=0.5),
        AudioPreprocess(features="whisper", seconds=2, bins=8),
        AudioPreprocess(features="kaldi", stack=3, bins=23),
        AudioPreprocess(features="kaldi", frames=31, bins=23, rate=8000),
    ],
)
def test_the_shape_is_known_before(spec: AudioPreprocess) -> None:
    tensor = INPUT if spec.features == "waveform" else FEATURES
    found = encode(spec, [sound(9000)], tensor, rate=spec.rate)["x"]
    assert feature_shape(spec, 9000) == found.shape[1:]
    assert spec_from_dict(spec_to_dict(spec)) == spec


def lengths(pieces: list[np.ndarray]) -> list[int]:
    return [len(piece) for piece in pieces]


def test_chunks_are_the_whole_again() -> None:
    chunks = split_chunks(sound(40001), AudioPreprocess(seconds=1, longer="chunks"))
    assert lengths(chunks) == [16000, 16000, 8001]
    np.testing.assert_array_equal(np.concatenate(chunks), sound(40001))
    assert lengths(split_chunks(sound(33599), AudioPreprocess(seconds=1, longer="chunks"))) == [16000, 16000]
    assert lengths(split_chunks(sound(40001), AudioPreprocess(seconds=1))) == [40001], "as in bundles that say nothing"


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n", [5201, 5600, 10400, 12000])
def test_chunks_of_frames(n: int, normalize: bool) -> None:
    """Every one has features, the last one, too."""
    spec = AudioPreprocess(features="kaldi", frames=31, bins=23, normalize=normalize, longer="chunks")
    chunks = split_chunks(sound(n), spec)
    assert max(lengths(chunks)) == 5200 and n - sum(lengths(chunks)) < 1600
    found = encode(spec, chunks, FEATURES, MASK)
    assert found["x"].shape == (len(chunks), 31, 23) and (found["attention_mask"][:-1] == 1).all()


def test_pieces_end_in_pauses() -> None:
    waveform = np.random.default_rng(0).normal(0, 0.1, 40000).astype(np.float32)
    waveform[13000:15000] = waveform[26000:28000] = 0
    spec = AudioPreprocess(seconds=1, longer="pauses")
    assert lengths(split_chunks(waveform, spec)) == [13800, 13000, 13200]
    assert lengths(split_chunks((waveform * 32767).astype(np.int16), spec)) == [13800, 13000, 13200]


@pytest.mark.parametrize("longest", [1, 2, 7, 1000, 16000])
def test_pieces_with_pauses_are_the_whole_and_no_scraps(longest: int) -> None:
    spec = AudioPreprocess(seconds=longest / RATE, longer="pauses")
    for n in (1, longest, longest + 1, 2 * longest - 1, 2 * longest, 2 * longest + 1, 5 * longest):
        waveform = sound(n, seed=n)
        pieces = split_chunks(waveform, spec)
        np.testing.assert_array_equal(np.concatenate(pieces), waveform)
        assert max(lengths(pieces)) <= longest
        assert len(pieces) == 1 or min(lengths(pieces)) >= 0.4 * longest - 1


def test_long_recordings_become_rows() -> None:
    spec = AudioPreprocess(seconds=0.5, longer="chunks", resample=True)
    encoder = make_preprocessor(spec, (INPUT,))
    slow = sound(6000, seed=2)
    columns = {"audio": [sound(10000), sound(8000), slow], "rate": [RATE, RATE, 8000], "label": [3, 4, 5]}
    split = split_samples(encoder, columns)
    assert split.samples.tolist() == [0, 0, 1, 2, 2]
    assert split.sizes.tolist() == [8000, 2000, 8000, 8000, 4000]
    assert split.columns["label"] == [3, 3, 4, 5, 5]
    found = encoder.encode(split.columns)["x"]
    np.testing.assert_array_equal(found[:2].reshape(-1)[:10000], sound(10000))
    np.testing.assert_array_equal(found[2], sound(8000))
    whole = soxr.resample(slow, 8000, RATE, quality="HQ")
    np.testing.assert_array_equal(found[3:].reshape(-1)[:12000], whole)
    short = {"audio": np.stack([sound(8000)] * 2), "rate": np.full(2, RATE)}
    assert split_samples(encoder, short).columns is short


def test_means_of_rows() -> None:
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    found = Split({}, np.array([0, 0, 0, 1, 2]), np.array([4.0, 4.0, 1.0, 0.3, 7.0])).average(values)
    np.testing.assert_allclose(found[0], np.average(values[:3].astype(np.float64), axis=0, weights=[4, 4, 1]))
    np.testing.assert_array_equal(found[1:], values[3:], "a sample of one row is that row")


@pytest.mark.parametrize("features", ["waveform", "kaldi"])
def test_what_is_longer_needs_a_length(features: Any) -> None:
    with pytest.raises(ValueError, match=r"longer is chunks, and no length is given .* set seconds"):
        AudioPreprocess(features=features, longer="chunks")


def test_a_model_with_a_channel() -> None:
    channel = TensorSpec("x", "float32", ("batch", 1, 9000))
    assert encode(AudioPreprocess(), [sound(9000)], channel)["x"].shape == (1, 1, 9000)


@pytest.mark.parametrize(
    ("suffix", "subtype"),
    [("wav", "PCM_16"), ("wav", "PCM_24"), ("wav", "FLOAT"), ("wav", "PCM_U8"), ("flac", "PCM_16"), ("flac", "PCM_24")],
)
def test_files_as_soundfile_reads_them(tmp_path: Path, suffix: str, subtype: str) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.stack([sound(4000, 1), sound(4000, 2)], axis=1), 8000, subtype=subtype)
    wanted = soundfile.read(path, dtype="float32")[0].mean(axis=1)
    for item in (path, str(path), {"path": str(path)}, {"bytes": path.read_bytes()}):
        samples, rate = load_audio(item)
        assert rate == 8000
        np.testing.assert_allclose(samples, wanted, atol=1e-7, rtol=0)


def test_16_bits_stay_16_bits(tmp_path: Path) -> None:
    given = (sound(4000) * 30000).astype(np.int16)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(given.tobytes())
    samples, rate = load_audio(tmp_path / "a.wav")
    assert (samples.dtype, rate) == (np.int16, RATE)
    np.testing.assert_array_equal(samples, given)
    found = encode(AudioPreprocess(), [tmp_path / "a.wav"], INPUT, rate=None)["x"]
    np.testing.assert_allclose(found[0], given / 32768, atol=1e-7)


def test_another_rate_is_changed_where_the_record_says_so() -> None:
    given = {"array": sound(8000), "sampling_rate": 8000}
    found = encode(AudioPreprocess(resample=True), [given], INPUT, rate=None)["x"]
    np.testing.assert_array_equal(found[0], soxr.resample(given["array"], 8000, RATE, quality="HQ"))


NAN = np.full(9000, np.nan, np.float32)


@pytest.mark.parametrize(
    ("spec", "sounds", "rate", "message"),
    [
        ({}, [sound(9000)], 8000, "8000 samples a second, and the model takes 16000: set resample"),
        ({}, [sound(9000)], None, "an array says nothing of its rate"),
        ({}, [sound(9000), sound(8000)], RATE, r"differs in length \(8000 to 9000 samples\).*set seconds"),
        ({"features": "kaldi"}, [sound(9000), sound(8000)], RATE, r"\(48 to 54 frames\).*set seconds"),
        ({}, ["nowhere.wav"], None, "there is no file nowhere.wav"),
        ({}, [__file__], None, "cannot be read as audio"),
        ({}, [NAN], RATE, "holds NaN"),
        ({}, [np.zeros(9000, int)], RATE, "samples are int64"),
        ({}, [np.zeros((2, 9000), np.float32)], RATE, "channels come last"),
        ({}, [np.zeros(0, np.float32)], RATE, "a waveform is"),
        ({}, [3.5], RATE, "expected a path"),
        ({}, [sound(9000)], np.nan, "rate nan: give samples a second"),
        ({}, [{"array": sound(9000), "sampling_rate": "fast"}], None, "rate fast: give samples a second"),
        ({"features": "kaldi"}, [sound(100)], RATE, "shorter than a frame of 400"),
        ({"features": "whisper"}, [sound(100)], RATE, "too short for a spectrogram"),
    ],
)
def test_what_is_not_audio(spec: dict[str, Any], sounds: Any, rate: Any, message: str) -> None:
    tensor = FEATURES if "features" in spec else INPUT
    with pytest.raises(UsageError, match=message):
        encode(AudioPreprocess(**spec), sounds, tensor, rate=rate)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((TensorSpec("x", "int64", ("batch", "t")),), "audio is made floating-point"),
        ((INPUT, TensorSpec("y", "float32", ("batch", "t"))), "use kind: tensor"),
        ((TensorSpec("x", "float32", ("batch",)),), "use kind: tensor"),
    ],
)
def test_inputs_that_audio_cannot_feed(inputs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_preprocessor(AudioPreprocess(), inputs)


def test_audio_of_another_length_than_the_models() -> None:
    with pytest.raises(UsageError, match=r"audio is \[9000\].*takes \[8000\]: set seconds"):
        encode(AudioPreprocess(), [sound(9000)], TensorSpec("x", "float32", ("batch", 8000)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0}, "rate is 0"),
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"bins": 0}, "bins 0"),
        ({"std": 0.0}, "std is 0.0"),
        ({"frames": 5}, "frames, stack and gain are of features: kaldi"),
        ({"features": "whisper", "normalize": True}, "normalize is of waveforms"),
        ({"features": "mfcc"}, "not one of"),
    ],
)
def test_records_that_are_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from_dict({"kind": "audio", **fields})
