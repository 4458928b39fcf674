"""A checkpoint that was written is loaded back by its reader: as it was judged, or it is an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import FEEDS, decoder, linears, scheme, streamed
from safetensors.torch import load_file, save_file

from compress.blocks.materialise import plain
from compress.blocks.sizes import shapes_of
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export import loading_back
from compress.export.bundle import note_rows
from compress.export.checkpoint import write_checkpoint
from compress.export.loading_back import CLOSE, LoadBack, check_loads_back, choose_samples
from compress.export.loading_back import ask as ask_a_process
from compress.facts import Note, Structure
from compress.models.facts import look_at_model
from compress.models.huggingface import TextModel
from compress.models.load import load_model
from compress.models.meta import open_on_meta
from compress.models.open_streamed import open_streamed_module
from compress.models.source import Source, locate
from compress.planning.make_plan import explain_unsaid_sizes
from compress.pruning.configuration import fit_config
from compress.pruning.coupling import find_coupling
from compress.pruning.surgery import remove
from compress.recipe.exports import CheckpointExport
from compress.specs import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
PLENTY = 2**40
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FEWER_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", FEWER_HEADS),
    "llama of 6 heads": ("LlamaForCausalLM", MORE_HEADS),
    "qwen": ("Qwen2ForCausalLM", FEWER_HEADS),
    "gpt2": ("GPT2LMHeadModel", {"num_attention_heads": 4, "num_key_value_heads": None}),
    "bert": ("BertModel", {"num_attention_heads": 4}),
}


def whole(folder: Path, kind: str) -> ModelSpec:
    """A random model as a file would have it that says nothing which its class derives."""
    name, heads = MODELS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SIZES, **{k: v for k, v in heads.items() if v}))
    model.save_pretrained(folder)
    path = folder / "config.json"
    record = json.loads(path.read_text())
    record.pop("head_dim", None)
    path.write_text(json.dumps(record))
    return ModelSpec(source=f"dir:{folder}", task="feature-extraction" if kind == "bert" else "text-generation")


def samples(spec: ModelSpec) -> list[dict[str, np.ndarray]]:
    ids = {name: np.ones((2, 8), np.int64) * (name == "attention_mask") for name in FEEDS[spec.task]}
    return choose_samples([{**ids, "input_ids": np.arange(16).reshape(2, 8) % 60}], texts=True)


def unlocated(spec: ModelSpec, root: Path) -> Source:
    """What the checkpoint came of, which is not read again, and need not be there."""
    return Source(spec, root, "python" if spec.source.startswith("python:") else "huggingface", None, ())


def read_back(
    folder: Path, model: StreamedModel, spec: ModelSpec, export: CheckpointExport | None = None, memory: int = PLENTY
) -> list[Note]:
    lines: list[str] = []
    how = LoadBack(unlocated(spec, folder), samples(spec), memory, lines.append)
    return check_loads_back(folder, model, export or CheckpointExport(), "transformers", how)


def pruned(spec: ModelSpec, kinds: tuple[str, ...]) -> StreamedModel:
    """With one unit of every dimension of these kinds taken out."""
    feeds = FEEDS[spec.task]
    loaded = load_model(locate(spec, Path()), feeds)
    before = shapes_of(loaded.module)
    sample = {name: torch.from_numpy(values) for name, values in samples(spec)[0].items()}
    for dimension in find_coupling(loaded.module, sample).dimensions:
        if dimension.kind in kinds:
            remove(loaded.module, dimension, np.array([1]))
    fit_config(loaded.module.wrapped, before)  # type: ignore[arg-type]
    shapes = shapes_of(loaded.module).since(before)
    return open_streamed_module(loaded.module, Structure(()), loaded.parameters, loaded.folder, shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dimensions", "reader"),
    [
        ("llama", ("heads", "neurons"), "transformers 5"),
        ("llama of 6 heads", ("heads",), "compress (transformers does not: config.json cannot say the pruned sizes"),
        ("qwen", ("heads", "neurons"), "transformers 5"),
        ("gpt2", ("neurons",), "transformers 5"),
        ("gpt2", ("heads", "neurons"), "compress (transformers does not"),
        ("bert", ("neurons",), "transformers 5"),
        ("bert", ("heads",), "compress (transformers does not"),
    ],
)
def test_every_pruned_checkpoint_has_a_reader(
    kind: str, dimensions: tuple[str, ...], reader: str, tmp_path: Path
) -> None:
    """transformers where the class of its configuration takes the numbers, else `dir:` by shapes.json."""
    spec = whole(tmp_path / "whole", kind)
    model = pruned(spec, dimensions)
    write_checkpoint(tmp_path / "small", model, CheckpointExport(), "")
    note, compared = read_back(tmp_path / "small", model, spec)
    assert note.text.startswith(f"small: loaded back by {reader}") and note.level == compared.level == "info"
    assert (tmp_path / "small/shapes.json").exists() == reader.startswith("compress")
    again = load_model(
        locate(spec.model_copy(update={"source": f"dir:{tmp_path / 'small'}"}), tmp_path), FEEDS[spec.task]
    )
    assert again.module is not None
    feeds = {name: torch.from_numpy(values) for name, values in samples(spec)[0].items()}
    torch.testing.assert_close(again.module(**feeds), model.materialise()(**feeds))


def test_what_a_class_derives_is_written_once_it_is_no_longer_so(tmp_path: Path) -> None:
    """A head's size was the width over the heads, of which there are fewer now."""
    spec = whole(tmp_path / "whole", "llama")
    assert "head_dim" not in json.loads((tmp_path / "whole/config.json").read_text())
    write_checkpoint(tmp_path / "small", pruned(spec, ("heads",)), CheckpointExport(), "")
    record = json.loads((tmp_path / "small/config.json").read_text())
    assert (record["num_attention_heads"], record["num_key_value_heads"], record["head_dim"]) == (2, 1, 16)


def test_a_plan_knows_what_no_configuration_will_say(tmp_path: Path) -> None:
    spec = whole(tmp_path / "whole", "llama of 6 heads")
    units = {f"model.layers.{i}.self_attn.v_proj": 3 for i in range(2)}
    names = [
        one.name
        for one in find_coupling(
            load_model(locate(spec, tmp_path), FEEDS[spec.task]).module,
            {  # type: ignore[arg-type]
                name: torch.from_numpy(values) for name, values in samples(spec)[0].items()
            },
        ).dimensions
        if one.kind == "heads"
    ]
    units = dict.fromkeys(names, 3)
    _, run = look_at_model(open_on_meta(locate(spec, tmp_path)), FEEDS[spec.task])
    why = explain_unsaid_sizes(run, units)
    assert why == "LlamaConfig: The hidden size (64) is not a multiple of the number of attention heads (6)"
    assert explain_unsaid_sizes(run, dict.fromkeys(names, 2)) == ""


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_a_pruned_model_in_few_bits_opens_by_its_record(form: Any, tmp_path: Path) -> None:
    """Beside shapes.json the layers' integers are read without transformers."""
    spec = whole(tmp_path / "whole", "llama of 6 heads")
    model = pruned(spec, ("heads",))
    module, export = model.materialise(), CheckpointExport(format=form)
    schemes = {plain(layer): scheme("W4A16", 16) for layer in linears(module)}
    inputs = model.parameters
    model = streamed(module, schemes, tmp_path, shapes=model.shapes, folder=model.folder)
    model = replace(model, parameters=inputs)
    write_checkpoint(tmp_path / "small", model, export, "")
    note, _ = read_back(tmp_path / "small", model, spec, export)
    assert "loaded back by compress (transformers does not: config.json cannot say" in note.text


@pytest.mark.parametrize(
    ("name", "form", "reader"),
    [
        ("W4A16", "compressed-tensors", "transformers 5"),
        ("W3A16_ASYM", "compressed-tensors", "transformers 5"),
        ("W8A8", "compressed-tensors", "transformers 5"),
        ("W8A8_STATIC", "compressed-tensors", "transformers 5"),
        ("FP8_DYNAMIC", "compressed-tensors", "transformers 5"),
        ("W4A16", "gptq", "compress (transformers needs gptqmodel"),
        ("W3A16_ASYM", "gptq", "compress (transformers needs gptqmodel"),
        ("W4A16", "awq", "compress (transformers needs gptqmodel, and a GPU, for the AWQ format"),
        ("W4A16_ASYM", "awq", "compress (transformers needs gptqmodel"),
    ],
)
def test_quantized_checkpoints_are_read_back(name: str, form: Any, reader: str, tmp_path: Path) -> None:
    spec, model, export = written(tmp_path, name, form)
    note, compared = read_back(tmp_path / "out", model, spec, export)
    assert f"loaded back by {reader}" in note.text and "its outputs on 2 samples are those" in compared.text


def test_layers_that_multiply_by_a_formula_of_their_own_are_read_back(tmp_path: Path) -> None:
    """Falcon's, which ask for a weight that transformers' packed layer has not."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 60}
    net = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    spec, model, export = written(tmp_path, net=net)
    note, compared = read_back(tmp_path / "out", model, spec, export)
    assert "loaded back by compress (in transformers transformer.h.0.self_attention.query_key_value multi" in note.text
    assert "its outputs on 2 samples are those" in compared.text


def test_layers_that_lie_transposed_and_in_a_small_type_are_read_back(tmp_path: Path) -> None:
    """GPT-2's square ones above all, whose shape does not tell which way round they lie; and what storing changed."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 60, "initializer_range": 1.0}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    module, export = TextModel(gpt2, "logits"), CheckpointExport(format="gptq", dtype="bfloat16")
    schemes = {plain(layer): scheme("W4A16") for layer in linears(module)}
    names = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    model = replace(streamed(module, schemes, tmp_path), parameters=names)
    write_checkpoint(tmp_path / "out", model, export, "")
    note, _, *more = read_back(tmp_path / "out", model, ModelSpec(source="dir:x", task="text-generation"), export)
    assert "loaded back by compress" in note.text
    assert all("storing in bfloat16 changes its outputs by more than" in one.text for one in more)


def written(
    tmp_path: Path, name: str = "W4A16", form: Any = "compressed-tensors", net: Any = None
) -> tuple[ModelSpec, Any, Any]:
    """A quantized model, a Llama unless one is given, in tmp_path/out."""
    module, export = TextModel(decoder() if net is None else net, "logits"), CheckpointExport(format=form)
    schemes = {plain(layer): scheme(name) for layer in linears(module)}
    names = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    model = replace(streamed(module, schemes, tmp_path), parameters=names)
    write_checkpoint(tmp_path / "out", model, export, "")
    return ModelSpec(source="dir:nowhere", task="text-generation"), model, export


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held["model.layers.0.mlp.up_proj.weight_scale"].mul_(1.1), "computes something else: on 2 samp"),
        (lambda held: held["model.layers.1.input_layernorm.weight"].add_(0.1), "its outputs differ by 0"),
        (
            lambda held: held.pop("model.norm.weight"),
            r"transformers 5.* does not load what .* 'model.norm.weight'",
        ),
        (lambda held: held.update(extra=torch.ones(1)), r"does not load what was written: .*does not use: extra"),
    ],
)
def test_a_checkpoint_that_is_not_what_was_judged_is_an_error(change: Any, message: str, tmp_path: Path) -> None:
    spec, model, export = written(tmp_path)
    path = tmp_path / "out/model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path, {"format": "pt"})
    with pytest.raises(ExportError, match=message):
        read_back(tmp_path / "out", model, spec, export)


LAYER = "model.layers.0.self_attn.q_proj"


def with_biases_and_outliers() -> Any:
    """Channels of large activations, as trained models have them, and biases that count."""
    net = decoder("Qwen2", num_hidden_layers=3, initializer_range=0.1)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
        if name.endswith("layernorm.weight"):
            parameter.data[3] *= 30
    return net


def change_config(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    record = json.loads(path.read_text())
    change(record["quantization_config"]["config_groups"]["group_0"])
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("W8A8", lambda held: held[f"{LAYER}.weight_scale"].mul_(1.1), "from what the stored values give, and 0.001"),
        ("W8A8", lambda held: held.update({f"{LAYER}.weight": held[f"{LAYER}.weight"].flip(1)}), "and 0.001 may be"),
        ("W8A8", lambda held: held[f"{LAYER}.bias"].zero_(), "and 0.001 may be rounding"),
        ("W8A8_STATIC", lambda held: held[f"{LAYER}.input_scale"].mul_(1.1), "q_proj.input_scale is 0.022, and 0.02 "),
    ],
)
def test_where_inputs_are_rounded_a_fault_of_one_layer_is_found(
    name: str, change: Any, message: str, tmp_path: Path
) -> None:
    spec, model, export = written(tmp_path, name, net=with_biases_and_outliers())
    path = tmp_path / "out/model.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path, {"format": "pt"})
    with pytest.raises(ExportError, match=f"computes something else: .*{message}"):
        read_back(tmp_path / "out", model, spec, export)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: group.update(input_activations=None), "rounded, its outputs differ by|rounding of .* by 0 of"),
        (
            lambda group: group["input_activations"].update(num_bits=4),
            "rounded, its outputs differ by|rounding of .* changes",
        ),
    ],
)
def test_a_reader_that_rounds_inputs_in_another_way_is_found(change: Any, message: str, tmp_path: Path) -> None:
    spec, model, export = written(tmp_path, "W8A8", net=with_biases_and_outliers())
    change_config(tmp_path / "out", change)
    with pytest.raises(ExportError, match=message):
        read_back(tmp_path / "out", model, spec, export)


def test_last_bits_that_rounding_makes_large_are_no_fault(tmp_path: Path) -> None:
    """A millionth of each norm moves inputs by whole levels, and outputs by far more than a fault of weights may."""
    spec, model, export = written(tmp_path, "W8A8", net=with_biases_and_outliers())
    path = tmp_path / "out/model.safetensors"
    held = load_file(path)
    for name in held:
        if name.endswith("norm.weight"):
            held[name].mul_(1 + 1e-6 * torch.randn(held[name].shape, generator=torch.Generator().manual_seed(0)))
    save_file(held, path, {"format": "pt"})
    lines: list[str] = []
    check_loads_back(
        tmp_path / "out",
        model,
        export,
        "transformers",
        LoadBack(unlocated(spec, tmp_path), samples(spec), PLENTY, lines.append),
    )
    apart = float(
        next(line for line in lines if "with inputs rounded" in line).split("differ by ")[1].split(" ")[0][:-1]
    )
    assert apart > 3 * CLOSE, lines


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_what_does_not_fit_into_memory_is_compared_by_names_and_shapes(form: Any, tmp_path: Path) -> None:
    spec, model, export = written(tmp_path, form=form)
    plenty, scarce = (read_back(tmp_path / "out", model, spec, export, memory) for memory in (PLENTY, 0))
    assert note_rows(plenty) == note_rows(scarce), "what the manifest hashes does not depend on a machine's memory"
    (compared,) = (note for note in scarce if note.here)
    assert compared.level == "warning" and "its outputs were not compared" in compared.text
    path = tmp_path / "out/model.safetensors"
    held = load_file(path)
    key = next(key for key in held if key.endswith(("up_proj.scales", "up_proj.weight_packed")))
    save_file({**held, key: held[key][:-1].contiguous()}, path, {"format": "pt"})
    with pytest.raises(ExportError, match=r"does not load what was written: .*up_proj"):
        read_back(tmp_path / "out", model, spec, export, memory=0)


@pytest.mark.slow
def test_the_process_is_its_own_and_reads_no_module_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_back, "ask", ask_a_process)
    (tmp_path / "numpy.py").write_text("raise SystemExit('the working directory was imported')")
    monkeypatch.chdir(tmp_path)
    spec, model, export = written(tmp_path)
    note, _ = read_back(tmp_path / "out", model, spec, export)
    assert "loaded back by transformers" in note.text
