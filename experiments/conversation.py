"""Users' messages and whole conversations, as token ids that a model's chat template makes."""

from __future__ import annotations

from collections.abc import Callable

from eejax.common.errors import ConfigError, DataError
from eejax.data.chat import ChatTemplate, find


def template_of(model) -> ChatTemplate | None:
    """Return a model's chat template, None if it has none."""
    source = find(model.source, model.tokenizer)
    return None if source is None else ChatTemplate(*source, tuple(model.tokenizer.control))


def encoder_of(model) -> Callable[[str], list[int]]:
    """Return a function from a user's message to token ids; without a template it is plain text."""
    template, tokenizer = template_of(model), model.tokenizer

    def encode(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text).tolist()
        asked = template.render([{"role": "user", "content": text}])
        return tokenizer.encode_marked(asked).tolist()

    return encode


class Conversation:
    """Messages that were answered so far, and the one that was asked last."""

    def __init__(self, name: str, model, system: str | None = None):
        """Begin a conversation. Raises `DataError` for a model without a chat template."""
        template = template_of(model)
        if template is None:
            raise DataError(
                f"MODEL = {name!r}: has no chat template, so it continues texts: `eejax generate` "
                "does that for a run."
            )
        self._template = template
        self._encode, self._room = model.tokenizer.encode_marked, model.config.context_length
        self._system = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        self.messages = self._asked = list(self._system)

    def ask(self, text: str, new: int) -> list[int]:
        """Return the conversation with a message of the user, [t], which counts once answered.

        The oldest messages are left out where all of them leave no room for `new` tokens.

        Raises:
          ConfigError: for a message that is too long by itself, or that the template refuses.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        begin = len(self._system)
        while True:
            ids = self._encode(self._template.render(asked)).tolist()
            if len(ids) + new <= self._room:
                self._asked = asked
                return ids
            if len(asked) - begin < 3:
                raise ConfigError(
                    f"the message has {len(ids)} tokens, which with --max_new_tokens = {new} must "
                    f"be at most the context ({self._room}): shorten it, or lower the flag."
                )
            del asked[begin : begin + 2]

    def answer(self, text: str) -> None:
        """Add the message that was asked last, and its answer."""
        self.messages = [*self._asked, {"role": "assistant", "content": text}]
