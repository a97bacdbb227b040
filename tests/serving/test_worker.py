"""The engine's process, without its pipe: what serves first, and what serves then."""

from __future__ import annotations

import pytest

from eejax.inference.engine import EarlyExitEngine
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest
from eejax.inference.sampling import SamplingParams
from eejax.serving import models
from eejax.serving.messages import ScoreRequest
from eejax.serving.models import ServedModel
from eejax.serving.worker import EngineWorker

STEPS, NEW = 2, 24


def asked(config) -> list[EngineRequest]:
    """Requests with and without exits, greedy and sampled."""
    return [
        EngineRequest(
            f"request-{i}",
            tuple(b"def main(" + bytes([97 + i]) * (3 * i + 1)),
            NEW,
            policy=ExitPolicy.make(config, 1, (0.0, 0.05, 1.0)[i % 3]),
            sampling=SamplingParams.make(1, temperature=(0.0, 0.8)[i % 2], seed=i),
        )
        for i in range(5)
    ]


def finish(worker: EngineWorker, before=None) -> dict[str, list[int]]:
    """Run until the worker is idle; `before(step, worker)` is called before each step."""
    tokens: dict[str, list[int]] = {}
    step = 0
    while not worker.idle:
        if before is not None:
            before(step, worker)
        step += 1
        for output in worker.step()[-1].outputs:
            tokens.setdefault(output.request_id, []).extend(t.id for t in output.tokens)
    return tokens


@pytest.fixture(scope="module")
def built(small_run):
    """A model of which one slot serves first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "MANY_LAYERS", 1)
        return ServedModel(str(small_run), slots=3)()


def test_one_slot_serves_first_where_there_are_many_layers(built, small_run):
    assert (built.first.slots, built.engine.slots) == (1, 3)
    assert built.first.weights is built.engine.weights
    assert ServedModel(str(small_run), slots=3)().first is None  # of few layers


@pytest.mark.parametrize("at", [0, 3])
def test_requests_get_the_same_from_the_first_engine_and_the_next(built, at):
    """They go on in the engine with all slots where they were, running, waiting and ended."""
    plain = EngineWorker(built._replace(first=None), STEPS)
    for request in asked(built.config):
        plain.handle(request)
    want = finish(plain)
    assert {len(tokens) for tokens in want.values()} == {NEW}

    worker = EngineWorker(built, STEPS)
    worker.warm_up()
    assert worker.scheduler.engine is built.first
    running = []

    def grow(step, worker):
        running.append(worker.scheduler.running)
        if step == at:
            worker.compile_rest()
            worker.serve_with_all_slots()
            assert worker.scheduler.engine is built.engine

    for request in asked(built.config):
        worker.handle(request)
    assert finish(worker, grow) == want
    assert max(map(len, running[: at + 1])) <= 1 and max(map(len, running)) == 3
    # As many wait as there are slots, and who ran goes on before them.
    assert running[at + 1] == ["request-0", "request-1", "request-2"]


def test_texts_wait_for_the_programs_that_score_them(built):
    worker = EngineWorker(built, STEPS)
    worker.handle(ScoreRequest("scored", tuple(b"def main("), False))
    worker.handle(asked(built.config)[0])
    assert len(finish(worker)["request-0"]) == NEW  # and is idle, though a text waits
    worker.compile_rest()
    assert not worker.idle
    reply, _ = worker.step()
    assert reply.request_id == "scored" and reply.scores.logprob.shape == (8,)
    assert worker.idle


def test_memory_for_all_slots_is_tried_before_the_engine_is_ready(built, monkeypatch):
    def start(engine):
        if engine.slots == built.engine.slots:
            raise MemoryError("too many slots")
        return real(engine)

    real = EarlyExitEngine.start
    monkeypatch.setattr(EarlyExitEngine, "start", start)
    with pytest.raises(MemoryError, match="too many slots"):
        EngineWorker(built, STEPS).warm_up()
