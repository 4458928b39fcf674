"""Claims about the model/ folder of the bundle of recipes/claims/minilm-int8.yaml: others load it as it is.

Through optimum-onnx (ORTModelForFeatureExtraction, in its own environment) and through transformers' AutoTokenizer with
a plain ONNX Runtime session it gives the embeddings that `runtime.open_bundle(...).predict([...])` gives: no number
differs by more than 1e-4. With --ours only the second, which needs no other environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from common import ROOT, Call, Measured, Peer, Row, RunError, at_most, make_bundle, run_peer, run_script

import runtime
from runtime.bundle.format import read_samples

RECIPE = ROOT / "recipes/claims" / "minilm-int8.yaml"
NEEDS = ("data/stsb/sts-train.csv", "data/stsb/sts-dev.csv")
PEERS = (
    Peer("transformers", "embed.py", ("onnxruntime",)),
    Peer("optimum", "embed.py", ("optimum",), "optimum"),
)
BAR = 1e-4
UNUSUAL = ["", " ", "Ünïcödé — 東京 🙂", "UPPER lower 3.14", "word " * 300]
"""Empty, blank, not ASCII, and far over the model's length."""


def measure(call: Call) -> Measured:
    bundle, _ = make_bundle(RECIPE, call)
    with runtime.open_bundle(bundle) as opened:
        texts = [*read_samples(bundle, opened.manifest)["text"][:250], *UNUSUAL]
        ours = opened.predict(texts, batch_size=1)["embeddings"][:, 0]  # [N, D]
        batched = opened.predict(texts)["embeddings"][:, 0]
        folder = bundle / Path(opened.manifest.candidate_for(opened.backend).path).parent
        max_length = opened.manifest.preprocess["max_length"]
    rows: list[Row] = [{"model": "ours, batches of 32", "max_abs_difference": largest(batched, ours)}]
    for peer in PEERS[:1] if call.ours else PEERS:
        rows.append({"model": peer.name} | compare(peer, folder, texts, max_length, ours, call))
    return [at_most(f"{row['model']}_max_abs_difference", row.get("max_abs_difference"), BAR) for row in rows[1:]], rows


def compare(peer: Peer, folder: Path, texts: list[str], max_length: object, ours: np.ndarray, call: Call) -> Row:
    """How far the peer's embeddings are from ours, or why there are none: then the claim does not hold."""
    given, out = call.out / "texts.json", call.out / f"{peer.name}.npy"
    given.write_text(json.dumps(texts), encoding="utf-8")
    try:
        run_peer(peer, folder, given, out, max_length, folder=call.out)
    except RunError as error:
        return {"failed": str(error)}
    return {"max_abs_difference": largest(np.load(out), ours)}


def largest(a: np.ndarray, b: np.ndarray) -> float:
    """The largest absolute difference of two arrays of one shape."""
    if a.shape != b.shape:
        raise RunError(f"embeddings of shape {a.shape}, ours are {b.shape}")
    return float(np.abs(a - b).max())


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
