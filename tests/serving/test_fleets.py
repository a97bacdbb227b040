"""Several models as one behind the server: nobody is lost, whatever serves meanwhile."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import re
import signal
import time
from functools import wraps
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from adding import request
from launchers import call
from served import Scripted
from server_threads import serving
from tiny_fleets import FLEET, TinyFleet

from eejax.checkpoint.language_model import LanguageModel
from eejax.common.errors import ConfigError, DataError
from eejax.data.tokenizers import ByteTokenizer
from eejax.experiments import prompt_files
from eejax.experiments.serving_runs import server
from eejax.helios.build import FleetConfig
from eejax.helios.choices import ControllerOptions
from eejax.helios.repository import Repository
from eejax.inference import Generator
from eejax.inference.policy import ExitPolicy
from eejax.serving.fleets import check_alike, template_of
from eejax.serving.http import HttpOptions
from eejax.serving.service import READY, Service, ServiceOptions


def run(test):
    @wraps(test)
    def plain(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 300))

    return plain


@pytest.fixture(scope="module")
def fleet():
    """(address, service) of a server of a fleet of the same model twice."""
    with serving(TinyFleet(alike=True)) as found:
        yield found


@contextlib.asynccontextmanager
async def client_of(address):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        yield client


def asked(prompt, limit: int, **more) -> dict:
    return dict(model="m", prompt=prompt, max_tokens=limit, temperature=0, ignore_eos=True) | more


async def streamed(client, prompt, limit: int, **more) -> tuple[list[dict], list[int], str]:
    """(exits, offsets, text, finish, tokens by usage) of a request."""
    body = asked(prompt, limit, stream=True, return_exits=True, logprobs=0, **more)
    exits, offsets, text, finish, count = [], [], "", None, None
    async with client.stream(
        "POST", "/v1/completions", json=body | dict(stream_options=dict(include_usage=True))
    ) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            if not chunk["choices"]:
                count = chunk["usage"]["completion_tokens"]
                continue
            (choice,) = chunk["choices"]
            assert choice["index"] == 0 and finish is None  # nothing comes behind the end
            exits += choice["exits"]
            offsets += choice["logprobs"]["text_offset"]
            text += choice["text"]
            finish = choice["finish_reason"]
    return exits, offsets, text, finish, count


async def everybody(address, clients: int, each: int) -> tuple[list, dict]:
    """What requests of so many clients were answered, and what the dashboard says then."""
    async with client_of(address) as client:

        async def one(i: int) -> list:
            found = []
            for r in range(each):
                k = i * each + r
                prompt, limit = [65 + k % 50, 97 + k % 7, *range(48, 48 + k % 9)], 1 + k % 21
                got = await streamed(client, prompt, limit)
                assert (len(got[0]), got[3], got[4]) == (limit, "length", limit), got
                assert len(got[1]) == limit and got[1] == sorted(got[1])
                found.append((prompt, limit, got[2], got[0]))
            return found

        found = await asyncio.gather(*map(one, range(clients)))
        told = (await client.get("/dashboard")).json()["models"]["m"]
        return sum(found, []), told


def kinds(told: dict) -> collections.Counter:
    return collections.Counter(d["kind"] for d in told["fleet"]["decisions"])


@run
async def test_clients_get_every_token_while_models_and_depths_change(fleet):
    found, told = await everybody(fleet[0], 8, 6)
    decisions = told["fleet"]["decisions"]
    assert {d["model"] for d in decisions} == {*FLEET}
    assert [d["layers"] for d in decisions].count(2) > 1 < kinds(told)["evaluate"], decisions
    member = TinyFleet(alike=True).members()["small"]
    generator = Generator.make(member.params, member.config, "posthoc")
    prompts = [prompt for prompt, *_ in found]
    want = generator.generate(prompts, 21, threshold=0.0, prefill_exit=True)
    tokenizer, whole = ByteTokenizer(), 0
    for i, (_, limit, text, exits) in enumerate(found):
        assert {e["layers"] for e in exits} == {2}
        tied = np.flatnonzero(want.margins[i, :limit] < 1e-3)
        n = int(tied[0]) if len(tied) else limit
        whole += n == limit
        known = tokenizer.decode(want.tokens[i, :n].tolist()).rstrip("\ufffd")
        assert text.startswith(known), (i, text, known)
    assert whole > len(found) / 2


@pytest.mark.parametrize(
    "change, param, said",
    [
        (dict(thresholds=0.0), "thresholds", "thresholds = 0.0: must be left out: the server"),
        (dict(engine="full"), "engine", "engine = 'full': must be left out"),
        (dict(exits=[]), "exits", "exits = []: must be left out"),
        (dict(gate="margin"), "gate", "gate = 'margin': must be left out"),
        (dict(min_layers=1), "min_layers", "min_layers = 1: must be left out"),
        (dict(objective="fast"), "objective", "objective = \"fast\": Input should be 'throughput'"),
        (dict(objective="goodput"), "objective", 'objective = "goodput": Input should be'),
        (dict(stop_token_ids=[300]), "stop_token_ids", "stop_token_ids = (300,): must be a"),
        (dict(echo=True, logprobs=1), "echo", "echo = true: excludes logprobs here"),
    ],
)
def test_what_a_fleet_does_not_take_is_named(fleet, change, param, said):
    answer = httpx.post(f"{fleet[0]}/v1/completions", json=asked("ab", 3, **change), timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(said), error


def test_a_member_cannot_be_asked_by_its_name(fleet):
    answer = httpx.post(f"{fleet[0]}/v1/completions", json=asked("a", 3, model="small"), timeout=60)
    said = answer.json()["error"]["message"]
    assert answer.status_code == 404 and said.startswith("model = 'small': is one of those that")


@run
async def test_objectives_of_requests_and_plain_fields(fleet):
    async with client_of(fleet[0]) as client:
        for name in ("throughput", "response_time", "accuracy", "energy", None):
            body = asked("ab", 5, objective=name, return_exits=True, min_layers=0)
            answer = (await client.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert len(choice["exits"]) == 5 and choice["finish_reason"] == "length"
            assert {token["model"] for token in choice["exits"]} <= {*FLEET}
        both = asked(["ab", "c"], 4, n=2, echo=True, presence_penalty=1.0, logit_bias={"70": 3.0})
        answer = (await client.post("/v1/completions", json=both)).json()
        assert [c["text"][0] for c in answer["choices"]] == ["a", "a", "c", "c"]
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["layers"], model["exits"], model["max_model_len"]) == (3, [2], 32)
        assert model["members"] == dict.fromkeys(FLEET, dict(layers=3, exits=[2]))


@run
async def test_metrics_of_what_serves(fleet):
    async with client_of(fleet[0]) as client, asyncio.timeout(100):
        page = ""
        # Of the choice that serves, whose answers are looked at again once one has ended.
        while not re.search(r"^eejax_fleet_perplexity{.*} \d", page, re.M):
            await asyncio.gather(*(streamed(client, "abc", 9) for _ in range(12)))
            page = (await client.get("/metrics")).text
        told = (await client.get("/dashboard")).json()["models"]["m"]

    def value(name, labels):
        return float(re.search(rf"^eejax_{name}{{{labels}}} (\S+)$", page, re.M)[1])

    layers = {name: value("fleet_layers", f'member="{name}",model="m"') for name in FLEET}
    assert sorted(layers.values())[0] == 0 and max(layers.values()) in (2, 3)
    assert value("depth_loaded_layers", 'model="m"') == max(layers.values())
    assert value("fleet_slots", 'model="m"') == 2
    # Of those alone that asked for accuracy, while not all was loaded.
    assert 0 <= value("fleet_below_threshold_ratio", 'model="m"') < 0.5
    assert value("fleet_decisions_total", 'kind="evaluate",model="m"') > 2
    left = {name: f'member="{name}",model="m"}}' for name in FLEET}
    assert any(f'eejax_exit_tokens_total{{layer="2",{labels}' in page for labels in left.values())
    # Answers are looked at again: those of evaluations, which never end here.
    least, most = (
        value(f"fleet_quality_shortfall{kind}_ratio", 'model="m"') for kind in ("", "_bound")
    )
    assert 0 <= least <= most <= 1 and value("fleet_perplexity", 'model="m"') >= 1
    own = told["fleet"]
    assert own["layers"] == told["loaded"] and own["decisions"][-1]["why"]
    assert {span["member"] for span in told["spans"]} <= {*FLEET}
    times = [d["time"] for d in own["decisions"]]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 600


@run
async def test_who_leaves_or_is_late_frees_the_slot_and_the_first_come_first(fleet):
    async with client_of(fleet[0]) as client:

        def load():
            return fleet[1].load

        async def until(done):
            async with asyncio.timeout(60):
                while not done():
                    await asyncio.sleep(0.01)

        late = await client.post("/v1/completions", json=asked("a", 30, timeout=1e-3))
        assert late.json()["choices"][0]["finish_reason"] == "timeout"
        await until(lambda: (load().running, load().waiting) == (0, 0))
        many = asked(["a"] * 60, 31)
        leaving = asyncio.create_task(client.post("/v1/completions", json=many))
        await until(lambda: fleet[1].active > 20)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: (load().running, load().waiting, fleet[1].active) == (0, 0, 0))
        order = []

        async def note(name, prompts, **more):
            body = asked(prompts, 31, **more)
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            order.append(name)

        low = asyncio.create_task(note("low", ["a"] * 60))
        await until(lambda: fleet[1].active > 20)
        await asyncio.gather(low, note("high", ["a"], priority=1))
        assert order == ["high", "low"]


@pytest.mark.slow
@run
async def test_many_clients_get_every_token_of_unlike_models():
    with serving(TinyFleet(slots=4)) as (address, service):
        found, told = await everybody(address, 64, 4)
        stops = {stop for config in FLEET.values() for stop in config.exit_boundaries}
        assert (
            {e["layers"] for *_, exits in found for e in exits}
            == stops
            == {*told["exit_boundaries"]}
        )
        seen = kinds(told)
        assert seen["evaluate"] > 4 and seen["grow"] + seen["switch"] > 0, seen
        assert told["fleet"]["below"] > 0
        assert (service.load.running, service.load.waiting, service.active) == (0, 0, 0)


@pytest.mark.slow
@run
async def test_a_fleet_that_hangs_is_ended_and_started_again():
    service = Service(TinyFleet(alike=True), ServiceOptions(first_pause=0.05, silence=5.0))
    await service.start()

    async def one(limit: int) -> tuple[int, str]:
        count, finish = 0, ""
        async for event in service.stream(request((65, 66), limit)):
            count, finish = count + len(event.tokens), event.finish
        return count, finish

    assert await one(20) == (20, "length")
    lost = [asyncio.create_task(one(30)) for _ in range(6)]
    await asyncio.sleep(0)
    os.kill(service._engine.process.pid, signal.SIGSTOP)
    assert {finish for _, finish in await asyncio.gather(*lost)} == {"lost"}
    async with asyncio.timeout(200):
        while service.state != READY:
            await asyncio.sleep(0.1)
    assert await one(20) == (20, "length") and service.restarts == 1
    with pytest.raises(ConfigError, match="stop_token_ids"):  # which ends nobody's else
        async for _ in service.stream(request((65,), 3, stop_token_ids=(300,))):
            pass
    with pytest.raises(ConfigError, match="policy = .*: must be None: the server chooses"):
        policy = ExitPolicy.make(FLEET["large"], 1)
        async for _ in service.stream(request((65,), 3, policy)):
            pass
    under_way = [asyncio.create_task(one(30)) for _ in range(6)]
    await asyncio.sleep(0)
    await service.stop(60)
    assert await asyncio.gather(*under_way) == [(30, "length")] * 6


@pytest.mark.slow
def test_the_launcher_serves_runs_as_one(small_run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps(dict(prompt=f"def f{i}(x): return x", task="other")) for i in range(30)]
    prompts.write_text("\n".join([*lines, "import os", ""]))
    flags = (
        f"--model=small={small_run}",
        f"--model=large={small_run}",
        "--objective=goodput",
        "--limits=ttft_p99=100,accuracy=0.5",
        f"--prompts={prompts}",
        "--slots=2",
        "--reassess=5",
        f"--repository={tmp_path / 'helios.db'}",
        "--budget=1G",
        "--thresholds=small=0.3,0.5",
    )
    free = [flag for flag in flags if not flag.startswith("--budget")]
    with pytest.raises(ConfigError, match="--budget = 1024: must be [0-9]+ bytes at least, which"):
        call("eejax.experiments.serve", *free, "--budget=1K", "--port=0")
    with server(*flags) as (process, address):

        async def ask() -> None:
            async with client_of(address) as client:
                (model,) = (await client.get("/v1/models")).json()["data"]
                assert model["id"] == "auto" and {*model["members"]} == {"small", "large"}
                some = [streamed(client, "def f(", 25, model="auto") for _ in range(12)]
                assert [got[-1] for got in await asyncio.gather(*some)] == [25] * 12
                last = [
                    asyncio.create_task(streamed(client, "def f(", 90, model="auto"))
                    for _ in range(4)
                ]
                while True:  # until they run
                    if 'requests_running{model="auto"} 2.0' in (await client.get("/metrics")).text:
                        break
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                assert [got[-1] for got in await asyncio.gather(*last)] == [90] * 4

        asyncio.run(ask())
        assert process.wait(60) == 0
    kept = Repository(tmp_path / "helios.db")
    assert kept.history("small") or kept.history("large")  # of whichever was faster here


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--limits=ttft=1"], "--limits: requires --objective"),
        (["--nogreedy"], "--greedy: requires --objective"),
        (["--candidates=2"], "--candidates: requires --objective"),
        (["--objective=goodput"], "objective = 'goodput': needs limits of ttft_p99 and accuracy"),
        (["--objective=energy", "--limits=speed=1"], "limits = 'speed': must be of throughput"),
        (["--objective=energy", "--drafts=2"], "--drafts = 2: must be left out with --objective"),
        (["--objective=energy", "--lookup=2"], "--lookup = 2: must be left out with --objective"),
        (["--lookup=-1"], "--lookup = -1: must be"),
        (["--objective=energy", "--budget=much"], "--budget = 'much': must be a number of bytes"),
        (
            ["--objective=energy", "--limits=accuracy=2"],
            "--limits: accuracy = 2.0: must be",
        ),
        (["--objective=energy", "--limits=ttft=fast"], "--limits: ttft = 'fast': must be a number"),
        (
            ["--objective=energy", "--limits=memory=big"],
            "--limits: memory = 'big': must be a number of bytes, as 500M or 2G",
        ),
        (
            ["--objective=energy", "--limits=ttft=1,"],
            "--limits = '': must be METRIC=VALUE, or several with a comma between",
        ),
        (["--thresholds=a"], "--thresholds = 'a': must be NAME=T or NAME=T,T"),
        (["--objective=energy", "--repository="], "--repository = '': must name a file"),
        (
            ["--objective=energy", "--repository=/etc/passwd"],
            "--repository: /etc/passwd: cannot be",
        ),
        (["--objective=energy", "--prompts=/none"], "--prompts = '/none': cannot be read"),
    ],
)
def test_flags_that_do_not_go_together(flags, said):
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        call("eejax.experiments.serve", "--model=a=/none", *flags)


@run
async def test_a_server_of_one_model_chooses_nothing():
    service = Service(Scripted())
    await service.start()
    with pytest.raises(ConfigError, match="objective = 'accuracy': must be None: there is one"):
        async for _ in service.stream(request((5,), 3, objective="accuracy")):
            pass
    assert not service.ready.chooses and service.report is None
    await service.stop()


def test_models_share_one_valid_chat_template(tmp_path):
    tokenizer = ByteTokenizer()
    models = {name: SimpleNamespace(source=tmp_path / name, tokenizer=tokenizer) for name in "abc"}
    for model in models.values():
        model.source.mkdir()
    assert template_of(models) is None
    for name in "ab":
        (tmp_path / name / "chat_template.jinja").write_text("{{ messages }}")
    assert template_of(models) == ("{{ messages }}", dict(tokenizer.special))
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages[0] }}")
    with pytest.raises(ConfigError, match="chat template of 'b' = .*must be that of 'a'"):
        template_of(models)
    for name in "ab":
        (tmp_path / name / "chat_template.jinja").write_text("{{ messages")
    with pytest.raises(ConfigError, match="chat_template"):
        template_of(models)


def test_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('plain\n\n{"prompt": "of JSON", "task": 3}\n')
    assert prompt_files.texts("prompts", str(file)) == ["plain", "of JSON"]
    whole = json.dumps("pair \U0001f600")  # both halves
    file.write_text(f'{{"prompt": {whole}}}')
    assert "\\ud83d" in whole and prompt_files.texts("prompts", str(file)) == ["pair \U0001f600"]
    for text, said in (
        ("\n", "must have a line"),
        ("{}", "line 1 must have a text"),
        ("{", "line 1 is not a readable JSON"),
        ('a\n{"prompt": "x\\ud800y"}', r"prompts'?: line 2 has \\ud800 in its prompt"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=f"--prompts = .*{said}"):
            prompt_files.texts("prompts", str(file))


def test_models_of_one_tokenizer_alone():
    config = FLEET["small"]

    def opened(config, **own):
        return LanguageModel(config, {}, ByteTokenizer(**own))

    same = {"a": opened(config), "b": opened(FLEET["large"])}
    check_alike(same)
    other = same | {"c": opened(config, eos_id=10)}
    # It begins with the flag to be mended: --tokenizer is for models that have none.
    told = "model: the tokenizer of 'c' = 'bytes-256-10': must be that of 'a', 'bytes-257'"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
        check_alike(other)

    class EndsOtherwise(ByteTokenizer):
        end_ids = (5, 6)

    other = same | {"c": LanguageModel(config, {}, EndsOtherwise())}
    told = r"^model: the set of end tokens of 'c' = \[5, 6\]: must be that of 'a', \[256\]"
    with pytest.raises(ConfigError, match=told):
        check_alike(other)
    other = same | {"c": opened(config.replace(vocab_size=300))}
    told = "^model: the vocabulary of 'c' = 300: must be that of 'a', 257"
    with pytest.raises(ConfigError, match=told):
        check_alike(other)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: HttpOptions(keys="secret"), "HttpOptions.keys = '(hidden)': must be a tuple"),
        (lambda: HttpOptions(keys=("a", "")), "HttpOptions.keys = 'an empty one': must be strings"),
        (lambda: HttpOptions(n=0), "HttpOptions.n = 0: must be in [1, 2^31)"),
        (lambda: ServiceOptions(grace="30"), "ServiceOptions.grace = '30': must be a number"),
        (lambda: ControllerOptions(greedy="no"), "ControllerOptions.greedy = 'no': must be True"),
        (lambda: ControllerOptions(budget="8G"), "ControllerOptions.budget = '8G': must be a numb"),
        (lambda: ControllerOptions(breaches=101), "ControllerOptions.breaches = 101: must be at m"),
        (lambda: FleetConfig(audits="0.1"), "FleetConfig.audits = '0.1': must be a number"),
        (
            lambda: FleetConfig(limits={"accuracy": "0.9"}),
            "FleetConfig.limits = {'accuracy': '0.9'}: must be a mapping of strings to numbers",
        ),
    ],
)
def test_options_of_another_type_are_named(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(message)
