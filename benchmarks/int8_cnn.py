"""Claims of recipes/claims/cifar10-resnet56-int8.yaml: ResNet-56 in int8, 5,000 CIFAR-10 test images, one CPU thread.

Against ONNX Runtime on the float model: top-1 drops by at most 0.002, at least 99.3 % of the answers stay, the file is
at least 3.2 times smaller, the median call at least 2.4 (batch 1) and 2.5 (batch 64) times faster. Beside it, not as
claims: ONNX Runtime's own static quantizer and NNCF, from the same float file and the same calibration images.

And of benchmarks/depthwise.yaml, `{kind: int8}` alone: a network of depthwise convolutions, which this script trains
first on the 20,000 images, with three seeds, some five minutes each on one core: top-1 drops by at most 0.005.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    HERE,
    ROOT,
    Call,
    Claim,
    Measured,
    Peer,
    Row,
    at_least,
    at_most,
    drop,
    make_bundle,
    metric,
    run_recipe,
    run_script,
    say,
    size_ratio,
)
from measuring import ONNXRUNTIME, OPENVINO, Entry, Timing, compare, find_row, make_peer_models, open_judged
from torch.nn import functional as F
from training import find_trained

from runtime.backends import find_backend

RECIPE = ROOT / "recipes/claims" / "cifar10-resnet56-int8.yaml"
DEPTHWISE = HERE / "depthwise.yaml"
NEEDS = ("models/cifar10-resnet56/model.safetensors", "data/cifar10/train.npz", "data/cifar10/test.npz")
METRICS = ("top1", "agreement")
TIMINGS = {"latency_p50_ratio_batch1": Timing(1, 300), "latency_p50_ratio_batch64": Timing(64, 60)}
SEEDS = {f"depthwise-{seed}": seed for seed in range(3)}
EPOCHS, BATCH, LEARNING_RATE, MOST_SECONDS = 5, 128, 6e-3, 900
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


PEERS = (Peer("onnxruntime static", "onnxruntime_static.py"), Peer("nncf", "nncf_quantize.py", venv="nncf"))


def measure(call: Call) -> Measured:
    held: list[Claim] = []
    rows: list[Row] = []
    for name in call.choose(("resnet56", *SEEDS), quick=2):
        found, measured = measure_depthwise(call, name) if name in SEEDS else measure_resnet(call)
        held += found
        rows += measured
    return held, rows


def measure_resnet(call: Call) -> Measured:
    bundle, report = make_bundle(RECIPE, call)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry("ours", judged.model_for(ONNXRUNTIME))]
    failures: list[Row] = []
    if not call.ours:
        made, failures = make_peer_models(PEERS, judged, RECIPE, call)
        entries += [Entry(name, path) for name, path in made.items()]
        missing = find_backend(OPENVINO).available()
        if missing:
            failures.append({"model": "all", "backend": OPENVINO, "failed": missing})
        else:
            models = {"float": judged.float_model, "ours": judged.model_for(OPENVINO), **made}
            entries += [Entry(name, path, OPENVINO) for name, path in models.items()]
    rows = compare(judged, entries, METRICS, TIMINGS)
    return claims(report, rows), rows + failures


def claims(report: Mapping[str, Any], rows: Sequence[Row]) -> list[Claim]:
    """Quality and size as report.json has them, speed as it was timed here."""
    ours = find_row(rows, "ours")
    return [
        at_least("evaluated_images", report["n_samples"], 5000),
        at_most("top1_drop", drop(report, "top1"), 0.002),
        at_least("agreement", metric(report, "candidate", "agreement"), 0.993),
        at_least("size_ratio", size_ratio(report), 3.2),
        at_least("latency_p50_ratio_batch1", ours.get("latency_p50_ratio_batch1"), 2.4),
        at_least("latency_p50_ratio_batch64", ours.get("latency_p50_ratio_batch64"), 2.5),
    ]


def make_weights(call: Call, name: str) -> float:
    """Put the trained weights into the work folder; the seconds that training took."""
    import compress.zoo.depthwise_cnn as zoo

    epochs, seed = 1 if call.quick else EPOCHS, SEEDS[name]
    settings = (epochs, BATCH, LEARNING_RATE, MEAN, STD, seed)
    code = (zoo, train, draw_batch)
    weights = call.out / f"{name}.safetensors"
    return find_trained("depthwise", settings, code, lambda: train(call.bench, epochs, seed), weights)


def measure_depthwise(call: Call, name: str) -> Measured:
    seconds = make_weights(call, name)
    bundle, report = run_recipe(DEPTHWISE, call, name, (f"vars.work={call.out}", f"vars.weights={name}.safetensors"))
    judged = open_judged(bundle)
    entries = [Entry(f"{name}: float", judged.float_model), Entry(f"{name}: int8", judged.model_for(ONNXRUNTIME))]
    rows = compare(judged, entries, METRICS, TIMINGS)
    held = [
        at_least(f"{name}: evaluated_images", report["n_samples"], 5000),
        at_most(f"{name}: training_seconds", seconds, MOST_SECONDS),
        at_least(f"{name}: float_top1", metric(report, "baseline", "top1"), 0.6),
        at_most(f"{name}: top1_drop", drop(report, "top1"), 0.005),
    ]
    return held, rows


def train(bench: Path, epochs: int, seed: int) -> Any:
    """Train the depthwise network on one thread: AdamW, the rate rising and falling once."""
    from compress.zoo.depthwise_cnn import depthwise_cnn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    with np.load(bench / "data/cifar10/train.npz") as data:
        images, labels = np.pad(data["image"], ((0, 0), (4, 4), (4, 4), (0, 0)), "reflect"), data["label"]
    model = depthwise_cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    n_steps = len(labels) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * n_steps)
    for epoch in range(epochs):
        losses = []
        for rows in rng.permutation(len(labels))[: n_steps * BATCH].reshape(-1, BATCH):
            loss = F.cross_entropy(model(draw_batch(images[rows], rng)), torch.from_numpy(labels[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        say(f"epoch {epoch + 1} of {epochs}: loss {np.mean(losses):.3f}")
    return model


def draw_batch(padded: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Return float32 [n, 3, 32, 32] as the model reads it, of uint8 [n, 40, 40, 3]: cut out and flipped at random."""
    n = len(padded)
    tops, lefts = rng.integers(0, 9, (2, n, 1))
    columns = np.where(rng.random((n, 1)) < 0.5, np.arange(32), np.arange(31, -1, -1)) + lefts  # [n, 32]
    cut = padded[np.arange(n)[:, None, None], (tops + np.arange(32))[:, :, None], columns[:, None]]
    pixels = (torch.from_numpy(cut).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return pixels.permute(0, 3, 1, 2)  # channels last in memory


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
