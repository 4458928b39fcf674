"""Every metric that comes with us: `BUILT_IN` are computed from outputs, `MEASURED` by running.

Those that belong to a task alone stand in its file; `runtime.tasks.metrics` knows all by name. Imports numpy only.
"""

from __future__ import annotations

from runtime.metrics.accuracy import TOP1, TOP5
from runtime.metrics.answers import ACCURACY_ANSWERED, COVERAGE
from runtime.metrics.base import Metric, NonFiniteOutputs, Outputs, check_finite
from runtime.metrics.calibration import ECE
from runtime.metrics.correlation import MSE, PEARSON, SPEARMAN
from runtime.metrics.detection import DETECTION_METRICS
from runtime.metrics.fidelity import AGREEMENT, COSINE, KL, MSE_BASELINE, SQNR_DB
from runtime.metrics.fscore import F_SCORES
from runtime.metrics.language import KL_TOKEN, NLL, PERPLEXITY, TOKEN_AGREEMENT
from runtime.metrics.measured import ITL_PERCENTILES, LATENCY_PERCENTILES, MEASURED, SIZES, MeasuredMetric
from runtime.metrics.multi_label import MULTI_LABEL
from runtime.metrics.regression import MAE, R2, RMSE
from runtime.metrics.retrieval import RETRIEVAL
from runtime.metrics.texts import CER, CHRF, EXACT_MATCH, ROUGE_L, TEXT_AGREEMENT, WER

BUILT_IN = (
    *(TOP1, TOP5, *F_SCORES, ECE, COVERAGE, ACCURACY_ANSWERED, SPEARMAN, PEARSON, MSE, MAE, RMSE, R2),
    *(*MULTI_LABEL, *RETRIEVAL),
    *(AGREEMENT, KL, COSINE, SQNR_DB, MSE_BASELINE),
    *(NLL, PERPLEXITY, KL_TOKEN, TOKEN_AGREEMENT),
    *(EXACT_MATCH, CHRF, ROUGE_L, WER, CER, TEXT_AGREEMENT),
    *DETECTION_METRICS,
)

__all__ = [
    "BUILT_IN",
    "ITL_PERCENTILES",
    "LATENCY_PERCENTILES",
    "MEASURED",
    "SIZES",
    "MeasuredMetric",
    "Metric",
    "NonFiniteOutputs",
    "Outputs",
    "check_finite",
]
