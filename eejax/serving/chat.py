"""Conversations as a model was trained to read them: its chat template, in a sandbox."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eejax.common.errors import CheckpointError, ConfigError
from eejax.data.tokenizers import Tokenizer

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class Template:
    """What makes one text of messages; written by whoever made the model, so it is not trusted."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None):
        """special: names of tokens that templates speak of, bos_token and eos_token. Raises
        ConfigError for what is no template."""
        self._special = dict(special or {})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
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
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            told = f"messages: the model's chat template refuses them ({error})."
            raise ConfigError(told) from error


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def find(folder: pathlib.Path, tokenizer: Tokenizer) -> tuple[str, dict[str, str]] | None:
    """(source, special tokens) of a folder's chat template, None where it has none.

    Raises CheckpointError for files that cannot be read.
    """
    own, config = folder / FILE, folder / CONFIG
    try:
        said = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        source = own.read_text(encoding="utf-8") if own.is_file() else said.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its chat template cannot be read ({error}).") from error
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special = {}
    for name, fallback in (("bos_token", "bos"), ("eos_token", "eos")):
        token = said.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        special[name] = token or getattr(tokenizer, fallback, None) or ""
    return source, special
