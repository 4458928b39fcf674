"""What `gate_confidence.py` simulates of quality: outputs of two models whose true metrics are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from runtime.bundle.format import Gate, Judgement
from runtime.judge.evidence import Evidence, quality_evidence
from runtime.metrics import Outputs
from runtime.metrics.language import PART, PARTS
from runtime.tasks.metrics import METRICS

SIZES = (10, 20, 30, 50, 100, 200, 500, 1000, 5000)
Rng = np.random.Generator
Array = np.ndarray
Rule = tuple[str, str]
"""(metric, rule of a gate)."""


@dataclass(frozen=True)
class Subject:
    """What is simulated: evidence of so many samples or rounds, and the true value that each rule bounds."""

    name: str
    shape: str
    draw: Callable[[Rng, int], Mapping[str, Evidence]]
    known: Mapping[Rule, float] | Callable[[], Mapping[Rule, float]]
    """The truths, or what finds them in seconds."""
    sizes: tuple[int, ...] = SIZES

    @cached_property
    def truths(self) -> Mapping[Rule, float]:
        return self.known() if callable(self.known) else self.known


# losses per sample: a distribution and its mean


@dataclass(frozen=True)
class Losses:
    """A distribution of a loss, never negative, its mean, and how many samples show what it is."""

    draw: Callable[[Rng, int], Array]
    mean: float
    sizes: tuple[int, ...] = SIZES


def lognormal(sigma: float) -> Losses:
    return Losses(lambda rng, n: rng.lognormal(0, sigma, n), math.exp(sigma**2 / 2))


def rare_losses(share: float, times: float) -> Losses:
    """A share of the samples loses many times as much. No interval sees them in sets that may well hold none."""
    return Losses(
        lambda rng, n: rng.gamma(4, 0.25, n) * np.where(rng.random(n) < share, times, 1.0),
        1 + share * (times - 1),
        tuple(n for n in SIZES if (1 - share) ** n < 0.01),
    )


LOSSES = {
    "lognormal 0.5": lognormal(0.5),
    "lognormal 1": lognormal(1.0),
    "lognormal 1.5": lognormal(1.5),
    "lognormal 2": lognormal(2.0),
    "exponential": Losses(lambda rng, n: rng.exponential(1, n), 1.0),
    "gamma 0.3": Losses(lambda rng, n: rng.gamma(0.3, 1, n), 0.3),
    "Pareto 3": Losses(lambda rng, n: rng.pareto(3, n), 0.5),
    "near normal": Losses(lambda rng, n: rng.gamma(400, 1 / 400, n), 1.0),
    "1 in 10, 30 times as large": rare_losses(0.1, 30.0),
    "1 in 100, 100 times as large": rare_losses(0.01, 100.0),
}


def mean_subjects() -> Iterator[Subject]:
    """`mse_baseline`, `kl` and `cosine` are means of one loss; `mse` is of two models on the same samples."""
    for shape, losses in LOSSES.items():
        yield value_subject("mse_baseline", shape, losses, losses.mean, lambda loss: ({"y": np.sqrt(loss)[:, None]}, 0))
    for shape in ("lognormal 1", "gamma 0.3", "lognormal 2"):
        losses = LOSSES[shape]
        yield value_subject("kl", shape, losses, losses.mean, two_classes_apart)
    for shape, losses in {
        "1 - beta": Losses(lambda rng, n: rng.beta(0.5, 50, n), 0.5 / 50.5),
        "1 - beta, rare": Losses(lambda rng, n: rng.beta(0.2, 100, n), 0.2 / 100.2),
    }.items():
        yield value_subject("cosine", shape, losses, 1 - losses.mean, turned_vectors)
    for shape, losses in LOSSES.items():
        share = 1 / (1 + losses.mean)
        yield paired_mse(f"{shape}, candidate adds it", losses, lambda rng, n: np.ones(n), losses.mean, share)
    one = lognormal(1.0)
    for share in (0.3, 0.5, 0.8):
        apart = (1 - share) * one.mean
        change = partial(_draw_share, one, share)
        yield paired_mse(f"lognormal 1 - {share} lognormal 1", one, change, apart, share)
    heavy = lognormal(1.5)
    yield paired_mse("lognormal 1.5 - 0.8 of it", heavy, lambda rng, n: 0.8 * heavy.draw(rng, n), 0.2 * heavy.mean, 0.8)


Sides = tuple[dict[str, Array], float | dict[str, Array]]


def value_subject(metric: str, shape: str, losses: Losses, truth: float, outputs: Callable[[Array], Sides]) -> Subject:
    """A mean of losses that a candidate's outputs have against the baseline's."""

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        ours, theirs = outputs(losses.draw(rng, n))
        baseline = theirs if isinstance(theirs, dict) else {name: np.zeros_like(a) for name, a in ours.items()}
        return quality((metric,), ours, baseline, None)

    up = METRICS[metric].higher_is_better
    ideal = METRICS[metric].ideal or 0.0
    dropped = ideal - truth if up else truth - ideal
    truths = {(metric, "min" if up else "max"): truth, (metric, "max_drop"): dropped}
    return Subject(metric, shape, draw, truths, losses.sizes)


def two_classes_apart(loss: Array) -> Sides:
    """Logits with KL(baseline || candidate) = loss: of a fair coin, ln cosh(a) for logits +-a."""
    a = loss + np.log1p(np.sqrt(-np.expm1(-2 * loss)))  # arccosh(exp(loss)), which would overflow
    logits = np.stack([a, -a], axis=1)
    return {"logits": logits}, {"logits": np.zeros_like(logits)}


def turned_vectors(loss: Array) -> Sides:
    """Vectors whose cosine to the baseline's is 1 - loss."""
    cosine = 1 - loss
    turned = np.stack([cosine, np.sqrt(1 - cosine**2)], axis=1)
    return {"y": turned}, {"y": np.tile([1.0, 0.0], (len(loss), 1))}


def _draw_share(losses: Losses, share: float, rng: Rng, n: int) -> Array:
    return share * losses.draw(rng, n)


def paired_mse(
    shape: str, losses: Losses, before: Callable[[Rng, int], Array], truth: float, retained: float
) -> Subject:
    """`mse` of two models: the difference is what is shaped. "adds it" puts a constant loss before.

    `retained`: the mean loss before over that after.
    """

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        theirs = before(rng, n)
        ours = losses.draw(rng, n) + (theirs if "adds" in shape else 0.0)
        return quality(("mse",), {"y": np.sqrt(ours)[:, None]}, {"y": np.sqrt(theirs)[:, None]}, np.zeros(n))

    truths = {("mse", "max_drop"): truth, ("mse", "min_retained"): retained}
    return Subject("mse", shape, draw, truths, losses.sizes)


def quality(names: Sequence[str], ours: Outputs, theirs: Outputs, labels: Array | None) -> Mapping[str, Evidence]:
    asked = tuple(Gate(name, min_retained=1.0) for name in names if METRICS[name].against != "baseline")
    return quality_evidence([METRICS[name] for name in names], ours, theirs, labels, Judgement(gates=asked))


# counts


def proportion_subjects() -> Iterator[Subject]:
    """top1 of a baseline that is right on a share; the candidate gains and loses some of it."""
    for right in (0.6, 0.9, 0.99):
        for gained, lost in ((0.0, 0.01), (0.005, 0.015), (0.02, 0.05)):
            if gained < 1 - right:
                yield top1_subject(right, gained, lost)
    for agreeing in (0.9, 0.98, 0.995):
        yield agreement_subject(agreeing)


def top1_subject(right: float, gained: float, lost: float) -> Subject:
    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        kind = rng.choice(4, n, p=[right - lost, lost, gained, 1 - right - gained])  # kept, lost, gained, never right
        before, after = kind <= 1, (kind == 0) | (kind == 2)
        return quality(("top1",), two_logits(after), two_logits(before), np.ones(n, np.int64))

    value = right - lost + gained
    truths = {("top1", "max_drop"): lost - gained, ("top1", "min"): value, ("top1", "max"): value}
    truths |= {("top1", "min_retained"): value / right}
    return Subject("top1", f"{right:g} right, +{gained:g} -{lost:g}", draw, truths)


def two_logits(ones: Array) -> dict[str, Array]:
    return {"logits": np.stack([~ones, ones], axis=1).astype(np.float64)}


def answer_subjects() -> Iterator[Subject]:
    """A classifier of two classes whose confidence is off, and that answers where it is sure enough."""
    for off, more in ((0.0, 0.0), (0.0, 0.05), (0.1, 0.02)):
        yield calibration_subject(off, more)
    for answering, right, lost in ((0.9, 0.95, 0.02), (0.5, 0.8, 0.05), (0.3, 0.99, 0.01)):
        yield answered_subject(answering, right, lost)


def calibration_subject(off: float, more: float) -> Subject:
    """The baseline is right less often than it is sure, by `off`; the candidate is surer by `more`."""

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        sure = rng.uniform(0.6, 0.9, n)
        labels = (rng.random(n) >= sure - off).astype(np.int64)
        return quality(("ece",), two_chances(sure + more), two_chances(sure), labels)

    return Subject("ece", f"{off:g} off, {more:g} more", draw, {("ece", "max"): off + more, ("ece", "max_drop"): more})


def two_chances(first: Array) -> dict[str, Array]:
    return {"logits": np.log(np.stack([first, 1 - first], axis=1))}


def answered_subject(answering: float, right: float, lost: float) -> Subject:
    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        answered, place = rng.random(n) < answering, rng.random(n)
        sides = [{**two_logits(place < part), "answered": answered} for part in (right - lost, right)]
        return quality(("coverage", "accuracy_answered"), sides[0], sides[1], np.ones(n, np.int64))

    truths = {
        ("coverage", "min"): answering,
        ("accuracy_answered", "min"): right - lost,
        ("accuracy_answered", "max_drop"): lost,
        ("accuracy_answered", "min_retained"): (right - lost) / right,
    }
    return Subject("answers", f"{answering:g} answered, {right:g} right, -{lost:g}", draw, truths)


def agreement_subject(agreeing: float) -> Subject:
    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        base = rng.random(n) < 0.5
        return quality(("agreement",), two_logits(base ^ (rng.random(n) >= agreeing)), two_logits(base), None)

    truths = {("agreement", "min"): agreeing, ("agreement", "max_drop"): 1 - agreeing}
    return Subject("agreement", f"{agreeing:g}", draw, truths)


def f_score_subjects() -> Iterator[Subject]:
    """Macro averages over classes of unequal size; an error goes to any other class."""
    even, uneven = np.full(10, 0.1), np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    pair = np.array([0.8, 0.2])
    for name, shares, wrong, worse in (
        ("2 classes 4:1", pair, 0.3, 0.02),
        ("2 classes 4:1", pair, 0.02, 0.01),
        ("5 classes 10:1", uneven, 0.1, 0.05),
        ("10 even classes", even, 0.3, 0.02),
        ("10 even classes", even, 0.02, 0.01),
    ):
        yield f_score_subject(f"{name}, {wrong:g} wrong, {worse:g} more", shares, wrong, worse)


def f_score_subject(shape: str, shares: Array, wrong: float, worse: float) -> Subject:
    """The candidate is wrong where the baseline is, and on `worse` of the samples more."""
    names = ("f1_macro", "precision_macro", "recall_macro")
    classes = len(shares)

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        labels = rng.choice(classes, n, p=shares)
        other = (labels + rng.integers(1, classes, n)) % classes
        place = rng.random(n)
        sides = [np.where(place < part, other, labels) for part in (wrong + worse, wrong)]
        ours, theirs = ({"logits": np.eye(classes)[side]} for side in sides)
        return quality(names, ours, theirs, labels)

    def values(part: float) -> dict[str, float]:
        confusion = part / (classes - 1) * np.tile(shares[:, None], classes)  # [label, prediction]
        np.fill_diagonal(confusion, (1 - part) * shares)
        hits, chosen = np.diag(confusion), confusion.sum(axis=0)
        return {
            "f1_macro": float((2 * hits / (shares + chosen)).mean()),
            "precision_macro": float((hits / chosen).mean()),
            "recall_macro": float((hits / shares).mean()),
        }

    after, before = values(wrong + worse), values(wrong)
    truths = {(name, "min"): after[name] for name in names} | {
        (name, "max_drop"): before[name] - after[name] for name in names
    }
    truths |= {(name, "min_retained"): after[name] / before[name] for name in names}
    return Subject("macro", shape, draw, truths)


# sums over sums


def language_subjects() -> Iterator[Subject]:
    """Nats of texts of unequal length; what the candidate adds to a token differs from text to text."""
    lengths: dict[str, Callable[[Rng, int], Array]] = {
        "even lengths": lambda rng, n: np.full(n, 64.0),
        "lognormal lengths": lambda rng, n: np.ceil(rng.lognormal(4, 0.8, n)),
    }
    added = {
        "lognormal 1": lognormal(1.0),
        "lognormal 1.5": lognormal(1.5),
        "gamma 0.3": LOSSES["gamma 0.3"],
        "near normal": LOSSES["near normal"],
    }
    for of_lengths, length in lengths.items():
        for of_added, losses in added.items():
            yield language_subject(f"{of_lengths}, adds {of_added}", length, losses)
    yield from window_subjects()
    for disagreeing in (0.05, 0.01, 0.001):
        yield token_agreement_subject(disagreeing)


def language_subject(shape: str, length: Callable[[Rng, int], Array], losses: Losses) -> Subject:
    scale = 0.05 / losses.mean
    before, after = 3.0, 3.05

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        tokens = length(rng, n)
        base = rng.gamma(30, 0.1, n)  # nats per token of a text, 3 on average whatever its length
        extra = scale * losses.draw(rng, n)
        theirs = {"nll": base * tokens, "n_tokens": tokens}
        ours = {"nll": (base + extra) * tokens, "n_tokens": tokens, "kl": extra * tokens, "agree": tokens}
        return quality(("nll", "perplexity", "kl_token"), ours, theirs, None)

    truths = {
        ("nll", "max_drop"): after - before,
        ("nll", "max"): after,
        ("nll", "min_retained"): before / after,
        ("perplexity", "min_retained"): math.exp(before - after),
        ("perplexity", "max"): math.exp(after),
        ("perplexity", "max_drop"): math.exp(after) - math.exp(before),
        ("kl_token", "max"): 0.05,
    }
    return Subject("tokens", shape, draw, truths)


def window_subjects() -> Iterator[Subject]:
    """Few windows of a long text: what the candidate adds differs from part to part, and in part by window."""
    for name, losses in {
        "lognormal 0.5": lognormal(0.5),
        "lognormal 1": lognormal(1.0),
        "gamma 0.3": LOSSES["gamma 0.3"],
    }.items():
        for shared in (0.0, 0.2, 0.5):
            yield window_subject(f"{shared:g} of {name} by window", losses, shared)


def window_subject(shape: str, losses: Losses, shared: float) -> Subject:
    """`shared`: the share of what is added that all parts of a window have alike."""
    scale, before, after = 0.05 / losses.mean, 3.0, 3.05

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        tokens = np.tile([PART] * 7 + [PART - 1], (n, 1))
        base = rng.gamma(30, 0.1, (n, 1)) + rng.normal(0, 0.4, tokens.shape)
        alone, alike = (losses.draw(rng, size).reshape(n, -1) for size in (tokens.size, n))
        extra = scale * (shared * alike + (1 - shared) * alone) * tokens
        theirs, ours = add_parts(base * tokens, tokens), add_parts(base * tokens + extra, tokens)
        ours |= {"kl": extra.sum(axis=1), f"{PARTS}kl": extra}
        return quality(("nll", "kl_token"), ours, theirs, None)

    truths = {("nll", "max_drop"): 0.05, ("nll", "max"): after, ("kl_token", "max"): 0.05}
    truths |= {("nll", "min_retained"): before / after}
    return Subject("windows", shape, draw, truths, (10, 20, 40))


def add_parts(nll: Array, tokens: Array) -> dict[str, Array]:
    sums = {"nll": nll, "n_tokens": tokens}
    return {name: values.sum(axis=1) for name, values in sums.items()} | {f"{PARTS}{n}": v for n, v in sums.items()}


def token_agreement_subject(disagreeing: float) -> Subject:
    """Texts differ in how often their tokens disagree (beta-binomial)."""

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        tokens = rng.integers(30, 200, n)
        share = rng.beta(2, 2 / disagreeing - 2, n)
        nll = tokens * 3.0
        ours = {"nll": nll, "n_tokens": tokens, "agree": tokens - rng.binomial(tokens, share), "kl": nll * 0}
        return quality(("token_agreement",), ours, {"nll": nll + 1, "n_tokens": tokens}, None)

    truths = {("token_agreement", "min"): 1 - disagreeing, ("token_agreement", "max_drop"): disagreeing}
    return Subject("token_agreement", f"{disagreeing:g} differ", draw, truths)


def sqnr_subjects() -> Iterator[Subject]:
    for shape in ("lognormal 0.5", "lognormal 1", "gamma 0.3"):
        losses = LOSSES[shape]

        def draw(rng: Rng, n: int, losses: Losses = losses) -> Mapping[str, Evidence]:
            signal = np.sqrt(rng.lognormal(0, 0.5, n))[:, None]
            noise = 0.01 * np.sqrt(losses.draw(rng, n))[:, None]
            return quality(("sqnr_db",), {"y": signal + noise}, {"y": signal}, None)

        truth = 10 * math.log10(math.exp(0.125) / (1e-4 * losses.mean))
        yield Subject("sqnr_db", f"noise {shape}", draw, {("sqnr_db", "min"): truth})


# correlations


def correlation_subjects() -> Iterator[Subject]:
    """Scores and labels that are normal, of two models whose errors are shared in part; ratings in steps of a half."""
    for before, after, shared in ((0.9, 0.88, 0.9), (0.9, 0.88, 0.0), (0.6, 0.55, 0.5), (0.97, 0.96, 0.9)):
        yield correlation_subject(before, after, shared)


def correlation_subject(before: float, after: float, shared: float) -> Subject:
    names = ("spearman", "pearson")

    def draw(rng: Rng, n: int) -> Mapping[str, Evidence]:
        labels, common, own = rng.normal(size=(3, n))
        sides = [
            {"y": (r * labels + math.sqrt(1 - r * r) * error)[:, None]}
            for r, error in (
                (after, math.sqrt(shared) * common + math.sqrt(1 - shared) * own),
                (before, common),
            )
        ]
        return quality(names, sides[0], sides[1], labels)

    def rank(r: float) -> float:
        return 6 / math.pi * math.asin(r / 2)

    truths = {
        ("spearman", "min"): rank(after),
        ("spearman", "max_drop"): rank(before) - rank(after),
        ("pearson", "min"): after,
        ("pearson", "max_drop"): before - after,
    }
    return Subject("correlation", f"{before:g} to {after:g}, errors {shared:g} shared", draw, truths)


def quality_subjects() -> Iterator[Subject]:
    yield from proportion_subjects()
    yield from answer_subjects()
    yield from mean_subjects()
    yield from language_subjects()
    yield from sqnr_subjects()
    yield from f_score_subjects()
    yield from correlation_subjects()
