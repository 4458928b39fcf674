"""Python in a process of its own: a broken installation may crash the one that loads it, and memory is told apart.

No child looks modules up in the working directory, which may be a bundle's folder (`runtime.processes.search_path`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from runtime.processes.search_path import HOME, holds_bundle, keep_trusted

SECONDS = 120
"""After them an isolated call that hangs is ended."""
FOLLOW_PARENT = """\
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it outlives no parent that was killed
"""
"""Only where the caller waits: the parent that counts is the thread that started the child."""


def python_command(code: str, *arguments: str) -> list[str]:
    """Return a command line that runs `code` with the modules that this process finds, except the working directory's.

    `arguments` are its sys.argv[1:].
    """
    search = keep_trusted([os.fspath(entry) for entry in sys.path])
    if HOME not in search and not holds_bundle(HOME):  # it was found by a relative path
        search.append(HOME)
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {search!r}\n{code}", *arguments]


def python_environment() -> dict[str, str]:
    """Return the environment of such a command: its own children are kept out of the working directory, too."""
    named = keep_trusted(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(named), "PYTHONSAFEPATH": "1"}


def start_python(
    code: str, *arguments: str, given: str = "", seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run `code` to its end, with `given` on its stdin; return what it wrote. TimeoutExpired after `seconds`."""
    return subprocess.run(
        python_command(FOLLOW_PARENT + code, *arguments),
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        env=python_environment(),
        check=False,
    )


def trouble(code: str) -> str:
    """Return "" if the code runs, else what it says last."""
    return run(code)[0]


def run(code: str) -> tuple[str, str]:
    """Run the code; return (what went wrong, "" if nothing did; what the code printed)."""
    try:
        done = start_python(code)
    except subprocess.TimeoutExpired:
        return f"did not answer within {SECONDS} s", ""
    if done.returncode < 0:
        return f"crashed (signal {-done.returncode})", done.stdout
    why = "" if done.returncode == 0 else (_strip_error_name(last_line(done.stderr)) or f"exit code {done.returncode}")
    return why, done.stdout


def _strip_error_name(line: str) -> str:
    """Strip the name of an error of ours: its text is a sentence for people."""
    return re.sub(r"^runtime\.errors\.\w+: ", "", line)


def last_line(text: str) -> str:
    """Return the last line that holds anything; "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
