"""Serve models behind OpenAI's interface.

    eejax serve --model=mine=runs/mine
    eejax serve --model=llama=~/models/Llama-3.2-1B --thresholds=llama=0.8
    eejax serve --model=small=runs/small --model=large=runs/large \\
        --objective=throughput

Clients use http://HOST:PORT/v1 in place of OpenAI's address; docs/SERVING.md describes further
fields of requests. Each model has an engine in a process of its own, which is restarted if it ends.
With --objective all models are served as one, "auto", by one process, which chooses the model and
the number of its loaded layers. On Ctrl-C or SIGTERM the server refuses new requests, gives running
ones --grace seconds to finish, and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from eejax.common.errors import ConfigError, DataError, require_one_of
from eejax.experiments import field_flags, launch, prompt_files
from eejax.gates.confidence import GATES
from eejax.helios.build import FleetConfig
from eejax.helios.choices import ControllerOptions
from eejax.helios.objectives import NAMED
from eejax.serving import fleets
from eejax.serving.http import KEYS, HttpOptions, environment_keys
from eejax.serving.models import ServedModel
from eejax.serving.service import Service, ServiceOptions
from eejax.sharding.mesh import MeshConfig

WITH_OBJECTIVE = "With --objective: "

_MODEL = flags.DEFINE_multi_string(
    "model", [], "NAME=PATH: a run's workdir, a Hugging Face folder, a GGUF file, or a name."
)
_THRESHOLDS = flags.DEFINE_multi_string(
    "thresholds",
    [],
    "NAME=T or NAME=T,T,...: thresholds of a model's exits where a request names none. Default: 1; "
    "with --objective 0.8.",
)
_GATE = flags.DEFINE_multi_string(
    "gate",
    [],
    "NAME=GATE: gate of a model's exits where a request names none, such as router for a model "
    "with routers. Default: max_probability; not with --objective.",
)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
_PORT = flags.DEFINE_integer(
    "port",
    8000,
    "Port; 0 takes any that is free.",
    lower_bound=0,
    upper_bound=65535,
)
_ENGINE = field_flags.define(ServedModel, ("slots", "context", "tokenizer", "dtype"))
_DRAFTS = field_flags.define(ServedModel, ["drafts", "lookup"])
_MESH = field_flags.define(
    MeshConfig,
    {"model": "mesh.model"},
    helps={"model": "Devices over which each model's matrices are cut"},
)
_SERVICE = field_flags.define(ServiceOptions, ("waiting", "steps", "grace"))
_HTTP = field_flags.define(
    HttpOptions, {"body": "max_body", "n": "max_n", "allow_special": "allow_special"}
)
_KEYS = flags.DEFINE_string(
    "keys",
    None,
    "A file of keys, one a line, of which clients must send one. Default: those of "
    "$EEJAX_KEYS, separated by commas; without either no key is required.",
)
_OBJECTIVE = flags.DEFINE_enum(
    "objective",
    None,
    [*NAMED],
    'Serve all models as one, "auto": the server chooses the model and its loaded layers.',
)
_LIMITS = flags.DEFINE_list(
    "limits",
    [],
    "METRIC=VALUE,...: with --objective, limits to keep: ttft, ttft_p99, tpot "
    "(seconds at most), accuracy (--quality of the answers, at least), perplexity (at most), ...",
)
_PROMPTS = flags.DEFINE_string(
    "prompts",
    None,
    "With --objective: a file of prompts like those to come, one a line, or JSON "
    'lines with "prompt", to measure models on. Default: what the largest model writes itself.',
)
_BUDGET = flags.DEFINE_string(
    "budget",
    None,
    "With --objective: maximum bytes of weights and requests, as 500M or 2G; fewer "
    "layers leave room for more requests, up to --slots. Default: no limit.",
)
_FLEET = field_flags.define(FleetConfig, ("repository", "audits", "quality"), note=WITH_OBJECTIVE)
_CONTROLLER = field_flags.define(
    ControllerOptions,
    {name: name for name in ("candidates", "breaches", "greedy")} | {"interval": "reassess"},
    note=WITH_OBJECTIVE,
)

AUTO = "auto"  # the name of all models as one
FLUSH = 5  # seconds for clients to read the rest of what they were sent


def main() -> None:
    import asyncio

    models = named("model", "NAME=PATH", _MODEL.value)
    if not models:
        raise ConfigError("--model: name at least one, as NAME=PATH.")
    thresholds = {
        name: tuple(launch.numbers("thresholds", text.split(",")))
        for name, text in named("thresholds", "NAME=T or NAME=T,T", _THRESHOLDS.value).items()
    }
    for name, values in thresholds.items():
        if not all(0 <= t <= 1 for t in values):
            raise ConfigError(f"--thresholds = {name}={values}: must lie in [0, 1].")
    gates = named("gate", "NAME=GATE", _GATE.value)
    for name, gate in gates.items():
        require_one_of(f"--gate: {name}", gate, GATES)
    for flag, given in (("thresholds", thresholds), ("gate", gates)):
        if unknown := set(given) - set(models):
            raise ConfigError(f"--{flag}: names {sorted(unknown)}, which no --model does.")
    if _OBJECTIVE.value is None:
        made = engines(models, thresholds, gates)
    elif gates:
        allowed = "must be left out with --objective, which compares probabilities"
        raise ConfigError(f"--gate = {_GATE.value[0]!r}: {allowed}.")
    else:
        made = fleet(models, thresholds)
    asyncio.run(serve(models, *made, keys()))


def named(flag: str, what: str, values: list[str]) -> dict[str, str]:
    found = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not (name and equals and rest):
            raise ConfigError(f"--{flag} = {value!r}: must be {what}.")
        if name in found:
            raise ConfigError(f"--{flag} = {value!r}: {name!r} is named twice.")
        found[name] = rest
    return found


def keys() -> tuple[str, ...]:
    if _KEYS.value is None:
        found = environment_keys()
        if not found and KEYS in os.environ:
            launch.say(f"${KEYS} holds no key: none is required")
        return found
    try:
        with open(_KEYS.value, encoding="utf-8-sig") as file:
            found = tuple(filter(None, map(str.strip, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys = {_KEYS.value!r}: cannot be read ({error}).") from error
    if not found:
        raise ConfigError(f"--keys = {_KEYS.value!r}: holds no key.")
    return found


def engines(
    models: dict[str, str], thresholds: dict[str, tuple], gates: dict[str, str]
) -> tuple[dict, dict]:
    """Return two mappings by model name: builders of engines, and defaults of requests."""
    from eejax.serving.answers import ExitDefaults

    own = [flag.name for flag in (_LIMITS, _PROMPTS, _BUDGET) if flag.present]
    if given := [*own, *_FLEET.on_command_line(), *_CONTROLLER.on_command_line()]:
        raise ConfigError(f"--{given[0]}: requires --objective.")
    mesh = _MESH() if _MESH["model"] > 1 else None
    with _DRAFTS.named():
        builds = {
            name: _ENGINE(source=path, mesh=mesh, **_DRAFTS.values())
            for name, path in models.items()
        }
    defaults = {
        name: ExitDefaults(
            t[0] if len(t) == 1 else t,
            gates.get(name, ExitDefaults().gate),
            builds[name].draft_rows,
        )
        for name, t in ({n: (1.0,) for n in models} | thresholds).items()
    }
    return builds, defaults


def fleet(models: dict[str, str], thresholds: dict[str, tuple]) -> tuple[dict, dict]:
    """Return the two mappings for all models served as one."""
    from eejax.helios.repository import Repository
    from eejax.serving.answers import ExitDefaults

    for flag, value, least in (
        ("mesh.model", _MESH["model"], 1),
        *((name, value, 0) for name, value in _DRAFTS.values().items()),
    ):
        if value > least:
            raise ConfigError(f"--{flag} = {value}: must be left out with --objective.")
    budget = {} if _BUDGET.value is None else {"budget": size("budget", _BUDGET.value)}
    limits = named("limits", "METRIC=VALUE, or several with a comma between", _LIMITS.value)
    limits = {
        metric: size(f"limits: {metric}", value) if metric == "memory" else number(metric, value)
        for metric, value in limits.items()
    }
    with launch.flags_named(limit_flags()):
        config = _FLEET(objective=_OBJECTIVE.value, limits=limits, options=_CONTROLLER(**budget))
    if "repository" in _FLEET.on_command_line():  # fail now, before models are measured
        if not _FLEET["repository"]:
            raise ConfigError("--repository = '': must name a file.")
        try:
            kept = Repository(_FLEET["repository"])
            kept.check()
            kept.close()
        except DataError as error:
            raise ConfigError(f"--repository: {error}") from error
    for name in [name for name in models if name not in thresholds]:
        launch.say(f"{name}: no --thresholds: tokens leave at a confidence of {fleets.THRESHOLD:g}")
    prompts = prompt_files.texts("prompts", _PROMPTS.value) if _PROMPTS.value else ()
    given = {name: t[0] if len(t) == 1 else t for name, t in thresholds.items()}
    with _ENGINE.named():
        build = fleets.ServedFleet(models, config, given, tuple(prompts), **_ENGINE.values())
    return {AUTO: build}, {AUTO: ExitDefaults()}


def limit_flags() -> dict[str, str]:
    """Map the names of limits as settings to their names on the command line."""
    from eejax.helios.objectives import METRICS

    return {f"limits.{metric}": f"limits: {metric}" for metric in METRICS}


def number(metric: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--limits: {metric} = {text!r}: must be a number.") from error


def size(flag: str, text: str) -> float:
    """Parse a number of bytes, with or without a suffix."""
    number, power = text.upper().removesuffix("B"), 0
    if number and number[-1] in "KMGT":
        number, power = number[:-1], "KMGT".index(number[-1]) + 1
    try:
        found = float(number) * 1024**power
    except ValueError as error:
        expected = "must be a number of bytes, as 500M or 2G"
        raise ConfigError(f"--{flag} = {text!r}: {expected}.") from error
    return found


async def serve(models: dict[str, str], builds: dict, defaults: dict, keys: tuple) -> None:
    import asyncio
    import signal

    import uvicorn

    from eejax.serving.answers import checked_build
    from eejax.serving.app import app
    from eejax.serving.metrics import ServerMetrics

    metrics = ServerMetrics()
    options = _SERVICE()

    def watch(name):
        return report(name, metrics.watch(name))

    services = {
        name: Service(checked_build(build, name, defaults[name]), options, watch=watch(name))
        for name, build in builds.items()
    }
    http = _HTTP(keys=keys, defaults=defaults)
    api = app(services, http, metrics)
    signals = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    ended = asyncio.create_task(signals.get())

    async def unless_ended(work) -> bool:
        """Run work until a signal arrives; return whether it finished first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait({task})
        return False

    async def load() -> None:
        for name, service in services.items():
            of = models if _OBJECTIVE.value is not None else {name: models[name]}
            of = ", ".join(f"{name}={path}" for name, path in of.items())
            launch.say(f"{name}: loading {of}, and compiling ...")
            try:
                ready = await service.start()
            except RuntimeError as error:
                what = launch.with_flag(service.failure, limit_flags())
                raise ConfigError(what or f"--model = {of}: {error}") from error
            launch.say(
                f"{name}: {ready.slots} slots of {ready.context} tokens, {ready.seconds:.0f} s"
            )

    with bound(_HOST.value, _PORT.value) as listening:
        address = f"http://{_HOST.value}:{listening.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(
                api,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=FLUSH,
            )
        )
        # Requests under way are answered before the server closes their connections.
        server.capture_signals = contextlib.nullcontext
        running = asyncio.create_task(server.serve([listening]))
        for service in services.values():
            service.announce()
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.01)
            tell(f"starting: {address}/health tells what it does; requests wait until it is ready")
            loaded = await unless_ended(load())
            if loaded:
                tell(f"listening at {address}")
                await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            number = ended.result() if ended.done() else None
            # Models that are ready answer what is under way; the others start no more.
            stopped = (s.stop(0) for s in services.values() if s.ready is None)
            await asyncio.gather(*stopped)
            left = api.state.server.under_way
            if left:
                tell(
                    f"no more requests: answering {left} that are under way, for "
                    f"{options.grace:g} s at most; Ctrl-C ends now ..."
                )
            ended.cancel()
            ended = asyncio.create_task(signals.get())
            await unless_ended(api.state.server.drain(options.grace))
            if left := api.state.server.under_way:
                tell(f"{left} requests were not answered in time")
            if not loaded:
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                sys.exit(128 + number)
        finally:
            ended.cancel()
            api.state.server.draining = True
            await asyncio.gather(*(service.stop(0) for service in services.values()))
            server.should_exit = True
            await running


def tell(text: str) -> None:
    """Print a line, if someone reads it still: a server outlives its terminal."""
    with contextlib.suppress(OSError):
        launch.say(text)


def report(name: str, metrics: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Return a callback that updates metrics and prints lines about an engine's start and end."""

    def watch(what: str, value: Any) -> None:
        metrics(what, value)
        if what == "starting":
            tell(f"{name}: {value}")
        elif what == "compiled":
            tell(f"{name}: all programs are compiled, {value:.0f} s")
        elif what == "restart":
            before, newline, last = value.strip().rpartition("\n")
            if newline:  # a traceback, whose last line is the error
                tell(before)
            tell(f"{name}: the engine ended ({last}); starting another ...")

    return watch


def bound(host: str, port: int):
    """Listen at an address. Raises ConfigError if that is not possible."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=False)
    except OSError as error:
        message = f"--host = {host!r}, --port = {port}: cannot listen there ({error})."
        raise ConfigError(message) from error


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted before it listened")
