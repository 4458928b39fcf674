"""A folder that onnxruntime-genai runs: the same greedy tokens as torch, from text to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from decoder_graphs import LENGTH, VOCABULARY, exported, make
from graphs import one_layer

from compress.errors import ExportError
from compress.export.first_token import write_first_token
from compress.export.genai import genai_config, write_genai_config
from compress.export.onnx import finish, float_graph, save_graph
from compress.formats.targets import TARGETS
from compress.graph.attention_parts import find_attention
from compress.rounding.state import GraphState
from runtime.encode.language import LanguagePreprocess

pytestmark = pytest.mark.slow
PROMPT = "the cat sat on the mat"


def finished(form: str) -> ir.Model:
    model = exported("llama")
    if form == "plain":
        return float_graph(model)
    state = GraphState(model)
    if form == "int8":
        state.kv_cache = "int8"
        state.kv_scales = {find_attention(model, i).name: (0.05, 0.05) for i in range(2)}
    return finish(state, TARGETS["onnxruntime-cpu"])[0]


def write_folder(folder: Path, graph: ir.Model) -> None:
    """model.onnx with a byte-level tokenizer, as a Hugging Face folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    save_graph(graph, folder / "model.onnx")
    make("llama").config.save_pretrained(folder)  # type: ignore[union-attr,operator]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False, initial_alphabet=[]
    )
    tokenizer.train_from_iterator([PROMPT, "a dog and a cat sat", "on the mat the dog sat"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    write_genai_config(folder, graph)


@pytest.mark.parametrize("form", ["buffer", "plain", "int8"])
def test_the_same_greedy_tokens(form: str, tmp_path: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    write_folder(tmp_path / "model", finished(form))
    model = genai.Model(str(tmp_path / "model"))
    tokenizer = genai.Tokenizer(model)
    ids = tokenizer.encode(PROMPT)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=24)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    got = [int(token) for token in generator.get_sequence(0)]
    with torch.no_grad():
        prompt = torch.from_numpy(np.asarray(ids, np.int64))[None]
        wanted: Any = make("llama").generate(prompt, max_length=24, do_sample=False, pad_token_id=0)  # type: ignore[operator]
    same = len(ids) + 1 if form == "int8" else 24  # rounded keys may choose another token later
    assert got[:same] == wanted[0].tolist()[:same] and len(ids) < 20
    assert PROMPT in tokenizer.decode(np.array(got, np.int32))


def test_the_scored_first_token_is_put_before_prompts_where_it_is_asked_for(tmp_path: Path) -> None:
    """By default onnxruntime-genai adds no special token to any model's prompts."""
    genai = pytest.importorskip("onnxruntime_genai")
    write_folder(tmp_path / "model", finished("buffer"))
    write_first_token(tmp_path / "model", LanguagePreprocess(bos_token_id=1))
    tokenizer = genai.Tokenizer(genai.Model(str(tmp_path / "model")))
    plain = list(tokenizer.encode(PROMPT))
    tokenizer.update_options(add_special_tokens="true")
    assert list(tokenizer.encode(PROMPT)) == [1, *plain]


CONFIG = {"max_position_embeddings": LENGTH, "eos_token_id": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_what_the_file_says() -> None:
    graph = finished("buffer")
    said = genai_config(graph, CONFIG, {"eos_token_id": [2, 5], "top_k": 7, "temperature": None, "do_sample": True})
    assert said["model"]["eos_token_id"] == [2, 5] and said["model"]["pad_token_id"] == 2
    assert said["model"]["vocab_size"] == VOCABULARY and said["model"]["context_length"] == LENGTH
    decoder = said["model"]["decoder"]
    assert (decoder["num_hidden_layers"], decoder["num_key_value_heads"], decoder["head_size"]) == (2, 2, 16)
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert decoder["outputs"]["present_value_names"] == "present.%d.value"
    search = said["search"]
    assert (search["top_k"], search["temperature"], search["do_sample"], search["max_length"]) == (7, 1.0, True, LENGTH)
    assert search["past_present_share_buffer"] is True
    plain = genai_config(finished("plain"), CONFIG, max_length=32)
    assert plain["search"]["past_present_share_buffer"] is False and plain["model"]["context_length"] == 32


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="the graph has no key-value cache, which onnxruntime-genai needs"):
        genai_config(one_layer(), CONFIG)
    with pytest.raises(ExportError, match=r"config\.json names no max_position_embeddings; give max_length"):
        genai_config(finished("plain"), {"eos_token_id": 2})
    with pytest.raises(ExportError, match=r"neither config\.json nor generation_config\.json names an eos_token_id"):
        genai_config(finished("plain"), {"max_position_embeddings": 8})
    with pytest.raises(ExportError, match=r"has no config\.json, from which genai_config\.json is made"):
        write_genai_config(tmp_path, finished("plain"))
    graph = finished("plain")
    next(value for value in graph.graph.outputs if value.name == "logits").shape = None
    with pytest.raises(ExportError, match="does not say how many logits a token gets"):
        genai_config(graph, CONFIG)
