"""What a model computes of known sizes is known while it runs by shapes alone, and while it is exported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.export.decoder import shapes_alone
from compress.export.known_values import KnownValues, in_earnest

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slices": lambda x, grid: x[: grid[0], : grid[1] // 2],
    "sizes": lambda x, grid: x.view(grid[0], grid[1] // 2, 2),
    "a list of sizes": lambda x, grid: torch.nn.functional.interpolate(x[None, None], size=(grid[1], grid[0]))[0, 0],
    "numbers": lambda x, grid: x[:, : sum(grid.tolist()) // 4],
    "a mask": lambda x, grid: x[torch.arange(4) < grid[0] - 1],
    "what is chosen of counted places": lambda x, grid: x[:, torch.repeat_interleave(torch.arange(2), grid[:1])],
    "joined with what is not known": lambda x, grid: torch.stack([x.sum(), grid[0].float()]),
}


@pytest.mark.parametrize("use", USES)
def test_code_looks_at_sizes_that_are_known(use: str) -> None:
    grid, values = torch.tensor([4, 6]), torch.randn(4, 6)
    wanted = USES[use](values, grid)
    with shapes_alone(), torch.no_grad():
        unknown = torch.empty(4, 6)
        with KnownValues():
            got = USES[use](unknown, grid)
    assert got.shape == wanted.shape

    class Uses(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with KnownValues():
                return USES[use](x, grid)

    program = torch.export.export(Uses(), (values,))
    assert torch.equal(program.module()(values), wanted)


def test_tensors_made_in_earnest_keep_their_values() -> None:
    with shapes_alone(), in_earnest():
        assert torch.tensor([3]).item() == 3
