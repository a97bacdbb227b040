"""What is recorded and measured of two models once, for `experiments.reproduce.helios`, on disk."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eejax.common.errors import ConfigError, DataError
from experiments import launch

ALONG = "|"  # in a name: one model along the text of another
UNSURE = 0.5  # what thresholds are while nothing is asked of them
TIMED = 16  # prompts that models are timed on


class Measured(NamedTuple):
    """trace: of the models; along: (reader, writer) -> what one says of the other's texts;
    profiles; costs: what `batch_costs` measured of each, with its buckets; slots: at which."""

    trace: Any
    along: Mapping[tuple[str, str], Any]
    profiles: Mapping[str, Any]
    costs: Mapping[str, dict]
    slots: int


def prompts(model, new: int, most: int | None) -> tuple[list[list[int]], tuple[str, ...], int]:
    """(ids, tasks, how many were cut): the first `most` of the mixed prompts. One that leaves no
    room for so many tokens keeps its end."""
    from experiments import helios_runs

    records = helios_runs.prompts()[:most]
    ids, cut = helios_runs.fitted(model.tokenizer, records, model.config.context_length - new)
    return ids, tuple(record["task"] for record in records), cut


def member(model):
    import jax

    from eejax.inference.batched_state import BatchOptions
    from eejax.serving.fleet import Member

    params = jax.device_get(model.params)
    chunk = min(64, model.config.context_length)
    return Member(params, model.config, dict(threshold=UNSURE), BatchOptions(drafts=0, chunk=chunk))


def opened(paths: Mapping[str, str | None]) -> dict[str, Any]:
    from eejax.train.runs import open_run

    if missing := [name for name, path in paths.items() if path is None]:
        raise ConfigError(
            f"--{missing[0]} = None: must name a training run, as --trace names no recorded file, "
            "or --live asks for a fleet."
        )
    models = {name: open_run(path).model for name, path in paths.items()}
    one, two = models.values()
    if one.tokenizer.fingerprint != two.tokenizer.fingerprint:
        raise ConfigError(
            f"--large = {paths['large']!r}: has another tokenizer than --small. Train it with "
            "--config.data.tokenizer=SMALL/tokenizer, so that both read the same prompts."
        )
    return models


def record(models: Mapping[str, Any], new: int, most: int | None, slots: int, calls: int):
    """`Measured`, which takes minutes."""
    from eejax.serving import traces

    small = next(iter(models.values()))
    contexts = [m.config.context_length for m in models.values()]
    if len({*contexts}) > 1:
        raise ConfigError(f"--large: a context of {contexts[1]}, where --small has {contexts[0]}.")
    asked, tasks, cut = prompts(small, new, most)
    print(f"{len(asked)} prompts, {cut} of which keep but their end", flush=True)
    found, along, profiles, costs, texts = {}, {}, {}, {}, {}
    members = {name: member(m) for name, m in models.items()}
    for name, one in members.items():
        begin = time.perf_counter()
        texts[name] = traces.write(one, asked, new, slots=16)
        found[name] = traces.read(one, asked, texts[name])
        launch.say(f"{name}: recorded in {time.perf_counter() - begin:.0f} s")
    for reader, one in members.items():
        for writer in members.keys() - {reader}:
            along[reader, writer] = traces.read(one, asked, texts[writer])
    for name, one in members.items():
        begin = time.perf_counter()
        profiles[name], costs[name] = timed(one, asked, slots, calls)
        launch.say(f"{name}: timed in {time.perf_counter() - begin:.0f} s")
    return Measured(traces.Trace(found, tasks), along, profiles, costs, slots)


def timed(one, asked: Sequence[Sequence[int]], slots: int, calls: int) -> tuple[Any, dict]:
    """(profile, costs) of a member: all slots taken by prompts spread over all there are."""
    import jax

    from eejax.inference import batch_costs
    from eejax.inference.batched_slots import BatchedEngine
    from eejax.serving import profiles

    some = [asked[i] for i in np.linspace(0, len(asked) - 1, TIMED).astype(int)]
    context = one.config.context_length
    width = min(64, context - 1)
    rows = np.zeros((TIMED, width + 1), np.int32)
    labels = np.full((TIMED, width), -1, np.int32)
    for i, ids in enumerate(some):
        ids = ids[-width - 1 :]
        rows[i, : len(ids)] = ids
        labels[i, : len(ids) - 1] = ids[1:]
    new = min(32, context // 4)
    profile = profiles.measure(
        one, some, [{"tokens": rows[:, :-1], "labels": labels}], slots=slots, new=new
    )
    engine = BatchedEngine.make(jax.device_put(one.params), one.config, one.options, slots=slots)
    costs = batch_costs.measure(engine, some, calls=calls)
    own = {"buckets": engine.options.buckets, "tokens": one.options.chunk}
    return profile, dataclasses.asdict(costs) | own


def save(measured: Measured, path: pathlib.Path) -> None:
    """The trace, and what was measured beside it."""
    from eejax.checkpoint.files import write_text
    from eejax.serving.traces import Trace

    along = {ALONG.join(pair): m for pair, m in measured.along.items()}
    Trace({**measured.trace.models, **along}, measured.trace.kinds).save(path)
    told = {
        "slots": measured.slots, "costs": measured.costs,
        "profiles": {name: dataclasses.asdict(p) for name, p in measured.profiles.items()},
    }  # fmt: skip
    write_text(beside(path), json.dumps(told, indent=1))


def beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.json")


def load(path: pathlib.Path) -> Measured:
    """Raises DataError for files that are not what `save` left."""
    from eejax.serving import traces
    from eejax.serving.choices import Profile

    whole = traces.load(path)
    try:
        told = json.loads(beside(path).read_text(encoding="utf-8"))
        tuples = lambda values: {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        profiles = {name: Profile(**tuples(own)) for name, own in told["profiles"].items()}
        costs, slots = told["costs"], int(told["slots"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{beside(path)}: cannot be read ({error}). Record it again.") from error
    split = {tuple(name.split(ALONG)): m for name, m in whole.models.items()}
    own = {name: m for (name, *writer), m in split.items() if not writer}
    return Measured(
        traces.Trace(own, whole.kinds), {k: m for k, m in split.items() if len(k) == 2}, profiles,
        costs, slots,
    )  # fmt: skip


def paces(measured: Measured) -> dict[str, Any]:
    """Of each model, by what was measured of its engine."""
    from eejax.inference.batch_simulator import Costs
    from eejax.serving.pace import Pace

    fields, found = {f.name for f in dataclasses.fields(Costs)}, {}
    for name, own in measured.costs.items():
        told = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items() if k in fields}
        found[name] = Pace.of(Costs(**told), own["buckets"], own["tokens"])
    return found


def live(models: Mapping[str, Any], measured: Measured, thresholds, objective, options, n, setting):
    """`Live` of a real `Fleet` for the first n prompts, of as many clients as slots; everything is
    done twice, and only the second time counts, so that what is compiled is compiled."""
    from eejax.serving.controller import Controller
    from eejax.serving.repository import Repository
    from eejax.serving.simulated import Live
    from experiments.helios_runs import Chosen, Stopwatch, drive

    asked, _, _ = prompts(next(iter(models.values())), measured.trace.new, n)
    members = {
        name: dataclasses.replace(member(m), rules=dict(threshold=thresholds[name]))
        for name, m in models.items() if name in measured.profiles
    }  # fmt: skip
    for _ in range(2):
        repository, watch = Repository.of(measured.profiles), Stopwatch()
        controller = Controller(measured.profiles, objective, repository, options, clock=watch.now)
        server = Chosen(
            members, controller, watch, slots=setting.slots, steps=setting.steps,
            audits=setting.audits,
        )  # fmt: skip
        texts = dict(enumerate(asked))
        seconds, answers = drive(server, texts, measured.trace.new, setting.slots)
    tokens = sum(len(a.tokens) for a in answers)
    told = Live(tokens / seconds, float(np.mean([a.ttft for a in answers])))
    return told, controller.decisions
