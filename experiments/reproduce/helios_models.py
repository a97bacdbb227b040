"""Records and measurements of HELIOS' two models, made once and kept on disk."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eejax.common.errors import DataError
from eejax.experiments import launch

ALONG = "|"  # in a name: reader|writer
UNSURE = 0.5  # thresholds while nothing is asked of them
TIMED = 16  # prompts that models are timed on


class Measured(NamedTuple):
    """Everything that the reproduction needs of two models.

    Attributes:
      trace: `helios_simulation.traces.PromptTrace` of both models.
      along: `ModelTrace` of the reader on the writer's text, by (reader, writer).
      judged: mean log-probability of each prompt's text under a separate model, by writer.
      profiles: `helios.choices.ModelProfile` by model.
      costs: results of `batch_costs` for each model's engine, with its buckets.
      slots: requests served at a time while costs were measured.
    """

    trace: Any
    along: Mapping[tuple[str, str], Any]
    judged: Mapping[str, Sequence[float]]
    profiles: Mapping[str, Any]
    costs: Mapping[str, dict]
    slots: int


def prompts(model, new: int, most: int | None) -> tuple[list[list[int]], tuple[str, ...], int]:
    """Return the first `most` mixed prompts: ids, tasks, and how many were cut.

    A prompt that leaves no room for `new` tokens keeps its end.
    """
    from eejax.experiments import helios_runs

    records = helios_runs.prompts()[:most]
    ids, cut = helios_runs.fitted(model.tokenizer, records, model.config.context_length - new)
    return ids, tuple(record["task"] for record in records), cut


def member(model):
    import jax

    from eejax.helios.pool import FleetMember
    from eejax.inference.options import EngineOptions

    params = jax.device_get(model.params)
    chunk = min(64, model.config.context_length)
    return FleetMember(params, model.config, dict(threshold=UNSURE), EngineOptions(chunk=chunk))


def opened(runs: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    """Open the models of training runs, by name."""
    from eejax.train.runs import open_run

    return {name: open_run(path).model for name, path in runs.items()}


def record(models: Mapping[str, Any], new: int, most: int | None, slots: int, calls: int):
    """Record the texts of two models, and their scores by a third one, "judge"; measure costs.

    It takes minutes.

    Args:
      models: "judge" among them; the smaller of the others first. All share a tokenizer.
      new: tokens of each prompt's text.
      most: maximum prompts, or None for all.
      slots: requests that a model serves at a time while it is timed.
      calls: calls of the engine over which costs are fitted.
    """
    from eejax.experiments.helios_simulation import traces

    served = {name: model for name, model in models.items() if name != "judge"}
    asked, tasks, cut = prompts(next(iter(served.values())), new, most)
    print(f"{len(asked)} prompts, of {cut} of which only the end is kept", flush=True)
    found, along, judged, profiles, costs, texts = {}, {}, {}, {}, {}, {}
    members = {name: member(model) for name, model in served.items()}
    for name, one in members.items():
        begin = time.perf_counter()
        texts[name] = traces.write(one, asked, new, slots=16)
        found[name] = traces.read(one, asked, texts[name])
        launch.say(f"{name}: recorded in {time.perf_counter() - begin:.0f} s")
    for reader, one in members.items():
        for writer in members.keys() - {reader}:
            along[reader, writer] = traces.read(one, asked, texts[writer])
    for name in members:
        judged[name] = judge(models["judge"], asked, texts[name])
    for name, one in members.items():
        begin = time.perf_counter()
        profiles[name], costs[name] = timed(one, asked, slots, calls)
        launch.say(f"{name}: timed in {time.perf_counter() - begin:.0f} s")
    return Measured(traces.PromptTrace(found, tasks), along, judged, profiles, costs, slots)


def judge(model, asked: Sequence[Sequence[int]], texts: np.ndarray) -> list[float]:
    """Return the mean log-probability, in nats, of each text [p, new] after its prompt."""
    from eejax.inference import scoring
    from eejax.inference.weights import prepare

    weights, new = prepare(model.params, model.config), texts.shape[1]

    def score(ids):
        return scoring.score(weights, model.config, ids).logprob[-new:]

    return [
        float(score([*prompt, *text]).mean())
        for prompt, text in zip(asked, texts.tolist(), strict=True)
    ]


def timed(one, asked: Sequence[Sequence[int]], slots: int, calls: int) -> tuple[Any, dict]:
    """Measure profile and costs of a member whose slots are filled by prompts of the whole list."""
    import jax

    from eejax.helios import profiles
    from eejax.inference import batch_costs
    from eejax.inference.engine import EarlyExitEngine

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
    engine = EarlyExitEngine.make(jax.device_put(one.params), one.config, one.options, slots=slots)
    costs = batch_costs.measure(engine, some, calls=calls)
    own = {"buckets": engine.options.buckets, "tokens": one.options.chunk}
    return profile, dataclasses.asdict(costs) | own


def save(measured: Measured, path: pathlib.Path) -> None:
    """Write the trace, and a JSON file beside it with what was measured."""
    from eejax.checkpoint.files import write_text
    from eejax.experiments.helios_simulation.traces import PromptTrace

    along = {ALONG.join(pair): m for pair, m in measured.along.items()}
    PromptTrace({**measured.trace.models, **along}, measured.trace.kinds).save(path)
    told = {
        "slots": measured.slots,
        "costs": measured.costs,
        "judged": measured.judged,
        "profiles": {name: dataclasses.asdict(p) for name, p in measured.profiles.items()},
    }
    write_text(beside(path), json.dumps(told, indent=1))


def beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.json")


def load(path: pathlib.Path) -> Measured:
    """Read what `save` wrote. Raises DataError for other files."""
    from eejax.experiments.helios_simulation import traces
    from eejax.helios.choices import ModelProfile

    whole = traces.load(path)
    try:
        told = json.loads(beside(path).read_text(encoding="utf-8"))

        def tuples(values):
            return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

        profiles = {name: ModelProfile(**tuples(own)) for name, own in told["profiles"].items()}
        costs, judged, slots = told["costs"], told["judged"], int(told["slots"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{beside(path)}: cannot be read ({error}). Record it again.") from error
    split = {tuple(name.split(ALONG)): m for name, m in whole.models.items()}
    own = {name: m for (name, *writer), m in split.items() if not writer}
    return Measured(
        traces.PromptTrace(own, whole.kinds),
        {k: m for k, m in split.items() if len(k) == 2},
        judged,
        profiles,
        costs,
        slots,
    )


def paces(measured: Measured) -> dict[str, Any]:
    """Return each model's `StepSeconds`, from the measurements of its engine."""
    from eejax.experiments.helios_simulation.pace import StepSeconds
    from eejax.inference.batch_simulator import StepCosts

    fields, found = {f.name for f in dataclasses.fields(StepCosts)}, {}
    for name, own in measured.costs.items():
        told = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items() if k in fields}
        found[name] = StepSeconds.of(StepCosts(**told), own["buckets"], own["tokens"])
    return found


def live(models: Mapping[str, Any], measured: Measured, thresholds, objective, options, n, setting):
    """Return `MeasuredResult` of a real `Fleet` for the first n prompts, and its decisions.

    There are as many clients as slots. Everything runs twice and the second time counts, so that
    nothing is compiled then.
    """
    from eejax.experiments.helios_runs import ControlledFleet, Stopwatch, drive
    from eejax.experiments.helios_simulation.result import MeasuredResult
    from eejax.helios.controller import Controller
    from eejax.helios.repository import Repository

    asked, _, _ = prompts(next(iter(models.values())), measured.trace.new, n)
    members = {
        name: dataclasses.replace(member(m), rules=dict(threshold=thresholds[name]))
        for name, m in models.items()
        if name in measured.profiles
    }
    for _ in range(2):
        repository, watch = Repository.of(measured.profiles), Stopwatch()
        controller = Controller(measured.profiles, objective, repository, options, clock=watch.now)
        server = ControlledFleet(
            members,
            controller,
            watch,
            slots=setting.slots,
            steps=setting.steps,
            audits=setting.audits,
        )
        texts = dict(enumerate(asked))
        seconds, answers = drive(server, texts, measured.trace.new, setting.slots)
    tokens = sum(len(a.tokens) for a in answers)
    told = MeasuredResult(tokens / seconds, float(np.mean([a.ttft for a in answers])))
    return told, controller.decisions
