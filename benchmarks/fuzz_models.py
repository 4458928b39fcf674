"""Random ONNX graphs and torch modules through plan, apply and the bundle: what holds of every model.

    .venv/bin/python benchmarks/fuzz_models.py [--graphs 500] [--modules 300] [--first 0]

Of each model: it runs in ONNX Runtime; plan says yes, or no in a sentence, with exit code 2; what plan takes, apply
does, but where the source gives NaN for the data; the float graph of the bundle answers as the source does; a sample is
answered alone as beside others; the sizes that the plan says are those of the file. Nothing is timed, and all is done
in this process. One line for each model that breaks a rule, with the number that makes it again; exit code 1 where
there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import runtime
from compress.errors import CompressError
from compress.execution.run import apply_recipe
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from runtime.errors import RuntimeFailure

SAMPLES = 12
LAYERS = (2, 7)
NAMES = ("x", "onnx::Conv_7", "a b", "é", "/model/0/out.1", "prediction", "score", "label_", "0", "batch", "w'\"w")
MODULE = """
import sys
sys.path.insert(0, {here!r})
from fuzz_models import make_module

def build():
    return make_module({seed})
"""
SPARE_BYTES = 4096
"""Of a file beside its tensors: names, nodes; each node takes some 100 bytes more."""


PASSES = (
    {"kind": "int8"},
    {"kind": "rtn", "indivisible": "fit"},
    {"kind": "int8"},
    {"kind": "int8", "mode": "dynamic"},
)


class Graphs:
    """Builds one random ONNX graph: a chain of nodes over float32 [N, ...], here and there joined with one before.

    Every fifth reads float16.
    """

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        newest = min(onnx.defs.onnx_opset_version(), 23)  # the newest that ONNX Runtime 1.31 runs all of these in
        self.opset = int(self.chance.integers(7, newest + 1))
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}
        self.names = iter(self._draw_names())
        image = self.chance.random() < 0.5
        self.shape: tuple[int, ...] = tuple(int(n) for n in self.chance.integers(3, 9, 3 if image else self.pick(1, 2)))
        self.input, self.input_shape = next(self.names), self.shape
        self.value = self.input
        self.batch: Any = self.pick("n", "n", "n", "", 1)
        self.half = seed % 5 == 4
        if self.half:
            self.add("Cast", self.input, to=TensorProto.FLOAT)

    def _draw_names(self) -> Iterator[str]:
        odd = list(self.chance.permutation(NAMES))
        number = 0
        while True:
            number += 1
            yield str(odd.pop()) if odd and self.chance.random() < 0.3 else f"v{number}"

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.chance.integers(len(choices)))]

    def constant(self, values: Any) -> str:
        array = np.asarray(values)
        if array.dtype.kind == "f":
            array = array.astype(np.float32)
            alike = [
                name
                for name, other in self.weights.items()
                if other.shape == array.shape and other.dtype == array.dtype
            ]
            if alike and self.chance.random() < 0.4:
                return str(self.pick(*alike))  # shared by several nodes
        name = next(self.names)
        self.weights[name] = array
        return name

    def normal(self, *shape: int) -> str:
        fan = max(int(np.prod(shape[1:])), 1)
        return self.constant(self.chance.standard_normal(shape) / np.sqrt(fan))

    def add(
        self, kind: str, *inputs: str, shape: tuple[int, ...] | None = None, outputs: int = 1, **attributes: Any
    ) -> str:
        names = [next(self.names) for _ in range(outputs)]
        name = self.pick("", f"node {len(self.nodes)}")
        self.nodes.append(helper.make_node(kind, list(inputs), names, name, **attributes))
        self.value = names[0]
        self.shape = self.shape if shape is None else shape
        return names[0]

    def build(self) -> onnx.ModelProto:
        for _ in range(int(self.chance.integers(*LAYERS))):
            kinds = [
                self.activate,
                self.affine,
                self.branch,
                self.join,
                self.turn,
                self.reduce,
                self.product,
                self.product,
            ]
            kinds += [self.convolve, self.convolve, self.normalise, self.pool] if len(self.shape) == 3 else []
            self.pick(*kinds)()
        if self.pick(True, False) or not any(node.op_type in ("Conv", "Gemm", "MatMul") for node in self.nodes):
            self.product()
        head = next(self.names)
        self.nodes[-1].output[0] = self.value if self.value != self.input else head
        free = None if self.batch == "" else self.batch
        ends = [
            [helper.make_tensor_value_info(name, kind, [free, *shape])]
            for name, kind, shape in (
                (self.input, TensorProto.FLOAT16 if self.half else TensorProto.FLOAT, self.input_shape),
                (self.nodes[-1].output[0], TensorProto.FLOAT, self.shape),
            )
        ]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        if self.opset < 9 and self.pick(True, False):  # as old exporters list them
            ends[0] += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
        graph = helper.make_graph(self.nodes, "random", ends[0], ends[1], tensors)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=min(10, 3 + self.opset // 3)
        )

    def activate(self) -> None:
        kind = self.pick("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Softplus", "Elu", "Abs", "Identity", "Neg")
        self.add(kind, self.value)

    def affine(self) -> None:
        ones = [1] * len(self.shape)
        axis = int(self.chance.integers(len(ones)))
        ones[axis] = self.shape[axis]
        shape = self.pick((), tuple(ones), self.shape, self.shape[-1:])
        values = self.chance.uniform(0.5, 1.5, shape)
        kind = self.pick("Add", "Mul", "Sub", "Div")
        pair = (self.value, self.constant(values))
        turned = kind != "Div" and self.pick(True, False, False)
        self.add(kind, *(pair[::-1] if turned else pair))

    def join(self) -> None:
        before, shape = self.value, self.shape
        self.activate()
        kind = self.pick("Add", "Mul", "Concat", "Max")
        if kind == "Concat":
            axis = int(self.chance.integers(len(shape))) + 1
            wide = tuple(n * (2 if i == axis - 1 else 1) for i, n in enumerate(shape))
            self.add(kind, before, self.value, axis=axis, shape=wide)
        else:
            self.add(kind, before, self.value)

    def turn(self) -> None:
        order = [int(i) for i in self.chance.permutation(len(self.shape))]
        turned = tuple(self.shape[i] for i in order)
        if self.pick(True, False):
            self.add("Transpose", self.value, perm=[0, *(i + 1 for i in order)], shape=turned)
        else:
            self.add("Reshape", self.value, self.constant(np.array([-1, *turned], np.int64)), shape=turned)

    def reduce(self) -> None:
        if len(self.shape) < 2:
            self.activate()
            return
        axis = int(self.chance.integers(len(self.shape)))
        kept = int(self.chance.integers(2))
        shape = tuple(n for i, n in enumerate(self.shape) if i != axis) if not kept else None
        shape = shape or tuple(1 if i == axis else n for i, n in enumerate(self.shape))
        kind = self.pick("ReduceMean", "ReduceMax")
        if self.opset >= 18:
            self.add(kind, self.value, self.constant(np.array([axis + 1], np.int64)), keepdims=kept, shape=shape)
        else:
            self.add(kind, self.value, axes=[axis + 1], keepdims=kept, shape=shape)

    def product(self) -> None:
        width, out = self.shape[-1], int(self.chance.integers(1, 17))
        if len(self.shape) == 1 and self.pick(True, False):
            turned = self.pick(0, 1)
            weight = self.normal(*((out, width) if turned else (width, out)))
            bias = [self.constant(self.chance.standard_normal(self.pick((out,), (1, out), (1,), ())))]
            bias = bias if self.opset < 11 else self.pick(bias, [])
            self.add("Gemm", self.value, weight, *bias, transB=turned, alpha=self.pick(1.0, 0.5), shape=(out,))
        elif len(self.shape) == 2 and self.pick(True, False, False):
            self.add(
                "MatMul", self.normal(out, self.shape[0]), self.value, shape=(out, width)
            )  # the weight comes first
        else:
            self.add("MatMul", self.value, self.normal(width, out), shape=(*self.shape[:-1], out))

    def convolve(self) -> None:
        channels, height, width = self.shape
        groups = self.pick(*[n for n in range(1, channels + 1) if channels % n == 0])
        out, size = groups * int(self.chance.integers(1, 4)), self.pick(1, 3)
        bias = self.pick([], [self.constant(self.chance.standard_normal(out))])
        pads = [size // 2] * 4
        if self.pick(True, True, False):
            self.add(
                "Conv",
                self.value,
                self.normal(out, channels // groups, size, size),
                *bias,
                group=groups,
                pads=pads,
                shape=(out, height, width),
            )
        else:
            self.add(
                "ConvTranspose",
                self.value,
                self.normal(channels, out // groups, size, size),
                *bias,
                group=groups,
                pads=pads,
                shape=(out, height, width),
            )

    def normalise(self) -> None:
        n = self.shape[0]
        four = [self.constant(self.chance.uniform(0.5, 2, n)) for _ in range(4)]
        self.add("BatchNormalization", self.value, *four)

    def pool(self) -> None:
        if self.pick(True, False):
            self.add("GlobalAveragePool", self.value, shape=(self.shape[0], 1, 1))
        else:
            self.add(self.pick("MaxPool", "AveragePool"), self.value, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def branch(self) -> None:
        """A branch that a constant or a sum chooses, or a loop of a few turns."""
        value = self.value
        if self.pick(True, False):
            yes = self.constant(np.array(bool(self.pick(0, 1))))
            halves = [
                helper.make_graph([helper.make_node(kind, [value], [next(self.names)])], kind, [], [])
                for kind in ("Neg", "Tanh")
            ]
            for half in halves:
                half.output.append(helper.make_tensor_value_info(half.node[0].output[0], TensorProto.FLOAT, None))
            self.add("If", yes, then_branch=halves[0], else_branch=halves[1])
        else:
            again, state, on, after, turn = (next(self.names) for _ in range(5))
            body = helper.make_graph(
                [helper.make_node("Identity", [again], [on]), helper.make_node("Tanh", [state], [after])],
                "body",
                [
                    helper.make_tensor_value_info(turn, TensorProto.INT64, []),
                    helper.make_tensor_value_info(again, TensorProto.BOOL, []),
                    helper.make_tensor_value_info(state, TensorProto.FLOAT, [None, *self.shape]),
                ],
                [
                    helper.make_tensor_value_info(on, TensorProto.BOOL, []),
                    helper.make_tensor_value_info(after, TensorProto.FLOAT, [None, *self.shape]),
                ],
            )
            turns, yes = self.constant(np.array(2, np.int64)), self.constant(np.array(True))
            self.add("Loop", turns, yes, value, body=body)


def make_module(seed: int) -> Any:
    """Build a random torch module over float32 [N, 12] or [N, 4, 12], with shared, grouped and parametrized layers."""
    import torch
    from torch import nn

    chance = np.random.default_rng(seed)
    torch.manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(chance.integers(len(choices)))]

    class Flip(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.transpose(1, 2)

    class Last(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x)[0]

    class Residual(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(torch.relu(self.first(x)))

    deep = pick(True, False)
    shared = nn.Linear(12, 12)
    flat = (
        lambda: nn.Linear(12, 12, bias=pick(True, False)),
        lambda: shared,
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12)),
        lambda: nn.Sequential(nn.LayerNorm(12), nn.GELU()),
        lambda: nn.Sequential(nn.Linear(12, 30), pick(nn.ReLU(), nn.SiLU(), nn.Hardswish()), nn.Linear(30, 12)),
        lambda: Residual(nn.Linear(12, 12)),
        Tied,
        lambda: nn.Dropout(0.5),
    )
    maps = (
        lambda: nn.Conv1d(4, 4, 3, padding=1, groups=pick(1, 2, 4)),
        lambda: nn.ConvTranspose1d(4, 4, 3, padding=1, groups=pick(1, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 1)),
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1)),
        lambda: nn.Sequential(Flip(), nn.Linear(4, 4), Flip()),
        lambda: Last(nn.GRU(12, 12, batch_first=True)),
        lambda: Last(nn.LSTM(12, 6, batch_first=True, bidirectional=True)),
        lambda: nn.TransformerEncoderLayer(12, 2, 20, batch_first=True, dropout=0.0),
        lambda: nn.Upsample(12),
    )
    made = [pick(*flat, *(maps if deep else ()))() for _ in range(int(chance.integers(*LAYERS)))]
    head = [nn.Flatten(), nn.Linear(48 if deep else 12, 5)]
    module = nn.Sequential(*made, *head).eval()
    module.sample_shape = (4, 12) if deep else (12,)  # type: ignore[assignment]
    return module


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Do here what a process of its own does with an ONNX file, and time nothing."""
    from unittest.mock import patch

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests/helpers"), str(Path(__file__).parent)]
    from shortcuts import quick_judge  # type: ignore[import-not-found]

    from compress.models import onnx_check, onnx_graph

    def run(path: Path, order: str, _: object) -> Any:
        return onnx_graph._run_samples(path, **json.loads(order))

    with (
        patch.object(onnx_check, "_examine_apart", lambda path, *_: onnx_check.examine(path)),
        patch.object(onnx_graph, "_run_apart", run),
        patch.dict("os.environ", COMPRESS_TIMING="off"),
        quick_judge(),
    ):
        yield


def write_case(kind: str, seed: int, folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Write a model of that number into the folder; return its source and samples by input."""
    chance = np.random.default_rng(seed)
    if kind == "graph":
        builder = Graphs(seed)
        onnx.save(builder.build(), folder / "model.onnx")
        samples = chance.standard_normal((SAMPLES, *builder.input_shape))
        return "onnx:model.onnx", {builder.input: samples.astype(np.float16 if builder.half else np.float32)}
    (folder / "model.py").write_text(MODULE.format(here=str(Path(__file__).parent), seed=seed))
    samples = chance.standard_normal((SAMPLES, *make_module(seed).sample_shape))
    return "python:model.py:build", {"input": samples.astype(np.float32)}


def run_source(folder: Path, seed: int, samples: dict[str, np.ndarray]) -> np.ndarray:
    """Return what the source gives for each sample alone, [N, ...]."""
    file = folder / "model.onnx"
    if not file.exists():
        import torch

        return make_module(seed)(torch.from_numpy(samples["input"])).detach().numpy()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    rows = [session.run(None, {name: values[i : i + 1] for name, values in samples.items()})[0] for i in range(SAMPLES)]
    return np.concatenate(rows)


def find_fault(kind: str, seed: int, folder: Path) -> str:
    """Return what does not hold of the model of that number; "" where all does, "refused: ..." where plan says no."""
    source, samples = write_case(kind, seed, folder)
    wanted = run_source(folder, seed, samples)
    np.savez(folder / "samples.npz", **samples)  # type: ignore[arg-type]
    pass_ = PASSES[seed % len(PASSES)]
    recipe = {
        "version": 1,
        "name": "random",
        "model": {"source": source, "task": "generic"},
        "data": {name: {"source": "npz:samples.npz"} for name in ("calibration", "evaluation")},
        "passes": [pass_],
        "validate": {"benchmark": {"warmup": 1, "iterations": 2}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    loaded = load_recipe(folder / "recipe.yaml")
    try:
        plan = make_plan(loaded, folder / "cache", timed=False)
    except CompressError as error:
        return f"refused: {error}" if error.exit_code == 2 else f"plan ends with {error.exit_code}: {error}"
    try:
        apply_recipe(loaded, folder / "out", folder / "cache", quiet=True)
    except (CompressError, RuntimeFailure) as error:
        broken = error.exit_code == 2 and not np.isfinite(wanted).all()  # which no plan sees: it draws its samples
        return f"refused: {error}" if broken else f"plan takes it, apply does not: {error}"
    alone = "mode" not in pass_  # a dynamic scale spans a batch
    return find_wrong_answers(folder / "out", samples, wanted, alone) or find_wrong_size(
        folder / "out", plan.after.n_bytes
    )


def find_wrong_answers(bundle: Path, samples: dict[str, np.ndarray], wanted: np.ndarray, alone: bool) -> str:
    """Return how the float graph differs from the source, or, if `alone`, a sample alone from the same among others."""
    scale = float(np.abs(wanted).max()) or 1.0
    frozen = np.load(bundle / "evaluation/baseline_outputs.npz")
    got = frozen[frozen.files[0]]
    if got.shape != wanted.shape or np.abs(got - wanted).max() > 1e-4 * scale:
        how = np.abs(got - wanted).max() / scale if got.shape == wanted.shape else got.shape
        return f"the float graph is off by {how}"
    if not alone:
        return ""
    with runtime.open_bundle(bundle) as opened:
        together = next(iter(opened.predict(samples).values()))
        apart = [
            next(iter(opened.predict({n: v[i : i + 1] for n, v in samples.items()}).values())) for i in range(SAMPLES)
        ]
    gap = np.abs(np.concatenate(apart) - together).max()
    return f"a sample alone is off by {gap / scale} of the largest value" if gap > 0.05 * scale else ""


def find_wrong_size(bundle: Path, said: int) -> str:
    """Return how the size that the plan said differs from the file's tensors."""
    model = onnx.load(next((bundle / "model").glob("*.onnx")))
    has = sum(len(t.raw_data) or 4 * int(np.prod(t.dims)) for t in model.graph.initializer)
    return f"the plan says {said} bytes, the tensors have {has}" if abs(has - said) > 0.1 * said + SPARE_BYTES else ""


def main() -> int:
    """Try them all, tell what breaks, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, n in (("graphs", 500), ("modules", 300), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=n)
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    with in_this_process():
        for kind, n in (("graph", given.graphs), ("module", given.modules)):
            for seed in range(given.first, given.first + n):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        fault = find_fault(kind, seed, Path(folder))
                    except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
                        fault = f"{type(error).__name__}: {error}"
                end = "refused" if fault.startswith("refused") else "broke" if fault else "held"
                ends[f"{kind}s {end}"] += 1
                if fault:
                    print(f"{kind} {seed}: {' '.join(fault.split())[:400]}", flush=True)
    print(json.dumps(ends))
    return int(any(name.endswith("broke") for name in ends))


if __name__ == "__main__":
    sys.exit(main())
