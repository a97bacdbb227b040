"""Records that hold a question and its answer, of which only the answer is learned.

The model's own chat template writes a conversation. The assistant's messages are learned, each with
the token that ends its turn. Of a prompt and its completion, training learns the completion and the
end of the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.common.errors import ConfigError, DataError
from eejax.data.chat import MARKS, ChatTemplate, plain
from eejax.data.records import CHAT
from eejax.data.sources import FieldDocument
from eejax.data.tokenizers import Tokenizer, require_end


def encode(tokenizer: Tokenizer, document: FieldDocument) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a conversation, or a prompt and its completion.

    Returns:
      ids: [t] int32, the tokens; the last is the one that ends documents.
      counted: [t] bool, the tokens that a model is to predict.

    Raises:
      DataError: a conversation that the template refuses, or whose assistant's parts it does not
        show; a tokenizer without a template.
    """
    end = require_end(tokenizer)
    try:
        if document.form == CHAT:
            text, spans = conversation(tokenizer, **json.loads(document.text))
            ids, counted = _counted(tokenizer, tokenizer.encode_marked, text, spans)
            ids, counted = np.append(ids, end), np.append(counted, False)
        else:
            record = json.loads(document.text)
            prompt, text = record["prompt"], record["prompt"] + record["completion"]
            answer = (len(prompt), len(text))
            ids, counted = _counted(tokenizer, tokenizer.encode, text, [answer])
            ids, counted = np.append(ids, end), np.append(counted, True)
    except (ConfigError, DataError) as error:
        raise DataError(f"{document.name}: {error}") from error
    return ids.astype(np.int32), counted


def conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """Write messages with the tokenizer's template and find the assistant's parts in the text.

    Returns the text, for `Tokenizer.encode_marked`, and the (begin, end) of every part in
    characters. `tools` are the functions that the template may describe to the model.

    A template with `{% generation %}` declares these parts. With any other template, a part begins
    where the rendered messages before it ask for a reply, and ends with its message.

    Raises:
      ConfigError: messages that the template refuses.
      DataError: no template, no assistant message, a message with one of `chat.MARKS`, or a
        template that changes a message once others follow it.
    """
    if tokenizer.chat is None:
        raise DataError(
            "the tokenizer has no chat template: give, as data.tokenizer, a folder with the same "
            "tokenizer and a chat_template.jinja, or records of prompts and completions "
            "(completion:FILE)."
        )
    special = tuple(sorted(tokenizer.special.items()))
    template = _template(tokenizer.chat, special, tuple(tokenizer.control))
    messages = [plain(m, f"messages[{i}]") for i, m in enumerate(messages)]
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not replies:
        raise DataError("messages: none is of the role 'assistant', so none is learned. Add one.")
    if template.marks:
        for i, message in enumerate(messages):
            _check_unmarked(message, f"messages[{i}]")
        _check_unmarked(tools, "tools")
    whole = template.render(messages, reply=False, tools=tools)
    if template.marks:
        text, spans = _marked(whole)
        if not spans:
            raise DataError(
                "messages: the template marks none of the assistant's text, so none is learned."
            )
        return text, spans
    spans = []
    for i in replies:
        before = template.render(messages[:i], reply=True, tools=tools) if i else None
        behind = template.render(messages[: i + 1], reply=False, tools=tools)
        if before is None or not (behind.startswith(before) and whole.startswith(behind)):
            raise DataError(
                f"messages[{i}]: its place in the text is not known, because no message comes "
                "before it or the model's chat template changes it once others follow. Put {% "
                "generation %} and {% endgeneration %} around the assistant's part of the template."
            )
        spans.append((len(before), len(behind)))
    return whole, spans


def _check_unmarked(value: Any, where: str) -> None:
    """Raise `DataError` for a value of JSON with a character that marks the assistant's parts."""
    text = json.dumps(value, ensure_ascii=False)
    if found := [mark for mark in MARKS if mark in text]:
        raise DataError(
            f"{where}: has the character U+{ord(found[0]):04X}, which marks the assistant's part "
            "of a text here and which Unicode reserves for programs. Remove it."
        )


@functools.lru_cache(4)
def _template(
    source: str, special: tuple[tuple[str, str], ...], control: tuple[str, ...]
) -> ChatTemplate:
    return ChatTemplate(source, dict(special), control, marks=True)


def _marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks of `{% generation %}`; return the text and the (begin, end) of each part."""
    begin, end = MARKS
    out, spans, at = [], [], 0
    for part in text.split(begin)[:1]:
        out.append(part)
        at += len(part)
    for part in text.split(begin)[1:]:
        own, _, rest = part.partition(end)
        spans.append((at, at + len(own)))
        out += own, rest
        at += len(own) + len(rest)
    return "".join(out), spans


def _counted(
    tokenizer: Tokenizer,
    ids_of: Callable[[str], np.ndarray],
    text: str,
    spans: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenize a text and mark the tokens of `spans`, (begin, end) in characters, as learned.

    A token that begins before a span and reaches into it belongs to the span. White space after the
    token that ends a turn is the template's and is not learned.
    """
    ids = ids_of(text)
    counted = np.zeros(len(ids), bool)
    for begin, end in spans:
        first = _shared(ids, ids_of(text[:begin]))
        last = len(ids) if end == len(text) else _shared(ids, ids_of(text[:end]))
        ends = np.flatnonzero(np.isin(ids[first:last], tokenizer.end_ids))
        if len(ends) and not tokenizer.decode(ids[first + ends[-1] : last]).strip():
            last = first + int(ends[-1]) + 1
        counted[first:last] = True
    return ids, counted


def _shared(ids: np.ndarray, other: np.ndarray) -> int:
    """Count the tokens that two texts share at their beginning."""
    n = min(len(ids), len(other))
    differ = np.flatnonzero(ids[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
