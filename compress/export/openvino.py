"""Write what OpenVINO's own tools load from a graph: its IR and, of models that read texts, the tokenizer as a model.

The folder is named as optimum-intel names it: openvino_model.xml and .bin, openvino_tokenizer.xml,
openvino_detokenizer.xml, config.json and the tokenizer's own files. A decoder keeps keys and values as its state, with
the input `beam_idx`, as OpenVINO GenAI needs it. Weights stay as the graph stores them, int4 and int8 with their
scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError
from compress.facts import Note
from runtime.backends.openvino import core, keep_decoder_cache, name_outputs, read_specs
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import PreprocessSpec

MODEL, TOKENIZER, DETOKENIZER = "openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"
COUNTED = re.compile(r"[A-Z]\w*_\d+(\.\d+)?")
"""A name that OpenVINO made: of an operator's kind, and a number."""
COMPARED = 32
"""Texts on which the converted tokenizer is held against the one that it was made from, for a note of those that it
reads otherwise. A bound on the time that takes, not measured."""
Specs = tuple[TensorSpec, ...]


def reads_texts(preprocess: PreprocessSpec) -> bool:
    """Return whether a model reads texts, whose tokenizer OpenVINO's tools want as a model."""
    return hasattr(preprocess, "tokenizer")


def missing_packages(with_tokenizer: bool) -> list[str]:
    """Return the packages that are not installed and that writing the folder needs."""
    needed = {"openvino": "openvino", "openvino-tokenizers": "openvino_tokenizers"}
    if not with_tokenizer:
        del needed["openvino-tokenizers"]
    return [package for package, module in needed.items() if find_spec(module) is None]


def write_ir(graph: Path, folder: Path) -> tuple[Path, Specs, Specs]:
    """Write the graph's IR into `folder`; return its .xml, inputs and outputs. ExportError where it does not load.

    Same graph, same bytes: operators without a name of their own are named by their place.
    """
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MODEL
    try:
        model = core().read_model(graph)
        keep_decoder_cache(graph, model)
        _name_by_place(model)
        openvino.save_model(model, path, compress_to_fp16=False)
        names = name_outputs(model)
        compiled = core().compile_model(core().read_model(path), "CPU", {})
    except RuntimeError as error:
        raise ExportError(f"{graph.name}: OpenVINO {openvino.__version__} cannot write its IR: {error}") from error
    return path, read_specs(compiled.inputs), read_specs(compiled.outputs, names)


def write_tokenizer(folder: Path, texts: Sequence[str]) -> list[Note]:
    """Write the tokenizer of a folder as OpenVINO models beside it; return a note where it splits `texts` otherwise.

    ExportError for a tokenizer that openvino-tokenizers cannot convert.
    """
    import openvino
    import openvino_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        models = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:  # whatever a tokenizer's own code raises
        raise ExportError(
            f"openvino: the tokenizer of {folder.name} cannot be converted by openvino-tokenizers "
            f"{openvino_tokenizers.__version__}: {error}; export {{kind: onnx, target: openvino}} instead"
        ) from error
    for model, name in zip(models, (TOKENIZER, DETOKENIZER), strict=True):
        _name_by_place(model)
        openvino.save_model(model, folder / name, compress_to_fp16=False)
    core().add_extension(str(openvino_tokenizers._ext_path))  # a Core made before the import does not know it
    request = core().compile_model(models[0], "CPU", {}).create_infer_request()
    different = list(_split_otherwise(tokenizer, request, texts[:COMPARED]))
    if not different:
        return []
    compared = len(texts[:COMPARED])
    text = f"{TOKENIZER} gives other tokens than tokenizer.json for {len(different)} of {compared} texts"
    return [Note("warning", f"openvino: {text}, the first {different[0][:40]!r}: give OpenVINO the tokens instead")]


def _split_otherwise(tokenizer: Any, request: Any, texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts that the converted tokenizer splits otherwise."""
    for text in texts:
        made = request.infer({0: np.array([text])})["input_ids"][0].tolist()
        if made != tokenizer(text)["input_ids"]:
            yield text


def _name_by_place(model: Any) -> None:
    """Name by its place in the graph what was named by how many operators had been made before: Constant_5297."""
    for place, operator in enumerate(model.get_ordered_ops()):
        kind = operator.get_type_name()
        if COUNTED.fullmatch(operator.get_friendly_name()):
            operator.set_friendly_name(f"{kind}_{place}")
        for output in operator.outputs():
            counted = {name for name in output.get_names() if COUNTED.fullmatch(name) and name.startswith(f"{kind}_")}
            if counted:
                output.set_names((output.get_names() - counted) | {f"{kind}_{place}"})
