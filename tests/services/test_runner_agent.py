"""The agent of a runner pod as a process on loopback: its access control, and its cleanup after a connection closes.

The harness is a fake that prints its pid and echoes. The contract tests on a cluster run candidates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nouscoder.verifier.runner import __file__ as runner_init
from nouscoder.verifier.runner import handshake
from nouscoder.verifier.runner.agent import _exactly
from nouscoder.verifier.runner.handshake import any_certificate, digest_of, own_certificate
from nouscoder.verifier.sandbox.runners import link as runner_link
from nouscoder.verifier.sandbox.runners.link import RunnerBusy, RunnerRefused, SocketLink, connect
from nouscoder.verifier.sandbox.slot import ENVIRONMENT

KEY_TEXT = "0123456789abcdef-a key of a pool"
KEY = handshake.read_key(KEY_TEXT)
HARNESS = """import json, os, socket, sys, time
settings = json.loads(sys.argv[1])
peer = socket.socket(fileno=settings["peer"]) if settings["peer"] >= 0 else None
key = any("0123456789abcdef" in value for value in os.environ.values())
print(os.getpid(), settings["kernel"], settings["tmp_bytes"], key, flush=True)
for line in sys.stdin:
    if line == "send\\n": peer.send(b"sent")
    elif line == "receive\\n": print(peer.recv(99).decode(), flush=True)
    elif line == "flood\\n":
        print("y" * (8 << 20), flush=True)
        os._exit(0)
    elif line == "sleep\\n":
        time.sleep(600)
    else: print(line.strip()[::-1], flush=True)
"""
Address = tuple[str, int]


@pytest.fixture
def kernel() -> str:
    """The kernel below the agent, as it is told."""
    return "gvisor"


@pytest.fixture
def idle_s() -> float:
    """Seconds without a gateway after which the agent ends; 0: never."""
    return 0


@pytest.fixture
def waits() -> str:
    """ "1": the first gateway may come later than `idle_s`."""
    return ""


@pytest.fixture
def agent(tmp_path: Path, kernel: str, idle_s: float, waits: str) -> Iterator[tuple[Address, subprocess.Popen[bytes]]]:
    """The address and the process of the agent."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__main__.py").write_text(HARNESS)
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "init.so").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = Path(runner_init).with_name("__main__.py")
    environment = {
        "NOUSCODER_RUNNER_KEY": KEY_TEXT,
        "NOUSCODER_RUNNER_PORT": str(port),
        "NOUSCODER_RUNNER_HOME": str(tmp_path),
        "NOUSCODER_RUNNER_KERNEL": kernel,
        "NOUSCODER_RUNNER_IDLE_S": str(idle_s),
        "NOUSCODER_RUNNER_WAITS": waits,
    }
    process = subprocess.Popen([sys.executable, "-I", "-S", str(entry)], env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"listening" in process.stderr.readline()
    yield ("127.0.0.1", port), process
    process.kill()
    process.wait()
    process.stderr.close()


async def opened(address: Address, want: str = handshake.SLOT, key: bytes = KEY) -> tuple[SocketLink, int]:
    """A link, and the pid of its harness."""
    request = {"settings": {"tmp_bytes": 5}, "environment": ENVIRONMENT, "tools": ["sh", "no-such-tool"]}
    link = await connect(address, key, want, request | {"search_path": "/usr/bin:/bin"}, name="it", limit_s=10)
    assert [*link.tools] == ["sh"]
    async with asyncio.timeout(60):
        pid, _, tmp_bytes, has_key = (await link.reader.readline()).split()
    assert (tmp_bytes, has_key) == (b"5", b"False")
    assert link.has_dialogue_socket == (want != handshake.CHECKER)
    return link, int(pid)


async def is_gone(pid: int) -> bool:
    async with asyncio.timeout(60):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.01)
    return True


async def test_the_connection_is_the_stream_of_a_fresh_harness(agent: tuple[Address, object]) -> None:
    address, _ = agent
    link, first = await opened(address)
    link.writer.write(b"abc\n")
    assert await link.reader.readline() == b"cba\n"
    await link.close()
    assert not link.is_open
    link, second = await opened(address)
    assert second != first
    assert await is_gone(first)
    await link.close()
    assert await is_gone(second)


async def test_one_slot_at_a_time_and_its_partners_end_with_it(
    agent: tuple[Address, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_link, "_BUSY_LIMIT_S", 0.2)
    address, _ = agent
    for want in handshake.PARTNERS:
        with pytest.raises(RunnerBusy):
            await opened(address, want)  # without a slot
    slot, pid = await opened(address)
    partners = [await opened(address, want) for want in handshake.PARTNERS]
    for want in (handshake.SLOT, *handshake.PARTNERS):
        with pytest.raises(RunnerBusy):
            await opened(address, want)
    await slot.close()
    assert await is_gone(pid)
    for partner, partner_pid in partners:
        assert await partner.reader.read() == b""
        assert await is_gone(partner_pid)
        await partner.close()


@pytest.mark.parametrize("kernel", ["gvisor", "linux"])
async def test_a_slot_and_its_partner_have_a_socket_to_each_other_that_ends_with_the_slot(
    agent: tuple[Address, object],
) -> None:
    address, _ = agent
    for _ in range(2):
        slot, _ = await opened(address)
        for _ in range(2):  # a partner that starts again gets the same end
            partner, pid = await opened(address, handshake.PARTNER)
            for one, other in ((slot, partner), (partner, slot)):
                one.writer.write(b"send\n")
                other.writer.write(b"receive\n")
                async with asyncio.timeout(60):
                    assert await other.reader.readline() == b"sent\n"
            await partner.close()
            assert await is_gone(pid)
        await slot.close()


async def test_a_gateway_without_the_key_gets_no_harness(agent: tuple[Address, object]) -> None:
    address, _ = agent
    with pytest.raises(RunnerRefused):
        await opened(address, key=handshake.read_key("another key of a pool"))
    await opened(address)


async def test_a_runner_without_the_key_is_refused() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake.MAGIC + bytes(handshake.NONCE_BYTES))
        await reader.readexactly(handshake.NONCE_BYTES + handshake.PROOF_BYTES)
        answer = handshake.pack({"status": handshake.OK})
        writer.write(bytes(handshake.PROOF_BYTES) + handshake.LENGTH.pack(len(answer)) + answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1", 0, ssl=own_certificate()[0]) as server:
        address = server.sockets[0].getsockname()
        with pytest.raises(RunnerRefused, match="key"):
            await connect(address, KEY, handshake.SLOT, {}, name="it", limit_s=5)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 68 + b"\xff" * 4])
async def test_invalid_connections_are_closed_and_do_not_affect_others(
    agent: tuple[Address, object], sent: bytes
) -> None:
    address, _ = agent
    for _ in range(20):
        _, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        writer.close()
    link, pid = await opened(address)
    assert link.is_open
    await link.close()
    assert await is_gone(pid)


async def test_a_recorded_handshake_is_refused(agent: tuple[Address, object]) -> None:
    """The proof covers this runner's nonce of this connection."""
    address, _ = agent
    text = handshake.pack({"want": handshake.SLOT, "settings": {}})
    reader, writer = await asyncio.open_connection(*address, ssl=any_certificate(), server_hostname="")
    certificate = digest_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    theirs = (await reader.readexactly(len(handshake.MAGIC) + handshake.NONCE_BYTES))[len(handshake.MAGIC) :]
    ours = bytes(handshake.NONCE_BYTES)
    proof = handshake.proof(KEY, "gateway", handshake.Nonces(theirs, ours, certificate), text)
    recorded = ours + proof + handshake.LENGTH.pack(len(text)) + text
    writer.close()
    reader, writer = await asyncio.open_connection(*address, ssl=any_certificate(), server_hostname="")
    writer.write(recorded)
    await reader.readexactly(len(handshake.MAGIC) + handshake.NONCE_BYTES)
    assert await reader.read() == b""
    writer.close()


async def test_a_runner_exits_on_request(agent: tuple[Address, subprocess.Popen[bytes]]) -> None:
    address, process = agent
    link = await connect(address, KEY, handshake.RETIRE, {}, name="it", limit_s=5)
    await link.close(worn=True)
    assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.parametrize("idle_s", [2.0])
async def test_a_runner_whose_gateway_is_gone_ends_itself(agent: tuple[Address, subprocess.Popen[bytes]]) -> None:
    """Connections without a proof of the key, such as probes, do not keep it alive; a slot in use does."""
    address, process = agent
    link, _ = await opened(address)
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 4)
    await link.close()
    async with asyncio.timeout(60):
        while process.poll() is None:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection(*address))[1].close()
            await asyncio.sleep(0.05)
    assert process.returncode == 0


@pytest.mark.parametrize(("idle_s", "waits"), [(1.0, "1")])
async def test_a_runner_of_a_warm_pool_waits_for_its_first_gateway_and_ends_after_its_last(
    agent: tuple[Address, subprocess.Popen[bytes]],
) -> None:
    address, process = agent
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 3)
    link, _ = await opened(address)
    await link.close()
    assert await asyncio.to_thread(process.wait, 60) == 0


async def test_connections_that_dribble_do_not_lock_the_gateway_out(agent: tuple[Address, object]) -> None:
    """More connections than handshakes at once send a byte now and then; the oldest of them ends for a new one."""
    address, _ = agent
    writers = [(await asyncio.open_connection(*address))[1] for _ in range(40)]
    for writer in writers:
        writer.write(b"\0")
    link, pid = await opened(address)
    assert link.is_open
    await link.close()
    assert await is_gone(pid)
    for writer in writers:
        writer.close()


def test_a_handshake_has_one_time_limit_however_slowly_its_bytes_arrive() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 10)
        assert _exactly(ours, 10, time.monotonic() + 60) == b"x" * 10
        theirs.sendall(b"x")
        with pytest.raises(TimeoutError):
            _exactly(ours, 10, time.monotonic() - 1)


def test_the_key_is_not_in_the_environment_of_the_agent(agent: tuple[Address, subprocess.Popen[bytes]]) -> None:
    _, process = agent
    assert b"0123456789abcdef" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"0123456789abcdef" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_what_is_sent_is_encrypted_and_arrives_whole(agent: tuple[Address, object]) -> None:
    """A peer between gateway and runner reads neither the program nor the answer. Megabytes go both ways at once."""
    address, _ = agent
    seen = bytearray()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = await asyncio.open_connection(*address)
        await asyncio.gather(_pass_on(reader, others[1], seen), _pass_on(others[0], writer, seen))

    lines = [b"secret%d" % number * 100 for number in range(5_000)]
    async with await asyncio.start_server(between, "127.0.0.1", 0) as server:
        link, _ = await opened(server.sockets[0].getsockname())
        link.writer.write(b"\n".join(lines) + b"\n")
        async with asyncio.timeout(120):
            for line in lines:
                assert (await link.reader.readline()).rstrip() == line[::-1]
        await link.close()
    assert len(seen) > 2 * sum(map(len, lines))
    assert b"secret" not in seen
    assert b"terces" not in seen


async def test_all_output_of_a_harness_that_has_ended_arrives(agent: tuple[Address, object]) -> None:
    address, _ = agent
    link, _ = await opened(address)
    link.writer.write(b"flood\n")
    received = 0
    async with asyncio.timeout(120):
        while data := await link.reader.read(1 << 16):
            received += len(data)
            await asyncio.sleep(0)
    assert received == (8 << 20) + 1
    await link.close()


@pytest.mark.heavy
async def test_a_gateway_that_goes_while_nobody_reads_ends_the_harness(agent: tuple[Address, object]) -> None:
    """The connection is full in the direction of the harness, so its end is not seen by reading."""
    address, _ = agent
    link, pid = await opened(address)
    link.writer.write(b"sleep\n" + b"x" * (16 << 20))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await link.writer.drain()
    await link.close()
    assert await is_gone(pid)


async def test_a_peer_in_between_with_a_certificate_of_its_own_gets_nothing(agent: tuple[Address, object]) -> None:
    """It ends TLS itself and passes every byte of the handshake on. Neither side accepts the other's proof."""
    address, _ = agent
    seen = bytearray()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = await asyncio.open_connection(*address, ssl=any_certificate(), server_hostname="")
        await asyncio.gather(_pass_on(reader, others[1], seen), _pass_on(others[0], writer, seen))

    async with await asyncio.start_server(between, "127.0.0.1", 0, ssl=own_certificate()[0]) as server:
        with pytest.raises(RunnerRefused):
            await opened(server.sockets[0].getsockname())
    assert handshake.MAGIC in seen
    await opened(address)


async def test_a_gateway_and_a_runner_without_tls_are_refused(agent: tuple[Address, object]) -> None:
    address, _ = agent
    reader, writer = await asyncio.open_connection(*address)
    writer.write(os.urandom(handshake.NONCE_BYTES + handshake.PROOF_BYTES) + handshake.LENGTH.pack(2) + b"{}")
    with contextlib.suppress(OSError):
        assert handshake.MAGIC not in await reader.read()
    writer.close()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake.MAGIC + bytes(handshake.NONCE_BYTES))
        await reader.read(1 << 16)
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        with pytest.raises(RunnerRefused, match="TLS"):
            await connect(server.sockets[0].getsockname(), KEY, handshake.SLOT, {}, name="it", limit_s=60)


async def test_probes_write_nothing_into_the_log(agent: tuple[Address, subprocess.Popen[bytes]]) -> None:
    """The kubelet connects and closes every 2 s."""
    address, process = agent
    for _ in range(20):
        (await asyncio.open_connection(*address))[1].close()
    link, _ = await opened(address)
    await link.close()
    link = await connect(address, KEY, handshake.RETIRE, {}, name="it", limit_s=60)
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
