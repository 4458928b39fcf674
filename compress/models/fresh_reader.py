"""A checkpoint read as its users will read it, in a process that knows nothing of how it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from compress.blocks.forward import run
from compress.blocks.materialise import plain
from compress.errors import CompressError, SourceError
from compress.models import factory, huggingface
from compress.models.pruned import load_recorded, open_recorded_store
from compress.models.source import SHAPES, Source, locate
from compress.specs import ModelSpec
from runtime.bundle.samples import read_npz, write_npz

JOB, ANSWER = "job.json", "answer.json"
OUTPUTS, UNROUNDED = "outputs.npz", "unrounded.npz"
"""Of a sample as the reader computes it, and with what it reads, keys and values left as they are."""
SCALES = INPUT_SCALE, KEY_SCALE, VALUE_SCALE = ".input_scale", ".k_scale", ".v_scale"
"""What compressed-tensors calls a layer's stored scale of inputs, and an attention's of keys and values."""
Reader = Literal["transformers", "compress"]


@dataclass(frozen=True)
class LoadRequest:
    """What is asked of the process. `folder`: the checkpoint; `spec`: the recipe's model, as JSON; `root`: its place.

    `whole`: load all weights and run the samples of feeds-<i>.npz; else names and shapes alone are compared. `rounds`:
    inputs, keys or values are rounded as it runs, so that each sample is run without that, too.
    """

    folder: str
    spec: str
    root: str
    reader: Reader
    whole: bool
    rounds: bool
    samples: int
    threads: int
    surplus: Sequence[str] = ()
    """Tensors that the checkpoint holds and that are no part of the model, as it was loaded before."""


@dataclass(frozen=True)
class LoadReply:
    """`reader`: what read it, with its version. `problem`: why it cannot be read; "" where it can.

    `scales`: by plain name, those stored scales by which the reader rounds inputs, keys and values.
    """

    reader: str
    problem: str = ""
    scales: dict[str, float] = field(default_factory=dict)


def answer(work: Path) -> None:
    """Do the job in the folder `work` and write the answer, and outputs in order of the samples, beside it."""
    job = LoadRequest(**json.loads((work / JOB).read_text(encoding="utf-8")))
    torch.set_num_threads(job.threads)
    name = _name_reader(job.reader)
    try:
        module = _load_checkpoint(job)
        n_samples = job.samples if job.whole else 0
        _write_outputs(module, work, n_samples, OUTPUTS)
        if job.rounds:
            from compressed_tensors.quantization import disable_quantization

            # the library's own switch for all rounding that a module does as it runs
            module.apply(disable_quantization)
            _write_outputs(module, work, n_samples, UNROUNDED)
        reply = LoadReply(name, scales=_list_scales(module) if job.rounds else {})
    except (CompressError, *factory.USER_ERRORS, AssertionError, ArithmeticError, MemoryError) as error:
        # What a reader raises is the answer: its words are the reason that the user gets.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["it gives no reason"]
        kind = "" if isinstance(error, CompressError) else f"{type(error).__name__}: "
        reply = LoadReply(name, kind + "; ".join(lines[:4])[:1000])
    (work / ANSWER).write_text(json.dumps(asdict(reply)), encoding="utf-8")


def _write_outputs(module: nn.Module, work: Path, n_samples: int, name: str) -> None:
    """Run the samples in the folder `work` and write what comes of each to <i>-<name> there."""
    for i in range(n_samples):
        feeds = {key: torch.from_numpy(value) for key, value in read_npz(work / f"feeds-{i}.npz").items()}
        write_npz(work / f"{i}-{name}", {key: tensor.float().numpy() for key, tensor in run(module, feeds).items()})


def _list_scales(module: nn.Module) -> dict[str, float]:
    named = ((plain(name), value) for name, value in module.named_parameters())
    return {name: float(value.detach()) for name, value in named if name.endswith(SCALES) and value.numel() == 1}


def _name_reader(reader: Reader) -> str:
    if reader == "compress":
        return "compress"
    import transformers

    return f"transformers {transformers.__version__}"


def _load_checkpoint(job: LoadRequest) -> nn.Module:
    spec, root, folder = ModelSpec.model_validate_json(job.spec), Path(job.root), Path(job.folder)
    if spec.source.startswith("python:"):
        return _load_into_factory(locate(spec, root), folder, job.whole)
    spec = spec.model_copy(update={"source": f"dir:{folder.resolve()}", "revision": None})
    source = locate(spec, root)
    if job.reader == "compress":
        whole, on_meta = huggingface.load_trained, huggingface.build_on_meta
        return whole(source, alone=True) if job.whole else on_meta(source, alone=True)[0]
    placement = {} if job.whole else {"device_map": "meta"}
    module, unused = huggingface.read_pretrained(source, job.surplus, **placement)
    if unused:
        raise SourceError(unused)  # it would be lost on whoever loads the checkpoint
    return module


def _load_into_factory(source: Source, folder: Path, whole: bool) -> nn.Module:
    """Load the folder's tensors into the factory's module, in the place of its own, and return it."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    shapes = folder / SHAPES if (folder / SHAPES).is_file() else None
    source = replace(source, folder=folder, weights=files, shapes=shapes)
    with torch.random.fork_rng(devices=[]):
        module = factory.build(source).float().eval().requires_grad_(False)
    if whole:
        load_recorded(module, source)
    else:
        open_recorded_store(module, source)
    return module


def main(work: str) -> None:
    """Do the job in the folder `work`: the entry point of the process."""
    answer(Path(work))
