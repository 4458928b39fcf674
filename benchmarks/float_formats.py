"""Claims of tinystories-w4-gptq.yaml in recipes/claims/ in the number formats of 2026.

tinystories656k in each format of SCHEMES by `rtn`, `gptq`, `awq`, `autoround` and `tune`, nats per token on stories 200
to 399, against compressed-tensors' own scales of the range (its observers' arithmetic, `calculate_qparams` and
`generate_gparam`, inputs rounded by its own forward): rounded to the nearest with searched scales no more, within 0.002
where the scales have no choice or eight bits lose less than that; by `gptq`, calibrated on stories 400 to 655, a part
of what the range loses that each format has (NVFP4A16 half of it). No pass that is calibrated is further from the float
model than `rtn`: in KL divergence of its tokens, and in nats by no more than 0.005, which in eight bits is what other
calibration texts change (MXFP8 by `gptq` on four halves of them: 3.360 to 3.363, its divergence 0.0082 to 0.0083, that
of `rtn` 0.0102). Each checkpoint, loaded by transformers, gives the nats of its report within 0.001, of NVFP4
within 0.01.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Call, Claim, Measured, Row, apply_recipe, at_most, metric, run_script
from language import load_causal
from subjects import ONLY_WHAT_IS_SCORED, Subject, checkpoint_of, float_row, row, stories_subject
from torch import nn

MODEL = "tinystories656k-hf"
NEEDS = (f"models/{MODEL}/config.json", "data/tinystories/stories.jsonl")
RECIPE = ROOT / "recipes/claims/tinystories-w4-gptq.yaml"
SCHEMES = (
    *("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP8A16", "MXFP8"),
    *("FP8_BLOCK", "FP8_DYNAMIC", "W4A8", "W4AFP8"),
)
ROOM = 0.002
"""Nats by which MX, whose scales are one power of two or the next, and formats of eight bits may miss the range."""
EIGHT_BITS_ROOM = 0.005
"""The same with calibrated passes in eight bits: what a few thousand roundings do to one model by chance."""
PARTS = {"NVFP4A16": 0.5, "NVFP4": 0.75, "MXFP4A16": 0.8, "MXFP4": 1.0, "W4A8": 0.7, "W4AFP8": 0.7}
"""Of what the range loses, at most with `gptq`."""
APART = {"NVFP4": 0.01}
"""Nats by which transformers may be apart from the report, else `SAME`: it divides NVFP4's scales in bfloat16, so
that weights differ by up to 0.2 %, which inputs of four bits amplify."""
SAME = 0.001
PASSES = {f"ours {kind}": f"[{{kind: {kind}, scheme: %s}}]" for kind in ("rtn", "gptq", "awq", "autoround", "tune")}
OTHERWISE = {
    ("ours awq", "NVFP4"): "[{kind: awq, round: false, scheme: NVFP4}, {kind: gptq, scheme: NVFP4}]",
    **dict.fromkeys((("ours awq", "FP8_BLOCK"), ("ours awq", "FP8_DYNAMIC")), None),
}
"""(Row, scheme) -> what the plan takes in place of the pass alone; None: it refuses the pass."""


def measure(call: Call) -> Measured:
    subject = stories_subject(call.bench, MODEL, call.quick)
    rows = [float_row(subject)]
    for name in call.choose(SCHEMES, quick=2):
        rows.append(row_of(subject, "compressed-tensors' range", name) | subject.score(ranged(subject, name)))
        for made_by, usual in PASSES.items():
            passes = OTHERWISE.get((made_by, name), usual % name)
            rows += [our_row(subject, made_by, name, passes, call)] if passes else []
    return claims(rows), rows


def row_of(subject: Subject, made_by: str, scheme: str) -> Row:
    return {**row(subject, made_by, 0, 0), "scheme": scheme}


def our_row(subject: Subject, made_by: str, scheme: str, passes: str, call: Call) -> Row:
    """`compress apply`, then the checkpoint as transformers loads it, and the nats of its report beside that."""
    name = f"{made_by}-{scheme}".replace(" ", "-").replace(",", "")
    bundle = call.out / name
    sets = (*ONLY_WHAT_IS_SCORED["text-generation"], f"passes={passes}")
    apply_recipe(RECIPE, (f"vars.bench={call.bench}", *sets), bundle, call.out / f"{name}-cache")
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    found = row_of(subject, made_by, scheme) | subject.score(load_unpacked(checkpoint_of(bundle)))
    stated = {"reported": metric(report, "candidate", "nll"), "kl_token": metric(report, "candidate", "kl_token")}
    return found | stated


def load_unpacked(folder: Path) -> nn.Module:
    """The folder as transformers loads it; weights that it would unpack into bfloat16, in float32."""
    from compress.models.huggingface import read_pretrained
    from compress.models.source import locate
    from compress.specs import ModelSpec

    spec = ModelSpec(source=f"dir:{folder}", task="text-generation")
    model: Any = read_pretrained(locate(spec, folder))[0]
    return model.wrapped


@torch.no_grad()
def ranged(subject: Subject, scheme: str) -> nn.Module:
    """The float model, its linear layers rounded as it runs by compressed-tensors, with the scales of its ranges."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = load_causal(subject.folder)
    layers = {n: part for n, part in model.named_modules() if isinstance(part, nn.Linear) and n != "lm_head"}
    peaks = find_input_peaks(model, layers, subject) if scheme == "NVFP4" else {}
    groups = {"all": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for together in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if "NVFP4" in scheme else ():
        fuse_global_scales(layers, together)
    for name, layer in layers.items():
        set_scales(layer, peaks.get(name))
    return model


def find_input_peaks(model: nn.Module, layers: dict[str, nn.Linear], subject: Subject) -> dict[str, float]:
    """The largest magnitude that each layer reads on the calibration stories."""
    peaks = dict.fromkeys(layers, 0.0)

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            peaks[name] = max(peaks[name], float(args[0].abs().max()))

        return hook

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    for batch in subject.calibration:
        model(input_ids=torch.from_numpy(batch["input_ids"]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return peaks


def fuse_global_scales(layers: dict[str, nn.Linear], together: Sequence[str]) -> None:
    """Give layers that engines run as one the range of all of them, as llm-compressor does."""
    parents = {name.rpartition(".")[0] for name in layers if name.endswith(together[0])}
    for parent in parents:
        members: list[Any] = [layers[f"{parent}.{leaf}"] for leaf in together]
        whole = max(float(layer.weight.abs().max()) for layer in members)
        for layer in members:
            layer.shared_peak = whole


def set_scales(layer: Any, input_peak: float | None) -> None:
    """Fill the parameters that the library made for a layer's scales with those of its weight's ranges."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments, weight, whole = layer.quantization_scheme.weights, layer.weight, None
    if hasattr(layer, "weight_global_scale"):
        peak = torch.tensor([getattr(layer, "shared_peak", float(weight.abs().max()))])
        whole = generate_gparam(-peak, peak)
        layer.weight_global_scale.copy_(whole)
    if arguments.block_structure is not None:
        rows, columns = arguments.block_structure
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        groups = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    elif arguments.group_size:
        groups = weight.unflatten(1, (-1, arguments.group_size))
    else:
        groups = weight[:, None]
    scales, _ = calculate_qparams(groups.amin(2), groups.amax(2), arguments, whole)
    layer.weight_scale.copy_(scales)
    if input_peak is not None:
        peak = torch.tensor([input_peak])
        layer.input_global_scale.copy_(generate_gparam(-peak, peak))


def claims(rows: Sequence[Row]) -> list[Claim]:
    made: list[Claim] = []
    whole = rows[0]["nats"]
    for scheme in dict.fromkeys(entry["scheme"] for entry in rows[1:]):
        found = {entry["made_by"]: entry for entry in rows[1:] if entry["scheme"] == scheme}
        theirs = found["compressed-tensors' range"]["nats"]
        room = ROOM if scheme not in PARTS or scheme.startswith("MX") else 0.0
        made.append(at_most(f"{scheme}_rtn_nats", found["ours rtn"]["nats"], theirs + room))
        bar = whole + PARTS[scheme] * (theirs - whole) if scheme in PARTS else theirs + EIGHT_BITS_ROOM
        made.append(at_most(f"{scheme}_gptq_nats", found["ours gptq"]["nats"], bar))
        for made_by, entry in found.items():
            if made_by not in ("ours rtn", "compressed-tensors' range"):
                kind, nearest = made_by.removeprefix("ours "), found["ours rtn"]
                made.append(at_most(f"{scheme}_{kind}_divergence", entry["kl_token"], nearest["kl_token"]))
                made.append(at_most(f"{scheme}_{kind}_beside_rtn", entry["nats"] - nearest["nats"], EIGHT_BITS_ROOM))
        apart = max(abs(entry["nats"] - entry["reported"]) for entry in found.values() if "reported" in entry)
        made.append(at_most(f"{scheme}_transformers_apart", apart, APART.get(scheme, SAME)))
    return made


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
