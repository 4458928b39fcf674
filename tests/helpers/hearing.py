"""Tiny random models that also hear, as Hugging Face folders with their own processors, and questions about sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from seeing import TEXT, save, write_json, write_tokens

RATE = 16000
BINS = 16
NAMED = {"audio_bos_token": "<|audio_bos|>", "audio_token": "<|AUDIO|>", "audio_eos_token": "<|audio_eos|>"}
TOWER: dict[str, Any] = {"num_mel_bins": BINS, "initializer_range": 0.1}
LAYERS = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_qwen(folder: Path, **sizes: Any) -> Path:
    """A Qwen 2 that reads the features of a tower that takes one second. `sizes`: of its language part."""
    import transformers

    ids = write_processor(folder, "Qwen2AudioProcessor")
    config = transformers.Qwen2AudioConfig(
        audio_config={**TOWER, **LAYERS, "model_type": "qwen2_audio_encoder", "max_source_positions": 50},
        text_config={**TEXT, **sizes, "model_type": "qwen2"},
        audio_token_index=ids["<|AUDIO|>"],
    )
    return save(config, folder, "AutoModelForMultimodalLM")


def write_glm(folder: Path) -> Path:
    """A Llama that reads four frames of a tower with rotary positions as one."""
    import transformers

    ids = write_processor(folder, "GlmAsrProcessor", 2, audio_token="<|AUDIO|>")
    config = transformers.GlmAsrConfig(
        audio_config={**TOWER, **SMALL, "intermediate_size": 128, "model_type": "glmasr_encoder"},
        text_config={**TEXT, "model_type": "llama"},
        audio_token_id=ids["<|AUDIO|>"],
        tie_word_embeddings=False,
    )
    return save(config, folder, "AutoModelForMultimodalLM")


def write_qwen_asr(folder: Path) -> Path:
    """A Qwen 3 that reads a tower's features of pieces of a sound."""
    import transformers

    ids = write_processor(folder, "Qwen3ASRProcessor", feature_extractor_type="Qwen3ASRFeatureExtractor")
    config = transformers.Qwen3ASRConfig(
        audio_config={
            **TOWER,
            **LAYERS,
            "output_dim": 64,
            "downsample_hidden_size": 8,
            "model_type": "qwen3_asr_encoder",
        },
        text_config={**TEXT, "head_dim": 16, "model_type": "qwen3"},
        audio_token_id=ids["<|AUDIO|>"],
        pad_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return save(config, folder, "AutoModelForMultimodalLM")


def write_voxtral(folder: Path) -> Path:
    """A Llama whose processor reads sounds in its own way alone, and leaves them out beside a rendered text."""
    import transformers

    ids = write_processor(folder, "VoxtralProcessor")
    config = transformers.VoxtralConfig(
        audio_config={**TOWER, **SMALL, "intermediate_size": 128, "max_source_positions": 50},
        text_config={**TEXT, "model_type": "llama"},
        audio_token_id=ids["<|AUDIO|>"],
    )
    return save(config, folder, "AutoModelForMultimodalLM")


def write_processor(folder: Path, processor_class: str, seconds: int = 1, **values: Any) -> dict[str, int]:
    """Write a processor of sounds of at most `seconds`, with its tokenizer; return the ids of its special tokens."""
    folder.mkdir(parents=True)
    ids = write_tokens(folder, "".join(NAMED.values()), **NAMED)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("== 'image'", "== 'audio'"))
    kind = values.pop("feature_extractor_type", "WhisperFeatureExtractor")
    about = {"feature_size": BINS, "chunk_length": seconds, "sampling_rate": RATE, "return_attention_mask": True}
    write_json(folder, "preprocessor_config.json", feature_extractor_type=kind, **about)
    write_json(folder, "processor_config.json", processor_class=processor_class, **values)
    return ids


def write_sounds(folder: Path, name: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Write 16-bit wav files and NAME.jsonl with a question about each and its answer; return the rows."""
    (folder / "sounds").mkdir(exist_ok=True)
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        samples = rng.integers(-9000, 9000, int(rng.integers(RATE // 2, RATE)))
        file = f"sounds/{name}-{i}.wav"
        with wave.open(str(folder / file), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(RATE)
            sound.writeframes(samples.astype("<i2").tobytes())
        words = ["".join(rng.choice(list("abcdef "), int(rng.integers(4, 9)))).strip() or "a" for _ in range(2)]
        rows.append({"audio": file, "text": words[0], "label": words[1]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
