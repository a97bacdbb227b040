"""A conversation with a model, as token ids that its chat template makes."""

from __future__ import annotations

from eejax.common.errors import ConfigError, DataError
from eejax.data.chat import ChatTemplate, find


class Conversation:
    """Messages so far, as token ids that a model's chat template makes of them."""

    def __init__(self, name: str, model, system: str | None = None):
        """Begin a conversation. Raises `DataError` for a model without a chat template."""
        source = find(model.source, model.tokenizer)
        if source is None:
            raise DataError(
                f"MODEL = {name!r}: has no chat template, so it continues texts: `eejax generate` "
                "does that for a run."
            )
        self._template = ChatTemplate(*source, tuple(model.tokenizer.control))
        self._encode, self._room = model.tokenizer.encode_marked, model.config.context_length
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = [*self._system]

    def clear(self) -> None:
        self.messages = [*self._system]

    def ask(self, text: str, new: int) -> list[int]:
        """Return the conversation with a message of the user, [t].

        The oldest messages are left out where all of them leave no room for `new` tokens.

        Raises:
          ConfigError: for a message that is too long by itself, or that the template refuses.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        begin = len(self._system)
        while True:
            ids = self._encode(self._template.render(messages)).tolist()
            if len(ids) + new <= self._room:
                self.messages = messages
                return ids
            if len(messages) - begin < 3:
                raise ConfigError(
                    f"the message has {len(ids)} tokens, which with --max_new_tokens = {new} must "
                    f"be at most the context ({self._room}): shorten it, or lower the flag."
                )
            del messages[begin : begin + 2]

    def alone(self, text: str, new: int) -> list[int]:
        """Return a message without a conversation before it, [t]. Raises as `ask`."""
        self.clear()
        ids = self.ask(text, new)
        self.clear()
        return ids

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
