"""How far a candidate's outputs are from the baseline's on the same samples. No labels are needed."""

from __future__ import annotations

import math

import numpy as np

from runtime.metrics.base import FRACTION, Columns, Metric, Outputs, cosine_rows, float_outputs, same_shapes

MAX_SQNR_DB = 200.0
"""Reported for outputs without any error; float32 outputs that differ at all stay below about 150 dB."""


def agreement_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return 1.0 where both choose the same class."""
    ((ours, theirs),) = same_shapes({"logits": outputs["logits"]}, {"logits": baseline["logits"]})
    return ((ours.argmax(axis=1) == theirs.argmax(axis=1)).astype(np.float64),)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the natural log of the softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def kl_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return KL(baseline || candidate) of the class distributions, nats, float64 [N], never negative."""
    ((ours, theirs),) = same_shapes({"logits": outputs["logits"]}, {"logits": baseline["logits"]})
    log_p, log_q = log_softmax(theirs), log_softmax(ours)
    return (np.maximum(np.sum(np.exp(log_p) * (log_p - log_q), axis=1), 0.0),)  # rounding can leave -1e-17


def cosine_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the cosine to the baseline per sample, [N]: mean over outputs and, for embeddings [N, k, D], over k."""
    parts = []
    for name, (ours, theirs) in zip(float_outputs(outputs), same_shapes(outputs, baseline), strict=True):
        k = ours.shape[1] if name == "embeddings" else 1
        rows = (len(ours), k, -1)
        parts.append(cosine_rows(ours.reshape(rows), theirs.reshape(rows)))  # [N, k]
    return (np.concatenate(parts, axis=1).mean(axis=1),)


def error_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return per sample, over all floating outputs: sum of baseline's squares, sum and mean of the error's squares."""
    pairs = same_shapes(outputs, baseline)
    signal = sum(np.sum(theirs.reshape(len(theirs), -1) ** 2, axis=1) for _, theirs in pairs)
    noise = sum(np.sum((ours - theirs).reshape(len(ours), -1) ** 2, axis=1) for ours, theirs in pairs)
    values = sum(theirs[0].size for _, theirs in pairs)
    return np.asarray(signal), np.asarray(noise), np.asarray(noise) / values


def mse_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the mean squared error to the baseline per sample."""
    return (error_columns(outputs, baseline)[2],)


def sqnr_db(columns: Columns) -> float:
    """Return 10 log10(sum signal / sum noise), at most MAX_SQNR_DB; noise on a silent baseline gives -MAX_SQNR_DB."""
    signal, noise = float(columns[0].sum()), float(columns[1].sum())
    if noise == 0:
        return MAX_SQNR_DB
    return float(np.clip(10 * np.log10(signal / noise), -MAX_SQNR_DB, MAX_SQNR_DB)) if signal > 0 else -MAX_SQNR_DB


def sqnr_influence(columns: Columns) -> np.ndarray:
    """Return how many dB each sample adds to the ratio of the sums, float64 [N]."""
    signal, noise = columns[0], columns[1]
    if not (signal.any() and noise.any()):
        return np.zeros(len(signal))
    decibels: np.ndarray = 10 / np.log(10) * (signal / signal.mean() - noise / noise.mean())
    return decibels


AGREEMENT = Metric(
    name="agreement",
    against="baseline",
    **FRACTION,
    fits=("classes",),
    about="fraction of samples for which candidate and baseline choose the same class",
    reduce=agreement_columns,
    shape="classes",
    kind="proportion",
    ideal=1.0,
)
KL = Metric(
    name="kl",
    against="baseline",
    higher_is_better=False,
    fits=("classes",),
    unit="nats",
    range=(0.0, math.inf),
    about="mean KL divergence of the candidate's class distribution from the baseline's",
    reduce=kl_columns,
    shape="classes",
    ideal=0.0,
)
COSINE = Metric(
    name="cosine",
    against="baseline",
    higher_is_better=True,
    unit="cosine",
    range=(-1.0, 1.0),
    about="mean cosine between the candidate's and the baseline's outputs",
    reduce=cosine_columns,
    ideal=1.0,
)
SQNR_DB = Metric(
    name="sqnr_db",
    against="baseline",
    higher_is_better=True,
    unit="dB",
    range=(-MAX_SQNR_DB, MAX_SQNR_DB),
    about="power of the baseline's outputs over the power of the candidate's error",
    reduce=error_columns,
    kind="statistic",
    statistic=sqnr_db,
    influence=sqnr_influence,
)
MSE_BASELINE = Metric(
    name="mse_baseline",
    against="baseline",
    higher_is_better=False,
    unit="squared output",
    range=(0.0, math.inf),
    about="mean squared difference between the candidate's and the baseline's outputs",
    reduce=mse_columns,
    ideal=0.0,
)
