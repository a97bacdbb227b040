"""Requests of all kinds, for hypothesis to draw."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eejax.inference.policy import available_gates


def asked_of(draw, prompts, config, batch):
    """Drawn (prompts, arguments of `generate`); of a gate, a threshold and a least depth each."""
    n = config.n_exits
    threshold = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0]))

    def each(kind):
        return draw(st.lists(kind, min_size=batch, max_size=batch))

    thresholds = each(st.lists(threshold, min_size=n, max_size=n))
    kwargs = dict(
        threshold=np.array(thresholds, np.float32).reshape(batch, n),
        gate=each(st.sampled_from(available_gates(config))),
        min_exit_layer=each(st.integers(0, 3)),
        decay=draw(st.sampled_from([None, 0.0, 4.0])),
        prefill_exit=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (ord(" "), ord("e"))])),
    )
    lengths = each(st.integers(1, 16))
    return prompts(draw(st.integers(0, 99)), lengths), kwargs
