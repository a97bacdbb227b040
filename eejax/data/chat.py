"""Render conversations with a model's chat template, in a sandbox.

A template gets the same variables as in transformers (`apply_chat_template`, 5.23), so that it
writes the same text. Names of special tokens in text of users are marked (`data.special`), so that
special tokens come only from the template.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eejax.common.errors import ConfigError
from eejax.data.special import MARK, Shield
from eejax.data.tokenizer_files import TemplateSource, chat_template
from eejax.data.tokenizers import Tokenizer

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields that hold a message's reasoning; templates read the first or the second."""

SPEAKING = ("system", "developer", "user", "tool")
"""Roles whose messages must have content, as in OpenAI's API."""

OPTIONS = "chat_template_kwargs"

_END = "CONTINUE_FINAL_MESSAGE_TAG "

MARKS = ("\ufdd1", "\ufdd2")
"""Delimiters of the assistant's parts of a text; Unicode reserves them code points for programs."""


class MarkingEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox of a template.

    Attributes:
      marks: whether `GenerationTag` puts `MARKS` around its content.
      marked: whether it has done so.
    """

    marks = False
    marked = False


class GenerationTag(Extension):
    """Tag `{% generation %}`, with which templates mark the assistant's part for training.

    Its content is rendered as it is, or between `MARKS` if the environment's `marks` is set.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        environment = self.environment
        if not isinstance(environment, MarkingEnvironment) or not environment.marks:
            return body
        environment.marked = True

        def put(mark):
            return nodes.Output([nodes.TemplateData(mark)], lineno=line)

        return [put(MARKS[0]), *body, put(MARKS[1])]


class ChatTemplate:
    """A chat template, which renders messages as one text.

    It comes with the model, so it is not trusted.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        control: Sequence[str] = (),
        *,
        marks: bool = False,
    ):
        """Compile a template.

        Args:
          special: names of special tokens, by the variables that templates use for them.
          control: names of special tokens that stay text in messages. They are marked in the
            rendered text, which must be encoded with `Tokenizer.encode_marked`.
          marks: put `MARKS` around the parts that the template declares as the assistant's;
            `self.marks` is then whether it declares any.

        Raises:
          ConfigError: the source is not a valid template.
        """
        self._special, self._shield = dict(special or {}), Shield(control) if control else None
        environment = MarkingEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.marks = marks
        environment.filters["tojson"] = _json
        environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda f: datetime.datetime.now().strftime(f)
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"chat_template: is not a valid Jinja template ({error}).") from error
        self.marks = environment.marked

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool = True,
        go_on: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages as one text.

        Args:
          messages: as `plain` makes them.
          reply: end the text where the model's reply begins (`add_generation_prompt`).
          go_on: end the text within the last message, which the model continues
            (`continue_final_message`); without `reply`.
          tools: the functions the model may call, for templates that use them.
          documents: the documents the model may read, for templates that use them.
          options: other variables of the template.

        Raises:
          ConfigError: the template refuses the messages; the error names the first refused one.
        """
        given = list(messages)
        variables: dict[str, Any] = dict(tools=tools, documents=documents)
        more = dict(options or {})
        if taken := sorted({"messages", *variables, "add_generation_prompt"} & {*more}):
            raise ConfigError(
                f"{OPTIONS}: must not have {taken}, which other fields of the request set."
            )
        if (shield := self._shield) is not None:
            given = _shielded(shield, "messages", given)
            variables = {name: _shielded(shield, name, a) for name, a in variables.items()}
            more = _shielded(shield, OPTIONS, more)
        read = [_thoughtful(message) for message in given]
        rest = self._special | more | variables | dict(add_generation_prompt=reply)
        if go_on:
            return self._unfinished(read, rest)
        try:
            return self._rendered(read, rest)
        except Exception as error:  # an untrusted program may raise anything
            number = self._first_bad(read, rest, error)
            raise ConfigError(
                f"messages: the model's chat template refuses them ({error}), the first time at "
                f"messages[{number}], which has {', '.join(read[number])}."
            ) from error

    def _rendered(self, messages: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]) -> str:
        """Render the first form of the messages that the template accepts."""
        failed = []
        for form in _forms(messages):
            try:
                return self._template.render(messages=form, **rest)
            except Exception as error:
                failed.append(error)
        raise failed[0]

    def _first_bad(self, messages, rest, error: Exception) -> int:
        """Return the number of the first message with which the template raises the same error."""
        low, high = 1, len(messages)
        while low < high:
            mid = (low + high) // 2
            try:
                self._rendered(messages[:mid], rest)
                fails = False
            except Exception as other:
                fails = str(other) == str(error)
            low, high = (low, mid) if fails else (mid + 1, high)
        return high - 1

    def _unfinished(self, messages: list[dict], rest: Mapping[str, Any]) -> str:
        """Render up to the end of the last message's content."""
        last = messages[-1].get("content")
        where = f"messages[{len(messages) - 1}].content"
        if not isinstance(last, str):
            raise ConfigError(f"{where}: must be a string, for the model to continue.")
        tagged = [*messages[:-1], messages[-1] | {"content": last + _END}]
        try:
            text = self._rendered(tagged, rest)
        except Exception as error:
            raise ConfigError(
                f"messages: the model's chat template refuses them ({error})."
            ) from error
        at = text.rfind(_END.strip())
        if at < 0 or last.strip() not in text:
            raise ConfigError(
                f"{where}: cannot be continued, because the model's chat template changes it."
            )
        whole = text[at : at + len(_END)] == _END  # otherwise the template strips white space
        return text[:at] if whole else text[:at].rstrip()


def _shielded(shield: Shield, name: str, value: Any) -> Any:
    try:
        return shield(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}.") from error


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield forms of messages to try in order.

    The first is that of transformers. Templates that fail on it get an empty text for missing
    content, then the arguments of tool calls as JSON text, as in OpenAI's API.
    """
    messages = [dict(message) for message in messages]
    yield messages
    filled = [{**m, "content": m.get("content", "")} for m in messages]
    if filled != messages:
        yield filled
    if any("tool_calls" in m for m in messages):
        yield [_with_calls(m, _text_of_arguments) for m in filled]


def _text_of_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function) | {"arguments": _json(function.get("arguments", {}))}


def _with_calls(message: Mapping[str, Any], change) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    made = [
        dict(call) | {"function": change(call["function"])}
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        else call
        for call in calls
    ]
    return dict(message) | {"tool_calls": made}


def _thoughtful(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message's reasoning to the fields that templates read."""
    found = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def plain(message: Mapping[str, Any], where: str = "messages") -> dict[str, Any]:
    """Convert a message of OpenAI's form to the form that templates take.

    Its content becomes a text and the arguments of its tool calls become objects; null fields are
    dropped.

    Raises:
      ConfigError: for a field that cannot be converted; the error names it, within `where`.
    """
    found = {key: value for key, value in message.items() if value is not None}
    if "content" not in found and (role := found.get("role")) in SPEAKING:
        raise ConfigError(f"{where}.content: is required for the role {role!r}.")
    if isinstance(content := found.get("content"), list):
        found["content"] = "".join(
            _text_of_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    calls = found.get("tool_calls")
    if calls is None:
        return found
    if not calls:
        del found["tool_calls"]
        return found
    if not isinstance(calls, list):
        raise ConfigError(f"{where}.tool_calls: must be a list.")
    number = iter(range(len(calls)))

    def parsed(function: Mapping[str, Any]) -> dict[str, Any]:
        name = f"{where}.tool_calls[{next(number)}].function.arguments"
        value = function.get("arguments")
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}: must be JSON ({error}).") from error
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r}: must be a JSON object.")
        return dict(function) | {"arguments": value}

    return _with_calls(found, parsed)


def _text_of_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ConfigError(f"{where}.type = {kind!r}: must be 'text', the only supported content.")
    return part["text"]


def _json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Serialize a value for the filter `tojson`, with the arguments of the one in transformers."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace("\\ufdd0", MARK) if ensure_ascii else text


def _refuse(message: str) -> None:
    raise TemplateError(message)


def find(folder: pathlib.Path | None, tokenizer: Tokenizer) -> TemplateSource | None:
    """Find a model's chat template.

    A file in the folder comes before the tokenizer's own.

    Returns:
      the template, None if there is none.

    Raises:
      DataError: for a file that cannot be read.
    """
    own = None if folder is None else chat_template(folder)
    source = own or tokenizer.chat
    return None if source is None else TemplateSource(source, dict(tokenizer.special))
