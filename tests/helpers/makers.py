"""What the end-to-end tests share: tiny models and data, recipes about them, and ways to run and compare bundles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from child_processes import run_python
from shortcuts import QUICK_COMMAND

BLOCKED = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "pydantic", "compress", "safetensors", "datasets")
REPORTS = tuple(f"report.{end}" for end in ("html", "json", "md", "samples.npz", "steps.json", "xml"))
MEASURED = ("compress.log", "host.json", *REPORTS)
QUICK: dict[str, Any] = {"warmup": 1, "iterations": 10, "throughput_batch_size": 2, "processes": 1}
"""Benchmark settings under which nothing about speed can be said, which no test here does."""

DIGITS_RECIPE = """\
version: 1
name: digits
vars: {digits: "${package:compress}/zoo/digits"}
model:
  source: "python:compress.zoo.digits_resnet:digits_resnet"
  weights: "${digits}/digits_resnet.safetensors"
  task: image-classification
preprocess: {kind: image, channels: L}
data:
  calibration: {source: "npz:${digits}/train.npz", samples: 64}
  evaluation: {source: "npz:${digits}/test.npz"}
passes: [{kind: int8}]
"""
NET = '''
import torch
from torch import nn


class Net(nn.Module):
    """float32 [N, 1, 8, 8] -> [N, 3]: a convolution and two matrix products."""

    def __init__(self, hidden=32):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc1 = nn.Linear(256, hidden)
        self.fc2 = nn.Linear(hidden, 3)

    def forward(self, image):
        x = torch.relu(self.conv(image)).flatten(1)  # [N, 256]
        return self.fc2(torch.relu(self.fc1(x)))


def make(hidden=32):
    return Net(hidden)
'''


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(recipe))
    return path


def changed(recipe: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A copy with other values at the top level; a dict is merged into the one that is there."""
    copy: dict[str, Any] = json.loads(json.dumps(recipe))
    for key, value in parts.items():
        copy[key] = {**copy[key], **value} if isinstance(value, dict) and isinstance(copy.get(key), dict) else value
    return copy


def apply(recipe: dict[str, Any], out: Path, cache: Path, root: Path | None = None) -> Any:
    """Run a recipe that stands in `root` (default: beside `out`); the report."""
    from compress.execution.run import apply_recipe
    from compress.recipe.load import load_recipe

    out.parent.mkdir(parents=True, exist_ok=True)
    file = write_recipe((root or out.parent) / f"{out.name}.yaml", recipe)
    return apply_recipe(load_recipe(file), out, cache, quiet=True)


def plan(recipe: dict[str, Any], root: Path, cache: Path) -> Any:
    """The plan of a recipe that stands in `root`."""
    from compress.planning.make_plan import make_plan
    from compress.recipe.load import load_recipe

    return make_plan(load_recipe(write_recipe(root / "planned.yaml", recipe)), cache)


def image_recipe(folder: Path, n_train: int = 64, n_test: int = 96, seed: int = 0) -> dict[str, Any]:
    """Write net.py, its weights and data into `folder`. The labels are what the float model says, so its top1 is 1."""
    import torch
    from safetensors.torch import save_file

    (folder / "net.py").write_text(NET)
    namespace: dict[str, Any] = {}
    exec(NET, namespace)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = namespace["make"]().eval()
    save_file(net.state_dict(), folder / "net.safetensors")
    rng = np.random.default_rng(seed)
    for name, n in (("train", n_train), ("test", n_test)):
        images = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
        feeds = torch.from_numpy(images[:, None].astype(np.float32) / 255)
        with torch.no_grad():
            labels = net(feeds).argmax(dim=1).numpy()
        np.savez(folder / f"{name}.npz", image=images, label=labels)
    return {
        "version": 1,
        "name": "tiny",
        "model": {"source": "python:net.py:make", "weights": "net.safetensors", "task": "image-classification"},
        "preprocess": {"kind": "image", "channels": "L"},
        "data": {"calibration": {"source": "npz:train.npz"}, "evaluation": {"source": "npz:test.npz"}},
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "agreement", "min": 0.9}], "benchmark": QUICK},
    }


def text_folder(folder: Path, kind: str, n_layers: int = 2) -> Path:
    """A random BERT with a word tokenizer: kind "classifier" (three classes) or "encoder"."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": n_layers, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, intermediate_size=64, **sizes)
    config.initializer_range = 0.3  # outputs that tell samples apart
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = BertForSequenceClassification(config) if kind == "classifier" else BertModel(config)
    made.save_pretrained(folder)
    return folder


def write_texts(path: Path, n: int, pairs: bool = False, seed: int = 0) -> Path:
    """JSON lines of three to twelve random words, with labels 0 to 2."""
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 60, rng.integers(3, 13)))

    rows = [
        {"text": text(), **({"text_pair": text()} if pairs else {}), "label": int(rng.integers(3))} for _ in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bundle_bytes(bundle: Path) -> dict[str, str]:
    """Relative name -> sha256 of every file that is not a measurement, or of one machine."""
    files = [path for path in bundle.rglob("*") if path.is_file()]
    names = {path.relative_to(bundle).as_posix(): path for path in files}
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in names.items() if name not in MEASURED}


def serve(bundle: Path, samples: str, cwd: Path) -> dict[str, Any]:
    """Predict and evaluate where nothing of the build side can be imported. `samples`: a Python expression."""
    code = f"""
with runtime.open_bundle(sys.argv[1]) as bundle:
    outputs = bundle.predict({samples})
    shapes = {{name: list(np.shape(v)) if isinstance(v, np.ndarray) else [len(v)] for name, v in outputs.items()}}
    shapes |= {{"prediction": [len(outputs.predictions)]}} if outputs.predictions else {{}}
    finite = all(np.isfinite(v).all() for v in outputs.values() if isinstance(v, np.ndarray) and v.dtype != object)
    print(json.dumps({{"shapes": shapes, "finite": bool(finite), "metrics": bundle.evaluate()}}))
"""
    answer: dict[str, Any] = run_alone(code, cwd, str(bundle))
    return answer


def run_alone(code: str, cwd: Path, *args: str) -> Any:
    """Run Python code where nothing of the build side can be imported; return the JSON that it prints."""
    alone = f"""
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
import numpy as np
import runtime
{code}"""
    command = [sys.executable, "-c", alone, *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compress_elsewhere(args: Sequence[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that has imported nothing of ours, though torch."""
    return run_python("-m", "compress", *args, cwd=cwd, environment={**os.environ, **environment})


def cli(args: Sequence[str], cwd: Path, quick: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, in a process of its own; `quick`: its measuring is cut short."""
    command = [sys.executable, *(("-c", QUICK_COMMAND) if quick else ("-m", "compress")), *args]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, check=False
    )
