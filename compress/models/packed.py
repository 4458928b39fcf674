"""Quantized checkpoints read without their engine: each weight as the floats that its integers stand for."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from compress.blocks.layers import is_hf_conv1d, is_layer
from compress.blocks.materialise import plain
from compress.blocks.store import Decoded
from compress.errors import SourceError
from compress.models.checkpoint_names import file_names
from compress.models.source import read_object

Files = Mapping[str, tuple[Path, tuple[int, ...]]]
"""Name of a tensor -> its file, and its shape."""
Parts = Mapping[str, tuple[Path, str, tuple[int, ...]]]
"""Last word of a tensor's name -> its file, its name and its shape."""
PARTS = (
    *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_g_idx"),
    *("weight_scale_inv", "weight_scale_2", "input_scale", "input_global_scale", "input_zero_point", "output_scale"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
"""Last words of the names of what a quantized layer is stored as, beside `weight` and `bias`."""
SCALED = ("fp8", "fbgemm_fp8", "modelopt")
"""Methods whose weights are FP8 or FP4 numbers times scales, which their shapes tell."""
OF_ANOTHER_FORMAT = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files in which formats of quantized weights say what they hold, beside config.json or in its place."""


def quantization_of(folder: Path | None) -> dict[str, Any]:
    """Return what a folder's config.json says of its quantized weights; {} where it says nothing."""
    path = folder / "config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    record = read_object(path).get("quantization_config")
    if record is None and path.with_name(OF_ANOTHER_FORMAT[0]).is_file():
        return {"quant_method": "modelopt"}
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
    grouped = group_by_layer(files)
    held = {n: grouped[written] for n in layers if (written := names.layer(n)) in grouped}
    if method in SCALED:
        marks = ("weight_scale", "weight_scale_inv")
        scaled = {n: parts for n, parts in held.items() if "weight" in parts and any(mark in parts for mark in marks)}
        return {f"{n}.weight": _decode_scaled(n, layers[n], parts, record) for n, parts in scaled.items()}
    if method == "gptq":
        packed = {n: parts for n, parts in held.items() if "qweight" in parts}
        return {f"{n}.weight": _decode_gptq(n, layers[n], parts, record) for n, parts in packed.items()}
    if method == "awq" and str(record.get("version", "gemm")).lower() == "gemm":
        packed = {n: parts for n, parts in held.items() if "qweight" in parts}
        return {f"{n}.weight": _decode_awq(n, layers[n], parts) for n, parts in packed.items()}
    if method != "compressed-tensors":
        known = ("compressed-tensors", "gptq", *SCALED)
        raise SourceError(
            f"weights of quant_method {method!r} are not read here; {', '.join(known)} and awq (gemm) are"
        )
    schemes = _match_schemes(module, record)
    packed = {n: parts for n, parts in held.items() if n in schemes and "weight_scale" in parts}
    return {f"{n}.weight": _decode_tensors(n, layers[n], parts, schemes[n]) for n, parts in packed.items()}


def group_by_layer(files: Files) -> dict[str, Parts]:
    """Return the tensors of each module by the last word of their names."""
    grouped: dict[str, dict[str, tuple[Path, str, tuple[int, ...]]]] = {}
    for key, (path, shape) in files.items():
        layer, _, leaf = key.rpartition(".")
        grouped.setdefault(layer, {})[leaf] = (path, key, shape)
    return dict(grouped)


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


def _decode_tensors(layer: str, part: Any, parts: Parts, scheme: Any) -> Decoded:
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
            scales = tensors["weight_scale"].float() / tensors["weight_global_scale"].float()  # [out, groups]
            return _multiply_fp4(tensors["weight_packed"], scales)
        weight: Tensor = BaseCompressor.get_value_from_registry(form).decompress(tensors, scheme)["weight"]
        return weight

    return Decoded(shape, read)


def _multiply_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return FP4 numbers, two in a byte [out, in / 2], times the scales of their groups [out, groups]."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = packed.shape
    values: Tensor = unpack_fp4_from_uint8(packed, rows, 2 * half, torch.float32)
    return (values.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(rows, -1)


def _decode_scaled(layer: str, part: Any, parts: Parts, record: Mapping[str, Any]) -> Decoded:
    """Return a weight of FP8 numbers, or of FP4 ones in pairs, times scales of tensor, rows, blocks or groups.

    Scales called `_inv` are multiplied by like all others (DeepSeek-V3's own inference code does).
    """
    rows, columns = part.weight.shape
    pairs = "weight_scale_2" in parts and parts["weight"][2] == (rows, columns // 2)
    _check_shape(layer, parts, "weight", (rows, columns // 2 if pairs else columns))
    block = record.get("weight_block_size")

    def read() -> Tensor:
        weight, scales = (
            _read_tensor(*parts[leaf][:2])
            for leaf in ("weight", "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale")
        )
        if pairs:
            return _multiply_fp4(weight, scales.float() * _read_tensor(*parts["weight_scale_2"][:2]).float())
        return weight.float().mul_(_spread_scales(scales.float(), rows, columns, block))

    return Decoded((rows, columns), read)


def _spread_scales(scales: Tensor, rows: int, columns: int, block: Sequence[int] | None) -> Tensor:
    """Return scales that a weight [rows, columns] can be multiplied by: one, one for each row, or of blocks."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    scales = scales.reshape(len(scales), -1)  # [blocks of rows, blocks of columns]
    if scales.shape == (rows, 1):
        return scales
    height, width = block or (-(-rows // scales.shape[0]), -(-columns // scales.shape[1]))
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]


def _decode_gptq(layer: str, part: Any, parts: Parts, record: Mapping[str, Any]) -> Decoded:
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


def _decode_awq(layer: str, part: Any, parts: Parts) -> Decoded:
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


def _check_shape(layer: str, parts: Parts, leaf: str, shape: tuple[int, ...]) -> None:
    if leaf not in parts:
        raise SourceError(f"{layer} has no {leaf} in the files, which its quantization needs; get them again")
    path, key, stored = parts[leaf]
    if tuple(stored) != shape:
        raise SourceError(f"{path}: '{key}' is {list(stored)} in the file, {list(shape)} for the layer in the model")


def _read_tensor(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor
