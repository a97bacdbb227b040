"""TIDE's experiments on a small model: what they promise, and that a broken promise is told."""

import json

import numpy as np
import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError
from eejax.experiments import windows
from eejax.experiments.reproduce import tide_findings, tide_model, tide_paper, tide_problem


def test_windows_cover_a_text_and_batches_are_filled_up():
    text = bytes(range(256)) * 5
    rows = windows.cut(text)
    np.testing.assert_array_equal(rows[:, :-1].reshape(-1), np.frombuffer(text, np.uint8)[:1024])
    np.testing.assert_array_equal(rows[:-1, -1], rows[1:, 0])  # labels go one token on
    (batch,) = windows.batches(rows)
    assert batch["tokens"].shape == (windows.BATCH, windows.LENGTH)
    assert (batch["labels"][len(rows) :] == -1).all() and (batch["labels"][: len(rows)] >= 0).all()
    assert len(windows.cut(text, 2)) == 2
    assert windows.divided(text, 600) == (text[:-600], text[-600:])
    with pytest.raises(ConfigError, match="--unseen = 641: the text has only 1280 bytes"):
        windows.divided(text, 641)


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(ConfigError, match="--model and --text: are required"):
        windows.model_and_text(None, "text.txt")
    assert [str(p) for p in windows.model_and_text("model", "text.txt")] == ["model", "text.txt"]


PLACES = {
    "Abstract",
    "Figure 2",
    *(f"Table {n}" for n in range(1, 6)),
    *(f"Section {n}" for n in ("1", "3.1", "3.2", "3.3", "5.1", "5.3", "5.5", "6")),
}
"""Everything of the paper that has a number or is drawn, but for facts of its package."""


@pytest.mark.parametrize(
    "text, right",
    [
        ("So x = 6 and y = 4: you bought 6 apples and 4 oranges.", True),
        ("Apples: 6\nOranges: 4", True),
        ("apples are 6, oranges are 4", True),
        ("You bought 4 apples and 6 oranges.", False),
        ("16 apples and 4 oranges", False),
        ("6 apples", False),
        ("", False),
    ],
)
def test_an_answer_names_both_numbers(text, right):
    assert tide_problem.correct(text) == right


def test_a_routers_size_is_the_papers_and_a_norm_and_a_bias():
    assert tide_findings.router_parameters(4096, 128) == 524_416 + 4096 + 1


@pytest.mark.slow
def test_without_a_checkpoint_one_is_trained(monkeypatch, tmp_path):
    import eejax

    monkeypatch.delenv("EEJAX_DATA", raising=False)
    monkeypatch.setattr(tide_model, "STEPS", 2)
    monkeypatch.setattr(tide_model, "BYTES", 150_000)
    folder, text, tokenizer = tide_model.checkpoint(None, None, tmp_path, 5000)
    model = eejax.load(folder, tokenizer=tokenizer)
    assert model.config.exits == () and model.config.n_layers == 12
    earlier, unseen = windows.divided(text.read_bytes(), 5000)
    assert (tmp_path / "earlier.txt").read_bytes() == earlier and len(unseen) == 5000
    given = tide_model.checkpoint("model", "text.txt", tmp_path, 5000)
    assert [str(g) for g in given] == ["model", "text.txt", "bytes"]


@pytest.mark.slow
def test_it_leaves_what_it_promises(eejax_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tide_paper.RECIPE, "epochs", 2)
    with pytest.raises(SystemExit) as ended:
        call(
            "eejax.experiments.reproduce.tide",
            f"--workdir={tmp_path}",
            "--unseen=6000",
            "--windows=40",
            "--width=8",
            "--width=16",
            "--epochs=1",
            "--threshold=0.5",
            "--batch=1",
            "--batch=8",
            "--pairs=2",
            "--new=8",
            "--json",
        )
    assert ended.value.code == 0
    told = capsys.readouterr().out
    result = json.loads(told.splitlines()[-1])
    assert result == json.loads((tmp_path / "tide.json").read_text())
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert "Table 3" in told and "Table 5" in told and result["failed"] == []
    assert [r["boundary"] for r in result["convergence"]] == list(range(1, 12))
    cosines = [r["cosine"] for r in result["convergence"]]
    assert cosines[-1] > 0.9 > cosines[0]
    names = [(r["rule"], r["width"], r["recipe"]) for r in result["rules"]]
    assert len(names) == len(set(names)) == 3 * 2 + 2
    matched, top1 = (
        [r for r in result["rules"] if r["rule"] == n] for n in ("cosine, matched", "top1")
    )
    for a, b in zip(matched, top1, strict=True):
        np.testing.assert_allclose(a["positives"], b["positives"], atol=0.08)
        assert b["boundaries"] == [4, 8] and b["points"]["0.5"]["rate"] > 0
    assert [(r["batch"], r["engine"]) for r in result["throughput"]] == [
        (size, engine) for size in (1, 8) for engine in ("posthoc", "recompute")
    ]
    post_hoc, skipping = result["throughput"][:2]
    assert post_hoc["layers_run"] == 12 > skipping["layers_run"]
    rows = {r["threshold"]: r for r in result["problem"]["rows"]}
    assert rows[1.0]["rate"] == 0 and rows[0.5]["rate"] >= rows[0.85]["rate"]
    assert all(0 < r["unique"] <= result["problem"]["tokens"] for r in rows.values())
    assert {f["place"] for f in result["findings"]} == PLACES
    claims = [(f["place"], f["claim"], f["ours"]) for f in result["findings"]]
    assert len(set(claims)) == len(claims)
    # A broken claim would be told.
    tide = functions_of("eejax.experiments.reproduce.tide")
    broken = [skipping | {"layers_run": 12.0, "others": 1, "rate": 0.5}, post_hoc]
    assert len(tide.failed(broken, 12)) == 2
    assert tide.failed([post_hoc | {"layers_run": 11.0}], 12)


def summary():
    """Results as the reproduction leaves them, made by hand."""
    point = {"rate": 0.3, "disagreement": 0.1, "depth": 10.0, "by_exit": {4: 0.1, 8: 0.2}}
    rule = {
        "rule": "top1",
        "width": 128,
        "seconds": 50.0,
        "boundaries": [4, 8],
        "auc_right": [0.8, 0.9],
        "auc_right_entropy": [0.7, 0.8],
        "points": {t: point | {"tokens": 100} for t in ("0.85", "0.5")},
    }

    def ratio(middle):
        return {"ratio": middle, "low": middle - 0.02, "high": middle + 0.02}

    speed = {"threshold": 0.5, "full_tokens_per_s": 100.0, "tokens_per_s": 110.0, "others": 0}
    near = {"nearer_than": {"0.95": 0.1, "0.9": 0.2}, "near": 0.01}
    problem = {"rate": 0.0, "unique": 20, "correct": False, "by_exit": {}, "text": "a pear"}
    return {
        "layers": 12,
        "every": 4,
        "windows": 400,
        "tokens": 102_400,
        "convergence": [{"boundary": n} | near for n in range(1, 12)],
        "rules": [rule | {"recipe": recipe} for recipe in ("ours", "paper")],
        "latency": [
            {"threshold": t, "full_ms": 10.0, "routed_ms": 9.0, "routed_over_full": ratio(0.9)}
            for t in (0.85, 0.5)
        ],
        "throughput": [
            speed | {"batch": b, "engine": e, "over_full": ratio(1.1), "layers_run": n}
            for b in (1, 8)
            for e, n in (("posthoc", 12.0), ("recompute", 9.0))
        ],
        "problem": {
            "tokens": 130,
            "rows": [problem | {"threshold": t} for t in tide_paper.TABLE_5],
        },
    }


def of(place: str, claim: str = "", **change) -> list[dict]:
    """Findings of a place, and of a claim that begins so, with other results."""
    found = tide_findings.findings(summary() | change, "a test's")
    return [f for f in found if f["place"] == place and f["claim"].startswith(claim)]


def verdicts(place: str, claim: str = "", **change) -> list[str]:
    return [f["verdict"] for f in of(place, claim, **change)]


def test_a_finding_for_every_claim_follows_the_numbers():
    found = tide_findings.findings(summary(), "a test's")
    assert {f["place"] for f in found} == PLACES
    assert verdicts("Section 3.3", layers=13) == ["does not hold"]
    assert set(verdicts("Table 5")) == {"not at this scale"}
    assert all("'a pear'" in f["why"] for f in found if f["place"] == "Table 5")


def test_speeds_are_judged_by_the_interval_that_is_shown():
    assert verdicts("Table 4") == ["holds"] * 4
    assert "0.90 (0.88 to 0.92) times the time without exits, 10.0 ms" in of("Table 4")[0]["ours"]
    assert "1.10 (1.08 to 1.12) at 0.5 times the 100 tok/s" in of("Table 4")[2]["ours"]
    noise = {"ratio": 1.3, "low": 0.9, "high": 1.4}
    unsure = [row | {"over_full": noise} for row in summary()["throughput"]]
    slower = [row | {"over_full": {"ratio": 0.8, "low": 0.7, "high": 0.9}} for row in unsure]
    for rows, why in ((unsure, "within noise (1 is in the interval)"), (slower, "less")):
        judged = of("Table 4", "Post-hoc", throughput=rows)
        assert [f["verdict"] for f in judged] == ["does not hold"] * 2
        assert all(f["why"].startswith(f"Post-hoc it is {why} at 0.5.") for f in judged)
    longer = [
        row | {"routed_over_full": {"ratio": 1.1, "low": 1.05, "high": 1.2}}
        for row in summary()["latency"]
    ]
    assert [f["why"][:13] for f in of("Table 4", "Exits", latency=longer)] == ["It is longer."] * 2


def test_the_papers_recipe_is_judged_by_its_own_routers():
    ours, theirs = summary()["rules"]

    def rules(a, b):
        return {"rules": [ours | {"auc_right": a}, theirs | {"auc_right": b}]}

    assert verdicts("Section 3.1", "Adam", **rules([0.5, 0.5], [0.6, 0.9])) == ["holds"]
    assert verdicts("Section 3.1", "Adam", **rules([0.9, 0.9], [0.54, 0.9])) == ["does not hold"]
    (why,) = (
        f["why"] for f in of("Section 1", "A router predicts", **rules([0.9] * 2, [0.8, 0.82]))
    )
    assert why == "Not at layer 8."


def test_spared_layers_and_unique_tokens_are_judged_by_the_bounds_that_are_shown():
    (rule, other) = summary()["rules"]

    def deep(d):
        return [rule | {"points": {"0.85": rule["points"]["0.85"] | {"depth": d}}}, other]

    assert verdicts("Figure 2", rules=deep(12 * (1 - 0.21))) == ["holds"]
    assert verdicts("Figure 2", rules=deep(12 * (1 - 0.20))) == ["does not hold"]
    problem = summary()["problem"]
    texts = {1.0: "KING: aaa", 0.5: "aaab"}
    rows = [
        row | {"text": texts.get(row["threshold"], "KING"), "unique": n}
        for row, n in zip(problem["rows"], (20, 18, 17, 10), strict=True)
    ]
    (one,) = of("Section 5.3", problem=problem | {"rows": rows})
    assert one["verdict"] == "does not hold" and one["why"].startswith("-50 % at 0.5.")
    assert "of 7 characters 6 do not occur with exits, 4 of them capitals" in one["why"]
    assert one["why"].endswith("and 1 are new.")
