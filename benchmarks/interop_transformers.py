"""Claims about the checkpoint of recipes/claims/tinystories-w4-gptq.yaml, at several schemes: transformers loads it.

AutoModelForCausalLM on the bundle's folder gives the logits of a float model whose weights were unpacked here from the
same files, by the format's description alone: no logit of 20 stories differs by more than 1e-4. And its nats per token
on stories 200 to 399 are those of the bundle's report within 1e-4. W4A16_ASYM is loaded with
CompressedTensorsConfig(dequantize=True): otherwise compressed-tensors 0.20 itself expects zero points that are not
packed, although it packs them when it saves.

And of checkpoints whose inputs, keys and values are rounded as they run: of the same model with outliers among its
activations (the same function in float) the report's added nats per token are within 2 % of transformers', on the
first 60 of these stories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, Call, Measured, Row, apply_recipe, at_most, run_script
from language import EVALUATED, encode_stories, load_causal, nats_per_token, read_stories, write_outliers
from subjects import ONLY_WHAT_IS_SCORED, checkpoint_of
from torch import nn

RECIPE = ROOT / "recipes/claims" / "tinystories-w4-gptq.yaml"
MODEL = "models/tinystories656k-hf"
NEEDS = (f"{MODEL}/config.json", "data/tinystories/stories.jsonl")
SCHEMES = {"W4A16": False, "W2A16": False, "W8A16": False, "W4A16_ASYM": True}
"""Scheme -> transformers is asked to dequantize as it loads. Those whose bits divide 32, so that unpacking is plain."""
GROUP = 32
COMPARED = 20
BAR = 1e-4
RTN = "{kind: rtn, scheme: %s}"
CACHE = "{kind: kv_cache, scheme: %s}"
AS_THEY_RUN = {
    "W8A8": (RTN % "W8A8",),
    "W8A8_STATIC": (RTN % "W8A8_STATIC",),
    "smoothquant, W8A8": ("{kind: smoothquant}", RTN % "W8A8"),
    "W4A8": ("{kind: rtn, scheme: W4A8, group_size: 32}",),
    "FP8": (RTN % "FP8",),
    "FP8_DYNAMIC": (RTN % "FP8_DYNAMIC",),
    "fp8 cache": (CACHE % "fp8",),
    "int8 cache": (CACHE % "int8",),
    "FP8_DYNAMIC, fp8 cache": (RTN % "FP8_DYNAMIC", CACHE % "fp8"),
}
"""Name -> passes that leave something to be rounded while the model runs."""
SCORED = 60
WORST = 0.02
"""Of the added nats, by how much the report may differ from transformers."""


def measure(call: Call) -> Measured:
    folder = call.bench / MODEL
    stories = encode_stories(folder, read_stories(call.bench, EVALUATED))
    rows = [compare(scheme, folder, stories, call) for scheme in list(SCHEMES)[: 1 if call.quick else None]]
    names = ("max_abs_difference", "nats_difference")
    claims = [at_most(f"{row['model']}_{name}", row[name], BAR) for row in rows for name in names]
    outliers = write_outliers(folder, call.out / "outliers")
    before = nats_per_token(load_causal(outliers), stories[:SCORED])
    for name in list(AS_THEY_RUN)[: 1 if call.quick else None]:
        rows.append(score_as_it_runs(name, outliers, before, stories[:SCORED], call))
        claims.append(at_most(f"{name}: difference of the added nats", rows[-1]["difference"], WORST))
    return claims, rows


def score_as_it_runs(name: str, model: Path, before: float, stories: list[list[int]], call: Call) -> Row:
    """The added nats of one of AS_THEY_RUN: the report's, transformers', and their difference over the latter."""
    sets = (f"vars.bench={call.bench}", f"model.source=dir:{model}", *ONLY_WHAT_IS_SCORED["text-generation"])
    more = (f"passes=[{', '.join(AS_THEY_RUN[name])}]", f"data.evaluation.samples={len(stories)}")
    bundle = call.out / name.replace(", ", "-").replace(" ", "-")
    apply_recipe(RECIPE, (*sets, *more), bundle, call.out / "cache")
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    ours = report["candidate"]["metrics"]["nll"] - report["baseline"]["metrics"]["nll"]
    theirs = nats_per_token(load_causal(checkpoint_of(bundle)), stories) - before
    return {"model": name, "reported": ours, "transformers": theirs, "difference": abs(ours - theirs) / abs(theirs)}


def compare(scheme: str, folder: Path, stories: list[list[int]], call: Call) -> Row:
    bundle = call.out / scheme
    scheme_sets = (f"passes.0.scheme={scheme}", f"passes.0.group_size={GROUP}")
    sets = (f"vars.bench={call.bench}", *ONLY_WHAT_IS_SCORED["text-generation"], *scheme_sets)
    apply_recipe(RECIPE, sets, bundle, call.out / "cache")
    checkpoint = checkpoint_of(bundle)
    loaded, unpacked = load_causal(checkpoint, SCHEMES[scheme]), with_unpacked(load_causal(folder), checkpoint)
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    nats, stated = nats_per_token(loaded, stories), report["candidate"]["metrics"]["nll"]
    worst = max(largest_difference(loaded, unpacked, ids) for ids in stories[:COMPARED])
    return {"model": scheme, "max_abs_difference": worst, "nats": nats, "nats_difference": abs(nats - stated)}


@torch.no_grad()
def largest_difference(a: nn.Module, b: nn.Module, ids: list[int]) -> float:
    """Of the logits of one story."""
    tokens = torch.tensor([ids])
    return float((a(input_ids=tokens).logits - b(input_ids=tokens).logits).abs().max())


@torch.no_grad()
def with_unpacked(model: nn.Module, checkpoint: Path) -> nn.Module:
    """The float model with the checkpoint's weights, changed in place."""
    tensors = read_tensors(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    bits = {group["weights"]["num_bits"] for group in config["config_groups"].values()}
    own = model.state_dict()
    for name in own.keys() & tensors.keys():
        own[name].copy_(torch.from_numpy(tensors[name]))
    for name in tensors:
        if name.endswith(".weight_packed"):
            layer = name.removesuffix(".weight_packed")
            (n_bits,) = bits
            own[f"{layer}.weight"].copy_(torch.from_numpy(unpack_layer(tensors, layer, n_bits)))
    return model


def read_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    found: dict[str, np.ndarray] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return found


def unpack_layer(tensors: Mapping[str, Any], layer: str, bits: int) -> np.ndarray:
    """float32 [out, in] of compressed-tensors' pack-quantized: (integer - zero point) * scale of its group."""
    rows, width = (int(size) for size in tensors[f"{layer}.weight_shape"])
    values = unpack(tensors[f"{layer}.weight_packed"], bits, width)  # [out, in]
    scales = tensors[f"{layer}.weight_scale"]  # [out, groups]
    zero_points = tensors.get(f"{layer}.weight_zero_point")
    grouped = values.reshape(rows, scales.shape[1], -1).astype(np.float32)
    if zero_points is not None:
        grouped -= unpack(zero_points.T, bits, rows).T[:, :, None]  # packed along the outputs
    weight: np.ndarray = grouped * scales[:, :, None]
    return weight.reshape(rows, width)


def unpack(words: np.ndarray, bits: int, width: int) -> np.ndarray:
    """int32 words [rows, n] -> signed integers [rows, width]: from the lowest bits on, stored with 2^(bits-1) added."""
    shifts = np.arange(0, 32, bits)
    values = (np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts) & (2**bits - 1)  # [rows, n, 32 / bits]
    return values.reshape(len(words), -1)[:, :width].astype(np.int64) - 2 ** (bits - 1)


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
