"""The dashboard, in a browser."""

from __future__ import annotations

import os
import shutil
import threading
import time

import httpx
import pytest
from served import CONFIG, STALL, said
from server_threads import serving

from eejax.helios.choices import Decision, ModelDepth
from eejax.helios.report import FleetReport
from eejax.helios.timeline import TimelinePoint, marks
from eejax.serving.history import KEEP, SECONDS, LoadHistory
from eejax.serving.http import HttpOptions

KEY = "secret"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs Chromium: none of " + ", ".join(names) + " is on the path")
    # As root, Chromium does not start in its sandbox.
    root = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with api.sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=path, args=[*root, *quiet])
        yield own
        own.close()


def until(check, seconds=30.0):
    """Waits for what holds sooner or later. The page's policy forbids Playwright's own."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def opened(browser):
    """Opens a page, and sees that it asks nobody but the server and nothing fails in it."""
    asked, wrong = [], []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def begin(address):
        page.goto(address + "/")
        begin.address = address
        return page

    yield begin
    page.close()
    assert asked and all(u.startswith((begin.address, "data:")) for u in asked), asked
    assert not wrong, wrong


def test_a_prompt_is_answered_in_the_colours_of_its_exits(opened):
    with serving() as (address, _):
        page = opened(address)
        page.wait_for_selector("#state.ready")
        assert "4 layers, exits after 1, 3" in page.inner_text("#facts")
        prompt = "<img src=x onerror=document.title='no'>"
        page.fill("#prompt", prompt)
        page.fill("#tokens", "9")
        page.click("#go")

        def coloured():
            return page.query_selector_all("#output [data-layers]")

        until(lambda: len(coloured()) == 9)
        spans = coloured()
        want = [said(tuple(prompt.encode()), i) for i in range(9)]
        assert [s.inner_text() for s in spans] == [chr(token) for token, _ in want]
        layers = [CONFIG.exit_boundaries[e] for _, e in want]
        assert [int(s.get_attribute("data-layers")) for s in spans] == layers
        colours = [s.evaluate("s => getComputedStyle(s).backgroundColor") for s in spans]
        pairs = set(zip(layers, colours, strict=True))
        assert len(pairs) == len(set(layers)) == len(set(colours)) == 3
        assert page.inner_text("#output").startswith(prompt) and page.title() == "eejax"
        assert page.inner_text("#summary").startswith("9 tokens, 2.67 layers at the mean")
        # What it brought is in the charts, once its span is over.
        page.wait_for_selector("#exits rect[data-tokens='3']", state="attached")
        counts = {
            int(r.get_attribute("data-layers")): int(r.get_attribute("data-tokens"))
            for r in page.query_selector_all("#exits rect")
        }
        assert counts == {stop: layers.count(stop) for stop in CONFIG.exit_boundaries}
        assert page.inner_text("#mean") == "2.67" and page.inner_text("#loaded") == "4"
        assert "M" in page.get_attribute("#depth path", "d")


def test_load_stopping_and_an_engine_that_ends(opened):
    with serving() as (address, service):
        page = opened(address)
        page.wait_for_selector("#state.ready")
        page.fill("#prompt", chr(STALL))  # in UTF-8 another byte: a plain prompt that goes on
        stall = dict(model="m", prompt=[STALL, 1], max_tokens=60)

        def ask():
            return httpx.post(f"{address}/v1/completions", json=stall, timeout=60).status_code

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: page.inner_text("#running") == "4")
        until(lambda: page.inner_text("#waiting") == "2")
        page.click("#go")
        until(lambda: page.inner_text("#waiting") == "3")
        page.click("#stop")
        until(lambda: page.inner_text("#waiting") == "2")
        assert page.is_enabled("#go")
        service._engine.process.kill()
        page.wait_for_selector("#state.dead")
        for thread in threads:
            thread.join(30)
        page.click("#go")
        until(lambda: "engine" in page.inner_text("#summary"))
        page.wait_for_selector("#state.ready")
        assert "restarts 1" in page.inner_text("#facts")


def test_keys_are_asked_for_by_the_prompt_alone(opened):
    with serving(options=HttpOptions(keys=(KEY,))) as (address, _):
        page = opened(address)
        page.wait_for_selector("#state.ready")
        page.fill("#prompt", "abc")
        page.click("#go")
        until(lambda: "keys" in page.inner_text("#summary"))
        page.fill("#key", KEY)
        page.click("#go")
        until(lambda: len(page.query_selector_all("#output [data-layers]")) > 9)


def test_which_of_several_models_serves_and_why(opened):
    """As a fleet would be told of: how it comes to decide is not the page's matter."""
    with serving() as (address, service):
        page = opened(address)
        page.wait_for_selector("#state.ready")
        assert page.is_hidden("#serves") and page.is_visible("#threshold")
        models = {"small": CONFIG, "large": CONFIG.replace(n_layers=6)}
        service.ready = service.ready._replace(models=models)

        def decide(*told):
            return Decision(time.time(), *told)

        begin = (
            decide("evaluate", ModelDepth("small", 3), "the server begins"),
            decide("serve", ModelDepth("small", 2), "<b>it is best</b>"),
        )
        switch = (decide("switch", ModelDepth("large", 3), "too many tokens"),)
        came = {0: marks(begin), 2: marks(switch)}  # with the first answer, and with the third
        for report in (
            FleetReport(
                "small",
                2,
                3,
                4,
                0.0,
                None,
                None,
                None,
                "operations",
                begin,
            ),
            FleetReport(
                "large",
                3,
                6,
                4,
                0.25,
                0.01,
                0.125,
                7.5,
                "nvml",
                switch,
                tuple(TimelinePoint(i, "large", 3, 5, 0.1, 4.0, came.get(i, ())) for i in range(4)),
            ),
        ):
            service.report = report
            service._watch("report", report)
            time.sleep(SECONDS)

        def rows():
            return [row.inner_text() for row in page.query_selector_all("#decisions li")]

        until(lambda: len(rows()) == 3)
        assert rows()[0].endswith("switch: large, 6 layers – too many tokens")
        assert rows()[1].endswith("serve: small, 3 layers – <b>it is best</b>")
        assert page.inner_text("#members b") == "large 6 of 6"
        assert "below threshold 25.0 %" in page.inner_text("#watched")
        assert "audited quality 99.0 %, at least 87.5 %" in page.inner_text("#watched")
        assert page.inner_text("#watched").endswith("joules by nvml")

        def drawn():
            return [p.get_attribute("d") for p in page.query_selector_all("#serves path")]

        until(lambda: all(drawn()))  # of each model one line
        assert len(page.query_selector_all("#serves .mark")) == 3
        lines = ("throughput", "requests", "ttft", "perplexity")
        assert all("L" in page.get_attribute(f"#{name} path", "d") for name in lines)
        # Of the decision to serve there is no mark.
        told = [mark.text_content() for mark in page.query_selector_all("#ttft .mark title")]
        assert told == [
            "reassessment: small, 3 exits: the server begins",
            "SW: large, 3 exits: too many tokens",
        ]
        assert page.inner_text("#loaded") == "6" and page.is_hidden("#threshold")
        page.fill("#prompt", "abc")
        page.fill("#tokens", "5")
        page.click("#go")
        until(lambda: len(page.query_selector_all("#output [data-layers]")) == 5)


def test_the_page_may_speak_to_nobody_else():
    with serving() as (address, _):
        answer = httpx.get(address + "/")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")


def test_history_by_spans_of_time():
    now = [100.0]
    history = LoadHistory(lambda: now[0])
    history.load(2, 1, 0.5)
    history.tokens([3, 3, 12], first=0.25)
    history.tokens([12], between=[0.1, 0.1, 0.4])
    assert history.spans == []
    now[0] += SECONDS
    (span,) = history.spans
    assert span == dict(
        begin=100.0,
        running=2,
        waiting=1,
        cache_use=0.5,
        tokens_per_s=4 / SECONDS,
        depth=7.5,
        exits={"3": 2, "12": 2},
        first=(0.25, 0.25),
        between=(0.1, 0.4),
        member=None,
        loaded=None,
    )
    now[0] += SECONDS
    quiet = history.spans[-1]
    assert (quiet["running"], quiet["depth"], quiet["first"], quiet["exits"]) == (2, None, None, {})
    for _ in range(KEEP + 5):
        now[0] += SECONDS
        history.load(0, 0, 0.0)
    spans = history.spans
    assert len(spans) == KEEP and spans[-1]["begin"] == now[0] - SECONDS
