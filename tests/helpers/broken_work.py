"""What processes of a study do that never answer. It imports nothing: they start as fast as Python."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NoReturn


def crash(order: dict[str, Any]) -> NoReturn:
    print("illegal instruction", file=sys.stderr, flush=True)
    os._exit(7)


def sleep(order: dict[str, Any]) -> None:
    time.sleep(600)
