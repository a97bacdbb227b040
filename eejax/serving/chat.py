"""Conversations as a model was trained to read them: its chat template, in a sandbox."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eejax.common.errors import ConfigError
from eejax.data.tokenizer_files import chat_template
from eejax.data.tokenizers import Tokenizer


class Generation(Extension):
    """`{% generation %}`, by which trainers find the model's part: what is in it, as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """What makes one text of messages; written by whoever made the model, so it is not trusted."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None):
        """special: names of tokens that templates speak of, bos_token and eos_token. Raises
        ConfigError for what is no template."""
        self._special = dict(special or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda f: datetime.datetime.now().strftime(f)
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"chat_template: is no template of Jinja ({error}).") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True) -> str:
        """The text of messages, up to where the model's reply begins. Raises ConfigError for
        messages that the template refuses."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=reply, **self._special
            )
        except Exception as error:  # it is a program, and whoever wrote it is not known
            told = f"messages: the model's chat template refuses them ({error})."
            raise ConfigError(told) from error


def _json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """With the arguments that transformers' has."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def find(folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[str, dict[str, str]] | None:
    """(source, special tokens) of a model's chat template: that of a file in its folder, else its
    tokenizer's; None where it has none. Raises DataError for a file that cannot be read."""
    source = chat_template(folder) or tokenizer.chat
    if source is None:
        return None
    special = {f"{n}_token": getattr(tokenizer, n, None) or "" for n in ("bos", "eos")}
    return source, special
