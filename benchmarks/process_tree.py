"""A command with all processes that it starts: how long it runs, and the memory of all of them together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, say

SAMPLED_S = 0.1


@dataclass(frozen=True)
class Run:
    """One process that ran, or was killed. `samples`: (seconds since its start, bytes of its whole tree)."""

    code: int
    seconds: float
    samples: Sequence[tuple[float, int]]

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that the tree held at once."""
        return max((n_bytes for _, n_bytes in self.samples), default=0)


def run_tree(command: Sequence[str], stop: Callable[[], bool] = lambda: False) -> Run:
    """Run a command; kill it and its children as soon as `stop` says so."""
    start, samples = time.perf_counter(), list[tuple[float, int]]()
    child = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True)
    while child.poll() is None:
        samples.append((time.perf_counter() - start, tree_bytes(child.pid)))
        if stop():
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            say(f"killed after {time.perf_counter() - start:.0f} s")
            break
        time.sleep(SAMPLED_S)
    return Run(child.returncode, time.perf_counter() - start, samples)


def tree_bytes(pid: int) -> int:
    """Return the resident bytes of a process and all that it started, pages of mapped files among them."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            pages = int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
        resident[int(folder.name)] = pages * os.sysconf("SC_PAGE_SIZE")
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        total += resident.get(one, 0)
        waiting += children.get(one, [])
    return total
