"""Where a model's files are, and a digest of everything that decides what it computes. No torch here."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compress.errors import SourceError
from compress.models import live
from compress.models.gguf_source import unpack
from compress.models.onnx_check import check_onnx, forget_shapes
from compress.specs import ModelSpec
from compress.store.digests import DigestOf
from compress.store.paths import find_path, resolve_path
from runtime.bundle.files import sha256_of
from runtime.bundle.onnx_file import external_files
from runtime.errors import BundleError
from runtime.words import did_you_mean

if TYPE_CHECKING:
    import onnx

CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.py", "*.jinja", "1_Pooling/*", "README.md")
"""Files of a hub repository that hold no weights and may be needed; its card names the licence."""
PICKLES = (".pt", ".pth", ".bin")
WEIGHTS = (".safetensors", *PICKLES)
SHAPES = "shapes.json"
"""The record of a pruned model's sizes, beside its weights."""


@dataclass(frozen=True)
class Source:
    """A located model: what the recipe says of it (`spec`), with paths relative to `root`, and its files.

    `folder`: where its config and tokenizer files lie, if it has any. `weights`: its weight files.
    `code`: (module or file.py, factory) of a python: source. `live`: the name of a module that this process holds.
    `shapes`: how sizes differ from those that it, or config.json, builds (of a pruned model, beside its weights).
    `onnx`: the graph of an onnx: source.
    `config`: what is to be otherwise in config.json, of a model that is to be built and not read.
    """

    spec: ModelSpec
    root: Path
    kind: Literal["huggingface", "shards", "python", "onnx"]
    folder: Path | None
    weights: tuple[Path, ...]
    code: tuple[str, str] | None = None
    live: str | None = None
    onnx: Path | None = None
    shapes: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return what the recipe calls it, such as hf:org/name: messages begin with it."""
        return self.spec.source

    @property
    def task(self) -> str:
        return self.spec.task


def locate(spec: ModelSpec, root: Path) -> Source:
    """Find the model's files; an hf: source is downloaded (or taken from the cache, see HF_HUB_OFFLINE), a gguf: one
    unpacked.

    A relative path is tried against the working directory, then against `root`. SourceError if something is missing.
    """
    kind, _, rest = spec.source.partition(":")
    if kind in ("hf", "dir"):
        folder = _download_snapshot(rest, spec.revision) if kind == "hf" else resolve_path(root, rest)
        return _locate_huggingface(spec, root, folder)
    if kind == "gguf":
        return _locate_huggingface(spec, root, unpack(resolve_path(root, rest)))
    if kind == "shards":
        return _locate_shards(spec, root, resolve_path(root, rest))
    if kind == "onnx":
        return _locate_onnx(spec, root, find_path(root, rest))
    if kind == "live":
        return _locate_live(spec, rest, root)
    return _locate_python(spec, rest, root)


def model_digest(source: Source, digest_of: DigestOf = sha256_of) -> str:
    """Return the sha256 (hex) over the model's weight files, configuration or factory source, and factory arguments.

    Of a factory, only the file that defines it counts, not what that file imports. `digest_of`: what stands for a
    weight file (see `compress.store.digests`); with another than its sha256 the result stands for no content.
    """
    spec, weights = source.spec, set(list_weight_files(source))
    said = {"task": spec.task, "args": spec.args}
    said |= {key: value for key, value in (("inputs", spec.inputs), ("state", spec.state)) if value}
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    files = [*source.weights, *([] if source.shapes is None else [source.shapes])]
    if source.kind in ("huggingface", "shards") and source.folder is not None:
        files += [source.folder / "config.json", *sorted(source.folder.glob("*.py"))]
    if source.onnx is not None:
        files += list_weight_files(source)
    if source.code is not None:
        files.append(factory_file(source.code, source.root))
    for path in files:
        sha.update(f"\n{path.name} {digest_of(path) if path in weights else sha256_of(path)}".encode())
    if source.code is not None or source.live is not None:
        sha.update(f"\n{source.live or (source.code and source.code[1])}".encode())
    return sha.hexdigest()


def list_weight_files(source: Source) -> list[Path]:
    """Return the files that hold a model's weights, of any size: not read for a plan."""
    return [*source.weights, *([] if source.onnx is None else [source.onnx, *onnx_external_files(source.onnx)])]


def factory_file(code: tuple[str, str], root: Path) -> Path:
    """Return the file that defines a python: source's factory. Imports a module's parent packages, not the module."""
    module = code[0]
    if module.endswith(".py"):
        path = resolve_path(root, module)
        if not path.is_file():
            raise SourceError(f"python:{module}:{code[1]}: {path} is a folder; give a file that ends in .py")
        return path
    try:
        module_spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SourceError(_format_import_error(code, str(error))) from error
    if module_spec is None or module_spec.origin is None:
        raise SourceError(_format_import_error(code, "no such module"))
    return Path(module_spec.origin)


def onnx_external_files(path: Path) -> tuple[Path, ...]:
    """Return the files beside an ONNX graph that hold its values: of initializers, constants, branches, functions.

    SourceError if one is missing or outside its folder.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read as ONNX: {error}") from error
    names = _list_external_names(path, found.st_mtime_ns, found.st_size)
    for name in names:
        if not name.isprintable():
            raise SourceError(f"{path}: its weights file {name!r} has no name that can be printed; save it anew")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise SourceError(
                f"{path}: its weights file '{name}' lies outside its folder; save it anew beside the graph"
            )
        _check_weights_file(path, path.parent / name)
    return tuple(path.parent / name for name in names)


def _check_weights_file(path: Path, file: Path) -> None:
    """Raise SourceError for weights that are not there, lie elsewhere than their graph, or that onnx would not read."""
    if not file.is_file():
        raise SourceError(f"{path}: its weights file {file} is missing; copy it beside the graph")
    whole = file.resolve()
    if not whole.is_relative_to(path.resolve().parent):
        raise SourceError(f"{path}: its weights file {file} is a link to {whole}, out of its folder; copy it here")
    if (n := whole.stat().st_nlink) > 1:
        raise SourceError(
            f"{path}: its weights file {file} has {n} names (hard links), which onnx takes for an attack; put a copy "
            "in its place"
        )


@functools.lru_cache(maxsize=8)
def _list_external_names(path: Path, mtime_ns: int, size: int) -> tuple[str, ...]:
    """Return what `external_files` finds, sorted, once for a file as it is: a graph may be two gigabytes long."""
    _parse_onnx(path)  # says better than what follows what is wrong with a file that is no ONNX at all
    try:
        return tuple(sorted(external_files(path)))
    except (BundleError, OSError) as error:
        raise SourceError(f"{path}: cannot be read as ONNX: {error}") from error


def read_onnx(path: Path, values: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    """Read the graph without its external weights; SourceError unless the file is a whole, consistent ONNX model.

    The shapes that it stores of inner tensors are left out, and outputs have those that ONNX infers: what a file says
    of them may be missing, or wrong, and it runs all the same. `values`: of inputs that are the same for all samples;
    they become constants.
    """
    onnx_external_files(path)
    inferred = check_onnx(path)
    model = _parse_onnx(path)
    declared = {value.name: value.type.tensor_type.shape.dim[:] for value in model.graph.output}
    forget_shapes(model)
    for value in model.graph.output:
        _write_shape(value, inferred.get(value.name), declared[value.name])
    for name, given in (values or {}).items():
        _bind_input(model, name, given, path)
    return model


def read_shared(path: Path, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the values of inputs that are the same for all samples, as the file reads them."""
    from onnx import numpy_helper

    tensors = read_onnx(path, values).graph.initializer if values else ()
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors if tensor.name in values}


def _bind_input(model: onnx.ModelProto, name: str, given: Any, path: Path) -> None:
    """Make an input a constant, in place. SourceError for one that there is not, and a value that does not fit it."""
    from onnx import helper, numpy_helper

    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in constants}
    if name not in inputs:
        raise SourceError(f"model.inputs: {path} has no input '{name}'; its inputs are {', '.join(inputs)}")
    if len(inputs) == 1:
        raise SourceError(f"model.inputs: '{name}' is the only input of {path}, and samples must have one")
    tensor = inputs[name].type.tensor_type
    sizes = [dim.dim_value or 1 for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    try:
        array = np.array(given)
        if not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ValueError(f"it takes {dtype}")
        array = np.broadcast_to(array, sizes).astype(dtype)
    except (ValueError, TypeError) as error:
        why = " ".join(str(error).split())
        raise SourceError(f"model.inputs: {given!r} does not fit input '{name}' {sizes} of {path}: {why}") from error
    model.graph.input.remove(inputs[name])
    model.graph.initializer.append(numpy_helper.from_array(array, name))


def _write_shape(value: onnx.ValueInfoProto, sizes: list[int | str | None] | None, stated: Sequence[Any]) -> None:
    """Give an output the `sizes` that ONNX infers, in place; where it cannot, those that the file has `stated`."""
    if sizes is None:
        if not stated:
            return
        sizes = [dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in stated]
    value.type.tensor_type.shape.SetInParent()
    for axis, size in enumerate(sizes):
        dim = value.type.tensor_type.shape.dim.add()
        own = stated[axis] if len(stated) == len(sizes) else None
        if isinstance(size, int):
            dim.dim_value = size
        elif own is not None and own.dim_value != -1 and own.WhichOneof("value"):
            dim.CopyFrom(own)  # the file's own name or number of a size that cannot be inferred
        else:
            dim.dim_param = size or f"{value.name}_{axis}"


def _parse_onnx(path: Path) -> onnx.ModelProto:
    """Read the graph as it stands in the file. SourceError: it cannot be read, or holds no operators."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise SourceError(f"{path}: cannot be read as ONNX: {error}") from error
    if not model.graph.node:
        raise SourceError(f"{path}: cannot be read as ONNX: it holds no operators")
    return model


def _locate_huggingface(spec: ModelSpec, root: Path, folder: Path) -> Source:
    _refuse_weights_key(spec)
    if not folder.is_dir():
        raise SourceError(f"{spec.source}: {folder} is a file; give the model's folder")
    if not (folder / "config.json").is_file():
        raise SourceError(f"{spec.source}: {folder} has no config.json, so it is not a Hugging Face model folder")
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not weights:
        raise SourceError(f"{spec.source}: {folder} has no *.safetensors (nor pytorch_model*.bin)")
    _check_shards(folder)
    shapes = folder / SHAPES
    return Source(spec, root, "huggingface", folder, tuple(weights), shapes=shapes if shapes.is_file() else None)


def _locate_shards(spec: ModelSpec, root: Path, path: Path) -> Source:
    """Return a folder that is read without its model's class, or a GGUF file as it is unpacked."""
    located = _locate_huggingface(spec, root, path if path.is_dir() else unpack(path))
    if located.shapes is not None:
        raise SourceError(f"{spec.source}: is a pruned model, whose sizes {SHAPES} has: give it as dir:{path}")
    if located.weights[0].suffix != ".safetensors":
        raise SourceError(f"{spec.source}: has no *.safetensors, whose names tell its layers; convert it, or use dir:")
    return replace(located, kind="shards")


def _check_shards(folder: Path) -> None:
    """Raise SourceError that names the shards that the index lists and the folder lacks."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise SourceError(f"{index}: is not an index of shards: it has no weight_map; copy or download it again")
    shards = {name if isinstance(name, str) else json.dumps(name) for name in files.values()}
    if outside := sorted(name for name in shards if not _is_file_name(name)):
        shown = outside[0] if len(outside[0]) <= LONGEST_NAME else outside[0][:LONGEST_NAME] + "..."
        raise SourceError(f"{index}: {shown!r} is no file's name of this folder; copy or download it again")
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        raise SourceError(f"{folder}: shards are missing: {', '.join(missing)}; copy or download them again")


MOST_NAMED = 4
"""Weight files that are offered in the place of one that is not there."""
LONGEST_NAME = 255
"""Bytes of a file's name: what the usual file systems hold."""


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and "\0" not in name and len(name.encode(errors="surrogatepass")) <= LONGEST_NAME


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. SourceError: the file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not JSON: {error}; copy or download it again") from error
    if not isinstance(record, dict):
        raise SourceError(f"{path}: holds a {type(record).__name__} and no object; copy or download it again")
    return record


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return config.json, {} without one; of a model that also sees with what it says of the part that reads texts.

    SourceError: it is no JSON object.
    """
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    part = config.get("text_config")
    said = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    return {**config, **said}


def _locate_onnx(spec: ModelSpec, root: Path, path: Path) -> Source:
    _refuse_weights_key(spec)
    if not path.is_file():
        raise SourceError(f"{spec.source}: {path} is a folder; give the .onnx file")
    named = _choose_name(path) if path.is_symlink() else path
    return Source(spec, root, "onnx", _find_processor_folder(path.parent), (), onnx=named)


def _choose_name(path: Path) -> Path:
    """Return the name of a graph's file beside which its weights lie: the link, or what it leads to.

    A hub's cache keeps all files in one folder under their digests, and has links of the names that a graph knows.
    """
    whole = path.resolve()
    names = _list_external_names(path, path.stat().st_mtime_ns, path.stat().st_size)
    return path if names and all((path.parent / name).is_file() for name in names) else whole


def _locate_python(spec: ModelSpec, rest: str, root: Path) -> Source:
    module, _, factory = rest.rpartition(":")
    if not module or not factory.isidentifier():
        raise SourceError(f"{spec.source}: write python:package.module:factory or python:path/to/file.py:factory")
    return replace(_locate_weights(spec, root), code=(module, factory))


def _locate_live(spec: ModelSpec, name: str, root: Path) -> Source:
    if not live.is_held(name):
        raise SourceError(
            f"{spec.source}: this model was given as an object, which another process does not have; give it again, as "
            "in compress.apply(recipe, model=model), or write source: python:FILE.py:FACTORY beside the same weights"
        )
    return replace(_locate_weights(spec, root), live=name)


def _locate_weights(spec: ModelSpec, root: Path) -> Source:
    """Return the source of a model whose code is Python's, with its weights alone."""
    weights: tuple[Path, ...] = ()
    if spec.weights is not None:
        path = _find_weights(spec.weights, root)
        if not path.is_file():
            raise SourceError(f"model.weights: {path} is a folder; give the file")
        if path.suffix not in WEIGHTS:
            raise SourceError(
                f"model.weights: {path}: give a .safetensors file, or a .pt, .pth or .bin of plain tensors"
            )
        weights = (path,)
    folder = _find_processor_folder(weights[0].parent) if weights else None
    shapes = weights[0].with_name(SHAPES) if weights else None
    if shapes is not None and not shapes.is_file():
        shapes = None
    return Source(spec, root, "python", folder, weights, shapes=shapes)


def _find_weights(text: str, root: Path) -> Path:
    try:
        return resolve_path(root, text)
    except SourceError as error:
        folders = [folder / Path(text).parent for folder in (Path.cwd(), root.absolute())]
        beside = sorted({p.name for f in folders for p in f.glob("*") if p.suffix in WEIGHTS})
        near = did_you_mean(Path(text).name, beside) or (f"; there is {', '.join(beside[:MOST_NAMED])}" * bool(beside))
        raise SourceError(f"model.weights: {error}{near}") from error


def _find_processor_folder(folder: Path) -> Path | None:
    return folder if any((folder / name).is_file() for name in ("tokenizer.json", "preprocessor_config.json")) else None


def _refuse_weights_key(spec: ModelSpec) -> None:
    if spec.weights is not None or spec.args:
        raise SourceError(
            f"{spec.source}: `weights` and `args` belong to python: sources; this one has its own weights"
        )


@functools.cache
def _download_snapshot(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=[*CONFIG_PATTERNS, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            patterns = [*CONFIG_PATTERNS, "pytorch_model*.bin"]
            folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"hf:{repo_id}: cannot be fetched: {error}; check the name, the network and HF_HUB_OFFLINE, or give a "
            "local copy as dir:FOLDER"
        ) from error
    return folder


def _format_import_error(code: tuple[str, str], reason: str) -> str:
    as_path = code[0].replace(".", "/")
    return (
        f"python:{code[0]}:{code[1]}: module '{code[0]}' cannot be imported ({reason}); install it, or give its file: "
        f"python:{as_path}.py:{code[1]}"
    )
