"""Hugging Face folders that cannot be what their config.json or the recipe's task says: refused at plan time, why."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from compress.errors import SourceError
from compress.models.facts import model_facts
from compress.models.huggingface import load_config
from compress.models.source import locate
from compress.specs import ModelSpec

FEEDS: dict[str, Any] = dict.fromkeys(("input_ids", "attention_mask"), ((4,), "int64"))


def plan(folder: Path, task: Any = "text-generation") -> None:
    model_facts(locate(ModelSpec(source=f"dir:{folder}", task=task), folder), FEEDS)


def test_a_model_with_an_encoder_is_no_text_generation_model(tmp_path: Path) -> None:
    """transformers would take the decoder alone."""
    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")} | {"decoder_start_token_id": 1}
    sizes |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_source_positions": 8, "max_target_positions": 8}
    config = transformers.WhisperConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    why = r"whisper has an encoder, .* compressed without it; give task: automatic-speech-recognition$"
    with pytest.raises(SourceError, match=why):
        plan(tmp_path)


def test_a_model_without_the_task_is_refused_in_one_sentence(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    for task in ("text-generation", "image-classification"):
        with pytest.raises(SourceError, match="give task: text2text-generation") as refusal:
            plan(tmp_path, task)
        assert len(str(refusal.value)) < 300


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    sizes: dict[str, Any] = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_hidden_layers", 10**18, "num_hidden_layers is 1000000000000000000, and the weights hold 12 tensors"),
        ("num_hidden_layers", 9000, "a model of more than 1024 parameters, and the weights hold 12"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1"),
        ("num_hidden_layers", 10**400, "num_hidden_layers has 401 digits"),
        ("num_labels", 10**9, "num_labels is 1000000000, and the weights hold 12 tensors"),
        ("max_position_embeddings", 10**12, "max_position_embeddings is 1000000000000"),
        ("hidden_size", -8, "negative dimension -8"),
        ("hidden_size", 10**12, r"is \[12, 8\] in the weights"),
        ("vocab_size", "many", "Field 'vocab_size' expected int, got str"),
        ("num_attention_heads", 0, "config.json cannot be used"),
    ],
)
def test_numbers_that_no_such_weights_have_are_refused_at_once(
    key: str, value: Any, why: str, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").hardlink_to(llama / "model.safetensors")
    record = json.loads((llama / "config.json").read_text())
    text = json.dumps({**record, key: value})
    (tmp_path / "config.json").write_text(text)
    begun = time.monotonic()
    with pytest.raises(SourceError, match=why) as refusal:
        plan(tmp_path)
    assert refusal.value.exit_code == 2 and time.monotonic() - begun < 5


def test_more_blocks_than_config_json_says_are_another_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, "num_hidden_layers": 2}))
    with pytest.raises(SourceError, match=r"describes 2 blocks layers, and the weights hold 3: .* mend config\.json"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**record, "num_hidden_layers": 4}))
    with pytest.raises(SourceError, match=r"lack 'model\.layers\.3\."):
        plan(tmp_path)
    declared = {**record, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    plan(tmp_path)


def test_a_configuration_may_hold_infinity(tmp_path: Path) -> None:
    """JSON has no word for it: transformers writes {"__float__": "Infinity"}."""
    config = transformers.Mamba2Config(hidden_size=8, num_hidden_layers=1, vocab_size=12, num_heads=2, head_dim=8)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    spec = ModelSpec(source=f"dir:{tmp_path}", task="text-generation")
    assert load_config(locate(spec, tmp_path)).time_step_limit[1] == float("inf")
