"""The files of configs/ hold what the papers publish, by their shapes alone: nothing is allocated.

Parameter counts are compared with sums written out here from the published sizes.
"""

import math
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.models import exits, params, transformer
from eejax.models.config import ModelConfig
from eejax.train.config import Experiment
from eejax.train.flops import model_flops_per_token
from eejax.train.memory import training_memory

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "configs"
NO_MODEL = {"__init__", "common", "tune_exits"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NO_MODEL)
EE_LLM = ["ee_llm_1b3", "ee_llm_1b3_mlp", "ee_llm_1b3_three_exits", "ee_llm_7b"]
HELIOS = ["helios_opt_1b3", "helios_opt_6b7"]


def experiment(name: str) -> Experiment:
    return Experiment.from_dict(runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]())


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_an_experiment_whose_step_can_be_cut_for_its_mesh(name):
    e = experiment(name)
    assert e == Experiment.from_dict(e.to_dict())
    held = training_memory(e)  # raises for a mesh or a batch that training would refuse
    assert held.params == 4 * params.count(e.model)
    assert 0 < held.temporary < held.total


def test_the_configurations_of_the_papers_are_here():
    assert {*EE_LLM, *HELIOS, "gpt2_small_ee"} <= set(NAMES)


def ee_llm_count(d, layers, heads_of_their_own, exit_norms=0, exit_mlps=0):
    """Llama's layers: four d x d matrices, three of d x f, two RMSNorms. f is Megatron's."""
    f = int(4 * d * 2 / 3 / 64) * 64
    mlp = 3 * d * f
    trunk = 32_000 * d + layers * (4 * d * d + mlp + 2 * d) + d
    return trunk + 32_000 * d * heads_of_their_own + exit_norms * d + exit_mlps * (mlp + d)


def opt_count(d, layers, positions, norms):
    """Four d x d matrices, two of d x 4d, a bias for each, LayerNorms with bias; one table."""
    layer = 4 * (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
    return 50_272 * d + positions * d + layers * layer + norms * 2 * d


def test_parameter_counts():
    count = lambda name: params.count(experiment(name).model)
    assert count("ee_llm_1b3") == ee_llm_count(2048, 24, 0)
    assert count("ee_llm_1b3_mlp") == ee_llm_count(2048, 24, 0, exit_norms=2, exit_mlps=2)
    assert count("ee_llm_1b3_three_exits") == ee_llm_count(2048, 24, 0, exit_norms=3)
    assert count("ee_llm_7b") == ee_llm_count(4096, 32, 3)
    assert count("helios_opt_1b3") == opt_count(2048, 24, 2048, norms=3)
    assert count("helios_opt_6b7") == opt_count(4096, 32, 2048, norms=3)
    # GPT-2 small as transformers counts it, 47 rows of padding, two exits' LayerNorms.
    assert count("gpt2_small_ee") == 124_439_808 + 47 * 768 + 2 * 2 * 768


def test_sizes_are_those_the_models_are_named_after():
    count = lambda name: params.count(experiment(name).model)
    assert count("ee_llm_1b3") == pytest.approx(1.3e9, rel=0.03)
    assert count("ee_llm_7b") == pytest.approx(7e9, rel=0.01)


@pytest.mark.parametrize(
    "name, d, layers, published",
    [
        ("helios_opt_1b3", 2048, 24, 1_315_758_080),
        ("helios_opt_6b7", 4096, 32, 6_658_473_984),
    ],
)
def test_opt_without_its_exits_is_the_published_model(name, d, layers, published):
    # Published with 2050 rows of positions, of which the first two are never read.
    assert opt_count(d, layers, 2050, norms=1) == published
    plain = experiment(name).model.replace(exits=())
    assert params.count(plain) == published - 2 * d
    shapes = params.shapes(plain)
    assert shapes["embed"]["tokens"].shape == (50_272, d)
    assert shapes["embed"]["positions"].shape == (2048, d)
    assert shapes["layers"]["mlp"]["up"].shape == (layers, d, 4 * d)
    assert shapes["layers"]["attn"]["q"].shape == (layers, d, 32, d // 32)


@pytest.mark.parametrize(
    "name, boundaries, weights, head, norm, mlp",
    [
        ("gpt2_small_ee", (3, 6), (1 / 4, 1 / 2), "tied", True, False),
        ("ee_llm_1b3", (6, 12), (1 / 4, 1 / 2), "tied", False, False),
        ("ee_llm_1b3_mlp", (6, 12), (1 / 4, 1 / 2), "tied", True, True),
        ("ee_llm_1b3_three_exits", (4, 12, 20), (0.1, 0.2, 0.3), "tied", True, False),
        ("ee_llm_7b", (8, 16), (0.1, 0.2), "own", False, False),
        ("helios_opt_1b3", (6, 12), (1 / 4, 1 / 2), "tied", True, False),
        ("helios_opt_6b7", (9, 17), (1 / 4, 1 / 2), "tied", True, False),
    ],
)
def test_exits(name, boundaries, weights, head, norm, mlp):
    e = experiment(name)
    assert tuple(x.boundary for x in e.model.exits) == boundaries
    assert e.model.head == head and {x.head for x in e.model.exits} == {head}
    assert {(x.norm, x.mlp, x.block, x.temperature) for x in e.model.exits} == {
        (norm, mlp, False, 1.0)
    }
    for step in (0, e.train.steps - 1):
        np.testing.assert_allclose(e.exit_weights.schedule(e.train.steps)(step), weights, rtol=1e-6)
    if name in ("gpt2_small_ee", "ee_llm_1b3", "ee_llm_1b3_mlp", "ee_llm_7b"):
        assert boundaries == (e.model.n_layers // 4, e.model.n_layers // 2)


@pytest.mark.parametrize("name", EE_LLM)
def test_ee_llm_trains_as_published(name):
    e = experiment(name)
    o = e.optimizer
    assert (o.b1, o.b2, o.eps, o.learning_rate, o.schedule) == (0.9, 0.95, 1e-8, 3e-4, "cosine")
    assert o.final_fraction * o.learning_rate == pytest.approx(3e-5)
    assert (o.weight_decay, o.clip_norm, o.warmup_steps) == (0.1, 1.0, 2000)
    assert e.train.batch_size * e.data.length == 2048 * 2048
    tokens = 150e9 if name == "ee_llm_7b" else 300e9
    assert e.train.batch_size * e.data.length * e.train.steps == pytest.approx(tokens, rel=0.01)
    sequences = e.train.batch_size // e.mesh.data // e.train.microbatches
    assert sequences == (2 if name == "ee_llm_7b" else 4)  # as in the authors' scripts
    m = e.model
    assert (m.norm, m.position, m.activation, m.mlp_gated) == ("rmsnorm", "rotary", "silu", True)
    assert not (m.qkv_bias or m.o_bias or m.mlp_bias or m.head_bias)
    assert (m.dtype, m.context_length, m.n_heads, m.n_kv_heads) == ("bfloat16", 2048, 32, 32)


def test_gpt2_small_trains_with_ee_llms_optimiser():
    o = experiment("gpt2_small_ee").optimizer
    assert (o.b1, o.b2, o.eps, o.learning_rate, o.schedule) == (0.9, 0.95, 1e-8, 3e-4, "cosine")


@pytest.mark.parametrize("name, peak", [("helios_opt_1b3", 2e-4), ("helios_opt_6b7", 1.2e-4)])
def test_opt_goes_on_at_a_tenth_of_its_rate(name, peak):
    e = experiment(name)
    assert e.optimizer.learning_rate == pytest.approx(peak / 10)
    assert e.train.batch_size * e.data.length * e.train.steps == pytest.approx(2.1e9, rel=0.01)


@pytest.mark.parametrize("name", [*EE_LLM, *HELIOS, "gpt2_small_ee"])
def test_every_exit_reads_a_state_and_gives_logits(name):
    model = experiment(name).model
    tokens = jax.ShapeDtypeStruct((1, model.context_length), jnp.int32)
    shapes = params.shapes(model)
    states = jax.eval_shape(lambda p, x: transformer.exit_states(p, model, x), shapes, tokens)
    assert [s.shape for s in states] == [(1, model.context_length, model.d_model)] * len(states)
    assert {s.dtype for s in states} == {jnp.dtype(jnp.bfloat16)}
    assert len(states) == model.n_exits + 1
    for e in range(len(states)):
        y = jax.eval_shape(
            lambda p, h, e=e: exits.logits(exits.head(params.for_compute(p, h.dtype), model, e), h),
            shapes, states[e],
        )  # fmt: skip
        assert y.shape == (1, model.context_length, model.padded_vocab)


def test_training_costs_what_the_papers_sizes_say():
    # 6 operations for each weight and token, a head counted at every exit, and attention's scores.
    e = experiment("ee_llm_1b3")
    weights = ee_llm_count(2048, 24, 0) - 49 * 2048 + 2 * 32_000 * 2048
    attention = 12 * 24 * 2048 * 2049 / 2
    assert model_flops_per_token(e.model, 2048) == pytest.approx(6 * weights + attention)


def test_memory_is_as_the_files_say():
    for name in ("ee_llm_7b", "helios_opt_6b7"):
        assert training_memory(experiment(name)).total > 80 * 2**30
    assert training_memory(experiment("ee_llm_1b3")).total < 80e9


def opt_names(tree, config: ModelConfig):
    """Our parameters under the names and in the layouts of transformers' OPT."""
    d = config.d_model
    stack, top = tree["layers"], "model.decoder."
    positions = np.asarray(tree["embed"]["positions"])
    out = {
        top + "embed_tokens.weight": tree["embed"]["tokens"],
        top + "embed_positions.weight": np.concatenate([np.full((2, d), np.nan), positions]),
        top + "final_layer_norm.weight": tree["final"]["norm"]["scale"],
        top + "final_layer_norm.bias": tree["final"]["norm"]["bias"],
    }
    for i in range(config.n_layers):
        p = jax.tree.map(lambda a, i=i: np.asarray(a[i]), stack)
        attn, h = p["attn"], f"{top}layers.{i}."
        for w in "qkv":
            out[f"{h}self_attn.{w}_proj.weight"] = attn[w].reshape(d, d).T
            out[f"{h}self_attn.{w}_proj.bias"] = attn[f"{w}_bias"].ravel()
        out |= {
            h + "self_attn.out_proj.weight": attn["o"].reshape(d, d).T,
            h + "self_attn.out_proj.bias": attn["o_bias"],
            h + "self_attn_layer_norm.weight": p["attn_norm"]["scale"],
            h + "self_attn_layer_norm.bias": p["attn_norm"]["bias"],
            h + "final_layer_norm.weight": p["mlp_norm"]["scale"],
            h + "final_layer_norm.bias": p["mlp_norm"]["bias"],
            h + "fc1.weight": p["mlp"]["up"].T, h + "fc1.bias": p["mlp"]["up_bias"],
            h + "fc2.weight": p["mlp"]["down"].T, h + "fc2.bias": p["mlp"]["down_bias"],
        }  # fmt: skip
    return out


@pytest.mark.slow
def test_the_architecture_is_that_of_transformers_opt():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = experiment("helios_opt_1b3").model.replace(
        vocab_size=31, n_layers=3, d_model=32, n_heads=4, d_ff=128, head_dim=8, n_kv_heads=4,
        context_length=20, exits=(), dtype="float32",
    )  # fmt: skip
    theirs = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=31,
            num_hidden_layers=3,
            hidden_size=32,
            word_embed_proj_dim=32,
            num_attention_heads=4,
            ffn_dim=128,
            max_position_embeddings=20,
            dropout=0.0,
            attn_implementation="eager",
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=2,
        )  # fmt: skip
    ).eval()
    # Nothing stays at 0 or 1, so that no bias or scale can be left out unnoticed.
    key = jax.random.key(0)
    draw = lambda p: 0.1 * jax.random.normal(jax.random.fold_in(key, math.prod(p.shape)), p.shape)
    ours = params.map_params(draw, params.abstract(config))
    with torch.no_grad():
        have = dict(theirs.named_parameters())
        names = opt_names(ours, config)
        assert set(names) == set(have)
        for name, value in names.items():
            have[name].copy_(torch.from_numpy(np.array(value, np.float32)))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 20))
    h = transformer.exit_states(ours, config, jnp.asarray(tokens, jnp.int32))[-1]
    with torch.no_grad():
        want = theirs(input_ids=torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(exits.logits(exits.head(ours, config, 0), h), want, atol=2e-5)
