"""What a peer of a language model is asked, and where it answers: one JSON file each way. Standard library only.

A peer's script is called with the job's file. It writes job["result"], a JSON object; what a model needs more room for
goes to files that the job names too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def read_job() -> Job:
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return job


def write_result(job: Job, **result: Any) -> None:
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


def peak_bytes() -> int:
    """The most resident memory that this program ever had (Linux). ru_maxrss would count the starting process too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024
