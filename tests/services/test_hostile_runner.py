"""A runner that was taken over sends anything it likes: the gateway bounds it, and answers only with SandboxError."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

import pytest

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import FrameKind
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.handshake import own_certificate
from nouscoder.verifier.sandbox import Exit, Program, SandboxError, SandboxUnavailable
from nouscoder.verifier.sandbox.base import OutOfMemory
from nouscoder.verifier.sandbox.compile_cache import CompileCache
from nouscoder.verifier.sandbox.runners.link import RunnerRefused, connect
from nouscoder.verifier.sandbox.runners.pods import new_canary
from nouscoder.verifier.sandbox.session import SlotSession
from nouscoder.verifier.sandbox.slot import Launch, Link, Slot
from nouscoder.verifier.toolchains import languages

LIMITS = Limits(wall_time_s=60, output_bytes=1000)
PROGRAM = Program(languages.registry()["python"], "print(1)", LIMITS)
GOOD = frames.Result(0, 0, 0, 0.1, 0.1, 1000, b"1\n", b"", None)
KEY = handshake.read_key("0123456789abcdef-a key of a pool")
INVALID: tuple[object, ...] = (None, [], "x")
COMPILED = frames.encode(FrameKind.COMPILED)


class HostileLink(Link):
    """A link whose other end says what the test wants. It keeps what the gateway sends."""

    is_open = True

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tools: Mapping[str, str]) -> None:
        self.reader, self.writer, self.tools = reader, writer, tools

    def last_log_line(self) -> str:
        return ""

    async def close(self, *, worn: bool = False) -> None:
        self.is_open = False
        self.writer.transport.abort()


class HostileLaunch(Launch):
    """Opens links to `says`, which is called with the other end of the connection."""

    def __init__(self, said: bytes, hello: bytes = b"{}", tools: Mapping[str, str] | None = None) -> None:
        self._said = frames.encode(FrameKind.HELLO, hello) + frames.encode(FrameKind.READY) + said
        self._tools = tools or {}
        self.received = b""
        self.is_out_of_memory = False
        self.hangs_up = False
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> HostileLink:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._tasks.append(asyncio.create_task(self._serve(*await asyncio.open_connection(sock=theirs))))
        return HostileLink(reader, writer, self._tools)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._said)
        with contextlib.suppress(OSError):
            while data := await reader.read(0 if self.hangs_up else 1 << 16):
                self.received += data
        writer.close()

    def explain(self, reason: str) -> str:
        return reason

    async def lacked_memory(self) -> bool:
        return self.is_out_of_memory


async def session_with(launch: HostileLaunch, program: Program = PROGRAM) -> tuple[Slot, SlotSession]:
    """A session whose program has compiled, if the other end says so."""
    slot = Slot(0, SandboxSection(start_limit_s=60), launch)
    await slot.ensure_usable()
    session = SlotSession(slot, program, SandboxSection(), CompileCache(0))
    session.begin()
    await session.compile()
    return slot, session


def result(**changed: object) -> bytes:
    """A RESULT frame with these numbers."""
    return frames.encode(FrameKind.RESULT, frames.pack_result(GOOD._replace(**changed)))  # type: ignore[arg-type]


BAD_RESULTS = {
    "a claimed length of 512 MiB": frames.HEADER.pack(FrameKind.RESULT, 1 << 29),
    "more than all its output": frames.encode(FrameKind.RESULT, bytes(frames.session_bound(LIMITS.output_bytes) + 1)),
    "a short result": frames.encode(FrameKind.RESULT, b"\0"),
    "an unknown end": result(ended=99),
    "no number as the wall time": result(wall_time_s=math.nan),
    "an endless CPU time": result(cpu_time_s=math.inf),
    "a negative wall time": result(wall_time_s=-1.0),
    "an impossible exit code": result(exit_code=-5),
    "an impossible signal": result(signal=1000),
    "an unknown kind": frames.HEADER.pack(99, 0),
    "another kind": frames.encode(FrameKind.READY),
}


async def test_bad_files_after_compiling_are_a_sandbox_error() -> None:
    bad = frames.encode(FrameKind.COMPILED, b"\0\0\0\0\0\0\0\1\0\0\0\2..\0\0\0\0")
    with pytest.raises(SandboxError, match="invalid files"):
        await session_with(HostileLaunch(bad))


@pytest.mark.parametrize("said", BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
async def test_a_bad_answer_to_a_run_is_a_sandbox_error_and_ends_the_slot(said: bytes) -> None:
    slot, session = await session_with(HostileLaunch(COMPILED + said))
    with pytest.raises(SandboxError):
        await session.run(b"")
    assert not slot.end_session()


@pytest.mark.parametrize("is_out_of_memory", [True, False])
async def test_a_runner_that_was_killed_for_lack_of_memory_is_told_from_one_that_was_lost(
    is_out_of_memory: bool,
) -> None:
    slot, session = await session_with(launch := HostileLaunch(COMPILED + BAD_RESULTS["an unknown kind"]))
    launch.is_out_of_memory = is_out_of_memory
    with pytest.raises(SandboxError) as caught:
        await session.run(b"")
    assert isinstance(caught.value, OutOfMemory) is is_out_of_memory
    assert not slot.end_session()


async def test_the_same_while_the_program_compiles() -> None:
    launch = HostileLaunch(b"")
    launch.is_out_of_memory, launch.hangs_up = True, True
    with pytest.raises(OutOfMemory):
        await session_with(launch)


async def test_a_frame_as_large_as_files_is_refused_unread_unless_the_program_fetches_some() -> None:
    large = frames.encode(FrameKind.RESULT, bytes(2 * LIMITS.output_bytes + (1 << 19)))
    compiled_elsewhere = replace(PROGRAM, language=languages.registry()["c"])
    programs = [
        (PROGRAM, "sent a frame of"),
        (compiled_elsewhere, "sent a frame of"),
        (replace(PROGRAM, fetch=("made",)), "sent an invalid result"),
    ]
    for program, why in programs:
        _, session = await session_with(HostileLaunch(COMPILED + large), program)
        with pytest.raises(SandboxError, match=why):
            await session.run(b"")


async def test_a_good_answer_is_taken() -> None:
    slot, session = await session_with(HostileLaunch(COMPILED + result()))
    assert (await session.run(b"")).exit is Exit.EXITED
    assert slot.end_session()
    await slot.stop()


@pytest.mark.parametrize("hello", [b"{", b"[" * 100_000, b"x" * (1 << 18)])
async def test_a_bad_first_frame_is_a_sandbox_error(hello: bytes) -> None:
    with pytest.raises(SandboxUnavailable):
        await session_with(HostileLaunch(b"", hello))


END = frames.encode(FrameKind.OUTPUT_END)


@pytest.mark.parametrize(
    "said",
    [
        frames.encode(FrameKind.OUTPUT) * 10,
        frames.encode(FrameKind.OUTPUT, b"x" * 70_000) * (1 + frames.session_bound(LIMITS.output_bytes) // 70_000),
        END * 2,
        END + frames.encode(FrameKind.OUTPUT, b"x"),
    ],
    ids=["empty", "flood", "two ends", "output after the end"],
)
@pytest.mark.parametrize("by_pipes", [False, True])
async def test_the_output_in_a_conversation_is_bounded(
    said: bytes, by_pipes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "has_dialogue_socket", by_pipes)
    slot, session = await session_with(HostileLaunch(COMPILED + said))
    partner_slot, partner = await session_with(HostileLaunch(COMPILED + result()))
    with pytest.raises(SandboxError):
        await session.dialogue_with(partner)
    assert not slot.end_session()
    await partner_slot.stop()


async def test_a_runner_chooses_only_its_own_tools_and_only_in_the_known_folders() -> None:
    evil = {"gcc": "/tmp/evil", "g++": "/usr/bin/gcc", "sh": 7, "javac": "/usr/bin/javac", "java": "/usr/bin/java"}
    assert languages.known_tools(evil) == {"javac": "/usr/bin/javac", "java": "/usr/bin/java"}
    assert [languages.known_tools(found) for found in INVALID] == [{}] * 3
    pool = object()
    languages.offer(pool, ["gcc", "sh"])
    languages.offer(pool, ["g++", "sh"])
    try:
        assert {"python", "c", "cpp"} <= languages.installed().keys()
        c = languages.installed()["c"]
    finally:
        languages.withdraw(pool)
    assert "/usr/local/bin/gcc" in (languages.in_slot(c, {"gcc": "/usr/local/bin/gcc", "sh": "/bin/sh"}).compile or ())
    with pytest.raises(languages.ToolsMissing, match="c needs gcc"):
        languages.in_slot(c, {"sh": "/bin/sh"})


def _deep(_: dict[str, object]) -> bytes:
    return b"[" * 60_000


def _not_an_object(_: dict[str, object]) -> bytes:
    return b"[1]"


def _bad_tools(_: dict[str, object]) -> bytes:
    return json.dumps({"status": handshake.OK, "tools": [["x"]], "python": {}}).encode()


@pytest.mark.parametrize(("answer", "refused"), [(_deep, True), (_not_an_object, True), (_bad_tools, False)])
async def test_a_malformed_handshake_is_refused(answer: Callable[[dict[str, object]], bytes], refused: bool) -> None:
    context, certificate = own_certificate()

    async def runner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = bytes(handshake.NONCE_BYTES)
        writer.write(handshake.MAGIC + nonce)
        theirs = await reader.readexactly(handshake.NONCE_BYTES)
        text = answer({})
        proof = handshake.proof(KEY, "runner", handshake.Nonces(nonce, theirs, certificate), text)
        writer.write(proof + handshake.LENGTH.pack(len(text)) + text)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(runner, "127.0.0.1", 0, ssl=context) as server:
        connecting = connect(server.sockets[0].getsockname(), KEY, handshake.SLOT, {}, name="it", limit_s=60)
        if refused:
            with pytest.raises(RunnerRefused):
                await connecting
        else:
            link = await connecting
            assert link.tools == {}
            await link.close()


async def _answers() -> AsyncIterator[tuple[bytes, bytes]]:
    for _ in range(5):
        code, given, expected = new_canary()
        shell = "import os\nos.listdir = lambda path: ['main.py'] if path == '/tmp' else ['1', str(os.getpid())]\n"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", shell + code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate(given)
        assert output == expected
        yield code.encode(), output


async def test_each_canary_is_another_program_and_prints_what_is_expected() -> None:
    programs = [code async for code, _ in _answers()]
    assert len(set(programs)) == 5
    assert len({tuple(sorted(code.splitlines())) for code in programs}) == 5
