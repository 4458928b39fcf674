"""What the names in a folder's files tell: layers, blocks, what stands beside them, and numbers in few bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress.errors import SourceError
from compress.export import compressed_tensors
from compress.export.packing import pack_floats
from compress.facts import LayerFacts
from compress.formats.schemes import PRESETS, Scheme
from compress.formats.targets import TARGETS
from compress.models import shards
from compress.models.shards import facts_by_names, open_named_model, read_named_model
from compress.models.source import Source, locate
from compress.passes.rtn import Rtn
from compress.rounding.weights import round_weight
from compress.specs import ModelSpec

HIDDEN, INNER, VOCABULARY = 64, 160, 96


def decoder(n_blocks: int = 2, prefix: str = "model.") -> dict[str, Tensor]:
    """The tensors of a decoder."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.1).bfloat16()

    tensors = {f"{prefix}embed_tokens.weight": draw(VOCABULARY, HIDDEN), "lm_head.weight": draw(VOCABULARY, HIDDEN)}
    for block in range(n_blocks):
        at = f"{prefix}layers.{block}"
        tensors |= {f"{at}.self_attn.{name}.weight": draw(HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj")}
        tensors |= {f"{at}.mlp.{name}.weight": draw(INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
        tensors |= {f"{at}.mlp.down_proj.weight": draw(HIDDEN, INNER), f"{at}.self_attn.q_norm.weight": draw(4, 16)}
    return tensors


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Source:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    usual = {"model_type": "nobody", "architectures": ["Nobody"], "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**usual, **config}.items() if v is not None}))
    return locate(ModelSpec(source=f"shards:{folder}", task="text-generation"), folder)


def layers_of(source: Source) -> dict[str, LayerFacts]:
    return {layer.name: layer for layer in facts_by_names(source, read_named_model(source)).layers}


def test_a_decoder(tmp_path: Path) -> None:
    source = write(tmp_path / "lm", decoder())
    named = read_named_model(source)
    layers = layers_of(source)
    assert layers["model.embed_tokens"].type == "Embedding" and layers["model.embed_tokens"].role == "table"
    assert layers["lm_head"].role == "head" and "model.layers.0.self_attn.q_norm" not in layers
    assert layers["model.layers.1.mlp.down_proj"].shape == (HIDDEN, INNER)
    assert [block.name for block in named.structure.blocks] == ["model.layers.0", "model.layers.1"]
    groups = {group.layers for group in named.structure.blocks[0].input_groups}
    at = "model.layers.0.self_attn"
    assert (f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj") in groups
    assert len(open_named_model(source).store.names()) == len(decoder())


def test_a_table_that_the_output_layer_shares(tmp_path: Path) -> None:
    tensors = decoder()
    del tensors["lm_head.weight"]
    source = write(tmp_path / "lm", tensors)
    layers = layers_of(source)
    assert layers["lm_head"].weight == "model.embed_tokens.weight" and layers["lm_head"].role == "tied"
    assert open_named_model(source).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head" not in layers_of(write(tmp_path / "untied", tensors, tie_word_embeddings=False))


def test_what_stands_beside(tmp_path: Path) -> None:
    """A tower, what joins it, blocks beyond the number in config.json, next-token predictors."""
    tensors = decoder(3, "model.language_model.")
    tensors |= {f"model.visual.blocks.{i}.qkv.weight": torch.randn(48, 16) for i in range(4)}
    tensors |= {
        f"{name}.weight": torch.randn(64, 64) for name in ("model.visual.merger", "mtp.layers.0.proj", "mtp.fc")
    }
    tensors |= {"model.joiner.weight": torch.randn(64, 64)}
    config = {"num_hidden_layers": None, "vocab_size": None, "vision_config": {"num_hidden_layers": 4}}
    config |= {"text_config": {"num_hidden_layers": 2, "vocab_size": VOCABULARY}}
    layers = layers_of(write(tmp_path / "lm", tensors, **config))
    beside = {name for name, layer in layers.items() if layer.role == "beside"}
    inside = {
        name for name in layers if name.startswith(("model.language_model.layers.0", "model.language_model.layers.1"))
    }
    assert beside == layers.keys() - inside - {"lm_head", "model.language_model.embed_tokens"}


def test_an_output_layer_of_any_name_and_lists_that_are_no_towers(tmp_path: Path) -> None:
    tensors = decoder()
    tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    tensors |= {f"model.projections.{i}.weight": torch.randn(64, 64) for i in range(3)}
    tensors |= {f"model.ffns.{i}.linear.weight": torch.randn(64, 64) for i in range(2)}
    layers = layers_of(write(tmp_path / "lm", tensors))
    taken, kept = Rtn(scheme="W4A16", group_size=32).choose_layers(list(layers.values()), TARGETS["vllm"])
    assert {decision.layer: decision.reason for decision in kept} == {
        "embed_out": "ignore: lm_head",
        "model.embed_tokens": "not a matrix product",
    }
    assert {"model.projections.2", "model.ffns.1.linear"} <= {layer.name for layer in taken}


@pytest.mark.parametrize("stacked", [False, True])
def test_routers_and_stacks(tmp_path: Path, stacked: bool) -> None:
    tensors = decoder()
    at = "model.layers.1.mlp"
    if stacked:
        tensors |= {f"{at}.experts.gate_up_proj": torch.randn(8, 64, 64), f"{at}.conv1d.weight": torch.randn(64, 1, 4)}
    else:
        tensors |= {f"{at}.experts.{e}.w1.weight": torch.randn(32, 64) for e in range(8)}
    tensors |= {f"{at}.gate.weight": torch.randn(9, 64), f"{at}.shared.weight": torch.randn(9, 64)}
    tensors |= {f"{at}.scores.weight": torch.randn(8, 64)}
    source = write(tmp_path / "lm", tensors)
    layers, named = layers_of(source), read_named_model(source)
    assert [name for name, layer in layers.items() if layer.role == "router"] == [f"{at}.gate", f"{at}.scores"]
    assert (f"{at}.experts.7.w1" in layers) == (not stacked)
    assert any("lie in stacks" in note for note in named.notes) == stacked


def test_a_large_block_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = decoder() | {f"model.layers.0.mlp.experts.{e}.w1.weight": torch.randn(64, 64) for e in range(3)}
    monkeypatch.setattr(shards, "BLOCK_WEIGHTS", 3 * 64 * 64)
    names = [block.name for block in read_named_model(write(tmp_path / "lm", tensors)).structure.blocks]
    assert names[:2] == ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts"]
    assert names[-2:] == ["model.layers.1.mlp", "model.layers.1.self_attn"]


def fp8_blocks(weight: Tensor, layer: str) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 with a scale for each 48 x 32, which does not divide the rows."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 48), -(-columns // 32)) * 0.01 + 0.001
    spread = scales.repeat_interleave(48, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    values = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": values, f"{layer}.weight_scale_inv": scales}, values.float() * spread


def fp8_rows(weight: Tensor, layer: str) -> tuple[dict[str, Tensor], Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": values, f"{layer}.weight_scale": scales}, values.float() * scales


def fp8_tensor(weight: Tensor, layer: str) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    more = {f"{layer}.input_scale": torch.tensor(0.1), f"{layer.replace('k_proj', 'attn')}.k_scale": torch.tensor(0.1)}
    return {f"{layer}.weight": values, f"{layer}.weight_scale": scale, **more}, values.float() * scale


def nvfp4(weight: Tensor, layer: str) -> tuple[dict[str, Tensor], Tensor]:
    """As ModelOpt writes it: the second scale is multiplied by."""
    rounded = round_weight(weight, PRESETS["NVFP4A16"].weights)
    stored = {name: torch.from_numpy(array) for name, array in rounded.stored.items()}
    tensors = {f"{layer}.weight": torch.from_numpy(pack_floats(rounded.values))}
    tensors |= {f"{layer}.weight_scale": stored["scales"].view(torch.float8_e4m3fn)}
    tensors |= {f"{layer}.weight_scale_2": 1 / stored["global_scale"].reshape(())}
    return tensors, torch.from_numpy(rounded.dequantize())


def packed(scheme: Scheme) -> Callable[[Tensor, str], tuple[dict[str, Tensor], Tensor]]:
    """As compressed-tensors writes it; scales in float32, so that they are the same ones."""

    def make(weight: Tensor, layer: str) -> tuple[dict[str, Tensor], Tensor]:
        rounded = round_weight(weight, scheme.weights)
        tensors = compressed_tensors.tensors(layer, rounded, scheme, torch.float32, None)
        return tensors, torch.from_numpy(rounded.dequantize())

    return make


def library_config(scheme: Scheme) -> dict[str, Any]:
    return compressed_tensors.quantization_config({"x": scheme}, {"x": "Linear"}, ["lm_head"], None, {})


W4, W3 = PRESETS["W4A16"].with_group(32), PRESETS["W3A16_ASYM"].with_group(32)
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor, str], tuple[dict[str, Tensor], Tensor]]]] = {
    "FP8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 32]}, fp8_blocks),
    "FP8 by rows": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "FP8 by tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "NVFP4 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    **{
        name: (library_config(scheme), packed(scheme))
        for name, scheme in {
            "packed integers": W4,
            "packed, with zero points": W3,
            "NVFP4": PRESETS["NVFP4A16"],
            "MXFP4": PRESETS["MXFP4A16"],
            "MXFP8": PRESETS["MXFP8A16"],
            "FP8": PRESETS["FP8_DYNAMIC"],
            "W8A8": PRESETS["W8A8"],
        }.items()
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_in_few_bits_are_read_as_the_floats_that_they_stand_for(form: str, tmp_path: Path) -> None:
    record, make = FORMS[form]
    tensors, floats = dict(decoder()), dict[str, Tensor]()
    for name in [name for name in tensors if "_proj" in name]:
        layer = name.removesuffix(".weight")
        stored, floats[name] = make(tensors.pop(name).float(), layer)
        tensors |= stored
    source = write(tmp_path / "lm", tensors, quantization_config=record)
    model = open_named_model(source)
    assert set(model.store.names()) == set(decoder())
    for name, expected in floats.items():
        torch.testing.assert_close(model.store.read(name), expected, rtol=1e-6, atol=0)


STACK = {"model.layers.0.mlp.experts.down_blocks": torch.zeros(4, 32, 2, 16, dtype=torch.uint8)}
UNFIT: list[tuple[dict[str, Tensor | None], dict[str, Any], str]] = [
    (
        {"model.layers.3.x.weight": torch.zeros(2, 2)},
        {"num_hidden_layers": 4},
        "its files hold nothing of model.layers.2",
    ),
    (STACK, {"quantization_config": {"quant_method": "mxfp4"}}, "is a stack of experts in few bits"),
    ({"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}, {}, "is stored as F8_E4M3"),
    ({"model.layers.0.mlp.up_proj.bias": torch.zeros(HIDDEN)}, {}, "weights lie as [in, out]"),
    (
        {},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "weights of quant_method 'bitsandbytes' are not read",
    ),
]


@pytest.mark.parametrize(("tensors", "config", "text"), UNFIT)
def test_refusals(tensors: dict[str, Tensor], config: dict[str, Any], text: str, tmp_path: Path) -> None:
    source = write(tmp_path / "lm", decoder() | tensors, **config)
    with pytest.raises(SourceError) as caught:
        read_named_model(source)
    assert text in str(caught.value)


def test_other_tasks_and_files_without_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "lm", {"fc.weight": torch.zeros(4, 4)})
    with pytest.raises(SourceError, match="no numbers in names"):
        read_named_model(locate(ModelSpec(source="shards:lm", task="text-generation"), tmp_path))
    with pytest.raises(SourceError, match="language models alone"):
        read_named_model(locate(ModelSpec(source="shards:lm", task="image-classification"), tmp_path))
