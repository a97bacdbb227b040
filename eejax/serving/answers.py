"""What becomes of a request in OpenAI's form: asks of the engine, and pieces of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from eejax.common.errors import ConfigError, require
from eejax.data.tokenizers import Tokenizer
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Token
from eejax.inference.shaping import Shaping
from eejax.inference.state import STOPS
from eejax.serving.messages import CHOOSES, Ask, Ready
from eejax.serving.metrics import Watched
from eejax.serving.protocol import Wishes
from eejax.serving.service import Service, Unavailable
from eejax.serving.text import Revealed

FIELDS = dict(
    presence="presence_penalty", frequency="frequency_penalty", repetition="repetition_penalty",
    least="min_tokens", biases="logit_bias", likely="logprobs", threshold="thresholds",
    min_depth="min_layers", stop_tokens="stop_token_ids", limit="max_tokens",
)  # fmt: skip
"""What settings are called in requests, where that is another name."""

LEAVING = ("engine", "gate", "thresholds", "exits", "min_layers")
"""Fields that say how tokens leave."""


class Defaults(NamedTuple):
    """How tokens leave where a request does not say."""

    thresholds: float | tuple[float, ...] = 1.0
    gate: str = "max_probability"
    drafts: int = 0


class Piece(NamedTuple):
    """More of choice `index`: text, the tokens that it begins to show, and how it ended, if it did;
    count: of the tokens generated."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: str
    count: int


def asks(
    wishes: Wishes, ready: Ready, prompt: Sequence[int], limit: int | None, likely: int,
    defaults: Defaults,
) -> list[Ask]:  # fmt: skip
    """One for each of the n choices. Raises ConfigError, which names the request's field."""
    config, tokenizer = ready.config, ready.tokenizer
    room = ready.context - len(prompt)
    # Where nothing is to be generated, the prompt may fill the context.
    most = ready.context if limit == 0 else ready.context - 1
    require(
        0 < len(prompt) <= most, "prompt", f"{len(prompt)} tokens",
        f"must have 1 to {most}, as the model's context is {ready.context}",
    )  # fmt: skip
    least, own = wishes.min_tokens, wishes.stop_token_ids or ()
    require(limit in (None, 0) or least <= limit, "min_tokens", least, f"must be at most {limit}")
    ends = set() if wishes.ignore_eos else {*tokenizer.end_ids}
    stops = sorted({*ends, *own})
    require(
        len(stops) <= STOPS, "stop_token_ids", own, f"must be at most {STOPS - len(ends)} tokens"
    )
    seed = wishes.seed
    seed = secrets.randbelow(2**31) if seed is None else seed % 2**31
    try:
        policy = policy_of(wishes, ready, defaults)
        biases = {int(token): value for token, value in (wishes.logit_bias or {}).items()}
        shaping = Shaping.make(
            config.vocab_size, wishes.presence_penalty, wishes.frequency_penalty,
            wishes.repetition_penalty, wishes.min_tokens, biases, likely,
        )  # fmt: skip
        sampled = lambda i: Sampling.make(
            1, wishes.temperature, max(wishes.top_k, 0), wishes.top_p, wishes.min_p,
            (seed + i) % 2**31,
        )  # fmt: skip
        return [
            Ask(
                tuple(prompt), room if limit is None else limit, policy, sampled(i), shaping,
                tuple(stops), wishes.priority, wishes.objective,
            )
            for i in range(wishes.n)
        ]  # fmt: skip
    except ConfigError as error:
        raise renamed(error) from error


def policy_of(wishes: Wishes, ready: Ready, defaults: Defaults) -> ExitPolicy | None:
    """How tokens leave; None where the server chooses. Raises ConfigError as `asks`."""
    if ready.chooses:
        for name in LEAVING:
            value, default = getattr(wishes, name), Wishes.model_fields[name].default
            told = f"must be left out: {CHOOSES}"
            require(value in (None, default), name, value, told)
        return None
    told = "must be left out: there is one model, and nothing to choose"
    require(wishes.objective is None, "objective", wishes.objective, told)
    threshold = defaults.thresholds if wishes.thresholds is None else wishes.thresholds
    if wishes.engine == "full":
        given = [n for n in ("thresholds", "exits", "gate") if getattr(wishes, n) is not None]
        require(not given, "engine", "full", f"leaves no choice of {' and '.join(given)}")
        threshold = 1.0
    if isinstance(threshold, list):
        n = ready.config.n_exits
        told = f"must be one number, or {n}: one for each exit of the model"
        require(len(threshold) == n, "thresholds", threshold, told)
    return ExitPolicy.make(
        ready.config, 1, threshold, wishes.exits, gate=wishes.gate or defaults.gate,
        min_depth=wishes.min_layers, drafts=defaults.drafts,
    )  # fmt: skip


def renamed(error: ConfigError) -> ConfigError:
    """The error, with the name that a request has for the setting."""
    field, *rest = str(error).split(" ", 1)
    return ConfigError(" ".join([FIELDS.get(field, field), *rest]))


async def pieces(
    service: Service, ask: Ask, index: int, stops: Sequence[str], watched: Watched,
    seconds: float | None = None,
) -> AsyncIterator[Piece]:  # fmt: skip
    """A choice's pieces, the last of which has a `finish`; it ends the request where it is left, or
    where a stop string came. Raises as `Service.ask`."""
    tokenizer: Tokenizer = service.ready.tokenizer
    revealed, tokens, told = Revealed(tokenizer, stops, ask.prompt), [], 0
    ends, finish = set(ask.stop_tokens), "cancelled"
    try:
        async with contextlib.aclosing(service.ask(ask, seconds=seconds)) as events:
            async for event in events:
                tokens += event.tokens
                watched.tokens(event.tokens)
                # A token that ends a text is none of it, whatever it would be written as.
                shown = revealed.push([t.id for t in event.tokens if t.id not in ends])
                text = shown.text
                if shown.stopped:
                    finish = "stop"
                elif event.finish:
                    finish = event.finish
                    shown = revealed.finish()
                    text += shown.text
                    finish = "stop" if shown.stopped else finish
                done = shown.stopped or bool(event.finish)
                upto = len(tokens) if event.finish and not shown.stopped else shown.tokens
                # What came behind a stop string in the same event is none of the answer.
                count = revealed.taken if shown.stopped else len(tokens)
                if text or upto > told or done:
                    yield Piece(
                        index, text, tuple(tokens[told:upto]), finish if done else "", count
                    )
                told = max(told, upto)
                if done:
                    return
    except (Unavailable, ConfigError):
        finish = "refused"
        raise
    finally:
        watched.end(finish)


async def merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Items of several streams as they come. The first error of one ends all of them."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue = asyncio.Queue()

    async def forward(stream: AsyncIterator[Any]) -> None:
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
