"""Live parity: tiny random GPT-2 and Llama models of transformers and ours, with equal weights,
have equal logits and equal gradients of the next-token loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.losses import multi_exit_loss
from eejax.models import exits, params, transformer
from eejax.models.config import ModelConfig
from eejax.models.rotary_config import RotaryConfig

pytestmark = pytest.mark.slow

D, LAYERS, HEADS, VOCAB, LENGTH = 24, 3, 4, 31, 150  # long enough for attention in blocks


def gpt2_names(tree, config):
    """Our tree (of parameters or of gradients) under the names and in the layouts of GPT-2."""
    stack = tree["layers"]
    out = {
        "transformer.wte.weight": tree["embed"]["tokens"],
        "transformer.wpe.weight": tree["embed"]["positions"],
        "transformer.ln_f.weight": tree["final"]["norm"]["scale"],
        "transformer.ln_f.bias": tree["final"]["norm"]["bias"],
    }
    for i in range(config.n_layers):
        p = jax.tree.map(lambda a, i=i: a[i], stack)
        attn, mlp, h = p["attn"], p["mlp"], f"transformer.h.{i}."
        out |= {
            h + "ln_1.weight": p["attn_norm"]["scale"],
            h + "ln_1.bias": p["attn_norm"]["bias"],
            h + "ln_2.weight": p["mlp_norm"]["scale"],
            h + "ln_2.bias": p["mlp_norm"]["bias"],
            h + "attn.c_attn.weight": np.concatenate([attn[w].reshape(D, -1) for w in "qkv"], 1),
            h + "attn.c_attn.bias": np.concatenate([attn[f"{w}_bias"].ravel() for w in "qkv"]),
            h + "attn.c_proj.weight": attn["o"].reshape(-1, D),
            h + "attn.c_proj.bias": attn["o_bias"],
            h + "mlp.c_fc.weight": mlp["up"],
            h + "mlp.c_fc.bias": mlp["up_bias"],
            h + "mlp.c_proj.weight": mlp["down"],
            h + "mlp.c_proj.bias": mlp["down_bias"],
        }
    return out


def llama_names(tree, config):
    """Our tree under the names and in the layouts of Llama."""
    out = {
        "model.embed_tokens.weight": tree["embed"]["tokens"],
        "model.norm.weight": tree["final"]["norm"]["scale"],
    }
    if config.head == "own":
        out["lm_head.weight"] = tree["final"]["head"]
    for i in range(config.n_layers):
        p = jax.tree.map(lambda a, i=i: a[i], tree["layers"])
        attn, mlp, h = p["attn"], p["mlp"], f"model.layers.{i}."
        out |= {f"{h}self_attn.{w}_proj.weight": attn[w].reshape(D, -1).T for w in "qkv"}
        out |= {f"{h}mlp.{w}_proj.weight": mlp[w].T for w in ("gate", "up", "down")}
        out |= {
            h + "self_attn.o_proj.weight": attn["o"].reshape(-1, D).T,
            h + "input_layernorm.weight": p["attn_norm"]["scale"],
            h + "post_attention_layernorm.weight": p["mlp_norm"]["scale"],
        }
    return out


def gpt2(transformers):
    config = ModelConfig(
        vocab_size=VOCAB,
        n_layers=LAYERS,
        d_model=D,
        n_heads=HEADS,
        context_length=LENGTH,
        norm="layernorm",
        position="learned",
        mlp_gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="tied",
    )
    theirs = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_layer=LAYERS,
        n_embd=D,
        n_head=HEADS,
        n_positions=LENGTH,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return config, transformers.GPT2LMHeadModel(theirs), gpt2_names


def llama(transformers, head, rotary=None, **rope):
    config = ModelConfig(
        vocab_size=VOCAB,
        n_layers=LAYERS,
        d_model=D,
        n_heads=HEADS,
        n_kv_heads=2,
        d_ff=40,
        context_length=LENGTH,
        norm_eps=1e-6,
        head=head,
        rotary=rotary or RotaryConfig(),
    )
    theirs = transformers.LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        hidden_size=D,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=40,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-6,
        tie_word_embeddings=head == "tied",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | rope,
        attn_implementation="eager",
    )
    return config, transformers.LlamaForCausalLM(theirs), llama_names


CASES = {
    "gpt2": gpt2,
    "llama": lambda t: llama(t, "own"),
    "llama_tied": lambda t: llama(t, "tied"),
    "llama3": lambda t: llama(
        t,
        "own",
        RotaryConfig(scaling="llama3", factor=4.0, original_context=64, high_frequency=4.0),
        rope_type="llama3",
        factor=4.0,
        original_max_position_embeddings=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": lambda t: llama(
        t,
        "own",
        RotaryConfig(scaling="yarn", factor=4.0, original_context=40),
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=40,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_transformers(name):
    torch = pytest.importorskip("torch")
    config, model, names = CASES[name](pytest.importorskip("transformers"))
    rng = np.random.default_rng(0)
    tree = params.map_params(
        lambda p: jnp.asarray(rng.standard_normal(p.shape) * (p.std or 0.1) + p.fill, jnp.float32),
        params.abstract(config),
    )
    ours = jax.tree.map(np.asarray, names(jax.tree.map(np.asarray, tree), config))
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for key, a in ours.items():
            assert theirs[key].shape == a.shape, key
            theirs[key].copy_(torch.tensor(np.ascontiguousarray(a)))
    tokens = rng.integers(0, VOCAB, (2, LENGTH))
    labels = np.roll(tokens, -1, 1)

    logits = model(torch.tensor(tokens)).logits
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(labels).reshape(-1), reduction="sum"
    ).backward()
    want = {key: p.grad.numpy() for key, p in theirs.items()}

    states = transformer.exit_states(tree, config, jnp.asarray(tokens))
    got = exits.logits(exits.head(tree, config, 0), states[-1])
    logits = logits.detach().numpy()
    # Both round in float32 (6e-8), in other orders, over three layers.
    np.testing.assert_allclose(got, logits, atol=2e-5 * np.abs(logits).max(), rtol=0)

    def loss(tree):
        return multi_exit_loss(tree, config, jnp.asarray(tokens), jnp.asarray(labels), jnp.ones(1))[
            0
        ]

    grads = names(jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(tree)), config)
    for key, w in want.items():
        assert np.abs(grads[key] - w).max() < 1e-4 * np.abs(w).max(), key
