"""Write a compressed model as a Hugging Face folder: shards layer by layer, configuration, tokenizer, recipe."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from compress.blocks.experts import ExpertPart, Experts, find_stacked_parts, restack
from compress.blocks.layers import is_layer, layer_type, weight_shape
from compress.blocks.materialise import NamedParts, plain, tied_names
from compress.blocks.sizes import transformers_config, write_shapes
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export import awq_format, compressed_tensors, gptq_format
from compress.export.checkpoint_config import FloatTypes, float_types, write_config, write_json
from compress.export.checkpoint_rules import format_names, layer_problem
from compress.export.shards import TYPES, Entry, ShardUnit, write_shards
from compress.facts import Note
from compress.formats.schemes import Scheme
from compress.models.checkpoint_names import FileNames, file_names, find_taken_apart
from compress.models.pruned import config_lacks
from compress.models.shards import find_mixture, is_stack
from compress.models.source import SHAPES
from compress.recipe.exports import CHECKPOINT_TARGET, CheckpointExport
from compress.rounding.grid import finite
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import FLOAT8

SHARD_BYTES = 5 * 2**30
"""The largest file."""

WITH_ZEROS = {"gptq": gptq_format, "awq": awq_format}
"""Formats of 32-bit words with a zero point for each group, and scales in float16: what writes each."""


@dataclass(frozen=True)
class Content:
    """What is to be written. `own`: the module's parameters and stored buffers; all names are the module's.

    `surplus`: tensors of the source that are no part of the module, by the files' names -> the file. `copied`: the
    module's tensors that are in those of the surplus which transformers takes apart as it loads them.
    """

    model: StreamedModel
    export: CheckpointExport
    modules: Mapping[str, nn.Module]
    own: Mapping[str, Tensor]
    schemes: Mapping[str, Scheme]
    names: FileNames
    types: FloatTypes
    stacks: Mapping[str, ExpertPart]
    surplus: Mapping[str, Path]
    copied: frozenset[str] = frozenset()
    scale_changes: dict[str, float] = field(default_factory=dict)
    """Layer -> the largest relative change of a scale in the type it is stored in, once the layer is written."""


def write_checkpoint(
    folder: Path,
    model: StreamedModel,
    export: CheckpointExport,
    recipe_yaml: str,
    with_code: bool = False,
    surplus: Mapping[str, Path] = MappingProxyType({}),
) -> list[Note]:
    """Write everything that an engine loads into `folder`, and return notes on it.

    Peak memory is one layer's weights, whatever the size of the model. Quantized layers are stored exactly but for
    scales, which take the type that the format has for them. `with_code`: the model's own *.py come along. `surplus`:
    see `Content`; these are copied byte for byte. Raises ExportError: a layer that the format cannot hold, a tensor
    that is missing or damaged, a value that a smaller type cannot hold; SourceError: a source file that cannot be read.
    """
    module = model.build()
    content = _collect_content(module, model, export, surplus)
    folder.mkdir(parents=True, exist_ok=True)
    files = write_shards(folder, list(_make_units(content)), SHARD_BYTES)
    quantization = _make_quantization_config(content)
    untied = [name for name in tied_names(module) if name not in model.tied]
    usual, sizes = content.types.usual, model.shapes.config
    record = write_config(folder, model.folder, module, quantization, usual, bool(untied), sizes, with_code)
    recorded = config_lacks(module, model.shapes, record)
    if recorded:
        write_shapes(model.shapes, folder / SHAPES)
    if quantization is not None and export.format == "gptq":
        write_json(folder / "quantize_config.json", quantization)
    (folder / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
    return _make_notes(content, files, untied, recorded)


def _collect_content(
    module: nn.Module, model: StreamedModel, export: CheckpointExport, surplus: Mapping[str, Path]
) -> Content:
    modules = {plain(name): part for name, part in module.named_modules()}
    tensors = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    schemes = {layer: model.schemes[layer] for layer in modules if layer in set(model.quantized_layers())}
    names, single = file_names(module, tensors), (export.target or CHECKPOINT_TARGET) == "vllm"
    stacks = {} if single and names.one_by_one else _float_stacks(module, schemes)
    types = float_types(model.folder, export.dtype)
    apart = find_taken_apart(module, surplus, tensors)
    copied = frozenset(name for parts in apart.values() for name in parts)
    content = Content(model, export, modules, tensors, schemes, names, types, stacks, surplus, copied)
    if problems := list(_find_problems(content)):
        raise ExportError(problems)
    return content


def _find_problems(content: Content) -> Iterator[str]:
    """Yield what would otherwise be written wrongly; the plan has looked at most of it before."""
    model, export = content.model, content.export
    held = set(model.store.names())
    if missing := [name for name in content.own if name not in held and not name.endswith("num_batches_tracked")]:
        names = format_names(missing)
        yield f"the weights lack {names}, which {model.architecture or 'the model'} has; get them again"
    for layer, scheme in content.schemes.items():
        part = content.modules[layer]
        kind = layer_type(part) if is_layer(part) else type(part).__name__
        shape = weight_shape(part) if is_layer(part) else ()
        if problem := layer_problem(layer, kind, shape, scheme, export.format):
            yield problem
        sharing = [name.removesuffix(".weight") for name, owner in model.tied.items() if owner == f"{layer}.weight"]
        if floats := [name for name in sharing if name not in content.schemes]:
            yield f"{layer} is quantized and shares its weight with {format_names(floats)}; ignore it, or quantize both"
        if _has_static_inputs(scheme) and layer not in model.activation_scales:
            yield f"{layer} has no scale for its inputs, which {scheme.name} needs; run its pass again"


def _has_static_inputs(scheme: Scheme) -> bool:
    return scheme.activations is not None and scheme.activations.has_stored_scale


def _make_units(content: Content) -> Iterator[ShardUnit]:
    """Yield in the module's order a quantized layer's tensors together, all others one by one, then cache scales."""
    tied, stacked = content.model.tied, set()
    for name in content.own:
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer in content.schemes:
            if name in tied:
                continue  # stored once
            yield _make_quantized_unit(content, layer)
        elif name in content.stacks:
            stack = content.stacks[name].stacked
            if stack not in stacked:
                yield _make_stacked_unit(content, stack)
            stacked.add(stack)
        elif name not in tied and name in content.model.store and name not in content.copied:
            yield _make_float_unit(content, name)
    for attention, scales in content.model.kv_scales.items():
        yield _make_scale_unit(content.names.layer(attention), scales)
    yield from (_make_copied_unit(name, path) for name, path in content.surplus.items())


def _make_copied_unit(name: str, path: Path) -> ShardUnit:
    with safe_open(path, framework="pt") as file:
        held = file.get_slice(name)
        entry = Entry(name, TYPES[held.get_dtype()], tuple(held.get_shape()))

    def make() -> dict[str, Tensor]:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name)}

    return ShardUnit((entry,), make)


def _make_float_unit(content: Content, name: str) -> ShardUnit:
    store, written = content.model.store, content.names.tensor(name)
    shape, dtype = store.shape(name), content.own[name].dtype
    dtype = content.types.of(written) if dtype.is_floating_point else dtype

    def make() -> dict[str, Tensor]:
        held = store.view(name)
        tensor = held if held is not None and held.dtype == dtype else store.read(name).to(dtype)
        if dtype.is_floating_point and not finite(tensor):
            raise ExportError(
                f"'{name}' does not fit into {_format_dtype(dtype)}; set export.dtype: bfloat16 or float32"
            )
        return {written: tensor}

    return ShardUnit((Entry(written, dtype, tuple(shape)),), make)


def _make_stacked_unit(content: Content, stack: str) -> ShardUnit:
    """Return the experts of a mixture that stay float as one tensor."""
    store, written = content.model.store, content.names.tensor(stack)
    parts = {name: part for name, part in content.stacks.items() if part.stacked == stack}
    name, part = next(iter(parts.items()))
    rows, *rest = store.shape(name)
    single = (rows * (2 if part.half else 1), *rest)
    shape = (1 + max(part.expert for part in parts.values()), *(single[::-1] if part.transposed else single))
    dtype = content.types.of(written)
    make = lambda: {written: restack(parts, store.read)[stack].to(dtype)}  # noqa: E731
    return ShardUnit((Entry(written, dtype, shape),), make)


def _make_quantized_unit(content: Content, layer: str) -> ShardUnit:
    scheme, written = content.schemes[layer], content.names.layer(layer)
    rows, columns = weight_shape(content.modules[layer])
    form, usual = WITH_ZEROS.get(content.export.format), content.types.usual
    announced = (
        compressed_tensors.entries(written, (rows, columns), scheme, usual)
        if form is None
        else form.entries(written, (rows, columns), scheme)
    )
    scale = next(entry for entry in announced if entry.name.endswith("scale") or entry.name.endswith("scales"))

    def make() -> dict[str, Tensor]:
        weight = _check_weight(layer, content.model.store.quantized(layer), scheme, (rows, columns))
        if not weight.stored:
            exact = torch.from_numpy(np.ascontiguousarray(weight.scales)).to(torch.float32)
            stored = exact.to(scale.dtype).to(torch.float32)
            if not finite(stored):
                raise ExportError(
                    f"{layer} has scales that do not fit into {_format_dtype(scale.dtype)}; set export.dtype: bfloat16"
                )
            content.scale_changes[layer] = float(((stored - exact).abs() / exact.abs().clamp_min(1e-30)).max())
        if form is not None:
            return form.tensors(written, weight, scheme)
        inputs = content.model.activation_scales[layer] if _has_static_inputs(scheme) else None
        return compressed_tensors.tensors(written, weight, scheme, usual, inputs)

    return ShardUnit(announced, make)


def _make_scale_unit(attention: str, scales: tuple[float, float]) -> ShardUnit:
    """Return the scales of a layer's cached keys and values, named beside its projections."""
    made = {f"{attention}.{n}": torch.tensor([s]) for n, s in zip(("k_scale", "v_scale"), scales, strict=True)}
    return ShardUnit(tuple(Entry(name, torch.float32, (1,)) for name in made), lambda: made)


def _check_weight(
    layer: str, weight: QuantizedWeight | None, scheme: Scheme, shape: tuple[int, int]
) -> QuantizedWeight:
    """Return the weight, or raise ExportError that says what is wrong with it."""
    low, high = scheme.weights.integer_range
    if weight is None:
        problem = "has no quantized weight"
    elif weight.values.shape != shape:
        problem = f"has a quantized weight of {list(weight.values.shape)} where the model has {list(shape)}"
    elif not np.isfinite(weight.scales).all():
        problem = "has scales that are NaN or infinite"
    elif (weight.zero_points is None) != scheme.weights.symmetric or weight.bits != scheme.weights.bits:
        problem = f"has a quantized weight that is not {scheme.name}"
    elif (scheme.weights.kind == "float") != (weight.values.dtype == FLOAT8):
        problem = f"has numbers that are not those of {scheme.name}"
    elif scheme.weights.scales != "float" and not weight.stored:
        problem = f"lacks the scales that {scheme.name} is stored with"
    elif scheme.weights.kind == "int" and not low <= int(weight.values.min()) <= int(weight.values.max()) <= high:
        problem = f"has integers outside {low}..{high}, which {weight.bits} bits hold"
    else:
        return weight
    raise ExportError(f"{layer} {problem}: the finished work is damaged; run the passes again")


def _make_quantization_config(content: Content) -> dict | None:
    """Return `quantization_config`, or None where nothing is quantized."""
    if not content.schemes and content.model.kv_cache is None:
        return None
    layer = content.names.layer
    kinds = {name: layer_type(part) for name, part in content.modules.items() if is_layer(part)}
    targeted = {kinds[name] for name in content.schemes}
    floating = [n for n, p in content.modules.items() if n not in content.schemes and _is_targetable(p, targeted)]
    schemes = {layer(name): scheme for name, scheme in content.schemes.items()}
    ignore = [layer(name) for name in floating] + _find_unloaded_layers(content, targeted)
    ignore += [name.removesuffix(".weight") for name in content.surplus if name.endswith(".weight")]
    if isinstance(content.model.build(), NamedParts):
        # of experts that lie in stacks, vLLM asks for each by itself
        mixtures = (find_mixture(name) for name, tensor in content.own.items() if is_stack(tensor.shape))
        families = dict.fromkeys(re.sub(r"\d+", "#", name) for name in mixtures)
        ignore += [
            *_list_suffixes(ignore, [layer(name) for name in kinds]),
            *[rf"re:(?:.*\.)?{re.escape(family)}\.experts\..*".replace(r"\#", r"\d+") for family in families],
        ]
    if (form := WITH_ZEROS.get(content.export.format)) is not None:
        return form.quantization_config(schemes, ignore)
    other = {layer(name): name for name in (*content.schemes, *floating) if layer(name) != name}
    types = {layer(name): kinds[name] for name in content.schemes}
    with_head = any(name in content.schemes for name in content.model.structure.head)
    return compressed_tensors.quantization_config(schemes, types, ignore, content.model.kv_cache, other, with_head)


def _list_suffixes(ignore: Sequence[str], every: Sequence[str]) -> list[str]:
    """Return patterns that select the names in `ignore` by their last words: a reader may have others before them."""
    patterns, ignored = dict[str, str](), set(ignore)
    for name in ignore:
        family = re.sub(r"\d+", "#", name)
        words = family.split(".")
        if family in patterns:
            continue
        for n in range(2, len(words) + 1):
            suffix = re.escape(".".join(words[-n:])).replace(r"\#", r"\d+")
            pattern = rf"(?:.*\.)?{suffix}$"
            if all(other in ignored for other in every if re.match(pattern, other)):
                patterns[family] = f"re:{pattern}"
                break
    return list(patterns.values())


def _find_unloaded_layers(content: Content, targeted: set[str]) -> list[str]:
    """Return the layers that a reader builds of the configuration and this model was loaded without.

    It would take such a layer (a pooler that nothing reads) for a quantized one, and find no integers for it.
    """
    module = content.model.build()
    config = transformers_config(module)
    if config is None:
        return []
    model: Any = getattr(module, "wrapped", module)
    with torch.device("meta"):
        built = type(model)(config)
    return [
        name for name, part in built.named_modules() if name not in content.modules and _is_targetable(part, targeted)
    ]


def _is_targetable(part: nn.Module, targeted: set[str]) -> bool:
    """Return whether a reader would take a float module for a quantized one. Engines run a router as a Linear."""
    if is_layer(part):
        return layer_type(part) in targeted
    from compressed_tensors.quantization.quant_config import get_vllm_module_type

    router = get_vllm_module_type(type(part).__name__) == "Linear" and "weight" in part._parameters
    return router and "Linear" in targeted


def _make_notes(content: Content, files: tuple[Path, ...], untied: list[str], recorded: bool) -> list[Note]:
    size = sum(path.stat().st_size for path in files)
    notes = [Note("info", f"{len(files)} file(s) of safetensors, {size / 2**20:.1f} MiB")]
    worst = max(content.scale_changes, key=content.scale_changes.__getitem__, default="")
    if worst and (change := content.scale_changes[worst]) > 0:
        text = f"scales are rounded as they are stored, by up to {change:.2%} (in {worst})"
        # more than 1 % of a scale, as it is rounded to the type it is stored in, is a warning
        notes.append(Note("warning" if change > 0.01 else "info", text))
    if content.stacks:
        notes.append(Note("info", "experts that stay float are stored in stacks, as transformers keeps them"))
    if any(".experts." in layer for layer in content.schemes) and not content.names.one_by_one:
        kind = content.model.architecture or "this model"
        text = (
            f"transformers reads {kind}'s experts in stacks and would leave quantized ones out; other engines read them"
        )
        notes.append(Note("warning", text))
    if recorded and hasattr(content.model.build(), "wrapped"):
        text = (
            "config.json cannot say the pruned sizes: compress loads the folder by shapes.json, transformers does not"
        )
        notes.append(Note("warning", text))
    if untied:
        notes.append(
            Note("info", f"{format_names(untied)} no longer share another's weight: tie_word_embeddings is false")
        )
    return notes


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _float_stacks(module: nn.Module, quantized: Iterable[str]) -> dict[str, ExpertPart]:
    """Return where each float expert's parameter lies in its layer's stack, of mixtures with no quantized expert.

    Empty for modules that are none of transformers', whose experts stay single.
    """
    wrapped: Any = getattr(module, "wrapped", module)
    config = getattr(wrapped, "config", None)
    layers = tuple(quantized)
    mixtures = [plain(name) for name, part in module.named_modules() if isinstance(part, Experts)]
    mixtures = [name for name in mixtures if not any(layer.startswith(f"{name}.") for layer in layers)]
    if not mixtures or not hasattr(config, "model_type"):
        return {}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        stacked = type(wrapped)(copy.deepcopy(config))
    return {
        parameter: part
        for name in mixtures
        for parameter, part in find_stacked_parts(stacked.get_submodule(name), name).items()
    }
