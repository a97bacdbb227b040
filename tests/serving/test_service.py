"""The service around an engine's process: nothing lost, nothing mixed up, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import partial

import pytest
import served
from adding import request
from coroutines import run_by
from served import DIE, STALL, Scripted, said

from eejax.common.errors import ConfigError
from eejax.inference.request import EngineRequest
from eejax.serving import service as s
from eejax.serving.service import EngineUnavailable, QueueFull, Service, ServiceOptions

RUNNER = asyncio.Runner()  # of all tests, as a service belongs to one event loop
run = run_by(RUNNER)


@pytest.fixture(scope="module", autouse=True)
def loop():
    with RUNNER:
        yield


@pytest.fixture(scope="module")
def several():
    """A service of four slots. Starting one takes seconds, and most tests leave it as it is."""
    service = Service(Scripted(), ServiceOptions(waiting=10**4))
    RUNNER.run(service.start())
    yield service
    RUNNER.run(service.stop())


@pytest.fixture(scope="module")
def narrow():
    """A service of one slot, for which as many wait as a test of priorities needs."""
    service = Service(Scripted(slots=1), ServiceOptions(waiting=3))
    RUNNER.run(service.start())
    yield service
    RUNNER.run(service.stop())


async def gathered(service, prompt, limit, **kwargs):
    """(tokens, finish) of a request."""
    tokens, finish = [], None
    async for event in service.stream(request(tuple(prompt), limit), **kwargs):
        tokens += [t.id for t in event.tokens]
        finish = event.finish
    return tokens, finish


def want(prompt, limit):
    return [said(tuple(prompt), i)[0] for i in range(limit)]


async def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@run
async def test_everyone_gets_their_own_tokens_whoever_comes_and_goes(several):
    rng, service, ready = random.Random(0), several, several.ready
    assert (ready.slots, ready.context, service.state) == (4, 64, s.READY)

    async def one(i):
        await asyncio.sleep(rng.random() * 0.2)
        prompt = [1 + i % 90, i % 7, *range(i % 5)]
        limit, leaves = 1 + i % 20, rng.random() < 0.3
        tokens, stream = [], service.stream(request(tuple(prompt), limit))
        async for event in stream:
            tokens += [t.id for t in event.tokens]
            if leaves and tokens:
                await stream.aclose()
                break
        else:
            assert tokens == want(prompt, limit) and event.finish == "length"
            return True
        assert tokens == want(prompt, limit)[: len(tokens)]

    done = await asyncio.gather(*(one(i) for i in range(400)))
    assert sum(map(bool, done)) > 200
    assert service.active == 0
    await until(lambda: service.load == (0, 0, 0, 256))


@run
async def test_priorities_deadlines_and_aborted_requests(narrow):
    service = narrow
    slow = asyncio.create_task(gathered(service, [STALL, 1], 60))
    await until(lambda: service.load.running == 1)
    order = []

    async def note(name, ask):
        async for event in service.stream(ask):
            if event.tokens and name not in order:
                order.append(name)

    low = asyncio.create_task(note("low", request((5,), 3)))
    await asyncio.sleep(0.05)
    high = asyncio.create_task(note("high", request((6,), 3, priority=1)))
    tokens, finish = await gathered(service, [7], 5, seconds=0.1)  # it waits, and its time is up
    assert (tokens, finish) == ([], "deadline")
    slow.cancel()  # who runs: its slot is free for those who wait
    await asyncio.gather(low, high)
    assert order == ["high", "low"]
    tokens, finish = await gathered(service, [STALL, 2], 60, seconds=0.5)
    assert finish == "deadline" and 0 < len(tokens) < 60
    assert tokens == want([STALL, 2], 60)[: len(tokens)]


@run
async def test_an_id_is_free_once_the_engine_reported_its_end(narrow):
    service = narrow
    stream = service.stream(EngineRequest("a", [STALL, 1], 60))
    await anext(stream)
    await stream.aclose()
    refused, tokens = 0, []
    while not tokens:
        try:
            async for output in service.stream(EngineRequest("a", [5], 3)):
                tokens += [t.id for t in output.tokens]
        except ConfigError as error:
            assert "request_id = 'a': must not be the id of an unfinished request" in str(error)
            refused += 1
            await asyncio.sleep(0.01)
    assert refused and tokens == want([5], 3)


@run
async def test_as_many_wait_as_may(narrow):
    service = narrow
    tasks = [asyncio.create_task(gathered(service, [STALL, i], 20)) for i in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="4 requests are under way"):
        await gathered(service, [9], 1)
    assert [finish for _, finish in await asyncio.gather(*tasks)] == ["length"] * 4
    assert (await gathered(service, [9], 1))[1] == "length"


@run
async def test_what_the_engine_refuses_is_an_error_of_one_request(several):
    service = several
    other = asyncio.create_task(gathered(service, [3], 9))
    with pytest.raises(ConfigError, match="prompts"):
        await gathered(service, range(64), 4)
    assert (await other)[0] == want([3], 9)
    assert service.active == 0


@run
async def test_an_engine_that_dies_is_reported_and_started_again():
    told = []

    def watch(name, value):
        told.append((name, value))
        raise BrokenPipeError  # as a print does once nobody reads what is printed

    service = Service(Scripted(), ServiceOptions(first_pause=0.05), watch=watch)
    await service.start()
    process = service._engine.process
    lost = [asyncio.create_task(gathered(service, [STALL, i], 60)) for i in range(6)]
    await until(lambda: service.load.running == 4)
    os.kill(process.pid, signal.SIGKILL)
    assert {finish for _, finish in await asyncio.gather(*lost)} == {"lost"}
    with pytest.raises(EngineUnavailable, match="the engine is dead"):
        await gathered(service, [3], 9)
    await until(lambda: service.state == s.READY)
    assert (await gathered(service, [3], 9))[0] == want([3], 9)
    assert (await gathered(service, [DIE], 9))[1] == "lost"  # a request that kills it
    assert "status 3" in service.failure
    await until(lambda: service.state == s.READY)
    assert (await gathered(service, [4], 9))[0] == want([4], 9)
    states = [value for name, value in told if name == "state"]
    assert states == [s.STARTING, s.READY, s.DEAD, s.READY, s.DEAD, s.READY]
    assert service.restarts == sum(name == "restart" for name, _ in told) == 2
    # What an engine is doing is told until it is ready, of each that is started.
    assert [value for name, value in told if name == "starting"] == ["4 slots"] * 3
    assert told.index(("starting", "4 slots")) < told.index(("state", s.READY))
    await service.stop()


@run
async def test_the_first_requests_are_answered_while_more_slots_compile(tmp_path):
    """They go on in the engine with all slots, and lose nothing."""
    late, told = tmp_path / "late", []
    service = Service(
        Scripted(first=1, until=str(late)),
        ServiceOptions(steps=1),
        watch=lambda *event: told.append(event),
    )
    assert (await service.start()).slots == 4
    assert (await gathered(service, [7], 5))[0] == want([7], 5)
    asked = [[STALL, i] for i in range(6)]
    tasks = [asyncio.create_task(gathered(service, prompt, 40)) for prompt in asked]
    await until(lambda: service.load.running == 1 and service.load.waiting == 5)
    assert "compiled" not in {name for name, _ in told}
    late.touch()
    await until(lambda: service.load.running == 4)
    assert "compiled" in {name for name, _ in told} and not service.doing
    for prompt, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert answer == (want(prompt, 40), "length")
    await service.stop()


@run
async def test_when_to_ask_again_counts_what_a_start_takes():
    service = Service(Scripted(), ServiceOptions(first_pause=0.5))
    assert service.retry_after == 0.5
    ready = await service.start()
    service.ready = ready._replace(seconds=200.0)
    begin = time.monotonic()
    service._engine.process.kill()
    await until(lambda: service.state == s.DEAD)
    with pytest.raises(EngineUnavailable) as refused:
        await gathered(service, [3], 9)
    assert refused.value.after == 200.5
    await until(lambda: service.retry_after == 201.0)  # the next one would wait twice as long
    await until(lambda: service.state == s.READY)
    assert 0.5 < time.monotonic() - begin < 60  # nobody waits so long
    assert service.retry_after == 1.0 + service.ready.seconds
    await service.stop()


@run
async def test_warnings_of_an_engine_are_one_plain_line(capfd):
    warns = "import warnings; warnings.warn('a thing is\\n  not kept')"
    service = Service(partial(exec, warns))
    with pytest.raises(RuntimeError, match="did not start"):  # this builds none
        await service.start()
    await service.stop()
    told = capfd.readouterr().err
    assert "a thing is not kept" in told.splitlines() and "UserWarning" not in told, told


@run
async def test_an_engine_that_hangs_is_ended_and_started_again():
    service = Service(Scripted(), ServiceOptions(first_pause=0.05, silence=2.0))
    await service.start()
    lost = asyncio.create_task(gathered(service, [STALL, 1], 60))
    await until(lambda: service.load.running == 1)
    os.kill(service._engine.process.pid, signal.SIGSTOP)
    assert (await lost)[1] == "lost"
    assert service.failure == "it gave no sign of life for 2 seconds"
    await until(lambda: service.state == s.READY)
    await asyncio.sleep(2.5)  # one with nothing to do is no such engine
    assert (await gathered(service, [4], 9))[0] == want([4], 9)
    assert service.restarts == 1
    await service.stop()


@run
async def test_an_engine_that_cannot_be_built_says_why(tmp_path):
    broken = tmp_path / "broken"
    broken.touch()
    service = Service(Scripted(broken=str(broken)), ServiceOptions(first_pause=0.05))
    with pytest.raises(RuntimeError, match="(?s)did not start: .*ValueError: the weights are gone"):
        await service.start()
    await service.stop()
    broken.unlink()
    service = Service(Scripted(broken=str(broken)), ServiceOptions(first_pause=0.05))
    await service.start()
    broken.touch()
    service._engine.process.kill()
    await until(lambda: service.restarts > 1)  # it tries again and again
    assert service.state == s.DEAD and "the weights are gone" in service.failure
    broken.unlink()
    await until(lambda: service.state == s.READY)
    assert (await gathered(service, [4], 9))[0] == want([4], 9)
    await service.stop()


@run
async def test_what_runs_is_finished_and_nobody_else_comes_in():
    service = Service(Scripted(), ServiceOptions(grace=60))
    await service.start()
    process = service._engine.process
    tasks = [asyncio.create_task(gathered(service, [STALL, i], 9)) for i in range(8)]
    await until(lambda: service.load.running == 4)
    stopping = asyncio.create_task(service.stop())
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="the engine is draining"):
        await gathered(service, [3], 9)
    assert [len(tokens) for tokens, _ in await asyncio.gather(*tasks)] == [9] * 8
    await stopping
    assert not process.is_alive() and service.state == s.STOPPED


@run
async def test_who_is_not_done_in_time_is_told():
    service = Service(Scripted(), ServiceOptions(grace=0.2))
    await service.start()
    task = asyncio.create_task(gathered(service, [STALL, 1], 60))
    await until(lambda: service.load.running == 1)
    await service.stop()
    assert (await task)[1] == "lost"


def test_who_forgets_to_stop_a_service_ends_all_the_same(tmp_path):
    import subprocess
    import sys

    file = tmp_path / "forgets.py"
    file.write_text(f"""
import asyncio, sys
sys.path.insert(0, {os.path.dirname(served.__file__)!r})
from served import Scripted
from eejax.serving.service import Service
if __name__ == "__main__":
    asyncio.run(Service(Scripted()).start())
""")
    subprocess.run([sys.executable, "-P", str(file)], timeout=60, check=True)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("build", ["Scripted()", "partial(exec, SLOW)"])
def test_an_engine_ends_with_the_process_that_asked_it(build, tmp_path):
    """Whether it runs, or is made still."""
    import subprocess
    import sys

    code = f"""
import asyncio, os, sys, time
from functools import partial
sys.path.insert(0, {os.path.dirname(served.__file__)!r})
from served import Scripted
from eejax.serving.service import Service
SLOW = "import time; print('making', flush=True); time.sleep(300)"
async def main():
    service = Service({build})
    task = asyncio.create_task(service.start())
    while service._engine is None or (service.ready is None and {build != "Scripted()"} is False):
        await asyncio.sleep(0.1)
    print(service._engine.process.pid, flush=True)
    await asyncio.sleep(2)
    os.kill(os.getpid(), 9)
if __name__ == "__main__":
    asyncio.run(main())
"""
    file = tmp_path / "dies.py"
    file.write_text(code)
    begun = subprocess.Popen([sys.executable, "-P", str(file)], stdout=subprocess.PIPE, text=True)
    with begun as process:
        pid = int(next(line for line in process.stdout if line.strip().isdigit()))
        assert not gone(pid)
        process.wait(60)
    end = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
