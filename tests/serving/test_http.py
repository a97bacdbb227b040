"""The pages of the server, over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json

import numpy as np
import pytest
from coroutines import run_by
from served import STALL, Scripted, said
from server_clients import TEMPLATE, client_of, serving, text

from eejax.common.errors import ConfigError
from eejax.data.tokenizer_export import bytes_definition
from eejax.data.tokenizers import ByteTokenizer, JsonTokenizer
from eejax.inference.scoring import TextScores
from eejax.serving.answers import ExitDefaults, checked_build
from eejax.serving.completions import CompletionResponse
from eejax.serving.http import HttpOptions
from eejax.serving.protocol import CompletionRequest
from eejax.serving.service import Service

RUNNER = asyncio.Runner()  # of all tests, as a service belongs to one event loop
run = run_by(RUNNER)


@pytest.fixture(scope="module", autouse=True)
def loop():
    with RUNNER:
        yield


@pytest.fixture(scope="module")
def service():
    """One for all servers that leave its engine as it is: starting another takes seconds."""
    made = Service(Scripted(template=TEMPLATE))
    RUNNER.run(made.start())
    yield made
    RUNNER.run(made.stop())


def chunks(response) -> list[dict]:
    """Of server-sent events, which end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@run
async def test_completions_whole_and_streamed(service):
    async with client_of(service) as client:
        asked = dict(model="m", prompt="abc", max_tokens=9)
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert answer["choices"] == [
            dict(index=0, text=text(b"abc", 9), logprobs=None, finish_reason="length")
        ]
        assert answer["usage"] == dict(prompt_tokens=3, completion_tokens=9, total_tokens=12)
        assert answer["object"] == "text_completion" and answer["model"] == "m"
        asked |= dict(stream=True, stream_options=dict(include_usage=True))
        parts = chunks(await client.post("/v1/completions", json=asked))
        assert "".join(p["choices"][0]["text"] for p in parts[:-1]) == text(b"abc", 9)
        assert parts[-1]["choices"] == [] and parts[-1]["usage"] == answer["usage"]
        assert all(p["usage"] is None for p in parts[:-1])
        assert parts[-2]["choices"][0]["finish_reason"] == "length"


@run
async def test_scoring_a_prompt_takes_time_of_the_timeout(service, monkeypatch):
    left = []
    async with client_of(service) as client:

        async def score(request_id, tokens, *, seconds, **_):
            left.append(seconds)
            await asyncio.sleep(0.1)
            return TextScores(np.zeros(2), np.ones(2, bool), None)

        def stream(request, *, seconds):
            left.append(seconds)
            return Service.stream(service, request, seconds=seconds)

        monkeypatch.setattr(service, "score", score)
        monkeypatch.setattr(service, "stream", stream)
        asked = dict(model="m", prompt="abc", max_tokens=2, echo=True, logprobs=1, timeout=60)
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        assert left[1] <= left[0] - 0.1 < 60


@run
async def test_several_prompts_and_choices_in_their_order(service):
    async with client_of(service) as client:
        asked = dict(model="m", prompt=["ab", "c"], n=2, max_tokens=5)
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        want = [text(b"ab", 5)] * 2 + [text(b"c", 5)] * 2
        assert [c["text"] for c in answer["choices"]] == want
        streamed = chunks(await client.post("/v1/completions", json=asked | dict(stream=True)))
        got = ["", "", "", ""]
        for part in streamed:
            got[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert got == want
        ids = dict(model="m", prompt=[[97, 98], [99]], max_tokens=5)
        answer = (await client.post("/v1/completions", json=ids)).json()
        assert [c["text"] for c in answer["choices"]] == [text(b"ab", 5), text(b"c", 5)]


@run
async def test_stop_strings_are_not_shown_in_any_part(service):
    async with client_of(service) as client:
        whole = text(b"abc", 30)
        stop = whole[11:14]
        asked = dict(model="m", prompt="abc", max_tokens=30, stop=[stop, "never"])
        answer = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (whole[: whole.find(stop)], "stop")
        parts = chunks(await client.post("/v1/completions", json=asked | dict(stream=True)))
        assert "".join(p["choices"][0]["text"] for p in parts) == whole[: whole.find(stop)]
        assert client.service.active == 0


@run
async def test_conversations_by_the_models_template(service):
    async with client_of(service) as client:
        messages = [dict(role="user", content=[dict(type="text", text="hi")])]
        prompt = b"user: hi\nassistant: "
        asked = dict(model="m", messages=messages, max_completion_tokens=7, return_exits=True)
        choice = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        assert choice["message"]["content"] == text(prompt, 7)
        exits = [said(tuple(prompt), i)[1] for i in range(7)]
        assert [e["layers"] for e in choice["exits"]] == [(1, 3, 4)[e] for e in exits]
        parts = chunks(await client.post("/v1/chat/completions", json=asked | dict(stream=True)))
        deltas = [p["choices"][0]["delta"] for p in parts]
        assert deltas[0] == dict(role="assistant", content="")
        assert "".join(d.get("content", "") for d in deltas) == text(prompt, 7)
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        # Without a limit: what is left of the context.
        asked.pop("max_completion_tokens")
        choice = (await client.post("/v1/chat/completions", json=asked)).json()
        assert choice["usage"]["total_tokens"] == 64
        for size, message in ((46, "messages = '64 tokens'"), (10**5, "messages = 100018 bytes")):
            asked["messages"] = [dict(role="user", content="a" * size)]
            answer = await client.post("/v1/chat/completions", json=asked)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "messages"
            assert error["message"].startswith(message)


@pytest.mark.parametrize(
    "change, status, param, said",
    [
        (dict(model="x"), 404, "model", "model = 'x': there is none of this name; there are 'm'."),
        (dict(temperature="hot"), 400, "temperature", 'temperature = "hot": '),
        (dict(temperature=-1), 400, "temperature", "temperature = -1: "),
        (dict(colour=1), 400, "colour", "colour: is not a field of this request."),
        (dict(n=99), 400, "n", "n = 99: must be at most 16."),
        (dict(prompt="a" * 64), 400, "prompt", "prompt = '64 tokens': must have 1 to 63"),
        (dict(prompt=[257]), 400, "prompt", "prompt = 257: must be token ids in 0..256."),
        (dict(prompt=""), 400, "prompt", "prompt = '0 tokens'"),
        (dict(prompt=["a"] * 65), 400, "prompt", "prompt = 65 prompts: must be 1 to 64 prompts."),
        (dict(prompt=[]), 400, "prompt", "prompt = '0 tokens'"),
        (dict(prompt=["a"] * 65, echo=True, max_tokens=0), 400, "prompt", "prompt = 65 prompts"),
        (dict(prompt="a" * 65, echo=True, max_tokens=0), 400, "prompt", "prompt = '65 tokens'"),
        (dict(n=10**9, echo=True, max_tokens=0), 400, "n", "n = 1000000000: must be at most 16."),
        (dict(prompt=["a"] * 64, n=16), 400, "n", "n = 16: with 64 prompts must be at most 260"),
        (dict(exits=[7], echo=True, max_tokens=0), 400, "exits", "exits = [7]"),
        (dict(prompt="a" * 10**5), 400, "prompt", "prompt = 100000 bytes: must have at most"),
        (dict(prompt="\ud800"), 400, "prompt", "prompt: the text has a lone surrogate"),
        (dict(prompt=None), 400, "prompt", "prompt: is required."),
        (dict(repetition_penalty=1e-30), 400, "repetition_penalty", "repetition_penalty = 1e-30"),
        (dict(prompt=[-1]), 400, "prompt", "prompt.0 = -1: Input should be greater than"),
        (dict(thresholds=2), 400, "thresholds", "thresholds = 2: Input should be less than"),
        (dict(stop=["a"] * 17), 400, "stop", "stop = "),
        (dict(min_tokens=4), 400, "min_tokens", "min_tokens = 4: must be at most 3."),
        (dict(logit_bias={"01": 1}), 400, "logit_bias", "logit_bias = "),
        (dict(stop_token_ids=[*range(8)]), 400, "stop_token_ids", "stop_token_ids = [0, 1, 2, 3"),
        (dict(exits=[2]), 400, "exits", "exits = [2]: must be among this model's exit boundaries"),
        (dict(thresholds=[0.5]), 400, "thresholds", "thresholds = [0.5]: must be one number"),
        (dict(gate="router"), 400, "gate", "gate = 'router': no exit of this model has a router"),
        (dict(engine="full", gate="margin"), 400, "engine", "engine = 'full': excludes gate"),
        (dict(min_layers=9), 400, "min_layers", "min_layers = 9: must be a number of layers"),
        (dict(logit_bias={"300": 1}), 400, "logit_bias", "logit_bias = 300: must be of token ids"),
        (dict(logprobs=21), 400, "logprobs", "logprobs = 21: "),
        (dict(stop=""), 400, "stop", "stop"),
        (dict(stream_options={}), 400, "stream_options", "stream_options: only with stream"),
        (
            dict(stream=True, stream_options=dict(foo=1)),
            400,
            "stream_options",
            "stream_options.foo: is not a field of this request.",
        ),
        (dict(max_tokens=0), 400, "max_tokens", "max_tokens = 0: requires echo"),
    ],
)
def test_what_cannot_be_answered_is_named(change, status, param, said, client_of_all):
    asked = dict(model="m", prompt="abc", max_tokens=3) | change
    response = client_of_all(asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert error["message"].startswith(said), error
    assert error["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def client_of_all(service):
    """Asks /v1/completions of one server."""
    stack = contextlib.AsyncExitStack()
    client = RUNNER.run(stack.enter_async_context(client_of(service)))
    headers = {"content-type": "application/json"}  # and in ASCII, for what UTF-8 has not

    async def post(body):
        return await client.post("/v1/completions", content=body, headers=headers)

    yield lambda asked: RUNNER.run(post(json.dumps(asked)))
    RUNNER.run(stack.aclose())


@run
async def test_keys_sizes_and_ids(service):
    options = HttpOptions(keys=("secret", "other"), body=1000)
    async with client_of(service, options) as client:
        asked = dict(model="m", prompt="abc", max_tokens=3)

        def post(**headers):
            return client.post("/v1/completions", json=asked, headers=headers)

        for headers in ({}, dict(authorization="Bearer secre"), dict(authorization="secret")):
            refused = await post(**headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in refused.text
        known = await client.post(
            "/v1/completions",
            json=asked,
            headers={"authorization": "Bearer other", "x-request-id": "mine"},
        )
        assert (known.status_code, known.headers["x-request-id"]) == (200, "mine")
        assert len((await client.get("/health")).headers["x-request-id"]) == 32
        large = dict(asked, prompt="a" * 2000)
        headers = dict(authorization="Bearer secret")
        refused = await client.post("/v1/completions", json=large, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")

        async def pieces():
            for _ in range(20):
                yield b"a" * 100

        refused = await client.post(
            "/v1/completions", content=pieces(), headers=headers | {"x-request-id": "long"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert refused.headers["x-request-id"] == "long"
        assert client.server.under_way == 0
        broken = await client.post("/v1/completions", content=b"{", headers=headers)
        assert broken.status_code == 400
        assert "Content-Type: application/json" in broken.json()["error"]["message"]
        zipped = headers | {"content-encoding": "gzip"}
        refused = await client.post("/v1/completions", content=b"x", headers=zipped)
        assert refused.status_code == 415
        assert all(key not in repr(options) for key in options.keys)
        headers["content-type"] = "application/json"
        broken = await client.post("/v1/completions", content=b'"\xff"', headers=headers)
        assert "JSON in UTF-8" in broken.json()["error"]["message"]
        broken = await client.post("/v1/completions", content=b"{", headers=headers)
        assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]
        empty = await client.post("/v1/completions", headers=headers)
        assert empty.status_code == 400 and "must be a JSON object" in empty.text


@run
async def test_full_dead_and_back():
    async with serving(waiting=0) as client:
        asked = dict(model="m", prompt=[STALL, 1], max_tokens=40)
        tasks = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(4)]
        while client.service.active < 4:
            await asyncio.sleep(0.01)
        for stream in (False, True):
            full = await client.post("/v1/completions", json=asked | dict(stream=stream))
            assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        while 'eejax_prompt_tokens_total{model="m"} 8.0' not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200
        client.service.ready = client.service.ready._replace(seconds=300.0)
        client.service._engine.process.kill()
        for answer in await asyncio.gather(*tasks):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_unavailable"
        assert (await client.get("/health")).status_code == 503
        dead = await client.post("/v1/completions", json=asked)
        # The pause, and what the last start took.
        assert dead.status_code == 503 and 300 <= int(dead.headers["retry-after"]) <= 301
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)
        asked = dict(model="m", prompt="abc", max_tokens=3)
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert answer["choices"][0]["text"] == text(b"abc", 3)
        page = (await client.get("/metrics")).text
        assert 'eejax_engine_restarts_total{model="m"} 1.0' in page
        assert 'eejax_requests_total{finish="refused",model="m"} 3.0' in page
        assert 'eejax_requests_total{finish="lost",model="m"} 4.0' in page
        # Of prompts that were never read, and of requests that never ran, nothing is counted.
        assert 'eejax_prompt_tokens_total{model="m"} 11.0' in page
        assert 'eejax_request_seconds_count{model="m"} 5.0' in page


@run
async def test_a_server_that_ends_answers_what_is_under_way(service):
    async with client_of(service) as client:
        asked = dict(model="m", prompt=[STALL, 1], max_tokens=9, n=6)
        task = asyncio.create_task(client.post("/v1/completions", json=asked))
        while client.service.active < 6:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(client.server.drain(60))
        await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert not draining.done()
        assert [c["finish_reason"] for c in (await task).json()["choices"]] == ["length"] * 6
        await draining


@run
async def test_as_many_requests_as_may(service):
    async with client_of(service, HttpOptions(requests=2)) as client:
        asked = dict(model="m", prompt=[STALL, 1], max_tokens=40)
        tasks = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(2)]
        while client.service.active < 2:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", content=b"{")).status_code == 429
        assert (await client.get("/health")).status_code == 200
        assert [(await task).status_code for task in tasks] == [200, 200]


@run
async def test_an_error_of_the_servers_own_has_an_id_and_is_logged(service, monkeypatch, caplog):
    async with client_of(service) as client:
        monkeypatch.setattr(type(client.server), "engine_requests", lambda *_: 1 / 0)
        asked = dict(model="m", prompt="abc", max_tokens=3)
        broken = await client.post("/v1/completions", json=asked, headers={"x-request-id": "mine"})
        assert (broken.status_code, broken.headers["x-request-id"]) == (500, "mine")
        assert broken.json()["error"]["code"] == "internal"
        assert "ZeroDivisionError" in caplog.text
        assert client.server.under_way == 0


@run
async def test_characters_of_several_tokens(service):
    """`é` and `→` are two and three tokens of bytes."""
    async with client_of(service) as client:
        asked = dict(model="m", prompt="é→x", max_tokens=2, echo=True)
        whole = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
        assert whole["text"] == "é→x" + text("é→x".encode(), 2)
        parts = chunks(await client.post("/v1/completions", json=asked | dict(stream=True)))
        assert "".join(p["choices"][0]["text"] for p in parts) == whole["text"]
        # Bytes of an answer that are no character alone: with biases the script knows nothing of,
        # so that only how they are written is looked at.
        answer = CompletionResponse(client.server, CompletionRequest(**asked, logprobs=0), 0.0)
        ids = [*"é→x".encode()]
        told = answer._logprobs(0, [(token, 0.0, ()) for token in ids], "é→x")
        assert told["tokens"] == [
            r"bytes:\xc3",
            r"bytes:\xa9",
            r"bytes:\xe2",
            r"bytes:\x86",
            r"bytes:\x92",
            "x",
        ]
        assert told["text_offset"] == [0, 0, 1, 1, 1, 2]
        assert answer._logprobs(0, [(ord("y"), 0.0, ())], "")["text_offset"] == [3]


@run
async def test_special_tokens_come_from_the_template_alone():
    """The server's tokenizer comes from the engine's process."""
    # Every byte is a token, as its first 256, and the name of the last one is of ten.
    name = "<|im_end|>"
    inner = json.loads(bytes_definition(ByteTokenizer()))
    inner["added_tokens"][0]["content"] = name
    build = Scripted(
        template="{{ messages[0].content }}<|im_end|>",
        tokenizer=JsonTokenizer(json.dumps(inner), eos=name),
    )
    messages = [dict(role="user", content=f"a{name}b")]
    spelled, special = 13, 4  # tokens of the conversation
    async with serving(build) as own, contextlib.AsyncExitStack() as stack:
        for options, count in (
            (HttpOptions(), spelled),
            (HttpOptions(allow_special=True), special),
        ):
            client = await stack.enter_async_context(client_of(own.service, options))
            asked = dict(model="m", messages=messages, max_tokens=2)
            answer = (await client.post("/v1/chat/completions", json=asked)).json()
            assert answer["usage"]["prompt_tokens"] == count
            ids = (await client.post("/tokenize", json=dict(prompt=f"a{name}b"))).json()["tokens"]
            assert ids.count(256) == options.allow_special and len(ids) == count - 1
            asked = dict(model="m", prompt=f"a{name}b", max_tokens=2)
            answer = (await client.post("/v1/completions", json=asked)).json()
            assert answer["usage"]["prompt_tokens"] == count - 1
            # Of what is refused, the message is named.
            null = dict(model="m", messages=[*messages, dict(role="user", content=None)])
            error = (await client.post("/v1/chat/completions", json=null)).json()["error"]
            assert error["message"].startswith("messages[1].content: is required")
            assert error["param"] == "messages"


@run
async def test_the_other_pages():
    async with serving() as client:

        def get(path):
            return client.get(path)

        (model,) = (await get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"], model["exits"]) == ("m", 64, [1, 3])
        assert (await get("/v1/models/m")).json() == model
        missing = await get("/v1/models/x")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        assert (await get("/nothing")).json()["error"]["type"] == "invalid_request_error"
        tokens = (await client.post("/tokenize", json=dict(prompt="é!"))).json()
        assert tokens == dict(tokens=[195, 169, 33], count=3, max_model_len=64)
        back = await client.post("/detokenize", json=dict(tokens=[195, 169, 33]))
        assert back.json() == dict(prompt="é!")
        assert set((await get("/version")).json()) == {"version"}
        await client.post("/v1/completions", json=dict(model="m", prompt="abc", max_tokens=9))
        page = (await get("/metrics")).text
        for line in (
            'eejax_generation_tokens_total{model="m"} 9.0',
            'eejax_prompt_tokens_total{model="m"} 3.0',
            'eejax_time_to_first_token_seconds_count{model="m"} 1.0',
            'eejax_inter_token_seconds_count{model="m"}',
            'eejax_requests_total{finish="length",model="m"} 1.0',
            'eejax_depth_loaded_layers{model="m"} 4.0',
        ):
            assert line in page, line
        paths = (await get("/openapi.json")).json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(paths)


class _ManyEnds(ByteTokenizer):
    end_ids = tuple(range(9))


def test_a_model_with_too_many_end_tokens_is_not_served():
    build = checked_build(Scripted(tokenizer=_ManyEnds()), "m", ExitDefaults())
    with pytest.raises(ConfigError, match=r"end tokens of 'm' = \[0, 1, .* must be at most 8"):
        build()
