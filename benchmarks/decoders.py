"""Decoders that are timed in turns, by the clock: each reads a prompt, or single tokens behind a number of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import HERE, RunError, peer_environment, peer_python

TOKEN = 7
"""Which tokens are read changes nothing about the time."""
CONTEXT = 1280
"""Room that decoders with one buffer for the cache get: all pasts and turns fit."""


class Player(Protocol):
    """One decoder with its threads set. `size_bytes`: of its files."""

    size_bytes: int

    def read(self, n: int) -> float:
        """Seconds of a prompt of `n` tokens, batch 1, until the logits that follow it are there."""

    def turn(self, past: int, n: int) -> float:
        """Seconds for `n` single tokens, batch 1, that follow `past` tokens; what leads there is not timed."""

    def close(self) -> None: ...


def timed(step: Callable[[int], object], n: int) -> float:
    """Seconds of `step(0)` ... `step(n - 1)`."""
    start = time.perf_counter()
    for i in range(n):
        step(i)
    return time.perf_counter() - start


def present_of(past: str) -> str:
    """past_key_values.3.key -> present.3.key, as torch's exporter and genai's builder name them here."""
    return "present" + past.removeprefix("past_key_values")


class OrtPlayer:
    """An ONNX decoder in a plain ONNX Runtime session, by IO binding: the cache never leaves ONNX Runtime.

    Takes graphs as torch's exporter and as onnxruntime-genai's builder write them. One whose attention is
    GroupQueryAttention gets one buffer for each layer, bound as past and as present; otherwise the present of one call
    is bound as the past of the next. Before single tokens the cache is filled with numbers: the time is the same.
    """

    def __init__(self, path: Path, threads: int, head_size: int) -> None:
        import onnxruntime as ort

        settings = ort.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        settings.log_severity_level = 3
        self._ort, self._head_size = ort, head_size
        self._session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        self._shared, self.size_bytes = shares_buffer(path), graph_bytes(path)
        inputs = self._session.get_inputs()
        self._caches = [spec for spec in inputs if spec.name.startswith("past")]
        self._feeds = [spec.name for spec in inputs if not spec.name.startswith("past")]
        logits = next(spec for spec in self._session.get_outputs() if spec.name == "logits")
        self._logits = np.empty((1, 1, logits.shape[-1]), np.float32)
        self._kept: dict[int, dict[str, Any]] = {}

    def read(self, n: int) -> float:
        binding = self._session.io_binding()
        binding.bind_output("logits")
        self._bind_cache(binding, 0)
        return timed(lambda _: self._run(binding, 0, n), 1)

    def turn(self, past: int, n: int) -> float:
        binding = self._session.io_binding()
        binding.bind_ortvalue_output("logits", self._value(self._logits))
        for _ in range(2):  # the first is to warm up, and is forgotten
            self._bind_cache(binding, past)
            seconds = timed(lambda i: self._run(binding, past + i), n)
        return seconds

    def _bind_cache(self, binding: Any, past: int) -> None:
        for name, value in self._cache(CONTEXT if self._shared else past).items():
            binding.bind_ortvalue_input(name, value)
            if self._shared:
                binding.bind_ortvalue_output(present_of(name), value)

    def _run(self, binding: Any, past: int, n: int = 1) -> None:
        """Read `n` tokens after `past`."""
        made = make_feeds(past, n)
        for name in self._feeds:
            binding.bind_cpu_input(name, made[name])
        if self._shared:
            self._session.run_with_iobinding(binding)
            return
        for spec in self._caches:
            binding.bind_output(present_of(spec.name))
        self._session.run_with_iobinding(binding)
        for spec, value in zip(self._caches, binding.get_outputs()[1:], strict=True):
            binding.bind_ortvalue_input(spec.name, value)

    def _cache(self, length: int) -> dict[str, Any]:
        """One tensor for each past input; the same ones every time."""
        if length not in self._kept:
            self._kept[length] = {spec.name: self._filled(spec, length) for spec in self._caches}
        return self._kept[length]

    def _filled(self, spec: Any, length: int) -> Any:
        dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[spec.type]
        return self._value(numbers((1, spec.shape[1], length, self._head_size)).astype(dtype))

    def _value(self, array: np.ndarray) -> Any:
        """The array's own memory as ONNX Runtime's tensor."""
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def close(self) -> None:
        self._kept.clear()
        self._session = None


def make_feeds(past: int, n: int) -> dict[str, np.ndarray]:
    """What a graph reads beside its cache for `n` tokens after `past`."""
    return {
        "input_ids": np.full((1, n), TOKEN, np.int64),
        "attention_mask": np.ones((1, past + n), np.int64),
        "position_ids": np.arange(past, past + n, dtype=np.int64)[None],
    }


def graph_bytes(path: Path) -> int:
    """Of a graph and the file of its weights, whose name begins with its own, or with its stem."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """float32, normally distributed."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def shares_buffer(path: Path) -> bool:
    """True for a graph whose attention is GroupQueryAttention, which takes past and present in one buffer."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return any(node.op_type == "GroupQueryAttention" for node in graph.node)


class BundlePlayer:
    """A bundle's model as `python -m runtime generate` runs it."""

    def __init__(self, bundle: Path, threads: int) -> None:
        from runtime.backends import find_backend
        from runtime.decode.kv_cache import Decoder
        from runtime.tasks.manifest import read_manifest

        manifest = read_manifest(bundle)
        artifact = manifest.candidate_for("onnxruntime-cpu")
        self._session = find_backend("onnxruntime-cpu").open(bundle / artifact.path, threads, {})
        self._decoder, self.size_bytes = Decoder(self._session, artifact.cache), artifact.size_bytes

    def read(self, n: int) -> float:
        return timed(lambda _: self._decoder.start([np.full(n, TOKEN, np.int64)], CONTEXT), 1)

    def turn(self, past: int, n: int) -> float:
        self._decoder.start([np.full(past, TOKEN, np.int64)], CONTEXT)
        token = np.array([TOKEN], np.int64)
        self._decoder.step(token)
        return timed(lambda _: self._decoder.step(token), n)

    def close(self) -> None:
        self._session.close()


class GenaiPlayer:
    """onnxruntime-genai's own generator on a folder of its builder: greedy, its choice of tokens being part of it."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime_genai as genai

        config = genai.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._genai, self._model = genai, genai.Model(config)
        self.size_bytes = graph_bytes(folder / "model.onnx")

    def read(self, n: int) -> float:
        generator = self._generator()
        return timed(lambda _: generator.append_tokens(np.full((1, n), TOKEN, np.int32)), 1)

    def turn(self, past: int, n: int) -> float:
        generator = self._generator()
        generator.append_tokens(np.full((1, past), TOKEN, np.int32))
        generator.generate_next_token()
        return timed(lambda _: generator.generate_next_token(), n)

    def _generator(self) -> Any:
        settings = self._genai.GeneratorParams(self._model)
        settings.set_search_options(max_length=CONTEXT, min_length=CONTEXT, do_sample=False)
        return self._genai.Generator(self._model, settings)

    def close(self) -> None:
        self._model = None


class OpenVinoPlayer:
    """A decoder in OpenVINO, its cache made its state; hint LATENCY and its own default precision.

    Before single tokens the cache is filled with numbers.
    """

    def __init__(self, path: Path, threads: int) -> None:
        import openvino
        from openvino._offline_transformations import apply_make_stateful_transformation

        core = openvino.Core()
        model = core.read_model(path)
        pasts = [port for port in model.inputs if port.any_name.startswith("past")]
        self._shape = [dimension.get_length() if dimension.is_static else 0 for dimension in pasts[0].partial_shape]
        apply_make_stateful_transformation(model, {port.any_name: present_of(port.any_name) for port in pasts})
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        self._openvino = openvino
        self._request = core.compile_model(model, "CPU", settings).create_infer_request()
        self._inputs, self.size_bytes = [port.any_name for port in model.inputs], graph_bytes(path)

    def read(self, n: int) -> float:
        self._fill(0)
        return timed(lambda _: self._run(0, n), 1)

    def turn(self, past: int, n: int) -> float:
        for _ in range(2):  # the first is to warm up, and is forgotten
            self._fill(past)
            seconds = timed(lambda i: self._run(past + i), n)
        return seconds

    def _fill(self, past: int) -> None:
        for state in self._request.query_state():
            state.state = self._openvino.Tensor(numbers((1, self._shape[1], past, self._shape[3])))

    def _run(self, past: int, n: int = 1) -> None:
        made = make_feeds(past, n)
        self._request.infer({name: made[name] for name in self._inputs if name in made})

    def close(self) -> None:
        self._request = None


class LlamaCppPlayer:
    """llama.cpp in its own environment and process, asked turn by turn. `source`: a Llama's folder, or a GGUF file."""

    def __init__(self, source: Path, out: Path, threads: int) -> None:
        out.mkdir(exist_ok=True)
        job, self._log = out / f"{threads}.job.json", out / f"{threads}.log"
        asked = {"source": str(source), "out": str(out), "threads": threads, "context": CONTEXT}
        job.write_text(json.dumps(asked), encoding="utf-8")
        command = [str(peer_python("llamacpp")), str(HERE / "peers" / "llamacpp_decode.py"), str(job)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=peer_environment(), text=True
            )
        self.size_bytes = int(self._answer()["bytes"])

    def read(self, n: int) -> float:
        return self._ask(prompt=n)

    def turn(self, past: int, n: int) -> float:
        return self._ask(past=past, n=n)

    def _ask(self, **asked: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
            raise RunError(f"llama.cpp ended with exit code {self._process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def play(
    players: dict[str, Player], work: Callable[[Player], float], rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of each player's work in each round; they take turns, in a random order every round."""
    order = np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {name: [] for name in players}
    for _ in range(rounds):
        for name in order.permutation(list(players)):
            seconds[str(name)].append(work(players[str(name)]))
    return seconds


def ratios(seconds: dict[str, list[float]], first: str) -> dict[str, float]:
    """How many times faster each is than `first`: in each round the ratio, of these the median."""
    base = np.array(seconds[first])
    return {name: float(np.median(base / np.array(own))) for name, own in seconds.items()}
