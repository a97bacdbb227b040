import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.common.errors import ConfigError
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding import rules
from eejax.sharding.mesh import MeshConfig, make_mesh

ONE = {"data": 1, "pipe": 1, "model": 1}
SPLIT = {"data": 2, "pipe": 2, "model": 2}


@pytest.mark.parametrize(
    "shape, axes, expected",
    [
        ((6, 8, 4, 2), ("l", "d", "n", "h"), P("pipe", None, "model", None)),
        ((6, 8, 16), ("l", "d", "f"), P("pipe", None, "model")),
        ((10, 8), ("v", "d"), P("model", None)),
        ((8,), ("d",), P(None)),
        ((8,), (None,), P(None)),
        ((8, 1, 4), ("d", "k", "h"), P(None, None, None)),  # one KV head: whole on every device
    ],
)
def test_specs_follow_the_rules(shape, axes, expected):
    assert rules.spec("w", shape, axes, SPLIT) == expected
    assert rules.spec("w", shape, axes, ONE) == P(*(None,) * len(shape))


@pytest.mark.parametrize(
    "shape, axes, message",
    [
        ((4, 4), ("n", "f"), "layers/q: logical axes 'n' and 'f'.*both lie on mesh axis 'model'"),
        ((7, 8), ("v", "d"), "layers/q: dimension 'v' of size 7 does not divide by mesh.model = 2"),
        ((7, 8), ("v", "d"), "divides 7, or pad the vocabulary with model.vocab_multiple = 2"),
        ((8, 3, 4), ("d", "k", "h"), "layers/q: dimension 'k' of size 3 does not divide"),
        ((8, 3, 4), ("d", "k", "h"), "that divides 3, or another model.n_kv_heads"),
        ((4,), ("z",), "layers/q: logical axis 'z' has no rule"),
        ((4, 4), ("d",), "layers/q: shape"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(shape, axes, message):
    with pytest.raises(ConfigError, match=message):
        rules.spec("layers/q", shape, axes, SPLIT)


def test_a_rule_to_an_unknown_mesh_axis_is_refused():
    with pytest.raises(ConfigError, match="names no mesh axis"):
        rules.spec("w", (4,), ("d",), ONE, {"d": "tensor"})


def test_every_parameter_of_a_model_finds_its_place():
    config = ModelConfig(
        vocab_size=30,
        vocab_multiple=8,
        n_layers=4,
        d_model=16,
        n_heads=4,
        n_kv_heads=2,
        context_length=8,
        exits=(ExitConfig(2, mlp=True, block=True, head="own"),),
    )
    mesh = make_mesh(MeshConfig(data=2, pipe=2, model=2))
    declaration = params.abstract(config)
    tree = rules.shardings(rules.specs(declaration, mesh), mesh)
    values = jax.device_put(params.init(config, jax.random.key(0)), tree)
    for value, sharding in zip(jax.tree.leaves(values), jax.tree.leaves(tree), strict=True):
        local = value.addressable_shards[0].data.shape
        cuts = [mesh.shape[a] if a else 1 for a in (*sharding.spec, *(None,) * 9)]
        assert local == tuple(np.array(value.shape) // cuts[: value.ndim])
    up = values["layers"]["mlp"]["up"]
    assert up.addressable_shards[0].data.shape == (2, 16, up.shape[2] // 2)


@pytest.mark.parametrize(
    "spec, shape, start, expected",
    [
        (P(None, None), (8, 6), 0, P("data", None)),
        (P(None, None), (6, 8), 0, P(None, "data")),
        (P("model", None), (8, 8), 0, P("model", "data")),
        (P(None, None, "model"), (8, 8, 8), 1, P(None, "data", "model")),
        (P(None, None), (8, 6), 1, P(None, None)),
        (P("model"), (8,), 0, P("model")),
        (P(None), (6,), 0, P(None)),
        (P("data"), (8,), 0, P("data")),
        (P(), (), 0, P()),
    ],
)
def test_an_axis_is_put_on_the_first_dimension_that_is_free_and_divides(
    spec, shape, start, expected
):
    mesh = make_mesh(MeshConfig(data=4, model=2))
    assert rules.spread(spec, shape, mesh, "data", start) == expected
    one = make_mesh(MeshConfig(model=2))
    assert rules.spread(spec, shape, one, "data", start) == spec
