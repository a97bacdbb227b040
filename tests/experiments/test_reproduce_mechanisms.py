"""Mechanisms of the papers: parts that need neither a device nor a model that runs."""

from __future__ import annotations

import pytest

from eejax.experiments.reproduce import (
    ee_llm_formulas,
    mechanisms_helios,
    mechanisms_routers,
    mechanisms_schedules,
)
from eejax.experiments.reproduce.claims import Verdict


def verdicts(found) -> dict[str, Verdict]:
    return {one.key: one.verdict for one in found}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(mechanisms_schedules, "DRAWN", 12)


def test_memory_is_counted_operation_by_operation(monkeypatch):
    assert set(verdicts(mechanisms_schedules.formulas()).values()) == {Verdict.HOLDS}
    theirs = ee_llm_formulas.stage_memory
    monkeypatch.setattr(ee_llm_formulas, "stage_memory", lambda *args: theirs(*args) + 1)
    assert verdicts(mechanisms_schedules.formulas())["eq-4-6"] is Verdict.FAILS


def test_moved_forward_passes_leave_the_backward_passes_alone():
    """Remark A.2: k (f + b) = 3 becomes k b = 2."""
    found = {one.key: one for one in mechanisms_schedules.overheads()}
    assert {one.verdict for one in found.values()} == {Verdict.HOLDS}
    assert "b = 1: 2 with" in found["remark-a2"].ours and "3 without" in found["remark-a2"].ours


def test_the_peak_of_memory_is_judged_under_the_papers_condition(monkeypatch):
    """A microbatch's logits take 4 V bytes a token, a stage's layers 34 d each."""
    assert mechanisms_schedules.logits_share("ee_llm_1b3") == 4 * 32_000 / (34 * 2048 * 6)
    assert verdicts(mechanisms_schedules.memory())["peak-memory"] is Verdict.HOLDS
    monkeypatch.setattr(mechanisms_schedules, "logits_share", lambda name: 1.5)
    assert verdicts(mechanisms_schedules.memory())["peak-memory"] is Verdict.FAILS


def test_exits_of_the_7b_model_cost_what_their_matrices_do():
    """A table of 32,000 x 4,096 with 18 bytes of state a parameter is read, not held twice; an
    exit's logits are the product with it, a layer's 4 d d + 3 d f weights the rest."""
    assert set(verdicts(mechanisms_schedules.exits_of_choice()).values()) == {Verdict.HOLDS}
    table = 18 * 32_000 * 4096 / 1e9
    for head, places in (("shared", (10, 12)), ("tied", (4,)), ("shared", (28,))):
        own, one = (mechanisms_schedules.states_7b(places, name) for name in ("own", head))
        assert (own - one).max() == pytest.approx(table)
    _, share = mechanisms_schedules.overhead_7b({"norm": False}, (8, 16))
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 10_880) + 32_000 * 4096
    seen = 32 * 2 * 4096 * (2048 + 1) / 2  # of queries and values, in multiplications
    assert share == pytest.approx(2 * 32_000 * 4096 / (weights + seen), rel=1e-3)


def test_reassessments_are_the_controllers(monkeypatch):
    assert set(verdicts(mechanisms_helios.findings()).values()) == {Verdict.HOLDS}
    real = mechanisms_helios.controller

    def fixed(profiles, **options):
        return real(profiles, interval=150)

    monkeypatch.setattr(mechanisms_helios, "controller", fixed)
    assert verdicts(mechanisms_helios.intervals()) == {"interval-by-cost": Verdict.FAILS}


def test_modules_that_need_transformers_are_named():
    (one,) = mechanisms_routers.library()
    assert one.verdict is Verdict.NOT_AT_THIS_SCALE and "checkpoint/hf/compare.py" in one.ours
