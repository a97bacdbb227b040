"""Routers for any model, as `eejax calibrate` and `eejax.calibrate` train them.

The model's parameters stay as they are. A model without exits gets training-free ones: its own
final norm and head at every c-th boundary.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eejax.calibration.frontier import ExitScores, FrontierPoint
from eejax.calibration.routers import Quality, RouterOptions, Routers, train_routers
from eejax.calibration.states import POSITIONS_FILE, States, collect
from eejax.calibration.thresholds import thresholds_for
from eejax.checkpoint.digest import digest
from eejax.checkpoint.language_model import LanguageModel
from eejax.checkpoint.settings import require_same_settings
from eejax.common.errors import is_integer, require, require_count
from eejax.common.fields import PositiveInt
from eejax.common.trees import Tree
from eejax.models import params as declared
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.starts import copied_exit

SETTINGS = "calibration.json"


class Calibration(NamedTuple):
    """Outcome of a calibration (`LanguageModel.calibration`).

    Attributes:
      boundaries: of all exits of the model.
      qualities: of every exit that was to be calibrated.
      scores: of the held-out windows, with the confidences of the gate "router".
      states: what the routers were trained on; `boundary`, which may take more memory than the
        model, is None.
      routers: the trained routers, and how they were trained.
    """

    boundaries: tuple[int, ...]
    qualities: list[Quality]
    scores: ExitScores
    states: States
    routers: Routers

    def point(self, agreement: float) -> FrontierPoint:
        """Return thresholds of the exits in `scores` for about this agreement, and their effect."""
        return thresholds_for(self.scores, "router", agreement)

    def thresholds(self, point: FrontierPoint) -> tuple[float, ...]:
        """Return a point's thresholds for every exit of the model, 1 at exits without a router."""
        routed, given = [e.boundary for e in self.scores.config.exits], point.threshold
        every = given if isinstance(given, tuple) else (given,) * len(routed)
        found = dict(zip(routed, every, strict=True))
        return tuple(found.get(boundary, 1.0) for boundary in self.boundaries)


def boundaries_for(config: ModelConfig, every: int) -> tuple[int, ...]:
    """Return every `every`-th boundary but the last, where all tokens leave."""
    found = tuple(range(every, config.n_layers, every)) if every > 0 else ()
    require(
        bool(found),
        "every",
        every,
        f"must leave a boundary in 1..{config.n_layers - 1}",
        f"The model has {config.n_layers} layers.",
    )
    return found


def with_exits(
    params: Tree,
    config: ModelConfig,
    boundaries: Sequence[int],
    *,
    mlp: bool = False,
    block: bool = False,
    mlp_width: int = 0,
    head_rank: int = 0,
) -> tuple[Tree, ModelConfig]:
    """Add training-free exits at boundaries without one (TIDE, sections 3.1 and 3.3).

    They read the final exit's head and a copy of its norm. An `mlp` or a `block` below the norm
    adds nothing before it is trained (`train.starts.copied_exit`); `mlp_width` and `head_rank` are
    as in `ExitConfig`. A final head that belongs to the final exit alone becomes a shared head; its
    array stays the same. If exits share another head already, each new exit gets a copy of the
    final one.
    """
    have = {e.boundary for e in config.exits}
    if config.head == "own" and "shared_head" not in params:
        final = {k: v for k, v in params["final"].items() if k != "head"}
        params = params | {"final": final, "shared_head": params["final"]["head"]}
        config = config.replace(head="shared")
    new = [
        ExitConfig(
            n,
            mlp,
            block,
            config.final_norm,
            config.head,
            config.temperature,
            mlp_width=mlp_width,
            head_rank=head_rank,
        )
        for n in boundaries
        if n not in have
    ]
    config = config.replace(exits=tuple(sorted((*config.exits, *new), key=lambda e: e.boundary)))
    exits = {e.name: copied_exit(params, config, e) for e in new}
    return params | {"exits": params["exits"] | exits}, config


def calibrate_model(
    model: LanguageModel,
    batches: Iterable[Mapping[str, Any]],
    options: RouterOptions,
    *,
    every: int = 4,
    boundaries: Sequence[int] | None = None,
    tokens: PositiveInt = 200_000,
    folder: str | os.PathLike | None = None,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Return the model with routers, trained on batches of text (`data.batches`).

    The given model stays as it is and shares its leaves with the new one. An exit that gets no
    router is left out if it was not in the model before.

    Args:
      model: the model to calibrate.
      batches: batches of text.
      options: settings of the routers and of their training.
      every: distance in layers of the exits that a model without exits gets.
      boundaries: exits that get routers; by default those of the model or, if it has none, every
        `every`-th.
      tokens: maximum number of tokens of text, evenly spread.
      folder: where an interrupted run keeps what it resumes from.
      about: further settings that the run depends on, such as its text.
      watch: called with lines of progress.

    Raises:
      ConfigError: for impossible boundaries, a width unlike that of routers that are kept, and a
        folder of another calibration.
      DataError: for text with too few windows or labels.
      CheckpointError: for a folder whose settings cannot be read.
    """
    config = model.config
    given = {e.boundary for e in config.exits}
    require_count("every", every)
    if boundaries is None:
        boundaries = sorted(given - {config.n_layers}) or boundaries_for(config, every)
    listed = isinstance(boundaries, Sequence | np.ndarray)
    require(
        listed
        and all(map(is_integer, boundaries))
        and len(set(boundaries)) == len(boundaries) > 0
        and all(b in range(config.n_layers) for b in boundaries),
        "boundaries",
        boundaries,
        f"must be in 0..{config.n_layers - 1}, each once",
        "All tokens leave at the last one.",
    )
    stay = {e.boundary: e.router for e in config.exits if e.router and e.boundary not in boundaries}
    require(
        set(stay.values()) <= {options.width},
        "width",
        options.width,
        f"must be {', '.join(map(str, sorted(set(stay.values()))))}, as of the routers that stay, "
        f"at boundaries {', '.join(map(str, stay))}",
        "All routers of a model have one width: use that width, or calibrate those boundaries too.",
    )
    whole, has = with_exits(model.params, config, boundaries)
    # Exits that are to have no router are left out of the pass.
    asked = has.replace(
        exits=tuple(dataclasses.replace(e, router=0) for e in has.exits if e.boundary in boundaries)
    )
    watch = watch or (lambda text: None)
    folder = None if folder is None else pathlib.Path(folder)
    if folder is not None:
        settings = {
            "model": asked.to_dict(),
            "options": dataclasses.asdict(options),
            "tokens": tokens,
            "about": {"parameters": digest(asked, whole), **(about or {})},
        }
        stale = "*.safetensors", POSITIONS_FILE
        require_same_settings(folder / SETTINGS, settings, stale, "calibration")
    states = collect(whole, asked, batches, tokens, folder=folder, watch=watch)
    start = {i: _norm(whole, asked, e) for i, e in enumerate(asked.exits)}
    found = train_routers(
        states,
        asked,
        start,
        options,
        folder=folder,
        watch=lambda epoch, loss: watch(
            f"epoch {epoch} of {options.epochs}: cross entropy "
            + " ".join(f"{x:.3f}" for x in loss)
        ),
    )
    routed = {asked.exits[i].boundary: tree for i, tree in found.routers.items()}
    exits, trees = [], {}
    for e in has.exits:
        own = whole["exits"][e.name]
        if e.boundary in boundaries:
            fresh = routed.get(e.boundary)
            if fresh is None and e.boundary not in given:
                continue
            own = {k: v for k, v in own.items() if k != "router"}
            own |= {} if fresh is None else {"router": fresh}
            e = dataclasses.replace(e, router=0 if fresh is None else options.width)
        exits.append(e)
        trees[e.name] = own
    final = has.replace(exits=tuple(exits))
    report, kept = found.report, [asked.exits[i].boundary for i in sorted(found.routers)]
    rows = [i for i, e in enumerate(asked.exits) if e.boundary in kept]
    scored = asked.replace(
        exits=tuple(dataclasses.replace(asked.exits[i], router=options.width) for i in rows)
    )

    def pick(a):
        return a[[*rows, -1]][:, report]

    none = np.zeros((1, int(report.sum())), np.float32)
    scores = ExitScores(
        scored,
        states.labels[report],
        states.units[report],
        pick(states.tokens),
        pick(states.nlls),
        {"router": np.concatenate([found.confidences[rows], none])},
    )
    calibration = Calibration(
        tuple(e.boundary for e in final.exits),
        found.qualities,
        scores,
        states._replace(boundary=None),
        found,
    )
    return dataclasses.replace(
        model, config=final, params=whole | {"exits": trees}, calibration=calibration
    )


def _norm(params: Tree, config: ModelConfig, e: ExitConfig) -> Tree:
    """Return the norm that an exit's router starts from.

    It is the exit's own norm, else the final norm, else one with initial values.
    """
    own = params["exits"][e.name].get("norm", params["final"].get("norm"))
    if own is not None:
        return own
    fresh = declared.router(config, 1)["norm"]
    return declared.map_params(lambda p: np.full(p.shape, p.fill, np.float32), fresh)
