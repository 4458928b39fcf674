"""SIGTERM at several instants of an `apply`: it ends in order, and nothing of it is left but its log and its cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from makers import changed, write_recipe

HARNESS = '''
"""Runs `compress apply`, forked from a process that has imported what it needs, and ends it once it says a word."""
import json, os, signal, sys

import compress.cli
from compress.execution import run as runner
from compress.store import run_log

run_log.LEAST_SHOWN_S = 0  # of a tiny model every stage is short
arguments, words, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), []
for word in words:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writable, 2)
        sys.argv = ["compress", *arguments]
        try:
            compress.cli.main()
        except SystemExit as end:
            os._exit(end.code or 0)
        finally:
            os._exit(99)
    os.close(writable)
    said = ""
    with open(readable, encoding="utf-8") as lines:
        for line in lines:
            said += line
            if line.startswith(word):
                os.kill(child, signal.SIGTERM)
    out.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said])
print(json.dumps(out))
'''
WORDS = ("loading data", "int8:", "writing the bundle")
"""What the log says as each instant comes; in the last one the judging's child processes begin."""


@pytest.mark.skipif(sys.platform != "linux", reason="the harness forks a process that has imported torch")
def test_sigterm_leaves_nothing(net: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, recipe = net
    file = write_recipe(folder / "terminated.yaml", changed(recipe, name="terminated"))
    temporary, place = tmp_path / "temporary", tmp_path / "place"
    temporary.mkdir()
    arguments = ["apply", str(file), "--out", str(place / "b"), "--cache", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, json.dumps(arguments), json.dumps(WORDS)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
    )
    ends = json.loads(done.stdout.splitlines()[-1])
    assert [code for code, _ in ends] == [128 + signal.SIGTERM] * len(WORDS), done.stderr
    assert all("stopped; finished work is kept" in said and "Traceback" not in said for _, said in ends)
    assert list(temporary.iterdir()) == []
    assert [path.name for path in place.iterdir() if not path.name.endswith("compress.log")] == []
