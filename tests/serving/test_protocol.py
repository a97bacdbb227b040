"""Requests as OpenAI's own client has them: every field is taken, or refused by what it asks."""

from __future__ import annotations

import typing

import openai.types.chat.completion_create_params as chats
import openai.types.completion_create_params as texts
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from eejax.serving import protocol as form
from eejax.serving.http import validation_error

CHAT = dict(model="m", messages=[dict(role="user", content="hi")])
TEXT = dict(model="m", prompt="hi")
TOOL = dict(type="function", function=dict(name="f"))

# Values that ask for nothing, beside null.
NEUTRAL = dict(
    best_of=[1],
    frequency_penalty=[0, 0.0],
    function_call=["none", "auto"],
    functions=[[]],
    logit_bias=[{}],
    metadata=[{}, {"a": "b"}],
    modalities=[["text"]],
    n=[1],
    parallel_tool_calls=[True, False],
    prompt_cache_key=["k"],
    prompt_cache_options=[{}],
    prompt_cache_retention=["24h"],
    reasoning_effort=["none"],
    response_format=[{"type": "text"}],
    safety_identifier=["s"],
    service_tier=["auto", "default"],
    store=[False],
    stream=[False],
    suffix=[""],
    tool_choice=["none", "auto"],
    tools=[[]],
    user=["u"],
    verbosity=["medium"],
    echo=[False],
)
# Values that ask for what is not supported, and what the answer calls it.
ASKING = dict(
    audio=({"voice": "a", "format": "mp3"}, "audio is not supported"),
    best_of=(3, "choosing among more than n = 1 choices is not supported"),
    function_call=({"name": "f"}, "calling functions is not supported"),
    functions=([{"name": "f"}], "calling functions is not supported"),
    modalities=(["text", "audio"], "another modality than text is not supported"),
    moderation=({"model": "m"}, "moderation is not supported"),
    prediction=({"type": "content", "content": "a"}, "predicted output is not supported"),
    reasoning_effort=("high", "an effort of reasoning is not supported"),
    response_format=({"type": "json_object"}, "another format than text is not supported"),
    service_tier=("flex", "tiers of service are not supported"),
    store=(True, "keeping answers is not supported"),
    suffix=("end", "text before a suffix is not supported"),
    tool_choice=("required", "having a tool called is not supported"),
    tools=([TOOL], "tool calls are not parsed"),
    verbosity=("low", "a verbosity is not supported"),
    web_search_options=({}, "searching the web is not supported"),
)

KINDS = pytest.mark.parametrize(
    "body, kind, theirs",
    [
        (CHAT, form.ChatRequest, chats.CompletionCreateParamsStreaming),
        (TEXT, form.CompletionRequest, texts.CompletionCreateParamsStreaming),
    ],
    ids=["chat", "text"],
)


def fields(theirs) -> set[str]:
    return {*typing.get_type_hints(theirs)}


@KINDS
def test_every_field_of_the_client_is_known(body, kind, theirs):
    assert fields(theirs) <= {*kind.model_fields}
    asking = {name for name in fields(theirs) & {*ASKING}}
    # What is neither supported nor looked at is among those that are refused below.
    described = {n: f for n, f in kind.model_fields.items() if n in fields(theirs)}
    refused = {n for n, f in described.items() if "Validator" in str(f.metadata)}
    assert refused <= asking


@KINDS
def test_values_that_ask_for_nothing_are_taken(body, kind, theirs):
    for name in fields(theirs) - {"model", "messages", "prompt", "stream"}:
        kind.model_validate(body | {name: None})
        for value in NEUTRAL.get(name, ()):
            kind.model_validate(body | {name: value})
    everything = {n: v[0] for n, v in NEUTRAL.items() if n in kind.model_fields}
    kind.model_validate(body | everything)
    kind.model_validate(body | dict(stream=True, stream_options=dict(include_obfuscation=True)))


@KINDS
def test_what_is_not_supported_is_refused_by_name(body, kind, theirs):
    for name in fields(theirs) & {*ASKING}:
        value, told = ASKING[name]
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body | {name: value})
        errors = [e | dict(loc=("body", *e["loc"])) for e in caught.value.errors()]
        answer = validation_error(RequestValidationError(errors).errors())
        assert answer.status == 400 and answer.param == name
        assert str(answer).startswith(name) and told in str(answer), answer


def test_tools_are_for_the_template_alone():
    made = form.ChatRequest.model_validate(CHAT | dict(tools=[TOOL], tool_choice="none"))
    assert made.tools == [TOOL]
    with pytest.raises(ValidationError, match="requires add_generation_prompt = false"):
        form.ChatRequest.model_validate(CHAT | dict(continue_final_message=True))
