"""The `fake` engine: scripted completions, one byte a token, with every rule of a real engine but no model.

INVARIANT: as for the torch engine: a task added leaves exactly once, and each token carries the version in use when
it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from nouscoder.domain.rollout import (
    Completion,
    FinishReason,
    Rollout,
    Task,
    assemble_rollout,
    float32,
    int32,
    spans_of,
)
from nouscoder.generation.engines.base import EngineError

EOS_ID = 2
_FIRST_BYTE_ID = 3
_LOGPROB = -0.5
_HEADER_BYTES = 8

Script = Callable[[Task], str]


def default_script(task: Task) -> str:
    """A short program that hangs on the prompt and the seed alone."""
    digest = blake2b(f"{task.sampling.seed}/{task.prompt}".encode(), digest_size=2).digest()
    return f"print({int.from_bytes(digest, 'little')})"


@dataclass(slots=True)
class _Row:
    task: Task
    prompt_token_ids: list[int]
    script: list[int]
    max_tokens: int
    versions: list[int] = field(default_factory=list)


class FakeEngine:
    """Writes `script(task)` token by token, then ends; a task whose script is longer than its limit is cut."""

    name = "fake"

    def __init__(self, *, max_running: int, max_tokens_total: int, script: Script = default_script) -> None:
        self._max_running = max_running
        self._max_tokens_total = max_tokens_total
        self._script = script
        self._waiting: dict[str, _Row] = {}
        self._running: dict[str, _Row] = {}
        self._version: int | None = None
        self._num_tokens = 0

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use."""
        return self._version

    @property
    def num_running(self) -> int:
        """Rollouts being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Tasks waiting for a place."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._num_tokens

    def add(self, task: Task) -> None:
        """Queue a task. Raises EngineError naming it."""
        name = f"task {task.rollout_id}"
        if task.rollout_id in self._waiting or task.rollout_id in self._running:
            raise EngineError(f"{name} is already here")
        prompt = [_FIRST_BYTE_ID + byte for byte in task.prompt.encode()]
        if not prompt:
            raise EngineError(f"{name}: the prompt is empty")
        room = self._max_tokens_total - len(prompt)
        if room < 1:
            raise EngineError(
                f"{name}: a prompt of {len(prompt)} tokens leaves no room under {self._max_tokens_total} in all"
            )
        if task.sampling.max_new_tokens < 1:
            raise EngineError(f"{name}: max_new_tokens must be at least 1")
        script = [*(_FIRST_BYTE_ID + byte for byte in self._script(task).encode()), EOS_ID]
        self._waiting[task.rollout_id] = _Row(task, prompt, script, min(room, task.sampling.max_new_tokens))

    def cancel(self, rollout_id: str) -> None:
        """Forget a task."""
        self._waiting.pop(rollout_id, None)
        self._running.pop(rollout_id, None)

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Take over the version; of the files only the length of the header is checked."""
        for file in files:
            _check_header(file)
        self._version = policy_version

    def step(self) -> list[Rollout]:
        """One token for every rollout."""
        if self._version is None:
            raise EngineError("no policy has been loaded")
        while self._waiting and len(self._running) < self._max_running:
            rollout_id = next(iter(self._waiting))
            self._running[rollout_id] = self._waiting.pop(rollout_id)
        finished: list[Rollout] = []
        for row in list(self._running.values()):
            row.versions.append(self._version)
            num_tokens = len(row.versions)
            if num_tokens in (len(row.script), row.max_tokens):
                del self._running[row.task.rollout_id]
                finished.append(_finish(row))
            self._num_tokens += 1
        return finished


def _check_header(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_HEADER_BYTES), "little")
        num_bytes = file.stat().st_size
    except OSError as error:
        raise EngineError(f"{file} holds no weights that can be read: {error}") from error
    if not 0 < header_bytes <= num_bytes - _HEADER_BYTES:
        raise EngineError(f"{file} holds no weights that can be read: its header is broken")


def _finish(row: _Row) -> Rollout:
    token_ids = row.script[: len(row.versions)]
    stopped = token_ids[-1] == EOS_ID
    text = bytes(token - _FIRST_BYTE_ID for token in (token_ids[:-1] if stopped else token_ids))
    completion = Completion(
        token_ids=int32(token_ids),
        logprobs=float32([_LOGPROB] * len(token_ids)),
        versions=spans_of(row.versions),
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
    )
    return assemble_rollout(row.task, [int32(row.prompt_token_ids), completion], text.decode(errors="replace"))
