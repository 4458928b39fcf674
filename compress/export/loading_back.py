"""A written checkpoint is loaded back by its reader, in a process of its own, before anything is said of it.

What the reader may compute differently follows from how it computes. Sums are added in another order, which moves an
output by a millionth. Where inputs, keys or values are rounded as the model runs, such a millionth moves some of them
by a whole level, and that moves more of them in each layer behind: two correct readers of a deep model differ by nearly
as much as rounding itself changes. So the stored values are judged with the rounding off, strictly; and the rounding by
its own measure: by as much as it changes our outputs it has to change the reader's, and the two may differ by no more
than ours do when the last bits of all values change.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from compress.blocks.activations import with_others
from compress.blocks.engine_arithmetic import compute_as_engine
from compress.blocks.forward import run
from compress.blocks.layers import has_own_formula, is_hf_conv1d
from compress.blocks.materialise import fill, plain
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export.checkpoint import WITH_ZEROS
from compress.export.checkpoint_config import float_types
from compress.export.checkpoint_rules import transformers_lacks
from compress.export.compressed_tensors import NVFP4, PACKED, layer_format
from compress.facts import Note
from compress.formats.schemes import Scheme
from compress.models.checkpoint_names import file_names
from compress.models.fresh_reader import (
    ANSWER,
    INPUT_SCALE,
    JOB,
    KEY_SCALE,
    OUTPUTS,
    UNROUNDED,
    VALUE_SCALE,
    LoadReply,
    LoadRequest,
    Reader,
)
from compress.models.source import SHAPES, Source
from compress.recipe.exports import CheckpointExport
from runtime.bundle.samples import read_npz, write_npz
from runtime.processes.isolated import last_line, start_python

SAMPLES, TOKENS = 4, 32
"""Of the evaluation set that are run, and of each text that are kept: as many as show a wrong tensor or layout."""
CLOSE = 1e-3
"""Largest RMS difference of the outputs over their standard deviation between a reader and the values that were stored.

Measured: 0 to 1e-6 of every scheme, its inputs not rounded; a layer that is read as another gives 0.3 to 1.4, scales
that are a tenth too large in one layer 6e-3.
"""
LAST_BITS = 2.0**-19
"""Part of each stored value by which it is changed, to see how far that carries: sixteen times float32's rounding.

Measured, Llamas of 2 and 8 blocks in W8A8, W8A8_STATIC, W4A8, FP8_DYNAMIC, NVFP4 and MXFP8: outputs differ by 5e-7
where it moves no level, and by up to 0.8 times what the rounding of inputs changes of them.
"""
LIKE_LAST_BITS, LIKE_ROUNDING = 2.0, 0.5
"""Outputs may differ by so many times what last bits change, or by so much of what rounding as it runs changes."""
STORING = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""What storing in that type may change of what was judged before it is said. Decoders of 12 layers: 1e-3, 1e-2."""
HEADROOM = 2.5
"""Bytes that loading may take at its peak, over those of the float32 weights."""
FRESH = "from compress.models.fresh_reader import main; main(sys.argv[1])"
BASE_SECONDS, SECONDS_A_GIB = 600, 120
"""After them, and as many again for each GiB, a reader that hangs is ended."""
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LoadBack:
    """What checkpoints are loaded back with. `feeds`: encoded samples, by the model's input.

    `memory_bytes`: what a process may take; `log`: one line for the run's log; `surplus`: what checkpoints hold that is
    no part of the model, as of `write_checkpoint`.
    """

    source: Source
    feeds: Sequence[Mapping[str, np.ndarray]]
    memory_bytes: int
    log: Callable[[str], None]
    surplus: Mapping[str, Path] = field(default_factory=dict)


def choose_samples(batches: Sequence[Mapping[str, np.ndarray]], texts: bool) -> list[dict[str, np.ndarray]]:
    """Return the first samples of encoded batches, one row each; of texts without images the first tokens."""
    samples: list[dict[str, np.ndarray]] = []
    for i in range(len(batches)):
        feeds = {name: np.asarray(values) for name, values in batches[i].items()}
        n, cut = len(next(iter(feeds.values()))), texts and len({values.shape for values in feeds.values()}) == 1
        for row in range(n):
            if len(samples) == SAMPLES:
                return samples
            kept = feeds if n == 1 else {name: values[row : row + 1] for name, values in feeds.items()}
            samples.append({name: values[:, :TOKENS] if cut else values for name, values in kept.items()})
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
    reader, why = choose_reader(folder, model, export, how.source)
    with tempfile.TemporaryDirectory(prefix="compress-loading-") as name:
        work = Path(name)
        given = [_name_parameters(model, feeds) for feeds in how.feeds] if whole else []
        for i, feeds in enumerate(given):
            write_npz(work / f"feeds-{i}.npz", feeds)
        spec, root = how.source.spec.model_dump_json(), str(how.source.root.resolve())
        rounds = whole and reader == "transformers" and _rounds_as_it_runs(model)
        threads = torch.get_num_threads()
        surplus = tuple(how.surplus)
        job = LoadRequest(str(folder.resolve()), spec, root, reader, whole, rounds, len(given), threads, surplus)
        (work / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
        ask(work, BASE_SECONDS + SECONDS_A_GIB * n_bytes / 2**30)
        answer = LoadReply(**json.loads((work / ANSWER).read_text(encoding="utf-8")))
        if answer.problem:
            raise ExportError(f"{folder.name}: {answer.reader} does not load what was written: {answer.problem}")
        notes = []
        if whole:
            comparison = _Comparison(folder.name, model, export, given, reader, how.log)
            comparison.check_values(_read_outputs(work, len(given), UNROUNDED if rounds else OUTPUTS))
            if rounds:
                comparison.check_scales(answer.scales)
                comparison.check_rounding(*(_read_outputs(work, len(given), name) for name in (OUTPUTS, UNROUNDED)))
            notes = comparison.note_storing()
    reader_note = _make_reader_note(folder, answer.reader, why, target)
    return [reader_note, _make_comparison_note(folder, whole, len(given), n_bytes), *notes]


def _name_parameters(model: StreamedModel, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {parameter: feeds[name] for name, parameter in with_others(model.parameters, feeds).items()}


def choose_reader(folder: Path, model: StreamedModel, export: CheckpointExport, source: Source) -> tuple[Reader, str]:
    """Return who reads a checkpoint, and why it is not transformers; "" where it is."""
    if source.kind == "python":
        return "compress", "its code is not one of transformers'"
    if (folder / SHAPES).is_file():
        return "compress", f"transformers does not: config.json cannot say the pruned sizes, which {SHAPES} holds"
    if model.schemes and export.format in WITH_ZEROS:
        return "compress", f"transformers needs gptqmodel, and a GPU, for the {export.format.upper()} format"
    schemes = {layer: model.schemes[layer] for layer in model.quantized_layers()}
    module = model.build()
    stacked = any(".experts." in layer for layer in schemes) and not file_names(module, module.state_dict()).one_by_one
    one_by_one = "transformers reads experts in stacks, and these lie one by one"
    lacks = one_by_one if stacked else _ask_transformers(module, schemes)
    return ("compress", lacks) if lacks else ("transformers", "")


def _ask_transformers(module: torch.nn.Module, schemes: Mapping[str, Scheme]) -> str:
    """Return why transformers cannot read layers in these schemes; "" where it can."""
    parts = {plain(name): part for name, part in module.named_modules()}
    if spelled := next((name for name in schemes if has_own_formula(parts[name])), ""):
        return f"in transformers {spelled} multiplies with its weight itself, and in few bits it has none"
    return transformers_lacks(schemes, [name for name in schemes if isinstance(parts[name], torch.nn.Embedding)])


def _rounds_as_it_runs(model: StreamedModel) -> bool:
    """Return whether inputs, keys or values of the model are in few bits, and not its weights alone."""
    return model.kv_cache is not None or any(scheme.activations for scheme in model.schemes.values())


def compute_expected_outputs(
    model: StreamedModel, given: Sequence[Mapping[str, np.ndarray]], rounded: bool, read: Callable[[str], Tensor]
) -> list[Outputs]:
    """Return what a model with the values that `read` gives by name computes for each sample.

    `rounded`: as transformers computes, with inputs, keys and values in few bits where the schemes say so.
    """
    module = (compute_as_engine(model, "transformers") if rounded else model).build()
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


@dataclass(frozen=True)
class _Comparison:
    """A reader's outputs on a few samples, `given`, against what the stored values give. `name`: the checkpoint's."""

    name: str
    model: StreamedModel
    export: CheckpointExport
    given: Sequence[Mapping[str, np.ndarray]]
    reader: Reader
    log: Callable[[str], None]

    @cached_property
    def _read_stored(self) -> Callable[[str], Tensor]:
        return read_as_stored(self.model, self.export, self.reader)

    @cached_property
    def _unrounded(self) -> list[Outputs]:
        """Return what the stored values give where nothing is rounded as it runs."""
        return self._expect(self._read_stored)

    def check_values(self, found: Sequence[Outputs]) -> None:
        """Raise ExportError where the reader's values, computed with as they are, are not those that were stored."""
        apart = _measure_difference(self._unrounded, found)
        self.log(
            f"{self.name}: {self.reader} loads it; its outputs differ by {apart:.1e} from those of what was stored"
        )
        if not apart <= CLOSE:
            self._refuse(
                f"on {len(self.given)} samples its outputs differ by {apart:.3g} of their standard deviation from what "
                f"the stored values give, and {CLOSE:g} may be rounding"
            )

    def check_scales(self, found: Mapping[str, float]) -> None:
        """Raise ExportError where a scale by which the reader rounds as it runs is not the one that was stored."""
        stored = {f"{layer}{INPUT_SCALE}": scale for layer, scale in self.model.activation_scales.items()}
        for attention, scales in self.model.kv_scales.items():
            stored |= {
                f"{attention}{name}": scale for name, scale in zip((KEY_SCALE, VALUE_SCALE), scales, strict=True)
            }
        for name in sorted(stored.keys() & found.keys()):
            if not math.isclose(found[name], stored[name], rel_tol=CLOSE):
                self._refuse(f"{name} is {found[name]:.4g}, and {stored[name]:.4g} was stored")

    def check_rounding(self, found: Sequence[Outputs], unrounded: Sequence[Outputs]) -> None:
        """Raise ExportError where the reader does not round what it reads, keys and values as their scheme says."""
        expected = self._expect(self._read_stored, rounded=True)
        nudged = self._expect(_nudge(self._read_stored), rounded=True)
        ours, theirs = (_measure_difference(*pair) for pair in ((self._unrounded, expected), (unrounded, found)))
        noise, apart = (_measure_difference(expected, other) for other in (nudged, found))
        allowed = max(CLOSE, LIKE_LAST_BITS * noise, LIKE_ROUNDING * ours)
        self.log(f"{self.name}: with inputs rounded they differ by {apart:.1e}; last bits alone: {noise:.1e}")
        if not apart <= allowed:
            self._refuse(
                f"on {len(self.given)} samples, with inputs, keys or values rounded, its outputs differ by {apart:.3g} "
                f"of their standard deviation from what the stored values give, and {allowed:.3g} may come of last bits"
            )
        if ours > CLOSE and not LIKE_ROUNDING <= theirs / ours <= 1 / LIKE_ROUNDING:
            self._refuse(
                f"on {len(self.given)} samples the rounding of inputs, keys or values changes its outputs by "
                f"{theirs:.3g} of their standard deviation, and by {ours:.3g} as their scheme says"
            )

    def note_storing(self) -> list[Note]:
        """Return a note where storing changed what was judged.

        That is computed before floats and scales are rounded to the types that they are stored in.
        """
        dtype = float_types(self.model.folder, self.export.dtype).usual
        allowed = max(CLOSE, STORING[torch.float16 if self.export.format in WITH_ZEROS else dtype])
        change = _measure_difference(self._expect(self.model.store.read), self._unrounded)
        self.log(f"{self.name}: its outputs differ by {change:.1e} from what was judged")
        if change <= allowed:
            return []
        schemes = self.model.schemes.values()
        if self.reader == "transformers" and any(layer_format(scheme) == NVFP4 for scheme in schemes):
            text = f"{self.name}: transformers unpacks NVFP4 into bfloat16, which changes its outputs by more than "
            return [Note("warning", f"{text}{allowed:.0%}; vLLM's kernels do not", here=True)]
        type_name, how = str(dtype).removeprefix("torch."), "set export.dtype: float32 to store what was judged"
        text = f"{self.name}: storing in {type_name} changes its outputs by more than {allowed:.0%}; {how}"
        return [Note("warning", text, here=True)]

    def _expect(self, read: Callable[[str], Tensor], rounded: bool = False) -> list[Outputs]:
        return compute_expected_outputs(self.model, self.given, rounded, read)

    def _refuse(self, what: str) -> NoReturn:
        raise ExportError(
            f"{self.name}: {self.reader} loads the checkpoint and computes something else: {what}; what was written is "
            "defective: leave the export out and report it"
        )


def _nudge(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return `read`, each value of its tensors changed by up to LAST_BITS of it: always the same."""

    def read_nudged(name: str) -> Tensor:
        tensor = read(name)
        if not tensor.is_floating_point():
            return tensor
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return tensor * (1 + LAST_BITS * (2 * torch.rand(tensor.shape, generator=random) - 1))

    return read_nudged


def _read_outputs(work: Path, n_samples: int, name: str) -> list[Outputs]:
    return [
        {key: np.asarray(values) for key, values in read_npz(work / f"{i}-{name}").items()} for i in range(n_samples)
    ]


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
        packed = layer_format(model.schemes[layer]) == PACKED
        form = WITH_ZEROS.get(export.format)
        dtype = form.SCALE_TYPE if form is not None else types.usual if packed else torch.float32
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


def _make_reader_note(folder: Path, reader: str, why: str, target: str) -> Note:
    asked = reader + (f" ({why})" if why else "")
    engine = f"; {target} itself was not asked" if target not in reader else ""
    return Note("info", f"{folder.name}: loaded back by {asked} in a fresh process{engine}")


def _make_comparison_note(folder: Path, whole: bool, n: int, n_bytes: int) -> Note:
    if whole:
        return Note(
            "info", f"{folder.name}: loaded back, its outputs on {n} samples are those that were judged", here=True
        )
    text = (
        "loaded back, names and shapes of its tensors are those that config.json builds; its outputs were not compared"
    )
    reason = f"its {n_bytes / 2**30:.1f} GiB of float32 weights do not fit into memory twice"
    return Note("warning", f"{folder.name}: {text} ({reason})", here=True)
