"""Write a compressed model as one GGUF file, which llama.cpp and what is built on it load.

The `gguf` package names the tensors (`TensorNameMap`) and writes the file's structure. `describe_gguf` says what will
be written, or why it cannot be, to a plan already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.sizes import transformers_config
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export.gguf_blocks import as_stored, find_block_type, pack_blocks
from compress.export.gguf_metadata import Metadata, add_key
from compress.export.gguf_tensors import TensorEntry, import_gguf
from compress.export.gguf_tokenizer import Vocabulary, read_vocabulary
from compress.export.gguf_trial import GgufFinding, describe_form, find_form, read_model
from compress.export.imatrix import Imatrix, write_imatrix
from compress.facts import Note
from compress.formats.schemes import Scheme
from compress.models.pruned import config_lacks
from compress.recipe.exports import GgufExport
from compress.rounding.grid import finite
from compress.store.durable import temporary_folder

FILE = "model.gguf"
FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Description:
    """What a GGUF file of a model holds. `problems`: why it cannot be written, as sentences; nothing else counts."""

    finding: GgufFinding
    metadata: Metadata
    vocabulary: Vocabulary
    tensors: tuple[TensorEntry, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """Return GGUF's name of what llama.cpp computes; "" where there is none."""
        return self.finding.form.architecture if self.finding.form is not None else ""


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
    import_gguf()
    nothing = Description(GgufFinding(None), Metadata({}, {}, [], []), Vocabulary({}), ())
    own = transformers_config(module)
    if own is None or folder is None:
        kind = type(getattr(module, "wrapped", module)).__name__
        return replace(nothing, problems=(f"{kind} is none of transformers' models, which GGUF files are written of",))
    config = read_model(module) | dict(sizes)
    if not config.get("vocab_size"):
        text = f"models of type {config.get('model_type')} hold more than a language model, and are not written as GGUF"
        return replace(nothing, problems=(f"{text}; use target: transformers",))
    try:
        vocabulary = read_vocabulary(folder, config["vocab_size"], config)
    except ValueError as error:
        return replace(nothing, problems=(f"{folder.name}: {error}",))
    finding = find_form(module)
    if finding.form is None:
        return replace(nothing, problems=(finding.problem,))
    listed, metadata = describe_form(module, config, finding, set(tied))
    entries, problems = _choose_types(listed, schemes, export)
    notes = (*metadata.notes, *vocabulary.notes)
    return Description(finding, metadata, vocabulary, tuple(entries), (*metadata.problems, *problems), notes)


def write_gguf(
    path: Path, model: StreamedModel, export: GgufExport, name: str, imatrix: Imatrix | None = None
) -> list[Note]:
    """Write the file, read it back and return notes on it; beside it the importance matrix, where one is given.

    One tensor is in memory at a time.

    Raises ExportError: what cannot be written, a value that its type does not hold, a file that reads otherwise.
    """
    gguf, module = import_gguf(), model.build()
    layers = set(model.quantized_layers())
    schemes = {layer: scheme for layer, scheme in model.schemes.items() if layer in layers}
    description = describe_gguf(module, schemes, export, model.folder, model.shapes.config, model.tied)
    if description.problems:
        raise ExportError(list(description.problems))
    if config_lacks(module, model.shapes, transformers_config(module).to_dict() | dict(model.shapes.config)):
        raise ExportError("a GGUF file cannot say the sizes that pruning left; use other ratios, or kind: checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _Writing(gguf, model, description)
    work.write(path, name)
    work.check(path)
    notes = work.notes(path)
    if imatrix is not None:
        notes.append(write_imatrix(path.parent, description.architecture, description.tensors, imatrix))
    return notes


def make_byte_counter(model: StreamedModel, export: GgufExport, name: str) -> Callable[[Mapping[str, Scheme]], int]:
    """Return what counts the bytes of the file that `write_gguf` writes, with layers stored in these ways.

    Both raise ExportError as that does.
    """
    about = (export, model.folder, model.shapes.config, model.tied)
    description = describe_gguf(model.build(), model.schemes, *about)
    if description.problems:
        raise ExportError(list(description.problems))
    work = _Writing(import_gguf(), model, description)
    with temporary_folder() as folder:
        keys = work.count_keys(folder / FILE, name)

    def count(schemes: Mapping[str, Scheme]) -> int:
        entries, problems = _choose_types(description.tensors, {**model.schemes, **schemes}, export)
        if problems:
            raise ExportError(problems)
        return keys + work.count_values(entries)

    return count


def _choose_types(
    entries: Iterable[TensorEntry], schemes: Mapping[str, Scheme], export: GgufExport
) -> tuple[list[TensorEntry], list[str]]:
    """Return the tensors with the types that they are stored in, and why some cannot be."""
    chosen, problems = [], []
    for entry in entries:
        names = entry.experts or (entry.name,)
        layers = [name.removesuffix(".weight") for name in names]
        # llama.cpp computes a router in float32
        kind = FLOAT_TYPES[export.dtype] if entry.matrix and entry.stem != "ffn_gate_inp" else "F32"
        kinds = dict.fromkeys(layers, kind)
        for layer in layers:
            if layer in schemes and entry.name.endswith(".weight"):
                kinds[layer], problem = find_block_type(schemes[layer], entry.inputs)
                problems += [f"{layer}: {problem}"] if problem else []
        if odd := next((layer for layer, own in kinds.items() if own != kinds[layers[0]]), ""):
            problems.append(f"{odd}: a GGUF file stacks a layer's experts, and others are {kinds[layers[0]]}")
        kind = kinds[layers[0]]
        if entry.changed and kind not in FLOAT_TYPES.values():
            text = f"{layers[0]}: llama.cpp wants other numbers than its weight's, which integers cannot become"
            problems.append(f"{text}; ignore it")
        chosen.append(replace(entry, kind=kind))
    return chosen, problems


@dataclass
class _Writing:
    """A file that is written and read back. `changes`: layer -> relative RMS change of its weights by half floats."""

    gguf: ModuleType
    model: StreamedModel
    description: Description
    changes: dict[str, float] = field(default_factory=dict)

    def write(self, path: Path, name: str) -> None:
        """Write everything: keys first, then the tensors one by one."""
        with self._open(path, name) as writer:
            for entry in self.description.tensors:
                writer.write_tensor_data(self._make_bytes(entry))
            for values in self.description.metadata.factors.values():
                writer.write_tensor_data(values)

    def count_keys(self, path: Path, name: str) -> int:
        """Return the bytes before the tensors' values, whatever their types are: they are written to `path`."""
        with self._open(path, name):
            pass
        return self._pad(path.stat().st_size)

    def count_values(self, entries: Iterable[TensorEntry]) -> int:
        """Return the bytes of tensors of these types, and of rope's factors."""
        sizes = [self._announce(entry)[2] for entry in entries]
        sizes += [values.nbytes for values in self.description.metadata.factors.values()]
        return sum(map(self._pad, sizes))

    def _pad(self, size: int) -> int:
        padded: int = self.gguf.GGUFWriter.ggml_pad(size, self.gguf.GGUF_DEFAULT_ALIGNMENT)
        return padded

    @contextmanager
    def _open(self, path: Path, name: str) -> Iterator[Any]:
        """Yield a writer that has written all but the tensors' values."""
        writer = self.gguf.GGUFWriter(path, self.description.architecture)
        self._add_keys(writer, self.description.architecture, name)
        for entry in self.description.tensors:
            writer.add_tensor_info(entry.written, *self._announce(entry))
        for written, values in self.description.metadata.factors.items():
            writer.add_tensor_info(written, values.shape, values.dtype, values.nbytes)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            yield writer
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
        read = f"read back by gguf {version('gguf')}, each tensor as it was stored"
        tried = f"{self.description.finding.reader} computes what torch does of a small model in its form"
        notes = [Note("info", f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, tensors: {held}; {read}; {tried}")]
        notes += [Note("warning", f"{path.name}: {text}") for text in self.description.notes]
        worst = max(self.changes, key=self.changes.__getitem__, default="")
        if worst and (change := self.changes[worst]) > 0:
            text = (
                f"{path.name}: scales are rounded to half floats, which changes weights by up to {change:.2%} ({worst})"
            )
            # more than 1 % of a layer's weights (relative RMS), as scales become half floats, is a warning
            notes.append(Note("warning" if change > 0.01 else "info", text))
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
            add_key(writer, f"{architecture}.{key}", value)
        for key, value in self.description.vocabulary.values.items():
            add_key(writer, key, value)

    def _announce(self, entry: TensorEntry) -> tuple[Any, ...]:
        """Return shape, dtype, bytes and raw type as the writer asks for them."""
        shape, kind = entry.shape, self.gguf.GGMLQuantizationType[entry.kind]
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
            return entry.order(pack_blocks(stored, entry.kind))
        return self._make_float(entry).numpy() if entry.kind != "BF16" else _bfloat16_bytes(self._make_float(entry))

    def _make_values(self, entry: TensorEntry) -> np.ndarray:
        """Return the float32 values that a reader is to get."""
        if entry.experts:
            return np.stack([self._make_values(part) for part in _list_parts(entry)])
        if entry.kind not in FLOAT_TYPES.values():
            return entry.order(self._as_stored(entry).dequantize())
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
        values = entry.convert(self.model.store.read(entry.name).float().numpy())
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        if not finite(tensor):
            raise ExportError(f"'{entry.name}' does not fit into {dtype}; set export.dtype: bfloat16 or float32")
        return tensor


def _list_parts(entry: TensorEntry) -> list[TensorEntry]:
    """Return stacked experts one by one."""
    return [replace(entry, name=name, experts=()) for name in entry.experts]


_FILE_TYPES = {"": "MOSTLY_F16", "Q3_K": "MOSTLY_Q3_K_S", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}
"""Type of most tensors -> its name as a file's type, where that is not MOSTLY_ and the type."""


def _bfloat16_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
