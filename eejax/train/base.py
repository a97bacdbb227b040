"""A run that begins with the weights of a trained model: another run's, or a pretrained one's.

`with_base` makes the experiment: what the base fixes, its model and tokenizer, comes from there.
`load_base` reads the weights and adds the exits that the base does not have. Where exits alone are
trained (EE-Tuning, Pan et al. 2024), only the layers below the deepest of them are read and run,
and only they have gradients and optimiser state.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eejax.checkpoint import overlay
from eejax.checkpoint.digest import digest, digest_of
from eejax.checkpoint.files import write_text
from eejax.checkpoint.hf.load import Pretrained, fetched, load_pretrained, pretrained_config
from eejax.checkpoint.model import (
    CHECKPOINTS,
    TOKENIZER,
    TUNING,
    load_metadata,
    load_model,
    load_run_tokenizer,
    model_config,
)
from eejax.common.axes import MODEL
from eejax.common.errors import CheckpointError, DataError, require
from eejax.common.trees import Tree, join, path_name, split
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer, check_vocabulary
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.exits import head_name
from eejax.sharding import distributed, rules
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train import inputs
from eejax.train.config import DataConfig, Experiment
from eejax.train.placement import placement
from eejax.train.pretrained import has_tokenizer, is_run, tokenizer_of
from eejax.train.scope import Scope, first_layers
from eejax.train.starts import copied_exit

T = TypeVar("T")

BASE = "base.json"
FREE = ("exits", "dtype", "dropout", "vocab_multiple")
"""Fields of a model that are the run's own. Exits are added to the base's."""


class Facts(NamedTuple):
    """What a base fixes.

    Attributes:
      source: what `train.base` says.
      step: the checkpoint of a run; None for a pretrained model.
      config: the base's model.
      tokenizer: its fingerprint.
      digest: of the parameters that were read (`checkpoint.digest`); None before they are.
    """

    source: str
    step: int | None
    config: ModelConfig
    tokenizer: str
    digest: str | None = None


def base_model(
    source: str, step: int | None = None, workdir: str | os.PathLike | None = None
) -> ModelConfig:
    """The model of a base, as `with_base` finds it.

    Raises `CheckpointError` for what is no model.
    """
    if (facts := remembered(workdir, source)) is not None:
        return facts.config
    path = pathlib.Path(source).expanduser()
    if is_run(path):
        return _named(source, lambda: model_config(load_metadata(path, step=step)))
    return _named(source, lambda: pretrained_config(fetched(source))[0])


def with_base(
    values: Mapping[str, Any],
    workdir: str | os.PathLike | None = None,
    given: Collection[str] = (),
) -> Experiment:
    """The experiment of a configuration, its model and tokenizer those of `train.base`.

    Args:
      values: of a configuration file, as `Experiment.from_dict` takes them. Fields of `model` that
        are None or have their default are the base's; exits are added to the base's, at its
        temperature unless they say another. Exit weights that are left out are 1. A tokenizer
        must be the base's, but may bring a chat template.
      workdir: where the run lives. It gets the base's tokenizer, and what it remembers of the base
        (`Facts`) is taken from there, so that a run resumes without its base.
      given: fields that were set on the command line, such as "model.norm": they must be the
        base's even where they have their default.

    Raises:
      ConfigError: a field that contradicts the base.
      CheckpointError: a base that is no model.
      DataError: another tokenizer than the base's.
    """
    plain = lambda v: v.to_dict() if hasattr(v, "to_dict") else dict(v)
    values = {name: plain(section) for name, section in plain(values).items()}
    train = values.get("train", {})
    source = train.get("base")
    if source is None:
        return Experiment.from_dict(values)
    data = values.setdefault("data", {})
    spec = data.get("tokenizer", DataConfig.tokenizer)
    chosen = spec if spec != DataConfig.tokenizer or "data.tokenizer" in given else None
    facts = remembered(workdir, source)
    if facts is None:
        facts, tokenizer = _facts(source, train.get("base_step"), spec, chosen)
        if workdir is not None:
            workdir = pathlib.Path(workdir).expanduser()
            require(
                workdir.resolve() != pathlib.Path(source).expanduser().resolve(),
                "workdir", str(workdir), "must be another than train.base",
            )  # fmt: skip
            distributed.by_first(lambda: _keep(tokenizer, workdir / TOKENIZER))
    values["model"] = _model(values.get("model", {}), facts, given)
    data["tokenizer"] = inputs.BASE
    weights = values.setdefault("exit_weights", {})
    if not weights.get("weights"):
        chosen = values.get("tune", {}).get("exits") or values["model"]["exits"]
        weights["weights"] = (1.0,) * len(chosen)
    return Experiment.from_dict(values)


def _keep(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Save the tokenizer, unless it is there, or another one, which is named later on. One with
    another chat template replaces what an attempt before has left, but never that of a run."""
    if folder.is_dir():
        if any((folder.parent / name).is_dir() for name in (CHECKPOINTS, TUNING)):
            return
        old = load_tokenizer(folder)
        if old.fingerprint != tokenizer.fingerprint or old.chat == tokenizer.chat:
            return
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    inputs.save_tokenizer(tokenizer, folder)


def _model(wanted: Mapping[str, Any], facts: Facts, given: Collection[str]) -> dict[str, Any]:
    """The base's model with the fields of `wanted` that are the run's own."""
    base = facts.config.to_dict()
    unset = lambda f: None if f.default is dataclasses.MISSING else _plain(f.default)
    defaults = {f.name: unset(f) for f in dataclasses.fields(ModelConfig)}
    own = dict(base)
    for name, value in wanted.items():
        if name not in base or name == "exits":
            continue  # an unknown field is named by ModelConfig.from_dict
        value, said = _plain(value), any(f"{g}.".startswith(f"model.{name}.") for g in given)
        if not said and (value is None or value == defaults[name]):
            continue
        if name in FREE:
            own[name] = value
            continue
        require(
            value == base[name], f"model.{name}", value,
            f"must be the base's, {base[name]!r} (train.base = {facts.source!r})",
            "Leave the field out: the model is the base's.",
        )  # fmt: skip
    exits = {e["boundary"]: e for e in base["exits"]}
    for e in map(dict, _plain(wanted.get("exits") or ())):
        boundary = e.get("boundary")
        e = {"temperature": base["temperature"]} | e
        have = exits.get(boundary)
        full = dataclasses.asdict(ModelConfig.from_dict(base | {"exits": [e]}).exits[0])
        require(
            have is None or full == have, "model.exits", full,
            f"must be the base's at that boundary, {have!r} (train.base = {facts.source!r})",
            "Leave it out: exits of the base stay.",
        )  # fmt: skip
        exits[boundary] = full
    own["exits"] = [e for _, e in sorted(exits.items())]
    if base["head"] == "own" and any(e["head"] == "shared" for e in own["exits"]):
        own["head"] = "shared"  # the same table under another name
    return own | {k: v for k, v in wanted.items() if k not in base}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return dict(value)
    # As `ModelConfig.to_dict` has them.
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _facts(source: str, step: int | None, spec: str, chosen: str | None) -> tuple[Facts, Tokenizer]:
    """What a base fixes, and its tokenizer: the configured `spec` where it has none of its own,
    and else one that `chosen` must be."""
    path = pathlib.Path(source).expanduser()
    if is_run(path):
        metadata = _named(source, lambda: load_metadata(path, step=step))
        tokenizer = _named(source, lambda: load_run_tokenizer(path, metadata))
        facts = Facts(source, step, model_config(metadata), tokenizer.fingerprint)
    else:
        require(
            step is None, "train.base_step", step,
            f"must be None where the base is no run of eejax ({source})",
        )  # fmt: skip
        path = _named(source, lambda: fetched(source))
        config, raw = _named(source, lambda: pretrained_config(path))
        own = has_tokenizer(path)
        tokenizer = tokenizer_of(path, raw, config.vocab_size, None if own else spec)
        chosen = chosen if own else None
        facts = Facts(source, None, config, tokenizer.fingerprint)
    if chosen not in (None, inputs.BASE):
        other = None if chosen == inputs.BPE else load_tokenizer(chosen)
        if other is None or other.fingerprint != tokenizer.fingerprint:
            told = "one that is trained anew" if other is None else other.fingerprint
            raise DataError(
                f"data.tokenizer = {chosen!r}: must be the base's, {tokenizer.fingerprint} "
                f"(train.base = {source!r}), and is {told}. Leave the field out."
            )
        if other.chat is not None:
            tokenizer.chat = other.chat
    return facts, tokenizer


def remembered(workdir: str | os.PathLike | None, source: str | None = None) -> Facts | None:
    """What a workdir remembers of the base that its run began with; None where it began without
    one, or with another than `source`. Raises `CheckpointError` for what cannot be read."""
    file = None if workdir is None else pathlib.Path(workdir).expanduser() / BASE
    if file is None or not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        facts = Facts(**values | {"config": ModelConfig.from_dict(values["config"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error}). Put it back, or begin anew in another workdir."
        ) from error
    return facts if source in (None, facts.source) else None


def remember(workdir: pathlib.Path, facts: Facts) -> None:
    """Writes `facts` for `remembered`."""
    values = facts._asdict() | {"config": facts.config.to_dict()}
    distributed.by_first(lambda: write_text(workdir / BASE, json.dumps(values, indent=1) + "\n"))


def origin(workdir: pathlib.Path) -> dict[str, Any] | None:
    """What a run began with, as its checkpoints say it."""
    facts = remembered(workdir)
    return facts and {"source": facts.source, "step": facts.step, "digest": facts.digest}


class Base(NamedTuple):
    """The weights that a run begins with.

    Attributes:
      first: initial values of the trained parameters.
      frozen: those that the loss reads and no step changes.
      facts: what they are of.
    """

    first: Tree
    frozen: Tree
    facts: Facts


def load_base(experiment: Experiment, mesh: Mesh, workdir: pathlib.Path) -> Base:
    """The weights of `train.base` with the exits of `experiment`, laid onto `mesh`.

    The base's tokenizer becomes the workdir's. Where exits alone are trained, the held layers are
    read and, for initial values, the final norm and head; for a block that starts as a copy the
    layers up to the last.

    Raises:
      CheckpointError: no usable model, one that differs from the experiment's in more than may
        differ, or another tokenizer in the workdir.
      DataError: a pretrained model without a tokenizer.
    """
    held = Scope.of(experiment)
    model, base = held.config, _load(experiment, mesh, held)
    tokenizer = base.tokenizer or _tokenizer(base.pretrained, experiment, workdir)
    if not (workdir / TOKENIZER).is_dir():
        inputs.save_tokenizer(tokenizer, workdir / TOKENIZER)
    # Another run's would give the model other tokens.
    load_run_tokenizer(workdir, {"tokenizer": tokenizer.fingerprint})
    # Compiled, so that the rest of the model is not drawn.
    draw = jax.jit(lambda key: params.init(model, key)["exits"])
    fresh = draw(jax.random.key(experiment.train.seed))
    old, values = base.params.get("exits", {}), {}
    for e in model.exits:
        if held.tuned is not None and e.name not in held.tuned:
            continue
        values[e.name] = old.get(e.name, fresh[e.name])
        if e.name not in old and experiment.tune.start == "copy":
            values[e.name] = join(fresh[e.name], copied_exit(base.params, base.config, e))
    tree = overlay.above(model, base.config, base.params)
    if held.tuned is None:
        first, kept = tree | {"exits": values}, {}
    else:
        kept, _ = split(held.cut(tree), lambda name: held.held(name) and not held.trains(name))
        first = {"exits": values}
    places = placement(held, mesh, experiment.pipeline)
    place = lambda tree, declared: jax.tree.map(
        lambda a, s: jax.device_put(jnp.asarray(a, s.dtype), s.sharding),
        places.place(_fitted(tree, model)),
        rules.structs(declared, mesh, experiment.mesh.params_over),
    )
    facts = Facts(
        experiment.train.base, base.step, base.config, tokenizer.fingerprint,
        _digest(base.config, base.params, mesh),
    )  # fmt: skip
    trained, frozen = places.declarations
    return Base(place(first, trained), place(kept, frozen) if kept else {}, facts)


def _tokenizer(found: Pretrained, experiment: Experiment, workdir: pathlib.Path) -> Tokenizer:
    """That of a pretrained model: its own, the workdir's, or the one that is configured."""
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
    """All parameters of `experiment.model`: the base's, and the tuned `exits` in their place."""
    base, model = _load(experiment, mesh, None), experiment.model
    names = params.abstract(model)["exits"]
    both = base.params["exits"] | exits
    tree = overlay.above(model, base.config, base.params)
    return _fitted(tree | {"exits": {name: both.get(name, {}) for name in names}}, model)


def _fitted(tree: Tree, model: ModelConfig) -> Tree:
    """Parameters of `model`, or a part of their tree, with as many rows of padding as it has."""
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
    """A base as it was read. pretrained: where it is no run of eejax."""

    config: ModelConfig
    params: Tree
    step: int | None
    tokenizer: Tokenizer | None
    pretrained: Pretrained | None = None


def _load(experiment: Experiment, mesh: Mesh, held: Scope | None) -> _Read:
    """The base: whole, or what a run in the scope `held` reads of it."""
    train, path = experiment.train, pathlib.Path(experiment.train.base).expanduser()

    def part(config: ModelConfig, everything: Tree) -> Tree:
        check_base(config, experiment)
        if held is None or held.tuned is None:
            return everything
        copies = experiment.tune.start == "copy"
        return _read_by(held, config, copies, everything, _mesh_for(config, mesh))

    def load() -> _Read:
        if is_run(path):
            config = model_config(load_metadata(path, step=train.base_step))
            run = load_model(path, step=train.base_step, mesh=_mesh_for(config, mesh), part=part)
            return _Read(run.config, run.params, run.step, run.tokenizer)
        found = load_pretrained(fetched(train.base), mesh=mesh)
        return _Read(found.config, part(found.config, found.params), None, None, found)

    return _named(train.base, load)


def _mesh_for(config: ModelConfig, mesh: Mesh) -> Mesh:
    """The mesh that a base is read onto: one without a model axis where its vocabulary, which may
    have other padding than the run's, does not divide by that."""
    if config.padded_vocab % mesh.shape[MODEL] == 0:
        return mesh
    return make_mesh(MeshConfig(data=jax.device_count() if distributed.several() else 1))


def _read_by(held: Scope, config: ModelConfig, copies: bool, everything: Tree, mesh: Mesh) -> Tree:
    """What a run that trains exits alone reads of a base's parameters, or of their shape structs:
    what its loss reads, and where new exits are copies, what they are copies of."""
    old = {e.name for e in config.exits}
    new = [e for e in held.config.exits if e.name in held.tuned and e.name not in old]
    copied = new if copies else []
    # A head that becomes a shared one is the base's own.
    own = config.head == "own" and held.held("shared_head")
    read = lambda name: (
        held.held(name)
        or (bool(copied) and name.split("/")[0] == "final")
        or (any(e.head == "own" for e in copied) and name == "shared_head")
        or (own and name == "final/head")
    )
    tree, _ = split(everything, read)
    depth = max(held.depth, any(e.mlp for e in copied))
    depth = config.n_layers if any(e.block for e in copied) else depth
    if isinstance(jax.tree.leaves(everything)[0], jax.Array):
        return tree | {"layers": jax.tree.map(lambda a: first_layers(a, depth), tree["layers"])}
    # Fewer layers may not divide by the stages that all of them divide by.
    lower = params.map_params(lambda p: first_layers(p, depth), params.abstract(config)["layers"])
    return tree | {"layers": rules.structs(lower, mesh)}


def check_base(config: ModelConfig, experiment: Experiment) -> None:
    """Raises `CheckpointError` where the experiment's model is not the base's with more exits.

    config: the base's. Fields of `FREE` may differ, and a head of its own may become a shared one.
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


def same_base(workdir: pathlib.Path, found: Facts) -> None:
    """Raises `CheckpointError` where the base of a run that goes on has other parameters than when
    it began."""
    began = remembered(workdir)
    if began is not None and began.digest != found.digest:
        raise CheckpointError(
            f"train.base = {found.source!r}: its parameters (digest {found.digest}) are not those "
            f"that the run in {workdir} began with (digest {began.digest}, {began.source!r}). Put "
            "that model back, or begin anew in another workdir."
        )


def _digest(config: ModelConfig, tree: Tree, mesh: Mesh) -> str:
    """Of parameters that may lie on the devices of several processes."""
    if not distributed.several():
        return digest(config, tree)
    found = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {path_name(path): leaf for path, leaf in found}
    whole = rules.replicated(mesh)
    values = lambda name, at: jax.jit(lambda a: a[at], out_shardings=whole)(leaves[name])
    return digest_of(config, {name: a.shape for name, a in leaves.items()}, values)


def _named(source: str, load: Callable[[], T]) -> T:
    """`load()`, whose errors name the field."""
    try:
        return load()
    except CheckpointError as error:
        raise CheckpointError(f"train.base = {source!r}: {error}") from error
