"""A pruned transformers model as a folder: config.json alone where it can say the sizes, else shapes.json beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FEEDS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from compress.blocks.sizes import shapes_of
from compress.errors import SourceError
from compress.export.checkpoint import write_checkpoint
from compress.facts import Note, Structure
from compress.models.facts import model_facts
from compress.models.load import TorchModel, load_model
from compress.models.open_streamed import open_streamed_model, open_streamed_module
from compress.models.source import locate, model_digest
from compress.pruning.configuration import fit_config
from compress.pruning.coupling import find_coupling
from compress.pruning.surgery import remove
from compress.recipe.exports import CheckpointExport
from compress.specs import ModelSpec

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def inputs(spec: ModelSpec) -> dict[str, Tensor]:
    torch.manual_seed(1)
    given = {"input_ids": torch.randint(0, 60, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    return {name: given.get(name, torch.zeros(2, 8, dtype=torch.long)) for name in FEEDS[spec.task]}


def whole(folder: Path, kind: str) -> ModelSpec:
    """A small model with random weights, as transformers writes it."""
    torch.manual_seed(0)
    if kind == "bert":
        BertModel(BertConfig(vocab_size=60, **SIZES), add_pooling_layer=False).save_pretrained(folder)
        return ModelSpec(source=f"dir:{folder}", task="feature-extraction")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=60, **sizes)).save_pretrained(folder)
    return ModelSpec(source=f"dir:{folder}", task="text-generation")


def pruned(spec: ModelSpec, folder: Path, kinds: tuple[str, ...], unit: int = 1) -> tuple[TorchModel, list[Note]]:
    """The model of `spec` with a unit of every dimension of these kinds taken out, written to `folder`; and notes."""
    feeds = FEEDS[spec.task]
    loaded = load_model(locate(spec, folder), feeds)
    module = loaded.module
    before = shapes_of(module)
    for one in find_coupling(module, inputs(spec)).dimensions:
        if one.kind in kinds:
            remove(module, one, np.array([unit]))
    fit_config(module.wrapped, before)  # type: ignore[arg-type]
    loaded = replace(loaded, shapes=loaded.shapes.then(shapes_of(module).since(before)))
    streamed = open_streamed_module(module, Structure(()), loaded.parameters, loaded.folder, loaded.shapes)
    return loaded, write_checkpoint(folder, streamed, CheckpointExport(), "")


def at(folder: Path, spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"source": f"dir:{folder}"})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_folder_whose_config_cannot_say_the_sizes_loads_by_its_record(tmp_path: Path, kind: str) -> None:
    """As a whole, as a stream, and in the plan; plain transformers refuses it, and the export says so."""
    spec = whole(tmp_path / "whole", kind)
    loaded, notes = pruned(spec, tmp_path / "small", ("heads", "neurons"))
    small, feeds = at(tmp_path / "small", spec), FEEDS[spec.task]
    assert [note.text for note in notes if note.level == "warning"] == [
        "config.json cannot say the pruned sizes: compress loads the folder by shapes.json, transformers does not"
    ]
    again = load_model(locate(small, tmp_path), feeds)
    assert again.module is not None and loaded.module is not None
    assert torch.equal(again.module(**inputs(spec)), loaded.module(**inputs(spec)))
    assert again.shapes == loaded.shapes
    stream = open_streamed_model(locate(small, tmp_path), feeds, Structure(()))
    assert not stream.notes  # the weights stay in their files
    assert all(torch.equal(stream.store.read(n), p) for n, p in again.module.wrapped.named_parameters())  # type: ignore[union-attr]
    facts, before = model_facts(locate(small, tmp_path), feeds), model_facts(locate(spec, tmp_path), feeds)
    assert facts.n_bytes < before.n_bytes and facts.macs < before.macs
    assert any("shapes.json" in note for note in facts.notes)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModel.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_where_config_says_the_sizes_there_is_no_record(tmp_path: Path, kind: str) -> None:
    """One number of neurons for all layers: transformers loads it, and gives the same."""
    spec = whole(tmp_path / "whole", kind)
    loaded, notes = pruned(spec, tmp_path / "small", ("neurons",))
    assert not (tmp_path / "small/shapes.json").exists()
    assert all(note.level == "info" for note in notes)
    model_class = BertModel if kind == "bert" else GPT2LMHeadModel
    plain = model_class.from_pretrained(tmp_path / "small", attn_implementation="eager")
    torch.testing.assert_close(plain(**inputs(spec))[0], loaded.module(**inputs(spec)))


@pytest.mark.slow
def test_a_folder_with_a_record_can_be_pruned_again(tmp_path: Path) -> None:
    spec = whole(tmp_path / "whole", "bert")
    pruned(spec, tmp_path / "small", ("heads",))
    twice, _ = pruned(at(tmp_path / "small", spec), tmp_path / "smaller", ("heads", "neurons"), unit=0)
    again = load_model(locate(at(tmp_path / "smaller", spec), tmp_path), FEEDS[spec.task])
    assert again.module is not None and twice.module is not None
    assert again.module.wrapped.encoder.layer[1].attention.self.num_attention_heads == 2  # type: ignore[union-attr, index]
    assert torch.equal(again.module(**inputs(spec)), twice.module(**inputs(spec)))


def test_a_record_decides_what_a_folder_is(tmp_path: Path) -> None:
    """The digest by which results are kept follows it."""
    spec = at(tmp_path / "small", whole(tmp_path / "whole", "bert"))
    pruned(at(tmp_path / "whole", spec), tmp_path / "small", ("heads",))
    before = model_digest(locate(spec, tmp_path))
    record = tmp_path / "small/shapes.json"
    record.write_text(record.read_text() + " ")
    assert model_digest(locate(spec, tmp_path)) != before


def test_what_does_not_fit_the_record_is_refused(tmp_path: Path) -> None:
    spec = at(tmp_path / "small", whole(tmp_path / "whole", "bert"))
    pruned(at(tmp_path / "whole", spec), tmp_path / "small", ("heads",))
    path = tmp_path / "small/shapes.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "tensors": {}}))
    with pytest.raises(SourceError, match=r"query\.weight' is \[24, 32\] in the file, \[32, 32\] in the model"):
        load_model(locate(spec, tmp_path), FEEDS[spec.task])
    path.write_text(json.dumps({**record, "tensors": {"nobody.weight": [3]}}))
    with pytest.raises(
        SourceError, match=r"shapes\.json: the record of shapes is of another model: .* no nobody\.weight"
    ):
        load_model(locate(spec, tmp_path), FEEDS[spec.task])
    path.write_text(json.dumps(record))
    weights = tmp_path / "small/model.safetensors"
    save_file({f"{name}.packed": tensor for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(SourceError, match=r"no tensor of the files is called .* of another model than config"):
        load_model(locate(spec, tmp_path), FEEDS[spec.task])
