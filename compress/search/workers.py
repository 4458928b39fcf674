"""Processes that do a study's trials, and what is said to them: in this one, in several here, on a Ray cluster.

Whoever builds in parallel judges afterwards, one bundle after another with nothing beside it: two timings at once
would measure each other. So a wave of trials is built first, each in a process of its own, and then each is judged.
Nothing here imports torch: the study itself needs none.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from runtime.bundle.records import from_json, to_json
from runtime.errors import MissingDependency, RuntimeFailure, UsageError
from runtime.processes.interrupts import Terminated, end_orderly
from runtime.processes.isolated import FOLLOW_PARENT, last_line, python_command, python_environment

STARTED = "from compress.search.workers import answer_orders; answer_orders({work!r})"
USUAL_WORK = "compress.search.trying:obey"
"""module:function that answers an order in the process that got it, both as JSON values."""


def find_work(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that `USUAL_WORK` or its like names."""
    module, _, function = name.partition(":")
    work: Callable[[dict[str, Any]], dict[str, Any]] = getattr(import_module(module), function)
    return work


@dataclass(frozen=True)
class TrialOrder:
    """What a process is told to do: `do` "build" or "judge" the bundle at `out`.

    "start": the first `n_passes` alone, so that the cache has what they give, and no bundle.
    `recipe`: the file with the explicit recipe, of which `share` is done. `seconds`: what is left of the budget.
    `refuse`: a build that is foreseen to take longer, or to leave a file far from a gate, is not begun. `judging_s`:
    what judging takes, where that is known and need not be foreseen. `timed`: the plan forecasts speed, which times an
    ONNX file. `notes`: of the build, for the report. "twin" and "explain" are of `compress bench`.
    """

    do: Literal["start", "build", "judge", "twin", "explain"]
    out: str
    recipe: str = ""
    cache: str | None = None
    share: float = 1.0
    racing: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    n_passes: int = 0
    notes: tuple[str, ...] = ()
    refuse: bool = True
    judging_s: float | None = None
    timed: bool = True


@dataclass(frozen=True)
class TrialAnswer:
    """What came of an order. `state`: refused before any work, late (not begun: no time is left), failed, or done.

    `stop`: the failure is the disk's or the place's, which no other trial escapes. `report`: of a judgement, as JSON.
    `stages`: the seconds of each part of the work.
    """

    state: Literal["done", "refused", "late", "failed"]
    reason: str = ""
    seconds: float = 0.0
    host: str = ""
    notes: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    foreseen: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    stop: bool = False
    stages: dict[str, float] = field(default_factory=dict)


class Workers(Protocol):
    """Who does the work of trials. `n`: how many build at once."""

    n: int

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        """Build bundles, several at once; None for those that the deadline (`time.monotonic`) cut off."""
        ...

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer | None:
        """Judge a bundle on this machine, with no other work of the study beside it."""
        ...


def answer_orders(work: str) -> None:
    """Answer orders by the function `work` (module:name) until there are no more.

    What it prints goes to stderr, the study's log of workers.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        with end_orderly():
            obey = find_work(work)
            for line in sys.stdin:
                answers.write(json.dumps(obey(json.loads(line))) + "\n")
                answers.flush()
    except (KeyboardInterrupt, Terminated):  # the study ends; finished work is in the cache
        sys.exit(143)


class InThisProcess:
    """Does one after another right here; a deadline is seen only between two of them."""

    n = 1

    def __init__(self, work: str = USUAL_WORK) -> None:
        self.work = work

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        return [self.judge(order, deadline) for order in orders]

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer | None:
        if deadline is not None and time.monotonic() > deadline:
            return None
        return _read_answer(find_work(self.work)(to_json(order)))


class LocalProcesses(AbstractContextManager["LocalProcesses"]):
    """Keeps `n` processes of this machine; one that crashes is an answer, and another takes its place.

    `log`: the file that gets what they print. `work`: what answers an order in them (`USUAL_WORK`).
    """

    def __init__(self, n: int, log: Path, work: str = USUAL_WORK) -> None:
        self.n = n
        self.log = log
        self.work = work
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        answers: list[TrialAnswer | None] = [None] * len(orders)
        waiting = list(enumerate(orders))[::-1]
        under_way: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by the handle of its answers
        while waiting or under_way:
            while waiting and len(under_way) < self.n:
                number, order = waiting.pop()
                process = self._send(order)
                assert process.stdout is not None
                under_way[process.stdout.fileno()] = number, process
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready = wait(list(under_way), left)
            if not ready:  # out of time: finished results are in the cache, and long work keeps what it has
                self._end([process for _, process in under_way.values()])
                break
            for handle in [handle for handle in under_way if handle in ready]:
                number, process = under_way.pop(handle)
                answers[number] = self._receive(process)
        return answers

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer | None:
        return self.build([order], deadline)[0]

    def _send(self, order: TrialOrder) -> subprocess.Popen[bytes]:
        process = self._idle.pop() if self._idle else self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; reading says so
            process.stdin.write(json.dumps(to_json(order)).encode() + b"\n")
            process.stdin.flush()
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        environment = python_environment()
        if self.n > 1:  # each takes its share of the processors
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // self.n, 1)))
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                python_command(FOLLOW_PARENT + STARTED.format(work=self.work)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the study, which ends them
            )
        self._all.append(process)
        return process

    def _receive(self, process: subprocess.Popen[bytes]) -> TrialAnswer:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            self._idle.append(process)
            return _read_answer(json.loads(line))
        self._end([process])
        said = last_line(self.log.read_text(errors="replace"))
        return TrialAnswer("failed", f"its process ended with {_name_ending(process.returncode)}; it said last: {said}")

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20.0)  # to put its files in order
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._all.remove(process)
            if process in self._idle:
                self._idle.remove(process)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(list(self._all))


def _name_ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _read_answer(answer: dict[str, Any]) -> TrialAnswer:
    return from_json(TrialAnswer, answer, "answer")


class RayCluster(AbstractContextManager["RayCluster"]):
    """Builds on a Ray cluster and judges on the machine that called: times of different machines do not compare.

    Bundles come back through Ray. Every node needs this package at the same version, and the recipe's files under the
    same paths; each keeps its own cache, or all one that they share (COMPRESS_CACHE).
    """

    def __init__(self, address: str, n: int | None, log: Path) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency("ray", "trials on a Ray cluster") from error
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            options: dict[str, Any] = {"num_cpus": n} if address == "local" and n else {}
            try:
                ray.init(address=address, include_dashboard=False if address == "local" else None, **options)
            except Exception as error:  # Ray has no error of its own for what does not start or answer
                why = last_line(str(error))
                raise RuntimeFailure(f"--ray {address}: no Ray cluster answers there: {why}") from error
        self.n = n or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        self._local = LocalProcesses(1, log)

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=0)(build_remotely)
        answers: list[TrialAnswer | None] = [None] * len(orders)
        waiting = {remote.remote(to_json(order)): i for i, order in enumerate(orders)}
        while waiting:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not ready:
                for reference in waiting:
                    ray.cancel(reference, force=True)
                break
            number = waiting.pop(ready[0])
            answers[number] = self._receive(ready[0], Path(orders[number].out))
        return answers

    def _receive(self, reference: Any, out: Path) -> TrialAnswer:
        try:
            answer, packed = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return TrialAnswer("failed", f"its Ray task ended: {last_line(str(error))}")
        if packed:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(out, filter="data")
        return _read_answer(answer)

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer | None:
        return self._local.judge(order, deadline)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.__exit__(kind, error, trace)
        if self._ours:
            self._ray.shutdown()


def build_remotely(order: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Build a bundle in a folder of this node's own; return the answer, and the bundle as a tar file."""
    from compress.store.durable import temporary_folder

    with temporary_folder() as folder:
        answer = find_work(USUAL_WORK)({**order, "out": str(folder / "bundle")})
        packed = io.BytesIO()
        if (folder / "bundle").is_dir():
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(folder / "bundle", arcname=".")
        return answer, packed.getvalue()


@contextmanager
def start_workers(held: str, jobs: int, ray: str | None, log: Path, work: str = USUAL_WORK) -> Iterator[Workers]:
    """Yield who does the trials: this process (jobs 0), `jobs` processes, or a Ray cluster with `jobs` at once.

    `held`: what of the recipe this process alone has (`Recipe.held`), which is tried here. UsageError where others were
    asked for.
    """
    if held and (ray is not None or jobs > 1):
        raise UsageError(
            f"{held}: was given as an object, which other processes do not have: build one trial at a time, or "
            "give a factory that they can import, python:FILE.py:FACTORY, and data as files"
        )
    if ray is not None:
        with RayCluster(ray, jobs or None, log) as cluster:
            yield cluster
    elif jobs == 0 or held:
        yield InThisProcess(work)
    else:
        with LocalProcesses(jobs, log, work) as processes:
            yield processes
