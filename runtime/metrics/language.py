"""Language models: how well the next token is foreseen, and how far the candidate is from the baseline.

Outputs are what `runtime.decode.scoring.score` gives: sums over each sample's predicted tokens. Metrics are per token,
sums over sums, so that a long text counts for more than a short one. Whole samples are what intervals take as drawn;
of few long ones, their parts (`cut_parts`). A sample of no tokens (a recording that is read in several parts, a chat
whose assistant says nothing) does not count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.errors import RuntimeFailure, UsageError
from runtime.metrics.base import FRACTION, Columns, Link, Metric, Outputs, share_of_sums

PART = 64
"""Tokens of a sample that follow each other and are summed up as one part, too."""
PARTS = "part_"
"""Before the name of a sum: of each part."""
RUN = 8
"""Parts of a run: 512 tokens."""


def nll_columns(outputs: Outputs, reference: Any) -> Columns:
    """Return nats and tokens of each sample; the reference is the text itself, which is in the outputs already."""
    return outputs["nll"], outputs["n_tokens"], *_select_parts(outputs, "nll")


def kl_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return nats of KL(baseline || candidate), and tokens, of each sample."""
    return _select_columns(outputs, baseline, "kl", np.zeros(len(outputs["nll"])))


def agreement_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the number of tokens for which both models find the same one most likely, and of all, of each sample."""
    return _select_columns(outputs, baseline, "agree", outputs["n_tokens"])


def _select_columns(outputs: Outputs, baseline: Outputs, name: str, of_itself: np.ndarray) -> Columns:
    """Return the column `name`, or `of_itself` where the outputs are the baseline's own; and the tokens."""
    if not np.array_equal(outputs["n_tokens"], baseline["n_tokens"]):
        raise RuntimeFailure(
            f"{int(outputs['n_tokens'].sum())} tokens were scored, and {int(baseline['n_tokens'].sum())} of the "
            "baseline: both must read the same samples"
        )
    if name in outputs:
        return outputs[name], outputs["n_tokens"], *_select_parts(outputs, name)
    if not np.array_equal(outputs["nll"], baseline["nll"]):
        raise UsageError(f"the outputs hold no '{name}': score the candidate beside the baseline")
    return of_itself, outputs["n_tokens"]


def _select_parts(outputs: Outputs, name: str) -> Columns:
    """Return the sums and the tokens of each sample's parts, [N, P] each; () of a bundle that has none."""
    names = (f"{PARTS}{name}", f"{PARTS}n_tokens")
    return tuple(outputs[part] for part in names) if names[0] in outputs else ()


def cut_parts(columns: Columns) -> tuple[Columns, np.ndarray] | None:
    """Return the columns of parts instead of samples, and the run of each part, int64 [M]; None where there are none.

    A run is RUN parts that follow each other in a sample: tokens of one text depend on those before them.
    """
    if len(columns) == 2:
        return None
    sums, n_tokens = columns[2:]
    held = n_tokens > 0
    rows, places = np.nonzero(held)
    return (sums[held], n_tokens[held]), rows * held.shape[1] + places // RUN


def per_token(columns: Columns) -> float:
    """Return the sum of the first column over the sum of the second."""
    return float(columns[0].sum() / columns[1].sum())


def perplexity(columns: Columns) -> float:
    """Return exp of the nats per token; infinity where that is beyond a float."""
    nats = per_token(columns)
    return math.exp(nats) if nats < 700 else math.inf


def tokens(columns: Columns) -> np.ndarray:
    """Return how much each sample counts: its tokens, float64 [N]."""
    return columns[1].astype(np.float64)


def have_tokens(columns: Columns) -> np.ndarray:
    """Return which samples have predicted tokens, bool [N]; one that was read in several parts has none."""
    counted: np.ndarray = columns[1] > 0
    return counted


def per_token_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the ratio of the sums, float64 [N]."""
    influence: np.ndarray = (columns[0] - per_token(columns) * columns[1]) / columns[1].mean()
    return influence


def perplexity_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the perplexity, float64 [N]."""
    return perplexity(columns) * per_token_influence(columns)


def differ_in_sums(ours: Columns, theirs: Columns) -> np.ndarray:
    """Return which samples have other sums, bool [N]; their parts are of no account."""
    changed: np.ndarray = (ours[0] != theirs[0]) | (ours[1] != theirs[1])
    return changed


NLL = Metric(
    name="nll",
    against="texts",
    higher_is_better=False,
    fits=("tokens", "texts"),
    unit="nats per token",
    range=(0.0, math.inf),
    about="mean cross-entropy of the tokens that came, each predicted from those before it in its sample",
    reduce=nll_columns,
    shape="tokens",
    kind="statistic",
    statistic=per_token,
    influence=per_token_influence,
    weights=tokens,
    counts=have_tokens,
    cut=cut_parts,
)
PERPLEXITY = replace(
    NLL,
    name="perplexity",
    unit="perplexity",
    range=(1.0, math.inf),
    about="exp of nll",
    statistic=perplexity,
    influence=perplexity_influence,
    link=Link(to=math.log, back=math.exp, slope=lambda value: 1 / value),
)
KL_TOKEN = replace(
    NLL,
    name="kl_token",
    against="baseline",
    about="mean KL divergence of the candidate's next-token distribution from the baseline's",
    reduce=kl_columns,
    ideal=0.0,
)
TOKEN_AGREEMENT = replace(
    NLL,
    name="token_agreement",
    against="baseline",
    **FRACTION,
    about="fraction of tokens for which candidate and baseline find the same one most likely",
    reduce=agreement_columns,
    **share_of_sums(changed=differ_in_sums),
    ideal=1.0,
)
