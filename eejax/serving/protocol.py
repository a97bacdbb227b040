"""Request and response models in OpenAI's form, with eejax's additions."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from eejax.gates.confidence import GATES
from eejax.helios.fleet import OWN
from eejax.inference.logits_params import MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS

T = TypeVar("T")

TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
SHARE = Annotated[float, Field(ge=0, le=1)]
STRINGS = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]


class OrDefault:
    """Metadata of a field in which null means the default (`_default`)."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


Nullable = Annotated[T, OrDefault()]


class OneOf:
    """Metadata of a field that must be one of several texts."""

    def __init__(self, *texts: str):
        self._texts = texts

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema([*self._texts])


class Unsupported:
    """Metadata of a field that is not supported.

    The field accepts null and values that request nothing, which many clients send.
    """

    def __init__(self, what: str, *values: Any):
        """Set the unsupported feature, as errors name it, and the values that request nothing."""
        self._what, self._values = what, values

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        if any(type(value) is type(own) and value == own for own in self._values):
            return value
        said = json.dumps(value, default=str)
        said = said if len(said) <= 80 else said[:77] + "..."
        allowed = "".join(f" or say {json.dumps(own)}" for own in self._values)
        raise ValueError(
            f"{info.field_name} = {said}: {self._what} not supported: leave it out{allowed}."
        )

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        feature = self._what.split(" ")[0]
        return {"enum": [None, *self._values], "description": f"Not supported: {feature}."}


class RequestModel(BaseModel):
    """Base of request bodies: strict JSON without unknown fields or text in place of numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Ignored.")


class GenerationRequest(RequestModel):
    """Fields that completions and chats have in common.

    Beyond OpenAI's fields there are top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
    stop_token_ids, priority, timeout, and exit rules: engine, gate, thresholds, exits, min_layers.
    return_exits requests the exit and confidence of every token. Where the server chooses among
    models, `objective` takes the place of the exit rules.
    """

    text_field: ClassVar[str] = "prompt"  # which errors name
    model: str
    temperature: Nullable[float] = Field(1.0, ge=0, le=100)
    top_p: Nullable[float] = Field(1.0, gt=0, le=1)
    top_k: Nullable[int] = Field(0, ge=-1, lt=2**31, description="0 or -1: off.")
    min_p: Nullable[float] = Field(0.0, ge=0, le=1)
    n: Nullable[int] = Field(1, ge=1)
    stop: Annotated[str, Field(min_length=1, max_length=256)] | STRINGS | None = None
    stop_token_ids: Annotated[list[TOKEN], Field(max_length=8)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: Nullable[float] = Field(0.0, ge=-2, le=2)
    frequency_penalty: Nullable[float] = Field(0.0, ge=-2, le=2)
    repetition_penalty: Nullable[float] = Field(1.0, ge=0.01, le=100)
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    min_tokens: Nullable[int] = Field(0, ge=0, lt=2**31)
    ignore_eos: Nullable[bool] = False
    stream: Nullable[bool] = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Ignored.")
    safety_identifier: str | None = Field(None, max_length=512, description="Ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, max_length=512, description="Ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Ignored.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    store: Annotated[Any, Unsupported("keeping answers is", False)] = None
    service_tier: Annotated[Any, Unsupported("tiers of service are", "auto", "default")] = None
    priority: Nullable[int] = Field(0, ge=-1000, le=1000, description="Higher ones come first.")
    timeout: float | None = Field(None, gt=0, le=86400, description="Time limit in seconds.")
    engine: Literal["recompute", "full"] | None = Field(
        None, description="full: no token leaves before the last layer."
    )
    gate: Annotated[str, OneOf(*GATES)] | None = None
    thresholds: SHARE | list[SHARE] | None = Field(
        None, description="One for all exits, or one for each; at 1 no token leaves."
    )
    exits: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, description="Boundaries of the exits that tokens may leave by."
    )
    min_layers: Nullable[int] = Field(0, ge=0, lt=2**31)
    return_exits: Nullable[bool] = False
    objective: Annotated[str, OneOf(*OWN)] | None = Field(
        None, description="Objective of this request, where the server chooses among models."
    )

    @model_validator(mode="before")
    @classmethod
    def _default(cls, data: Any) -> Any:
        """Treat null as the default."""
        if isinstance(data, dict):
            return {k: v for k, v in data.items() if v is not None}
        return data

    @model_validator(mode="after")
    def _together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`; prompts are texts or token ids, one or several."""

    prompt: str | list[str] | list[TOKEN] | list[list[TOKEN]]
    max_tokens: Nullable[int] = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Nullable[bool] = False
    best_of: int | None = Field(None, ge=1, description="Not supported, but as many as `n`.")
    suffix: Annotated[Any, Unsupported("text before a suffix is", "")] = None

    @model_validator(mode="after")
    def _best(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(
                f"best_of = {self.best_of}: choosing among more than n = {self.n} choices is not "
                "supported: leave it out."
            )
        return self


class ChatMessage(BaseModel):
    """A message of a chat; further fields are passed to the model's chat template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`.

    Beyond OpenAI's fields there are documents, chat_template_kwargs, add_generation_prompt and
    continue_final_message, which transformers' chat templates know.
    """

    text_field: ClassVar[str] = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: Nullable[bool] = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Nullable[bool] = True
    continue_final_message: Nullable[bool] = Field(
        False, description="The answer continues the last message."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, description="For the chat template only, with tool_choice = none."
    )
    tool_choice: Annotated[Any, Unsupported("having a tool called is", "none", "auto")] = None
    parallel_tool_calls: bool | None = Field(None, description="Ignored.")
    functions: Annotated[Any, Unsupported("calling functions is", [])] = None
    function_call: Annotated[Any, Unsupported("calling functions is", "none", "auto")] = None
    response_format: Annotated[
        Any, Unsupported("another format than text is", {"type": "text"})
    ] = None
    modalities: Annotated[Any, Unsupported("another modality than text is", ["text"])] = None
    audio: Annotated[Any, Unsupported("audio is")] = None
    prediction: Annotated[Any, Unsupported("predicted output is")] = None
    web_search_options: Annotated[Any, Unsupported("searching the web is")] = None
    moderation: Annotated[Any, Unsupported("moderation is")] = None
    reasoning_effort: Annotated[Any, Unsupported("an effort of reasoning is", "none")] = None
    verbosity: Annotated[Any, Unsupported("a verbosity is", "medium")] = None

    @model_validator(mode="after")
    def _asked(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs = true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: is the old name of max_completion_tokens; give only one")
        if self.tools and self.tool_choice != "none":
            raise ValueError(
                "tools: tool calls are not parsed from a model's text: leave tools out, or set "
                "tool_choice = none, which passes them to the chat template only"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: requires add_generation_prompt = false")
        return self


class TokenizeRequest(RequestModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[TOKEN]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody
