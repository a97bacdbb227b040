"""Comparing generations with the oracle's, where different row counts round differently."""

from __future__ import annotations

TIE = 1e-4  # a mismatch counts unless the oracle's own margin (top-2 logits, or confidence to
# threshold) is below this


def assert_same(oracle, other) -> int:
    """Every token and exit equal, up to near-ties of the oracle; returns how many were excused.

    After a tie the two texts differ for good, so that request's comparison ends there.
    """
    excused = 0
    assert oracle.tokens.shape[0] == other.tokens.shape[0]
    for i in range(len(oracle.tokens)):
        n = min(oracle.lengths[i], other.lengths[i])
        tied = False
        for j in range(n):
            same = (
                oracle.tokens[i, j] == other.tokens[i, j]
                and oracle.exits[i, j] == other.exits[i, j]
            )
            if not same:
                assert oracle.margins[i, j] < TIE, (
                    f"request {i}, token {j}: oracle {oracle.tokens[i, j]} at exit"
                    f" {oracle.exits[i, j]} (margin {oracle.margins[i, j]:.2e}), other"
                    f" {other.tokens[i, j]} at exit {other.exits[i, j]}"
                )
                tied = True
                excused += 1
                break
            assert abs(oracle.confidences[i, j] - other.confidences[i, j]) < TIE
            assert abs(oracle.logprobs[i, j] - other.logprobs[i, j]) < 1e-3
        if not tied:
            assert oracle.lengths[i] == other.lengths[i]
            assert oracle.finish[i] == other.finish[i]
    if excused:
        print(f"near-ties excused: {excused}")
    return excused
