"""A part of a model that grows and shrinks under requests: none is lost, none is mixed up."""

from __future__ import annotations

import numpy as np
import pytest
from adding import add

from eejax.common.errors import ConfigError
from eejax.inference import Generator
from eejax.inference.options import EngineOptions
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy

CONTEXT, NEW = 96, 30


@pytest.fixture(scope="module")
def model(subset):
    return subset((1, 2, 3))


@pytest.mark.parametrize(
    "layout, slots",
    [
        ((1, 2), (4, 4, 2)),
        *(pytest.param((1, 2, 3), n, marks=pytest.mark.slow) for n in (3, (5, 4, 3, 2))),
    ],
)
def test_nobody_is_lost_while_it_grows_and_shrinks(subset, prompts, layout, slots):
    """All tokens leave by the first exit, so that they are the same at any depth."""
    p, config = subset(layout)
    whole = len(layout) + 1
    texts = [prompts(i, [4 + 3 * i])[0] for i in range(12)]
    want = Generator.make(p, config, "posthoc").generate(
        texts, NEW, threshold=0.0, prefill_exit=True
    )
    options = EngineOptions(cap=4, drafts=0, buckets=(8,))
    part = PartialModel(p, config, options, slots=slots, depth=1, context=CONTEXT, steps=2)
    sizes = {1: part.weight_bytes}
    policy, left, found, ends, depths = (
        ExitPolicy.make(config, 1, 0.0, prefill_exit=True),
        [*texts],
        {},
        {},
        [],
    )
    most = {}
    for turn in range(1000):
        while left and len(part.scheduler.waiting) < 3:
            number = add(part.scheduler, left[0], NEW, policy=policy)
            left.pop(0)
            found[number] = []
        if turn in (6, 12, 20):
            part.grow(2 if turn == 6 else whole)
            assert part.depth < part.target_segments
        if turn == 15:
            running = part.scheduler.running
            part.cancel_growth()
            # They are the same ones, and go on where they were.
            assert part.target_segments == 2 and part.scheduler.running == running
        if turn == 30:
            part.shrink(1)
        if turn == 33:
            part.restart()
            assert part.depth == 1 and not part.scheduler.running
        # What is asked for in between is not there before it is called off.
        for number, tokens, finish in (part.scheduler if 12 <= turn < 15 else part).step():
            found[number] += [t.id for t in tokens]
            if finish:
                ends[number] = finish
        depths.append(part.depth)
        running = len(part.scheduler.running)
        most[part.depth] = max(most.get(part.depth, 0), running)
        assert running <= part.engine.slots == part.slots[part.target_segments - 1]
        sizes.setdefault(part.depth, part.weight_bytes)
        if not left and part.scheduler.idle:
            break
    assert [d for i, d in enumerate(depths) if not i or d != depths[i - 1]] == [1, 2, whole, 1]
    assert sizes[1] < sizes[2] < sizes[whole] and part.weight_bytes == sizes[1]
    assert most == {d: part.slots[d - 1] for d in (1, 2, whole)}
    assert set(ends.values()) == {"length"} and len(ends) == len(texts)
    for i, text in enumerate(found.values()):
        # Where two logits are as good as equal, any may come first.
        tied = np.flatnonzero(want.margins[i] < 1e-3)
        n = int(tied[0]) if len(tied) else NEW
        assert len(text) == NEW and text[:n] == want.tokens[i, :n].tolist()
    assert np.mean([(m >= 1e-3).all() for m in want.margins]) > 0.5


def test_depths_there_cannot_be(model):
    p, config = model
    part = PartialModel(
        p, config, EngineOptions(cap=4, drafts=0), slots=3, depth=2, context=CONTEXT
    )
    for wrong in (1, 2, 5):
        with pytest.raises(ConfigError, match=rf"depth = {wrong}: must be in 3..4"):
            part.grow(wrong)
    for wrong in ((3, 3, 3), (1, 2, 3, 4)):
        with pytest.raises(ConfigError, match="must be one number, or 4 numbers that never rise"):
            PartialModel(p, config, slots=wrong, depth=1, context=CONTEXT)
    with pytest.raises(ConfigError, match="slots = 0: must be an integer of at least 1"):
        PartialModel(p, config, slots=(3, 2, 1, 0), depth=1, context=CONTEXT)
    for wrong in (0, 2):
        with pytest.raises(ConfigError, match=rf"depth = {wrong}: must be in 1..1"):
            part.shrink(wrong)


@pytest.mark.parametrize("engine", ["full", "speculative", "posthoc"])
def test_an_engine_whose_segments_are_not_the_models_is_refused(model, engine):
    with pytest.raises(ConfigError, match=f"engine = '{engine}': must be 'recompute'"):
        PartialModel(*model, EngineOptions(engine), slots=2, depth=1)
