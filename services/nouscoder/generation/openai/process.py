"""The process of the API, as the worker sees it: started, answered, started again, and ended with the worker.

The API reads what strangers send. In a process of its own it can take neither the interpreter of the worker, which
makes rollouts, nor its memory. It has a lower priority for the CPU, too.

INVARIANT: the process has no sample in the engine after it has ended. The worker holds the listening socket, so clients
wait while a process that has ended is replaced, and nobody else takes the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import EngineUnusable
from nouscoder.generation.environments.agent import AgentSessions
from nouscoder.generation.metrics import ApiMetrics
from nouscoder.generation.openai.guests import GuestDesk
from nouscoder.generation.openai.link import FrontLink, Record, end_record, error_record, request_of, tokens_record

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 15.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_PIECES_EVERY_S = 0.05


class _Front:
    def __init__(self, desk: GuestDesk, metrics: ApiMetrics, sessions: AgentSessions | None) -> None:
        self._desk = desk
        self._sessions = sessions
        self._claims: dict[str, asyncio.Task[None]] = {}
        self._metrics = metrics
        self._samples: dict[str, asyncio.Future[Completion]] = {}
        self._followed: dict[str, int] = {}  # samples whose pieces are wanted, and how many tokens were sent

    async def run(self, listening: socket.socket, begin: Record, listens: Callable[[], None]) -> str:
        """Start the process and answer it until it ends. Returns why it ended. `listens` is called once it does."""
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = theirs.fileno(), listening.fileno()
            command = [sys.executable, "-P", "-m", "nouscoder.generation.openai.front", *map(str, numbers)]
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=numbers, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        self._link = await FrontLink.on(ours)
        try:
            of_worker = {"policy_version": self._desk.policy_version, "has_agents": self._sessions is not None}
            self._link.send({"start": {**begin, **of_worker}})
            records = self._link.records()
            async with asyncio.timeout(_START_LIMIT_S):
                first: Record = await anext(records, {})
            if not first.get("ready"):
                return str(first.get("unusable", "it ended before it listened"))
            listens()
            await self._answer(records)
        except TimeoutError:
            return f"it did not listen within {_START_LIMIT_S:.0f} s"
        finally:
            self._link.close()
            await _ended(process)
        return f"it ended with code {process.returncode}"

    async def _answer(self, records: AsyncIterator[Record]) -> None:
        telling = [asyncio.create_task(self._tell_policies()), asyncio.create_task(self._send_pieces())]
        if self._sessions is not None:
            self._sessions.on_end = lambda session_id, why: self._link.send({"session_ended": session_id, "why": why})
        try:
            async for record in records:
                self._take(record)
                if self._sessions is not None:
                    self._take_of_agents(record, self._sessions)
        finally:
            for task in (*telling, *self._claims.values()):
                task.cancel()
            await asyncio.gather(*telling, *self._claims.values(), return_exceptions=True)
            for sample in list(self._samples.values()):
                sample.cancel()
            if self._sessions is not None:
                self._sessions.give_back_all()

    def _take(self, record: Record) -> None:
        match record:
            case {"sample": dict() as asked}:
                request = request_of(asked)
                sample = self._samples[request.request_id] = self._desk.sample(request)
                sample.add_done_callback(lambda ended: self._send_end(request.request_id, ended))
            case {"follow": str() as name} if name in self._samples:
                self._followed[name] = 0
            case {"cancel": str() as name} if name in self._samples:
                self._samples[name].cancel()
            case {"counts": list() as counts}:
                for name, *counted in counts:
                    (self._metrics.count_request if name == "request" else self._metrics.count_tokens)(*counted)

    def _send_end(self, name: str, sample: asyncio.Future[Completion]) -> None:
        del self._samples[name]
        self._followed.pop(name, None)
        if sample.cancelled():
            return
        self._send_answer(name, sample)

    def _send_answer(self, name: str, answer: asyncio.Future[Any]) -> None:
        """Send a completion, that a session is closed (None), or an error."""
        if (error := answer.exception()) is not None:
            self._link.send(error_record(name, error))
        else:
            completion = answer.result()
            self._link.send({"id": name, "closed": True} if completion is None else end_record(name, completion))

    def _take_of_agents(self, record: Record, sessions: AgentSessions) -> None:
        match record:
            case {"claim": str() as name}:
                self._claims[name] = asyncio.create_task(self._claim(name, sessions))
                self._claims[name].add_done_callback(lambda _: self._claims.pop(name, None))
            case {"unclaim": str() as name} if name in self._claims:
                self._claims[name].cancel()
            case {"give_back": str() as session_id}:
                sessions.give_back(session_id)
            case {"turn": str() as session_id, "id": str() as name, "given": list() as given, "max_tokens": most}:
                turn = sessions.turn(session_id, given, most)
                turn.add_done_callback(lambda ended: self._send_answer(name, ended))
            case {"close": str() as session_id, "id": str() as name, "reward": reward, "answer": answer}:
                closing = sessions.close(session_id, reward, answer)
                closing.add_done_callback(lambda ended: self._send_answer(name, ended))

    async def _claim(self, name: str, sessions: AgentSessions) -> None:
        session_id, about = await sessions.claim()
        self._link.send({"id": name, "session": session_id, "about": about})

    async def _tell_policies(self) -> None:
        version = -1
        while True:
            version = await self._desk.policy_after(version)
            self._link.send({"policy": version})

    async def _send_pieces(self) -> None:
        while True:
            await asyncio.sleep(_PIECES_EVERY_S)
            if not self._followed:
                continue
            for name, tokens in (await self._desk.sampled(dict(self._followed))).items():
                if name in self._followed:
                    self._followed[name] += len(tokens.token_ids)
                    self._link.send({"id": name, "tokens": tokens_record(tokens)})


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the process, which stops when its link has closed; it is killed when it does not."""
    try:
        await asyncio.wait_for(process.wait(), _STOP_LIMIT_S)
    except TimeoutError:
        log.warning("the process of the API did not stop by itself")
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def start_front(
    begin: Record,
    desk: GuestDesk,
    metrics: ApiMetrics,
    listening: socket.socket,
    stack: AsyncExitStack,
    sessions: AgentSessions | None = None,
) -> asyncio.Future[None]:
    """Serve the API in a process of its own until `stack` closes. Returns a future that is done when it listens.

    The future raises EngineUnusable when the first process did not. One that ends is started again, with growing waits.
    """
    listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    listens.add_done_callback(lambda done: done.cancelled() or done.exception())

    def told() -> None:
        if not listens.done():
            listens.set_result(None)

    async def keep() -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            begun_s = time.monotonic()
            reason = await _Front(desk, metrics, sessions).run(listening, begin, told)
            lasted = time.monotonic() - begun_s > _LONGEST_WAIT_S
            wait_s = _FIRST_WAIT_S if lasted else min(_LONGEST_WAIT_S, 2 * wait_s)
            log.error("the process of the API is started again", extra={"reason": reason, "wait_s": wait_s})
            if not listens.done():
                listens.set_exception(EngineUnusable(f"generation.openai: {reason}"))
            await asyncio.sleep(wait_s)

    keeping = asyncio.create_task(keep(), name="api")

    async def end() -> None:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    stack.push_async_callback(end)
    return listens
