"""The requests that the API takes, and its refusals: the fields of OpenAI's API that an engine here can honour.

A field that would change the completion and cannot be honoured is refused, unless it has the value that changes
nothing. Fields that only describe the caller are ignored. An unknown field is refused, so that no setting is lost
silently. A refusal has OpenAI's form: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nouscoder.domain.conversation import Message, Role
from nouscoder.errors import NousCoderError, plain_fault
from nouscoder.formats.body import ListOf
from nouscoder.formats.json_values import GIVEN_TWICE, ValueCount, json_value
from nouscoder.http_server.body import BodyParser

MAX_CHOICES = 128
MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions in OpenAI's API
_MESSAGE_CHARS = 200
_MAX_MESSAGES = 4096  # checking more would hold up the whole service
# vLLM takes no smaller one, and the logarithms of the torch engine would overflow at about 1e-38.
_MIN_TEMPERATURE = 0.01

_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# Fields that are taken only with these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
}
# The parts of a fault's place that name a type among several, not a field.
_TYPES = ("str", "list[")
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class ApiFault(NousCoderError):
    """A request that gets no completion. `status` is the HTTP status; `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        """`kind` is OpenAI's type of the error; by default it tells whose fault the status names."""
        # A lone surrogate, which JSON can hold, has no UTF-8 form.
        super().__init__(message.encode("utf8", "backslashreplace").decode())
        self.status = status
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.record = {"error": {"message": str(self), "type": kind, "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiFault:
    """A request that is wrong in itself."""
    return ApiFault(400, message, param, code)


def busy(message: str) -> ApiFault:
    """A request that can be repeated later."""
    return ApiFault(429, message, code="rate_limit_exceeded", kind="rate_limit_error")


def _repeated(key: str) -> ApiFault:
    shown = key[:_MESSAGE_CHARS]
    return invalid(f"{shown}: {GIVEN_TWICE}", shown)


bodies = BodyParser(lambda message: ApiFault(413, f"body: {message}"), _repeated)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TextPart(_Model):
    """A part of a message; only text."""

    type: Literal["text"]
    text: str


class ChatMessage(_Model):
    """One message of the conversation. Clients send an answer back with the fields that it had, which are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart]
    refusal: None = None
    tool_calls: None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """For the chat template."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(_ROLES[self.role], parts)


class StreamOptions(_Model):
    """What a stream has besides the text."""

    include_usage: bool = False


class TemplateSettings(_Model):
    """Settings of the chat template."""

    enable_thinking: bool | None = None


class SamplingRequest(_Model):
    """The fields that both kinds of requests have."""

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | ListOf[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _honourable(cls, given: Any) -> Any:
        """Leave out fields without a value, those that are ignored, and those that change nothing."""
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")
        for name, neutral in _NEUTRAL.items():
            if given.get(name) is not None and given[name] not in neutral:
                raise ValueError(f"{name} is not supported, except with the value {json.dumps(neutral[0])}")
        prompt = given.get("prompt")
        # Before each prompt is checked, which would hold up the whole service.
        if isinstance(prompt, list) and len(prompt) > MAX_CHOICES and not all(type(part) is int for part in prompt):
            raise ValueError(f"prompt: at most {MAX_CHOICES} are taken")
        skipped = (*_IGNORED, *_NEUTRAL)
        return {name: value for name, value in given.items() if value is not None and name not in skipped}

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, temperature: float) -> float:
        if 0 < temperature < _MIN_TEMPERATURE:
            raise ValueError(f"must be 0, or at least {_MIN_TEMPERATURE}")
        return temperature

    @model_validator(mode="after")
    def _few_stops(self) -> SamplingRequest:
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise ValueError(f"stop must be a text, or at most {MAX_STOPS} texts, none of them empty")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: TemplateSettings = TemplateSettings()

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a completion; None: as many as fit."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


class CompletionRequest(SamplingRequest):
    """The body of /v1/completions. A prompt is a text or token ids; there may be several."""

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    # Only the sampled token's: 0 alternatives.
    logprobs: int | None = Field(None, ge=0, le=0)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt. Raises ApiFault without any."""
        whole: Any = self.prompt
        found = [whole] if isinstance(whole, str) or (whole and isinstance(whole[0], int)) else list(whole)
        if not found:
            raise invalid("prompt: there is none", "prompt")
        return found


class ClaimRequest(_Model):
    """The body of /v1/sessions: an agent waits for a rollout so many seconds."""

    wait_s: float = Field(30.0, ge=0, le=600)


class CloseRequest(_Model):
    """The body of /v1/sessions/ID/reward: another `answer` to grade, a `reward` in place of the verdict's."""

    reward: float | None = None
    answer: str | None = None


Parsed = TypeVar("Parsed", bound=BaseModel)


def parsed(kind: type[Parsed], body: bytes) -> Parsed:
    """The request in a body. Raises ApiFault naming the field at fault."""
    found = _request_or_fault(kind, body)
    if not isinstance(found, ApiFault):
        return found
    try:
        raise found
    finally:  # what the traceback holds would wait for a collection of garbage
        del found, body


def _request_or_fault(kind: type[Parsed], body: bytes) -> Parsed | ApiFault:
    try:
        return kind.model_validate(json_value(body))
    except ValidationError as error:
        return _fault_in(error)
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        return invalid(f"the body is not JSON: {error}"[:_MESSAGE_CHARS])


def _fault_in(error: ValidationError) -> ApiFault:
    fault = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(part for part in map(str, fault["loc"]) if not part.startswith(_TYPES)) or None
    message = plain_fault(fault["msg"])
    return invalid(f"{field}: {message}" if field else message, field)


async def parsed_body(kind: type[Parsed], body: bytes) -> Parsed:
    """As `parsed`, beside the event loop when the body is large. Also raises MemoryBudgetExceeded and QueueFull."""

    def parse(body: bytes, values: ValueCount) -> Parsed:
        return parsed(kind, body)

    return await bodies.parsed(body, parse)
