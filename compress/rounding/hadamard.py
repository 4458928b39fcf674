"""Orthogonal matrices that spread outliers over all channels, and their fast products.

A Hadamard matrix has entries +-1 and orthogonal rows. Sylvester's construction gives 2^k; the two of R. E. A. C. Paley
(On orthogonal matrices, 1933) give q + 1 for primes q = 3 mod 4 and 2 (q + 1) for primes q = 1 mod 4: 12, 20, 28, ...
Their Kronecker products cover the widths that models have; what is left gets a random orthogonal factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """Q = diag(signs) (core x Sylvester's 2^power) / sqrt(n), orthogonal, [n, n]; float64.

    `signs` [n]; `core` [m, m] with orthogonal rows of length sqrt(m). `hadamard`: all entries of Q have one size.
    """

    signs: Tensor
    core: Tensor
    power: int
    hadamard: bool

    @property
    def size(self) -> int:
        return len(self.signs)

    def turn(self, x: Tensor) -> Tensor:
        """Return x Q along the last dimension, [..., n] -> [..., n], computed in float64 and given in x's type."""
        shape = x.shape
        signs, core = self.signs.to(x.device), self.core.to(x.device)
        y = (x.to(torch.float64) * signs).reshape(-1, len(self.core), 1 << self.power)
        if len(self.core) > 1:
            y = torch.einsum("bmp,mk->bkp", y, core)
        return (_multiply_sylvester(y) / self.size**0.5).reshape(shape).to(x.dtype)

    def matrix(self) -> Tensor:
        """Return Q itself, float64 [n, n]."""
        return self.turn(torch.eye(self.size, dtype=torch.float64))


def orthogonal(size: int, seed: int = 0) -> Orthogonal:
    """Return the rotation of `size` channels, the same for the same arguments.

    Random signs stand before the Hadamard matrix. Where none of these constructions gives one of that size, the odd
    part of it is a random orthogonal matrix (`.hadamard` is False).
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).to(torch.float64) * 2 - 1
    power = (size & -size).bit_length() - 1
    odd = size >> power  # size = odd * 2^power
    core, left = _find_core(odd, power)
    if core is not None:
        return Orthogonal(signs, core, left, True)
    # uniform over all orthogonal ones: F. Mezzadri, How to generate random matrices, 2007
    q, r = torch.linalg.qr(torch.randn((odd, odd), generator=generator, dtype=torch.float64))
    return Orthogonal(signs, (q * r.diagonal().sign()) * odd**0.5, power, False)


def _find_core(odd: int, power: int) -> tuple[Tensor | None, int]:
    """Return the smallest Hadamard matrix of size odd * 2^j or None, and how many factors of two are left."""
    if odd == 1:
        return torch.ones((1, 1), dtype=torch.float64), power
    for j in range(2, power + 1):
        if (matrix := paley(odd << j)) is not None:
            return matrix, power - j
    return None, power


def paley(size: int) -> Tensor | None:
    """Return a Hadamard matrix [size, size] of +-1 (float64) by Paley's constructions; None if neither gives one."""
    # the product with one of Paley's matrices is dense
    if size > 1024:
        return None
    q = size - 1
    if q % 4 == 3 and _is_prime(q):
        skew = _build_bordered(q, -1.0)
        return skew + torch.eye(size, dtype=torch.float64)
    q = size // 2 - 1
    if size % 2 == 0 and q % 4 == 1 and _is_prime(q):
        one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(_build_bordered(q, 1.0), one) + torch.kron(torch.eye(q + 1, dtype=torch.float64), other)
    return None


def _build_bordered(q: int, sign: float) -> Tensor:
    """Return [[0, 1], [sign, X]] with X[i, j] = 1, -1 or 0 as i - j is a square modulo q, is none, or is zero."""
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[torch.arange(1, q) ** 2 % q] = 1.0
    character[0] = 0.0
    index = torch.arange(q)
    out = torch.zeros((q + 1, q + 1), dtype=torch.float64)
    out[0, 1:], out[1:, 0] = 1.0, sign
    out[1:, 1:] = character[(index[:, None] - index[None, :]) % q]
    return out


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _multiply_sylvester(x: Tensor) -> Tensor:
    """Return the unnormalised Walsh-Hadamard transform of the last dimension, whose length is a power of two."""
    length, half = x.shape[-1], 1
    while half < length:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
        half *= 2
    return x
