"""Speed of a training step against transformers, and the memory that an early exit adds to it.

    eejax bench train --json

It needs the peers of `make bench-env`. Both train the same Llama in float32 on the same batch:
forward, backward, clipping by global norm, AdamW. Steps alternate in one process on the same cores,
after a check that both models compute the same loss from the same weights. Where JAX is on a GPU,
so is PyTorch (`peer_device`), and neither multiplies in TF32.

Reported: `train_vs_transformers`, the ratio of tokens/s, exits off (median over pairs of steps,
with a 95 % bootstrap interval); `exit_temp_bytes_ratio`, the largest growth of XLA's temporary
memory per added early exit as a fraction of one float32 [b, t, v] array of logits.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
from absl import flags

from eejax.experiments import launch, peer_device

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PAIRS = flags.DEFINE_integer("pairs", 20, "Pairs of steps to time.", lower_bound=2)
_WARMUP = flags.DEFINE_integer("warmup", 3, "Pairs of warm-up steps.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", None, "Cores for both; by default all.")
_REMAT = flags.DEFINE_string("remat", "dots", "Activation policy of the training step.")
_MAX_EXITS = flags.DEFINE_integer("max_exits", 3, "Maximum number of early exits.", lower_bound=1)

LAYERS, D, HEADS, D_FF, VOCAB, BATCH, LENGTH = 6, 384, 6, 1024, 8192, 8, 256
RATE, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[: _THREADS.value]
    os.sched_setaffinity(0, cores)  # before JAX starts: it makes a thread for each core it sees
    device = peer_device.torch_device()
    with peer_device.exact_products():
        sizes = [temporary_bytes(n) for n in range(_MAX_EXITS.value + 1)]
        ours, theirs, losses = time_pairs(len(cores), device)
    logits = BATCH * LENGTH * VOCAB * 4
    growth = [(size - sizes[0]) / n / logits for n, size in enumerate(sizes) if n]
    result = summary(ours, theirs) | {
        "exit_temp_bytes_ratio": max(growth),
        "exit_temp_bytes_ratios": growth,
        "temp_bytes": sizes,
        "first_losses": losses,
        "threads": len(cores),
        "remat": _REMAT.value,
        "peer_device": peer_device.described(device),
    }
    low, high = result["train_vs_transformers_interval"]
    print(
        f"eejax {result['tokens_per_second']:.0f}, transformers "
        f"{result['transformers_tokens_per_second']:.0f} tokens/s on {len(cores)} cores: "
        f"ratio {result['train_vs_transformers']:.3f} [{low:.3f}, {high:.3f}]"
    )
    print(
        f"temporary memory with 0, 1, ... early exits: {[s >> 20 for s in sizes]} MiB; "
        f"at most {max(growth):.4f} of the logits' size per exit"
    )
    if _JSON.value:
        print(json.dumps(result))


def model_config(exits: int):
    """Return the model with early exits (norm, tied head) after layers 1, 2, ...; 0 has none."""
    from eejax.models.config import ExitConfig, ModelConfig

    return ModelConfig(
        vocab_size=VOCAB,
        n_layers=LAYERS,
        d_model=D,
        n_heads=HEADS,
        d_ff=D_FF,
        context_length=LENGTH,
        head="tied",
        exits=tuple(ExitConfig(n + 1) for n in range(exits)),
    )


def build(exits: int):
    """Return (config, compiled-on-call step, optimiser, mesh)."""
    from eejax.losses import schedules
    from eejax.models import params
    from eejax.sharding.mesh import MeshConfig, make_mesh
    from eejax.train import optimizer, step

    config, mesh = model_config(exits), make_mesh(MeshConfig())
    settings = optimizer.OptimizerConfig(
        learning_rate=RATE,
        schedule="constant",
        warmup_steps=0,
        b1=BETAS[0],
        b2=BETAS[1],
        eps=EPS,
        weight_decay=DECAY,
    )
    adamw = optimizer.transformation(settings, params.decays(config))
    rate = optimizer.learning_rate(settings, 1)
    weights = schedules.constant((0.5,) * exits)
    train_step = step.make_train_step(
        config, adamw, rate, weights, mesh, clip_norm=CLIP, remat=_REMAT.value
    )
    return config, train_step, adamw, mesh


def temporary_bytes(exits: int) -> int:
    """Return XLA's temporary memory of the whole training step, without running it."""
    import jax

    from eejax.train import state

    config, train_step, adamw, mesh = build(exits)
    array = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
    arguments = state.abstract(config, adamw, mesh), {"tokens": array, "labels": array}
    return train_step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def time_pairs(threads: int, device: str) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """Time our steps and theirs pair by pair, and return each side's loss before its first too."""
    import jax
    import torch

    from eejax.analysis import interleave
    from eejax.train import state, step

    config, train_step, adamw, mesh = build(0)
    train_state = state.create(config, adamw, 0, mesh)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    labels = np.roll(tokens, -1, 1)
    labels[:, -1] = -1
    batch = step.put_batch({"tokens": tokens, "labels": labels}, mesh)

    torch.set_num_threads(threads)
    model = peer(train_state.params).to(device)
    adam = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    ids = torch.tensor(tokens, dtype=torch.long, device=device)

    def ours():
        nonlocal train_state
        train_state, metrics = train_step(train_state, batch)
        return float(jax.block_until_ready((train_state, metrics))[1]["loss"])

    def theirs():
        adam.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        return loss.item()

    losses = ours(), theirs()
    if abs(losses[0] - losses[1]) > 1e-4:
        raise RuntimeError(f"the models differ: their first losses are {losses}")
    runs = [lambda _: theirs(), lambda _: ours()]
    interleave(runs, _WARMUP.value, time.perf_counter)

    def rest(_):
        return time.sleep(0.3)  # torch's threads spin a while after their work

    seconds = interleave(runs, _PAIRS.value, time.perf_counter, before=rest)
    return seconds[1], seconds[0], losses


def peer(params):
    """Return transformers' Llama with our weights (those of a tied head)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=D,
            intermediate_size=D_FF,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).train()

    def copy(weight, value):  # torch keeps linear weights as [out, in]
        with torch.no_grad():
            weight.copy_(torch.from_numpy(np.array(value).reshape(weight.shape)))

    stack = params["layers"]
    copy(model.model.embed_tokens.weight, params["embed"]["tokens"])
    copy(model.model.norm.weight, params["final"]["norm"]["scale"])
    for i, layer in enumerate(model.model.layers):
        for name in "qkv":
            weight = np.array(stack["attn"][name][i]).reshape(D, -1).T
            copy(getattr(layer.self_attn, f"{name}_proj").weight, weight)
        copy(layer.self_attn.o_proj.weight, np.array(stack["attn"]["o"][i]).reshape(-1, D).T)
        for name in ("gate", "up", "down"):
            copy(getattr(layer.mlp, f"{name}_proj").weight, np.array(stack["mlp"][name][i]).T)
        copy(layer.input_layernorm.weight, stack["attn_norm"]["scale"][i])
        copy(layer.post_attention_layernorm.weight, stack["mlp_norm"]["scale"][i])
    return model


def summary(ours: np.ndarray, theirs: np.ndarray) -> dict:
    """Return the ratio of tokens/s with its interval, and both speeds."""
    from eejax.analysis import median_ratio

    ratio = median_ratio(theirs, ours)
    tokens = BATCH * LENGTH
    return {
        "train_vs_transformers": ratio.median,
        "train_vs_transformers_interval": [ratio.low, ratio.high],
        "tokens_per_second": tokens / float(np.median(ours)),
        "transformers_tokens_per_second": tokens / float(np.median(theirs)),
        "pairs": len(ours),
    }


if __name__ == "__main__":
    launch.run(main)
