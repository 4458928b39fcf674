"""Which tensors a GGUF file has of a model, and what becomes of each on its way there.

`gguf`'s TensorNameMap names them for an architecture. What a name cannot say (which rows rope turns together, how
merged queries, keys and values lie) is a `GgufForm`, which `gguf_trial` finds by trying; what a tensor's meaning says
is done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

from compress.blocks.layers import is_hf_conv1d, is_layer, weight_shape
from compress.blocks.materialise import plain
from compress.errors import ExportError
from compress.models.checkpoint_names import FileNames, file_names

OUTPUT = "output.weight"
_EXPERT = re.compile(r".*?\.(?P<block>\d+)\..*experts\.\d+\.(?P<part>gate|up|down)_proj\.(?P<leaf>weight|bias)")
_PAIRED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm", "attn_qkv")
_TILED = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_a", "ssm_dt")


def import_gguf() -> ModuleType:
    """Import the `gguf` package. ExportError, which says how it is installed."""
    try:
        import gguf
    except ImportError as error:
        raise ExportError(f"kind: gguf needs a package that is not here ({error}); pip install gguf") from error
    return gguf


@dataclass(frozen=True)
class GgufForm:
    """How an architecture wants what its tensors' names do not say.

    `pairs`: rope turns neighbouring rows of q and k. `groups`: merged queries, keys and values lie one after another,
    where the model has them by groups of heads. `columns`: vectors of a recurrence stand in columns, its norm has a row
    for each group. `tiled`: value heads lie by their number within a key head. `output`: tied values are written twice.
    `listed`: heads of keys are told of each layer. `gating`: GGUF's number of what makes a router's scores
    probabilities. `offsets`: norm, with `*` for numbers in its name -> what it adds to its weight as it computes.
    """

    architecture: str
    pairs: bool = False
    groups: bool = False
    columns: bool = False
    tiled: bool = False
    output: bool = False
    listed: bool = True
    gating: int = 0
    offsets: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file.

    `name`: the module's, of stacked experts the first's; `experts`: the module's names of all that are stacked. `rows`:
    which of the module's rows it has, in its order; `change`: what its values become, which integers cannot. `turned`:
    the module holds it with its inputs first, and its integers with its outputs.
    """

    name: str
    written: str
    shape: tuple[int, ...]
    matrix: bool = False
    rows: np.ndarray | None = field(default=None, compare=False)
    change: Callable[[np.ndarray], np.ndarray] | None = field(default=None, compare=False)
    turned: bool = False
    experts: tuple[str, ...] = ()
    kind: str = "F32"

    @property
    def stem(self) -> str:
        """Return what kind of tensor it is: attn_q, ffn_norm, token_embd, ..."""
        inner = self.written.split(".", 2)[2] if self.written.startswith("blk.") else self.written
        return inner.removesuffix(".weight").removesuffix(".bias")

    @property
    def block(self) -> int | None:
        """Return the number of its block; None for one that is in none."""
        return int(self.written.split(".")[1]) if self.written.startswith("blk.") else None

    @property
    def inputs(self) -> int:
        """Return how many inputs a row of a matrix has."""
        return self.shape[-1]

    @property
    def changed(self) -> bool:
        """Return whether integers cannot become what the file has."""
        return self.change is not None

    def order(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, of values or of bytes, in the file's order."""
        return rows if self.rows is None else np.ascontiguousarray(rows[self.rows])

    def convert(self, values: np.ndarray) -> np.ndarray:
        """Return the file's values for the module's."""
        values = self.order(values.T if self.turned else values)
        return values if self.change is None else self.change(values)


@dataclass(frozen=True)
class _Heads:
    """Sizes by which rows are put in order."""

    query: int
    key: int
    size: int
    turned: int
    key_heads: int = 0
    value_heads: int = 0
    value_size: int = 0


def list_tensors(
    module: nn.Module, config: Mapping[str, Any], form: GgufForm, tied: Collection[str]
) -> tuple[list[TensorEntry], list[str]]:
    """Return the file's tensors in the module's order, and the names of those that it has no place for."""
    tensors = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    parts = {plain(name): part for name, part in module.named_modules()}
    names = _Names(form.architecture, count_blocks(config), file_names(module, tensors))
    heads = _find_heads(config)
    entries: dict[str, TensorEntry] = {}
    homeless = []
    for name, tensor in tensors.items():
        written = names.find(name)
        if name in tied and not (form.output and written == OUTPUT):
            continue
        part = parts.get(name.rpartition(".")[0])
        layer = part is not None and name.endswith(".weight") and is_layer(part)
        shape = weight_shape(part) if layer and part is not None else tuple(tensor.shape)
        found = _split_stack(name, shape, names, tensors)
        if not found and not written:
            found = _split_halves(name, shape, names, tensors)
            if not found:
                homeless.append(name)
        elif not found:
            entry = TensorEntry(name, written, shape, layer and len(shape) == 2)
            if layer and part is not None and is_hf_conv1d(part):
                entry = replace(entry, turned=True)
            found = _arrange(entry, form, heads, config, names)
        for each in found:
            first = entries.get(each.written)
            if first is None:
                entries[each.written] = each
            elif _EXPERT.fullmatch(name):
                entries[each.written] = replace(first, experts=(*(first.experts or (first.name,)), name))
            else:
                homeless.append(name)
    return [_with_stack(entry) for entry in entries.values()], homeless


def count_blocks(config: Mapping[str, Any]) -> int:
    """Return how many blocks a model has, by its configuration; 0 where that does not say."""
    return int(next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if config.get(key)), 0))


def mask_numbers(name: str) -> str:
    """Return a module's name with `*` for its numbers: the same for all blocks."""
    return re.sub(r"(?<=\.)\d+", "*", name)


def _with_stack(entry: TensorEntry) -> TensorEntry:
    if not _EXPERT.fullmatch(entry.name):
        return entry
    experts = entry.experts or (entry.name,)
    return replace(entry, experts=experts, shape=(len(experts), *entry.shape))


class _Names:
    """GGUF's names for a module's tensors."""

    def __init__(self, architecture: str, n_blocks: int, files: FileNames) -> None:
        self.map, self.roots, self.kinds = _name_map(architecture, n_blocks)
        self.files = files

    def find(self, name: str) -> str:
        """Return the name of a tensor in the file; "" where it has no place."""
        if expert := _EXPERT.fullmatch(name):
            known = f"FFN_{expert['part'].upper()}_EXP" in self.kinds
            return f"blk.{expert['block']}.ffn_{expert['part']}_exps.{expert['leaf']}" if known else ""
        for base in dict.fromkeys((self.files.tensor(name), name)):
            inner = base.partition(".")[2]
            for full in (base, *(f"{root}{rest}" for rest in (base, inner) for root in self.roots)):
                for stem, suffix in _split_leaf(full):
                    if found := self.map.get_type_and_name(stem):
                        return found[1] + (suffix if suffix is not None else _usual_suffix(found[0].name))
        return ""


@cache
def _name_map(architecture: str, n_blocks: int) -> tuple[Any, tuple[str, ...], frozenset[str]]:
    """Return the map of an architecture, what names in it begin with, and its kinds of tensors."""
    import gguf

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    # gguf 0.19 writes what one architecture has for its own into the table of all of them
    table = gguf.TensorNameMap.block_mappings_cfg
    gguf.TensorNameMap.block_mappings_cfg = dict(table)
    try:
        names = gguf.get_tensor_name_map(arch, n_blocks)
    finally:
        gguf.TensorNameMap.block_mappings_cfg = table
    roots = sorted({f"{key.split('.')[0]}." for key in names.mapping if "." in key and not key.startswith("blk.")})
    return names, ("", *roots), frozenset(kind.name for kind in gguf.MODEL_TENSORS[arch])


def _split_leaf(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield ways to take a name as a stem that the map has and what follows it; None: what its kind has."""
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            yield from ((name, ""), (name.removesuffix(suffix), suffix))
    if name.endswith("_bias"):
        stem = name.removesuffix("_bias")
        yield from ((stem, ".bias"), (f"{stem}_proj", ".bias"))
    yield name, None


def _usual_suffix(kind: str) -> str:
    if kind in ("SSM_A", "SSM_D"):
        return ""
    return ".bias" if kind.endswith("_B") else ".weight"


def _find_heads(config: Mapping[str, Any]) -> _Heads:
    query = config.get("num_attention_heads") or 1
    query = max(query) if isinstance(query, list) else query
    key = config.get("num_key_value_heads") or config.get("num_kv_heads") or query
    key = max(key) if isinstance(key, list) else key
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        key = 1
    size = config.get("head_dim") or config.get("kv_channels") or config.get("hidden_size", query) // query
    return _Heads(
        query,
        key,
        size,
        count_turned(config, size),
        config.get("linear_num_key_heads") or 0,
        config.get("linear_num_value_heads") or 0,
        config.get("linear_value_head_dim") or 0,
    )


def count_turned(config: Mapping[str, Any], size: int) -> int:
    """Return how many of a head's rows rope turns."""
    if config.get("qk_rope_head_dim"):
        return int(config["qk_rope_head_dim"])
    if config.get("rotary_dim"):
        return int(config["rotary_dim"])
    both = config.get("rope_parameters") or {}
    rope = both.get("full_attention", both) or {}
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct") or 1.0
    return int(size * part)


def _arrange(
    entry: TensorEntry, form: GgufForm, heads: _Heads, config: Mapping[str, Any], names: _Names
) -> list[TensorEntry]:
    """Return what the file holds of a tensor that has a name in it."""
    stem = entry.stem
    if stem == "attn_kv_b" and "ATTN_K_B" in names.kinds and entry.matrix:
        return _split_latent(entry, heads, config)
    rows = None
    if stem == "attn_qkv" and form.groups:
        # queries, then keys, then values, which lie by groups of heads that share a key
        each = heads.query // heads.key
        groups = np.arange((heads.query + 2 * heads.key) * heads.size).reshape(heads.key, each + 2, heads.size)
        rows = np.concatenate([groups[:, :each].ravel(), groups[:, each].ravel(), groups[:, each + 1].ravel()])
    elif form.pairs and stem in _PAIRED:
        rows = _pair(stem, entry.shape[0], heads)
    elif form.tiled and stem in _TILED and heads.value_heads > heads.key_heads > 0:
        rows = _tile(entry.shape[0], heads)
    if rows is not None and len(rows) == entry.shape[0]:
        entry = replace(entry, rows=rows)
    change = _choose_change(entry, form, heads, config)
    if change is None:
        return [entry]
    return [replace(entry, change=change, shape=change(np.broadcast_to(np.float32(0), entry.shape)).shape)]


def _choose_change(
    entry: TensorEntry, form: GgufForm, heads: _Heads, config: Mapping[str, Any]
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return what a tensor's kind asks for beside the order of its rows."""
    stem, shape = entry.stem, entry.shape
    module, _, leaf = entry.name.rpartition(".")
    offset = form.offsets.get(mask_numbers(module), 0.0) if leaf == "weight" else 0.0
    if offset:
        return lambda values: values + np.float32(offset)
    if stem == "ssm_a":
        column = form.columns and len(shape) == 1
        return lambda values: _stand(-np.exp(values), column)
    if form.columns and stem == "ssm_d" and len(shape) == 1:
        return lambda values: _stand(values, True)
    if form.columns and stem == "ssm_norm" and len(shape) == 1:
        groups = next((config[key] for key in ("n_groups", "mamba_n_groups") if config.get(key)), 1)
        return lambda values: values.reshape(groups, -1)
    if len(shape) == 3 and shape[1] == 1:  # a kernel along time
        if stem.startswith("ssm_conv1d_"):
            return lambda values: values.reshape(1, shape[0], 1, shape[2])
        return lambda values: values[:, 0]
    if form.tiled and stem == "ssm_out" and heads.value_heads > heads.key_heads > 0:
        columns = _tile_heads(heads.key_heads, heads.value_heads, shape[1] // heads.value_heads)
        return lambda values: values[:, columns]
    return None


def _stand(values: np.ndarray, column: bool) -> np.ndarray:
    return values[:, None] if column else values


def _split_latent(entry: TensorEntry, heads: _Heads, config: Mapping[str, Any]) -> list[TensorEntry]:
    """Return what makes keys and what makes values of a latent vector, of each head: [heads, ., .]."""
    plain_size, value_size, rank = config["qk_nope_head_dim"], config["v_head_dim"], entry.shape[1]
    rows = np.arange(entry.shape[0]).reshape(heads.query, plain_size + value_size)
    keys, values = rows[:, :plain_size].reshape(-1), rows[:, plain_size:].reshape(-1)
    return [
        replace(
            entry,
            written=entry.written.replace("attn_kv_b", "attn_k_b"),
            rows=keys,
            change=lambda array: array.reshape(heads.query, plain_size, rank).swapaxes(1, 2),
            shape=(heads.query, rank, plain_size),
        ),
        replace(
            entry,
            written=entry.written.replace("attn_kv_b", "attn_v_b"),
            rows=values,
            change=lambda array: array.reshape(heads.query, value_size, rank),
            shape=(heads.query, value_size, rank),
        ),
    ]


def _split_stack(name: str, shape: tuple[int, ...], names: _Names, tensors: Mapping[str, Any]) -> list[TensorEntry]:
    """Return gate and up, or down, of all experts in one parameter: [experts, out, in], or [experts, in, out]."""
    parent, _, leaf = name.rpartition(".")
    block = re.search(r"\.(\d+)\.", name)
    down, both = tensors.get(f"{parent}.down_proj"), tensors.get(f"{parent}.gate_up_proj")
    if block is None or len(shape) != 3 or down is None or both is None or "FFN_DOWN_EXP" not in names.kinds:
        return []
    turned = both.shape[2] == 2 * down.shape[1]
    straight = (shape[0], shape[2], shape[1]) if turned else shape
    written = f"blk.{block[1]}.ffn_%s_exps.weight"
    if leaf == "down_proj":
        return [TensorEntry(name, written % "down", straight, True, change=lambda values: _turn(values, turned))]
    middle = straight[1] // 2

    def take(part: str, first: int) -> TensorEntry:
        size = (straight[0], middle, straight[2])
        change = lambda values: _turn(values, turned)[:, first : first + middle]  # noqa: E731
        return TensorEntry(name, written % part, size, True, change=change)

    return [take("gate", 0), take("up", middle)]


def _turn(stack: np.ndarray, turned: bool) -> np.ndarray:
    return stack.swapaxes(1, 2) if turned else stack


def _split_halves(name: str, shape: tuple[int, ...], names: _Names, tensors: Mapping[str, Any]) -> list[TensorEntry]:
    """Return gate and up of a matrix that holds both: one whose neighbour goes down from half as many inputs."""
    parent = name.rpartition(".")[0].rpartition(".")[0]
    if not name.endswith(".weight") or len(shape) != 2:
        return []
    for other, tensor in tensors.items():
        if other.startswith(f"{parent}.") and other.endswith(".weight") and tuple(tensor.shape)[1:] == (shape[0] // 2,):
            down = names.find(other)
            if ".ffn_down" in down:
                halves = np.arange(shape[0]).reshape(2, -1)
                return [
                    TensorEntry(name, down.replace("ffn_down", f"ffn_{part}"), (shape[0] // 2, shape[1]), True, rows)
                    for part, rows in zip(("gate", "up"), halves, strict=True)
                ]
    return []


def pair_rows(n_heads: int, size: int, turned: int) -> np.ndarray:
    """Return the rows of heads in the order that puts row i beside row i + half of those that rope turns."""
    rows = np.arange(n_heads * size).reshape(n_heads, size)
    front = rows[:, :turned].reshape(n_heads, 2, turned // 2).swapaxes(1, 2).reshape(n_heads, turned)
    return np.concatenate([front, rows[:, turned:]], axis=1).reshape(-1)


def _pair(stem: str, n_rows: int, heads: _Heads) -> np.ndarray | None:
    if n_rows % heads.size or heads.turned % 2:
        return None
    if stem != "attn_qkv":
        return pair_rows(n_rows // heads.size, heads.size, heads.turned)
    first = (heads.query + heads.key) * heads.size
    rest = np.arange(first, n_rows)
    return np.concatenate([pair_rows(heads.query + heads.key, heads.size, heads.turned), rest])


def _tile(n_rows: int, heads: _Heads) -> np.ndarray | None:
    """Return the rows with their last ones, those of value heads, by their number within a key head."""
    values = heads.value_heads * heads.value_size
    if n_rows < values:
        return _tile_heads(heads.key_heads, heads.value_heads, 1) if n_rows == heads.value_heads else None
    front = n_rows - values
    tiled = _tile_heads(heads.key_heads, heads.value_heads, heads.value_size)
    return np.concatenate([np.arange(front), front + tiled])


def _tile_heads(key_heads: int, value_heads: int, size: int) -> np.ndarray:
    rows = np.arange(value_heads * size).reshape(key_heads, value_heads // key_heads, size)
    return rows.swapaxes(0, 1).reshape(-1)
