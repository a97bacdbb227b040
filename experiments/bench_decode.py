"""Decoding speed beside transformers, and the gain of an early exit against the bytes it saves.

    eejax bench decode --json

It needs the peers of `make bench-env`. The model has GPT-2-small's shape with random weights,
float32, batch 1, greedy. Both libraries hold the same weights (checked: they generate the same
tokens) and use the same cores, or the same GPU where JAX is on one (`peer_device`; no product is in
TF32); runs alternate in one process.

Reported: `decode_vs_transformers`, tokens/s of the engine "full" over transformers' `generate`,
whole calls, prompt included; `exit_efficiency`, the smaller over exits at 1/4 and 1/2 depth of
(time of a full-depth token / time of a token forced out there, where no token goes deeper) divided
by (bytes of weights and cache that the one reads / the other). Every ratio is the median over
pairs, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
from absl import flags

from eejax.experiments import launch, peer_device

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PAIRS = flags.DEFINE_integer("pairs", 15, "Pairs of runs to time.", lower_bound=2)
_PROMPT = flags.DEFINE_integer("prompt", 64, "Tokens of the prompt.", lower_bound=1)
_NEW = flags.DEFINE_integer("new", 64, "Tokens to generate.", lower_bound=2)
_THREADS = flags.DEFINE_integer("threads", None, "Cores for both; by default all.")
_PEER = flags.DEFINE_bool("peer", True, "Measure transformers too.")

DEPTHS = (3, 6)  # exits at 1/4 and 1/2 of 12 layers


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[: _THREADS.value]
    os.sched_setaffinity(0, cores)  # before JAX starts: it makes a thread for each core it sees
    device = peer_device.torch_device() if _PEER.value else None
    config, params = build()
    prompt = np.random.default_rng(1).integers(0, config.vocab_size, _PROMPT.value).tolist()
    result = {"threads": len(cores), "prompt": _PROMPT.value, "new": _NEW.value}
    with peer_device.exact_products():
        result |= exits(config, params, prompt)
        if device is not None:
            result |= against_transformers(config, params, prompt, len(cores), device)
    for name, value in result.items():
        print(f"{name:32s} {value}")
    if _JSON.value:
        print(json.dumps(result))


def build():
    """Return GPT-2-small with exits at 1/4 and 1/2 depth that read the tied head.

    The weights are random.
    """
    import jax.numpy as jnp

    from eejax.models import params
    from eejax.models.config import ExitConfig, ModelConfig

    config = ModelConfig(
        vocab_size=50257,
        n_layers=12,
        d_model=768,
        n_heads=12,
        context_length=1024,
        norm="layernorm",
        position="learned",
        mlp_gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="tied",
        exits=tuple(ExitConfig(n, norm=False) for n in DEPTHS),
    )
    rng = np.random.default_rng(0)

    def draw(p):
        return jnp.asarray(rng.standard_normal(p.shape, np.float32) * (p.std or 0) + p.fill)

    return config, params.map_params(draw, params.abstract(config))


def exits(config, params, prompt) -> dict:
    """Time a token at full depth and forced out early, beside the bytes that each reads."""
    from eejax.analysis import interleave, median_ratio
    from eejax.inference import EngineOptions, Generator

    # A cap above the tokens generated never forces a token deeper. "full" has the same cap, so
    # that all caches have one length.
    room = dict(cap=_NEW.value + 8, buckets=(1,))
    generators = [Generator.make(params, config, EngineOptions("full", **room))]
    generators += [Generator.make(params, config, EngineOptions("recompute", **room))] * len(DEPTHS)
    n = len(DEPTHS)
    thresholds = [1.0] + [[0.0 if i == j else 1.0 for i in range(n)] for j in range(n)]
    started = {}

    def start(i):
        """Run everything up to the first token; the rest is one compiled call."""
        started[i] = generators[i].stream(
            [prompt], _NEW.value + 1, threshold=thresholds[i], chunk=_NEW.value
        )
        next(started[i])

    def finish(i):
        return next(started[i])

    depths = []
    for i in range(n + 1):
        start(i)
        executed = finish(i).layers[0, 1:]
        assert executed.min() == executed.max(), executed
        depths.append(int(executed[0]))
    assert depths == [config.n_layers, *DEPTHS], depths

    runs = [lambda _, i=i: finish(i) for i in range(n + 1)]
    seconds = interleave(runs, _PAIRS.value, time.perf_counter, before=start)
    length = positions_read(len(prompt), config.context_length, room["cap"])
    full = bytes_per_token(params, config, config.n_layers, length)
    result, worst = {"ms_per_token_full": 1e3 * float(np.median(seconds[0])) / _NEW.value}, []
    for i, depth in enumerate(DEPTHS, 1):
        ratio = median_ratio(seconds[0], seconds[i])
        spared = full / bytes_per_token(params, config, depth, length)
        worst.append(ratio.median / spared)
        result |= {
            f"time_ratio_depth_{depth}": ratio.median,
            f"time_ratio_depth_{depth}_interval": [ratio.low, ratio.high],
            f"bytes_ratio_depth_{depth}": spared,
            f"exit_efficiency_depth_{depth}": ratio.median / spared,
        }
    return result | {"exit_efficiency": min(worst), "pairs": _PAIRS.value}


def positions_read(prompt: int, context: int, cap: int) -> float:
    """Return the positions of the caches that a step reads.

    They are all that a generation allocates, or, by a GPU's kernel, those that are filled, on
    average.
    """
    from eejax.inference import EngineOptions
    from eejax.inference.generate import cache_length
    from eejax.kernels import call

    if call.by_kernels():
        return prompt + (_NEW.value + 1) / 2
    return cache_length(prompt + _NEW.value + 1, context, EngineOptions(cap=cap))


def bytes_per_token(params, config, depth: int, length: float) -> float:
    """Return the bytes of weights and caches that a token reads up to `depth` layers."""
    from eejax.common.trees import nbytes, slice_layers

    cache = 2 * depth * length * config.n_kv_heads * config.head_dim * 4
    head = nbytes(params["embed"]["tokens"])
    if depth == config.n_layers:
        head += nbytes(params["final"])
    return nbytes(slice_layers(params["layers"], 0, depth)) + head + cache


def against_transformers(config, params, prompt, threads: int, device: str) -> dict:
    """Time whole calls of the engine "full" and of transformers' `generate`."""
    import torch

    from eejax.analysis import interleave, median_ratio
    from eejax.inference import Generator

    torch.set_num_threads(threads)
    model = peer(params).to(device)
    ids = torch.tensor([prompt], device=device)
    full = Generator.make(params, config, "full")

    def ours():
        return full.generate([prompt], _NEW.value).ids(0)

    def theirs():
        return peer_device.greedy(model, ids, _NEW.value)

    a, b = ours(), theirs()
    if a != b:
        raise RuntimeError(f"the models differ: eejax {a[:8]}..., transformers {b[:8]}...")
    runs = [lambda _: theirs(), lambda _: ours()]

    def rest(_):
        return time.sleep(0.3)  # torch's threads spin a while after their work

    times = interleave(runs, _PAIRS.value, time.perf_counter, before=rest)
    ratio = median_ratio(*times)
    return {
        "decode_vs_transformers": ratio.median,
        "decode_vs_transformers_interval": [ratio.low, ratio.high],
        "tokens_per_second": _NEW.value / float(np.median(times[1])),
        "transformers_tokens_per_second": _NEW.value / float(np.median(times[0])),
        "peer_device": peer_device.described(device),
    }


def peer(params):
    """Return transformers' GPT-2 with our weights."""
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    transformers.logging.set_verbosity_error()
    model = GPT2LMHeadModel(GPT2Config()).eval()
    state = {
        "wte.weight": params["embed"]["tokens"],
        "wpe.weight": params["embed"]["positions"],
        "ln_f.weight": params["final"]["norm"]["scale"],
        "ln_f.bias": params["final"]["norm"]["bias"],
    }
    d = model.config.n_embd
    stack = {k: {n: np.asarray(a) for n, a in v.items()} for k, v in params["layers"].items()}

    def flat(names, i):
        return np.concatenate([stack["attn"][n][i].reshape(d, -1) for n in names], -1)

    for i in range(model.config.n_layer):
        bias = [stack["attn"][f"{n}_bias"][i].reshape(-1) for n in "qkv"]
        state |= {
            f"h.{i}.ln_1.weight": stack["attn_norm"]["scale"][i],
            f"h.{i}.ln_1.bias": stack["attn_norm"]["bias"][i],
            f"h.{i}.ln_2.weight": stack["mlp_norm"]["scale"][i],
            f"h.{i}.ln_2.bias": stack["mlp_norm"]["bias"][i],
            f"h.{i}.attn.c_attn.weight": flat("qkv", i),
            f"h.{i}.attn.c_attn.bias": np.concatenate(bias),
            f"h.{i}.attn.c_proj.weight": stack["attn"]["o"][i].reshape(-1, d),
            f"h.{i}.attn.c_proj.bias": stack["attn"]["o_bias"][i],
            f"h.{i}.mlp.c_fc.weight": stack["mlp"]["up"][i],
            f"h.{i}.mlp.c_fc.bias": stack["mlp"]["up_bias"][i],
            f"h.{i}.mlp.c_proj.weight": stack["mlp"]["down"][i],
            f"h.{i}.mlp.c_proj.bias": stack["mlp"]["down_bias"][i],
        }
    tensors = {f"transformer.{k}": torch.from_numpy(np.array(v)) for k, v in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"}
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return model


if __name__ == "__main__":
    launch.run(main)
