"""Kernels against XLA's own operations, on an NVIDIA GPU.

    eejax bench kernels --json
    eejax bench kernels --ops=norm_router,head_confidence

For every op, dtype and size: `error`, the largest difference from the op's definition in float32,
beside that of XLA's own (`reference_error`); `differ`, the share of whole numbers that are not
XLA's (a probability at its threshold, two equally likely tokens); `identical`, whether 20 runs give
the same bits; `speedup` over the op's definition by XLA, in interleaved pairs after warm-up, and
`speedup_over_logits`, where the definition itself needs no logits; `bandwidth`, of the bytes that
have to be moved, as a share of what a plain copy moves in a second; `temporary` bytes. A call's
time is that of one in a chain of many, each begun when the one before it ended, so that the start
of a program is not counted, and each with arguments of its own, which no cache holds.

Claims, the worst over their cases: `norm_router_bandwidth` at 32,768 rows, `norm_router_speedup`
and `head_confidence_bandwidth`, `head_confidence_speedup` at up to 64 rows,
`linear_cross_entropy_speedup` over whole logits, and `linear_cross_entropy_memory`, the largest
ratio over dtypes and widths of its temporary bytes at the largest vocabulary to those at the
smallest, without the table's gradient, which is a result. `sanitizer` is the result of
compute-sanitizer's memcheck and racecheck, where it is installed; races in a GPU's own memory,
which racecheck does not see, show in `identical`. `decode_step` is tokens per second of an engine
with router gates by kernels over the same without.

It ends with status 1 if runs differ, an error is `FAR` times XLA's, the sanitizer finds anything or
a case cannot be run (the largest, whole logits of 8192 tokens and 131072 words, are meant for 80
GB). --smoke runs on any machine in minutes, with tiny sizes and XLA's operations on both sides; its
figures mean nothing.
"""

from __future__ import annotations

import importlib
import json
import time

import numpy as np
from absl import flags

from eejax.common.errors import ConfigError
from eejax.experiments import launch
from eejax.experiments.gpu_check import sanitizer as tools
from eejax.kernels.specs import OPS

DECODE_STEP = "decode_step"
_OPS = flags.DEFINE_list(
    "ops", [*OPS, DECODE_STEP], f"Ops to measure; {DECODE_STEP}: decoding steps with router gates."
)
_PAIRS = flags.DEFINE_integer("pairs", 20, "Pairs of runs to time.", lower_bound=2)
_ONCE = flags.DEFINE_bool(
    "once", False, "Run the kernels' small cases once, for compute-sanitizer."
)
_SMOKE = flags.DEFINE_bool("smoke", False, "Tiny sizes, XLA on both sides.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

CHAIN, REPEATS, NEW = 64, 20, 64
SHAPE = dict(
    vocab_size=128256,
    n_layers=16,
    d_model=2048,
    n_heads=32,
    n_kv_heads=8,
    d_ff=8192,
    boundaries=(4, 8, 12),
)  # of a decoding step: Llama 3.2's of 1B parameters
TINY = dict(vocab_size=300, n_layers=4, d_model=32, n_heads=2, boundaries=(1, 2))
FAR = 8  # times the error of XLA's operations, at which a kernel is wrong
MAX_BYTES = 2**30  # of the copies of arguments that a chain reads
COPIED = 2**28  # bytes of each copy of a chain that measures bandwidth


def main() -> None:
    import jax

    known = (*OPS, DECODE_STEP)
    if unknown := [op for op in _OPS.value if op not in known]:
        raise ConfigError(f"--ops = {','.join(unknown)}: must be among {', '.join(known)}.")
    if jax.default_backend() != "gpu" and not _SMOKE.value:
        raise ConfigError(
            "there is no GPU: kernels are compiled for CUDA only. `make test` runs them in "
            "Triton's interpreter and compiles them for both chips; --smoke tries this program out."
        )
    if _ONCE.value:
        return once()
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "smoke": _SMOKE.value,
    }
    result["copy_bytes_per_second"] = copied = copy_bandwidth()
    launch.say(f"{result['device']}: copies {copied / 1e9:.0f} GB/s")
    result["failed"] = []
    for op in kernel_ops():
        cases = importlib.import_module(f"eejax.kernels.{op}.bench").CASES
        tried = [attempt(c, copied, result["failed"]) for c in cases if c.tiny == _SMOKE.value]
        result[op] = [told for told in tried if told is not None]
        if result[op]:
            print(table(op, result[op]))
    if DECODE_STEP in _OPS.value:
        result[DECODE_STEP] = [decode_step(batch) for batch in (1, 8)]
        print(decode_table(result[DECODE_STEP]))
    result["claims"] = claims(result)
    result["sanitizer"] = {} if _SMOKE.value else sanitizer()
    print("\n".join(f"{k}: {v}" for k, v in result["claims"].items()))
    wrong = result["failed"] + wrong_cases(result)
    print("\n".join(wrong), end="\n" * bool(wrong))
    if _JSON.value:
        print(json.dumps(result))
    if wrong:
        raise SystemExit(1)


def kernel_ops() -> list[str]:
    return [op for op in _OPS.value if op != DECODE_STEP]


def attempt(case, copied: float, failed: list[str]) -> dict | None:
    """Return the result of `measure`, or None and the error: a case may need too much memory."""
    import jax

    try:
        return measure(case, copied)
    except jax.errors.JaxRuntimeError as error:
        failed.append(f"{case.spec.name}: {str(error).splitlines()[0]}")
        launch.say(failed[-1])
        return None


def wrong_cases(result: dict) -> list[str]:
    """Return problems: runs that differ, and errors far beyond those of XLA's operations."""
    said = []
    for op in kernel_ops():
        for c in result[op]:
            sizes = ", ".join(f"{k} {c[k]}" for k in c if k not in FIGURES)
            if not c["identical"]:
                said.append(f"{op}, {sizes}: runs differ")
            if not c["error"] <= FAR * max(c["reference_error"], 1e-6):
                said.append(f"{op}, {sizes}: error {c['error']}, XLA's {c['reference_error']}")
    return said + [
        f"{tool}: {end}" for tool, end in result["sanitizer"].items() if " 0 " not in f" {end} "
    ]


def kernel() -> str:
    return "reference" if _SMOKE.value else "triton"


def once() -> None:
    """Run every op's small specs by its kernel, each in a program of its own."""
    import jax

    for op in kernel_ops():
        for spec in importlib.import_module(f"eejax.kernels.{op}.arg_specs").SPECS:
            if spec.small:
                run = jax.jit(lambda *a, spec=spec: spec.run(*a, implementation=kernel()))
                jax.block_until_ready(run(*spec.args()))


def sanitizer() -> dict[str, str]:
    """Return the results of compute-sanitizer's tools, by name; none if it is not installed."""
    found = {}
    for tool in ("memcheck", "racecheck"):
        report = tools.run(tool, kernel_ops())
        if report is None:
            return {}
        known = report.status in (0, tools.ERROR)
        found[tool] = report.summary if known else f"status {report.status}: {report.summary}"
    return found


def copy_bandwidth() -> float:
    """Return the bytes read and written in a second by copies larger than any cache."""
    import jax.numpy as jnp

    size, k = (COPIED // 2**10, 2) if _SMOKE.value else (COPIED, 8)
    sets = [(jnp.full(size // 4, i, jnp.float32),) for i in range(k)]
    (seconds,) = timed([lambda x: x + 1], sets)
    return 2 * size / float(np.median(seconds))


def timed(runs, sets) -> np.ndarray:
    """Return seconds [runs, pairs] of one call in a chain of calls on sets of arguments."""
    import jax

    from eejax import analysis

    chains = [chain(run, len(sets)) for run in runs]
    once = [lambda _, f=f: jax.block_until_ready(f(sets)) for f in chains]
    return analysis.interleave(once, _PAIRS.value, time.perf_counter) / len(sets)


def measure(case, copied: float) -> dict:
    """Measure a case."""
    import jax

    def run(which):
        return lambda *args: case.spec.run(*args, implementation=which)

    args = case.spec.args()
    told = dict(case.sizes)
    ours, theirs = (jax.jit(run(which)) for which in (kernel(), "reference"))
    exact = jax.jit(run("reference"))
    with jax.default_matmul_precision("highest"):
        want = exact(*jax.tree.map(wide, args))
    got, plain = ours(*args), theirs(*args)
    told["error"], told["reference_error"] = error(got, want), error(plain, want)
    told["differ"] = differ(got, plain)
    first = jax.tree.leaves(jax.device_get(ours(*args)))
    again = (jax.tree.leaves(jax.device_get(ours(*args))) for _ in range(REPEATS - 1))
    told["identical"] = all(
        (a.view(np.uint8) == b.view(np.uint8)).all()
        for other in again
        for a, b in zip(map(np.atleast_1d, first), map(np.atleast_1d, other), strict=True)
    )
    peers = [run(kernel()), run("reference"), *([case.peer] if case.peer else [])]

    def temporary(f):
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes

    names = ("", "reference_", "logits_")
    seconds = timed(peers, copies_of(args))
    for name, peer, times in zip(names, peers, seconds, strict=False):
        told[f"{name}temporary"] = temporary(peer)
        told[f"{name}seconds"] = float(np.median(times))
    for name, times in zip(("speedup", "speedup_over_logits"), seconds[1:], strict=False):
        told[name] = times_as_fast(times, seconds[0])
    told["bandwidth"] = case.moved / told["seconds"] / copied
    return told


def times_as_fast(theirs, ours) -> dict[str, float]:
    from eejax import analysis

    return dict(zip(("ratio", "low", "high"), analysis.median_ratio(theirs, ours), strict=True))


def wide(a):
    import jax.numpy as jnp

    return a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a


def error(got, want) -> float:
    """Return the largest difference among non-integer results, relative to their size."""
    import jax
    import jax.numpy as jnp

    worst = 0.0
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = (np.asarray(v.astype(jnp.float32), np.float64) for v in (a, b))
            if (np.isfinite(a) != np.isfinite(b)).any():
                return float("inf")
            worst = max(worst, float(np.abs(a - b).max() / max(1e-30, np.abs(b).max())))
    return worst


def differ(got, plain) -> float:
    """Return the share of integer and boolean results that differ."""
    import jax
    import jax.numpy as jnp

    whole = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(*map(jax.tree.leaves, (got, plain)), strict=True)
        if not jnp.issubdtype(a.dtype, jnp.floating)
    ]
    return sum(int((a != b).sum()) for a, b in whole) / max(1, sum(a.size for a, _ in whole))


def copies_of(args) -> list:
    """Return sets of arguments for a chain, equal except for their order.

    They are more than a cache holds, if that is at most `CHAIN` sets, and at least two.
    """
    import jax
    import jax.numpy as jnp

    size = sum(a.nbytes for a in jax.tree.leaves(args))
    k = 2 if _SMOKE.value else int(np.clip(MAX_BYTES // size, 2, CHAIN))

    def other(i):
        return jax.tree.map(lambda a: jnp.roll(a, i, 0) if a.ndim else a + 0, args)

    return jax.block_until_ready([other(i) for i in range(k)])


def chain(run, k: int):
    """Run k calls in one program, each of which begins after the one before it ended."""
    import jax

    def program(sets):
        results = []
        for args in sets:
            if results:
                args, results[-1] = jax.lax.optimization_barrier((args, results[-1]))
            results.append(run(*args))
        return results  # all of them: XLA would remove unused results

    return jax.jit(program)


def decode_step(batch: int) -> dict:
    """Measure tokens per second of an engine with router gates, with and without kernels."""
    import jax

    from eejax import analysis
    from eejax.inference import Generator, generate
    from eejax.inference.decoding import decode, default_plan
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.sampling import SamplingParams
    from eejax.inference.state import RequestRows
    from eejax.kernels import call
    from eejax.models import params
    from eejax.models.config import ExitConfig, ModelConfig

    sizes = dict(TINY if _SMOKE.value else SHAPE)
    exits = tuple(ExitConfig(n, head="tied", router=128) for n in sizes.pop("boundaries"))
    config = ModelConfig(exits=exits, dtype="bfloat16", context_length=512, **sizes)
    generator = Generator.make(params.init(config, jax.random.key(0)), config, "recompute")
    options, slots = generator.slots_for(batch)
    weights, own = generator.weights, dict(config=config, options=options)
    plan, steps = default_plan(config, options, slots), np.int32(NEW)
    prompt = np.arange(batch * 32, dtype=np.int32).reshape(batch, 32) % config.vocab_size
    # Untrained routers have a confidence of about a half.
    policy = ExitPolicy.make(config, batch, 0.5, gate="router")
    request = RequestRows.make(
        config, [32] * batch, [NEW] * batch, policy, SamplingParams.make(batch)
    )

    def begin():
        return generate.prefill(weights, plan, prompt, request, length=128, **own)[0]

    programs, told = [], dict(batch=batch)
    for which in (kernel() if _SMOKE.value else None, "reference"):
        with call.implementation(which):
            programs.append(decode.lower(weights, begin(), steps, size=NEW, **own).compile())
    states, layers = {}, {}

    def run(which: int):
        def one(_):
            _, record = programs[which](weights, states.pop("next"), steps)
            layers[which] = np.asarray(record.layers)

        return one

    def prepare(_):
        return states.__setitem__("next", jax.block_until_ready(begin()))

    seconds = analysis.interleave([run(0), run(1)], _PAIRS.value, time.perf_counter, prepare)
    told["tokens_per_s"], told["reference_tokens_per_s"] = (
        batch * NEW / np.median(seconds, 1)
    ).tolist()
    told["layers_run"] = [float(layers[i].mean()) for i in (0, 1)]
    told["speedup"] = times_as_fast(seconds[1], seconds[0])
    return told


def decode_table(rows: list[dict]) -> str:
    from eejax import analysis

    cells = [
        [
            str(r["batch"]),
            f"{r['tokens_per_s']:.0f} : {r['reference_tokens_per_s']:.0f}",
            " : ".join(f"{n:.2f}" for n in r["layers_run"]),
            ratio(r["speedup"]),
        ]
        for r in rows
    ]
    heads = ("batch", "tokens/s : without kernels", "layers run", "times")
    return f"\ndecoding steps with router gates\n{analysis.table(heads, cells)}"


def claims(result: dict) -> dict:
    """Return the worst value of every claim over its cases."""
    found = {}

    def least(name: str, op: str, of, when) -> None:
        values = [of(c) for c in result.get(op, []) if when(c)]
        if values:
            found[name] = min(values)

    few, many = (lambda c: c["rows"] <= 64), (lambda c: c["rows"] >= 32768)

    def speedup(c):
        return c["speedup"]["ratio"]

    def bandwidth(c):
        return c["bandwidth"]

    least("norm_router_bandwidth", "norm_router", bandwidth, many)
    least("norm_router_speedup", "norm_router", speedup, few)
    least("head_confidence_bandwidth", "head_confidence", bandwidth, few)
    least("head_confidence_speedup", "head_confidence", speedup, few)

    def over_logits(c):
        return c["speedup_over_logits"]["ratio"]

    least("linear_cross_entropy_speedup", "linear_cross_entropy", over_logits, lambda c: True)
    grown = []
    for case in result.get("linear_cross_entropy", []):
        alike = [
            c
            for c in result["linear_cross_entropy"]
            if all(c[k] == case[k] for k in ("dtype", "rows", "d"))
        ]
        own = [
            c["temporary"] - 4 * c["vocab"] * c["d"]
            for c in sorted(alike, key=lambda c: c["vocab"])
        ]
        grown.append(own[-1] / max(1, own[0]))
    if grown:
        found["linear_cross_entropy_memory"] = max(grown)
    return found


def table(op: str, rows: list[dict]) -> str:
    from eejax import analysis

    sizes = [k for k in rows[0] if k not in FIGURES]
    ratios = {"speedup": "times XLA", "speedup_over_logits": "times whole logits"}
    ratios = {name: head for name, head in ratios.items() if name in rows[0]}
    cells = [
        [
            *(str(r[k]) for k in sizes),
            f"{r['seconds'] * 1e6:.1f}",
            *(ratio(r[name]) for name in ratios),
            f"{r['bandwidth']:.2f}",
            f"{r['error']:.1e} : {r['reference_error']:.1e}",
            "yes" if r["identical"] else "NO",
        ]
        for r in rows
    ]
    heads = (*sizes, "us", *ratios.values(), "of a copy", "error : XLA's", "same bits")
    return f"\n{op}\n{analysis.table(heads, cells)}"


def ratio(of: dict) -> str:
    return f"{of['ratio']:.2f} [{of['low']:.2f}, {of['high']:.2f}]"


FIGURES = (
    "differ",
    "error",
    "reference_error",
    "identical",
    "bandwidth",
    "speedup",
    "speedup_over_logits",
    *(f"{who}{what}" for who in ("", "reference_", "logits_") for what in ("temporary", "seconds")),
)


if __name__ == "__main__":
    launch.run(main)
