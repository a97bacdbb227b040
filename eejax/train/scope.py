"""The part of a model that a run trains: all, a named part, or some exits on a fixed trunk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

import jax
import numpy as np

from eejax.common.errors import require, require_one_of
from eejax.common.fields import check_fields
from eejax.common.trees import Tree, join, path_name, split
from eejax.models import params
from eejax.models.config import ModelConfig

if TYPE_CHECKING:
    from eejax.train.config import Experiment

Part = Literal["all", "trunk", "heads", "exits"]
PARTS: tuple[Part, ...] = get_args(Part)
Start = Literal["copy", "random"]


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """The part of a model that is trained, where it begins with the weights of `train.base`.

    Attributes:
      part: "all", or the part that is trained while the rest stays as it is: "trunk" (the embedding
        and the layers), "heads" (the norms, projections and output embeddings of all exits, except
        a tied one), or "exits" (the early exits, on layers that are run and not differentiated:
        EE-Tuning, Pan et al. 2024).
      exits: boundaries of the exits that "exits" trains, () for all.
      start: initial values of new exits: "copy" as the logit lens (`train.starts.copied_exit`),
        "random" by `train.seed`. An exit of the base continues from its values there.
    """

    part: Part = "all"
    exits: tuple[int, ...] = ()
    start: Start = "copy"

    def __post_init__(self):
        check_fields(self)
        ascending = list(self.exits) == sorted(set(self.exits))
        require(ascending, "TuneConfig.exits", self.exits, "must be ascending, each boundary once")
        require(
            not self.exits or self.part == "exits",
            "TuneConfig.exits",
            self.exits,
            f"must be empty with tune.part = {self.part!r}",
            "Set tune.part to 'exits', or leave tune.exits empty.",
        )


@dataclasses.dataclass(frozen=True)
class Scope:
    """The part of a model that is trained.

    With part "exits", `tuned` names the exits that are trained while everything else is frozen
    (EE-Tuning, Pan et al. 2024). The model then ends at the deepest of them: layers above it, the
    final exit and other exits are neither loaded nor run, and the loss is that of the tuned exits
    alone. If the final exit teaches them (`taught`), it and all layers are loaded and run, but not
    trained. With any other part the whole model is loaded, run and differentiated, and the rest
    does not move (`moved`).
    """

    config: ModelConfig
    tuned: tuple[str, ...] | None = None
    taught: bool = False
    part: str = "all"

    @classmethod
    def of(cls, experiment: Experiment) -> Scope:
        """Return the scope of an experiment."""
        model, tuned = experiment.model, experiment.tuned
        if tuned is None:
            return cls(model, part=experiment.tune.part)
        names = tuple(e.name for e in model.exits if e.boundary in tuned)
        return cls(model, names, taught=bool(experiment.loss.distillation), part="exits")

    def __post_init__(self):
        require_one_of("tune.part", self.part, PARTS)
        if self.moved is not None:
            require(
                any(np.any(a) for a in jax.tree.leaves(self.moved)),
                "tune.part",
                self.part,
                "must be a part that has parameters, and this model has none in it",
                "Set tune.part to 'all' or 'trunk', or give the exits norms or heads of their own.",
            )
        if self.tuned is None:
            return
        names = [e.name for e in self.config.exits]
        require(
            len(self.tuned) > 0,
            "tune.exits",
            self.tuned,
            f"must name at least one of the model's exits ({', '.join(names) or 'it has none'})",
            "Add one to model.exits." if not names else "",
        )
        for name in self.tuned:
            require(
                name in names,
                "tune.exits",
                name,
                f"must be one of the model's exits ({', '.join(names)})",
                "Name one of them, or add it to model.exits.",
            )
            own = params.abstract(self.config)["exits"][name]
            require(
                bool(jax.tree.leaves(own)),
                "tune.exits",
                name,
                "must be an exit with parameters of its own, and this one has none",
                "Give it a norm, a head, a head_rank, an mlp or a block in model.exits, or leave "
                "it out.",
            )

    @property
    def which(self) -> tuple[int, ...]:
        """Numbers of the exits with a loss."""
        if self.tuned is None:
            return tuple(range(self.config.n_exits + 1))
        return tuple(i for i, e in enumerate(self.config.exits) if e.name in self.tuned)

    @property
    def depth(self) -> int:
        """Number of layers that are run."""
        if self.taught:
            return self.config.n_layers
        return max(self.config.exit_boundaries[e] for e in self.which)

    @property
    def moved(self) -> Tree | None:
        """Mask of the parameters that move: 1.0 or 0.0 for a leaf, [l] for a stack of layers.

        None where all trained parameters move.
        """
        if self.part in ("all", "exits"):
            return None
        trunk = ("embed", "layers")

        def one(path, p):
            top, last = path_name(path).split("/")[0], path_name(path).split("/")[-2:]
            of_head = top == "shared_head" or last[-1] in ("head", "head_bias")
            of_head |= "norm" in last or "low_rank" in last
            moves = top in trunk if self.part == "trunk" else top not in trunk and of_head
            return np.full(p.shape[:1] if top == "layers" else (), float(moves), np.float32)

        declared = params.abstract(self.config)
        return jax.tree_util.tree_map_with_path(
            one, declared, is_leaf=lambda x: isinstance(x, params.Param)
        )

    def trains(self, name: str) -> bool:
        """Return whether a leaf, such as 'exits/exit_3/norm/scale', is trained."""
        return self.tuned is None or _exit(name) in self.tuned

    def reads(self, name: str) -> bool:
        """Return whether the loss reads a leaf at all."""
        if self.tuned is None or self.trains(name):
            return True
        heads = {e.head for e in self.config.exits if e.name in self.tuned}
        heads |= {self.config.head} if self.taught else set()
        top = name.split("/")[0]
        if top == "final":
            return self.taught
        return top in ("embed", "layers") or (top == "shared_head" and "shared" in heads)

    def cut(self, tree: Tree) -> Tree:
        """Return the layers that run, from leaves [l, ...] or their declarations."""
        if self.depth == self.config.n_layers or "layers" not in tree:
            return tree

        def lower(leaf):
            return first_layers(leaf, self.depth)

        def is_leaf(x):
            return isinstance(x, params.Param)

        return tree | {"layers": jax.tree.map(lower, tree["layers"], is_leaf=is_leaf)}

    def declarations(self) -> tuple[Tree, Tree]:
        """Return (trained, frozen) parameters as `models.params.abstract` declares them."""
        read, _ = split(params.abstract(self.config), self.reads)
        trained, frozen = split(read, self.trains)
        return (trained, self.cut(frozen)) if self.tuned else (params.abstract(self.config), {})

    def parameters(self) -> Tree:
        """Return declarations of all parameters that the loss reads."""
        return join(*self.declarations())


def first_layers(leaf, n: int):
    """Return the first n layers of a stacked leaf: an array or a `Param`."""
    if isinstance(leaf, params.Param):
        return dataclasses.replace(leaf, shape=(n, *leaf.shape[1:]))
    return leaf[:n]


def _exit(name: str) -> str | None:
    top, _, rest = name.partition("/")
    return rest.split("/")[0] if top == "exits" else None
