"""Answers in OpenAI's form: what a request asks of the engine, and how its pieces are written."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os.path
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import numpy as np

from eejax.common.errors import DataError
from eejax.data.chat import plain
from eejax.data.tokenizers import utf8
from eejax.inference.scheduler import Token
from eejax.inference.scoring import Scores
from eejax.serving import protocol as form
from eejax.serving.answers import Piece
from eejax.serving.http import Failure, Server, ended, usage
from eejax.serving.messages import CHOOSES, Ask, Ready
from eejax.serving.text import Offsets


def encode(
    ready: Ready, text: str, *, limited: bool = True, marked: bool = False, **how
) -> list[int]:
    """Ids of a text, or of one that a chat template wrote (`marked`). Raises Failure for one that
    is longer than any context full of tokens is, if it is `limited`."""
    longest = int(ready.tokenizer.byte_lengths.max())
    try:
        size = len(utf8(text))
        # To find out how many tokens those are would take long.
        if limited and size > (ready.context + 1) * longest:
            told = f"prompt = {size} bytes: must have at most {ready.context} tokens, the context,"
            raise Failure(400, f"{told} of {longest} bytes each at most.", param="prompt")
        if marked:
            return ready.tokenizer.encode_marked(text).tolist()
        return ready.tokenizer.encode(text, **how).tolist()
    except DataError as error:
        raise Failure(400, f"prompt: {error}", param="prompt") from error


def check_tokens(ready: Ready, tokens: Sequence[int], param: str) -> None:
    most = ready.config.vocab_size
    bad = next((t for t in tokens if t >= most), None)
    if bad is not None:
        told = f"{param} = {bad}: must be token ids in 0..{most - 1}."
        raise Failure(400, told, param=param)


class Answer(abc.ABC):
    """What both kinds of answers have in common."""

    prefix, kind, kind_of_chunk = "", "", ""

    def __init__(self, server: Server, body: form.Wishes):
        self.server, self.body, self.begin = server, body, time.monotonic()
        self.service = server.service(body.model)
        self.ready = server.ready(self.service)
        self.head = dict(
            id=f"{self.prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=body.model
        )
        self.prompts: list[list[int]] = []
        self.asks: list[Ask] = []
        self.counts: dict[int, int] = {}

    async def prepare(self) -> None:
        """Checks what is asked. Raises for what cannot be answered."""
        self.prompts = await asyncio.to_thread(self.encoded)  # which takes long for long texts
        self.asks = self.server.asks(self.body, self.prompts, self.limit, self.likely)

    @property
    @abc.abstractmethod
    def limit(self) -> int | None:
        """Most tokens of a choice; None: as many as fit."""

    @property
    @abc.abstractmethod
    def likely(self) -> int:
        """How many of the most likely tokens are to be told of each."""

    @abc.abstractmethod
    def encoded(self) -> list[list[int]]:
        """The prompts, as ids."""

    @abc.abstractmethod
    async def whole(self) -> dict:
        """The answer at once."""

    def pieces(self) -> AsyncIterator[Piece]:
        """Of all choices, as they come."""
        return self.server.choices(self.body, self.asks, self.begin)

    @abc.abstractmethod
    def part(self, piece: Piece) -> dict:
        """A choice of a chunk."""

    async def chunks(self) -> AsyncIterator[dict]:
        head = self.head | dict(object=self.kind_of_chunk)
        options = self.body.stream_options
        counted = options is not None and options.include_usage
        more = dict(usage=None) if counted else {}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                self.counts[piece.index] = piece.count
                for choice in self.parts(piece):
                    yield head | dict(choices=[choice]) | more
        if counted:
            yield head | dict(choices=[], usage=usage(self.prompts, self.counts))

    def parts(self, piece: Piece) -> list[dict]:
        return [self.part(piece)]

    async def gathered(self) -> list[tuple[str, list[Token], str]]:
        """(text, tokens, finish) of every choice."""
        found: dict[int, tuple[str, list[Token], str]] = {}
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for index, text, tokens, finish, count in pieces:
                before, had, _ = found.get(index, ("", [], ""))
                found[index] = before + text, had + list(tokens), finish
                self.counts[index] = count
        return [found[i] for i in sorted(found)]

    @property
    def special(self) -> dict[str, bool]:
        """How text of clients is encoded."""
        return dict(allow_special=self.server.options.allow_special)

    def exits(self, tokens: Sequence[Token]) -> dict:
        if not self.body.return_exits:
            return {}
        which = lambda t: dict(model=t.model) if t.model else {}
        exits = [dict(layers=t.layers, confidence=t.confidence) | which(t) for t in tokens]
        return dict(exits=exits)

    def text_of(self, token: int) -> str:
        """A token's text; of a part of a character its bytes, as OpenAI writes them."""
        data = self.ready.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Completion(Answer):
    """Of `/v1/completions`."""

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"
    body: form.CompletionRequest

    def __init__(self, server: Server, body: form.CompletionRequest):
        super().__init__(server, body)
        self.scores: list[Scores | None] = []
        self.begun: set[int] = set()  # choices of which something was told
        self.offsets: dict[int, Offsets] = {}  # of choices

    limit = property(lambda self: self.body.max_tokens)
    likely = property(lambda self: self.body.logprobs or 0)

    def encoded(self) -> list[list[int]]:
        prompt, found = self.body.prompt, []
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        for one in prompt if several else [prompt]:
            ids = list(one) if isinstance(one, list) else encode(self.ready, one, **self.special)
            check_tokens(self.ready, ids, "prompt")
            found.append(ids)
        return found

    async def prepare(self) -> None:
        if self.body.max_tokens == 0 and not self.body.echo:
            raise Failure(400, "max_tokens = 0: goes with echo = true alone.", param="max_tokens")
        if self.ready.chooses and self.scores_prompts:
            told = f"echo = true: goes without logprobs here, as {CHOOSES}."
            raise Failure(400, told, param="echo")
        await super().prepare()
        self.scores = [await self._scored(prompt) for prompt in self.prompts]

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts are repeated with what the model makes of them."""
        return bool(self.body.echo) and self.body.logprobs is not None

    async def _scored(self, prompt: Sequence[int]) -> Scores | None:
        """What the model makes of a prompt, where it is to be repeated with it."""
        if not self.scores_prompts or len(prompt) < 2:
            return None
        left = self.body.timeout
        left = None if left is None else left - (time.monotonic() - self.begin)
        scores = await self.service.score(prompt, likely=self.body.logprobs > 0, seconds=left)
        if not np.isfinite(scores.logprob).all():
            ended("error")
        return scores

    def pieces(self) -> AsyncIterator[Piece]:
        return self._nothing() if self.body.max_tokens == 0 else super().pieces()

    async def _nothing(self) -> AsyncIterator[Piece]:
        for index in range(len(self.asks)):
            yield Piece(index, "", (), "length", 0)

    def part(self, piece: Piece) -> dict:
        index, text, tokens, finish, _ = piece
        return self._choice(index, text, tokens, finish)

    async def whole(self) -> dict:
        found = await self.gathered()
        choices = [self._choice(i, *one) for i, one in enumerate(found)]
        own = dict(object=self.kind, choices=choices, usage=usage(self.prompts, self.counts))
        return self.head | own

    def _choice(self, index, text, tokens, finish) -> dict:
        number = index // self.body.n
        prompt = self.prompts[number]
        echoed = self.body.echo and index not in self.begun
        self.begun.add(index)
        shown = self._echoed(prompt, tokens) if echoed else ""
        choice = dict(
            index=index, text=shown + text, logprobs=None,
            finish_reason=ended(finish) if finish else None,
        )  # fmt: skip
        if self.body.logprobs is not None:
            told = self._prompt_rows(number) if echoed else []
            told += [(t.id, t.logprob, t.likely) for t in tokens]
            choice["logprobs"] = self._logprobs(index, told, shown)
        return choice | self.exits(tokens)

    def _echoed(self, prompt: Sequence[int], tokens: Sequence[Token]) -> str:
        """The prompt's text, without a character that the tokens behind it make another one."""
        decode = self.ready.tokenizer.decode
        return os.path.commonprefix([decode(prompt), decode([*prompt, *(t.id for t in tokens)])])

    def _prompt_rows(self, number: int) -> list:
        """(token, log-probability, the most likely) of a prompt's tokens; the first has neither."""
        prompt, scores, rows = self.prompts[number], self.scores[number], []
        for i, token in enumerate(prompt):
            if i == 0 or scores is None:
                rows.append((token, None, None))
                continue
            likely = ()
            if scores.likely is not None:
                most = self.body.logprobs
                pairs = zip(*(a[i - 1, :most].tolist() for a in scores.likely), strict=True)
                likely = tuple((t, p) for t, p in pairs if t >= 0)
            rows.append((token, float(scores.logprob[i - 1]), likely))
        return rows

    def _logprobs(self, index: int, rows: Sequence, shown: str) -> dict:
        """Of the next tokens of a choice, which begin with those of `shown`, if anything is."""
        if index not in self.offsets:
            before = () if shown else self.prompts[index // self.body.n]
            self.offsets[index] = Offsets(self.ready.tokenizer, before)
        offsets = [self.offsets[index].push(token) for token, *_ in rows]
        tokens = [self.text_of(token) for token, *_ in rows]
        tops = [
            None if likely is None else self._top(token, logprob, likely)
            for token, logprob, likely in rows
        ]
        return dict(
            tokens=tokens, token_logprobs=[logprob for _, logprob, _ in rows],
            top_logprobs=tops, text_offset=offsets,
        )  # fmt: skip

    def _top(self, token: int, logprob: float, likely) -> dict[str, float]:
        """By text, of which some tokens have the same: the likelier one's.

        The token's own value is `logprob` to the last bit: clients compare the two to see whether
        it is the most likely one.
        """
        found: dict[str, float] = {}
        for other, value in (dict(likely) | {token: logprob}).items():
            text = self.text_of(other)
            found[text] = max(value, found.get(text, float("-inf")))
        return found


class Conversation(Answer):
    """Of `/v1/chat/completions`."""

    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: form.ChatRequest

    def __init__(self, server: Server, body: form.ChatRequest):
        super().__init__(server, body)
        self.begun: set[int] = set()

    @property
    def limit(self) -> int | None:
        body = self.body
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens

    @property
    def likely(self) -> int:
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
        # The template says itself what a text begins with.
        return [encode(self.ready, text, marked=True)]

    def parts(self, piece: Piece) -> list[dict]:
        first = []
        if piece.index not in self.begun:
            self.begun.add(piece.index)
            delta = dict(role="assistant", content="")
            first = [dict(index=piece.index, delta=delta, logprobs=None, finish_reason=None)]
        return [*first, self.part(piece)]

    def part(self, piece: Piece) -> dict:
        delta = dict(content=piece.text) if piece.text else {}
        return dict(
            index=piece.index, delta=delta, logprobs=self._logprobs(piece.tokens),
            finish_reason=ended(piece.finish) if piece.finish else None,
        ) | self.exits(piece.tokens)  # fmt: skip

    async def whole(self) -> dict:
        choices = []
        for i, (text, tokens, finish) in enumerate(await self.gathered()):
            message = dict(role="assistant", content=text, refusal=None)
            choice = dict(
                index=i, message=message, logprobs=self._logprobs(tokens),
                finish_reason=ended(finish),
            )  # fmt: skip
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
                one(t.id, t.logprob) | dict(top_logprobs=[one(*pair) for pair in t.likely])
                for t in tokens
            ],
            refusal=None,
        )  # fmt: skip
