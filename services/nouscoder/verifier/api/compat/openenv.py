"""OpenEnv's protocol, version 0.10.0, under /openenv: an environment server for the problems of `verifier.problems`.

    client                                     here
    POST /task {split, index}                  a problem of the file, by its place
    WebSocket /ws  reset {index}          ->   the prompt
                   step {answer}          ->   what the public tests say, as the environment `feedback` does; reward 0
                   step {answer}          ->   the public tests pass, or it is the last turn: the hidden tests decide;
                                               reward 1 or 0, done

Episodes are on /ws only, one a connection. The wire has no place for a version.

INVARIANT: a failure of the service is a frame EXECUTION_ERROR and never an observation. It leaves the episode as it
was, so the step can be sent again. At most `most` sessions are open, and clients with API keys have at most half of
them each. A session ends when its connection does, or after IDLE_S without a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, TypeVar

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from pydantic import Field, ValidationError
from pydantic_core import to_json

from nouscoder import __version__
from nouscoder.data.problem_index import IndexedProblem
from nouscoder.domain.conversation import TEXT_CHARS, TURNS, feedback_on
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body, all_faults, first_fault
from nouscoder.formats.json_values import ValueCount, json_bytes, with_whole_characters
from nouscoder.http_server.body import read_body
from nouscoder.http_server.listener import MOST_CONNECTIONS
from nouscoder.http_server.memory_budget import MemoryBudget, charging
from nouscoder.verifier.access.caller import ANONYMOUS, current_caller
from nouscoder.verifier.api.compat.problem_set import NO_PROBLEMS, NoSuchProblem, ProblemSet, SampleAnswer, prompt_of
from nouscoder.verifier.api.faults import Absent, Draining, add_faults, fault
from nouscoder.verifier.api.schema import bodies
from nouscoder.verifier.api.streaming import NotGraded
from nouscoder.verifier.grading.grader import QueueFull
from nouscoder.verifier.grading.validation import InvalidSubmission, TooLarge

log = logging.getLogger(__name__)

Asked = TypeVar("Asked", bound=Body)

VERSION = "0.10.0"
PREFIX = "/openenv"
NAME, SPLIT = "nouscoder", "train"
IDLE_S = 3600.0
_QUEUE_PATIENCE_S = 45.0  # OpenEnv's client waits 60 s for an answer
_DESCRIPTION = "Programming problems. A program is run, and the feedback of the public tests is the observation."


class Reset(Body):
    """Begins an episode: with a problem by its id or its place, else with one that the seed chooses, else any."""

    problem_id: str | None = Field(None, description="which problem, by its id")
    split: Literal["train"] | None = Field(None, description="the only split is train")
    index: int | None = Field(None, description="which problem, by its place in the file, from 0")
    seed: int | None = Field(None, description="chooses the problem where neither problem_id nor index is given")
    episode_id: str | None = Field(None, max_length=200, description="the episode's name in the state")
    turns: int = Field(TURNS, ge=1, le=1000, description="programs at most; the last one is final")


class ProgramAction(Body):
    """One program."""

    answer: str = Field(description="the program, alone or as the last fenced block of an answer")
    is_code: bool = Field(False, description="the answer is the program, even if it holds a fence")
    language: str = Field("", description="of a program alone; empty: the problem's first language")
    metadata: dict[str, Any] = Field({}, description="not used")


class ProgramObservation(Body):
    """What the policy sees."""

    problem_id: str
    prompt: str = Field("", description="the problem; empty after the first observation")
    feedback: str = Field("", description="how the program fails a public test; empty when the episode has ended")
    verdict: VerdictKind | None = Field(None, description="of the public tests; at the end, of the hidden ones")
    turns_left: int = Field(description="programs that may still be sent")


class EpisodeState(Body):
    """The state of an episode."""

    episode_id: str | None = None
    step_count: int = 0
    problem_id: str | None = None
    turns_left: int = 0
    done: bool = False


class _Message(Body):
    """A frame of a client."""

    type: str
    data: dict[str, Any] = Field({})


class _TaskRequest(Body):
    """The body of a request of the Task API."""

    split: Literal["train"]
    index: int = 0
    start: int | None = None
    stop: int | None = None


class FrameRefused(Exception):
    """The message gets no observation, but a frame with this code."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.more = more

    @property
    def frame(self) -> dict[str, Any]:
        """The frame."""
        return {"type": "error", "data": {"message": str(self), "code": self.code, **self.more}}


class Observed(NamedTuple):
    """An observation with its reward, which only a verdict gives."""

    observation: ProgramObservation
    reward: float | None = None
    done: bool = False

    @property
    def frame(self) -> dict[str, Any]:
        """The frame."""
        data = {"observation": self.observation.model_dump(), "reward": self.reward, "done": self.done}
        return {"type": "observation", "data": data}


class OpenEnvEpisode:
    """The episode of one session: `reset` begins it, and each `step` grades a program."""

    def __init__(self, problems: ProblemSet) -> None:
        self._problems = problems
        self._problem: IndexedProblem | None = None
        self.state = EpisodeState()

    async def reset(self, asked: Reset) -> Observed:
        """Begin with the problem asked for. Raises FrameRefused."""
        try:
            problem = self._chosen(asked)
        except NoSuchProblem as error:
            raise FrameRefused("VALIDATION_ERROR", str(error)) from None
        episode_id = asked.episode_id or secrets.token_hex(8)
        self._problem = problem
        self.state = EpisodeState(episode_id=episode_id, problem_id=problem.problem_id, turns_left=asked.turns)
        return Observed(self._observation(problem, prompt=prompt_of(problem)))

    def _chosen(self, asked: Reset) -> IndexedProblem:
        if asked.problem_id is not None:
            return self._problems.problem(asked.problem_id)
        if asked.index is not None:
            return self._problems.at(asked.index)
        return self._problems.at(random.Random(asked.seed).randrange(len(self._problems.problem_ids)))

    async def step(self, action: ProgramAction) -> Observed:
        """Grade a program. Raises FrameRefused, and what its grading raises; nothing has changed then."""
        problem, before = self._problem, self.state
        if problem is None or before.done:
            raise FrameRefused("EXECUTION_ERROR", "there is no episode, or it has ended: send reset first")
        answer = SampleAnswer(action.answer, action.is_code, action.language)
        turns_left = before.turns_left - 1
        public = await self._problems.public_verdict(problem, answer, _QUEUE_PATIENCE_S) if turns_left else None
        done = public is None or public.kind is VerdictKind.ACCEPTED
        if done:
            verdict = await self._problems.hidden_verdict(problem, answer, _QUEUE_PATIENCE_S)
            reward, feedback, turns_left = float(verdict.kind is VerdictKind.ACCEPTED), "", 0
        else:
            assert public is not None
            verdict, reward, feedback = public, 0.0, feedback_on(public, TEXT_CHARS)
        after = {"step_count": before.step_count + 1, "turns_left": turns_left, "done": done}
        self.state = before.model_copy(update=after)
        return Observed(self._observation(problem, feedback=feedback, verdict=verdict.kind), reward, done)

    def _observation(self, problem: IndexedProblem, **fields: Any) -> ProgramObservation:
        return ProgramObservation(problem_id=problem.problem_id, turns_left=self.state.turns_left, **fields)


class Sessions:
    """Counts the open sessions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()  # by client

    @contextmanager
    def opened(self, client: str) -> Iterator[None]:
        """One session more. Raises FrameRefused when there are as many as there may be."""
        of_client = self._most if client == ANONYMOUS else max(1, self._most // 2)
        if self._open.total() >= self._most or self._open[client] >= of_client:
            counts = {"active_sessions": self._open[client], "max_sessions": of_client}
            raise FrameRefused("CAPACITY_REACHED", f"{self._open[client]} sessions are open, try again later", **counts)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            self._open += Counter()  # drops the clients without a session


class _Gone(Exception):
    """The client has disconnected."""


class EpisodeSession:
    """One connection: its messages, one after another."""

    def __init__(
        self, socket: WebSocket, problems: ProblemSet, budget: MemoryBudget, enter: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._budget = budget
        self._enter = enter
        self._episode = OpenEnvEpisode(problems)
        self._reading: asyncio.Future[str | None] | None = None

    async def run(self) -> None:
        """Answer messages until the client has gone, closes, or sends nothing for IDLE_S."""
        with suppress(_Gone, WebSocketDisconnect):
            try:
                while (text := await self._next()) is not None and (frame := await self._answer(text)) is not None:
                    await self._socket.send_text(json_bytes(frame).decode())
            except TimeoutError:
                idle = FrameRefused("SESSION_ERROR", f"the session ends after {IDLE_S:.0f} s without a message")
                await self._socket.send_text(json.dumps(idle.frame))
            finally:
                if self._reading is not None:
                    self._reading.cancel()
            await self._socket.close()

    async def _next(self) -> str | None:
        """The next message; None when the client has gone. Raises TimeoutError."""
        reading = self._reading or asyncio.ensure_future(self._receive())
        self._reading = None
        async with asyncio.timeout(IDLE_S):
            return await reading

    async def _receive(self) -> str | None:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        return text if text is not None else bytes(message["bytes"]).decode("utf8", "replace")

    async def _answer(self, text: str) -> dict[str, Any] | None:
        """The frame that answers a message; None to `close`. Raises _Gone."""
        with self._budget.request() as reservation, charging(reservation):
            try:
                reservation.add(len(text))
                return await self._handled(await bodies.parsed(text.encode("utf8", "replace"), _message))
            except FrameRefused as error:
                return error.frame
            except TooLarge as error:
                return FrameRefused("VALIDATION_ERROR", str(error)).frame
            except (NotGraded, QueueFull, InvalidSubmission) as error:
                return FrameRefused("EXECUTION_ERROR", str(error)).frame
            except Draining:
                return FrameRefused("EXECUTION_ERROR", "the service is draining").frame
            except _Gone:
                raise
            except Exception:
                log.exception("a message of an OpenEnv session failed")
                return FrameRefused("EXECUTION_ERROR", "the service failed on this message").frame

    async def _handled(self, message: _Message) -> dict[str, Any] | None:
        match message.type:
            case "reset":
                self._enter()
                return (await self._episode.reset(_checked(Reset, message.data))).frame
            case "step":
                self._enter()
                step = self._episode.step(_checked(ProgramAction, message.data))
                return (await self._unless_gone(step)).frame
            case "state":
                return {"type": "state", "data": self._episode.state.model_dump()}
            case "mcp":
                return {"type": "mcp", "data": rpc_answer(message.data)}
            case "close":
                return None
            case other:
                raise FrameRefused("UNKNOWN_TYPE", f"unknown type of message: {other[:100]!r}")

    async def _unless_gone(self, work: Coroutine[Any, Any, Observed]) -> Observed:
        """The result of `work`, which ends when the client disconnects. Raises _Gone then."""
        working = asyncio.ensure_future(work)
        self._reading = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({working, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._reading.result() is None:
                raise _Gone
            return await working  # a message that has come meanwhile waits for its turn
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


def _message(body: bytes, _: ValueCount) -> _Message:
    """A frame of a client. Raises FrameRefused."""
    try:
        return _Message.model_validate_json(with_whole_characters(body))
    except ValidationError as error:
        is_json = error.errors(include_url=False)[0]["type"] != "json_invalid"
        raise FrameRefused("VALIDATION_ERROR" if is_json else "INVALID_JSON", ": ".join(first_fault(error))) from None


def _checked(kind: type[Asked], data: dict[str, Any]) -> Asked:
    """The record of this kind. Raises FrameRefused, naming each fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = [{"loc": field, "msg": wrong} for field, wrong in all_faults(error)[:10]]
        text = "; ".join(f"{one['loc']}: {one['msg']}" for one in faults)
        raise FrameRefused("VALIDATION_ERROR", text, errors=faults) from None


def rpc_answer(request: object) -> dict[str, Any]:
    """The answer of OpenEnv's own MCP endpoint, which offers no tool."""
    found = request if isinstance(request, dict) else {}
    answer = {"jsonrpc": "2.0", "id": found.get("id")}
    if found.get("method") == "tools/list":
        return {**answer, "result": {"tools": []}}
    wrong = (-32601, "no such method: this environment has no tools") if "method" in found else (-32600, "no method")
    return {**answer, "error": {"code": wrong[0], "message": wrong[1]}}


def add_openenv(
    app: FastAPI,
    problems: ProblemSet,
    budget: MemoryBudget,
    enter: Callable[[], None],
    max_body_bytes: int,
    most: int = MOST_CONNECTIONS // 2,
) -> None:
    """Add the environment to the REST API, for at most `most` sessions. Without problems it says what is missing."""
    own = FastAPI(title="NousCoder OpenEnv", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_faults(own)
    app.mount(PREFIX, own)
    if not problems.problem_ids:

        @own.api_route("/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
        async def no_problems() -> Response:
            """Says what turns the environment on."""
            raise Absent(NO_PROBLEMS)

        return
    sessions = Sessions(most)

    @own.websocket("/ws")
    async def episodes(socket: WebSocket) -> None:
        """The episodes of one client, one after another."""
        await socket.accept()
        try:
            with sessions.opened(current_caller().client):
                await EpisodeSession(socket, problems, budget, enter).run()
        except FrameRefused as error:
            with suppress(WebSocketDisconnect):
                await socket.send_text(json.dumps(error.frame))
                await socket.close(1013)

    _add_descriptions(own, max_body_bytes)
    _add_tasks(own, problems, max_body_bytes)


def _add_descriptions(own: FastAPI, max_body_bytes: int) -> None:
    @own.get("/health")
    async def health() -> dict[str, str]:
        """The service is there."""
        return {"status": "healthy"}

    @own.get("/metadata")
    async def metadata() -> dict[str, str]:
        """What this environment is."""
        return {"name": NAME, "description": _DESCRIPTION, "version": __version__}

    @own.get("/schema")
    async def schema() -> dict[str, Any]:
        """JSON Schemas of what a session says and hears."""
        kinds: dict[str, type[Body]] = {
            "action": ProgramAction,
            "observation": ProgramObservation,
            "state": EpisodeState,
            "reset": Reset,
        }
        return {name: kind.model_json_schema() for name, kind in kinds.items()}

    @own.post("/mcp")
    async def mcp(request: Request) -> dict[str, Any]:
        """OpenEnv's own form of MCP."""
        return rpc_answer(await bodies.parsed(await read_body(request, max_body_bytes), _any_json))


def _any_json(body: bytes, _: ValueCount) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _add_tasks(own: FastAPI, problems: ProblemSet, max_body_bytes: int) -> None:
    last = len(problems.problem_ids)

    def specs(start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        places = range(last)[slice(start, stop)]
        return [{"problem_id": problems.problem_ids[place], "split": SPLIT, "index": place} for place in places]

    @own.get("/list_environments")
    async def list_environments() -> list[str]:
        """The one environment."""
        return [NAME]

    @own.get("/{environment}/splits")
    async def splits(environment: str) -> Response:
        """The one split."""
        return _named(environment) or _json([{"name": SPLIT, "type": SPLIT}])

    @own.post("/{environment}/{call}")
    async def task_call(environment: str, call: str, request: Request) -> Response:
        """The tasks of a split: `tasks`, `num_tasks`, `task` by its index, or a `task_range`."""
        if missing := _named(environment):
            return missing
        try:
            body = await read_body(request, max_body_bytes)
            asked = await bodies.parsed(body, lambda text, _: _TaskRequest.model_validate_json(text))
        except ValidationError as error:
            field, wrong = first_fault(error)
            return fault(422, f"{field}: {wrong}", field)
        match call:
            case "tasks":
                return _json({"tasks": specs(), "env_name": NAME})
            case "num_tasks":
                return _json({"num_tasks": last})
            case "task" if 0 <= asked.index < last:
                prompt = prompt_of(problems.at(asked.index))
                return _json({"task": {**specs(asked.index, asked.index + 1)[0], "prompt": prompt}})
            case "task":
                return fault(400, f"index: there is no problem {asked.index}: the last is {last - 1}", "index")
            case "task_range":
                return _json({"tasks": specs(asked.start, asked.stop)})
        return fault(501, f"{call[:100]} is not supported for this environment")


def _named(environment: str) -> Response | None:
    """A fault unless this is the environment's name."""
    return None if environment.lower() == NAME else fault(404, f"unknown environment {environment[:100]!r}")


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")
