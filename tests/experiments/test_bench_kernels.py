"""eejax.experiments.bench_kernels, as far as it goes without a GPU."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError
from eejax.kernels.specs import OPS

BENCH = "eejax.experiments.bench_kernels"


def test_without_a_gpu_it_says_what_there_is():
    with pytest.raises(ConfigError, match="there is no GPU: .* --smoke"):
        call(BENCH)


@pytest.mark.slow
def test_the_smoke_run_goes_through_every_op(capsys):
    call(BENCH, "--smoke", "--json", "--pairs=2")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["sanitizer"] == {}
    for op in OPS:
        for case in told[op]:  # the same operations on both sides
            assert case["identical"] and case["differ"] == 0
            assert case["error"] == case["reference_error"] < 1e-5
            assert case["seconds"] > 0 and 0 < case["speedup"]["low"] <= case["speedup"]["high"]
    (loss,) = told["linear_cross_entropy"]
    assert loss["logits_seconds"] > 0 and loss["speedup_over_logits"]["low"] > 0


def test_an_unknown_op_is_named():
    with pytest.raises(ConfigError, match="--ops = attention: must be among compact"):
        call(BENCH, "--smoke", "--ops=compact,attention")


def test_a_chain_computes_every_call():
    bench = functions_of(BENCH)
    run, x = lambda x: x @ x, jnp.ones((64, 64))

    def flops(k):
        return bench.chain(run, k).lower([(x,)] * k).compile().cost_analysis()["flops"]

    assert flops(4) == pytest.approx(4 * flops(1), rel=0.01)


def test_what_is_not_finite_is_an_error():
    bench, nan = functions_of(BENCH), jnp.array([1.0, jnp.nan])
    assert bench.error(nan, jnp.ones(2)) == bench.error(jnp.ones(2), nan) == float("inf")
    assert bench.error(jnp.ones(2) * 1.5, jnp.ones(2)) == 0.5


def test_what_cannot_be_is_told(monkeypatch):
    bench = functions_of(BENCH)
    monkeypatch.setattr(bench, "kernel_ops", lambda: ["compact"])
    right = dict(rows=4, identical=True, error=2e-7, reference_error=1e-7)
    cases = [right, right | dict(identical=False), right | dict(error=float("nan"))]
    ends = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "2 hazards displayed"}
    said = bench.wrong_cases({"compact": cases, "sanitizer": ends})
    assert said == [
        "compact, rows 4: runs differ",
        "compact, rows 4: error nan, XLA's 1e-07",
        "racecheck: 2 hazards displayed",
    ]
