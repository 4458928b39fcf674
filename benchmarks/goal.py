"""Claims of goals: one recipe with `goal:` and not one tuned number, 45 minutes on two idle cores, one thread judged.

ResNet-20 on CIFAR-10: at least 5 times smaller, 3 times as fast, top-1 lower by at most 0.013. ResNet-56: 6 times, 4
times, 0.010, which is more than the recipe tuned by hand reaches (recipes/claims/cifar10-resnet56-prune-distill-int8).
And a plain network for handwritten digits, of another kind, that this script makes and trains first: as ResNet-20. The
claims are of values; whether their whole intervals keep the goal is a column. There is no peer: no other tool takes a
goal. --quick gives each 4 minutes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import GATE_FELL_SHORT, Call, Claim, Measured, Row, RunError, at_least, at_most, drop, run_child, run_script
from common import size_ratio as ratio_of_sizes

BUDGET_S, QUICK_S = 45 * 60, 4 * 60
CIFAR = ("data/cifar10/train.npz", "data/cifar10/test.npz")
NEEDS = ("models/cifar10-resnet20/model.safetensors", "models/cifar10-resnet56/model.safetensors", *CIFAR)
FRESH = '''
from torch import nn


def make() -> nn.Module:
    """Two plain stages of convolutions, no shortcuts, two linear layers behind them."""
    layers, width = [], 1
    for out, pool in ((64, False), (64, True), (128, False), (128, False), (128, True)):
        layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
        width = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4, 128), nn.ReLU(), nn.Linear(128, 10))
'''


@dataclass(frozen=True)
class Goal:
    """What a model is to reach: times smaller, times as fast, lost top-1."""

    size: float
    speed: float
    lost: float

    @property
    def text(self) -> str:
        return f"size >= {self.size:g}x, latency_p50 >= {self.speed:g}x, top1 drop <= {self.lost:g}"


GOALS = {"resnet20": Goal(5, 3, 0.013), "resnet56": Goal(6, 4, 0.010), "fresh digits": Goal(5, 3, 0.013)}


def measure(call: Call) -> Measured:
    claims: list[Claim] = []
    rows: list[Row] = []
    for name in call.choose(GOALS, quick=1):
        found, row = pursue(call, name)
        claims += found
        rows.append(row)
    return claims, rows


def pursue(call: Call, name: str) -> tuple[list[Claim], Row]:
    """Let `compress sweep` reach one goal; its claims, and its row."""
    goal, budget = GOALS[name], QUICK_S if call.quick else BUDGET_S
    folder = call.out / name.replace(" ", "-")
    folder.mkdir()
    recipe = make_fresh(folder) if name == "fresh digits" else make_cifar(call.bench, name)
    file = folder / "goal.json"  # JSON is YAML
    file.write_text(json.dumps({"version": 1, "name": folder.name, **recipe, "goal": goal.text}), encoding="utf-8")
    study, begun = folder / "study", time.monotonic()
    given = [str(file), "--out", str(study), "--cache", str(folder / "cache"), "--budget", f"{budget}s"]
    code, _ = run_child([sys.executable, "-m", "compress", "sweep", *given])
    if code not in (0, GATE_FELL_SHORT) or not (study / "best/report.json").exists():
        raise RunError(f"compress sweep of {name} ended with exit code {code}")
    seconds = time.monotonic() - begun
    report = json.loads((study / "best/report.json").read_text(encoding="utf-8"))
    summary = json.loads((study / "study.json").read_text(encoding="utf-8"))
    lost, speed, size = drop(report, "top1"), report["ratios"].get("latency_p50"), ratio_of_sizes(report)
    row = {
        "model": name,
        "size_ratio": size,
        "latency_p50_ratio": speed,
        "top1_drop": lost,
        "intervals_too": summary["best"] is not None,
        "trials": len(summary["trials"]),
        "seconds": seconds,
        "passes": describe_best(summary),
    }
    claims = [
        at_least(f"{name}: size_ratio", size, goal.size),
        at_least(f"{name}: latency_p50_ratio", speed, goal.speed),
        at_most(f"{name}: top1_drop", lost, goal.lost),
        at_most(f"{name}: seconds", seconds, 1.02 * budget),
    ]
    return claims, row


def describe_best(summary: dict[str, Any]) -> str:
    best = summary["nearest"]
    return next(str(trial["point"]["passes"]) for trial in summary["trials"] if trial["number"] == best)


def make_cifar(bench: Path, name: str) -> dict[str, Any]:
    train = {"source": f"npz:{bench}/data/cifar10/train.npz"}
    weights = f"{bench}/models/cifar10-{name}/model.safetensors"
    source = f"python:compress.zoo.cifar_resnet:{name}"
    return {
        "model": {"source": source, "weights": weights, "task": "image-classification"},
        "preprocess": {"kind": "image", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
        "data": {
            "calibration": {**train, "samples": 1024},
            "train": train,
            "evaluation": {"source": f"npz:{bench}/data/cifar10/test.npz"},
        },
    }


def make_fresh(folder: Path) -> dict[str, Any]:
    """Write and train a network that nobody tuned anything for; return its recipe, without a goal."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from torch.nn import functional as F

    from compress.zoo.digits_resnet import DIGITS, MEAN, STD

    (folder / "fresh.py").write_text(FRESH, encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(FRESH, namespace)
    torch.manual_seed(0)
    net, data = namespace["make"](), np.load(DIGITS / "train.npz")
    images = (torch.from_numpy(data["image"][:, None].astype(np.float32) / 255) - MEAN) / STD
    labels = torch.from_numpy(data["label"].astype(np.int64))
    optimizer, epochs = torch.optim.AdamW(net.parameters(), 2e-3), 40
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - epoch / epochs)
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[rows]), labels[rows]).backward()
            optimizer.step()
    save_file(net.eval().state_dict(), folder / "fresh.safetensors")
    train = {"source": f"npz:{DIGITS}/train.npz"}
    return {
        "model": {
            "source": f"python:{folder}/fresh.py:make",
            "weights": str(folder / "fresh.safetensors"),
            "task": "image-classification",
        },
        "preprocess": {"kind": "image", "channels": "L", "mean": [MEAN], "std": [STD]},
        "data": {
            "calibration": {**train, "samples": 256},
            "train": train,
            "evaluation": {"source": f"npz:{DIGITS}/test.npz"},
        },
    }


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
