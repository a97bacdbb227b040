"""Three lines of Python: load, calibrate, generate."""

import numpy as np
import pytest

import eejax
from eejax.common.errors import ConfigError


def test_three_lines(eejax_data, tmp_path):
    before = dir(eejax)
    assert {"load", "calibrate", "generate"} <= set(before)
    text = tmp_path / "earlier.txt"
    whole = (eejax_data / "tinyshakespeare" / "train.txt").read_bytes()
    text.write_bytes(whole[:60_000])
    model = eejax.load(eejax_data / "models" / "tinylm", tokenizer="bytes")
    assert model.config.exits == () and "params" not in repr(model)
    with pytest.raises(ConfigError, match="agreement = 0.9: this model was not made by calibrate"):
        eejax.generate(model, "ROMEO:", 4, agreement=0.9)
    made = eejax.calibrate(model, str(text), every=3, tokens=20_000, epochs=2, width=16)
    assert [e.boundary for e in made.config.exits] == [3, 6, 9] and model.config.exits == ()
    assert all(q.auc > 0.6 for q in made.calibrated.qualities)
    plain, result = eejax.generate(model, "ROMEO:", 24)
    assert set(result.exits[0, :24].tolist()) == {0} and len(plain) > 10
    early, result = eejax.generate(made, "ROMEO:", 24, agreement=0.8)
    assert result.boundaries[0, 1:24].min() < 12
    never, _ = eejax.generate(made, "ROMEO:", 24, gate="router", threshold=1.0)
    assert never == plain
    # Out and in again, with its routers.
    made.save(tmp_path / "out")
    again = eejax.load(tmp_path / "out")
    assert again.config.exits == made.config.exits
    thresholds = list(made.calibrated.point(0.8).threshold)
    same, _ = eejax.generate(again, "ROMEO:", 24, gate="router", threshold=thresholds)
    assert same == early
    np.testing.assert_array_equal(
        again.params["exits"]["exit_6"]["router"]["down"],
        made.params["exits"]["exit_6"]["router"]["down"],
    )
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = eejax.lode
