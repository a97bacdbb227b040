"""Cost of the server: tokens a second through HTTP against the engine's own, and latency by load.

    eejax train --config=configs/demo_wide.py --workdir=runs/wide
    eejax bench serving --workdir=runs/wide --json

`http_over_engine`: --clients clients, each of which sends one request after the other, streamed,
over the same requests through the engine's scheduler without a server; the server, the engine and
all clients share the given cores. Both engines have the same slots, thresholds, drafts and steps
between two reads of the scheduler; `http_over_default` is over the engine with its own default
number of steps. Medians of interleaved pairs after warm-up with 95 % bootstrap intervals. `load`:
seconds to the first token and between tokens, 50th and 99th percentile, where requests arrive at
random (Poisson) at shares of the rate that the clients reached, and where --clients send without a
pause. Tokens that come together are 0 s apart.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time

import numpy as np
from absl import flags

from eejax.experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_CLIENTS = flags.DEFINE_integer("clients", 16, "Clients, and slots.", lower_bound=1)
_REQUESTS = flags.DEFINE_integer("requests", 4, "Requests of each client in a run.", lower_bound=1)
_PAIRS = flags.DEFINE_integer("pairs", 8, "Pairs of runs to time.", lower_bound=2)
_THRESHOLD = flags.DEFINE_float("threshold", 0.5, "Threshold of all exits.")
_DRAFTS = flags.DEFINE_integer("drafts", 3, "Tokens that a request drafts.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of the server's engine, as --steps of serve.")
_LOADS = flags.DEFINE_list("loads", ["0.25", "0.5", "0.75", "0.9"], "Shares of the rate reached.")
_SECONDS = flags.DEFINE_float("seconds", 30.0, "Minimum seconds of each load.", lower_bound=1.0)
flags.mark_flags_as_required(["workdir"])

PROMPTS, LIMITS = (16, 64), (60, 160)  # tokens, from and to


def main() -> None:
    from eejax.analysis import table
    from eejax.experiments.serving_runs import server

    loads = launch.numbers("loads", _LOADS.value)
    requests = workload(_CLIENTS.value * _REQUESTS.value)
    flags_of_server = (
        f"--model=m={_WORKDIR.value}",
        f"--slots={_CLIENTS.value}",
        f"--drafts={_DRAFTS.value}",
        f"--thresholds=m={_THRESHOLD.value}",
        f"--steps={_STEPS.value}",
    )
    launch.say("starting the server and the engine ...")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    own = dict(
        slots=_CLIENTS.value, threshold=_THRESHOLD.value, drafts=_DRAFTS.value, steps=_STEPS.value
    )
    engine = context.Process(target=engine_process, args=(theirs, _WORKDIR.value, own), daemon=True)
    engine.start()
    theirs.close()
    try:
        with server(*flags_of_server) as (_, address):
            ours.recv()
            result = asyncio.run(measure(address, ours, requests, loads))
    finally:
        ours.close()
        engine.join(60)
        engine.kill()
    print(table(("", ""), launch.lines(result)))
    if _JSON.value:
        print(json.dumps(result))


def workload(n: int) -> list[tuple[tuple[int, ...], int]]:
    """Draw (prompt, tokens to generate) of n requests from the run's held-out text."""
    from eejax.train.runs import open_run

    split = open_run(_WORKDIR.value).dataset().split("validation")
    rng = np.random.default_rng(0)
    starts = np.linspace(0, len(split) - PROMPTS[1] - 1, n).astype(int)

    def draw(pair):
        return int(rng.integers(pair[0], pair[1] + 1))

    def read(start):
        return tuple(split.read(int(start), draw(PROMPTS)).tolist())

    return [(read(start), draw(LIMITS)) for start in starts]


def engine_process(pipe, workdir: str, own: dict) -> None:
    """Run (steps, requests of clients) from the pipe, and send seconds and tokens back.

    It ends when the other end closes the pipe.
    """
    from eejax.experiments.serving_runs import through_scheduler
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.scheduler import Scheduler
    from eejax.inference.slot_engine import STEPS_PER_CALL
    from eejax.serving.models import ServedModel
    from eejax.serving.worker import EngineWorker

    built = ServedModel(workdir, slots=own["slots"], drafts=own["drafts"])()
    for steps in {own["steps"], STEPS_PER_CALL}:
        EngineWorker(built._replace(first=None), steps).warm_up()
    policy = ExitPolicy.make(built.config, 1, own["threshold"], drafts=own["drafts"])
    pipe.send(None)
    while True:
        try:
            steps, clients = pipe.recv()
        except EOFError:
            return
        scheduler = Scheduler(built.engine, steps=steps or STEPS_PER_CALL)
        seconds, found = through_scheduler(scheduler, clients, policy)
        pipe.send((seconds, [built.tokenizer.decode(tokens) for tokens in found]))


async def measure(address: str, pipe, requests, loads) -> dict:
    import httpx

    from eejax.analysis import median_ratio
    from eejax.experiments.serving_runs import arriving, closed_loop, times_of

    n = _CLIENTS.value
    clients = [requests[i::n] for i in range(n)]
    tokens = sum(limit for _, limit in requests)
    fields = {"model": "m"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:

        async def http() -> tuple[float, list]:
            begin = time.perf_counter()
            answers = await closed_loop(client, clients, fields)
            return time.perf_counter() - begin, answers

        def engine(steps: int | None) -> tuple[float, list]:
            pipe.send((steps, clients))
            return pipe.recv()

        launch.say(f"timing {_PAIRS.value} pairs ...")
        seconds: dict[str, list[float]] = {"http": [], "engine": [], "default": []}
        answers, texts = [], []
        for pair in range(_PAIRS.value + 1):  # the first one warms up
            order = ["http", "engine", "default"]
            for name in order if pair % 2 else order[::-1]:
                if name == "http":
                    took, answers = await http()
                else:
                    took, texts = engine(_STEPS.value if name == "engine" else None)
                if pair:
                    seconds[name].append(took)
        same = np.mean([a.text == text for a, text in zip(answers, texts, strict=True)])

        def ratio(baseline: str) -> dict:
            found = median_ratio(seconds[baseline], seconds["http"])
            return {"median": found.median, "interval": [found.low, found.high]}

        rate = len(requests) / float(np.median(seconds["http"]))
        result = {
            "http_over_engine": ratio("engine"),
            "http_over_default": ratio("default"),
            "tokens_per_s": {k: tokens / float(np.median(v)) for k, v in seconds.items()},
            "same_answers": float(same),
            "load": {},
        }
        for share in loads:
            count = max(n, round(share * rate * _SECONDS.value))
            many = [requests[i % len(requests)] for i in range(count)]
            launch.say(f"{count} requests at {share:g} of {rate:.2f} a second ...")
            came = await arriving(client, many, share * rate, 0, fields)
            result["load"][f"{share:g}"] = times_of(came)
        _, came = await http()
        result["load"][f"{n} clients"] = times_of(came)
    return result


if __name__ == "__main__":
    launch.run(main)
