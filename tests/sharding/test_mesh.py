import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.axes import Axes
from eejax.common.errors import ConfigError
from eejax.sharding.mesh import MeshConfig, check_batch, make_mesh, mesh_axes


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_mesh_has_the_asked_shape_or_says_what_is_missing(data, pipe, model):
    config = MeshConfig(data, pipe, model)
    if config.size > (have := jax.device_count()):
        with pytest.raises(ConfigError, match=f"needs {config.size} devices.*has {have}"):
            make_mesh(config)
        return
    mesh = make_mesh(config)
    assert dict(mesh.shape) == {"data": data, "pipe": pipe, "model": model}
    assert list(mesh.devices.flat) == jax.devices()[: config.size]


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_bad_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="MeshConfig.pipe"):
        MeshConfig(pipe=value)


def test_parameters_are_not_spread_over_stages():
    with pytest.raises(
        ConfigError, match="MeshConfig.shard_params = True: must be False with mesh"
    ):
        MeshConfig(data=2, pipe=2, shard_params=True)


def test_axes_of_one_device_have_no_name():
    assert mesh_axes(make_mesh(MeshConfig(data=2, model=4))) == Axes(data="data", model="model")
    assert mesh_axes(make_mesh(MeshConfig())) == Axes()


def test_the_sequence_is_cut_over_the_model_axis():
    for sizes in ({"model": 4}, {"data": 2}):
        config = MeshConfig(**sizes, sequence=True)
        axes = mesh_axes(make_mesh(config), config)
        assert axes.sequence == axes.model == ("model" if "model" in sizes else None)


@pytest.mark.parametrize("field", ["sequence", "shard_optimizer", "shard_params"])
def test_switches_are_true_or_false(field):
    with pytest.raises(ConfigError, match=f"MeshConfig.{field} = 1: must be True or False"):
        MeshConfig(**{field: 1})


@pytest.mark.parametrize(
    "batch, microbatches, fits",
    [(8, 2, True), (4, 1, True), (6, 1, False), (4, 2, False), (2, 1, False)],
)
def test_batch_must_fill_the_data_shards(batch, microbatches, fits):
    mesh = make_mesh(MeshConfig(data=4))
    if fits:
        check_batch(batch, mesh, microbatches)
    else:
        with pytest.raises(ConfigError, match=f"batch_size = {batch}: must be a multiple of"):
            check_batch(batch, mesh, microbatches)
