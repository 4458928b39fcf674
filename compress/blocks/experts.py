"""Mixtures of experts: stacked 3-D parameters made into one Linear for each expert's projection, and back.

transformers keeps the experts of a layer in parameters `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] (transposed
in some, with biases in some, without a gate in some; `use_experts_implementation` says which). Layers that can be
calibrated and rounded one by one are `experts.<e>.gate_proj`, `.up_proj`, `.down_proj`, the names of most checkpoints.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from compress.blocks.activations import running_rows

_FIRST_ONLY: ContextVar[bool] = ContextVar("first_only", default=False)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertPart:
    """Where a parameter of one expert lies in a stacked one: `stacked` (full name) [`expert`], then `half` of its rows.

    `half`: "gate" or "up" of a gate_up_proj, "" for all of it. The halves follow one another, or alternate
    (`interleaved`). `transposed`: the stack holds [in, out].
    """

    stacked: str
    expert: int
    half: Literal["", "gate", "up"] = ""
    interleaved: bool = False
    transposed: bool = False


class Expert(nn.Module):
    """One expert's projections; `act(gate) * up` in between, or what the mixture computes instead."""

    def __init__(self, projections: Mapping[str, nn.Linear], between: Callable[..., Tensor]) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        """Return what the expert computes of each token: [tokens, H] -> [tokens, H]."""
        *inner, down = self.children()
        out: Tensor = down(self._between(*(projection(x) for projection in inner)))
        return out


class Experts(nn.ModuleList):
    """The experts of one layer, called as the stacked module was: hidden states [tokens, H], routing indices and
    weights [tokens, k] -> [tokens, H].

    With real tensors each expert sees the tokens routed to it alone. On tensors without values (meta, fake) it sees all
    of them, weighted with zero where it is not chosen: the same result, and every expert runs.
    """

    def __init__(self, stacked: nn.Module) -> None:
        between = _choose_activation(stacked)
        super().__init__(Expert(projections, between) for projections in _split_projections(stacked))
        self.arguments = tuple(inspect.signature(stacked.forward).parameters)
        self.n_chosen = 0
        """Experts for each token, as the last call had it."""
        if getattr(stacked, "has_post_expert_norm", False):
            self.post_expert_norm = stacked.post_expert_norm
        self.train(stacked.training)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden, chosen, weights = (*args, *(kwargs[name] for name in self.arguments[len(args) :]))
        self.n_chosen = chosen.shape[-1]
        if _FIRST_ONLY.get():
            return self._run_dense(self.experts()[:1], hidden, chosen, weights)
        if hidden.device.type == "meta" or isinstance(hidden, FakeTensor) or torch.compiler.is_compiling():
            return self._run_dense(self.experts(), hidden, chosen, weights)
        return self._run_routed(hidden, chosen, weights)

    def _run_dense(self, experts: list[Expert], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run every token through every expert, weighted with zero where it is not chosen; [tokens, H]."""
        parts = [
            self._apply_post_norm(expert(hidden)) * (weights * (chosen == e)).sum(-1, keepdim=True).to(hidden.dtype)
            for e, expert in enumerate(experts)
        ]
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out

    def _run_routed(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run every token through the experts chosen for it alone, padding through none, which gives 0; [tokens, H]."""
        out, rows = torch.zeros_like(hidden), running_rows()
        if rows is not None and rows.numel() == len(hidden):
            chosen = chosen.masked_fill(~rows.reshape(-1, 1), -1)
        for e, expert in enumerate(self.experts()):
            tokens, places = torch.where(chosen == e)
            if len(tokens):
                part = self._apply_post_norm(expert(hidden[tokens])) * weights[tokens, places, None]
                out.index_add_(0, tokens, part.to(out.dtype))
        return out

    def experts(self) -> list[Expert]:
        """Return the experts in order."""
        return [module for module in self if isinstance(module, Expert)]

    def _apply_post_norm(self, out: Tensor) -> Tensor:
        norm: Any = getattr(self, "post_expert_norm", None)
        return out if norm is None else norm(out)


@contextlib.contextmanager
def first_expert_only() -> Iterator[None]:
    """Run a mixture's first expert alone, on all tokens, while the context is open: for traces, not for results."""
    token = _FIRST_ONLY.set(True)
    try:
        yield
    finally:
        _FIRST_ONLY.reset(token)


def unstack_experts(module: nn.Module) -> list[str]:
    """Replace, in place, every module inside `module` that holds stacked experts by `Experts`, and return their names.

    Recognised by what it holds and takes: 3-D `down_proj` and `gate_up_proj` (or `up_proj`), and a forward of hidden
    states, routing indices and weights. Parameters become views of the stacked ones (no copy); on meta they stay there.
    """
    mixtures = [(name, child) for name, child in module.named_modules() if name and is_stacked(child)]
    for name, child in mixtures:
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, Experts(child))
    return [name for name, _ in mixtures]


def is_stacked(module: nn.Module) -> bool:
    """Return whether `unstack_experts` replaces the module."""
    parameters = dict(module.named_parameters(recurse=False))
    up = parameters.get("gate_up_proj", parameters.get("up_proj"))
    if up is None or "down_proj" not in parameters or up.dim() != 3 or parameters["down_proj"].dim() != 3:
        return False
    if len(up) != len(parameters["down_proj"]):
        return False  # some experts are none: they give what they read
    if {name.removesuffix("_bias") for name in parameters} - {"gate_up_proj", *PROJECTIONS}:
        return False  # it computes with something else besides
    return len(inspect.signature(module.forward).parameters) == 3 and (
        hasattr(module, "act_fn") or hasattr(module, "_apply_gate")
    )


def find_stacked_parts(stacked: nn.Module, name: str) -> dict[str, ExpertPart]:
    """Return where each expert's parameter lies, by its full name, for the stacked module called `name`.

    For reading a checkpoint that holds stacks. To write one, names without stacks are what engines read.
    """
    parts: dict[str, ExpertPart] = {}
    interleaved, transposed = not getattr(stacked, "is_concatenated", True), bool(getattr(stacked, "is_transposed", 0))
    for parameter, tensor in stacked.named_parameters(recurse=False):
        projection, bias = parameter.removesuffix("_bias"), parameter.endswith("_bias")
        if projection not in (*PROJECTIONS, "gate_up_proj"):
            continue
        leaf = "bias" if bias else "weight"
        for e in range(tensor.shape[0]):
            for half in ("gate", "up") if projection == "gate_up_proj" else ("",):
                name_in_expert = f"{half}_proj" if half else projection
                parts[f"{name}.{e}.{name_in_expert}.{leaf}"] = ExpertPart(
                    f"{name}.{parameter}",
                    e,
                    half,
                    interleaved and bool(half),
                    transposed and not bias,
                )
    return parts


def take_part(stack: Tensor, part: ExpertPart) -> Tensor:
    """Return one expert's weight [out, in] or bias [out] as a view of the stack that holds all experts'."""
    tensor = stack[part.expert].mT if part.transposed else stack[part.expert]
    if not part.half:
        return tensor
    if part.interleaved:
        return tensor[0::2] if part.half == "gate" else tensor[1::2]
    middle = tensor.shape[0] // 2
    return tensor[:middle] if part.half == "gate" else tensor[middle:]


def restack(parts: Mapping[str, ExpertPart], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the stacked tensors, by full name, made of the experts' own (`read(name)`): the inverse of `take_part`."""
    stacks: dict[str, list[tuple[ExpertPart, Tensor]]] = {}
    for name, part in parts.items():
        stacks.setdefault(part.stacked, []).append((part, read(name)))
    return {name: _stack_parts(members) for name, members in stacks.items()}


def _stack_parts(members: list[tuple[ExpertPart, Tensor]]) -> Tensor:
    part, tensor = members[0]
    rows = tensor.shape[0] * (2 if part.half else 1)
    shape = (rows, *tensor.shape[1:])[::-1] if part.transposed else (rows, *tensor.shape[1:])
    out = tensor.new_empty((1 + max(p.expert for p, _ in members), *shape))
    for part, tensor in members:
        take_part(out, part).copy_(tensor)
    return out


def _split_projections(stacked: nn.Module) -> list[dict[str, nn.Linear]]:
    """Return the Linear layers of each expert by projection; their parameters are views of the stacked ones."""
    stacks = {name: parameter.detach() for name, parameter in stacked.named_parameters(recurse=False)}
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, part in find_stacked_parts(stacked, "").items():
        leaf = name.removeprefix(f".{part.expert}.")
        tensors.setdefault(part.expert, {})[leaf] = take_part(stacks[part.stacked.removeprefix(".")], part)
    return [
        {
            p: _make_linear(leaves[f"{p}.weight"], leaves.get(f"{p}.bias"))
            for p in PROJECTIONS
            if f"{p}.weight" in leaves
        }
        for _, leaves in sorted(tensors.items())
    ]


def _make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _choose_activation(stacked: nn.Module) -> Callable[..., Tensor]:
    """Return the function that an expert of `stacked` computes between its projections."""
    act: Any = getattr(stacked, "act_fn", None)
    if not hasattr(stacked, "gate_up_proj"):
        return lambda up: act(up)
    own_gate = getattr(type(stacked), "_apply_gate", None)
    if own_gate is None or own_gate.__name__ == "_default_apply_gate":
        return lambda gate, up: act(gate) * up
    interleaved = not getattr(stacked, "is_concatenated", True)
    apply_gate: Any = _Shell(stacked, own_gate)

    def between(gate: Tensor, up: Tensor) -> Tensor:
        both = torch.stack([gate, up], -1).flatten(-2) if interleaved else torch.cat([gate, up], -1)
        return apply_gate(both)

    return between


class _Shell:
    """The stacked module's plain attributes (limits, activations), without its parameters, to call its own gate on."""

    def __init__(self, stacked: nn.Module, apply_gate: Callable[..., Tensor]) -> None:
        self._own_gate = apply_gate
        self.__dict__.update({k: v for k, v in stacked.__dict__.items() if not k.startswith("_")})
        self.__dict__.update(dict(stacked.named_children()))

    def __call__(self, both: Tensor) -> Tensor:
        return self._own_gate(self, both)
