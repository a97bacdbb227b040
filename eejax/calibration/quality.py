"""Quality of a confidence: how well it ranks, and whether it is calibrated."""

from __future__ import annotations

import numpy as np

BINS = 15


def auc(confidence: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve: the chance that a positive is above a negative, ties counting half.

    confidence [n], positive [n] bool. NaN where all are alike.
    """
    positive = np.asarray(positive, bool)
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    _, index, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2.0)[index]  # from 1, those of equals their mean
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def calibration_error(confidence: np.ndarray, positive: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: |confidence - share of positives|, by bins of equal width and
    weighted by what is in them (Guo et al. 2017, eq. 5)."""
    confidence = np.asarray(confidence, np.float64)
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, confidence - np.asarray(positive, np.float64), bins)
    return float(np.abs(gap).sum() / len(confidence))


def platt(logit: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """(a, b) for which sigmoid(a logit + b) is the most likely to have made `positive` [n], with
    a > 0, so that the order stays (Platt 1999). (1, 0) where there is nothing to learn from."""
    x, y = np.asarray(logit, np.float64), np.asarray(positive, np.float64)
    # Platt's targets: never certain, so that the optimum is finite where classes are separate.
    n, m = y.sum(), len(y) - y.sum()
    y = np.where(y > 0, (n + 1) / (n + 2), 1 / (m + 2))

    def softplus(z):
        return np.logaddexp(0.0, z)

    def loss(w):
        return np.sum(softplus(w[0] * x + w[1]) - y * (w[0] * x + w[1]))

    w = np.array([1.0, 0.0])
    design = np.stack([x, np.ones_like(x)])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(w[0] * x + w[1], -500, 500)))
        slope = design @ (p - y)
        curve = (design * (p * (1 - p))) @ design.T + 1e-9 * len(x) * np.eye(2)
        step, scale = np.linalg.solve(curve, slope), 1.0
        while loss(w - scale * step) > loss(w) and scale > 1e-6:
            scale /= 2
        w = w - scale * step
        if np.abs(scale * step).max() < 1e-9:
            break
    return (float(w[0]), float(w[1])) if w[0] > 0 and np.isfinite(w).all() else (1.0, 0.0)
