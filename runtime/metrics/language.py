"""Language models: how well the next token is foreseen, and how far the candidate is from the baseline.

Outputs are what `runtime.scoring.score` gives: sums over each sample's predicted tokens. Metrics are per token, sums
over sums, so that a long text counts for more than a short one; samples are what a bootstrap draws.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from runtime.errors import RuntimeFailure, UsageError
from runtime.manifest import GENERATION
from runtime.metrics.base import Columns, Metric, Outputs


def nll_columns(outputs: Outputs, reference: Any) -> Columns:
    """Nats and tokens of each sample; the reference is the text itself, which is in the outputs already."""
    return outputs["nll"], outputs["n_tokens"]


def kl_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Nats of KL(baseline || candidate), and tokens, of each sample."""
    return _beside(outputs, baseline, "kl", np.zeros(len(outputs["nll"])))


def agreement_columns(outputs: Outputs, baseline: Outputs) -> Columns:
    """Tokens for which both models find the same one most likely, and all tokens, of each sample."""
    return _beside(outputs, baseline, "agree", outputs["n_tokens"])


def _beside(outputs: Outputs, baseline: Outputs, name: str, of_itself: np.ndarray) -> Columns:
    """The column `name`, or `of_itself` where the outputs are the baseline's own."""
    if not np.array_equal(outputs["n_tokens"], baseline["n_tokens"]):
        raise RuntimeFailure(
            f"{int(outputs['n_tokens'].sum())} tokens were scored, and {int(baseline['n_tokens'].sum())} of the "
            "baseline: both must read the same samples"
        )
    if name in outputs:
        return outputs[name], outputs["n_tokens"]
    if not np.array_equal(outputs["nll"], baseline["nll"]):
        raise UsageError(f"the outputs hold no '{name}': score the candidate beside the baseline")
    return of_itself, outputs["n_tokens"]


def per_token(columns: Columns) -> float:
    """Sum of the first column over the sum of the second."""
    return float(columns[0].sum() / columns[1].sum())


def perplexity(columns: Columns) -> float:
    """exp of the nats per token; infinity where that is beyond a float."""
    nats = per_token(columns)
    return math.exp(nats) if nats < 700 else math.inf


NLL = Metric(
    name="nll",
    against="texts",
    higher_is_better=False,
    tasks=GENERATION,
    unit="nats per token",
    about="mean cross-entropy of the tokens that came, each predicted from those before it in its sample",
    reduce=nll_columns,
    shape="tokens",
    kind="statistic",
    statistic=per_token,
)
PERPLEXITY = Metric(
    name="perplexity",
    against="texts",
    higher_is_better=False,
    tasks=GENERATION,
    unit="perplexity",
    about="exp of nll",
    reduce=nll_columns,
    shape="tokens",
    kind="statistic",
    statistic=perplexity,
)
KL_TOKEN = Metric(
    name="kl_token",
    against="baseline",
    higher_is_better=False,
    tasks=GENERATION,
    unit="nats per token",
    about="mean KL divergence of the candidate's next-token distribution from the baseline's",
    reduce=kl_columns,
    shape="tokens",
    kind="statistic",
    statistic=per_token,
    ideal=0.0,
)
TOKEN_AGREEMENT = Metric(
    name="token_agreement",
    against="baseline",
    higher_is_better=True,
    tasks=GENERATION,
    unit="fraction",
    about="fraction of tokens for which candidate and baseline find the same one most likely",
    reduce=agreement_columns,
    shape="tokens",
    kind="statistic",
    statistic=per_token,
    ideal=1.0,
)
