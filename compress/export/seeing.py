"""What of a model sees, as a graph of its own: one image's pixels to the features that its decoder reads.

No family's modules are looked for. The model's forward pass is run on what its processor makes of an image, and its
`get_image_features` listened to: what that is given is what sees, and what it gives comes to the decoder's graph as
inputs. All that is done with features, the model's own code does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from compress.blocks.untouched import leave_untouched
from compress.data.sight import WAY_OUT, Sight
from compress.errors import NotExportable
from compress.export.image_positions import ImagePositions, fit_positions
from compress.export.known_values import KnownValues, in_earnest
from compress.export.onnx import Weight, export_program, silence
from compress.models.processor import IDS, MASK
from runtime.bundle.manifest import IMAGE_FEATURES

LOOK = "get_image_features"
"""How transformers calls what makes features of images."""
CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""The variable of the environment by which it checks no values."""
THREE_AXES = "get_rope_index"
"""And what counts positions by where images lie and how large they are."""


class _Heard(Exception):
    """The model has called what is listened to: how is all that is wanted of its forward pass."""


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""


@dataclass(frozen=True)
class Asked:
    """A call of `get_image_features`. `look`: that method; `given`: its arguments, with `pixels` among them."""

    part: nn.Module
    look: Callable[..., Any]
    given: Given
    pixels: Tensor

    def repeat(self, pixels: Tensor) -> Any:
        """Return what the call gives of other pixels."""
        leaves, tree = tree_flatten(self.given)
        args, kwargs = tree_unflatten([pixels if leaf is self.pixels else leaf for leaf in leaves], tree)
        with _leave_unchecked(), KnownValues():
            return self.look(*args, **kwargs)


@dataclass(frozen=True)
class Tower:
    """What of a model sees. `part`: has `get_image_features`; `tree`: of what that gives.

    `leaves`: what is in that, of tensors their shapes; `rows`: the numbers of those that have a row for each token of
    an image. The decoder gets no other tensor. `positions`: how they go on there; None: as in a text.
    """

    part: nn.Module
    tree: TreeSpec
    leaves: tuple[Any, ...]
    rows: tuple[int, ...]
    sight: Sight
    positions: ImagePositions | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of the features in both graphs."""
        return [IMAGE_FEATURES.format(i=i) for i in range(len(self.rows))]

    def make_features(self, n: int, device: torch.device | None = None) -> list[Tensor]:
        """Return features [n, width] of nothing."""
        return [torch.zeros(n, self.leaves[row][-1], device=device) for row in self.rows]

    @contextmanager
    def give(self, features: Sequence[Tensor]) -> Iterator[None]:
        """Let the model find these features, [n, width] each, whatever its pixels are, while the context is open."""
        leaves = [None if isinstance(leaf, torch.Size) else leaf for leaf in self.leaves]
        for row, given in zip(self.rows, features, strict=True):
            sizes = [given.shape[0] if size == self.sight.n_tokens else size for size in self.leaves[row][:-1]]
            leaves[row] = given.reshape(*sizes, given.shape[-1])

        def answer(*args: Any, **kwargs: Any) -> Any:
            return tree_unflatten(leaves, self.tree)

        with _exchange([self.part], LOOK, lambda _: answer), _Placing(features[0].shape[0]), _leave_unchecked():
            yield

    def list_arguments(self, ids: Tensor, total: int) -> dict[str, Tensor]:
        """Return what the forward pass reads beside tokens, of which there are `total`; images are in `ids` alone."""
        marks = pad((ids == self.sight.token_id).to(torch.int64), (total - ids.shape[1], 0))
        given = {name: values.to(ids.device) for name, values in _make_feeds(self.sight).items()}
        return {name: marks if name in self.sight.marks else given[name] for name in given.keys() - {IDS, MASK}}


@contextmanager
def _leave_unchecked() -> Iterator[None]:
    """Leave out what transformers checks of values while the context is open: a graph has none yet."""
    before = os.environ.get(CHECKS)
    os.environ[CHECKS] = "1"
    try:
        yield
    finally:
        del os.environ[CHECKS]
        os.environ.update({} if before is None else {CHECKS: before})


class _Placing(TorchFunctionMode):
    """Put features in the places of images' tokens by numbering these, `n` of them.

    What the exporter makes of `masked_scatter` lists every number's place, and fails where there are fewer features;
    of what a mask chooses it does not know how much that is.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.masked_scatter:
            return place_rows(*args, **(kwargs or {}))
        if func in (Tensor.__getitem__, Tensor.__setitem__) and _chooses_rows(*args[:2]):
            mask = args[1][0] if isinstance(args[1], tuple) else args[1]
            places = mask if mask.dim() == 3 else mask[..., None]
            if func is Tensor.__setitem__:
                return args[0].copy_(place_rows(args[0], places, args[2]))
            rows = take_rows(args[0], places[..., 0], self.n)
            return rows.flatten() if mask.dim() == 3 else rows
        return func(*args, **(kwargs or {}))


def _chooses_rows(tensor: Tensor, key: Any) -> bool:
    """Return whether a mask [batch, t], or one that is the same along a further axis, chooses of [batch, t, width]."""
    mask = key[0] if isinstance(key, tuple) and len(key) == 2 and key[1] == slice(None) else key
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() in (2, 3) and tensor.dim() == 3


def take_rows(embeddings: Tensor, mask: Tensor, n: int) -> Tensor:
    """Return the first `n` rows of embeddings [batch, t, width] where `mask` [batch, t] is true, [n, width]."""
    number = _number_places(mask).flatten()
    slot = torch.where(mask.flatten() & (number < n), number, n)
    first = torch.zeros(n + 1, dtype=torch.int64, device=mask.device)
    chosen = first.scatter(0, slot, torch.arange(slot.shape[0], device=mask.device))[:n]
    return embeddings.reshape(-1, embeddings.shape[-1])[chosen]


def place_rows(embeddings: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return embeddings [batch, t, width] with the rows of `source` in their order where `mask` is true.

    Where the rows are fewer than the places, further places stay as they are.
    """
    rows = source.reshape(-1, embeddings.shape[-1])
    places = mask.expand_as(embeddings)[..., 0]  # [batch, t]
    number = _number_places(places)
    held = places & (number < rows.shape[0])
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # there may be none to choose
    return torch.where(held[..., None], padded[torch.where(held, number, -1)], embeddings)


def _number_places(places: Tensor) -> Tensor:
    """Return the number from 0 of each place [batch, t] that is true, counted over all rows."""
    return places.flatten().to(torch.int64).cumsum(0).reshape(places.shape) - 1


class _Vision(nn.Module):
    """The model as a function of one image's pixels -> features [tokens, width], in the order of `Tower.rows`."""

    def __init__(self, wrapped: nn.Module, tower: Tower, asked: Asked) -> None:
        super().__init__()
        self.wrapped, self.tower, self.asked = wrapped, tower, asked

    def forward(self, pixels: Tensor) -> list[Tensor]:
        leaves = tree_leaves(self.asked.repeat(pixels))
        return [leaves[row].reshape(-1, leaves[row].shape[-1]) for row in self.tower.rows]


def _make_feeds(sight: Sight) -> dict[str, Tensor]:
    """Return what a model reads of a question about an image, tensors with values where others have shapes alone."""
    with in_earnest():
        return {name: torch.from_numpy(values) for name, values in sight.example.items()}


def find_tower(module: nn.Module, sight: Sight) -> Tower:
    """Return what of the model sees, found by running it. Raises NotExportable where no graph can hold that."""
    name = type(module).__name__
    try:
        with silence(), leave_untouched(module), torch.no_grad():
            tower = _run_tower(module, sight)
            return replace(tower, positions=_find_positions(module, tower))
    except NotExportable:
        raise
    except Exception as error:  # whatever a model's own code raises
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise NotExportable(f"{name}: what sees of it cannot be a graph of its own ({said}); {WAY_OUT}") from error


def _run_tower(module: nn.Module, sight: Sight) -> Tower:
    """Return what of the model sees. Raises NotExportable where its features are no rows for an image's tokens."""
    asked = _listen(module, sight)
    leaves, tree = tree_flatten(asked.repeat(asked.pixels))
    kept = tuple(leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    shapes = {i: leaf for i, leaf in enumerate(kept) if isinstance(leaf, torch.Size)}
    rows = tuple(i for i, shape in shapes.items() if _has_rows(shape, sight.n_tokens))
    if not rows:
        found = ", ".join(str(list(shape)) for shape in shapes.values())
        text = f"an image is {sight.n_tokens} tokens of its processor's, and its features are {found}"
        raise NotExportable(f"{type(module).__name__}: {text}; {WAY_OUT}")
    return Tower(asked.part, tree, kept, rows, sight)


def _find_positions(module: nn.Module, tower: Tower) -> ImagePositions | None:
    """Return how positions go on through an image; None: as through a text. Raises NotExportable."""
    if not any(hasattr(type(part), THREE_AXES) for part in module.modules()):
        return None
    feeds = _make_feeds(tower.sight)
    with in_earnest():
        feeds[MASK] = torch.ones_like(feeds[IDS])
    with tower.give(tower.make_features(tower.sight.n_tokens)):
        heard = _hear_call(module, THREE_AXES, feeds)
    with in_earnest():
        found = None if heard is None else fit_positions(*heard[1:], feeds[IDS], tower.sight.token_id)
    if found is None:
        raise NotExportable(
            f"{type(module).__name__}: the positions of its texts depend on their images in a way that is not known "
            f"here; {WAY_OUT}"
        )
    return found


def _has_rows(shape: Sequence[int], n_tokens: int) -> bool:
    """Return whether a tensor is [n_tokens, width], with axes of one before."""
    return len(shape) > 1 and sorted(shape[:-1])[-1] == n_tokens and all(size in (1, n_tokens) for size in shape[:-1])


def _listen(module: nn.Module, sight: Sight) -> Asked:
    """Return how the forward pass asks for the features of an image. Raises NotExportable where it does not."""
    feeds = _make_feeds(sight)
    heard = _hear_call(module, LOOK, feeds)
    if heard is None or not any(leaf is feeds[sight.pixels] for leaf in tree_leaves(heard[2])):
        raise NotExportable(
            f"{type(module).__name__}: its forward pass does not ask {LOOK} of the pixels that it is given; {WAY_OUT}"
        )
    return Asked(*heard, feeds[sight.pixels])


def _hear_call(
    module: nn.Module, method: str, feeds: Mapping[str, Tensor]
) -> tuple[nn.Module, Callable[..., Any], Given] | None:
    """Run the forward pass until it calls a method of this name; return whose it is, itself and what it is given.

    None where it does not.
    """
    heard: list[tuple[nn.Module, Callable[..., Any], Given]] = []
    parts = [part for part in module.modules() if hasattr(type(part), method)]

    def listen(part: nn.Module) -> Callable[..., Any]:
        own = getattr(part, method)

        def hear(*args: Any, **kwargs: Any) -> Any:
            heard.append((part, own, (args, kwargs)))
            raise _Heard

        return hear

    with suppress(_Heard), _exchange(parts, method, listen), _leave_unchecked(), KnownValues():
        module(**feeds, use_cache=False, return_dict=True)
    return heard[0] if heard else None


@contextmanager
def _exchange(
    parts: Sequence[nn.Module], method: str, make: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Let a method of these modules be what `make` gives for each, while the context is open."""
    before = [vars(part).get(method) for part in parts]
    for part, exchanged in zip(parts, [make(part) for part in parts], strict=True):
        vars(part)[method] = exchanged
    try:
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            vars(part).pop(method)
            vars(part).update({method: own} if own is not None else {})


def export_vision(module: nn.Module, tower: Tower, opset: int, weights: Mapping[str, Weight] | None = None) -> ir.Model:
    """Export what sees as a float32 graph of one image; layers keep the names of their modules. `weights`: as of
    `export_program`. Raises NotExportable.
    """
    with silence(), leave_untouched(module), torch.no_grad():
        asked = _listen(module, tower.sight)
    model = export_program(
        _Vision(module, tower, asked).eval(),
        f"{type(module).__name__}, what sees of it",
        kwargs={"pixels": asked.pixels},
        input_names=[tower.sight.pixels],
        output_names=tower.names,
        dynamic_shapes={"pixels": {}},
        opset=opset,
        weights=weights,
    )
    for value, row in zip(model.graph.outputs, tower.rows, strict=True):
        value.shape = ir.Shape([tower.sight.n_tokens, tower.leaves[row][-1]])
    return model
