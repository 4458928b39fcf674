"""Which form of GGUF makes llama.cpp compute what a model computes: found by trying, on a small model of the same kind.

The small model has the model's class and configuration, with narrower layers and random weights. It is written in the
forms that its tensors allow, for each architecture that has a place for them, until a reader's logits are torch's; then
the model itself is written in that form. The reader is llama.cpp where llama-cpp-python is installed, else
transformers, which reads some architectures, and those as llama.cpp's own converter writes them. What no form makes
right is refused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.experts import unstack_experts
from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain, tied_names
from compress.blocks.sizes import UNFIT_NUMBERS, transformers_config
from compress.export.gguf_metadata import Metadata, add_key, describe_config, end_with_window, write_all
from compress.export.gguf_tensors import GgufForm, TensorEntry, count_blocks, list_tensors, mask_numbers
from compress.models.huggingface import quiet
from runtime.processes.isolated import last_line, python_command, python_environment

N_TOKENS, VOCABULARY, WINDOW, EXPERTS, SHALLOW, WIDE = 40, 256, 16, 16, 8, 256
WINDOWS = ("sliding_window", "attention_chunk_size")
LARGEST = 160_000_000
"""Parameters of the small model: a bound, not measured."""
CLOSE = 4e-3
"""Of logits over their deviation. Measured: 1e-6 to 2e-5 where all is right, 3e-3 where llama.cpp looks GELU up in a
table of half floats, 0.05 and more where a form is wrong."""
SECONDS = 60
"""After them a file that llama.cpp does not answer on is none for it."""
_WAY_OUT = "use target: transformers, which runs the model's own code on a checkpoint"
_DIVIDED = re.compile(
    r"hidden_size|d_model|n_embd|(mamba_)?(num|n)_?(attention_|key_value_|kv_|linear_(key|value)_|mamba_)?heads?(_kv)?|n_heads?"
    r"|.*(intermediate|ffn_hidden)_size.*|ffn_dim|d_ff|n_inner|mamba_d_ssm|.*_num_(key|value)_heads"
)


@dataclass(frozen=True)
class GgufFinding:
    """`form`: in which a model is written; None where it is not, which `problem` explains. `window`: it has its own.

    `reader`: what computed the same, in words.
    """

    form: GgufForm | None
    problem: str = ""
    window: bool = True
    reader: str = ""


_FOUND: dict[str, GgufFinding] = {}


def find_form(module: nn.Module) -> GgufFinding:
    """Return the form in which a model of transformers, without values, is written as GGUF."""
    wrapped: Any = getattr(module, "wrapped", module)
    config = transformers_config(module)
    key = f"{type(wrapped).__qualname__} {config.to_json_string(use_diff=False)} {find_spec('llama_cpp') is None}"
    if key not in _FOUND:
        _FOUND[key] = _find_form(wrapped, config)
    return _FOUND[key]


def read_model(module: nn.Module) -> dict[str, Any]:
    """Return a model's configuration, also under the names that transformers has for all, and what its code adds.

    `norm_epsilon` is what most norms add to a variance; a number of layers and sections of rope stand there where the
    configuration has none.
    """
    config = transformers_config(module)
    values: dict[str, Any] = config.to_dict()
    values = {name: values[own] for name, own in getattr(config, "attribute_map", {}).items() if own in values} | values
    blocks = [int(found[1]) for name in module.state_dict() if (found := re.search(r"\.(\d+)\.", name))]
    values.setdefault("num_hidden_layers", max(blocks, default=-1) + 1)
    epsilons = Counter(
        float(value)
        for name, part in module.named_modules()
        for key in ("variance_epsilon", "eps", "epsilon", "norm_eps")
        if re.search(r"norm|ln_", name.rpartition(".")[2]) and isinstance(value := getattr(part, key, None), float)
    )
    if epsilons:
        values["norm_epsilon"] = epsilons.most_common(1)[0][0]
    for part in module.modules():
        if isinstance(section := getattr(part, "mrope_section", None), list | tuple):
            values.setdefault("mrope_section", list(section))
    return values


def describe_form(
    module: nn.Module, config: Mapping[str, Any], finding: GgufFinding, tied: Collection[str]
) -> tuple[list[TensorEntry], Metadata]:
    """Return the tensors and keys of a model in the form that was found for it."""
    assert finding.form is not None
    entries, homeless = list_tensors(module, config, finding.form, tied)
    made = describe_config(config, entries, finding.form)
    made.problems.extend(f"{name} has no place in llama.cpp's {finding.form.architecture}" for name in homeless)
    if not finding.window and (window := next((config[name] for name in WINDOWS if config.get(name)), 0)):
        end_with_window(made, window, finding.form.architecture)
    return entries, made


class _GgufReader(Protocol):
    """What computes a file's logits. `name`: in words."""

    name: str

    def compute(self, file: Path) -> np.ndarray | str:
        """Return logits [tokens, vocabulary], or why there are none."""


@dataclass(frozen=True)
class _SmallModel:
    """A small model: what it computes, and its tensors' values by their plain names."""

    module: nn.Module
    config: dict[str, Any]
    tokens: list[int]
    logits: np.ndarray
    values: Mapping[str, np.ndarray]
    offsets: Mapping[str, float]
    tied: Collection[str]


def _find_form(model: Any, config: Any) -> GgufFinding:
    """Try forms on a shallow model, and the one that is right on one as deep as the model.

    llama.cpp computes some depths otherwise: where no form is right of a shallow model, those of its name are tried on
    the deep one. All that without a window at last.
    """
    kind = getattr(config, "model_type", type(model).__name__)
    why = ""
    with tempfile.TemporaryDirectory(prefix="compress-gguf-") as folder:
        for windowed in (True, False):
            try:
                trials = [_make_trial(model, config, windowed, most) for most in (SHALLOW, None)]
            except UNFIT_NUMBERS as error:
                return GgufFinding(
                    None, f"no small model of type {kind} can be made to try GGUF with ({error}); {_WAY_OUT}"
                )
            shallow, deep = trials
            with _open_reader(Path(folder), shallow) as reader:
                search, last = (_FormSearch(trial, reader, Path(folder)) for trial in trials)
                form = search.find(kind, type(model).__name__)
                if deep.config["num_hidden_layers"] > shallow.config["num_hidden_layers"]:
                    right = form is not None and last.is_right(form)
                    form = form if right else last.find(kind, type(model).__name__, own_alone=True)
                if form is not None:
                    return GgufFinding(form, "", windowed, reader.name)
                why = why or search.explain()
            if not any(config.to_dict().get(name) for name in WINDOWS):
                break
    if find_spec("llama_cpp") is None:
        why += "; pip install llama-cpp-python, by which more are tried"
    return GgufFinding(None, f"models of type {kind} are not written as GGUF: {why}; {_WAY_OUT}")


class _FormSearch:
    """Forms of a small model, tried one after another. `best`: the smallest difference and its architecture."""

    def __init__(self, trial: _SmallModel, reader: _GgufReader, folder: Path) -> None:
        self.trial, self.reader, self.folder = trial, reader, folder
        self.best, self.nearest = float("inf"), ""
        self.said: dict[str, str] = {}
        self.homeless: list[tuple[int, str, list[str]]] = []

    def is_right(self, form: GgufForm) -> bool:
        """Return whether a form is right."""
        answer = self._try(form)
        return not isinstance(answer, str) and answer <= CLOSE

    def find(self, kind: str, class_name: str, own_alone: bool = False) -> GgufForm | None:
        """Return the first form that is right; where the model's own architecture computes, of that one alone."""
        own, others = order_architectures(kind, class_name)
        for architecture in own if own_alone else (*own, *others):
            if architecture not in own and self.nearest in own:
                break
            try:
                form = self._find_in(architecture)
            except UNFIT_NUMBERS as error:  # its configuration says otherwise what is looked for
                self.said.setdefault(architecture, f"{type(error).__name__}: {error}")
                continue
            if form is not None:
                return form
        return None

    def _find_in(self, architecture: str) -> GgufForm | None:
        """Return the first form of an architecture that is right."""
        trial, base = self.trial, GgufForm(architecture, offsets=self.trial.offsets)
        entries, homeless = list_tensors(trial.module, trial.config, base, trial.tied)
        if homeless:
            self.homeless.append((len(homeless), architecture, homeless))
            return None
        for outer in self._list_choices(entries, _SHAPING):
            for inner in self._list_choices(entries, _ARRANGING):
                form = replace(base, **outer, **inner)
                answer = self._try(form)
                if isinstance(answer, str):
                    self.said.setdefault(architecture, answer)
                    break  # what is not loaded is not for the order of its rows
                if answer < self.best:
                    self.best, self.nearest = answer, architecture
                if answer <= CLOSE:
                    return form
        return None

    def explain(self) -> str:
        """Return why no form is right."""
        if np.isfinite(self.best):
            return (
                f"{self.reader.name} computes otherwise as {self.nearest}, by {self.best:.2g} of its logits' deviation"
            )
        if self.said:
            architecture, said = next(iter(self.said.items()))
            return f"{self.reader.name} does not take it as {architecture}: {said}"
        if not self.homeless:
            return f"{self.reader.name} computes no finite logits"
        _, architecture, names = min(self.homeless)
        return f"{names[0]} has no place in {architecture}, the nearest of gguf {version('gguf')}'s architectures"

    def _try(self, form: GgufForm) -> float | str:
        """Return the difference of a reader's logits over the deviation of torch's, or why there are none."""
        trial = self.trial
        entries, _ = list_tensors(trial.module, trial.config, form, trial.tied)
        made = describe_config(trial.config, entries, form)
        if made.problems:
            return made.problems[0]
        file = self.folder / "trial.gguf"
        import gguf

        writer = gguf.GGUFWriter(file, form.architecture)
        for key, value in made.values.items():
            add_key(writer, f"{form.architecture}.{key}", value)
        writer.add_tokenizer_model("no_vocab")
        writer.add_token_list([f"t{i}" for i in range(made.values["vocab_size"])])
        for entry in entries:
            parts = [entry.convert(trial.values[name]) for name in entry.experts or (entry.name,)]
            array = np.stack(parts) if entry.experts else parts[0]
            writer.add_tensor(entry.written, np.ascontiguousarray(array, np.float32))
        for written, factors in made.factors.items():
            writer.add_tensor(written, factors)
        write_all(writer)
        found = self.reader.compute(file)
        if isinstance(found, str):
            return found
        width = min(found.shape[1], trial.logits.shape[1])
        apart = np.abs(found[:, :width] - trial.logits[:, :width]).max() / trial.logits.std()
        return float(apart) if np.isfinite(apart) else float("inf")

    def _list_choices(self, entries: Sequence[TensorEntry], choices: Mapping[str, Callable[..., Sequence[Any]]]) -> Any:
        options = {name: choose(entries, self.trial.config) for name, choose in choices.items()}
        return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


def _has(entries: Sequence[TensorEntry], *stems: str) -> bool:
    return any(entry.stem in stems for entry in entries)


def _choose_gating(entries: Sequence[TensorEntry], config: Mapping[str, Any]) -> Sequence[int]:
    """Return GGUF's numbers of ways to make a router's scores probabilities: softmax, sigmoid; 0: not told."""
    return (0, 1, 2) if _has(entries, "ffn_gate_inp") else (0,)


_SHAPING: dict[str, Callable[..., Sequence[Any]]] = {
    "output": lambda entries, config: (False, True) if not _has(entries, "output") else (False,),
    "columns": lambda entries, config: (
        (False, True) if any(e.stem == "ssm_a" and len(e.shape) == 1 for e in entries) else (False,)
    ),
    "listed": lambda entries, config: (
        (True, False)
        if len({e.block for e in entries if e.stem in ("attn_output", "attn_k")}) < count_blocks(config)
        else (True,)
    ),
    "gating": _choose_gating,
}
"""Field of a form -> what it may be, for what decides whether a file is loaded."""
_ARRANGING: dict[str, Callable[..., Sequence[Any]]] = {
    "tiled": lambda entries, config: (
        (False, True)
        if (config.get("linear_num_value_heads") or 0) > (config.get("linear_num_key_heads") or 0)
        else (False,)
    ),
    "groups": lambda entries, config: (
        (False, True) if _has(entries, "attn_qkv") and not _has(entries, "ssm_a") else (False,)
    ),
    "pairs": lambda entries, config: (False, True) if _has(entries, "attn_q", "attn_k", "attn_qkv") else (False,),
}


def order_architectures(kind: str, class_name: str) -> tuple[list[str], list[str]]:
    """Return GGUF's architectures: those whose name is the model type's or the class's, and the others."""
    import gguf

    def normalize(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    words = (kind, kind.removesuffix("_text"), re.sub(r"For[A-Z].*|LM.*", "", class_name))
    own, names = {normalize(word) for word in words}, list(gguf.MODEL_ARCH_NAMES.values())
    return [name for name in names if normalize(name) in own], [name for name in names if normalize(name) not in own]


@contextlib.contextmanager
def _open_reader(folder: Path, trial: _SmallModel) -> Iterator[_GgufReader]:
    if find_spec("llama_cpp") is None:
        yield _Transformers(trial)
        return
    reader = _LlamaCpp(folder, trial.tokens)
    try:
        yield reader
    finally:
        reader.close()


class _LlamaCpp:
    """llama.cpp in a process that is started anew where a file ended it."""

    def __init__(self, folder: Path, tokens: Sequence[int]) -> None:
        self.name = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
        self.folder, self.tokens = folder, list(tokens)
        self.process: subprocess.Popen[str] | None = None

    def compute(self, file: Path) -> np.ndarray | str:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                python_command("from compress.export.llamacpp_logits import main; main()"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self.folder / "stderr").open("w"),
                encoding="utf-8",
                env=python_environment(),
            )
        logits = self.folder / "logits.npy"
        job = {"file": str(file), "tokens": self.tokens, "logits": str(logits)}
        assert self.process.stdin is not None and self.process.stdout is not None
        sent, given = self.process.stdin, self.process.stdout
        limit = threading.Timer(SECONDS, self.process.kill)
        limit.start()
        try:
            sent.write(json.dumps(job) + "\n")
            sent.flush()
            answer = given.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            limit.cancel()
        if not answer:
            self.process.wait(SECONDS)
            errors = (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")
            said = next((line for line in errors.splitlines() if "ASSERT" in line), last_line(errors))
            return f"it ends its process (exit code {self.process.returncode}) {said}".rstrip()
        return str(json.loads(answer)) or np.load(logits)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


class _Transformers:
    """transformers' reader of GGUF files. Scaled rope, and some sizes, are not among what it reads: the model's own are
    taken."""

    def __init__(self, trial: _SmallModel) -> None:
        self.name, self.trial = f"transformers {version('transformers')}", trial

    def compute(self, file: Path) -> np.ndarray | str:
        from transformers import AutoModelForCausalLM

        sizes = {name: size for name, size in self.trial.config.items() if re.search("intermediate_size$", name)}
        settings = {"dtype": torch.float32, "attn_implementation": "eager", "pad_token_id": None, **sizes}
        rope = self.trial.config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            settings["rope_parameters"] = self.trial.config["rope_parameters"]
        try:
            with quiet():
                model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **settings)
        except Exception as error:  # noqa: BLE001  (whatever a reader raises of a file that it does not know)
            return " ".join(str(error).split())[:200]
        return _compute_logits(model.eval(), self.trial.tokens)


@torch.no_grad()
def _compute_logits(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    logits: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float().numpy()


def _make_trial(model: Any, config: Any, windowed: bool, most: int | None) -> _SmallModel:
    """Return a small model of the class. UNFIT_NUMBERS where its code refuses all that are tried."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        small = _build_small(type(model), config, windowed, most)
        layers = {f"{name}.weight" for name, part in small.named_modules() if is_layer(part)}
        with torch.no_grad():
            for name, tensor in small.state_dict(keep_vars=True).items():
                if not tensor.is_floating_point():
                    continue
                noise = torch.randn_like(tensor)
                if name in layers or tensor.dim() == 3:
                    fan_in = tensor[0].numel() if name in layers else tensor.shape[-1]
                    tensor.copy_(noise / fan_in**0.5)
                else:
                    tensor.add_(0.1 * noise)
        settings = read_model(small)
        generator = np.random.default_rng(0)
        tokens = generator.integers(settings["vocab_size"] // 8, settings["vocab_size"], N_TOKENS).tolist()
        logits = _compute_logits(small, tokens)
    finally:
        torch.random.set_rng_state(state)
    unstack_experts(small)
    values = {plain(name): tensor.detach().float().numpy() for name, tensor in small.state_dict().items()}
    norms = {
        mask_numbers(plain(name)): part
        for name, part in small.named_modules()
        if isinstance(weight := getattr(part, "weight", None), Tensor) and weight.dim() == 1
    }
    # what norms add to their weights as they compute
    offsets = {name: offset for name, part in norms.items() if (offset := _probe_offset(part))}
    return _SmallModel(small, settings, tokens, logits, values, offsets, tied_names(small))


def _build_small(kind: Any, config: Any, windowed: bool, most: int | None) -> nn.Module:
    """Build the narrowest model that the class takes, of `most` layers: widths and numbers of heads divided alike."""
    first: Exception | None = None
    depths = [most] if most is not None else [None, SHALLOW]
    for depth, divisor in product(depths, (64, 32, 16, 8, 4, 2, 1)):
        smaller = _shrink(config, divisor, windowed)
        if smaller is None:
            continue
        if depth is not None:
            _cut_layers(smaller, depth)
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(copy.deepcopy(smaller)).parameters())
            if size > LARGEST:
                raise ValueError(f"it has {size} parameters")
            model: nn.Module = kind._from_config(smaller, dtype=torch.float32, attn_implementation="eager")
            model.eval().requires_grad_(requires_grad=False)
            if not np.isfinite(_compute_logits(model, range(8))).all():
                raise ValueError("its logits are not finite")
            return model
        except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
            first = first or error
    raise ValueError(str(first))


def _shrink(config: Any, divisor: int, windowed: bool) -> Any:
    """Return a configuration whose widths and numbers of heads are divided; None where one cannot be."""
    values = config.to_dict()
    smaller = copy.deepcopy(config)
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "intermediate" in name and value > WIDE and value % 64 == 0:
            setattr(smaller, name, 64 * max(1, WIDE // 64 // (4 if "moe" in name else 1)))
        elif _DIVIDED.fullmatch(name) and value > 2:
            if value % divisor or ("head" in name and value // divisor < 2):
                return None
            setattr(smaller, name, value // divisor)
        elif re.fullmatch(r"vocab_size|vocab_size_per_layer_input", name):
            setattr(smaller, name, min(value, VOCABULARY))
        elif name.endswith("token_id") and value >= VOCABULARY:
            setattr(smaller, name, None)
        elif name in WINDOWS:
            setattr(smaller, name, WINDOW if windowed else 2 * N_TOKENS)
        elif re.fullmatch(r"(num|n|moe_num)_(local_|routed_)?experts", name) and value > EXPERTS:
            groups = values.get("n_group") or 1
            setattr(smaller, name, max(1, EXPERTS // groups) * groups)
    for name, value in values.items():
        if name.endswith("token_id") and isinstance(value, list):
            setattr(smaller, name, None)
    return smaller


def _cut_layers(config: Any, most: int) -> None:
    """Keep the first layers of a configuration, in place, with what is said of each."""
    n = config.num_hidden_layers
    if n <= most:
        return
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == n:
            setattr(config, name, value[:most])
    with contextlib.suppress(AttributeError):  # some count what is said of each
        config.num_hidden_layers = most


@torch.no_grad()
def _probe_offset(part: nn.Module) -> float:
    """Return a norm's offset: what it gives with weights of 0 over how that changes with weights of 1."""
    probe: Any = copy.deepcopy(part)
    x = torch.randn(4, len(probe.weight), generator=torch.Generator().manual_seed(0))
    try:
        if getattr(probe, "bias", None) is not None:
            probe.bias.zero_()
        probe.weight.zero_()
        without = probe(x).clone()
        probe.weight.fill_(1.0)
        with_ones = probe(x)
    except Exception:  # noqa: BLE001  (it is called otherwise than a norm)
        return 0.0
    change = with_ones - without
    offset = float((without * change).sum() / change.square().sum().clamp_min(1e-20))
    return round(offset, 4) if torch.allclose(without, offset * change, atol=1e-4) else 0.0
