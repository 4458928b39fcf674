"""live: sources: modules that a program holds, each under a name that stands for all of it but its weights.

A recipe cannot hold an object. It names it, its weights lie in a file beside, and whoever reads the recipe in the
process that holds the module finds it here; no other process can.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from compress.errors import SourceError

if TYPE_CHECKING:
    from torch import nn

_HELD: dict[str, nn.Module] = {}
_UNNAMED = itertools.count()
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def hold(module: nn.Module) -> str:
    """Keep a copy of a module, in eval mode on the CPU, and return its name: its class and a digest.

    The digest covers the code of its classes, the attributes of its modules and the values that no weights file has.
    What cannot be compared, such as an attribute that is an open file, makes the name one of its own, so that nothing
    that was computed for another model is taken for this one's. SourceError: the module cannot be copied.
    """
    try:
        kept = copy.deepcopy(module).cpu().eval().requires_grad_(False)
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise SourceError(
            f"model: a {type(module).__name__} cannot be copied: {error}; give a factory that builds it, as in "
            "python:FILE.py:FACTORY, and its weights"
        ) from error
    sha = hashlib.sha256()
    for text in _describe(kept):
        sha.update(text.encode(errors="backslashreplace") + b"\0")
    name = f"{type(kept).__name__}-{sha.hexdigest()[:12]}"
    _HELD[name] = kept
    return name


def digest_code(module: nn.Module) -> str:
    """Return the sha256 (hex) of the code of a module's classes, each once."""
    kinds = {type(part) for part in module.modules()}
    texts = sorted(f"{kind.__qualname__} {_read_text(kind)}" for kind in kinds if not _is_torchs(kind))
    return hashlib.sha256("\0".join(texts).encode(errors="backslashreplace")).hexdigest()


def is_held(name: str) -> bool:
    """Return whether this process holds a module of that name."""
    return name in _HELD


def copy_held(name: str) -> nn.Module:
    """Return a copy of a module that this process holds."""
    return copy.deepcopy(_HELD[name])


def _describe(module: nn.Module) -> Iterator[str]:
    import torch

    usual = vars(torch.nn.Module())
    yield torch.__version__
    for name, part in module.named_modules():
        stored = part.state_dict()
        yield f"{name}: {_describe_code(type(part))}"
        own = {key: value for key, value in vars(part).items() if key not in usual}
        yield from (f"{key} = {_describe_value(value)}" for key, value in sorted(own.items()))
        yield from (f"{key}: {_describe_code(hook)}" for key, hook in enumerate(part._forward_pre_hooks.values()))
        yield from (f"{key}: {_describe_code(hook)}" for key, hook in enumerate(part._forward_hooks.values()))
        yield from (
            f"{key} = {_describe_value(value)}" for key, value in part.named_buffers(recurse=False) if key not in stored
        )


def _describe_code(code: Any) -> str:
    """Return a class's or a function's name, with its text where it is not of an installed torch."""
    kind = code if inspect.isclass(code) or inspect.isroutine(code) else type(code)
    home = f"{kind.__module__}.{kind.__qualname__}"
    if _is_torchs(kind) or inspect.isbuiltin(kind):
        return home
    text = _read_text(kind) or f"no text {next(_UNNAMED)}"
    return f"{home} {text} {'' if code is kind else _describe_value(code)}"


def _is_torchs(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "torch"


def _read_text(kind: Any) -> str:
    """Return the text of a class or a function; "" of one that was written where no text is kept."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _describe_value(value: Any, depth: int = 0) -> str:
    """Return a text that is the same for equal values; for one that cannot be compared, one that no other has."""
    import torch

    if isinstance(value, (*PLAIN, torch.dtype, torch.device, torch.Size)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(_read_bytes(value)).hexdigest()}"
    # containers and objects are told apart down to here
    if depth == 8:
        return f"deeper {next(_UNNAMED)}"
    if isinstance(value, Mapping):
        return str([(_describe_value(k, depth + 1), _describe_value(v, depth + 1)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_describe_value(item, depth + 1) for item in value]}"
    if isinstance(value, set | frozenset):
        return f"set {sorted(_describe_value(item, depth + 1) for item in value)}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return _describe_code(value)
    if isinstance(value, torch.nn.Module):
        return f"module {_describe_code(type(value))}"  # a part that stands among the modules, too
    if hasattr(value, "__dict__"):
        return f"{_describe_code(type(value))} {_describe_value(vars(value), depth + 1)}"
    return f"{type(value).__name__} {next(_UNNAMED)}"


def _read_bytes(tensor: Any) -> bytes:
    import torch

    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
