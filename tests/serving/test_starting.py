"""A server's pages while its engine starts."""

from __future__ import annotations

import asyncio

import pytest
from coroutines import run_by
from served import Scripted
from server_clients import TEMPLATE, client_of, text

from eejax.serving.service import Service, ServiceOptions

RUNNER = asyncio.Runner()  # of all tests, as a service belongs to one event loop
run = run_by(RUNNER)


@pytest.fixture(scope="module", autouse=True)
def loop():
    with RUNNER:
        yield


@run
async def test_requests_wait_for_an_engine_that_starts(tmp_path):
    late = tmp_path / "late"
    service = Service(Scripted(template=TEMPLATE, until=str(late)), ServiceOptions())
    async with client_of(service) as client:
        asked = dict(model="m", prompt="abc", max_tokens=3)
        assert (await client.get("/health")).json() == {"m": {"state": "stopped"}}
        assert (await client.post("/v1/completions", json=asked)).status_code == 503
        service.announce()
        early = asyncio.create_task(client.post("/v1/completions", json=asked))
        await asyncio.sleep(0.05)
        assert (await client.get("/health")).json() == {"m": {"state": "starting"}}
        starting = asyncio.create_task(service.start())
        while not service.doing:
            await asyncio.sleep(0.01)
        found = await client.get("/health")
        assert found.status_code == 503
        assert found.json() == {"m": {"state": "starting", "doing": "4 slots"}}
        assert (await client.get("/dashboard")).json()["models"]["m"]["doing"] == "4 slots"
        waiting = [early] + [
            asyncio.create_task(client.post(path, json=body))
            for path, body in (
                ("/tokenize", dict(model="m", prompt="abc")),
                ("/v1/completions", asked | dict(timeout=0.05)),
            )
        ]
        late_answer = await waiting.pop()
        assert late_answer.status_code == 408
        assert "the engine was not ready in time" in late_answer.text
        assert not any(task.done() for task in waiting)
        late.touch()
        answer, tokens = await asyncio.gather(*waiting)
        assert answer.json()["choices"][0]["text"] == text(b"abc", 3)
        assert tokens.json()["tokens"] == [*b"abc"]
        await starting
        await service.until_compiled()
        assert (await client.get("/health")).json() == {"m": {"state": "ready"}}
    await service.stop()


@run
async def test_requests_that_wait_for_a_start_that_never_comes_get_503():
    service = Service(Scripted(), ServiceOptions())
    async with client_of(service) as client:
        service.announce()
        asked = dict(model="m", prompt="abc", max_tokens=3)
        waiting = asyncio.create_task(client.post("/v1/completions", json=asked))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await service.stop(0)
        assert (await waiting).status_code == 503


@run
async def test_requests_that_wait_for_a_start_that_fails_get_503(tmp_path):
    late, broken = tmp_path / "late", tmp_path / "broken"
    service = Service(Scripted(until=str(late), broken=str(broken)), ServiceOptions())
    async with client_of(service) as client:
        starting = asyncio.create_task(service.start())
        while not service.doing:
            await asyncio.sleep(0.01)
        asked = dict(model="m", prompt="abc", max_tokens=3)
        waiting = asyncio.create_task(client.post("/v1/completions", json=asked))
        await asyncio.sleep(0.05)
        service._engine.process.kill()
        with pytest.raises(RuntimeError, match="did not start"):
            await starting
        assert (await waiting).status_code == 503
