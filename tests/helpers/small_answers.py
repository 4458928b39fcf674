"""Small encoder-decoders with their tokenizers: one that has learned to turn texts round, and random ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from small_audio import RATE, TONES, draw_tone, write_wave
from trained_models import learn

LETTERS = "abcdefgh"
SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")


def write_tokenizer(folder: Path, extra: tuple[str, ...] = ()) -> Any:
    """Write a tokenizer of single letters, which ends texts with </s>; `extra`: further special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate((*SPECIAL, *LETTERS, "\N{LOWER ONE EIGHTH BLOCK}", *extra))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    split = [pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Split("", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>",
        additional_special_tokens=list(extra), model_max_length=32,
    )  # fmt: skip
    fast.save_pretrained(folder)
    return fast


def write_texts(path: Path, n: int, seed: int) -> None:
    """Write jsonl of texts and, as their references, the same texts turned round."""
    rows = [{"text": text, "label": text[::-1]} for text in draw_texts(n, np.random.default_rng(seed))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_texts(n: int, rng: np.random.Generator) -> list[str]:
    return ["".join(rng.choice(list(LETTERS), rng.integers(2, 6))) for _ in range(n)]


def write_turner(folder: Path, trained: bool = True) -> None:
    """Write a T5 of 20,000 parameters that has learned to turn texts round, with its tokenizer."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = write_tokenizer(folder)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0, relative_attention_num_buckets=16,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config)
    rng = np.random.default_rng(0)

    def draw_batch() -> dict[str, Any]:
        texts = draw_texts(64, rng)
        source = tokenizer(texts, padding=True, return_tensors="pt")
        labels = tokenizer([text[::-1] for text in texts], padding=True, return_tensors="pt").input_ids
        labels[labels == 0] = -100
        return {"input_ids": source.input_ids, "attention_mask": source.attention_mask, "labels": labels}

    if trained:
        learn(model, "turner", lambda: _train(model, draw_batch, 5e-3, 500))
    model.generation_config.max_length = 12
    model.save_pretrained(folder)


def _train(model: Any, draw_batch: Callable[[], dict[str, Any]], learning_rate: float, steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        loss = model(**draw_batch()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def make_random(kind: str) -> tuple[Any, dict[str, Any]]:
    """Return a model of a class (t5, bart, marian, whisper) with random weights, and samples for its encoder.

    What generation_config.json can ask for is asked of one or another.
    """
    import torch
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        MarianConfig,
        MarianMTModel,
        T5Config,
        T5ForConditionalGeneration,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    sizes: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.6}
    t5 = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    made: dict[str, tuple[type, Any, dict[str, Any]]] = {
        "t5": (T5ForConditionalGeneration, t5, {"repetition_penalty": 1.3, "min_length": 5}),
        "bart": (
            BartForConditionalGeneration,
            BartConfig(**sizes, max_position_embeddings=32),
            {
                "repetition_penalty": 1.3,
                "min_length": 5,
                "no_repeat_ngram_size": 2,
                "forced_bos_token_id": 0,
                "forced_eos_token_id": 2,
                "bad_words_ids": [[39], [5, 6]],
            },
        ),
        "marian": (
            MarianMTModel,
            MarianConfig(
                **sizes, max_position_embeddings=32, pad_token_id=39, eos_token_id=0, decoder_start_token_id=39
            ),
            {"bad_words_ids": [[39], [5, 6]]},
        ),
        "whisper": (WhisperForConditionalGeneration, None, {}),
    }
    if kind == "whisper":
        config = WhisperConfig(**sizes | SPEECH)
        rules = {"suppress_tokens": [7, 8], "begin_suppress_tokens": [9, 2], "no_timestamps_token_id": 39}
        rules |= {"lang_to_id": {"<|en|>": 10, "<|de|>": 11}, "task_to_id": {"transcribe": 12, "translate": 13}}
        made[kind] = (
            WhisperForConditionalGeneration,
            config,
            rules | {"language": "de", "task": "transcribe", "is_multilingual": True},
        )
    make, config, rules = made[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make(config).eval()
        if kind == "t5":
            for parameter in model.parameters():
                parameter.data.mul_(2.0)
        for name, value in {**rules, "max_length": 14, "num_beams": 1, "do_sample": False}.items():
            setattr(model.generation_config, name, value)
        if kind == "whisper":
            return model, {"input_features": 3 * torch.randn(3, 8, 100)}
        mask = torch.ones(3, 9, dtype=torch.int64)
        mask[0, -3:] = 0
        return model, {"input_ids": torch.randint(3, 39, (3, 9)), "attention_mask": mask}


SPEECH: dict[str, Any] = {
    "max_source_positions": 50, "max_target_positions": 24, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 3,
    "eos_token_id": 1, "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
"""Of a Whisper that hears one second."""


def write_speech_model(folder: Path, data: Path) -> Any:
    """Write a random Whisper of one second, its tokenizer and feature extractor, and recordings; return the model."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    tokenizer = write_tokenizer(folder, ("<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"))
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.6}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes | SPEECH)).eval()
    english, german, transcribe, translate, untimed = range(len(tokenizer) - 5, len(tokenizer))
    rules: dict[str, Any] = {"lang_to_id": {"<|en|>": english, "<|de|>": german}, "no_timestamps_token_id": untimed}
    rules |= {"task_to_id": {"transcribe": transcribe, "translate": translate}, "is_multilingual": True}
    rules |= {"max_length": 14, "suppress_tokens": [0, 2, 3, *range(13, 18)], "begin_suppress_tokens": [1, 12]}
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    for name, n in (("train", 8), ("test", 24)):
        rows = []
        for i in range(n):
            file = f"{name}-{i}.wav"
            write_wave(data / file, draw_tone(("low", "high")[i % 2], rng, seconds=float(rng.uniform(0.3, 0.9))))
            rows.append({"audio": file, "transcription": draw_texts(1, rng)[0]})
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


SPOKEN = dict(zip("abc", TONES, strict=True))
"""Letter -> the tone by which it is said."""
HEARD = {"features": "whisper", "bins": 8, "seconds": 1.0}
"""How the model of `write_listener` reads a sound."""


def say(words: str, rng: np.random.Generator) -> np.ndarray:
    """Return words of a letter each as int16 [T]: 0.6 s of its tone, and 0.3 s of silence."""
    tones = [draw_tone(SPOKEN[word], rng, seconds=0.6) for word in words.split()]
    return np.concatenate([np.pad(tone, (0, 3 * RATE // 10)) for tone in tones])


def draw_words(n: int, rng: np.random.Generator) -> str:
    return " ".join(rng.choice(list(SPOKEN), n))


def write_speech(folder: Path, name: str, words: list[int], seed: int) -> None:
    """Write jsonl and wav files of so many words each."""
    rng, rows = np.random.default_rng(seed), []
    for i, n in enumerate(words):
        text = draw_words(n, rng)
        write_wave(folder / f"{name}-{i}.wav", say(text, rng))
        rows.append({"audio": f"{name}-{i}.wav", "transcription": text})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_listener(folder: Path) -> None:
    """Write a Whisper that hears one second and has learned to write down a word said by tones."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from runtime.encode.audio import AudioPreprocess, make_features

    tokenizer = write_tokenizer(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes | SPEECH))
    rng = np.random.default_rng(0)

    def draw_batch() -> dict[str, Any]:
        texts = [draw_words(1, rng) for _ in range(32)]
        starts = rng.integers(0, RATE // 4, len(texts))
        sounds = [
            np.pad(say(text, rng), (start, 0))[:RATE] / np.float32(32768)
            for text, start in zip(texts, starts, strict=True)
        ]
        features = make_features(sounds, AudioPreprocess(**HEARD))[0]
        labels = tokenizer(texts, return_tensors="pt").input_ids
        return {"input_features": torch.from_numpy(features), "labels": labels}

    learn(model, "listener", lambda: _train(model, draw_batch, 4e-3, 80))
    model.eval()
    for name, value in {"max_length": 14, "suppress_tokens": None, "begin_suppress_tokens": None}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
