"""EE-Tuning: early exits for a trained model, whose own parameters stay as they are.

Pan et al., "EE-Tuning: An Economical yet Scalable Solution for Tuning Early-Exit Large Language
Models" (2024). Only the layers below the deepest tuned exit are read and run; only the tuned exits
have gradients and optimiser state.
"""

from __future__ import annotations

import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eejax.checkpoint.model import (
    TOKENIZER,
    Model,
    load_metadata,
    load_model,
    load_run_tokenizer,
)
from eejax.common.errors import CheckpointError
from eejax.common.trees import Tree, join, split
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.exits import head_name
from eejax.sharding import rules
from eejax.train import inputs
from eejax.train.config import Experiment
from eejax.train.placement import placement
from eejax.train.runs import saved_experiment
from eejax.train.scope import Scope, first_layers


def base_experiment(workdir: str | os.PathLike) -> Experiment:
    """The experiment of a trained run, from which a tuning run takes model and text.

    Raises `CheckpointError` where `workdir` holds no run's checkpoint.
    """
    return saved_experiment(load_metadata(workdir))


def scope(experiment: Experiment) -> Scope:
    """What of `experiment.model` is trained."""
    tune, model = experiment.tune, experiment.model
    if tune.base is None:
        return Scope(model)
    tuned = tuple(e.name for e in model.exits if e.boundary in tune.exits)
    return Scope(model, tuned, taught=bool(experiment.loss.distillation))


class Base(NamedTuple):
    """What a run reads of its base: initial values of the tuned exits, frozen parameters, and the
    step of the base's checkpoint they are of."""

    first: Tree
    frozen: Tree
    step: int


def load_base(experiment: Experiment, mesh: Mesh, workdir: pathlib.Path) -> Base:
    """The base of `experiment`, laid onto `mesh`.

    The base's tokenizer becomes the workdir's. Reads the held layers and, for the initial values,
    the final norm and head; for a block that starts as a copy the layers up to the last.

    Raises:
      CheckpointError: no usable checkpoint in the base, a model that differs from the
        experiment's in more than its tuned exits, or another tokenizer in the workdir.
    """
    held = scope(experiment)
    base = _load(experiment, mesh, held)
    if not (workdir / TOKENIZER).is_dir():
        inputs.save_tokenizer(base.tokenizer, workdir / TOKENIZER)
    load_run_tokenizer(workdir, base.metadata)  # another run's would give the trunk other tokens
    # Compiled, so that the rest of the model is not drawn.
    draw = jax.jit(lambda key: params.init(held.config, key)["exits"])
    fresh = draw(jax.random.key(experiment.train.seed))
    values = {}
    for e in held.config.exits:
        if e.name not in held.tuned:
            continue
        saved = base.params.get("exits", {}).get(e.name)
        if saved is not None:
            values[e.name] = saved
        elif experiment.tune.start == "copy":
            values[e.name] = join(fresh[e.name], copied(base.params, base.config, e))
        else:
            values[e.name] = fresh[e.name]
    places = placement(held, mesh, experiment.pipeline)
    kept, _ = split(held.cut(base.params), lambda name: held.held(name) and not held.trains(name))
    place = lambda tree, declared: jax.tree.map(
        lambda a, s: jax.device_put(jnp.asarray(a, s.dtype), s.sharding),
        places.place(tree),
        rules.structs(declared, mesh, experiment.mesh.params_over),
    )
    trained, frozen = places.declarations
    return Base(place({"exits": values}, trained), place(kept, frozen), base.step)


def copied(base: Tree, config: ModelConfig, e: ExitConfig) -> Tree:
    """Initial parameters of exit `e` as copies of what the model has (EE-Tuning, section 3.1).

    base: parameters of a model of `config`, which may lack layers that are not copied. norm <-
    the final norm; head <- the final exit's output embedding; mlp <- that of the layer below the
    boundary (above it at boundary 0), with the norm it reads; block <- the last layer. What the
    model has no counterpart of is left out, and so is a norm behind the layer's mlp, which an
    exit's mlp does not have.
    """
    final, tree = base["final"], {}
    if e.norm and "norm" in final:
        tree["norm"] = final["norm"]
    if "head_bias" in final:
        tree["head_bias"] = final["head_bias"]
    if e.head == "own":
        where = head_name(config, config.n_exits)
        tables = {"own": final, "tied": base["embed"], "shared": base}
        names = {"own": "head", "tied": "tokens", "shared": "shared_head"}
        tree["head"] = tables[where][names[where]]
    if e.mlp:
        layer = jax.tree.map(lambda a: a[max(e.boundary, 1) - 1], base["layers"])
        one_norm = config.residual == "parallel_one_norm"
        norms = {"mlp_norm": layer.get("attn_norm" if one_norm else "mlp_norm")}
        tree |= {"mlp": layer["mlp"]} | {k: v for k, v in norms.items() if v is not None}
    if e.block:
        tree["block"] = jax.tree.map(lambda a: a[config.n_layers - 1], base["layers"])
    # The exit computes in its own memory: a donated step must not give away the model's.
    return jax.tree.map(jnp.copy, tree)


def complete(experiment: Experiment, exits: Tree, mesh: Mesh) -> Tree:
    """All parameters of `experiment.model`: the base's, and the tuned `exits` in their place."""
    base = _load(experiment, mesh, None).params
    names = params.abstract(experiment.model)["exits"]
    both = base["exits"] | exits
    return base | {"exits": {name: both.get(name, {}) for name in names}}


def _load(experiment: Experiment, mesh: Mesh, held: Scope | None) -> Model:
    """The base: whole, or what a run in the scope `held` reads of it."""

    def part(config: ModelConfig, everything: Tree) -> Tree:
        check_base(config, experiment)
        if held is None:
            return everything
        old = {e.name for e in config.exits}
        new = [e for e in held.config.exits if e.name in held.tuned and e.name not in old]
        copies = new if experiment.tune.start == "copy" else []
        read = lambda name: (
            held.held(name)
            or (bool(copies) and name.split("/")[0] == "final")
            or (any(e.head == "own" for e in copies) and name == "shared_head")
        )
        tree, _ = split(everything, read)
        depth = max(held.depth, any(e.mlp for e in copies))
        depth = config.n_layers if any(e.block for e in copies) else depth
        # Fewer layers may not divide by the stages that all of them divide by.
        layers = params.abstract(config)["layers"]
        lower = params.map_params(lambda p: first_layers(p, depth), layers)
        return tree | {"layers": rules.structs(lower, mesh)}

    tune = experiment.tune
    try:
        return load_model(tune.base, step=tune.base_step, mesh=mesh, part=part)
    except CheckpointError as error:
        raise CheckpointError(f"tune.base = {tune.base!r}: {error}") from error


def check_base(config: ModelConfig, experiment: Experiment) -> None:
    """Raises `CheckpointError` unless the models differ in tuned exits alone.

    config: the base's.
    """
    model, tuned = experiment.model, experiment.tune.exits
    rest = lambda c: c.replace(exits=tuple(e for e in c.exits if e.boundary not in tuned))
    old, new = rest(config).to_dict(), rest(model).to_dict()
    differ = [f"{k}: {old[k]!r} in the base, {new[k]!r} wanted" for k in new if old[k] != new[k]]
    have = {e.boundary: e for e in config.exits}
    differ += [
        f"exit at {e.boundary}: {have[e.boundary]} in the base, {e} wanted"
        for e in model.exits
        if e.boundary in tuned and e.boundary in have and have[e.boundary] != e
    ]
    heads = {head_name(config, e) for e in range(config.n_exits + 1)}
    differ += [
        f"exit at {e.boundary}: its head is shared, and the base has no shared head"
        for e in model.exits
        if e.head == "shared" and "shared" not in heads
    ]
    if differ:
        raise CheckpointError(
            "the model is not the base's with other tuned exits:\n  " + "\n  ".join(differ)
        )
