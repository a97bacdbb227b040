"""Responses in OpenAI's form: from a request's body to engine requests, and from deltas to JSON."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os.path
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from eejax.common.errors import DataError
from eejax.data.chat import plain
from eejax.data.tokenizers import utf8
from eejax.helios.report import CHOOSES
from eejax.inference.request import EngineRequest, FinishReason, Token
from eejax.inference.scoring import TextScores
from eejax.serving import protocol as form
from eejax.serving.answers import ChoiceDelta
from eejax.serving.http import APIError, ModelServer, finish_reason, not_finite, remaining, usage
from eejax.serving.messages import EngineReady
from eejax.serving.text import TokenOffsets


def encode(
    ready: EngineReady,
    text: str,
    *,
    field: str = "prompt",
    limited: bool = True,
    marked: bool = False,
    allow_special: bool = False,
    begins: bool = True,
) -> list[int]:
    """Return the ids of a text, or of one that a chat template wrote (`marked`).

    `allow_special` and `begins` are those of `Tokenizer.encode`.

    Raises:
      APIError: for a text that is longer than any context full of tokens, if it is `limited`.
    """
    longest = int(ready.tokenizer.byte_lengths.max())
    try:
        size = len(utf8(text))
        # Counting the tokens of such a text would take long.
        if limited and size > (ready.context + 1) * longest:
            message = (
                f"{field} = {size} bytes: must have at most {ready.context} tokens, the context,"
            )
            raise APIError(400, f"{message} of {longest} bytes each at most.", param=field)
        if marked:
            return ready.tokenizer.encode_marked(text).tolist()
        own = dict(allow_special=allow_special, begins=begins)
        return ready.tokenizer.encode(text, **own).tolist()
    except DataError as error:
        raise APIError(400, f"{field}: {error}", param=field) from error


def check_tokens(ready: EngineReady, tokens: Sequence[int], param: str) -> None:
    """Raise `APIError`, naming the field `param`, for a token that the model does not have."""
    most = ready.config.vocab_size
    bad = next((t for t in tokens if t >= most), None)
    if bad is not None:
        message = f"{param} = {bad}: must be token ids in 0..{most - 1}."
        raise APIError(400, message, param=param)


class ResponseBuilder(abc.ABC):
    """Base of the responses to completions and chats."""

    prefix, kind, kind_of_chunk = "", "", ""

    def __init__(self, server: ModelServer, body: form.GenerationRequest, begin: float):
        """Take a request that arrived at `begin` by `time.monotonic`, once its engine is ready."""
        self.server, self.body, self.begin = server, body, begin
        self.service = server.service(body.model)
        self.ready = self.service.require_ready()
        self.response_id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = dict(id=self.response_id, created=int(time.time()), model=body.model)
        self.prompts: list[list[int]] = []
        self.requests: list[EngineRequest] = []
        self.counts: dict[int, int] = {}

    async def prepare(self) -> None:
        """Check the request and encode its prompts. Raises if it cannot be answered."""
        self.prompts = await asyncio.to_thread(self.encoded)  # takes long for long texts
        self.requests = self.server.engine_requests(
            self.response_id, self.body, self.prompts, self.limit, self.top_logprobs
        )

    @property
    @abc.abstractmethod
    def limit(self) -> int | None:
        """Maximum number of tokens of a choice; None for as many as fit."""

    @property
    @abc.abstractmethod
    def top_logprobs(self) -> int:
        """Number of most likely tokens to report for each token."""

    @abc.abstractmethod
    def encoded(self) -> list[list[int]]:
        """Return the prompts as ids."""

    @abc.abstractmethod
    async def whole(self) -> dict:
        """Return the whole answer."""

    def pieces(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the deltas of all choices as they come."""
        return self.server.choices(self.body, self.requests, self.begin)

    @abc.abstractmethod
    def part(self, piece: ChoiceDelta) -> dict:
        """Return one choice of a chunk."""

    async def chunks(self) -> AsyncGenerator[dict, None]:
        """Yield the chunks of a streamed response."""
        head = self.head | dict(object=self.kind_of_chunk)
        options = self.body.stream_options
        counted = options is not None and options.include_usage
        more = dict(usage=None) if counted else {}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                self.counts[piece.choice] = piece.num_tokens
                for choice in await self.parts(piece):
                    yield head | dict(choices=[choice]) | more
        if counted:
            yield head | dict(choices=[], usage=usage(self.prompts, self.counts))

    async def parts(self, piece: ChoiceDelta) -> list[dict]:
        """Return the choices that report a delta, each in a chunk of its own."""
        return [self.part(piece)]

    async def gathered(self) -> list[tuple[str, list[Token], FinishReason]]:
        """Collect (text, tokens, finish) of every choice."""
        found: dict[int, tuple[str, list[Token]]] = {}
        ends: dict[int, FinishReason] = {}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for choice, text, tokens, finish, num_tokens in pieces:
                before, had = found.get(choice, ("", []))
                found[choice] = before + text, had + list(tokens)
                self.counts[choice] = num_tokens
                if finish is not None:
                    ends[choice] = finish
        return [(*found[i], ends[i]) for i in sorted(found)]

    def exits(self, tokens: Sequence[Token]) -> dict:
        """Return the field with the tokens' exits if the request wants it, else no field."""
        if not self.body.return_exits:
            return {}

        def which(t):
            return dict(model=t.model) if t.model else {}

        exits = [dict(layers=t.layers, confidence=t.confidence) | which(t) for t in tokens]
        return dict(exits=exits)

    def text_of(self, token: int) -> str:
        """Return a token's text; for a part of a character its bytes, as OpenAI writes them."""
        data = self.ready.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionResponse(ResponseBuilder):
    """Response of `/v1/completions`."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"
    body: form.CompletionRequest

    def __init__(self, server: ModelServer, body: form.CompletionRequest, begin: float):
        super().__init__(server, body, begin)
        self.scores: list[TextScores | None] = []
        self.started_choices: set[int] = set()  # choices that have sent text
        self.offsets: dict[int, TokenOffsets] = {}  # by choice

    @property
    def limit(self) -> int | None:
        return self.body.max_tokens

    @property
    def top_logprobs(self) -> int:
        return self.body.logprobs or 0

    def encoded(self) -> list[list[int]]:
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [self._encoded(prompt)]
        ids = [one for one in prompt if isinstance(one, int)]
        if ids or not prompt:
            return [self._encoded(ids)]
        return [self._encoded(one) for one in prompt if not isinstance(one, int)]

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        allowed = self.server.options.allow_special
        text = isinstance(prompt, str)
        ids = encode(self.ready, prompt, allow_special=allowed) if text else prompt
        check_tokens(self.ready, ids, "prompt")
        return ids

    async def prepare(self) -> None:
        if self.body.max_tokens == 0 and not self.body.echo:
            raise APIError(400, "max_tokens = 0: requires echo = true.", param="max_tokens")
        if self.ready.chooses and self.scores_prompts:
            message = f"echo = true: excludes logprobs here, as {CHOOSES}."
            raise APIError(400, message, param="echo")
        await super().prepare()
        self.scores = [await self._scored(i) for i in range(len(self.prompts))]

    @property
    def scores_prompts(self) -> bool:
        """True if prompts are repeated with their log-probabilities."""
        return bool(self.body.echo) and self.body.logprobs is not None

    async def _scored(self, number: int) -> TextScores | None:
        """Score a prompt if it is to be repeated with log-probabilities."""
        prompt, id_ = self.prompts[number], f"{self.response_id}-score-{number}"
        if not self.scores_prompts or len(prompt) < 2:
            return None
        left = remaining(self.body.timeout, self.begin)
        scores = await self.service.score(
            id_, prompt, top_logprobs=self.top_logprobs > 0, seconds=left
        )
        if not np.isfinite(scores.logprob).all():
            raise not_finite()
        return scores

    def pieces(self) -> AsyncGenerator[ChoiceDelta, None]:
        return self._nothing() if self.body.max_tokens == 0 else super().pieces()

    async def _nothing(self) -> AsyncGenerator[ChoiceDelta, None]:
        for index in range(len(self.prompts) * self.body.n):
            yield ChoiceDelta(index, "", (), FinishReason.LENGTH, 0)

    def part(self, piece: ChoiceDelta) -> dict:
        index, text, tokens, finish, _ = piece
        return self._choice(index, text, tokens, finish)

    async def parts(self, piece: ChoiceDelta) -> list[dict]:
        if self.scores_prompts and piece.choice not in self.started_choices:
            return [await asyncio.to_thread(self.part, piece)]  # takes long for a long prompt
        return [self.part(piece)]

    async def whole(self) -> dict:
        found = await self.gathered()

        def choices_of() -> list[dict]:
            return [self._choice(i, *one) for i, one in enumerate(found)]

        # Log-probabilities of long prompts take long.
        choices = await asyncio.to_thread(choices_of) if self.scores_prompts else choices_of()
        own = dict(object=self.kind, choices=choices, usage=usage(self.prompts, self.counts))
        return self.head | own

    def _choice(self, index, text, tokens, finish) -> dict:
        number = index // self.body.n
        prompt = self.prompts[number]
        echoed = self.body.echo and index not in self.started_choices
        self.started_choices.add(index)
        shown = self._echoed(prompt, tokens) if echoed else ""
        choice: dict[str, Any] = dict(
            index=index,
            text=shown + text,
            logprobs=None,
            finish_reason=finish_reason(finish) if finish else None,
        )
        if self.body.logprobs is not None:
            rows = self._prompt_rows(number) if echoed else []
            rows += [(t.id, t.logprob, t.top_logprobs) for t in tokens]
            choice["logprobs"] = self._logprobs(index, rows, shown)
        return choice | self.exits(tokens)

    def _echoed(self, prompt: Sequence[int], tokens: Sequence[Token]) -> str:
        """Return the prompt's text, without a last character that the following tokens complete."""
        decode = self.ready.tokenizer.decode
        return os.path.commonprefix([decode(prompt), decode([*prompt, *(t.id for t in tokens)])])

    def _prompt_rows(self, number: int) -> list:
        """Return (token, log-probability, most likely tokens) of a prompt's tokens."""
        prompt, scores, rows = self.prompts[number], self.scores[number], []
        for i, token in enumerate(prompt):
            if i == 0 or scores is None:
                rows.append((token, None, None))
                continue
            top_logprobs = ()
            if scores.top_logprobs is not None:
                most = self.body.logprobs
                pairs = zip(*(a[i - 1, :most].tolist() for a in scores.top_logprobs), strict=True)
                top_logprobs = tuple((t, p) for t, p in pairs if t >= 0)
            rows.append((token, float(scores.logprob[i - 1]), top_logprobs))
        return rows

    def _logprobs(self, index: int, rows: Sequence, shown: str) -> dict:
        """Return log-probabilities of a choice's next tokens; those of `shown` come first."""
        if index not in self.offsets:
            before = () if shown else self.prompts[index // self.body.n]
            self.offsets[index] = TokenOffsets(self.ready.tokenizer, before)
        offsets = [self.offsets[index].push(token) for token, *_ in rows]
        tokens = [self.text_of(token) for token, *_ in rows]
        tops = [
            None if top_logprobs is None else self._top(token, logprob, top_logprobs)
            for token, logprob, top_logprobs in rows
        ]
        return dict(
            tokens=tokens,
            token_logprobs=[logprob for _, logprob, _ in rows],
            top_logprobs=tops,
            text_offset=offsets,
        )

    def _top(self, token: int, logprob: float, top_logprobs) -> dict[str, float]:
        """Return the most likely tokens by their text; of equal texts, the likelier token's.

        The token's own value is `logprob` to the last bit: clients compare the two to see whether
        it is the most likely one.
        """
        found: dict[str, float] = {}
        for other, value in (dict(top_logprobs) | {token: logprob}).items():
            text = self.text_of(other)
            found[text] = max(value, found.get(text, float("-inf")))
        return found


class ChatResponse(ResponseBuilder):
    """Response of `/v1/chat/completions`."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: form.ChatRequest

    def __init__(self, server: ModelServer, body: form.ChatRequest, begin: float):
        super().__init__(server, body, begin)
        self.started_choices: set[int] = set()

    @property
    def limit(self) -> int | None:
        body = self.body
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens

    @property
    def top_logprobs(self) -> int:
        return (self.body.top_logprobs or 0) if self.body.logprobs else 0

    def encoded(self) -> list[list[int]]:
        template, body = self.server.template(self.body.model), self.body
        messages = [
            plain(m.model_dump(exclude_unset=True), f"messages[{i}]")
            for i, m in enumerate(body.messages)
        ]
        text = template.render(
            messages,
            reply=body.add_generation_prompt,
            go_on=body.continue_final_message,
            tools=body.tools or None,
            documents=body.documents,
            options=body.chat_template_kwargs,
        )
        # The template itself writes the tokens that begin a text.
        return [encode(self.ready, text, field=self.body.text_field, marked=True)]

    async def parts(self, piece: ChoiceDelta) -> list[dict]:
        first = []
        if piece.choice not in self.started_choices:
            self.started_choices.add(piece.choice)
            delta = dict(role="assistant", content="")
            first = [dict(index=piece.choice, delta=delta, logprobs=None, finish_reason=None)]
        return [*first, self.part(piece)]

    def part(self, piece: ChoiceDelta) -> dict:
        delta = dict(content=piece.text) if piece.text else {}
        return dict(
            index=piece.choice,
            delta=delta,
            logprobs=self._logprobs(piece.tokens),
            finish_reason=finish_reason(piece.finish) if piece.finish else None,
        ) | self.exits(piece.tokens)

    async def whole(self) -> dict:
        choices = []
        for i, (text, tokens, finish) in enumerate(await self.gathered()):
            message = dict(role="assistant", content=text, refusal=None)
            choice = dict(
                index=i,
                message=message,
                logprobs=self._logprobs(tokens),
                finish_reason=finish_reason(finish),
            )
            choices.append(choice | self.exits(tokens))
        own = dict(object=self.kind, choices=choices, usage=usage(self.prompts, self.counts))
        return self.head | own

    def _logprobs(self, tokens: Sequence[Token]) -> dict | None:
        if not self.body.logprobs:
            return None

        def one(token: int, logprob: float) -> dict:
            data = list(self.ready.tokenizer.token_bytes(token))
            return dict(token=self.text_of(token), logprob=logprob, bytes=data)

        return dict(
            content=[
                one(t.id, t.logprob) | dict(top_logprobs=[one(*pair) for pair in t.top_logprobs])
                for t in tokens
            ],
            refusal=None,
        )
