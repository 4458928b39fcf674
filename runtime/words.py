"""Words for people: what one that is none of ours was meant as; sizes, times and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

OTHER_WORDS = {
    **dict.fromkeys(("int4", "4bit", "w4", "nf4"), ("W4A16",)),
    **dict.fromkeys(("int8_weights_only", "int8_weight_only", "weight_only", "w8"), ("W8A16",)),
    "int3": ("W3A16",),
    "int2": ("W2A16",),
    **dict.fromkeys(
        ("accuracy", "acc", "top_1", "top1_accuracy"),
        ("top1", "pixel_accuracy", "label_f1_macro", "span_f1", "squad_f1", "token_agreement", "exact_match", "map"),
    ),
    **dict.fromkeys(("map50", "map_50", "ap"), ("ap50", "map")),
    **dict.fromkeys(("iou", "mean_iou", "jaccard"), ("miou",)),
    **dict.fromkeys(("f1", "f1_score"), ("f1_macro", "label_f1_macro", "span_f1", "squad_f1", "f1_at", "dice")),
    **dict.fromkeys(("ppl", "loss", "cross_entropy"), ("perplexity", "nll", "kl")),
    **dict.fromkeys(("latency", "speed", "speedup", "time"), ("latency_p50",)),
    **dict.fromkeys(("fps", "qps"), ("throughput",)),
    **dict.fromkeys(("compression", "compression_ratio"), ("size_ratio",)),
    **dict.fromkeys(("memory", "ram"), ("peak_memory",)),
    **dict.fromkeys(("onnx", "onnxruntime", "ort", "cpu"), ("onnxruntime-cpu",)),
    **dict.fromkeys(("cuda", "gpu"), ("onnxruntime-cuda", "tensorrt")),
    "trt": ("tensorrt",),
    **dict.fromkeys(("pte", "xnnpack"), ("executorch",)),
    **dict.fromkeys(("gguf", "llamacpp", "llama_cpp"), ("llama.cpp",)),
    **dict.fromkeys(("quantize", "quantization", "ptq", "static_quantization"), ("int8",)),
    **dict.fromkeys(("reduce_range", "overflow_fix"), ("weight_bits",)),
    **dict.fromkeys(("prune", "pruning", "structured_pruning"), ("prune_channels", "prune_layers")),
    **dict.fromkeys(("fuse", "fusion", "fuse_bn", "fold_bn"), ("fold_batchnorm",)),
    **dict.fromkeys(("fp16", "bf16", "half"), ("autocast",)),
    **dict.fromkeys(("distillation", "kd"), ("distill",)),
    **dict.fromkeys(
        ("classification", "classifier"), ("image-classification", "text-classification", "audio-classification")
    ),
    **dict.fromkeys(("detection", "object_detector", "yolo"), ("object-detection",)),
    **dict.fromkeys(("segmentation", "semseg"), ("semantic-segmentation",)),
    **dict.fromkeys(("llm", "causal_lm", "language_model"), ("text-generation",)),
    **dict.fromkeys(("embedding", "embeddings", "sentence_similarity"), ("feature-extraction",)),
    **dict.fromkeys(("ner", "tagging"), ("token-classification",)),
    **dict.fromkeys(("asr", "speech_recognition"), ("automatic-speech-recognition",)),
}
"""Another tool's word, in small letters with underscores -> ours for the same thing, of which those count that fit."""
MOST_COMPARED, MOST_OPTIONS = 80, 1000
"""Length of a word that another may have been meant by, and how many others are looked at."""
SMALL = 0.001
"""Below this four places show next to nothing of a figure."""


def find_meant(word: object, options: Iterable[object]) -> list[str]:
    """Return those of the options that a word may have been meant as: ours for it, else the nearest in spelling."""
    text = str(word)[: MOST_COMPARED + 1].lower()
    if len(text) > MOST_COMPARED:
        return []
    by_fold = {str(option).lower(): str(option) for option in islice(options, MOST_OPTIONS) if str(option) != word}
    ours = [name for name in OTHER_WORDS.get(text.replace("-", "_").replace(" ", "_"), ()) if name.lower() in by_fold]
    return ours[:3] or [by_fold[near] for near in get_close_matches(text, by_fold, n=1, cutoff=0.6)]


def did_you_mean(word: object, options: Iterable[object]) -> str:
    """Return "; did you mean 'x'?", or "" where none of the options can have been meant."""
    meant = " or ".join(f"'{name}'" for name in find_meant(word, options))
    return f"; did you mean {meant}?" if meant else ""


def suggest(word: object, options: Iterable[object]) -> str:
    """Return the words of `did_you_mean`, or list all the options where none is near."""
    known = list(options)
    return did_you_mean(word, known) or (f"; known: {', '.join(map(str, known))}" if known else "")


def ms_text(value: float | None) -> str:
    """Format milliseconds."""
    return "-" if value is None else f"{value:.4g} ms"


def size_text(n_bytes: float | None) -> str:
    """Format bytes in units of 1024, as limits of memory are given: 1536 -> "1.5 KiB"."""
    if n_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def interval_words(low: float, high: float, spec: str = ".4g", unit: str = "") -> str:
    """Format the ends by `spec`; an end that is not known in words, never as an infinite number."""
    first, last = (f"{end:{spec}}{unit}" for end in (low, high))
    known = math.isfinite(low), math.isfinite(high)
    return {
        (True, True): f"{first} to {last}",
        (True, False): f"at least {first}",
        (False, True): f"at most {last}",
        (False, False): "unknown",
    }[known]


def interval_brackets(ends: tuple[float, float] | None, spec: str = ".4f") -> str:
    """Format an interval as it stands behind a value, "[0.12, 0.34]"; "" where there is none with two ends."""
    return f"[{ends[0]:{spec}}, {ends[1]:{spec}}]" if ends is not None and all(map(math.isfinite, ends)) else ""


def figure_text(value: float, ends: tuple[float, float] | None = None, sign: str = "") -> str:
    """Format a figure with its interval, both to four places, or by their powers of ten where these show nothing."""
    widest = max((abs(figure) for figure in (value, *(ends or ())) if math.isfinite(figure)), default=0.0)
    spec = f"{sign}.4f" if widest >= SMALL or widest == 0 else f"{sign}.1e"
    return f"{value:{spec}} {interval_brackets(ends, spec)}".rstrip()
