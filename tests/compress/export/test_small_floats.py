"""FP4, MX and FP8 in blocks: files hold what compressed-tensors itself would write, and load as what was rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IDS, decoder, linears, streamed
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme

from compress.blocks.engine_arithmetic import compute_as_engine
from compress.blocks.materialise import fill
from compress.export.checkpoint import write_checkpoint
from compress.export.compressed_tensors import _make_scheme_record, entries, layer_format, tensors
from compress.export.loading_back import read_as_stored
from compress.formats.schemes import PRESETS
from compress.models.huggingface import load_trained, read_pretrained
from compress.models.source import locate
from compress.recipe.exports import CheckpointExport
from compress.rounding.grid import round_to_grid
from compress.specs import ModelSpec

FLOATS = ["NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16", "FP8_BLOCK"]
NAMES = [*FLOATS, "W4AFP8", "W4A8"]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}


@pytest.mark.parametrize("name", NAMES)
def test_schemes_are_the_library_s_presets(name: str) -> None:
    written = _make_scheme_record(PRESETS[name], ["Linear"]).model_dump()
    wanted = preset_name_to_scheme(name, ["Linear"]).model_dump()
    written["weights"].pop("zp_dtype", None)
    wanted["weights"].pop("zp_dtype", None)
    assert written == wanted
    assert PRESETS[name].name == name


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_library_s_compressor(name: str) -> None:
    scheme, dtype = PRESETS[name], torch.float32
    torch.manual_seed(0)
    weight = torch.randn(200, 256) * torch.rand(200, 1) / 10  # rows that no block of 128 divides
    rounded = round_to_grid(weight, scheme.weights, signed=False)
    own = tensors("layer", rounded, scheme, dtype, None)
    own.pop("layer.weight_shape", None)
    record = _make_scheme_record(scheme, [])
    given = {"weight": torch.from_numpy(rounded.dequantize()), "weight_scale": torch.from_numpy(rounded.scales)}
    if scheme.weights.rows > 1:
        given["weight_scale"] = own["layer.weight_scale"]
    if scheme.weights.scales == "e4m3":
        given["weight_global_scale"] = own["layer.weight_global_scale"]
        given["weight_scale"] = own["layer.weight_scale"].float()
    library = BaseCompressor.get_value_from_registry(layer_format(scheme)).compress(given, record)
    library.pop("weight_shape", None)
    assert own.keys() == {f"layer.{leaf}" for leaf in library}
    for leaf, tensor in library.items():
        mine = own[f"layer.{leaf}"]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), leaf
        assert torch.equal(mine.view(torch.uint8), tensor.contiguous().view(torch.uint8)), leaf


@pytest.mark.parametrize("name", NAMES)
def test_what_is_announced_is_written(name: str) -> None:
    scheme = PRESETS[name]
    rounded = round_to_grid(torch.randn(200, 256), scheme.weights, signed=False)
    scale = 0.02 if scheme.activations and scheme.activations.has_stored_scale else None
    made = tensors("layer", rounded, scheme, torch.bfloat16, scale)
    announced = entries("layer", (200, 256), scheme, torch.bfloat16)
    assert {e.name: (e.dtype, e.shape) for e in announced} == {k: (t.dtype, tuple(t.shape)) for k, t in made.items()}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", NAMES)
def test_transformers_and_we_load_what_was_rounded(name: str, tmp_path: Path) -> None:
    module = decoder(**WIDE)
    model = streamed(module, dict.fromkeys(linears(module), PRESETS[name]), tmp_path)
    write_checkpoint(tmp_path / "out", model, CheckpointExport(), "name: x\n")
    spec = ModelSpec(source=f"dir:{tmp_path / 'out'}", task="text-generation")
    loaded, unused = read_pretrained(locate(spec, tmp_path))
    assert not unused
    read = read_as_stored(model, CheckpointExport(), "transformers")
    wanted = compute_as_engine(model, "transformers").build()
    fill(wanted, read, model.tied)
    with torch.no_grad():
        assert torch.equal(loaded.wrapped(input_ids=IDS).logits, wanted(input_ids=IDS).logits)
    exact, ours = model.materialise(), load_trained(locate(spec, tmp_path), alone=True)
    for layer in linears(module):
        assert torch.equal(ours.wrapped.get_submodule(layer).weight, exact.get_submodule(layer).weight)
