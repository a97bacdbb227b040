"""Weights of the model that a run begins with, and the exits that it adds to them.

Where only exits are trained (EE-Tuning, Pan et al. 2024), only the layers below the deepest of them
are read and run, and only the exits have gradients and optimiser state.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eejax.checkpoint import overlay
from eejax.checkpoint.digest import digest, digest_of
from eejax.checkpoint.hf.load import Pretrained, fetched, load_pretrained
from eejax.checkpoint.language_model import has_tokenizer, tokenizer_of
from eejax.checkpoint.model import (
    TOKENIZER,
    is_run,
    load_metadata,
    load_run,
    load_run_tokenizer,
    model_config,
)
from eejax.common.axes import MODEL
from eejax.common.errors import CheckpointError, require_given
from eejax.common.paths import expanded
from eejax.common.trees import Tree, join, path_name, split
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer, check_vocabulary, save_tokenizer
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.exits import head_name
from eejax.sharding import distributed, rules
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import inputs
from eejax.train.base import BASE, FREE, FixedFields, naming_base, origin
from eejax.train.config import Experiment
from eejax.train.program import Program
from eejax.train.scope import Scope, first_layers
from eejax.train.starts import copied_exit


class BaseWeights(NamedTuple):
    """Weights that a run begins with.

    Attributes:
      first: initial values of the trained parameters.
      frozen: parameters that the loss reads and no step changes.
      facts: facts about the base.
    """

    first: Tree
    frozen: Tree
    facts: FixedFields


def load_base(experiment: Experiment, mesh: Mesh, workdir: pathlib.Path) -> BaseWeights:
    """Read the weights of `train.base`, add the exits of `experiment`, and lay them onto `mesh`.

    The base's tokenizer becomes the workdir's. Where only exits are trained, the layers that run
    are read and, for initial values, the final norm and head; a block that starts as a copy also
    needs the layers up to the last.

    Raises:
      CheckpointError: no usable model, one that differs from the experiment's in more than is
        allowed, or another tokenizer in the workdir.
      DataError: a pretrained model without a tokenizer.
    """
    scope = Scope.of(experiment)
    model, base = scope.config, _load(experiment, mesh, scope)
    tokenizer = base.tokenizer
    if tokenizer is None:
        assert base.pretrained is not None  # a run has a tokenizer
        tokenizer = _tokenizer(base.pretrained, experiment, workdir)
    folder = workdir / TOKENIZER
    distributed.broadcast_from_process_zero(
        lambda: folder.is_dir() or save_tokenizer(tokenizer, folder)
    )
    # Another run's tokenizer would give the model other tokens.
    load_run_tokenizer(workdir, {"tokenizer": tokenizer.fingerprint})
    # Compiled, so that XLA drops the initialization of the rest of the model.
    draw = jax.jit(lambda key: params.init(model, key)["exits"])
    fresh = draw(jax.random.key(experiment.train.seed))
    old, values = base.params.get("exits", {}), {}
    for e in model.exits:
        if scope.tuned is not None and e.name not in scope.tuned:
            continue
        values[e.name] = old.get(e.name, fresh[e.name])
        if e.name not in old and experiment.tune.start == "copy":
            values[e.name] = join(fresh[e.name], copied_exit(base.params, base.config, e))
    tree = overlay.above(model, base.config, base.params)
    if scope.tuned is None:
        first, kept = tree | {"exits": values}, {}
    else:
        kept, _ = split(scope.cut(tree), lambda name: scope.reads(name) and not scope.trains(name))
        first = {"exits": values}
    places = Program(experiment, mesh).placement

    def place(tree, declared):
        return jax.tree.map(
            lambda a, s: jax.device_put(jnp.asarray(a, s.dtype), s.sharding),
            places.place(_fitted(tree, model)),
            rules.structs(declared, mesh, experiment.mesh.params_over),
        )

    facts = FixedFields(
        _source(experiment),
        base.step,
        base.config,
        tokenizer.fingerprint,
        _digest(base.config, base.params, mesh),
        base.facts,
    )
    trained, frozen = places.declarations
    return BaseWeights(place(first, trained), place(kept, frozen) if kept else {}, facts)


def _tokenizer(found: Pretrained, experiment: Experiment, workdir: pathlib.Path) -> Tokenizer:
    """Load a pretrained model's tokenizer: its own, the workdir's, or the configured one."""
    saved, size = workdir / TOKENIZER, found.config.vocab_size
    if has_tokenizer(found.path):
        return tokenizer_of(found.path, found.raw, size)
    if saved.is_dir():
        tokenizer = load_tokenizer(saved)
        check_vocabulary(tokenizer, size)
        return tokenizer
    spec = experiment.data.tokenizer
    return tokenizer_of(found.path, found.raw, size, None if spec == inputs.BASE else spec)


def complete(experiment: Experiment, exits: Tree, mesh: Mesh) -> Tree:
    """Return all parameters of `experiment.model`: the base's, with the tuned `exits`."""
    base, model = _load(experiment, mesh, None), experiment.model
    names = params.abstract(model)["exits"]
    both = {**base.params["exits"], **exits}
    tree = overlay.above(model, base.config, base.params)
    return _fitted(tree | {"exits": {name: both.get(name, {}) for name in names}}, model)


def _fitted(tree: Tree, model: ModelConfig) -> Tree:
    """Pad or cut the vocabulary rows of a part of `model`'s parameters to the declared number."""
    declared = params.abstract(model)

    def one(path, a):
        p = declared
        for key in path:
            p = p[key.key]
        for axis in (i for i, name in enumerate(p.axes) if name == "v"):
            rows = jax.lax.slice_in_dim(a, 0, min(a.shape[axis], model.vocab_size), axis=axis)
            more = p.shape[axis] - rows.shape[axis]
            if a.shape[axis] != p.shape[axis]:
                a = jnp.pad(rows, [(0, more if i == axis else 0) for i in range(a.ndim)])
        return a

    return jax.tree_util.tree_map_with_path(one, tree)


class _Read(NamedTuple):
    """A base as it was read.

    Attributes:
      pretrained: the pretrained model, None for a run of eejax.
      facts: `Pretrained.facts` of the model, None for a run without a pretrained model below it.
    """

    config: ModelConfig
    params: Tree
    step: int | None
    tokenizer: Tokenizer | None
    pretrained: Pretrained | None = None
    facts: Mapping[str, Any] | None = None


def _load(experiment: Experiment, mesh: Mesh, scope: Scope | None) -> _Read:
    """Read the base: whole if `scope` is None, else the part that a run of that scope needs."""
    source, step = _source(experiment), experiment.train.base_step
    path = expanded(source)

    def part(config: ModelConfig, everything: Tree) -> Tree:
        check_base(config, experiment)
        if scope is None or scope.tuned is None:
            return everything
        copies = experiment.tune.start == "copy"
        return _read_by(scope, config, copies, everything, _mesh_for(config, mesh))

    def load() -> _Read:
        if is_run(path):
            metadata = load_metadata(path, step=step)
            config = model_config(metadata)
            run = load_run(path, step=step, mesh=_mesh_for(config, mesh), part=part)
            facts = metadata.get("pretrained")
            return _Read(run.config, run.params, run.step, run.tokenizer, facts=facts)
        found = load_pretrained(fetched(source), mesh=mesh)
        tree = part(found.config, found.params)
        return _Read(found.config, tree, None, None, found, found.facts)

    return naming_base(source, load)


def _source(experiment: Experiment) -> str:
    return require_given("train.base", experiment.train.base, "must name the base to begin with")


def _mesh_for(config: ModelConfig, mesh: Mesh) -> Mesh:
    """Return the mesh onto which a base is read.

    It has no model axis if the base's vocabulary, which may be padded differently from the run's,
    is not divisible by it.
    """
    if config.padded_vocab % mesh.shape[MODEL] == 0:
        return mesh
    return make_mesh(MeshConfig(data=jax.device_count() if distributed.is_multiprocess() else 1))


def _read_by(scope: Scope, config: ModelConfig, copies: bool, everything: Tree, mesh: Mesh) -> Tree:
    """Select the parameters of a base, or their shape structs, that training exits alone needs.

    These are the ones that the loss reads, and where new exits are copies, their originals.
    """
    assert scope.tuned is not None
    old = {e.name for e in config.exits}
    new = [e for e in scope.config.exits if e.name in scope.tuned and e.name not in old]
    copied = new if copies else []
    # A head that becomes shared is the base's final head.
    own = config.head == "own" and scope.reads("shared_head")

    def read(name):
        return (
            scope.reads(name)
            or (bool(copied) and name.split("/")[0] == "final")
            or (any(e.head == "own" for e in copied) and name == "shared_head")
            or (own and name == "final/head")
        )

    tree, _ = split(everything, read)
    depth = max(scope.depth, int(any(e.mlp for e in copied)))  # the lowest, whose MLP is copied
    depth = config.n_layers if any(e.block for e in copied) else depth
    if isinstance(jax.tree.leaves(everything)[0], jax.Array):
        return tree | {"layers": jax.tree.map(lambda a: first_layers(a, depth), tree["layers"])}
    # The number of layers that are read may not be divisible by the stages.
    lower = params.map_params(lambda p: first_layers(p, depth), params.abstract(config)["layers"])
    return tree | {"layers": rules.structs(lower, mesh)}


def check_base(config: ModelConfig, experiment: Experiment) -> None:
    """Raise `CheckpointError` unless the experiment's model is the base's with more exits.

    `config` is the base's. Fields of `FREE` may differ, and a final head may become a shared one.
    """
    model = experiment.model
    old, new = config.to_dict(), model.to_dict()
    free = (*FREE, *["head"] * ((config.head, model.head) == ("own", "shared")))
    differ = [
        f"{k}: {old[k]!r} in the base, {new[k]!r} wanted"
        for k in new
        if k not in free and old[k] != new[k]
    ]
    wanted = {e.boundary: e for e in model.exits}
    differ += [
        f"exit at {e.boundary}: {e} in the base, {wanted.get(e.boundary)} wanted"
        for e in config.exits
        if wanted.get(e.boundary) != e
    ]
    have = {e.boundary for e in config.exits}
    heads = {head_name(model, model.n_exits), *(e.head for e in config.exits)}
    differ += [
        f"exit at {e.boundary}: its head is shared, and the base has no shared head"
        for e in model.exits
        if e.boundary not in have and e.head == "shared" and "shared" not in heads
    ]
    if differ:
        raise CheckpointError(
            "the model is not the base's with more exits:\n  " + "\n  ".join(differ)
        )


def same_base(
    workdir: pathlib.Path, metadata: Mapping[str, Any], facts: FixedFields | None
) -> None:
    """Compare the base of a run that resumes with the one that it began with.

    Args:
      workdir: the run's folder.
      metadata: metadata of the checkpoint that the run resumes from.
      facts: facts of the base, if the run reads it again.

    Raises:
      CheckpointError: if base.json differs from the checkpoint's metadata, or the base has other
        parameters than at the run's start.
    """
    kept, saved = origin(workdir), metadata.get("base")
    if kept is None or kept != saved:
        raise CheckpointError(
            f"{workdir / BASE}: must say what the run's checkpoints say, {saved}, and "
            f"{'is missing' if kept is None else f'says {kept}'}. Put it back (the same command "
            "writes it into a new workdir), or begin anew in another workdir."
        )
    if facts is not None and kept["digest"] != facts.digest:
        raise CheckpointError(
            f"train.base = {facts.source!r}: its parameters (digest {facts.digest}) are not those "
            f"that the run in {workdir} began with (digest {kept['digest']}, {kept['source']!r}). "
            "Put that model back, or begin anew in another workdir."
        )


def _digest(config: ModelConfig, tree: Tree, mesh: Mesh) -> str:
    """Digest parameters that may lie on the devices of several processes."""
    if not distributed.is_multiprocess():
        return digest(config, tree)
    found = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {path_name(path): leaf for path, leaf in found}
    whole = rules.replicated(mesh)

    def values(name, at):
        return jax.jit(lambda a: a[at], out_shardings=whole)(leaves[name])

    return digest_of(config, {name: a.shape for name, a in leaves.items()}, values)
