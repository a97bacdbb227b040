"""Conversion of requests in OpenAI's form to engine requests, and of outputs to answer deltas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, TypeVar

from eejax.common.errors import ConfigError, require
from eejax.helios.report import CHOOSES
from eejax.inference.logits_params import LogitsParams
from eejax.inference.policy import ExitPolicy, available_gates
from eejax.inference.request import EngineRequest, FinishReason, Token
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import MAX_STOP_TOKENS
from eejax.models.config import ModelConfig
from eejax.serving.messages import Build, BuiltEngine, EngineReady
from eejax.serving.metrics import ChoiceMetrics
from eejax.serving.protocol import GenerationRequest
from eejax.serving.service import EngineUnavailable, Service
from eejax.serving.text import StreamingDetokenizer

T = TypeVar("T")

FIELDS = dict(
    presence="presence_penalty",
    frequency="frequency_penalty",
    repetition="repetition_penalty",
    biases="logit_bias",
    top_logprobs="logprobs",
    threshold="thresholds",
    min_exit_layer="min_layers",
)
"""Names of settings in requests, where they differ."""

LEAVING = ("engine", "gate", "thresholds", "exits", "min_layers")
"""Fields of exit rules."""


class ExitDefaults(NamedTuple):
    """Exit rules of a model's requests that give none.

    Attributes:
      thresholds: one number, or one for each early exit.
      gate: name of the gate.
      drafts: maximum tokens of a request that an exit or its text drafts.
    """

    thresholds: float | tuple[float, ...] = 1.0
    gate: str = "max_probability"
    drafts: int = 0


def check_defaults(name: str, config: ModelConfig, defaults: ExitDefaults) -> None:
    """Check that a model has the thresholds and the gate of its defaults.

    Args:
      name: name of the model, for errors.
      config: configuration of the model.
      defaults: exit rules of its requests.

    Raises:
      ConfigError: names the setting, the model, and what is allowed.
    """
    try:
        ExitPolicy.make(config, 1, defaults.thresholds)
    except ConfigError as error:
        allowed = (
            f"must be one number in [0, 1], or one for each of its {config.n_exits} early exits"
        )
        raise ConfigError(f"thresholds of {name!r} = {defaults.thresholds}: {allowed}.") from error
    gates = available_gates(config)
    fix = "`eejax calibrate` trains routers." if defaults.gate == "router" else ""
    allowed = f"must be one of {', '.join(map(repr, gates))}"
    require(defaults.gate in gates, f"gate of {name!r}", defaults.gate, allowed, fix)


def check_end_tokens(name: str, ends: Sequence[int]) -> None:
    """Check that a request has room for the tokens that end a model's texts.

    Raises:
      ConfigError: names the model and the tokens.
    """
    require(
        len(ends) <= MAX_STOP_TOKENS,
        f"end tokens of {name!r}",
        list(ends),
        f"must be at most {MAX_STOP_TOKENS} to be served",
        "Name fewer as eos_token_id in the model's config.json and generation_config.json.",
    )


def checked_build(build: Build, name: str, defaults: ExitDefaults) -> Build:
    """Return a build that checks a model's end tokens and defaults before an engine is compiled.

    Arguments and errors are those of `check_end_tokens` and `check_defaults`. A fleet has no
    defaults.
    """
    return functools.partial(_build_checked, build, name, defaults)


def _build_checked(build: Build, name: str, defaults: ExitDefaults) -> BuiltEngine:
    built = build()
    check_end_tokens(name, built.tokenizer.end_ids)
    if built.fleet is None:
        check_defaults(name, built.config, defaults)
    return built


class ChoiceDelta(NamedTuple):
    """New text of a choice.

    Attributes:
      choice: number of the choice.
      text: the new text.
      tokens: tokens that begin in the text.
      finish: why the choice ended, None while it goes on.
      num_tokens: tokens generated so far.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    num_tokens: int


def engine_requests(
    ids: Sequence[str],
    body: GenerationRequest,
    ready: EngineReady,
    prompt: Sequence[int],
    limit: int | None,
    top_logprobs: int,
    defaults: ExitDefaults,
) -> list[EngineRequest]:
    """Return an engine request for each of the n choices; none where nothing is to be generated.

    Raises:
      ConfigError: for a field that cannot be as it is; it names the request's field.
    """
    config, tokenizer = ready.config, ready.tokenizer
    room = ready.context - len(prompt)
    # Where nothing is to be generated, the prompt may fill the context.
    most = ready.context if limit == 0 else ready.context - 1
    require(
        0 < len(prompt) <= most,
        body.text_field,
        f"{len(prompt)} tokens",
        f"must have 1 to {most}, as the model's context is {ready.context}",
    )
    least, own = body.min_tokens, body.stop_token_ids or ()
    require(not limit or least <= limit, "min_tokens", least, f"must be at most {limit}")
    ends = set() if body.ignore_eos else {*tokenizer.end_ids}
    stop_token_ids = sorted({*ends, *own})
    require(
        len(stop_token_ids) <= MAX_STOP_TOKENS,
        "stop_token_ids",
        own,
        f"must be at most {MAX_STOP_TOKENS - len(ends)} tokens beside those that end texts",
    )
    seed = body.seed
    seed = secrets.randbelow(2**31) if seed is None else seed % 2**31
    try:
        policy = exit_policy(body, ready, defaults)
        biases = {int(token): value for token, value in (body.logit_bias or {}).items()}
        logits_params = LogitsParams.make(
            config.vocab_size,
            body.presence_penalty,
            body.frequency_penalty,
            body.repetition_penalty,
            body.min_tokens,
            biases,
            top_logprobs,
        )

        def sampled(i):
            return SamplingParams.make(
                1,
                body.temperature,
                max(body.top_k, 0),
                body.top_p,
                body.min_p,
                (seed + i) % 2**31,
            )

        return [
            EngineRequest(
                request_id=id_,
                prompt=tuple(prompt),
                max_tokens=room if limit is None else limit,
                policy=policy,
                sampling=sampled(i),
                logits_params=logits_params,
                stop_token_ids=tuple(stop_token_ids),
                priority=body.priority,
                objective=body.objective,
            )
            for i, id_ in enumerate(ids if limit != 0 else ())
        ]
    except ConfigError as error:
        raise rename_field(error) from error


def exit_policy(
    body: GenerationRequest, ready: EngineReady, defaults: ExitDefaults
) -> ExitPolicy | None:
    """Return a request's exit rules, None where the server chooses.

    Raises:
      ConfigError: for rules that cannot be; `engine_requests` renames the field in it.
    """
    if ready.chooses:
        for name in LEAVING:
            value, default = getattr(body, name), GenerationRequest.model_fields[name].default
            allowed = f"must be left out: {CHOOSES}"
            require(value in (None, default), name, value, allowed)
        return None
    allowed = "must be left out: there is one model, and nothing to choose"
    require(body.objective is None, "objective", body.objective, allowed)
    threshold = defaults.thresholds if body.thresholds is None else body.thresholds
    if body.engine == "full":
        given = [n for n in ("thresholds", "exits", "gate") if getattr(body, n) is not None]
        require(not given, "engine", "full", f"excludes {' and '.join(given)}")
        threshold = 1.0
    if isinstance(threshold, list):
        n = ready.config.n_exits
        allowed = f"must be one number, or {n}: one for each exit of the model"
        require(len(threshold) == n, "thresholds", threshold, allowed)
    return ExitPolicy.make(
        ready.config,
        1,
        threshold,
        exits=body.exits,
        gate=body.gate or defaults.gate,
        min_exit_layer=body.min_layers,
        drafts=defaults.drafts,
    )


def rename_field(error: ConfigError) -> ConfigError:
    """Return the error with the request's name of the setting."""
    field, *rest = str(error).split(" ", 1)
    return ConfigError(" ".join([FIELDS.get(field, field), *rest]))


async def choice_deltas(
    service: Service,
    request: EngineRequest,
    index: int,
    stop_strings: Sequence[str],
    watched: ChoiceMetrics,
    seconds: float | None = None,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield a choice's deltas, the last of which has a `finish`.

    The request is aborted when the iterator is closed or a stop string came. Raises as
    `Service.stream` does.
    """
    tokenizer = service.require_ready().tokenizer
    revealed = StreamingDetokenizer(tokenizer, stop_strings, request.prompt)
    tokens, num_shown, finish = [], 0, FinishReason.ABORTED
    ends = set(request.stop_token_ids)
    try:
        async with contextlib.aclosing(service.stream(request, seconds=seconds)) as outputs:
            async for output in outputs:
                tokens += output.tokens
                watched.tokens(output.tokens)
                # A token that ends a text is not part of it, whatever its text is.
                shown = revealed.push([t.id for t in output.tokens if t.id not in ends])
                text = shown.text
                if shown.stopped:
                    finish = FinishReason.STOP
                elif output.finish:
                    finish = output.finish
                    shown = revealed.finish()
                    text += shown.text
                    finish = FinishReason.STOP if shown.stopped else finish
                done = shown.stopped or bool(output.finish)
                upto = len(tokens) if output.finish and not shown.stopped else shown.tokens
                # Tokens after a stop string in the same output are not part of the answer.
                count = revealed.num_tokens if shown.stopped else len(tokens)
                if text or upto > num_shown or done:
                    new, end = tuple(tokens[num_shown:upto]), finish if done else None
                    yield ChoiceDelta(index, text, new, end, count)
                num_shown = max(num_shown, upto)
                if done:
                    return
    except (EngineUnavailable, ConfigError):
        finish = FinishReason.REFUSED
        raise
    finally:
        watched.end(finish)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of several streams as they come; the first error of one ends all of them."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue = asyncio.Queue()

    async def forward(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    await queue.put((item, None))
            await queue.put((None, None))
        except Exception as error:
            await queue.put((None, error))

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
