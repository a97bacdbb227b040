"""TIDE's routers, labels, selection and kernels, against float64 and the paper's formulas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from eejax.experiments.reproduce.catalogue import finding
from eejax.experiments.reproduce.claims import Finding

SCALE = "float32, random states"
DIFFERS = "the value differs by more than rounding, which is a fault of ours"
ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def findings() -> list[Finding]:
    """Return every finding about routers and kernels."""
    return [*routers(), *calibration(), *selection(), *kernels(), *library()]


def library() -> Iterator[Finding]:
    """Judge which modules of eejax import transformers."""
    import ast
    import pathlib

    import eejax

    package = pathlib.Path(eejax.__file__).parent
    rooms = {file: file.relative_to(package).parts[0] for file in package.rglob("*.py")}
    files = sorted(f for f, room in rooms.items() if room not in ("configs", "experiments"))
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                found.add(str(file.relative_to(package)))
    yield judged(
        "any-transformers",
        None,
        f"of {len(files)} modules {', '.join(sorted(found)) or 'none'} imports transformers",
        "eejax generates without transformers, so no version of it needs a test",
        "eejax's own source",
    )


def judged(key: str, holds: bool | None, ours: str, why: str, scale: str = SCALE) -> Finding:
    holds = None if holds is None else bool(holds)
    return finding("TIDE", key, ours, scale, holds, why)


def model(layers: int = 8, width: int = 64, every: int = 2, **changes):
    from eejax.models.config import ModelConfig

    exits = [{"boundary": n, "router": 16} for n in range(every, layers, every)]
    values = dict(
        vocab_size=64,
        n_layers=layers,
        d_model=width,
        n_heads=4,
        d_ff=2 * width,
        context_length=48,
        head="tied",
        exits=exits,
    )
    return ModelConfig.from_dict(values | changes)


def routers() -> Iterator[Finding]:
    """Compare a router's confidence with float64."""
    import jax

    from eejax.gates.router import confidence
    from eejax.models import params

    config = model()
    value = params.init(config, jax.random.key(0))
    p = _arrays(value, config)
    p = {n: jax.random.normal(jax.random.key(i), a.shape) for i, (n, a) in enumerate(p.items())}
    tree = {"norm": {"scale": p["scale"]}, **{n: p[n] for n in ("down", "up", "up_bias")}}
    x = jax.random.normal(jax.random.key(9), (256, config.d_model))
    got = np.asarray(confidence(tree, x, config))
    wide = {n: np.asarray(a, np.float64) for n, a in p.items()}
    h = np.asarray(x, np.float64)
    h = h / np.sqrt((h * h).mean(1, keepdims=True) + config.norm_eps) * wide["scale"]
    h = h @ wide["down"]
    want = 1 / (1 + np.exp(-((h / (1 + np.exp(-h))) @ wide["up"] + wide["up_bias"])))
    error = float(np.abs(got - want.reshape(got.shape)).max())
    yield judged("eq-2", error < 1e-4, f"largest error beside float64: {error:.1e}", DIFFERS)


def _arrays(tree, config) -> dict:
    """Return the arrays of the first exit's router, by name."""
    from eejax.models import exits

    router = exits.exit_params(tree, config, 0)["router"]
    return {"scale": router["norm"]["scale"], **{n: router[n] for n in ("down", "up", "up_bias")}}


def calibration() -> Iterator[Finding]:
    """Check the places of routers, and which tokens they let go."""
    import jax

    from eejax.calibration.calibration import boundaries_for
    from eejax.calibration.routers import RouterOptions, labels
    from eejax.calibration.states import collect
    from eejax.models import params, transformer

    found = {n: boundaries_for(model(n, exits=[]), 4) for n in (32, 36)}
    yield judged(
        "placement",
        all(at == tuple(range(4, n + 1, 4)) for n, at in found.items()),
        f"with c = 4 after {', '.join(map(str, found[32]))} of 32 layers, counted from 1; the "
        "paper's list c - 1, 2c - 1, ..., counted from 0, ends with the last layer",
        "eejax differs: it leaves out the router after the last layer, since an exit there saves "
        "no layer",
        "configuration",
    )
    config = model()
    value = params.init(config, jax.random.key(0))
    scale = value["final"]["norm"]["scale"]  # a trained norm has one that is not 1
    drawn = np.random.default_rng(2).lognormal(0, 0.5, scale.shape)
    value["final"]["norm"]["scale"] = scale * drawn.astype(np.float32)
    tokens = np.random.default_rng(0).integers(0, 64, (12, 48)).astype(np.int32)
    states = collect(value, config, [{"tokens": tokens, "labels": tokens}], tokens.size)
    at = [e.boundary for e in config.exits] + [config.n_layers]
    hs = [np.asarray(h, np.float64) for h in _boundary_states(transformer, value, config, tokens)]
    hs = np.stack([h.reshape(-1, config.d_model) for h in hs])
    scales = np.asarray(value["final"]["norm"]["scale"], np.float64)
    normed = hs / np.sqrt((hs * hs).mean(-1, keepdims=True) + config.norm_eps) * scales
    right = {}
    for kind, own in (("raw states", hs), ("states under the final norm", normed)):
        want = _cosines(own)
        bound = float(np.quantile(want, 0.6))
        got = labels(states, RouterOptions(label="cosine", bound=bound))
        clear = np.abs(want - bound) > 1e-5
        right[kind] = float((got == (want >= bound))[clear].mean())
    told = ", ".join(f"{share:.1%} of {kind}" for kind, share in right.items())
    raw, under = right.values()
    default = labels(states, RouterOptions(label="cosine")).mean()
    yield judged(
        "eq-1",
        raw == 1 and len(at) == len(hs),
        f"labels that equal those of float64 cosines: {told}, with {want.size} tokens each and "
        f"the tau that 40 % of them reach; at the default of 0.98 {default:.0%} have converged in "
        "this untrained model, whose final norm has scales other than 1",
        "eejax differs: it takes the cosine of both states after the final norm, since an exit's "
        "head reads those; with scales other than 1 some labels differ from those of raw states"
        if under == 1
        else "labels differ from the cosines under the norm too, which is a fault of ours",
    )


def _cosines(states: np.ndarray) -> np.ndarray:
    """Return the cosines [e, n] of each state of [e + 1, n, d] and the last one."""
    unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
    return (unit[:-1] * unit[-1]).sum(-1)


def _boundary_states(transformer, value, config, tokens):
    """Return states at the boundaries of all exits, and after the last layer."""
    states = {}

    def tap(i, x):
        states[i] = x
        return x

    transformer.exit_states(value, config, tokens, tap=tap)
    return [states[i] for i in range(config.n_exits + 1)]


def selection() -> Iterator[Finding]:
    """Judge Algorithm 1, complete caches, thresholds by exit, and the states that are kept."""
    import jax

    from eejax.inference import Generator
    from eejax.models import params, transformer

    config = model()
    value = params.init(config, jax.random.key(3))
    prompts = np.random.default_rng(1).integers(0, 64, (3, 12)).tolist()

    def make(engine):
        return Generator.make(value, config, engine)

    ask = dict(threshold=0.5, gate="router", min_exit_layer=4)
    posthoc, skipping = (make(e).generate(prompts, 24, **ask) for e in ("posthoc", "recompute"))
    deep = posthoc.boundaries[posthoc.exits < config.n_exits]
    yield judged(
        "algorithm-1",
        False,
        f"{deep.size} of {posthoc.tokens.size} tokens leave early, none below k_min = 4; each "
        "request leaves by its own exit, where the paper waits for the whole batch",
        "eejax differs: it decides for each row of a batch where line 8 decides for all, since a "
        "batch that waits for its last row leaves late"
        if deep.size and deep.min() >= 4
        else "a token leaves below k_min, or none leaves",
    )
    yield judged(
        "cache",
        (posthoc.layers == config.n_layers).all()
        and (posthoc.tokens == skipping.tokens).all()
        and (posthoc.exits == skipping.exits).all(),
        "post-hoc runs all layers of every token; decoding that skips layers and fills in keys "
        "and values exactly has the same tokens and exits",
        "tokens differ, or a layer is left out",
    )
    loose, tight = ([0.5, 0.5, 1.0], [1.0, 1.0, 0.5])
    layers = [
        float(make("posthoc").generate(prompts, 24, threshold=t, gate="router").boundaries.mean())
        for t in (loose, tight)
    ]
    yield judged(
        "per-layer",
        None,
        f"thresholds by exit: {loose} give a mean depth of {layers[0]:.2f}, {tight} of "
        f"{layers[1]:.2f}; bounds of labels may be given by exit too",
        "routers of an untrained model do not show the gain of thresholds by exit",
    )
    kept = len(_boundary_states(transformer, value, config, np.array(prompts, np.int32)))
    yield judged(
        "hidden-states",
        None,
        f"a pass returns {kept} states, those at exits and the last, of {config.n_layers + 1}",
        "the cost that this would reduce arises with large batches on a GPU",
    )


def kernels() -> Iterator[Finding]:
    """Compare kernels in Triton's interpreter with their references, in all three types."""
    import importlib

    import jax

    errors: dict[str, dict[str, float]] = {}
    for op in ("norm_router", "compact", "scatter", "head_confidence"):
        api = importlib.import_module(f"eejax.kernels.{op}.arg_specs")
        for kind, spec in _some([s for s in api.SPECS if s.small]):
            args = jax.jit(spec.draw)(jax.random.key(1))
            got, want = (
                jax.tree.leaves(spec.run(*args, implementation=i))
                for i in ("interpreter", "reference")
            )
            rows = errors.setdefault(op, {})
            # Most likely tokens are left out: a tie in rounding decides between two.
            pairs = [(a, b) for a, b in zip(got, want, strict=True) if a.dtype != "int32"]
            pairs = pairs if op == "head_confidence" else list(zip(got, want, strict=True))
            rows[kind] = max(rows.get(kind, 0.0), *(_error(a, b) for a, b in pairs))
    told = "; ".join(
        f"{op} {', '.join(f'{kind} {error:.0e}' for kind, error in rows.items())}"
        for op, rows in errors.items()
    )
    kinds = set().union(*errors.values())
    right = all(e <= 4 * ROUNDING[k] for rows in errors.values() for k, e in rows.items())
    scale = "Triton's interpreter on a CPU"
    yield judged(
        "kernels",
        right and len(errors) == 4 and kinds == set(ROUNDING),
        f"largest relative difference from the reference: {told}",
        "a kernel differs from its reference by more than rounding",
        scale,
    )
    yield from precision(scale)
    yield judged(
        "gpus",
        None,
        "Triton compiles for the GPU that is found, from sm_80 on; older ones and machines without "
        "one take XLA's operations",
        "there is no GPU here, let alone one of each generation from V100 to Blackwell",
        scale,
    )


def precision(scale: str) -> Iterator[Finding]:
    """Judge sums in float32 under bfloat16 states, weights of routers, and use without a GPU."""
    import jax
    import jax.numpy as jnp

    from eejax.kernels.norm_router.api import norm_router
    from eejax.kernels.norms import NormOptions
    from eejax.models import params

    rng = np.random.default_rng(5)
    n, d, r, options = 16, 512, 16, NormOptions()

    def half(a):
        return np.asarray(a, jnp.bfloat16)

    x, scales = half(rng.normal(size=(n, d))), np.ones(d, np.float32)
    down = rng.normal(0, d**-0.5, (d, r)).astype(np.float32)
    up = rng.normal(size=r).astype(np.float32)
    args = (x, scales, None, down, up, np.float32(0.1), np.full(n, 0.5, np.float32))

    def run(how):
        return np.asarray(
            norm_router(*map(_array, args), options=options, implementation=how).confidence,
            np.float64,
        )

    got = run("interpreter")
    wide = np.asarray(x, np.float64)
    h = half(wide / np.sqrt((wide * wide).mean(1, keepdims=True) + options.eps))

    def gate(z, up):
        return 1 / (1 + np.exp(-((z / (1 + np.exp(-z))) @ up + 0.1)))

    exact = np.asarray(h, np.float64) @ np.asarray(half(down), np.float64)
    want = gate(exact, np.asarray(half(up), np.float64))
    narrow = half(np.zeros((n, r)))
    for j in range(d):
        narrow = half(narrow + half(h[:, j : j + 1] * half(down)[j]))
    errors = [
        float(np.abs(a - want).max())
        for a in (got, gate(np.asarray(narrow, np.float64), np.asarray(half(up), np.float64)))
    ]
    yield judged(
        "float32-sums",
        errors[0] < errors[1] / 10,
        f"bfloat16 states of width {d}: {errors[0]:.1e} from float64 at most, {errors[1]:.1e} with "
        "sums in bfloat16",
        "the kernel is no nearer to float64 than sums in bfloat16 are",
        scale,
    )
    unrounded = gate(np.asarray(h, np.float64) @ down.astype(np.float64), up.astype(np.float64))
    off = float(np.abs(got - unrounded).max())
    kept = params.init(model(dtype="bfloat16"), jax.random.key(0))
    dtypes = {str(a.dtype) for a in _arrays(kept, model(dtype="bfloat16")).values()}
    yield judged(
        "router-weights",
        dtypes == {"float32"} and off <= errors[0],
        f"kept in {', '.join(sorted(dtypes))}; with bfloat16 states a confidence is within "
        f"{errors[0]:.1e} of that by weights in bfloat16, and within {off:.1e} of that by weights "
        "in float32",
        "eejax differs: it keeps the weights in float32, and rounds them to the type of the "
        "states for products, as it does for all weights, so that serving has the values of "
        "training"
        if dtypes == {"float32"}
        else "weights are kept in another type",
        scale,
    )
    chosen, triton = float(np.abs(run(None) - want).max()), _loads_triton()
    yield judged(
        "no-compiler",
        chosen <= ROUNDING["bfloat16"] and not triton,
        f"on a {jax.devices()[0].device_kind} `norm_router` is within {chosen:.1e} of float64, in "
        f"a process that {'loads' if triton else 'does not load'} Triton",
        "it needs a compiler of kernels, or has other values than the kernel",
        "no kernel",
    )


def _loads_triton() -> bool:
    """Return whether `norm_router`, called in a process of its own, loads Triton."""
    script = """
import sys
import jax.numpy as jnp
from eejax.kernels.norm_router.api import norm_router
from eejax.kernels.norms import NormOptions
x = jnp.ones((4, 16), jnp.bfloat16)
down, up, one = jnp.ones((16, 8)), jnp.ones(8), jnp.float32(1)
norm_router(x, jnp.ones(16), None, down, up, one, jnp.ones(4), options=NormOptions())
print("triton" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1] == "True"


def _array(value):
    import jax.numpy as jnp

    return None if value is None else jnp.asarray(value)


def _some(specs, each: int = 2):
    """Return (type, spec) of the first specs of each type; without types those of rows of bools."""
    for kind in ROUNDING:
        mine = [spec for spec in specs if spec.name.startswith(f"{kind}-")]
        yield from ((kind, spec) for spec in mine[:each])
    if not any(spec.name.startswith("float") for spec in specs):
        yield from (("float32", spec) for spec in specs[:each])


def _error(got, want) -> float:
    """Return the largest difference, relative to the largest value or 1."""
    a, b = (np.asarray(x, np.float32).astype(np.float64) for x in (got, want))
    finite = np.isfinite(b)
    scale = np.abs(b[finite]).max(initial=1.0)
    return float(np.abs(a - b)[finite].max(initial=0) / scale)
