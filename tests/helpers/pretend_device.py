"""A GPU that is not there: real values on the processor, real passes, and torch's word on every operation's devices.

A tensor "on" it wraps one of the processor and says `cuda:0`. A dispatch mode runs every operation on what is inside,
so that control flow that reads values works and results can be compared. Beside it each operation runs once more on
fake tensors of those devices (`FakeTensorMode`, no input that is not fake), which raise where a GPU would: on two
devices in one operation. Copies between the devices are counted by the function of `compress` that asked for them.

Fake tensors alone would not do: a value that is read ends them, and without a CUDA build their gradients abort.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import compress

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
ROOT = str(Path(compress.__file__).parent)
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
TO_META = (aten._to_copy.default, aten.empty_like.default)
"""What makes a tensor without values; of other operations C++ means "where self is" by meta, which is here."""
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
NOT_FAKED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class OnDevice(Tensor):
    """A tensor that says it is on a GPU. To C++ it is on meta, for which every build has what gradients need."""

    held: Tensor
    device = property(lambda self: CUDA)

    @staticmethod
    def __new__(cls: type[OnDevice], inner: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("meta"),
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
        )
        made.held = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to and len(args) == 2 and isinstance(args[1], OnDevice):  # C++ would see meta
                return args[0].to(CUDA, args[1].dtype)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on a pretended GPU, after it has gone")


class PretendDevice(TorchDispatchMode):
    """Runs operations, refuses those on two devices, and counts in `moves` who copied: (from, to, function)."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: Counter[tuple[str, str, str]] = Counter()
        self.operations: Counter[str] = Counter()
        """On the GPU alone."""
        self.asked: set[Any] = set()
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        there = {id(x.held): x for x in tree_leaves((args, kwargs)) if isinstance(x, OnDevice)}
        wanted = kwargs.get("device")
        if wanted is not None:
            meta = torch.device(wanted).type == "meta"
            on_gpu = torch.device(wanted).type == "cuda" or (meta and func not in TO_META)
            kwargs["device"] = CUDA if on_gpu else wanted
        else:
            on_gpu = isinstance(args[0], OnDevice) if func is aten.copy_.default else bool(there)
        if func in COPIES:
            self._count_move(args[0] if func is aten._to_copy.default else args[1], on_gpu)
        if on_gpu or there:
            self._ask_torch(func, args, kwargs, on_gpu)
        if on_gpu and wanted is not None:
            kwargs["device"] = HOST
        self.operations[str(func)] += on_gpu
        out = func(*_unwrap(args), **_unwrap(kwargs))
        if not on_gpu or func is aten._local_scalar_dense.default:
            return out
        return tree_map_only(Tensor, lambda x: there[id(x)] if id(x) in there else OnDevice(x), out)

    def _count_move(self, source: Tensor, on_gpu: bool) -> None:
        before = "cuda" if isinstance(source, OnDevice) else source.device.type
        after = "cuda" if on_gpu else "cpu"
        if before != after and "meta" not in (before, after):
            self.moves[before, after, _find_caller()] += 1

    def _ask_torch(self, func: Any, args: Any, kwargs: Any, on_gpu: bool) -> None:
        """Run the operation on fake tensors of the same devices: what would raise on a GPU raises here."""
        key = _describe(func, args, kwargs)
        if key in self.asked:
            return
        self.asked.add(key)
        try:
            if any(x is not None and x.dtype == torch.bool for x in _list_indices(func, args)):
                raise DynamicOutputShapeException(func)
            with self.fake:
                out = func(*_to_fake(args), **_to_fake(kwargs))
        except NOT_FAKED:
            devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()}
            assert func in COPIES or len(devices) < 2, f"{func} on {devices}"
            return
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta":
                assert (x.device.type == "cuda") == on_gpu, f"{func} gives {x.device}, which {_find_caller()} overlooks"


def _list_indices(func: Any, args: Any) -> Any:
    return args[1] if func in INDEXED else ()


def _describe(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what decides whether devices mix: the operator; each tensor's device, type, whether it is one number."""
    tensors = [(x.device, x.dtype, x.dim() == 0) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return func, tuple(tensors), str(kwargs.get("device"))


def _unwrap(values: Any) -> Any:
    return tree_map_only(OnDevice, lambda x: x.held, values)


def _to_fake(values: Any) -> Any:
    return tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device), values
    )


def _find_caller() -> str:
    """Return "file:function" of the innermost frame of `compress` or `runtime`, "" where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            return f"{code.co_filename.removeprefix(ROOT).lstrip('/')}:{code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextmanager
def pretend_gpu(patch: pytest.MonkeyPatch, free_bytes: int = 0, count: int = 1) -> Iterator[PretendDevice]:
    """Make torch believe that there are `count` GPUs while the context is open. `free_bytes`: of the memory of each."""
    answers: dict[str, Any] = {
        "_lazy_init": None,
        "is_available": count > 0,
        "device_count": count,
        "mem_get_info": (free_bytes, free_bytes),
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "is_bf16_supported": True,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "manual_seed_all": None,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *args, answer=answer, **more: answer)
    make = torch.tensor  # in C++ it goes by the build's devices, not by the mode
    patch.setattr(torch, "tensor", lambda data, device=HOST, **how: make(data, **how).to(device))
    with PretendDevice() as mode:
        yield mode
