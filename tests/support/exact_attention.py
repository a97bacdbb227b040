"""Attention with a cache in float64, one row and head after the other."""

from __future__ import annotations

import numpy as np
from kernel_checks import ROUNDING, wide

from eejax.kernels.decode_attention.reference import AttentionOptions


def exact(options: AttentionOptions, q, k, v, keys, values, slot, position, _, slopes):
    """Return y, and the keys and values with those of the rows."""
    q, k, v, keys, values = map(wide, (q, k, v, keys, values))
    n_kv, g = q.shape[1:3]
    slots = len(keys) // n_kv
    rows = [
        (i, s, p) for i, (s, p) in enumerate(zip(slot.tolist(), position.tolist(), strict=True))
    ]
    rows = [row for row in rows if 0 <= row[1] < slots]
    for i, s, p in rows:
        keys[s * n_kv : (s + 1) * n_kv, p], values[s * n_kv : (s + 1) * n_kv, p] = k[i], v[i]
    y = np.zeros(q.shape)
    for i, s, p in rows:
        low = 0 if options.window is None else max(0, p + 1 - options.window)
        for head in range(n_kv):
            own, held = keys[s * n_kv + head, low : p + 1], values[s * n_kv + head, low : p + 1]
            for query in range(g):
                scores = own @ q[i, head, query] * options.scale
                if options.softcap:
                    scores = options.softcap * np.tanh(scores / options.softcap)
                if slopes is not None:
                    scores = scores - float(slopes[head, query]) * (p - np.arange(low, p + 1))
                weights = np.exp(scores - scores.max())
                y[i, head, query] = weights @ held / weights.sum()
    return y, keys, values


def same_as_exact(got, options, args) -> None:
    """Assert that y is as near to float64 as its dtype allows, and that the caches are the same."""
    want = exact(options, *args)
    assert [a.dtype for a in got] == [args[0].dtype, args[3].dtype, args[4].dtype]
    bound = 2 * ROUNDING[args[0].dtype.name] * max(1, np.abs(want[0]).max())
    assert np.abs(wide(got[0]) - want[0]).max() <= bound
    for a, b in zip(got[1:], want[1:], strict=True):
        assert (wide(a) == b).all()
