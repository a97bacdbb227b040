"""EE-LLM's training mechanisms, on a small model and against independent definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from eejax.experiments.reproduce.catalogue import finding
from eejax.experiments.reproduce.claims import Finding

STAGES, LENGTH, VOCAB = 4, 8, 24
EXACT = 1e-5  # relative; float32 sums in another order differ by less
DIFFERS = "the computation differs by more than rounding, which is a fault of ours"
TINY = "4 layers of width 32, float32, 4 fake devices"
SIMULATED = "simulated"
HEADS = ("tied", "shared", "own")


def findings() -> list[Finding]:
    """Return every finding about training."""
    return [*gradients(), *architectures(), *communication(), *weights_of_losses(), *inserted()]


def model(head: str = "own", exits: Sequence[dict] = ({"boundary": 1}, {"boundary": 2}), **changes):
    """Return a small model whose exits have heads of the same kind."""
    from eejax.models.config import ModelConfig

    listed = [{"head": head, **one} for one in exits]
    values = dict(
        vocab_size=VOCAB,
        n_layers=STAGES,
        d_model=32,
        n_heads=4,
        d_ff=48,
        context_length=LENGTH,
        head=head,
        exits=listed,
    )
    return ModelConfig.from_dict(values | changes)


def batch_of(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    return {"tokens": drawn[0], "labels": drawn[1]}


def whole(config, batch):
    """Return (parameters, weights of losses, loss, gradient by autodiff of the whole loss)."""
    import jax
    import jax.numpy as jnp

    from eejax.losses.multi_exit import multi_exit_loss
    from eejax.models import params

    value = params.init(config, jax.random.key(1))
    weights = jnp.linspace(0.3, 1.0, config.n_exits + 1)

    def loss(v):
        return multi_exit_loss(v, config, batch["tokens"], batch["labels"], weights)

    (total, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(value)
    return value, weights, (float(total), sums), grads


def largest(grads, want) -> float:
    """Return the largest error of any gradient, relative to the largest entry of its array."""
    import jax

    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True)
    errors = [
        np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max() for a, b in pairs
    ]
    return float(max(errors))


def on_stages(config, batch, microbatches: int, schedule: str):
    """Return the executor's gradient on four stages, as a tree of the model's parameters."""
    import jax
    import jax.numpy as jnp

    run, layout, here, weights = compiled(config, microbatches, schedule)
    sums = run(here, {}, weights, None, batch, jnp.zeros((), jnp.int32))
    return layout.from_stages(jax.device_get(sums.grads))


def compiled(config, microbatches: int, schedule: str):
    """Return (jitted gradients, layout, placed parameters, weights of losses) on four stages."""
    import jax
    import jax.numpy as jnp

    from eejax.models import params
    from eejax.pipeline import runner
    from eejax.pipeline.layout import StageLayout
    from eejax.pipeline.partition import partition
    from eejax.pipeline.schedule import GENERATORS
    from eejax.pipeline.stage import Pipeline
    from eejax.sharding import rules
    from eejax.sharding.mesh import MeshConfig, make_mesh

    mesh = make_mesh(MeshConfig(pipe=STAGES))
    layout = StageLayout(partition(config, STAGES))
    table = GENERATORS[schedule](
        STAGES, microbatches, exit_stages=layout.partition.input_exit_stages, exits="deferred"
    )
    specs = rules.specs(layout.declarations()[0], mesh)
    value = params.init(config, jax.random.key(1))
    here = jax.device_put(layout.to_stages(value), rules.shardings(specs, mesh))
    run = jax.jit(runner.gradients(Pipeline(layout, mesh), table))
    return run, layout, here, jnp.linspace(0.3, 1.0, config.n_exits + 1)


def gradients() -> Iterator[Finding]:
    """Judge Eq. (1), Eq. (2), Proposition 3.1, tied parameters and schedules."""
    import jax

    from eejax.experiments.reproduce import pipeline_oracle as oracle
    from eejax.models import exits, transformer
    from eejax.pipeline.partition import partition

    batch = batch_of(12)
    config = model()
    value, weights, (total, sums), grads = whole(config, batch)
    states = transformer.exit_states(value, config, batch["tokens"])
    want = 0.0
    for e, h in enumerate(states):
        logits = np.asarray(exits.logits(exits.head(value, config, e), h), np.float64)
        logits = logits[..., : config.vocab_size]
        peak = logits.max(-1, keepdims=True)
        norms = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
        right = np.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
        want += float(weights[e]) * (norms - right).sum()
    error = abs(total / want - 1)
    yield exact("eq-1", error, "relative error beside float64", TINY)

    stages = partition(config, STAGES)
    staged = jax.jit(oracle.gradients, static_argnums=0)
    loss, found = staged(stages, value, batch["tokens"], batch["labels"], weights)
    error = max(largest(found, grads), abs(float(loss) / total - 1))
    yield exact("eq-2", error, "largest relative difference from autodiff of the whole loss", TINY)
    error = largest(on_stages(config, batch, 6, "1f1b"), grads)
    yield exact("proposition-3-1", error, "largest relative difference over all parameters", TINY)
    errors = {name: largest(on_stages(config, batch, 6, name), grads) for name in ("1f1b", "gpipe")}
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    yield judged(
        "schedules",
        max(errors.values()) < EXACT,
        f"largest relative difference: {told} (up to {EXACT:.0e})",
        TINY,
    )
    tied = model("tied")
    error = largest(on_stages(tied, batch, 6, "1f1b"), whole(tied, batch)[3])
    yield exact("tied", error, "largest relative difference, embedding tied to all exits", TINY)


def exact(key: str, error: float, what: str, scale: str) -> Finding:
    return judged(key, error < EXACT, f"{what}: {error:.1e} (up to {EXACT:.0e})", scale)


def judged(key: str, holds: bool, ours: str, scale: str, why: str = DIFFERS) -> Finding:
    return finding("EE-LLM", key, ours, scale, bool(holds), why)


def architectures() -> Iterator[Finding]:
    """Judge Figure 1 and section 2: exits of every kind at every layer."""
    import jax

    from eejax.experiments.reproduce import pipeline_oracle as oracle
    from eejax.models import exits, params, transformer
    from eejax.pipeline.partition import partition

    batch = batch_of(4)
    # An exit's logits are those of the model cut off there, with the exit as its final one.
    config = model("own", [{"boundary": 2}])
    value = params.init(config, jax.random.key(1))
    short = config.replace(n_layers=2, exits=())
    layers = jax.tree.map(lambda a: a[:2], value["layers"])
    exit_ = next(iter(value["exits"].values()))
    cut = {"embed": value["embed"], "layers": layers, "final": exit_}

    def logits(tree, c):
        return exits.logits(
            exits.head(tree, c, 0), transformer.exit_states(tree, c, batch["tokens"])[0]
        )

    one, other = logits(value, config), logits(cut, short)
    error = float(np.abs(one - other).max() / np.abs(other).max())
    yield exact("figure-1", error, "relative difference from the model cut off at the exit", TINY)
    kinds: list[dict] = [{"norm": False}, {}, {"mlp": True}, {"block": True}]
    places = (0, 1, 3, STAGES)
    worst = 0.0
    staged = jax.jit(oracle.gradients, static_argnums=0)
    for head in HEADS:
        config = model(
            head, [kind | {"boundary": n} for kind, n in zip(kinds, places, strict=True)]
        )
        value, weights, _, grads = whole(config, batch)
        cut = partition(config, STAGES)
        _, found = staged(cut, value, batch["tokens"], batch["labels"], weights)
        worst = max(worst, largest(found, grads))
    yield judged(
        "section-2",
        worst < EXACT,
        f"a head alone, with norm, with MLP, with a layer, at boundaries {places}, each with tied, "
        f"shared and own embedding: gradients on stages within {worst:.1e} (up to "
        f"{EXACT:.0e})",
        TINY,
    )


def communication() -> Iterator[Finding]:
    """Judge Figure 2: the exchanges of a compiled step between stages, with and without exits."""
    import jax.numpy as jnp

    batch, counts = batch_of(12), []
    for config in (model(exits=()), model()):
        run, _, here, weights = compiled(config, 6, "1f1b")
        text = run.lower(here, {}, weights, None, batch, jnp.zeros((), jnp.int32)).as_text()
        counts.append(text.count("collective_permute"))
    without, with_exits = counts
    yield judged(
        "figure-2",
        without == with_exits > 0,
        f"{with_exits} transfers between neighbours in a step of the table with exits, {without} "
        "without",
        TINY,
        "the compiled step sends more with exits than without",
    )


def weights_of_losses() -> Iterator[Finding]:
    """Judge Appendix C.1, and the settings of section 5.1."""
    import importlib

    from eejax.losses.schedules import schedule

    ends = {}
    for name, first, last in (("warm-up", 0.0, 0.5), ("cool-down", 0.5, 0.0)):
        ramp = schedule("linear", [last], initial=[first], steps=100)
        ends[name] = [float(ramp(step)[0]) for step in (0, 50, 100, 200)]
    right = ends["warm-up"] == [0, 0.25, 0.5, 0.5] and ends["cool-down"] == [0.5, 0.25, 0, 0]
    told = "; ".join(f"{name}: {values}" for name, values in ends.items())
    yield judged("weights", right, f"at steps 0, 50, 100, 200 of 100: {told}", "configuration")
    own = {}
    for name in ("1b3", "7b"):
        c = importlib.import_module(f"eejax.configs.ee_llm_{name}").get_config()
        exits = [dict(e) for e in c.model.exits]
        own[name] = (
            c.model.head,
            [e["boundary"] / c.model.n_layers for e in exits],
            list(c.exit_weights.weights),
            any(e.get("norm", True) for e in exits),
            {e.get("head", c.model.head) for e in exits},
        )
    depths = [1 / 4, 1 / 2]
    want = {
        "1b3": ("tied", depths, [1 / 4, 1 / 2], False, {"tied"}),
        "7b": ("own", depths, [0.1, 0.2], False, {"own"}),
    }
    yield judged(
        "exit-settings",
        own == want,
        "; ".join(
            f"configs/ee_llm_{name}.py: {head}, exits at {at} of weights {weights}, "
            f"{'with' if norm else 'without'} norms"
            for name, (head, at, weights, norm, _) in own.items()
        ),
        "configuration",
        "a configuration differs from the paper",
    )
    names = ("1b3", "7b", "13b", "30b")
    configs = [importlib.import_module(f"eejax.configs.ee_llm_{n}").get_config() for n in names]
    have = {
        (
            c.optimizer.b1,
            c.optimizer.b2,
            c.optimizer.eps,
            c.optimizer.schedule,
            c.optimizer.learning_rate,
            c.train.batch_size,
            c.data.length,
        )
        for c in configs
    }
    want = (0.9, 0.95, 1e-8, "cosine", 3e-4, 2048, 2048)
    yield judged(
        "settings",
        have == {want},
        f"configs/ee_llm_{{{','.join(names)}}}.py: {sorted(have)}",
        "configuration",
        "a configuration differs from the paper",
    )


def inserted() -> Iterator[Finding]:
    """Judge Claim C.1 on text, and Proposition C.2 in closed form."""
    yield proposition_c2()
    yield from claim_c1()


def proposition_c2(n: int = 4, draws: int = 400_000) -> Finding:
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(draws, n + 1, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    a, b = mixed[..., 0] + 1, mixed[..., 1] + 2
    plain = a[:, :n].mean(1) + b[:, :n].mean(1)
    more = a.mean(1) + b[:, :n].mean(1)
    got = plain.var() - more.var()
    want = (1.0 + 2 * 0.6) / (n * (n + 1))
    bias = abs(more.mean() - 3) / (more.std() / np.sqrt(draws))
    return judged(
        "proposition-c-2",
        abs(got / want - 1) < 0.05 and bias < 4,
        f"variance falls by {got:.4f}, by the formula {want:.4f} (within 5 %); the mean is "
        f"{bias:.1f} standard errors off (below 4)",
        f"{draws} draws, N = {n}",
    )


def claim_c1(draws: int = 200) -> Iterator[Finding]:
    """Compute the gradient of filled iterations, over draws of microbatches of text.

    Exits are tied.
    """
    import pydoc_data.topics

    import jax
    import jax.numpy as jnp

    from eejax.losses.multi_exit import multi_exit_loss
    from eejax.pipeline import runner
    from eejax.pipeline.config import PipelineConfig
    from eejax.pipeline.plan import plan

    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    exits = [{"boundary": n} for n in range(1, STAGES)]
    config = model("tied", exits, vocab_size=256, d_model=64, d_ff=176)
    _, layout, here, weights = compiled(config, 8, "1f1b")
    pipeline = _pipeline(layout)
    table, factors = plan(
        PipelineConfig(fill="both"), layout.partition, 8, length=LENGTH, remat="dots"
    )
    run = jax.jit(runner.gradients(pipeline, table, factors))
    rng = np.random.default_rng(0)
    starts = rng.integers(0, text.size - LENGTH - 1, (40, 2))
    windows = text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)
    value = layout.from_stages(jax.device_get(here))
    grad = jax.grad(lambda v, w: multi_exit_loss(v, config, w[:, :-1], w[:, 1:], weights)[0])
    each = jax.device_get(jax.jit(lambda w: jax.lax.map(lambda one: grad(value, one), w))(windows))
    means = [g.mean(0) for g in jax.tree.leaves(each)]
    units = [m / np.linalg.norm(m) for m in means]

    def along(tree):
        return np.array(
            [np.vdot(np.asarray(g), u) for g, u in zip(jax.tree.leaves(tree), units, strict=True)]
        )

    want = np.array([np.vdot(m, u) for m, u in zip(means, units, strict=True)])
    filled, alone = [], []
    for _ in range(draws):
        chosen = rng.integers(0, 40, 8)
        rows = windows[chosen].reshape(16, LENGTH + 1)
        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        sums = run(here, {}, weights, None, batch, jnp.zeros((), jnp.int32))
        filled.append(along(layout.from_stages(jax.device_get(sums.grads))) / factors.main)
        first = chosen[: factors.main]
        alone.append(along(jax.tree.map(lambda g, first=first: g[first].mean(0), each)))
    filled, alone = np.stack(filled), np.stack(alone)
    z = (filled.mean(0) - want) / (filled.std(0, ddof=1) / np.sqrt(draws))
    # Partial passes do not come to all parameters: those of the other ones are as without.
    reached = (np.abs(filled - alone) > EXACT * np.abs(alone).max(0)).any(0)
    ratio = (filled.var(0) / alone.var(0))[reached]
    mean = float(np.exp(np.log(ratio).mean())) if reached.any() else 1.0
    # Variances are estimates: whether one is larger is a matter of its standard error.
    more = ((filled - want) ** 2 - (alone - want) ** 2)[:, reached]
    larger = more.mean(0) / (more.std(0, ddof=1) / np.sqrt(draws))
    scale = f"{TINY}, {draws} draws of text"
    yield judged(
        "claim-c-1",
        np.abs(z).max() < 4 and mean < 1 and larger.max(initial=0) < 3,
        f"{8 - factors.main} of 8 microbatches partial: means within {np.abs(z).max():.1f} "
        f"standard errors of the text's gradient (below 4); variance along it {mean:.2f} times "
        f"that of the whole ones ({ratio.min(initial=1):.2f} to {ratio.max(initial=0):.2f}; less "
        f"on average, and nowhere more by 3 standard errors) in the {reached.sum()} of "
        f"{len(reached)} arrays that partial passes reach",
        scale,
        "the gradient is biased, or varies as much as without",
    )
    shared = [
        "embed" in jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(each)
    ]
    off = np.abs(z[shared]).max()
    yield judged(
        "untied-filling",
        off >= 4,
        f"the embedding that {config.n_exits + 1} exits on {STAGES} stages read has a gradient "
        f"within {off:.1f} standard errors of the text's (harm: 4 or more)",
        scale,
        "the gradient of each copy is multiplied by its stage's factor before copies are added, "
        "so it is not biased",
    )


def _pipeline(layout):
    from eejax.pipeline.stage import Pipeline
    from eejax.sharding.mesh import MeshConfig, make_mesh

    return Pipeline(layout, make_mesh(MeshConfig(pipe=STAGES)))
