"""Requests drawn from the server's own description of itself: none brings it down."""

from __future__ import annotations

import collections
import itertools
import shutil

import hypothesis
import pytest
import requests
from hypothesis import HealthCheck, settings
from served import Scripted
from server_threads import serving

from eejax.serving.models import ServedModel

schemathesis = pytest.importorskip("schemathesis", reason="needs Schemathesis")

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def asked(address: str, per_post: int, per_get: int) -> dict[str, collections.Counter]:
    """Statuses by page, of so many requests to each: as the description has them, and not."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    modes = schemathesis.GenerationMode
    with requests.Session() as session:
        for operation in (result.ok() for result in schema.get_all_operations()):
            if operation.method == "post":
                for mode in modes:
                    ask_drawn(operation, mode, per_post // 2, session, found)
            else:
                ask_drawn(operation, modes.POSITIVE, per_get, session, found)
    return found


def ask_drawn(operation, mode, n: int, session, found) -> None:
    number = itertools.count()

    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def one(case):
        # Most names that are drawn are of no model, and a server of one model takes no objective:
        # then nothing else is looked at.
        if isinstance(case.body, dict) and "model" in case.body and next(number) % 10:
            case.body = case.body | {"model": "m"}
            case.body.pop("objective", None)
        response = case.call(session=session, timeout=60)
        status = response.status_code
        known = operation.definition.raw["responses"]
        assert status < 500 or str(status) in known, (case.body, response.text)
        if status >= 400 and response.headers["content-type"] == ["application/json"]:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        found[operation.path][status] += 1

    one()


def check(found, service) -> None:
    for path in POSTS:
        statuses = found[path]
        assert statuses[200] and statuses[400], (path, statuses)
        assert not statuses[503] and not statuses[500], (path, statuses)
    assert service.restarts == 0 and service.active == 0


def test_some_over_an_engine_that_is_scripted():
    with serving(Scripted(template=TEMPLATE)) as (address, service):
        found = asked(address, 40, 2)
        check(found, service)


@pytest.mark.slow
def test_ten_thousand_over_a_model(small_run, tmp_path):
    run = shutil.copytree(small_run, tmp_path / "run")  # other tests read the small run itself
    (run / "chat_template.jinja").write_text(TEMPLATE)
    with serving(ServedModel(str(run), slots=8)) as (address, service):
        found = asked(address, 2600, 40)
        print({path: dict(statuses) for path, statuses in found.items()})
        assert sum(statuses.total() for statuses in found.values()) >= 10_000
        check(found, service)
