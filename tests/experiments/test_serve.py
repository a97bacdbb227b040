"""What the server's launcher says, and what it makes of its flags."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from functools import partial

import httpx
import pytest
from absl import flags
from launchers import call, functions_of
from served import STALL, Scripted

from eejax.common.errors import ConfigError
from eejax.serving import fleets
from eejax.serving.answers import ExitDefaults
from eejax.serving.service import READY, Service, ServiceOptions

serve = functions_of("eejax.experiments.serve")


def test_why_an_engine_ended_is_told_each_time(tmp_path, capsys):
    """And metrics hear of everything."""
    broken, heard = tmp_path / "broken", []

    async def run() -> None:
        watch = serve.report("auto", lambda what, value: heard.append(what))
        options = ServiceOptions(first_pause=0.05)
        service = Service(Scripted(broken=str(broken)), options, watch=watch)
        await service.start()
        capsys.readouterr()
        broken.touch()
        service._engine.process.kill()
        while service.restarts < 3:
            await asyncio.sleep(0.01)
        os.remove(broken)
        while service.state != READY:
            await asyncio.sleep(0.01)
        await service.stop()

    asyncio.run(asyncio.wait_for(run(), 120))
    told = capsys.readouterr().err.splitlines()
    ended = [line for line in told if line.startswith("auto: the engine ended")]
    again = "auto: the engine ended (ValueError: the weights are gone); starting another ..."
    killed = "auto: the engine ended (its process ended with status -9); starting another ..."
    assert ended == [killed, *[again] * (len(ended) - 1)] and len(ended) > 2
    assert "Traceback (most recent call last):" in told  # where it failed
    assert heard.count("restart") == len(ended) and "load" in heard


@pytest.mark.parametrize(
    "given, said",
    [
        (["--grace=nan"], "--grace = nan: must be at least 0 and finite."),
        (["--objective=energy", "--audits=nan"], "--audits = nan: must be in [0, 1]."),
        (["--slots=0"], "--slots = 0: must be an integer of at least 1."),
        (["--context=1"], "--context = 1: must be an integer of at least 2."),
        (["--drafts=-1"], "--drafts = -1: must be an integer of at least 0."),
        (["--objective=energy", "--slots=0"], "--slots = 0: must be an integer of at least 1."),
        (
            ["--objective=energy", "--breaches=101"],
            "--breaches = 101: must be at most 100, the window.",
        ),
        (["--objective=energy", "--drafts=2"], "--drafts = 2: must be left out with --objective."),
        (["--greedy"], "--greedy: requires --objective."),
        (["--reassess=auto"], "--reassess: requires --objective."),
        (["--gate=a"], "--gate = 'a': must be NAME=GATE."),
        (["--gate=b=margin"], "--gate: names ['b'], which no --model does."),
        (["--gate=a=sure"], "--gate: a = 'sure': must be one of 'max_probability', 'margin'"),
        (
            ["--gate=a=margin", "--objective=energy"],
            "--gate = 'a=margin': must be left out with --objective",
        ),
    ],
)
def test_bad_values_name_their_flag(given, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        call("eejax.experiments.serve", "--model=a=/none", "--port=0", *given)


@pytest.mark.parametrize("flag", ["--waiting=-1", "--steps=0", "--max_n=0", "--max_body=0"])
def test_counts_out_of_range_are_refused_as_they_are_parsed(flag):
    number = flag.partition("=")[2]
    with pytest.raises(flags.IllegalFlagValueError, match=f"flag {flag}: {number} is not a"):
        call("eejax.experiments.serve", "--model=a=/none", "--port=0", flag)


def test_defaults_that_a_model_does_not_have_name_their_flag(monkeypatch):
    made, engines = [], serve.engines

    def scripted(*given):
        made.append(engines(*given)[1])
        return {"a": Scripted()}, made[-1]

    monkeypatch.setattr(serve, "engines", scripted)

    def said(*flags):
        with pytest.raises(ConfigError) as caught:
            call("eejax.experiments.serve", "--model=a=/none", "--port=0", *flags)
        return str(caught.value)

    two = "must be one number in [0, 1], or one for each of its 2 early exits."
    assert said("--thresholds=a=0.5,0.6,0.7") == f"--thresholds of 'a' = (0.5, 0.6, 0.7): {two}"
    told = said("--gate=a=router", "--thresholds=a=0.8")
    assert told.startswith("--gate of 'a' = 'router': must be one of 'max_probability'")
    assert told.endswith("`eejax calibrate` trains routers.")
    assert made[-1] == {"a": ExitDefaults(0.8, "router", 0)}


def test_a_signal_while_a_model_loads_lets_the_others_finish(monkeypatch, tmp_path):
    never, answers, threads, lines = tmp_path / "never", {}, [], []

    def ask(address, model):
        body = dict(model=model, prompt=[STALL, 1], max_tokens=40)
        with httpx.Client(trust_env=False, timeout=60) as client:
            answers[model] = client.post(f"{address}/v1/completions", json=body)

    def end(address):
        """Send the signal when the first model answers."""
        with httpx.Client(trust_env=False, timeout=60) as client:
            while client.get(f"{address}/dashboard").json()["models"]["a"]["running"] == 0:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def hear(line):
        lines.append(line)
        if line.startswith("b: loading"):
            address = re.search(r"http://[^/]+", lines[0])[0]
            threads.extend(threading.Thread(target=ask, args=(address, m)) for m in "ab")
            threads.append(threading.Thread(target=end, args=(address,)))
            for thread in threads:
                thread.start()

    builds = {"a": Scripted(), "b": Scripted(until=str(never))}
    monkeypatch.setattr(serve, "engines", lambda *_: (builds, dict.fromkeys("ab", ExitDefaults())))
    monkeypatch.setattr(serve.launch, "say", hear)
    with pytest.raises(SystemExit) as ended:
        call("eejax.experiments.serve", "--model=a=/none", "--model=b=/none", "--port=0")
    for thread in threads:
        thread.join()
    assert ended.value.code == 128 + signal.SIGTERM
    assert answers["a"].status_code == 200, answers["a"].text
    assert answers["a"].json()["usage"]["completion_tokens"] == 40
    assert answers["b"].status_code == 503
    assert not [line for line in lines if line.startswith("listening")]


def test_flags_of_a_controller(monkeypatch):
    made = []
    monkeypatch.setattr(
        fleets, "ServedFleet", lambda models, config, *more, **own: made.append(config)
    )
    monkeypatch.setattr(serve, "serve", lambda *_: asyncio.sleep(0))

    def ask(*flags):
        return call("eejax.experiments.serve", "--model=a=/none", "--objective=energy", *flags)

    ask()
    ask("--candidates=3", "--reassess=7")
    ask("--reassess=auto", "--quality=best:a")
    told = [(a.options.candidates, a.options.interval, a.quality) for a in made]
    assert told == [(2, 150, "best"), (3, 7, "best"), (2, "auto", "best:a")]
    for wrong in ("often", "-3", "0"):
        with pytest.raises(ConfigError, match=f"--reassess = '?{wrong}'?: must be "):
            ask(f"--reassess={wrong}")
    with pytest.raises(ConfigError, match="--quality = 'worst': must be one of 'best'"):
        ask("--quality=worst")


def test_a_limit_that_an_engine_refuses_is_named_as_its_flag(monkeypatch):
    """What it is counted by is known in the engine's process alone."""
    said = "from eejax.common.errors import ConfigError\nraise ConfigError('{}')"
    build = partial(exec, said.format("limits.energy = 5.0: must be left out."))
    monkeypatch.setattr(fleets, "ServedFleet", lambda *_, **__: build)
    with pytest.raises(ConfigError, match="^--limits: energy = 5.0: must be left out"):
        call(
            "eejax.experiments.serve",
            "--model=a=/none",
            "--port=0",
            "--objective=throughput",
            "--limits=energy=5",
        )
