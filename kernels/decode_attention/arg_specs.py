"""Arguments for tests of `decode_attention`."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np

from eejax.kernels.decode_attention.api import decode_attention
from eejax.kernels.decode_attention.reference import AttentionOptions
from eejax.kernels.specs import Spec, normal

# Rows by slot, positions of the caches, heads of keys and values, queries of each, a head's width,
# maximum rows of a span; rows without a slot at the end, and unused spans; the options.
SMALL = (
    ((1,), 40, 2, 1, 16, 1, 0, 0, {}),
    ((1, 0, 1), 70, 1, 3, 20, 4, 3, 2, dict(softcap=20.0)),
    ((3, 0, 9, 1), 150, 2, 2, 40, 4, 2, 3, dict(window=21)),
    ((40, 21), 130, 1, 4, 16, 32, 3, 1, dict(slopes=True)),
    ((2, 2), 64, 3, 1, 33, 2, 1, 1, dict(window=1, softcap=5.0, slopes=True)),
)
CHUNK = (300, 100, 50, 30, 20, 10, 1), 64, 1, 2  # of prompts
DECODED = (  # slots: a model of 2048 columns, one of grouped queries, SmolLM
    *((slots, s, 16, 1, 128) for s in (640, 4096) for slots in (1, 8, 64)),
    *((slots, 4096, 8, 4, 128) for slots in (1, 8)),
    *((slots, 640, 3, 3, 64) for slots in (1, 8)),
)
LARGE = (
    *(((1,) * slots, *shape, 1 if slots == 1 else 4, 0, 0, {}) for slots, *shape in DECODED),
    ((4, 3, 2), 2000, 4, 2, 256, 4, 3, 2, dict(softcap=50.0, window=512)),
    ((1, 4), 2048, 32, 1, 80, 4, 3, 0, dict(slopes=True)),
    (CHUNK[0], 4096, 16, 1, 128, *CHUNK[1:], {}),
    (CHUNK[0], 4096, 8, 4, 128, *CHUNK[1:], {}),
    (CHUNK[0], 640, 3, 3, 64, 32, 1, 2, {}),
    (CHUNK[0], 2048, 4, 2, 256, *CHUNK[1:], dict(softcap=50.0, window=512)),
)


def layout(counts, starts, width: int, nobody: int, no_span: int) -> tuple[np.ndarray, ...]:
    """Return slot and position of each row, and the first row of each span.

    Slots have `counts` rows from positions `starts` on; the last slot's rows come first.
    """
    slot, position, first = [], [], []
    for i in reversed(range(len(counts))):
        first += [len(slot) + c for c in range(0, counts[i], width)]
        slot += [i] * counts[i]
        position += [starts[i] + c for c in range(counts[i])]
    first += [len(slot) + nobody] * no_span
    slot += [len(counts)] * nobody
    position += [0] * nobody
    return tuple(np.array(a, np.int32) for a in (slot, position, first))


def draw(
    key,
    counts,
    s: int,
    n_kv: int,
    g: int,
    h: int,
    width: int,
    nobody: int,
    no_span: int,
    slopes: bool,
    dtype: str,
    full: bool = False,
) -> tuple:
    """Draw rows and caches, of which a random part is filled, or as much as there is room for."""
    make, rng = partial(normal, key, dtype=dtype), np.random.default_rng(len(counts) + s)
    starts = [s - c if full else int(rng.integers(0, s - c + 1)) for c in counts]
    slot, position, first = map(jnp.asarray, layout(counts, starts, width, nobody, no_span))
    r, slots = len(slot), len(counts)
    own, cache = (r, n_kv, h), (slots * n_kv, s, h)
    return (
        make(0, (r, n_kv, g, h)),
        make(1, own),
        make(2, own),
        make(3, cache),
        make(4, cache),
        slot,
        position,
        first,
        2.0 ** -jnp.arange(1.0, n_kv * g + 1).reshape(n_kv, g) if slopes else None,
    )


def run(*args, options: AttentionOptions, implementation: str | None = None):
    """Call `decode_attention` with the arguments from `draw`."""
    *own, slopes = args
    return decode_attention(*own, options=options, slopes=slopes, implementation=implementation)


def spec(dtype: str, case: tuple, small: bool, full: bool = False) -> Spec:
    counts, s, n_kv, g, h, width, nobody, no_span, given = case
    rest = {k: v for k, v in given.items() if k != "slopes"}
    options = AttentionOptions(width, max(counts), h**-0.5, **rest)
    sizes = dict(s=s, n_kv=n_kv, g=g, h=h, width=width, nobody=nobody, no_span=no_span)
    slopes = given.get("slopes", False)
    return Spec(
        "-".join([f"{dtype}-{len(counts)}x{s}-{n_kv}x{g}x{h}-{sum(counts)}by{width}", *given]),
        partial(run, options=options),
        partial(draw, counts=counts, slopes=slopes, dtype=dtype, full=full, **sizes),
        {"options": options},
        small,
    )


SPECS = (
    *(spec(dtype, case, True) for dtype in ("float32", "float16", "bfloat16") for case in SMALL),
    *(spec("bfloat16", case, False) for case in LARGE),
    *(spec("float32", case, False) for case in LARGE[1::2]),  # of every form
    spec("float16", LARGE[1], False),
)
