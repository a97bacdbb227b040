"""Long work shows how far it is where a person looks, and nothing elsewhere."""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common import progress


@pytest.fixture
def looked_at(monkeypatch):
    monkeypatch.setattr(progress, "watched", lambda: True)
    monkeypatch.setattr(progress, "DELAY", 0.01)


def work():
    with progress.steps("passing", 40, "token") as done:
        for _ in range(4):
            done(10)
            time.sleep(0.11)
    with progress.waiting("loading"):
        time.sleep(0.1)
        jax.jit(lambda x: x + np.float32(time.time()))(jnp.zeros(3)).block_until_ready()
        time.sleep(0.6)


def test_a_person_sees_what_is_done(looked_at, capfd):
    work()
    out, err = capfd.readouterr()
    assert out == "" and "passing" in err and re.search(r"[123]0\.0/40\.0.*token/s", err)
    assert "loading ... 0 s" in err and "programs compiled" in err


def test_a_log_holds_nothing_of_it(capfd):
    work()
    assert capfd.readouterr() == ("", "")


def test_what_fails_passes_through_a_bar(looked_at):
    with pytest.raises(ZeroDivisionError), progress.waiting("dividing"):
        1 / 0  # noqa: B018


def test_every_program_is_told_of_inside_of_the_block_alone():
    told = []

    def compiled():
        return jax.jit(lambda x: x * np.float32(time.time()))(jnp.zeros(3))

    for _ in range(2):
        compiled()
        with progress.compilations(lambda name, seconds: told.append((name, seconds))):
            compiled()
    mine = [seconds for name, seconds in told if "lambda" in name]
    assert len(mine) == 2 and all(seconds > 0 for seconds in mine)


def test_what_compiles_is_reported_while_it_does():
    def slow(x):
        for i in range(200):
            x = jnp.sin(x @ x.T) @ x * i
        return x * np.float32(time.time())

    said = []
    with progress.reports(said.append, every=0.01):
        jax.jit(slow)(jnp.ones((8, 8)))
    assert any("compiling" in line and "slow" in line for line in said)
    count = len(said)
    time.sleep(0.05)
    assert len(said) == count  # it ends with the block
    said.clear()
    with progress.reports(said.append, every=0.01):
        time.sleep(0.05)
    assert said and all(line.endswith("0 programs compiled ...") for line in said)
