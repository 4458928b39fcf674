"""A process that does trials: orders come in on stdin, answers go out, one JSON document a line."""

from __future__ import annotations

import json
import os
import sys

from compress.search.orders import find_work
from runtime.processes.interrupts import Terminated, end_orderly


def main(work: str) -> None:
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
