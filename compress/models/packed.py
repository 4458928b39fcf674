"""Quantized checkpoints read without their engine: each weight as the floats that its integers stand for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.blocks.store import Decoded
from compress.blocks.trace import is_hf_conv1d, is_layer
from compress.errors import SourceError
from compress.models.checkpoint_names import file_names
from compress.models.source import read_object

Files = Mapping[str, tuple[Path, tuple[int, ...]]]
"""Name of a tensor -> its file, and its shape."""


def quantization_of(folder: Path | None) -> dict[str, Any]:
    """Return what a folder's config.json says of its quantized weights; {} where it says nothing."""
    path = folder / "config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    record = read_object(path).get("quantization_config")
    return record if isinstance(record, dict) else {}


def loads_as_floats(record: Mapping[str, Any]) -> bool:
    """Return whether transformers reads a compressed-tensors record with `dequantize=True` alone.

    That is so of asymmetric weights in packed words, and of embeddings, to whose look-up it gives no weight otherwise.
    """
    groups = [group for group in (record.get("config_groups") or {}).values() if isinstance(group, dict)]
    if any("Embedding" in (group.get("targets") or ()) for group in groups):
        return True
    weights = [group.get("weights") or {} for group in groups if not group.get("input_activations")]
    return any(args.get("symmetric") is False and args.get("type") == "int" for args in weights)


def has_small_floats(record: Mapping[str, Any]) -> bool:
    """Return whether a compressed-tensors record has FP4 or MX weights, which the library unpacks into bfloat16."""
    groups = [group for group in (record.get("config_groups") or {}).values() if isinstance(group, dict)]
    weights = [group.get("weights") or {} for group in groups]
    return any(args.get("type") == "float" and args.get("scale_dtype") for args in weights)


def decode_weights(module: nn.Module, record: Mapping[str, Any], files: Files) -> dict[str, Decoded]:
    """Find the weights of `module` that `files` hold in few bits, by the module's plain names.

    `record`: `quantization_config`. SourceError: a format that is not read here, tensors that are missing or of a shape
    that does not fit the layer.
    """
    method = record.get("quant_method")
    layers = {plain(name): part for name, part in module.named_modules() if is_layer(part)}
    names = file_names(module, (plain(name) for name in module.state_dict()))
    if method == "gptq":
        held = {n: _find_layer_tensors(files, names.layer(n), "qweight") for n in layers}
        return {f"{n}.weight": _decode_gptq(n, layers[n], parts, record) for n, parts in held.items() if parts}
    if method == "awq" and str(record.get("version", "gemm")).lower() == "gemm":
        held = {n: _find_layer_tensors(files, names.layer(n), "qweight") for n in layers}
        return {f"{n}.weight": _decode_awq(n, layers[n], parts) for n, parts in held.items() if parts}
    if method != "compressed-tensors":
        raise SourceError(
            f"weights of quant_method {method!r} are not read here; compressed-tensors, gptq and awq (gemm) are"
        )
    schemes = _match_schemes(module, record)
    held = {n: _find_layer_tensors(files, names.layer(n), "weight_scale") for n in layers if n in schemes}
    return {f"{n}.weight": _decode_tensors(n, layers[n], parts, schemes[n]) for n, parts in held.items() if parts}


def _find_layer_tensors(files: Files, layer: str, mark: str) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
    """Return a layer's tensors by the last word of their names: (file, name, shape); none without one called `mark`."""
    parts = {key.removeprefix(f"{layer}."): (*files[key], key) for key in files if key.startswith(f"{layer}.")}
    return {leaf: (path, key, shape) for leaf, (path, shape, key) in parts.items()} if mark in parts else {}


def _match_schemes(module: nn.Module, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return layer -> the library's own scheme for it, as the library matches its targets."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    known = {key: value for key, value in record.items() if key in QuantizationConfig.model_fields}
    config = QuantizationConfig.model_validate(known | {"kv_cache_scheme": None})
    wrapped = getattr(module, "wrapped", module)
    memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in wrapped.buffers()}
    memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in wrapped.parameters()}
    shadow = copy.deepcopy(wrapped, memo)
    apply_quantization_config(shadow, config)
    schemes = {name: getattr(part, "quantization_scheme", None) for name, part in shadow.named_modules()}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None and scheme.weights is not None}


def _decode_tensors(layer: str, part: Any, parts: Mapping[str, Any], scheme: Any) -> Decoded:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    shape = tuple(part.weight.shape)
    packed, bits = "weight_packed" in parts, scheme.weights.num_bits
    word = 8 if scheme.weights.type == "float" else 32
    columns = -(-shape[1] * bits // word) if packed else shape[1]
    _check_shape(layer, parts, "weight_packed" if packed else "weight", (shape[0], columns))
    form = str(getattr(scheme.format or infer_module_format(nn.Linear, scheme), "value", scheme.format))

    def read() -> Tensor:
        tensors = {leaf: _read_tensor(path, key) for leaf, (path, key, _) in parts.items() if leaf != "bias"}
        if "weight_global_scale" in tensors:
            return _unpack_nvfp4(tensors)  # the library's own gives bfloat16, which rounds them once more
        weight: Tensor = BaseCompressor.get_value_from_registry(form).decompress(tensors, scheme)["weight"]
        return weight

    return Decoded(shape, read)


def _unpack_nvfp4(tensors: Mapping[str, Tensor]) -> Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = tensors["weight_packed"].shape
    values: Tensor = unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * half, torch.float32)
    scales = tensors["weight_scale"].float() / tensors["weight_global_scale"].float()  # [out, groups]
    return (values.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(rows, -1)


def _decode_gptq(layer: str, part: Any, parts: Mapping[str, Any], record: Mapping[str, Any]) -> Decoded:
    """Return a layer's weight of a GPTQ file (see `compress.export.gptq_format`), put together from single bits."""
    bits, transposed = int(record["bits"]), is_hf_conv1d(part)
    rows, columns = part.weight.shape[::-1] if transposed else part.weight.shape
    _check_shape(layer, parts, "qweight", (-(-columns * bits // 32), rows))
    _check_shape(layer, parts, "g_idx", (columns,))
    groups = parts["scales"][2][0]
    _check_shape(layer, parts, "scales", (groups, rows))
    _check_shape(layer, parts, "qzeros", (groups, -(-rows * bits // 32)))

    def read() -> Tensor:
        words, zeros, scales, group = (
            _read_tensor(*parts[leaf][:2]).numpy() for leaf in ("qweight", "qzeros", "scales", "g_idx")
        )
        values = _unpack_bits(words.T, columns, bits)  # [out, in]
        offsets = _unpack_bits(zeros, rows, bits) + (record.get("checkpoint_format") == "gptq")  # [groups, out]
        weight = (values - offsets[group].T) * scales.astype(np.float32)[group].T
        return torch.from_numpy(np.ascontiguousarray(weight.T if transposed else weight, np.float32))

    return Decoded(tuple(part.weight.shape), read)


def _decode_awq(layer: str, part: Any, parts: Mapping[str, Any]) -> Decoded:
    """Return a layer's weight of an AWQ file (see `compress.export.awq_format`): eight outputs in a word, in pairs."""
    rows, columns = part.weight.shape
    _check_shape(layer, parts, "qweight", (columns, rows // 8))
    groups = parts["scales"][2][0]
    _check_shape(layer, parts, "scales", (groups, rows))
    _check_shape(layer, parts, "qzeros", (groups, rows // 8))

    def read() -> Tensor:
        words, zeros, scales = (_read_tensor(*parts[leaf][:2]).numpy() for leaf in ("qweight", "qzeros", "scales"))
        values, offsets = (
            _unpack_bits(packed, rows, 4).reshape(len(packed), -1, 2, 4).swapaxes(2, 3).reshape(len(packed), rows)
            for packed in (words, zeros)
        )
        each = columns // groups
        weight = (values - offsets.repeat(each, 0)) * scales.astype(np.float32).repeat(each, 0)  # [in, out]
        return torch.from_numpy(np.ascontiguousarray(weight.T, np.float32))

    return Decoded(tuple(part.weight.shape), read)


def _unpack_bits(words: np.ndarray, n: int, bits: int) -> np.ndarray:
    """Return the first `n` unsigned integers of each row of int32 words, lowest bit first, as int32 [rows, n]."""
    single = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), axis=1, bitorder="little")
    places = single[:, : n * bits].reshape(len(words), n, bits)
    return np.asarray(places @ (1 << np.arange(bits, dtype=np.int32)), np.int32)


def _check_shape(layer: str, parts: Mapping[str, Any], leaf: str, shape: tuple[int, ...]) -> None:
    if leaf not in parts:
        raise SourceError(f"{layer} has no {leaf} in the files, which its quantization needs; get them again")
    path, key, stored = parts[leaf]
    if tuple(stored) != shape:
        raise SourceError(f"{path}: '{key}' is {list(stored)} in the file, {list(shape)} for the layer in the model")


def _read_tensor(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor
