"""Models' costs against their other accounts, and the places of exits."""

import pytest
from drawn_configs import configs
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.costs import exit_places, model_costs
from eejax.pipeline.partition import INSIDE, PLACEMENTS, partition
from eejax.pipeline.plan import costs
from eejax.train.flops import model_flops_per_token

SMALL = ModelConfig(vocab_size=50, n_layers=8, d_model=16, n_heads=2, context_length=32)


@settings(max_examples=40)
@given(configs(), st.integers(1, 3), st.integers(2, 16), st.data())
def test_a_models_work_is_what_training_counts(config, rows, length, data):
    cuts = data.draw(st.sets(st.integers(1, config.n_layers)))
    edges = sorted({0, config.n_layers, *cuts})
    layers = [b - a for a, b in zip(edges, edges[1:], strict=False)]
    c = model_costs(config, layers, rows, length)
    total = sum(w.total for ws in (c.layers, c.entry, c.inner, [c.final]) for w in ws)
    expected = rows * length * model_flops_per_token(config, length)
    assert total == pytest.approx(expected, rel=1e-12)
    assert all(w.backward == 2 * w.forward for w in (*c.layers, *c.entry, *c.inner, c.final))


def test_where_exits_lie():
    boundaries = (0, 1, 4, 5, 6, 8)
    config = SMALL.replace(exits=tuple(map(ExitConfig, boundaries)))
    places = exit_places(config, (4, 2, 2))

    def name(rows):
        return [tuple(boundaries[e] for e in row) for row in rows]

    assert name(places.entry) == [(0,), (4,), (6,)]
    assert name(places.inner) == [(1,), (5,), ()]
    assert name([places.final]) == [(8,)]
    earlier = exit_places(config, (4, 2, 2), "earlier")  # nothing is before boundary 0
    assert name(earlier.entry) == [(0,), (), ()]
    assert name(earlier.inner) == [(1, 4), (5, 6), ()]
    for layers in ((4, 4, 1), (8, 0), (4, 2)):
        with pytest.raises(
            ConfigError, match="pipeline.layers = .*(at least one layer|add up to the 8)"
        ):
            exit_places(config, layers)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_plan_charges_every_exit_where_its_schedule_computes_it(placement):
    config = SMALL.replace(exits=(ExitConfig(2), ExitConfig(4), ExitConfig(5)))
    cut = partition(config, 4, placement=placement)
    found = costs(PipelineConfig(), cut, 8)
    for i in range(4):
        assert (found.entry[i].forward > 0) == (i in cut.input_exit_stages)
        assert (found.inner[i].forward > 0) == bool(cut.on(i, INSIDE))
