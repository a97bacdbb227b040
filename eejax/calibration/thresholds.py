"""A threshold for every exit: the least depth at a required agreement."""

from __future__ import annotations

import numpy as np

from eejax.calibration.frontier import ExitScores, FrontierPoint, at_threshold
from eejax.common.errors import require

PASSES = 3
PRICES = np.geomspace(1e-2, 1e2, 30)
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))  # at 1 no token leaves


def thresholds_for(scores: ExitScores, gate: str, agreement: float) -> FrontierPoint:
    """Find the thresholds [E] of least mean depth with at least this agreement on `scores`.

    They are 1, at which no token leaves, where no others reach the agreement.

    Given the other exits' thresholds, one sort gives the effect of every value of an exit's
    threshold: of the tokens that reach the exit, those above it leave at once, and the others leave
    where they would anyway. Exits are therefore optimised in turn, the deepest first: first at a
    varying price of a wrong token, then within the number of wrong tokens that is still allowed.
    The thresholds are chosen on the text that they are judged on: judge them on other text, or ask
    for a `guarantee`.

    Raises:
      ConfigError: for a gate without confidences of its own, or an agreement outside [0, 1].
    """
    require(0 <= agreement <= 1, "agreement", agreement, "must lie in [0, 1]")
    require(
        gate in scores.confidences, "gate", gate, f"must be one of {sorted(scores.confidences)}"
    )
    turns = _Turns(scores, gate)
    thresholds = np.ones(scores.config.n_exits)
    best = at_threshold(scores, thresholds.tolist(), gate=gate)
    for price in PRICES:
        turns.priced(thresholds, price)
        within = thresholds.copy()
        turns.within(within, (1 - agreement) * len(scores))
        point = at_threshold(scores, within.tolist(), gate=gate)
        if point.agreement >= agreement and point.depth < best.depth:
            best = point
    return best


class _Turns:
    """Coordinate-wise choice of the thresholds [E] of scored text, in place."""

    def __init__(self, scores: ExitScores, gate: str):
        config = scores.config
        self.said = np.asarray(scores.confidences[gate][: config.n_exits], np.float64)
        self.wrong = (scores.tokens != scores.tokens[-1]).astype(np.float64)
        depth = np.asarray(config.exit_boundaries, np.float64)[:, None] / config.n_layers
        self.depth = np.broadcast_to(depth, self.wrong.shape)
        self.order = np.argsort(-self.said, axis=1, kind="stable")
        self.exits = [e for e, x in enumerate(config.exits) if x.router or gate != "router"][::-1]

    def priced(self, thresholds: np.ndarray, price: float) -> None:
        """Minimise depth + price * wrong tokens, exit by exit."""
        for _ in range(PASSES):
            before = thresholds.copy()
            for e in self.exits:
                saved, spoilt, cuts, _ = self._look(e, thresholds)
                gain = np.where(cuts, saved - price * spoilt, -np.inf)
                self._set(thresholds, e, gain)
            if np.array_equal(before, thresholds):
                return

    def within(self, thresholds: np.ndarray, max_wrong: float) -> None:
        """Minimise the depth with at most `max_wrong` wrong tokens, exit by exit."""
        for _ in range(PASSES):
            before = thresholds.copy()
            for e in self.exits:
                saved, spoilt, cuts, wrong = self._look(e, thresholds)
                gain = np.where(cuts & (wrong + spoilt <= max_wrong + 1e-9), saved, -np.inf)
                if wrong > max_wrong + 1e-9:  # already too many: as few more as possible
                    gain = np.where(cuts, -spoilt, -np.inf)
                self._set(thresholds, e, gain)
            if np.array_equal(before, thresholds):
                return

    def _look(self, e: int, thresholds: np.ndarray):
        """Evaluate leaving at exit e with the i + 1 most confident positions, for every i.

        Returns:
          (depth saved [n], tokens made wrong [n], whether a threshold separates them from the rest
          [n] bool, wrong tokens if none leaves).
        """
        fires = (self.said >= thresholds[:, None]) & (thresholds[:, None] < 1)
        fires[e] = False
        leaves = np.concatenate([fires, np.ones((1, self.said.shape[1]), bool)]).argmax(0)

        def at(a):
            return np.take_along_axis(a, leaves[None], 0)[0]

        arrives, order = leaves > e, self.order[e]

        def sums(a):
            return np.cumsum(np.where(arrives, at(a) - a[e], 0.0)[order])

        confidence = self.said[e][order]
        cuts = np.append(confidence[1:] < confidence[:-1], True)
        return sums(self.depth), -sums(self.wrong), cuts, float(at(self.wrong).sum())

    def _set(self, thresholds: np.ndarray, e: int, gain: np.ndarray) -> None:
        i = int(np.argmax(gain))
        surest = float(self.said[e][self.order[e][i]])
        thresholds[e] = min(surest, BELOW_ONE) if gain[i] > 0 else 1.0
