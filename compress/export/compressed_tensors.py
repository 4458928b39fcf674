"""The compressed-tensors format, which transformers and vLLM read: a layer's tensors, and `quantization_config`.

The configuration is built from the library's own records, so that what it can read is what is written.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from compress.export.packing import as_signed, as_unsigned, count_words, pack_bits, pack_floats
from compress.export.shards import Entry
from compress.formats.schemes import ActivationScheme, KvScheme, Scheme
from compress.rounding.activations import SCALE_TYPES, cache_arguments, global_scale, input_arguments
from compress.rounding.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

PACKED = "pack-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"


def entries(layer: str, shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype) -> tuple[Entry, ...]:
    """Return what a quantized layer of `shape` [out, in] is stored as, without its bias.

    `dtype`: what the model computes in. Scales of packed layers are in `dtype`, as kernels take them; those of W8A8 and
    FP8 stay float32, as few as they are; FP4 and MX have types of their own. What is symmetric has no zero points.
    """
    rows, columns = shape
    weights, form = scheme.weights, layer_format(scheme)
    groups = columns // weights.group_size if weights.group_size > 0 else 1
    scales = (1,) if weights.group_size == 0 else (-(-rows // weights.rows), groups)
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if form in (NVFP4, MXFP4):
        layout["weight_packed"] = torch.uint8, (rows, columns // 2)
    elif form == PACKED:
        layout["weight_packed"] = torch.int32, (rows, count_words(columns, weights.bits))
        layout["weight_shape"] = torch.int64, (2,)
    else:
        layout["weight"] = torch.float8_e4m3fn if weights.kind == "float" else torch.int8, shape
    scale_types = {PACKED: dtype, NVFP4: torch.float8_e4m3fn, MXFP4: torch.uint8, MXFP8: torch.uint8}
    layout["weight_scale"] = scale_types.get(form, torch.float32), scales
    if form == NVFP4:
        layout["weight_global_scale"] = torch.float32, (1,)
    if not weights.symmetric:
        packed_zeros = torch.int32, (count_words(rows, weights.bits), groups)
        layout["weight_zero_point"] = packed_zeros if form == PACKED else (torch.int8, scales)
    if scheme.activations is not None and scheme.activations.has_stored_scale:
        layout[_name_input_scale(scheme.activations)] = torch.float32, (1,)
    return tuple(Entry(f"{layer}.{name}", kind, size) for name, (kind, size) in layout.items())


def _name_input_scale(inputs: ActivationScheme) -> str:
    return "input_global_scale" if inputs.scales == "e4m3" else "input_scale"


def tensors(
    layer: str, weight: QuantizedWeight, scheme: Scheme, dtype: torch.dtype, input_scale: float | None
) -> dict[str, Tensor]:
    """Return the tensors that `entries` announces.

    Integers are stored as signed ones; asymmetric ones and their zero points are shifted together, which changes no
    weight.
    """
    bits = scheme.weights.bits
    form, own = layer_format(scheme), {name: torch.from_numpy(array) for name, array in weight.stored.items()}
    scales = torch.from_numpy(np.ascontiguousarray(weight.scales[:: scheme.weights.rows]))
    scales = scales.reshape(-1)[:1] if scheme.weights.group_size == 0 else scales
    stored: dict[str, Tensor] = {}
    if form == NVFP4:
        stored["weight_packed"] = torch.from_numpy(pack_floats(weight.values))
        stored["weight_scale"] = own["scales"].view(torch.float8_e4m3fn)
        stored["weight_global_scale"] = own["global_scale"]
    elif form == MXFP4:
        stored["weight_packed"] = torch.from_numpy(pack_floats(weight.values))
        stored["weight_scale"] = own["exponents"]
    elif form == MXFP8:
        stored["weight"] = _to_byte_tensor(weight.values, bits)
        stored["weight_scale"] = own["exponents"]
    elif form == PACKED:
        stored["weight_packed"] = torch.from_numpy(pack_bits(as_unsigned(weight.values, bits), bits))
        stored["weight_shape"] = torch.tensor(weight.values.shape, dtype=torch.int64)
        stored["weight_scale"] = scales.to(dtype)
        if weight.zero_points is not None:
            packed = pack_bits(as_unsigned(weight.zero_points, bits).T, bits).T  # [ceil(out * bits / 32), groups]
            stored["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(packed))
    else:
        stored["weight"] = _to_byte_tensor(weight.values, bits)
        stored["weight_scale"] = scales.to(torch.float32)
        if weight.zero_points is not None:
            zero_points = torch.from_numpy(as_signed(weight.zero_points, bits))
            stored["weight_zero_point"] = zero_points.reshape(stored["weight_scale"].shape)
    if input_scale is not None and scheme.activations is not None:
        two_levels = scheme.activations.scales == "e4m3"
        value = global_scale(input_scale) if two_levels else torch.tensor([input_scale], dtype=torch.float32)
        stored[_name_input_scale(scheme.activations)] = value
    return {f"{layer}.{name}": tensor for name, tensor in stored.items()}


def _to_byte_tensor(values: np.ndarray, bits: int) -> Tensor:
    """Return values of one byte each as a tensor: float8, or signed integers."""
    if values.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(as_signed(values, bits)))


@functools.cache
def layer_format(scheme: Scheme) -> str:
    """Return "pack-quantized", "int-quantized", "nvfp4-pack-quantized", ..., as the library chooses.

    But for integers with inputs in floats (W4AFP8): vLLM's kernel reads them packed, as the library can.
    """
    from compressed_tensors.compressors.format import infer_module_format

    if scheme.activations is not None and (scheme.weights.kind, scheme.activations.kind) == ("int", "float"):
        return PACKED
    return str(infer_module_format(torch.nn.Linear, _make_scheme_record(scheme, [])).value)


def _make_scheme_record(scheme: Scheme, targets: Sequence[str], form: str | None = None) -> QuantizationScheme:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = scheme.weights
    strategy = {0: "tensor", -1: "channel"}.get(weights.group_size, "group")
    strategy = "block" if weights.rows > 1 else "tensor_group" if weights.scales == "e4m3" else strategy
    size = weights.group_size if weights.group_size > 0 else None
    types = {} if weights.scales == "float" else dict.fromkeys(("scale_dtype", "zp_dtype"), SCALE_TYPES[weights.scales])
    inputs = scheme.activations
    return QuantizationScheme(
        targets=list(targets),
        format=form,
        weights=QuantizationArgs(
            num_bits=weights.bits,
            type=weights.kind,
            symmetric=weights.symmetric,
            strategy=strategy,
            group_size=None if weights.rows > 1 else size,
            block_structure=[weights.rows, weights.group_size] if weights.rows > 1 else None,
            dynamic=False,
            **types,
        ),
        input_activations=inputs and input_arguments(inputs),
    )


def quantization_config(
    schemes: Mapping[str, Scheme],
    types: Mapping[str, str],
    ignore: Sequence[str],
    kv_cache: KvScheme | None,
    other_names: Mapping[str, str],
    by_name: bool = False,
) -> dict[str, Any]:
    """Return `quantization_config` of config.json.

    `schemes` and `types` (Linear, ...): by layer, names as in the file. `ignore`: layers of those types that stay
    float. `other_names`: a layer's name in the file -> that in the module, where it is another; both are then given,
    because engines look for the one and transformers for the other. `by_name`: products are named even where all are
    stored alike, as an output layer must be for vLLM, to which it is no Linear.
    """
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig

    groups: dict[Scheme, list[str]] = {}
    for layer, scheme in schemes.items():
        groups.setdefault(scheme, []).append(layer)
    targets = {
        scheme: _name_targets(layers, types, [*types], other_names, by_name or len(groups) > 1)
        for scheme, layers in groups.items()
    }
    formats = sorted({layer_format(scheme) for scheme in groups})
    config = QuantizationConfig(
        config_groups={
            f"group_{i}": _make_scheme_record(scheme, targets[scheme], layer_format(scheme))
            for i, scheme in enumerate(groups)
        },
        format="dense" if not formats else formats[0] if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=_list_both_names(ignore, other_names),
        kv_cache_scheme=None if kv_cache is None else cache_arguments(kv_cache),
    )
    head = {"version": compressed_tensors.__version__, "sparsity_config": {}, "transform_config": {}}
    return head | json.loads(config.model_dump_json())


def _name_targets(
    layers: Sequence[str],
    types: Mapping[str, str],
    every: Sequence[str],
    other_names: Mapping[str, str],
    by_name: bool,
) -> list[str]:
    """Return how a group names its layers: by type, or products by patterns over layer numbers.

    vLLM looks for a class's name before it takes a fused layer (qkv_proj) apart, so types and names of products do not
    mix. Embeddings go by their type where all are in the group: a reader is to know what it looks up.
    """
    if not by_name:
        return sorted({types[layer] for layer in layers})
    tables = [layer for layer in every if types.get(layer) == "Embedding"]
    if not tables or any(layer not in layers for layer in tables):
        return patterns(_list_both_names(layers, other_names), _list_both_names(every, other_names))
    products = [layer for layer in layers if layer not in tables]
    return [*patterns(_list_both_names(products, other_names), _list_both_names(every, other_names)), "Embedding"]


def patterns(layers: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return names and `re:` patterns that select exactly `layers` among `every` layer.

    Numbers become \\d+ where all of a family (model.layers.*.mlp.up_proj) belong together.
    """
    every = tuple(every)
    families: dict[str, list[str]] = {}
    for name in every:
        families.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    wanted, selected = set(layers), []
    for family, members in families.items():
        inside = [name for name in members if name in wanted]
        if len(inside) == len(members) > 1:
            selected.append("re:" + _make_pattern(family, members, every))
        else:
            selected += inside
    return selected


def _make_pattern(family: str, members: Sequence[str], every: Sequence[str]) -> str:
    """Return a regular expression for `members`.

    It leaves out what stands before layers.<number>, which engines name in their own ways, where that selects the same.
    """
    whole = re.escape(family).replace(r"\#", r"\d+") + "$"
    start = family.rpartition(".")[0].partition(".#")[0].rpartition(".")[0]
    short = r".*\." + re.escape(family[len(start) + 1 :]).replace(r"\#", r"\d+") + "$"
    same = bool(start) and [name for name in every if re.match(short, name)] == list(members)
    return short if same else whole


def _list_both_names(names: Iterable[str], other_names: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(n for name in names for n in (name, other_names.get(name, name))))
