"""A written checkpoint is loaded back by its reader, in a process of its own, before anything is said of it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.blocks.engine_arithmetic import compute_as_engine
from compress.blocks.materialise import fill, plain
from compress.blocks.streamed import StreamedModel
from compress.blocks.trace import is_hf_conv1d, run
from compress.errors import ExportError
from compress.export import gptq_format
from compress.export.checkpoint_config import float_types
from compress.export.checkpoint_rules import transformers_lacks
from compress.export.compressed_tensors import NVFP4, PACKED, layer_format
from compress.facts import HostNote, Note
from compress.formats.schemes import Scheme
from compress.models.checkpoint_names import file_names
from compress.models.fresh_reader import ANSWER, JOB, OUTPUTS, LoadReply, LoadRequest, Reader
from compress.models.source import SHAPES
from compress.recipe.exports import CheckpointExport
from compress.specs import ModelSpec
from runtime.bundle.samples import read_npz, write_npz
from runtime.processes.isolated import last_line, start_python

SAMPLES, TOKENS = 4, 32
"""Of the evaluation set that are run, and of each text that are kept: as many as show a wrong tensor or layout."""
CLOSE = 1e-3
"""Largest RMS difference of the outputs over their standard deviation between a reader and the values that were stored.

Measured: 0 to 1e-6 of every scheme; a layer that is read as another gives 0.3 to 1.4, scales that are a tenth too large
in one layer 6e-3.
"""
ROUNDED_AS_IT_RUNS = 2e-2
"""The same where inputs, keys or values are rounded: the last bit of a sum may move one by a level."""
STORING = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What storing in that type may change of what was judged before it is said. Decoders of 12 layers: 1e-3, 1e-2."""
HEADROOM = 2.5
"""Bytes that loading may take at its peak, over those of the float32 weights."""
FRESH = "from compress.models.fresh_reader import main; main(sys.argv[1])"
BASE_SECONDS, SECONDS_A_GIB = 600, 120
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LoadBack:
    """What checkpoints are loaded back with. `feeds`: encoded samples, by the model's input.

    `memory_bytes`: what a process may take; `log`: one line for the run's log.
    """

    spec: ModelSpec
    root: Path
    feeds: Sequence[Mapping[str, np.ndarray]]
    memory_bytes: int
    log: Callable[[str], None]


def choose_samples(batches: Sequence[Mapping[str, np.ndarray]], texts: bool) -> list[dict[str, np.ndarray]]:
    """Return the first samples of encoded batches, one row each; of texts the first tokens."""
    samples: list[dict[str, np.ndarray]] = []
    for i in range(len(batches)):
        feeds = batches[i]
        for row in range(len(next(iter(feeds.values())))):
            if len(samples) == SAMPLES:
                return samples
            kept = {name: np.asarray(values)[row : row + 1] for name, values in feeds.items()}
            samples.append({name: values[:, :TOKENS] if texts else values for name, values in kept.items()})
    return samples


def check_loads_back(
    folder: Path, model: StreamedModel, export: CheckpointExport, target: str, how: LoadBack
) -> list[Note]:
    """Load the checkpoint in `folder` in a fresh process and compare it with `model`; return notes, first who read it.

    What was compared, which the memory of this machine decides, and what came of it are notes of this machine.
    ExportError where its reader refuses the checkpoint, or computes something else of it.
    """
    n_bytes = sum(tensor.numel() for tensor in model.build().state_dict().values()) * 4
    whole = n_bytes * HEADROOM <= how.memory_bytes and bool(how.feeds)
    reader, why = choose_reader(folder, model, export, how.spec)
    with tempfile.TemporaryDirectory(prefix="compress-loading-") as name:
        work = Path(name)
        given = [{model.parameters[key]: value for key, value in feeds.items()} for feeds in how.feeds] if whole else []
        for i, feeds in enumerate(given):
            write_npz(work / f"feeds-{i}.npz", feeds)
        spec, root = how.spec.model_dump_json(), str(how.root.resolve())
        job = LoadRequest(str(folder.resolve()), spec, root, reader, whole, len(given), torch.get_num_threads())
        (work / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
        ask(work, BASE_SECONDS + SECONDS_A_GIB * n_bytes / 2**30)
        answer = LoadReply(**json.loads((work / ANSWER).read_text(encoding="utf-8")))
        if answer.problem:
            raise ExportError(f"{folder.name}: {answer.reader} does not load what was written: {answer.problem}")
        notes = []
        if whole:
            outputs = [_to_arrays(read_npz(work / f"{i}-{OUTPUTS}")) for i in range(len(given))]
            notes = _compare_outputs(folder, model, export, given, outputs, reader, how.log)
    reader_note = _make_reader_note(folder, answer.reader, why, target)
    return [reader_note, _make_comparison_note(folder, whole, len(given), n_bytes), *notes]


def choose_reader(folder: Path, model: StreamedModel, export: CheckpointExport, spec: ModelSpec) -> tuple[Reader, str]:
    """Return who reads a checkpoint, and why it is not transformers; "" where it is."""
    if spec.source.startswith("python:"):
        return "compress", "its code is not one of transformers'"
    if (folder / SHAPES).is_file():
        return "compress", f"transformers does not: config.json cannot say the pruned sizes, which {SHAPES} holds"
    if model.schemes and export.format == "gptq":
        return "compress", "transformers needs gptqmodel, and a GPU, for the GPTQ format"
    schemes = {layer: model.schemes[layer] for layer in model.quantized_layers()}
    module = model.build()
    stacked = any(".experts." in layer for layer in schemes) and not file_names(module, module.state_dict()).experts
    one_by_one = "transformers reads experts in stacks, and these lie one by one"
    lacks = one_by_one if stacked else _ask_transformers(module, schemes)
    return ("compress", lacks) if lacks else ("transformers", "")


def _ask_transformers(module: torch.nn.Module, schemes: Mapping[str, Scheme]) -> str:
    """Return why transformers cannot read layers in these schemes; "" where it can."""
    parts = {plain(name): part for name, part in module.named_modules()}
    return transformers_lacks(schemes, [name for name in schemes if isinstance(parts[name], torch.nn.Embedding)])


def compute_expected_outputs(
    model: StreamedModel, given: Sequence[Mapping[str, np.ndarray]], reader: Reader, read: Callable[[str], Tensor]
) -> list[Outputs]:
    """Return what a model with the values that `read` gives by name computes for each sample, rounding as `reader`."""
    module = (compute_as_engine(model, reader) if reader == "transformers" else model).build()
    fill(module, read, model.tied)
    feeds = ({name: torch.from_numpy(value) for name, value in sample.items()} for sample in given)
    return [{name: out.float().numpy() for name, out in run(module, sample).items()} for sample in feeds]


def ask(work: Path, seconds: float) -> None:
    """Let a fresh process do the job in `work`. ExportError where it does not come to an answer."""
    try:
        done = start_python(
            "from compress.models.fresh_reader import main; main(sys.argv[1])", str(work), seconds=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"loading the checkpoint back took longer than {seconds:.0f} s") from error
    if done.returncode != 0 or not (work / ANSWER).is_file():
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise ExportError(f"loading the checkpoint back ended with {how}: {last_line(done.stderr) or 'without a word'}")


def _compare_outputs(
    folder: Path,
    model: StreamedModel,
    export: CheckpointExport,
    given: Sequence[Mapping[str, np.ndarray]],
    found: Sequence[Outputs],
    reader: Reader,
    log: Callable[[str], None],
) -> list[Note]:
    """Compare a reader's outputs with those of the stored values, and return a note where storing changed them.

    ExportError where the reader computes other outputs than the stored values give. What is judged is
    computed before floats and scales are rounded to the types that they are stored in.
    """
    stored = compute_expected_outputs(model, given, reader, read_as_stored(model, export, reader))
    rounding = model.kv_cache is not None or any(scheme.activations for scheme in model.schemes.values())
    allowed = ROUNDED_AS_IT_RUNS if rounding else CLOSE
    apart = _measure_difference(stored, found)
    log(f"{folder.name}: {reader} loads it; its outputs differ by {apart:.1e} from those of what was stored")
    if not apart <= allowed:
        raise ExportError(
            f"{folder.name}: {reader} loads the checkpoint and computes something else: on {len(given)} samples its "
            f"outputs differ by {apart:.3g} of their standard deviation from what the stored values give, and "
            f"{allowed:g} may be rounding; what was written is defective: leave the export out and report it"
        )
    judged = compute_expected_outputs(model, given, reader, model.store.read)
    dtype = float_types(model.folder, export.dtype).usual
    change, expected = _measure_difference(judged, found), STORING[torch.float16 if export.format == "gptq" else dtype]
    log(f"{folder.name}: its outputs differ by {change:.1e} from what was judged")
    if change <= max(expected, allowed):
        return []
    if reader == "transformers" and any(layer_format(scheme) == NVFP4 for scheme in model.schemes.values()):
        text = f"{folder.name}: transformers unpacks NVFP4 into bfloat16, which changes its outputs by more than "
        return [HostNote("warning", f"{text}{max(expected, allowed):.0%}; vLLM's kernels do not")]
    name, how = str(dtype).removeprefix("torch."), "set export.dtype: float32 to store what was judged"
    text = f"{folder.name}: storing in {name} changes its outputs by more than {max(expected, allowed):.0%}; {how}"
    return [HostNote("warning", text)]


def read_as_stored(
    model: StreamedModel, export: CheckpointExport, reader: Reader = "compress"
) -> Callable[[str], Tensor]:
    """Return a function that gives a tensor of the model by its name, rounded to the type that a checkpoint stores.

    As `reader` gives it: transformers unpacks NVFP4 into bfloat16, whatever the model's type; engines' kernels do not.
    """
    module, types = model.build(), float_types(model.folder, export.dtype)
    names = file_names(module, (plain(name) for name in module.state_dict()))
    transposed = {plain(name) for name, part in module.named_modules() if is_hf_conv1d(part)}

    def read(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        weight = model.store.quantized(layer) if name.endswith(".weight") and layer in model.schemes else None
        if weight is None:
            tensor = model.store.read(name)
            return tensor.to(types.of(names.tensor(name))).float() if tensor.is_floating_point() else tensor
        if weight.stored:
            values = torch.from_numpy(weight.dequantize())
            return (
                values.bfloat16().float()
                if reader == "transformers" and layer_format(model.schemes[layer]) == NVFP4
                else values
            )
        packed = export.format == "gptq" or layer_format(model.schemes[layer]) == PACKED
        dtype = gptq_format.SCALE_TYPE if export.format == "gptq" else types.usual if packed else torch.float32
        scales = torch.from_numpy(np.ascontiguousarray(weight.scales)).to(dtype).float().numpy()
        values = torch.from_numpy(replace(weight, scales=scales).dequantize())
        return values.t().contiguous() if layer in transposed else values

    return read


def _measure_difference(wanted: Sequence[Outputs], found: Sequence[Outputs]) -> float:
    """Return the largest RMS difference of an output over its standard deviation; 0 where both sides are broken."""
    worst = 0.0
    for name in wanted[0]:
        a, b = (
            np.concatenate([outputs[name].reshape(-1) for outputs in side]).astype(np.float64)
            for side in (wanted, found)
        )
        if np.isfinite(a).all() or np.isfinite(b).all():
            worst = float(np.maximum(worst, np.sqrt(np.mean((a - b) ** 2)) / max(float(a.std()), 1e-12)))
    return worst


def _to_arrays(columns: Mapping[str, Any]) -> Outputs:
    return {name: np.asarray(values) for name, values in columns.items()}


def _make_reader_note(folder: Path, reader: str, why: str, target: str) -> Note:
    asked = reader + (f" ({why})" if why else "")
    engine = f"; {target} itself was not asked" if target not in reader else ""
    return Note("info", f"{folder.name}: loaded back by {asked} in a fresh process{engine}")


def _make_comparison_note(folder: Path, whole: bool, n: int, n_bytes: int) -> HostNote:
    if whole:
        return HostNote("info", f"{folder.name}: loaded back, its outputs on {n} samples are those that were judged")
    text = (
        "loaded back, names and shapes of its tensors are those that config.json builds; its outputs were not compared"
    )
    reason = f"its {n_bytes / 2**30:.1f} GiB of float32 weights do not fit into memory twice"
    return HostNote("warning", f"{folder.name}: {text} ({reason})")
