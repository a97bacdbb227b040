"""Arguments for tests of `head_confidence`."""

from __future__ import annotations

from functools import partial

from eejax.kernels.head_confidence.api import head_confidence
from eejax.kernels.head_confidence.reference import HeadConfidenceOptions
from eejax.kernels.norms import NormOptions
from eejax.kernels.specs import DTYPES, LAYER, ONE, RMS, Spec, normal

# Rows, width, table rows, padding among them, whether norm and head have a bias; the options.
SMALL = (
    (1, 64, 257, 0, False, False, dict(norm=RMS)),
    (5, 200, 180, 44, True, True, dict(norm=LAYER, temperature=0.7)),
    (16, 130, 1, 0, False, True, dict(norm=ONE, softcap=30.0)),
    (17, 96, 500, 23, False, False, dict(norm=LAYER)),
    (40, 288, 17, 0, False, True, dict(softcap=5.0, temperature=1.5)),
    (70, 64, 130, 2, True, False, dict(norm=RMS)),
)
LARGE = (
    (1, 4096, 128256, 0, False, False, dict(norm=RMS)),
    (16, 768, 50304, 47, True, False, dict(norm=LAYER)),
    (8, 2880, 201088, 70, False, True, dict(norm=ONE, temperature=0.8)),
    (32, 8192, 256000, 0, False, False, dict(norm=ONE, softcap=30.0)),
    (64, 4096, 128256, 256, True, True, dict(norm=LAYER, softcap=30.0, temperature=0.7)),
    (5000, 2048, 50257, 0, False, False, dict(norm=RMS)),
)


def draw(
    key,
    n: int,
    d: int,
    rows: int,
    bias: bool,
    head_bias: bool,
    dtype: str,
    options: HeadConfidenceOptions,
):
    """Draw states and the other arguments, such that logits have a standard deviation of about 2.

    States have a mean, so that the two norms differ. Padding of the table would be the most likely
    token.
    """
    make, norm = partial(normal, key, dtype=dtype), options.norm
    table = make(3, (rows, d), std=2 * d**-0.5)
    table = table.at[options.vocab_size :].set(100.0)
    return (
        make(0, (n, d), mean=0.5 if norm else 0.0),
        make(1, (d,), std=0.2, mean=0.0 if norm.plus_one else 1.0) if norm else None,
        make(2, (d,), std=0.2) if bias else None,
        table,
        make(4, (rows,)) if head_bias else None,
    )


def _name(norm: NormOptions | None, bias: bool, head_bias: bool, rest: dict) -> str:
    normed = f"{norm.kind}{'+1' * norm.plus_one}{'-bias' * bias}" if norm else "normed"
    return "-".join([normed, *["head_bias"] * head_bias, *rest])


def _specs(cases: tuple, small: bool) -> tuple[Spec, ...]:
    specs = []
    for dtype in DTYPES:
        for n, d, rows, padding, bias, head_bias, given in cases:
            options = HeadConfidenceOptions(rows - padding, **given)
            rest = {k: v for k, v in given.items() if k != "norm"}
            specs.append(
                Spec(
                    f"{dtype}-{n}x{d}x{rows}-{_name(options.norm, bias, head_bias, rest)}",
                    partial(head_confidence, options=options),
                    partial(
                        draw,
                        n=n,
                        d=d,
                        rows=rows,
                        bias=bias,
                        head_bias=head_bias,
                        dtype=dtype,
                        options=options,
                    ),
                    {"options": options},
                    small,
                )
            )
    return tuple(specs)


SPECS = _specs(SMALL, True) + _specs(LARGE, False)
