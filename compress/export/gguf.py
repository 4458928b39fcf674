"""Write a compressed model as one GGUF file, which llama.cpp and what is built on it load.

The `gguf` package names the tensors (`TensorNameMap`) and writes the file's structure. `describe_gguf` says what will
be written, or why it cannot be, to a plan already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.layers import is_layer, weight_shape
from compress.blocks.materialise import plain
from compress.blocks.sizes import transformers_config
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export.gguf_blocks import as_stored, find_block_type, pack_blocks
from compress.export.gguf_metadata import ARCHITECTURES, Architecture, Metadata, describe_config
from compress.export.gguf_tokenizer import Vocabulary, read_vocabulary
from compress.facts import Note
from compress.formats.schemes import Scheme
from compress.models.checkpoint_names import file_names
from compress.models.pruned import config_lacks
from compress.recipe.exports import GgufExport
from compress.rounding.grid import finite

FILE = "model.gguf"
FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WORST_CHANGE = 0.01
"""Of a layer's weights, relative RMS, as their scales become half floats; more is a warning."""
OUTPUT = "output.weight"
_EXPERT = re.compile(r".*\.layers\.(?P<block>\d+)\..*experts\.\d+\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file.

    `name`: the module's, of stacked experts the first's; `kind`: GGUF's type; `heads`: of q and k whose rows are
    reordered; `experts`: the module's names of all that are stacked.
    """

    name: str
    written: str
    kind: str
    heads: int = 0
    offset: float = 0.0
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What a GGUF file of a model holds. `problems`: why it cannot be written, as sentences; nothing else counts."""

    architecture: Architecture | None
    metadata: Metadata
    vocabulary: Vocabulary
    tensors: tuple[TensorEntry, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def import_gguf() -> ModuleType:
    """Import the `gguf` package. ExportError, which says how it is installed."""
    try:
        import gguf
    except ImportError as error:
        raise ExportError(f"kind: gguf needs a package that is not here ({error}); pip install gguf") from error
    return gguf


def describe_gguf(
    module: nn.Module,
    schemes: Mapping[str, Scheme],
    export: GgufExport,
    folder: Path | None,
    sizes: Mapping[str, Any],
    tied: Iterable[str],
) -> Description:
    """Describe the file of a module, whose values are not looked at. ExportError without the `gguf` package.

    `schemes`: layer -> how it is stored; `folder`: with the tokenizer; `sizes`: what pruning changed in config.json;
    `tied`: parameters without values of their own.
    """
    nothing = Description(None, Metadata({}, {}, [], []), Vocabulary({}), ())
    config = _read_config(module, sizes)
    architecture = ARCHITECTURES.get(config.get("model_type", ""))
    if architecture is None or folder is None:
        kind = config.get("model_type") or type(getattr(module, "wrapped", module)).__name__
        text = f"models of type {kind} are not written as GGUF; these are: {', '.join(ARCHITECTURES)}"
        return _with_problems(nothing, [text])
    metadata = describe_config(config, architecture)
    if metadata.problems:
        return _with_problems(nothing, metadata.problems)
    try:
        vocabulary = read_vocabulary(folder, config["vocab_size"], config)
    except ValueError as error:
        return _with_problems(nothing, [f"{folder.name}: {error}"])
    entries, problems = _list_tensors(module, schemes, export, architecture, metadata, set(tied))
    notes = (*metadata.notes, *vocabulary.notes)
    return Description(architecture, metadata, vocabulary, tuple(entries), tuple(problems), notes)


def write_gguf(path: Path, model: StreamedModel, export: GgufExport, name: str) -> list[Note]:
    """Write the file, read it back and return notes on it. One tensor is in memory at a time.

    Raises ExportError: what cannot be written, a value that its type does not hold, a file that reads otherwise.
    """
    gguf, module = import_gguf(), model.build()
    layers = set(model.quantized_layers())
    schemes = {layer: scheme for layer, scheme in model.schemes.items() if layer in layers}
    description = describe_gguf(module, schemes, export, model.folder, model.shapes.config, model.tied)
    if description.problems or description.architecture is None:
        raise ExportError(list(description.problems))
    if config_lacks(module, model.shapes, _read_config(module, model.shapes.config)):
        raise ExportError("a GGUF file cannot say the sizes that pruning left; use other ratios, or kind: checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _Writing(gguf, model, description)
    work.write(path, name)
    work.check(path)
    return work.notes(path)


def _read_config(module: nn.Module, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the module's config.json with its class's defaults and pruned sizes; empty for none of transformers'."""
    own = transformers_config(module)
    return {} if own is None else own.to_dict() | dict(sizes)


def _list_tensors(
    module: nn.Module,
    schemes: Mapping[str, Scheme],
    export: GgufExport,
    architecture: Architecture,
    metadata: Metadata,
    tied: set[str],
) -> tuple[list[TensorEntry], list[str]]:
    """Return the file's tensors in the module's order, and what has no place in it."""
    gguf = import_gguf()
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, metadata.values["block_count"])
    tensors = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    parts = {plain(name): part for name, part in module.named_modules()}
    files = file_names(module, tensors)
    entries, problems, stacks = list[TensorEntry](), list[str](), dict[str, list[str]]()
    for name, tensor in tensors.items():
        written = names.get_name(files.tensor(name), try_suffixes=(".weight", ".bias")) or ""
        if expert := _EXPERT.fullmatch(name):
            written = f"blk.{expert['block']}.ffn_{expert['part']}_exps.weight"
            stacks.setdefault(written, []).append(name)
        stem = written.split(".")[2] if written.startswith("blk.") else written.partition(".")[0]
        if name in tied and not (written == OUTPUT and architecture.tied is False):
            continue
        if not written or (written.endswith(".bias") and stem not in architecture.biases):
            problems.append(f"{name} has no place in llama.cpp's {architecture.name}")
            continue
        layer = name.removesuffix(".weight")
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(stem)
        if architecture.paired and stem == "attn_qkv":
            problems.append(f"{name} holds queries and keys in one, whose rows llama.cpp wants in another order")
        # llama.cpp computes a router in float32
        type_, problem = FLOAT_TYPES[export.dtype] if tensor.dim() > 1 and stem != "ffn_gate_inp" else "F32", ""
        if name.endswith(".weight") and layer in schemes:
            part = parts[layer]
            shape = weight_shape(part) if is_layer(part) else tuple(tensor.shape)
            type_, problem = find_block_type(schemes[layer], shape[1])
        problems += [f"{layer}: {problem}"] if problem else []
        if len(stacks.get(written, ())) > 1:
            first = next(entry for entry in entries if entry.written == written)
            if first.kind != type_:
                problems.append(f"{layer}: a GGUF file stacks a layer's experts, and others are {first.kind}")
            continue
        entries.append(
            TensorEntry(
                name,
                written,
                type_,
                metadata.values[heads] if architecture.paired and heads else 0,
                architecture.norm_offset if stem.endswith("norm") else 0.0,
            )
        )
    return [replace(entry, experts=tuple(stacks.get(entry.written, ()))) for entry in entries], problems


def _with_problems(description: Description, problems: Iterable[str]) -> Description:
    return replace(description, problems=tuple(problems))


@dataclass
class _Writing:
    """A file that is written and read back. `changes`: layer -> relative RMS change of its weights by half floats."""

    gguf: ModuleType
    model: StreamedModel
    description: Description
    changes: dict[str, float] = field(default_factory=dict)

    def write(self, path: Path, name: str) -> None:
        """Write everything: keys first, then the tensors one by one."""
        architecture = self.description.architecture
        assert architecture is not None
        writer = self.gguf.GGUFWriter(path, architecture.name)
        self._add_keys(writer, architecture.name, name)
        for entry in self.description.tensors:
            writer.add_tensor_info(entry.written, *self._announce(entry))
        for written, values in self.description.metadata.factors.items():
            writer.add_tensor_info(written, values.shape, values.dtype, values.nbytes)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in self.description.tensors:
                writer.write_tensor_data(self._make_bytes(entry))
            for values in self.description.metadata.factors.values():
                writer.write_tensor_data(values)
        finally:
            writer.close()

    def check(self, path: Path) -> None:
        """Read the file with the gguf package. ExportError where a tensor is not what was to be stored."""
        reader = self.gguf.GGUFReader(path)
        found = {tensor.name: tensor for tensor in reader.tensors}
        for entry in self.description.tensors:
            tensor = found[entry.written]
            values = self.gguf.dequantize(tensor.data, tensor.tensor_type)
            if tensor.tensor_type.name != entry.kind or not np.array_equal(values, self._make_values(entry)):
                raise ExportError(f"{path.name}: {entry.written} reads otherwise than it was written; report it")
        for written, values in self.description.metadata.factors.items():
            if not np.array_equal(found[written].data, values):
                raise ExportError(f"{path.name}: {written} reads otherwise than it was written; report it")

    def notes(self, path: Path) -> list[Note]:
        """Return what the report says of the file."""
        kinds: dict[str, int] = {}
        for entry in self.description.tensors:
            kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
        held = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        read = f"read back by gguf {version('gguf')}, each tensor as it was stored; llama.cpp itself was not asked"
        notes = [Note("info", f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, tensors: {held}; {read}")]
        notes += [Note("warning", f"{path.name}: {text}") for text in self.description.notes]
        worst = max(self.changes, key=self.changes.__getitem__, default="")
        if worst and (change := self.changes[worst]) > 0:
            text = (
                f"{path.name}: scales are rounded to half floats, which changes weights by up to {change:.2%} ({worst})"
            )
            notes.append(Note("warning" if change > WORST_CHANGE else "info", text))
        return notes

    def _add_keys(self, writer: Any, architecture: str, name: str) -> None:
        kinds = [entry.kind for entry in self.description.tensors if entry.kind not in FLOAT_TYPES.values()]
        usual = max(sorted(set(kinds)), key=kinds.count, default="")
        file_type = getattr(self.gguf.LlamaFileType, _FILE_TYPES.get(usual, f"MOSTLY_{usual}"), None)
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(int(file_type if file_type is not None else self.gguf.LlamaFileType.MOSTLY_F16))
        writer.add_quantization_version(self.gguf.GGML_QUANT_VERSION)
        for key, value in self.description.metadata.values.items():
            self._add_key(writer, f"{architecture}.{key}", value)
        for key, value in self.description.vocabulary.values.items():
            self._add_key(writer, key, value)

    def _add_key(self, writer: Any, key: str, value: Any) -> None:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)

    def _announce(self, entry: TensorEntry) -> tuple[Any, ...]:
        """Return shape, dtype, bytes and raw type as the writer asks for them."""
        shape, kind = self.model.store.shape(entry.name), self.gguf.GGMLQuantizationType[entry.kind]
        if entry.experts:
            shape = (len(entry.experts), *shape)
        if entry.kind in ("F32", "F16"):
            dtype = np.dtype(np.float32 if entry.kind == "F32" else np.float16)
            return shape, dtype, int(np.prod(shape)) * dtype.itemsize, None
        byte_shape = self.gguf.quant_shape_to_byte_shape(shape, kind)
        return byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), kind

    def _make_bytes(self, entry: TensorEntry) -> np.ndarray:
        """Return a tensor as the file has it."""
        if entry.experts:
            return np.stack([self._make_bytes(part) for part in _list_parts(entry)])
        if entry.kind not in FLOAT_TYPES.values():
            weight = self.model.store.quantized(entry.name.removesuffix(".weight"))
            assert weight is not None
            stored = self._as_stored(entry)
            exact = weight.dequantize()
            power = float(np.square(exact, dtype=np.float64).mean()) or 1.0
            change = float(np.square(stored.dequantize() - exact, dtype=np.float64).mean())
            self.changes[entry.name] = (change / power) ** 0.5
            return reorder_rows(pack_blocks(stored, entry.kind), entry.heads)
        return self._make_float(entry).numpy() if entry.kind != "BF16" else _bfloat16_bytes(self._make_float(entry))

    def _make_values(self, entry: TensorEntry) -> np.ndarray:
        """Return the float32 values that a reader is to get."""
        if entry.experts:
            return np.stack([self._make_values(part) for part in _list_parts(entry)])
        if entry.kind not in FLOAT_TYPES.values():
            return reorder_rows(self._as_stored(entry).dequantize(), entry.heads)
        return self._make_float(entry).float().numpy()

    def _as_stored(self, entry: TensorEntry) -> Any:
        weight = self.model.store.quantized(entry.name.removesuffix(".weight"))
        if weight is None:
            raise ExportError(
                f"{entry.name} has no quantized weight: the finished work is damaged; run the passes again"
            )
        try:
            return as_stored(weight, entry.kind)
        except ExportError as error:
            raise ExportError(f"{entry.name}: {error}") from error

    def _make_float(self, entry: TensorEntry) -> Tensor:
        dtype = getattr(torch, next(name for name, kind in FLOAT_TYPES.items() if kind == entry.kind))
        values = self.model.store.read(entry.name).float() + entry.offset
        tensor = torch.from_numpy(reorder_rows(values.numpy(), entry.heads)).to(dtype)
        if not finite(tensor):
            raise ExportError(f"'{entry.name}' does not fit into {dtype}; set export.dtype: bfloat16 or float32")
        return tensor


def _list_parts(entry: TensorEntry) -> list[TensorEntry]:
    """Return stacked experts one by one."""
    return [replace(entry, name=name, experts=()) for name in entry.experts]


_FILE_TYPES = {"": "MOSTLY_F16", "Q3_K": "MOSTLY_Q3_K_S", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}
"""Type of most tensors -> its name as a file's type, where that is not MOSTLY_ and the type."""


def reorder_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Put row i of each head beside row i + half, as llama.cpp's rope of neighbours has them; 0 heads: as they are."""
    if not heads:
        return values
    pairs = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _bfloat16_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
