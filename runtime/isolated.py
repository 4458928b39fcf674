"""A piece of Python tried in a process of its own: a broken installation may crash the one that loads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SECONDS = 120


def trouble(code: str) -> str:
    """ "" if the code runs, else what it says last."""
    return run(code)[0]


def run(code: str) -> tuple[str, str]:
    """(what went wrong, "" if nothing did; what the code printed)."""
    home = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": search},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {SECONDS} s", ""
    if done.returncode < 0:
        return f"crashed (signal {-done.returncode})", ""
    why = "" if done.returncode == 0 else (_said(last_line(done.stderr)) or f"exit code {done.returncode}")
    return why, done.stdout


def _said(line: str) -> str:
    """Without the name of an error of ours: its text is a sentence for people."""
    return re.sub(r"^runtime\.errors\.\w+: ", "", line)


def last_line(text: str) -> str:
    """The last that holds anything; "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
