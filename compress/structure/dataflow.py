"""One forward pass written down: which operator read which tensor, inside which module. No values are needed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from compress.blocks.experts import Experts
from compress.blocks.layers import CONVOLUTIONS, TRANSPOSED, Work, in_axis, is_layer
from compress.blocks.materialise import plain
from compress.blocks.untouched import leave_untouched

OPAQUE = "opaque"
"""The operator of a tensor that was seen after its memory had been written to through another view."""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor among an operator's arguments: the number of its value."""

    value: int


@dataclass(frozen=True, eq=False)
class Op:
    """One aten operator: `name` without overload and without the underscore of in-place forms; tensors are `Ref`s."""

    index: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module: the tensors among its arguments and results. `start`, `stop`: operators run meanwhile."""

    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    start: int
    stop: int


@dataclass(eq=False)
class DataFlow:
    """A recorded run. Values are numbered; module and parameter names are the user's (see `plain`).

    A value has at most one `producers` entry; those of parameters, buffers and inputs have none. `computed`: with
    values. `result`: what forward gave, of which `outputs` are the tensors. `peak_bytes`: of tensors alive at once,
    but for parameters, buffers and inputs.
    """

    module: nn.Module
    computed: bool = False
    result: Any = None
    peak_bytes: int = 0
    ops: list[Op] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    producers: dict[int, Op] = field(default_factory=dict)
    consumers: dict[int, list[Op]] = field(default_factory=dict)
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def in_order(self) -> list[ModuleCall]:
        """Return all calls by the time at which they began, a module before what it calls."""
        return sorted((call for calls in self.calls.values() for call in calls), key=lambda c: (c.start, -c.stop))


def within(name: str, module: str) -> bool:
    """Return whether `name` is `module` or inside it ("" holds everything)."""
    return not module or name == module or name.startswith(f"{module}.")


def record(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> DataFlow:
    """Run `module` once on `feeds` (by parameter of forward) and write down what reads what.

    Unless `compute`, tensors hold no values, wherever the module lies (meta, CPU): a forward that looks at values then
    raises RuntimeError. With `compute` the module must hold values. Raises whatever else the forward raises.
    """
    with _empty_unless(compute, module, feeds) as (state, feeds), contextlib.ExitStack() as stack:
        flow = DataFlow(module, compute)
        recorder = _Recorder(flow, state or dict(_iterate_state(module)))
        for handle in recorder.hooks():
            stack.callback(handle.remove)
        with recorder:
            flow.result = torch.func.functional_call(module, state, kwargs=dict(feeds)) if state else module(**feeds)
        flow.outputs = tuple(recorder.value(leaf) for leaf in tree_leaves(flow.result) if isinstance(leaf, Tensor))
    return flow


def count_work(flow: DataFlow) -> Work:
    """Return what each layer that ran multiplied, over all its calls."""
    work: Work = {}
    for name, calls in flow.calls.items():
        if is_layer(layer := flow.modules[name]):
            counted = [_count_macs(layer, flow, call) for call in calls]
            work[name] = sum(macs for macs, _ in counted), counted[-1][1]
    return work


def spread_over_experts(work: Work, flow: DataFlow) -> Work:
    """Return the work with each expert's expected part of what the first one, which ran on all tokens, multiplied.

    Each of E experts gets k / E of the tokens where k are chosen for each.
    """
    spread = dict(work)
    for name, mixture in flow.modules.items():
        if isinstance(mixture, Experts):
            n, first = len(mixture.experts()), f"{name}.0."
            for layer, (macs, op) in work.items():
                if layer.startswith(first):
                    inside, part = layer.removeprefix(first), (macs * mixture.n_chosen // n, op)
                    spread |= {f"{name}.{e}.{inside}": part for e in range(n)}
    return spread


def _count_macs(layer: nn.Module, flow: DataFlow, call: ModuleCall) -> tuple[int, str]:
    """Return (multiply-accumulates, ONNX operator) of one call; of several outputs the first tensor counts."""
    shape: tuple[int, ...] = tuple(layer.weight.shape)  # type: ignore[arg-type]
    out = flow.shapes[call.outputs[0]] if call.outputs else (0,)
    if isinstance(layer, nn.Embedding):
        return 0, "Gather"
    if isinstance(layer, CONVOLUTIONS):
        return math.prod(out) * math.prod(shape[1:]), "Conv"
    if isinstance(layer, TRANSPOSED):
        return math.prod(flow.shapes[call.inputs[0]]) * math.prod(shape[1:]), "ConvTranspose"
    return math.prod(out) * shape[in_axis(layer)], "Gemm" if len(out) == 2 else "MatMul"


@dataclass(frozen=True)
class Attempt:
    """How far a run came. `shapes`: of its outputs, None where it failed; `module`: the innermost one that it was in
    then; `n_calls`: of modules begun by then."""

    shapes: tuple[tuple[int, ...], ...] | None
    module: str
    n_calls: int


def attempt(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Attempt:
    """Run `module` as `record` does, for what comes of it alone: shapes that do not fit are an answer."""
    running, n_calls = list[str](), 0

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            nonlocal n_calls
            running.append(name)
            n_calls += 1

        return hook

    with _empty_unless(compute, module, feeds) as (state, feeds), contextlib.ExitStack() as stack:
        stack.enter_context(_silence_refusals())
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(enter(plain(name))).remove)
            stack.callback(part.register_forward_hook(lambda *_: running.pop() and None).remove)
        try:
            out = torch.func.functional_call(module, state, kwargs=dict(feeds)) if state else module(**feeds)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError):
            return Attempt(None, running[-1] if running else "", n_calls)
    return Attempt(tuple(tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), "", n_calls)


@contextlib.contextmanager
def _silence_refusals() -> Iterator[None]:
    """Hide the stack traces that torch logs of operators whose empty tensors do not fit, while the context is open."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _empty_unless(
    compute: bool, module: nn.Module, feeds: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], Mapping[str, Tensor]]]:
    """Yield a state for the module and feeds, both without values; or no state and the feeds as they are."""
    with torch.no_grad(), _disable_fused_layers(), contextlib.ExitStack() as stack:
        state: dict[str, Tensor] = {}
        if not compute:
            stack.enter_context(leave_untouched(module))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            for part in module.modules():  # no operator takes tensors of two devices
                held = {name: _make_empty(t) for name, t in vars(part).items() if isinstance(t, Tensor) and t.is_meta}
                vars(part).update(held)
            state = {name: _make_empty(tensor) for name, tensor in _iterate_state(module)}
            feeds = {name: _make_empty(tensor) for name, tensor in feeds.items()}
        yield state, feeds


def _iterate_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _make_empty(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape and dtype on the CPU; in a fake mode this takes no memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _disable_fused_layers() -> Iterator[None]:
    """Disable torch's fused encoder layers, inside which no module is called, while the context is open."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Recorder(TorchDispatchMode):
    """Numbers values by memory, view and the number of writes to that memory."""

    def __init__(self, flow: DataFlow, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.flow = flow
        self.memories: dict[int, tuple[int, Any]] = {}  # address -> (number, what tells its end)
        self.numbers = itertools.count()  # an address may be another's later
        self.counted: dict[int, int] = {}  # memory -> bytes, of what is alive
        self.n_bytes = 0
        self.views: dict[tuple[Any, ...], tuple[int, int]] = {}  # view -> (value, writes), of the latest alike
        self.handles = WeakTensorKeyDictionary()  # tensor -> (value, writes)
        self.writes: dict[int, tuple[int, int]] = {}  # memory -> (writes so far, the last written value)
        self.running: list[str] = []
        flow.modules = {plain(name): part for name, part in flow.module.named_modules()}
        for name, tensor in state.items():
            self.flow.parameters[self.value(tensor)] = plain(name)
            self.counted[self._identify_memory(tensor)] = 0

    def value(self, tensor: Tensor) -> int:
        """Return the number of what `tensor` now holds."""
        key = self._identify_view(tensor)
        n_writes, last = self.writes.get(key[0], (0, -1))
        known = self.handles.get(tensor) or self.views.get(key)
        if known is not None and known[1] == n_writes:
            return known[0]
        sources = [value for value in (known[0] if known else -1, last) if value >= 0]
        value = self._number_new(tensor)
        if sources:
            self._add_op(OPAQUE, (), {}, sources, [value])
        return value

    def _number_new(self, tensor: Tensor) -> int:
        value = len(self.flow.shapes)
        self.flow.shapes.append(tuple(tensor.shape))
        key = self._identify_view(tensor)
        self.views[key] = self.handles[tensor] = (value, self.writes.get(key[0], (0, -1))[0])
        return value

    def _add_op(self, name: str, args: Any, kwargs: Any, inputs: list[int], outputs: list[int]) -> None:
        module = self.running[-1] if self.running else ""
        op = Op(len(self.flow.ops), name, args, kwargs, tuple(inputs), tuple(outputs), module)
        self.flow.ops.append(op)
        for value in dict.fromkeys(inputs):
            self.flow.consumers.setdefault(value, []).append(op)
        for value in outputs:
            self.flow.producers[value] = op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # asks for a device: no value is read
        inputs: list[int] = []

        def refer(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            inputs.append(self.value(leaf))
            return Ref(inputs[-1])

        ref_args, ref_kwargs = tree_map(refer, (tuple(args), dict(kwargs)))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = {self._identify_view(leaf): self.handles.get(leaf) for leaf in given}
        out = func(*args, **kwargs)
        written = [
            args[i] if i < len(args) else kwargs.get(arg.name)
            for i, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        changed = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for leaf in fresh:
            self._count_bytes(leaf)
        if not changed and len(fresh) == 1 and (view := self._identify_view(fresh[0])) in before:
            self.handles[fresh[0]] = before[view]  # another handle on the same tensor
            return out
        outputs = [self._number_written(leaf) for leaf in changed] or [self._number_new(leaf) for leaf in fresh]
        name = func.overloadpacket.__name__
        self._add_op(name.rstrip("_") if changed else name, ref_args, ref_kwargs, inputs, outputs)
        return out

    def _number_written(self, tensor: Tensor) -> int:
        memory = self._identify_memory(tensor)
        self.writes[memory] = (self.writes.get(memory, (0, -1))[0] + 1, -1)
        value = self._number_new(tensor)
        self.writes[memory] = (self.writes[memory][0], value)
        return value

    def hooks(self) -> Iterator[Any]:
        """Yield handles of hooks on every module that tell which one runs."""
        for name, module in self.flow.modules.items():
            calls: list[tuple[tuple[int, ...], int]] = []
            yield module.register_forward_pre_hook(self._make_pre_hook(name, calls), with_kwargs=True)
            yield module.register_forward_hook(self._make_post_hook(name, calls), with_kwargs=True)

    def _make_pre_hook(self, name: str, calls: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append((self._number_values((args, kwargs)), len(self.flow.ops)))
            self.running.append(name)

        return hook

    def _make_post_hook(self, name: str, calls: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.running.pop()
            inputs, start = calls.pop()
            call = ModuleCall(name, inputs, self._number_values(out), start, len(self.flow.ops))
            self.flow.calls.setdefault(name, []).append(call)

        return hook

    def _number_values(self, tree: Any) -> tuple[int, ...]:
        return tuple(self.value(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))

    def _identify_view(self, tensor: Tensor) -> tuple[Any, ...]:
        place = self._identify_memory(tensor)
        return place, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype

    def _identify_memory(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # as modules see tensors inside vmap; operators see those that it wraps
            return next(self.numbers)
        address = storage._cdata
        if address not in self.memories:
            self.memories[address] = next(self.numbers), weakref.ref(storage, lambda _: self._forget_memory(address))
        return self.memories[address][0]

    def _forget_memory(self, address: int) -> None:
        self.n_bytes -= self.counted.pop(self.memories.pop(address)[0], 0)

    def _count_bytes(self, tensor: Tensor) -> None:
        memory = self._identify_memory(tensor)
        if memory not in self.counted:
            self.counted[memory] = tensor.untyped_storage().nbytes()
            self.n_bytes += self.counted[memory]
            self.flow.peak_bytes = max(self.flow.peak_bytes, self.n_bytes)
