"""Start child processes of tests: fresh ones by `SEARCH_PATH`, and ones that need not import torch again.

The latter are forked from a server that has imported what they share and has no threads (`multiprocessing`'s, one for
each pytest process, started when it is first needed). What a child does is a top-level function of a test's module.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from runpy import run_module, run_path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from unittest import mock

from places import HELPERS, ROOT

ROOMS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})
SEARCH_PATH = os.pathsep.join((str(ROOT), str(HELPERS), *ROOMS))
"""`PYTHONPATH` of a child process; the pytest option `pythonpath` holds for this process alone."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH}
PRELOADED = [
    "torch._dynamo",  # optimizers import it
    "exported_once",  # of 2.1 s of a child's first export 1.6
    "pytest",
    "hypothesis",
    "streaming",
    "distilling",
    "compress.execution.run",
    "compress.work.autoround",
    "compress.work.sparsify",
    "compress.work.tune",
]
TIMEOUT_SECONDS = 300.0


@contextmanager
def start_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Iterator[BaseProcess]:
    """Run a function in a forked process, with one torch thread; yields the process, which is killed on exit.

    Its environment is that of the server, whatever a test has set since, with `environment` on top. All processes of
    one server have one hash seed and one state of numpy's global random generator, which those of `torchrun` have not.
    """
    process = _server().Process(target=_work, args=(function, arguments, dict(environment or {})), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a forked process and return what it returns.

    Raises AssertionError with the function's traceback.
    """
    return _run(function, arguments, [{}])[0]


def run_in_two_processes(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function in two forked processes with the environment of a `torchrun` launch; return what each returns.

    Raises AssertionError with the traceback of the one that fails first; the other is killed.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as in torchrun, of the launcher
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
    }
    return _run(function, arguments, [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")])


def run_python(*words: object, cwd: Path, environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Do what `python WORDS` does in a folder: -m MODULE, -c CODE or FILE, and arguments; stdin is empty.

    What others wrote (torch, transformers, onnxruntime) may be imported already, of our packages nothing is.
    `environment`: all of it; None for this process's own.
    """
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        call = [str(word) for word in words]
        with start_process(
            _interpret, call, cwd, dict(os.environ if environment is None else environment), outputs
        ) as it:
            it.join(TIMEOUT_SECONDS)
            assert it.exitcode is not None, f"{call}: takes over {TIMEOUT_SECONDS:.0f} s"
            return CompletedProcess(call, it.exitcode, *(path.read_text() for path in outputs))


class ForkedKernel:
    """A Jupyter kernel in a forked process: of a `Popen` what jupyter_client asks of one."""

    stdin = stdout = stderr = None

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def forked_kernels() -> Iterator[None]:
    """Start Jupyter's kernels as `run_python` starts Python."""
    with ExitStack() as stack:

        def launch(command: list[str], cwd: str, env: dict[str, str], **more: Any) -> ForkedKernel:
            process = stack.enter_context(start_process(_serve_kernel, command[1:], Path(cwd), env))
            while os.getpgid(process.pid) != process.pid:  # what ends a kernel ends its group
                time.sleep(0.001)
            return ForkedKernel(process)

        with mock.patch("jupyter_client.provisioning.local_provisioner.launch_kernel", launch):
            yield


def _serve_kernel(words: list[str], cwd: Path, environment: dict[str, str]) -> None:
    os.setsid()
    _interpret(words, cwd, environment, [])


def _interpret(words: list[str], cwd: Path, environment: dict[str, str], outputs: list[Path]) -> None:
    for handle, path in enumerate(outputs, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), handle)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("compress", "runtime")]:
        del sys.modules[name]
    kind = words.pop(0) if words[0] in ("-m", "-c") else ""
    first = {"-m": str(cwd), "-c": ""}.get(kind) or str(Path(words[0]).parent)
    search = environment.get("PYTHONPATH", "").split(os.pathsep)
    ours = {*map(os.path.abspath, ENVIRONMENT["PYTHONPATH"].split(os.pathsep)), ""}
    # The root last: an editable install puts it there, which the server, that had it already, does not show.
    sys.path[:] = [first, *filter(None, search), *(path for path in sys.path if path not in ours), str(ROOT)]
    if kind == "-m":
        sys.argv = words
        run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(words[0], {"__name__": "__main__"})
    else:
        sys.argv = words
        run_path(words[0], run_name="__main__")


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], environments: list[dict[str, str]]) -> list[Any]:
    """Run a function in one process for each environment, all at once; return their results, in that order."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    results: list[Any] = [None] * len(environments)
    with ExitStack() as stack:
        processes: list[BaseProcess] = []
        answers: dict[Connection, int] = {}
        for rank, environment in enumerate(environments):
            ours, theirs = (stack.enter_context(end) for end in _server().Pipe(duplex=False))
            start = start_process(_answer, theirs, function, arguments, environment=environment)
            processes.append(stack.enter_context(start))
            theirs.close()  # so that its end is heard
            answers[ours] = rank
        while answers:
            ready = wait(list(answers), deadline - time.monotonic())
            assert ready, f"{function.__name__}: processes {[*answers.values()]} take over {TIMEOUT_SECONDS:.0f} s"
            for ours in ready:
                rank = answers.pop(ours)
                try:
                    results[rank], problem = pickle.loads(ours.recv_bytes())
                except EOFError:
                    processes[rank].join()
                    problem = f"ended with {processes[rank].exitcode}"
                assert not problem, f"{function.__name__} in process {rank}: {problem}"
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 1))
            assert process.exitcode == 0, f"{function.__name__} in process {rank}: ended with {process.exitcode}"
    return results


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    """Run a function as the whole of this process, which ends as others do: with what was registered for its end."""
    import torch

    atexit._clear()  # of the server
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()


def _answer(answer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Send (what a function returns, "") or (None, its traceback)."""
    try:
        found = function(*arguments)
    except BaseException:
        answer.send((None, traceback.format_exc()))
        raise
    answer.send_bytes(pickle.dumps((found, "")))  # tensors by value; `send` would share their memory


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
