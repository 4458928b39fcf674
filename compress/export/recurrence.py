"""Recurrences of linear attention and of state spaces, as the operator that ONNX Runtime has for all of them.

transformers names the kernels that its models call, of flash-linear-attention and mamba-ssm, and falls back to code
that walks over the text in Python, which no exporter follows. For a state S [K, V] of each head and tokens t

    S_t = exp(decay_t) S_{t-1} + key_t beta_t (value_t - exp(decay_t) S_{t-1}^T key_t)^T      output_t = S_t^T query_t

is what the delta rules compute; the others have key_t value_t^T in place of the second term (the schemas of
com.microsoft.LinearAttention; Yang et al. 2024, "Gated Delta Networks"; Dao and Gu 2024, "Transformers are SSMs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.untouched import list_files

OPERATOR = "LinearAttention"
DOMAIN = "com.microsoft"
NAME = "func_name"
"""The variable in which a function of transformers holds the name of the kernel that it stands for."""


class Recurrences:
    """What a module's recurrences were exchanged for, while it runs."""

    def __init__(self) -> None:
        self.used = False
        """Whether any was computed."""
        self.last_state: Tensor | None = None
        """The state that was read last from a cache."""

    def follow(self, cache: Any) -> None:
        """Note which state is read last from a cache that a module is given."""
        read = cache.get_recurrent_state

        def get_recurrent_state(*args: Any, **kwargs: Any) -> Tensor | None:
            self.last_state = read(*args, **kwargs)
            return self.last_state

        self.last_state, cache.get_recurrent_state = None, get_recurrent_state

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        state: Tensor | None,
        beta: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, T, H, V] and the last state [B, H, K, V], float32.

        `query`, `key` [B, T, H, K], `value` [B, T, H, V], `decay` [B, T, H] or [B, T, H, K], logarithms; `beta`
        [B, T, H]: by the delta rule. `state`: that of the tokens before; None: zeros.
        """
        self.used = True
        heads, size = value.shape[2], value.shape[3]
        if state is None:
            state = value.new_zeros(value.shape[0], heads, key.shape[3], size)
        inputs = [tensor.float().flatten(2) for tensor in (query, key, value)]  # [B, T, H x size]
        inputs += [state.float(), decay.float() if decay.ndim == 3 else decay.float().flatten(2)]
        rule = "gated" if beta is None else "gated_delta"
        output, last = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{OPERATOR}",
            [*inputs, *([] if beta is None else [beta.float()])],
            {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": scale},
            dtypes=(torch.float32, torch.float32),
            shapes=(inputs[2].shape, state.shape),
            version=1,
        )
        return output.unflatten(2, (heads, size)), last

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `chunk_gated_delta_rule` and, where `g` has a decay for each channel of the keys, `chunk_kda`."""
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        groups = value.shape[2] // key.shape[2]
        if groups > 1:
            query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
        scale = float(key.shape[3]) ** -0.5
        output, last = self.attend(query, key, value, g, initial_state, beta, scale)
        return output.to(value.dtype), last if output_final_state else None

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - the kernel's names
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int = 64,
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `mamba_chunk_scan_combined`. `x` [B, T, H, P], `dt` [B, T, H], `A` [H], `B` and `C` [B, T, G, N]."""
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = functional.softplus(dt) if dt_softplus else dt
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
        key, query = (part.float().repeat_interleave(x.shape[2] // part.shape[2], dim=2) for part in (B, C))
        before = None if initial_states is None else initial_states.transpose(2, 3)  # [B, H, N, P]
        output, last = self.attend(query, key, x.float() * dt[..., None], A.float() * dt, before)
        output = output if D is None else output + x.float() * D[..., None]
        output = (output if z is None else output * functional.silu(z)).to(x.dtype)
        return (output, last.transpose(2, 3)) if return_final_states else output

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803 - the kernel's names
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `selective_scan_fn`. `x`, `dt` [B, D, T], `A` [D, N], `B` and `C` [B, N, T].

        The kernel takes no state, and transformers goes on from one by single tokens alone; here it is the one that
        was read last, by the layer that calls.
        """
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
        dt = (functional.softplus(dt) if delta_softplus else dt).float().transpose(1, 2)  # [B, T, D]
        key, query = (part.float().transpose(1, 2).unsqueeze(2).expand(*dt.shape, -1) for part in (B, C))
        value, decay = (x.float().transpose(1, 2) * dt).unsqueeze(3), dt.unsqueeze(3) * A.float()
        before = None if self.last_state is None else self.last_state.unsqueeze(3)  # [B, D, N, 1]
        output, last = self.attend(query, key, value, decay, before)
        output = output.squeeze(3).transpose(1, 2)  # [B, D, T]
        output = output if D is None else output + x * D[None, :, None]
        output = output if z is None else output * functional.silu(z)
        return (output, last.squeeze(3)) if return_last_state else output


KERNELS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": Recurrences.delta_rule,
    "chunk_kda": Recurrences.delta_rule,
    "mamba_chunk_scan_combined": Recurrences.state_space,
    "selective_scan_fn": Recurrences.selective_scan,
}
"""Name of a kernel -> what computes it here."""


@contextmanager
def exchange_recurrences(module: nn.Module) -> Iterator[Recurrences]:
    """Let the module's own code call OPERATOR in the kernels' places while the context is open."""
    recurrences = Recurrences()
    found = [
        (vars(file), name, function)
        for file in list_files(module)
        for name, function in vars(file).items()
        if _kernel_name(function) in KERNELS
    ]
    for names, name, function in found:
        names[name] = partial(KERNELS[_kernel_name(function)], recurrences)
    try:
        yield recurrences
    finally:
        for names, name, function in found:
            names[name] = function


def _kernel_name(function: object) -> str:
    """Return the name of the kernel in whose place transformers calls the function; "" of any other."""
    if not isinstance(function, FunctionType) or NAME not in function.__code__.co_freevars:
        return ""
    cells = function.__closure__ or ()
    name = cells[function.__code__.co_freevars.index(NAME)].cell_contents
    return name if isinstance(name, str) else ""
