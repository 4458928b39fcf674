"""How much each unit of a dimension matters: scores float64 [n_units], higher is dearer.

Magnitude (Li et al. 2017, arXiv:1608.08710), batch norm scale (Liu et al. 2017, arXiv:1708.06519), Taylor and Fisher
(Molchanov et al. 2019, arXiv:1906.10771, equations 7 and 8; Theis et al. 2018, arXiv:1801.05787), activations, and
Optimal Brain Damage (LeCun et al. 1990) on the squared error of the readers' outputs. OBS has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.blocks.forward import remove_hooks_on_exit
from compress.blocks.materialise import plain
from compress.errors import PassError
from compress.pruning.dimensions import Dimension
from compress.pruning.obs import Elimination, ReadingLayer
from compress.pruning.statistics import Batch
from compress.rounding.outputs import list_outputs, measure_units, model_output

Loss = Callable[[nn.Module, Batch], Tensor]
"""What a module's outputs on a batch are worth, summed over the batch's samples; a scalar with a gradient."""
Comparison = Literal["local", "global"]


def magnitude(module: nn.Module, dimension: Dimension, power: int) -> np.ndarray:
    """Return the L1 (`power` 1) or L2 norm of all weights that write or read each unit."""
    weights = {name: tensor for name, tensor in _parameters(module).items() if tensor.dim() > 1}
    summed = _sum_over_units(
        dimension, {name: tensor.detach().double().abs() ** power for name, tensor in weights.items()}
    )
    norms: np.ndarray = summed ** (1 / power)
    return norms


def batch_norm_scale(module: nn.Module, dimension: Dimension) -> np.ndarray:
    """Return |gamma| of the batch norms on each unit, summed. PassError where there is none."""
    scales = {
        f"{plain(name)}.weight": part.weight.detach().double().abs()
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.weight is not None
    }
    if not any(name in scales for name, _ in dimension.members):
        raise PassError(f"{dimension.name}: no batch norm with a scale lies on its units; choose another importance")
    return _sum_over_units(dimension, scales)


def gradient_scores(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    batches: Sequence[Batch],
    loss: Loss,
    kind: Literal["taylor", "fisher"],
) -> list[np.ndarray]:
    """Return for each dimension its units' scores from weights and the gradients of `loss`.

    Taylor: the square of the sum over a unit of weight * gradient; fisher: half its sum of weight^2 * gradient^2.

    Taylor: the square of the sum over a unit of weight * gradient; fisher: the sum over it of weight^2 * gradient^2 /
    2.

    Gradients are those of `loss` per sample: of a batch the squares of its mean ones, times its size, averaged over the
    samples. Squares come before any mean over batches, for the mean of a gradient at the model's own labels is zero. No
    gradient is left behind in the module.
    """
    parameters = {name: p for name, p in _parameters(module).items() if p.is_floating_point()}
    totals = [np.zeros(one.n_units) for one in dimensions]
    n_samples = 0
    for size, gradients in _iterate_gradients(module, parameters, batches, loss):
        n_samples += size
        pairs = zip(parameters.items(), gradients, strict=True)
        change = {name: p.detach().double() * g.double() for (name, p), g in pairs if g is not None}
        if kind == "fisher":
            change = {name: one.square() / 2 for name, one in change.items()}
        for total, one in zip(totals, dimensions, strict=True):
            summed = _sum_over_units(one, change)
            total += (np.square(summed) if kind == "taylor" else summed) / size
    return [total / max(n_samples, 1) for total in totals]


def activation_norm(reading_layers: Sequence[ReadingLayer]) -> np.ndarray:
    """Return the root mean square of what the readers get from each unit, from second moments about zero."""
    total = sum(
        reading_layer.gram.diagonal().numpy()[reading_layer.features].sum(1) for reading_layer in reading_layers
    )
    norms: np.ndarray = np.sqrt(np.asarray(total))
    return norms


def damage(reading_layers: Sequence[ReadingLayer]) -> np.ndarray:
    """Return Optimal Brain Damage by unit: the readers' squared output error without it, nothing making up for it."""
    total = np.zeros(len(reading_layers[0].features))
    for reading_layer in reading_layers:
        features = torch.from_numpy(reading_layer.features)
        blocks = reading_layer.gram.double()[features[:, :, None], features[:, None, :]]  # [n_units, k, k]
        columns = reading_layer.weight.double()[:, features].movedim(1, 0)  # [n_units, out, k]
        total += ((columns @ blocks) * columns).sum((1, 2)).numpy()
    return total


def random_scores(n_units: int, seed: int) -> np.ndarray:
    """Return random scores in [0, 1), a baseline."""
    return np.random.default_rng(seed).random(n_units)


def rank_units(scores: np.ndarray, comparison: Comparison = "global") -> Elimination:
    """Order units by rising score; the damage of the first j is the sum of their scores.

    "local": scores are divided by the dimension's mean first, so that each dimension loses alike.
    """
    scale = float(scores.mean()) if comparison == "local" else 1.0
    order = np.argsort(scores, kind="stable")
    return Elimination(order[:-1], np.cumsum(scores[order] / (scale or 1.0))[:-1])


def output_fisher(module: nn.Module, names: Sequence[str], batches: Sequence[Batch], loss: Loss) -> dict[str, Tensor]:
    """Return for each named module the squared gradient of `loss` by its output, float64 [channels or features].

    Summed over a sample's pixels or tokens, the mean over samples: an error e in the output raises a loss that is at
    its least by about (fisher * e^2).sum() / 2. Of convolutions and batch norms channels lie on axis 1, else last.
    """
    parts = {plain(name): part for name, part in module.named_modules()}
    sums: dict[str, Tensor] = {}
    n_samples = 0
    for batch in batches:
        outputs: dict[str, Tensor] = {}
        handles = [parts[name].register_forward_hook(_make_gradient_hook(outputs, name)) for name in names]
        with remove_hooks_on_exit(handles), torch.enable_grad():
            gradients = torch.autograd.grad(loss(module, batch), [outputs[name] for name in names], allow_unused=True)
        n_samples += n_in(batch)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                by_output = gradient.movedim(1 if _has_channels_first(parts[name]) else -1, 0).flatten(1)
                sums[name] = sums.get(name, 0.0) + by_output.double().square().sum(1)
    return {name: squares / max(n_samples, 1) for name, squares in sums.items()}


def n_in(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(iter(batch.values())))


def draw_label_loss(seed: int = 0) -> Loss:
    """Return the cross entropy with labels drawn from the model itself, as a loss.

    For logits [batch, classes], [batch, tokens, classes] or [batch, classes, height, width]. Its squared gradients are
    the Fisher information: the curvature of the KL divergence from the model as it is.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        logits = model_output(module(**batch), batch).float()
        if logits.dim() == 4:
            logits = logits.movedim(1, -1)
            logits = nn.functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits  # one channel: two classes
        drawn = torch.multinomial(logits.detach().softmax(-1).flatten(0, -2), 1, generator=generator)[:, 0]
        per_row = nn.functional.cross_entropy(logits.flatten(0, -2), drawn, reduction="none").reshape(logits.shape[:-1])
        mask = batch.get("attention_mask")
        return (per_row if mask is None or mask.shape != per_row.shape else per_row * mask).sum()

    return loss


def random_projection_loss(seed: int = 0) -> Loss:
    """Return the product of the outputs with random signs, as a loss for any model.

    Its squared gradients are the curvature of |outputs|^2 / 2; several outputs are each taken in their own unit.
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        outputs = [out.float() for out in list_outputs(module(**batch), batch)]
        total = outputs[0].new_zeros(())
        for out, unit in zip(outputs, measure_units(outputs), strict=True):
            signs = torch.randint(0, 2, out.shape, generator=generator) * 2.0 - 1.0
            total = total + (out * signs).sum() / unit
        return total

    return loss


def _make_gradient_hook(
    outputs: dict[str, Tensor], name: str
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that stores the output and makes its gradient available.

    What follows may change its copy in place.
    """

    def hook(part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        if not out.requires_grad:
            out.requires_grad_(True)
        outputs[name] = out
        return out.clone()

    return hook


def _has_channels_first(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) or hasattr(part, "kernel_size")


def _iterate_gradients(
    module: nn.Module, parameters: Mapping[str, Tensor], batches: Sequence[Batch], loss: Loss
) -> Iterator[tuple[int, tuple[Tensor | None, ...]]]:
    """Yield (samples, the gradient of the loss summed over them) for every batch."""
    before = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.requires_grad_(True)
        for batch in batches:
            with torch.enable_grad():
                gradients = torch.autograd.grad(loss(module, batch), [*parameters.values()], allow_unused=True)
            yield n_in(batch), gradients
    finally:
        for name, p in parameters.items():
            p.requires_grad_(before[name])


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {plain(name): p for name, p in module.named_parameters()}


def _sum_over_units(dimension: Dimension, worth: Mapping[str, Tensor]) -> np.ndarray:
    """Sum what each number of the parameters is worth over the units that it belongs to."""
    total = np.zeros(dimension.n_units)
    for (name, axis), members in dimension.members.items():
        if name in worth:
            tensor = worth[name]
            by_index = tensor.movedim(axis, 0).flatten(1).sum(1) if tensor.dim() > 1 else tensor
            total += by_index.numpy()[members].sum(1)
    return total
