"""Working through a model block by block: each is read, worked on, written and dropped before the next one is read."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.blocks.activations import Holder, MicroBatch, micro_batches
from compress.blocks.block import BlockWork
from compress.blocks.blockfiles import Said, block_file, read_block, read_finished_blocks, write_block
from compress.blocks.device import room_for_activations
from compress.blocks.sharing import from_main, share, wait
from compress.blocks.work import AFTER, BEFORE, Planned, Work
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup
from compress.rounding.products import Compute

if TYPE_CHECKING:
    from compress.blocks.streamed import StreamedModel


class Stream:
    """The blocks of a model, for a pass to work on: `for block in stream: ...`, then `stream.result()`.

    With `data`, every block has the calls that reach it with everything before it as this pass left it; without, the
    weights alone. `float_too`: also what the float model gives at each block. `readings_outside`: also the layers
    outside the blocks that read something, as "before" and "after" (without `data` always). `offload`: activations
    between blocks lie on disk. `compute`: the type of products in forward passes; hidden states stay float32. `rows`:
    tokens that go through a block at once (see `micro_batches`). `tables`: also the part "before" where nothing in it
    but embeddings is to be worked on. `lazy`, without `data`: a weight is read when it is asked for, and dropped after
    that; modules stay empty.

    A block that is done is written into `context.work`; a stream that finds finished blocks there goes on after them.
    Several processes (`compress.blocks.sharing`) share the micro-batches; the first of them writes.
    """

    def __init__(
        self,
        model: StreamedModel,
        context: PassContext,
        *,
        float_too: bool = False,
        data: bool = True,
        input_groups_outside: bool = True,
        offload: bool = False,
        compute: Compute = "float32",
        rows: int | None = None,
        tables: bool = False,
        lazy: bool = False,
    ) -> None:
        self.model, self.context, self.lazy = model, context, lazy
        self.float_too, self.data = float_too and data, data
        self.compute, self.device = compute, torch.device(context.device)
        self.timings: list[dict[str, Any]] = []
        self._folder, self._owner = _open_work_folder(context.work)
        self._offload = offload
        self._rows = min((n for n in (rows, context.rows) if n is not None), default=None)
        self._plan = plan_blocks(model, data, input_groups_outside, tables)
        self._counted = len(self._plan)
        self._said: list[Said] = []

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Generator[BlockWork, None, None]:
        self._said = self._read_finished_blocks()
        done = len(self._said)
        if done:
            self.context.log(f"{done} of {len(self._plan)} blocks are done already; going on after them")
        if done < len(self._plan):
            if self.device.type != "cpu":
                torch.cuda.reset_peak_memory_stats(self.device)
            with self._open_holder() as holder:
                how = (self.float_too, self.compute, self.device, self.context.rows is None, self.lazy)
                work = Work(self.model, self._load_batches(), holder, *how)
                counted = self._plan[: self._counted]
                for entry in chain(self.context.progress(counted, "blocks"), self._plan[self._counted :]):
                    if entry.index < done:
                        work.replay(entry, self._said[entry.index].path)
                    else:
                        yield from self._run_block(work, entry)
        self._said = read_finished_blocks(self._folder, len(self._plan))
        if self.device.type != "cpu" and done < len(self._plan):
            taken = torch.cuda.max_memory_allocated(self.device) / 2**20
            self.context.log(f"at most {taken:.0f} MiB of {self.device} were taken")

    def result(self) -> PassResult[StreamedModel]:
        """Return the model as the blocks left it, and their records. RuntimeError before the last one is done."""
        if len(self._said) < len(self._plan):
            raise RuntimeError("the stream was not worked through")
        return result_of(self.model, self._said, self._owner)

    def _run_block(self, work: Work, entry: Planned) -> Iterator[BlockWork]:
        started = time.perf_counter()
        block = work.open(entry)
        yield block
        if entry.feeds_more:
            work.advance(block)
        timing = {"seconds": round(time.perf_counter() - started, 3), "peak_rss_mib": peak_rss_mib()}
        path = self._write_block(entry, block, timing)
        block.close()
        work.drop(path)
        self.timings.append({"name": entry.name, **timing})
        self._check_memory(entry.name)

    def _load_batches(self) -> list[MicroBatch] | None:
        """Return this process's share of the calibration data; None without data. PassError if the context has none."""
        if not self.data:
            return None
        batches = list(enumerate(micro_batches(self.context.batches, self.model.parameters, self._rows)))
        if not batches:
            raise PassError("there is no calibration data; give the recipe a calibration set")
        return [batch for i, batch in batches if share().mine(i)]

    @contextmanager
    def _open_holder(self) -> Iterator[Holder]:
        """Open what holds activations: memory, or a folder of this process that is removed as the context ends."""
        folder = self._folder / f"activations-{share().rank}"
        shutil.rmtree(folder, ignore_errors=True)  # a killed run's
        if not self._offload:
            yield Holder(None, room_for_activations(self.device) if self.context.rows is None else 0)
            return
        folder.mkdir()
        try:
            yield Holder(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _check_memory(self, name: str) -> None:
        """Raise PassError where the process holds more than the recipe allows; what is finished stays."""
        allowed, held = self.context.memory_mib, rss_mib()
        if allowed is not None and held > allowed:
            raise PassError(
                f"{name}: {held:.0f} MiB are held after this block and limits.memory_gib allows {allowed:.0f}; "
                "finished blocks are kept: raise the limit, or take fewer or shorter calibration samples"
            )

    def _write_block(self, entry: Planned, block: BlockWork, timing: Mapping[str, float]) -> Path:
        if share().rank == 0:
            write_block(self._folder, entry.index, entry.name, block.changes, timing)
        wait()
        return block_file(self._folder, entry.index)

    def _read_finished_blocks(self) -> list[Said]:
        """Read the blocks that an earlier run finished, up to the first damaged one, as the first process sees them."""
        records: list[Said] = []
        for entry in self._plan:
            record = read_block(self._folder, entry.index, entry.name) if share().rank == 0 else None
            if record is None:
                if block_file(self._folder, entry.index).with_suffix(".json").exists() and share().rank == 0:
                    self.context.log(
                        f"{entry.name}: what an earlier run left is damaged; it is discarded and done again"
                    )
                break
            records.append(record)
        count = from_main(len(records))
        return read_finished_blocks(self._folder, count) if count and not records else records


@contextmanager
def open_last_block(stream: Stream) -> Iterator[BlockWork]:
    """Yield a stream's last part, which gives logits, with all before it passed; nothing of it is held afterwards."""
    stream._counted -= 1  # what is left is told of the parts that are passed: the last is opened alone
    with closing(iter(stream)) as blocks:
        for _ in range(len(stream) - 1):
            next(blocks)
        head = next(blocks)
        yield head
        head.close()


def plan_blocks(
    model: StreamedModel, data: bool = True, input_groups_outside: bool = True, tables: bool = False
) -> list[Planned]:
    """Return the blocks of a stream over `model`, in order."""
    structure = model.structure
    whole = [block.name for block in structure.blocks] == [""]
    parts: list[tuple[str, tuple[InputGroup, ...], int | None]] = [
        (block.name, block.input_groups, number) for number, block in enumerate(structure.blocks)
    ]
    if input_groups_outside and not whole and (structure.before or tables or not data):
        parts.insert(0, (BEFORE, structure.before, None))
    if input_groups_outside and not whole and (structure.after or not data):
        parts.append((AFTER, structure.after, None))
    last = len(parts) - 1
    return [
        Planned(i, name, input_groups, number, feeds_more=data and number is not None and i < last)
        for i, (name, input_groups, number) in enumerate(parts)
    ]


def result_of(model: StreamedModel, said: Sequence[Said], owner: Any = None) -> PassResult[StreamedModel]:
    """Return the result of a stream over `model` from the records of its blocks. `owner`: kept alive with the store."""
    schemes, scales, kv_scales = dict(model.schemes), dict(model.activation_scales), dict(model.kv_scales)
    measured: dict[str, dict[str, float]] = {}
    for record in said:
        schemes |= record.schemes
        scales |= record.activation_scales
        kv_scales |= record.kv_scales
        for layer, numbers in [*record.measured.items(), (record.name, record.timing)]:
            measured.setdefault(layer, {}).update(numbers)
    store = model.store.over([record.path for record in said], owner)
    after = replace(
        model,
        store=store,
        schemes={layer: scheme for layer, scheme in schemes.items() if store.is_quantized(layer)},
        activation_scales=scales,
        kv_scales=kv_scales,
    )
    decisions = tuple(decision for record in said for decision in record.decisions)
    return PassResult(after, decisions, tuple(note for record in said for note in record.notes), measured)


def rss_mib() -> float:
    """Return the memory that this process holds now, MiB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * resource.getpagesize() / 2**20


def peak_rss_mib() -> float:
    """Return the most memory that this process has held, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


class _Temporary:
    """A folder that goes when nothing needs it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="compress-blocks-"))
        weakref.finalize(self, shutil.rmtree, self.path, True)


def _open_work_folder(named: Path | None) -> tuple[Path, _Temporary | None]:
    """Return the folder of finished blocks, and what keeps a temporary one; the first process decides for all."""
    named = from_main(named)
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        return named, None
    temporary = _Temporary() if share().rank == 0 else None
    return from_main(temporary.path if temporary is not None else None), temporary
