"""Run a command and say how much memory it took at most: RESULT COMMAND...

A process's ru_maxrss begins with the peak of the process that started it, even after exec; so a small one must start
what is measured. RESULT becomes {"code": exit code, "peak_bytes": the largest resident set of the command's processes}.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys


def main(result: str, *command: str) -> None:
    code = subprocess.run(command, check=False).returncode
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"code": code, "peak_bytes": peak_kib * 1024}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
