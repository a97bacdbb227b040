"""TIDE's experiments on a small model: what they promise, and that a broken promise is told."""

import json

import numpy as np
import pytest
from launchers import call

from eejax.common.errors import ConfigError
from experiments import windows


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
    with pytest.raises(ConfigError, match="--unseen = 641: the text has but 1280 bytes"):
        windows.divided(text, 641)


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.delenv("EEJAX_DATA", raising=False)
    with pytest.raises(ConfigError, match="--model and --text: must be given"):
        windows.given(None, "text.txt")
    assert [str(p) for p in windows.given("model", "text.txt")] == ["model", "text.txt"]


@pytest.mark.slow
def test_it_leaves_what_it_promises(eejax_data, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        call(
            "experiments.reproduce.tide", f"--workdir={tmp_path}", "--unseen=6000", "--windows=40",
            "--width=8", "--width=16", "--epochs=1", "--threshold=0.3", "--batch=1", "--batch=2",
            "--pairs=2", "--new=8", "--json",
        )  # fmt: skip
    assert ended.value.code == 0
    told = capsys.readouterr().out
    result = json.loads(told.splitlines()[-1])
    assert result == json.loads((tmp_path / "tide.json").read_text())
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert "Table 3" in told and "Table 5" in told and result["failed"] == []
    assert [r["boundary"] for r in result["convergence"]] == list(range(1, 12))
    cosines = [r["cosine"] for r in result["convergence"]]
    assert cosines[-1] > 0.9 > cosines[0]
    names = [(r["rule"], r["width"]) for r in result["rules"]]
    assert len(names) == len(set(names)) == 6
    matched, top1 = ([r for r in result["rules"] if r["rule"] == n] for n in
                     ("cosine, matched", "top1"))  # fmt: skip
    for a, b in zip(matched, top1, strict=True):
        np.testing.assert_allclose(a["positives"], b["positives"], atol=0.08)
        assert b["boundaries"] == [4, 8] and b["points"]["0.3"]["rate"] > 0
    post_hoc, skipping = result["throughput"][:2]
    assert post_hoc["layers_run"] == 12 > skipping["layers_run"]
    # A broken claim would be told.
    from experiments.reproduce import tide

    broken = [skipping | {"layers_run": 12.0, "others": 1, "rate": 0.5}, post_hoc]
    assert len(tide.failed(broken, 12)) == 2
    assert tide.failed([post_hoc | {"layers_run": 11.0}], 12)
