"""Hugging Face folders: the model of the task with all its weights, or why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_specs import TEXT_FEEDS, changed_config, text_spec

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models import huggingface
from compress.models.facts import model_facts
from compress.models.load import load_model
from compress.models.source import locate
from compress.specs import ModelSpec
from compress.tasks import TORCH_TASKS
from runtime.bundle.tensors import TensorSpec


def test_bert_classifier(bert: Path) -> None:
    from transformers import BertForSequenceClassification

    spec = text_spec(bert)
    facts, loaded = model_facts(locate(spec, Path()), TEXT_FEEDS), load_model(locate(spec, Path()), TEXT_FEEDS)
    assert facts.architecture == "BertForSequenceClassification"
    assert facts.inputs == tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in TEXT_FEEDS)
    assert facts.outputs == (TensorSpec("logits", "float32", ("batch", 3)),)
    layers = {layer.name: layer for layer in facts.layers}
    assert layers["bert.encoder.layer.1.intermediate.dense"].macs == 16 * 16 * 32
    assert layers["classifier"].op == "Gemm"
    assert loaded.class_names == ("bad", "fair", "good")
    assert loaded.folder == bert
    reference = BertForSequenceClassification.from_pretrained(bert).eval()
    ids, mask = torch.arange(12).reshape(2, 6), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        expected = reference(input_ids=ids, attention_mask=mask, token_type_ids=mask * 0).logits
        torch.testing.assert_close(loaded.module(ids, mask, mask * 0), expected)


def test_bert_features_have_no_pooler(bert: Path) -> None:
    facts = model_facts(locate(text_spec(bert, "feature-extraction"), Path()), TEXT_FEEDS)
    assert facts.outputs == (TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 16)),)
    assert not any("pooler" in layer.name for layer in facts.layers)
    assert "no part of this model (bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias" in facts.notes[0]
    assert facts.unread == {
        "bert.pooler.dense.bias": 64, "bert.pooler.dense.weight": 1024, "classifier.bias": 12, "classifier.weight": 192
    }  # fmt: skip


def test_vit(vit: Path) -> None:
    spec = ModelSpec(source=f"dir:{vit}", task="image-classification")
    feeds: SampleShapes = {"pixel_values": ((3, 16, 16), "float32")}
    facts, loaded = model_facts(locate(spec, Path()), feeds), load_model(locate(spec, Path()), feeds)
    patches = next(layer for layer in facts.layers if layer.type == "Conv2d")
    assert patches.macs == 2 * 2 * 16 * 3 * 8 * 8
    assert (facts.outputs, loaded.outputs) == ((TensorSpec("logits", "float32", ("batch", 5)),),) * 2
    assert loaded.class_names == ()  # LABEL_0, ... say nothing


def test_a_checkpoint_without_the_tasks_head_is_refused(bert: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    BertModel.from_pretrained(bert).save_pretrained(tmp_path / "base")
    with pytest.raises(
        SourceError, match=r"the weights lack 'classifier\.bias', which a text-classification model needs"
    ):
        model_facts(locate(text_spec(tmp_path / "base"), Path()), TEXT_FEEDS)


def test_weights_of_another_config_are_refused(bert: Path, tmp_path: Path) -> None:
    other = changed_config(bert, tmp_path / "other", vocab_size=60)
    for refused in (model_facts, load_model):
        with pytest.raises(
            SourceError, match=r"word_embeddings\.weight' is \[50, 16\] in the weights, \[60, 16\] in the"
        ):
            refused(locate(text_spec(other), Path()), TEXT_FEEDS)


def test_damaged_and_unknown_folders(bert: Path, tmp_path: Path) -> None:
    cut = changed_config(bert, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-10])
    unknown = changed_config(bert, tmp_path / "unknown", model_type="no_such_type")
    (tmp_path / "empty").mkdir()
    for folder, message in {
        cut: r"model\.safetensors: is not a whole safetensors file",
        unknown: "config.json cannot be used: .*no_such_type",
        tmp_path / "empty": "has no config.json",
        tmp_path / "absent": "no such file or folder",
    }.items():
        with pytest.raises(SourceError, match=message):
            model_facts(locate(text_spec(folder), Path()), TEXT_FEEDS)
    with pytest.raises(SourceError, match="task generic is for python: and onnx: sources"):
        model_facts(locate(text_spec(bert, "generic"), Path()), TEXT_FEEDS)


def test_an_absent_hub_model_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"hf:nobody/nothing-here: cannot be fetched.*HF_HUB_OFFLINE"):
        model_facts(locate(ModelSpec(source="hf:nobody/nothing-here", task="text-classification"), Path()), TEXT_FEEDS)


def test_tasks_name_the_classes_that_optimum_names() -> None:
    """Importing optimum's table takes half a second, so that it is not asked in a run."""
    manager = pytest.importorskip("optimum.exporters.tasks").TasksManager
    named = {name: task.auto_class for name, task in TORCH_TASKS.items() if task.auto_class}
    named.pop("audio-text-to-text")  # which is no task of theirs
    speech = "automatic-speech-recognition"  # one task of theirs, with a class for each of ours
    asked = {name: (name, None) for name in named}
    asked |= {speech: (speech, "whisper"), "ctc-speech-recognition": (speech, "wav2vec2")}
    theirs = {
        name: manager.get_model_class_for_task(task, model_type=kind).__name__ for name, (task, kind) in asked.items()
    }
    assert named == theirs
    assert all(TORCH_TASKS[task.model_task].auto_class for task in TORCH_TASKS.values() if task.model_task)


def test_a_task_that_names_no_class_gets_that_of_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optimum.exporters.tasks")
    unnamed = replace(TORCH_TASKS["text-classification"], auto_class="")
    monkeypatch.setitem(TORCH_TASKS.own, "text-classification", unnamed)
    assert huggingface._find_auto_class("text-classification", "bert").__name__ == "AutoModelForSequenceClassification"


def test_tensors_that_are_no_part_of_the_model_are_named_and_not_counted(tmp_path: Path) -> None:
    """Blocks for next-token prediction, which transformers leaves out without a word in some families."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=24, num_hidden_layers=2, num_nextn_predict_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    extra = {name.replace("layers.0", "layers.2"): t.clone() for name, t in held.items() if "layers.0" in name}
    save_file(held | extra | {"mtp.fc.weight": torch.ones(16, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    feeds: SampleShapes = {"input_ids": ((6,), "int64"), "attention_mask": ((6,), "int64")}
    facts = model_facts(locate(ModelSpec(source=f"dir:{tmp_path}", task="text-generation"), Path()), feeds)
    assert facts.unread.keys() == {*extra, "mtp.fc.weight"}
    assert sum(facts.unread.values()) == sum(4 * t.numel() for t in extra.values()) + 4 * 16 * 32
    assert "9 of model.layers.2, 1 of mtp; " in facts.notes[0]
