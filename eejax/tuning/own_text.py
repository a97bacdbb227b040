"""Text that a model writes itself: what its exits have to predict where they are used.

A model with a chat template writes both sides of conversations: behind the template's beginning of
a user's message it writes a question, and then the answer (Magpie; Xu et al. 2024, section 2). Any
other model continues the beginning of a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from eejax.checkpoint.language_model import LanguageModel
from eejax.common import progress
from eejax.common.errors import DataError, require_count
from eejax.data.chat import ChatTemplate
from eejax.data.records import CHAT, fields_of
from eejax.data.sources import Document, Documents, FieldDocument
from eejax.inference.generate import Generator
from eejax.inference.request import FinishReason

SLOTS = 16  # texts that are written at once
QUESTION, ANSWER, TEXT = 48, 192, 256  # most tokens of each
TEMPERATURE, MIN_P = 1.0, 0.05  # of questions and texts, so that they differ
ATTEMPTS = 4  # rounds of questions for one round of answers, before a model is refused
_PLACE = "QUESTION"


def write_own_text(
    model: LanguageModel,
    generator: Generator,
    tokens: int,
    *,
    seed: int = 0,
    watch: Callable[[str], None] | None = None,
) -> Documents:
    """Let a model write text of about `tokens` tokens.

    Questions and texts are drawn from the model's distribution, answers are greedy.

    Args:
      model: the model.
      generator: its generator with the engine "full".
      tokens: tokens of its texts, or of its answers.
      seed: of the random draws.
      watch: called with a line about what was written.

    Raises:
      ConfigError: for a number below 1, and a chat template that refuses a conversation.
      DataError: for a model that writes nothing.
    """
    require_count("tokens", tokens)
    chats = bool(model.tokenizer.chat)
    rounds = (_conversations if chats else _texts)(model, generator, seed)
    written: list[Document | FieldDocument] = []
    total = 0
    with progress.steps("writing text", tokens, "token") as advance:
        while total < tokens:
            texts, counted = next(rounds)
            if not counted:
                raise DataError("the model's texts are empty. Give a text in place of its own.")
            written += [_document(f"own/{len(written) + i}", t) for i, t in enumerate(texts)]
            advance(min(counted, tokens - total))
            total += counted
    if watch is not None:
        kind = "answers to questions of its own" if chats else "texts"
        watch(f"the model wrote {len(written)} {kind}, {total} tokens")
    return Documents(tuple(written))


def _document(name: str, text: str | list[dict[str, str]]) -> Document | FieldDocument:
    if isinstance(text, str):
        return Document(name, text)
    return FieldDocument(name, fields_of({"messages": text}, CHAT, name), CHAT)


def _conversations(
    model: LanguageModel, generator: Generator, seed: int
) -> Iterator[tuple[list[list[dict[str, str]]], int]]:
    """Yield rounds of (conversations of a question and its answer, tokens of the answers)."""
    tokenizer, context = model.tokenizer, model.config.context_length
    template = ChatTemplate(str(tokenizer.chat), dict(tokenizer.special), tuple(tokenizer.control))
    questions = _questions(model, generator, template, seed)
    while True:
        # The same number each time, so that one program answers all.
        asked = [next(questions) for _ in range(SLOTS)]
        ids = [tokenizer.encode_marked(template.render([_said("user", q)])) for q in asked]
        fits = [len(prompt) < context for prompt in ids]
        prompts = [p.tolist() if fit else [0] for p, fit in zip(ids, fits, strict=True)]
        answers = generator.generate(prompts, ANSWER, stop_token_ids=tokenizer.end_ids)
        found, counted = [], 0
        for i, question in enumerate(asked):
            text = tokenizer.decode(answers.ids(i)).strip()
            if fits[i] and text:
                found.append([_said("user", question), _said("assistant", text)])
                counted += int(answers.lengths[i])
        yield found, counted


def _questions(
    model: LanguageModel, generator: Generator, template: ChatTemplate, seed: int
) -> Iterator[str]:
    """Yield questions that differ. Raises `DataError` where several rounds give too few."""
    tokenizer = model.tokenizer
    # All before the user's text; what the template puts behind it is for the model to write.
    before, _, _ = template.render([_said("user", _PLACE)], reply=False).partition(_PLACE)
    begin = tokenizer.encode_marked(before).tolist()
    most = max(1, min(QUESTION, (model.config.context_length - len(begin)) // 2))
    known: set[str] = set()
    for number in itertools.count():
        drawn = generator.generate(
            [begin] * SLOTS,
            most,
            seed=_seeds(seed, number),
            stop_token_ids=tokenizer.end_ids,
            temperature=TEMPERATURE,
            min_p=MIN_P,
        )
        for i, finish in enumerate(drawn.finish):
            text = tokenizer.decode(drawn.ids(i)).strip()
            if finish == FinishReason.STOP and text and text not in known:
                known.add(text)
                yield text
        if len(known) < (number + 1) * SLOTS / ATTEMPTS**2 and number + 1 >= ATTEMPTS:
            raise DataError(
                f"the model wrote {len(known)} different questions in {(number + 1) * SLOTS} "
                "attempts behind its chat template's beginning of a user's message. Give a text "
                "in place of its own."
            )


def _texts(
    model: LanguageModel, generator: Generator, seed: int
) -> Iterator[tuple[list[str], int]]:
    """Yield rounds of (texts behind the beginning of a text, their tokens)."""
    tokenizer = model.tokenizer
    first = tokenizer.bos_id if tokenizer.adds_bos else tokenizer.eos_id
    for number in itertools.count():
        found = generator.generate(
            [[0 if first is None else first]] * SLOTS,
            min(TEXT, model.config.context_length - 1),
            seed=_seeds(seed, number),
            stop_token_ids=tokenizer.end_ids,
            temperature=TEMPERATURE,
            min_p=MIN_P,
        )
        texts = [tokenizer.decode(found.ids(i)) for i in range(SLOTS)]
        yield [text for text in texts if text], int(found.lengths.sum()) if any(texts) else 0


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _seeds(seed: int, part: int) -> list[int]:
    """Return a seed for every slot, unlike those of other rounds."""
    drawn = np.random.default_rng([seed, part]).integers(0, 2**31 - 1, SLOTS)
    return drawn.tolist()
