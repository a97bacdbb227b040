"""The files of configs/ hold what the papers publish, by their shapes alone: nothing is allocated.

`EE_LLM_PUBLISHED` has a row for each published value. Parameter counts are compared with sums
written out here from the published sizes.
"""

import functools
import math
import operator
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
NO_MODEL = {"__init__", "common", "finetune", "layerskip", "tune_exits"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NO_MODEL)
EE_LLM = [name for name in NAMES if name.startswith("ee_llm_")]
HELIOS = ["helios_opt_1b3", "helios_opt_6b7"]

ALL = "1b3 7b 13b 30b 7b_mlp 7b_three_exits"
# EE-LLM (Chen et al., ICML 2024): models, field, value, section of the paper. Fields are those of
# `Experiment` or of `DERIVED_FIELDS`.
EE_LLM_PUBLISHED = (
    (ALL, "optimizer.b1", 0.9, "5.1"),
    (ALL, "optimizer.b2", 0.95, "5.1"),
    (ALL, "optimizer.eps", 1e-8, "5.1"),
    (ALL, "optimizer.learning_rate", 3e-4, "5.1: maximum value"),
    (ALL, "optimizer.schedule", "cosine", "5.1"),
    (ALL, "train.batch_size", 2048, "5.1"),
    (ALL, "data.length", 2048, "5.1"),
    (ALL, "model.context_length", 2048, "5.1"),
    ("1b3 7b 13b 30b", "mesh.data", 4, "5.1: data parallelism degree"),
    ("1b3 7b", "microbatch", 2, "5.1"),
    ("13b 30b", "microbatch", 1, "5.1"),
    ("1b3", "model.n_layers", 24, "5.1"),
    ("7b 7b_mlp 7b_three_exits", "model.n_layers", 32, "5.1, B.3"),
    ("1b3 7b 13b 30b 7b_mlp", "exit depths", (1 / 4, 1 / 2), "5.1, B.3"),
    ("1b3", "exit layers", (6, 12), "5.1"),
    ("7b 7b_mlp", "exit layers", (8, 16), "5.1, B.3"),
    ("7b_three_exits", "exit layers", (4, 12, 20), "B.3"),
    ("1b3", "exit_weights.weights", (1 / 4, 1 / 2), "5.1"),
    ("7b 7b_mlp", "exit_weights.weights", (0.1, 0.2), "5.1, B.3"),
    ("7b_three_exits", "exit_weights.weights", (0.1, 0.2, 0.3), "B.3"),
    ("1b3 7b 7b_mlp 7b_three_exits", "exit_weights.kind", "constant", "5.1, B.3"),
    ("1b3 7b", "exit parts", {()}, "5.1: minimalistic, without layer normalization"),
    ("7b_mlp", "exit parts", {("mlp", "norm")}, "B.3"),
    ("7b_three_exits", "exit parts", {("norm",)}, "B.3"),
    ("1b3 7b_three_exits", "embeddings", {"tied"}, "5.1, B.3: all tied"),
    ("7b 7b_mlp", "embeddings", {"own"}, "5.1, B.3: all untied"),
    ("1b3", "tokens", 300e9, "5.2"),
    ("7b", "tokens", 150e9, "5.2"),
)
DERIVED_FIELDS = {
    "microbatch": lambda e: e.train.batch_size / e.mesh.data / e.train.microbatches,
    "exit layers": lambda e: tuple(x.boundary for x in e.model.exits),
    "exit depths": lambda e: tuple(x.boundary / e.model.n_layers for x in e.model.exits),
    "exit parts": lambda e: {
        tuple(part for part in ("block", "mlp", "norm") if getattr(x, part)) for x in e.model.exits
    },
    "embeddings": lambda e: {e.model.head, *(x.head for x in e.model.exits)},
    "tokens": lambda e: e.train.batch_size * e.data.length * e.train.steps,
}
# Not in the paper: of the authors' scripts, examples/ee_training/ in github.com/pan-x-c/EE-LLM.
EE_LLM_SCRIPTS = (
    ("1b3", "model.d_model", 2048, "1-3B.sh"),
    ("7b", "model.d_model", 4096, "7B.sh"),
    ("13b", "model.d_model", 5120, "13B.sh"),
    ("30b", "model.d_model", 6656, "30B.sh"),
    ("13b", "model.n_layers", 40, "13B.sh"),
    ("30b", "model.n_layers", 60, "30B.sh"),
    ("1b3 7b", "model.n_heads", 32, "1-3B.sh, 7B.sh"),
    ("13b", "model.n_heads", 40, "13B.sh"),
    ("30b", "model.n_heads", 52, "30B.sh"),
    ("13b 30b", "exit_weights.weights", (0.1, 0.2), "13B.sh, 30B.sh"),
    ("13b 30b", "embeddings", {"own"}, "13B.sh, 30B.sh"),
    (ALL, "optimizer.final_fraction", 0.1, "min-lr"),
    (ALL, "optimizer.weight_decay", 0.1, "weight-decay"),
    (ALL, "optimizer.clip_norm", 1.0, "clip-grad"),
    (ALL, "optimizer.warmup_steps", 2000, "lr-warmup-iters"),
    (ALL, "model.norm", "rmsnorm", "normalization"),
    (ALL, "model.position", "rotary", "position-embedding-type"),
    (ALL, "model.activation", "silu", "swiglu"),
    (ALL, "model.mlp_gated", True, "swiglu"),
    (ALL, "model.qkv_bias", False, "disable-bias-linear"),
    (ALL, "model.o_bias", False, "disable-bias-linear"),
    (ALL, "model.mlp_bias", False, "disable-bias-linear"),
    (ALL, "model.dtype", "bfloat16", "bf16"),
)

# Published by nobody: of the models of section 5.1 the nearest one's.
EE_LLM_OURS = (
    ("7b_mlp 7b_three_exits", "mesh.data", 4, "ours, as 7b"),
    ("7b_mlp 7b_three_exits", "microbatch", 2, "ours, as 7b"),
    ("13b 30b", "exit parts", {()}, "ours, as 7b"),
    ("13b 30b", "exit_weights.kind", "constant", "ours, as 7b"),
)


def experiment(name: str) -> Experiment:
    return Experiment.from_dict(runpy.run_path(str(FOLDER / f"{name}.py"))["get_config"]())


def field_of(e: Experiment, field: str):
    return DERIVED_FIELDS[field](e) if field in DERIVED_FIELDS else operator.attrgetter(field)(e)


@pytest.mark.parametrize(
    "models, field, value, place", EE_LLM_PUBLISHED + EE_LLM_SCRIPTS + EE_LLM_OURS
)
def test_ee_llm_is_as_published(models, field, value, place):
    for model in models.split():
        got = field_of(ee_llm(model), field)
        numbers = isinstance(value, (float, tuple))
        tolerance = 0.01 if field == "tokens" else 1e-12
        same = got == pytest.approx(value, rel=tolerance) if numbers else got == value
        assert same, f"ee_llm_{model}: {field} is {got}, and ({place}) {value}"


@functools.cache
def ee_llm(model: str) -> Experiment:
    return experiment(f"ee_llm_{model}")


def test_every_model_of_ee_llm_has_a_row_for_batch_mesh_and_exits():
    assert EE_LLM == sorted(f"ee_llm_{model}" for model in ALL.split())
    rows = {
        (model, field)
        for models, field, *_ in EE_LLM_PUBLISHED + EE_LLM_OURS
        for model in models.split()
    }
    for model in ALL.split():
        assert {(model, "microbatch"), (model, "mesh.data"), (model, "exit parts")} <= rows


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_an_experiment_whose_step_can_be_cut_for_its_mesh(name):
    e = experiment(name)
    assert e == Experiment.from_dict(e.to_dict())
    held = training_memory(e)  # raises for a mesh or a batch that training would refuse
    assert held.params == 4 * params.count(e.model)
    assert 0 < held.temporary < held.total


def test_the_configurations_of_the_papers_are_here():
    assert {*HELIOS, "gpt2_small_ee"} <= set(NAMES)


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
    def count(name):
        return params.count(experiment(name).model)

    assert count("ee_llm_1b3") == ee_llm_count(2048, 24, 0)
    assert count("ee_llm_7b") == ee_llm_count(4096, 32, 3)
    assert count("ee_llm_7b_mlp") == ee_llm_count(4096, 32, 3, exit_norms=2, exit_mlps=2)
    assert count("ee_llm_7b_three_exits") == ee_llm_count(4096, 32, 0, exit_norms=3)
    assert count("helios_opt_1b3") == opt_count(2048, 24, 2048, norms=3)
    assert count("helios_opt_6b7") == opt_count(4096, 32, 2048, norms=3)
    # GPT-2 small as transformers counts it, 47 rows of padding, two exits' LayerNorms.
    assert count("gpt2_small_ee") == 124_439_808 + 47 * 768 + 2 * 2 * 768


def test_sizes_are_those_the_models_are_named_after():
    def count(name):
        return params.count(experiment(name).model)

    assert count("ee_llm_1b3") == pytest.approx(1.3e9, rel=0.03)
    assert count("ee_llm_7b") == pytest.approx(7e9, rel=0.01)
    assert count("ee_llm_13b") == pytest.approx(13e9, rel=0.03)
    assert count("ee_llm_30b") == pytest.approx(
        32.5e9, rel=0.03
    )  # Llama's 30B, so called, has so many


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
    if name == "gpt2_small_ee":
        assert boundaries == (e.model.n_layers // 4, e.model.n_layers // 2)


def test_gpt2_small_trains_with_ee_llms_optimiser():
    o = experiment("gpt2_small_ee").optimizer
    assert (o.b1, o.b2, o.eps, o.learning_rate, o.schedule) == (0.9, 0.95, 1e-8, 3e-4, "cosine")


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
            shapes,
            states[e],
        )
        assert y.shape == (1, model.context_length, model.padded_vocab)


def test_training_costs_what_the_papers_sizes_say():
    # 6 operations for each weight and token, a head counted at every exit, and attention's scores.
    e = experiment("ee_llm_1b3")
    weights = ee_llm_count(2048, 24, 0) - 49 * 2048 + 2 * 32_000 * 2048
    attention = 12 * 24 * 2048 * 2049 / 2
    assert model_flops_per_token(e.model, 2048) == pytest.approx(6 * weights + attention)


def test_memory_is_as_the_files_say():
    assert training_memory(experiment("ee_llm_7b")).total > 80 * 2**30
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
            h + "fc1.weight": p["mlp"]["up"].T,
            h + "fc1.bias": p["mlp"]["up_bias"],
            h + "fc2.weight": p["mlp"]["down"].T,
            h + "fc2.bias": p["mlp"]["down_bias"],
        }
    return out


@pytest.mark.slow
def test_the_architecture_is_that_of_transformers_opt():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = experiment("helios_opt_1b3").model.replace(
        vocab_size=31,
        n_layers=3,
        d_model=32,
        n_heads=4,
        d_ff=128,
        head_dim=8,
        n_kv_heads=4,
        context_length=20,
        exits=(),
        dtype="float32",
    )
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
        )
    ).eval()
    # Nothing stays at 0 or 1, so that no bias or scale can be left out unnoticed.
    key = jax.random.key(0)

    def draw(p):
        return 0.1 * jax.random.normal(jax.random.fold_in(key, math.prod(p.shape)), p.shape)

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


# HELIOS (Kumar et al. 2025, arXiv 2504.10724): values as the paper prints them, with their place.
# What the paper does not give (optimiser, batch, kind of exit) is configs.common.opt's and is not
# here.
HELIOS_PAPER = {
    # Table 2: parameters, layers, early exits (the last one is the final exit).
    "helios_opt_1b3": {"parameters": 1.3e9, "layers": 24, "exits": (6, 12, 24)},
    "helios_opt_6b7": {"parameters": 6.7e9, "layers": 32, "exits": (9, 17, 32)},
}
HELIOS_EXIT_WEIGHT = 1.0  # section 4.1: "a weight of 1.0 to each early-exit loss"
HELIOS_ITERATIONS = 50_000  # section 4.1
HELIOS_TEXT = ("redpajama", "pile")  # section 4.1
HELIOS_BASE = {"helios_opt_1b3": "facebook/opt-1.3b", "helios_opt_6b7": "facebook/opt-6.7b"}


@pytest.mark.parametrize("name", HELIOS)
def test_helios_models_are_those_of_table_2(name):
    model, paper = experiment(name).model, HELIOS_PAPER[name]
    assert params.count(model) == pytest.approx(paper["parameters"], rel=0.02)
    assert model.n_layers == paper["layers"] and model.exit_boundaries == paper["exits"]


@pytest.mark.parametrize("name", HELIOS)
def test_helios_trains_as_in_section_4_1(name):
    e = experiment(name)
    assert e.train.steps == HELIOS_ITERATIONS
    early = HELIOS_PAPER[name]["exits"][:-1]
    for step in (0, HELIOS_ITERATIONS - 1):
        weights = e.exit_weights.schedule(e.train.steps)(step)
        np.testing.assert_array_equal(weights, (HELIOS_EXIT_WEIGHT,) * len(early))


@pytest.mark.parametrize("name", HELIOS)
def test_helios_command_begins_with_opt_and_reads_the_papers_text(name):
    command = (FOLDER / f"{name}.py").read_text().split("\n\n")[1]
    assert f"--config=configs/{name}.py" in command
    assert f"--config.train.base={HELIOS_BASE[name]}" in command
    assert all(source in command for source in HELIOS_TEXT)


def test_helios_6b7_nearly_fills_a_gpu_of_80_gb():
    assert training_memory(experiment("helios_opt_6b7")).total == pytest.approx(77e9, rel=0.01)
