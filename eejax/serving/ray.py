"""The server as replicas on a Ray cluster, with Ray Serve.

    serve run eejax.serving.ray:build models.mine=runs/mine deployment.num_replicas=2

Every replica has an engine of each model, in processes of their own, and serves all routes of
`eejax.serving.app`; Ray Serve's proxies hand each request to one of the replicas with the fewest
running requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import yaml
from fastapi import FastAPI
from prometheus_client import Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eejax.common.errors import ConfigError, require, require_one_of
from eejax.common.paths import expanded
from eejax.data.tokenizer_files import BYTES
from eejax.gates.confidence import GATES
from eejax.serving.answers import ExitDefaults, checked_build
from eejax.serving.app import app
from eejax.serving.http import HttpOptions, environment_keys
from eejax.serving.metrics import ServerMetrics
from eejax.serving.models import ServedModel
from eejax.serving.service import DRAINING, READY, Service, ServiceOptions

SPARE = 64
"""Requests that a replica accepts beyond those of its engines: to refuse them, and for pages that
need no engine."""

PERIOD = 1.0
"""Seconds between health checks of a replica; Ray replaces it after three failures."""

END = 10.0
"""Seconds that a replica has to end after the grace of its requests."""


def application(
    models: Mapping[str, ServedModel],
    options: ServiceOptions | None = None,
    http: HttpOptions | None = None,
    **deployment: Any,
) -> serve.Application:
    """Return the Ray Serve application whose replicas serve models by their names.

    Args:
      models: the models by name.
      options: options of each replica's services.
      http: options of the HTTP server.
      **deployment: arguments of `ray.serve.deployment`, such as num_replicas, autoscaling_config
        and ray_actor_options (num_cpus, num_gpus, ...: of a replica with all its engines).
    """
    require(bool(models), "models", dict(models), "must name at least one")
    options, http = options or ServiceOptions(), http or HttpOptions()
    # A service itself refuses excess requests, in OpenAI's form: Ray must not hold them back. A
    # request has at least one prompt, so one model's queue is full before this limit is reached.
    ongoing = sum(model.slots + options.waiting for model in models.values()) + SPARE
    own: dict[str, Any] = dict(
        name="eejax",
        max_ongoing_requests=ongoing,
        health_check_period_s=PERIOD,
        graceful_shutdown_timeout_s=options.grace + END,
        # A model that cannot be opened will fail again; Ray's default limit is 20.
        max_constructor_retry_count=3,
    )
    replicas = deployment.get("num_replicas", 1)
    if isinstance(replicas, int):
        # A proxy queues this many requests that no replica accepts, as when none is left.
        own |= dict(
            max_queued_requests=ongoing * replicas,
            backpressure_config=dict(status_code=503, retry_after_s=1),
        )
    try:
        made = serve.deployment(**(own | deployment))(Replica)
    except (TypeError, ValueError) as error:
        message = f"deployment = {deployment!r}: must suit ray.serve.deployment ({error})."
        raise ConfigError(message) from error
    return made.bind(dict(models), options, http)


@serve.ingress()
class Replica:
    """Services of models, and the application in front of them, in one of Ray's processes."""

    async def __init__(
        self, models: Mapping[str, ServedModel], options: ServiceOptions, http: HttpOptions
    ):
        self._id = serve.get_replica_context().replica_id.unique_id
        self._http, self._metrics = http, ReplicaLabels(self._id)
        self._services = {
            name: Service(
                checked_build(model, name, http.defaults.get(name, ExitDefaults())),
                options,
                watch=self._metrics.watch(name),
            )
            for name, model in models.items()
        }
        await start(self._services)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Ray calls this once the services run."""
        api = app(self._services, self._http, self._metrics)
        api.add_middleware(ReplicaHeader, replica=self._id)
        return api

    async def check_health(self) -> None:
        """Raise an error if an engine is not available.

        The service starts another engine by itself, and if that is quick nothing else happens.
        Until then, however, the replica refuses requests at once, so it has the fewest running
        requests and would receive all of them. Ray should use the other replicas and replace this
        one.
        """
        for name, service in self._services.items():
            if service.state not in (READY, DRAINING):
                raise RuntimeError(f"{name}: the engine is {service.state}: {service.failure}")

    async def __del__(self) -> None:
        """End the engines; Ray calls this before a replica ends, when its requests are answered.

        A replica that is killed ends its engines too.
        """
        services = getattr(self, "_services", {}).values()
        await asyncio.gather(*(service.stop() for service in services))


async def start(services: Mapping[str, Service]) -> None:
    """Start services by the names of their models. Raises RuntimeError, naming the model."""
    for name, service in services.items():
        try:
            await service.start()
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}") from error


class ReplicaHeader:
    """Middleware that adds the replica's name to every response."""

    def __init__(self, inner: ASGIApp, replica: str):
        self._inner, self._replica = inner, replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Ray's proxy itself adds the request's id.
                headers = [h for h in message.get("headers", ()) if h[0] != b"x-request-id"]
                message["headers"] = [*headers, (b"x-replica", self._replica)]
            await send(message)

        await self._inner(scope, receive, named)


class ReplicaLabels(ServerMetrics):
    """Metrics with a replica label, as any replica may answer /metrics."""

    def __init__(self, replica: str):
        super().__init__()
        self._replica = replica

    def exposition(self) -> tuple[bytes, str]:
        return generate_latest(self), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        for family in self.registry.collect():
            family.samples = [
                sample._replace(labels=sample.labels | {"replica": self._replica})
                for sample in family.samples
            ]
            yield family


class ReplicaArgs(pydantic.BaseModel, extra="forbid"):
    """Arguments of `build`.

    Attributes:
      models: models by name, each a source or the fields of `ServedModel`.
      thresholds: threshold or thresholds by the name of a model.
      gate: gate by the name of a model.
      service: fields of `ServiceOptions`.
      http: fields of `HttpOptions`.
      deployment: arguments of `ray.serve.deployment`.
    """

    models: dict[str, ServedModel]
    thresholds: dict[str, float | tuple[float, ...]] = {}
    gate: dict[str, str] = {}
    service: ServiceOptions = ServiceOptions()
    http: HttpOptions = HttpOptions()
    deployment: dict[str, Any] = {}


def build(args: dict[str, Any]) -> serve.Application:
    """Return the `application` for the arguments of a Serve config or of the command line.

    The arguments are those of `ReplicaArgs`. On the command line a field is SECTION.NAME=VALUE, the
    value in YAML. API keys come from $EEJAX_KEYS, separated by commas.
    """
    try:
        options = ReplicaArgs.model_validate(sections(args))
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(map(describe_error, error.errors()))) from error
    for field in ("thresholds", "gate"):
        if unknown := set(getattr(options, field)) - set(options.models):
            raise ConfigError(f"{field}: names {sorted(unknown)}, which `models` does not.")
    for name, gate in options.gate.items():
        require_one_of(f"gate.{name}", gate, GATES)
    defaults = {
        name: ExitDefaults(
            options.thresholds.get(name, 1.0),
            options.gate.get(name, ExitDefaults().gate),
            model.draft_rows,
        )
        for name, model in options.models.items()
    }
    http = dataclasses.replace(
        options.http,
        keys=options.http.keys or environment_keys(),
        defaults={**defaults, **options.http.defaults},
    )
    return application(options.models, options.service, http, **options.deployment)


def sections(args: Mapping[str, Any]) -> dict[str, Any]:
    """Sort arguments of the command line into their sections, and turn sources into models."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        section, dot, rest = name.partition(".")
        if dot:
            try:
                value = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise ConfigError(f"{name} = {value!r}: must be YAML ({error}).") from error
            found.setdefault(section, {})[rest] = value
        else:
            found[name] = value
    if isinstance(models := found.get("models"), Mapping):
        found["models"] = {name: described(model) for name, model in models.items()}
    return found


def described(model: Any) -> Any:
    """Return a model's fields, with paths that do not depend on a replica's folder."""
    fields = {"source": model} if isinstance(model, str) else model
    if not isinstance(fields, Mapping):
        return fields
    paths = {name: fields[name] for name in ("source", "tokenizer") if name in fields}
    return {**fields, **{name: resolved(path) for name, path in paths.items() if path != BYTES}}


def resolved(path: Any) -> Any:
    """Return the absolute form of a path that exists, and anything else as it is."""
    if isinstance(path, str) and expanded(path).exists():
        return str(expanded(path).resolve())
    return path


def describe_error(error: Mapping[str, Any]) -> str:
    """Describe an error of pydantic's in a field."""
    field, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{field}: {message}"
    value = json.dumps(error["input"], default=repr)
    message = f"{message[0].lower()}{message[1:]}"
    return f"{field} = {value[:80]}: {message}. See `eejax.serving.ray.ReplicaArgs`."
