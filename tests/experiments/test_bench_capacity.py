"""Requests that fit, as the benchmark says it and as a model that is built at its budget has it."""

import dataclasses
import json

import jax
import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError
from eejax.inference import capacity
from eejax.inference.options import EngineOptions
from eejax.models import params

bench = functions_of("eejax.experiments.bench_capacity")
TINY = dict(n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=96, context_length=64)


@pytest.fixture
def asked(capsys):
    def run(*arguments):
        call("eejax.experiments.bench_capacity", *arguments, "--json")
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_more_fit_beside_a_part(asked):
    got = asked("--nocheck", "--contexts=512")
    rows = {row["model"]: row for row in got["rows"]}
    assert [*rows] == ["OPT-1.3B", "Llama-2-7B", "Llama-2-13B"]
    for row in rows.values():
        assert row["ratio"] == row["part"] / row["whole"]
        for which in ("whole", "part"):
            taken = row[f"{which}_weights"] + row[which] * row[f"{which}_request"]
            assert 0 < 40e9 - taken < 1.01 * row[f"{which}_request"]
    # Parameters as published, in two bytes each; HELIOS has 3.7 times as many requests on average.
    assert rows["Llama-2-7B"]["whole_weights"] == pytest.approx(2 * 6_738_415_616, rel=1e-3)
    assert rows["Llama-2-13B"]["whole_weights"] == pytest.approx(2 * 13_015_864_320, rel=1e-3)
    assert 3.7 < got["least"] < got["batch_ratio"] < got["most"] < 6


def test_what_fits_nowhere_is_no_ratio(asked):
    got = asked("--nocheck", "--contexts=512", "--budget=1e9")
    assert got["batch_ratio"] is None and {row["ratio"] for row in got["rows"]} == {None}
    assert [row["part"] > 0 for row in got["rows"]] == [True, False, False]
    with pytest.raises(ConfigError, match="context = 2049"):
        asked("--nocheck", "--contexts=2049")


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--contexts=0", "--contexts = '0': must be at least one number of tokens"),
        ("--contexts=512,-1", "--contexts = '512,-1': must be at least one number of tokens"),
        ("--contexts=", "--contexts = '': must be at least one number of tokens, each at least 1"),
        ("--budget=nan", "--budget = nan: must be a finite number of bytes"),
        ("--budget=inf", "--budget = inf: must be a finite number of bytes"),
    ],
)
def test_flags_of_no_use(asked, flag, said):
    with pytest.raises(ConfigError, match=said):
        asked("--nocheck", flag)


def test_a_part_that_is_built_holds_what_is_said():
    config = bench.llama(1, TINY)
    options = EngineOptions(cap=4, buckets=(4,), chunk=4, drafts=0, can_deepen=True)
    budget = capacity.weight_bytes(config, 2) + 1.5 * capacity.request_bytes(config, options, 2, 32)
    n = capacity.slots(config, options, 1, 32, budget)
    assert n > 1 == capacity.slots(config, options, 2, 32, budget)
    host = jax.device_get(params.init(config, jax.random.key(0)))

    def built(*args):
        return bench.serve(host, config, options, *args)

    options = dataclasses.replace(options, num_segments=1)
    got, more = built(n, 32, 1), built(n + 1, 32, 0)
    assert got["held"] == capacity.engine_bytes(config, options, 1, 32, n)
    assert got["held"] <= got["live"] <= budget < more["held"]
    assert got["together"] == n and got["tokens"] == n * bench.NEW


@pytest.mark.slow
def test_a_small_model_holds_what_is_said():
    got = bench.check(bench.llama(1, TINY), 1, 32, can_deepen=True)
    assert got["ratio"] > 1
    for part in (got["whole"], got["part"]):
        assert part["predicted"] == part["held"] <= part["live"] <= got["budget"] < part["one_more"]
        assert part["fits"] and not part["one_more_fits"] and part["together"] == part["slots"]
        assert part["tokens"] == 2 * part["slots"] * bench.NEW
