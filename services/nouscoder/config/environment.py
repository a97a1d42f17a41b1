"""Settings of the environments: one section an environment, chosen by `generation.environment.kind`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from nouscoder.config.base import Section

_KINDS = "single_turn, feedback, interpreter, entry_point"


def _kind(kind: str) -> Any:
    return Field(
        kind,
        description="single_turn: one prompt, one completion; feedback: the policy sees how its program fails the"
        " problem's public tests and tries again; interpreter: the policy may run Python before it answers;"
        " entry_point: a class of the user",
    )


class EnvironmentSection(Section):
    """Settings of every environment: how a problem becomes a prompt."""

    prompt_as: Literal["auto", "text", "messages"] = Field(
        "text",
        description="text: the prompt as it is; messages: as a user's message in the policy's chat template;"
        " auto: messages if the policy has a chat template, else text",
    )
    prompt_template: str = Field(
        "{prompt}", pattern=r"\{prompt\}", description="text around {prompt}; a problem may have its own template"
    )
    system_prompt: str = Field("", description="a system message before the prompt (prompt_as messages); may be empty")
    thinking: Literal["auto", "on", "off"] = Field(
        "auto", description="enable_thinking of the chat template; auto: as the template has it by default"
    )


class ToolsSection(EnvironmentSection):
    """Settings of environments with tools, which the verifier provides."""

    tool_limit_s: float = Field(
        120.0,
        gt=0,
        description="seconds to wait for an answer of the verifier; then the lease of the rollout is released",
    )


class SingleTurnSection(EnvironmentSection):
    """One prompt and one completion, which is graded."""

    kind: Literal["single_turn"] = _kind("single_turn")


class FeedbackSection(ToolsSection):
    """Up to `turns` programs. After each but the last, the policy sees how it failed the public tests."""

    kind: Literal["feedback"] = _kind("feedback")
    turns: int = Field(3, ge=1, description="maximum number of turns; the program of the last is graded")
    feedback_chars: int = Field(
        600, ge=40, description="characters of each text in the feedback: input, outputs, message; longer ones are cut"
    )


class InterpreterSection(ToolsSection):
    """Up to `calls` calls of a Python interpreter, then the answer."""

    kind: Literal["interpreter"] = _kind("interpreter")
    calls: int = Field(5, ge=1, description="calls of the interpreter at most; the turn after the last is the answer")
    call_begin: str = Field("<python>", min_length=1, description="what the policy writes before the code of a call")
    call_end: str = Field("</python>", min_length=1, description="what it writes after the code, to end its turn")
    output_begin: str = Field("<output>\n", description="what precedes the output of a call")
    output_end: str = Field("\n</output>", description="what follows the output of a call")
    output_chars: int = Field(2000, ge=40, description="characters of an output; a longer one loses its middle")


class EntryPointSection(ToolsSection):
    """A class of the user, as docs/environments.md describes."""

    kind: Literal["entry_point"] = _kind("entry_point")
    entry_point: str = Field(pattern=r"^[\w.]+:\w+$", description="package.module:Class")
    options: dict[str, str | int | float | bool] = Field({}, description="options of the class, passed to it unchecked")


# Tags begin with the key, so that the report of a fault can leave them out of the path.
TAG = "kind="


def _tag_of(value: Any) -> str:
    kind = value.get("kind", "single_turn") if isinstance(value, dict) else getattr(value, "kind", None)
    return f"{TAG}{kind}"


Environment = Annotated[
    Annotated[SingleTurnSection, Tag("kind=single_turn")]
    | Annotated[FeedbackSection, Tag("kind=feedback")]
    | Annotated[InterpreterSection, Tag("kind=interpreter")]
    | Annotated[EntryPointSection, Tag("kind=entry_point")],
    Discriminator(
        _tag_of,
        custom_error_type="environment_kind",
        custom_error_message=f"a section whose kind must be one of {_KINDS}",
    ),
]
