"""Performance over prompts: what a fleet and the dashboard keep of it, and its picture."""

from __future__ import annotations

import json
import math

import httpx
import pytest
from launchers import call, functions_of
from simulations import PROFILES, THROUGHPUT, drawn, options, pace

from eejax.common.errors import DataError
from eejax.experiments.helios_simulation import policies
from eejax.experiments.helios_simulation.simulator import SimulatedServer, SimulationSetting
from eejax.helios.choices import Decision, ModelDepth
from eejax.helios.report import FleetReport
from eejax.helios.timeline import WINDOW, AnswerTimeline, TimelinePoint, marks
from eejax.serving.history import LoadHistory


def point(i: int, **changes) -> TimelinePoint:
    own = dict(time=0.5 * i, model="small", depth=1, tokens=8, ttft=0.1, perplexity=2.0)
    return TimelinePoint(**(own | changes))


def decide(kind: str) -> Decision:
    return Decision(0.0, kind, ModelDepth("large", 2), "for the test")


def test_rates_are_of_the_last_answers_and_marks_of_the_next():
    line = AnswerTimeline(kept=30)
    for i in range(40):
        # "serve" is where the model stays, which is no mark.
        kinds = {15: ("evaluate",), 25: ("evaluate",), 35: ("switch", "serve")}.get(i, ())
        line.add(point(i, perplexity=float(i), marks=marks(map(decide, kinds))))
    found = line.curves()
    assert found["prompt"] == [*range(11, 41)] and found["perplexity"] == [
        *map(float, range(10, 40))
    ]
    assert found["throughput"][0] is None and found["throughput"][-1] == pytest.approx(16.0)
    assert found["requests"][WINDOW:] == [pytest.approx(2.0)] * (30 - WINDOW)
    told = [(m["prompt"], m["kind"]) for m in found["marks"]]
    assert told == [(16, "reassessment"), (26, "reassessment"), (36, "SW")]
    assert len(line.since(37)) == 3 and line.since(40) == () and len(line.since(0)) == 30


def test_a_fleet_keeps_every_prompt_and_what_was_decided_between():
    """A simulated one: the same class keeps it of one that serves."""
    t = drawn()
    paces = {"small": pace(1.0, slots=2), "large": pace(1.3, slots=2)}
    make = policies.helios(PROFILES, THROUGHPUT, options())
    server = SimulatedServer(t, PROFILES, paces, make, SimulationSetting(slots=2, steps=2))
    got = server.run()
    found = server.dispatcher.performance.curves()
    assert found["prompt"] == [*range(1, len(t) + 1)]
    assert sorted(found["ttft"]) == pytest.approx(sorted(got.first - got.arrived))
    assert sorted(found["model"]) == sorted(got.models)
    kinds = {"evaluate": "reassessment", "switch": "SW", "grow": "LD", "tighten": "LD"}
    want = [kinds[d.kind] for d in got.decisions if d.kind in kinds and d.time <= got.ended.max()]
    told = [mark["kind"] for mark in found["marks"]]
    assert told == want[: len(told)] and len(told) >= len(want) - 1 > 3
    assert [m["prompt"] for m in found["marks"]] == sorted(m["prompt"] for m in found["marks"])


def test_it_is_drawn_by_one_command(tmp_path, capsys):
    history = LoadHistory()
    report = FleetReport("small", 1, 2, 4, 0.0, None, None, None, "operations", (decide("grow"),))
    points = tuple(point(i, perplexity=None if i == 3 else 2.0) for i in range(20))
    # A decision is told before the answer behind it comes, which has its mark.
    history.serves(report._replace(points=points))
    last = point(20, model="large", marks=marks(report.decisions))
    history.serves(report._replace(points=(last,), decisions=()))
    source = tmp_path / "timeline.json"
    source.write_text(json.dumps(history.timeline.curves()))
    call("eejax.experiments.timeline", f"--source={source}", f"--output={tmp_path / 'drawn'}")
    assert "21 prompts" in capsys.readouterr().out
    assert (tmp_path / "drawn" / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    again = json.loads((tmp_path / "drawn" / "timeline.json").read_text())
    assert [(m["prompt"], m["kind"]) for m in again["marks"]] == [(21, "LD")]
    source.write_text("{}")
    for wrong, said in (
        (source, "is not a timeline: prompt = None: must be a list"),
        (tmp_path / "none", "is not a timeline"),
        ("http://127.0.0.1:9", "does not answer as a server .* or it still compiles: try"),
        ("http://127.0.0.1:99999", "does not answer as a server"),
        ("http://[::1", "does not answer as a server"),
    ):
        with pytest.raises(DataError, match=f"--source = '.*': {said}"):
            call("eejax.experiments.timeline", f"--source={wrong}", f"--output={tmp_path}")


GOOD = dict(
    prompt=[1, 2],
    model=["a", "b"],
    throughput=[None, 1.0],
    requests=[None, 2],
    ttft=[0.1, 0.2],
    perplexity=[1.0, 2.0],
    marks=[dict(prompt=1, kind="SW", why="x")],
)
WRONG = [
    {},
    [*GOOD],
    "prompt",
    5,
    None,
    *(GOOD | {name: wrong} for name in GOOD for wrong in (3, "x", None, {}, [[1], [2]], [True])),
    *(GOOD | {name: value[:1]} for name, value in GOOD.items() if name != "marks"),
    GOOD | {"ttft": ["x", "y"]},
    GOOD | {"ttft": [1, 10**400]},
    GOOD | {"model": [1, 2]},
    GOOD | {"prompt": [1, 10**400]},
    GOOD | {"prompt": [1, 1.5]},
    GOOD | {"prompt": [1, None]},
    *(
        GOOD | {"marks": [mark]}
        for mark in (
            {},
            "SW",
            dict(prompt=1, kind="$x"),
            dict(prompt=1, kind=[]),
            dict(prompt="x", kind="SW"),
            dict(kind="LD"),
        )
    ),
]


@pytest.mark.parametrize("served", [False, True], ids=["file", "server"])
def test_what_is_no_timeline_is_refused_from_either_source(tmp_path, monkeypatch, served):
    """Every value is either refused by a name, or drawn."""
    file, body = tmp_path / "timeline.json", []
    launcher = functions_of("eejax.experiments.timeline")
    request = httpx.Request("GET", "http://server/dashboard")

    def answer(*_, **__):
        return httpx.Response(200, content=body[-1], request=request)

    monkeypatch.setattr(httpx, "get", answer)

    def read(text: str) -> dict:
        file.write_text(text)
        body.append('{"models": {"auto": {"fleet": {"timeline": ' + text + "}}}}")
        return launcher.timeline("http://server" if served else str(file), "auto")

    nothing = {name: [] for name in GOOD}
    unknown = GOOD | {name: [math.nan, None] for name in ("throughput", "requests", "perplexity")}
    for good in (GOOD, nothing, unknown):
        found = read(json.dumps(good))
        assert found["prompt"] == good["prompt"]
    for wrong in map(json.dumps, WRONG):
        with pytest.raises(DataError, match="--source = .*: is not a timeline: .* = .*: must "):
            read(wrong)
    with pytest.raises(DataError, match="is not a timeline|does not answer as a server"):
        read("[" * 100_000)
    if served:
        for text in ("[]", "{}", "5", "null", '{"models": []}', '{"models": null}'):
            body.append(text)
            with pytest.raises(DataError, match="does not answer as a server: .* no models"):
                launcher.timeline("http://server", "auto")
        for own in ("5", "null", "[]", "{}", '"fleet"', '{"fleet": null}', '{"fleet": []}'):
            body.append(f'{{"models": {{"auto": {own}}}}}')
            with pytest.raises(DataError, match="--model = 'auto': must be one .* of none"):
                launcher.timeline("http://server", "auto")
