"""A real server, asked by a client that nobody here wrote."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import httpx
import numpy as np
import openai
import pytest

from eejax.checkpoint.model import load_run
from eejax.experiments.serving_runs import server
from eejax.inference import Generator
from eejax.inference.scoring import score
from eejax.inference.weights import prepare


@pytest.fixture(scope="module")
def model(small_run):
    """(workdir, model) of a run."""
    return small_run, load_run(small_run)


# As few programs as can be, as a server compiles all of them.
SMALL = ("--slots=2", "--context=64", "--grace=60", "--steps=1")


@pytest.fixture(scope="module")
def served(model):
    """(process, address) of a server."""
    with server(f"--model=m={model[0]}", *SMALL) as found:
        yield found
    assert found[0].returncode == 0


@pytest.fixture(scope="module")
def address(served):
    return served[1]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_texts_are_those_of_the_model(model, client):
    _, found = model
    prompts = ["def f(", "import "]
    own = Generator.make(found.params, found.config, "posthoc")
    for threshold in (1.0, 0.2):
        want = own.generate(
            [found.tokenizer.encode(p).tolist() for p in prompts],
            20,
            threshold=threshold,
            stop_token_ids=found.tokenizer.end_ids,
        )
        extra = dict(thresholds=threshold, return_exits=True)
        got = client.completions.create(
            model="m", prompt=prompts, max_tokens=20, temperature=0, extra_body=extra, logprobs=2
        )
        for i, choice in enumerate(got.choices):
            length = int(want.lengths[i])
            tied = np.flatnonzero(want.margins[i] < 1e-4)
            n = int(tied[0]) if len(tied) else length
            layers = [found.config.exit_boundaries[e] for e in want.exits[i, :n]]
            assert [e["layers"] for e in choice.model_extra["exits"]][:n] == layers
            ids = want.tokens[i, :n].tolist()
            if not len(tied):
                assert choice.text == found.tokenizer.decode(ids)
            logprobs = choice.logprobs.token_logprobs[:n]
            np.testing.assert_allclose(logprobs, want.logprobs[i, :n], atol=2e-4)
            assert all(len(top) >= 1 for top in choice.logprobs.top_logprobs[:n])


def test_streams_and_asynchronous_clients(address, client):
    whole = client.completions.create(model="m", prompt="class ", max_tokens=12, seed=5)
    stream = client.completions.create(
        model="m",
        prompt="class ",
        max_tokens=12,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(p.choices[0].text for p in parts[:-1]) == whole.choices[0].text
    assert parts[-1].usage == whole.usage

    async def several():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as many:

            def ask(i):
                return many.completions.create(
                    model="m", prompt="class ", max_tokens=12, seed=i % 3, n=2
                )

            return await asyncio.gather(*map(ask, range(6)))

    answers = asyncio.run(several())
    for i, answer in enumerate(answers):
        assert [c.text for c in answer.choices] == [c.text for c in answers[i % 3].choices]
    assert len({c.text for a in answers[:3] for c in a.choices}) > 3


def test_prompts_are_scored_where_they_are_repeated(model, client):
    _, found = model
    ids = found.tokenizer.encode("def main():").tolist()
    got = client.completions.create(
        model="m", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    told = got.choices[0].logprobs
    want = score(prepare(found.params, found.config), found.config, ids)
    assert told.token_logprobs[0] is None
    np.testing.assert_allclose(told.token_logprobs[1 : len(ids)], want.logprob, atol=2e-4)
    best = [max(top.values()) for top in told.top_logprobs[1 : len(ids)]]
    same = np.array(best) - np.array(told.token_logprobs[1 : len(ids)]) < 1e-6
    assert same.tolist() == want.top.tolist()
    assert got.choices[0].text.startswith("def main():")
    assert told.text_offset[: len(ids)] == list(range(len(ids)))


def test_errors_are_those_of_openai(client):
    with pytest.raises(openai.NotFoundError, match="there is none of this name"):
        client.completions.create(model="x", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        client.chat.completions.create(model="m", messages=[dict(role="user", content="a")])
    assert [m.id for m in client.models.list()] == ["m"]


def test_what_is_under_way_is_answered_before_the_end(served):
    """The last test of this server, as it ends it."""
    process, address = served
    asked = dict(model="m", prompt="def f(", max_tokens=57, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert process.wait(60) == 0
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(model):
    asked = dict(model="m", prompt="def f(", max_tokens=57, ignore_eos=True, n=16)

    answers = []

    def ask():
        answers.append(httpx.post(f"{address}/v1/completions", json=asked, timeout=60))

    with server(f"--model=m={model[0]}", *SMALL) as (process, address):
        thread = threading.Thread(target=ask)
        thread.start()
        while 'requests_running{model="m"} 2.0' not in httpx.get(f"{address}/metrics").text:
            pass
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 and time.monotonic() - begin < 20
        thread.join()
    assert [answer.status_code for answer in answers] == [503]  # nobody waited for all of it


@pytest.mark.slow
def test_a_model_over_several_devices(eejax_data):
    model = f"--model=m={eejax_data / 'models' / 'tinylm'}"
    asked = dict(model="m", prompt="ROMEO:", max_tokens=40, temperature=0, return_exits=True)

    def post(at):
        return httpx.post(f"{at}/v1/completions", json=asked, timeout=60).json()["choices"]

    flags = (model, "--tokenizer=bytes", "--slots=4")
    with server(*flags) as (_, one), server(*flags, "--mesh.model=2") as (_, other):
        (ours,), (theirs,) = post(one), post(other)
    assert theirs["text"] == ours["text"] and ours["text"]
    for a, b in zip(theirs["exits"], ours["exits"], strict=True):
        assert a["layers"] == b["layers"] and abs(a["confidence"] - b["confidence"]) < 1e-4
