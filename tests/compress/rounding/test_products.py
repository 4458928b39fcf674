"""Products in bfloat16: float32 comes in and out, whether sums are kept in float32 or rounded, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress.rounding import gram, products
from compress.rounding.gram import Gram, shrink_correlations
from compress.rounding.layer_products import LayersBy, layers_in, multiply_by_onednn
from compress.rounding.products import add_product, multiply

FACTOR, ONCE, TWICE = 2**-8, 0.0027, 0.0033
"""What rounding takes off a factor at most; of a product, whose factors are rounded, or it too, in its mean square."""


@pytest.fixture(params=[False, True], ids=["this processor", "no sums in float32"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products come out in bfloat16, as where a processor has no AMX."""
    if request.param:
        monkeypatch.setattr(products, "_cpu_keeps_sums", lambda: False)
    return products.rounds_sums("bfloat16", "cpu")


@pytest.fixture
def factors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(48, 512, generator=draw), torch.randn(64, 512, generator=draw)


def error(product: Tensor, left: Tensor, right: Tensor) -> float:
    exact = left.double() @ right.double().T
    return float((product - exact).norm() / exact.norm())


def test_factors_are_rounded(narrow: bool, factors: tuple[Tensor, Tensor]) -> None:
    left, right = factors
    product = multiply(left, right.T, "bfloat16")
    assert product.dtype == torch.float32
    assert FACTOR / 4 < error(product, left, right) < (TWICE if narrow else ONCE)
    assert torch.equal(multiply(left, right.T, "float32"), left @ right.T)
    total = torch.ones_like(product)
    add_product(total, left, right.T, "bfloat16")
    torch.testing.assert_close(total, product + 1)


@pytest.mark.usefixtures("narrow")
def test_layers_are_linear_ones_of_float32(factors: tuple[Tensor, Tensor]) -> None:
    left, right = factors
    layer, half = nn.Linear(512, 64), nn.Linear(512, 64).bfloat16()
    layer.weight = nn.Parameter(right)
    with layers_in("bfloat16", "cpu"):
        out = layer(left)
        assert half(left.bfloat16()).dtype == torch.bfloat16
    assert error((out - layer.bias).detach(), left, right) < TWICE
    out.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer(left), nn.functional.linear(left, right, layer.bias))


def test_gram_matrices_stay_positive(narrow: bool, factors: tuple[Tensor, Tensor]) -> None:
    """Of rows that nearly agree, which float32 tells apart; of many rows for each input sums are float32's."""
    rows = 1 + 0.01 * torch.cat(factors).T  # 512 rows that read 112 inputs
    few = rows[:, :4]
    assert len(few) ** 2 > gram.MOST_ROUNDED * 4
    plain, rounded, kept, long = Gram(112), Gram(112, "bfloat16"), Gram(4), Gram(4, "bfloat16")
    for part in rows.split(64):
        plain.add(part)
        rounded.add(part)
    exact, coarse = plain.mean()[0], rounded.mean()[0]
    assert FACTOR / 100 < float((coarse - exact).norm() / exact.norm()) < FACTOR
    assert float(torch.linalg.eigvalsh(shrink_correlations(coarse, len(rows))).min()) > 0
    kept.add(few)
    long.add(few)
    assert torch.equal(kept.mean()[0], long.mean()[0]) is narrow


def test_layers_by_another_library_are_the_same(factors: tuple[Tensor, Tensor]) -> None:
    left, right = factors
    bias = torch.arange(64.0)
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no such operator")
    with LayersBy(multiply_by_onednn):
        out = nn.functional.linear(left[None], right, bias=bias)
    torch.testing.assert_close(out, nn.functional.linear(left[None], right, bias), rtol=1e-5, atol=1e-4)
