"""Reads examples from files and run folders, encodes them, and chooses those that are trained on.

A file is JSON lines, a JSON array or parquet. A run folder gives the rollouts of its saved batches,
token by token as they were sampled, with their verdicts; learner.keep_batches says how many batches a run keeps.

A record is a JSON object, one a line, or a row of a parquet file:

    prompt       the problem as a run asks it, in the run's prompt template; or
    messages     a conversation: system, user, assistant and tool, in the policy's chat template
    completion   the answer: a text, or turns [{"text", "given"}]; messages may end in the answer instead
    problem_id, accepted or verdict, prompt_template, starter_code, languages, tests_type or tests    optional

    tools        descriptions of the functions of `tool_calls`, a list or its JSON

The chat template writes each message in its role, with reasoning_content, tool_calls and name; what it leaves out is
refused (policy_folder/finished_chat.py). Turns that are `given` (outputs of tools) carry no loss, and neither does any
message but the assistant's, nor one with "weight": 0 or "train": false. A line of a run's samples.jsonl (prompt,
program, verdict) is a record too. Other fields are ignored.

An example becomes a rollout that somebody else has sampled, which the learner's trainer takes. A rollout has segments,
given or sampled, and only sampled ones are in the loss. Nobody knows the log-probabilities with which an example was
written; they are 0 here, and the objective of supervised fine-tuning does not read them.

An example has the tokens of a policy, exactly as a run's environment would give and sample them:

    prompt or messages -> answer + its end -> what the environment writes around a reply -> answer + its end
        given                loss                given                                         loss

The end is what the chat template writes after an answer, or without a template the end-of-sequence token.

The prompt goes through the template, the system prompt and the chat template of generation.environment. So a policy
that was trained on examples finds the same tokens before its answers in the run that follows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationError

from nouscoder.config import SftSection
from nouscoder.config.generation import EnvironmentSection
from nouscoder.data.importers.rows import file_rows
from nouscoder.domain.batch import Batch, GradedRollout
from nouscoder.domain.prompt import PromptSettings, rendered_mark
from nouscoder.domain.reasoning import parted
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.tokens import Completion, FinishReason, Segment, VersionSpan, concatenated, int32
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import Unusable
from nouscoder.formats.body import Body, first_fault
from nouscoder.generation.environments.base import TaskRefused
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.policy_folder.chat_template import ChatMessage
from nouscoder.policy_folder.finished_chat import FinishedChats, unmarked
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.policy_folder.trained_on import digest_of
from nouscoder.sft.choice import ExampleCandidate, choose, is_held_out

# Records, and the examples that they are.


class BadExample(Exception):
    """A record is no example. The text says why."""


class Turn(Body):
    """A part of the answer: written by the policy, or `given` to it as the output of a tool."""

    text: str
    given: bool = False


class _TextPart(Body):
    type: Literal["text"]
    text: str


class _MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] = ""
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    tool_calls: list[dict[str, Any]] = Field([])
    tool_call_id: str = ""
    name: str = ""
    weight: Literal[0, 1] = 1
    train: bool = True

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant" and self.weight == 1 and self.train

    def message(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        optional = ("reasoning_content", "tool_calls", "tool_call_id", "name")
        given = {name: value for name in optional if (value := getattr(self, name))}
        return {"role": self.role, "content": content or (None if self.tool_calls else ""), **given}


class Record(Body):
    """A record, see the module."""

    model_config = ConfigDict(extra="ignore")

    problem_id: str = ""
    prompt: str = ""
    prompt_template: str = Field("", pattern=r"^$|\{prompt\}")
    starter_code: str = ""
    languages: list[str] = Field([])
    tests_type: str = "stdin"
    tests: Any = None
    messages: list[_MessageBody] = Field([])
    tools: list[Any] | str = Field([])
    completion: str | list[Turn] = ""
    program: str = ""
    finish_reason: str = ""
    accepted: bool | None = None
    verdict: VerdictKind | None = Field(None, strict=False)

    @property
    def text_digest(self) -> str:
        """The digest of its problem: the prompt, or the first message of a user."""
        asked = (str(one.message()["content"]) for one in self.messages if one.role == "user")
        return digest_of(self.prompt or next(asked, ""), self.starter_code)


@dataclass(frozen=True, slots=True)
class Example:
    """One example: its record, and the turns of its completion.

    The turns begin and end with one of the policy, and no two of a kind follow each other. There are none where
    `messages` end in the answer. `accepted` is None when nobody has graded the answer.
    """

    record: Record
    turns: tuple[Turn, ...]
    accepted: bool | None

    @property
    def is_unfinished(self) -> bool:
        """Whether the answer was cut off: its record says so, or it is wrong and ends inside its reasoning."""
        is_open = self.accepted is False and bool(self.turns) and parted(self.turns[-1].text)[1] is None
        return is_open or self.record.finish_reason == FinishReason.LENGTH


def example_of(record: Any) -> Example:
    """The example that a record is. Raises BadExample."""
    try:
        body = Record.model_validate(_without_nulls(record, 2))  # of the record, and of each message
    except ValidationError as error:
        field, fault = first_fault(error)
        raise BadExample(fault if field == "body" else f"{field}: {fault}") from None
    if bool(body.prompt) == bool(body.messages):
        raise BadExample("it needs either a prompt or messages")
    completion = body.completion or body.program
    turns = completion if isinstance(completion, list) else [Turn(text=completion)] if completion else []
    _check(body.messages, turns)
    if body.verdict is VerdictKind.INTERNAL_ERROR:
        raise BadExample("internal_error is no verdict on an answer: leave the record out")
    accepted = body.accepted if body.verdict is None else body.verdict is VerdictKind.ACCEPTED
    return Example(body, tuple(turns), accepted)


def _without_nulls(value: Any, levels: int) -> Any:
    """A value without the fields that are null: rows of parquet have every field of every record in them."""
    if isinstance(value, list):
        return [_without_nulls(item, levels) for item in value]
    if isinstance(value, dict) and levels:
        return {name: _without_nulls(item, levels - 1) for name, item in value.items() if item is not None}
    return value


def _check(messages: Sequence[_MessageBody], turns: Sequence[Turn]) -> None:
    for number, message in enumerate(messages):
        if message.role == "assistant" and not (number and (message.content or message.tool_calls)):
            raise BadExample("messages: an answer has no message before it" if not number else "an answer is empty")
        text = str(message.message()["content"] or "")
        if message.reasoning_content and parted(text) != ("", text):
            raise BadExample("messages: an answer has reasoning_content, and reasoning in its content: leave one out")
        mark = rendered_mark(text)
        if mark and message.role != "assistant":
            raise BadExample(
                f"messages: a content is in a chat template already (it begins with {mark}): give its text"
            )
    if turns and len(turns) > 1 and any(message.role == "assistant" for message in messages):
        raise BadExample(
            "a completion of several turns follows messages that have answers: put the turns into messages"
        )
    if not ((turns and not turns[-1].given) or (not turns and messages and messages[-1].role == "assistant")):
        raise BadExample("it does not end with an answer: completion is missing, or the last message is no assistant's")
    if not turns and not any(message.is_trained for message in messages):
        raise BadExample("messages: no answer is trained")
    for number, turn in enumerate(turns):
        if turn.given != bool(number % 2):
            raise BadExample(f"turn {number + 1} of the answer and the one before it are of the same side")
        if not turn.text:
            raise BadExample(f"turn {number + 1} of the answer is empty")


# Examples as rollouts.

_WRITTEN = Verdict(kind=VerdictKind.ACCEPTED, passed=0, total=0, graded=0, duration_s=0.0, backend="example")

# Token ids, and whether they are in the loss.
Part = tuple[Sequence[int], bool]


def rollout_of(parts: Sequence[Part], problem_id: str = "") -> Rollout:
    """An example from its parts; the first is the prompt. Raises ValueError for an empty part or one without loss."""
    num_sampled = sum(len(ids) for ids, in_loss in parts if in_loss)
    return Rollout(
        rollout_id="",
        group_id="",
        problem_id=problem_id,
        segments=tuple(Segment(len(ids), in_loss) for ids, in_loss in parts),
        token_ids=concatenated(int32(ids) for ids, _ in parts),
        logprobs=_unknown_logprobs(num_sampled),
        versions=(VersionSpan(0, num_sampled),),
        finish_reason=FinishReason.STOP,
        sampling=Sampling(),
        text="",
    )


def written(answer: Sequence[int]) -> Completion:
    """An answer [tokens] that ends with its end token, as if it had been sampled."""
    size = len(answer)
    return Completion(int32(answer), _unknown_logprobs(size), (VersionSpan(0, size),), FinishReason.STOP)


def demonstration(prompt: Sequence[int], answer: Sequence[int]) -> Rollout:
    """An example of one turn, from the token ids of its prompt and its answer. Only the answer is in the loss."""
    return rollout_of([(prompt, False), (answer, True)])


def again(rollout: Rollout) -> Rollout:
    """A rollout of a run as an example: the same tokens and segments, scored at temperature 1."""
    return replace(rollout, finish_reason=FinishReason.STOP, sampling=Sampling(), text="", experts=None)


def batch_of(number: int, examples: Sequence[Rollout]) -> Batch:
    """The examples of one step. Each is a group of its own."""
    rollouts = (
        replace(example, rollout_id=f"g{place:06d}-0", group_id=f"g{place:06d}")
        for place, example in enumerate(examples)
    )
    # Rollouts of a run have versions of that run; here each is as old as the policy.
    newest = max(example.newest_version for example in examples)
    return Batch(number, tuple(GradedRollout(rollout, _WRITTEN, 1.0) for rollout in rollouts), newest)


def _unknown_logprobs(num_tokens: int) -> memoryview[float]:
    return memoryview(bytes(4 * num_tokens)).cast("f")


# Examples in the tokens of a policy.


_TASK = Task("example", "", "", "", Sampling())


class Encoder:
    """Encodes examples for one policy."""

    def __init__(self, tokenizer: PolicyTokenizer, environment: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, environment)
        in_template = environment.model_copy(update={"prompt_as": "messages"})
        self._in_chat = Prompts(tokenizer, in_template) if tokenizer.has_chat_template else None
        self._thinking = environment.record(PromptSettings).enable_thinking
        self._chats = FinishedChats(tokenizer, self._thinking) if tokenizer.has_chat_template else None

    def encode(self, example: Example) -> Rollout:
        """The example as a rollout, up to its last answer. Raises BadExample."""
        return next(self.encode_all(example))

    def encode_all(self, example: Example) -> Iterator[Rollout]:
        """The rollouts of an example: one, or where the template changes earlier answers, one for each of these too."""
        try:
            for parts in self._parts(example):
                yield rollout_of(parts, example.record.problem_id)
        except (ValueError, TaskRefused) as error:
            raise BadExample(str(error)) from error

    def _parts(self, example: Example) -> Iterator[Sequence[Part]]:
        record = example.record
        if record.messages and self._chats is None:
            raise BadExample("it has messages, but the policy has no chat template: give prompt and completion")
        if self._prompts.as_messages and (mark := rendered_mark(record.prompt)):
            raise BadExample(
                f"the prompt is in a chat template already (it begins with {mark}): give its text, or messages"
            )
        if self._chats is None or not (record.messages or self._prompts.as_messages):
            yield self._as_text(example)
            return
        chat, trained = self._chat(record), [n for n, one in enumerate(record.messages) if one.is_trained]
        tools = _tools(record)
        if len(example.turns) > 1:
            yield self._of_run(chat, example.turns, self._chats)
            return
        if example.turns:
            trained.append(len(chat))
            chat.append({"role": "assistant", "content": example.turns[0].text})
        yield from self._chats.parts(chat, trained, tools)

    def _chat(self, record: Record) -> list[ChatMessage]:
        """The messages, or those that a run makes of the prompt."""
        if record.messages:
            return [message.message() for message in record.messages]
        if record.program:
            raise BadExample(
                "a line of samples.jsonl has lost the special tokens of its prompt: give the run folder instead"
            )
        asked = self._prompts.messages_of(_task(record))
        return [{"role": message.role.value, "content": message.content} for message in asked]

    def _of_run(self, chat: list[ChatMessage], turns: Sequence[Turn], chats: FinishedChats) -> list[Part]:
        """Turns of an environment: each answer and each reply follows the tokens before it, as in a run."""
        parts: list[Part] = []
        for turn in turns:
            if turn.given:
                parts.append((self._reply(parts[-1][0], turn.text), False))
                chat = [*chat, {"role": "user", "content": turn.text}]
                continue
            chat = [*chat, {"role": "assistant", "content": turn.text}]
            answer = chats.answer(chat)
            parts += [] if parts else [(self._tokenizer.encode_text(answer.prompt), False)]
            end = [] if answer.is_ended else [self._tokenizer.eos_id]
            parts.append(([*self._tokenizer.encode_after(answer.prompt, answer.text), *end], True))
        return parts

    def _as_text(self, example: Example) -> list[Part]:
        record, end = example.record, self._tokenizer.eos_id
        # The prompt of a line of samples.jsonl needs no template any more.
        text = record.prompt if record.program else self._prompts.messages_of(_task(record))[-1].content
        parts: list[Part] = [(self._tokenizer.encode(text), False)]
        for turn in example.turns:
            if turn.given:
                parts.append((self._reply(parts[-1][0], turn.text), False))
            else:
                answer = unmarked(self._tokenizer, text, turn.text)
                parts.append(([*self._tokenizer.encode_after(text, answer, in_chat=False), end], True))
            text = turn.text
        return parts

    def _reply(self, answer: Sequence[int], text: str) -> list[int]:
        """What follows an answer [tokens] when the environment replies with `text`."""
        prompts = self._in_chat if self._in_chat is not None and self._prompts.as_messages else self._prompts
        reply = prompts.reply_to(written(answer), text)
        if not reply:
            raise BadExample("the vocabulary of the policy cannot write a given turn")
        return reply


def _task(record: Record) -> Task:
    asked = replace(_TASK, prompt=record.prompt, prompt_template=record.prompt_template)
    tests = record.tests if isinstance(record.tests, dict) else {}  # of a line of a problem file
    asked = replace(asked, tests_type=str(tests.get("type") or record.tests_type))
    return replace(asked, starter_code=record.starter_code, languages=tuple(record.languages) or asked.languages)


def _tools(record: Record) -> list[Any]:
    tools = record.tools
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            raise BadExample("tools: not JSON") from None
    if not isinstance(tools, list):
        raise BadExample("tools: not a list")
    return tools


# Reading.

_BATCHES = "batches"
_ALL = 99  # levels of a record


class ExamplesUnusable(Unusable):
    """A file holds no usable examples. The message names the file, the record and the fault."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples. `dropped` counts others by reason; `problems` are those of `train`, with digests of their texts."""

    train: tuple[Rollout, ...]
    validation: tuple[Rollout, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The SHA-256 of all their tokens, in order: equal digests give equal trainings."""
        whole = hashlib.sha256()
        for part in (self.train, self.validation):
            whole.update(len(part).to_bytes(8, "little"))
            for rollout in part:
                whole.update(bytes.fromhex(key_of(rollout)))
        return whole.hexdigest()


def read_examples(
    settings: SftSection, encoder: Encoder, vocabulary_size: int, context_tokens: int | None, seed: int
) -> Examples:
    """All examples of the section, encoded and chosen. Raises ExamplesUnusable and what reading raises."""
    settings = settings.model_copy(update={"max_tokens": settings.max_tokens or context_tokens or 0})
    rollouts, candidates = _read(settings.train, encoder, vocabulary_size)
    numbers, dropped = choose(candidates, settings, seed)
    held_out = {number for number in numbers if is_held_out(candidates[number].problem, settings.validation_share)}
    train = tuple(rollouts[number] for number in numbers if number not in held_out)
    validation = tuple(rollouts[number] for number in sorted(held_out))
    if settings.validation:
        others, theirs = _read(settings.validation, encoder, vocabulary_size)
        validation = tuple(others[number] for number in choose(theirs, settings, seed)[0])
    if not train:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "there is none"
        raise ExamplesUnusable(f"sft.train: no example is left to train on ({reasons})")
    problems = {candidates[number].problem: candidates[number].text for number in numbers if number not in held_out}
    return Examples(train, validation, {reason.value: count for reason, count in dropped.items()}, problems)


# An example, None for one that cannot be taught, and what its choice depends on.
_Read = tuple[Rollout | None, ExampleCandidate]


def _read(
    paths: Sequence[Path], encoder: Encoder, vocabulary_size: int
) -> tuple[dict[int, Rollout], list[ExampleCandidate]]:
    rollouts: dict[int, Rollout] = {}
    candidates: list[ExampleCandidate] = []
    for path in paths:
        for rollout, candidate in _from_run(path, vocabulary_size) if path.is_dir() else _from_file(path, encoder):
            if rollout is not None:
                rollouts[len(candidates)] = rollout
            candidates.append(candidate)
    return rollouts, candidates


def _from_file(path: Path, encoder: Encoder) -> Iterator[_Read]:
    for row in file_rows(path, 0):
        try:
            if row.fault:
                raise BadExample(row.fault)
            example = example_of(_without_nulls(row.value, _ALL) if path.suffix == ".parquet" else row.value)
            record = example.record
            for rollout in [None] if example.is_unfinished else encoder.encode_all(example):
                yield _candidate(rollout, record.problem_id, example.accepted, record.text_digest)
        except BadExample as error:
            raise ExamplesUnusable(f"{path}, record {row.number}: {error}") from None


def _candidate(rollout: Rollout | None, problem_id: str, accepted: bool | None, text: str = "") -> _Read:
    key, size = (key_of(rollout), len(rollout.token_ids)) if rollout is not None else ("", 0)
    return rollout, ExampleCandidate(key, problem_id, accepted, size, text)


def _from_run(path: Path, vocabulary_size: int) -> Iterator[_Read]:
    saved = SavedBatches(path / _BATCHES, 1)
    if not saved.numbers():
        raise ExamplesUnusable(f"{path} is not a run folder with saved batches: it has no {_BATCHES}/*.batch")
    for number in saved.numbers():
        for graded in saved.load(number).rollouts:
            if max(graded.rollout.token_ids) >= vocabulary_size:
                raise ExamplesUnusable(f"{path} is a run of a policy with another vocabulary than the one to train")
            rollout, is_right = again(graded.rollout), graded.verdict.kind is VerdictKind.ACCEPTED
            yield _candidate(rollout, rollout.problem_id, is_right)


def key_of(rollout: Rollout) -> str:
    """A digest of the tokens and segments of an example."""
    segments = ",".join(f"{segment.num_tokens}{'+' if segment.is_sampled else '-'}" for segment in rollout.segments)
    return hashlib.sha256(segments.encode() + b"/" + rollout.token_ids.cast("B")).hexdigest()
