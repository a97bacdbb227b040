"""Models' costs against their other accounts, and the places of exits."""

import itertools

import pytest
from drawn_configs import configs
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from eejax.common.axes import MESH_AXES
from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.costs import exit_places, model_costs
from eejax.pipeline.partition import BALANCED, INSIDE, PLACEMENTS, partition, stage_work
from eejax.pipeline.plan import costs
from eejax.sharding.mesh import MeshConfig
from eejax.train.config import DataConfig, Experiment
from eejax.train.flops import model_flops_per_token
from eejax.train.program import Program

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


def test_balanced_stages_go_by_the_length_of_the_texts():
    """SmolLM2-135M's shape, whose context is 32 times as long as the texts here."""
    config = ModelConfig(
        vocab_size=49152,
        n_layers=30,
        d_model=576,
        n_heads=9,
        n_kv_heads=3,
        d_ff=1536,
        context_length=8192,
        head="tied",
    )
    experiment = Experiment(
        model=config,
        data=DataConfig(length=256),
        mesh=MeshConfig(pipe=4),
        pipeline=PipelineConfig(layers=BALANCED),
    )
    mesh = AbstractMesh(experiment.mesh.shape, MESH_AXES)
    cut = Program(experiment, mesh).placement.stages.partition
    assert cut == partition(config, 4, BALANCED, length=256) == partition(config, 4, cut.layers)
    most = max(stage_work(cut, 256))
    assert most < 0.8 * max(stage_work(partition(config, 4, BALANCED), 256))
    for i, j in itertools.permutations(range(4), 2):  # no layer is better elsewhere
        moved = list(cut.layers)
        moved[i], moved[j] = moved[i] - 1, moved[j] + 1
        assert max(stage_work(partition(config, 4, moved), 256)) >= most


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_plan_charges_every_exit_where_its_schedule_computes_it(placement):
    config = SMALL.replace(exits=(ExitConfig(2), ExitConfig(4), ExitConfig(5)))
    cut = partition(config, 4, placement=placement)
    found = costs(PipelineConfig(), cut, 8)
    for i in range(4):
        assert (found.entry[i].forward > 0) == (i in cut.input_exit_stages)
        assert (found.inner[i].forward > 0) == bool(cut.on(i, INSIDE))
