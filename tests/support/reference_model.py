"""The transformer written again in float64 numpy, one sequence and one position at a time where
that is clearer, without cache, batch or einsum: what the model's tests compare with."""

from __future__ import annotations

import math

import numpy as np

ERF = np.vectorize(math.erf)


def tree64(tree):
    if isinstance(tree, dict):
        return {k: tree64(v) for k, v in tree.items()}
    return np.asarray(tree, np.float64)


def act(name, x):
    if name == "gelu":
        return 0.5 * x * (1 + ERF(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu_quick":
        return x / (1 + np.exp(-1.702 * x))
    if name == "silu":
        return x / (1 + np.exp(-x))
    return np.maximum(x, 0) ** (2 if name == "relu2" else 1)


def norm(p, x, c):
    """x [..., d] normalised over the dimensions of the scale."""
    axes = tuple(range(-p["scale"].ndim, 0))
    if c.norm == "layernorm":
        x = x - x.mean(axes, keepdims=True)
    x = x / np.sqrt((x**2).mean(axes, keepdims=True) + c.norm_eps)
    return x * (p["scale"] + (1 if c.norm_plus_one else 0)) + p.get("bias", 0)


def frequencies(rotary, r):
    """Radians per position of each of r/2 pairs, and the factor on cos and sin."""
    theta, factor = rotary.theta, rotary.factor
    freqs = [theta ** (-2 * i / r) for i in range(r // 2)]
    if rotary.scaling == "linear":
        return [f / factor for f in freqs], 1.0
    if rotary.scaling == "ntk":
        base = theta * factor ** (r / (r - 2))
        return [base ** (-2 * i / r) for i in range(r // 2)], 1.0
    out = []
    if rotary.scaling == "llama3":
        low, high = rotary.low_frequency, rotary.high_frequency
        for f in freqs:
            turns = rotary.original_context * f / (2 * math.pi)
            if turns < low:
                out.append(f / factor)
            elif turns > high:
                out.append(f)
            else:
                s = (turns - low) / (high - low)
                out.append((1 - s) * f / factor + s * f)
        return out, 1.0
    if rotary.scaling == "yarn":
        # The (real) index of the pair that makes so many turns over the original context.
        def index(turns):
            return r / 2 * math.log(rotary.original_context / (2 * math.pi * turns), theta)

        first = max(0, math.floor(index(rotary.beta_fast)))  # the last that keeps its frequency
        last = min(r - 1, math.ceil(index(rotary.beta_slow)))  # the first that is divided whole
        for i, f in enumerate(freqs):
            if i <= first:
                out.append(f)
            elif i >= last:
                out.append(f / factor)
            else:
                s = (i - first) / (last - first)
                out.append((1 - s) * f + s * f / factor)
        return out, 1 + math.log(factor) / 10
    return freqs, 1.0


def rotate(x, position, c, local):
    """One head vector x [h] at an integer position."""
    r = int(c.head_dim * c.rotary.fraction)
    freqs, factor = frequencies(c.rotary, r)
    if local and c.rotary.local_theta:
        freqs, factor = [c.rotary.local_theta ** (-2 * i / r) for i in range(r // 2)], 1.0
    y = x.copy()
    for i, freq in enumerate(freqs):
        a = position * freq
        j, k = (2 * i, 2 * i + 1) if c.rotary.interleaved else (i, i + r // 2)
        y[j] = (x[j] * math.cos(a) - x[k] * math.sin(a)) * factor
        y[k] = (x[k] * math.cos(a) + x[j] * math.sin(a)) * factor
    return y


def slopes(n):
    """ALiBi's slopes as Press et al. compute them."""

    def power_of_two(m):
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start * start**i for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    m = 2 ** math.floor(math.log2(n))
    return power_of_two(m) + slopes(2 * m)[0::2][: n - m]


def attention(p, x, c, window, positions, segments):
    t = len(x)
    q, k, v = (np.tensordot(x, p[w], 1) + p.get(f"{w}_bias", 0) for w in "qkv")
    if c.qk_norm != "none":
        q, k = norm(p["q_norm"], q, c), norm(p["k_norm"], k, c)
    if c.position == "rotary":
        local = window is not None
        for a in (q, k):
            for i in range(t):
                for n in range(a.shape[1]):
                    a[i, n] = rotate(a[i, n], positions[i], c, local)
    scale = c.attention_scale or 1 / math.sqrt(c.head_dim)
    group = c.n_heads // c.n_kv_heads
    alibi = slopes(c.n_heads)
    out = np.zeros((t, c.n_heads, c.head_dim))
    for n in range(c.n_heads):
        for i in range(t):
            s, gap = k[:, n // group] @ q[i, n] * scale, positions[i] - positions
            if c.attention_softcap:
                s = c.attention_softcap * np.tanh(s / c.attention_softcap)
            if c.position == "alibi":
                s = s - alibi[n] * gap
            seen = (gap >= 0) & (segments[i] == segments) & (window is None or gap < window)
            s = np.where(seen, s, -np.inf)
            w = np.exp(s - s.max())
            out[i, n] = (w / w.sum()) @ v[:, n // group]
    return np.tensordot(out, p["o"], 2) + p.get("o_bias", 0)


def mlp(p, x, c):
    up = x @ p["up"] + p.get("up_bias", 0)
    if c.mlp_gated:
        up = act(c.activation, x @ p["gate"] + p.get("gate_bias", 0)) * up
    else:
        up = act(c.activation, up)
    return up @ p["down"] + p.get("down_bias", 0)


def layer(p, x, c, window, positions, segments):
    def attend(y):
        return attention(p["attn"], y, c, window, positions, segments)

    def feed(y):
        return mlp(p["mlp"], y, c)

    def n(name, y):
        return norm(p[name], y, c)

    if c.residual == "parallel":
        return x + attend(n("attn_norm", x)) + feed(n("mlp_norm", x))
    if c.residual == "parallel_one_norm":
        h = n("attn_norm", x)
        return x + attend(h) + feed(h)
    if c.norm_placement == "pre":
        x = x + attend(n("attn_norm", x))
        return x + feed(n("mlp_norm", x))
    if c.norm_placement == "post":
        x = n("attn_out_norm", x + attend(x))
        return n("mlp_out_norm", x + feed(x))
    if c.norm_placement == "pre_post":
        x = x + n("attn_out_norm", attend(n("attn_norm", x)))
        return x + n("mlp_out_norm", feed(n("mlp_norm", x)))
    x = x + n("attn_out_norm", attend(x))
    return x + n("mlp_out_norm", feed(x))


def exit_logits(params, c, tokens, positions=None, segments=None):
    """Logits of every exit, final last: list of [t, vocab_size], for one sequence of tokens."""
    p = tree64(params)
    t = len(tokens)
    positions = np.arange(t) if positions is None else positions
    segments = np.zeros(t, int) if segments is None else segments
    x = p["embed"]["tokens"][np.asarray(tokens)] * c.embedding_scale
    if c.position == "learned":
        x = x + p["embed"]["positions"][positions]
    if c.embedding_norm:
        x = norm(p["embed"]["norm"], x, c)

    def read(own, head, temperature, x, e):
        if "mlp" in own:
            x = x + mlp(own["mlp"], norm(own["mlp_norm"], x, c), c)
        if "block" in own:
            window = c.window(min(c.exit_boundaries[e], c.n_layers - 1))
            x = layer(own["block"], x, c, window, positions, segments)
        if "norm" in own:
            x = norm(own["norm"], x, c)
        if "low_rank" in own:
            x = x @ own["low_rank"]["down"] @ own["low_rank"]["up"]
        tables = {
            "own": own.get("head"),
            "tied": p["embed"]["tokens"],
            "shared": p.get("shared_head"),
        }
        y = x @ tables[head].T + own.get("head_bias", 0)
        if c.logit_softcap:
            y = c.logit_softcap * np.tanh(y / c.logit_softcap)
        return y[:, : c.vocab_size] / temperature

    out = []
    for n in range(c.n_layers + 1):
        for e, exit_ in enumerate(c.exits):
            if exit_.boundary == n:
                out.append(read(p["exits"][exit_.name], exit_.head, exit_.temperature, x, e))
        if n < c.n_layers:
            own = jax_free_slice(p["layers"], n)
            x = layer(own, x, c, c.window(n), positions, segments)
    out.append(read(p["final"], c.head, c.temperature, x, c.n_exits))
    return out


def jax_free_slice(tree, n):
    if isinstance(tree, dict):
        return {k: jax_free_slice(v, n) for k, v in tree.items()}
    return tree[n]
