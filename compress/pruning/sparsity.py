"""How many weights of a layer become zero: a share of them, or all but N of each M inputs. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Sparsity:
    """`share`: of the weights, those that become zero. With `group` > 0: all but `kept` of each `group` inputs."""

    share: float
    kept: int = 0
    group: int = 0

    @classmethod
    def of(cls, pattern: str) -> Sparsity:
        """Parse "N:M", where N of each M stay. ValueError unless 1 <= N < M."""
        match = re.fullmatch(r"(\d+):(\d+)", pattern)
        kept, group = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= kept < group:
            raise ValueError(f"{pattern!r} is no pattern: N:M keeps N of each M inputs, 1 <= N < M, such as '2:4'")
        return cls(1 - kept / group, kept, group)

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}" if self.group else f"{self.share:.4g}"

    def count(self, n: int) -> int:
        """Return how many of `n` weights become zero."""
        return round(self.share * n)
