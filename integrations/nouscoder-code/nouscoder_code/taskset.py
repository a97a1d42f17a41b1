"""The problems of a file as tasks of verifiers; the reward is the verdict of the grading service.

It speaks verifiers 0.4 (`verifiers.v1`), which finds the taskset by the name of the module.

INVARIANT: hidden tests are in no trace. A task carries the place of its problem in the file, and reads the line when it
is graded, because verifiers writes and uploads the data of a task with each trace.

INVARIANT: without a verdict there is no reward. The method raises, verifiers records a TaskError, and prime-rl leaves
the rollout out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import verifiers.v1 as vf

from nouscoder.client import AsyncClient, Patience
from nouscoder.client.adapters import score_of
from nouscoder.domain.prompt import PromptForm, PromptSettings, PromptText

_RULES = ("limits", "comparator", "profile", "prelude", "libraries")  # fields of a problem that a request has too
_AWAY_S = 60.0  # so that a wrong URL is said within a minute
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, float], AsyncClient]] = WeakKeyDictionary()


class ProblemFault(ValueError):
    """A problem file cannot be used. The message names the file and the line."""


class CodeTaskConfig(vf.TaskConfig):
    """Where the problems are and who grades: `--env.taskset.task.*`. NOUSCODER_TOKEN holds the service's API key."""

    problems: Path | None = None
    """Problem file, JSON lines (docs/data.md). Each process that grades reads it."""
    url: str = "http://127.0.0.1:8080"
    """The grading service."""
    patience_s: float = 300.0
    """Seconds for which a request is repeated while the service is full; 60 at most while it is away."""


class CodeTasksetConfig(vf.TasksetConfig):
    """`--env.taskset.*`."""

    prompt_form: PromptForm = PromptForm.LIVECODEBENCH
    """How a problem is asked: livecodebench, plain, deepcoder or acereason."""
    task: CodeTaskConfig = CodeTaskConfig()


class CodeData(vf.TaskData):
    """A problem without its tests."""

    offset: int
    """The place of its line in the problem file, in bytes."""


class CodeTask(vf.Task[CodeData, vf.State, CodeTaskConfig]):
    """Write a program that passes the tests."""

    @property
    def key(self) -> str:
        """The problem's id, which stays the same when the file or its order changes."""
        return str(self.data.id)

    @vf.reward
    async def accepted(self, trace: vf.Trace) -> float:
        """1 for a right program, else 0. Raises GradingFailed or ProblemFault when there is no verdict."""
        _, problem = await asyncio.to_thread(lambda: next(_problems(self.config, self.data.offset)))
        if problem["problem_id"] != self.data.id:
            raise ProblemFault(f"{self.config.problems} has changed during the run: {self.data.id!r} has moved")
        answer = await _client(self.config).grade_record(_request(problem, trace.last_reply))
        reward = score_of(answer)
        trace.info["grading"] = {name: answer[name] for name in ("verdict", "detail", "passed", "total", "duration_s")}
        trace.record_metric("tests_passed", answer["score"])
        return reward


class CodeTaskset(vf.Taskset[CodeTask, CodeTasksetConfig]):
    """The problems of a file, in its order."""

    def load(self) -> Iterator[CodeTask]:
        """Each problem as a task. Raises ProblemFault for a line that is none."""
        for offset, problem in _problems(self.config.task):
            system, user = _asked(problem, PromptSettings(prompt_form=self.config.prompt_form))
            data = CodeData(id=problem["problem_id"], prompt=user, system_prompt=system, offset=offset)
            yield CodeTask(data, self.config.task)


def _asked(problem: dict[str, Any], settings: PromptSettings) -> tuple[str | None, str]:
    """The system message, if there is one, and the user's."""
    tests = problem["tests"] if isinstance(problem["tests"], dict) else {}
    asked = PromptText(
        problem["prompt"],
        problem.get("prompt_template", ""),
        problem.get("starter_code", ""),
        tuple(problem.get("languages") or ("python",)),
        tests.get("type") or ("call" if tests.get("fn_name") else "stdin"),
    )
    if settings.misleads(asked):
        settings = replace(settings, prompt_form=PromptForm.PLAIN)
    *system, user = (message.content for message in settings.messages(asked))
    return (system[0] if system else None), user


def _problems(config: CodeTaskConfig, begin: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each problem from byte `begin` on, with its place. Raises ProblemFault."""
    if (path := config.problems) is None:
        raise ProblemFault("no problem file: set task.problems of the taskset, --env.taskset.task.problems FILE")
    offset, is_empty = begin, True
    try:
        with path.open("rb") as lines:
            lines.seek(begin)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    is_empty = False
                    yield offset, _problem(line, f"{path}, line {number}{f' from byte {begin}' if begin else ''}")
                offset += len(line)
    except OSError as error:
        raise ProblemFault(f"{path} cannot be read: {error.strerror}") from None
    if is_empty:
        raise ProblemFault(f"{path} holds no problem{f' at byte {begin}: it has changed' if begin else ''}")


def _problem(line: bytes, place: str) -> dict[str, Any]:
    try:
        problem = json.loads(line)
    except ValueError:
        raise ProblemFault(f"{place}: not JSON; a problem file has JSON lines") from None
    if not isinstance(problem, dict):
        raise ProblemFault(f"{place}: not an object")
    problem.setdefault("problem_id", problem.pop("task_id", None))
    for name in ("problem_id", "prompt", "tests"):
        if not problem.get(name):
            raise ProblemFault(f"{place}: {name} is missing")
    return problem | {"problem_id": str(problem["problem_id"])}


def _request(problem: dict[str, Any], reply: str) -> dict[str, Any]:
    """The fields of POST /v1/grade."""
    language, *others = problem.get("languages") or ["python"]
    return {name: problem[name] for name in ("tests", "problem_id", *_RULES) if name in problem} | {
        "code" if problem.get("text_is_code") else "completion": reply,
        "language": language,
        "other_languages": others,
        "reveal": "none",
    }


def _client(config: CodeTaskConfig) -> AsyncClient:
    """One client for each service and event loop: it keeps connections, and the digests of stored tests."""
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    key = (config.url, config.patience_s)
    if key not in clients:
        patience = Patience(busy_s=config.patience_s, unreachable_s=min(config.patience_s, _AWAY_S))
        clients[key] = AsyncClient(config.url, patience)
    return clients[key]
