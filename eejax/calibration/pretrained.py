"""Routers for any model: what `experiments.calibrate` and `eejax.calibrate` do.

The model's parameters stay as they are. A model without exits gets training-free ones: its own
final norm and head at every c-th boundary.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eejax.calibration.frontier import Point, Scores
from eejax.calibration.routers import Quality, RouterOptions, Routers, train_routers
from eejax.calibration.states import HELD, States, collect
from eejax.calibration.thresholds import thresholds_for
from eejax.checkpoint.digest import digest
from eejax.checkpoint.files import write_text
from eejax.common.errors import CheckpointError, ConfigError, require
from eejax.common.trees import Tree
from eejax.models import params as declared
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.starts import copied_exit

SETTINGS = "calibration.json"


class Calibrated(NamedTuple):
    """config, params: the model with routers; what was there before is untouched, and leaves are
    shared with it. qualities: of every exit that was there to be calibrated. scores: of the windows
    held out, with the confidences of the gate "router". states, routers: what they come from; the
    states' `boundary`, which may take more memory than the model, is None."""

    config: ModelConfig
    params: Tree
    qualities: list[Quality]
    scores: Scores
    states: States
    routers: Routers

    def point(self, agreement: float) -> Point:
        """Thresholds for about this agreement (`thresholds_for`), and what they do, of the exits
        in `scores`."""
        return thresholds_for(self.scores, "router", agreement)

    def thresholds(self, point: Point) -> tuple[float, ...]:
        """A point's, for every exit of the model: 1 at those that have no router of this."""
        stops = (e.boundary for e in self.scores.config.exits)
        found = dict(zip(stops, point.threshold, strict=True))
        return tuple(found.get(e.boundary, 1.0) for e in self.config.exits)


def boundaries_for(config: ModelConfig, every: int) -> tuple[int, ...]:
    """Every c-th boundary but the last, where all tokens leave."""
    found = tuple(range(every, config.n_layers, every)) if every > 0 else ()
    require(
        bool(found), "every", every, f"must leave a boundary in 1..{config.n_layers - 1}",
        f"The model has {config.n_layers} layers.",
    )  # fmt: skip
    return found


def with_exits(
    params: Tree, config: ModelConfig, boundaries: Sequence[int]
) -> tuple[Tree, ModelConfig]:
    """Add training-free exits at boundaries without one (TIDE, sections 3.1 and 3.3).

    They read the final exit's head, and a copy of its norm. A head that is the final exit's own
    becomes a shared one, the array as it is.
    """
    have = {e.boundary for e in config.exits}
    if config.head == "own":
        final = {k: v for k, v in params["final"].items() if k != "head"}
        params = params | {"final": final, "shared_head": params["final"]["head"]}
        config = config.replace(head="shared")
    new = [
        ExitConfig(n, norm=config.final_norm, head=config.head, temperature=config.temperature)
        for n in boundaries if n not in have
    ]  # fmt: skip
    config = config.replace(exits=tuple(sorted((*config.exits, *new), key=lambda e: e.boundary)))
    exits = {e.name: copied_exit(params, config, e) for e in new}
    return params | {"exits": params["exits"] | exits}, config


def calibrate_model(
    params: Tree,
    config: ModelConfig,
    batches: Iterable[Mapping[str, Any]],
    options: RouterOptions,
    *,
    every: int = 4,
    boundaries: Sequence[int] | None = None,
    tokens: int = 200_000,
    folder: str | os.PathLike | None = None,
    about: Mapping[str, Any] | None = None,
    watch: Callable[[str], None] | None = None,
) -> Calibrated:
    """Trains routers for a model of training parameters, on batches of text (`data.batches`).

    boundaries: where the model is to have exits with routers; by default where it has exits, and
    without any every `every`-th. tokens: most that are held. folder: where a run that is killed is
    resumed from; about: what else makes it another run (its text, say). watch: is told how far it
    is. An exit that is refused a router is left out of the model where it was not there before.

    Raises ConfigError for boundaries there cannot be and for a width unlike that of routers that
    are kept, DataError for text of too few windows or
    labels, CheckpointError for a folder of another calibration.
    """
    given = {e.boundary for e in config.exits}
    if boundaries is None:
        boundaries = sorted(given - {config.n_layers}) or boundaries_for(config, every)
    require(
        len(set(boundaries)) == len(boundaries) > 0
        and all(b in range(config.n_layers) for b in boundaries),
        "boundaries", boundaries, f"must be in 0..{config.n_layers - 1}, each once",
        "All tokens leave at the last one.",
    )  # fmt: skip
    stay = {e.boundary: e.router for e in config.exits if e.router and e.boundary not in boundaries}
    require(
        set(stay.values()) <= {options.width}, "width", options.width,
        f"must be {', '.join(map(str, sorted(set(stay.values()))))}, as of the routers that stay, "
        f"at boundaries {', '.join(map(str, stay))}",
        "All routers of a model have one width: take that, or calibrate those boundaries too.",
    )  # fmt: skip
    whole, has = with_exits(params, config, boundaries)
    # Those that are to have no router are left out of the pass.
    asked = has.replace(
        exits=tuple(dataclasses.replace(e, router=0) for e in has.exits if e.boundary in boundaries)
    )
    say = watch or (lambda text: None)
    folder = None if folder is None else pathlib.Path(folder)
    if folder is not None:
        _same(folder, {
            "model": asked.to_dict(), "options": dataclasses.asdict(options), "tokens": tokens,
            "about": {"parameters": digest(asked, whole), **(about or {})},
        })  # fmt: skip
    states = collect(whole, asked, batches, tokens, folder=folder, watch=say)
    start = {i: _norm(whole, asked, e) for i, e in enumerate(asked.exits)}
    found = train_routers(
        states, asked, start, options, folder=folder,
        watch=lambda epoch, loss: say(
            f"epoch {epoch} of {options.epochs}: cross entropy "
            + " ".join(f"{x:.3f}" for x in loss)
        ),
    )  # fmt: skip
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
    pick = lambda a: a[[*rows, -1]][:, report]
    none = np.zeros((1, int(report.sum())), np.float32)
    scores = Scores(
        scored, states.labels[report], states.units[report], pick(states.tokens),
        pick(states.nlls),
        {"router": np.concatenate([found.confidences[rows], none])},
    )  # fmt: skip
    return Calibrated(
        final, whole | {"exits": trees}, found.qualities, scores, states._replace(boundary=None),
        found,
    )  # fmt: skip


def _norm(params: Tree, config: ModelConfig, e: ExitConfig) -> Tree:
    """What the router of an exit begins with as its norm: the exit's own, the final one, or none's
    initial values."""
    own = params["exits"][e.name].get("norm", params["final"].get("norm"))
    if own is not None:
        return own
    fresh = declared.router(config, 1)["norm"]
    return declared.map_params(lambda p: np.full(p.shape, p.fill, np.float32), fresh)


def _same(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Makes the folder, or checks that it is of the same calibration."""
    file = folder / SETTINGS
    text = json.dumps(settings, indent=1, sort_keys=True, default=str)
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for left in (*folder.glob("*.safetensors"), folder / HELD):
            left.unlink(missing_ok=True)
        return write_text(file, text + "\n")
    try:
        old, new = json.loads(file.read_text(encoding="utf-8")), json.loads(text)
        old = dict(old)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}): remove {folder}.") from error
    flat = lambda tree: {f"{k}.{n}": v for k, part in tree.items() for n, v in dict(
        part if isinstance(part, dict) else {"": part}).items()}  # fmt: skip
    a, b = flat(old), flat(new)
    differ = [f"{k.strip('.')} = {b.get(k)!r}, there {a.get(k)!r}" for k in b if a.get(k) != b[k]]
    if differ:
        raise ConfigError(
            f"{folder} holds a calibration of other settings: {'; '.join(differ)}. Remove it, or "
            "calibrate with those."
        )
