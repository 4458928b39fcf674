"""What clients may take of a server."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import UsageError

MIB = 2**20


@dataclass(frozen=True)
class ServingLimits:
    """What clients may take of the server."""

    max_body: int = 16 * MIB
    """Bytes of one request's body. All bodies together: eight times as many."""
    max_batch: int = 1024
    """Samples in one request."""
    max_connections: int = 128
    """At once; those beyond get 503."""
    request_timeout: float = 30.0
    """Seconds in which a request must have come whole, and an answer must be taken; idle connections end after it."""
    call_timeout: float = 300.0
    """Seconds in which the model must have answered a request; after it the server is not ready until it has."""
    drain_timeout: float = 25.0
    """Seconds that requests under way have after the signal to end."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 2**53:
                raise UsageError(f"{name} is {value}: give a number above 0")
