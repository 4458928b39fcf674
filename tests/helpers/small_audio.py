"""Small models of sound that have learned to tell tones apart, in seconds, and the files that they are judged on."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000
TONES = {"high": 2200.0, "low": 300.0, "middle": 900.0}
"""Class -> Hz; in alphabetical order, as folders have it."""
SECONDS = 0.25


def draw_tone(kind: str, rng: np.random.Generator, rate: int = RATE, seconds: float = SECONDS) -> np.ndarray:
    """Return a tone of a class in noise, int16 [T]."""
    time = np.arange(int(rate * seconds)) / rate
    pitch = TONES[kind] * rng.uniform(0.85, 1.15)
    loud = rng.uniform(0.1, 0.5) * np.sin(2 * np.pi * pitch * time + rng.uniform(0, 6)) + rng.normal(0, 0.1, len(time))
    return (np.clip(loud, -1, 1) * 32767).astype(np.int16)


def write_wave(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def write_tones(folder: Path, n: int, seed: int, rate: int = RATE) -> None:
    """Write `n` wav files of each class as folder/CLASS/*.wav."""
    rng = np.random.default_rng(seed)
    for kind in TONES:
        for i in range(n):
            write_wave(folder / kind / f"{i:03d}.wav", draw_tone(kind, rng, rate), rate)


def train_spectrogram_model(folder: Path) -> None:
    """Write an AST that has learned the tones, with its feature extractor."""
    import torch
    from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

    extractor = ASTFeatureExtractor(num_mel_bins=32, max_length=24)
    config = ASTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, patch_size=8,
        frequency_stride=8, time_stride=8, max_length=24, num_mel_bins=32, id2label=dict(enumerate(TONES)),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    labels = np.arange(144) % len(TONES)
    sounds = [draw_tone(list(TONES)[label], rng) / 32768 for label in labels]
    values = extractor(sounds, sampling_rate=RATE, return_tensors="pt")["input_values"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ASTForAudioClassification(config)
    _fit(model, values, torch.from_numpy(labels), steps=120)
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)


def write_waveform_model(folder: Path, masked: bool, **config: Any) -> None:
    """Write an untrained wav2vec2 for three classes, with its feature extractor, which gives a mask if `masked`."""
    import torch
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForSequenceClassification

    sizes = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_kernel=(10, 8), conv_stride=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, id2label=dict(enumerate(TONES)),
        feat_extract_norm="layer" if masked else "group", do_stable_layer_norm=masked, **config,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Wav2Vec2ForSequenceClassification(sizes).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=masked).save_pretrained(folder)


def _fit(model: Any, values: Any, labels: Any, steps: int) -> None:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        loss = model(values, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
