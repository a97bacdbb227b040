"""Replicas on a Ray cluster of this machine's own, and whoever asks them."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext

import httpx
import numpy as np
import openai
import pytest
from processes import free_port
from served import DIE, STALL, Scripted, said

from eejax.checkpoint.model import load_run
from eejax.common.errors import ConfigError
from eejax.inference import Generator
from eejax.serving.answers import ExitDefaults, checked_build
from eejax.serving.service import Service

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
SERVE = pytest.importorskip("ray.serve", reason="needs ray[serve]")

# Ray runs in a process of its own, that a setting of Ray's is nobody else's, and that all that Ray
# starts ends with it. It is told on its standard input how many replicas there are to be.
CLUSTER = """
import sys

import ray
from ray import serve
from served import Scripted

from eejax.serving import ray as replicas
from eejax.serving.service import ServiceOptions

folder, port = sys.argv[1:]
ray.init(
    num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=folder,
    log_to_driver=False,
)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
own = dict(ray_actor_options={"num_cpus": 0.5}, graceful_shutdown_wait_loop_s=0.2)
# Engines that end stay away: what brings them back is Ray.
options = ServiceOptions(waiting=28, steps=2, first_pause=300)
for line in sys.stdin:
    kind, told = line.split()
    if kind == "scripted":
        app = replicas.application({"m": Scripted()}, options, num_replicas=int(told), **own)
        serve.run(app, name="scripted", route_prefix="/")
    else:
        models = {"real": {"source": told, "slots": 2}}
        app = replicas.build({"models": models, "thresholds.real": "0.2", "deployment": own})
        serve.run(app, name="real", route_prefix="/real")
    print("done", flush=True)
serve.shutdown()
ray.shutdown()
"""


def stat(pid: int) -> tuple[str, int]:
    """(state, parent) of a process; ("", 0) where there is none."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    state, parent, *_ = text.rpartition(")")[2].split()
    return state, int(parent)


def below(pid: int) -> set[int]:
    """Processes that a process has started, and theirs."""
    parents = {int(p.name): stat(int(p.name))[1] for p in pathlib.Path("/proc").glob("[0-9]*")}
    found, more = set(), {pid}
    while more:
        more = {child for child, parent in parents.items() if parent in more}
        found |= more
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if stat(pid)[0] not in ("", "Z")}


def until(condition, seconds=60):
    """What a condition is, once that is something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
    return found


class Cluster:
    def __init__(self, folder: pathlib.Path):
        token = folder / "token"  # or Ray would make one for all clusters of the user
        token.write_text(secrets.token_hex(32))
        self.port, support = free_port(), pathlib.Path(__file__).parents[1] / "support"
        paths = [str(support), os.environ.get("PYTHONPATH")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback, as on those systems
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # it ends workers where others take the memory
        }
        environment.pop("RAY_ADDRESS", None)
        self.log = folder / "log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", CLUSTER, str(folder / "ray"), str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def order(self, kind: str, told: object) -> None:
        print(kind, told, file=self.process.stdin, flush=True)

    def wait(self) -> None:
        """Until an order is carried out."""
        assert "done\n" in self.process.stdout, self.log.read_text()  # Ray says things too

    def replicas(self) -> set[int]:
        """Processes of the scripted engine's replicas."""

        def title(pid):
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()

        named = b"ServeReplica:scripted:"
        return {p for p in alive(below(self.process.pid)) if named in title(p)}

    def close(self) -> None:
        """Ends it, as it wants to or not, and says if something outlived it."""
        started = below(self.process.pid)
        self.process.stdin.close()
        try:
            status = self.process.wait(60)
        finally:
            started |= below(self.process.pid)
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            try:
                until(lambda: not alive(started), 20)
            finally:
                for pid in alive(started):
                    os.kill(pid, signal.SIGKILL)
        assert status == 0, self.log.read_text()


@pytest.fixture(scope="module")
def cluster(request):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="eejax-"))  # paths of sockets are short
    cluster = Cluster(folder)
    try:
        cluster.order("scripted", 2)
        # It is trained while Ray starts.
        cluster.order("real", request.getfixturevalue("small_run"))
        cluster.wait()
        cluster.wait()
        yield cluster
    finally:
        try:
            cluster.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(cluster):
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        yield client


def text(prompt: bytes, n: int) -> str:
    return bytes(said(tuple(prompt), i)[0] for i in range(n)).decode()


def shown(lines) -> str:
    """The text of server-sent events, which end with [DONE]."""
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def metric(client, name: str, label: str = "") -> dict[str, float]:
    """Sums of a metric's rows that have a label, by replicas, of which there are two."""
    found: dict[str, float] = {}
    while len(found) < 2:
        page = client.get("/metrics").text
        rows = re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE)
        replica = re.search(r'replica="(\w+)"', page)[1]
        found[replica] = sum(float(value) for labels, value in rows if label in labels)
    return found


@pytest.mark.slow
def test_each_gets_its_own_answer_from_one_of_two_replicas(cluster):
    async def ask(client, i):
        prompt, n = b"%d is asked" % i, 5 + i % 20
        asked = dict(model="m", prompt=prompt.decode(), max_tokens=n)
        if i % 2:
            answer = await client.post("/v1/completions", json=asked)
            got = answer.json()["choices"][0]["text"]
        else:
            asked |= dict(stream=True)
            async with client.stream("POST", "/v1/completions", json=asked) as answer:
                got = shown([line async for line in answer.aiter_lines()])
        assert (answer.status_code, got) == (200, text(prompt, n))
        assert len(answer.headers["x-request-id"].split(", ")) == 1
        return answer.headers["x-replica"]

    async def all_of_them():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            seen = set()  # a proxy may hear late of a replica that has just started
            while len(seen) < 2:
                seen |= {*await asyncio.gather(*(ask(client, i) for i in range(8)))}
            return await asyncio.gather(*(ask(client, i) for i in range(48)))

    names = asyncio.run(all_of_them())
    assert len(set(names)) == 2 and all(names.count(name) >= 5 for name in set(names))


@pytest.mark.slow
def test_a_client_of_openais(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["m"]
        whole = client.completions.create(model="m", prompt="abc", max_tokens=9)
        assert whole.choices[0].text == text(b"abc", 9)
        assert whole.usage.completion_tokens == 9
        parts = client.completions.create(model="m", prompt="abc", max_tokens=9, stream=True)
        assert "".join(p.choices[0].text for p in parts) == text(b"abc", 9)
        with pytest.raises(openai.NotFoundError, match="there is none of this name"):
            client.completions.create(model="x", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="m", prompt="a", temperature=-1)
        assert caught.value.param == "temperature"


@pytest.mark.slow
def test_a_model_is_opened_in_its_replica(cluster, small_run):
    found = load_run(small_run)
    prompt = found.tokenizer.encode("def f(").tolist()
    want = Generator.make(found.params, found.config, "posthoc").generate(
        [prompt], 12, threshold=0.2, stop_token_ids=found.tokenizer.end_ids
    )
    tied = np.flatnonzero(want.margins[0] < 1e-4)
    n = int(tied[0]) if len(tied) else int(want.lengths[0])
    with openai.OpenAI(base_url=f"{cluster.url}/real/v1", api_key="none") as client:
        asked = dict(model="real", prompt=prompt, max_tokens=12, temperature=0)
        got = client.completions.create(**asked, extra_body=dict(return_exits=True)).choices[0]
        streamed = "".join(
            p.choices[0].text for p in client.completions.create(**asked, stream=True)
        )
    layers = [found.config.exit_boundaries[e] for e in want.exits[0, :n]]
    assert [e["layers"] for e in got.model_extra["exits"]][:n] == layers
    assert streamed == got.text
    if not len(tied):
        assert got.text == found.tokenizer.decode(want.tokens[0, :n].tolist())


@pytest.mark.slow
def test_too_many_are_refused_as_by_a_server_without_ray(cluster):
    async def ask(client, i):
        asked = dict(model="m", prompt=[STALL, i], max_tokens=2)
        return await client.post("/v1/completions", json=asked)

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(110)))

    answers = asyncio.run(all_of_them())
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 32
    for i, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == text(bytes([STALL, i]), 2)
        else:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert answer.headers["retry-after"] == "1"


@pytest.mark.slow
def test_who_disconnects_frees_the_slot(client):
    def ends():
        return sum(metric(client, "eejax_requests_total", 'finish="aborted"').values())

    before = ends()
    asked = dict(model="m", prompt=[STALL, 1], max_tokens=60)
    with client.stream("POST", "/v1/completions", json=asked | dict(stream=True)) as answer:
        next(answer.iter_lines())
    until(lambda: ends() == before + 1, 10)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=asked, timeout=0.5)
    until(lambda: ends() == before + 2, 10)
    until(lambda: not any(metric(client, "eejax_requests_running").values()), 2)


def ask_until_replaced(client, known: set[str]) -> tuple[int, int]:
    """(refused, answered) of requests until a replica that is not known has answered."""
    refused, answered, end = 0, 0, time.monotonic() + 60
    while time.monotonic() < end:
        prompt = b"request %d" % answered
        asked = dict(model="m", prompt=prompt.decode(), max_tokens=6)
        answer = client.post("/v1/completions", json=asked)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == text(prompt, 6)
            answered += 1
            if answer.headers["x-replica"] not in known:
                return refused, answered
        else:
            assert answer.status_code in (500, 503)
            refused += 1
        time.sleep(0.02)
    raise AssertionError("nothing came in its place")


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_while_the_other_answers(cluster, client):
    known, before = set(metric(client, "eejax_engine_up")), cluster.replicas()
    lost = min(before)
    gone = {lost, *below(lost)}
    assert len(before) == 2 and len(gone) > 1  # with its engine
    os.kill(lost, signal.SIGKILL)
    until(lambda: not alive(gone), 20)
    refused, answered = ask_until_replaced(client, known)
    assert refused <= 2 and answered >= 20
    assert before & cluster.replicas() == before - {lost}
    assert len(known & set(metric(client, "eejax_engine_up"))) == 1


@pytest.mark.slow
def test_a_replica_whose_engine_ended_is_replaced(cluster, client):
    known = set(metric(client, "eejax_engine_up"))
    answer = client.post("/v1/completions", json=dict(model="m", prompt=[DIE], max_tokens=2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    _, answered = ask_until_replaced(client, known)
    assert answered >= 20
    after = set(metric(client, "eejax_engine_up"))
    assert after & known == known - {answer.headers["x-replica"]}


@pytest.mark.slow
def test_who_makes_room_for_another_version_answers_what_is_under_way(cluster):
    async def ask(client, i):
        asked = dict(model="m", prompt=[STALL, i], max_tokens=40, stream=True)
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            if i == 5:
                cluster.order("scripted", 1)
            got += [line async for line in lines]
        assert shown(got) == text(bytes([STALL, i]), 40)
        return answer.headers["x-replica"]

    async def all_of_them():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(6)))

    before = cluster.replicas()
    gone = before.union(*map(below, before))
    assert len(set(asyncio.run(all_of_them()))) == 2
    cluster.wait()
    until(lambda: not alive(gone), 30)
    assert len(cluster.replicas()) == 1
    cluster.order("scripted", 2)
    cluster.wait()


def test_a_configuration_says_what_is_wrong_with_it():
    from eejax.serving.ray import application, build

    for args, told in (
        ({}, "models = {}: field required"),
        ({"models": {}}, "models = {}: must name at least one"),
        ({"models.m": "x", "model.m": "x"}, 'model = {"m": "x"}: extra inputs'),
        ({"models": {"m": {"source": "x", "slots": "many"}}}, 'models.m.slots = "many": input'),
        ({"models": {"m": {"source": "x", "slot": 1}}}, "models.m.slot = 1: unexpected"),
        ({"models.m": "x", "thresholds.n": "1"}, "thresholds: names ['n']"),
        ({"models.m": "x", "gate.n": "margin"}, "gate: names ['n']"),
        ({"models.m": "x", "gate.m": "sure"}, "gate.m = 'sure': must be one of 'max_probability'"),
        ({"models.m": "x", "service.grace": "-1"}, "service.grace = -1: input should be greater"),
        ({"models.m": "[x"}, "models.m = '[x': must be YAML"),
        ({"models.m": "x", "deployment.replicas": "2"}, "deployment = {'replicas': 2}: must suit"),
    ):
        with pytest.raises(ConfigError) as caught:
            build(args)
        assert str(caught.value).startswith(told)
    with pytest.raises(ConfigError, match="models = {}: must name at least one"):
        application({})


def test_a_configuration_reaches_the_replicas(monkeypatch, tmp_path):
    from eejax.serving.ray import SPARE, build

    monkeypatch.setenv("EEJAX_KEYS", "one, two")
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path.parent / "bytes").touch()
    plain = {"source": tmp_path.name, "tokenizer": "bytes"}
    made = build(
        {
            "models": {
                "a": {"source": tmp_path.name, "tokenizer": f"{tmp_path.name}/tokenizer.json"},
                "b": {"source": "on/the-hub", "slots": 4, "drafts": 2},
                "c": plain,
                "d": tmp_path.name,
            },
            "gate.b": "margin",
            "thresholds.b": "[0.5, 0.6]",
            "service.waiting": "10",
            "http.n": "3",
            "deployment.num_replicas": "3",
            "deployment.ray_actor_options": "{num_gpus: 1}",
        }
    )._bound_deployment
    models, options, http = made.init_args
    assert models["a"].source == str(tmp_path) and models["b"].source == "on/the-hub"
    assert models["a"].tokenizer == str(tmp_path / "tokenizer.json")
    assert (models["c"].source, models["c"].tokenizer) == (str(tmp_path), "bytes")
    assert (models["d"].source, models["d"].tokenizer) == (str(tmp_path), None)
    assert (models["a"].slots, models["b"].slots, options.waiting) == (16, 4, 10)
    assert (http.keys, http.n) == (("one", "two"), 3)
    assert http.defaults["a"].thresholds == 1.0
    assert http.defaults["a"].gate == "max_probability"
    assert http.defaults["b"] == ((0.5, 0.6), "margin", 2)
    assert made.max_ongoing_requests == 3 * 16 + 4 + 4 * 10 + SPARE
    assert made.max_queued_requests == 3 * made.max_ongoing_requests
    assert made.num_replicas == 3 and made.ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize(
    "rules, told",
    [
        ((0.5, "max_probability"), ""),
        (((0.5, 0.6, 0.7), "margin"), "thresholds of 'm' = (0.5, 0.6, 0.7): must be one number"),
        ((0.5, "router"), "gate of 'm' = 'router': must be one of 'max_probability'"),
    ],
)
def test_a_replica_checks_exit_rules_against_its_models(rules, told, monkeypatch):
    from eejax.serving.ray import start

    async def begin():
        service = Service(checked_build(Scripted(), "m", ExitDefaults(*rules)))
        try:
            await start({"m": service})
        finally:
            await service.stop()

    message = f"m: the engine did not start: {re.escape(told)}"
    with pytest.raises(RuntimeError, match=message) if told else nullcontext():
        asyncio.run(begin())
