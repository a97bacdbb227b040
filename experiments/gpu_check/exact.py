"""Ops of `eejax.kernels` in float64, by numpy, from their formulas.

Each function takes an op's options and arguments, and returns the op's results in float64; integers
and booleans keep their types.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def wide(a: Any) -> np.ndarray:
    """Return an array of any floating dtype in float64."""
    return np.asarray(a.astype("float32")).astype(np.float64)


def normed(options, x: np.ndarray, scale, bias) -> np.ndarray:
    """Apply a norm to rows [n, d]."""
    if options is None:
        return x
    if options.kind == "layernorm":
        x = x - x.mean(1, keepdims=True)
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + options.eps)
    x = x * (wide(scale) + options.plus_one)
    return x if bias is None else x + wide(bias)


def compact(_, keep) -> tuple[np.ndarray, ...]:
    keep = np.asarray(keep)
    order = np.concatenate([np.flatnonzero(keep), np.flatnonzero(~keep)])
    return order, np.array([keep.sum(), (~keep).sum()])


def scatter(options, into, x, place, scale, bias) -> tuple[np.ndarray, ...]:
    out, place = wide(into), np.asarray(place)
    inside = (place >= 0) & (place < len(out))
    out[place[inside]] = normed(options, wide(x), scale, bias)[inside]
    return (out,)


def norm_router(options, x, scale, bias, down, up, up_bias, threshold) -> tuple[np.ndarray, ...]:
    h = normed(options, wide(x), scale, bias) @ wide(down)
    y = h / (1 + np.exp(-h)) @ wide(up) + wide(up_bias)
    confidence = 1 / (1 + np.exp(-y))
    return confidence, confidence >= np.asarray(threshold)


def head_confidence(options, x, scale, bias, table, head_bias) -> tuple[np.ndarray, ...]:
    size = options.vocab_size
    y = normed(options.norm, wide(x), scale, bias) @ wide(table)[:size].T
    y = y if head_bias is None else y + wide(head_bias)[:size]
    if options.softcap is not None:
        y = options.softcap * np.tanh(y / options.softcap)
    y = y / options.temperature
    top = y.max(1)
    p = np.exp(y - top[:, None])
    total = p.sum(1, keepdims=True)
    p = p / total
    lse = top + np.log(total[:, 0])
    second = np.sort(p, 1)[:, -2] if size > 1 else np.zeros(len(y))
    return y.argmax(1), p.max(1), second, lse, lse - (p * y).sum(1)


def linear_cross_entropy(options, h, table, bias, labels, weights) -> tuple[np.ndarray, ...]:
    """Return both sums, the gradients in states, table, bias and weights, and the sums again."""
    h, table, weights, labels = wide(h), wide(table), wide(weights), np.asarray(labels)
    size, padding = options.vocab_size, len(table) - options.vocab_size
    table, counted = table[:size], labels >= 0
    y = h @ table.T + (0.0 if bias is None else wide(bias)[:size])
    slope = np.ones_like(y)
    if options.softcap is not None:
        tanh = np.tanh(y / options.softcap)
        y, slope = options.softcap * tanh, 1 - tanh**2
    y, slope = y / options.temperature, slope / options.temperature
    top = y.max(1, keepdims=True)
    lse = (top + np.log(np.exp(y - top).sum(1, keepdims=True)))[:, 0]
    p, hot = np.exp(y - lse[:, None]), labels[:, None] == np.arange(size)
    nll = np.where(counted, lse - (y * hot).sum(1), 0.0)
    factor = p.max(1) if options.confidence_weighted else np.ones(len(p))
    cost = np.where(counted, nll * factor + options.z_loss * lse**2, 0.0)
    g = (p - hot) * factor[:, None] + p * (2 * options.z_loss * lse)[:, None]
    g = g * (weights * counted)[:, None] * slope

    def pad(a):
        return np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1))

    sums = (weights * cost).sum(), (weights * nll).sum()
    of_bias = () if bias is None else (pad(g.sum(0)),)
    return *sums, g @ table, pad(g.T @ h), *of_bias, cost, *sums


def decode_attention(options, q, k, v, keys, values, slot, position, _, slopes):
    q, k, v, keys, values = map(wide, (q, k, v, keys, values))
    n_kv, y = q.shape[1], np.zeros(q.shape)
    slot, position = np.asarray(slot), np.asarray(position)
    rows = np.flatnonzero((slot >= 0) & (slot < len(keys) // n_kv))

    def heads(i):
        return slice(slot[i] * n_kv, (slot[i] + 1) * n_kv)

    for i in rows:
        keys[heads(i), position[i]], values[heads(i), position[i]] = k[i], v[i]
    for i in rows:
        p = position[i]
        low = 0 if options.window is None else max(0, p + 1 - options.window)
        own, held = keys[heads(i), low : p + 1], values[heads(i), low : p + 1]
        scores = np.einsum("ksh,kgh->kgs", own, q[i]) * options.scale
        if options.softcap:
            scores = options.softcap * np.tanh(scores / options.softcap)
        if slopes is not None:
            scores = scores - wide(slopes)[:, :, None] * (p - np.arange(low, p + 1))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y[i] = np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), held)
    return y, keys, values


def work(name: str, args: tuple) -> float:
    """Estimate the operations of an op's function here, to leave out cases that take minutes."""
    shapes = [getattr(a, "shape", ()) for a in args]
    if name == "decode_attention":
        (r, n_kv, g, h), s = shapes[0], shapes[3][1]
        return 4.0 * r * n_kv * g * h * s
    if name == "linear_cross_entropy":
        return 6.0 * np.prod(shapes[0]) * shapes[1][0]
    if name == "head_confidence":
        return 2.0 * np.prod(shapes[0]) * shapes[3][0]
    if name == "norm_router":
        return 2.0 * np.prod(shapes[0]) * shapes[3][1]
    return float(np.prod(shapes[0]))
