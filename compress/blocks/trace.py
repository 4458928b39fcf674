"""One forward pass without weights: what every layer multiplies, what lives in memory, which shapes come out."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from compress.blocks.untouched import leave_untouched
from compress.errors import SourceError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class Trace:
    """What one sample's forward pass shows. `macs` and `ops` (the ONNX operator) are by module name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    macs: dict[str, int] = field(default_factory=dict)
    ops: dict[str, str] = field(default_factory=dict)
    operators: tuple[str, ...] = ()
    peak_activation_bytes: int = 0


class _Live(TorchDispatchMode):
    """Bytes of the tensors alive at once, those of `known` storages (weights) left out."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, Any] = {}
        self.n_bytes = self.peak = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators.add(str(func.overloadpacket))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add_storage(leaf.untyped_storage())
        return out

    def _add_storage(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive and key not in self.known:
            self.alive[key] = weakref.ref(storage, lambda _: self._drop_storage(key, size))
            self.n_bytes += size
            self.peak = max(self.peak, self.n_bytes)

    def _drop_storage(self, key: int, size: int) -> None:
        self.alive.pop(key, None)
        self.n_bytes -= size


def is_layer(module: nn.Module) -> bool:
    """Return whether a module's weight is a matrix, a kernel or a table."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)) or is_hf_conv1d(module)


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer, no table, is of a subclass of torch's that computes otherwise: Falcon's, phimoe's router.

    An engine that puts its own layer in its place, and whoever computes with its weight alone, loses that.
    """
    kind = next(kind for kind in type(layer).__mro__ if kind.__name__ in LAYER_OPS)
    computes = ("forward", "_conv_forward")
    own = any(getattr(type(layer), name, None) is not getattr(kind, name, None) for name in computes)
    return own and not isinstance(layer, nn.Embedding)


def in_axis(layer: nn.Module) -> int:
    """Return the axis of a layer's weight along which its inputs lie."""
    return 0 if is_hf_conv1d(layer) or isinstance(layer, TRANSPOSED) else 1


def is_hf_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D: a Linear with a transposed weight (GPT-2)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def layer_type(layer: nn.Module) -> str:
    """Return a layer's name for `targets:`; a subclass counts as the torch class that it is."""
    return next(kind.__name__ for kind in type(layer).__mro__ if kind.__name__ in LAYER_OPS)


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return a layer's weight shape as [out, in / groups, *kernel], or [rows, width] for Embedding."""
    shape: tuple[int, ...] = tuple(layer.weight.shape)  # type: ignore[arg-type]
    if is_hf_conv1d(layer):
        return shape[::-1]
    if isinstance(layer, TRANSPOSED):  # torch has [in, out / groups, *kernel]
        return (shape[1] * layer.groups, shape[0] // layer.groups, *shape[2:])
    return shape


@contextlib.contextmanager
def remove_hooks_on_exit(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks when the context ends, whatever happened inside."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def trace(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Trace:
    """Run `module` once on one sample ([1, ...] by parameter name, on the module's device) and note what happens.

    Unless `compute`, shapes alone are worked out: a forward that looks at values then fails with RuntimeError. Raises
    whatever else the forward raises.
    """
    result = Trace()
    handles = [
        m.register_forward_hook(_make_counting_hook(result, name)) for name, m in module.named_modules() if is_layer(m)
    ]
    with (
        remove_hooks_on_exit(handles),
        contextlib.nullcontext() if compute else leave_untouched(module),
        torch.no_grad(),
        contextlib.nullcontext() if compute else FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        prepare = fake.from_tensor if fake is not None else torch.Tensor.detach
        state = {name: prepare(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        inputs = {name: prepare(tensor) for name, tensor in feeds.items()}
        live = _Live([*state.values()])
        with live:
            out = torch.func.functional_call(module, state, kwargs=inputs)
    result.outputs, result.operators, result.peak_activation_bytes = (
        name_outputs(out),
        tuple(sorted(live.operators)),
        live.peak,
    )
    return result


def run(module: nn.Module, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the real forward pass without gradients and return the outputs by name."""
    with torch.inference_mode():
        return name_outputs(module(**feeds))


def name_outputs(out: Any) -> dict[str, Tensor]:
    """Name a forward's outputs: "output" for one tensor, "output_k" for several; a dict keeps its names.

    SourceError for anything else.
    """
    if isinstance(out, Tensor):
        return {"output": out}
    named = {f"output_{k}": item for k, item in enumerate(out)} if isinstance(out, (tuple, list)) else out
    if not isinstance(named, Mapping) or not all(isinstance(item, Tensor) for item in named.values()):
        kinds = ", ".join(type(item).__name__ for item in named.values()) if isinstance(named, Mapping) else ""
        raise SourceError(
            f"model: forward gives {type(out).__name__}{f' of {kinds}' if kinds else ''}; a tensor, or tensors in a "
            "tuple or dict, can be exported"
        )
    return {str(name): item for name, item in named.items()}


def _make_counting_hook(result: Trace, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        macs, op = _count_macs(module, args, out)
        result.macs[name] = result.macs.get(name, 0) + macs
        result.ops[name] = op

    return hook


def _count_macs(module: nn.Module, args: tuple[Any, ...], out: Any) -> tuple[int, str]:
    """Return (multiply-accumulates, ONNX operator) of one call; of several outputs the first tensor counts."""
    weight: Any = module.weight
    out = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), weight.new_zeros(0))
    if isinstance(module, nn.Embedding):
        return 0, "Gather"
    if isinstance(module, CONVOLUTIONS):
        return out.numel() * weight[0].numel(), "Conv"
    if isinstance(module, TRANSPOSED):
        return args[0].numel() * weight[0].numel(), "ConvTranspose"
    n_in = weight.shape[0] if is_hf_conv1d(module) else weight.shape[1]
    return out.numel() * n_in, "Gemm" if out.dim() == 2 else "MatMul"


LAYER_OPS = {
    "Linear": "MatMul",
    "Conv1d": "Conv",
    "Conv2d": "Conv",
    "Conv3d": "Conv",
    "ConvTranspose1d": "ConvTranspose",
    "ConvTranspose2d": "ConvTranspose",
    "ConvTranspose3d": "ConvTranspose",
    "Embedding": "Gather",
    "Conv1D": "Gemm",
}
"""Layer type -> ONNX operator, where the forward pass did not tell."""
