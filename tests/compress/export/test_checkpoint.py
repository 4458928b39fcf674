"""Checkpoints: what transformers loads from them is exactly what was quantized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import IDS, decoder, linears, scheme, streamed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress.blocks.experts import unstack_experts
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError, SourceError
from compress.export import checkpoint
from compress.export.checkpoint import write_checkpoint
from compress.export.compressed_tensors import patterns
from compress.recipe.exports import CheckpointExport

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
CT = CheckpointExport()
DENSE = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


def write(tmp_path: Path, model: StreamedModel, export: CheckpointExport = CT) -> Path:
    write_checkpoint(tmp_path / "out", model, export, "name: x\n")
    return tmp_path / "out"


def load(folder: Path, auto: Any = transformers.AutoModelForCausalLM, **how: Any) -> nn.Module:
    """The model, after transformers found every tensor and nothing too many."""
    model, info = auto.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", **how)
    assert not any(info.values()), info
    return model.eval()


def logits(model: nn.Module, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Gemma2", "Phi3"])
def test_decoders_load_with_the_logits_of_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    module = decoder(kind, **({"head_dim": 16} if kind == "Gemma2" else {}))
    model = streamed(module, dict.fromkeys(linears(module), scheme("W4A16")), tmp_path)
    folder = write(tmp_path, model)
    assert torch.equal(logits(load(folder)), logits(model.materialise()))
    record = config(folder)["quantization_config"]
    assert record["format"] == "pack-quantized" and record["quantization_status"] == "compressed"
    assert record["ignore"] == ["lm_head"] and record["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.parametrize("name", ["W2A16", "W3A16", "W5A16", "W8A16"])
def test_other_widths_load_exactly(name: str, tmp_path: Path) -> None:
    module = decoder()
    model = streamed(module, dict.fromkeys(linears(module), scheme(name)), tmp_path)
    assert torch.equal(logits(load(write(tmp_path, model))), logits(model.materialise()))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "W3A16_ASYM", "W8A16_ASYM", "W8A8", "W4A8", "FP8_DYNAMIC"])
def test_dequantized_on_loading_they_are_exact(name: str, tmp_path: Path) -> None:
    module = decoder()
    model = streamed(module, dict.fromkeys(linears(module), scheme(name)), tmp_path)
    assert torch.equal(logits(load(write(tmp_path, model), **DENSE)), logits(model.materialise()))


@pytest.mark.parametrize(
    ("name", "form"), [("W8A8_STATIC", "int-quantized"), ("FP8", "float-quantized"), ("FP8_DYNAMIC", "float-quantized")]
)
def test_schemes_with_activations_carry_their_scales(name: str, form: str, tmp_path: Path) -> None:
    module = decoder()
    layers, chosen = linears(module), scheme(name)
    model = streamed(module, dict.fromkeys(layers, chosen), tmp_path)
    folder = write(tmp_path, model)
    loaded = load(folder)
    assert torch.isfinite(logits(loaded)).all()  # the first forward dequantizes
    state, reference = loaded.state_dict(), model.materialise().state_dict()
    for layer in layers:
        assert torch.equal(state[f"{layer}.weight"], reference[f"{layer}.weight"])
        assert chosen.activations is not None
        if not chosen.activations.dynamic:
            assert state[f"{layer}.input_scale"].item() == pytest.approx(0.02)
    assert config(folder)["quantization_config"]["format"] == form


class QuantizedCache(transformers.DynamicCache):
    """Keys and values rounded with one scale each, as they are stored."""

    def __init__(self, kind: str, scales: tuple[float, float]) -> None:
        super().__init__()
        self.kind, self.scales = kind, scales

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*map(self.rounded, (keys, values), self.scales), *args, **kwargs)

    def rounded(self, x: Tensor, scale: float) -> Tensor:
        if self.kind == "int8":
            return torch.clamp(x / scale, -128, 127).round() * scale
        return torch.clamp(x / scale, -448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantized_cache_is_read_with_its_scales(kind: str, tmp_path: Path) -> None:
    module, scales = decoder(), (0.0078125, 0.015625)
    attention = {f"model.layers.{i}.self_attn": scales for i in range(2)}
    schemes = dict.fromkeys(linears(module), scheme("W4A16"))
    model = streamed(module, schemes, tmp_path, kv_cache=kind, kv_scales=attention)
    folder = write(tmp_path, model)
    assert config(folder)["quantization_config"]["kv_cache_scheme"]["type"] == ("int" if kind == "int8" else "float")
    reference = logits(model.materialise(), past_key_values=QuantizedCache(kind, scales))
    assert not torch.equal(reference, logits(model.materialise()))
    assert torch.equal(logits(load(folder)), reference)


def test_layers_of_several_schemes_load_exactly(tmp_path: Path) -> None:
    module = decoder()
    chosen = {"down_proj": "W8A16", "o_proj": "FP8_DYNAMIC", "gate_proj": "W2A16", "up_proj": "W2A16"}
    schemes = {n: scheme(chosen.get(n.rpartition(".")[2], "W4A16")) for n in linears(module, ("lm_head", "0.mlp"))}
    model = streamed(module, schemes, tmp_path)
    folder = write(tmp_path, model)
    loaded = load(folder)
    logits(loaded)
    state, reference = loaded.state_dict(), model.materialise().state_dict()
    assert all(torch.equal(state[f"{layer}.weight"], reference[f"{layer}.weight"]) for layer in schemes)
    record = config(folder)["quantization_config"]
    assert record["format"] == "mixed-precision"
    assert "model.layers.0.mlp.down_proj" in record["ignore"]
    assert record["config_groups"]["group_1"]["targets"] == [r"re:.*\.layers\.\d+\.self_attn\.o_proj$"]


def test_patterns_select_exactly_their_layers() -> None:
    every = [f"model.{part}.layers.{i}.{leaf}" for part in ("text", "image") for i in range(3) for leaf in "ab"]
    text = [name for name in every if ".text." in name and name.endswith("a")]
    assert patterns(text, every) == [r"re:model\.text\.layers\.\d+\.a$"]
    assert patterns(text[:2], every) == text[:2]
    assert patterns(["model.layers.1.a", "model.layers.2.a"], ["model.layers.1.a", "model.layers.2.a"]) == [
        r"re:.*\.layers\.\d+\.a$"
    ]


def test_an_output_layer_that_is_quantized_no_longer_shares_the_embedding(tmp_path: Path) -> None:
    module = decoder(tie_word_embeddings=True)
    tied = streamed(module, dict.fromkeys(linears(module), scheme("W4A16")), tmp_path / "tied")
    folder = write(tmp_path / "tied", tied)
    assert "lm_head.weight" not in tensors(folder) and config(folder)["tie_word_embeddings"] is True
    assert torch.equal(logits(load(folder)), logits(tied.materialise()))
    free = streamed(module, dict.fromkeys([*linears(module), "lm_head"], scheme("W4A16")), tmp_path / "free")
    folder = write(tmp_path / "free", free)
    assert {"lm_head.weight_packed", "model.embed_tokens.weight"} <= set(tensors(folder))
    assert config(folder)["tie_word_embeddings"] is False
    assert torch.equal(logits(load(folder)), logits(free.materialise()))


def test_encoders_keep_the_names_of_their_files(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes["attn_implementation"] = "eager"
    bert = transformers.BertModel(transformers.BertConfig(num_attention_heads=4, vocab_size=128, **sizes))
    model = streamed(bert.eval(), dict.fromkeys(linears(bert), scheme("W4A16")), tmp_path / "bert")
    loaded = load(write(tmp_path / "bert", model), transformers.AutoModel)
    with torch.no_grad():
        reference = model.materialise()(IDS).last_hidden_state
        assert torch.equal(loaded(IDS).last_hidden_state, reference)
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(num_attention_heads=4, image_size=32, patch_size=8, **sizes)
    ).eval()
    model = streamed(vit, dict.fromkeys(linears(vit), scheme("W4A16")), tmp_path / "vit")
    folder = write(tmp_path / "vit", model)
    assert "vit.encoder.layer.0.attention.attention.query.weight_packed" in tensors(folder)
    pixels = torch.ones(1, 3, 32, 32)
    with torch.no_grad():
        reference = model.materialise()(pixels).logits
        assert torch.equal(load(folder, transformers.AutoModelForImageClassification)(pixels).logits, reference)


@pytest.mark.parametrize("quantized", [True, False])
def test_experts_are_stored_one_by_one_or_stacked_where_they_stay_float(quantized: bool, tmp_path: Path) -> None:
    module = decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    unstack_experts(module)
    layers = linears(module, ("lm_head",) if quantized else ("lm_head", "experts"))
    model = streamed(module, dict.fromkeys(layers, scheme("W4A16")), tmp_path)
    folder = write(tmp_path, model)
    names = set(tensors(folder))
    assert ("model.layers.1.block_sparse_moe.experts.3.w1.weight_packed" in names) == quantized
    assert ("model.layers.1.block_sparse_moe.experts.gate_up_proj" in names) != quantized
    assert "model.layers.0.block_sparse_moe.gate" in config(folder)["quantization_config"]["ignore"]
    # Not equal to the last bit: transformers multiplies all experts of a layer at once.
    torch.testing.assert_close(logits(load(folder)), logits(model.materialise()), rtol=0, atol=1e-6)


def test_what_stays_float_takes_the_wanted_type_or_the_sources(tmp_path: Path) -> None:
    module = decoder()
    source = tmp_path / "source"
    module.to(torch.bfloat16).save_pretrained(source)
    module.float()
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("not copied")
    (source / "modeling_own.py").write_text("not copied either, unless the recipe trusts it")
    schemes = dict.fromkeys(linears(module), scheme("W4A16"))
    model = streamed(module, schemes, tmp_path, folder=source)
    folder = write(tmp_path, model)
    held = tensors(folder)
    layer = "model.layers.0.mlp.up_proj"
    assert held["model.norm.weight"].dtype == held[f"{layer}.weight_scale"].dtype == torch.bfloat16
    assert config(folder)["dtype"] == "bfloat16" and config(folder)["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "tokenizer.json").is_file() and not (folder / "notes.txt").exists()
    assert (folder / "recipe.yaml").read_text() == "name: x\n"
    assert load(folder).dtype == torch.bfloat16
    export = CheckpointExport(dtype="float16")
    notes = write_checkpoint(tmp_path / "half", model, export, "", with_code=True)
    assert (tmp_path / "half/modeling_own.py").is_file() and not (folder / "modeling_own.py").exists()
    assert tensors(tmp_path / "half")["model.norm.weight"].dtype == torch.float16
    assert any("scales are rounded as they are stored, by up to 0.0" in note.text for note in notes)


def test_shards_hold_the_same_as_one_file_and_the_same_bytes_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = decoder()
    model = streamed(module, dict.fromkeys(linears(module), scheme("W4A16")), tmp_path)
    whole = write(tmp_path, model)
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 30_000)
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, model, CheckpointExport(), "")
    shards = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2 and not list((tmp_path / "a").glob("*.partial"))
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        with safe_open(tmp_path / "a" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    one, many = tensors(whole), tensors(tmp_path / "a")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert torch.equal(logits(load(tmp_path / "a")), logits(model.materialise()))


def slow_gptq(held: dict[str, Tensor], layer: str, bits: int, version: int) -> np.ndarray:
    """The weight [out, in] that a GPTQ layer stands for, bit by bit from the format's description."""
    words, zeros = (held[f"{layer}.{name}"].numpy().astype(np.uint32) for name in ("qweight", "qzeros"))
    scales, groups = held[f"{layer}.scales"].float().numpy(), held[f"{layer}.g_idx"].numpy()

    def value(column: np.ndarray, i: int) -> int:
        number = sum(int(word) << (32 * k) for k, word in enumerate(column))
        return (number >> (bits * i)) & (2**bits - 1)

    rows, columns = scales.shape[1], len(groups)
    weight = np.empty((rows, columns), np.float32)
    for r in range(rows):
        for c in range(columns):
            zero = value(zeros[groups[c]], r) + (1 if version == 1 else 0)
            weight[r, c] = np.float32(value(words[:, r], c) - zero) * scales[groups[c], r]
    return weight


@pytest.mark.parametrize("name", ["W2A16", "W3A16", "W4A16", "W8A16", "W3A16_ASYM", "W4A16_ASYM"])
def test_gptq_stands_for_the_same_weights(name: str, tmp_path: Path) -> None:
    module = decoder()
    layer, chosen = "model.layers.1.self_attn.k_proj", scheme(name)
    model = streamed(module, dict.fromkeys(linears(module), chosen), tmp_path)
    folder = write(tmp_path, model, CheckpointExport(format="gptq"))
    record = config(folder)["quantization_config"]
    symmetric = chosen.weights.symmetric
    assert record["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2") and record["sym"] is symmetric
    assert json.loads((folder / "quantize_config.json").read_text()) == record
    weight = model.store.quantized(layer)
    assert weight is not None
    exact = (weight.values.astype(np.float32).reshape(32, weight.scales.shape[1], -1)) - (
        0 if weight.zero_points is None else weight.zero_points[:, :, None].astype(np.float32)
    )
    expected = (exact * weight.scales.astype(np.float16).astype(np.float32)[:, :, None]).reshape(32, 64)
    found = slow_gptq(tensors(folder), layer, chosen.weights.bits, 1 if symmetric else 2)
    np.testing.assert_array_equal(found, expected)


def slow_awq(held: dict[str, Tensor], layer: str, group_size: int) -> np.ndarray:
    """The weight [out, in] that an AWQ layer stands for, unpacked as AutoAWQ and vLLM do: shift, order, subtract."""
    shifts, back = torch.arange(0, 32, 4), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # AWQ_REVERSE_ORDER

    def unpack(name: str) -> Tensor:
        words = held[f"{layer}.{name}"]
        return ((words[:, :, None] >> shifts) & 15)[:, :, back].flatten(1)  # [rows, out]

    scales = held[f"{layer}.scales"].float().repeat_interleave(group_size, 0)
    weight = (unpack("qweight") - unpack("qzeros").repeat_interleave(group_size, 0)).float() * scales  # [in, out]
    return weight.T.numpy()


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_awq_stands_for_the_same_weights(name: str, tmp_path: Path) -> None:
    module = decoder()
    layer, chosen = "model.layers.1.self_attn.k_proj", scheme(name)
    model = streamed(module, dict.fromkeys(linears(module), chosen), tmp_path)
    folder = write(tmp_path, model, CheckpointExport(format="awq"))
    assert config(folder)["quantization_config"] == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": chosen.weights.group_size,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }
    weight = model.store.quantized(layer)
    assert weight is not None
    expected = replace(weight, scales=weight.scales.astype(np.float16).astype(np.float32)).dequantize()
    np.testing.assert_array_equal(slow_awq(tensors(folder), layer, chosen.weights.group_size), expected)


def test_gptq_takes_transposed_layers_and_tells_which_stay_float(tmp_path: Path) -> None:
    config_ = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2)
    module = transformers.AutoModelForCausalLM.from_config(config_).eval()
    layers = linears(module)
    model = streamed(module, dict.fromkeys(layers[1:], scheme("W4A16")), tmp_path)
    folder = write(tmp_path, model, CheckpointExport(format="gptq"))
    held = tensors(folder)
    assert held["transformer.h.0.mlp.c_fc.qweight"].shape == (64 // 8, 256)
    assert held["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
    dynamic = config(folder)["quantization_config"]["dynamic"]
    assert dynamic == {r"-:^transformer\.h\.0\.attn\.c_attn$": {}}
    with pytest.raises(ExportError, match=r"transformer.h.0.mlp.c_fc is a Conv1D, which compressed-tensors has no"):
        write(tmp_path / "ct", model)


def test_a_model_with_nothing_quantized_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    module = decoder()
    folder = write(tmp_path, streamed(module, {}, tmp_path))
    assert "quantization_config" not in config(folder)
    assert torch.equal(logits(load(folder)), logits(module))


class Plain(nn.Module):
    """None of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 8)


def test_a_module_of_ones_own_gets_its_tensors_and_what_they_mean(tmp_path: Path) -> None:
    folder = write(tmp_path, streamed(Plain(), {"one": scheme("W4A16")}, tmp_path))
    assert list(config(folder)) == ["quantization_config"]
    assert {"one.weight_packed", "one.bias", "two.weight"} <= set(tensors(folder))


def damaged(tmp_path: Path, change: Any) -> StreamedModel:
    module = decoder()
    model = streamed(module, dict.fromkeys(linears(module), scheme("W4A16")), tmp_path)
    held = load_file(tmp_path / "finished.safetensors")
    change(held)
    save_file(held, tmp_path / "finished.safetensors")
    return model


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held[f"{UP}:scales"].fill_(np.nan), "has scales that are NaN or infinite"),
        (lambda held: held[f"{UP}:values"].fill_(9), r"has integers outside -8\.\.7, which 4 bits hold"),
        (
            lambda held: held.update({f"{UP}:values": held[f"{UP}:values"][:-1].contiguous()}),
            r"has a quantized weight of \[95, 64\] where the model has \[96, 64\]",
        ),
        (
            lambda held: held.update({f"{UP}:scales": held[f"{UP}:scales"][:, :1].contiguous()}),
            r"weight_scale' is torch.float32 \[96, 1\] where the model and the recipe make it torch.float32 \[96, 2\]",
        ),
    ],
)
def test_damaged_work_is_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{UP}.*{message}"):
        write(tmp_path, damaged(tmp_path, change))
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"{UP}:scales' cannot be read"):
        write(tmp_path, damaged(tmp_path, lambda held: held.pop(f"{UP}:scales")))
    module = decoder()
    model = streamed(module, {}, tmp_path)
    del model.store._entries["model.norm.weight"]
    with pytest.raises(ExportError, match=r"the weights lack model.norm.weight, which LlamaForCausalLM has"):
        write(tmp_path, model)


def test_values_that_a_smaller_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    module = decoder()
    module.model.norm.weight.data.fill_(1e6)
    model = streamed(module, {}, tmp_path)
    with pytest.raises(ExportError, match=r"'model.norm.weight' does not fit into float16; set export.dtype: bfloat16"):
        write(tmp_path, model, CheckpointExport(dtype="float16"))


def test_a_quantized_embedding_that_is_shared_and_a_missing_input_scale_are_refused(tmp_path: Path) -> None:
    module = decoder(tie_word_embeddings=True)
    shared = streamed(module, {"model.embed_tokens": scheme("W4A16")}, tmp_path)
    with pytest.raises(ExportError, match=r"model.embed_tokens is quantized and shares its weight with lm_head;"):
        write(tmp_path, shared)
    static = streamed(module, {UP: scheme("FP8")}, tmp_path, activation_scales={})
    with pytest.raises(ExportError, match=f"{UP} has no scale for its inputs, which FP8 needs"):
        write(tmp_path, static)
