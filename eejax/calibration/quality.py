"""Quality of a confidence: how well it ranks, and whether it is calibrated."""

from __future__ import annotations

import numpy as np

BINS = 15


def auc(confidence: np.ndarray, positive: np.ndarray) -> float:
    """Compute the area under the ROC curve: the chance that a positive is above a negative.

    Ties count half.

    Args:
      confidence: [n].
      positive: [n] bool.

    Returns:
      The area, NaN where all are positive or none is.
    """
    from sklearn.metrics import roc_auc_score  # takes seconds to import

    positive = np.asarray(positive, bool)
    if positive.all() or not positive.any():
        return float("nan")
    return float(roc_auc_score(positive, confidence))


def calibration_error(confidence: np.ndarray, positive: np.ndarray, bins: int = BINS) -> float:
    """Compute the expected calibration error (Guo et al. 2017, eq. 5).

    It is |confidence - share of positives| in bins of equal width, weighted by the number of
    positions in each.

    Args:
      confidence: [n], in [0, 1].
      positive: [n] bool.
      bins: the number of bins.
    """
    confidence = np.asarray(confidence, np.float64)
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, confidence - np.asarray(positive, np.float64), bins)
    return float(np.abs(gap).sum() / len(confidence))


def platt(logit: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Fit Platt scaling (Platt 1999): the most likely sigmoid(a logit + b) behind `positive`.

    Args:
      logit: [n].
      positive: [n] bool.

    Returns:
      (a, b) with a > 0, so that the order stays. (1, 0) where there is nothing to learn: all
      logits or all labels are alike, or negatives have the greater logits.
    """
    from sklearn.linear_model import LogisticRegression  # takes seconds to import

    x, positive = np.asarray(logit, np.float64), np.asarray(positive, bool)
    if positive.all() or not positive.any() or not 0 < np.ptp(x) < np.inf:
        return 1.0, 0.0
    # Platt's targets: never certain, so that the optimum is finite where classes are separate.
    # A target between 0 and 1 is a positive and a negative, weighted.
    n, m = positive.sum(), (~positive).sum()
    target = np.where(positive, (n + 1) / (n + 2), 1 / (m + 2))
    center, spread = x.mean(), x.std()
    scaled = np.tile((x - center) / spread, 2)[:, None]
    fit = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-9).fit(
        scaled, np.repeat([True, False], len(x)), np.concatenate([target, 1 - target])
    )
    a = float(fit.coef_[0, 0] / spread)
    return (a, float(fit.intercept_[0] - a * center)) if a > 0 else (1.0, 0.0)
