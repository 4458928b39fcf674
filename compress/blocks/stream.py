"""Working through a model block by block: each is read, worked on, written and dropped before the next one is read."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from compress.blocks.activations import Holder, MicroBatch, micro_batches
from compress.blocks.blockfiles import Said, finished_steps, read_step, step_file, write_step
from compress.blocks.sharing import from_main, share, wait
from compress.blocks.step import BlockStep
from compress.blocks.work import AFTER, BEFORE, Planned, Work
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import Reading

if TYPE_CHECKING:
    from compress.blocks.streamed import StreamedModel


class Stream:
    """The steps of a model, for a pass to work on: `for step in stream: ...`, then `stream.result()`.

    With `data`, every step has the calls that reach it with everything before it as this pass left it; without, the
    weights alone. `float_too`: also what the float model gives at each block. `readings_outside`: also steps for the
    layers outside the blocks that read something ("before" and "after"; without `data` always). `offload`: activations
    between blocks lie on disk. `compute`: the type of products in forward passes; hidden states stay float32. `rows`:
    tokens that go through a block at once (see `micro_batches`).

    A step that is done is written into `context.work`; a stream that finds finished steps there goes on after them.
    Several processes (`compress.blocks.sharing`) share the micro-batches; the first of them writes.
    """

    def __init__(
        self,
        model: StreamedModel,
        context: PassContext,
        *,
        float_too: bool = False,
        data: bool = True,
        readings_outside: bool = True,
        offload: bool = False,
        compute: Literal["float32", "bfloat16"] = "float32",
        rows: int | None = None,
    ) -> None:
        self.model, self.context = model, context
        self.float_too, self.data = float_too and data, data
        self.compute = getattr(torch, compute)
        self.timings: list[dict[str, Any]] = []
        self._folder, self._owner = _work_folder(context.work)
        self._offload, self._rows = offload, rows
        self._plan = planned(model, data, readings_outside)
        self._said: list[Said] = []

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Generator[BlockStep, None, None]:
        self._said = self._finished()
        done = len(self._said)
        if done:
            self.context.log(f"{done} of {len(self._plan)} blocks are done already; going on after them")
        if done < len(self._plan):
            with self._activations() as holder:
                work = Work(self.model, self._batches(), holder, self.float_too, self.compute)
                for one in self.context.progress(self._plan, "blocks"):
                    if one.index < done:
                        work.replay(one, self._said[one.index].path)
                    else:
                        yield from self._step(work, one)
        self._said = finished_steps(self._folder, len(self._plan))

    def result(self) -> PassResult:
        """The model as the steps left it, and what they said. RuntimeError before the last step is done."""
        if len(self._said) < len(self._plan):
            raise RuntimeError("the stream was not worked through")
        return result_of(self.model, self._said, self._owner)

    def _step(self, work: Work, one: Planned) -> Iterator[BlockStep]:
        started = time.perf_counter()
        step = work.open(one)
        yield step
        if one.feeds_more:
            work.advance(step)
        timing = {"seconds": round(time.perf_counter() - started, 3), "peak_rss_mib": peak_rss_mib()}
        path = self._write(one, step, timing)
        step.close()
        work.drop(path)
        self.timings.append({"name": one.name, **timing})
        self._check_memory(one.name)

    def _batches(self) -> list[MicroBatch] | None:
        """This process's share of the calibration data; None without data. PassError if there is none."""
        if not self.data:
            return None
        found = list(enumerate(micro_batches(self.context.batches, self.model.parameters, self._rows)))
        if not found:
            raise PassError("there is no calibration data; give the recipe a calibration set")
        return [batch for i, batch in found if share().mine(i)]

    @contextmanager
    def _activations(self) -> Iterator[Holder]:
        """Where activations are: in memory, or in a folder of this process that ends with the stream."""
        folder = self._folder / f"activations-{share().rank}"
        shutil.rmtree(folder, ignore_errors=True)  # a killed run's
        if not self._offload:
            yield Holder(None)
            return
        folder.mkdir()
        try:
            yield Holder(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _check_memory(self, name: str) -> None:
        """PassError where the process holds more than the recipe allows; what is finished stays."""
        allowed, held = self.context.memory_mib, rss_mib()
        if allowed is not None and held > allowed:
            raise PassError(
                f"{name}: {held:.0f} MiB are held after this block and limits.memory_gib allows {allowed:.0f}; "
                "finished blocks are kept: raise the limit, or take fewer or shorter calibration samples"
            )

    def _write(self, one: Planned, step: BlockStep, timing: Mapping[str, float]) -> Path:
        if share().rank == 0:
            write_step(self._folder, one.index, one.name, step.changes, timing)
        wait()
        return step_file(self._folder, one.index)

    def _finished(self) -> list[Said]:
        """The steps done by an earlier run, as the first process sees them, up to the first that is not whole."""
        found: list[Said] = []
        for one in self._plan:
            said = read_step(self._folder, one.index, one.name) if share().rank == 0 else None
            if said is None:
                break
            found.append(said)
        count = from_main(len(found))
        return finished_steps(self._folder, count) if count and not found else found


def planned(model: StreamedModel, data: bool = True, readings_outside: bool = True) -> list[Planned]:
    """The steps, in order."""
    structure = model.structure
    whole = [block.name for block in structure.blocks] == [""]
    steps: list[tuple[str, tuple[Reading, ...], int | None]] = [
        (block.name, block.readings, number) for number, block in enumerate(structure.blocks)
    ]
    if readings_outside and not whole and (structure.before or not data):
        steps.insert(0, (BEFORE, structure.before, None))
    if readings_outside and not whole and (structure.after or not data):
        steps.append((AFTER, structure.after, None))
    last = len(steps) - 1
    return [Planned(i, *step, feeds_more=data and step[2] is not None and i < last) for i, step in enumerate(steps)]


def result_of(model: StreamedModel, said: Sequence[Said], owner: Any = None) -> PassResult:
    """What a stream over `model` gave, from the records of its steps. `owner`: kept alive with the store."""
    schemes, scales, kv_scales = dict(model.schemes), dict(model.activation_scales), dict(model.kv_scales)
    measured: dict[str, dict[str, float]] = {}
    for one in said:
        schemes |= one.schemes
        scales |= one.activation_scales
        kv_scales |= one.kv_scales
        for layer, numbers in [*one.measured.items(), (one.name, one.timing)]:
            measured.setdefault(layer, {}).update(numbers)
    store = model.store.over([one.path for one in said], owner)
    after = replace(
        model,
        store=store,
        schemes={layer: scheme for layer, scheme in schemes.items() if store.is_quantized(layer)},
        activation_scales=scales,
        kv_scales=kv_scales,
    )
    decisions = tuple(decision for one in said for decision in one.decisions)
    return PassResult(after, decisions, tuple(note for one in said for note in one.notes), measured)


def rss_mib() -> float:
    """The memory that this process holds now, MiB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**20


def peak_rss_mib() -> float:
    """The most memory that this process has held, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


class _Temporary:
    """A folder that goes when nothing needs it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="compress-blocks-"))
        weakref.finalize(self, shutil.rmtree, self.path, True)


def _work_folder(named: Path | None) -> tuple[Path, _Temporary | None]:
    """Where finished steps go, and what keeps that folder; the first process decides for all."""
    named = from_main(named)
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        return named, None
    own = _Temporary() if share().rank == 0 else None
    return from_main(own.path if own is not None else None), own
